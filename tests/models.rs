//! Whole models against what transformers computed, and against bad files.

use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use testkit::compare::relative_l2;
use testkit::golden::{self, Array};
use testkit::gpu::workspace_root;
use testkit::simulator::Card;
use warpforge::models::{Logits, Model, ModelConfig, Observed, Sampler, Session, SessionOptions};
use warpforge::ops::sampling::Sampling;
use warpforge::{Arch, DType, Device};

type Outcome = Result<(), Box<dyn StdError>>;

/// The card once for every floor that it runs; says so if there is none.
fn cards() -> Vec<Device> {
    match Device::cuda(0) {
        Ok(card) => Arch::ALL.into_iter().filter_map(|arch| card.with_arch(arch).ok()).collect(),
        Err(error) => {
            testkit::gpu::skip(&format!("models were not run on a card: {error}"));
            Vec::new()
        }
    }
}

struct Case {
    name: &'static str,
    folder: PathBuf,
    arrays: std::collections::HashMap<String, Array>,
}

impl Case {
    fn load(name: &'static str) -> Result<Self, Box<dyn StdError>> {
        let folder = golden::folder(name);
        let arrays = golden::load(&folder.join("case.safetensors"))?;
        Ok(Case { name, folder, arrays })
    }

    /// The sequences of the batch.
    fn prompts(&self) -> Vec<Vec<u32>> {
        let ids = &self.arrays["input_ids"];
        let values: Vec<u32> = ids.i32().expect("ids").iter().map(|&id| id as u32).collect();
        values.chunks(ids.shape[1]).map(<[u32]>::to_vec).collect()
    }

    /// The part of an array `[batch, tokens, …]` that belongs to a sequence.
    fn sequence(&self, name: &str, index: usize) -> &[f32] {
        let array = &self.arrays[name];
        let len: usize = array.shape[1..].iter().product();
        &array.f32().expect(name)[index * len..][..len]
    }

    fn greedy(&self) -> Vec<u32> {
        self.arrays["greedy"].i32().expect("greedy").iter().map(|&id| id as u32).collect()
    }
}

fn session(
    device: &Device,
    folder: &Path,
    dtype: DType,
    options: SessionOptions,
) -> Result<Session, warpforge::Error> {
    Model::load(device, folder, dtype, &mut |_| {})?.session(options)
}

fn greedy(session: &mut Session, prompt: &[u32], num_tokens: usize) -> Result<Vec<u32>, warpforge::Error> {
    session.truncate(0, 0)?;
    let mut sampler = Sampler::new(session, Sampling::Greedy)?;
    session.prefill(0, prompt)?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        ids.push(sampler.sample(session)?[0]);
        session.decode(&ids[ids.len() - 1..])?;
    }
    Ok(ids)
}

/// Logits, hidden states layer by layer and greedy tokens in f32, with the prompt in pieces of `chunk` tokens.
fn matches_transformers(device: &Device, case: &Case, chunk: usize) -> Outcome {
    let options = SessionOptions { capacity: 80, chunk, logits: Logits::All, ..SessionOptions::default() };
    let mut session = session(device, &case.folder, DType::F32, options)?;
    let num_layers = session.model().config().decoder.layers.len();
    for (index, prompt) in case.prompts().iter().enumerate() {
        session.truncate(0, 0)?;
        let stream = session.stream().clone();
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); num_layers + 1];
        let mut logits = Vec::new();
        session.prefill_with(
            0,
            prompt,
            &mut |which, tensor| {
                let layer = match which {
                    Observed::LayerInput(layer) => layer,
                    Observed::FinalNorm => num_layers,
                };
                hidden[layer].extend(tensor.to_vec::<f32>(&stream)?);
                Ok(())
            },
            &mut |_, rows| {
                logits.extend(rows.to_vec::<f32>(&stream)?);
                Ok(())
            },
        )?;
        // In order, so that the first message names the layer before which something went wrong.
        for (layer, hidden) in hidden.iter().enumerate() {
            let error = relative_l2(hidden, case.sequence(&format!("hidden.{layer}"), index));
            assert!(
                error <= 1e-4,
                "{}, {device:?}, sequence {index}: input of layer {layer}: {error:.2e}",
                case.name
            );
        }
        let error = relative_l2(&logits, case.sequence("logits", index));
        assert!(error <= 1e-4, "{}, {device:?}, sequence {index}: logits: {error:.2e}", case.name);
    }
    let want = case.greedy();
    let got = greedy(&mut session, &case.prompts()[0], want.len())?;
    assert_eq!(got, want, "{}, {device:?}: greedy tokens", case.name);
    Ok(())
}

