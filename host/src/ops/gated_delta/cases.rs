//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{GatedDelta, GatedDeltaArgs, GatedDeltaProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{DeltaNet, QWEN3_CODER_NEXT_DELTA};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Heads of q and k.
    pub heads_k: usize,
    /// Heads of v.
    pub heads_v: usize,
    /// Elements of a key head.
    pub dim_k: usize,
    /// Elements of a value head.
    pub dim_v: usize,
}

const fn case(name: &'static str, phase: Phase, model: DeltaNet) -> GatedDeltaCase {
    let DeltaNet { heads: (heads_k, heads_v), dims: (dim_k, dim_v), .. } = model;
    let (tokens, sequences) = match phase {
        Phase::Prefill(tokens) => (tokens, 1),
        Phase::Decode(sequences) => (1, sequences),
    };
    GatedDeltaCase { name, tokens, sequences, heads_k, heads_v, dim_k, dim_v }
}

/// The shapes.
pub const CASES: &[GatedDeltaCase] = cases! {
    case;
    one: [];
    phases: ["qwen3-coder-next" => (QWEN3_CODER_NEXT_DELTA)];
    decode: [];
    prefill: [];
};

/// A run of one sequence of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let ([heads_k, heads_v], [dim_k, dim_v]) = ([1, 2], [64, 32]);
    let problem = GatedDeltaProblem::new(tokens, 1, [heads_k, heads_v], [dim_k, dim_v], dtype);
    let plan = GatedDelta::plan(device, problem)?;
    let tensors = [
        tensor("q", &[tokens, heads_k, dim_k], dtype),
        tensor("k", &[tokens, heads_k, dim_k], dtype),
        tensor("v", &[tokens, heads_v, dim_v], dtype),
        tensor("b", &[tokens, heads_v], dtype),
        tensor("a", &[tokens, heads_v], dtype),
        tensor("a_log", &[heads_v], DType::F32),
        tensor("dt_bias", &[heads_v], DType::F32),
        tensor("offsets", &[2], DType::U32),
        tensor("slots", &[1], DType::U32),
        tensor("state", &[1, heads_v, dim_k, dim_v], DType::F32).or_more(),
        tensor("out", &[tokens, heads_v, dim_v], dtype),
    ];
    let sample = Sample::new(
        OP,
        tensors,
        move |stream, [q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out]| {
            let args = GatedDeltaArgs {
                q: q.as_view(),
                k: k.as_view(),
                v: v.as_view(),
                b: b.as_view(),
                a: a.as_view(),
                a_log: a_log.as_view(),
                dt_bias: dt_bias.as_view(),
                offsets: offsets.as_view(),
                slots: slots.as_view(),
                state: state.reborrow(),
                out: out.reborrow(),
            };
            plan.run(stream, args)
        },
    );
    Ok(vec![sample])
}
