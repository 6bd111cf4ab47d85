//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Parser;
use warpforge::models::CacheType;
use warpforge::{DType, DeviceChoice};

/// Serves a model by HTTP, with the routes of OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models; and
/// /health and /metrics. Ctrl-C or SIGTERM lets requests come to their end, a second one ends them.
#[derive(Parser)]
#[command(name = "serve", version)]
pub struct Options {
    /// Folder with config.json, the safetensors and tokenizer.json; or a GGUF file.
    #[arg(long, default_value = "assets/demo-model")]
    pub model: PathBuf,
    /// What clients call the model. Default: the name of its folder or file.
    #[arg(long)]
    pub name: Option<String>,
    /// Address to listen on. Who can reach it can use the model: there are no keys.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes one that is free, and says which.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Type of weights and activations: f32, bf16 or f16. Default: the checkpoint's on a card, f32 on the CPU.
    #[arg(long, value_parser = parse_dtype)]
    pub dtype: Option<DType>,
    /// Most tokens of a prompt and its answer. Default: 8192, or what the model was made for.
    #[arg(long)]
    pub context: Option<usize>,
    /// Requests that run at a time.
    #[arg(long, default_value_t = 32)]
    pub sequences: usize,
    /// Requests that wait beside them; more are refused with status 429.
    #[arg(long, default_value_t = 128)]
    pub queue: usize,
    /// Tokens of a forward pass: longer ones read prompts faster, shorter ones keep answers fluent.
    #[arg(long, default_value_t = 512)]
    pub step_tokens: usize,
    /// Tokens that are drafted, and verified in one pass; 0: none. Without --draft-model they are what the text has
    /// repeated before, so that answers that quote their prompts come sooner. What is written does not depend on it but
    /// for rounding. Default: 0, with --draft-model 4.
    #[arg(long)]
    pub draft: Option<usize>,
    /// Folder or GGUF file of a smaller model with the same tokens, which drafts. Its caches take memory besides, for
    /// as many tokens as the model's.
    #[arg(long)]
    pub draft_model: Option<PathBuf>,
    /// A LoRA adapter that clients ask for by this name as by a model's: a folder with PEFT's adapter_config.json and
    /// adapter_model.safetensors. May be given several times; requests of different ones share forward passes.
    #[arg(long, value_name = "NAME=DIR", value_parser = parse_lora)]
    pub lora: Vec<(String, PathBuf)>,
    /// Take kernels that give an answer the same bits alone and among others, whatever is reused or drafted. Slower.
    #[arg(long)]
    pub invariant: bool,
    /// Most memory for the caches, in MiB.
    #[arg(long, default_value_t = 4096)]
    pub cache_mib: usize,
    /// What keys and values are stored as: model (its own type), or fp8, for half of the memory.
    #[arg(long, default_value = "model", value_name = "TYPE", value_parser = parse_cache_type)]
    pub cache_type: CacheType,
    /// Seconds that requests have to come to their end after Ctrl-C or SIGTERM.
    #[arg(long, default_value_t = 30)]
    pub grace: u64,
}

fn parse_lora(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => Ok((name.into(), folder.into())),
        _ => Err("expected NAME=DIR".into()),
    }
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    let known = DType::FLOATS.into_iter().find(|dtype| dtype.name() == text);
    known.ok_or_else(|| format!("unknown type {text:?}: expected f32, bf16 or f16"))
}

fn parse_cache_type(text: &str) -> Result<CacheType, String> {
    text.parse().map_err(|error: warpforge::Error| error.to_string())
}
