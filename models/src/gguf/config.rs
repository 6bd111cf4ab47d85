//! A file's metadata as the `config.json` that the model was published with, so that one reader checks both.

use serde_json::{Map, Value, json};

use super::Gguf;
use crate::ModelError;
use crate::config::RopeKind;

/// The values of `general.architecture` that are read.
const ARCHITECTURES: &[&str] = &["llama", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen3vl", "deepseek2"];

/// Reads keys that begin with the architecture's name.
struct Keys<'a> {
    file: &'a Gguf,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn number(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.file.unsigned(&self.key(key))
    }

    fn required(&self, key: &str) -> Result<u64, ModelError> {
        let missing = || self.file.error(&self.key(key), "a number", "nothing");
        self.number(key)?.ok_or_else(missing)
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.file.float(&self.key(key))
    }
}

/// The `config.json` of a file, and of the file with its vision tower, if there is one.
pub(crate) fn config_json(file: &Gguf, tower: Option<&Gguf>) -> Result<Value, ModelError> {
    let key = "general.architecture";
    let Some(architecture) = file.text(key)? else {
        return Err(file.error(key, format!("one of {}", ARCHITECTURES.join(", ")), "nothing"));
    };
    let keys = Keys { file, architecture };
    let mut config = match architecture {
        "llama" | "qwen2" | "qwen3" | "qwen3vl" | "qwen3moe" | "qwen3next" => decoder(&keys)?,
        "deepseek2" => latent_decoder(&keys)?,
        other => return Err(file.error(key, format!("one of {}", ARCHITECTURES.join(", ")), other)),
    };
    let model_type = match architecture {
        "qwen3moe" => "qwen3_moe",
        "qwen3next" => "qwen3_next",
        "deepseek2" => "glm4_moe_lite",
        // Without its tower it is the decoder of text, whose positions are all one.
        "qwen3vl" => "qwen3",
        other => other,
    };
    let mut set = |key: &str, value: Value| config.insert(key.into(), value);
    set("model_type", model_type.into());
    set("tie_word_embeddings", (!file.contains("output.weight")).into());
    let mut ends = Vec::new();
    for key in ["eos", "eot", "eom"] {
        if let Some(id) = file.token_id(&format!("tokenizer.ggml.{key}_token_id"))?
            && !ends.contains(&id)
        {
            ends.push(id);
        }
    }
    set("eos_token_id", ends.into());
    if let Some(id) = file.token_id("tokenizer.ggml.bos_token_id")? {
        set("bos_token_id", id.into());
    }
    match tower {
        None => Ok(Value::Object(config)),
        Some(tower) if architecture == "qwen3vl" => with_tower(&keys, config, tower),
        Some(tower) => {
            let got = format!("one for {architecture}");
            Err(tower.error(key, "a vision tower only for qwen3vl", got))
        }
    }
}

/// What all decoders have.
fn common(keys: &Keys<'_>) -> Result<Map<String, Value>, ModelError> {
    let file = keys.file;
    let mut config = Map::new();
    let layers = keys.required("block_count")?;
    // Layers that predict the token after the next are behind the others.
    let layers = layers.saturating_sub(keys.number("nextn_predict_layers")?.unwrap_or(0));
    config.insert("num_hidden_layers".into(), layers.into());
    let Some(&[vocabulary, hidden]) = file.shape("token_embd.weight") else {
        let got = file.shape("token_embd.weight").map_or("nothing".into(), |shape| format!("{shape:?}"));
        return Err(file.error("token_embd.weight", "a matrix", got));
    };
    config.insert("vocab_size".into(), vocabulary.into());
    let stated = keys.required("embedding_length")?;
    if stated != hidden as u64 {
        return Err(file.error(
            &keys.key("embedding_length"),
            format!("{hidden}, as token_embd has"),
            stated,
        ));
    }
    config.insert("hidden_size".into(), hidden.into());
    config.insert("num_attention_heads".into(), keys.required("attention.head_count")?.into());
    config.insert("max_position_embeddings".into(), keys.required("context_length")?.into());
    if let Some(size) = keys.number("feed_forward_length")?.filter(|&size| size > 0) {
        config.insert("intermediate_size".into(), size.into());
    }
    match keys.float("attention.layer_norm_rms_epsilon")? {
        Some(eps) => config.insert("rms_norm_eps".into(), eps.into()),
        None => return Err(file.error(&keys.key("attention.layer_norm_rms_epsilon"), "a float", "nothing")),
    };
    config.insert("rope_theta".into(), keys.float("rope.freq_base")?.unwrap_or(10_000.0).into());
    if let Some(scaling) = scaling(keys)? {
        config.insert("rope_scaling".into(), scaling);
    }
    Ok(config)
}

