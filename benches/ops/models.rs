//! Whole models of published size with random weights: prefill, and a decode step at several batch sizes.
//!
//! Timed by the clock around a call and its synchronisation, so what the host does counts too: for decode also the
//! choice of the next tokens and their way to the host. Sequences that are decoded together hold different texts. The
//! bytes are those of the weights, and for decode of the cache: what a step must read at least, of experts as many as
//! its tokens are expected to go to.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use warpforge::models::{
    FeedForwardConfig, MixerConfig, Model, ModelConfig, Quantise, Session, SessionOptions, SessionSampler,
};
use warpforge::ops::sampling::SamplingParams;
use warpforge::weight::Scheme;
use warpforge::{DType, Error};

use crate::harness::{Bencher, Failure, Meter, Work};

/// A published configuration.
struct Published {
    name: &'static str,
    json: &'static str,
    /// Layers that are built, if not all.
    layers: Option<usize>,
    batches: &'static [usize],
    /// What the weights of projections and experts are, if not bf16.
    scheme: Option<Scheme>,
}

macro_rules! published {
    ($name:literal, $file:literal, $layers:expr, $batches:expr) => {
        published!($name, $file, $layers, $batches, None)
    };
    ($name:literal, $file:literal, $layers:expr, $batches:expr, $scheme:expr) => {
        Published {
            name: $name,
            json: include_str!(concat!("../../assets/configs/", $file, ".json")),
            layers: $layers,
            batches: $batches,
            scheme: $scheme,
        }
    };
}

/// The text decoders; 48 layers of Qwen3-Coder-Next are 148 GiB, which no card of today's holds: the first nine of its
/// twelve groups of four layers are 112 GiB.
const MODELS: &[Published] = &[
    published!("qwen3-0.6b", "qwen3-0.6b", None, &[1, 8, 32]),
    published!("qwen3-4b", "qwen3-4b-instruct-2507", None, &[1, 8, 32]),
    published!("qwen3-coder-30b", "qwen3-coder-30b-a3b-instruct", None, &[1, 2, 4, 8]),
    published!("qwen3-coder-next, 36 of 48 layers,", "qwen3-coder-next", Some(36), &[1, 8]),
    published!("glm-4.7-flash", "glm-4.7-flash", None, &[1, 8]),
    published!("qwen3-vl-2b", "qwen3-vl-2b-instruct", None, &[1, 8]),
    published!("qwen3-0.6b int4", "qwen3-0.6b", None, &[1, 8], Some(Scheme::INT4)),
    published!("qwen3-4b int4", "qwen3-4b-instruct-2507", None, &[1, 8, 32], Some(Scheme::INT4)),
    published!("qwen3-4b fp8", "qwen3-4b-instruct-2507", None, &[1, 8, 32], Some(Scheme::FP8)),
    published!(
        "qwen3-coder-30b int4",
        "qwen3-coder-30b-a3b-instruct",
        None,
        &[1, 2, 4, 8],
        Some(Scheme::INT4)
    ),
    published!("qwen3-coder-30b fp8", "qwen3-coder-30b-a3b-instruct", None, &[1, 8], Some(Scheme::FP8)),
    published!("glm-4.7-flash int4", "glm-4.7-flash", None, &[1, 8], Some(Scheme::INT4)),
    published!("qwen3-coder-next int4", "qwen3-coder-next", None, &[1, 8], Some(Scheme::INT4)),
    published!("qwen3-coder-next fp8", "qwen3-coder-next", None, &[1, 8], Some(Scheme::FP8)),
];

impl Published {
    /// What a peer builds the same model from.
    fn json(&self) -> Result<Value, Failure> {
        let mut json: Value = serde_json::from_str(self.json)?;
        if let Some(layers) = self.layers {
            json["num_hidden_layers"] = layers.into();
        }
        Ok(json)
    }

    fn config(&self) -> Result<ModelConfig, Failure> {
        Ok(ModelConfig::from_json(&self.json()?.to_string(), Path::new(self.name))?)
    }
}

