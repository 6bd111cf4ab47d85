//! The grouped product against its reference.

pub(crate) mod fp8;
mod packed;

use std::collections::BTreeSet;

use abi::ops::glu::Activation;
use abi::ops::grouped_matmul::{
    GroupedMatmulTile, GroupedMatmulVariant, MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims_from, finite_values, stride_padding};
use warpforge::ops::grouped_matmul::reference::{self, Sizes};
use warpforge::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use warpforge::{Arch, DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, cards_of, check, devices, every_kernel_of, expect_loaded, fail, floats,
    is_new, on_executors, one_sm, runs, store, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: GroupedMatmulProblem,
    /// Rows of each expert.
    groups: Vec<usize>,
    x_layout: Layout,
    w_layout: Layout,
    out_layout: Layout,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![3 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

/// Rows of each expert: many experts with few, few with many, one with all; some with none.
fn groups() -> impl Strategy<Value = Vec<usize>> {
    let few = prop::collection::vec(prop_oneof![1 => Just(0usize), 3 => 0usize..4], 1..40);
    let many = prop::collection::vec(prop_oneof![1 => Just(0usize), 3 => dims_from(0, &[8, 64], 140)], 1..4);
    let one = (1usize..6, 0usize..6, 1usize..150).prop_map(|(experts, owner, rows)| {
        (0..experts).map(|expert| if expert == owner % experts { rows } else { 0 }).collect()
    });
    prop_oneof![3 => few, 2 => many, 1 => one]
}

fn case() -> impl Strategy<Value = Case> {
    let n = dims_from(1, &[8, 64], 140);
    let k = prop_oneof![3 => dims_from(1, &[8, 16, 32], 130), 1 => dims_from(1, &[128, 512], 600)];
    // Most experts of a token.
    let fan_out = prop_oneof![1 => Just(0usize), 1 => 1usize..5];
    let layouts = (layout(), layout(), layout(), any::<bool>());
    (floats(), groups(), n, k, fan_out, layouts, finite_values(), any::<u64>()).prop_map(
        |(dtype, groups, n, k, fan_out, (x_layout, w_layout, out_layout, in_pieces), kind, seed)| {
            // Half of the cases are what the tensor cores' kernels take.
            let (k, [x_layout, w_layout]) = if in_pieces {
                let whole = |size: usize| size.next_multiple_of(8);
                let pieces =
                    |Layout { padding, offset }| Layout { padding: whole(padding), offset: whole(offset) };
                (whole(k), [x_layout, w_layout].map(pieces))
            } else {
                (k, [x_layout, w_layout])
            };
            let rows: usize = groups.iter().sum();
            // The largest that divides the rows.
            let fan_out = (1..=fan_out).rev().find(|fan_out| rows.is_multiple_of(*fan_out));
            let from = fan_out.map_or(GroupedRows::Sorted, |fan_out| GroupedRows::Gathered { fan_out });
            let problem =
                GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, groups.len(), n, k, dtype) };
            Case { problem, groups, x_layout, w_layout, out_layout, kind, seed }
        },
    )
}