/// How rotary frequencies are stretched.
fn scaling(keys: &Keys<'_>) -> Result<Option<Value>, ModelError> {
    let file = keys.file;
    let key = keys.key("rope.scaling.type");
    let (kind, factor) = (file.text(&key)?, keys.float("rope.scaling.factor")?);
    let scaled = match (kind, factor) {
        (None | Some("none" | ""), _) => None,
        (Some("linear"), None) => None,
        (Some("linear"), Some(factor)) => Some(json!({"type": "linear", "factor": factor})),
        (Some("yarn"), Some(factor)) => {
            let mut yarn = json!({"type": "yarn", "factor": factor});
            if let Some(length) = keys.number("rope.scaling.original_context_length")? {
                yarn["original_max_position_embeddings"] = length.into();
            }
            // The file has it times the 0.1 of the magnitude's formula.
            if let Some(scale) = keys.float("rope.scaling.yarn_log_multiplier")? {
                yarn["mscale_all_dim"] = (scale / 0.1).into();
                yarn["mscale"] = (scale / 0.1).into();
            }
            Some(yarn)
        }
        (Some("yarn"), None) => {
            return Err(file.error(&keys.key("rope.scaling.factor"), "a float", "nothing"));
        }
        (Some(other), _) => return Err(file.error(&key, "none, linear or yarn", other)),
    };
    match (scaled, file.contains("rope_freqs.weight")) {
        (scaled, false) => Ok(scaled),
        (None, true) => divisors(keys).map(Some),
        (Some(_), true) => Err(file.error(&key, "none beside rope_freqs.weight", kind.unwrap_or_default())),
    }
}

/// The stretching of Llama 3, of which a file has the divisor of each frequency instead of the numbers that it was made
/// from: those of the published models are tried.
fn divisors(keys: &Keys<'_>) -> Result<Value, ModelError> {
    let file = keys.file;
    let name = "rope_freqs.weight";
    let values = file.tensor(name).and_then(|tensor| tensor.dense_f32()).unwrap_or_default();
    let rotary_dim = 2 * values.len();
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    let factor = values.iter().fold(1.0f64, |most, &value| most.max(f64::from(value)));
    let known = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let divisor = |pair: usize| {
        let frequency = theta.powf(-2.0 * pair as f64 / rotary_dim as f64);
        let stretched = RopeKind::llama3_frequency(frequency, factor, 1.0, 4.0, 8192);
        frequency / stretched
    };
    let is_known = values
        .iter()
        .enumerate()
        .all(|(pair, &value)| (divisor(pair) - f64::from(value)).abs() <= 1e-4 * f64::from(value).abs());
    if values.is_empty() || !is_known {
        return Err(file.error(name, "the divisors of Llama 3 (1 and 4 turns over 8192 tokens)", "others"));
    }
    Ok(known)
}

