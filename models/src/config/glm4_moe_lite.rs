//! `model_type: "glm4_moe_lite"`: latent attention; experts in all layers but the first (GLM-4.7-Flash).
//!
//! The files' `first_k_dense_replace`, `topk_method` and `scoring_func` are not obeyed, as by transformers: what they
//! would say follows from the model type, or from other keys. Layers beyond `num_hidden_layers` are the published
//! checkpoint's prediction of the token after the next, which is not built.

use abi::ops::attention::MAX_HEAD_DIM as MAX_KEY_DIM;
use abi::ops::glu::Activation;
use abi::ops::moe_router::{MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K};
use abi::ops::rope::RopeStyle;
use serde_json::Value;

use super::fields::Fields;
use super::qwen3::{read_activation, read_eps};
use super::rope::{RopeConfig, RopeDefaults, score_factor};
use super::{
    DecoderConfig, FeedForwardConfig, LatentConfig, LayerConfig, MAX_HEAD_DIM, MAX_HEADS, MAX_INTERMEDIATE,
    MAX_LAYERS, MAX_SIZE, MixerConfig, MlpConfig, MoeConfig, NormConfig, SharedExpertConfig,
};
use crate::ModelError;
use host::ops::moe_router::{ExpertGroups, RouterScore, RouterWeights};
use host::ops::rmsnorm::NormWeight;

/// Of the norms of the latent rows, whatever `rms_norm_eps` says: transformers leaves them at its class's default.
/// vLLM, SGLang and llama.cpp use `rms_norm_eps`.
const LATENT_EPS: f32 = 1e-6;

/// With the defaults of the type's configuration class.
pub(super) fn read(fields: &Fields) -> Result<DecoderConfig, ModelError> {
    let num_layers = fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(47);
    let latent = read_latent(fields)?;
    let activation = read_activation(fields, "silu")?;
    let dense = MlpConfig {
        intermediate_size: fields.size_up_to("intermediate_size", MAX_INTERMEDIATE, 10240)?,
        activation,
    };
    let experts = read_experts(fields, activation)?;
    let max_position_embeddings = fields.size("max_position_embeddings", 202752)?;
    let layers = sparse_layers(fields, num_layers)?
        .into_iter()
        .map(|is_sparse| {
            let feed_forward =
                if is_sparse { FeedForwardConfig::Moe(experts) } else { FeedForwardConfig::Mlp(dense) };
            LayerConfig { mixer: MixerConfig::Latent(latent), feed_forward }
        })
        .collect();
    let defaults = RopeDefaults {
        theta: 10000.0,
        partial_rotary_factor: Some(1.0),
        head_dim: latent.rope,
        max_position_embeddings,
    };
    let rope = RopeConfig::read(fields, defaults)?;
    if rope.rotary_dim != latent.rope {
        let rule = "partial_rotary_factor must leave all qk_rope_head_dim dimensions rotated";
        return Err(fields.inconsistent(rule, format!("{} of {}", rope.rotary_dim, latent.rope)));
    }
    Ok(DecoderConfig {
        vocab_size: fields.size("vocab_size", 154_880)?,
        hidden_size: fields.size("hidden_size", 2048)?,
        norm: NormConfig { eps: read_eps(fields, 1e-5)?, weight: NormWeight::Plain },
        layers,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        max_position_embeddings,
        rope,
    })
}