#[test]
fn golden_f32_on_the_cpu() -> Outcome {
    for name in ["qwen3", "qwen3_sliding"] {
        let case = Case::load(name)?;
        for chunk in [64, 16, 5] {
            matches_transformers(&Device::cpu(), &case, chunk)?;
        }
    }
    Ok(())
}

/// The kernels of a whole model one after the other, with every access watched.
#[test]
fn golden_f32_in_the_simulator() -> Outcome {
    let device = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
    for (name, chunk) in [("qwen3", 64), ("qwen3_sliding", 5)] {
        matches_transformers(&device, &Case::load(name)?, chunk)?;
    }
    Ok(())
}

#[test]
fn golden_f32_on_the_card() -> Outcome {
    for device in cards() {
        for name in ["qwen3", "qwen3_sliding"] {
            let case = Case::load(name)?;
            for chunk in [64, 5] {
                matches_transformers(&device, &case, chunk)?;
            }
        }
    }
    Ok(())
}

/// bf16 may be off by half as much again as transformers in bf16 is.
#[test]
fn golden_bf16() -> Outcome {
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        for name in ["qwen3", "qwen3_sliding"] {
            let case = Case::load(name)?;
            let options =
                SessionOptions { capacity: 80, chunk: 64, logits: Logits::All, ..SessionOptions::default() };
            let mut session = session(&device, &case.folder, DType::BF16, options)?;
            let stream = session.stream().clone();
            let (mut got, mut want, mut yardstick) = (Vec::new(), Vec::new(), Vec::new());
            for (index, prompt) in case.prompts().iter().enumerate() {
                session.truncate(0, 0)?;
                session.prefill_with(0, prompt, &mut |_, _| Ok(()), &mut |_, rows| {
                    got.extend(rows.to_vec::<f32>(&stream)?);
                    Ok(())
                })?;
                want.extend_from_slice(case.sequence("logits", index));
                yardstick.extend_from_slice(case.sequence("logits_bf16_hf", index));
            }
            let (error, allowed) = (relative_l2(&got, &want), 1.5 * relative_l2(&yardstick, &want));
            println!("{name} on {device:?}: error {error:.4}, allowed {allowed:.4}");
            assert!(error <= allowed, "{name} on {device:?}: error {error:.4}, allowed {allowed:.4}");
        }
    }
    Ok(())
}

/// The demo model's continuations, token by token.
#[test]
fn demo_model_writes_the_expected_text() -> Outcome {
    let folder = workspace_root().join("assets/demo-model");
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json"))?)?;
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let options = SessionOptions { capacity: 256, ..SessionOptions::default() };
        let mut session = session(&device, &folder, DType::F32, options)?;
        for case in expected.as_array().expect("a list") {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone())?;
            let want: Vec<u32> = serde_json::from_value(case["greedy"].clone())?;
            assert_eq!(greedy(&mut session, &ids, want.len())?, want, "{device:?}: {}", case["prompt"]);
        }
    }
    Ok(())
}

/// Sequences of different lengths in one batch write what each writes alone.
#[test]
fn a_batch_writes_what_its_sequences_write_alone() -> Outcome {
    let folder = workspace_root().join("assets/demo-model");
    let prompts: [&[u32]; 3] = [&[0, 439, 1153, 994, 265], &[0, 457, 519, 352, 314, 307, 438], &[0]];
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let model = Model::load(&device, &folder, DType::F32, &mut |_| {})?;
        let options = SessionOptions { capacity: 64, ..SessionOptions::default() };
        let mut alone = model.session(options)?;
        let want: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| greedy(&mut alone, prompt, 20)).collect::<Result<_, _>>()?;
        let mut together = model.session(SessionOptions { batch: prompts.len(), ..options })?;
        let mut sampler = Sampler::new(&together, Sampling::Greedy)?;
        let mut got: Vec<Vec<u32>> = Vec::new();
        for (sequence, prompt) in prompts.iter().enumerate() {
            together.prefill(sequence, prompt)?;
            got.push(sampler.sample(&together)?);
        }
        for _ in 1..20 {
            let last: Vec<u32> = got.iter().map(|ids| ids[ids.len() - 1]).collect();
            together.decode(&last)?;
            for (ids, id) in std::iter::zip(&mut got, sampler.sample(&together)?) {
                ids.push(id);
            }
        }
        assert_eq!(got, want, "{device:?}");
    }
    Ok(())
}