/// Decoders with attention over keys and values, some with experts or delta nets.
fn decoder(keys: &Keys<'_>) -> Result<Map<String, Value>, ModelError> {
    let mut config = common(keys)?;
    let file = keys.file;
    let heads = keys.required("attention.head_count")?;
    let hidden = config["hidden_size"].as_u64().unwrap_or(0);
    let head_dim = match keys.number("attention.key_length")? {
        Some(width) => width,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let value_dim = keys.number("attention.value_length")?.unwrap_or(head_dim);
    if value_dim != head_dim {
        return Err(file.error(
            &keys.key("attention.value_length"),
            format!("{head_dim}, as keys have"),
            value_dim,
        ));
    }
    let heads_kv = keys.number("attention.head_count_kv")?.unwrap_or(heads);
    let rotary = keys.number("rope.dimension_count")?.unwrap_or(head_dim);
    if rotary > head_dim {
        return Err(file.error(&keys.key("rope.dimension_count"), format!("at most {head_dim}"), rotary));
    }
    // Half a dimension more, so that the product is no less than the number.
    let factor = if rotary == head_dim { 1.0 } else { (rotary as f64 + 0.5) / head_dim as f64 };
    let mut set = |key: &str, value: Value| config.insert(key.into(), value);
    set("head_dim", head_dim.into());
    set("num_key_value_heads", heads_kv.into());
    set("partial_rotary_factor", factor.into());
    let has = |name: &str| file.contains(&format!("blk.0.{name}"));
    set("attention_bias", (has("attn_output.bias")).into());
    if let Some(window) = keys.number("attention.sliding_window")?.filter(|&window| window > 0) {
        set("sliding_window", window.into());
        set("use_sliding_window", true.into());
        set("max_window_layers", 0.into());
    }
    if !matches!(keys.architecture, "qwen3moe" | "qwen3next") {
        return Ok(config);
    }
    // A file that claims more layers than there are is refused where layers are counted.
    let layers = config["num_hidden_layers"].as_u64().unwrap_or(0).min(1 << 16);
    let dense: Vec<u64> =
        (0..layers).filter(|layer| !file.contains(&format!("blk.{layer}.ffn_gate_inp.weight"))).collect();
    let mut set = |key: &str, value: Value| config.insert(key.into(), value);
    set("num_experts", keys.required("expert_count")?.into());
    set("num_experts_per_tok", keys.required("expert_used_count")?.into());
    set("moe_intermediate_size", keys.required("expert_feed_forward_length")?.into());
    set("norm_topk_prob", true.into());
    set("decoder_sparse_step", 1.into());
    set("mlp_only_layers", dense.into());
    if keys.architecture == "qwen3next" {
        let is_full = |layer: u64| file.contains(&format!("blk.{layer}.attn_q.weight"));
        let types: Vec<&str> = (0..layers)
            .map(|layer| if is_full(layer) { "full_attention" } else { "linear_attention" })
            .collect();
        let (heads_v, values) = (keys.required("ssm.time_step_rank")?, keys.required("ssm.inner_size")?);
        if heads_v == 0 || !values.is_multiple_of(heads_v) {
            let expected = format!("a multiple of ssm.time_step_rank, {heads_v}");
            return Err(file.error(&keys.key("ssm.inner_size"), expected, values));
        }
        set("layer_types", types.into());
        set("linear_conv_kernel_dim", keys.required("ssm.conv_kernel")?.into());
        set("linear_key_head_dim", keys.required("ssm.state_size")?.into());
        set("linear_num_key_heads", keys.required("ssm.group_count")?.into());
        set("linear_num_value_heads", heads_v.into());
        set("linear_value_head_dim", (values / heads_v).into());
        let shared = keys.number("expert_shared_feed_forward_length")?;
        let shared = match shared {
            Some(size) => size,
            None => keys.required("expert_feed_forward_length")?,
        };
        set("shared_expert_intermediate_size", shared.into());
    }
    Ok(config)
}

/// Decoders with latent attention and experts chosen by sigmoid scores.
fn latent_decoder(keys: &Keys<'_>) -> Result<Map<String, Value>, ModelError> {
    let mut config = common(keys)?;
    let file = keys.file;
    let rope = keys.required("rope.dimension_count")?;
    let either = |new: &str, old: &str| match keys.number(new)? {
        Some(value) => Ok(value),
        None => keys.required(old),
    };
    let key = either("attention.key_length_mla", "attention.key_length")?;
    let Some(nope) = key.checked_sub(rope) else {
        return Err(file.error(&keys.key("attention.key_length_mla"), format!("at least {rope}"), key));
    };
    // 1 is softmax, 2 sigmoid.
    let gating = keys.required("expert_gating_func")?;
    if gating != 2 {
        return Err(file.error(&keys.key("expert_gating_func"), "2, which is sigmoid", gating));
    }
    let layers = config["num_hidden_layers"].as_u64().unwrap_or(0).min(1 << 16);
    let dense = keys.number("leading_dense_block_count")?.unwrap_or(0);
    let types: Vec<&str> = (0..layers).map(|layer| if layer < dense { "dense" } else { "sparse" }).collect();
    let mut set = |key: &str, value: Value| config.insert(key.into(), value);
    set("q_lora_rank", keys.number("attention.q_lora_rank")?.map_or(Value::Null, Value::from));
    set("kv_lora_rank", keys.required("attention.kv_lora_rank")?.into());
    set("qk_rope_head_dim", rope.into());
    set("qk_nope_head_dim", nope.into());
    set("v_head_dim", either("attention.value_length_mla", "attention.value_length")?.into());
    set("mlp_layer_types", types.into());
    set("n_routed_experts", keys.required("expert_count")?.into());
    set("num_experts_per_tok", keys.required("expert_used_count")?.into());
    set("n_shared_experts", keys.number("expert_shared_count")?.unwrap_or(0).into());
    set("moe_intermediate_size", keys.required("expert_feed_forward_length")?.into());
    set("norm_topk_prob", file.flag(&keys.key("expert_weights_norm"))?.unwrap_or(false).into());
    set(
        "routed_scaling_factor",
        keys.float("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0).into(),
    );
    set("n_group", keys.number("expert_group_count")?.filter(|&groups| groups > 0).unwrap_or(1).into());
    set(
        "topk_group",
        keys.number("expert_group_used_count")?.filter(|&groups| groups > 0).unwrap_or(1).into(),
    );
    Ok(config)
}

/// The decoder's configuration with that of its tower.
fn with_tower(keys: &Keys<'_>, text: Map<String, Value>, tower: &Gguf) -> Result<Value, ModelError> {
    let clip = Keys { file: tower, architecture: "clip.vision" };
    let projector = tower.text("clip.projector_type")?;
    if projector.is_some_and(|projector| projector != "qwen3vl_merger") {
        return Err(tower.error("clip.projector_type", "qwen3vl_merger", projector.unwrap_or_default()));
    }
    let depth = clip.required("block_count")?;
    let deepstack: Vec<usize> = match tower.integers("clip.vision.is_deepstack_layers")? {
        Some(flags) => {
            flags.iter().enumerate().filter(|(_, flag)| **flag != 0).map(|(block, _)| block).collect()
        }
        None => Vec::new(),
    };
    let Some(positions) = tower.shape("v.position_embd.weight").and_then(|shape| shape.first()) else {
        return Err(tower.error("v.position_embd.weight", "a matrix", "nothing"));
    };
    let vocabulary = keys.file.vocabulary()?;
    let token = |text: &str| {
        let ids = vocabulary.as_ref().and_then(|known| known.tokens.iter().position(|token| *token == text));
        ids.ok_or_else(|| keys.file.error("tokenizer.ggml.tokens", format!("a token {text}"), "none"))
    };
    let mut text = text;
    let sections = keys.file.integers(&keys.key("rope.dimension_sections"))?;
    let sections = match &sections {
        Some(sections) if sections.len() >= 3 => &sections[..3],
        _ => return Err(keys.file.error(&keys.key("rope.dimension_sections"), "three sizes", "fewer")),
    };
    if text.contains_key("rope_scaling") {
        return Err(keys.file.error(&keys.key("rope.scaling.type"), "none beside sections", "another"));
    }
    text.insert("rope_scaling".into(), json!({"rope_type": "default", "mrope_section": sections}));
    Ok(json!({
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": token("<|image_pad|>")?,
        "video_token_id": token("<|video_pad|>")?,
        "vision_start_token_id": token("<|vision_start|>")?,
        "vision_end_token_id": token("<|vision_end|>")?,
        "vision_config": {
            "depth": depth,
            "hidden_size": clip.required("embedding_length")?,
            "intermediate_size": clip.required("feed_forward_length")?,
            "num_heads": clip.required("attention.head_count")?,
            "patch_size": clip.required("patch_size")?,
            "spatial_merge_size": clip.number("spatial_merge_size")?.unwrap_or(2),
            "out_hidden_size": clip.required("projection_dim")?,
            "num_position_embeddings": positions,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "deepstack_visual_indexes": deepstack,
        },
        "text_config": text,
    }))
}
