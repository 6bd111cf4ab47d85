//! The matrix product at the shapes of its cases.

use abi::ops::matmul::{MMA_VARIANTS, STREAM_VARIANTS, VARIANTS, WGMMA_VARIANTS};
use serde_json::json;
use warpforge::ops::matmul::{
    Act, Bias, CASES, Epilogue, Matmul, MatmulArgs, MatmulCase, MatmulProblem, Precision, reference,
};
use warpforge::weight::{Quantised, Scheme, Weight};
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
    for (name, scheme) in Scheme::NAMED {
        for [n, k] in PACKED_SIZES {
            for m in PACKED_ROWS {
                let label = format!("packed {name} {m}x{n}x{k}");
                bencher.case("matmul", &label, |bencher| time_packed(bencher, scheme, [m, n, k]));
            }
        }
    }
}

/// Weights of projections: a large one, and those of Qwen3-4B.
const PACKED_SIZES: [[usize; 2]; 4] = [[28672, 8192], [19456, 2560], [6144, 2560], [2560, 9728]];
const PACKED_ROWS: [usize; 6] = [1, 8, 16, 32, 64, 4096];

/// A product with a packed weight: the rows are made, and not stored, before they are quantised.
fn time_packed(bencher: &mut Bencher, scheme: Scheme, [m, n, k]: [usize; 3]) -> Result<(), Failure> {
    let dtype = DType::BF16;
    let problem = MatmulProblem { weight: Some(scheme.layout()), ..MatmulProblem::new(m, n, k, dtype) };
    let plan = Matmul::plan(&bencher.device, problem)?;
    let report = plan.report();
    let shape = json!({ "m": m, "n": n, "k": k, "weight": format!("{:?}", scheme.layout()) });
    let work = Work { dtype: dtype.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let source = |seed: u64| {
        let rows = move |row: usize, values: &mut [f32]| {
            let mut state = (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
            for value in values {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *value = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.03;
            }
        };
        Quantised::new([n, k], scheme, rows)
    };
    let mut sets = bencher.sets(|bencher, seed| {
        let a = bencher.random(&[m, k], dtype, seed)?;
        let weight = Weight::pack(&bencher.stream, &source(seed)?)?;
        Ok((a, weight, Tensor::empty(&bencher.stream, &[m, n], dtype)?, seed))
    })?;
    let run = |stream: &Stream, (a, weight, out, _): &mut (Tensor, Weight, Tensor, u64)| {
        plan.run(stream, MatmulArgs::new(a.view(), &*weight, out.view_mut()))
    };
    let verify = |stream: &Stream, (a, _, out, seed): &(Tensor, Weight, Tensor, u64)| {
        let a = first_row(a, stream)?;
        let (source, mut row) = (source(*seed)?, vec![0.0; k]);
        let mut b = Vec::new();
        for index in 0..CHECKED {
            source.dequantise(index, &mut row);
            b.extend(row.iter().map(|&value| f64::from(value)));
        }
        let want = reference::matmul::<f64>(&a, &b, None, [1, CHECKED, k], |v| v);
        expect_close(dtype, &first_row(out, stream)?[..want.len()], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
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
