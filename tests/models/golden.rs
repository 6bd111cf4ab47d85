//! The golden checkpoints against what transformers computed.

use testkit::golden;

use super::*;

/// Logits, hidden states layer by layer and greedy tokens in f32, with the prompt in pieces of `chunk` tokens.
fn matches_transformers(device: &Device, case: &Case, chunk: usize) -> Outcome {
    session_matches(&mut session(device, &case.folder, DType::F32, options(case, chunk))?, case).map(|_| ())
}

/// The same of a session in f32; on a simulated card of the first sequence alone, and some of the tokens. Gives the
/// logits.
pub(super) fn session_matches(session: &mut Session, case: &Case) -> Result<Vec<f32>, Box<dyn StdError>> {
    let device = session.model().device().clone();
    let is_simulated = matches!(device.place(), Place::Simulated(_));
    let (sequences, tokens) = if is_simulated { (1, 6) } else { (usize::MAX, usize::MAX) };
    let mut all = Vec::new();
    let (grids, patches) = case.images();
    let visuals = visuals((&grids, patches));
    let num_layers = session.model().config().decoder.layers.len();
    let vision = session.model().config().vision.as_ref();
    let deepstack = vision.map_or(0, |vision| vision.deepstack_blocks.len());
    let visual_tokens = vision.map_or(vec![], |vision| vec![vision.image_token, vision.video_token]);
    for (index, prompt) in case.prompts().iter().enumerate().take(sequences) {
        session.truncate(0, 0)?;
        let stream = session.stream().clone();
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); num_layers + 1];
        let mut logits = Vec::new();
        session.prefill_visual_with(
            0,
            prompt,
            &visuals,
            &mut |which, tensor| {
                let layer = match which {
                    Observed::LayerInput(layer) => layer,
                    Observed::FinalNorm => num_layers,
                    _ => return Ok(()),
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
            let want = case.sequence(&format!("hidden.{layer}"), index);
            // transformers keeps the outputs of layers before features of images are added.
            let is_kept =
                |row: usize| !(1..=deepstack).contains(&layer) || !visual_tokens.contains(&prompt[row]);
            let kept = |rows: &[f32]| -> Vec<f32> {
                let rows = rows.chunks(rows.len() / prompt.len()).enumerate();
                rows.filter(|&(row, _)| is_kept(row)).flat_map(|(_, row)| row).copied().collect()
            };
            let error = relative_l2(&kept(hidden), &kept(want));
            assert!(
                error <= 1e-4,
                "{}, {device:?}, sequence {index}: input of layer {layer}: {error:.2e}",
                case.name
            );
        }
        let error = relative_l2(&logits, case.sequence("logits", index));
        assert!(error <= 1e-4, "{}, {device:?}, sequence {index}: logits: {error:.2e}", case.name);
        if let (0, Some(mut want)) = (index, case.greedy()) {
            want.truncate(tokens);
            assert_eq!(go_on(session, want.len())?, want, "{}, {device:?}: greedy tokens", case.name);
        }
        all.extend(logits);
    }
    Ok(all)
}

#[test]
fn golden_f32_on_the_cpu() -> Outcome {
    for name in GOLDEN.into_iter().chain(RELATED) {
        let case = Case::load(name)?;
        for chunk in [64, 16, 5] {
            matches_transformers(&Device::cpu(), &case, chunk)?;
        }
    }
    Ok(())
}

/// Token by token through the cache: the same logits as of the whole prompt.
#[test]
fn golden_f32_by_decode_steps() -> Outcome {
    for name in GOLDEN.into_iter().chain(RELATED) {
        let case = Case::load(name)?;
        // A decode step is text.
        if name == "qwen3_vl" {
            continue;
        }
        for device in cards().into_iter().chain([Device::cpu()]) {
            let options = SessionOptions { capacity: 96, ..SessionOptions::default() };
            let mut session = session(&device, &case.folder, DType::F32, options)?;
            let stream = session.stream().clone();
            for (index, prompt) in case.prompts().iter().enumerate() {
                session.truncate(0, 0)?;
                let mut logits = session.prefill(0, &prompt[..1])?.to_vec::<f32>(&stream)?;
                for &id in &prompt[1..] {
                    logits.extend(session.decode(&[id])?.to_vec::<f32>(&stream)?);
                }
                let error = relative_l2(&logits, case.sequence("logits", index));
                assert!(error <= 1e-4, "{name}, {device:?}, sequence {index}: logits: {error:.2e}");
            }
        }
    }
    Ok(())
}

