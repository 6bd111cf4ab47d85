//! Transposition at the shapes of its cases.

use serde_json::json;
use warpforge::ops::transpose::{
    CASES, Transpose, TransposeArgs, TransposeCase, TransposeProblem, reference,
};
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("transpose", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &TransposeCase) -> Result<(), Failure> {
    let &TransposeCase { batch, rows, cols, dtype, .. } = case;
    let plan = Transpose::plan(&bencher.device, TransposeProblem { batch, rows, cols, dtype })?;
    let work = Work {
        dtype: dtype.name(),
        shape: json!({ "batch": batch, "rows": rows, "cols": cols }),
        bytes: (2 * batch * rows * cols * dtype.bytes()) as u64,
        flops: 0,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let x = bencher.random(&[batch, rows, cols], dtype, seed)?;
        Ok((x, Tensor::empty(&bencher.stream, &[batch, cols, rows], dtype)?))
    })?;
    let run = |stream: &Stream, (x, out): &mut (Tensor, Tensor)| {
        plan.run(stream, TransposeArgs { x: x.view(), out: out.view_mut() })
    };
    // The first matrix, whole: a copy must be exact.
    let verify = |stream: &Stream, (x, out): &(Tensor, Tensor)| {
        let want = reference::transpose(&first_matrix(x, stream)?, rows, cols);
        if first_matrix(out, stream)? == want { Ok(()) } else { Err("elements differ".into()) }
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}

/// The bits of a tensor's first matrix, whatever the type.
fn first_matrix(tensor: &Tensor, stream: &Stream) -> Result<Vec<u32>, Error> {
    let matrix = tensor.view().slice(0, 0..1)?;
    Ok(match tensor.dtype() {
        DType::F32 => matrix.to_vec::<f32>(stream)?.into_iter().map(f32::to_bits).collect(),
        DType::F16 => matrix.to_vec::<half::f16>(stream)?.into_iter().map(|v| v.to_bits().into()).collect(),
        DType::BF16 => matrix.to_vec::<half::bf16>(stream)?.into_iter().map(|v| v.to_bits().into()).collect(),
        DType::F8E4M3 => {
            matrix.to_vec::<warpforge::F8E4M3>(stream)?.into_iter().map(|v| v.0.into()).collect()
        }
        DType::I8 => matrix.to_vec::<i8>(stream)?.into_iter().map(|v| u32::from(v as u8)).collect(),
        DType::I32 => matrix.to_vec::<i32>(stream)?.into_iter().map(|v| v as u32).collect(),
        DType::U32 => matrix.to_vec::<u32>(stream)?,
    })
}
