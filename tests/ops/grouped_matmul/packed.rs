//! Grouped products with packed weights: every layout, by every kernel, against the values that the layout stands for.

use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::round::round_to;
use testkit::strategies::{Values, dims_from};
use warpforge::ops::grouped_matmul::{
    GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedPackedChoices, GroupedRows,
    PACKED_MMA_VARIANTS, PACKED_VARIANTS, UNPACK_VARIANTS, select_packed,
};
use warpforge::ops::matmul::{MatmulB, PackedTile};
use warpforge::weight::{RowScales, Weight};
use warpforge::{Arch, DType, Device, Error, Tensor};

use super::{Case, Expected, contiguous, groups, inputs, layout};
use crate::harness::{
    EVERY, Layout, Rows, Wanted, all_cards, cards_of, devices_for, every_kernel_of, expect_loaded, fail,
    floats, on_executors,
};
use crate::matmul::packed::{Source, layouts};

#[derive(Clone, Debug)]
pub(super) struct PackedCase {
    pub(super) case: Case,
    /// Of the sources; where their blocks end inside of an expert, each row has a scale of its own.
    pub(super) layout: WeightLayout,
}

fn packed() -> impl Strategy<Value = PackedCase> {
    let n = prop_oneof![3 => dims_from(1, &[16, 32], 70), 1 => select(vec![16usize, 128])];
    let k = prop_oneof![3 => dims_from(1, &[16, 64, 128], 200), 1 => dims_from(1, &[256], 500)];
    let fan_out = prop_oneof![1 => Just(0usize), 1 => 1usize..5];
    let parts = (floats(), groups(), n, k, fan_out, any::<u64>());
    (parts, select(layouts()), (layout(), layout(), any::<bool>())).prop_map(
        |((dtype, groups, n, k, fan_out, seed), weight, (x_layout, out_layout, in_pieces))| {
            let whole = |size: usize| size.next_multiple_of(8);
            let (k, x_layout) = if in_pieces {
                let Layout { padding, offset } = x_layout;
                (whole(k), Layout { padding: whole(padding), offset: whole(offset) })
            } else {
                (k, x_layout)
            };
            let rows: usize = groups.iter().sum();
            let fan_out = (1..=fan_out).rev().find(|fan_out| rows.is_multiple_of(*fan_out));
            let from = fan_out.map_or(GroupedRows::Sorted, |fan_out| GroupedRows::Gathered { fan_out });
            let case = Case {
                problem: GroupedMatmulProblem {
                    from,
                    ..GroupedMatmulProblem::new(rows, groups.len(), n, k, dtype)
                },
                groups,
                x_layout,
                w_layout: Layout::default(),
                out_layout,
                kind: Values::Normal,
                seed,
            };
            PackedCase { case, layout: weight }
        },
    )
}

impl PackedCase {
    pub(super) fn work(&self) -> usize {
        let GroupedMatmulProblem { rows, experts, n, k, .. } = self.case.problem;
        let slots: usize = self.case.groups.iter().map(|rows| rows.div_ceil(2)).sum();
        let tile = n.next_multiple_of(16) * k.next_multiple_of(64);
        slots * tile * 6 + rows * tile + (rows + experts) * n.div_ceil(16) * 256 * 20
    }

    fn is_whole(&self) -> bool {
        self.case.problem.n.is_multiple_of(self.layout.rows as usize)
    }

    pub(super) fn problem(&self) -> GroupedMatmulProblem {
        let rows = if self.is_whole() { self.layout.rows } else { 1 };
        GroupedMatmulProblem { weight: Some(WeightLayout { rows, ..self.layout }), ..self.case.problem }
    }

    pub(super) fn sources(&self) -> Vec<Source> {
        let GroupedMatmulProblem { experts, n, k, .. } = self.case.problem;
        let source = |expert: usize| {
            let mut source = Source::new([n, k], self.layout, self.case.seed ^ expert as u64);
            // Each expert has its own.
            source.global *= 1.0 + (expert % 4) as f32;
            source
        };
        (0..experts).map(source).collect()
    }

