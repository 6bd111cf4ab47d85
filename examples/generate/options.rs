//! The command line.

use std::path::PathBuf;

use clap::Parser;
#[cfg(not(feature = "hub"))]
use warpforge::models::cached_repo;
#[cfg(feature = "hub")]
use warpforge::models::download_repo;
use warpforge::models::{CacheType, Checkpoint, ExpertSharding, GenerationConfig, ModelError, Quantise};
use warpforge::ops::matmul::Activations;
use warpforge::ops::sampling::SamplingParams;
use warpforge::weight::Scheme;
use warpforge::{DType, Device, DeviceChoice, Invariance, OptLevel};

use crate::output::Failure;

/// Writes text with a model of the Qwen3 or GLM family, on the best device there is.
#[derive(Parser)]
#[command(name = "generate", version)]
pub struct Options {
    /// Folder with config.json, the safetensors and tokenizer.json; a GGUF file; or a repository of the Hugging Face
    /// hub, org/name, that is in its cache, or in a build with the feature hub is downloaded into it.
    #[arg(long, default_value = "assets/demo-model")]
    pub model: PathBuf,
    /// Text to continue, or with --chat what to ask; - reads standard input, as does a pipe without --prompt.
    #[arg(long, conflicts_with = "ids")]
    pub prompt: Option<String>,
    /// Token ids to continue, instead of text.
    #[arg(long, value_delimiter = ',')]
    pub ids: Option<Vec<u32>>,
    /// Ask and answer by the model's chat template: one turn with --prompt, else a conversation from the terminal.
    #[arg(long, conflicts_with = "ids")]
    pub chat: bool,
    /// What the model is told before the conversation.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// A variable of the chat template, as JSON: enable_thinking=false; may be given several times.
    #[arg(long, requires = "chat", value_name = "NAME=JSON")]
    pub template_variable: Vec<String>,
    /// A PNG or JPEG file for a model that sees; may be given several times. Images come before the text, or in the
    /// places of single image tokens in it.
    #[arg(long)]
    pub image: Vec<PathBuf>,
    /// Images that are cut into patches already: a safetensors file with `pixel_values` f32, [patches, numbers], and
    /// `image_grid_thw`, [images, 3].
    #[arg(long, conflicts_with = "image")]
    pub pixel_values: Option<PathBuf>,
    /// Most tokens to write. Default: 96, with --chat 1024.
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
    /// Tokens that there is room for. Default: those of the prompt and of --max-new-tokens; for a conversation 8192, or
    /// what the model was made for.
    #[arg(long)]
    pub context: Option<usize>,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Devices that have the model together, each a part of it: 0,1 are cuda:0 and cuda:1. Of cards NCCL is needed.
    #[arg(long, value_delimiter = ',', value_parser = parse_device, conflicts_with = "device")]
    pub devices: Vec<DeviceChoice>,
    /// How --devices share the experts of a mixture: tensor (each has some columns of all) or expert (each has some).
    #[arg(long, default_value = "tensor", value_parser = parse_experts)]
    pub experts: ExpertSharding,
    /// Type of weights and activations: f32, bf16 or f16. Default: the checkpoint's on a card, f32 on the CPU.
    #[arg(long, value_parser = parse_dtype)]
    pub dtype: Option<DType>,
    /// Folder of a LoRA adapter (PEFT's adapter_config.json and adapter_model.safetensors), which is added to the
    /// weights as they are loaded. The model's may not be quantised.
    #[arg(long)]
    pub lora: Option<PathBuf>,
    /// What becomes of the weights of projections: as-stored, dense (dequantised), or quantised as they are loaded:
    /// int8, int4, fp8, fp8-channel, mxfp4, nvfp4 or e6m9 (16-bit floats, for weights in f32); with requantise- before
    /// it also those that are quantised already, with + and a second scheme the tables of embedding and head too
    /// (int4+int8).
    #[arg(long, default_value = "as-stored", value_name = "SCHEME", value_parser = parse_quantise)]
    pub quant: Quantise,
    /// What becomes of rows before products with quantised weights: as-given; fp8 before fp8 weights, where kernels
    /// multiply both; int8 before int8 weights of linear layers that have a scale for each row. Default: what the
    /// checkpoint says.
    #[arg(long, value_parser = parse_activations)]
    pub activations: Option<Activations>,
    /// What keys and values are stored as: model (its own type), or fp8, for half of the memory.
    #[arg(long, default_value = "model", value_name = "TYPE", value_parser = parse_cache_type)]
    pub cache_type: CacheType,
    /// Divides the logits; 0 takes the most likely token each time. Default: generation_config.json's, or 0.
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Draws from this many most likely tokens; 0 from all. Default: generation_config.json's, or 0 if it has none.
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Draws from the most likely tokens that together have this probability. Default: generation_config.json's, or 1.
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Draws from tokens that are at least this part as probable as the most probable one. Default:
    /// generation_config.json's, or 0.
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that the text has already, above 1 against repetition. Default:
    /// generation_config.json's, or 1.
    #[arg(long, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the random draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How much of the hardware to use: basic, medium or high.
    #[arg(long, default_value = "high")]
    pub level: OptLevel,
    /// Take kernels that give a text the same bits alone and among others, in chunks and token by token. Slower.
    #[arg(long)]
    pub invariant: bool,
    /// Print one JSON line with the new ids instead of text.
    #[arg(long, conflicts_with = "chat")]
    pub print_ids: bool,
    /// Write the prompt's logits to this file: tensor `logits`, f32, [tokens, vocab].
    #[arg(long, conflicts_with = "chat")]
    pub dump_logits: Option<PathBuf>,
    /// Look at each layer's tensors, and stop at the first value that is infinite or NaN. Takes longer.
    #[arg(long)]
    pub check: bool,
    /// Say which kernel each operator takes, and why.
    #[arg(long)]
    pub report: bool,
}