const DTYPE: DType = DType::BF16;
/// Tokens of the prompt.
const PROMPT: usize = 2048;
/// Decode steps from one prompt.
const STEPS: usize = 48;
/// The same where sequences cannot go back to their prompts' ends: those whose energy is measured come on top.
const STEPS_ONWARD: usize = 8 * STEPS;
/// How long calls are repeated where the energy is measured.
const ENERGY_SECONDS: f64 = 0.5;

pub fn bench(bencher: &mut Bencher) {
    for published in MODELS {
        let name = published.name;
        // Made by the first case that is timed.
        let mut model = None;
        bencher.case("model", &format!("{name} prefill {PROMPT}"), |bencher| {
            let config = published.config()?;
            let work = work(published, 1, Cost::of(&config, published.scheme)?.prefill())?;
            if !bencher.starts(work)? {
                return Ok(());
            }
            prefill(bencher, open(&mut model, bencher, (config, published.scheme))?)
        });
        for &batch in published.batches {
            bencher.case("model", &format!("{name} decode {batch}"), |bencher| {
                let config = published.config()?;
                let work = work(published, batch, Cost::of(&config, published.scheme)?.decode(batch))?;
                if !bencher.starts(work)? {
                    return Ok(());
                }
                decode(bencher, open(&mut model, bencher, (config, published.scheme))?, batch)
            });
        }
    }
}

fn open<'a>(
    model: &'a mut Option<Model>,
    bencher: &Bencher,
    (config, scheme): (ModelConfig, Option<Scheme>),
) -> Result<&'a Model, Failure> {
    if model.is_none() {
        let quantise = scheme.map_or(Quantise::Dense, Quantise::By);
        *model = Some(Model::random_quantised(&bencher.device, config, DTYPE, quantise, 1)?);
    }
    model.as_ref().ok_or_else(|| "there is no model".into())
}

