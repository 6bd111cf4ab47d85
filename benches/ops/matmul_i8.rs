//! The int8 product at the shapes of its cases, and the quantisation of their activations.

use warpforge::ops::matmul::Bias;
use warpforge::ops::matmul_i8::{
    CASES, MatmulI8, MatmulI8Args, MatmulI8Problem, QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem,
    reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

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

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    for case in CASES {
        let name = format!("matmul_i8 {}", case.name);
        if bencher.wants(&name) {
            product(bencher, name, [case.m, case.n, case.k])?;
        }
        let name = format!("quantize_rows {}", case.name);
        if bencher.wants(&name) {
            quantization(bencher, name, case.m, case.k)?;
        }
    }
    Ok(())
}

fn product(
    bencher: &mut Bencher,
    name: String,
    [m, n, k]: [usize; 3],
) -> Result<(), Box<dyn std::error::Error>> {
    let plan =
        MatmulI8::plan(&bencher.device, MatmulI8Problem { m, n, k, out_dtype: DTYPE, bias: Bias::None })?;
    let report = plan.report();
    let (bytes, flops) = (report.bytes, report.flops);
    let mut sets = bencher.sets(bytes, |seed| {
        Ok(Set {
            qa: bencher.random(&[m, k], DType::I8, seed)?,
            qb: bencher.random(&[n, k], DType::I8, 1000 + seed)?,
            a_scale: bencher.random(&[m], DType::F32, 2000 + seed)?,
            b_scale: bencher.random(&[n], DType::F32, 3000 + seed)?,
            out: Tensor::empty(&bencher.stream, &[m, n], DTYPE)?,
        })
    })?;
    let (set, stream, checked) = (&sets[0], &bencher.stream, CHECKED.min(n));
    let qa = set.qa.view().slice(0, 0..1)?.to_vec::<i8>(stream)?;
    let qb = set.qb.view().slice(0, 0..checked)?.to_vec::<i8>(stream)?;
    let (a_scale, b_scale) = (first_row(&set.a_scale, stream)?, first_row(&set.b_scale, stream)?);
    let want = reference::matmul_i8::<f64>(&qa, &qb, &a_scale[..1], &b_scale[..checked], None, k, |v| v);
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
    let verify =
        |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?[..checked], &want);
    bencher.bench(Case { name, report, bytes, flops }, &mut sets, run, verify)
}

fn quantization(
    bencher: &mut Bencher,
    name: String,
    rows: usize,
    cols: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let plan = QuantizeRows::plan(&bencher.device, QuantizeRowsProblem { rows, cols, dtype: DTYPE })?;
    let report = plan.report();
    let (bytes, flops) = (report.bytes, report.flops);
    let mut sets = bencher.sets(bytes, |seed| {
        let x = bencher.random(&[rows, cols], DTYPE, seed)?;
        let q = Tensor::empty(&bencher.stream, &[rows, cols], DType::I8)?;
        Ok((x, q, Tensor::empty(&bencher.stream, &[rows], DType::F32)?))
    })?;
    let x = first_row(&sets[0].0, &bencher.stream)?;
    let (want, _) = reference::quantize_rows::<f32>(&x, cols);
    let run = |stream: &Stream, (x, q, scale): &mut (Tensor, Tensor, Tensor)| {
        plan.run(stream, QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale.view_mut() })
    };
    let verify = |stream: &Stream, (_, q, _): &(Tensor, Tensor, Tensor)| {
        let got = q.view().slice(0, 0..1)?.to_vec::<i8>(stream)?;
        if got == want { Ok(()) } else { Err("a quantised row differs from the reference".into()) }
    };
    bencher.bench(Case { name, report, bytes, flops }, &mut sets, run, verify)
}
