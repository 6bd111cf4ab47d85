//! Shapes that occur, for tests and benches.

use super::Activation;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct GluCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens, or token–expert pairs.
    pub rows: usize,
    /// Elements of a row: the intermediate size.
    pub cols: usize,
    /// Activation of the gate.
    pub activation: Activation,
}

const fn case(name: &'static str, rows: usize, cols: usize, activation: Activation) -> GluCase {
    GluCase { name, rows, cols, activation }
}

/// The shapes.
pub const CASES: &[GluCase] = &[
    case("anchor 32768x9728", 32768, 9728, Activation::Silu),
    case("32768x9728 gelu_tanh", 32768, 9728, Activation::GeluTanh),
    case("32768x9728 gelu_erf", 32768, 9728, Activation::GeluErf),
    case("qwen3-0.6b prefill 2048", 2048, 3072, Activation::Silu),
    case("qwen3-0.6b decode 1", 1, 3072, Activation::Silu),
    case("qwen3-4b decode 32", 32, 9728, Activation::Silu),
    case("qwen3-coder-30b experts prefill 4096", 4096 * 8, 768, Activation::Silu),
    case("qwen3-coder-next experts prefill 4096", 4096 * 10, 512, Activation::Silu),
];
