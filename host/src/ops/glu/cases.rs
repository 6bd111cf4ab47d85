//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{Activation, Glu, GluArgs, GluProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS as GLM, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_30B_EXPERTS as CODER,
    QWEN3_CODER_NEXT_EXPERTS as NEXT, QWEN3_VL_2B, QWEN3_VL_2B_VISION,
};
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
const fn alone(name: &'static str, rows: usize, cols: usize, activation: Activation) -> GluCase {
    GluCase { name, rows, cols, activation, has_up: false }
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
        alone("qwen3-vl-2b vision prefill 4096", 4096, QWEN3_VL_2B_VISION.intermediate, Activation::GeluTanh),
        alone("qwen3-vl-2b merger prefill 1024", 1024, QWEN3_VL_2B_VISION.merged, Activation::GeluErf),
    ];
    phases: [
        "qwen3-0.6b" => (1, QWEN3_0_6B.intermediate),
        "qwen3-4b" => (1, QWEN3_4B.intermediate),
        "qwen3-coder-30b experts" => (CODER.top_k, CODER.intermediate),
        "qwen3-coder-next experts" => (NEXT.top_k, NEXT.intermediate),
        "glm-4.7-flash dense" => (1, GLM_4_7_FLASH.intermediate),
        "glm-4.7-flash experts" => (GLM.top_k, GLM.intermediate),
        "qwen3-vl-2b" => (1, QWEN3_VL_2B.intermediate),
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
