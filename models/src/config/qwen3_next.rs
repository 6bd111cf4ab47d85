//! `model_type: "qwen3_next"`: gated delta nets with gated attention between them, and a mixture of experts in each
//! layer.

use abi::ops::causal_conv1d::MAX_WIDTH;
use abi::ops::gated_delta::MAX_DIM_K;
use abi::ops::glu::Activation;
use serde_json::Value;

use super::fields::Fields;
use super::qwen3::{read_activation, read_attention, read_eps};
use super::qwen3_moe::{MoeDefaults, read_moe, sparse_layers};
use super::rope::{RopeConfig, RopeDefaults};
use super::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, LayerConfig, MAX_HEADS,
    MAX_INTERMEDIATE, MAX_LAYERS, MixerConfig, MlpConfig, MoeConfig, NormConfig, SharedExpertConfig,
};
use crate::ModelError;
use host::ops::rmsnorm::NormWeight;

/// With the defaults of the type's configuration class. The gate of the attention and the zero-centred norms are of the
/// class, not of the file.
pub(super) fn read(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let num_layers = fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(48);
    let attention = AttentionConfig { output_gate: true, ..read_attention(fields, 16, 2, 256)? };
    let delta_net = read_delta_net(fields)?;
    let activation = read_activation(fields, "silu")?;
    if activation != Activation::Silu {
        // The convolution has it too.
        return Err(fields.unsupported("hidden_act", activation.name().into(), &["silu", "swish"]));
    }
    let mlp = MlpConfig {
        intermediate_size: fields.size_up_to("intermediate_size", MAX_INTERMEDIATE, 5632)?,
        activation,
    };
    let shared = SharedExpertConfig {
        mlp: MlpConfig {
            intermediate_size: fields.size_up_to("shared_expert_intermediate_size", MAX_INTERMEDIATE, 512)?,
            activation,
        },
        name: "shared_expert",
        gate: true,
    };
    let defaults = MoeDefaults { num_experts: 512, top_k: 10, normalised: true, intermediate_size: 512 };
    let moe = read_moe(fields, defaults)?.map(|moe| MoeConfig { shared: Some(shared), ..moe });
    let feed_forwards = sparse_layers(fields, num_layers)?.into_iter().map(|is_sparse| match moe {
        Some(moe) if is_sparse => FeedForwardConfig::Moe(moe),
        _ => FeedForwardConfig::Mlp(mlp),
    });
    let mixers = full_attention_layers(fields, num_layers)?.into_iter().map(|is_full| {
        if is_full { MixerConfig::Attention(attention) } else { MixerConfig::DeltaNet(delta_net) }
    });
    let layers =
        mixers.zip(feed_forwards).map(|(mixer, feed_forward)| LayerConfig { mixer, feed_forward }).collect();
    let max_position_embeddings = fields.size("max_position_embeddings", 32768)?;
    Ok(DecoderConfig {
        vocab_size: fields.size("vocab_size", 151936)?,
        hidden_size: fields.size("hidden_size", 2048)?,
        norm: NormConfig { eps: read_eps(fields, 1e-6)?, weight: NormWeight::ZeroCentred },
        layers,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        max_position_embeddings,
        rope: RopeConfig::read(
            fields,
            RopeDefaults {
                theta: 10000.0,
                partial_rotary_factor: Some(0.25),
                head_dim: attention.head_dim,
                max_position_embeddings,
            },
        )?,
    })
}

fn read_delta_net(fields: &Fields) -> Result<DeltaNetConfig, ModelError> {
    let config = DeltaNetConfig {
        heads_k: fields.size_up_to("linear_num_key_heads", MAX_HEADS, 16)?,
        heads_v: fields.size_up_to("linear_num_value_heads", MAX_HEADS, 32)?,
        dim_k: fields.size_up_to("linear_key_head_dim", MAX_DIM_K as usize, 128)?,
        dim_v: fields.size("linear_value_head_dim", 128)?,
        conv_width: fields.integer("linear_conv_kernel_dim", 2..=MAX_WIDTH as usize)?.unwrap_or(4),
    };
    let DeltaNetConfig { heads_k, heads_v, dim_v, .. } = config;
    let inconsistent = |rule, got| Err(fields.inconsistent(rule, got));
    if !heads_v.is_multiple_of(heads_k) {
        let rule = "linear_num_value_heads must be a multiple of linear_num_key_heads";
        return inconsistent(rule, format!("{heads_v} and {heads_k}"));
    }
    // As the delta rule takes them.
    if heads_v.saturating_mul(dim_v) >= 1 << 24 {
        let rule = "linear_num_value_heads · linear_value_head_dim must be below 2^24";
        return inconsistent(rule, format!("{heads_v} · {dim_v}"));
    }
    Ok(config)
}

