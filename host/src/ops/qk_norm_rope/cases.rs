//! Shapes that occur, for tests and benches.

use crate::ops::Phase;
use crate::ops::rmsnorm::NormWeight;

/// One shape; pairs are half-split.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRopeCase {
    /// Model and phase.
    pub name: &'static str,
    /// New tokens.
    pub tokens: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads, and value heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// What the weights hold.
    pub weight: NormWeight,
}

const fn case(
    name: &'static str,
    phase: Phase,
    (heads_q, heads_kv): (usize, usize),
    (head_dim, rotary_dim): (usize, usize),
    weight: NormWeight,
) -> QkNormRopeCase {
    QkNormRopeCase { name, tokens: phase.tokens(), heads_q, heads_kv, head_dim, rotary_dim, weight }
}

/// The shapes. Qwen3-VL-2B has those of Qwen3-0.6B.
pub const CASES: &[QkNormRopeCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-0.6b" => ((16, 8), (128, 128), NormWeight::Plain),
        "qwen3-4b" => ((32, 8), (128, 128), NormWeight::Plain),
        "qwen3-coder-30b" => ((32, 4), (128, 128), NormWeight::Plain),
        "qwen3-coder-next" => ((16, 2), (256, 64), NormWeight::ZeroCentred),
    ];
    decode: [];
    prefill: [];
};