/// A number is a card's ordinal.
fn parse_device(text: &str) -> Result<DeviceChoice, String> {
    text.parse().map(DeviceChoice::Cuda).or_else(|_| text.parse())
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    let known = DType::FLOATS.into_iter().find(|dtype| dtype.name() == text);
    known.ok_or_else(|| format!("unknown type {text:?}: expected f32, bf16 or f16"))
}

fn parse_experts(text: &str) -> Result<ExpertSharding, String> {
    text.parse().map_err(|error: warpforge::Error| error.to_string())
}

fn parse_cache_type(text: &str) -> Result<CacheType, String> {
    text.parse().map_err(|error: warpforge::Error| error.to_string())
}

fn parse_activations(text: &str) -> Result<Activations, String> {
    match text {
        "as-given" => Ok(Activations::AsGiven),
        "fp8" => Ok(Activations::Fp8),
        "int8" => Ok(Activations::Int8),
        _ => Err(format!("unknown kind {text:?}: expected as-given, fp8 or int8")),
    }
}

fn parse_quantise(text: &str) -> Result<Quantise, String> {
    text.parse().map_err(|_| {
        let schemes = Scheme::NAMED.map(|(name, _)| name).join(", ");
        format!(
            "unknown scheme {text:?}: expected as-stored, dense, a scheme ({schemes}), requantise- and a scheme, or two schemes with + between"
        )
    })
}

/// A repository of the hub, from its cache alone.
#[cfg(not(feature = "hub"))]
fn repository(name: &str) -> Result<PathBuf, ModelError> {
    cached_repo(name, None)
}

/// A repository of the hub, from its cache or else from the hub.
#[cfg(feature = "hub")]
fn repository(name: &str) -> Result<PathBuf, ModelError> {
    let bar = indicatif::ProgressBar::no_length();
    let style = indicatif::ProgressStyle::with_template("{msg} {bytes} of {total_bytes}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    let folder = download_repo(name, None, &mut |progress| {
        bar.set_message(progress.file.to_owned());
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
    });
    bar.finish_and_clear();
    folder
}

impl Options {
    /// The checkpoint with the activations that were asked for.
    pub fn checkpoint(&self) -> Result<Checkpoint, Failure> {
        let checkpoint = Checkpoint::open(&self.model)?;
        Ok(match self.activations {
            None => checkpoint,
            Some(activations) => checkpoint.with_activations(activations),
        })
    }

    /// A model that is no path here is a repository's name, if it looks like one.
    pub fn found(mut self) -> Result<Self, Failure> {
        let name =
            self.model.to_str().filter(|name| name.split('/').filter(|part| !part.is_empty()).count() == 2);
        if let Some(name) = name.filter(|name| !name.starts_with('/') && !self.model.exists()) {
            let folder = repository(name);
            self.model =
                folder.map_err(|error| format!("{} does not exist, and {error}", self.model.display()))?;
        }
        Ok(self)
    }

    /// The device, or those of a group.
    pub fn devices(&self) -> Result<Vec<Device>, Failure> {
        let choices = if self.devices.is_empty() { vec![self.device] } else { self.devices.clone() };
        let invariance = if self.invariant { Invariance::Batch } else { Invariance::None };
        let devices = choices
            .into_iter()
            .map(|choice| Ok(choice.open()?.with_level(self.level).with_invariance(invariance)));
        devices.collect()
    }

    /// Most tokens of an answer.
    pub fn max_new_tokens(&self) -> usize {
        self.max_new_tokens.unwrap_or(if self.chat { 1024 } else { 96 })
    }

