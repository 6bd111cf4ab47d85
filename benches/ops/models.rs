//! Whole models of published size with random weights: prefill, and a decode step at several batch sizes.
//!
//! Timed by the clock around a call and its synchronisation, so what the host does counts too: for decode also the choice
//! of the next tokens and their way to the host. The bytes are those of the weights, and for decode of the cache: what a
//! step must read at least.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use warpforge::models::{
    FeedForwardConfig, MixerConfig, Model, ModelConfig, Sampler, Session, SessionOptions,
};
use warpforge::ops::sampling::Sampling;
use warpforge::{DType, Error};

use crate::harness::{Bencher, Failure, Meter, Work};

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
const DTYPE: DType = DType::BF16;
/// Tokens of the prompt.
const PROMPT: usize = 2048;
/// Decode steps from one prompt.
const STEPS: usize = 48;
/// How long calls are repeated where the energy is measured.
const ENERGY_SECONDS: f64 = 0.5;

pub fn bench(bencher: &mut Bencher) {
    for (name, text) in MODELS {
        // Made by the first case that is timed.
        let mut model = None;
        bencher.case("model", &format!("{name} prefill {PROMPT}"), |bencher| {
            let config = ModelConfig::from_json(text, Path::new("config.json"))?;
            let work = Cost::of(&config).prefill(text)?;
            if bencher.starts(work)? { prefill(bencher, open(&mut model, bencher, config)?) } else { Ok(()) }
        });
        for batch in [1, 8, 32] {
            bencher.case("model", &format!("{name} decode {batch}"), |bencher| {
                let config = ModelConfig::from_json(text, Path::new("config.json"))?;
                let work = Cost::of(&config).decode(text, batch)?;
                if !bencher.starts(work)? {
                    return Ok(());
                }
                decode(bencher, open(&mut model, bencher, config)?, batch)
            });
        }
    }
}

fn open<'a>(
    model: &'a mut Option<Model>,
    bencher: &Bencher,
    config: ModelConfig,
) -> Result<&'a Model, Failure> {
    if model.is_none() {
        *model = Some(Model::random(&bencher.device, config, DTYPE, 1)?);
    }
    model.as_ref().ok_or_else(|| "there is no model".into())
}

