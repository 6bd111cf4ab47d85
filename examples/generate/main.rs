//! Writes text with a model: `cargo run --release --example generate`.

mod pictures;

use std::collections::HashMap;
use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use pictures::Pictures;
use safetensors::tensor::{Dtype, TensorView};
use tokenizers::Tokenizer;
use warpforge::models::{Logits, Model, ModelConfig, Sampler, SessionOptions};
use warpforge::ops::sampling::{self, Sampling, SamplingProblem};
use warpforge::{DType, DeviceChoice, OptLevel};

/// Writes text with a model of the Qwen3 or GLM family, on the best device there is.
#[derive(Parser)]
struct Options {
    /// Folder with config.json, the safetensors and tokenizer.json.
    #[arg(long, default_value = "assets/demo-model")]
    model: PathBuf,
    /// Text to continue.
    #[arg(long, default_value = "The borrow checker", conflicts_with = "ids")]
    prompt: String,
    /// Token ids to continue, instead of text.
    #[arg(long, value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// A PNG or JPEG file for a model that sees; may be given several times. Images come before the text, or in the places of
    /// single image tokens in it.
    #[arg(long)]
    image: Vec<PathBuf>,
    /// Images that are cut into patches already: a safetensors file with `pixel_values` f32, [patches, numbers], and
    /// `image_grid_thw`, [images, 3].
    #[arg(long, conflicts_with = "image")]
    pixel_values: Option<PathBuf>,
    /// Most tokens to write.
    #[arg(long, default_value_t = 96)]
    max_new_tokens: usize,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Type of weights and activations: f32, bf16 or f16. Default: the checkpoint's on a card, f32 on the CPU.
    #[arg(long, value_parser = parse_dtype)]
    dtype: Option<DType>,
    /// Divides the logits; 0 takes the most likely token each time.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Draws from this many most likely tokens; 0 from all.
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Draws from the most likely tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Seed of the random draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How much of the hardware to use: basic, medium or high.
    #[arg(long, default_value = "high")]
    level: OptLevel,
    /// Print one JSON line with the new ids instead of text.
    #[arg(long)]
    print_ids: bool,
    /// Write the prompt's logits to this file: tensor `logits`, f32, [tokens, vocab].
    #[arg(long)]
    dump_logits: Option<PathBuf>,
    /// Say which kernel each operator takes, and why.
    #[arg(long)]
    report: bool,
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    let known = DType::FLOATS.into_iter().find(|dtype| dtype.name() == text);
    known.ok_or_else(|| format!("unknown type {text:?}: expected f32, bf16 or f16"))
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        eprint!("generate: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            eprint!(": {error}");
            cause = error.source();
        }
        eprintln!();
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let device = options.device.open()?.with_level(options.level);
    let config = ModelConfig::from_dir(&options.model)?;
    let checkpoint_dtype = config.dtype.unwrap_or(DType::BF16);
    let dtype =
        options.dtype.unwrap_or(if device.limits().is_some() { checkpoint_dtype } else { DType::F32 });
    eprintln!("device: {}; weights in {dtype}", device.describe());

    let tokenizer = load_tokenizer(&options.model, options.ids.is_some())?;
    let prompt = match (&options.ids, &tokenizer) {
        (Some(ids), _) => ids.clone(),
        (None, Some(tokenizer)) => {
            let first = config.bos_token_id.filter(|_| adds_bos(&options.model));
            let text = tokenizer.encode(options.prompt.as_str(), true).map_err(text_error)?;
            first.into_iter().chain(text.get_ids().iter().copied()).collect()
        }
        (None, None) => return Err("--prompt needs a tokenizer.json; use --ids without one".into()),
    };
    let (pictures, prompt) = look_at_pictures(options, &config, prompt)?;
    // Loading may take minutes: whatever is wrong with the arguments comes before.
    if prompt.is_empty() {
        return Err("the prompt has no tokens".into());
    }
    let sampling = sampling_of(options);
    let vocab = config.decoder.vocab_size;
    let problem = SamplingProblem { rows: 1, vocab, dtype: DType::F32, method: sampling };
    sampling::Sampler::supports(&device, &problem)?;
    let capacity = prompt.len().saturating_add(options.max_new_tokens);
    let most = config.decoder.max_position_embeddings;
    if capacity > most {
        eprintln!(
            "warning: prompt and continuation are up to {capacity} tokens; the model was made for {most}"
        );
    }

