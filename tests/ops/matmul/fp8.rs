//! Products of fp8 by fp8: rows become fp8 by the formula, and what is multiplied then is exact but for the sums.

use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::strategies::{Values, dims_from};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{
    Act, Activations, Bias, Epilogue, FP8_VARIANTS, Matmul, MatmulProblem, PackedChoices, reference,
    select_packed,
};
use warpforge::{DType, Device};

use super::case::*;
use super::packed::{PackedCase, case_of_many, work};
use crate::grouped_matmul::fp8::{expect, quantised};
use crate::harness::{
    EVERY, Layout, Wanted, all_cards, devices_for, every_kernel_of, expect_loaded, fail, on_executors,
};

/// Scales of blocks of 128 rows and of 128 of k.
const BLOCKS: WeightLayout = WeightLayout {
    codes: Codes::E4m3,
    group: 128,
    rows: 128,
    scale: ScaleType::F32,
    zeros: false,
    minimums: false,
    permuted: false,
};
/// A scale for each row.
const CHANNELS: WeightLayout = WeightLayout { group: 0, rows: 1, scale: ScaleType::Bf16, ..BLOCKS };

fn case() -> impl Strategy<Value = PackedCase> {
    let layout = prop_oneof![
        2 => Just(BLOCKS),
        2 => Just(CHANNELS),
        1 => Just(WeightLayout { scale: ScaleType::E8m0, ..BLOCKS }),
        1 => Just(WeightLayout { group: 0, rows: 256, ..BLOCKS }),
    ];
    let act = prop_oneof![
        2 => Just(Act::None),
        1 => Just(Act::Of(Activation::GeluTanh)),
        2 => Just(Act::Gated(Activation::Silu))
    ];
    let epilogue = (act, prop_oneof![3 => Just(1.0f32), 1 => Just(-0.37)], any::<bool>())
        .prop_map(|(act, scale, residual)| Epilogue { scale, act, residual });
    let sizes = (
        prop_oneof![1 => 1usize..70, 1 => 100usize..300],
        dims_from(1, &[16, 128, 192], 420),
        dims_from(1, &[8, 16, 32], 56),
    );
    let kind = prop_oneof![4 => Just(Values::Normal), 1 => Just(Values::Zeros), 1 => Just(Values::Tiny)];
    let place = (0usize..3, 0usize..3, 0usize..9, 0usize..9);
    let dtype = select(vec![DType::BF16, DType::F16]);
    ((dtype, sizes), layout, (epilogue, any::<bool>()), kind, (place, any::<u64>())).prop_map(
        |((dtype, (m, n, k)), layout, (epilogue, bias), kind, (place, seed))| {
            let gated = matches!(epilogue.act, Act::Gated(_));
            let bias = if bias && !gated { Bias::PerColumn } else { Bias::None };
            let problem = MatmulProblem {
                bias,
                epilogue,
                activations: Activations::Fp8,
                ..MatmulProblem::new(m, n, 8 * k, dtype)
            };
            let (padding, offset, out_padding, out_offset) = place;
            let case = Case {
                problem,
                a_layout: Layout { padding: 8 * padding, offset: 8 * offset },
                b_layout: Layout::default(),
                out_layout: Layout { padding: out_padding, offset: out_offset },
                kind,
                seed,
            };
            PackedCase { case, layout }
        },
    )
}

/// The wanted kernels that can do a case, for any number of rows.
fn run_variants(cards: &[Device], case: &PackedCase, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        let Some(limits) = device.limits() else { continue };
        let problem = case.problem();
        let choices = select_packed(&limits, &problem, problem.weight.as_ref().expect("one is planned"));
        for variant in FP8_VARIANTS.iter().filter(|variant| wanted(variant.entry)) {
            if !choices.fp8.0.contains(&variant) {
                continue;
            }
            let choices = PackedChoices { fp8: (vec![variant], 0), ..choices.clone() };
            let plan = Matmul::plan_packed(device, problem, choices).map_err(fail)?;
            prop_assert_eq!(plan.report().variant, variant.entry);
            check(device, &plan, case)?;
        }
    }
    Ok(())
}

fn check(device: &Device, plan: &Matmul, case: &PackedCase) -> Result<(), TestCaseError> {
    let MatmulProblem { m, n, k, dtype, epilogue, .. } = case.case.problem;
    let sources = case.sources();
    let inputs = case.inputs(&sources, false);
    let weight = case.pack(device, &sources)?;
    let got = product_of(device, plan, &case.case, &inputs, Some(&weight))?;
    let Inputs { a, b, bias, residual, .. } = &inputs;
    let a = quantised(a, k);
    let ends = (bias.as_deref(), residual.as_deref());
    let want = reference::fused::<f64>((&a, b), ends.0, ends.1, [m, n, k], &epilogue, |value| value);
    // The magnitudes of what is added up, with an activation's slope of at most 1.13.
    let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
    let b_rows = b_rows(&case.case.problem);
    let sums = reference::matmul::<f64>(&absolute(&a), &absolute(b), None, [m, b_rows, k], |value| value);
    let linear = |row: usize, col: usize| {
        f64::from(epilogue.scale.abs()) * sums[row * b_rows + col]
            + ends.0.map_or(0.0, |bias| bias[col].abs())
    };
    let terms: Vec<f64> = (0..m * n)
        .map(|index| {
            let (row, col) = (index / n, index % n);
            let value = match epilogue.act {
                Act::None => linear(row, col),
                Act::Of(_) => 1.2 * linear(row, col),
                // Both factors err.
                Act::Gated(_) => 2.2 * linear(row, col) * linear(row, n + col),
            };
            value + ends.1.map_or(0.0, |residual| residual[index].abs())
        })
        .collect();
    expect(dtype, &got, &want, &terms)
}

