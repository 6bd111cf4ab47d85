//! Weighted sums of table rows against their reference.

use abi::ops::embedding_bag::{EmbeddingBagVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::Store;
use warpforge::ops::embedding_bag::{EmbeddingBag, EmbeddingBagArgs, EmbeddingBagProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, on_executors, store,
    through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: EmbeddingBagProblem,
    table: Layout,
    out: Layout,
    kind: Values,
    /// Whether some ids are beyond the table.
    has_invalid: bool,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    (stride_padding(), prop_oneof![5 => Just(0usize), 1 => 1usize..9])
        .prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 40), 0usize..6, 1usize..40, dims_from(1, &[8, 64, 1024], 1500));
    let stores = prop_oneof![Just(Store::Replace), Just(Store::Add)];
    let layouts =
        prop_oneof![layout().prop_map(|all| [all; 2]), (layout(), layout()).prop_map(|(t, o)| [t, o])];
    let has_invalid = prop_oneof![3 => Just(false), 1 => Just(true)];
    (sizes, stores, layouts, finite_values(), has_invalid, any::<u64>()).prop_map(
        |((dtype, tokens, bag, vocab, cols), store, [table, out], kind, has_invalid, seed)| {
            let problem = EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, store };
            Case { problem, table, out, kind, has_invalid, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        let EmbeddingBagProblem { tokens, bag, cols, .. } = self.problem;
        tokens * cols * (3 * bag + 2)
    }

    /// Ids and weights of each token.
    fn bags(&self) -> Vec<(Vec<u32>, Vec<f32>)> {
        let EmbeddingBagProblem { tokens, bag, vocab, .. } = self.problem;
        let mut rng = Rng::new(self.seed ^ 7);
        let invalid = [vocab as u32, u32::MAX, 1 << 31];
        let mut entry = || {
            let id = match rng.below(8) {
                0 if self.has_invalid => invalid[rng.below(3)],
                _ => rng.below(vocab) as u32,
            };
            (id, [rng.uniform() as f32, 0.0, 1.0, -2.0][rng.below(4)])
        };
        (0..tokens).map(|_| (0..bag).map(|_| entry()).unzip()).collect()
    }
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static EmbeddingBagVariant>,
) -> Result<(), TestCaseError> {
    let EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, store: kind } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => EmbeddingBag::plan(device, case.problem),
        Some(variant) => EmbeddingBag::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let table = values(case.kind, dtype, vocab * cols, case.seed);
    let bags = case.bags();
    let ids: Vec<u32> = bags.iter().flat_map(|(ids, _)| ids).copied().collect();
    let weights: Vec<f32> = bags.iter().flat_map(|(_, weights)| weights).copied().collect();
    let table_rows = Rows::input(&stream, dtype, &table, cols, case.table).map_err(fail)?;
    let ids = Tensor::from_slice(&stream, &[tokens, bag], &ids).map_err(fail)?;
    let weights = Tensor::from_slice(&stream, &[tokens, bag], &weights).map_err(fail)?;
    let before = match kind {
        Store::Replace => vec![0.0; tokens * cols],
        Store::Add => values(case.kind, dtype, tokens * cols, case.seed ^ 1),
    };
    let mut out = match kind {
        Store::Replace => Rows::output(&stream, dtype, tokens, cols, case.out).map_err(fail)?,
        Store::Add => Rows::input(&stream, dtype, &before, cols, case.out).map_err(fail)?,
    };
    let (ids, weights) = (ids.view(), weights.view());
    let args = EmbeddingBagArgs { table: table_rows.view(), ids, weights, out: out.view_mut() };
    plan.run(&stream, args).map_err(fail)?;
    let (mut want, mut naive) = (before.clone(), before);
    let terms = reference::embedding_bag::<f64>(&table, &bags, &mut want, cols, |v| v);
    reference::embedding_bag::<f32>(&table, &bags, &mut naive, cols, store(dtype));
    let tolerance = Tolerance::new(dtype, Scale::Given(&terms), 2 * bag + 1);
    check(plan.report().variant, &out.read(&stream)?, &want, &naive, &tolerance)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == case.problem.dtype) {
            if wanted(variant.entry) && EmbeddingBag::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "embedding_bag",
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.bag = 0],
        case(),
        |case| 2 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("embedding_bag", case(), |case| 2 * case.work(), run_variants)
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
    fn every_variant((case, on) in on_executors(case, |case| 2 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let (dtype, store) = (DType::F32, Store::Replace);
        let problem = EmbeddingBagProblem { tokens: 4, bag: 2, vocab: 10, cols: 64, dtype, store };
        let plan = EmbeddingBag::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |table: [usize; 2], ids: [usize; 2], weights: DType, out: [usize; 2]| {
            let (table, ids, weights) =
                (tensor(&table, dtype)?, tensor(&ids, DType::U32)?, tensor(&ids, weights)?);
            let mut out = tensor(&out, dtype)?;
            let (table, ids, weights) = (table.view(), ids.view(), weights.view());
            let args = EmbeddingBagArgs { table, ids, weights, out: out.view_mut() };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message([11, 64], [4, 2], DType::F32, [4, 64])?,
            "embedding_bag: table: expected shape [10, 64], got [11, 64]"
        );
        assert_eq!(
            message([10, 64], [4, 3], DType::F32, [4, 64])?,
            "embedding_bag: ids: expected shape [any, 2], got [4, 3]"
        );
        assert_eq!(
            message([10, 64], [5, 2], DType::F32, [5, 64])?,
            "embedding_bag: ids: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message([10, 64], [4, 2], DType::BF16, [4, 64])?,
            "embedding_bag: weights: expected f32, got bf16"
        );
        assert_eq!(
            message([10, 64], [4, 2], DType::F32, [3, 64])?,
            "embedding_bag: out: expected shape [4, 64], got [3, 64]"
        );
        let (table, wide) = (tensor(&[10, 64], dtype)?, tensor(&[4, 3], DType::U32)?);
        let (weights, mut out) = (tensor(&[4, 2], DType::F32)?, tensor(&[4, 64], dtype)?);
        let ids = wide.view().slice(1, 0..2)?;
        let args =
            EmbeddingBagArgs { table: table.view(), ids, weights: weights.view(), out: out.view_mut() };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "embedding_bag: ids: expected a contiguous view, got gaps between the elements"
        );
        assert_eq!(
            EmbeddingBag::supports(device, &EmbeddingBagProblem { dtype: DType::I8, ..problem })
                .unwrap_err()
                .to_string(),
            "embedding_bag: problem: expected dtype f32, f16 or bf16, got i8"
        );
    }
    Ok(())
}
