//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{Embedding, EmbeddingArgs, EmbeddingProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
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

const fn case(name: &'static str, phase: Phase, vocab: usize, cols: usize) -> EmbeddingCase {
    EmbeddingCase { name, tokens: phase.tokens(), vocab, cols }
}

/// The shapes.
pub const CASES: &[EmbeddingCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-0.6b" => (151_936, 1024),
        "qwen3-4b" => (151_936, 2560),
        "qwen3-coder-30b" => (151_936, 2048),
        "glm-4.7-flash" => (154_880, 2048),
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
