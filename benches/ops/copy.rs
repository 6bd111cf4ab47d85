//! Copies and casts at the shapes of their cases.

use serde_json::json;
use warpforge::ops::copy::{CASES, Copy, CopyArgs, CopyCase, CopyProblem};
use warpforge::{Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("copy", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &CopyCase) -> Result<(), Failure> {
    let [rows, heads, cols] = case.shape;
    let [src_stride, dst_stride] = case.strides;
    let elements = rows * heads * cols;
    let plan = Copy::plan(&bencher.device, CopyProblem { elements, src: case.src, dst: case.dst })?;
    let shape = json!({
        "rows": rows, "cols": heads * cols, "src_stride": src_stride, "dst_stride": dst_stride,
        "src": case.src.name(), "dst": case.dst.name(),
    });
    let bytes = (elements * (case.src.bytes() + case.dst.bytes())) as u64;
    if !bencher.starts(Work { dtype: case.src.name(), shape, bytes, flops: 0 })? {
        return Ok(());
    }
    // Rows of the stride's length, of which the first part is copied.
    let mut sets = bencher.sets(|bencher, seed| {
        let src = bencher.random(&[rows, src_stride], case.src, seed)?;
        Ok((src, Tensor::zeros(&bencher.stream, &[rows, dst_stride], case.dst)?))
    })?;
    let run = |stream: &Stream, (src, dst): &mut (Tensor, Tensor)| -> Result<(), Error> {
        let (src, dst) = (src.view(), dst.view_mut());
        let (src, dst) = (src.slice(1, 0..heads * cols)?, dst.slice(1, 0..heads * cols)?);
        let shape = [rows, heads, cols];
        plan.run(stream, CopyArgs { src: src.reshape(&shape)?, dst: dst.reshape(&shape)? })
    };
    let verify = |stream: &Stream, (src, dst): &(Tensor, Tensor)| {
        let (got, want) = (first_row(dst, stream)?, first_row(src, stream)?);
        expect_close(case.dst, &got[..heads * cols], &want[..heads * cols])
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
