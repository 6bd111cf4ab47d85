//! The matrix product at the shapes of its cases.

use half::bf16;
use warpforge::ops::matmul::{Bias, CASES, Matmul, MatmulArgs, MatmulProblem, reference};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

/// Columns of the first row that are checked.
const CHECKED: usize = 64;

struct Set {
    a: Tensor,
    b: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    const DTYPE: DType = DType::BF16;
    for case in CASES {
        let name = format!("matmul {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (m, n, k) = (case.m, case.n, case.k);
        let problem = MatmulProblem { m, n, k, dtype: DTYPE, out_dtype: DTYPE, bias: Bias::None };
        let plan = Matmul::plan(&bencher.device, problem)?;
        let report = plan.report();
        let (bytes, flops) = (report.bytes, report.flops);
        let mut sets = bencher.sets(bytes, |seed| {
            let a = bencher.random(&[m, k], DTYPE, seed)?;
            let b = bencher.random(&[n, k], DTYPE, 1000 + seed)?;
            Ok(Set { a, b, out: Tensor::empty(&bencher.stream, &[m, n], DTYPE)? })
        })?;
        let a = first_row(&sets[0].a, &bencher.stream)?;
        let b = sets[0].b.view().slice(0, 0..CHECKED.min(n))?.to_vec::<bf16>(&bencher.stream)?;
        let b: Vec<f64> = b.into_iter().map(f64::from).collect();
        let want = reference::matmul::<f64>(&a, &b, None, [1, b.len() / k, k], |v| v);
        let run = |stream: &Stream, set: &mut Set| {
            let args = MatmulArgs { a: set.a.view(), b: set.b.view(), bias: None, out: set.out.view_mut() };
            plan.run(stream, args)
        };
        let verify = |stream: &Stream, set: &Set| {
            expect_close(DTYPE, &first_row(&set.out, stream)?[..want.len()], &want)
        };
        bencher.bench(Case { name, report, bytes, flops }, &mut sets, run, verify)?;
    }
    Ok(())
}
