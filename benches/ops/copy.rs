//! Copies and casts at the shapes of their cases.

use warpforge::ops::copy::{CASES, Copy, CopyArgs, CopyProblem};
use warpforge::{Error, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    for case in CASES {
        let name = format!("copy {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let [rows, heads, cols] = case.shape;
        let [src_stride, dst_stride] = case.strides;
        let elements = rows * heads * cols;
        let plan = Copy::plan(&bencher.device, CopyProblem { elements, src: case.src, dst: case.dst })?;
        let bytes = (elements * (case.src.bytes() + case.dst.bytes())) as u64;
        // Rows of the stride's length, of which the first part is copied.
        let mut sets = bencher.sets(bytes, |seed| {
            let src = bencher.random(&[rows, src_stride], case.src, seed)?;
            Ok((src, Tensor::zeros(&bencher.stream, &[rows, dst_stride], case.dst)?))
        })?;
        let run = |stream: &Stream, (src, dst): &mut (Tensor, Tensor)| -> Result<(), Error> {
            let (src, dst) = (src.view(), dst.view_mut());
            let (src, dst) = (src.slice(1, 0..heads * cols)?, dst.slice(1, 0..heads * cols)?);
            let args =
                CopyArgs { src: src.reshape(&[rows, heads, cols])?, dst: dst.reshape(&[rows, heads, cols])? };
            plan.run(stream, args)
        };
        let verify = |stream: &Stream, (src, dst): &(Tensor, Tensor)| {
            let (got, want) = (first_row(dst, stream)?, first_row(src, stream)?);
            expect_close(case.dst, &got[..heads * cols], &want[..heads * cols])
        };
        bencher.bench(Case { name, report: plan.report(), bytes, flops: 0 }, &mut sets, run, verify)?;
    }
    Ok(())
}