/// The kernels of a whole model one after the other, with every access watched: a test for each model, so that they run
/// side by side.
mod golden_f32_in_the_simulator {
    use super::*;

    macro_rules! models {
        ($($name:ident in chunks of $chunk:literal,)*) => {$(
            #[test]
            fn $name() -> Outcome {
                let device = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
                matches_transformers(&device, &Case::load(stringify!($name))?, $chunk)
            }
        )*};
    }

    models! {
        qwen3 in chunks of 64,
        qwen3_sliding in chunks of 5,
        qwen3_moe in chunks of 64,
        qwen3_next in chunks of 29,
        qwen3_vl in chunks of 16,
        glm4_moe_lite in chunks of 16,
        qwen3_heads128 in chunks of 16,
        llama in chunks of 5,
        mistral in chunks of 29,
        qwen2 in chunks of 64,
    }
}

#[test]
fn golden_f32_on_the_card() -> Outcome {
    for device in cards() {
        for name in GOLDEN.into_iter().chain(RELATED) {
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
        for name in GOLDEN.into_iter().chain(RELATED) {
            let case = Case::load(name)?;
            let mut session = session(&device, &case.folder, DType::BF16, options(&case, 64))?;
            let (grids, patches) = case.images();
            let visuals = visuals((&grids, patches));
            let stream = session.stream().clone();
            let (mut got, mut want, mut yardstick) = (Vec::new(), Vec::new(), Vec::new());
            for (index, prompt) in case.prompts().iter().enumerate() {
                session.truncate(0, 0)?;
                session.prefill_visual_with(0, prompt, &visuals, &mut |_, _| Ok(()), &mut |_, rows| {
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

/// The same token by token, as a sequence of one decodes, whose layers norm and add the residual in their products from
/// Hopper on, or are one launch.
#[test]
fn golden_bf16_steps() -> Outcome {
    let [simulated, of_few_blocks] = [132, 5].map(|sms| Arc::new(Card::with_sms(Arch::Sm90a, sms)));
    let names = &["qwen3", "qwen3_moe", "qwen3_heads128"][..];
    let mut devices: Vec<_> = cards().into_iter().chain([Device::cpu()]).map(|card| (card, names)).collect();
    devices.push((Device::simulated(simulated.clone())?, &names[..2]));
    devices.push((Device::simulated(of_few_blocks.clone())?, &names[2..]));
    for (device, names) in devices {
        for name in names {
            let case = Case::load(name)?;
            let mut session = session(&device, &case.folder, DType::BF16, options(&case, 64))?;
            let prompt = &case.prompts()[0];
            let stream = session.stream().clone();
            let mut got = session.prefill(0, &prompt[..2])?.to_vec::<f32>(&stream)?;
            for &id in &prompt[2..10] {
                got.extend(session.decode(&[id])?.to_vec::<f32>(&stream)?);
            }
            let vocab = got.len() / 9;
            let steps = vocab..10 * vocab;
            let want = &case.sequence("logits", 0)[steps.clone()];
            let yardstick = &case.sequence("logits_bf16_hf", 0)[steps];
            let (error, allowed) = (relative_l2(&got, want), 1.5 * relative_l2(yardstick, want));
            assert!(error <= allowed, "{name} on {device:?}: error {error:.4}, allowed {allowed:.4}");
        }
    }
    let all =
        [(simulated, "matmul_bf16__ahead__sm90a"), (of_few_blocks, "decoder_layers_bf16__persistent__sm90a")];
    for (card, entry) in all {
        assert!(card.launched().contains(entry), "{entry}: {:?}", card.launched());
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

/// Experts as transformers stacks them in memory, gate rows above up rows, give what those of the published files do.
#[test]
fn experts_in_one_tensor() -> Outcome {
    for name in ["qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let folder = tempfile::tempdir()?;
        with_experts_in_one_tensor(name, folder.path())?;
        let logits = |folder: &Path| -> Result<Vec<f32>, warpforge::Error> {
            let mut session = session(&Device::cpu(), folder, DType::F32, SessionOptions::default())?;
            let stream = session.stream().clone();
            session.prefill(0, &[3, 1, 4, 1, 5])?.to_vec(&stream)
        };
        assert_eq!(logits(folder.path())?, logits(&golden::folder(name))?, "{name}");
    }
    Ok(())
}

/// A mixture with each layer's experts in one tensor, as transformers 5 saves them.
pub(super) fn with_experts_in_one_tensor(name: &str, folder: &Path) -> Outcome {
    const EXPERTS: usize = 8;
    let golden = golden::folder(name);
    std::fs::copy(golden.join("config.json"), folder.join("config.json"))?;
    let bytes = std::fs::read(golden.join("model.safetensors"))?;
    let all = safetensors::SafeTensors::deserialize(&bytes)?;
    let mut tensors: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in all.tensors() {
        let Some((prefix, rest)) = name.split_once(".experts.") else {
            tensors.push((name, view.dtype(), view.shape().to_vec(), view.data().to_vec()));
            continue;
        };
        // Its first tensor stands for all of a kind.
        let (fused, parts) = match rest {
            "0.gate_proj.weight" => ("gate_up_proj", &["gate_proj", "up_proj"][..]),
            "0.down_proj.weight" => ("down_proj", &["down_proj"][..]),
            _ => continue,
        };
        let mut data = Vec::new();
        for expert in 0..EXPERTS {
            for part in parts {
                let name = format!("{prefix}.experts.{expert}.{part}.weight");
                data.extend_from_slice(all.tensor(&name)?.data());
            }
        }
        let shape = vec![EXPERTS, parts.len() * view.shape()[0], view.shape()[1]];
        tensors.push((format!("{prefix}.experts.{fused}"), view.dtype(), shape, data));
    }
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            Ok((name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data)?))
        })
        .collect::<Result<_, safetensors::SafeTensorError>>()?;
    Ok(safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))?)
}

/// Models whose weights stay quantised, prompt and decode, against transformers with the dequantised weights: mixtures,
/// tied tables, and rows that become int8. In f32 by ordinary arithmetic, in bf16 by tensor cores.
fn quantised(device: &Device) -> Outcome {
    for (name, rows) in [
        ("awq_int4_moe", ""),
        ("fp8_block_moe", ""),
        ("gguf_moe_mxfp4", ""),
        ("gguf_q4_k_m", ""),
        ("ct_w8a8_int8", "_act"),
    ] {
        let folder = workspace_root().join("tests/golden-quant").join(name);
        let arrays = testkit::golden::load(&folder.join("case.safetensors"))?;
        let path = if name.starts_with("gguf") { folder.join("model.gguf") } else { folder.clone() };
        let case = Case { name, folder, arrays };
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 0.05)] {
            let options =
                SessionOptions { capacity: 96, chunk: 64, logits: Logits::All, ..SessionOptions::default() };
            let mut session = session(device, &path, dtype, options)?;
            let prompt = &case.prompts()[0];
            let stream = session.stream().clone();
            let mut logits = Vec::new();
            session.prefill_visual_with(0, prompt, &[], &mut |_, _| Ok(()), &mut |_, rows| {
                logits.extend(rows.to_vec::<f32>(&stream)?);
                Ok(())
            })?;
            let error = relative_l2(&logits, case.sequence(&format!("logits{rows}"), 0));
            assert!(error <= bound, "{name} in {dtype} on {device:?}: {error:.2e}");
            if dtype == DType::F32 {
                let want: Vec<u32> = case.arrays[&format!("greedy{rows}")].i32().expect("greedy")[..4]
                    .iter()
                    .map(|&id| id as u32)
                    .collect();
                assert_eq!(greedy(&mut session, prompt, 4)?, want, "{name} on {device:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn quantised_on_a_simulated_card() -> Outcome {
    quantised(&Device::simulated(Arc::new(Card::new(Arch::Sm80)))?)
}

#[test]
fn quantised_on_the_card() -> Outcome {
    cards().iter().try_for_each(quantised)
}
