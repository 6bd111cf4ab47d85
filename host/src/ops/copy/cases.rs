//! Shapes that occur, for tests and benches.

use super::{Copy, CopyArgs, CopyProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::published::QWEN3_4B;
use crate::sample::{Sample, tensor};
use abi::DType;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct CopyCase {
    /// Model and phase.
    pub name: &'static str,
    /// Sizes.
    pub shape: [usize; 3],
    /// Elements from one index of the first dimension to the next, in src and in dst.
    pub strides: [usize; 2],
    /// Type of src.
    pub src: DType,
    /// Type of dst.
    pub dst: DType,
}

const fn contiguous(name: &'static str, rows: usize, cols: usize, src: DType, dst: DType) -> CopyCase {
    CopyCase { name, shape: [rows, 1, cols], strides: [cols, cols], src, dst }
}

/// Heads of a cache.
const KV: usize = QWEN3_4B.heads.1;

/// The shapes.
pub const CASES: &[CopyCase] = &[
    contiguous("32768x9728 bf16", 32768, 9728, DType::BF16, DType::BF16),
    contiguous("32768x9728 bf16 to f32", 32768, 9728, DType::BF16, DType::F32),
    contiguous("32768x9728 f32 to bf16", 32768, 9728, DType::F32, DType::BF16),
    contiguous("logits 32x151936 bf16 to f32", 32, 151_936, DType::BF16, DType::F32),
    // The v part of a joint projection of 32 + 8 + 8 heads to a cache of 8 heads.
    CopyCase {
        name: "qwen3-4b v to cache prefill 2048",
        shape: [2048, KV, QWEN3_4B.head_dim],
        strides: [QWEN3_4B.qkv(), KV * QWEN3_4B.head_dim],
        src: DType::BF16,
        dst: DType::BF16,
    },
    CopyCase {
        name: "qwen3-4b v to cache decode 1",
        shape: [1, KV, QWEN3_4B.head_dim],
        strides: [QWEN3_4B.qkv(), KV * QWEN3_4B.head_dim],
        src: DType::BF16,
        dst: DType::BF16,
    },
];

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let shape = [rows, 64];
    let plan = Copy::plan(device, CopyProblem::new(rows * 64, dtype, dtype))?;
    let tensors = ["src", "dst"].map(|name| tensor(name, &shape, dtype).of_any_strides());
    let sample = Sample::new(OP, tensors, move |stream, [src, dst]| {
        plan.run(stream, CopyArgs::new(src.as_view(), dst.reborrow()))
    });
    Ok(vec![sample])
}
