//! Embedding against its reference: bit by bit; of packed tables within its bound.

mod packed;

use abi::ops::embedding::{EmbeddingVariant, VARIANTS};
use half::bf16;
use proptest::prelude::*;
use testkit::strategies::{Rng, any_values, dims, dims_from, stride_padding};
use warpforge::ops::embedding::reference;
use warpforge::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel_of, fail, floats, on_executors,
    through_kernels, values,
};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    tokens: usize,
    vocab: usize,
    cols: usize,
    table: Layout,
    out: Layout,
    kind: testkit::strategies::Values,
    /// Whether some ids are beyond the table.
    has_invalid: bool,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
        .prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 70), 1usize..60, dims_from(1, &[8, 128, 1024], 3000));
    (sizes, layout(), layout(), any_values(), any::<bool>(), any::<u64>()).prop_map(
        |((dtype, tokens, vocab, cols), table, out, kind, has_invalid, seed)| Case {
            dtype,
            tokens,
            vocab,
            cols,
            table,
            out,
            kind,
            has_invalid,
            seed,
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        5 * self.tokens * self.cols
    }
}

/// Rows of a table, perhaps some that it does not have.
fn ids(tokens: usize, vocab: usize, has_invalid: bool, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed ^ 7);
    let invalid = [vocab as u32, u32::MAX, 1 << 31];
    let mut draw = || match rng.below(4) {
        0 if has_invalid => invalid[rng.below(3)],
        _ => rng.below(vocab) as u32,
    };
    (0..tokens).map(|_| draw()).collect()
}

