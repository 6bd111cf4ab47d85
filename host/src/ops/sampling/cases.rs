//! Shapes that occur, for tests and benches.

use super::Sampling;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct SamplingCase {
    /// Model and method.
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

/// The shapes.
pub const CASES: &[SamplingCase] = &[
    SamplingCase { name: "qwen3 decode 1 greedy", rows: 1, vocab: 151_936, method: Sampling::Greedy },
    SamplingCase { name: "qwen3 decode 32 greedy", rows: 32, vocab: 151_936, method: Sampling::Greedy },
    SamplingCase { name: "qwen3 decode 1 temperature", rows: 1, vocab: 151_936, method: TEMPERATURE },
    SamplingCase { name: "qwen3 decode 1 top_p", rows: 1, vocab: 151_936, method: TOP_P },
    SamplingCase { name: "qwen3 decode 1 top_k top_p", rows: 1, vocab: 151_936, method: QWEN3 },
    SamplingCase { name: "qwen3 decode 32 top_k top_p", rows: 32, vocab: 151_936, method: QWEN3 },
];
