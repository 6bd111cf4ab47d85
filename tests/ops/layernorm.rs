//! LayerNorm against its reference.

use abi::ops::layernorm::{LayerNormVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::layernorm::{LayerNorm, LayerNormArgs, LayerNormProblem, NormResidual, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, floats, layouts,
    on_executors, one_apart, store, through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    cols: usize,
    x: Layout,
    added: Layout,
    /// Of weight and bias, which have one row each.
    gains: [Layout; 2],
    out: Layout,
    residual: NormResidual,
    eps: f32,
    /// Added to every element of normal x: rows far from zero, whose variance cancels if it is computed carelessly.
    /// Elements that are nearly equal are a test of their own: where the plain formula happens to be exact it is no
    /// yardstick.
    offset: f64,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
        .prop_map(|(padding, offset)| Layout { padding, offset })
}

/// Elements of a case: all sizes of a row, and as many rows as make a tile, but not both at once.
const MAX_ELEMENTS: usize = 1 << 16;

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 40), dims_from(1, &[32, 48, 128, 1024, 4096], 5000));
    let kinds = (
        prop_oneof![Just(NormResidual::None), Just(NormResidual::Add)],
        prop_oneof![Just(1e-6f32), Just(1e-5), Just(0.1)],
        prop_oneof![2 => Just(0.0), 1 => Just(3.0), 1 => Just(-100.0)],
        finite_values(),
        any::<u64>(),
    );
    (sizes, layouts(layout), kinds).prop_map(
        |((dtype, rows, cols), [x, added, weight, bias, out], (residual, eps, offset, kind, seed))| {
            let kind = if offset == 0.0 { kind } else { Values::Normal };
            let rows = rows.min(MAX_ELEMENTS / cols);
            let gains = [weight, bias].map(|gain| Layout { padding: 0, ..gain });
            Case { dtype, rows, cols, x, added, gains, out, residual, eps, offset, kind, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        work(self.rows, self.cols)
    }
}

/// A block of 256 threads for a row, which adds up three sums.
fn work(rows: usize, cols: usize) -> usize {
    rows * (256 * 180 + 8 * cols)
}

/// All elements of a row share the errors of its mean and its variance, so a case has as many independent errors as
/// rows; the largest of a few may be next to nothing by luck. The naive result is therefore computed in as many orders
/// of the columns as make up this many rows.
const ROWS: usize = 512;

/// The naive result with the sums of a row in several orders, one after another.
fn naive_in_orders(
    dtype: DType,
    x: &[f64],
    gains: [&[f64]; 2],
    (rows, cols): (usize, usize),
    eps: f64,
) -> Vec<f64> {
    let orders = ROWS.div_ceil(rows.max(1)).min(cols);
    let rotated = |data: &[f64], by: usize| -> Vec<f64> {
        data.chunks_exact(cols).flat_map(|row| [&row[by..], &row[..by]].concat()).collect()
    };
    let naive = |order: usize| {
        let by = order * cols / orders;
        let [weight, bias] = gains.map(|gain| rotated(gain, by));
        let gains = (&weight[..], &bias[..]);
        let out = reference::layernorm::<f32>(&rotated(x, by), None, gains, eps, store(dtype)).out;
        rotated(&out, (cols - by) % cols)
    };
    (0..orders).flat_map(naive).collect()
}

/// Runs the case on a device, with the kernel that `plan` chooses or with a given one.
fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static LayerNormVariant>,
) -> Result<(), TestCaseError> {
    let Case { dtype, rows, cols, residual, eps, .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let problem = LayerNormProblem { rows, cols, dtype, eps };
    let plan = match variant {
        None => LayerNorm::plan(device, problem),
        Some(variant) => LayerNorm::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;

    let x: Vec<f64> =
        values(case.kind, dtype, rows * cols, case.seed).into_iter().map(|x| x + case.offset).collect();
    let x = testkit::round::round_all(dtype, &x);
    let weight = values(Values::Normal, dtype, cols, case.seed ^ 1);
    let bias = values(Values::Normal, dtype, cols, case.seed ^ 2);
    let added = (residual == NormResidual::Add).then(|| values(case.kind, dtype, rows * cols, case.seed ^ 3));
    let input = |values: &[f64], layout| Rows::input(&stream, dtype, values, cols, layout).map_err(fail);
    let (x_rows, weight_row) = (input(&x, case.x)?, input(&weight, case.gains[0])?);
    let bias_row = input(&bias, case.gains[1])?;
    let mut sum = added.as_ref().map(|added| input(added, case.added)).transpose()?;
    let mut out = Rows::output(&stream, dtype, rows, cols, case.out).map_err(fail)?;
    let args = LayerNormArgs {
        x: x_rows.view(),
        residual: sum.as_mut().map(|sum| sum.view_mut()),
        weight: weight_row.view().reshape(&[cols]).map_err(fail)?,
        bias: bias_row.view().reshape(&[cols]).map_err(fail)?,
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;

    let (eps, gains) = (f64::from(eps), (&weight[..], &bias[..]));
    let want = reference::layernorm::<f64>(&x, added.as_deref(), gains, eps, |v| v);
    let what = plan.report().variant;
    let element = Tolerance::new(dtype, Scale::Element, 1);
    let mut normed = want.sum.clone();
    if let Some(sum) = sum {
        let naive = reference::layernorm::<f32>(&x, added.as_deref(), gains, eps, store(dtype));
        normed = sum.read(&stream)?;
        check(what, &normed, &want.sum, &naive.sum, &element)?;
    }
    // Of what is stored: where elements are nearly equal, a rounding of the sum is magnified without bound.
    let want = reference::layernorm::<f64>(&normed, None, gains, eps, |v| v);
    let naive = naive_in_orders(dtype, &normed, [gains.0, gains.1], (rows, cols), eps);
    let repeat = |values: &[f64]| values.repeat(naive.len() / (rows * cols).max(1));
    let terms = repeat(&want.terms);
    let tolerance = Tolerance::new(dtype, Scale::Given(&terms), 2 * cols + 8);
    check(what, &repeat(&out.read(&stream)?), &repeat(&want.out), &naive, &tolerance)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let Case { rows, cols, dtype, eps, .. } = *case;
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == dtype) {
            if wanted(variant.entry)
                && LayerNorm::plan_with(device, LayerNormProblem { rows, cols, dtype, eps }, variant).is_ok()
            {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "layernorm",
        &[|case: &mut Case| case.rows = 0],
        case(),
        |case| 3 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("layernorm", case(), |case| 3 * case.work(), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 3 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A row gives the same bits alone and among others.
    #[test]
    fn rows_are_independent(
        ((dtype, rows, cols, seed), on) in on_executors(
            || (floats(), 2usize..40, dims_from(1, &[128, 1024], 3000), any::<u64>()),
            |&(_, rows, cols, _)| work(rows, cols),
        ),
    ) {
        for device in &on.devices() {
            let stream = device.stream().map_err(fail)?;
            let data = values(Values::Normal, dtype, rows * cols, seed);
            let vector = values(Values::Normal, dtype, cols, seed ^ 1);
            let run = |rows: usize, data: &[f64]| -> Result<Vec<f64>, TestCaseError> {
                let plan = LayerNorm::plan(device, LayerNormProblem { rows, cols, dtype, eps: 1e-6 });
                let x = Rows::input(&stream, dtype, data, cols, Layout::default()).map_err(fail)?;
                let gain = Rows::input(&stream, dtype, &vector, cols, Layout::default()).map_err(fail)?;
                let mut out = Rows::output(&stream, dtype, rows, cols, Layout::default()).map_err(fail)?;
                let weight = gain.view().reshape(&[cols]).map_err(fail)?;
                let (x, residual, bias) = (x.view(), None, weight);
                let args = LayerNormArgs { x, residual, weight, bias, out: out.view_mut() };
                plan.map_err(fail)?.run(&stream, args).map_err(fail)?;
                out.read(&stream)
            };
            let together = run(rows, &data)?;
            let row = seed as usize % rows;
            let alone = run(1, &data[row * cols..][..cols])?;
            prop_assert_eq!(&together[row * cols..][..cols], &alone[..], "{:?}", device);
        }
    }
}

/// One tensor's own stride; and one that cannot be read in pieces of 16 bytes is enough for the kernel that reads none.
#[test]
fn one_tensor_apart() -> Result<(), TestCaseError> {
    for [x, added, weight, bias, out] in one_apart() {
        let case = Case {
            dtype: DType::BF16,
            rows: 3,
            cols: 64,
            x,
            added,
            gains: [weight, bias].map(|gain| Layout { padding: 0, ..gain }),
            out,
            residual: NormResidual::Add,
            eps: 1e-6,
            offset: 0.0,
            kind: Values::Normal,
            seed: 3,
        };
        for device in &devices() {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Equal elements give the bias, although the root is of eps alone, and magnifies the rounding of the mean a
/// thousandfold.
#[test]
fn equal_elements() -> Result<(), Error> {
    for (dtype, value, cols) in [
        (DType::F32, 100.3f32, 1693),
        (DType::F32, -0.1, 1024),
        (DType::F32, 3.3, 8192),
        (DType::BF16, 1000.0, 1152),
        (DType::F16, 0.1, 4104),
    ] {
        for device in &devices_for(work(2, cols)) {
            let stream = device.stream()?;
            let x = vec![f64::from(value); 2 * cols];
            let vector = values(Values::Normal, dtype, cols, 3);
            let x = Rows::input(&stream, dtype, &x, cols, Layout::default())?;
            let gain = Rows::input(&stream, dtype, &vector, cols, Layout::default())?;
            let mut out = Tensor::zeros(&stream, &[2, cols], dtype)?;
            let weight = gain.view().reshape(&[cols])?;
            let plan = LayerNorm::plan(device, LayerNormProblem { rows: 2, cols, dtype, eps: 1e-6 })?;
            let (x, residual, bias) = (x.view(), None, weight);
            plan.run(&stream, LayerNormArgs { x, residual, weight, bias, out: out.view_mut() })?;
            for (got, &want) in std::iter::zip(out.to_f32_vec(&stream)?, vector.iter().cycle()) {
                assert!(
                    (f64::from(got) - want).abs() < 2.5e-7 * want.abs().max(0.1),
                    "{device:?}: {got} {want}"
                );
            }
        }
    }
    Ok(())
}

/// Rows whose sums or squares overflow or underflow in f32, among ordinary ones, which keep their bits.
#[test]
fn sums_beyond_f32() -> Result<(), TestCaseError> {
    let (most, four) = (3.3e38, [1.0, -1.0, 2.0, 3.0]);
    for (dtype, cols) in [DType::F32, DType::BF16]
        .into_iter()
        .flat_map(|dtype| [4, 37, 64, 256, 4096, 8192].map(|cols| (dtype, cols)))
    {
        // What a row has of each size, and epsilon; of equal elements nothing is left.
        let rows = [
            (four, 1e20, 1e-6),
            (four, most / 3.0, 1e-6),
            ([1.0, 1.0, 1.0, -1.0], most, 0.1),
            ([1.0; 4], most, 1e-6),
            ([1.0; 4], 1e30, 1e-40),
            (four, 1e-22, 1e-44),
            (four, 1e-30, 0.0),
            (four, 1e-40, 0.0),
        ];
        for (pattern, size, eps) in rows {
            let eps = eps as f32;
            let far: Vec<f64> = (0..cols).map(|col| pattern[col % 4] * size).collect();
            let far = testkit::round::round_all(dtype, &far);
            let usual = values(Values::Normal, dtype, cols, 1);
            let problem = LayerNormProblem { rows: 3, cols, dtype, eps };
            let mean = far.iter().sum::<f64>() / cols as f64;
            let variance = far.iter().map(|value| (value - mean).powi(2) / cols as f64).sum::<f64>();
            let scale = 1.0 / (variance + f64::from(eps)).sqrt();
            for device in &devices_for(work(3, cols)) {
                let run = |rows: &[&[f64]], variant| -> Result<Vec<f64>, TestCaseError> {
                    let stream = device.stream().map_err(fail)?;
                    let plan = match variant {
                        None => LayerNorm::plan(device, problem),
                        Some(variant) => LayerNorm::plan_with(device, problem, variant),
                    };
                    let input = |data: &[f64]| {
                        Rows::input(&stream, dtype, data, cols, Layout::default()).map_err(fail)
                    };
                    let (x, gain, zero) =
                        (input(&rows.concat())?, input(&vec![1.0; cols])?, input(&vec![0.0; cols])?);
                    let mut out =
                        Rows::output(&stream, dtype, rows.len(), cols, Layout::default()).map_err(fail)?;
                    let args = LayerNormArgs {
                        x: x.view(),
                        residual: None,
                        weight: gain.view().reshape(&[cols]).map_err(fail)?,
                        bias: zero.view().reshape(&[cols]).map_err(fail)?,
                        out: out.view_mut(),
                    };
                    plan.map_err(fail)?.run(&stream, args).map_err(fail)?;
                    out.read(&stream)
                };
                let fits = |variant: &&'static LayerNormVariant| {
                    variant.dtype == dtype && LayerNorm::plan_with(device, problem, variant).is_ok()
                };
                let variants = VARIANTS.iter().filter(fits).map(Some);
                for variant in std::iter::once(None).chain(variants) {
                    let got = run(&[&usual, &far, &usual], variant)?;
                    let what = format!("{variant:?} {dtype} {cols} {pattern:?} {size:e} {eps:e} {device:?}");
                    let alone = run(&[&usual], variant)?;
                    prop_assert_eq!(&got[..cols], &alone[..], "{}", what);
                    prop_assert_eq!(&got[2 * cols..], &alone[..], "{}", what);
                    for (got, value) in got[cols..2 * cols].iter().zip(&far) {
                        let want = (value - mean) * scale;
                        let bound = if dtype == DType::F32 { 4e-6 } else { 8e-3 };
                        prop_assert!((got - want).abs() <= bound, "{}: {} {}", what, got, want);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = LayerNormProblem { rows: 4, cols: 64, dtype: DType::F32, eps: 1e-6 };
        let plan = LayerNorm::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |x: &Tensor, vectors: [&Tensor; 2], out: &mut Tensor| {
            let [weight, bias] = vectors.map(Tensor::view);
            let args = LayerNormArgs { x: x.view(), residual: None, weight, bias, out: out.view_mut() };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (x, vector) = (tensor(&[4, 64], DType::F32)?, tensor(&[64], DType::F32)?);
        let mut out = tensor(&[4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[4, 65], DType::F32)?, [&vector; 2], &mut out),
            "layernorm: x: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message(&x, [&tensor(&[64], DType::BF16)?, &vector], &mut out),
            "layernorm: weight: expected f32, got bf16"
        );
        assert_eq!(
            message(&x, [&vector, &tensor(&[63], DType::F32)?], &mut out),
            "layernorm: bias: expected shape [64], got [63]"
        );
        assert_eq!(
            message(&tensor(&[5, 64], DType::F32)?, [&vector; 2], &mut tensor(&[5, 64], DType::F32)?),
            "layernorm: x: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(&x, [&vector; 2], &mut tensor(&[3, 64], DType::F32)?),
            "layernorm: out: expected shape [4, 64], got [3, 64]"
        );
        let mut residual = tensor(&[4, 32], DType::F32)?;
        let args = LayerNormArgs {
            x: x.view(),
            residual: Some(residual.view_mut()),
            weight: vector.view(),
            bias: vector.view(),
            out: out.view_mut(),
        };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "layernorm: residual: expected shape [4, 64], got [4, 32]"
        );
        let refused = |problem| LayerNorm::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(LayerNormProblem { dtype: DType::I8, ..problem }),
            "layernorm: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(LayerNormProblem { cols: 0, ..problem }),
            "layernorm: problem: expected at least one column, got 0"
        );
        assert_eq!(
            refused(LayerNormProblem { eps: -1.0, ..problem }),
            "layernorm: problem: expected a finite eps of at least 0, got -1"
        );
    }
    Ok(())
}
