//! What tests of all types share, and those of what is common to them.

use std::fs;

use super::*;

pub(super) fn parse(text: &str) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(text, Path::new("config.json"))
}

/// A qwen3 configuration with these fields besides `model_type`.
pub(super) fn qwen3(fields: &str) -> Result<ModelConfig, ModelError> {
    let comma = if fields.is_empty() { "" } else { "," };
    parse(&format!(r#"{{"model_type":"qwen3"{comma}{fields}}}"#))
}

pub(super) fn message(fields: &str) -> String {
    qwen3(fields).unwrap_err().to_string()
}

pub(super) fn rope(fields: &str) -> RopeConfig {
    qwen3(fields).unwrap().decoder.rope
}

pub(super) fn repository(dir: &str) -> ModelConfig {
    ModelConfig::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(dir)).unwrap()
}

/// One of assets/configs: whatever it says is understood.
pub(super) fn published(name: &str) -> ModelConfig {
    let file = format!("{}/../assets/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let config = ModelConfig::from_json(&fs::read_to_string(&file).unwrap(), Path::new(&file)).unwrap();
    assert_eq!(config.unread_keys, [""; 0], "{name}");
    config
}

/// A dense decoder of like layers, with Qwen3's constants.
pub(super) fn dense(
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

pub(super) fn heads(heads_q: usize, heads_kv: usize, head_dim: usize) -> AttentionConfig {
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

pub(super) fn attention(config: &ModelConfig, layer: usize) -> AttentionConfig {
    match config.decoder.layers[layer].mixer {
        MixerConfig::Attention(attention) => attention,
        other => panic!("layer {layer}: {other:?}"),
    }
}

pub(super) fn default_rope(theta: f64) -> RopeConfig {
    RopeConfig { theta, kind: RopeKind::Default, rotary_dim: 128 }
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

/// Qwen3's experts.
pub(super) fn experts(
    num_experts: usize,
    top_k: usize,
    intermediate_size: usize,
    weights: RouterWeights,
) -> MoeConfig {
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
pub(super) fn sparse(
    num_layers: usize,
    attention: AttentionConfig,
    moe: MoeConfig,
    theta: f64,
) -> DecoderConfig {
    let mut config = dense(num_layers, attention, 1, theta);
    for layer in &mut config.layers {
        layer.feed_forward = FeedForwardConfig::Moe(moe);
    }
    config
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
pub(super) fn qwen3_vl(text: &str, vision: &str, top: &str) -> Result<ModelConfig, ModelError> {
    parse(&format!(
        r#"{{"model_type": "qwen3_vl", "text_config": {{{text}}}, "vision_config": {{{vision}}} {top}}}"#
    ))
}
