//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

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
    top_k: usize,
    cols: usize,
    shared: SharedTerm,
) -> MoeCombineCase {
    MoeCombineCase { name, tokens: phase.tokens(), top_k, cols, shared }
}

/// The shapes.
pub const CASES: &[MoeCombineCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-coder-30b" => (8, 2048, SharedTerm::None),
        "qwen3-coder-next" => (10, 2048, SharedTerm::Gated),
        "glm-4.7-flash" => (4, 2048, SharedTerm::Plain),
    ];
    decode: [];
    prefill: [];
};
