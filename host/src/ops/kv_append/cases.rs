//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{KvAppend, KvAppendArgs, KvAppendProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{Decoder, QWEN3_4B, QWEN3_CODER_30B, QWEN3_CODER_NEXT};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct KvAppendCase {
    /// Model and phase.
    pub name: &'static str,
    /// New tokens.
    pub tokens: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

const fn case(name: &'static str, phase: Phase, model: Decoder) -> KvAppendCase {
    KvAppendCase { name, tokens: phase.tokens(), heads: model.heads.1, head_dim: model.head_dim }
}

/// The shapes. Qwen3-0.6B and Qwen3-VL-2B have those of Qwen3-4B.
pub const CASES: &[KvAppendCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-4b" => (QWEN3_4B),
        "qwen3-coder-30b" => (QWEN3_CODER_30B),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let shape = [tokens, 2, 8];
    let plan = KvAppend::plan(device, KvAppendProblem::new(tokens, 2, 8, dtype))?;
    let tensors = [
        tensor("k", &shape, dtype),
        tensor("v", &shape, dtype),
        tensor("slots", &[tokens], DType::U32),
        tensor("k_cache", &shape, dtype),
        tensor("v_cache", &shape, dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [k, v, slots, k_cache, v_cache]| {
        let args = KvAppendArgs {
            v: Some(v.as_view()),
            v_cache: Some(v_cache.reborrow()),
            ..KvAppendArgs::new(k.as_view(), slots.as_view(), k_cache.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
