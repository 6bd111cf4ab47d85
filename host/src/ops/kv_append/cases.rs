//! Shapes that occur, for tests and benches.

use crate::ops::Phase;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct KvAppendCase {
    /// Model and phase.
    pub name: &'static str,
    /// New tokens.
    pub tokens: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

const fn case(name: &'static str, phase: Phase, heads: usize, head_dim: usize) -> KvAppendCase {
    KvAppendCase { name, tokens: phase.tokens(), heads, head_dim }
}

/// The shapes. Qwen3-0.6B and Qwen3-VL-2B have those of Qwen3-4B.
pub const CASES: &[KvAppendCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-4b" => (8, 128),
        "qwen3-coder-30b" => (4, 128),
        "qwen3-coder-next" => (2, 256),
    ];
    decode: [];
    prefill: [];
};