    let started = Instant::now();
    let bar = ProgressBar::new(0)
        .with_style(ProgressStyle::with_template("loading {bytes}/{total_bytes} {bar:40} {eta}")?);
    let model = Model::load(&device, &options.model, dtype, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.loaded_bytes);
    })?;
    bar.finish_and_clear();
    eprintln!("loaded in {:.2} s", started.elapsed().as_secs_f64());
    if !model.report().is_empty() {
        eprintln!("not used: {}", model.report());
    }

    let session_options =
        SessionOptions { capacity, max_patches: pictures.num_patches(), ..SessionOptions::default() };
    let mut session = model.session(if options.dump_logits.is_some() {
        // All rows of logits of a chunk, half a megabyte each for a large vocabulary.
        SessionOptions { chunk: 512, logits: Logits::All, ..session_options }
    } else {
        session_options
    })?;
    if options.report {
        for (phase, reports) in session.optimization_reports() {
            for report in reports {
                eprintln!("{phase}: {report}");
            }
        }
    }

    // The prompt.
    let stream = session.stream().clone();
    let mut dumped: Vec<f32> = Vec::new();
    let started = Instant::now();
    session.prefill_visual_with(0, &prompt, &pictures.visuals(), &mut |_, _| Ok(()), &mut |_, rows| {
        if options.dump_logits.is_some() {
            dumped.extend(rows.to_vec::<f32>(&stream)?);
        }
        Ok(())
    })?;
    stream.synchronize()?;
    let prefill_time = started.elapsed();
    if let Some(path) = &options.dump_logits {
        write_logits(path, &dumped, prompt.len())?;
    }

    // The continuation.
    let mut sampler = Sampler::new(&session, sampling)?;
    let mut text = StreamedText::new(tokenizer.as_ref());
    let mut new_ids = Vec::new();
    let mut out = std::io::stdout();
    let started = Instant::now();
    while new_ids.len() < options.max_new_tokens {
        let id = sampler.sample(&session)?[0];
        new_ids.push(id);
        if config.eos_token_ids.contains(&id) {
            break;
        }
        if !options.print_ids {
            write!(out, "{}", text.push(id)?)?;
            out.flush()?;
        }
        if new_ids.len() < options.max_new_tokens {
            session.decode(&[id])?;
        }
    }
    stream.synchronize()?;
    let decode_time = started.elapsed();
    if options.print_ids {
        println!("{}", serde_json::to_string(&new_ids)?);
    } else {
        writeln!(out, "{}", text.finish()?)?;
    }
    print_speed(prompt.len(), prefill_time, new_ids.len(), decode_time);
    Ok(())
}

fn sampling_of(options: &Options) -> Sampling {
    if options.temperature == 0.0 {
        return Sampling::Greedy;
    }
    let (temperature, top_p, seed) = (options.temperature, options.top_p, options.seed);
    Sampling::Random { temperature, top_k: (options.top_k > 0).then_some(options.top_k), top_p, seed }
}

/// The images, and the prompt with a placeholder for each token of theirs.
fn look_at_pictures(
    options: &Options,
    config: &ModelConfig,
    prompt: Vec<u32>,
) -> Result<(Pictures, Vec<u32>), Box<dyn Error>> {
    if options.image.is_empty() && options.pixel_values.is_none() {
        return Ok((Pictures::default(), prompt));
    }
    let Some(vision) = &config.vision else { return Err("this model does not see images".into()) };
    let pictures = match &options.pixel_values {
        Some(path) => Pictures::from_tensors(vision, path)?,
        None => Pictures::from_files(vision, &options.image)?,
    };
    let prompt = pictures.insert(vision, &prompt)?;
    Ok((pictures, prompt))
}

/// Text as soon as it is whole characters: a token may end in the middle of one. (The tokenizer's own `DecodeStream` keeps what
/// is left at the end to itself.)
struct StreamedText<'a> {
    tokenizer: Option<&'a Tokenizer>,
    /// The last ids whose text was given, and those whose text was not.
    ids: Vec<u32>,
    /// How many the former are. They are decoded with the latter: some decoders write a first token in another way.
    given: usize,
}

impl<'a> StreamedText<'a> {
    fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        StreamedText { tokenizer, ids: Vec::new(), given: 0 }
    }

    /// What there is to write after this id: nothing while a character is not whole.
    fn push(&mut self, id: u32) -> Result<String, Box<dyn Error>> {
        if self.tokenizer.is_none() {
            return Ok(format!("{id} "));
        }
        self.ids.push(id);
        let text = self.rest()?;
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text)
    }

    /// What is left at the end, whole or not.
    fn finish(self) -> Result<String, Box<dyn Error>> {
        self.rest()
    }

    /// The text of the ids that was not given.
    fn rest(&self) -> Result<String, Box<dyn Error>> {
        let Some(tokenizer) = self.tokenizer else { return Ok(String::new()) };
        let decode = |ids: &[u32]| tokenizer.decode(ids, true).map_err(text_error);
        let (given, text) = (decode(&self.ids[..self.given])?, decode(&self.ids)?);
        Ok(text.get(given.len()..).unwrap_or_default().to_owned())
    }
}

