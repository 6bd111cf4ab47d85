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
use warpforge::models::{Checkpoint, Logits, Model, Quantise, SessionOptions};
use warpforge::weight::{ScaleType, Scheme};
use warpforge::{DType, Device, DeviceChoice, Error};

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
    /// Tokens of the text that are read, from its beginning.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    tokens: u32,
    /// Tokens that the model sees at once: the text is cut into windows of so many.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
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
    let measure = |dtype, quantise| measure(&device, &checkpoint, dtype, quantise, &windows);

    let tokens: usize = windows.iter().map(|window| window.len()).sum();
    note(format_args!("{tokens} tokens in windows of {}, on {}", options.window, device.describe()));
    let dense = measure(DType::F32, Quantise::Dense)?;
    let (rows, own) = (dense.logits.len() / config.decoder.vocab_size, dense.perplexity());
    note(format_args!("logits of {rows} tokens"));
    output::write(format_args!(
        "| weights | activations | error of the logits | perplexity | change |\n|---|---|---|---|---|\n\
         | dense, f32 | f32 | | {own:.3} | |\n"
    ))?;
    let plain = [DType::F16, DType::BF16].map(|dtype| (format!("dense, {dtype}"), dtype, Quantise::Dense));
    let requantised = schemes().into_iter();
    let requantised = requantised.map(|(name, scheme)| (name, DType::F32, Quantise::Requantise(scheme)));
    let stored = [("as stored".to_owned(), DType::F32, Quantise::AsStored)];
    for (name, dtype, quantise) in plain.into_iter().chain(stored).chain(requantised) {
        let line = match measure(dtype, quantise) {
            Ok(made) => {
                let error = 100.0 * made.error(&dense);
                let (perplexity, change) = (made.perplexity(), 100.0 * (made.perplexity() / own - 1.0));
                format!("| {name} | {dtype} | {error:.2} % | {perplexity:.3} | {change:+.2} % |\n")
            }
            // Groups that are no whole ones, say.
            Err(error) => format!("| {name} | {dtype} | {} | | |\n", output::printable(&error.to_string())),
        };
        output::write(format_args!("{line}"))?;
    }
    Ok(())
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
struct Measured {
    /// Of all tokens, one row after the other.
    logits: Vec<f32>,
    /// Minus the logarithms of the probabilities of those tokens that have one before them, added up.
    surprise: f64,
    predicted: usize,
}

impl Measured {
    fn perplexity(&self) -> f64 {
        (self.surprise / self.predicted as f64).exp()
    }

    /// The root of the sum of the squares of the differences, over that of the other's own.
    fn error(&self, other: &Measured) -> f64 {
        let pairs = std::iter::zip(&self.logits, &other.logits);
        let [error, all] = pairs.fold([0.0f64; 2], |[error, all], (&own, &other)| {
            [error + f64::from(own - other).powi(2), all + f64::from(other).powi(2)]
        });
        (error / all).sqrt()
    }
}

fn measure(
    device: &Device,
    checkpoint: &Checkpoint,
    dtype: DType,
    quantise: Quantise,
    windows: &[&[u32]],
) -> Result<Measured, Error> {
    let model = Model::quantised(device, checkpoint, dtype, quantise, &mut |_| {})?;
    let longest = windows.iter().map(|window| window.len()).max().unwrap_or(0);
    let options = SessionOptions {
        capacity: longest,
        chunk: longest,
        logits: Logits::All,
        ..SessionOptions::default()
    };
    let mut session = model.session(options)?;
    let stream = session.stream().clone();
    let vocab = checkpoint.config().decoder.vocab_size;
    let mut measured = Measured { logits: Vec::new(), surprise: 0.0, predicted: 0 };
    for window in windows {
        session.truncate(0, 0)?;
        let first = measured.logits.len();
        session.prefill_with(0, window, &mut |_, _| Ok(()), &mut |_, rows| {
            measured.logits.extend(rows.to_vec::<f32>(&stream)?);
            Ok(())
        })?;
        for (row, &next) in std::iter::zip(measured.logits[first..].chunks_exact(vocab), &window[1..]) {
            measured.surprise += surprise(row, next);
            measured.predicted += 1;
        }
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
        let of = |quantise| measure(&Device::cpu(), &checkpoint, DType::F32, quantise, &[&ids]);
        let dense = of(Quantise::Dense)?;
        assert_eq!(dense.predicted, ids.len() - 1);
        assert!(dense.perplexity() > 1.0 && dense.perplexity() < 200.0, "{}", dense.perplexity());
        assert_eq!(dense.error(&dense), 0.0);
        let [int8, int4] = [Scheme::INT8, Scheme::INT4]
            .map(|scheme| of(Quantise::Requantise(scheme)).map(|made| made.error(&dense)));
        let (int8, int4) = (int8?, int4?);
        assert!(int8 > 1e-5 && int8 < 0.03 && int4 > 2.0 * int8 && int4 < 0.5, "{int8} {int4}");
        Ok(())
    }
}
