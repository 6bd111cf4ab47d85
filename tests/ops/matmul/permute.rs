//! Columns in another order, by every kernel and on every device: bits are copied.

use abi::weight::Layout as WeightLayout;
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, any_values, dims, dims_from};
use warpforge::ops::matmul::{
    Matmul, MatmulArgs, MatmulProblem, PermuteColumns, PermuteColumnsArgs, PermuteColumnsProblem, RowNorm,
    reference,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::weight::{Part, Stack, Weight};
use warpforge::{DType, Device, Tensor};

use super::packed::{Source, layouts};

use crate::harness::{
    Layout, Rows, devices, every_kernel_of, expect_loaded, fail, floats, on_executors, values,
};

/// The entries that no product is.
pub(super) fn is_permutation(entry: &str) -> bool {
    entry.starts_with("permute_columns")
}

#[derive(Clone, Debug)]
struct Case {
    problem: PermuteColumnsProblem,
    x: Layout,
    out: Layout,
    /// Where the order begins.
    order_at: usize,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    let padding = prop_oneof![2 => Just(0usize), 1 => Just(8), 1 => 1usize..9];
    (padding, prop_oneof![3 => Just(0usize), 1 => 1usize..9])
        .prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let cols = prop_oneof![2 => dims_from(1, &[8, 64], 200), 1 => dims_from(1, &[2048], 2100)];
    let order_at = prop_oneof![Just(0usize), 1usize..6];
    (floats(), dims(&[4], 20), cols, (layout(), layout()), order_at, any_values(), any::<u64>()).prop_map(
        |(dtype, rows, cols, (x, out), order_at, kind, seed)| {
            let problem = PermuteColumnsProblem { rows, cols, dtype };
            Case { problem, x, out, order_at, kind, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        let PermuteColumnsProblem { rows, cols, .. } = self.problem;
        (rows * cols).next_multiple_of(2048) * 12
    }

    /// Any columns, some of them several times, and some that there are not.
    fn order(&self) -> Vec<u32> {
        let (cols, mut random) = (self.problem.cols, Rng::new(self.seed ^ 0x77));
        (0..cols)
            .map(|_| random.below(cols + 1) as u32)
            .map(|at| if at as usize == cols { u32::MAX } else { at })
            .collect()
    }

    fn run(&self, devices: &[Device]) -> Result<(), TestCaseError> {
        let PermuteColumnsProblem { rows, cols, dtype } = self.problem;
        let (x, order) = (values(self.kind, dtype, rows * cols, self.seed), self.order());
        let want = reference::permute_columns(&x, cols, &order);
        for device in devices {
            let stream = device.stream().map_err(fail)?;
            let plan = PermuteColumns::plan(device, self.problem).map_err(fail)?;
            let x = Rows::input(&stream, dtype, &x, cols, self.x).map_err(fail)?;
            let whole = [&vec![0; self.order_at][..], &order].concat();
            let whole = Tensor::from_slice(&stream, &[whole.len()], &whole).map_err(fail)?;
            let order = whole.view().slice(0, self.order_at..self.order_at + cols).map_err(fail)?;
            let mut out = Rows::output(&stream, dtype, rows, cols, self.out).map_err(fail)?;
            plan.run(&stream, PermuteColumnsArgs::new(x.view(), order, out.view_mut())).map_err(fail)?;
            let got = out.read(&stream)?;
            let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let same = std::iter::zip(bits(&got), bits(&want)).position(|(got, want)| got != want);
            prop_assert!(same.is_none(), "{device:?}: {:?}", same.map(|at| (at, got[at], want[at])));
        }
        Ok(())
    }
}

#[test]
fn every_permutation_is_simulated() -> Result<(), TestCaseError> {
    let entries = abi::ops::entries("matmul").filter(|entry| is_permutation(entry));
    every_kernel_of(entries, case(), Case::work, |cards, case, _| case.run(cards))
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    #[test]
    fn permuted_columns((case, on) in on_executors(case, Case::work)) {
        case.run(&on.devices())?;
    }
}

/// Sizes of 0, and what does not fit.
#[test]
fn permutation_of_nothing_and_mistakes() -> Result<(), TestCaseError> {
    for device in &devices() {
        let stream = device.stream()?;
        for (dtype, [rows, cols]) in
            DType::FLOATS.into_iter().flat_map(|dtype| [[0, 4], [4, 0], [0, 0]].map(|size| (dtype, size)))
        {
            let plan = PermuteColumns::plan(device, PermuteColumnsProblem::new(rows, cols, dtype))?;
            let x = Tensor::zeros(&stream, &[rows, cols], dtype)?;
            let order = Tensor::from_slice(&stream, &[cols], &vec![0u32; cols])?;
            let mut out = Tensor::zeros(&stream, &[rows, cols], dtype)?;
            plan.run(&stream, PermuteColumnsArgs::new(x.view(), order.view(), out.view_mut()))?;
        }
        let problem = PermuteColumnsProblem::new(2, 4, DType::F32);
        let plan = PermuteColumns::plan(device, problem)?;
        let (x, order) =
            (Tensor::zeros(&stream, &[2, 4], DType::F32)?, Tensor::from_slice(&stream, &[4], &[0u32; 4])?);
        let mut out = Tensor::zeros(&stream, &[2, 4], DType::F32)?;
        let mut says = |x: &Tensor, order: &Tensor, expected: &str| {
            let run = plan.run(&stream, PermuteColumnsArgs::new(x.view(), order.view(), out.view_mut()));
            let message = run.expect_err(expected).to_string();
            assert!(message.starts_with(expected), "{message}");
        };
        let more = Tensor::zeros(&stream, &[3, 4], DType::F32)?;
        says(&more, &order, "permute_columns: x: expected at most 2 rows, as planned, got 3");
        let other = Tensor::zeros(&stream, &[2, 4], DType::BF16)?;
        says(&other, &order, "permute_columns: x: expected f32, got bf16");
        let short = Tensor::from_slice(&stream, &[3], &[0u32; 3])?;
        says(&x, &short, "permute_columns: order: expected shape [4], got [3]");
        let floats = Tensor::zeros(&stream, &[4], DType::F32)?;
        says(&x, &floats, "permute_columns: order: expected u32, got f32");
        let message =
            PermuteColumns::supports(device, &PermuteColumnsProblem { dtype: DType::I8, ..problem });
        assert_eq!(
            message.expect_err("a type").to_string(),
            "permute_columns: problem: expected dtype f32, f16 or bf16, got i8"
        );
    }
    expect_loaded(abi::ops::entries("matmul").filter(|entry| is_permutation(entry)))
}

/// An order of columns that is none, or is not where it should be; and what takes no such weight.
#[test]
fn permuted_mistakes() -> Result<(), TestCaseError> {
    let layout = WeightLayout { permuted: true, ..layouts()[0] };
    let device = Device::cpu();
    let stream = device.stream()?;
    let pack = |layout: WeightLayout, order: Option<Vec<u32>>| {
        let source = Source::new([16, 8], layout, 1).with_order(order);
        Weight::pack(&stream, &source).map(|_| ()).map_err(|error| error.to_string())
    };
    let ordered = WeightLayout { permuted: false, ..layout };
    let order: Vec<u32> = (0..8).rev().collect();
    assert_eq!(pack(layout, Some(order.clone())), Ok(()));
    let refused = [
        (layout, None, "an order of columns, as the layout says, got none"),
        (ordered, Some(order.clone()), "no order of columns, as the layout says, got one"),
        (
            layout,
            Some(order[1..].to_vec()),
            "an order of 8 columns, each of them once, got 7 numbers, 7 of them",
        ),
        (layout, Some(vec![0, 1, 2, 3, 3, 5, 6, 7]), "got 8 numbers, 7 of them"),
        (layout, Some(vec![0, 1, 2, 3, 4, 5, 6, u32::MAX]), "got 8 numbers, 7 of them"),
        (layout, Some([&order[..], &[8]].concat()), "got 9 numbers, 8 of them"),
    ];
    for (layout, order, expected) in refused {
        let message = pack(layout, order).expect_err(expected);
        assert!(message.starts_with("Weight::pack: source: ") && message.contains(expected), "{message}");
    }
    let of_experts = Weight::pack_experts(&stream, 2, |_| Ok(Source::new([16, 8], layout, 1)));
    let message = of_experts.expect_err("experts").to_string();
    assert!(message.contains("columns that are in order, of several experts"), "{message}");

    let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(1, 16, 8, DType::BF16) };
    let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
    let message =
        Matmul::supports(&device, &MatmulProblem { norm, ..problem }).expect_err("a norm").to_string();
    assert!(message.contains("no norm of rows that are brought into a weight's order"), "{message}");
    // Two weights of different orders are no stack; nor is some of one's columns a part.
    let source = || Source::new([16, 8], layout, 1);
    let other = source().with_order(Some((0..8).rev().collect()));
    assert!(Stack::new(vec![source(), other]).is_none() && Stack::new(vec![source(), source()]).is_some());
    let cut = |cols| Part::new(source(), vec![0..8, 8..16], cols).is_some();
    assert!(cut(0..8) && !cut(0..4));
    // A plan takes no weight that is packed in another order than planned.
    let weight = Weight::pack(&stream, &Source::new([16, 8], ordered, 1))?;
    let a = Tensor::zeros(&stream, &[1, 8], DType::BF16)?;
    let mut out = Tensor::zeros(&stream, &[1, 16], DType::BF16)?;
    let plan = Matmul::plan(&device, problem)?;
    let run = plan.run(&stream, MatmulArgs::new(a.view(), &weight, out.view_mut()));
    let message = run.expect_err("another layout").to_string();
    assert!(message.contains("permuted: true") && message.contains("permuted: false"), "{message}");
    // Sizes of 0.
    for device in &devices() {
        let stream = device.stream()?;
        for [m, n, k] in [[0, 16, 64], [3, 0, 64], [3, 16, 0]] {
            let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(m, n, k, DType::BF16) };
            let weight = Weight::pack(&stream, &Source::new([n, k], layout, 1))?;
            let a = Tensor::zeros(&stream, &[m, k], DType::BF16)?;
            let mut out = Rows::output(&stream, DType::BF16, m, n, Layout::default())?;
            Matmul::plan(device, problem)?
                .run(&stream, MatmulArgs::new(a.view(), &weight, out.view_mut()))?;
            assert_eq!(out.read(&stream)?, vec![0.0; m * n], "{device:?} {m} {n} {k}");
        }
    }
    Ok(())
}
