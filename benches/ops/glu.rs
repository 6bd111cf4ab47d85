//! The gated linear unit at the shapes of its cases.

use serde_json::json;
use warpforge::ops::glu::{CASES, Glu, GluArgs, GluCase, GluProblem, reference};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    gate: Tensor,
    up: Option<Tensor>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("glu", case.name, |bencher| time(bencher, case));
    }
}

pub fn time(bencher: &mut Bencher, case: &GluCase) -> Result<(), Failure> {
    let &GluCase { rows, cols, activation, has_up, .. } = case;
    let plan = Glu::plan(&bencher.device, GluProblem { rows, cols, dtype: DTYPE, activation })?;
    let shape = json!({ "rows": rows, "cols": cols, "activation": activation.name(), "up": has_up });
    let bytes = ((2 + usize::from(has_up)) * rows * cols * DTYPE.bytes()) as u64;
    let flops = (6 * rows * cols) as u64;
    if !bencher.starts(Work { dtype: DTYPE.name(), shape, bytes, flops })? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let gate = bencher.random(&[rows, cols], DTYPE, seed)?;
        let up = if has_up { Some(bencher.random(&[rows, cols], DTYPE, 1000 + seed)?) } else { None };
        Ok(Set { gate, up, out: Tensor::empty(&bencher.stream, &[rows, cols], DTYPE)? })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let up = set.up.as_ref().map(Tensor::view);
        plan.run(stream, GluArgs { gate: set.gate.view(), up, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| {
        let gate = first_row(&set.gate, stream)?;
        let up = match &set.up {
            Some(up) => first_row(up, stream)?,
            None => vec![1.0; cols],
        };
        let want = reference::glu::<f64>(&gate, &up, activation, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?, &want)
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
