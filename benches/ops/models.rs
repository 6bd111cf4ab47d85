//! Whole models of published size with random weights: prefill, and a decode step at several batch sizes.
//!
//! Timed by the clock around a call and its synchronisation, so what the host does counts too. The bytes are those of the
//! weights, and for decode of the cache: what a step must read at least.

use std::path::Path;
use std::time::Instant;

use warpforge::models::{Model, ModelConfig, Sampler, Session, SessionOptions};
use warpforge::ops::sampling::Sampling;
use warpforge::{DType, Error};

use crate::harness::Bencher;

/// Published configurations: name, and what of config.json counts.
const MODELS: [(&str, &str); 2] = [
    (
        "qwen3-0.6b",
        r#"{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": true}"#,
    ),
    (
        "qwen3-4b",
        r#"{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 5e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": true}"#,
    ),
];
/// Tokens of the prompt.
const PROMPT: usize = 2048;
/// Decode steps that are timed.
const STEPS: usize = 48;

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    for (name, config) in MODELS {
        let name = format!("model {name}");
        if bencher.wants(&name) {
            time(bencher, &name, ModelConfig::from_json(config, Path::new("config.json"))?)?;
        }
    }
    Ok(())
}

fn time(bencher: &mut Bencher, name: &str, config: ModelConfig) -> Result<(), Box<dyn std::error::Error>> {
    let (weights, cache) = (weight_bytes(&config), cache_bytes(&config));
    let matmul_flops = weights as u64 / DType::BF16.bytes() as u64 * 2;
    let vocab = config.decoder.vocab_size as u32;
    let model = Model::random(&bencher.device, config, DType::BF16, 1)?;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
    for batch in [1, 8, 32] {
        let capacity = PROMPT + STEPS;
        let mut session = model.session(SessionOptions { batch, capacity, ..SessionOptions::default() })?;
        if batch == 1 {
            // The head runs for the last token only.
            let flops = matmul_flops * PROMPT as u64;
            let samples = repeat(4, || prefill(&mut session, 0, &prompt))?;
            bencher.record(&format!("{name} prefill {PROMPT}"), weights as u64, flops, samples)?;
        }
        for sequence in 0..batch {
            prefill(&mut session, sequence, &prompt)?;
        }
        let mut sampler = Sampler::new(&session, Sampling::Greedy)?;
        let mut ids = vec![1; batch];
        let samples = repeat(STEPS, || {
            session.decode(&ids)?;
            ids = sampler.sample(&session)?;
            Ok(())
        })?;
        let bytes = (weights + batch * PROMPT * cache) as u64;
        bencher.record(&format!("{name} decode {batch}"), bytes, matmul_flops * batch as u64, samples)?;
    }
    Ok(())
}

fn prefill(session: &mut Session, sequence: usize, prompt: &[u32]) -> Result<(), Error> {
    session.truncate(sequence, 0);
    session.prefill(sequence, prompt)?;
    session.stream().synchronize()
}

/// Microseconds of each call but the first two, which warm up and record.
fn repeat(calls: usize, mut call: impl FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    let mut samples = Vec::new();
    for index in 0..calls {
        let start = Instant::now();
        call()?;
        if index >= 2 {
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(samples)
}

/// Bytes of the weights that a step reads, in bf16: all but the rows of the embedding that it does not look up.
fn weight_bytes(config: &ModelConfig) -> usize {
    let d = &config.decoder;
    let (q, kv) = (d.heads_q * d.head_dim, d.heads_kv * d.head_dim);
    let layer = d.hidden_size * (2 * q + 2 * kv) + 3 * d.hidden_size * d.intermediate_size;
    (d.num_layers * layer + d.vocab_size * d.hidden_size) * DType::BF16.bytes()
}

/// Bytes of a token in the cache, in bf16.
fn cache_bytes(config: &ModelConfig) -> usize {
    let d = &config.decoder;
    2 * d.num_layers * d.heads_kv * d.head_dim * DType::BF16.bytes()
}
