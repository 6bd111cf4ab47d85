//! Faults of files and of configurations.

use testkit::golden;

use super::*;

/// A type that no model is in is named.
#[test]
fn models_are_of_floats() -> Outcome {
    let folder = golden::folder("qwen3");
    let config = ModelConfig::from_dir(&folder)?;
    for dtype in [DType::I8, DType::U32] {
        let want = format!("Model: dtype: expected weights and activations in f32, f16 or bf16, got {dtype}");
        let random = Model::random(&Device::cpu(), config.clone(), dtype, 1);
        assert_eq!(random.map(|_| ()).unwrap_err().to_string(), want);
        let loaded = Model::load(&Device::cpu(), &folder, dtype, &mut |_| {});
        assert_eq!(loaded.map(|_| ()).unwrap_err().to_string(), want);
    }
    Ok(())
}

/// Faults of the files are found before anything is loaded, all missing tensors at once.
#[test]
fn bad_checkpoints() -> Outcome {
    let golden = golden::folder("qwen3");
    let folder = tempfile::tempdir()?;
    let load = || {
        let model =
            Model::load(&Device::cpu(), folder.path(), DType::F32, &mut |_| panic!("nothing is loaded"));
        let error = model.map(|_| ()).unwrap_err();
        error.to_string()
    };
    assert!(load().contains("config.json"), "{}", load());
    std::fs::copy(golden.join("config.json"), folder.path().join("config.json"))?;
    assert!(load().contains("model.safetensors"), "{}", load());

    let bytes = std::fs::read(golden.join("model.safetensors"))?;
    std::fs::write(folder.path().join("model.safetensors"), &bytes[..bytes.len() / 2])?;
    assert!(load().contains("model.safetensors"), "{}", load());

    // Without three of its tensors.
    let all = safetensors::SafeTensors::deserialize(&bytes)?;
    let removed =
        ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_norm.weight"];
    let kept: Vec<_> =
        all.tensors().into_iter().filter(|(name, _)| !removed.contains(&name.as_str())).collect();
    safetensors::serialize_to_file(kept, None, &folder.path().join("model.safetensors"))?;
    let message = load();
    for name in removed {
        assert!(message.contains(name), "{name} is not in: {message}");
    }

    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "mamba"}"#)?;
    assert!(load().contains("mamba") && load().contains("qwen3"), "{}", load());
    Ok(())
}

/// Sizes that no checkpoint has: an error that says so, whatever they are, and nothing that is as large as they are.
#[test]
fn bad_sizes() -> Outcome {
    let folder = tempfile::tempdir()?;
    std::fs::copy(
        golden::folder("qwen3").join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )?;
    let load = |config: &str| -> Result<String, Box<dyn StdError>> {
        std::fs::write(folder.path().join("config.json"), config.replace('N', "2147483647"))?;
        let model =
            Model::load(&Device::cpu(), folder.path(), DType::F32, &mut |_| panic!("nothing is loaded"));
        Ok(model.map(|_| ()).unwrap_err().to_string())
    };
    for (config, field) in [
        (r#"{"model_type":"qwen3_moe","num_experts":N}"#, "num_experts"),
        (
            r#"{"model_type":"qwen3_next","linear_num_key_heads":N,"linear_num_value_heads":N}"#,
            "linear_num_key_heads",
        ),
        (
            r#"{"model_type":"qwen3_next","num_attention_heads":N,"num_key_value_heads":1,"full_attention_interval":1}"#,
            "num_attention_heads",
        ),
        (
            r#"{"model_type":"qwen3","vocab_size":N,"hidden_size":N}"#,
            "expected shape [2147483647, 2147483647]",
        ),
        (
            r#"{"model_type":"qwen3_vl","text_config":{"hidden_size":3584},"vision_config":{"patch_size":N}}"#,
            "patch_size",
        ),
        (
            r#"{"model_type":"glm4_moe_lite","n_shared_experts":N,"moe_intermediate_size":N}"#,
            "moe_intermediate_size",
        ),
        (
            r#"{"model_type":"qwen3_vl","text_config":{"hidden_size":3584,"rope_scaling":{"mrope_section":
            [64,9223372036854775808,9223372036854775808]}},"vision_config":{}}"#,
            "mrope_section",
        ),
        // What the bounds let through.
        (
            r#"{"model_type":"qwen3_moe","num_experts":2048,"moe_intermediate_size":1073741823,"hidden_size":N,"head_dim":8}"#,
            "unusable tensors (147675):",
        ),
        (
            r#"{"model_type":"qwen3_next","linear_num_value_heads":65535,"linear_num_key_heads":65535}"#,
            "linear_attn",
        ),
    ] {
        let message = load(config)?;
        assert!(message.contains(field), "{config}: {}", &message[..message.len().min(500)]);
        assert!(message.len() < 10_000, "{config}: {} bytes", message.len());
    }
    // A session's own sizes.
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let options = SessionOptions { capacity: usize::MAX, ..SessionOptions::default() };
        for options in [options, SessionOptions { batch: usize::MAX, capacity: 8, ..options }] {
            let message = model.session(options).unwrap_err().to_string();
            assert!(
                message.contains("Session: capacity: expected batch · capacity below 2^31, got "),
                "{message}"
            );
        }
    }
    Ok(())
}
