//! The weighted sum of experts' results against its reference.

use abi::ops::moe_combine::{MoeCombineVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::Store;
use warpforge::ops::moe_combine::reference::{self, Terms};
use warpforge::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem, SharedTerm};
use warpforge::ops::moe_permute::NO_POSITION;
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, on_executors, store,
    through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: MoeCombineProblem,
    shared: SharedTerm,
    y_layout: Layout,
    shared_layout: Layout,
    out_layout: Layout,
    kind: Values,
    seed: u64,
}

impl Case {
    fn work(&self) -> usize {
        let MoeCombineProblem { tokens, top_k, cols, .. } = self.problem;
        4 * tokens * cols * (top_k + 2) + 256 * 10
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![5 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let stores = prop_oneof![Just(Store::Replace), Just(Store::Add)];
    let problem = (floats(), dims(&[8], 30), 0usize..12, dims_from(1, &[8, 64, 256], 700), stores).prop_map(
        |(dtype, tokens, top_k, cols, store)| MoeCombineProblem {
            store,
            ..MoeCombineProblem::new(tokens, top_k, cols, dtype)
        },
    );
    let shared = prop_oneof![Just(SharedTerm::None), Just(SharedTerm::Plain), Just(SharedTerm::Gated)];
    // The same layout for all half of the time: otherwise the path by pieces of 16 bytes is rare.
    let layouts = prop_oneof![
        layout().prop_map(|all| [all; 3]),
        (layout(), layout(), layout()).prop_map(|(y, shared, out)| [y, shared, out]),
    ];
    (problem, shared, layouts, any_values(), any::<u64>()).prop_map(
        |(problem, shared, [y_layout, shared_layout, out_layout], kind, seed)| Case {
            problem,
            shared,
            y_layout,
            shared_layout,
            out_layout,
            kind,
            seed,
        },
    )
}

/// The inputs, exactly.
struct Inputs {
    y: Vec<f64>,
    weights: Vec<f64>,
    positions: Vec<u32>,
    shared: Option<Vec<f64>>,
    gate: Option<Vec<f64>>,
    residual: Option<Vec<f64>>,
}

impl Inputs {
    fn of(case: &Case) -> Self {
        let MoeCombineProblem { tokens, top_k, cols, dtype, store } = case.problem;
        let (pairs, mut rng) = (tokens * top_k, Rng::new(case.seed ^ 9));
        let values = |dtype, n, salt: u64| values(case.kind, dtype, n, case.seed ^ salt);
        // Each row once, and some nowhere, of which some are next to y.
        let mut positions: Vec<u32> = (0..pairs as u32).collect();
        for i in (1..pairs).rev() {
            positions.swap(i, rng.below(i + 1));
        }
        for position in &mut positions {
            *position = match rng.below(20) {
                0 => NO_POSITION,
                1 => pairs as u32,
                _ => *position,
            };
        }
        // A weight of nothing makes nothing of a result that is not finite.
        let mut weights = crate::harness::values(Values::Normal, DType::F32, pairs, case.seed ^ 2);
        for weight in &mut weights {
            *weight = if rng.below(10) == 0 { 0.0 } else { *weight };
        }
        let is_gated = case.shared == SharedTerm::Gated;
        Inputs {
            y: values(dtype, pairs * cols, 1),
            weights,
            positions,
            shared: (case.shared != SharedTerm::None).then(|| values(dtype, tokens * cols, 3)),
            gate: is_gated.then(|| values(DType::F32, tokens, 4)),
            residual: (store == Store::Add).then(|| values(dtype, tokens * cols, 5)),
        }
    }

    fn terms<'a>(&'a self, problem: &MoeCombineProblem, absolute: Option<&'a Inputs>) -> Terms<'a> {
        let of = absolute.unwrap_or(self);
        Terms {
            top_k: problem.top_k,
            cols: problem.cols,
            y: &of.y,
            weights: &of.weights,
            positions: &self.positions,
            shared: of.shared.as_deref(),
            gate: self.gate.as_deref(),
            residual: of.residual.as_deref(),
        }
    }

    fn absolute(&self) -> Inputs {
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
        Inputs {
            y: absolute(&self.y),
            weights: absolute(&self.weights),
            positions: Vec::new(),
            shared: self.shared.as_deref().map(absolute),
            gate: None,
            residual: self.residual.as_deref().map(absolute),
        }
    }
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static MoeCombineVariant>,
) -> Result<(), TestCaseError> {
    let MoeCombineProblem { tokens, top_k, cols, dtype, .. } = case.problem;
    let inputs = Inputs::of(case);
    let got = sum(device, case, variant, &inputs)?;
    let terms = inputs.terms(&case.problem, None);
    let want = reference::moe_combine::<f64>(tokens, &terms, |v| v);
    let naive = reference::moe_combine::<f32>(tokens, &terms, store(dtype));
    let absolute = inputs.absolute();
    let scale = reference::moe_combine::<f64>(tokens, &inputs.terms(&case.problem, Some(&absolute)), |v| v);
    // The products, the sum, and the gate's sigmoid.
    let tolerance = Tolerance::new(dtype, Scale::Given(&scale), 2 * top_k + 16);
    check(&format!("{device:?}, {cols} columns"), &got, &want, &naive, &tolerance)
}

fn sum(
    device: &Device,
    case: &Case,
    variant: Option<&'static MoeCombineVariant>,
    inputs: &Inputs,
) -> Result<Vec<f64>, TestCaseError> {
    let MoeCombineProblem { tokens, top_k, cols, dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => MoeCombine::plan(device, case.problem),
        Some(variant) => MoeCombine::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let rows = |dtype, values: &[f64], cols, layout| Rows::input(&stream, dtype, values, cols, layout);
    let y = rows(dtype, &inputs.y, cols, case.y_layout).map_err(fail)?;
    let shared = inputs.shared.as_ref().map(|shared| rows(dtype, shared, cols, case.shared_layout));
    let shared = shared.transpose().map_err(fail)?;
    // A column of a wider matrix, as of a router's product with a row more.
    let gate = inputs.gate.as_ref().map(|gate| rows(DType::F32, gate, 1, case.shared_layout));
    let gate = gate.transpose().map_err(fail)?;
    // Rows cannot hold rows of nothing.
    let pairs = [tokens, top_k];
    let weights: Vec<f32> = inputs.weights.iter().map(|&weight| weight as f32).collect();
    let weights = Tensor::from_slice(&stream, &pairs, &weights).map_err(fail)?;
    let positions = Tensor::from_slice(&stream, &pairs, &inputs.positions).map_err(fail)?;
    let out = match &inputs.residual {
        Some(residual) => rows(dtype, residual, cols, case.out_layout),
        None => Rows::output(&stream, dtype, tokens, cols, case.out_layout),
    };
    let mut out = out.map_err(fail)?;
    let args = MoeCombineArgs {
        y: y.view(),
        weights: weights.view(),
        positions: positions.view(),
        shared: shared.as_ref().map(Rows::view),
        gate: gate.as_ref().map(Rows::view),
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;
    out.read(&stream)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS {
            if wanted(variant.entry) && MoeCombine::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "moe_combine",
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.top_k = 0],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("moe_combine", case(), Case::work, run_variants)
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
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let dtype = DType::BF16;
    let problem = MoeCombineProblem::new(4, 2, 8, dtype);
    for device in &devices() {
        let stream = device.stream()?;
        let plan = MoeCombine::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |y: &[usize],
                       weights: &[usize],
                       shared: Option<&[usize]>,
                       gate: Option<&[usize]>,
                       out: &[usize]| {
            let (y, mut out) = (tensor(y, dtype)?, tensor(out, dtype)?);
            let (weights, positions) = (tensor(weights, DType::F32)?, tensor(&[4, 2], DType::U32)?);
            let shared = shared.map(|shape| tensor(shape, dtype)).transpose()?;
            let gate = gate.map(|shape| tensor(shape, DType::F32)).transpose()?;
            let args = MoeCombineArgs {
                y: y.view(),
                weights: weights.view(),
                positions: positions.view(),
                shared: shared.as_ref().map(Tensor::view),
                gate: gate.as_ref().map(Tensor::view),
                out: out.view_mut(),
            };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message(&[8, 8], &[5, 2], None, None, &[5, 8])?,
            "moe_combine: out: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message(&[8, 7], &[4, 2], None, None, &[4, 8])?,
            "moe_combine: y: expected shape [any, 8], got [8, 7]"
        );
        assert_eq!(
            message(&[8, 8], &[4, 3], None, None, &[4, 8])?,
            "moe_combine: weights: expected shape [4, 2], got [4, 3]"
        );
        assert_eq!(
            message(&[8, 8], &[4, 2], Some(&[3, 8]), None, &[4, 8])?,
            "moe_combine: shared: expected shape [4, 8], got [3, 8]"
        );
        assert_eq!(
            message(&[8, 8], &[4, 2], None, Some(&[4, 1]), &[4, 8])?,
            "moe_combine: gate: expected none without a shared expert, got a tensor"
        );
        assert_eq!(
            message(&[8, 8], &[4, 2], Some(&[4, 8]), Some(&[4, 2]), &[4, 8])?,
            "moe_combine: gate: expected shape [4, 1], got [4, 2]"
        );
        let int = MoeCombineProblem { dtype: DType::I8, ..problem };
        assert_eq!(
            MoeCombine::supports(device, &int).unwrap_err().to_string(),
            "moe_combine: problem: expected dtype f32, f16 or bf16, got i8"
        );
    }
    Ok(())
}
