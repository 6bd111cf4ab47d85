//! `model_type: "llama"`, `"mistral"` and `"qwen2"`: dense decoders without norms of heads.

use serde_json::Value;

use super::fields::{Fields, whole};
use super::qwen3::{layer_windows, read_activation, read_eps};
use super::rope::{RopeConfig, RopeDefaults};
use super::{
    AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MAX_HEAD_DIM, MAX_HEADS,
    MAX_INTERMEDIATE, MAX_LAYERS, MAX_SIZE, MixerConfig, MlpConfig, NormConfig,
};
use crate::ModelError;
use host::ops::rmsnorm::NormWeight;

/// What a type's configuration class says where the file is silent, as far as the types differ.
struct Defaults {
    vocab_size: usize,
    intermediate_size: usize,
    max_position_embeddings: usize,
    /// `None` is as many as there are query heads.
    heads_kv: Option<usize>,
}

/// Llama, of version 3 with its own stretching of rotary frequencies.
pub(super) fn read(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        vocab_size: 32_000,
        intermediate_size: 11_008,
        max_position_embeddings: 2048,
        heads_kv: None,
    };
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    if fields.flag("mlp_bias")?.unwrap_or(false) {
        return Err(fields.unsupported("mlp_bias", "true".into(), &["false"]));
    }
    let num_layers = num_layers(fields)?;
    decoder(fields, defaults, vec![None; num_layers], [bias, bias])
}

/// Mistral: with a sliding window in all layers, or none.
pub(super) fn read_mistral(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        vocab_size: 32_000,
        intermediate_size: 14_336,
        max_position_embeddings: 131_072,
        heads_kv: Some(8),
    };
    let size = |value: &Value| match value {
        Value::Null => Some(None),
        size => whole(size).filter(|size| (1..=MAX_SIZE).contains(size)).map(Some),
    };
    let window = fields.optional("sliding_window", "a size or null", size)?.unwrap_or(Some(4096));
    let num_layers = num_layers(fields)?;
    decoder(fields, defaults, vec![window; num_layers], [false; 2])
}

/// Qwen2: with biases of q, k and v alone.
pub(super) fn read_qwen2(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let defaults = Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        max_position_embeddings: 32_768,
        heads_kv: Some(32),
    };
    let windows = layer_windows(fields, num_layers(fields)?)?;
    decoder(fields, defaults, windows, [true, false])
}

fn num_layers(fields: &Fields) -> Result<usize, ModelError> {
    Ok(fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(32))
}

