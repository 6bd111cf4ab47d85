//! RMSNorm at the shapes of its cases.

use abi::ops::rmsnorm::VARIANTS;
use serde_json::json;
use warpforge::ops::rmsnorm::{
    CASES, Gate, NormResidual, NormWeight, RmsNorm, RmsNormArgs, RmsNormCase, RmsNormProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;
const EPS: f32 = 1e-6;

struct Set {
    x: Tensor,
    residual: Option<Tensor>,
    gate: Option<Tensor>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("rmsnorm", case.name, |bencher| time(bencher, case));
    }
}

pub fn time(bencher: &mut Bencher, case: &RmsNormCase) -> Result<(), Failure> {
    let &RmsNormCase { rows, cols, residual, weight: kind, gate, .. } = case;
    let problem = RmsNormProblem { rows, cols, dtype: DTYPE, eps: EPS, weight: kind };
    let forced = VARIANTS.iter().find(|variant| Some(variant.entry) == bencher.kernel.as_deref());
    let plan = match forced {
        Some(variant) => RmsNorm::plan_with(&bencher.device, problem, variant)?,
        None => RmsNorm::plan(&bencher.device, problem)?,
    };
    let (row_tensors, residual_name) = match residual {
        NormResidual::None => (2, "none"),
        NormResidual::Add => (4, "add"),
    };
    let (gate_tensors, gate_name) = match gate {
        Gate::None => (0, "none"),
        Gate::Silu => (1, "silu"),
    };
    let (offset, weight_name) = match kind {
        NormWeight::Plain => (0.0, "plain"),
        NormWeight::ZeroCentred => (1.0, "zero_centred"),
    };
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "rows": rows, "cols": cols, "residual": residual_name, "weight": weight_name, "gate": gate_name,
            "eps": 1e-6,
        }),
        bytes: (((row_tensors + gate_tensors) * rows + 1) * cols * DTYPE.bytes()) as u64,
        flops: (4 * rows * cols) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let weight = bencher.random(&[cols], DTYPE, 1)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let residual = match residual {
            NormResidual::None => None,
            NormResidual::Add => Some(bencher.random(&[rows, cols], DTYPE, 1000 + seed)?),
        };
        let gate = match gate {
            Gate::None => None,
            Gate::Silu => Some(bencher.random(&[rows, cols], DTYPE, 2000 + seed)?),
        };
        let out = Tensor::empty(&bencher.stream, &[rows, cols], DTYPE)?;
        Ok(Set { x: bencher.random(&[rows, cols], DTYPE, seed)?, residual, gate, out })
    })?;
    // Of the first set, before a run changes the residual.
    let set = &sets[0];
    let x = first_row(&set.x, &bencher.stream)?;
    let residual = set.residual.as_ref().map(|sum| first_row(sum, &bencher.stream)).transpose()?;
    let gate_row = set.gate.as_ref().map(|gate| first_row(gate, &bencher.stream)).transpose()?;
    let gain = first_row(&weight, &bencher.stream)?;
    let input =
        reference::Input { x: &x, residual: residual.as_deref(), weight: &gain, gate: gate_row.as_deref() };
    let (want, _) = reference::rmsnorm::<f64>(input, cols, 1e-6, offset, |v| v);
    let run = |stream: &Stream, set: &mut Set| {
        let residual = set.residual.as_mut().map(|residual| residual.view_mut());
        let (x, weight, gate) = (set.x.view(), weight.view(), set.gate.as_ref().map(|gate| gate.view()));
        plan.run(stream, RmsNormArgs { x, residual, weight, gate, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?, &want);
    bencher.time(&plan.report(), &mut sets, run, verify)
}
