//! `model_type: "qwen3_moe"`: Qwen3's attention, and a mixture of experts in some or all layers.

use abi::ops::moe_router::{MAX_EXPERTS, MAX_TOP_K};
use serde_json::Value;

use super::fields::{Fields, whole};
use super::qwen3::{read_activation, read_attention, read_eps};
use super::rope::{RopeConfig, RopeDefaults};
use super::{
    AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MAX_HEADS, MAX_INTERMEDIATE, MAX_LAYERS,
    MixerConfig, MlpConfig, MoeConfig, NormConfig,
};
use crate::ModelError;
use host::ops::moe_router::{RouterScore, RouterWeights};
use host::ops::rmsnorm::NormWeight;

/// With the defaults of the type's configuration class.
pub(super) fn read(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let num_layers = fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(24);
    let hidden_size = fields.size("hidden_size", 2048)?;
    let heads_q = fields.size_up_to("num_attention_heads", MAX_HEADS, 32)?;
    // All layers slide, or none.
    let enabled = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = match fields.get("sliding_window") {
        Some(Value::Null) => None,
        _ if !enabled => None,
        _ => Some(fields.size("sliding_window", 4096)?),
    };
    let attention = AttentionConfig { window, ..read_attention(fields, 32, 4, hidden_size / heads_q)? };
    let mlp = MlpConfig {
        intermediate_size: fields.size_up_to("intermediate_size", MAX_INTERMEDIATE, 6144)?,
        activation: read_activation(fields, "silu")?,
    };
    let defaults = MoeDefaults { num_experts: 128, top_k: 8, normalised: false, intermediate_size: 768 };
    let moe = read_moe(fields, defaults)?;
    let layers = sparse_layers(fields, num_layers)?.into_iter().map(|is_sparse| LayerConfig {
        mixer: MixerConfig::Attention(attention),
        feed_forward: match moe {
            Some(moe) if is_sparse => FeedForwardConfig::Moe(moe),
            _ => FeedForwardConfig::Mlp(mlp),
        },
    });
    fields.assume("shared_expert_intermediate_size", |size| size == 0);
    let max_position_embeddings = fields.size("max_position_embeddings", 32768)?;
    Ok(DecoderConfig {
        vocab_size: fields.size("vocab_size", 151936)?,
        hidden_size,
        norm: NormConfig { eps: read_eps(fields, 1e-6)?, weight: NormWeight::Plain },
        layers: layers.collect(),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        max_position_embeddings,
        rope: RopeConfig::read(
            fields,
            RopeDefaults {
                theta: 10000.0,
                partial_rotary_factor: None,
                head_dim: attention.head_dim,
                max_position_embeddings,
            },
        )?,
    })
}

/// What a model type assumes of its experts.
pub(super) struct MoeDefaults {
    pub(super) num_experts: usize,
    pub(super) top_k: usize,
    /// Of `norm_topk_prob`.
    pub(super) normalised: bool,
    pub(super) intermediate_size: usize,
}

/// The experts of the Qwen models, by softmax and without a shared one; none if there are no experts.
pub(super) fn read_moe(fields: &Fields, defaults: MoeDefaults) -> Result<Option<MoeConfig>, ModelError> {
    let named = |key| fields.integer(key, 0..=MAX_EXPERTS as usize);
    let num_experts = match named("num_experts")? {
        Some(num_experts) => num_experts,
        None => named("num_local_experts")?.unwrap_or(defaults.num_experts),
    };
    if num_experts == 0 {
        return Ok(None);
    }
    let top_k = fields.size_up_to("num_experts_per_tok", MAX_TOP_K as usize, defaults.top_k)?;
    if top_k > num_experts {
        let rule = "num_experts_per_tok must be at most num_experts";
        return Err(fields.inconsistent(rule, format!("{top_k} and {num_experts}")));
    }
    let normalised = fields.flag("norm_topk_prob")?.unwrap_or(defaults.normalised);
    Ok(Some(MoeConfig {
        num_experts,
        top_k,
        expert: MlpConfig {
            intermediate_size: fields.size_up_to(
                "moe_intermediate_size",
                MAX_INTERMEDIATE,
                defaults.intermediate_size,
            )?,
            activation: read_activation(fields, "silu")?,
        },
        score: RouterScore::Softmax,
        correction_bias: false,
        groups: None,
        weights: if normalised { RouterWeights::Normalised } else { RouterWeights::Scores },
        scale: 1.0,
        round_weights: true,
        shared: None,
    }))
}

/// Which layers have experts: every `decoder_sparse_step`th, but for those of `mlp_only_layers`.
pub(super) fn sparse_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = fields.size("decoder_sparse_step", 1)?;
    let indices = |value: &Value| value.as_array()?.iter().map(whole).collect::<Option<Vec<usize>>>();
    let dense = fields.nullable("mlp_only_layers", "a list of layers", indices)?.unwrap_or_default();
    Ok((0..num_layers).map(|layer| (layer + 1).is_multiple_of(step) && !dense.contains(&layer)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    #[test]
    fn configs_with_experts() {
        let config = repository("tests/golden/qwen3_moe");
        let moe = experts(8, 2, 48, RouterWeights::Normalised);
        let expected =
            DecoderConfig { vocab_size: 384, hidden_size: 64, ..sparse(3, heads(4, 2, 32), moe, 1e7) };
        assert_eq!((config.architecture, config.decoder), (Architecture::Qwen3Moe, expected));

        let moe = experts(128, 8, 768, RouterWeights::Normalised);
        let expected = DecoderConfig {
            hidden_size: 2048,
            max_position_embeddings: 262144,
            ..sparse(48, heads(32, 4, 128), moe, 1e7)
        };
        assert_eq!(published("qwen3-coder-30b-a3b-instruct").decoder, expected);

        let parse = |fields: &str| parse(&format!(r#"{{"model_type": "qwen3_moe"{fields}}}"#));
        // A head's width is the hidden size over the heads where it is not said.
        let moe = experts(128, 8, 768, RouterWeights::Scores);
        let expected = DecoderConfig { hidden_size: 2048, ..sparse(24, heads(32, 4, 64), moe, 1e4) };
        assert_eq!(parse("").unwrap().decoder, expected);
        let windows = parse(r#", "use_sliding_window": true, "max_window_layers": 3"#).unwrap();
        assert!((0..24).all(|layer| attention(&windows, layer).window == Some(4096)));

        let is_dense = |fields: &str| -> Vec<bool> {
            let layers = parse(&format!(r#", "num_hidden_layers": 4{fields}"#)).unwrap().decoder.layers;
            let is_mlp = |layer: &LayerConfig| match layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => {
                    assert_eq!(mlp.intermediate_size, 6144);
                    true
                }
                FeedForwardConfig::Moe(_) => false,
            };
            layers.iter().map(is_mlp).collect()
        };
        assert_eq!(is_dense(r#", "decoder_sparse_step": 2"#), [true, false, true, false]);
        assert_eq!(is_dense(r#", "mlp_only_layers": [0, 3]"#), [true, false, false, true]);
        assert_eq!(is_dense(r#", "num_experts": 0"#), [true; 4]);
        let error = |fields: &str| parse(fields).unwrap_err().to_string();
        assert_eq!(
            error(r#", "num_local_experts": 4"#),
            "config.json: num_experts_per_tok must be at most num_experts, got 8 and 4"
        );
        assert_eq!(
            error(r#", "mlp_only_layers": 3"#),
            "config.json: mlp_only_layers: expected a list of layers, got 3"
        );
    }
}
