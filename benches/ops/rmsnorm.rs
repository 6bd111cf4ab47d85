//! RMSNorm at the shapes of its cases.

use warpforge::ops::rmsnorm::{CASES, NormWeight, Residual, RmsNorm, RmsNormArgs, RmsNormProblem, reference};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

struct Set {
    x: Tensor,
    residual: Option<Tensor>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    const DTYPE: DType = DType::BF16;
    for case in CASES {
        let name = format!("rmsnorm {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (rows, cols) = (case.rows, case.cols);
        let problem = RmsNormProblem { rows, cols, dtype: DTYPE, eps: 1e-6, weight: NormWeight::Plain };
        let plan = RmsNorm::plan(&bencher.device, problem)?;
        let row_tensors = if case.residual == Residual::Add { 4 } else { 2 };
        let bytes = ((row_tensors * rows + 1) * cols * DTYPE.bytes()) as u64;
        let weight = bencher.random(&[cols], DTYPE, 1)?;
        let mut sets = bencher.sets(bytes, |seed| {
            let residual = (case.residual == Residual::Add)
                .then(|| bencher.random(&[rows, cols], DTYPE, 1000 + seed))
                .transpose()?;
            let out = Tensor::empty(&bencher.stream, &[rows, cols], DTYPE)?;
            Ok(Set { x: bencher.random(&[rows, cols], DTYPE, seed)?, residual, out })
        })?;
        let x = first_row(&sets[0].x, &bencher.stream)?;
        let residual = sets[0].residual.as_ref().map(|sum| first_row(sum, &bencher.stream)).transpose()?;
        let gain = first_row(&weight, &bencher.stream)?;
        let (want, _) = reference::rmsnorm::<f64>(&x, residual.as_deref(), &gain, cols, 1e-6, 0.0, |v| v);
        let run = |stream: &Stream, set: &mut Set| {
            let residual = set.residual.as_mut().map(|residual| residual.view_mut());
            let args =
                RmsNormArgs { x: set.x.view(), residual, weight: weight.view(), out: set.out.view_mut() };
            plan.run(stream, args)
        };
        let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?, &want);
        let case = Case { name, report: plan.report(), bytes, flops: (4 * rows * cols) as u64 };
        bencher.bench(case, &mut sets, run, verify)?;
    }
    Ok(())
}
