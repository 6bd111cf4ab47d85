//! LayerNorm at the shapes of its cases.

use serde_json::json;
use warpforge::ops::layernorm::{
    CASES, LayerNorm, LayerNormArgs, LayerNormCase, LayerNormProblem, NormResidual, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;
const EPS: f32 = 1e-6;

struct Set {
    x: Tensor,
    residual: Option<Tensor>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("layernorm", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &LayerNormCase) -> Result<(), Failure> {
    let &LayerNormCase { rows, cols, residual, .. } = case;
    let problem = LayerNormProblem { rows, cols, dtype: DTYPE, eps: EPS };
    let plan = LayerNorm::plan(&bencher.device, problem)?;
    let (row_tensors, residual_name) = match residual {
        NormResidual::None => (2, "none"),
        NormResidual::Add => (4, "add"),
    };
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "rows": rows, "cols": cols, "residual": residual_name, "eps": 1e-6 }),
        bytes: ((row_tensors * rows + 2) * cols * DTYPE.bytes()) as u64,
        flops: (7 * rows * cols) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let (weight, bias) = (bencher.random(&[cols], DTYPE, 1)?, bencher.random(&[cols], DTYPE, 2)?);
    let mut sets = bencher.sets(|bencher, seed| {
        let residual = match residual {
            NormResidual::None => None,
            NormResidual::Add => Some(bencher.random(&[rows, cols], DTYPE, 1000 + seed)?),
        };
        let out = Tensor::empty(&bencher.stream, &[rows, cols], DTYPE)?;
        Ok(Set { x: bencher.random(&[rows, cols], DTYPE, seed)?, residual, out })
    })?;
    // Of the first set, before a run changes the residual.
    let set = &sets[0];
    let x = first_row(&set.x, &bencher.stream)?;
    let residual = set.residual.as_ref().map(|sum| first_row(sum, &bencher.stream)).transpose()?;
    let gains = (&first_row(&weight, &bencher.stream)?[..], &first_row(&bias, &bencher.stream)?[..]);
    let want = reference::layernorm::<f64>(&x, residual.as_deref(), gains, 1e-6, |v| v).out;
    let run = |stream: &Stream, set: &mut Set| {
        let residual = set.residual.as_mut().map(|residual| residual.view_mut());
        let (weight, bias) = (weight.view(), bias.view());
        plan.run(stream, LayerNormArgs { x: set.x.view(), residual, weight, bias, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?, &want);
    bencher.time(&plan.report(), &mut sets, run, verify)
}
