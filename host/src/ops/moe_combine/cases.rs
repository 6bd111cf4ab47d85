//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{MoeCombine, MoeCombineArgs, MoeCombineProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    Decoder, Experts, GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS,
    QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS,
};
use crate::sample::{Sample, tensor};

/// What the shared expert adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedTerm {
    /// There is none.
    None,
    /// Its result.
    Plain,
    /// Its result by the sigmoid of a gate.
    Gated,
}

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct MoeCombineCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a row.
    pub cols: usize,
    /// What the shared expert adds.
    pub shared: SharedTerm,
}

const fn case(
    name: &'static str,
    phase: Phase,
    model: Decoder,
    experts: Experts,
    shared: SharedTerm,
) -> MoeCombineCase {
    MoeCombineCase { name, tokens: phase.tokens(), top_k: experts.top_k, cols: model.hidden, shared }
}

/// The shapes.
pub const CASES: &[MoeCombineCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-coder-30b" => (QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS, SharedTerm::None),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS, SharedTerm::Gated),
        "glm-4.7-flash" => (GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, SharedTerm::Plain),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (top_k, cols) = (2, 64);
    let plan = MoeCombine::plan(device, MoeCombineProblem::new(tokens, top_k, cols, dtype))?;
    let tensors = [
        tensor("y", &[tokens * top_k, cols], dtype).or_more(),
        tensor("weights", &[tokens, top_k], DType::F32),
        tensor("positions", &[tokens, top_k], DType::U32),
        tensor("shared", &[tokens, cols], dtype),
        tensor("gate", &[tokens, 1], DType::F32).of_any_strides(),
        tensor("out", &[tokens, cols], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [y, weights, positions, shared, gate, out]| {
        let args = MoeCombineArgs {
            shared: Some(shared.as_view()),
            gate: Some(gate.as_view()),
            ..MoeCombineArgs::new(y.as_view(), weights.as_view(), positions.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
