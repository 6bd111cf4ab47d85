//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Channels.
    pub channels: usize,
    /// Taps of a channel.
    pub width: usize,
}

const fn case(name: &'static str, phase: Phase, channels: usize, width: usize) -> CausalConv1dCase {
    let (tokens, sequences) = match phase {
        Phase::Prefill(tokens) => (tokens, 1),
        Phase::Decode(sequences) => (1, sequences),
    };
    CausalConv1dCase { name, tokens, sequences, channels, width }
}

/// The shapes.
pub const CASES: &[CausalConv1dCase] = cases! {
    case;
    one: [];
    phases: ["qwen3-coder-next" => (8192, 4)];
    decode: [];
    prefill: [];
};