/// Which layers have attention: those that `layer_types` marks, or else every `full_attention_interval`th.
fn full_attention_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(types) = fields.nullable("layer_types", "a list of strings", Value::as_array)? else {
        let interval = fields.size("full_attention_interval", 4)?;
        return Ok((0..num_layers).map(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    if types.len() != num_layers {
        let rule = "layer_types must have num_hidden_layers entries";
        return Err(fields.inconsistent(rule, format!("{} and {num_layers}", types.len())));
    }
    let is_full = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("full_attention") => Ok(true),
        Some("linear_attention") => Ok(false),
        _ => Err(fields.unsupported(
            &format!("layer_types[{layer}]"),
            kind.to_string(),
            &["full_attention", "linear_attention"],
        )),
    };
    types.iter().enumerate().map(is_full).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    #[test]
    fn configs_with_delta_nets() {
        let delta_net = |heads_k, heads_v, dim| DeltaNetConfig {
            heads_k,
            heads_v,
            dim_k: dim,
            dim_v: dim,
            conv_width: 4,
        };
        let shared = |intermediate_size| {
            let mlp = MlpConfig { intermediate_size, activation: Activation::Silu };
            Some(SharedExpertConfig { mlp, name: "shared_expert", gate: true })
        };
        // Attention in every fourth layer.
        let mixed = |num_layers, attention, delta_net, moe| {
            let attention = AttentionConfig { output_gate: true, ..attention };
            let mut config = sparse(num_layers, attention, moe, 5e6);
            for layer in (0..num_layers).filter(|layer| layer % 4 != 3) {
                config.layers[layer].mixer = MixerConfig::DeltaNet(delta_net);
            }
            DecoderConfig { norm: NormConfig { weight: NormWeight::ZeroCentred, ..config.norm }, ..config }
        };
        let rope = |theta, rotary_dim| RopeConfig { rotary_dim, ..default_rope(theta) };

        let config = repository("tests/golden/qwen3_next");
        let moe = MoeConfig { shared: shared(48), ..experts(8, 2, 32, RouterWeights::Normalised) };
        let expected = DecoderConfig {
            vocab_size: 384,
            hidden_size: 64,
            rope: rope(1e7, 8),
            ..mixed(4, heads(4, 2, 32), delta_net(2, 4, 16), moe)
        };
        assert_eq!((config.architecture, config.decoder), (Architecture::Qwen3Next, expected));

        let moe = MoeConfig { shared: shared(512), ..experts(512, 10, 512, RouterWeights::Normalised) };
        let expected = DecoderConfig {
            hidden_size: 2048,
            max_position_embeddings: 262144,
            rope: rope(5e6, 64),
            ..mixed(48, heads(16, 2, 256), delta_net(16, 32, 128), moe)
        };
        assert_eq!(published("qwen3-coder-next").decoder, expected);

        // The defaults are those sizes too.
        let parse = |fields: &str| parse(&format!(r#"{{"model_type": "qwen3_next"{fields}}}"#));
        let defaults = DecoderConfig { max_position_embeddings: 32768, rope: rope(1e4, 64), ..expected };
        assert_eq!(parse("").unwrap().decoder, defaults);

        let error = |fields: &str| parse(fields).unwrap_err().to_string();
        assert_eq!(
            error(r#", "linear_num_key_heads": 3"#),
            "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads, got 32 and 3"
        );
        assert_eq!(
            error(r#", "linear_conv_kernel_dim": 5"#),
            "config.json: linear_conv_kernel_dim: expected an integer from 2 to 4, got 5"
        );
        assert_eq!(
            error(r#", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]"#),
            "config.json: layer_types[0]: \"sliding_attention\" is not supported; supported: full_attention, linear_attention"
        );
        assert_eq!(
            error(r#", "hidden_act": "gelu""#),
            "config.json: hidden_act: gelu_erf is not supported; supported: silu, swish"
        );
    }
}