/// The text of a sequence, another for each: the prompt, and the first token that is decoded. The peers have the same.
fn text(model: &Model, sequence: usize) -> Vec<u32> {
    let vocab = model.config().decoder.vocab_size as u32;
    let start = (sequence * (PROMPT + 1)) as u32;
    (start..=start + PROMPT as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect()
}

fn prefill(bencher: &mut Bencher, model: &Model) -> Result<(), Failure> {
    let options = SessionOptions { batch: 1, capacity: PROMPT, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let text = text(model, 0);
    let (samples, joules) = repeat(bencher.meter(), 4, |_| read(&mut session, 0, &text[..PROMPT]))?;
    bencher.record(samples, joules)
}

fn read(session: &mut Session, sequence: usize, prompt: &[u32]) -> Result<(), Error> {
    session.truncate(sequence, 0)?;
    session.prefill(sequence, prompt)?;
    session.stream().synchronize()
}

/// All sequences back at their prompts' ends. A recurrent state goes on while there is room, and then reads its prompt
/// again.
fn rewind(session: &mut Session, texts: &[Vec<u32>]) -> Result<(), Error> {
    let is_full = session.len(0) + STEPS > session.options().capacity;
    for (sequence, text) in texts.iter().enumerate() {
        let is_new = session.len(sequence) < PROMPT;
        if is_new || (session.truncate(sequence, PROMPT).is_err() && is_full) {
            read(session, sequence, &text[..PROMPT])?;
        }
    }
    Ok(())
}

fn decode(bencher: &mut Bencher, model: &Model, batch: usize) -> Result<(), Failure> {
    // A state of fixed size is what cannot go back.
    let is_recurrent = model.config().decoder.cache_bytes(DTYPE, 0) > 0;
    let steps = if is_recurrent { STEPS_ONWARD } else { STEPS };
    let options = SessionOptions { batch, capacity: PROMPT + steps, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let texts: Vec<Vec<u32>> = (0..batch).map(|sequence| text(model, sequence)).collect();
    let mut sampler = SessionSampler::new(&session, SamplingParams::default())?;
    let mut ids: Vec<u32> = texts.iter().map(|text| text[PROMPT]).collect();
    let (samples, joules) = repeat(bencher.meter(), STEPS, |step| {
        if step % STEPS == 0 {
            rewind(&mut session, &texts)?;
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
    /// Elements of the matrices that every token is multiplied by, the head's aside.
    dense: usize,
    head: usize,
    /// Elements of all experts' matrices, and the share that a token is multiplied by.
    experts: usize,
    expert_share: f64,
    /// Bytes of a sequence's caches after the prompt.
    cache: usize,
    /// Operations of attention for one query and one key, in all layers.
    attention: usize,
    /// Bytes of an element of the matrices, the head's aside.
    bytes: f64,
}

impl Cost {
    fn of(config: &ModelConfig, scheme: Option<Scheme>) -> Result<Self, Failure> {
        let d = &config.decoder;
        let bits = |scheme: Scheme| f64::from(scheme.layout().bits_per_weight(d.hidden_size as u32));
        let bytes = scheme.map_or(DTYPE.bytes() as f64, |scheme| bits(scheme) / 8.0);
        let head = d.vocab_size * d.hidden_size;
        let (mut dense, mut experts) = (0, 0);
        for (name, shape) in Model::tensors(config)? {
            let len: usize = shape.iter().product();
            if name.contains(".experts.") {
                experts += len;
            } else if name.contains(".layers.") {
                dense += len;
            }
        }
        let (mut attention, mut expert_share) = (0, 0.0);
        for layer in &d.layers {
            match layer.mixer {
                MixerConfig::Attention(heads) => attention += 4 * heads.heads_q * heads.head_dim,
                // With keys and values made for every head, which is less than against the latent rows.
                MixerConfig::Latent(latent) => {
                    attention += 2 * latent.heads * (latent.head_dim() + latent.value);
                }
                _ => {}
            }
            if let FeedForwardConfig::Moe(moe) = layer.feed_forward {
                expert_share = moe.top_k as f64 / moe.num_experts as f64;
            }
        }
        let cache = d.cache_bytes(DTYPE, PROMPT);
        Ok(Cost { dense, head, experts, expert_share, cache, attention, bytes })
    }

    /// Bytes of the weights with so many elements of experts.
    fn weights(&self, experts: usize) -> usize {
        ((self.dense + experts) as f64 * self.bytes) as usize + self.head * DTYPE.bytes()
    }

    /// Bytes and operations. The head runs for the last token only.
    fn prefill(&self) -> (usize, usize) {
        let pairs = PROMPT * (PROMPT + 1) / 2;
        let matrices = self.dense + (self.experts as f64 * self.expert_share) as usize;
        let bytes = self.weights(self.experts) + self.cache;
        (bytes, 2 * (matrices * PROMPT + self.head) + pairs * self.attention)
    }

    /// The same for a step of `batch` sequences. Of the experts it reads those that some token goes to, if any is as
    /// likely as another: all but `(1 - share)^batch` of them.
    fn decode(&self, batch: usize) -> (usize, usize) {
        let read = |tokens: usize| {
            let unread = (1.0 - self.expert_share).powf(tokens as f64);
            (self.experts as f64 * (1.0 - unread)).round() as usize
        };
        let bytes = self.weights(read(batch)) + batch * self.cache;
        let linear = 2 * (self.dense + read(1) + self.head);
        (bytes, batch * (linear + PROMPT * self.attention))
    }
}

fn work(published: &Published, batch: usize, (bytes, flops): (usize, usize)) -> Result<Work, Failure> {
    let mut shape = json!({ "config": published.json()?, "batch": batch, "prompt": PROMPT, "steps": STEPS });
    if let Some(scheme) = published.scheme {
        shape["weight"] = json!(format!("{:?}", scheme.layout()));
    }
    Ok(Work { dtype: DTYPE.name(), shape, bytes: bytes as u64, flops: flops as u64 })
}