fn read_latent(fields: &Fields) -> Result<LatentConfig, ModelError> {
    let q_latent = match fields.get("q_lora_rank") {
        Some(Value::Null) => None,
        _ => Some(fields.size("q_lora_rank", 768)?),
    };
    let most = MAX_KEY_DIM as usize;
    let nope = fields.size_up_to("qk_nope_head_dim", most, 192)?;
    let rope = fields.size_up_to("qk_rope_head_dim", most, 64)?;
    let (latent, value) = (fields.size("kv_lora_rank", 512)?, fields.size("v_head_dim", 256)?);
    fields.check_head_dim("kv_lora_rank", latent, MAX_HEAD_DIM)?;
    fields.check_head_dim("v_head_dim", value, MAX_HEAD_DIM)?;
    // A chunk of a prompt has keys of every head, a decode step cached rows.
    fields.check_head_dim("qk_nope_head_dim + qk_rope_head_dim", nope + rope, most)?;
    fields.check_head_dim("kv_lora_rank + qk_rope_head_dim", latent + rope, most)?;
    let heads = fields.size_up_to("num_attention_heads", MAX_HEADS, 20)?;
    // Every head has keys and values of its own.
    if let Some(heads_kv) = fields.integer("num_key_value_heads", 0..=MAX_SIZE)?.filter(|&of| of != heads) {
        let rule = "num_key_value_heads must be num_attention_heads";
        return Err(fields.inconsistent(rule, format!("{heads_kv} and {heads}")));
    }
    // A second name of it in transformers.
    if let Some(head_dim) = fields.integer("head_dim", 0..=MAX_SIZE)?.filter(|&of| of != rope) {
        let rule = "head_dim must be qk_rope_head_dim";
        return Err(fields.inconsistent(rule, format!("{head_dim} and {rope}")));
    }
    fields.assume("scoring_func", |value| value == "sigmoid");
    fields.assume("topk_method", |value| value == "noaux_tc");
    fields.assume("first_k_dense_replace", |value| value == 1);
    let scale = score_factor(fields)? / ((nope + rope) as f64).sqrt();
    let is_interleaved = fields.flag("rope_interleave")?.unwrap_or(true);
    Ok(LatentConfig {
        heads,
        q_latent,
        latent,
        nope,
        rope,
        value,
        bias: fields.flag("attention_bias")?.unwrap_or(false),
        eps: LATENT_EPS,
        scale: scale as f32,
        style: if is_interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit },
    })
}

fn read_experts(fields: &Fields, activation: Activation) -> Result<MoeConfig, ModelError> {
    let intermediate_size = fields.size_up_to("moe_intermediate_size", MAX_INTERMEDIATE, 1536)?;
    let mlp = |intermediate_size| MlpConfig { intermediate_size, activation };
    let num_experts = match fields.integer("n_routed_experts", 1..=MAX_EXPERTS as usize)? {
        Some(num_experts) => num_experts,
        None => fields.size_up_to("num_local_experts", MAX_EXPERTS as usize, 64)?,
    };
    let top_k = fields.size_up_to("num_experts_per_tok", MAX_TOP_K as usize, 4)?;
    let num_groups = fields.size_up_to("n_group", MAX_GROUPS as usize, 1)?;
    let top_groups = fields.size("topk_group", 1)?;
    let num_shared = fields.integer("n_shared_experts", 0..=MAX_SIZE)?.unwrap_or(1);
    let inconsistent = |rule, got| Err(fields.inconsistent(rule, got));
    if top_k > num_experts {
        let rule = "num_experts_per_tok must be at most n_routed_experts";
        return inconsistent(rule, format!("{top_k} and {num_experts}"));
    }
    let group = num_experts / num_groups;
    // A group is judged by the sum of its best two.
    if !num_experts.is_multiple_of(num_groups) || group < 2 && num_groups > 1 {
        let rule = "n_group must divide n_routed_experts into groups of at least 2";
        return inconsistent(rule, format!("{num_groups} and {num_experts}"));
    }
    if top_groups > num_groups {
        let rule = "topk_group must be at most n_group";
        return inconsistent(rule, format!("{top_groups} and {num_groups}"));
    }
    if top_k > top_groups * group {
        let rule = "num_experts_per_tok must be at most the experts of topk_group groups";
        return inconsistent(rule, format!("{top_k} and {top_groups} groups of {group}"));
    }
    let shared_size = intermediate_size.saturating_mul(num_shared);
    if shared_size > MAX_INTERMEDIATE {
        let rule = "moe_intermediate_size · n_shared_experts must be below 2^30";
        return inconsistent(rule, format!("{intermediate_size} · {num_shared}"));
    }
    let is_normalised = fields.flag("norm_topk_prob")?.unwrap_or(true);
    let scale = fields.number("routed_scaling_factor", "a number above 0", |scale| scale > 0.0)?;
    Ok(MoeConfig {
        num_experts,
        top_k,
        expert: mlp(intermediate_size),
        score: RouterScore::Sigmoid,
        correction_bias: true,
        groups: (num_groups > 1).then_some(ExpertGroups { num_groups, top_groups }),
        weights: if is_normalised { RouterWeights::Normalised } else { RouterWeights::Scores },
        scale: scale.unwrap_or(1.8) as f32,
        round_weights: false,
        shared: (num_shared > 0).then(|| SharedExpertConfig {
            mlp: mlp(shared_size),
            name: "shared_experts",
            gate: false,
        }),
    })
}

