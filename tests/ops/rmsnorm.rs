//! RMSNorm against its reference.

use abi::ops::rmsnorm::{RmsNormVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::rmsnorm::reference;
use warpforge::ops::rmsnorm::{Gate, NormResidual, NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, floats, heads_of, layouts,
    on_executors, one_apart, store, swapped, through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    cols: usize,
    layouts: Layouts,
    residual: NormResidual,
    weight: NormWeight,
    gate: Gate,
    eps: f32,
    kind: Values,
    seed: u64,
}

/// How the tensors lie in memory; the weight has one row.
#[derive(Clone, Copy, Debug, Default)]
struct Layouts {
    x: Layout,
    residual: Layout,
    weight: Layout,
    gate: Layout,
    out: Layout,
}

/// Elements of a case: all sizes of a row, and as many rows as make a tile, but not both at once.
const MAX_ELEMENTS: usize = 1 << 16;

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 40), dims_from(1, &[16, 32, 128, 1024, 4096], 5000));
    let layout = || {
        (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
            .prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let layouts = layouts(layout).prop_map(|[x, residual, weight, gate, out]| Layouts {
        x,
        residual,
        weight,
        gate,
        out,
    });
    let kinds = (
        prop_oneof![Just(NormResidual::None), Just(NormResidual::Add)],
        prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)],
        prop_oneof![2 => Just(Gate::None), 1 => Just(Gate::Silu)],
        prop_oneof![Just(1e-6f32), Just(1e-5), Just(0.1)],
        finite_values(),
        any::<u64>(),
    );
    (sizes, layouts, kinds).prop_map(
        |((dtype, rows, cols), layouts, (residual, weight, gate, eps, kind, seed))| {
            let rows = rows.min(MAX_ELEMENTS / cols);
            Case { dtype, rows, cols, layouts, residual, weight, gate, eps, kind, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        work(self.rows, self.cols)
    }
}

/// A block of 256 threads for a row, which adds up a sum.
fn work(rows: usize, cols: usize) -> usize {
    rows * (256 * 60 + 5 * cols)
}

/// Runs the case on a device, with the kernel that `plan` chooses or with a given one.
fn run(device: &Device, case: &Case, variant: Option<&'static RmsNormVariant>) -> Result<(), TestCaseError> {
    let Case { dtype, rows, cols, layouts, residual, weight: kind, gate, eps, .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let problem = RmsNormProblem { rows, cols, dtype, eps, weight: kind };
    let plan = match variant {
        None => RmsNorm::plan(device, problem),
        Some(variant) => RmsNorm::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;

    let x = values(case.kind, dtype, rows * cols, case.seed);
    let weight = values(Values::Normal, dtype, cols, case.seed ^ 1);
    let added = (residual == NormResidual::Add).then(|| values(case.kind, dtype, rows * cols, case.seed ^ 2));
    let gates = (gate == Gate::Silu).then(|| values(Values::Normal, dtype, rows * cols, case.seed ^ 3));
    let x_rows = Rows::input(&stream, dtype, &x, cols, layouts.x).map_err(fail)?;
    let weight_layout = Layout { padding: 0, ..layouts.weight };
    let weight_tensor = Rows::input(&stream, dtype, &weight, cols, weight_layout).map_err(fail)?;
    let mut sum = added
        .as_ref()
        .map(|added| Rows::input(&stream, dtype, added, cols, layouts.residual))
        .transpose()
        .map_err(fail)?;
    let gate_rows = gates
        .as_ref()
        .map(|gates| Rows::input(&stream, dtype, gates, cols, layouts.gate))
        .transpose()
        .map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, rows, cols, layouts.out).map_err(fail)?;
    let weight_view = weight_tensor.view().reshape(&[cols]).map_err(fail)?;
    let residual_view = sum.as_mut().map(|sum| sum.view_mut());
    let args = RmsNormArgs {
        x: x_rows.view(),
        residual: residual_view,
        weight: weight_view,
        gate: gate_rows.as_ref().map(|gates| gates.view()),
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;

    let offset = if kind == NormWeight::ZeroCentred { 1.0 } else { 0.0 };
    let eps = f64::from(eps);
    let input =
        reference::Input { x: &x, residual: added.as_deref(), weight: &weight, gate: gates.as_deref() };
    let (want, want_sum) = reference::rmsnorm::<f64>(input, cols, eps, offset, |v| v);
    let (naive, naive_sum) = reference::rmsnorm::<f32>(input, cols, eps, offset, store(dtype));
    let what = plan.report().variant;
    // A gain of weight + 1 cancels where the weight is near −1: the error then scales with the row, not the element.
    // A gate makes the sizes of a row's results differ, so that the row says nothing of an element: its own terms do.
    let terms: Vec<f64> = std::iter::zip(&want, weight.iter().cycle())
        .map(|(want, weight)| {
            want.abs() * (weight.abs() + offset) / (weight + offset).abs().max(f64::MIN_POSITIVE)
        })
        .collect();
    let scale = if gate == Gate::Silu { Scale::Given(&terms) } else { Scale::Rows(cols) };
    let tolerance = Tolerance { on_the_way: None, ..Tolerance::new(dtype, scale, cols + 8) };
    check(what, &out.read(&stream)?, &want, &naive, &tolerance)?;
    if let Some(sum) = sum {
        check(what, &sum.read(&stream)?, &want_sum, &naive_sum, &Tolerance::new(dtype, Scale::Element, 1))?;
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let Case { rows, cols, dtype, eps, weight, .. } = *case;
    let problem = RmsNormProblem { rows, cols, dtype, eps, weight };
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == dtype) {
            if wanted(variant.entry) && RmsNorm::plan_with(device, problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "rmsnorm",
        &[|case: &mut Case| case.rows = 0],
        case(),
        |case| 4 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("rmsnorm", case(), |case| 4 * case.work(), run_variants)
}

/// Gated rows of very different sizes: on an H200 one result of these was off by more than what the others of its row
/// err by, which is nothing beside the row's size.
#[test]
fn gated_rows_of_mixed_sizes() -> Result<(), TestCaseError> {
    let case = Case {
        dtype: DType::F32,
        rows: 21,
        cols: 64,
        layouts: Layouts::default(),
        residual: NormResidual::None,
        weight: NormWeight::Plain,
        gate: Gate::Silu,
        eps: 1e-6,
        kind: Values::Mixed,
        seed: 7_047_100_859_675_383_292,
    };
    run_variants(&devices_for(4 * case.work()), &case, EVERY)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(256))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 4 * case.work())) {
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
            let weight = values(Values::Normal, dtype, cols, seed ^ 1);
            let run = |rows: usize, data: &[f64]| -> Result<Vec<f64>, TestCaseError> {
                let problem = RmsNormProblem { rows, cols, dtype, eps: 1e-6, weight: NormWeight::Plain };
                let plan = RmsNorm::plan(device, problem).map_err(fail)?;
                let x = Rows::input(&stream, dtype, data, cols, Layout::default()).map_err(fail)?;
                let weight = Rows::input(&stream, dtype, &weight, cols, Layout::default()).map_err(fail)?;
                let mut out = Rows::output(&stream, dtype, rows, cols, Layout::default()).map_err(fail)?;
                let weight = weight.view().reshape(&[cols]).map_err(fail)?;
                let args = RmsNormArgs { x: x.view(), residual: None, weight, gate: None, out: out.view_mut() };
                plan.run(&stream, args).map_err(fail)?;
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
    for [x, residual, weight, gate, out] in one_apart() {
        let case = Case {
            dtype: DType::BF16,
            rows: 3,
            cols: 64,
            layouts: Layouts { x, residual, weight, gate, out },
            residual: NormResidual::Add,
            weight: NormWeight::Plain,
            gate: Gate::Silu,
            eps: 1e-6,
            kind: Values::Normal,
            seed: 3,
        };
        for device in &devices() {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// The longest rows that a block has registers for, and longer ones.
#[test]
fn long_rows() -> Result<(), TestCaseError> {
    for (dtype, cols) in
        [(DType::BF16, 32768), (DType::BF16, 32776), (DType::F32, 32768), (DType::F32, 32772)]
    {
        let (residual, weight, gate) = (NormResidual::Add, NormWeight::Plain, Gate::None);
        let (layouts, kind) = (Layouts::default(), Values::Normal);
        let case = Case { dtype, rows: 2, cols, layouts, residual, weight, gate, eps: 1e-6, kind, seed: 3 };
        for device in &devices_for(case.work()) {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Rows whose squares overflow or underflow in f32, among ordinary ones, which keep their bits.
#[test]
fn squares_beyond_f32() -> Result<(), TestCaseError> {
    for (dtype, cols) in [DType::F32, DType::BF16]
        .into_iter()
        .flat_map(|dtype| [4, 37, 64, 256, 512, 4096, 8192].map(|cols| (dtype, cols)))
    {
        // The row of each size, and epsilon.
        let sizes = [(1e20, 1e-6), (1.1e38, 0.1), (1e-22, 1e-44), (1e-30, 0.0), (1e-40, 0.0)];
        for (size, eps) in sizes {
            let eps = eps as f32;
            let pattern = [1.0, -1.0, 2.0, 3.0];
            let huge: Vec<f64> = (0..cols).map(|col| pattern[col % 4] * size).collect();
            let huge = testkit::round::round_all(dtype, &huge);
            let usual = values(Values::Normal, dtype, cols, 1);
            let problem = RmsNormProblem { rows: 3, cols, dtype, eps, weight: NormWeight::Plain };
            let mean = huge.iter().map(|value| value * value / cols as f64).sum::<f64>() + f64::from(eps);
            for device in &devices_for(work(3, cols)) {
                let run = |rows: &[&[f64]], variant| -> Result<Vec<f64>, TestCaseError> {
                    let stream = device.stream().map_err(fail)?;
                    let plan = match variant {
                        None => RmsNorm::plan(device, problem),
                        Some(variant) => RmsNorm::plan_with(device, problem, variant),
                    };
                    let input = |data: &[f64]| {
                        Rows::input(&stream, dtype, data, cols, Layout::default()).map_err(fail)
                    };
                    let (x, weight) = (input(&rows.concat())?, input(&vec![1.0; cols])?);
                    let mut out =
                        Rows::output(&stream, dtype, rows.len(), cols, Layout::default()).map_err(fail)?;
                    let weight = weight.view().reshape(&[cols]).map_err(fail)?;
                    let args =
                        RmsNormArgs { x: x.view(), residual: None, weight, gate: None, out: out.view_mut() };
                    plan.map_err(fail)?.run(&stream, args).map_err(fail)?;
                    out.read(&stream)
                };
                let fits = |variant: &&'static RmsNormVariant| {
                    variant.dtype == dtype && RmsNorm::plan_with(device, problem, variant).is_ok()
                };
                let variants = VARIANTS.iter().filter(fits).map(Some);
                for variant in std::iter::once(None).chain(variants) {
                    let got = run(&[&usual, &huge, &usual], variant)?;
                    let what = format!("{variant:?} {dtype} {cols} {size:e} {eps:e} {device:?}");
                    let alone = run(&[&usual], variant)?;
                    prop_assert_eq!(&got[..cols], &alone[..], "{}", what);
                    prop_assert_eq!(&got[2 * cols..], &alone[..], "{}", what);
                    for (got, value) in got[cols..2 * cols].iter().zip(&huge) {
                        let want = value / mean.sqrt();
                        // Of a sum one after the other, as on the CPU.
                        let of_sum = cols as f64 * 2f64.powi(-24);
                        let bound = if dtype == DType::F32 { 2e-6 + of_sum } else { 4e-3 + of_sum };
                        prop_assert!((got - want).abs() <= bound * want.abs(), "{}: {} {}", what, got, want);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Heads whose tensors have strides of their own, some head by head in memory: the bits are those of contiguous rows.
#[test]
fn strides_of_heads() -> Result<(), TestCaseError> {
    let (tokens, heads, eps) = (5, 3, 1e-6);
    for (dtype, cols) in DType::FLOATS.into_iter().flat_map(|dtype| [64, 2048, 37].map(|cols| (dtype, cols)))
    {
        let shape = [tokens, heads, cols];
        let random = |seed| values(Values::Normal, dtype, tokens * heads * cols, seed);
        let (x, added, gates) = (random(1), random(2), random(3));
        let weight = values(Values::Normal, dtype, cols, 4);
        let problem = RmsNormProblem { rows: tokens * heads, cols, dtype, eps, weight: NormWeight::Plain };
        for device in &devices_for(work(tokens * heads, cols)) {
            let stream = device.stream()?;
            let plan = RmsNorm::plan(device, problem)?;
            let weight = Rows::input(&stream, dtype, &weight, cols, Layout::default())?;
            let run = |apart: bool| -> Result<[Vec<f64>; 2], TestCaseError> {
                let gap = |gap| Layout { padding: if apart { gap } else { 0 }, offset: 0 };
                let input = |values: &[f64], by_head: bool, layout| {
                    let values = if by_head { swapped(values, shape) } else { values.to_vec() };
                    Rows::input(&stream, dtype, &values, cols, layout)
                };
                let (x, gate) = (input(&x, apart, gap(8))?, input(&gates, false, gap(24))?);
                let mut sum = input(&added, apart, gap(16))?;
                let mut out = Rows::output(&stream, dtype, tokens * heads, cols, gap(32))?;
                let residual = if apart {
                    sum.view_mut().reshape(&[heads, tokens, cols])?.swap_axes(0, 1)?
                } else {
                    sum.view_mut().reshape(&shape)?
                };
                let args = RmsNormArgs {
                    x: heads_of(x.view(), shape, apart)?,
                    residual: Some(residual),
                    weight: weight.view().reshape(&[cols])?,
                    gate: Some(gate.view().reshape(&shape)?),
                    out: out.view_mut().reshape(&shape)?,
                };
                plan.run(&stream, args)?;
                let sum = sum.read(&stream)?;
                let sum = if apart { swapped(&sum, [heads, tokens, cols]) } else { sum };
                Ok([sum, out.read(&stream)?])
            };
            assert_eq!(run(true)?, run(false)?, "{dtype} {cols} {device:?}");
        }
    }
    Ok(())
}

/// Heads of one token inside a wider row, as the q and k parts of a joint projection.
#[test]
fn per_head() -> Result<(), Box<dyn std::error::Error>> {
    let (tokens, heads, cols, width) = (3, 4, 128, 1024);
    for device in &devices() {
        let stream = device.stream()?;
        let data = values(Values::Normal, DType::BF16, tokens * width, 5);
        let weight = values(Values::Normal, DType::BF16, cols, 6);
        let x = Rows::input(&stream, DType::BF16, &data, width, Layout::default())?;
        let weight_rows = Rows::input(&stream, DType::BF16, &weight, cols, Layout::default())?;
        let mut out = Tensor::zeros(&stream, &[tokens, heads, cols], DType::BF16)?;
        let problem = RmsNormProblem {
            rows: tokens * heads,
            cols,
            dtype: DType::BF16,
            eps: 1e-6,
            weight: NormWeight::Plain,
        };
        let part = x.view().slice(1, 256..256 + heads * cols)?.reshape(&[tokens, heads, cols])?;
        let args = RmsNormArgs {
            x: part,
            residual: None,
            weight: weight_rows.view().reshape(&[cols])?,
            gate: None,
            out: out.view_mut(),
        };
        RmsNorm::plan(device, problem)?.run(&stream, args)?;
        let got: Vec<f64> = out.to_f32_vec(&stream)?.into_iter().map(f64::from).collect();
        let rows: Vec<f64> =
            data.chunks(width).flat_map(|token| &token[256..256 + heads * cols]).copied().collect();
        let input = reference::Input { x: &rows, residual: None, weight: &weight, gate: None };
        let (want, _) = reference::rmsnorm::<f64>(input, cols, 1e-6, 0.0, |v| v);
        let (naive, _) = reference::rmsnorm::<f32>(input, cols, 1e-6, 0.0, store(DType::BF16));
        let tolerance = Tolerance::new(DType::BF16, Scale::Rows(cols), cols + 8);
        testkit::compare::assert_within_naive(&got, &want, &naive, &tolerance);
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem =
            RmsNormProblem { rows: 4, cols: 64, dtype: DType::F32, eps: 1e-6, weight: NormWeight::Plain };
        let plan = RmsNorm::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |x: &Tensor, weight: &Tensor, out: &mut Tensor| {
            let (weight, out) = (weight.view(), out.view_mut());
            let args = RmsNormArgs { x: x.view(), residual: None, weight, gate: None, out };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (x, weight) = (tensor(&[4, 64], DType::F32)?, tensor(&[64], DType::F32)?);
        let mut out = tensor(&[4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[4, 65], DType::F32)?, &weight, &mut out),
            "rmsnorm: x: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message(&x, &tensor(&[64], DType::BF16)?, &mut out),
            "rmsnorm: weight: expected f32, got bf16"
        );
        assert_eq!(
            message(&tensor(&[5, 64], DType::F32)?, &weight, &mut tensor(&[5, 64], DType::F32)?),
            "rmsnorm: x: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(&x, &weight, &mut tensor(&[3, 64], DType::F32)?),
            "rmsnorm: out: expected shape [4, 64], got [3, 64]"
        );
        let refused = |problem| RmsNorm::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(RmsNormProblem { dtype: DType::I8, ..problem }),
            "rmsnorm: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(RmsNormProblem { cols: 0, ..problem }),
            "rmsnorm: problem: expected at least one column, got 0"
        );
        assert_eq!(
            refused(RmsNormProblem { eps: -1.0, ..problem }),
            "rmsnorm: problem: expected a finite eps of at least 0, got -1"
        );
    }
    Ok(())
}
