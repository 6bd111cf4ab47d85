//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{CausalConv1d, CausalConv1dArgs, CausalConv1dProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{DeltaNet, QWEN3_CODER_NEXT_DELTA};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Channels.
    pub channels: usize,
    /// Taps of a channel.
    pub width: usize,
}

const fn case(name: &'static str, phase: Phase, model: DeltaNet) -> CausalConv1dCase {
    let (tokens, sequences) = match phase {
        Phase::Prefill(tokens) => (tokens, 1),
        Phase::Decode(sequences) => (1, sequences),
    };
    CausalConv1dCase { name, tokens, sequences, channels: model.channels(), width: model.width }
}

/// The shapes.
pub const CASES: &[CausalConv1dCase] = cases! {
    case;
    one: [];
    phases: ["qwen3-coder-next" => (QWEN3_CODER_NEXT_DELTA)];
    decode: [];
    prefill: [];
};

/// A run of one sequence of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (channels, width) = (64, 4);
    let plan = CausalConv1d::plan(device, CausalConv1dProblem::new(tokens, 1, channels, width, dtype))?;
    let tensors = [
        tensor("x", &[tokens, channels], dtype),
        tensor("weight", &[channels, width], dtype),
        tensor("bias", &[channels], dtype),
        tensor("offsets", &[2], DType::U32),
        tensor("slots", &[1], DType::U32),
        tensor("state", &[1, channels, width - 1], dtype).or_more(),
        tensor("out", &[tokens, channels], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, weight, bias, offsets, slots, state, out]| {
        let (offsets, slots) = (offsets.as_view(), slots.as_view());
        let (x, weight, state, out) = (x.as_view(), weight.as_view(), state.reborrow(), out.reborrow());
        let args = CausalConv1dArgs {
            bias: Some(bias.as_view()),
            ..CausalConv1dArgs::new(x, weight, offsets, slots, state, out)
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
