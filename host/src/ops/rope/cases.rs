//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{OP, Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{Decoder, GLM_4_7_FLASH_LATENT as LATENT, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_NEXT};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct RopeCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Heads of q or of k.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
}

const fn plain(name: &'static str, heads: usize) -> RopeCase {
    RopeCase { name, tokens: 32768, heads, head_dim: 128, rotary_dim: 128, style: RopeStyle::HalfSplit }
}

const fn case(
    name: &'static str,
    phase: Phase,
    heads: usize,
    (head_dim, rotary_dim): (usize, usize),
    style: RopeStyle,
) -> RopeCase {
    RopeCase { name, tokens: phase.tokens(), heads, head_dim, rotary_dim, style }
}

/// Elements of a head, and of its rotated part.
const fn dims(model: Decoder) -> (usize, usize) {
    (model.head_dim, model.rotary_dim)
}

/// The shapes. Qwen3-Coder-30B has the queries of Qwen3-4B.
pub const CASES: &[RopeCase] = cases! {
    case;
    one: [
        // The anchor is 32 + 8 heads in one go; here q and k are two runs.
        plain("anchor 32768 q, 32 heads of 128", 32),
        plain("anchor 32768 k, 8 heads of 128", 8),
    ];
    phases: [
        "qwen3-0.6b q" => (QWEN3_0_6B.heads.0, dims(QWEN3_0_6B), RopeStyle::HalfSplit),
        "qwen3-4b q" => (QWEN3_4B.heads.0, dims(QWEN3_4B), RopeStyle::HalfSplit),
        "qwen3-4b k" => (QWEN3_4B.heads.1, dims(QWEN3_4B), RopeStyle::HalfSplit),
        "qwen3-coder-next q" => (QWEN3_CODER_NEXT.heads.0, dims(QWEN3_CODER_NEXT), RopeStyle::HalfSplit),
        "glm-4.7-flash q" => (LATENT.heads, (LATENT.rope, LATENT.rope), RopeStyle::Interleaved),
        "glm-4.7-flash k" => (1, (LATENT.rope, LATENT.rope), RopeStyle::Interleaved),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let shape = [tokens, 2, 64];
    let plan = Rope::plan(device, RopeProblem::new(tokens, 2, 64, dtype))?;
    let tables = RopeTables::new(&device.stream()?, &[1.0; 32], 1.0, 16)?;
    let tensors = [
        tensor("x", &shape, dtype),
        tensor("positions", &[tokens], DType::U32).of_any_strides(),
        tensor("out", &shape, dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, positions, out]| {
        let x = RopeInput::From(x.as_view());
        plan.run(stream, RopeArgs::new(x, positions.as_view(), &tables, out.reborrow()))
    });
    Ok(vec![sample])
}