    /// What the flags say of sampling, over the model's own.
    pub fn sampling(&self, model: &GenerationConfig) -> Result<SamplingParams, Failure> {
        let of_flags = self.temperature.is_some_and(|temperature| temperature != 0.0);
        let mut config = *model;
        if of_flags && !model.do_sample {
            // The model has no opinion: as drawn from all.
            config = GenerationConfig { do_sample: true, top_k: None, top_p: 1.0, min_p: 0.0, ..config };
        }
        config.temperature = self.temperature.unwrap_or(config.temperature);
        if let Some(top_k) = self.top_k {
            config.top_k = (top_k > 0).then_some(top_k);
        }
        config.top_p = self.top_p.unwrap_or(config.top_p);
        config.min_p = self.min_p.unwrap_or(config.min_p);
        config.repetition_penalty = self.repetition_penalty.unwrap_or(config.repetition_penalty);
        let sampling = config.sampling(self.seed);
        let bounds = self.top_k.is_some_and(|k| k > 0)
            || self.top_p.is_some_and(|p| p != 1.0)
            || self.min_p.is_some_and(|p| p != 0.0);
        if sampling.temperature == 0.0 && bounds {
            let reason = "--top-k, --top-p and --min-p bound what is drawn from, and nothing is drawn: give --temperature";
            return Err(reason.into());
        }
        Ok(sampling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &[&str]) -> Options {
        Options::parse_from([&["generate"], arguments].concat())
    }

    #[test]
    fn a_model_is_a_path_or_a_name() {
        for path in [".", "no-such-folder", "/no/such", "no/such/folder", "src/../.."] {
            let found = of(&["--model", path]).found().map(|options| options.model);
            assert_eq!(found.expect("as it is"), PathBuf::from(path));
        }
    }

    /// With the feature the hub would be asked.
    #[cfg(not(feature = "hub"))]
    #[test]
    fn a_name_that_is_not_cached() {
        let message = of(&["--model", "no-such-org/name"]).found().err().expect("no such model").to_string();
        let expected = "no-such-org/name does not exist, and no-such-org/name is not in the hub's cache: ";
        assert!(message.starts_with(expected), "{message}");
    }

    #[test]
    fn flags_over_the_model() -> Result<(), Failure> {
        let plain = GenerationConfig::default();
        let qwen =
            GenerationConfig { do_sample: true, temperature: 0.6, top_k: Some(20), top_p: 0.95, ..plain };
        let penalised = GenerationConfig { min_p: 0.1, repetition_penalty: 1.1, ..qwen };
        let greedy = SamplingParams::default();
        let random = |temperature, top_k, top_p| SamplingParams { temperature, top_k, top_p, ..greedy };
        for (model, arguments, want) in [
            (plain, &[][..], greedy),
            (plain, &["--temperature", "0.5"], random(0.5, None, 1.0)),
            (plain, &["--temperature", "0.5", "--top-k", "7"], random(0.5, Some(7), 1.0)),
            (plain, &["--top-k", "0", "--top-p", "1"], greedy),
            (qwen, &[], random(0.6, Some(20), 0.95)),
            (qwen, &["--temperature", "0"], greedy),
            (qwen, &["--temperature", "1", "--top-k", "0"], random(1.0, None, 0.95)),
            (qwen, &["--top-p", "0.5"], random(0.6, Some(20), 0.5)),
            (
                penalised,
                &[],
                SamplingParams { min_p: 0.1, repetition_penalty: 1.1, ..random(0.6, Some(20), 0.95) },
            ),
            (penalised, &["--min-p", "0", "--repetition-penalty", "1"], random(0.6, Some(20), 0.95)),
            (penalised, &["--temperature", "0"], SamplingParams { repetition_penalty: 1.1, ..greedy }),
            (
                plain,
                &["--temperature", "1", "--min-p", "0.2"],
                SamplingParams { min_p: 0.2, ..random(1.0, None, 1.0) },
            ),
        ] {
            assert_eq!(of(arguments).sampling(&model)?, want, "{arguments:?}");
        }
        for arguments in [
            &["--top-k", "5"][..],
            &["--top-p", "0.5"],
            &["--min-p", "0.5"],
            &["--temperature", "0", "--top-k", "5"],
        ] {
            let message = of(arguments).sampling(&plain).err().ok_or("an error")?.to_string();
            assert!(message.ends_with("give --temperature"), "{message}");
        }
        Ok(())
    }

    #[test]
    fn devices_by_number_or_name() {
        let devices = of(&["--devices", "0,cuda:3,cpu"]).devices;
        assert_eq!(devices, [DeviceChoice::Cuda(0), DeviceChoice::Cuda(3), DeviceChoice::Cpu]);
        assert!(of(&[]).devices.is_empty());
    }

    #[test]
    fn what_does_not_go_together() {
        for arguments in [
            &["--prompt", "a", "--ids", "1"][..],
            &["--chat", "--ids", "1"],
            &["--system", "a"],
            &["--chat", "--print-ids"],
            &["--dtype", "i8"],
            &["--device", "cpu", "--devices", "0,1"],
            &["--devices", "0,tpu"],
        ] {
            assert!(Options::try_parse_from([&["generate"], arguments].concat()).is_err(), "{arguments:?}");
        }
        let version = Options::try_parse_from(["generate", "--version"]).err().map(|error| error.to_string());
        assert_eq!(version.as_deref(), Some(concat!("generate ", env!("CARGO_PKG_VERSION"), "\n")));
    }
}
