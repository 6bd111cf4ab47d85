//! Shapes that occur, for tests and benches.

use super::RopeStyle;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct RopeCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Heads of q or of k.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
}

const fn case(name: &'static str, tokens: usize, heads: usize, dims: (usize, usize)) -> RopeCase {
    let (head_dim, rotary_dim) = dims;
    RopeCase { name, tokens, heads, head_dim, rotary_dim, style: RopeStyle::HalfSplit }
}

/// The shapes.
pub const CASES: &[RopeCase] = &[
    // The anchor is 32 + 8 heads in one go; here q and k are two runs.
    case("anchor 32768 q, 32 heads of 128", 32768, 32, (128, 128)),
    case("anchor 32768 k, 8 heads of 128", 32768, 8, (128, 128)),
    case("qwen3-0.6b q prefill 2048", 2048, 16, (128, 128)),
    case("qwen3-0.6b q decode 1", 1, 16, (128, 128)),
    case("qwen3-4b k decode 32", 32, 8, (128, 128)),
    case("qwen3-coder-next q prefill 4096", 4096, 16, (256, 64)),
    RopeCase { style: RopeStyle::Interleaved, ..case("glm-4.7-flash q prefill 4096", 4096, 20, (64, 64)) },
    RopeCase { style: RopeStyle::Interleaved, ..case("glm-4.7-flash k prefill 4096", 4096, 1, (64, 64)) },
];
