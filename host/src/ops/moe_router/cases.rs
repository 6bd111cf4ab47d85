//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{MoeRouter, MoeRouterArgs, MoeRouterProblem, OP, RouterScore, RouterWeights};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{Experts, GLM_4_7_FLASH_EXPERTS, QWEN3_CODER_30B_EXPERTS, QWEN3_CODER_NEXT_EXPERTS};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct MoeRouterCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// What a logit is turned into; sigmoid scores have a bias.
    pub score: RouterScore,
    /// What the weights are.
    pub weights: RouterWeights,
    /// What the weights are multiplied by.
    pub scale: f32,
}

const fn case(
    name: &'static str,
    phase: Phase,
    Experts { count: experts, top_k, .. }: Experts,
    score: RouterScore,
    scale: f32,
) -> MoeRouterCase {
    let weights = RouterWeights::Normalised;
    MoeRouterCase { name, tokens: phase.tokens(), experts, top_k, score, weights, scale }
}

/// The shapes.
pub const CASES: &[MoeRouterCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-coder-30b" => (QWEN3_CODER_30B_EXPERTS, RouterScore::Softmax, 1.0),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT_EXPERTS, RouterScore::Softmax, 1.0),
        "glm-4.7-flash" => (GLM_4_7_FLASH_EXPERTS, RouterScore::Sigmoid, 1.8),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (experts, top_k) = (8, 2);
    let plan = MoeRouter::plan(device, MoeRouterProblem::new(tokens, experts, top_k, dtype))?;
    let tensors = [
        tensor("logits", &[tokens, experts], dtype),
        tensor("bias", &[experts], DType::F32),
        tensor("ids", &[tokens, top_k], DType::U32),
        tensor("weights", &[tokens, top_k], DType::F32),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [logits, bias, ids, weights]| {
        let args = MoeRouterArgs {
            bias: Some(bias.as_view()),
            ..MoeRouterArgs::new(logits.as_view(), ids.reborrow(), weights.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
