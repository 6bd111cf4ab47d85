//! The int8 product at the shapes of its cases, and the quantisation of their activations.

use serde_json::json;
use warpforge::ops::matmul::{Bias, MatmulCase};
use warpforge::ops::matmul_i8::{
    CASES, MMA_VARIANTS, MatmulI8, MatmulI8Args, MatmulI8Problem, QuantizeRows, QuantizeRowsArgs,
    QuantizeRowsProblem, VARIANTS, WGMMA_VARIANTS, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

/// Columns of the first row that are checked.
const CHECKED: usize = 64;
/// Type of the activations before they are quantised, and of out.
const DTYPE: DType = DType::BF16;

struct Set {
    qa: Tensor,
    qb: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("matmul_i8", case.name, |bencher| product(bencher, case));
    }
    for (index, case) in CASES.iter().enumerate() {
        // Layers that have the same input are quantised alike.
        if CASES[..index].iter().all(|earlier| (earlier.m, earlier.k) != (case.m, case.k)) {
            bencher.case("quantize_rows", case.name, |bencher| quantization(bencher, case.m, case.k));
        }
    }
}

fn product(bencher: &mut Bencher, case: &MatmulCase) -> Result<(), Failure> {
    let &MatmulCase { m, n, k, .. } = case;
    let problem = MatmulI8Problem { m, n, k, out_dtype: DTYPE, bias: Bias::None };
    let named = bencher.kernel.as_deref();
    let mut variants = VARIANTS.iter().chain(MMA_VARIANTS).chain(WGMMA_VARIANTS);
    let plan = match variants.find(|variant| Some(variant.entry) == named) {
        Some(variant) => MatmulI8::plan_with(&bencher.device, problem, variant)?,
        None => MatmulI8::plan(&bencher.device, problem)?,
    };
    let report = plan.report();
    let work = Work {
        dtype: DType::I8.name(),
        shape: json!({ "m": m, "n": n, "k": k }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        Ok(Set {
            qa: bencher.random(&[m, k], DType::I8, seed)?,
            qb: bencher.random(&[n, k], DType::I8, 1000 + seed)?,
            a_scale: bencher.random(&[m], DType::F32, 2000 + seed)?,
            b_scale: bencher.random(&[n], DType::F32, 3000 + seed)?,
            out: Tensor::empty(&bencher.stream, &[m, n], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let args = MatmulI8Args {
            qa: set.qa.view(),
            qb: set.qb.view(),
            a_scale: set.a_scale.view(),
            b_scale: set.b_scale.view(),
            bias: None,
            out: set.out.view_mut(),
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| {
        let checked = CHECKED.min(n);
        let qa = set.qa.view().slice(0, 0..1)?.to_vec::<i8>(stream)?;
        let qb = set.qb.view().slice(0, 0..checked)?.to_vec::<i8>(stream)?;
        let (a_scale, b_scale) = (first_row(&set.a_scale, stream)?, first_row(&set.b_scale, stream)?);
        let (a_scale, b_scale) = (&a_scale[..1], &b_scale[..checked]);
        let want = reference::matmul_i8::<f64>(&qa, &qb, a_scale, b_scale, None, k, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?[..checked], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}

fn quantization(bencher: &mut Bencher, rows: usize, cols: usize) -> Result<(), Failure> {
    let plan = QuantizeRows::plan(&bencher.device, QuantizeRowsProblem { rows, cols, dtype: DTYPE })?;
    let report = plan.report();
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "rows": rows, "cols": cols }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let x = bencher.random(&[rows, cols], DTYPE, seed)?;
        let q = Tensor::empty(&bencher.stream, &[rows, cols], DType::I8)?;
        Ok((x, q, Tensor::empty(&bencher.stream, &[rows], DType::F32)?))
    })?;
    let run = |stream: &Stream, (x, q, scale): &mut (Tensor, Tensor, Tensor)| {
        plan.run(stream, QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale.view_mut() })
    };
    let verify = |stream: &Stream, (x, q, _): &(Tensor, Tensor, Tensor)| {
        let (want, _) = reference::quantize_rows::<f32>(&first_row(x, stream)?, cols);
        let got = q.view().slice(0, 0..1)?.to_vec::<i8>(stream)?;
        if got == want { Ok(()) } else { Err("a quantised row differs from the reference".into()) }
    };
    bencher.time(&report, &mut sets, run, verify)
}
