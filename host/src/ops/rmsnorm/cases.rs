//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{NormWeight, OP, RmsNorm, RmsNormArgs, RmsNormProblem};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    GLM_4_7_FLASH_LATENT as LATENT, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_30B, QWEN3_CODER_NEXT as NEXT,
    QWEN3_CODER_NEXT_DELTA as DELTA,
};
use crate::sample::{Sample, tensor};

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
    pub residual: NormResidual,
    /// What the weight tensor holds.
    pub weight: NormWeight,
    /// Whether the result is gated.
    pub gate: Gate,
}

/// Whether a residual is added first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormResidual {
    /// Plain norm.
    None,
    /// NormResidual add and norm.
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

const fn plain(name: &'static str, rows: usize, cols: usize, residual: NormResidual) -> RmsNormCase {
    RmsNormCase { name, rows, cols, residual, weight: NormWeight::Plain, gate: Gate::None }
}

/// A norm of so many rows for each token.
const fn case(
    name: &'static str,
    phase: Phase,
    (rows, cols): (usize, usize),
    residual: NormResidual,
    weight: NormWeight,
) -> RmsNormCase {
    RmsNormCase { name, rows: phase.tokens() * rows, cols, residual, weight, gate: Gate::None }
}

/// A gated norm of so many rows for each token.
const fn gated(name: &'static str, phase: Phase, rows: usize, cols: usize) -> RmsNormCase {
    RmsNormCase { gate: Gate::Silu, ..case(name, phase, (rows, cols), NormResidual::None, NormWeight::Plain) }
}

/// The shapes. GLM-4.7-Flash and Qwen3-VL-2B have the layer norms of Qwen3-Coder-30B.
pub const CASES: &[RmsNormCase] = cases! {
    case;
    one: [
        plain("anchor 65536x4096", 65536, 4096, NormResidual::None),
        plain("anchor 65536x4096 add", 65536, 4096, NormResidual::Add),
        plain("anchor 16384x2560", 16384, 2560, NormResidual::None),
        plain("anchor 32x2560", 32, 2560, NormResidual::None),
        gated("qwen3-coder-next delta heads prefill 2048", Phase::Prefill(2048), DELTA.heads.1, DELTA.dims.1),
        gated("qwen3-coder-next delta heads decode 1", Phase::Decode(1), DELTA.heads.1, DELTA.dims.1),
        gated("qwen3-coder-next delta heads decode 32", Phase::Decode(32), DELTA.heads.1, DELTA.dims.1),
    ];
    phases: [
        "qwen3-0.6b layer" => ((1, QWEN3_0_6B.hidden), NormResidual::Add, NormWeight::Plain),
        "qwen3-0.6b q heads" => ((QWEN3_0_6B.heads.0, QWEN3_0_6B.head_dim), NormResidual::None, NormWeight::Plain),
        "qwen3-4b layer" => ((1, QWEN3_4B.hidden), NormResidual::Add, NormWeight::Plain),
        "qwen3-4b q heads" => ((QWEN3_4B.heads.0, QWEN3_4B.head_dim), NormResidual::None, NormWeight::Plain),
        "qwen3-coder-30b layer" => ((1, QWEN3_CODER_30B.hidden), NormResidual::Add, NormWeight::Plain),
        "qwen3-coder-next layer" => ((1, NEXT.hidden), NormResidual::Add, NormWeight::ZeroCentred),
        "qwen3-coder-next q heads" => ((NEXT.heads.0, NEXT.head_dim), NormResidual::None, NormWeight::ZeroCentred),
        "glm-4.7-flash q_a" => ((1, LATENT.q_rank), NormResidual::None, NormWeight::Plain),
        "glm-4.7-flash kv_a" => ((1, LATENT.kv_rank), NormResidual::None, NormWeight::Plain),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (cols, head) = (64, [rows, 64]);
    let plan = RmsNorm::plan(device, RmsNormProblem::new(rows, cols, dtype, 1e-6))?;
    let tensors = [
        tensor("x", &head, dtype),
        tensor("residual", &head, dtype),
        tensor("weight", &[cols], dtype),
        tensor("gate", &head, dtype),
        tensor("out", &head, dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, residual, weight, gate, out]| {
        let args = RmsNormArgs {
            residual: Some(residual.reborrow()),
            gate: Some(gate.as_view()),
            ..RmsNormArgs::new(x.as_view(), weight.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
