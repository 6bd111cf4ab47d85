//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{OP, Sampler, Sampling, SamplingArgs, SamplingProblem};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{GLM_4_7_FLASH, QWEN3_4B};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct SamplingCase {
    /// Model, method and phase.
    pub name: &'static str,
    /// Sequences.
    pub rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// How a token is chosen.
    pub method: Sampling,
}

/// The parameters that Qwen3's model cards recommend for thinking.
const QWEN3: Sampling = Sampling::Random { temperature: 0.6, top_k: Some(20), top_p: 0.95, seed: 1 };
const TEMPERATURE: Sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: 1.0, seed: 1 };
const TOP_P: Sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: 0.9, seed: 1 };

const fn case(name: &'static str, phase: Phase, vocab: usize, method: Sampling) -> SamplingCase {
    SamplingCase { name, rows: phase.tokens(), vocab, method }
}

/// The shapes.
pub const CASES: &[SamplingCase] = cases! {
    case;
    one: [
        SamplingCase { name: "qwen3 temperature decode 1", rows: 1, vocab: QWEN3_4B.vocab, method: TEMPERATURE },
        SamplingCase { name: "qwen3 top_p decode 1", rows: 1, vocab: QWEN3_4B.vocab, method: TOP_P },
    ];
    phases: [];
    decode: [
        "qwen3 greedy" => (QWEN3_4B.vocab, Sampling::Greedy),
        "qwen3 top_k top_p" => (QWEN3_4B.vocab, QWEN3),
        "glm-4.7-flash greedy" => (GLM_4_7_FLASH.vocab, Sampling::Greedy),
    ];
    prefill: [];
};

/// Runs of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let vocab = 64;
    let sample = |method| {
        let problem = SamplingProblem { method, ..SamplingProblem::new(rows, vocab, dtype) };
        let plan = Sampler::plan(device, problem)?;
        let tensors = [tensor("logits", &[rows, vocab], dtype), tensor("ids", &[rows], DType::U32)];
        Ok(Sample::new(OP, tensors, move |stream, [logits, ids]| {
            plan.run(stream, SamplingArgs { step: 3, ..SamplingArgs::new(logits.as_view(), ids.reborrow()) })
        }))
    };
    let random = Sampling::Random { temperature: 1.0, top_k: Some(4), top_p: 0.9, seed: 1 };
    Ok(vec![sample(Sampling::Greedy)?, sample(random)?])
}
