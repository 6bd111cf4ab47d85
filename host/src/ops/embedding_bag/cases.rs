//! Shapes that occur, for tests and benches.

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBagCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens: patches of an image.
    pub tokens: usize,
    /// Table rows of a token.
    pub bag: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
}

const fn positions(name: &'static str, tokens: usize) -> EmbeddingBagCase {
    EmbeddingBagCase { name, tokens, bag: 4, vocab: 48 * 48, cols: 1024 }
}

/// The shapes: the positions of an image's patches, interpolated between four places of a learned table.
pub const CASES: &[EmbeddingBagCase] = &[
    positions("qwen3-vl-2b vision prefill 16384", 16384),
    positions("qwen3-vl-2b vision prefill 4096", 4096),
    positions("qwen3-vl-2b vision prefill 256", 256),
];
