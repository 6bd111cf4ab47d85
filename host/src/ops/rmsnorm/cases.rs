//! Shapes that occur, for tests and benches.

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens, times heads for a norm per head.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Whether a residual is added first.
    pub residual: Residual,
}

/// Whether a residual is added first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// Plain norm.
    None,
    /// Residual add and norm.
    Add,
}

/// The shapes.
pub const CASES: &[RmsNormCase] = &[
    RmsNormCase { name: "anchor 65536x4096", rows: 65536, cols: 4096, residual: Residual::None },
    RmsNormCase { name: "anchor 65536x4096 add", rows: 65536, cols: 4096, residual: Residual::Add },
    RmsNormCase { name: "anchor 16384x2560", rows: 16384, cols: 2560, residual: Residual::None },
    RmsNormCase { name: "anchor 32x2560", rows: 32, cols: 2560, residual: Residual::None },
    RmsNormCase { name: "qwen3-0.6b prefill 2048", rows: 2048, cols: 1024, residual: Residual::Add },
    RmsNormCase { name: "qwen3-0.6b decode 1", rows: 1, cols: 1024, residual: Residual::Add },
    RmsNormCase {
        name: "qwen3-4b q heads prefill 2048",
        rows: 2048 * 32,
        cols: 128,
        residual: Residual::None,
    },
];
