//! An architecture that warpforge does not know, in a crate of its own: Phi-3, whose q, k and v are stored as one
//! matrix, and whose gate and up projections are too.
//!
//! Two things are needed: [`read_config`] makes a `ModelConfig` of its `config.json`, from the parts that decoders
//! have; [`stored`] says where its tensors are. The rest is warpforge's: operators, caches, sessions and batches.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use warpforge::models::{
    AttentionConfig, Checkpoint, DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, MlpConfig,
    ModelConfig, NormConfig, RopeConfig, RopeKind, StoredName,
};
use warpforge::ops::glu::Activation;
use warpforge::ops::rmsnorm::NormWeight;

/// What of a Phi-3 `config.json` has an effect here.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: f64,
    hidden_act: String,
    #[serde(default)]
    sliding_window: Option<usize>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    rope_scaling: Option<Value>,
    #[serde(default)]
    attention_bias: bool,
    /// All other keys.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys without an effect on what a model computes.
const IDLE: [&str; 15] = [
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "embd_pdrop",
    "eos_token_id",
    "initializer_range",
    "original_max_position_embeddings",
    "pad_token_id",
    "resid_pdrop",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "dtype",
];

/// The model that a `config.json` of this text describes.
///
/// **Errors**: text that is not such a JSON, and what it asks for that these parts cannot do.
pub fn read_config(json: &str) -> Result<ModelConfig, Box<dyn Error>> {
    let config: Config = serde_json::from_str(json)?;
    for (key, value, wanted) in [
        ("model_type", config.model_type.as_str(), "phi3"),
        ("hidden_act", config.hidden_act.as_str(), "silu"),
        ("rope_scaling", config.rope_scaling.as_ref().map_or("null", |_| "a scaling"), "null"),
        ("attention_bias", if config.attention_bias { "true" } else { "false" }, "false"),
    ] {
        if value != wanted {
            return Err(format!("config.json: {key}: expected {wanted}, got {value}").into());
        }
    }
    if config.num_attention_heads == 0 {
        return Err("config.json: num_attention_heads: expected at least 1, got 0".into());
    }
    let head_dim = config.hidden_size / config.num_attention_heads;
    let layer = LayerConfig {
        mixer: MixerConfig::Attention(AttentionConfig {
            heads_q: config.num_attention_heads,
            heads_kv: config.num_key_value_heads,
            head_dim,
            bias: false,
            output_bias: false,
            qk_norm: false,
            window: config.sliding_window,
            output_gate: false,
        }),
        feed_forward: FeedForwardConfig::Mlp(MlpConfig {
            intermediate_size: config.intermediate_size,
            activation: Activation::Silu,
        }),
    };
    // Checked before so many are made: a wrong number should be an error, not a lack of memory.
    if config.num_hidden_layers > 1024 {
        return Err(format!(
            "config.json: num_hidden_layers: expected at most 1024, got {}",
            config.num_hidden_layers
        )
        .into());
    }
    let decoder = DecoderConfig {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        norm: NormConfig { eps: config.rms_norm_eps, weight: NormWeight::Plain },
        layers: vec![layer; config.num_hidden_layers],
        tie_word_embeddings: config.tie_word_embeddings,
        max_position_embeddings: config.max_position_embeddings,
        rope: RopeConfig { theta: config.rope_theta, kind: RopeKind::Default, rotary_dim: head_dim },
    };
    let unread_keys = config.others.into_keys().filter(|key| !IDLE.contains(&key.as_str())).collect();
    Ok(ModelConfig { unread_keys, ..ModelConfig::of_decoder(decoder) })
}

/// Where a Phi-3 checkpoint has the tensor of this name: q, k and v are rows of one matrix, gate and up of another.
pub fn stored(attention: &AttentionConfig, mlp: &MlpConfig, name: &str) -> StoredName {
    let (q, kv) = (attention.heads_q * attention.head_dim, attention.heads_kv * attention.head_dim);
    let inner = mlp.intermediate_size;
    let parts = [
        ("self_attn.q_proj.", "self_attn.qkv_proj.", 0..q),
        ("self_attn.k_proj.", "self_attn.qkv_proj.", q..q + kv),
        ("self_attn.v_proj.", "self_attn.qkv_proj.", q + kv..q + 2 * kv),
        ("mlp.gate_proj.", "mlp.gate_up_proj.", 0..inner),
        ("mlp.up_proj.", "mlp.gate_up_proj.", inner..2 * inner),
    ];
    match parts.into_iter().find(|(part, ..)| name.contains(part)) {
        Some((part, whole, rows)) => StoredName::Rows(name.replace(part, whole), rows),
        None => StoredName::Whole(name.into()),
    }
}

/// A folder with a Phi-3 model, opened; `Model::from_checkpoint` loads it.
///
/// **Errors**: those of [`read_config`] and of [`Checkpoint::open_custom`].
pub fn open(folder: &Path) -> Result<Checkpoint, Box<dyn Error>> {
    let config = read_config(&std::fs::read_to_string(folder.join("config.json"))?)?;
    let layer = config.decoder.layers.first().copied();
    let Some(LayerConfig {
        mixer: MixerConfig::Attention(attention),
        feed_forward: FeedForwardConfig::Mlp(mlp),
    }) = layer
    else {
        return Err("config.json: num_hidden_layers: expected at least 1, got 0".into());
    };
    Ok(Checkpoint::open_custom(folder, config, move |name| stored(&attention, &mlp, name))?)
}