/// A copy of a sequence writes what the sequence itself writes, and neither disturbs the other.
#[test]
fn a_fork_goes_on_as_its_sequence() -> Outcome {
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let options = SessionOptions { batch: 3, capacity: 24, ..SessionOptions::default() };
        let mut session = session(&device, &golden::folder("qwen3"), DType::F32, options)?;
        let stream = session.stream().clone();
        session.prefill(2, &[5, 6, 7, 8])?;
        session.prefill(0, &[9])?;
        session.fork(2, 1)?;
        session.fork(1, 0)?;
        assert_eq!((session.len(0), session.len(1), session.len(2)), (4, 4, 4));
        let vocab = session.model().config().decoder.vocab_size;
        for ids in [[1, 1, 1], [2, 3, 2], [4, 4, 4]] {
            let logits = session.decode(&ids)?.to_vec::<f32>(&stream)?;
            assert_eq!(logits[..vocab], logits[2 * vocab..], "{device:?}");
            assert_eq!(logits[..vocab] == logits[vocab..2 * vocab], ids == [1, 1, 1], "{device:?}");
        }
        assert_eq!(
            session.fork(0, 3).unwrap_err().to_string(),
            "Session: to: expected a sequence below 3, got 3"
        );
    }
    Ok(())
}

/// Mistakes of a caller: each is an error that names what was expected, and leaves the session as it was.
#[test]
fn bad_calls() -> Outcome {
    let folder = golden::folder("qwen3");
    let options = SessionOptions { capacity: 8, ..SessionOptions::default() };
    let mut session = session(&Device::cpu(), &folder, DType::F32, options)?;
    session.prefill(0, &[1, 2, 3])?;
    let mut message = |sequence, ids: &[u32]| session.prefill(sequence, ids).unwrap_err().to_string();
    assert_eq!(message(0, &[1, 384]), "Session: ids: expected token ids below 384, got 384 at index 1");
    assert_eq!(
        message(0, &[1; 6]),
        "Session: ids: expected at most 5 more tokens (the cache holds 3 of 8), got 6"
    );
    assert_eq!(message(1, &[1]), "Session: sequence: expected a sequence below 1, got 1");
    assert_eq!(message(0, &[]), "Session: ids: expected at least one token, got none");
    assert_eq!(session.len(0), 3);
    assert_eq!(
        session.decode(&[1, 2]).unwrap_err().to_string(),
        "Session: ids: expected one token for each of 1 sequences, got 2"
    );
    for id in 0..5 {
        session.decode(&[id])?;
    }
    assert_eq!(
        session.decode(&[1]).unwrap_err().to_string(),
        "Session: ids: expected at most 0 more tokens (the cache holds 8 of 8), got 1"
    );
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

/// The full-size configuration of Qwen3-0.6B, with random weights, on a card.
#[test]
fn qwen3_0_6b_of_full_size() -> Outcome {
    let Some(device) = cards().pop() else { return Ok(()) };
    let config = r#"{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#;
    let config = ModelConfig::from_json(config, Path::new("config.json"))?;
    let model = Model::random(&device, config, DType::BF16, 1)?;
    let mut session = model.session(SessionOptions { capacity: 1024, ..SessionOptions::default() })?;
    let prompt: Vec<u32> = (0..600).map(|i| i * 251 % 151936).collect();
    let ids = greedy(&mut session, &prompt, 16)?;
    assert_eq!(ids.len(), 16);
    let logits = session.logits()?.to_vec::<f32>(session.stream())?;
    assert!(logits.iter().all(|logit| logit.is_finite()));
    Ok(())
}
