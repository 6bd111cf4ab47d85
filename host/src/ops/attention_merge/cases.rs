//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{AttentionMerge, AttentionMergeArgs, AttentionMergeProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMergeCase {
    /// Model and phase.
    pub name: &'static str,
    /// Queries.
    pub tokens: usize,
    /// Heads of a query.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

const fn case(name: &'static str, tokens: usize, heads: usize) -> AttentionMergeCase {
    AttentionMergeCase { name, tokens, heads, dim: 128 }
}

/// The shapes: queries of Qwen3-4B behind a prefix that they share, in a decode step and in prompts.
pub const CASES: &[AttentionMergeCase] =
    &[case("qwen3-4b decode 128", 128, 32), case("qwen3-4b prefill 2048", 2048, 32)];

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (shape, lses) = ([rows, 2, 64], [2, rows]);
    let plan = AttentionMerge::plan(device, AttentionMergeProblem::new(rows, 2, 64, dtype))?;
    let tensors = [
        tensor("a", &shape, dtype),
        tensor("a_lse", &lses, DType::F32),
        tensor("b", &shape, dtype),
        tensor("b_lse", &lses, DType::F32),
        tensor("out", &shape, dtype),
        tensor("lse", &lses, DType::F32),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [a, a_lse, b, b_lse, out, lse]| {
        let parts = [(a.as_view(), a_lse.as_view()), (b.as_view(), b_lse.as_view())];
        let args = AttentionMergeArgs::new(parts, out.reborrow());
        plan.run(stream, AttentionMergeArgs { lse: Some(lse.reborrow()), ..args })
    });
    Ok(vec![sample])
}
