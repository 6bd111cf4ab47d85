//! Times whole models of published size with random weights: prefill, and decode per token at several batch sizes.
//!
//! `cargo bench --bench models -- [--device …] [--level …] [filter]`. The floor is the time in which the weights (and for
//! decode the cache) can be read at the bandwidth of the device's memory.

use std::path::Path;
use std::time::Instant;

use clap::Parser;
use warpforge::models::{Model, ModelConfig, Sampler, SessionOptions};
use warpforge::ops::sampling::Sampling;
use warpforge::{DType, Device, DeviceChoice, OptLevel};

/// Command line.
#[derive(Parser)]
struct Options {
    /// Only models whose name contains this text.
    filter: Option<String>,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// basic, medium or high.
    #[arg(long, default_value = "high")]
    level: OptLevel,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Tokens to decode.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Sequences that are decoded together.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    batch: Vec<usize>,
    /// What `cargo bench` passes; no effect.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Published configurations: name, and config.json.
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let device = options.device.open()?.with_level(options.level);
    println!("{}", device.describe());
    for (name, config) in MODELS {
        if options.filter.as_deref().is_none_or(|filter| name.contains(filter)) {
            time(&device, name, ModelConfig::from_json(config, Path::new("config.json"))?, &options)?;
        }
    }
    Ok(())
}

fn time(
    device: &Device,
    name: &str,
    config: ModelConfig,
    options: &Options,
) -> Result<(), Box<dyn std::error::Error>> {
    let weight_bytes = weight_bytes(&config);
    let decoder = &config.decoder;
    let cache_bytes = decoder.num_layers * 2 * decoder.heads_kv * decoder.head_dim * DType::BF16.bytes();
    let vocab = decoder.vocab_size as u32;
    let model = Model::random(device, config, DType::BF16, 1)?;
    let floor_ms = |bytes: usize| match device.profile().memory_bandwidth {
        0.0 => "unknown".into(),
        bandwidth => format!("{:.2} ms", bytes as f64 / bandwidth * 1e3),
    };
    let prompt: Vec<u32> =
        (0..options.prompt as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
    for &batch in &options.batch {
        let capacity = options.prompt + options.tokens;
        let mut session = model.session(SessionOptions { batch, capacity, ..SessionOptions::default() })?;
        let mut sampler = Sampler::new(&session, Sampling::Greedy)?;
        // Once to warm up: the driver assembles the images then.
        session.prefill(0, &prompt)?;
        session.stream().synchronize()?;
        session.truncate(0, 0);
        let start = Instant::now();
        session.prefill(0, &prompt)?;
        session.stream().synchronize()?;
        let prefill = start.elapsed().as_secs_f64();
        if batch == options.batch[0] {
            println!(
                "{name}: prefill of {} tokens {:.2} ms ({:.0} tokens/s)",
                options.prompt,
                prefill * 1e3,
                options.prompt as f64 / prefill
            );
        }
        for sequence in 1..batch {
            session.prefill(sequence, &prompt)?;
        }
        let mut ids = vec![1; batch];
        let mut times = Vec::new();
        for _ in 0..options.tokens {
            let start = Instant::now();
            session.decode(&ids)?;
            ids = sampler.sample(&session)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{name}: decode, batch {batch}: {:.3} ms a step ({:.0} tokens/s); memory floor {}",
            median * 1e3,
            batch as f64 / median,
            floor_ms(weight_bytes + batch * options.prompt * cache_bytes)
        );
    }
    let stats = device.pool().stats();
    println!(
        "{name}: {:.2} GiB of device memory at the peak",
        stats.peak_in_use_bytes as f64 / f64::from(1 << 30)
    );
    Ok(())
}

/// Bytes of the weights that a step reads, in bf16: all but the rows of the embedding that it does not look up.
fn weight_bytes(config: &ModelConfig) -> usize {
    let d = &config.decoder;
    let (q, kv) = (d.heads_q * d.head_dim, d.heads_kv * d.head_dim);
    let layer = d.hidden_size * (2 * q + 2 * kv) + 3 * d.hidden_size * d.intermediate_size;
    (d.num_layers * layer + d.vocab_size * d.hidden_size) * DType::BF16.bytes()
}
