//! Grouped products of fp8 by fp8: rows become fp8 by the formula, and what is multiplied then is exact but for the
//! sums.

use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::round::{max_finite, ulp};
use testkit::strategies::{Values, dims_from};
use warpforge::ops::grouped_matmul::{
    GroupedMatmul, GroupedMatmulProblem, GroupedMatmulVariant, GroupedPackedChoices, GroupedRows,
    select_packed,
};
use warpforge::ops::matmul::Activations;
use warpforge::{DType, Device, DeviceLimits, F8E4M3};

use super::packed::PackedCase;
use super::{Case, contiguous, groups, reference};
use crate::harness::{EVERY, Layout, Wanted, all_cards, every_kernel_of, expect_loaded, fail, on_executors};
use crate::matmul::packed::Source;
use warpforge::ops::grouped_matmul::reference::Sizes;

const LAYOUT: WeightLayout = WeightLayout {
    codes: Codes::E4m3,
    group: 128,
    rows: 128,
    scale: ScaleType::F32,
    zeros: false,
    minimums: false,
    permuted: false,
};

fn case() -> impl Strategy<Value = PackedCase> {
    let layout =
        (select(vec![0u32, 128]), select(vec![128u32, 256]), select(vec![ScaleType::F32, ScaleType::E8m0]))
            .prop_map(|(group, rows, scale)| WeightLayout { group, rows, scale, ..LAYOUT });
    let dtype = select(vec![DType::BF16, DType::F16]);
    let n = prop_oneof![2 => Just(256usize), 1 => dims_from(1, &[16, 128], 300)];
    let k = dims_from(1, &[8, 16, 32], 56);
    let fan_out = prop_oneof![1 => Just(0usize), 1 => 1usize..5];
    let kind = prop_oneof![4 => Just(Values::Normal), 1 => Just(Values::Zeros), 1 => Just(Values::Huge), 1 => Just(Values::Tiny)];
    let places = (0usize..3, 0usize..3, 0usize..9, 0usize..9);
    ((dtype, groups(), n, k, fan_out, any::<u64>()), layout, kind, places).prop_map(
        |(
            (dtype, mut groups, n, k, fan_out, seed),
            layout,
            kind,
            (padding, offset, out_padding, out_offset),
        )| {
            // A border of blocks inside of an expert is for a single one.
            if n != 256 {
                groups.truncate(1);
            }
            let (k, rows) = (8 * k, groups.iter().sum::<usize>());
            let fan_out = (1..=fan_out).rev().find(|fan_out| rows.is_multiple_of(*fan_out));
            let from = fan_out.map_or(GroupedRows::Sorted, |fan_out| GroupedRows::Gathered { fan_out });
            let case = Case {
                problem: GroupedMatmulProblem {
                    from,
                    ..GroupedMatmulProblem::new(rows, groups.len(), n, k, dtype)
                },
                groups,
                x_layout: Layout { padding: 8 * padding, offset: 8 * offset },
                w_layout: Layout::default(),
                out_layout: Layout { padding: out_padding, offset: out_offset },
                kind,
                seed,
            };
            PackedCase { case, layout }
        },
    )
}

/// What rows are after they have become fp8, by the formula.
pub(crate) fn quantised(x: &[f64], k: usize) -> Vec<f64> {
    let block = |block: &[f64]| -> Vec<f64> {
        let most = block.iter().fold(0.0, |most: f32, value| most.max(value.abs() as f32));
        let scale = most * (1.0 / 448.0);
        let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
        let value = |x: &f64| f64::from(F8E4M3::from_f32(*x as f32 * inverse).to_f32()) * f64::from(scale);
        block.iter().map(value).collect()
    };
    x.chunks(k.max(1)).flat_map(|row| row.chunks(128).flat_map(block).collect::<Vec<f64>>()).collect()
}

/// The kernel that a device has for the problem with many rows.
fn variant(limits: &DeviceLimits, problem: &GroupedMatmulProblem) -> Option<&'static GroupedMatmulVariant> {
    let many = GroupedMatmulProblem { rows: 1 << 20, ..*problem };
    let choices = select_packed(limits, &many, problem.weight.as_ref()?).ok()?;
    choices.fp8.map(|(variant, _)| variant)
}

/// The kernels of the case's type, for any number of rows.
fn run_variants(cards: &[Device], case: &PackedCase, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let problem = GroupedMatmulProblem { activations: Activations::Fp8, ..case.problem() };
    let sources: Vec<Source> = case.sources();
    for device in cards {
        let (Some(limits), Some(layout)) = (device.limits(), &problem.weight) else { continue };
        let Some(variant) = variant(&limits, &problem).filter(|variant| wanted(variant.entry)) else {
            continue;
        };
        let choices = select_packed(&limits, &problem, layout).map_err(fail)?;
        let choices = GroupedPackedChoices { fp8: Some((variant, 0)), ..choices };
        let plan = GroupedMatmul::plan_packed(device, problem, choices).map_err(fail)?;
        prop_assert_eq!(plan.report().variant, variant.entry);
        check(device, &plan, case, &sources)?;
    }
    Ok(())
}

