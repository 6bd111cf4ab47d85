//! Packed tables: every layout, by every kernel, against the values that the layout stands for.

use abi::ops::embedding::{EmbeddingVariant, PACKED_VARIANTS};
use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_to;
use testkit::strategies::{dims, dims_from};
use warpforge::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem, reference};
use warpforge::ops::matmul::MatmulB;
use warpforge::weight::Weight;
use warpforge::{DType, Device, Error, Tensor};

use super::{ids, layout};
use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, every_kernel_of, fail, floats, on_executors, through_kernels,
};
use crate::matmul::packed::{Source, layouts};

#[derive(Clone, Debug)]
struct Case {
    problem: EmbeddingProblem,
    weight: WeightLayout,
    out: Layout,
    /// Whether some ids are beyond the table.
    has_invalid: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8], 40), dims_from(1, &[8, 16], 50), dims_from(1, &[64, 256, 1024], 1500));
    (sizes, select(layouts()), layout(), any::<bool>(), any::<u64>()).prop_map(
        |((dtype, tokens, vocab, cols), weight, out, has_invalid, seed)| {
            let problem = EmbeddingProblem::new(tokens, vocab, cols, dtype);
            let problem = EmbeddingProblem { weight: Some(weight), ..problem };
            Case { problem, weight, out, has_invalid, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        20 * self.problem.tokens * self.problem.cols.next_multiple_of(64)
    }

    /// With the kernel that `plan` chooses, or with a given one.
    fn run(&self, device: &Device, variant: Option<&'static EmbeddingVariant>) -> Result<(), TestCaseError> {
        let Case { problem, weight, out, has_invalid, seed } = *self;
        let EmbeddingProblem { tokens, vocab, cols, dtype, .. } = problem;
        let stream = device.stream().map_err(fail)?;
        let plan = match variant {
            None => Embedding::plan(device, problem),
            Some(variant) => Embedding::plan_with(device, problem, variant),
        };
        let plan = plan.map_err(fail)?;
        let source = Source::new([vocab, cols], weight, seed);
        let table = Weight::pack(&stream, &source).map_err(fail)?;
        let ids = ids(tokens, vocab, has_invalid, seed);
        let ids_tensor = Tensor::from_slice(&stream, &[tokens], &ids).map_err(fail)?;
        let mut out = Rows::output(&stream, dtype, tokens, cols, out).map_err(fail)?;
        plan.run(&stream, EmbeddingArgs::new(&table, ids_tensor.view(), out.view_mut())).map_err(fail)?;
        let rows = |table: &[f64]| reference::embedding(table, &ids, cols);
        let (want, sizes) = (rows(&source.values()), rows(&source.sizes()));
        let naive: Vec<f64> = want.iter().map(|&value| round_to(dtype, value)).collect();
        // Where the naive value is rounded once, the scale, its product and the difference are before.
        let tolerance = Tolerance { factor: 8.0, ..Tolerance::new(dtype, Scale::Given(&sizes), 4) };
        check(plan.report().variant, &out.read(&stream)?, &want, &naive, &tolerance)
    }
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in PACKED_VARIANTS.iter().filter(|variant| wanted(variant.entry)) {
            if Embedding::plan_with(device, case.problem, variant).is_ok() {
                case.run(device, Some(variant))?;
            }
        }
    }
    Ok(())
}

fn entries() -> impl Iterator<Item = &'static str> {
    PACKED_VARIANTS.iter().map(|variant| variant.entry)
}

/// Sizes of 0, through every kernel.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    let zeros: [fn(&mut Case); 2] =
        [|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.cols = 0];
    through_kernels(entries, &zeros, case(), Case::work, run_variants)
}

#[test]
fn every_packed_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel_of(entries(), case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn packed_planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            case.run(device, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_packed_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// What does not fit is an error that says so.
#[test]
fn packed_mistakes() -> Result<(), Error> {
    let weight = WeightLayout {
        codes: Codes::Int8,
        group: 32,
        rows: 1,
        scale: ScaleType::F16,
        zeros: false,
        minimums: false,
        permuted: false,
    };
    let device = Device::cpu();
    let stream = device.stream()?;
    let table = Weight::pack(&stream, &Source::new([32, 64], weight, 1))?;
    let matrix = Tensor::zeros(&stream, &[32, 64], DType::F32)?;
    let ids = Tensor::zeros(&stream, &[2], DType::U32)?;
    let mut out = Tensor::empty(&stream, &[2, 64], DType::F32)?;
    let problem = EmbeddingProblem { weight: Some(weight), ..EmbeddingProblem::new(2, 32, 64, DType::F32) };
    let mut refused = |problem: EmbeddingProblem, table: MatmulB<'_>, expected: &str| {
        let result = Embedding::plan(&device, problem)
            .and_then(|plan| plan.run(&stream, EmbeddingArgs::new(table, ids.view(), out.view_mut())));
        let message = result.expect_err(expected).to_string();
        assert!(message.starts_with("embedding: ") && message.contains(expected), "{message}");
    };
    refused(problem, matrix.view().into(), "table: expected a packed weight, as planned, got a matrix");
    let plain = EmbeddingProblem { weight: None, ..problem };
    refused(plain, (&table).into(), "table: expected a matrix, as planned, got a packed weight");
    refused(EmbeddingProblem { vocab: 33, ..problem }, (&table).into(), "rows and columns [1, 33, 64]");
    let other = EmbeddingProblem { weight: Some(WeightLayout { group: 64, ..weight }), ..problem };
    refused(other, (&table).into(), "as planned");
    let bad = EmbeddingProblem { weight: Some(WeightLayout { group: 24, ..weight }), ..problem };
    refused(bad, (&table).into(), "problem: expected a table with a group of 16, 32");
    Ok(())
}
