//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{LayerNorm, LayerNormArgs, LayerNormProblem, NormResidual, OP};
use crate::device::Device;
use crate::error::Error;
use crate::published::QWEN3_VL_2B_VISION as VISION;
use crate::sample::{Sample, tensor};

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
    pub residual: NormResidual,
}

const fn case(name: &'static str, rows: usize, cols: usize, residual: NormResidual) -> LayerNormCase {
    LayerNormCase { name, rows, cols, residual }
}

/// The shapes: an image of 1024 × 1024 pixels in the vision tower of Qwen3-VL-2B, one of 256 × 256, and an anchor.
pub const CASES: &[LayerNormCase] = &[
    case("anchor 65536x4096", 65536, 4096, NormResidual::None),
    case("anchor 65536x4096 add", 65536, 4096, NormResidual::Add),
    case("qwen3-vl-2b vision block prefill 4096", 4096, VISION.hidden, NormResidual::Add),
    case("qwen3-vl-2b merger prefill 1024", 1024, VISION.merged, NormResidual::None),
    case("qwen3-vl-2b vision block prefill 256", 256, VISION.hidden, NormResidual::Add),
    case("qwen3-vl-2b merger prefill 64", 64, VISION.merged, NormResidual::None),
];

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (cols, shape) = (64, [rows, 64]);
    let plan = LayerNorm::plan(device, LayerNormProblem::new(rows, cols, dtype, 1e-6))?;
    let tensors = [
        tensor("x", &shape, dtype),
        tensor("residual", &shape, dtype),
        tensor("weight", &[cols], dtype),
        tensor("bias", &[cols], dtype),
        tensor("out", &shape, dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, residual, weight, bias, out]| {
        let args = LayerNormArgs {
            residual: Some(residual.reborrow()),
            ..LayerNormArgs::new(x.as_view(), weight.as_view(), bias.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
