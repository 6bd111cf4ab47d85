//! Shapes that occur, for tests and benches.

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

/// The shapes.
pub const CASES: &[KvAppendCase] = &[
    KvAppendCase { name: "qwen3-4b prefill 16384", tokens: 16384, heads: 8, head_dim: 128 },
    KvAppendCase { name: "qwen3-4b prefill 2048", tokens: 2048, heads: 8, head_dim: 128 },
    KvAppendCase { name: "qwen3-4b decode 32", tokens: 32, heads: 8, head_dim: 128 },
    KvAppendCase { name: "qwen3-4b decode 1", tokens: 1, heads: 8, head_dim: 128 },
];
