//! Transposition at the shapes of its cases.

use warpforge::ops::transpose::{CASES, Transpose, TransposeArgs, TransposeProblem, reference};
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::{Bencher, Case};

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    for case in CASES {
        let name = format!("transpose {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (batch, rows, cols, dtype) = (case.batch, case.rows, case.cols, case.dtype);
        let plan = Transpose::plan(&bencher.device, TransposeProblem { batch, rows, cols, dtype })?;
        let bytes = (2 * batch * rows * cols * dtype.bytes()) as u64;
        let mut sets = bencher.sets(bytes, |seed| {
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
        bencher.bench(Case { name, report: plan.report(), bytes, flops: 0 }, &mut sets, run, verify)?;
    }
    Ok(())
}

/// The bits of a tensor's first matrix, whatever the type.
fn first_matrix(tensor: &Tensor, stream: &Stream) -> Result<Vec<u32>, Error> {
    let matrix = tensor.view().slice(0, 0..1)?;
    Ok(match tensor.dtype() {
        DType::F32 => matrix.to_vec::<f32>(stream)?.into_iter().map(f32::to_bits).collect(),
        DType::F16 => matrix.to_vec::<half::f16>(stream)?.into_iter().map(|v| v.to_bits().into()).collect(),
        DType::BF16 => matrix.to_vec::<half::bf16>(stream)?.into_iter().map(|v| v.to_bits().into()).collect(),
        DType::I8 => matrix.to_vec::<i8>(stream)?.into_iter().map(|v| u32::from(v as u8)).collect(),
        DType::I32 => matrix.to_vec::<i32>(stream)?.into_iter().map(|v| v as u32).collect(),
        DType::U32 => matrix.to_vec::<u32>(stream)?,
    })
}
