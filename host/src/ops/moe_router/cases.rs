//! Shapes that occur, for tests and benches.

use super::{RouterScore, RouterWeights};
use crate::ops::Phase;

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
    experts: usize,
    top_k: usize,
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
        "qwen3-coder-30b" => (128, 8, RouterScore::Softmax, 1.0),
        "qwen3-coder-next" => (512, 10, RouterScore::Softmax, 1.0),
        "glm-4.7-flash" => (64, 4, RouterScore::Sigmoid, 1.8),
    ];
    decode: [];
    prefill: [];
};
