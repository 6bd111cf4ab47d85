//! Adapters of routed experts.

use super::*;

/// Each projection alone, of all experts and of one, beside an adapter that adds to attention alone; with a shared
/// expert and without, whose gate is one of the router's rows or none.
#[test]
fn each_projection_of_them() -> Outcome {
    for name in ["qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        for modules in [
            &["experts.*.down_proj"][..],
            &["experts.*.gate_proj"],
            &["experts.*.up_proj"],
            &["experts.0.gate_proj", "experts.5.up_proj", "experts.7.down_proj"],
        ] {
            let base = Base::open(name)?;
            let with = [&["o_proj"][..], &[modules, &["o_proj"]].concat()];
            let (error, apart) = errors(&base, &Device::cpu(), (DType::F32, Quantise::Dense), with)?;
            assert!(error <= 1e-4 && apart >= 0.01, "{name}, {modules:?}: {error:.2e}, apart {apart:.2e}");
            let with = [modules, modules];
            let (error, apart) = errors(&base, &Device::cpu(), (DType::F32, Quantise::Dense), with)?;
            // Few of them may be nobody's.
            let is_apart = apart >= 1e-3 || modules.len() > 1;
            assert!(error <= 1e-4 && is_apart, "{name}, {modules:?}: {error:.2e}, apart {apart:.2e}");
        }
    }
    Ok(())
}

/// One of two matrices of an expert is an error that names it.
#[test]
fn half_of_a_module() -> Outcome {
    let base = Base::open("qwen3_moe")?;
    let made = base.adapter(3, (8, 8.0, false), &["experts.*.up_proj"])?;
    let file = made.folder.path().join("adapter_model.safetensors");
    let tensors = load_tensors(&file, &base.stream)?;
    let lost = "layers.1.mlp.experts.4.up_proj.lora_A.weight";
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_tensors(&file, &base.stream, named.filter(|(name, _)| !name.ends_with(lost)))?;
    let model = Model::load(&Device::cpu(), &base.folder, DType::F32, &mut |_| {})?;
    let error = model.batch_with(OPTIONS, &[&Adapter::open(made.folder.path())?]).unwrap_err().to_string();
    assert!(error.contains(lost) && error.contains("missing"), "{error}");
    Ok(())
}

/// Pairs are sorted by adapter and expert: there is an end to how many these are.
#[test]
fn more_than_can_be_sorted() -> Outcome {
    let base = Base::open("qwen3_moe")?;
    let model = Model::load(&Device::cpu(), &base.folder, DType::F32, &mut |_| {})?;
    let made = base.adapter(3, (1, 1.0, false), &["layers.0.mlp.experts.0.up_proj"])?;
    let adapter = Adapter::open(made.folder.path())?;
    let error = model.batch_with(OPTIONS, &[&adapter; 257]).unwrap_err().to_string();
    assert_eq!(
        error,
        "Batch: adapters: expected at most 256 where some are of routed experts, of which there are 8, got 257"
    );
    Ok(())
}