    /// x and the weights' values, these perhaps rounded to the operands' type.
    pub(super) fn values(&self, sources: &[Source], rounded: bool) -> (Vec<f64>, Vec<f64>) {
        let (x, _) = inputs(&Case {
            problem: GroupedMatmulProblem { n: 0, ..self.case.problem },
            ..self.case.clone()
        });
        let mut w: Vec<f64> = sources.iter().flat_map(Source::values).collect();
        if rounded {
            w.iter_mut().for_each(|value| *value = round_to(self.case.problem.dtype, *value));
        }
        (x, w)
    }

    pub(super) fn pack(&self, device: &Device, sources: &[Source]) -> Result<Weight, TestCaseError> {
        let stream = device.stream().map_err(fail)?;
        let weight = if self.is_whole() {
            Weight::pack_experts(&stream, sources.len(), |expert| Ok(&sources[expert]))
        } else {
            Weight::pack_experts(&stream, sources.len(), |expert| Ok(RowScales(&sources[expert])))
        };
        weight.map_err(fail)
    }

    /// What a plan makes of sorted rows `from..` of the case, which are all that are not cut off.
    pub(super) fn product(
        &self,
        device: &Device,
        plan: &GroupedMatmul,
        x: &[f64],
        weight: &Weight,
    ) -> Result<Vec<f64>, TestCaseError> {
        let GroupedMatmulProblem { rows, experts, n, k, dtype, .. } = self.case.problem;
        let stream = device.stream().map_err(fail)?;
        let x = Rows::input(&stream, dtype, x, k, self.case.x_layout).map_err(fail)?;
        let empty = Tensor::empty(&stream, &[self.case.x_rows(), 0], dtype).map_err(fail)?;
        let x = if k == 0 { empty.view() } else { x.view() };
        let offsets = Tensor::from_slice(&stream, &[experts + 1], &self.case.offsets()).map_err(fail)?;
        let order = Tensor::from_slice(&stream, &[rows], &self.case.order()).map_err(fail)?;
        let mut out = Rows::output(&stream, dtype, rows, n, self.case.out_layout).map_err(fail)?;
        let args = GroupedMatmulArgs {
            order: self.case.fan_out().map(|_| order.view()),
            ..GroupedMatmulArgs::new(x, weight, offsets.view(), out.view_mut())
        };
        plan.run(&stream, args).map_err(fail)?;
        out.read(&stream)
    }

    pub(super) fn run(
        &self,
        device: &Device,
        plan: &GroupedMatmul,
        sources: &[Source],
    ) -> Result<(), TestCaseError> {
        let variant = plan.report().variant;
        let (x, w) = self.values(sources, variant.contains("unpack"));
        let weight = self.pack(device, sources)?;
        let got = self.product(device, plan, &x, &weight)?;
        let sizes: Vec<f64> = sources.iter().flat_map(Source::sizes).collect();
        Expected::of_terms(&self.case, (&x, &w), &sizes).check(variant, &got, &self.case)
    }

    /// The same with the experts unpacked, so many at a time.
    fn run_unpacked(&self, device: &Device, experts: usize, sources: &[Source]) -> Result<(), TestCaseError> {
        let problem = self.problem();
        let (Some(limits), Some(layout)) = (device.limits(), &problem.weight) else { return Ok(()) };
        let choices = select_packed(&limits, &problem, layout).map_err(fail)?;
        let choices = GroupedPackedChoices { dense_from: Some(0), experts, ..choices };
        let plan = GroupedMatmul::plan_packed(device, problem, choices).map_err(fail)?;
        self.run(device, &plan, sources)
    }
}

/// The wanted kernels that can do a case.
fn run_variants(cards: &[Device], case: &PackedCase, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let sources = case.sources();
    let GroupedMatmulProblem { experts, dtype, .. } = case.case.problem;
    for device in cards {
        for variant in PACKED_VARIANTS.iter().chain(PACKED_MMA_VARIANTS).filter(|v| wanted(v.entry)) {
            if let Ok(plan) = GroupedMatmul::plan_packed_with(device, case.problem(), variant) {
                case.run(device, &plan, &sources)?;
            }
        }
        let unpacks = UNPACK_VARIANTS.iter().any(|variant| {
            (variant.dtype, variant.codes) == (dtype, case.layout.codes) && wanted(variant.entry)
        });
        if unpacks {
            case.run_unpacked(device, 1 + case.case.seed as usize % experts, &sources)?;
        }
    }
    Ok(())
}

