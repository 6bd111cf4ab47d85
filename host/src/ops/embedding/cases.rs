//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingCase {
    /// Model and phase.
    pub name: &'static str,
    /// Ids.
    pub tokens: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
}

const fn case(name: &'static str, phase: Phase, vocab: usize, cols: usize) -> EmbeddingCase {
    EmbeddingCase { name, tokens: phase.tokens(), vocab, cols }
}

/// The shapes.
pub const CASES: &[EmbeddingCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-0.6b" => (151_936, 1024),
        "qwen3-4b" => (151_936, 2560),
        "qwen3-coder-30b" => (151_936, 2048),
        "glm-4.7-flash" => (154_880, 2048),
    ];
    decode: [];
    prefill: [];
};
