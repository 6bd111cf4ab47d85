//! Whole models of published size with random weights, over the ranks of a group: what of one card's time is left over
//! several, prefill and decode steps. `cargo bench --bench ranks -- --help`.
//!
//! Timed by the clock at rank 0 around a call and its synchronisation, the choice of the next tokens included, as in
//! `--bench ops`; the first two calls, which warm up and record, are left out, and the median is told.

#[path = "common/named.rs"]
mod named;

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use serde_json::json;
use warpforge::group::Group;
use warpforge::models::{
    ExpertSharding, FeedForwardConfig, LayerConfig, Model, SessionOptions, SessionSampler, Shard,
};
use warpforge::ops::matmul::Activations;
use warpforge::ops::sampling::SamplingParams;
use warpforge::{DType, Device, DeviceChoice};

use named::Named;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
struct Options {
    /// Names of files in assets/configs, without .json; behind a colon a scheme: qwen3-coder-next:fp8; behind an @
    /// layers, if not all.
    #[arg(long, value_delimiter = ',', default_value = "qwen3-4b-instruct-2507")]
    models: Vec<String>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    ranks: Vec<usize>,
    /// How several ranks share the experts of mixtures: tensor, expert, or both of them in turn.
    #[arg(long, value_delimiter = ',', default_value = "tensor")]
    experts: Vec<ExpertSharding>,
    /// Whether rows become fp8 before products with fp8 weights.
    #[arg(long)]
    fp8_activations: bool,
    /// cuda, a card for each rank, or cpu.
    #[arg(long, default_value = "cuda")]
    device: DeviceChoice,
    /// Sequences of a decode step.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    batches: Vec<usize>,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Decode steps from one prompt.
    #[arg(long, default_value_t = 48)]
    steps: usize,
    /// Type of weights and activations.
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Adds a JSON line for each case to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Of cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// Numbers of ranks and ways to share the experts, each that makes a difference for the model.
    fn groups(&self, named: &Named) -> Vec<(usize, ExpertSharding)> {
        let mixes = |layer: &LayerConfig| matches!(layer.feed_forward, FeedForwardConfig::Moe(_));
        let is_mixture = named.config.decoder.layers.iter().any(mixes);
        let ways = |&ranks: &usize| {
            let count = if ranks > 1 && is_mixture { self.experts.len() } else { 1 };
            self.experts.iter().take(count).map(move |&experts| (ranks, experts))
        };
        self.ranks.iter().flat_map(ways).collect()
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Milliseconds of each case at a rank, with the bytes that its device has in use.
fn times(shard: Shard<'_>, named: &Named, options: &Options) -> Result<Vec<(String, f64)>, Failure> {
    let &Options { prompt, steps, dtype, .. } = options;
    let started = Instant::now();
    let model = Model::random_of_rank(shard, named.config.clone(), dtype, named.quantise, 1)?;
    let activations = if options.fp8_activations { Activations::Fp8 } else { Activations::AsGiven };
    let model = model.with_activations(activations);
    let mut times = vec![("make".to_owned(), started.elapsed().as_secs_f64() * 1e3)];
    let vocab = named.config.decoder.vocab_size as u32;
    let text = |sequence: usize| -> Vec<u32> {
        let start = (sequence * (prompt + 1)) as u32;
        (start..start + prompt as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect()
    };
    {
        let session = SessionOptions { capacity: prompt, ..SessionOptions::default() };
        let (mut session, text) = (model.session(session)?, text(0));
        let samples = (0..6).map(|_| -> Result<f64, Failure> {
            session.truncate(0, 0)?;
            let start = Instant::now();
            session.prefill(0, &text)?;
            session.stream().synchronize()?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        });
        let samples = samples.collect::<Result<Vec<f64>, _>>()?;
        times.push((format!("prefill {prompt}"), median(samples[2..].to_vec())));
    }
    for &batch in &options.batches {
        let session = SessionOptions { batch, capacity: prompt + steps, ..SessionOptions::default() };
        let mut session = model.session(session)?;
        for sequence in 0..batch {
            session.prefill(sequence, &text(sequence))?;
        }
        let mut sampler = SessionSampler::new(&session, SamplingParams::default())?;
        let mut ids: Vec<u32> = (0..batch as u32).collect();
        let samples = (0..steps).map(|_| -> Result<f64, Failure> {
            let start = Instant::now();
            session.decode(&ids)?;
            ids = sampler.sample(&session)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        });
        let samples = samples.collect::<Result<Vec<f64>, _>>()?;
        times.push((format!("decode {batch}"), median(samples[2.min(samples.len())..].to_vec())));
    }
    times.push((
        "GiB".to_owned(),
        model.device().pool().stats().peak_in_use_bytes as f64 / (1u64 << 30) as f64,
    ));
    Ok(times)
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let device = |ordinal: usize| match options.device {
        DeviceChoice::Cuda(first) => Device::cuda(first + ordinal),
        other => other.open(),
    };
    for name in &options.models {
        let named = Named::new(name)?;
        let mut first: Vec<(String, f64)> = Vec::new();
        for (ranks, experts) in options.groups(&named) {
            let devices = (0..ranks).map(device).collect::<Result<Vec<_>, _>>()?;
            let card = devices[0].describe();
            let outcomes = Group::new(&devices)?
                .run(|rank| times(Shard::from(rank).with_experts(experts), &named, &options));
            let outcome: Result<Vec<_>, Failure> = outcomes.into_iter().collect();
            let sharding = format!("{experts:?}").to_lowercase();
            let of_ranks = match outcome {
                Ok(of_ranks) => of_ranks,
                // The others are told all the same.
                Err(error) => {
                    println!("{name}, {ranks} ranks, {sharding}: {error}");
                    continue;
                }
            };
            for (case, ms) in &of_ranks[0] {
                let one = first.iter().find(|(other, _)| other == case).map(|(_, one)| ms / one);
                let share = one.map_or(String::new(), |share| format!("  {share:.2} of one"));
                println!("{name}, {ranks} ranks, {sharding}, {case}: {ms:.3}{share}");
                if let Some(path) = &options.json {
                    let line = json!({
                        "model": name, "ranks": ranks, "experts": sharding, "case": case, "value": ms, "device": card,
                        "dtype": options.dtype.name(),
                    });
                    use std::io::Write;
                    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
                    writeln!(file, "{line}")?;
                }
            }
            if ranks == 1 {
                first = of_ranks.into_iter().next().unwrap_or_default();
            }
        }
    }
    Ok(())
}
