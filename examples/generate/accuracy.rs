//! What quantising costs: perplexity of a text and error of the logits, by each scheme.
//!
//! `cargo run --release --package generate --bin accuracy -- --model MODEL --text FILE`

#[path = "../language/mod.rs"]
mod language;
#[path = "../output/mod.rs"]
mod output;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use output::{Failure, note};
use warpforge::models::{CacheType, Checkpoint, Logits, Model, Quantise, SessionOptions};
use warpforge::ops::matmul::Activations;
use warpforge::weight::{ScaleType, Scheme};
use warpforge::{DType, Device, DeviceChoice};

/// Compares a model with what quantising makes of it, over a text that it was not trained on. Writes a table.
#[derive(Parser)]
#[command(name = "accuracy", version)]
struct Options {
    /// Folder with config.json, the safetensors and tokenizer.json, or a GGUF file.
    #[arg(long, default_value = "assets/demo-model")]
    model: PathBuf,
    /// The text, in UTF-8.
    #[arg(long)]
    text: PathBuf,
    /// Tokens of the text that are read, from its beginning. The logits of all of them are kept, tokens · vocab · 4
    /// bytes.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1 << 16))]
    tokens: u32,
    /// Tokens that the model sees at once: the text is cut into windows of so many.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 16))]
    window: u32,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

fn main() -> ExitCode {
    output::end("accuracy", run(&Options::parse()).map(|()| ExitCode::SUCCESS))
}

fn run(options: &Options) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let config = checkpoint.config();
    let codec = language::codec(&options.model, config)?.ok_or("the model has no tokenizer")?;
    let text = std::fs::read_to_string(&options.text)
        .map_err(|error| format!("cannot read {}: {error}", options.text.display()))?;
    let mut ids = codec.encode(&text)?;
    ids.truncate(options.tokens as usize);
    let windows: Vec<&[u32]> =
        ids.chunks(options.window as usize).filter(|window| window.len() > 1).collect();
    if windows.is_empty() {
        return Err(format!("{}: expected two tokens at least", options.text.display()).into());
    }
    let device = options.device.open()?;
    // Of a checkpoint without int8 of its own only what is quantised as it is loaded has rows that become so.
    let int8 = Checkpoint::open(&options.model)?.with_activations(Activations::Int8);
    let checkpoint = checkpoint.with_activations(Activations::AsGiven);

    let tokens: usize = windows.iter().map(|window| window.len()).sum();
    note(format_args!("{tokens} tokens in windows of {}, on {}", options.window, device.describe()));
    let of = |name: &str, quantise| Tried { name: name.into(), quantise, ..Tried::default() };
    let dense = of("dense, f32", Quantise::Dense);
    let dense = measure(&device, &checkpoint, &dense, &windows, None)?;
    let own = dense.perplexity();
    output::write(format_args!(
        "| weights | activations | error of the logits | perplexity | change |\n|---|---|---|---|---|\n\
         | dense, f32 | f32 | | {own:.3} | |\n"
    ))?;
    let mut all: Vec<Tried> = [DType::F16, DType::BF16]
        .map(|dtype| Tried { dtype, ..of(&format!("dense, {dtype}"), Quantise::Dense) })
        .into();
    let in_fp8 = of("dense, bf16, keys and values in fp8", Quantise::Dense);
    all.push(Tried { dtype: DType::BF16, cache_type: CacheType::Fp8, ..in_fp8 });
    all.push(of("as stored", Quantise::AsStored));
    let by_int8 = of("int8", Quantise::Requantise(Scheme::INT8));
    all.push(Tried { rows_become_int8: true, ..by_int8 });
    all.extend(schemes().into_iter().map(|(name, scheme)| of(&name, Quantise::Requantise(scheme))));
    for (name, projections) in [("int8", Scheme::INT8), ("int4", Scheme::INT4)] {
        let quantise = Quantise::WithTables { projections, tables: Scheme::INT8 };
        all.push(of(&format!("floats by {name}, their tables by int8"), quantise));
    }
    for tried in &all {
        let Tried { name, dtype, rows_become_int8, .. } = tried;
        let (checkpoint, rows) =
            if *rows_become_int8 { (&int8, "int8") } else { (&checkpoint, dtype.name()) };
        let line = match measure(&device, checkpoint, tried, &windows, Some(&dense.logits)) {
            Ok(made) => {
                let error = 100.0 * made.error();
                let (perplexity, change) = (made.perplexity(), 100.0 * (made.perplexity() / own - 1.0));
                format!("| {name} | {rows} | {error:.2} % | {perplexity:.3} | {change:+.2} % |\n")
            }
            // Groups that are no whole ones, say.
            Err(error) => format!("| {name} | {rows} | {} | | |\n", output::printable(&error.to_string())),
        };
        output::write(format_args!("{line}"))?;
    }
    Ok(())
}

/// What a model is made of and computes in.
#[derive(Clone)]
struct Tried {
    name: String,
    dtype: DType,
    quantise: Quantise,
    rows_become_int8: bool,
    cache_type: CacheType,
}

impl Default for Tried {
    fn default() -> Self {
        Tried {
            name: String::new(),
            dtype: DType::F32,
            quantise: Quantise::AsStored,
            rows_become_int8: false,
            cache_type: CacheType::Model,
        }
    }
}

