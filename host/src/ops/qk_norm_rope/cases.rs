//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{OP, QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::ops::rmsnorm::NormWeight;
use crate::ops::rope::{RopeInput, RopeTables};
use crate::published::{Decoder, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_30B, QWEN3_CODER_NEXT};
use crate::sample::{Sample, tensor};

/// One shape; pairs are half-split.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRopeCase {
    /// Model and phase.
    pub name: &'static str,
    /// New tokens.
    pub tokens: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads, and value heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// What the weights hold.
    pub weight: NormWeight,
}

const fn case(name: &'static str, phase: Phase, model: Decoder, weight: NormWeight) -> QkNormRopeCase {
    let Decoder { heads: (heads_q, heads_kv), head_dim, rotary_dim, .. } = model;
    QkNormRopeCase { name, tokens: phase.tokens(), heads_q, heads_kv, head_dim, rotary_dim, weight }
}

/// The shapes. Qwen3-VL-2B has those of Qwen3-0.6B.
pub const CASES: &[QkNormRopeCase] = cases! {
    case;
    one: [];
    phases: [
        "qwen3-0.6b" => (QWEN3_0_6B, NormWeight::Plain),
        "qwen3-4b" => (QWEN3_4B, NormWeight::Plain),
        "qwen3-coder-30b" => (QWEN3_CODER_30B, NormWeight::Plain),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT, NormWeight::ZeroCentred),
    ];
    decode: [];
    prefill: [];
};

/// A run of so many tokens with fp8 caches, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (heads_q, heads_kv, head_dim, cache_dtype) = (2, 2, 64, DType::F8E4M3);
    let problem = QkNormRopeProblem {
        cache_dtype,
        norm: Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain }),
        ..QkNormRopeProblem::new(tokens, [heads_q, heads_kv], head_dim, dtype)
    };
    let plan = QkNormRope::plan(device, problem)?;
    let tables = RopeTables::new(&device.stream()?, &[1.0; 32], 1.0, 16)?;
    let (queries, keys) = ([tokens, heads_q, head_dim], [tokens, heads_kv, head_dim]);
    let tensors = [
        tensor("q", &queries, dtype),
        tensor("k", &keys, dtype),
        tensor("v", &keys, dtype),
        tensor("weights.q", &[head_dim], dtype),
        tensor("weights.k", &[head_dim], dtype),
        tensor("positions", &[tokens], DType::U32).of_any_strides(),
        tensor("slots", &[tokens], DType::U32),
        tensor("q_out", &queries, dtype),
        tensor("k_cache", &keys, cache_dtype),
        tensor("v_cache", &keys, cache_dtype),
        tensor("k_scale", &[heads_kv], DType::F32),
        tensor("v_scale", &[heads_kv], DType::F32),
    ];
    let sample = Sample::new(OP, tensors, move |stream, tensors| {
        let [q, k, v, q_weight, k_weight, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale] =
            tensors;
        let args = QkNormRopeArgs {
            q: RopeInput::From(q.as_view()),
            k: k.as_view(),
            v: v.as_view(),
            weights: Some(QkNormWeights { q: q_weight.as_view(), k: k_weight.as_view() }),
            positions: positions.as_view(),
            tables: &tables,
            slots: slots.as_view(),
            q_out: q_out.reborrow(),
            k_cache: k_cache.reborrow(),
            v_cache: v_cache.reborrow(),
            k_scale: Some(k_scale.as_view()),
            v_scale: Some(v_scale.as_view()),
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
