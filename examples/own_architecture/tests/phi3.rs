//! A Phi-3 checkpoint against the same weights under the names of a model that warpforge knows.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use own_architecture::{open, read_config};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use warpforge::models::{Model, ModelConfig, Session, SessionOptions};
use warpforge::{DType, Device};

type Outcome = Result<(), Box<dyn Error>>;

const PHI3: &str = r#"{
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "sliding_window": null, "tie_word_embeddings": false, "rope_scaling": null, "mystery": 1
}"#;

/// The same as a Llama.
const LLAMA: &str = r#"{
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false
}"#;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn write(folder: &Path, config: &str, tensors: &Tensors) -> Outcome {
    std::fs::write(folder.join("config.json"), config)?;
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (shape, data))| Ok((name, TensorView::new(Dtype::F32, shape.clone(), data)?)))
        .collect::<Result<_, safetensors::SafeTensorError>>()?;
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))?;
    Ok(())
}

/// Weights of a Llama, and the same as Phi-3 stores them.
fn checkpoints() -> Result<(Tensors, Tensors), Box<dyn Error>> {
    let mut state = 1u64;
    let mut value = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * 0.3
    };
    let mut llama = Tensors::new();
    for (name, shape) in Model::tensors(&read_config(PHI3)?)? {
        let count: usize = shape.iter().product();
        let data = (0..count).flat_map(|_| value().to_le_bytes()).collect();
        llama.insert(name, (shape, data));
    }
    let mut phi3 = llama.clone();
    for (whole, parts) in [
        ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..]),
        ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
    ] {
        for layer in 0..2 {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let (mut rows, mut all) = (0, Vec::new());
            for part in parts {
                let (shape, data) = phi3.remove(&name(part)).ok_or("a tensor of that name")?;
                rows += shape[0];
                all.extend(data);
            }
            phi3.insert(name(whole), (vec![rows, 32], all));
        }
    }
    Ok((llama, phi3))
}

fn logits(model: &Model) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut session: Session = model.session(SessionOptions { capacity: 16, ..SessionOptions::default() })?;
    session.prefill(0, &[3, 1, 4, 1, 5])?;
    Ok(session.decode(&[9])?.to_host()?)
}

#[test]
fn the_same_weights_give_the_same_logits() -> Outcome {
    let (llama, phi3) = checkpoints()?;
    let [known, own] = [tempfile::tempdir()?, tempfile::tempdir()?];
    write(known.path(), LLAMA, &llama)?;
    write(own.path(), PHI3, &phi3)?;
    let device = Device::cpu();
    let checkpoint = open(own.path())?;
    let model = Model::from_checkpoint(&device, &checkpoint, DType::F32, &mut |_| {})?;
    assert_eq!(
        (&model.report().unread_keys[..], model.report().unused_tensors.len()),
        (&["mystery".into()][..], 0)
    );
    let known = Model::load(&device, known.path(), DType::F32, &mut |_| {})?;
    let want = logits(&known)?;
    assert!(want.iter().all(|logit| logit.is_finite()) && want.iter().any(|&logit| logit != want[0]));
    assert_eq!(logits(&model)?, want);
    Ok(())
}

/// A matrix that lacks the rows of v is named.
#[test]
fn rows_that_are_missing() -> Outcome {
    let (_, mut phi3) = checkpoints()?;
    let name = "model.layers.1.self_attn.qkv_proj.weight";
    let (shape, data) = phi3.get_mut(name).ok_or("a tensor of that name")?;
    shape[0] = 40;
    data.truncate(40 * 32 * 4);
    let folder = tempfile::tempdir()?;
    write(folder.path(), PHI3, &phi3)?;
    let error = Model::from_checkpoint(&Device::cpu(), &open(folder.path())?, DType::F32, &mut |_| {});
    let error = error.err().ok_or("an error")?.to_string();
    assert!(error.contains(&format!("{name}: expected rows 48 to 64, got 40 rows")), "{error}");
    Ok(())
}

/// What a configuration asks for that the parts cannot do is an error.
#[test]
fn configurations_that_are_refused() {
    for (from, to, want) in [
        (
            "\"rope_scaling\": null",
            "\"rope_scaling\": {\"type\": \"longrope\"}",
            "rope_scaling: expected null",
        ),
        ("silu", "relu", "hidden_act: expected silu, got relu"),
        (
            "\"num_attention_heads\": 4",
            "\"num_attention_heads\": 0",
            "num_attention_heads: expected at least 1",
        ),
    ] {
        let error = read_config(&PHI3.replace(from, to)).map(|_: ModelConfig| ()).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}
