//! The matrix product at the shapes of its cases.

use abi::ops::matmul::{MMA_VARIANTS, STREAM_VARIANTS, VARIANTS, WGMMA_VARIANTS};
use serde_json::json;
use warpforge::ops::matmul::{
    Act, Bias, CASES, Epilogue, Matmul, MatmulArgs, MatmulCase, MatmulProblem, Precision, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row, floats};

/// Columns of the first row that are checked.
const CHECKED: usize = 64;

struct Set {
    a: Tensor,
    b: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("matmul", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &MatmulCase) -> Result<(), Failure> {
    let &MatmulCase { batch, m, n, k, act, dtype, precision, .. } = case;
    let epilogue = Epilogue::of(act);
    let bias = Bias::None;
    let problem =
        MatmulProblem { batch, m, n, k, dtype, out_dtype: dtype, precision, bias, epilogue, weight: None };
    // The gate's rows, then up's.
    let (b_rows, activation) = match act {
        Act::None => (n, None),
        Act::Of(activation) => (n, Some(activation)),
        Act::Gated(activation) => (2 * n, Some(activation)),
    };
    let mut shape = json!({ "batch": batch, "m": m, "n": n, "k": k });
    if let Some(activation) = activation {
        shape["activation"] = json!(activation.name());
        shape["gated"] = json!(b_rows != n);
    }
    if precision == Precision::Tf32 {
        shape["tf32"] = json!(true);
    }
    let named = bencher.kernel.as_deref();
    let mut variants = VARIANTS.iter().chain(MMA_VARIANTS).chain(STREAM_VARIANTS).chain(WGMMA_VARIANTS);
    let plan = match variants.find(|variant| Some(variant.entry) == named) {
        Some(variant) => Matmul::plan_with(&bencher.device, problem, variant)?,
        None => Matmul::plan(&bencher.device, problem)?,
    };
    let report = plan.report();
    let work = Work { dtype: dtype.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let a = bencher.random(&[batch * m, k], dtype, seed)?;
        let b = bencher.random(&[batch * b_rows, k], dtype, 1000 + seed)?;
        Ok(Set { a, b, out: Tensor::empty(&bencher.stream, &[batch * m, n], dtype)? })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (a, b, out) = (set.a.view(), set.b.view(), set.out.view_mut());
        let args = match batch {
            1 => MatmulArgs::new(a, b, out),
            _ => MatmulArgs::new(
                a.reshape(&[batch, m, k])?,
                b.reshape(&[batch, b_rows, k])?,
                out.reshape(&[batch, m, n])?,
            ),
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| {
        let a = first_row(&set.a, stream)?;
        let checked = CHECKED.min(n);
        let mut b = Vec::new();
        for first in (0..b_rows).step_by(n) {
            b.extend(floats(set.b.view().slice(0, first..first + checked)?, stream)?);
        }
        let want = reference::fused::<f64>((&a, &b), None, None, [1, checked, k], &epilogue, |v| v);
        // tf32 has as many bits as f16.
        let close_as = if precision == Precision::Tf32 { DType::F16 } else { dtype };
        expect_close(close_as, &first_row(&set.out, stream)?[..want.len()], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