/// With a layer for each of the windows, and biases of q, k and v, and of the output.
fn decoder(
    fields: &Fields,
    defaults: Defaults,
    windows: Vec<Option<usize>>,
    [bias, output_bias]: [bool; 2],
) -> Result<DecoderConfig, ModelError> {
    let inconsistent = |rule, got| Err(fields.inconsistent(rule, got));
    let size = |value: &Value| whole(value).filter(|size| (1..=MAX_HEADS).contains(size));
    let hidden_size = fields.size("hidden_size", 4096)?;
    let heads_q = fields.size_up_to("num_attention_heads", MAX_HEADS, 32)?;
    let heads_kv = match fields.optional("num_key_value_heads", "a number of heads, or null", |value| {
        if value.is_null() { Some(None) } else { size(value).map(Some) }
    })? {
        Some(stated) => stated.unwrap_or(heads_q),
        None => defaults.heads_kv.unwrap_or(heads_q),
    };
    if !heads_q.is_multiple_of(heads_kv) {
        let rule = "num_attention_heads must be a multiple of num_key_value_heads";
        return inconsistent(rule, format!("{heads_q} and {heads_kv}"));
    }
    let head_dim = match fields.nullable("head_dim", "a size", size)? {
        Some(stated) => stated,
        None if hidden_size.is_multiple_of(heads_q) => hidden_size / heads_q,
        None => {
            let rule = "hidden_size must be a multiple of num_attention_heads where there is no head_dim";
            return inconsistent(rule, format!("{hidden_size} and {heads_q}"));
        }
    };
    fields.check_head_dim("head_dim", head_dim, MAX_HEAD_DIM)?;
    let mlp = MlpConfig {
        intermediate_size: fields.size_up_to(
            "intermediate_size",
            MAX_INTERMEDIATE,
            defaults.intermediate_size,
        )?,
        activation: read_activation(fields, "silu")?,
    };
    let max_position_embeddings = fields.size("max_position_embeddings", defaults.max_position_embeddings)?;
    let layer = |window| LayerConfig {
        mixer: MixerConfig::Attention(AttentionConfig {
            heads_q,
            heads_kv,
            head_dim,
            bias,
            output_bias,
            qk_norm: false,
            window,
            output_gate: false,
        }),
        feed_forward: FeedForwardConfig::Mlp(mlp),
    };
    Ok(DecoderConfig {
        vocab_size: fields.size("vocab_size", defaults.vocab_size)?,
        hidden_size,
        norm: NormConfig { eps: read_eps(fields, 1e-6)?, weight: NormWeight::Plain },
        layers: windows.into_iter().map(layer).collect(),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        max_position_embeddings,
        rope: RopeConfig::read(
            fields,
            RopeDefaults { theta: 10_000.0, partial_rotary_factor: None, head_dim, max_position_embeddings },
        )?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    /// With the defaults of transformers' classes, and what published files of each type say.
    #[test]
    fn llama_and_its_like() {
        let decoder =
            |text: &str| parse(text).map(|config| config.decoder).map_err(|error| error.to_string());
        let of = |decoder: &DecoderConfig, layer: usize| match decoder.layers[layer].mixer {
            MixerConfig::Attention(attention) => attention,
            other => panic!("{other:?}"),
        };
        let plain = AttentionConfig { qk_norm: false, ..heads(32, 32, 128) };

        let llama = decoder(r#"{"model_type": "llama"}"#).unwrap();
        assert_eq!((llama.vocab_size, llama.hidden_size, llama.layers.len()), (32000, 4096, 32));
        assert_eq!((llama.max_position_embeddings, llama.rope), (2048, default_rope(1e4)));
        assert_eq!(of(&llama, 31), plain);
        // Llama 3.2 1B: heads of 64, the rotation of version 3.
        let text = r#"{"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": null, "attention_bias": true, "rope_theta": 500000.0, "rope_scaling": {"factor": 32.0,
            "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}}"#;
        let small = decoder(text).unwrap();
        let biased = AttentionConfig { bias: true, output_bias: true, qk_norm: false, ..heads(32, 8, 64) };
        assert_eq!(of(&small, 0), biased);
        let (frequencies, base) =
            (small.rope.inv_freq().unwrap(), |pair: i32| 500000f64.powf(-f64::from(pair) / 32.0));
        // By turns over 8192 tokens: many are kept, few divided by 32, between 1 and 4 a mean of both.
        assert_eq!((frequencies[0], small.rope.attention_factor()), (1.0, 1.0));
        assert!((frequencies[31] / base(31) - 1.0 / 32.0).abs() < 1e-12);
        let turns = 8192.0 * base(16) / std::f64::consts::TAU;
        assert!((1.0..4.0).contains(&turns), "{turns}");
        let kept = (turns - 1.0) / 3.0;
        assert!((frequencies[16] / base(16) - (kept + (1.0 - kept) / 32.0)).abs() < 1e-12);

        let mistral = decoder(r#"{"model_type": "mistral"}"#).unwrap();
        assert_eq!(of(&mistral, 0), AttentionConfig { heads_kv: 8, window: Some(4096), ..plain });
        let mistral = decoder(r#"{"model_type": "mistral", "sliding_window": null}"#).unwrap();
        assert_eq!(of(&mistral, 0).window, None);
        let qwen2 = decoder(r#"{"model_type": "qwen2", "use_sliding_window": true}"#).unwrap();
        assert_eq!(of(&qwen2, 27), AttentionConfig { bias: true, ..plain });
        assert_eq!(of(&qwen2, 28).window, Some(4096));

        let message = |rest: &str| decoder(&format!(r#"{{"model_type": "llama", {rest}}}"#)).unwrap_err();
        assert_eq!(
            message(r#""mlp_bias": true"#),
            "config.json: mlp_bias: true is not supported; supported: false"
        );
        assert_eq!(
            message(r#""hidden_size": 100"#),
            "config.json: hidden_size must be a multiple of num_attention_heads where there is no head_dim, got 100 and 32"
        );
        assert_eq!(
            message(r#""num_key_value_heads": 5"#),
            "config.json: num_attention_heads must be a multiple of num_key_value_heads, got 32 and 5"
        );
        assert_eq!(
            message(r#""num_key_value_heads": 0"#),
            "config.json: num_key_value_heads: expected a number of heads, or null, got 0"
        );
        assert_eq!(
            message(
                r#""rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}"#
            ),
            "config.json: rope_scaling.high_freq_factor: expected a number above low_freq_factor, 4, got 4"
        );
    }
}
