//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{EmbeddingBag, EmbeddingBagArgs, EmbeddingBagProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::published::QWEN3_VL_2B_VISION as VISION;
use crate::sample::{Sample, tensor};
/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBagCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens: patches of an image.
    pub tokens: usize,
    /// Table rows of a token.
    pub bag: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
}

const fn positions(name: &'static str, tokens: usize) -> EmbeddingBagCase {
    EmbeddingBagCase { name, tokens, bag: 4, vocab: VISION.positions, cols: VISION.hidden }
}

/// The shapes: the positions of an image's patches, interpolated between four places of a learned table.
pub const CASES: &[EmbeddingBagCase] = &[
    positions("qwen3-vl-2b vision prefill 16384", 16384),
    positions("qwen3-vl-2b vision prefill 4096", 4096),
    positions("qwen3-vl-2b vision prefill 256", 256),
];

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (bag, vocab, cols) = (2, tokens, 64);
    let plan = EmbeddingBag::plan(device, EmbeddingBagProblem::new(tokens, bag, vocab, cols, dtype))?;
    let tensors = [
        tensor("table", &[vocab, cols], dtype),
        tensor("ids", &[tokens, bag], DType::U32),
        tensor("weights", &[tokens, bag], DType::F32),
        tensor("out", &[tokens, cols], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [table, ids, weights, out]| {
        let (table, ids, weights) = (table.as_view(), ids.as_view(), weights.as_view());
        plan.run(stream, EmbeddingBagArgs::new(table, ids, weights, out.reborrow()))
    });
    Ok(vec![sample])
}
