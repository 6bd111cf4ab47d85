//! Shapes that occur, for tests and benches.

use super::NormWeight;
use crate::ops::Phase;

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
    /// What the weight tensor holds.
    pub weight: NormWeight,
    /// Whether the result is gated.
    pub gate: Gate,
}

/// Whether a residual is added first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// Plain norm.
    None,
    /// Residual add and norm.
    Add,
}

/// Whether the result is gated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// It is not.
    None,
    /// By the SiLU of another tensor.
    Silu,
}

const fn plain(name: &'static str, rows: usize, cols: usize, residual: Residual) -> RmsNormCase {
    RmsNormCase { name, rows, cols, residual, weight: NormWeight::Plain, gate: Gate::None }
}

/// A norm of so many rows for each token.
const fn case(
    name: &'static str,
    phase: Phase,
    (rows, cols): (usize, usize),
    residual: Residual,
    weight: NormWeight,
) -> RmsNormCase {
    RmsNormCase { name, rows: phase.tokens() * rows, cols, residual, weight, gate: Gate::None }
}

/// A gated norm of so many rows for each token.
const fn gated(name: &'static str, phase: Phase, rows: usize, cols: usize) -> RmsNormCase {
    RmsNormCase { gate: Gate::Silu, ..case(name, phase, (rows, cols), Residual::None, NormWeight::Plain) }
}

/// The shapes. GLM-4.7-Flash and Qwen3-VL-2B have the layer norms of Qwen3-Coder-30B.
pub const CASES: &[RmsNormCase] = cases! {
    case;
    one: [
        plain("anchor 65536x4096", 65536, 4096, Residual::None),
        plain("anchor 65536x4096 add", 65536, 4096, Residual::Add),
        plain("anchor 16384x2560", 16384, 2560, Residual::None),
        plain("anchor 32x2560", 32, 2560, Residual::None),
        gated("qwen3-coder-next delta heads prefill 2048", Phase::Prefill(2048), 32, 128),
        gated("qwen3-coder-next delta heads decode 1", Phase::Decode(1), 32, 128),
        gated("qwen3-coder-next delta heads decode 32", Phase::Decode(32), 32, 128),
    ];
    phases: [
        "qwen3-0.6b layer" => ((1, 1024), Residual::Add, NormWeight::Plain),
        "qwen3-0.6b q heads" => ((16, 128), Residual::None, NormWeight::Plain),
        "qwen3-4b layer" => ((1, 2560), Residual::Add, NormWeight::Plain),
        "qwen3-4b q heads" => ((32, 128), Residual::None, NormWeight::Plain),
        "qwen3-coder-30b layer" => ((1, 2048), Residual::Add, NormWeight::Plain),
        "qwen3-coder-next layer" => ((1, 2048), Residual::Add, NormWeight::ZeroCentred),
        "qwen3-coder-next q heads" => ((16, 256), Residual::None, NormWeight::ZeroCentred),
        "glm-4.7-flash q_a" => ((1, 768), Residual::None, NormWeight::Plain),
        "glm-4.7-flash kv_a" => ((1, 512), Residual::None, NormWeight::Plain),
    ];
    decode: [];
    prefill: [];
};