/// The named ones, and others of four bits.
fn schemes() -> Vec<(String, Scheme)> {
    let named = Scheme::NAMED.map(|(name, scheme)| (name.to_owned(), scheme));
    let small = Scheme { group: 32, ..Scheme::INT4 };
    let others = [
        ("int4 in groups of 32", small),
        ("int4 in groups of 32, zero points", Scheme { asymmetric: true, scale: ScaleType::F16, ..small }),
        ("int4 in groups of 32, 95 % covered", Scheme { percentile: 0.95, ..small }),
    ];
    named.into_iter().chain(others.map(|(name, scheme)| (name.to_owned(), scheme))).collect()
}

/// What a model has said of the text.
#[derive(Default)]
struct Measured {
    /// Of all tokens, one row after the other, where there were none to compare with.
    logits: Vec<f32>,
    /// The sums of the squares of the differences to those, and of the squares of those.
    squares: [f64; 2],
    /// Minus the logarithms of the probabilities of those tokens that have one before them, added up.
    surprise: f64,
    predicted: usize,
}

impl Measured {
    fn perplexity(&self) -> f64 {
        (self.surprise / self.predicted as f64).exp()
    }

    /// The root of the differences' squares over the others'.
    fn error(&self) -> f64 {
        let [differences, all] = self.squares;
        (differences / all).sqrt()
    }
}

/// Reads the windows; beside the logits that another model had of them, or keeping its own.
fn measure(
    device: &Device,
    checkpoint: &Checkpoint,
    tried: &Tried,
    windows: &[&[u32]],
    beside: Option<&[f32]>,
) -> Result<Measured, Failure> {
    let &Tried { dtype, quantise, cache_type, .. } = tried;
    let model = Model::quantised(device, checkpoint, dtype, quantise, &mut |_| {})?;
    let longest = windows.iter().map(|window| window.len()).max().unwrap_or(0);
    let options = SessionOptions {
        capacity: longest,
        chunk: longest,
        logits: Logits::All,
        cache_type,
        ..SessionOptions::default()
    };
    let mut session = model.session(options)?;
    let stream = session.stream().clone();
    let vocab = checkpoint.config().decoder.vocab_size;
    let mut measured = Measured::default();
    if beside.is_none() {
        let tokens: usize = windows.iter().map(|window| window.len()).sum();
        let failed =
            |_| format!("no memory for the logits of {tokens} tokens, {vocab} each: give fewer by --tokens");
        measured.logits.try_reserve_exact(tokens * vocab).map_err(failed)?;
    }
    let mut others = beside.unwrap_or_default();
    for window in windows {
        session.truncate(0, 0)?;
        let mut rows = Vec::new();
        session.prefill_with(0, window, &mut |_, _| Ok(()), &mut |_, chunk| {
            rows.extend(chunk.to_vec::<f32>(&stream)?);
            Ok(())
        })?;
        for (row, &next) in std::iter::zip(rows.chunks_exact(vocab), &window[1..]) {
            measured.surprise += surprise(row, next);
            measured.predicted += 1;
        }
        if beside.is_none() {
            measured.logits.extend(rows);
            continue;
        }
        let (own, rest) = others.split_at(rows.len());
        others = rest;
        let pairs = std::iter::zip(&rows, own);
        measured.squares = pairs.fold(measured.squares, |[differences, all], (&row, &own)| {
            [differences + f64::from(row - own).powi(2), all + f64::from(own).powi(2)]
        });
    }
    Ok(measured)
}

/// Minus the logarithm of a token's probability.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    let own = logits.get(token as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit));
    largest + sum.ln() - own
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn surprise_of_equal_and_of_sure_tokens() {
        assert!((surprise(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
        assert!(surprise(&[1000.0, -1000.0], 0) == 0.0 && surprise(&[1000.0, -1000.0], 1) == 2000.0);
    }

    /// Fewer bits are further off; the text is more likely than by chance.
    #[test]
    fn the_demo_model() -> Result<(), Failure> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo-model");
        let checkpoint = Checkpoint::open(&folder)?;
        let codec = language::codec(&folder, checkpoint.config())?.ok_or("a tokenizer")?;
        let ids = codec.encode("Returns an iterator over the elements of the slice, in order.")?;
        let of = |quantise, beside: Option<&[f32]>| {
            measure(&Device::cpu(), &checkpoint, &Tried { quantise, ..Tried::default() }, &[&ids], beside)
        };
        let dense = of(Quantise::Dense, None)?;
        assert_eq!(dense.predicted, ids.len() - 1);
        assert!(dense.perplexity() > 1.0 && dense.perplexity() < 200.0, "{}", dense.perplexity());
        let error = |quantise| of(quantise, Some(&dense.logits)).map(|made| made.error());
        assert_eq!(error(Quantise::Dense)?, 0.0);
        let int8 = error(Quantise::Requantise(Scheme::INT8))?;
        let int4 = error(Quantise::Requantise(Scheme::INT4))?;
        assert!(int8 > 1e-5 && int8 < 0.03 && int4 > 2.0 * int8 && int4 < 0.5, "{int8} {int4}");
        Ok(())
    }
}
