//! `model_type: "qwen3"`: a dense decoder.

use abi::ops::glu::Activation;
use serde_json::Value;

use super::fields::Fields;
use super::rope::{RopeConfig, RopeDefaults};
use super::{
    AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MAX_HEAD_DIM, MAX_HEADS,
    MAX_INTERMEDIATE, MAX_LAYERS, MAX_SIZE, MixerConfig, MlpConfig, NormConfig,
};
use crate::ModelError;
use host::ops::rmsnorm::NormWeight;

/// With the defaults of the type's configuration class.
pub(super) fn read(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let num_layers = read_num_layers(fields)?;
    let windows = layer_windows(fields, num_layers)?;
    let tie_word_embeddings = fields.flag("tie_word_embeddings")?.unwrap_or(false);
    Ok(DecoderConfig { tie_word_embeddings, ..read_dense(fields, windows, 10_000.0, 32_768)? })
}

pub(super) fn read_num_layers(fields: &Fields) -> Result<usize, ModelError> {
    Ok(fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(32))
}

/// With a layer for each of the windows, a head of its own, and with these defaults of the rotary base and the longest
/// sequence.
pub(super) fn read_dense(
    fields: &Fields,
    windows: Vec<Option<usize>>,
    theta: f64,
    max_positions: usize,
) -> Result<DecoderConfig, ModelError> {
    let attention = read_attention(fields, 32, 32, 128)?;
    let mlp = MlpConfig {
        intermediate_size: fields.size_up_to("intermediate_size", MAX_INTERMEDIATE, 22016)?,
        activation: read_activation(fields, "silu")?,
    };
    let max_position_embeddings = fields.size("max_position_embeddings", max_positions)?;
    let layers = windows
        .into_iter()
        .map(|window| LayerConfig {
            mixer: MixerConfig::Attention(AttentionConfig { window, ..attention }),
            feed_forward: FeedForwardConfig::Mlp(mlp),
        })
        .collect();
    Ok(DecoderConfig {
        vocab_size: fields.size("vocab_size", 151936)?,
        hidden_size: fields.size("hidden_size", 4096)?,
        norm: NormConfig { eps: read_eps(fields, 1e-6)?, weight: NormWeight::Plain },
        layers,
        tie_word_embeddings: false,
        max_position_embeddings,
        rope: RopeConfig::read(
            fields,
            RopeDefaults {
                theta,
                partial_rotary_factor: None,
                head_dim: attention.head_dim,
                max_position_embeddings,
            },
        )?,
    })
}

/// Heads and biases, without a window or a gate, with the defaults of query heads, of key and value heads, and of a
/// head's width.
pub(super) fn read_attention(
    fields: &Fields,
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
) -> Result<AttentionConfig, ModelError> {
    let heads_q = fields.size_up_to("num_attention_heads", MAX_HEADS, heads_q)?;
    let heads_kv = match fields.get("num_key_value_heads") {
        Some(Value::Null) => heads_q,
        _ => fields.size_up_to("num_key_value_heads", MAX_HEADS, heads_kv)?,
    };
    if !heads_q.is_multiple_of(heads_kv) {
        let rule = "num_attention_heads must be a multiple of num_key_value_heads";
        return Err(fields.inconsistent(rule, format!("{heads_q} and {heads_kv}")));
    }
    let head_dim = fields.size("head_dim", head_dim)?;
    fields.check_head_dim("head_dim", head_dim, MAX_HEAD_DIM)?;
    // Heads of q and k have a norm in all of these types.
    fields.assume("use_qk_norm", |value| value == true);
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(AttentionConfig {
        heads_q,
        heads_kv,
        head_dim,
        bias,
        output_bias: bias,
        qk_norm: true,
        window: None,
        output_gate: false,
    })
}

pub(super) fn read_eps(fields: &Fields, default: f64) -> Result<f32, ModelError> {
    let positive_f32 = |eps: f64| eps as f32 > 0.0 && (eps as f32).is_finite();
    let eps = fields.number("rms_norm_eps", "a positive number in the range of f32", positive_f32)?;
    Ok(eps.unwrap_or(default) as f32)
}

/// The sliding window of each layer: the one width `sliding_window`, in the layers that `layer_types` marks, or else in
/// those from `max_window_layers` on.
pub(super) fn layer_windows(fields: &Fields, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let enabled = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = match fields.get("sliding_window") {
        Some(Value::Null) => None,
        _ if !enabled => None,
        _ => Some(fields.size("sliding_window", 4096)?),
    };
    let first_sliding = fields.integer("max_window_layers", 0..=MAX_SIZE)?.unwrap_or(28);
    let Some(types) = fields.nullable("layer_types", "a list of strings", Value::as_array)? else {
        return Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first_sliding)).collect());
    };
    if types.len() != num_layers {
        let rule = "layer_types must have num_hidden_layers entries";
        return Err(fields.inconsistent(rule, format!("{} and {num_layers}", types.len())));
    }
    let layer_window = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(fields.inconsistent(
            "layer_types with sliding_attention needs use_sliding_window and sliding_window",
            format!("sliding_attention in layer {layer} and no window"),
        )),
        _ => Err(fields.unsupported(
            &format!("layer_types[{layer}]"),
            kind.to_string(),
            &["full_attention", "sliding_attention"],
        )),
    };
    types.iter().enumerate().map(layer_window).collect()
}