/// The kernels of plain matrices are the other tests'.
pub(super) fn is_packed(entry: &str) -> bool {
    entry.contains("packed") || entry.contains("unpack")
}

#[test]
fn every_packed_kernel_is_simulated() -> Result<(), TestCaseError> {
    let entries = abi::ops::entries("grouped_matmul").filter(|entry| is_packed(entry));
    every_kernel_of(entries, packed(), |case| 4 * case.work(), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// What `plan` chooses, on every device.
    #[test]
    fn packed_planned((case, on) in on_executors(packed, PackedCase::work)) {
        let sources = case.sources();
        for device in &on.devices() {
            let plan = GroupedMatmul::plan(device, case.problem()).map_err(fail)?;
            case.run(device, &plan, &sources)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_packed_variant((case, on) in on_executors(packed, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

const LAYOUT: WeightLayout = WeightLayout {
    codes: Codes::Int4,
    group: 32,
    rows: 1,
    scale: ScaleType::F16,
    zeros: true,
    minimums: false,
    permuted: false,
};

/// Experts with rows far more than average, a few and none: unpacked one, two and all at a time, by what takes rows in
/// pieces and what does not.
#[test]
fn unpacked_experts() -> Result<(), TestCaseError> {
    let fp4 = WeightLayout { codes: Codes::E2m1, group: 16, scale: ScaleType::E4m3, zeros: false, ..LAYOUT };
    let blocks = WeightLayout {
        codes: Codes::E4m3,
        group: 128,
        rows: 16,
        scale: ScaleType::F32,
        zeros: false,
        ..LAYOUT
    };
    for (i, layout) in [LAYOUT, fp4, blocks].into_iter().enumerate() {
        for (dtype, k) in [(DType::BF16, 136), (DType::F16, 75), (DType::F32, 64)] {
            let case = contiguous(dtype, vec![0, 40, 1, 0, 3], [16, 40, 48][i], k, i as u64);
            let case = PackedCase { case, layout };
            for device in devices_for(case.work()) {
                for experts in [1, 2, 5] {
                    case.run_unpacked(&device, experts, &case.sources())?;
                }
            }
        }
    }
    Ok(())
}

/// A row of few rows' kernels has the same bits alone and among others, whatever kernel of its kind takes it.
#[test]
fn packed_rows_are_independent() -> Result<(), TestCaseError> {
    let mut layouts = layouts();
    // fp8 with small groups, int4 with groups of 16 and 16 bits have no kernels on tensor cores.
    layouts.retain(|layout| match layout.codes {
        _ if layout.rows > 1 => false,
        Codes::E4m3 => layout.is_wide(),
        Codes::Int4 => layout.group != 16,
        Codes::E6m9 => false,
        _ => true,
    });
    for (i, layout) in layouts.into_iter().step_by(13).enumerate() {
        let dtype = [DType::BF16, DType::F16][i % 2];
        let case = PackedCase { case: contiguous(dtype, vec![2, 0, 20, 1], 48, 256, i as u64), layout };
        let sources = case.sources();
        let (x, _) = case.values(&sources, false);
        for device in cards_of(Arch::Sm80) {
            let weight = case.pack(&device, &sources)?;
            // A sum is scaled at the end of each group that a kernel knows of: kinds of their own.
            let mut seen: [Option<Vec<f64>>; 3] = Default::default();
            for variant in PACKED_MMA_VARIANTS {
                let Ok(plan) = GroupedMatmul::plan_packed_with(&device, case.problem(), variant) else {
                    continue;
                };
                let all = case.product(&device, &plan, &x, &weight)?;
                let kind = match variant.tile {
                    PackedTile::Mma { group, .. } => group as usize / 32,
                    _ => continue,
                };
                prop_assert_eq!(seen[kind].get_or_insert_with(|| all.clone()), &all, "{}", variant.entry);
                // The sixth row of the third expert.
                let row = 7;
                let mut alone = case.clone();
                (alone.case.groups, alone.case.problem.rows) = (vec![0, 0, 1, 0], 1);
                let from = case.case.order()[row] as usize;
                let got = alone.product(&device, &plan, &x[from * 256..][..256], &weight)?;
                prop_assert_eq!(&all[row * 48..][..48], &got[..], "{}", variant.entry);
            }
            prop_assert!(seen.iter().any(Option::is_some), "{:?}", layout);
        }
    }
    Ok(())
}

/// Sizes of 0 through every kernel: nothing to do, or empty sums.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    for (codes, group) in [
        (Codes::Int4, 32),
        (Codes::Int4, 128),
        (Codes::Int8, 32),
        (Codes::Int8, 0),
        (Codes::E2m1, 32),
        (Codes::E4m3, 128),
        (Codes::E6m9, 0),
    ] {
        let scale = if codes == Codes::E6m9 { ScaleType::F32 } else { LAYOUT.scale };
        let layout = WeightLayout { codes, group, scale, zeros: false, ..LAYOUT };
        for dtype in DType::FLOATS {
            for (groups, n, k) in [(vec![0, 0], 20, 40), (vec![3, 2], 0, 40), (vec![3, 2], 20, 0)] {
                let case = PackedCase { case: contiguous(dtype, groups, n, k, 1), layout };
                run_variants(&all_cards(), &case, EVERY)?;
            }
        }
    }
    expect_loaded(abi::ops::entries("grouped_matmul").filter(|entry| is_packed(entry)))
}

/// What does not fit is an error that says so.
#[test]
fn packed_mistakes() -> Result<(), Error> {
    let device = Device::cpu();
    let stream = device.stream()?;
    let source = |size, layout| Source::new(size, layout, 1);
    let weight = Weight::pack_experts(&stream, 3, |_| Ok(source([32, 64], LAYOUT)))?;
    let problem =
        GroupedMatmulProblem { weight: Some(LAYOUT), ..GroupedMatmulProblem::new(2, 3, 32, 64, DType::F32) };
    let (x, w) =
        (Tensor::zeros(&stream, &[2, 64], DType::F32)?, Tensor::zeros(&stream, &[3, 32, 64], DType::F32)?);
    let offsets = Tensor::zeros(&stream, &[4], DType::U32)?;
    let mut out = Tensor::empty(&stream, &[2, 32], DType::F32)?;
    let mut refused = |problem: GroupedMatmulProblem, w: MatmulB<'_>, expected: &str| {
        let result = GroupedMatmul::plan(&device, problem).and_then(|plan| {
            plan.run(&stream, GroupedMatmulArgs::new(x.view(), w, offsets.view(), out.view_mut()))
        });
        let message = result.expect_err(expected).to_string();
        assert!(message.starts_with("grouped_matmul: ") && message.contains(expected), "{message}");
    };
    refused(problem, w.view().into(), "a packed weight, as planned");
    refused(GroupedMatmulProblem { weight: None, ..problem }, (&weight).into(), "a matrix, as planned");
    let other = WeightLayout { group: 64, ..LAYOUT };
    refused(GroupedMatmulProblem { weight: Some(other), ..problem }, (&weight).into(), "as planned");
    let single = Weight::pack(&stream, &source([32, 64], LAYOUT))?;
    refused(problem, (&single).into(), "experts, rows and columns [3, 32, 64], got [1, 32, 64]");
    let bad = WeightLayout { group: 24, ..LAYOUT };
    refused(GroupedMatmulProblem { weight: Some(bad), ..problem }, (&weight).into(), "a group of 16, 32");
    let refused = |experts: usize, source: &dyn Fn(usize) -> Result<Source, Error>, expected: &str| {
        let message = Weight::pack_experts(&stream, experts, source).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    };
    refused(0, &|_| Ok(source([32, 64], LAYOUT)), "at least one");
    refused(2, &|expert| Ok(source([32 + expert, 64], LAYOUT)), "experts alike");
    refused(2, &|expert| Ok(source([32, 64], if expert == 0 { LAYOUT } else { other })), "experts alike");
    let blocks = WeightLayout { rows: 16, group: 64, zeros: false, ..LAYOUT };
    refused(2, &|_| Ok(source([40, 64], blocks)), "whole blocks of 16 rows");
    Ok(())
}
