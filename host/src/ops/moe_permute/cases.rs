//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

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

const fn case(name: &'static str, phase: Phase, experts: usize, top_k: usize) -> MoePermuteCase {
    MoePermuteCase { name, tokens: phase.tokens(), top_k, experts }
}

/// The shapes.
pub const CASES: &[MoePermuteCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-coder-30b" => (128, 8),
        "qwen3-coder-next" => (512, 10),
        "glm-4.7-flash" => (64, 4),
    ];
    decode: [];
    prefill: [];
};
