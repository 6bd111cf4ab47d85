//! Shapes that occur, for tests and benches.

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

/// The shapes.
pub const CASES: &[EmbeddingCase] = &[
    EmbeddingCase { name: "qwen3-0.6b prefill 2048", tokens: 2048, vocab: 151_936, cols: 1024 },
    EmbeddingCase { name: "qwen3-0.6b decode 1", tokens: 1, vocab: 151_936, cols: 1024 },
    EmbeddingCase { name: "qwen3-4b prefill 16384", tokens: 16384, vocab: 151_936, cols: 2560 },
    EmbeddingCase { name: "qwen3-4b decode 32", tokens: 32, vocab: 151_936, cols: 2560 },
];
