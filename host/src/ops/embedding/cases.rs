//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{Embedding, EmbeddingArgs, EmbeddingProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{Decoder, GLM_4_7_FLASH, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_30B};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingCase {
    /// Model and phase.
    pub name: &'static str,
    /// Ids.
    pub tokens: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
}

const fn case(name: &'static str, phase: Phase, model: Decoder) -> EmbeddingCase {
    EmbeddingCase { name, tokens: phase.tokens(), vocab: model.vocab, cols: model.hidden }
}

/// The shapes.
pub const CASES: &[EmbeddingCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-0.6b" => (QWEN3_0_6B),
        "qwen3-4b" => (QWEN3_4B),
        "qwen3-coder-30b" => (QWEN3_CODER_30B),
        "glm-4.7-flash" => (GLM_4_7_FLASH),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many ids, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (vocab, cols) = (tokens, 64);
    let plan = Embedding::plan(device, EmbeddingProblem::new(tokens, vocab, cols, dtype))?;
    let tensors = [
        tensor("table", &[vocab, cols], dtype),
        tensor("ids", &[tokens], DType::U32),
        tensor("out", &[tokens, cols], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [table, ids, out]| {
        plan.run(stream, EmbeddingArgs::new(table.as_view(), ids.as_view(), out.reborrow()))
    });
    Ok(vec![sample])
}