/// Runs the case on a device, with the kernel that `plan` chooses or with a given one.
fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static EmbeddingVariant>,
) -> Result<(), TestCaseError> {
    let Case { dtype, tokens, vocab, cols, has_invalid, seed, .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let problem = EmbeddingProblem::new(tokens, vocab, cols, dtype);
    let plan = match variant {
        None => Embedding::plan(device, problem),
        Some(variant) => Embedding::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let data = values(case.kind, dtype, vocab * cols, case.seed);
    let ids = ids(tokens, vocab, has_invalid, seed);
    let table = Rows::input(&stream, dtype, &data, cols, case.table).map_err(fail)?;
    let ids_tensor = Tensor::from_slice(&stream, &[tokens], &ids).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, tokens, cols, case.out).map_err(fail)?;
    let args = EmbeddingArgs::new(table.view(), ids_tensor.view(), out.view_mut());
    plan.run(&stream, args).map_err(fail)?;
    let (got, want) = (out.read(&stream)?, reference::embedding(&data, &ids, cols));
    prop_assert_eq!(got.len(), want.len());
    for (index, (got, want)) in std::iter::zip(got, want).enumerate() {
        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        prop_assert!(same, "{}: element {index} is {got:e}, expected {want:e}", plan.report().variant);
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let Case { dtype, tokens, vocab, cols, .. } = *case;
    for device in cards {
        for variant in VARIANTS {
            if wanted(variant.entry)
                && Embedding::plan_with(device, EmbeddingProblem::new(tokens, vocab, cols, dtype), variant)
                    .is_ok()
            {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    let plain = || VARIANTS.iter().map(|variant| variant.entry);
    through_kernels(plain, &[|case: &mut Case| case.tokens = 0], case(), Case::work, run_variants)?;
    packed::nothing()
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel_of(VARIANTS.iter().map(|variant| variant.entry), case(), Case::work, run_variants)
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

/// Every bit pattern of bf16 survives, also NaN payloads; an id beyond the table gives all ones and spoils no other
/// row.
#[test]
fn bits_are_kept() -> Result<(), Error> {
    for device in &devices_for(5 << 16) {
        let stream = device.stream()?;
        for cols in [256, 255] {
            let vocab = (1 << 16) / cols;
            let patterns: Vec<bf16> = (0..vocab * cols).map(|bits| bf16::from_bits(bits as u16)).collect();
            let table = Tensor::from_slice(&stream, &[vocab, cols], &patterns)?;
            let ids: Vec<u32> = (0..vocab as u32).rev().chain([vocab as u32, 0, u32::MAX]).collect();
            let ids_tensor = Tensor::from_slice(&stream, &[ids.len()], &ids)?;
            let mut out = Tensor::zeros(&stream, &[ids.len(), cols], DType::BF16)?;
            let problem = EmbeddingProblem::new(ids.len(), vocab, cols, DType::BF16);
            let args = EmbeddingArgs::new(table.view(), ids_tensor.view(), out.view_mut());
            Embedding::plan(device, problem)?.run(&stream, args)?;
            let out: Vec<u16> = out.to_vec::<bf16>(&stream)?.into_iter().map(bf16::to_bits).collect();
            for (row, &id) in std::iter::zip(out.chunks(cols), &ids) {
                let want: Vec<u16> = match patterns.chunks(cols).nth(id as usize) {
                    Some(row) => row.iter().map(|value| value.to_bits()).collect(),
                    None => vec![0xffff; cols],
                };
                assert_eq!(row, want, "{device:?}: id {id}");
            }
        }
    }
    Ok(())
}

/// The part of a table that one device holds: columns of wider rows.
#[test]
fn part_of_a_wider_table() -> Result<(), Box<dyn std::error::Error>> {
    for device in &devices() {
        let stream = device.stream()?;
        for (start, cols) in [(32, 64), (3, 61)] {
            let data = values(testkit::strategies::Values::Normal, DType::F16, 10 * 128, 3);
            let table = Rows::input(&stream, DType::F16, &data, 128, Layout::default())?;
            let ids = [9u32, 0, 4];
            let ids_tensor = Tensor::from_slice(&stream, &[3], &ids)?;
            let mut out = Rows::output(&stream, DType::F16, 3, cols, Layout::default())?;
            let problem = EmbeddingProblem::new(8, 10, cols, DType::F16);
            let part = table.view().slice(1, start..start + cols)?;
            let args = EmbeddingArgs::new(part, ids_tensor.view(), out.view_mut());
            Embedding::plan(device, problem)?.run(&stream, args)?;
            let want: Vec<f64> =
                ids.iter().flat_map(|&id| &data[id as usize * 128 + start..][..cols]).copied().collect();
            assert_eq!(out.read(&stream).map_err(|error| error.to_string())?, want);
        }
    }
    Ok(())
}

/// Empty problems are done without an error.
#[test]
fn empty() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        for (tokens, vocab, cols) in [(0, 5, 8), (3, 5, 0), (0, 0, 0), (2, 0, 8)] {
            let problem = EmbeddingProblem::new(tokens, vocab, cols, DType::F32);
            let table = Tensor::zeros(&stream, &[vocab, cols], DType::F32)?;
            let ids = Tensor::zeros(&stream, &[tokens], DType::U32)?;
            let mut out = Tensor::zeros(&stream, &[tokens, cols], DType::F32)?;
            let args = EmbeddingArgs::new(table.view(), ids.view(), out.view_mut());
            Embedding::plan(device, problem)?.run(&stream, args)?;
            let out: Vec<f32> = out.to_vec(&stream)?;
            assert!(out.iter().all(|value| value.is_nan()), "an empty table has no valid id");
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = EmbeddingProblem::new(4, 10, 64, DType::F32);
        let plan = Embedding::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |table: &Tensor, ids: &Tensor, out: &mut Tensor| {
            let args = EmbeddingArgs::new(table.view(), ids.view(), out.view_mut());
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (table, ids) = (tensor(&[10, 64], DType::F32)?, tensor(&[4], DType::U32)?);
        let mut out = tensor(&[4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[9, 64], DType::F32)?, &ids, &mut out),
            "embedding: table: expected shape [10, 64], got [9, 64]"
        );
        assert_eq!(
            message(&tensor(&[10, 64], DType::BF16)?, &ids, &mut out),
            "embedding: table: expected f32, got bf16"
        );
        assert_eq!(
            message(&table, &tensor(&[4], DType::I32)?, &mut out),
            "embedding: ids: expected u32, got i32"
        );
        assert_eq!(
            message(&table, &ids, &mut tensor(&[3, 64], DType::F32)?),
            "embedding: out: expected shape [4, 64], got [3, 64]"
        );
        assert_eq!(
            message(&table, &tensor(&[5], DType::U32)?, &mut tensor(&[5, 64], DType::F32)?),
            "embedding: ids: expected at most 4 ids, as planned, got 5"
        );
        let wide = tensor(&[4, 2], DType::U32)?;
        let every_other = wide.view().slice(1, 0..1)?.reshape(&[4])?;
        let args = EmbeddingArgs::new(table.view(), every_other, out.view_mut());
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "embedding: ids: expected stride 1 in the last dimension, got 2"
        );
        let refused = |problem| Embedding::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(EmbeddingProblem { dtype: DType::I8, ..problem }),
            "embedding: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(EmbeddingProblem { vocab: 1 << 31, ..problem }),
            "embedding: problem: expected vocab below 2^31, got 2147483648"
        );
    }
    Ok(())
}