pub(super) fn read_activation(fields: &Fields, default: &str) -> Result<Activation, ModelError> {
    const SUPPORTED: &[&str] = &["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new"];
    match fields.optional("hidden_act", "a string", Value::as_str)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::GeluErf),
        other => Err(fields.unsupported("hidden_act", other.into(), SUPPORTED)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    #[test]
    fn defaults_are_the_model_types() {
        let expected = ModelConfig {
            architecture: Architecture::Qwen3,
            decoder: dense(32, heads(32, 32, 128), 22016, 1e4),
            vision: None,
            dtype: None,
            eos_token_ids: vec![],
            bos_token_id: None,
            generation: GenerationConfig::default(),
            unread_keys: vec![],
        };
        assert_eq!(qwen3("").unwrap(), expected);
        let harmless = r#""use_cache": null, "attention_dropout": 0.1, "tie_encoder_decoder": false"#;
        assert_eq!(qwen3(harmless).unwrap(), expected);
        let unread =
            qwen3(r#""some_future_key": {"a": [1]}, "rope_parameters": {"future": 1, "rope_theta": 1e4}"#);
        let unread_keys = vec!["rope_parameters.future".into(), "some_future_key".into()];
        assert_eq!(unread.unwrap(), ModelConfig { unread_keys, ..expected });
    }

    #[test]
    fn published_configs() {
        let config = published("qwen3-0.6b");
        let small = DecoderConfig {
            hidden_size: 1024,
            tie_word_embeddings: true,
            max_position_embeddings: 40960,
            ..dense(28, heads(16, 8, 128), 3072, 1e6)
        };
        assert_eq!(config.decoder, small);
        assert_eq!(config.dtype, Some(DType::BF16));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![151645], Some(151643)));

        let config = published("qwen3-4b-instruct-2507");
        let large = DecoderConfig {
            hidden_size: 2560,
            tie_word_embeddings: true,
            max_position_embeddings: 262144,
            ..dense(36, heads(32, 8, 128), 9728, 5e6)
        };
        assert_eq!(config.decoder, large);
        assert_eq!(config.eos_token_ids, [151645, 151643]);
    }

    #[test]
    fn kv_heads_default_and_null_differ() {
        let heads_kv = |fields: &str| attention(&qwen3(fields).unwrap(), 0).heads_kv;
        assert_eq!(heads_kv(r#""num_attention_heads": 64"#), 32);
        assert_eq!(heads_kv(r#""num_attention_heads": 6, "num_key_value_heads": null"#), 6);
    }

    #[test]
    fn activations() {
        let activation =
            |name: &str| match qwen3(&format!(r#""hidden_act": "{name}""#)).unwrap().decoder.layers[0] {
                LayerConfig { feed_forward: FeedForwardConfig::Mlp(mlp), .. } => mlp.activation,
                other => panic!("{other:?}"),
            };
        assert_eq!(activation("swish"), Activation::Silu);
        assert_eq!(activation("gelu"), Activation::GeluErf);
        assert_eq!(activation("gelu_pytorch_tanh"), Activation::GeluTanh);
        assert_eq!(
            message(r#""hidden_act": "relu2""#),
            "config.json: hidden_act: relu2 is not supported; supported: silu, swish, gelu, gelu_pytorch_tanh, gelu_new"
        );
    }

    #[test]
    fn sliding_windows() {
        let windows = |fields: &str| {
            let fields = format!(r#""num_hidden_layers": 3, {fields}"#);
            qwen3(&fields).map(|config| (0..3).map(|i| attention(&config, i).window).collect::<Vec<_>>())
        };
        let on = r#""use_sliding_window": true, "sliding_window": 16"#;
        assert_eq!(windows(r#""sliding_window": 16, "max_window_layers": 0"#).unwrap(), [None; 3]);
        assert_eq!(windows(&format!(r#"{on}, "max_window_layers": 1"#)).unwrap(), [None, Some(16), Some(16)]);
        assert_eq!(windows(on).unwrap(), [None; 3]);
        assert_eq!(windows(r#""use_sliding_window": true, "max_window_layers": 2"#).unwrap()[2], Some(4096));
        let null = r#""use_sliding_window": true, "sliding_window": null, "max_window_layers": 0"#;
        assert_eq!(windows(null).unwrap(), [None; 3]);
        let types = r#""layer_types": ["sliding_attention", "full_attention", "sliding_attention"]"#;
        let overridden = windows(&format!(r#"{on}, "max_window_layers": 1, {types}"#)).unwrap();
        assert_eq!(overridden, [Some(16), None, Some(16)]);
        assert_eq!(
            windows(types).unwrap_err().to_string(),
            "config.json: layer_types with sliding_attention needs use_sliding_window and sliding_window, got \
             sliding_attention in layer 0 and no window"
        );
        assert_eq!(
            windows(r#""layer_types": ["full_attention"]"#).unwrap_err().to_string(),
            "config.json: layer_types must have num_hidden_layers entries, got 1 and 3"
        );
        let unknown = r#""layer_types": ["full_attention", "linear_attention", "full_attention"]"#;
        assert_eq!(
            windows(unknown).unwrap_err().to_string(),
            "config.json: layer_types[1]: \"linear_attention\" is not supported; supported: full_attention, \
             sliding_attention"
        );
    }
}