fn check(
    device: &Device,
    plan: &GroupedMatmul,
    case: &PackedCase,
    sources: &[Source],
) -> Result<(), TestCaseError> {
    let GroupedMatmulProblem { n, k, dtype, .. } = case.case.problem;
    let (x, w) = case.values(sources, false);
    let got = case.product(device, plan, &x, &case.pack(device, sources)?)?;
    let sizes = Sizes { n, k, fan_out: case.case.fan_out(), gate: None };
    let (offsets, order) = (case.case.offsets(), case.case.order());
    let product =
        |x: &[f64], w: &[f64]| reference::grouped_matmul::<f64>(x, w, &offsets, &order, sizes, |value| value);
    let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
    let q = quantised(&x, k);
    expect(dtype, &got, &product(&q, &w), &product(&absolute(&q), &absolute(&w)))
}

/// That a product of rows that were made fp8 is within its bound: what is wanted, and the sum of its terms' magnitudes.
pub(crate) fn expect(dtype: DType, got: &[f64], want: &[f64], terms: &[f64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (index, ((got, want), terms)) in got.iter().zip(want).zip(terms).enumerate() {
        // Each of a block's four sums is cut off below the 13th bit, and out is rounded.
        let allowed = terms * 2f64.powi(-10) + ulp(dtype, *want) + f64::from(f32::MIN_POSITIVE);
        // What is beyond f32 on the way may be infinite or NaN, and what is beyond the type infinite.
        let most = max_finite(dtype);
        let is_beyond = *terms > 3e38 || (want.abs() + allowed > most && got.abs() >= 0.99 * most);
        prop_assert!(
            is_beyond || (got - want).abs() <= allowed,
            "at {index}: {got}, expected {want} ± {allowed:e}"
        );
    }
    Ok(())
}

#[test]
fn every_fp8_kernel_is_simulated() -> Result<(), TestCaseError> {
    let entries = abi::ops::entries("grouped_matmul").filter(|entry| is_fp8(entry));
    every_kernel_of(entries, case(), |case| 4 * case.work(), run_variants)
}

/// The kernels of this file; the other tests have the others.
pub(crate) fn is_fp8(entry: &str) -> bool {
    entry.contains("_fp8__") || entry.contains("__quantise__")
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(32))]

    #[test]
    fn every_fp8_variant((case, on) in on_executors(case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// More tiles than multiprocessors, columns and rows of several, as a plan takes them; and devices without such kernels
/// multiply as always.
#[test]
fn fp8_planned() -> Result<(), TestCaseError> {
    for (groups, n, k) in [(vec![300, 0, 17, 130], 256, 264), (vec![40; 3], 384, 128)] {
        let case = PackedCase { case: contiguous(DType::BF16, groups, n, k, 5), layout: LAYOUT };
        let problem = GroupedMatmulProblem { activations: Activations::Fp8, ..case.problem() };
        for device in &crate::harness::devices_for(case.work()) {
            let plan = GroupedMatmul::plan(device, problem).map_err(fail)?;
            let sources = case.sources();
            match is_fp8(plan.report().variant) {
                true => check(device, &plan, &case, &sources)?,
                false => case.run(device, &plan, &sources)?,
            }
        }
    }
    Ok(())
}

/// A NaN or an infinity spoils its row and no other.
#[test]
fn fp8_rows_that_are_not_finite() -> Result<(), TestCaseError> {
    let case = PackedCase { case: contiguous(DType::BF16, vec![3, 4], 128, 256, 6), layout: LAYOUT };
    let problem =
        GroupedMatmulProblem { activations: Activations::Fp8, from: GroupedRows::Sorted, ..case.problem() };
    let case = PackedCase {
        case: Case { problem: GroupedMatmulProblem { weight: None, ..problem }, ..case.case },
        ..case
    };
    let sources = case.sources();
    for device in &all_cards() {
        let (Some(limits), Some(layout)) = (device.limits(), &problem.weight) else { continue };
        let Some(variant) = variant(&limits, &problem) else { continue };
        let choices = select_packed(&limits, &problem, layout).map_err(fail)?;
        let choices = GroupedPackedChoices { fp8: Some((variant, 0)), ..choices };
        let plan = GroupedMatmul::plan_packed(device, problem, choices).map_err(fail)?;
        let weight = case.pack(device, &sources)?;
        let (clean, _) = case.values(&sources, false);
        for spoilt in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut x = clean.clone();
            x[2 * 256 + 7] = spoilt;
            let (all, got) =
                (case.product(device, &plan, &clean, &weight)?, case.product(device, &plan, &x, &weight)?);
            for row in 0..7 {
                let (all, got) = (&all[row * 128..][..128], &got[row * 128..][..128]);
                prop_assert!(
                    if row == 2 { got.iter().all(|value| value.is_nan()) } else { all == got },
                    "{row}"
                );
            }
        }
    }
    Ok(())
}

/// No rows and no columns; no columns of x, which other kernels take.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    for dtype in [DType::BF16, DType::F16] {
        for (groups, n, k) in [(vec![0, 0], 128, 40), (vec![3, 2], 0, 40), (vec![3, 2], 128, 0)] {
            let case = PackedCase { case: contiguous(dtype, groups, n, k, 1), layout: LAYOUT };
            run_variants(&all_cards(), &case, EVERY)?;
        }
    }
    expect_loaded(abi::ops::entries("grouped_matmul").filter(|entry| is_fp8(entry)))
}