/// The kernels of this file.
pub(super) fn is_fp8(entry: &str) -> bool {
    entry.contains("_fp8__")
}

#[test]
fn every_fp8_kernel_is_simulated() -> Result<(), TestCaseError> {
    let entries = abi::ops::entries("matmul").filter(|entry| is_fp8(entry));
    every_kernel_of(entries, case(), |case| 4 * work(case), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(32))]

    #[test]
    fn every_fp8_variant((case, on) in on_executors(case, |case| 4 * work(case))) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// As a plan takes them: of many rows; fewer, and rows that are no pieces, are multiplied as always, and so are all by
/// devices without such kernels.
#[test]
fn fp8_planned() -> Result<(), TestCaseError> {
    for (i, (layout, act)) in
        [(BLOCKS, Act::None), (CHANNELS, Act::Of(Activation::Silu)), (BLOCKS, Act::Gated(Activation::Silu))]
            .into_iter()
            .enumerate()
    {
        let epilogue = Epilogue { act, residual: true, ..Epilogue::NONE };
        let problem = MatmulProblem {
            epilogue,
            activations: Activations::Fp8,
            ..MatmulProblem::new(300, 256, 264, DType::BF16)
        };
        let case = PackedCase { case: contiguous(problem, i as u64), layout };
        let odd = Case { a_layout: Layout { padding: 1, offset: 1 }, ..case.case.clone() };
        let few = MatmulProblem { m: 64, ..problem };
        for device in devices_for(work(&case)) {
            let Some(limits) = device.limits() else { continue };
            let problem = case.problem();
            let choices = select_packed(&limits, &problem, problem.weight.as_ref().expect("one is planned"));
            let choices = PackedChoices { fp8: (choices.fp8.0.clone(), 71), ..choices };
            let plan = Matmul::plan_packed(&device, problem, choices).map_err(fail)?;
            match is_fp8(plan.report().variant) {
                true => check(&device, &plan, &case)?,
                false => case.run(&device, &plan, &case.sources())?,
            }
            for case in [odd.clone(), Case { problem: few, ..case.case.clone() }] {
                let case = PackedCase { case, layout };
                case.run(&device, &plan, &case.sources())?;
                case_of_many(&device, &case)?;
            }
        }
    }
    Ok(())
}

/// A NaN or an infinity spoils its row and no other.
#[test]
fn fp8_rows_that_are_not_finite() -> Result<(), TestCaseError> {
    let (n, k) = (136, 256);
    let problem = MatmulProblem { activations: Activations::Fp8, ..MatmulProblem::new(7, n, k, DType::BF16) };
    let case = PackedCase { case: contiguous(problem, 6), layout: BLOCKS };
    let sources = case.sources();
    for device in &all_cards() {
        let Some(limits) = device.limits() else { continue };
        let choices = select_packed(&limits, &case.problem(), &BLOCKS);
        for &variant in &choices.fp8.0 {
            let choices = PackedChoices { fp8: (vec![variant], 0), ..choices.clone() };
            let plan = Matmul::plan_packed(device, case.problem(), choices).map_err(fail)?;
            let weight = case.pack(device, &sources)?;
            let clean = case.inputs(&sources, false);
            let product = |inputs: &Inputs| product_of(device, &plan, &case.case, inputs, Some(&weight));
            let all = product(&clean)?;
            for spoilt in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut inputs = case.inputs(&sources, false);
                inputs.a[2 * k + 7] = spoilt;
                let got = product(&inputs)?;
                for row in 0..7 {
                    let (all, got) = (&all[row * n..][..n], &got[row * n..][..n]);
                    let is_right = if row == 2 { got.iter().all(|value| value.is_nan()) } else { all == got };
                    prop_assert!(is_right, "{row} of {}", variant.entry);
                }
            }
        }
    }
    Ok(())
}

/// No rows and no columns.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    for dtype in [DType::BF16, DType::F16] {
        for [m, n, k] in [[0, 128, 40], [70, 0, 40]] {
            let problem =
                MatmulProblem { activations: Activations::Fp8, ..MatmulProblem::new(m, n, k, dtype) };
            run_variants(&all_cards(), &PackedCase { case: contiguous(problem, 1), layout: BLOCKS }, EVERY)?;
        }
    }
    expect_loaded(abi::ops::entries("matmul").filter(|entry| is_fp8(entry)))
}