fn prompt(model: &Model) -> Vec<u32> {
    let vocab = model.config().decoder.vocab_size as u32;
    (0..PROMPT as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect()
}

fn prefill(bencher: &mut Bencher, model: &Model) -> Result<(), Failure> {
    let options = SessionOptions { batch: 1, capacity: PROMPT, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let prompt = prompt(model);
    let (samples, joules) = repeat(bencher.meter(), 4, |_| read(&mut session, 0, &prompt))?;
    bencher.record(samples, joules)
}

fn read(session: &mut Session, sequence: usize, prompt: &[u32]) -> Result<(), Error> {
    session.truncate(sequence, 0)?;
    session.prefill(sequence, prompt)?;
    session.stream().synchronize()
}

fn decode(bencher: &mut Bencher, model: &Model, batch: usize) -> Result<(), Failure> {
    let options = SessionOptions { batch, capacity: PROMPT + STEPS, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let prompt = prompt(model);
    for sequence in 0..batch {
        read(&mut session, sequence, &prompt)?;
    }
    let mut sampler = Sampler::new(&session, Sampling::Greedy)?;
    let mut ids = vec![1; batch];
    let (samples, joules) = repeat(bencher.meter(), STEPS, |step| {
        if step % STEPS == 0 {
            (0..batch).try_for_each(|sequence| session.truncate(sequence, PROMPT))?;
        }
        session.decode(&ids)?;
        ids = sampler.sample(&session)?;
        Ok(())
    })?;
    bencher.record(samples, joules)
}

/// Microseconds of each of `calls` calls but the first two, which warm up and record. With a meter the calls then go on
/// until it has seen enough, and the joules of one come with them.
fn repeat(
    meter: Option<&Meter>,
    calls: usize,
    mut call: impl FnMut(usize) -> Result<(), Error>,
) -> Result<(Vec<f64>, Option<f64>), Error> {
    let mut samples = Vec::new();
    for index in 0..calls {
        let start = Instant::now();
        call(index)?;
        if index >= 2 {
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    let Some(meter) = meter else { return Ok((samples, None)) };
    let mut reading = meter.begin();
    let (started, mut more) = (Instant::now(), 0);
    while started.elapsed().as_secs_f64() < ENERGY_SECONDS {
        call(calls + more)?;
        reading.poll();
        more += 1;
    }
    let call_s = started.elapsed().as_secs_f64() / more as f64;
    Ok((samples, reading.watts().map(|watts| watts * call_s)))
}

/// What a model's forward pass takes at least.
struct Cost {
    /// Bytes of the weights, of which those of the head; of the embedding only single rows are read.
    weights: usize,
    head: usize,
    /// Bytes of a token in the cache.
    cache: usize,
    /// Operations of attention for one query and one key, in all layers.
    attention: usize,
}

impl Cost {
    fn of(config: &ModelConfig) -> Self {
        let d = &config.decoder;
        let (mut weights, mut cache, mut attention) = (0, 0, 0);
        for layer in &d.layers {
            match layer.mixer {
                MixerConfig::Attention(heads) => {
                    let (q, kv) = (heads.heads_q * heads.head_dim, heads.heads_kv * heads.head_dim);
                    weights += d.hidden_size * (2 * q + 2 * kv);
                    cache += 2 * kv;
                    attention += 4 * q;
                }
                MixerConfig::Latent(latent) => {
                    let (q, value) = (latent.heads * latent.head_dim(), latent.heads * latent.value);
                    let q_weights =
                        latent.q_latent.map_or(d.hidden_size * q, |row| row * (d.hidden_size + q));
                    let kv_weights =
                        d.hidden_size * latent.row() + latent.latent * (latent.heads * latent.nope + value);
                    weights += q_weights + kv_weights + value * d.hidden_size;
                    cache += latent.row();
                    // With keys and values made for every head, which is less than against the latent rows.
                    attention += 2 * (q + value);
                }
                _ => {}
            }
            weights += match layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => 3 * d.hidden_size * mlp.intermediate_size,
                // Those of one token.
                FeedForwardConfig::Moe(moe) => {
                    let experts = moe.top_k * moe.expert.intermediate_size
                        + moe.shared.map_or(0, |shared| shared.mlp.intermediate_size);
                    d.hidden_size * (moe.num_experts + 3 * experts)
                }
                _ => 0,
            };
        }
        let head = d.vocab_size * d.hidden_size * DTYPE.bytes();
        let (weights, cache) = (weights * DTYPE.bytes() + head, cache * DTYPE.bytes());
        Cost { weights, head, cache, attention }
    }

    /// The head runs for the last token only.
    fn prefill(&self, config: &str) -> Result<Work, Failure> {
        let pairs = PROMPT * (PROMPT + 1) / 2;
        let linear = 2 * ((self.weights - self.head) * PROMPT + self.head) / DTYPE.bytes();
        let bytes = self.weights + PROMPT * self.cache;
        work(config, 1, bytes, linear + pairs * self.attention)
    }

    fn decode(&self, config: &str, batch: usize) -> Result<Work, Failure> {
        let linear = 2 * self.weights / DTYPE.bytes() * batch;
        let bytes = self.weights + batch * PROMPT * self.cache;
        work(config, batch, bytes, linear + batch * PROMPT * self.attention)
    }
}

fn work(config: &str, batch: usize, bytes: usize, flops: usize) -> Result<Work, Failure> {
    let config: Value = serde_json::from_str(config)?;
    let shape = json!({ "config": config, "batch": batch, "prompt": PROMPT, "steps": STEPS });
    Ok(Work { dtype: DTYPE.name(), shape, bytes: bytes as u64, flops: flops as u64 })
}
