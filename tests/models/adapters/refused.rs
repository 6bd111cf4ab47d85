//! Adapters that do not fit, or that a batch adds nothing of.

use super::*;

/// Modules of mixtures, delta nets and latent attention that do not fit, or that a batch adds nothing to.
#[test]
fn what_other_parts_refuse() -> Outcome {
    // With the module that an adapter's is called instead, if it is.
    for (name, module, instead, want) in [
        (
            "glm4_moe_lite",
            "layers.1.self_attn.kv_b_proj",
            None,
            "lora_A or lora_B of a linear layer that adapters can change, got one of kv_b_proj, which is absorbed",
        ),
        (
            "glm4_moe_lite",
            "layers.1.mlp.experts.3.up_proj",
            Some("layers.1.mlp.experts.8.up_proj"),
            "got one of routed experts that is no expert's",
        ),
        (
            "glm4_moe_lite",
            "layers.1.mlp.experts.3.up_proj",
            Some("layers.1.mlp.experts.3.down_proj"),
            "expected shape [8, 48], got [8, 64]",
        ),
        ("glm4_moe_lite", "layers.1.mlp.gate", None, "got one of a router"),
        ("qwen3_next", "layers.2.mlp.shared_expert_gate", None, "got one of a router"),
        ("qwen3_next", "layers.3.self_attn.q_proj", Some("layers.2.self_attn.q_proj"), "the model has not"),
        (
            "glm4_moe_lite",
            "layers.2.self_attn.q_a_proj",
            Some("layers.2.self_attn.o_proj"),
            "expected shape [8, 128], got [8, 64]",
        ),
        (
            "glm4_moe_lite",
            "layers.1.self_attn.q_b_proj",
            Some("layers.1.self_attn.kv_a_proj_with_mqa"),
            "expected shape [48, 8], got [160, 8]",
        ),
        (
            "glm4_moe_lite",
            "layers.1.mlp.shared_experts.down_proj",
            Some("layers.1.mlp.shared_experts.up_proj"),
            "expected shape [8, 64], got [8, 48]",
        ),
        (
            "qwen3_next",
            "layers.0.linear_attn.in_proj_ba",
            Some("layers.0.linear_attn.in_proj_qkvz"),
            "expected shape [192, 8], got [8, 8]",
        ),
        (
            "qwen3_next",
            "layers.1.linear_attn.in_proj_qkvz",
            Some("layers.1.linear_attn.out_proj"),
            "expected shape [64, 8], got [192, 8]",
        ),
    ] {
        let base = Base::open(name)?;
        let made = base.adapter(3, (8, 8.0, false), &[module])?;
        assert_eq!(made.modules.len(), 1, "{module}");
        let called = instead.unwrap_or(module);
        let file = made.folder.path().join("adapter_model.safetensors");
        let tensors = load_tensors(&file, &base.stream)?;
        let tensors: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name.replace(module, called), tensor)).collect();
        save_tensors(&file, &base.stream, tensors.iter().map(|(name, tensor)| (name.as_str(), *tensor)))?;
        let model = Model::load(&Device::cpu(), &base.folder, DType::F32, &mut |_| {})?;
        let error = model.batch_with(OPTIONS, &[&Adapter::open(made.folder.path())?]).unwrap_err();
        let own = match &error {
            BatchError::Device(Error::Model(own)) => own.downcast_ref(),
            _ => None,
        };
        let is_typed = matches!(own, Some(ModelError::Tensors { .. }));
        let text = error.to_string();
        assert!(is_typed && text.contains(called) && text.contains(want), "{module}: {error:?}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit() -> Outcome {
    let base = Base::open("qwen3")?;
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let made = base.adapter(3, (8, 8.0, false), &ATTENTION)?;
    let adapter = Adapter::open(made.folder.path())?;
    let mut batch = model.batch_with(OPTIONS, &[&adapter])?;
    let error = batch.add_prompt(Prompt { adapter: Some(1), ..[1][..].into() }).unwrap_err().to_string();
    assert_eq!(error, "Batch: adapter: expected one of the batch's 1 adapters, counted from 0, got 1");
    let error = model.batch(OPTIONS)?.add_prompt(Prompt { adapter: Some(0), ..[1][..].into() });
    assert!(error.unwrap_err().to_string().contains("0 adapters"));

    let file = made.folder.path().join("adapter_model.safetensors");
    let tensors = load_tensors(&file, &base.stream)?;
    let with = |change: &dyn Fn(&str) -> Option<String>| -> Result<String, Box<dyn StdError>> {
        let renamed: Vec<_> =
            tensors.iter().filter_map(|(name, tensor)| Some((change(name)?, tensor))).collect();
        let named = renamed.iter().map(|(name, tensor)| (name.as_str(), *tensor));
        let folder = tempfile::tempdir()?;
        fs::copy(made.folder.path().join("adapter_config.json"), folder.path().join("adapter_config.json"))?;
        save_tensors(&folder.path().join("adapter_model.safetensors"), &base.stream, named)?;
        let adapter = Adapter::open(folder.path())?;
        Ok(model.batch_with(OPTIONS, &[&adapter]).err().map(|error| error.to_string()).unwrap_or_default())
    };
    assert_eq!(with(&|name| Some(name.to_owned()))?, "");
    let first = "layers.0.self_attn.q_proj.lora_B";
    let error = with(&|name| (!name.contains(first)).then(|| name.to_owned()))?;
    assert!(error.contains(first) && error.contains("missing"), "{error}");
    let error = with(&|name| Some(name.replace("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj")))?;
    assert!(error.contains("layers.7.self_attn.q_proj.lora_A.weight: expected lora_A or lora_B"), "{error}");
    let error = with(&|name| Some(name.replace("0.self_attn.q_proj", "0.mlp.gate_proj")))?;
    // 256 rows both, of 4 heads of 64 and of the MLP: it fits.
    assert_eq!(error, "");
    let error = with(&|name| Some(name.replace("0.self_attn.o_proj", "0.mlp.gate_proj")))?;
    assert!(error.contains("expected shape [8, 128], got [8, 256]"), "{error}");

    // A rank that the tensors have not, before there is memory for it.
    let config = r#"{"r": 65536, "lora_alpha": 8}"#;
    fs::write(made.folder.path().join("adapter_config.json"), config)?;
    let error = model.batch_with(OPTIONS, &[&Adapter::open(made.folder.path())?]).unwrap_err().to_string();
    assert!(error.contains("expected shape [65536, 128], got [8, 128]"), "{error}");

    let folder = tempfile::tempdir()?;
    assert!(matches!(Adapter::open(folder.path()), Err(ModelError::Missing { .. })));
    fs::write(folder.path().join("adapter_config.json"), r#"{"r": 8, "lora_alpha": 8, "use_dora": true}"#)?;
    let error = Adapter::open(folder.path()).unwrap_err();
    assert!(matches!(&error, ModelError::Unsupported { field, .. } if field == "use_dora"), "{error}");
    Ok(())
}
