//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Heads of q and k.
    pub heads_k: usize,
    /// Heads of v.
    pub heads_v: usize,
    /// Elements of a key head.
    pub dim_k: usize,
    /// Elements of a value head.
    pub dim_v: usize,
}

const fn case(
    name: &'static str,
    phase: Phase,
    (heads_k, heads_v): (usize, usize),
    (dim_k, dim_v): (usize, usize),
) -> GatedDeltaCase {
    let (tokens, sequences) = match phase {
        Phase::Prefill(tokens) => (tokens, 1),
        Phase::Decode(sequences) => (1, sequences),
    };
    GatedDeltaCase { name, tokens, sequences, heads_k, heads_v, dim_k, dim_v }
}

/// The shapes.
pub const CASES: &[GatedDeltaCase] = cases! {
    case;
    one: [];
    phases: ["qwen3-coder-next" => ((16, 32), (128, 128))];
    decode: [];
    prefill: [];
};
