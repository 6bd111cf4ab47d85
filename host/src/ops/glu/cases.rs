//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{Activation, Glu, GluArgs, GluProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::sample::{Sample, tensor};

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
    /// Whether something is gated.
    pub has_up: bool,
}

const fn plain(name: &'static str, activation: Activation) -> GluCase {
    GluCase { name, rows: 32768, cols: 9728, activation, has_up: true }
}

/// The activation of an MLP without a gate.
const fn alone(name: &'static str, rows: usize, activation: Activation) -> GluCase {
    GluCase { name, rows, cols: 4096, activation, has_up: false }
}

/// SwiGLU in a model that gives a token to so many experts.
const fn case(name: &'static str, phase: Phase, experts: usize, cols: usize) -> GluCase {
    GluCase { name, rows: phase.tokens() * experts, cols, activation: Activation::Silu, has_up: true }
}

/// The shapes.
pub const CASES: &[GluCase] = cases! {
    case;
    one: [
        plain("anchor 32768x9728", Activation::Silu),
        plain("32768x9728 gelu_tanh", Activation::GeluTanh),
        plain("32768x9728 gelu_erf", Activation::GeluErf),
        plain("32768x9728 sigmoid", Activation::Sigmoid),
        alone("qwen3-vl-2b vision prefill 4096", 4096, Activation::GeluTanh),
        alone("qwen3-vl-2b merger prefill 1024", 1024, Activation::GeluErf),
    ];
    phases: [
        "qwen3-0.6b" => (1, 3072),
        "qwen3-4b" => (1, 9728),
        "qwen3-coder-30b experts" => (8, 768),
        "qwen3-coder-next experts" => (10, 512),
        "glm-4.7-flash dense" => (1, 10240),
        "glm-4.7-flash experts" => (4, 1536),
        "qwen3-vl-2b" => (1, 6144),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (cols, shape) = (64, [rows, 64]);
    let plan = Glu::plan(device, GluProblem::new(rows, cols, dtype, Activation::Silu))?;
    let tensors = ["gate", "up", "out"].map(|name| tensor(name, &shape, dtype));
    let sample = Sample::new(OP, tensors, move |stream, [gate, up, out]| {
        let args = GluArgs { up: Some(up.as_view()), ..GluArgs::new(gate.as_view(), out.reborrow()) };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