/// Which layers have experts.
fn sparse_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(types) = fields.nullable("mlp_layer_types", "a list of strings", Value::as_array)? else {
        return Ok((0..num_layers).map(|layer| layer > 0).collect());
    };
    if types.len() != num_layers {
        let rule = "mlp_layer_types must have num_hidden_layers entries";
        return Err(fields.inconsistent(rule, format!("{} and {num_layers}", types.len())));
    }
    let is_sparse = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("dense") => Ok(false),
        Some("sparse") => Ok(true),
        _ => Err(fields.unsupported(
            &format!("mlp_layer_types[{layer}]"),
            kind.to_string(),
            &["dense", "sparse"],
        )),
    };
    types.iter().enumerate().map(is_sparse).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    /// GLM-4.7-Flash's layers: the first dense, the others with experts.
    fn glm(num_layers: usize, latent: LatentConfig, dense_size: usize, moe: MoeConfig) -> DecoderConfig {
        let layer = |feed_forward| LayerConfig { mixer: MixerConfig::Latent(latent), feed_forward };
        let mlp = MlpConfig { intermediate_size: dense_size, activation: Activation::Silu };
        let mut layers = vec![layer(FeedForwardConfig::Moe(moe)); num_layers];
        layers[0] = layer(FeedForwardConfig::Mlp(mlp));
        DecoderConfig {
            vocab_size: 154880,
            hidden_size: 2048,
            norm: NormConfig { eps: 1e-5, weight: NormWeight::Plain },
            layers,
            tie_word_embeddings: false,
            max_position_embeddings: 202752,
            rope: RopeConfig { rotary_dim: latent.rope, ..default_rope(1e6) },
        }
    }

    /// Experts by sigmoid scores, beside a shared one.
    fn glm_experts(num_experts: usize, top_k: usize, intermediate_size: usize) -> MoeConfig {
        let expert = MlpConfig { intermediate_size, activation: Activation::Silu };
        MoeConfig {
            num_experts,
            top_k,
            expert,
            score: RouterScore::Sigmoid,
            correction_bias: true,
            groups: None,
            weights: RouterWeights::Normalised,
            scale: 1.8,
            round_weights: false,
            shared: Some(SharedExpertConfig { mlp: expert, name: "shared_experts", gate: false }),
        }
    }

    const GLM_LATENT: LatentConfig = LatentConfig {
        heads: 20,
        q_latent: Some(768),
        latent: 512,
        nope: 192,
        rope: 64,
        value: 256,
        bias: false,
        eps: 1e-6,
        scale: 1.0 / 16.0,
        style: RopeStyle::Interleaved,
    };

    #[test]
    fn latent_attention() {
        let published = published("glm-4.7-flash");
        let expected = glm(47, GLM_LATENT, 10240, glm_experts(64, 4, 1536));
        assert_eq!((published.architecture, &published.decoder), (Architecture::Glm4MoeLite, &expected));
        assert_eq!(published.eos_token_ids, [154820, 154827, 154829]);

        let latent = LatentConfig {
            heads: 4,
            q_latent: Some(48),
            latent: 32,
            nope: 24,
            rope: 16,
            value: 32,
            scale: 0.158_113_88,
            ..GLM_LATENT
        };
        let small =
            DecoderConfig { vocab_size: 384, hidden_size: 64, ..glm(3, latent, 160, glm_experts(8, 2, 48)) };
        assert_eq!(repository("tests/golden/glm4_moe_lite").decoder, small);

        let parse = |fields: &str| parse(&format!(r#"{{"model_type": "glm4_moe_lite"{fields}}}"#));
        let read = |fields: &str| parse(fields).unwrap().decoder;
        let defaults = DecoderConfig { rope: RopeConfig { rotary_dim: 64, ..default_rope(1e4) }, ..expected };
        assert_eq!(read(""), defaults);
        // What other readers of this file go by has no effect; `head_dim` is the rotated width.
        assert_eq!(
            read(r#", "first_k_dense_replace": 3, "scoring_func": "softmax", "head_dim": 64"#),
            defaults
        );
        let mixer = |fields: &str| match read(fields).layers[0].mixer {
            MixerConfig::Latent(latent) => latent,
            other => panic!("{other:?}"),
        };
        assert_eq!(mixer(r#", "q_lora_rank": null"#), LatentConfig { q_latent: None, ..GLM_LATENT });
        assert_eq!(
            mixer(r#", "rope_interleave": false, "attention_bias": true"#),
            LatentConfig { style: RopeStyle::HalfSplit, bias: true, ..GLM_LATENT }
        );
        let scale = |fields: &str| mixer(&format!(r#", "rope_parameters": {{{fields}}}"#)).scale * 16.0;
        assert_eq!(scale(r#""rope_type": "default", "factor": 4.0, "mscale_all_dim": 1.0"#), 1.0);
        assert_eq!(scale(r#""rope_type": "yarn", "factor": 4.0"#), 1.0);
        let factor = 0.1 * 4f64.ln() + 1.0;
        let got = scale(r#""rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0"#);
        assert!((f64::from(got) - factor * factor).abs() < 1e-6, "{got}");

        let groups = |fields: &str| match read(fields).layers[1].feed_forward {
            FeedForwardConfig::Moe(moe) => {
                (moe.groups, moe.shared.map(|shared| shared.mlp.intermediate_size))
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(
            groups(r#", "n_group": 8, "topk_group": 4, "n_shared_experts": 2"#),
            (Some(ExpertGroups { num_groups: 8, top_groups: 4 }), Some(3072))
        );
        assert_eq!(groups(r#", "n_shared_experts": 0"#), (None, None));
        assert_eq!(
            groups(r#", "n_group": 32, "topk_group": 2"#),
            (Some(ExpertGroups { num_groups: 32, top_groups: 2 }), Some(1536))
        );
        let types = read(r#", "num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]"#).layers;
        assert!(matches!(types[0].feed_forward, FeedForwardConfig::Moe(_)));
        assert!(matches!(types[1].feed_forward, FeedForwardConfig::Mlp(_)));
        let error = |fields: &str| parse(fields).unwrap_err().to_string();
        for (fields, expected) in [
            (r#""n_routed_experts": 3"#, "num_experts_per_tok must be at most n_routed_experts, got 4 and 3"),
            (
                r#""n_group": 3"#,
                "n_group must divide n_routed_experts into groups of at least 2, got 3 and 64",
            ),
            (
                r#""n_routed_experts": 4, "n_group": 4"#,
                "n_group must divide n_routed_experts into groups of at least 2, got 4 and 4",
            ),
            (r#""n_group": 33"#, "n_group: expected an integer from 1 to 32, got 33"),
            (r#""n_group": 8, "topk_group": 9"#, "topk_group must be at most n_group, got 9 and 8"),
            (r#""topk_group": 2"#, "topk_group must be at most n_group, got 2 and 1"),
            (
                r#""n_group": 32"#,
                "num_experts_per_tok must be at most the experts of topk_group groups, got 4 and 1 groups of 2",
            ),
        ] {
            assert_eq!(error(&format!(", {fields}")), format!("config.json: {expected}"));
        }
        assert_eq!(
            error(r#", "mlp_layer_types": ["dense"]"#),
            "config.json: mlp_layer_types must have num_hidden_layers entries, got 1 and 47"
        );
        assert_eq!(
            error(r#", "num_hidden_layers": 1, "mlp_layer_types": ["mixed"]"#),
            "config.json: mlp_layer_types[0]: \"mixed\" is not supported; supported: dense, sparse"
        );
        assert_eq!(
            error(r#", "partial_rotary_factor": 0.5"#),
            "config.json: partial_rotary_factor must leave all qk_rope_head_dim dimensions rotated, got 32 of 64"
        );
    }
}
