//! Gated linear unit activation against its reference.

use abi::ops::glu::{GluVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Values, any_values, dims, stride_padding};
use warpforge::ops::glu::reference;
use warpforge::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, floats, on_executors,
    store, through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: GluProblem,
    /// Else the activation alone.
    has_up: bool,
    gate: Layout,
    up: Layout,
    out: Layout,
    gates: Values,
    ups: Values,
    seed: u64,
}

impl Case {
    fn work(&self) -> usize {
        5 * self.problem.rows * self.problem.cols
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![5 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn activation() -> impl Strategy<Value = Activation> {
    proptest::sample::select(&Activation::ALL[..])
}

fn case() -> impl Strategy<Value = Case> {
    let problem = (floats(), dims(&[8, 32], 70), dims(&[8, 64, 512], 1600), activation())
        .prop_map(|(dtype, rows, cols, activation)| GluProblem { rows, cols, dtype, activation });
    // The same layout for all three half of the time: otherwise the path by pieces of 16 bytes is rare.
    let layouts = prop_oneof![
        layout().prop_map(|all| [all; 3]),
        (layout(), layout(), layout()).prop_map(|(gate, up, out)| [gate, up, out]),
    ];
    let has_up = prop_oneof![3 => Just(true), 1 => Just(false)];
    (problem, has_up, layouts, any_values(), any_values(), any::<u64>()).prop_map(
        |(problem, has_up, [gate, up, out], gates, ups, seed)| Case {
            problem,
            has_up,
            gate,
            up,
            out,
            gates,
            ups,
            seed,
        },
    )
}

/// Checks a result; see `reference::magnitude` for what its error is relative to.
fn check_glu(
    what: &str,
    got: &[f64],
    (gate, up): (&[f64], &[f64]),
    activation: Activation,
    dtype: DType,
) -> Result<(), TestCaseError> {
    let want = reference::glu::<f64>(gate, up, activation, |v| v);
    let naive = reference::glu::<f32>(gate, up, activation, store(dtype));
    let scale: Vec<f64> =
        std::iter::zip(gate, up).map(|(&gate, &up)| reference::magnitude(gate, up, activation)).collect();
    // The chain of the longest formula: the polynomial of degree 9, its argument (3), the exponential (4), 3 products.
    check(what, got, &want, &naive, &Tolerance::new(dtype, Scale::Given(&scale), 20))
}

fn run(device: &Device, case: &Case, variant: Option<&'static GluVariant>) -> Result<(), TestCaseError> {
    let GluProblem { rows, cols, dtype, activation } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => Glu::plan(device, case.problem),
        Some(variant) => Glu::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let gate = values(case.gates, dtype, rows * cols, case.seed);
    let up = if case.has_up {
        values(case.ups, dtype, rows * cols, case.seed ^ 1)
    } else {
        vec![1.0; rows * cols]
    };
    let gate_rows = Rows::input(&stream, dtype, &gate, cols, case.gate).map_err(fail)?;
    let up_rows = Rows::input(&stream, dtype, &up, cols, case.up).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, rows, cols, case.out).map_err(fail)?;
    if cols == 0 {
        // Rows cannot tell how many empty rows there are.
        let (x, mut out) =
            (Tensor::zeros(&stream, &[rows, 0], dtype)?, Tensor::zeros(&stream, &[rows, 0], dtype)?);
        let up = case.has_up.then(|| x.view());
        return Ok(plan.run(&stream, GluArgs { gate: x.view(), up, out: out.view_mut() })?);
    }
    let args =
        GluArgs { gate: gate_rows.view(), up: case.has_up.then(|| up_rows.view()), out: out.view_mut() };
    plan.run(&stream, args).map_err(fail)?;
    check_glu(plan.report().variant, &out.read(&stream)?, (&gate, &up), activation, dtype)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let GluProblem { dtype, activation, .. } = case.problem;
    for device in cards {
        for variant in VARIANTS.iter().filter(|v| v.dtype == dtype && v.activation == activation) {
            if wanted(variant.entry) && Glu::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "glu",
        &[|case: &mut Case| case.problem.rows = 0, |case: &mut Case| case.problem.cols = 0],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("glu", case(), Case::work, run_variants)
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
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A row gives the same bits alone and among others.
    #[test]
    fn rows_are_independent(
        ((dtype, activation, rows, cols, seed), on) in on_executors(
            || (floats(), activation(), 2usize..40, 1usize..700, any::<u64>()),
            |&(_, _, rows, cols, _)| 5 * rows * cols,
        ),
    ) {
        for device in &on.devices() {
            let stream = device.stream().map_err(fail)?;
            let gate = values(Values::Normal, dtype, rows * cols, seed);
            let up = values(Values::Normal, dtype, rows * cols, seed ^ 1);
            let run = |rows: usize, gate: &[f64], up: &[f64]| -> Result<Vec<f64>, TestCaseError> {
                let plan = Glu::plan(device, GluProblem { rows, cols, dtype, activation }).map_err(fail)?;
                let gate = Rows::input(&stream, dtype, gate, cols, Layout::default()).map_err(fail)?;
                let up = Rows::input(&stream, dtype, up, cols, Layout::default()).map_err(fail)?;
                let mut out = Rows::output(&stream, dtype, rows, cols, Layout::default()).map_err(fail)?;
                let args = GluArgs { gate: gate.view(), up: Some(up.view()), out: out.view_mut() };
                plan.run(&stream, args).map_err(fail)?;
                out.read(&stream)
            };
            let together = run(rows, &gate, &up)?;
            let at = (seed as usize % rows) * cols..;
            let alone = run(1, &gate[at.clone()][..cols], &up[at.clone()][..cols])?;
            prop_assert_eq!(&together[at][..cols], &alone[..], "{:?}", device);
        }
    }
}

/// Gate and up as the two halves of one matmul output.
#[test]
fn halves_of_one_tensor() -> Result<(), TestCaseError> {
    for (rows, cols, dtype) in [(3, 768, DType::BF16), (5, 33, DType::F16), (33, 512, DType::F32)] {
        for device in &devices() {
            let stream = device.stream()?;
            let data = values(Values::Normal, dtype, rows * 2 * cols, 7);
            let joint = Rows::input(&stream, dtype, &data, 2 * cols, Layout::default())?;
            let mut out = Rows::output(&stream, dtype, rows, cols, Layout::default())?;
            let gate = joint.view().slice(1, 0..cols)?;
            let up = joint.view().slice(1, cols..2 * cols)?;
            let problem = GluProblem { rows, cols, dtype, activation: Activation::Silu };
            Glu::plan(device, problem)?.run(&stream, GluArgs { gate, up: Some(up), out: out.view_mut() })?;
            let half = |start: usize| -> Vec<f64> {
                data.chunks(2 * cols).flat_map(|row| &row[start..start + cols]).copied().collect()
            };
            check_glu("halves", &out.read(&stream)?, (&half(0), &half(cols)), problem.activation, dtype)?;
        }
    }
    Ok(())
}

/// The whole range of gates in small steps, where the exponential overflows and underflows too, and infinities and NaN.
#[test]
fn extreme_gates() -> Result<(), TestCaseError> {
    let specials = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40];
    for dtype in DType::FLOATS {
        let sweep = (-24_000..=24_000).map(|i| f64::from(i) / 200.0);
        let gate = testkit::round::round_all(dtype, &sweep.chain(specials).collect::<Vec<_>>());
        let up = vec![1.0; gate.len()];
        for activation in Activation::ALL {
            for device in &devices_for(5 * gate.len()) {
                let stream = device.stream()?;
                let problem = GluProblem { rows: 1, cols: gate.len(), dtype, activation };
                let plan = Glu::plan(device, problem)?;
                let gate_row = Rows::input(&stream, dtype, &gate, gate.len(), Layout::default())?;
                let up_row = Rows::input(&stream, dtype, &up, gate.len(), Layout::default())?;
                let mut out = Rows::output(&stream, dtype, 1, gate.len(), Layout::default())?;
                let args = GluArgs { gate: gate_row.view(), up: Some(up_row.view()), out: out.view_mut() };
                plan.run(&stream, args)?;
                let got = out.read(&stream)?;
                check_glu(plan.report().variant, &got, (&gate, &up), activation, dtype)?;
                let at = gate.len() - specials.len();
                let limit = if activation == Activation::Sigmoid { 1.0 } else { f64::INFINITY };
                assert_eq!(got[at], limit, "{dtype} {activation:?} {device:?}");
                assert_eq!(got[at + 1], 0.0, "{dtype} {activation:?} {device:?}");
                assert!(got[at + 2].is_nan(), "{dtype} {activation:?} {device:?}");
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
        let problem = GluProblem { rows: 4, cols: 64, dtype: DType::F32, activation: Activation::Silu };
        let plan = Glu::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |gate: &Tensor, up: &Tensor, out: &mut Tensor| {
            let args = GluArgs { gate: gate.view(), up: Some(up.view()), out: out.view_mut() };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let good = tensor(&[4, 64], DType::F32)?;
        let mut out = tensor(&[4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[4, 65], DType::F32)?, &good, &mut out),
            "glu: gate: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message(&good, &tensor(&[3, 64], DType::F32)?, &mut out),
            "glu: up: expected shape [4, 64], got [3, 64]"
        );
        assert_eq!(
            message(&good, &tensor(&[4, 64], DType::BF16)?, &mut out),
            "glu: up: expected f32, got bf16"
        );
        assert_eq!(
            message(&good, &good, &mut tensor(&[4, 1, 64], DType::F32)?),
            "glu: out: expected shape [4, 64], got [4, 1, 64]"
        );
        assert_eq!(
            message(&tensor(&[5, 64], DType::F32)?, &good, &mut out),
            "glu: gate: expected at most 4 rows, as planned, got 5"
        );
        let int = GluProblem { dtype: DType::U32, ..problem };
        assert_eq!(
            Glu::supports(device, &int).unwrap_err().to_string(),
            "glu: problem: expected dtype f32, f16 or bf16, got u32"
        );
    }
    Ok(())
}