impl Case {
    fn offsets(&self) -> Vec<u32> {
        let ends = self.groups.iter().scan(0, |end, rows| {
            *end += *rows as u32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// A permutation of the rows.
    fn order(&self) -> Vec<u32> {
        let mut rng = Rng::new(self.seed ^ 7);
        let mut order: Vec<u32> = (0..self.problem.rows as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        order
    }

    fn fan_out(&self) -> Option<usize> {
        match self.problem.from {
            GroupedRows::Sorted => None,
            GroupedRows::Gathered { fan_out } => Some(fan_out),
        }
    }

    fn x_rows(&self) -> usize {
        self.problem.rows / self.fan_out().unwrap_or(1)
    }

    /// Of few rows: a warp per column and 8 rows; and blocks that find nothing.
    fn work(&self) -> usize {
        let GroupedMatmulProblem { rows, experts, n, k, .. } = self.problem;
        let slots: usize = self.groups.iter().map(|rows| rows.div_ceil(8)).sum();
        slots * n * (1500 + 4 * k) + (rows + experts) * n.div_ceil(32) * 256 * 20 + self.work_in_tiles()
    }

    /// Tiles of 64, whose operands are read from shared memory.
    fn work_in_tiles(&self) -> usize {
        let GroupedMatmulProblem { rows, experts, n, k, .. } = self.problem;
        let rows_of_tiles: usize = self.groups.iter().map(|rows| rows.next_multiple_of(64)).sum();
        let empty = (rows / 64 + experts) * n.div_ceil(64) * 256 * 20;
        rows_of_tiles * n.next_multiple_of(64) * (k + 100) / 8 + empty
    }
}

/// The kernels for a case; those of the tensor cores only if its operands are what they take.
fn variants(case: &Case) -> impl Iterator<Item = &'static GroupedMatmulVariant> + use<> {
    let GroupedMatmulProblem { k, dtype, .. } = case.problem;
    let in_pieces = |Layout { padding, offset }| (k + padding).is_multiple_of(8) && offset.is_multiple_of(8);
    let tensor = k.is_multiple_of(8) && in_pieces(case.x_layout) && in_pieces(case.w_layout);
    let tensor = MMA_VARIANTS.iter().chain(WGMMA_VARIANTS).filter(move |_| tensor);
    VARIANTS.iter().chain(tensor).filter(move |variant| variant.dtype == dtype)
}

/// Inputs as exact f64: x and the weights.
fn inputs(case: &Case) -> (Vec<f64>, Vec<f64>) {
    let GroupedMatmulProblem { experts, n, k, dtype, .. } = case.problem;
    let x = values(case.kind, dtype, case.x_rows() * k, case.seed);
    (x, values(case.kind, dtype, experts * n * k, case.seed ^ 1))
}

fn product(
    device: &Device,
    case: &Case,
    variant: Option<&'static GroupedMatmulVariant>,
    (x, w): (&[f64], &[f64]),
) -> Result<Vec<f64>, TestCaseError> {
    let GroupedMatmulProblem { rows, experts, n, k, dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => GroupedMatmul::plan(device, case.problem),
        Some(variant) => GroupedMatmul::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let x = Rows::input(&stream, dtype, x, k, case.x_layout).map_err(fail)?;
    let w = Rows::input(&stream, dtype, w, k, case.w_layout).map_err(fail)?;
    let offsets = Tensor::from_slice(&stream, &[experts + 1], &case.offsets()).map_err(fail)?;
    let order = Tensor::from_slice(&stream, &[rows], &case.order()).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, rows, n, case.out_layout).map_err(fail)?;
    let args = GroupedMatmulArgs {
        x: x.view(),
        w: w.view().reshape(&[experts, n, k]).map_err(fail)?.into(),
        offsets: offsets.view(),
        order: case.fan_out().map(|_| order.view()),
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;
    out.read(&stream)
}

/// The specification, the naive computation, and the sum of the terms' absolute values.
struct Expected {
    want: Vec<f64>,
    naive: Vec<f64>,
    terms: Vec<f64>,
}

impl Expected {
    fn of(case: &Case, (x, w): (&[f64], &[f64])) -> Self {
        Self::of_terms(case, (x, w), w)
    }

    /// Of weights whose values are the sums of terms of these sizes.
    fn of_terms(case: &Case, (x, w): (&[f64], &[f64]), w_sizes: &[f64]) -> Self {
        let GroupedMatmulProblem { n, k, dtype, .. } = case.problem;
        let sizes = Sizes { n, k, fan_out: case.fan_out(), gate: None };
        let (offsets, order) = (case.offsets(), case.order());
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
        let (x_terms, w_terms) = (absolute(x), absolute(w_sizes));
        Expected {
            want: reference::grouped_matmul::<f64>(x, w, &offsets, &order, sizes, |v| v),
            naive: reference::grouped_matmul::<f32>(x, w, &offsets, &order, sizes, store(dtype)),
            terms: reference::grouped_matmul::<f64>(&x_terms, &w_terms, &offsets, &order, sizes, |v| v),
        }
    }

    fn check(&self, what: &str, got: &[f64], case: &Case) -> Result<(), TestCaseError> {
        let GroupedMatmulProblem { k, dtype, .. } = case.problem;
        let tolerance = Tolerance::new(dtype, Scale::Given(&self.terms), k + 1);
        check(what, got, &self.want, &self.naive, &tolerance)
    }
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let (x, w) = inputs(case);
    let mut expected = None;
    for device in cards {
        for variant in variants(case).filter(|v| runs(device, v.floor) && wanted(v.entry)) {
            let got = product(device, case, Some(variant), (&x, &w))?;
            let expected = expected.get_or_insert_with(|| Expected::of(case, (&x, &w)));
            expected.check(variant.entry, &got, case)?;
        }
    }
    Ok(())
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    let plain =
        abi::ops::entries("grouped_matmul").filter(|entry| !packed::is_packed(entry) && !fp8::is_fp8(entry));
    every_kernel_of(plain, case(), |case| 4 * case.work(), run_variants)
}

/// Few rows of each expert, fewer than 8 on the CPU's account, and contiguous.
fn few_rows() -> impl Strategy<Value = Case> {
    let groups = prop::collection::vec(0usize..9, 1..12)
        .prop_filter("rows", |groups| groups.iter().sum::<usize>() > 0);
    let sizes = (dims_from(1, &[8, 64], 70), dims_from(1, &[16, 64], 100));
    (floats(), groups, sizes, any::<u64>())
        .prop_map(|(dtype, groups, (n, k), seed)| contiguous(dtype, groups, n, 8 * k, seed))
}

fn contiguous(dtype: DType, groups: Vec<usize>, n: usize, k: usize, seed: u64) -> Case {
    let (rows, from) = (groups.iter().sum(), GroupedRows::Gathered { fan_out: 1 });
    let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, groups.len(), n, k, dtype) };
    let place = Layout::default();
    let (x_layout, w_layout, out_layout) = (place, place, place);
    Case { problem, groups, x_layout, w_layout, out_layout, kind: Values::Normal, seed }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        let (x, w) = inputs(&case);
        let expected = Expected::of(&case, (&x, &w));
        for device in &on.devices() {
            let got = product(device, &case, None, (&x, &w))?;
            expected.check(&format!("{device:?}"), &got, &case)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 10 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A row gives the same bits alone and among others, and by all kernels of a kind.
    #[test]
    fn rows_are_independent((case, on) in on_executors(few_rows, |case| 24 * case.work())) {
        let (x, w) = inputs(&case);
        let GroupedMatmulProblem { rows, n, k, .. } = case.problem;
        let row = case.seed as usize % rows;
        let expert = case.offsets()[1..].iter().filter(|&&end| end as usize <= row).count();
        let mut groups = vec![0; case.groups.len()];
        groups[expert] = 1;
        let alone = contiguous(case.problem.dtype, groups, n, k, case.seed);
        let from = case.order()[row] as usize;
        for device in &on.devices() {
            let mut seen: [Option<Vec<f64>>; 5] = Default::default();
            for variant in variants(&case).filter(|variant| device.limits().is_none() || runs(device, variant.floor)) {
                let together = product(device, &case, Some(variant), (&x, &w))?;
                let apart = product(device, &alone, Some(variant), (&x[from * k..][..k], &w))?;
                prop_assert_eq!(&together[row * n..][..n], &apart[..], "{} {:?}", variant.entry, device);
                let kind = match variant.tile {
                    GroupedMatmulTile::Gemv { .. } => 0,
                    GroupedMatmulTile::Simt { .. } => 1,
                    GroupedMatmulTile::Stream { .. } => 2,
                    GroupedMatmulTile::Mma { .. } => 3,
                    GroupedMatmulTile::Wgmma { .. } => 4,
                };
                prop_assert_eq!(seen[kind].get_or_insert_with(|| together.clone()), &together);
            }
        }
    }
}

/// Gated products: few rows, some without, of any layout and size of values.
fn gated() -> impl Strategy<Value = Case> {
    let activations = [Activation::Silu, Activation::GeluTanh, Activation::GeluErf];
    (case(), prop::collection::vec(0usize..4, 1..8), prop::sample::select(activations.to_vec())).prop_map(
        |(case, groups, activation)| {
            let (rows, experts, from) = (groups.iter().sum(), groups.len(), GroupedRows::Sorted);
            let problem =
                GroupedMatmulProblem { rows, experts, from, gate: Some(activation), ..case.problem };
            Case { problem, groups, ..case }
        },
    )
}

/// Those of [`gated`] by its own kernels, or by what `plan` chooses: against the definition.
fn check_gated(
    device: &Device,
    case: &Case,
    variant: Option<&'static GroupedMatmulVariant>,
) -> Result<(), TestCaseError> {
    let GroupedMatmulProblem { rows, experts, n, k, dtype, gate, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => GroupedMatmul::plan(device, case.problem),
        Some(variant) => GroupedMatmul::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let x = values(case.kind, dtype, rows * k, case.seed);
    let w = values(case.kind, dtype, experts * 2 * n * k, case.seed ^ 1);
    let x_rows = Rows::input(&stream, dtype, &x, k, case.x_layout).map_err(fail)?;
    let w_rows = Rows::input(&stream, dtype, &w, k, case.w_layout).map_err(fail)?;
    let offsets = Tensor::from_slice(&stream, &[experts + 1], &case.offsets()).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, rows, n, case.out_layout).map_err(fail)?;
    let w_view = w_rows.view().reshape(&[experts, 2 * n, k]).map_err(fail)?;
    let args = GroupedMatmulArgs::new(x_rows.view(), w_view, offsets.view(), out.view_mut());
    plan.run(&stream, args).map_err(fail)?;
    let got = out.read(&stream)?;

    let (offsets, order): (_, Vec<u32>) = (case.offsets(), (0..rows as u32).collect());
    let sizes = Sizes { n, k, fan_out: None, gate };
    // As in the products of one weight: tensor cores take a subnormal f16 for one of the smallest normal exponent.
    let least = if dtype == DType::F16 { testkit::round::min_normal(DType::F16) } else { 0.0 };
    let size = |&value: &f64| if value == 0.0 { 0.0 } else { value.abs().max(least) };
    let absolute = |values: &[f64]| values.iter().map(size).collect::<Vec<f64>>();
    let plain = Sizes { n: 2 * n, gate: None, ..sizes };
    let sums = reference::grouped_matmul::<f64>(&absolute(&x), &absolute(&w), &offsets, &order, plain, |v| v);
    let factors = |index: usize| {
        let of_row = &sums[index / n * 2 * n..][..2 * n];
        [of_row[index % n], of_row[n + index % n]]
    };
    let terms: Vec<f64> = (0..rows * n).map(|index| factors(index).iter().product()).collect();
    let largest = |(index, term): (usize, &f64)| factors(index).into_iter().fold(*term, f64::max);
    let on_the_way: Vec<f64> = terms.iter().enumerate().map(largest).collect();
    let added = vec![0.0; rows * n];
    let want = reference::grouped_matmul::<f64>(&x, &w, &offsets, &order, sizes, |v| v);
    let naive = reference::grouped_matmul::<f32>(&x, &w, &offsets, &order, sizes, store(dtype));
    let is_cut = dtype != DType::F32;
    let roundings = if is_cut { 4 * k } else { k } + 10;
    let tolerance = Tolerance {
        on_the_way: Some(&on_the_way),
        activated: Some(&added),
        ..Tolerance::new(dtype, Scale::Given(&terms), roundings)
    };
    let what = variant.map_or_else(|| format!("{device:?}"), |variant| variant.entry.into());
    check(&what, &got, &want, &naive, &tolerance)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Gated linear units, by what `plan` chooses and by every kernel that makes them.
    #[test]
    fn gated_units((case, on) in on_executors(gated, |case| 16 * case.work())) {
        for device in &on.devices() {
            check_gated(device, &case, None)?;
            let few = |v: &&GroupedMatmulVariant| {
                matches!(v.tile, GroupedMatmulTile::Gemv { .. } | GroupedMatmulTile::Stream { rows: 8, .. })
            };
            let can = |v: &&GroupedMatmulVariant| device.limits().is_some() && runs(device, v.floor);
            for variant in variants(&case).filter(few).filter(can) {
                check_gated(device, &case, Some(variant))?;
            }
        }
    }
}

/// Sizes of 0 and 1 through every kernel, also where no plan would choose it: an empty sum is 0, and an empty product
/// nothing.
pub fn nothing() -> Result<(), TestCaseError> {
    let sizes = [0, 1, 6]
        .into_iter()
        .flat_map(|rows| [0, 1, 70].into_iter().flat_map(move |n| [0, 1].map(|k| [rows, n, k])));
    let mut done = BTreeSet::new();
    for device in &devices() {
        let stream = device.stream()?;
        for ([rows, n, k], dtype) in sizes.clone().flat_map(|sizes| DType::FLOATS.map(|dtype| (sizes, dtype)))
        {
            let case = contiguous(dtype, vec![rows.min(1), rows - rows.min(1)], n, k, 0);
            let problem = GroupedMatmulProblem { from: GroupedRows::Sorted, ..case.problem };
            let own = variants(&case).filter(|variant| runs(device, variant.floor));
            for variant in std::iter::once(None).chain(own.map(Some)) {
                if variant.is_some_and(|variant| !is_new(device, &mut done, (variant.entry, [rows, n, k]))) {
                    continue;
                }
                let plan = match variant {
                    None => GroupedMatmul::plan(device, problem)?,
                    Some(variant) => GroupedMatmul::plan_with(device, problem, variant)?,
                };
                let tensor = |shape: &[usize]| {
                    let ones = vec![1.0; shape.iter().product()];
                    Tensor::from_bytes(&stream, shape, dtype, &testkit::round::encode(dtype, &ones))
                };
                let (x, w) = (tensor(&[rows, k])?, tensor(&[2, n, k])?);
                let offsets = Tensor::from_slice(&stream, &[3], &case.offsets())?;
                let mut out = Rows::output(&stream, dtype, rows, n, Layout::default())?;
                let args = GroupedMatmulArgs {
                    x: x.view(),
                    w: w.view().into(),
                    offsets: offsets.view(),
                    order: None,
                    out: out.view_mut(),
                };
                let what = format!("{:?} {rows} {n} {k} {}", device.place(), plan.report().variant);
                plan.run(&stream, args).map_err(|error| fail(format!("{what}: {error}")))?;
                assert_eq!(out.read(&stream)?, vec![k as f64; rows * n], "{what}");
            }
        }
    }
    expect_loaded(
        abi::ops::entries("grouped_matmul").filter(|entry| !packed::is_packed(entry) && !fp8::is_fp8(entry)),
    )?;
    packed::nothing()?;
    fp8::nothing()
}

/// Rows of no expert stay as they are, and wrong offsets and orders reach nothing that is out of bounds.
#[test]
fn foreign_rows_and_wrong_indices() -> Result<(), TestCaseError> {
    let from = GroupedRows::Gathered { fan_out: 2 };
    for (dtype, rows) in [(DType::F32, 4), (DType::F32, 140), (DType::BF16, 4), (DType::BF16, 140)] {
        let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, 3, 4, 8, dtype) };
        for device in &devices() {
            let stream = device.stream()?;
            let plan = GroupedMatmul::plan(device, problem)?;
            let filled = |value: f64, rows: usize, cols: usize| {
                Rows::input(&stream, dtype, &vec![value; rows * cols], cols, Layout::default())
            };
            let (x, w) = (filled(1.0, rows / 2, 8)?, filled(1.0, 12, 8)?);
            let run = |offsets: [u32; 4], order: &[u32]| -> Result<Vec<f64>, TestCaseError> {
                let offsets = Tensor::from_slice(&stream, &[4], &offsets)?;
                let order = Tensor::from_slice(&stream, &[rows], order)?;
                let mut out = filled(-1.0, rows, 4)?;
                let args = GroupedMatmulArgs {
                    x: x.view(),
                    w: w.view().reshape(&[3, 4, 8])?.into(),
                    offsets: offsets.view(),
                    order: Some(order.view()),
                    out: out.view_mut(),
                };
                plan.run(&stream, args)?;
                out.read(&stream)
            };
            let order: Vec<u32> = (0..rows as u32).collect();
            let last = rows as u32 - 1;
            let got = run([0, 1, 1, last], &order)?;
            let want = [vec![8.0; 4 * last as usize], vec![-1.0; 4]].concat();
            assert_eq!(got, want, "{device:?}");
            let got = run([0, 1, u32::MAX, u32::MAX], &vec![u32::MAX; rows])?;
            assert!(got.iter().all(|&value| value == 8.0 || value == -1.0), "{device:?}");
            run([u32::MAX, 2, 1, 0], &order)?;
            run([1 << 31, 3, 0, 1 << 31], &order)?;
        }
    }
    Ok(())
}

/// More rows than a tile has, none and one, by every kernel of the tensor cores: properties have few cases so large.
#[test]
fn tensor_tiles() -> Result<(), TestCaseError> {
    for variant in MMA_VARIANTS {
        let case = contiguous(variant.dtype, vec![130, 0, 1], 72, 40, 3);
        let (x, w) = inputs(&case);
        let got = product(&cards_of(Arch::Sm80)[0], &case, Some(variant), (&x, &w))?;
        Expected::of(&case, (&x, &w)).check(variant.entry, &got, &case)?;
    }
    Ok(())
}

/// Weights with a gap between them, by every kernel: the bits are those of weights without.
#[test]
fn strides_between_weights() -> Result<(), TestCaseError> {
    let (n, k, gap) = (40, 24, 16);
    for dtype in DType::FLOATS {
        let case = contiguous(dtype, vec![3, 0, 20, 1], n, k, 9);
        let GroupedMatmulProblem { rows, experts, .. } = case.problem;
        let (x, w) = inputs(&case);
        let rest = vec![f64::NAN; gap * k];
        let spread: Vec<f64> = w.chunks(n * k).flat_map(|weight| [weight, &rest].concat()).collect();
        for device in &devices() {
            let stream = device.stream()?;
            for variant in
                variants(&case).filter(|variant| device.limits().is_none() || runs(device, variant.floor))
            {
                let x_rows = Rows::input(&stream, dtype, &x, k, Layout::default())?;
                let w_rows = Rows::input(&stream, dtype, &spread, k, Layout::default())?;
                let offsets = Tensor::from_slice(&stream, &[experts + 1], &case.offsets())?;
                let order = Tensor::from_slice(&stream, &[rows], &case.order())?;
                let mut out = Rows::output(&stream, dtype, rows, n, Layout::default())?;
                let args = GroupedMatmulArgs {
                    x: x_rows.view(),
                    w: w_rows.view().reshape(&[experts, n + gap, k])?.slice(1, 0..n)?.into(),
                    offsets: offsets.view(),
                    order: Some(order.view()),
                    out: out.view_mut(),
                };
                GroupedMatmul::plan_with(device, case.problem, variant)?.run(&stream, args)?;
                let want = product(device, &case, Some(variant), (&x, &w))?;
                assert_eq!(out.read(&stream)?, want, "{} {device:?}", variant.entry);
            }
        }
    }
    Ok(())
}

/// Tiles one after the other in one block have the bits that they have in blocks of their own: of experts near and far,
/// of some rows or all, with fewer steps than there are stages and with more.
#[test]
fn tiles_of_one_block() -> Result<(), TestCaseError> {
    let (own, one_sm) = (&cards_of(Arch::Sm90a)[0], &one_sm());
    for (variant, (n, k)) in std::iter::zip(WGMMA_VARIANTS, [(264, 72), (136, 264)]) {
        for from in [GroupedRows::Gathered { fan_out: 1 }, GroupedRows::Sorted] {
            let mut groups = vec![0; 40];
            [groups[1], groups[33]] = [130, 3];
            let mut case = contiguous(variant.dtype, groups, n, k, 5);
            case.problem.from = from;
            let (x, w) = inputs(&case);
            let run = |device| product(device, &case, Some(variant), (&x, &w));
            let got = run(one_sm)?;
            Expected::of(&case, (&x, &w)).check(variant.entry, &got, &case)?;
            prop_assert_eq!(got, run(own)?, "{}", variant.entry);
        }
    }
    Ok(())
}

/// Sorted rows that are one row, as after a broadcast, have its bits: they are not for tensor maps.
#[test]
fn rows_over_each_other() -> Result<(), TestCaseError> {
    for variant in WGMMA_VARIANTS {
        let mut case = contiguous(variant.dtype, vec![3, 0, 2], 264, 72, 5);
        case.problem.from = GroupedRows::Sorted;
        let GroupedMatmulProblem { rows, experts, n, k, dtype, .. } = case.problem;
        let (x, w) = inputs(&case);
        let row = &x[..k];
        let want = product(&cards_of(Arch::Sm90a)[0], &case, Some(variant), (&row.repeat(rows), &w))?;
        let device = &cards_of(Arch::Sm90a)[0];
        let stream = device.stream()?;
        let x_row = Rows::input(&stream, dtype, row, k, Layout::default())?;
        let w_rows = Rows::input(&stream, dtype, &w, k, Layout::default())?;
        let offsets = Tensor::from_slice(&stream, &[experts + 1], &case.offsets())?;
        let mut out = Rows::output(&stream, dtype, rows, n, Layout::default())?;
        let args = GroupedMatmulArgs {
            x: x_row.view().repeat(0, rows)?,
            w: w_rows.view().reshape(&[experts, n, k])?.into(),
            offsets: offsets.view(),
            order: None,
            out: out.view_mut(),
        };
        GroupedMatmul::plan_with(device, case.problem, variant)?.run(&stream, args)?;
        assert_eq!(out.read(&stream)?, want, "{}", variant.entry);
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let dtype = DType::BF16;
    let from = GroupedRows::Gathered { fan_out: 2 };
    let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(4, 3, 6, 8, dtype) };
    for device in &devices() {
        let stream = device.stream()?;
        let message =
            |from, x: &[usize], w: &[usize], offsets: usize, order: Option<usize>, out: &[usize]| {
                let plan = GroupedMatmul::plan(device, GroupedMatmulProblem { from, ..problem })?;
                let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
                let (x, w, mut out) = (tensor(x, dtype)?, tensor(w, dtype)?, tensor(out, dtype)?);
                let offsets = tensor(&[offsets], DType::U32)?;
                let order = order.map(|order| tensor(&[order], DType::U32)).transpose()?;
                let args = GroupedMatmulArgs {
                    x: x.view(),
                    w: w.view().into(),
                    offsets: offsets.view(),
                    order: order.as_ref().map(Tensor::view),
                    out: out.view_mut(),
                };
                Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
            };
        let w = &[3, 6, 8];
        assert_eq!(
            message(from, &[3, 8], w, 4, Some(6), &[6, 6])?,
            "grouped_matmul: out: expected at most 4 rows, as planned, got 6"
        );
        assert_eq!(
            message(from, &[2, 8], w, 4, Some(3), &[3, 6])?,
            "grouped_matmul: out: expected a multiple of 2 rows, got 3"
        );
        assert_eq!(
            message(from, &[4, 8], w, 4, Some(4), &[4, 6])?,
            "grouped_matmul: x: expected shape [2, 8], got [4, 8]"
        );
        assert_eq!(
            message(from, &[2, 8], &[2, 6, 8], 4, Some(4), &[4, 6])?,
            "grouped_matmul: w: expected shape [3, 6, 8], got [2, 6, 8]"
        );
        assert_eq!(
            message(from, &[2, 8], w, 3, Some(4), &[4, 6])?,
            "grouped_matmul: offsets: expected shape [4], got [3]"
        );
        assert_eq!(
            message(from, &[2, 8], w, 4, None, &[4, 6])?,
            "grouped_matmul: order: expected a tensor, as planned, got none"
        );
        assert_eq!(
            message(GroupedRows::Sorted, &[4, 8], w, 4, Some(4), &[4, 6])?,
            "grouped_matmul: order: expected none, as planned, got a tensor"
        );
        let refused = |problem| GroupedMatmul::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(GroupedMatmulProblem { experts: 0, ..problem }),
            "grouped_matmul: problem: expected at least one expert, got 0"
        );
        assert_eq!(
            refused(GroupedMatmulProblem { from: GroupedRows::Gathered { fan_out: 0 }, ..problem }),
            "grouped_matmul: problem: expected a fan_out of at least 1, got 0"
        );
        assert_eq!(
            refused(GroupedMatmulProblem { dtype: DType::I8, ..problem }),
            "grouped_matmul: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(GroupedMatmulProblem { n: 1 << 20, k: 1 << 11, ..problem }),
            "grouped_matmul: problem: expected size of a weight below 2^31, got 2147483648"
        );
    }
    Ok(())
}
