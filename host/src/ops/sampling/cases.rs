//! Shapes that occur, for tests and benches.

use super::Sampling;
use crate::ops::Phase;

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
        SamplingCase { name: "qwen3 temperature decode 1", rows: 1, vocab: 151_936, method: TEMPERATURE },
        SamplingCase { name: "qwen3 top_p decode 1", rows: 1, vocab: 151_936, method: TOP_P },
    ];
    phases: [];
    decode: [
        "qwen3 greedy" => (151_936, Sampling::Greedy),
        "qwen3 top_k top_p" => (151_936, QWEN3),
        "glm-4.7-flash greedy" => (154_880, Sampling::Greedy),
    ];
    prefill: [];
};
