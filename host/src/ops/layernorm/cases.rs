//! Shapes that occur, for tests and benches.

use super::Residual;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormCase {
    /// Model and phase.
    pub name: &'static str,
    /// Patches, or groups of them.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Whether a residual is added first.
    pub residual: Residual,
}

const fn case(name: &'static str, rows: usize, cols: usize, residual: Residual) -> LayerNormCase {
    LayerNormCase { name, rows, cols, residual }
}

/// The shapes: an image of 1024 × 1024 pixels in the vision tower of Qwen3-VL-2B, one of 256 × 256, and an anchor.
pub const CASES: &[LayerNormCase] = &[
    case("anchor 65536x4096", 65536, 4096, Residual::None),
    case("anchor 65536x4096 add", 65536, 4096, Residual::Add),
    case("qwen3-vl-2b vision block prefill 4096", 4096, 1024, Residual::Add),
    case("qwen3-vl-2b merger prefill 1024", 1024, 4096, Residual::None),
    case("qwen3-vl-2b vision block prefill 256", 256, 1024, Residual::Add),
    case("qwen3-vl-2b merger prefill 64", 64, 4096, Residual::None),
];
