//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{MoePermute, MoePermuteArgs, MoePermuteProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{Experts, GLM_4_7_FLASH_EXPERTS, QWEN3_CODER_30B_EXPERTS, QWEN3_CODER_NEXT_EXPERTS};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct MoePermuteCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts.
    pub experts: usize,
}

const fn case(name: &'static str, phase: Phase, model: Experts) -> MoePermuteCase {
    MoePermuteCase { name, tokens: phase.tokens(), top_k: model.top_k, experts: model.count }
}

/// The shapes.
pub const CASES: &[MoePermuteCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-coder-30b" => (QWEN3_CODER_30B_EXPERTS),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT_EXPERTS),
        "glm-4.7-flash" => (GLM_4_7_FLASH_EXPERTS),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator; no tensor has the type.
pub fn samples(device: &Device, tokens: usize, _: DType) -> Result<Vec<Sample>, Error> {
    let (top_k, experts) = (2, 8);
    let plan = MoePermute::plan(device, MoePermuteProblem::new(tokens, top_k, experts))?;
    let tensors = [
        tensor("ids", &[tokens, top_k], DType::U32),
        tensor("offsets", &[experts + 1], DType::U32),
        tensor("order", &[tokens * top_k], DType::U32),
        tensor("positions", &[tokens, top_k], DType::U32),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [ids, offsets, order, positions]| {
        let (offsets, order, positions) = (offsets.reborrow(), order.reborrow(), positions.reborrow());
        plan.run(stream, MoePermuteArgs::new(ids.as_view(), offsets, order, positions))
    });
    Ok(vec![sample])
}
