use std::fs;

use super::*;

fn parse(text: &str) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(text, Path::new("config.json"))
}

/// A qwen3 configuration with these fields besides `model_type`.
fn qwen3(fields: &str) -> Result<ModelConfig, ModelError> {
    let comma = if fields.is_empty() { "" } else { "," };
    parse(&format!(r#"{{"model_type":"qwen3"{comma}{fields}}}"#))
}

fn message(fields: &str) -> String {
    qwen3(fields).unwrap_err().to_string()
}

fn rope(fields: &str) -> RopeConfig {
    qwen3(fields).unwrap().decoder.rope
}

fn repository(dir: &str) -> ModelConfig {
    ModelConfig::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(dir)).unwrap()
}

/// One of assets/configs: whatever it says is understood.
fn published(name: &str) -> ModelConfig {
    let file = format!("{}/../assets/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let config = ModelConfig::from_json(&fs::read_to_string(&file).unwrap(), Path::new(&file)).unwrap();
    assert_eq!(config.unread_keys, [""; 0], "{name}");
    config
}

/// A dense decoder of like layers, with Qwen3's constants.
fn dense(
    num_layers: usize,
    attention: AttentionConfig,
    intermediate_size: usize,
    theta: f64,
) -> DecoderConfig {
    let mlp = MlpConfig { intermediate_size, activation: Activation::Silu };
    let layer =
        LayerConfig { mixer: MixerConfig::Attention(attention), feed_forward: FeedForwardConfig::Mlp(mlp) };
    DecoderConfig {
        vocab_size: 151936,
        hidden_size: 4096,
        norm: NormConfig { eps: 1e-6, weight: NormWeight::Plain },
        layers: vec![layer; num_layers],
        tie_word_embeddings: false,
        max_position_embeddings: 32768,
        rope: RopeConfig { rotary_dim: attention.head_dim, ..default_rope(theta) },
    }
}

fn heads(heads_q: usize, heads_kv: usize, head_dim: usize) -> AttentionConfig {
    AttentionConfig {
        heads_q,
        heads_kv,
        head_dim,
        bias: false,
        output_bias: false,
        qk_norm: true,
        window: None,
        output_gate: false,
    }
}

fn attention(config: &ModelConfig, layer: usize) -> AttentionConfig {
    match config.decoder.layers[layer].mixer {
        MixerConfig::Attention(attention) => attention,
        other => panic!("layer {layer}: {other:?}"),
    }
}

fn default_rope(theta: f64) -> RopeConfig {
    RopeConfig { theta, kind: RopeKind::Default, rotary_dim: 128 }
}

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
fn golden_and_demo_configs() {
    let config = repository("tests/golden/qwen3");
    let expected = DecoderConfig {
        vocab_size: 384,
        hidden_size: 128,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        ..dense(3, heads(4, 2, 64), 256, 1e6)
    };
    assert_eq!(config.decoder, expected);
    assert_eq!(config.dtype, Some(DType::F32));
    assert_eq!((&config.eos_token_ids[..], config.bos_token_id), (&[1][..], Some(0)));

    let config = repository("tests/golden/qwen3_sliding");
    let mut expected =
        DecoderConfig { vocab_size: 384, hidden_size: 64, ..dense(4, heads(4, 1, 32), 128, 1e4) };
    for layer in &mut expected.layers[2..] {
        layer.mixer = MixerConfig::Attention(AttentionConfig { window: Some(8), ..heads(4, 1, 32) });
    }
    assert_eq!(config.decoder, expected);

    let config = repository("assets/demo-model");
    let expected = DecoderConfig {
        vocab_size: 2048,
        hidden_size: 256,
        tie_word_embeddings: true,
        max_position_embeddings: 2048,
        ..dense(5, heads(4, 2, 64), 768, 1e4)
    };
    assert_eq!(config.decoder, expected);
    assert_eq!(config.dtype, Some(DType::BF16));
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![0], Some(0)));
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

/// Qwen3's experts.
fn experts(num_experts: usize, top_k: usize, intermediate_size: usize, weights: RouterWeights) -> MoeConfig {
    MoeConfig {
        num_experts,
        top_k,
        expert: MlpConfig { intermediate_size, activation: Activation::Silu },
        score: RouterScore::Softmax,
        correction_bias: false,
        groups: None,
        weights,
        scale: 1.0,
        round_weights: true,
        shared: None,
    }
}

/// A decoder whose layers all have these experts.
fn sparse(num_layers: usize, attention: AttentionConfig, moe: MoeConfig, theta: f64) -> DecoderConfig {
    let mut config = dense(num_layers, attention, 1, theta);
    for layer in &mut config.layers {
        layer.feed_forward = FeedForwardConfig::Moe(moe);
    }
    config
}

#[test]
fn configs_with_experts() {
    let config = repository("tests/golden/qwen3_moe");
    let moe = experts(8, 2, 48, RouterWeights::Normalised);
    let expected = DecoderConfig { vocab_size: 384, hidden_size: 64, ..sparse(3, heads(4, 2, 32), moe, 1e7) };
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
    assert_eq!(read(r#", "first_k_dense_replace": 3, "scoring_func": "softmax", "head_dim": 64"#), defaults);
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
        FeedForwardConfig::Moe(moe) => (moe.groups, moe.shared.map(|shared| shared.mlp.intermediate_size)),
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
        (r#""n_group": 3"#, "n_group must divide n_routed_experts into groups of at least 2, got 3 and 64"),
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

#[test]
fn configs_with_delta_nets() {
    let delta_net =
        |heads_k, heads_v, dim| DeltaNetConfig { heads_k, heads_v, dim_k: dim, dim_v: dim, conv_width: 4 };
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

#[test]
fn both_rope_spellings_agree() {
    let old = rope(r#""rope_theta": 5e6, "rope_scaling": null"#);
    let new = rope(r#""rope_parameters": {"rope_theta": 5000000, "rope_type": "default"}"#);
    assert_eq!(old, default_rope(5e6));
    assert_eq!(new, old);

    let old = rope(
        r#""rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768}"#,
    );
    let new = rope(
        r#""rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4,
        "original_max_position_embeddings": 32768}"#,
    );
    assert_eq!(new, old);
    assert!(matches!(old.kind, RopeKind::Yarn(yarn) if yarn.original_max_position_embeddings == 32768));

    // rope_scaling wins over rope_parameters, and lets the top level fill in theta.
    let both = rope(
        r#""rope_theta": 7e6, "rope_scaling": {"rope_type": "linear", "factor": 2},
        "rope_parameters": {"rope_theta": 9e6}"#,
    );
    assert_eq!(both, RopeConfig { kind: RopeKind::Linear { factor: 2.0 }, ..default_rope(7e6) });
    assert_eq!(rope(r#""rope_theta": 3e4, "rope_parameters": {}"#), default_rope(3e4));
}

#[test]
fn rope_errors() {
    assert_eq!(
        message(r#""rope_scaling": {"rope_type": "dynamic", "factor": 2.0}"#),
        "config.json: rope_scaling.rope_type: dynamic is not supported; supported: default, linear, yarn, \
         llama3"
    );
    assert_eq!(
        message(r#""rope_parameters": {"type": "yarn"}"#),
        "config.json: rope_parameters.factor: expected a positive number, got nothing"
    );
    assert_eq!(message(r#""rope_theta": 0"#), "config.json: rope_theta: expected a number above 1, got 0");
    let partial = parse(r#"{"model_type": "qwen3_next", "head_dim": 128, "partial_rotary_factor": 0.01}"#);
    assert_eq!(
        partial.unwrap_err().to_string(),
        "config.json: head_dim · partial_rotary_factor must be even and at least 2, got 128 · 0.01"
    );
    assert_eq!(
        message(r#""rope_scaling": {"type": "linear", "factor": 2}, "partial_rotary_factor": 0.5"#),
        "config.json: partial_rotary_factor: 0.5 is not supported; supported: 1"
    );
    assert_eq!(
        message(r#""rope_parameters": {"full_attention": {"rope_theta": 1e4}}"#),
        "config.json: rope_parameters.full_attention: {\"rope_theta\":10000.0} is not supported; supported: one \
         set of parameters for all layers"
    );
    assert_eq!(message(r#""rope_scaling": 3"#), "config.json: rope_scaling: expected an object, got 3");
}

#[test]
fn default_and_linear_frequencies() {
    let rope = RopeConfig { rotary_dim: 8, ..default_rope(10000.0) };
    let freqs = rope.inv_freq().unwrap();
    for (freq, expected) in freqs.iter().zip([1.0, 0.1, 0.01, 0.001]) {
        assert!((freq / expected - 1.0).abs() < 1e-14, "{freq} {expected}");
    }
    assert_eq!((freqs.len(), rope.attention_factor()), (4, 1.0));
    let linear = RopeConfig { kind: RopeKind::Linear { factor: 4.0 }, ..rope };
    let quarters: Vec<f64> = freqs.iter().map(|freq| freq / 4.0).collect();
    assert_eq!((linear.inv_freq().unwrap(), linear.attention_factor()), (quarters, 1.0));
}

#[test]
fn partial_rotation() {
    let rotary_dim = |fields: &str| {
        let config = parse(&format!(r#"{{"model_type": "qwen3_next", "head_dim": 256, {fields}}}"#)).unwrap();
        assert_eq!(config.unread_keys, [""; 0]);
        config.decoder.rope.rotary_dim
    };
    assert_eq!(rotary_dim(r#""partial_rotary_factor": 0.75"#), 192);
    assert_eq!(rotary_dim(r#""rope_parameters": {"partial_rotary_factor": 0.5}"#), 128);
    // Heads of the other types are rotated as a whole.
    let whole = qwen3(r#""partial_rotary_factor": 0.5"#).unwrap();
    assert_eq!(
        (whole.decoder.rope.rotary_dim, &whole.unread_keys[..]),
        (128, &["partial_rotary_factor".into()][..])
    );
    assert_eq!(qwen3(r#""partial_rotary_factor": 1.0"#).unwrap().unread_keys, [""; 0]);
}

/// The documented long-context option of the Qwen3 models: theta 1e6, factor 4 over 32768 positions, 128 dimensions.
/// A pair makes 32 turns at index 23.60 and one turn at 39.65, so the ramp goes from 23 to 40.
#[test]
fn yarn_frequencies() {
    let yarn = r#""rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768"#;
    let rounded = rope(&format!(r#""rope_theta": 1e6, "rope_scaling": {{{yarn}}}"#));
    let plain = default_rope(1e6).inv_freq().unwrap();
    let freqs = rounded.inv_freq().unwrap();
    assert_eq!(freqs[..24], plain[..24]);
    for i in 40..64 {
        assert_eq!(freqs[i], plain[i] / 4.0);
    }
    // Pair 30 is 7 of the ramp's 17 steps in: 10/17 + 7/17 / 4 = 47/68.
    assert!((freqs[30] / plain[30] - 47.0 / 68.0).abs() < 1e-14);
    assert!((rounded.attention_factor() - 1.138_629_436_111_989).abs() < 1e-14);

    let exact = rope(&format!(r#""rope_theta": 1e6, "rope_scaling": {{{yarn}, "truncate": false}}"#));
    let RopeKind::Yarn(parameters) = exact.kind else { panic!("{exact:?}") };
    let (low, high) = parameters.ramp(1e6, 128);
    assert!((low - 23.59595).abs() < 1e-4 && (high - 39.65088).abs() < 1e-4, "{low} {high}");
    assert_eq!(exact.inv_freq().unwrap()[23], plain[23]);
    assert!(exact.inv_freq().unwrap()[24] < plain[24]);
}

#[test]
fn yarn_attention_factor() {
    let factor = |fields: &str| {
        let yarn = format!(r#""rope_scaling": {{"rope_type": "yarn", "factor": 4, {fields}}}"#);
        rope(&yarn).attention_factor()
    };
    let ln4 = 4f64.ln();
    assert_eq!(factor(r#""attention_factor": 1.5, "mscale": 2, "mscale_all_dim": 1"#), 1.5);
    let ratio = (0.2 * ln4 + 1.0) / (0.1 * ln4 + 1.0);
    assert!((factor(r#""mscale": 2, "mscale_all_dim": 1"#) - ratio).abs() < 1e-14);
    assert!((factor(r#""mscale": 2, "mscale_all_dim": 0"#) - (0.1 * ln4 + 1.0)).abs() < 1e-14);
    assert!((factor(r#""attention_factor": null"#) - (0.1 * ln4 + 1.0)).abs() < 1e-14);
    let shrink = rope(r#""rope_scaling": {"rope_type": "yarn", "factor": 0.5}"#);
    assert_eq!(shrink.attention_factor(), 1.0);
    let RopeKind::Yarn(yarn) = shrink.kind else { panic!("{shrink:?}") };
    assert_eq!(yarn.original_max_position_embeddings, 32768);
}

/// Stretching by 1 is not stretching, whatever the other parameters, and every frequency lies between the kept and the
/// divided one.
#[test]
fn stretches() {
    for theta in [1e4, 1e6, 5e6] {
        let plain = default_rope(theta).inv_freq().unwrap();
        for original in [512usize, 4096, 32768, 262144] {
            for (factor, truncate) in [(1.0, true), (1.0, false), (2.0, true), (4.0, false), (40.0, true)] {
                for kind in ["linear", "yarn"] {
                    let stretched = rope(&format!(
                        r#""rope_theta": {theta}, "rope_scaling": {{"rope_type": "{kind}", "factor": {factor},
                        "original_max_position_embeddings": {original}, "truncate": {truncate}}}"#
                    ));
                    assert_eq!(stretched.attention_factor() == 1.0, factor == 1.0 || kind == "linear");
                    for (freq, plain) in std::iter::zip(stretched.inv_freq().unwrap(), &plain) {
                        let range = plain / factor * (1.0 - 1e-14)..=plain * (1.0 + 1e-14);
                        assert!(range.contains(&freq), "{kind} {factor}: {freq} not in {range:?}");
                    }
                }
            }
        }
    }
}

/// With a context of a few tokens both ends of the ramp fall on 0.
#[test]
fn yarn_ramp_of_no_width_stays_finite() {
    let yarn =
        rope(r#""rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 6}"#);
    let RopeKind::Yarn(parameters) = yarn.kind else { panic!("{yarn:?}") };
    assert_eq!(parameters.ramp(yarn.theta, 128), (0.0, 0.001));
    let halved: Vec<f64> = default_rope(1e4).inv_freq().unwrap()[1..].iter().map(|freq| freq / 2.0).collect();
    let freqs = yarn.inv_freq().unwrap();
    assert_eq!((freqs[0], &freqs[1..]), (1.0, &halved[..]));
}

#[test]
fn wrong_fields() {
    let cases = [
        (r#""hidden_size": "1024""#, r#"hidden_size: expected an integer from 1 to 2147483647, got "1024""#),
        (r#""vocab_size": 0"#, "vocab_size: expected an integer from 1 to 2147483647, got 0"),
        (r#""intermediate_size": -3"#, "intermediate_size: expected an integer from 1 to 1073741823, got -3"),
        (r#""head_dim": null"#, "head_dim: expected an integer from 1 to 2147483647, got null"),
        (
            r#""num_hidden_layers": 99999999999999"#,
            "num_hidden_layers: expected an integer from 1 to 1024, got 99999999999999",
        ),
        (
            r#""rms_norm_eps": 1e-300"#,
            "rms_norm_eps: expected a positive number in the range of f32, got 1e-300",
        ),
        (r#""attention_bias": 1"#, "attention_bias: expected true or false, got 1"),
        (r#""eos_token_id": [1, "2"]"#, "eos_token_id: expected a token id or a list of them, got [1,\"2\"]"),
        (
            r#""num_attention_heads": 4, "num_key_value_heads": 3"#,
            "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",
        ),
        (r#""head_dim": 63"#, "head_dim: expected a multiple of 8 from 8 to 512, got 63"),
        (
            r#""torch_dtype": "float8_e4m3fn""#,
            "torch_dtype: float8_e4m3fn is not supported; supported: float32, float16, bfloat16",
        ),
    ];
    for (fields, expected) in cases {
        assert_eq!(message(fields), format!("config.json: {expected}"));
    }
}

/// Sizes beyond what kernels take: no allocation, product or sum of them comes before the error.
#[test]
fn sizes_that_no_kernel_takes() {
    const LARGE: &str = "2147483647";
    let cases = [
        ("qwen3_moe", r#""num_experts": N"#, "num_experts: expected an integer from 0 to 2048, got N"),
        (
            "qwen3_moe",
            r#""num_local_experts": N"#,
            "num_local_experts: expected an integer from 0 to 2048, got N",
        ),
        (
            "qwen3_moe",
            r#""num_experts_per_tok": 33"#,
            "num_experts_per_tok: expected an integer from 1 to 32, got 33",
        ),
        (
            "qwen3_moe",
            r#""num_attention_heads": N"#,
            "num_attention_heads: expected an integer from 1 to 65535, got N",
        ),
        (
            "qwen3_moe",
            r#""num_attention_heads": 512"#,
            "head_dim: expected a multiple of 8 from 8 to 512, got 4",
        ),
        (
            "qwen3_moe",
            r#""moe_intermediate_size": N"#,
            "moe_intermediate_size: expected an integer from 1 to 1073741823, got N",
        ),
        (
            "qwen3",
            r#""intermediate_size": N"#,
            "intermediate_size: expected an integer from 1 to 1073741823, got N",
        ),
        (
            "qwen3",
            r#""num_key_value_heads": N"#,
            "num_key_value_heads: expected an integer from 1 to 65535, got N",
        ),
        ("qwen3", r#""head_dim": 520"#, "head_dim: expected a multiple of 8 from 8 to 512, got 520"),
        (
            "qwen3_next",
            r#""linear_num_key_heads": N, "linear_num_value_heads": N"#,
            "linear_num_key_heads: expected an integer from 1 to 65535, got N",
        ),
        (
            "qwen3_next",
            r#""linear_key_head_dim": 129"#,
            "linear_key_head_dim: expected an integer from 1 to 128, got 129",
        ),
        (
            "qwen3_next",
            r#""linear_value_head_dim": N"#,
            "linear_num_value_heads · linear_value_head_dim must be below 2^24, got 32 · N",
        ),
        (
            "qwen3_next",
            r#""num_attention_heads": N, "num_key_value_heads": 1, "full_attention_interval": 1"#,
            "num_attention_heads: expected an integer from 1 to 65535, got N",
        ),
        (
            "glm4_moe_lite",
            r#""n_shared_experts": N, "moe_intermediate_size": N"#,
            "moe_intermediate_size: expected an integer from 1 to 1073741823, got N",
        ),
        (
            "glm4_moe_lite",
            r#""n_shared_experts": N"#,
            "moe_intermediate_size · n_shared_experts must be below 2^30, got 1536 · N",
        ),
        (
            "glm4_moe_lite",
            r#""n_routed_experts": N"#,
            "n_routed_experts: expected an integer from 1 to 2048, got N",
        ),
        (
            "glm4_moe_lite",
            r#""num_attention_heads": N"#,
            "num_attention_heads: expected an integer from 1 to 65535, got N",
        ),
        (
            "glm4_moe_lite",
            r#""kv_lora_rank": N"#,
            "kv_lora_rank: expected a multiple of 8 from 8 to 512, got N",
        ),
        (
            "glm4_moe_lite",
            r#""v_head_dim": 12"#,
            "v_head_dim: expected a multiple of 8 from 8 to 512, got 12",
        ),
        (
            "glm4_moe_lite",
            r#""qk_nope_head_dim": 520"#,
            "qk_nope_head_dim + qk_rope_head_dim: expected a multiple of 8 from 8 to 576, got 584",
        ),
    ];
    for (model_type, fields, expected) in cases {
        let text = format!(r#"{{"model_type": "{model_type}", {}}}"#, fields.replace('N', LARGE));
        let message = parse(&text).unwrap_err().to_string();
        assert_eq!(message, format!("config.json: {}", expected.replace('N', LARGE)));
    }
    let vision = |text: &str, vision: &str| {
        let text = format!(r#""hidden_size": 3584{text}"#);
        qwen3_vl(&text, &vision.replace('N', LARGE), "").unwrap_err().to_string()
    };
    for (fields, expected) in [
        (r#""patch_size": N"#, "vision_config.patch_size: expected an integer from 1 to 4096, got N"),
        (
            r#""patch_size": 1024, "spatial_merge_size": 8"#,
            "vision_config.patch_size · spatial_merge_size must be at most 4096, got 1024 · 8",
        ),
        (
            r#""in_channels": N, "temporal_patch_size": N"#,
            "a patch, vision_config.in_channels · temporal_patch_size · patch_size², must be below 2^31, got N · N · 16²",
        ),
        (
            r#""hidden_size": 8192, "num_heads": 1024, "patch_size": 1, "spatial_merge_size": 4096"#,
            "a token's patches, vision_config.hidden_size · spatial_merge_size², must be below 2^31, got 8192 · 4096²",
        ),
        (r#""num_heads": N"#, "vision_config.num_heads: expected an integer from 1 to 65535, got N"),
    ] {
        assert_eq!(vision("", fields), format!("config.json: {}", expected.replace('N', LARGE)));
    }
    let sections = r#", "rope_scaling": {"mrope_section": [64, 9223372036854775808, 9223372036854775808]}"#;
    assert_eq!(
        vision(sections, ""),
        "config.json: text_config.rope_scaling.mrope_section: expected a list of three sizes, got \
         [64,9223372036854775808,9223372036854775808]"
    );
    // Each is a size that kernels take; a cache of theirs may be none.
    let large = qwen3(&r#""vocab_size": N, "hidden_size": N"#.replace('N', LARGE)).unwrap().decoder;
    assert_eq!(large.cache_bytes(DType::F32, usize::MAX), usize::MAX);
    let latent = parse(r#"{"model_type": "glm4_moe_lite"}"#).unwrap().decoder;
    assert_eq!(latent.cache_bytes(DType::F32, usize::MAX), usize::MAX);
}

#[test]
fn wrong_files() {
    let text = |text: &str| parse(text).unwrap_err().to_string();
    assert_eq!(
        text(r#"{"model_type": "gemma2"}"#),
        format!(
            r#"config.json: unknown model_type "gemma2"; supported: {}"#,
            Architecture::MODEL_TYPES.join(", ")
        )
    );
    assert_eq!(text("{}"), "config.json: model_type: expected a string, got nothing");
    assert_eq!(text("[1]"), "config.json: the file's content: expected an object, got [1]");
    assert_eq!(text("{\n \"model_type\" \"qwen3\"}"), "config.json:2:15: not valid JSON: expected `:`");
    assert_eq!(text(""), "config.json:1:0: not valid JSON: EOF while parsing a value");
}

#[test]
fn directories() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let error = ModelConfig::from_dir(dir.path()).unwrap_err();
    assert!(matches!(&error, ModelError::Missing { path: missing } if *missing == path("config.json")));
    assert_eq!(error.to_string(), format!("{} does not exist", path("config.json").display()));

    fs::write(path("config.json"), r#"{"model_type": "qwen3", "eos_token_id": 2, "bos_token_id": 1}"#)
        .unwrap();
    assert_eq!(ModelConfig::from_dir(dir.path()).unwrap().eos_token_ids, [2]);

    fs::write(path("generation_config.json"), r#"{"eos_token_id": [5, 6], "temperature": 0.7}"#).unwrap();
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![5, 6], Some(1)));

    fs::write(path("generation_config.json"), "{").unwrap();
    let text = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    let expected = ":1:1: not valid JSON: EOF while parsing an object";
    assert_eq!(text, format!("{}{expected}", path("generation_config.json").display()));

    // What a file says is quoted, but neither obeyed by a terminal nor in full.
    let name = "\u{1b}[2Jé\n\u{202e}".to_owned() + &"x".repeat(1 << 20);
    fs::write(path("config.json"), serde_json::json!({"model_type": name}).to_string()).unwrap();
    let text = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    let start =
        format!("{}: unknown model_type \"\\u{{1b}}[2Jé\\n\\u{{202e}}xxx", path("config.json").display());
    assert!(text.starts_with(&start) && text.len() < 1000, "{}", &text[..text.len().min(1000)]);

    fs::File::create(path("config.json")).unwrap().set_len(MAX_CONFIG_BYTES + 1).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err();
    assert_eq!(error.to_string(), format!("{} is larger than 4194304 bytes", path("config.json").display()));

    fs::write(path("config.json"), [0xff, 0xfe]).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err();
    assert!(matches!(error, ModelError::Unreadable { .. }));
    assert_eq!(error.to_string(), format!("cannot read {}", path("config.json").display()));
}

/// A qwen3_vl configuration with these fields of the text, of the tower, and besides.
fn qwen3_vl(text: &str, vision: &str, top: &str) -> Result<ModelConfig, ModelError> {
    parse(&format!(
        r#"{{"model_type": "qwen3_vl", "text_config": {{{text}}}, "vision_config": {{{vision}}} {top}}}"#
    ))
}

#[test]
fn vision_configs() {
    let config = published("qwen3-vl-2b-instruct");
    let decoder = DecoderConfig {
        hidden_size: 2048,
        tie_word_embeddings: true,
        max_position_embeddings: 262144,
        ..dense(28, heads(16, 8, 128), 6144, 5e6)
    };
    let vision = VisionConfig {
        depth: 24,
        hidden_size: 1024,
        heads: 16,
        intermediate_size: 4096,
        activation: Activation::GeluTanh,
        channels: 3,
        temporal_patch_size: 2,
        patch_size: 16,
        merge_size: 2,
        out_hidden_size: 2048,
        position_grid: 48,
        rope_theta: 1e4,
        deepstack_blocks: vec![5, 11, 17],
        mrope_section: [24, 20, 20],
        image_token: 151655,
        video_token: 151656,
        vision_start_token: 151652,
        vision_end_token: 151653,
        pixels: PixelConfig::default(),
    };
    assert_eq!(vision.patch_len(), 1536);
    assert_eq!((config.architecture, config.decoder), (Architecture::Qwen3Vl, decoder));
    assert_eq!((config.vision.as_ref(), config.dtype), (Some(&vision), Some(DType::BF16)));
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![151645], Some(151643)));

    let golden = repository("tests/golden/qwen3_vl");
    let small = golden.vision.unwrap();
    assert_eq!((small.mrope_section, small.position_grid, small.depth), ([6, 5, 5], 8, 3));
    assert_eq!((golden.decoder.rope.theta, golden.decoder.tie_word_embeddings), (5e6, false));
    assert_eq!((golden.dtype, golden.eos_token_ids), (Some(DType::F32), vec![1]));

    // With the defaults of the classes, of which the widths do not fit each other.
    let defaults = qwen3_vl(r#""hidden_size": 3584"#, "", "").unwrap();
    assert_eq!(defaults.decoder.rope.theta, 5e5);
    let large = VisionConfig {
        depth: 27,
        hidden_size: 1152,
        intermediate_size: 4304,
        out_hidden_size: 3584,
        deepstack_blocks: vec![8, 16, 24],
        ..vision
    };
    assert_eq!(defaults.vision, Some(large));
}

/// What has a reader of its own is neither refused nor unread here; a method that it lacks is named.
#[test]
fn quantization_is_read_elsewhere() {
    let methods = r#""quantization_config": {"quant_method": "bitsandbytes"}"#;
    assert_eq!(qwen3(methods).unwrap(), qwen3("").unwrap());
    let text = format!(r#"{{"text_config": {{{methods}}}}}"#);
    let root = serde_json::from_str(&text).unwrap();
    assert_eq!(
        QuantConfig::read(&root, Path::new("config.json")).unwrap_err().to_string(),
        "config.json: text_config.quantization_config.quant_method: bitsandbytes is not supported; supported: fp8, gptq, \
         awq, mxfp4, compressed-tensors, modelopt"
    );
}

#[test]
fn vision_configs_that_contradict_themselves() {
    let message = |text: &str, vision: &str| qwen3_vl(text, vision, "").unwrap_err().to_string();
    let fits = r#""hidden_size": 3584"#;
    assert_eq!(
        message("", ""),
        "config.json: vision_config.out_hidden_size must be text_config.hidden_size, got 3584 and 4096"
    );
    assert!(message(fits, r#""num_position_embeddings": 2305"#).contains("must be a square"));
    assert!(message(fits, r#""num_heads": 7"#).contains("eight times num_heads"));
    assert!(message(fits, r#""deepstack_visual_indexes": [5, 27]"#).contains("below depth"));
    assert!(message(fits, r#""deepstack_visual_indexes": [5, 5]"#).contains("must ascend"));
    assert!(message(fits, r#""depth": 20"#).contains("below depth"));
    assert!(
        message(r#""hidden_size": 3584, "num_hidden_layers": 2"#, "").contains("a decoder layer for each")
    );
    let sections = r#""hidden_size": 3584, "rope_scaling": {"mrope_section": [24, 20, 21]}"#;
    assert!(message(sections, "").contains("mrope_section"));
    assert!(parse(r#"{"model_type": "qwen3_vl"}"#).unwrap_err().to_string().contains("text_config"));
}

/// With the defaults of transformers' classes, and what published files of each type say.
#[test]
fn llama_and_its_like() {
    let decoder = |text: &str| parse(text).map(|config| config.decoder).map_err(|error| error.to_string());
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
