//! Shapes that occur, for tests and benches.

use super::{OP, Transpose, TransposeArgs, TransposeProblem};
use crate::device::Device;
use crate::error::Error;
use crate::sample::{Sample, tensor};
use abi::DType;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct TransposeCase {
    /// Model and phase.
    pub name: &'static str,
    /// Matrices.
    pub batch: usize,
    /// Rows of a matrix of x.
    pub rows: usize,
    /// Columns of a matrix of x.
    pub cols: usize,
    /// Type of the elements.
    pub dtype: DType,
}

/// The shapes.
pub const CASES: &[TransposeCase] = &[
    TransposeCase { name: "8192x8192 bf16", batch: 1, rows: 8192, cols: 8192, dtype: DType::BF16 },
    TransposeCase { name: "8192x8192 f32", batch: 1, rows: 8192, cols: 8192, dtype: DType::F32 },
    TransposeCase { name: "16384x16384 i8", batch: 1, rows: 16384, cols: 16384, dtype: DType::I8 },
    TransposeCase { name: "qwen3-4b gate_proj", batch: 1, rows: 9728, cols: 2560, dtype: DType::BF16 },
    TransposeCase { name: "32 heads of 4096x128", batch: 32, rows: 4096, cols: 128, dtype: DType::BF16 },
    TransposeCase { name: "odd 4095x4097", batch: 1, rows: 4095, cols: 4097, dtype: DType::BF16 },
];

/// A run of a matrix of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let plan = Transpose::plan(device, TransposeProblem::new(1, rows, 64, dtype))?;
    let tensors = [
        tensor("x", &[1, rows, 64], dtype).of_any_strides(),
        tensor("out", &[1, 64, rows], dtype).of_any_strides(),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, out]| {
        plan.run(stream, TransposeArgs::new(x.as_view(), out.reborrow()))
    });
    Ok(vec![sample])
}
