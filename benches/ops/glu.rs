//! The gated linear unit at the shapes of its cases.

use warpforge::ops::glu::{CASES, Glu, GluArgs, GluProblem, reference};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

struct Set {
    gate: Tensor,
    up: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    const DTYPE: DType = DType::BF16;
    for case in CASES {
        let name = format!("glu {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (rows, cols, activation) = (case.rows, case.cols, case.activation);
        let plan = Glu::plan(&bencher.device, GluProblem { rows, cols, dtype: DTYPE, activation })?;
        let bytes = (3 * rows * cols * DTYPE.bytes()) as u64;
        let mut sets = bencher.sets(bytes, |seed| {
            let gate = bencher.random(&[rows, cols], DTYPE, seed)?;
            let up = bencher.random(&[rows, cols], DTYPE, 1000 + seed)?;
            Ok(Set { gate, up, out: Tensor::empty(&bencher.stream, &[rows, cols], DTYPE)? })
        })?;
        let (gate, up) =
            (first_row(&sets[0].gate, &bencher.stream)?, first_row(&sets[0].up, &bencher.stream)?);
        let want = reference::glu::<f64>(&gate, &up, activation, |v| v);
        let run = |stream: &Stream, set: &mut Set| {
            plan.run(stream, GluArgs { gate: set.gate.view(), up: set.up.view(), out: set.out.view_mut() })
        };
        let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?, &want);
        let case = Case { name, report: plan.report(), bytes, flops: (6 * rows * cols) as u64 };
        bencher.bench(case, &mut sets, run, verify)?;
    }
    Ok(())
}