fn load_tokenizer(model: &Path, is_optional: bool) -> Result<Option<Tokenizer>, Box<dyn Error>> {
    let path = model.join("tokenizer.json");
    if is_optional && !path.exists() {
        return Ok(None);
    }
    Tokenizer::from_file(&path).map(Some).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Whether a prompt starts with the model's first token: if `add_bos_token` of tokenizer_config.json says so (Qwen3: no).
fn adds_bos(model: &Path) -> bool {
    let Ok(text) = std::fs::read(model.join("tokenizer_config.json")) else { return false };
    let config: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    config.is_some_and(|config| config["add_bos_token"] == true)
}

fn text_error(error: tokenizers::Error) -> Box<dyn Error> {
    format!("tokenizer: {error}").into()
}

fn write_logits(path: &Path, logits: &[f32], tokens: usize) -> Result<(), Box<dyn Error>> {
    let shape = vec![tokens, logits.len() / tokens.max(1)];
    let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(logits))?;
    safetensors::serialize_to_file(HashMap::from([("logits", view)]), None, path)?;
    Ok(())
}

fn print_speed(prompt: usize, prefill: Duration, new: usize, decode: Duration) {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    eprintln!(
        "prompt: {prompt} tokens in {:.1} ms ({:.0} tokens/s); continuation: {new} tokens in {:.1} ms ({:.0} tokens/s)",
        prefill.as_secs_f64() * 1e3,
        rate(prompt, prefill),
        decode.as_secs_f64() * 1e3,
        rate(new, decode)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    type Outcome = Result<(), Box<dyn Error>>;

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model")
    }

    /// The pieces make up the text, none ends in the middle of a character, and few ids are kept; what is cut at the end is there.
    #[test]
    fn streamed_text() -> Outcome {
        let tokenizer = load_tokenizer(&demo(), false)?.ok_or("a tokenizer")?;
        let whole = "The borrow checker … naïve 漢字 🦀🦀 done. ".repeat(20);
        let encoded = tokenizer.encode(whole.as_str(), true).map_err(text_error)?;
        let mut text = StreamedText::new(Some(&tokenizer));
        let mut written = String::new();
        for &id in encoded.get_ids() {
            written += &text.push(id)?;
            assert!(whole.starts_with(&written));
            assert!(text.ids.len() <= 8, "{} ids are kept", text.ids.len());
        }
        assert_eq!(written.clone() + &text.finish()?, whole);

        let crab = tokenizer.encode("a 🦀", true).map_err(text_error)?;
        let ids = crab.get_ids();
        let mut text = StreamedText::new(Some(&tokenizer));
        let pieces: Vec<String> =
            ids[..ids.len() - 1].iter().map(|&id| text.push(id)).collect::<Result<_, _>>()?;
        assert_eq!(pieces.concat().trim_end(), "a");
        assert!(text.finish()?.ends_with('\u{fffd}'));

        let mut text = StreamedText::new(None);
        assert_eq!((text.push(7)? + &text.push(8)?, text.finish()?), ("7 8 ".into(), String::new()));
        Ok(())
    }

    #[test]
    fn first_tokens() -> Outcome {
        assert!(adds_bos(&demo()));
        let folder = tempfile::tempdir()?;
        assert!(!adds_bos(folder.path()), "without the file");
        for (text, want) in
            [("{}", false), (r#"{"add_bos_token": false}"#, false), (r#"{"add_bos_token": true}"#, true)]
        {
            std::fs::write(folder.path().join("tokenizer_config.json"), text)?;
            assert_eq!(adds_bos(folder.path()), want, "{text}");
        }
        Ok(())
    }

    /// A checkpoint that cannot be loaded: what is wrong with the arguments is said before that is.
    #[test]
    fn arguments_are_checked_before_loading() -> Outcome {
        let folder = tempfile::tempdir()?;
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(demo().join(file), folder.path().join(file))?;
        }
        let message = |arguments: &[&str]| {
            let model = folder.path().to_str().unwrap_or_default();
            let all = [&["generate", "--device", "cpu", "--model", model], arguments].concat();
            run(&Options::parse_from(all)).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(
            message(&["--temperature", "-1"]).contains("temperature"),
            "{}",
            message(&["--temperature", "-1"])
        );
        let top_p = message(&["--temperature", "1", "--top-p", "7"]);
        assert!(top_p.contains("top_p"), "{top_p}");
        assert_eq!(message(&["--prompt", ""]), "the prompt has no tokens");
        assert!(message(&["--ids", "1,2"]).starts_with("no weights in "), "{}", message(&["--ids", "1,2"]));
        Ok(())
    }
}
