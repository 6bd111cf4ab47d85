//! GGUF files of each architecture: the golden checkpoints of transformers, changed as llama.cpp's converter changes
//! them, give the logits of transformers again.

use std::collections::BTreeMap;
use std::path::Path;

use host::{DType, Device};
use models::{
    Checkpoint, GgmlType, Logits, Mixer, Model, PatchGrid, ProjectionWeight, Quantise, SessionOptions, Visual,
};
use testkit::compare::relative_l2;
use testkit::golden;

use super::Outcome;
use super::writer::{Kv, Writer};

/// Tensors by published name: shape and elements.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(name: &str) -> Result<Tensors, Box<dyn std::error::Error>> {
    let arrays = golden::load(&golden::folder(name).join("model.safetensors"))?;
    Ok(arrays
        .into_iter()
        .map(|(name, array)| {
            let values = array.f32().expect("floats").to_vec();
            (name, (array.shape, values))
        })
        .collect())
}

/// Writes what is left of the tensors, by the names of llama.cpp.
fn write_rest(writer: &mut Writer, tensors: Tensors, prefix: &str, names: &[(&str, &str)]) {
    let mut stacked: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (name, (shape, values)) in tensors {
        let own = match name.as_str() {
            "lm_head.weight" => "output.weight".to_owned(),
            name => {
                let part = name.strip_prefix(prefix).unwrap_or_else(|| panic!("{name}"));
                match part {
                    ".embed_tokens.weight" => "token_embd.weight".to_owned(),
                    ".norm.weight" => "output_norm.weight".to_owned(),
                    part => {
                        let part = part.strip_prefix(".layers.").unwrap_or_else(|| panic!("{name}"));
                        let (layer, part) = part.split_once('.').expect("a layer");
                        if let Some(part) = part.strip_prefix("mlp.experts.") {
                            let (expert, part) = part.split_once('.').expect("an expert");
                            let part = part.trim_end_matches("_proj.weight");
                            // In order of their numbers: there are fewer than ten.
                            let all = stacked.entry(format!("blk.{layer}.ffn_{part}_exps.weight"));
                            let (all, elements) =
                                all.or_insert_with(|| (vec![0, shape[0], shape[1]], Vec::new()));
                            assert_eq!(all[0], expert.parse::<usize>().expect("a number"));
                            all[0] += 1;
                            elements.extend(values);
                            continue;
                        }
                        let (_, own) = names
                            .iter()
                            .find(|(known, _)| part == *known)
                            .unwrap_or_else(|| panic!("{name}"));
                        format!("blk.{layer}.{own}")
                    }
                }
            }
        };
        // The converter leaves out dimensions of 1.
        let shape: Vec<usize> = shape.into_iter().filter(|&size| size != 1).collect();
        writer.floats(&own, &shape, &values);
    }
    for (name, (shape, values)) in stacked {
        writer.floats(&name, &shape, &values);
    }
}

const NAMES: [(&str, &str); 36] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.o_proj.bias", "attn_output.bias"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.q_a_proj.weight", "attn_q_a.weight"),
    ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    ("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
    ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("linear_attn.out_proj.weight", "ssm_out.weight"),
    ("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
];

fn logits(
    path: &Path,
    tower: Option<&Path>,
    name: &str,
) -> Result<(Vec<f32>, Vec<f32>), Box<dyn std::error::Error>> {
    let checkpoint = Checkpoint::open_with_tower(path, tower)?;
    let case = golden::load(&golden::folder(name).join("case.safetensors"))?;
    let grids: Vec<PatchGrid> = case.get("image_grid_thw").map_or(Vec::new(), |grids| {
        let sizes: Vec<usize> = grids.i32().expect("sizes").iter().map(|&size| size as usize).collect();
        sizes.chunks(3).map(|size| PatchGrid { frames: size[0], rows: size[1], cols: size[2] }).collect()
    });
    let mut patches = case.get("pixel_values").map_or(&[][..], |values| values.f32().expect("pixels"));
    let len = patches.len() / grids.iter().map(PatchGrid::patches).sum::<usize>().max(1);
    let visuals: Vec<Visual<'_>> = grids
        .iter()
        .map(|&grid| {
            let (own, rest) = patches.split_at(grid.patches() * len);
            patches = rest;
            Visual { grid, patches: own }
        })
        .collect();
    let model = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {})?;
    let max_patches = grids.iter().map(PatchGrid::patches).sum();
    let mut session = model.session(SessionOptions {
        capacity: 96,
        chunk: 64,
        logits: Logits::All,
        max_patches,
        ..SessionOptions::default()
    })?;
    let ids = &case["input_ids"];
    let mut got = Vec::new();
    for prompt in ids.i32().expect("ids").chunks(ids.shape[1]) {
        let prompt: Vec<u32> = prompt.iter().map(|&id| id as u32).collect();
        session.truncate(0, 0)?;
        let stream = session.stream().clone();
        session.prefill_visual_with(0, &prompt, &visuals, &mut |_, _| Ok(()), &mut |_, rows| {
            got.extend(rows.to_vec::<f32>(&stream)?);
            Ok(())
        })?;
    }
    Ok((got, case["logits"].f32().expect("logits").to_vec()))
}

fn agrees(writer: &Writer, name: &str) -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, writer.bytes())?;
    let (got, want) = logits(&path, None, name)?;
    let error = relative_l2(&got, &want);
    assert!(error <= 1e-4, "{name}: {error:.2e}");
    Ok(())
}

/// Keys that all architectures have.
fn common(architecture: &str, numbers: &[(&str, u32)], eps: f32, theta: f32) -> Writer {
    let mut writer = Writer::new(architecture);
    writer.numbers(architecture, numbers);
    writer.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Kv::F32(eps));
    writer.set(&format!("{architecture}.rope.freq_base"), Kv::F32(theta));
    writer.numbers("tokenizer.ggml", &[("bos_token_id", 0), ("eos_token_id", 1)]);
    writer
}

const QWEN3: [(&str, u32); 8] = [
    ("block_count", 3),
    ("context_length", 4096),
    ("embedding_length", 128),
    ("feed_forward_length", 256),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("attention.key_length", 64),
    ("attention.value_length", 64),
];

#[test]
fn qwen3_and_qwen3moe() -> Outcome {
    let mut writer = common("qwen3", &QWEN3, 1e-6, 1e6);
    write_rest(&mut writer, tensors("qwen3")?, "model", &NAMES);
    agrees(&writer, "qwen3")?;

    let numbers = [
        ("block_count", 3),
        ("context_length", 32768),
        ("embedding_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 48),
    ];
    let mut writer = common("qwen3moe", &numbers, 1e-6, 1e7);
    write_rest(&mut writer, tensors("qwen3_moe")?, "model", &NAMES);
    agrees(&writer, "qwen3_moe")
}

/// Norms have had 1 added, but for that of delta nets; decay rates are what they stand for; the projections are apart,
/// in these types.
fn qwen3next_with(kinds: [GgmlType; 2]) -> Result<Writer, Box<dyn std::error::Error>> {
    let numbers = [
        ("block_count", 4),
        ("context_length", 32768),
        ("embedding_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("rope.dimension_count", 8),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
        ("expert_shared_feed_forward_length", 48),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 64),
    ];
    let names: Vec<(&str, &str)> = NAMES
        .into_iter()
        .map(
            |(name, own)| {
                if own == "ffn_norm.weight" { (name, "post_attention_norm.weight") } else { (name, own) }
            },
        )
        .collect();
    let mut writer = common("qwen3next", &numbers, 1e-6, 1e7);
    let mut all = tensors("qwen3_next")?;
    for (name, (_, values)) in &mut all {
        if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        } else if name.ends_with("A_log") {
            values.iter_mut().for_each(|value| *value = -value.exp());
        }
    }
    for layer in 0..3 {
        let name = format!("model.layers.{layer}.linear_attn.in_proj_qkvz.weight");
        let (_, values) = all.remove(&name).expect("a projection");
        // Two key heads of 16 (q), 16 (k), 32 (v) and 32 (z) rows of 64.
        let rows: Vec<&[f32]> = values.chunks(64).collect();
        let part = |start: usize, len: usize| -> Vec<f32> {
            (0..2).flat_map(|head| rows[head * 96 + start..head * 96 + start + len].concat()).collect()
        };
        let qkv = [part(0, 16), part(16, 16), part(32, 32)].concat();
        writer.matrix(&format!("blk.{layer}.attn_qkv.weight"), kinds[0], 64, &qkv);
        writer.matrix(&format!("blk.{layer}.attn_gate.weight"), kinds[1], 64, &part(64, 32));
    }
    write_rest(&mut writer, all, "model", &names);
    Ok(writer)
}

#[test]
fn qwen3next() -> Outcome {
    agrees(&qwen3next_with([GgmlType::F32; 2])?, "qwen3_next")
}

/// The input's projections stay quantised, as one matrix or, where the file's types differ, as two; gates are floats
/// beside them.
#[test]
fn qwen3next_projections_stay_quantised() -> Outcome {
    use GgmlType::{F32, Q4_0, Q8_0};
    for (kinds, parts) in [([Q8_0; 2], vec![192]), ([Q8_0, Q4_0], vec![128, 64]), ([Q8_0, F32], vec![])] {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, qwen3next_with(kinds)?.bytes())?;
        let checkpoint = Checkpoint::open(&path)?;
        let of = |quantise| -> Result<(Model, Vec<f32>), Box<dyn std::error::Error>> {
            let model = Model::quantised(&Device::cpu(), &checkpoint, DType::F32, quantise, &mut |_| {})?;
            let mut session = model.session(SessionOptions { capacity: 32, ..SessionOptions::default() })?;
            let mut logits = session.prefill(0, &[5, 80, 33, 7, 120, 9])?.to_host()?;
            logits.extend(session.decode(&[17])?.to_host()?);
            Ok((model, logits))
        };
        let (dense, want) = of(Quantise::Dense)?;
        let (model, got) = of(Quantise::AsStored)?;
        let error = relative_l2(&got, &want);
        assert!(error <= 1e-5, "{kinds:?}: {error:.2e}");
        for (own, dense) in std::iter::zip(&model.decoder().layers, &dense.decoder().layers) {
            let (Mixer::DeltaNet(own), Mixer::DeltaNet(dense)) = (&own.mixer, &dense.mixer) else { continue };
            let rows: Vec<usize> = match &own.input.weight {
                ProjectionWeight::Mixed(both) => match &both[..] {
                    [ProjectionWeight::Packed(parts), ProjectionWeight::Plain(gates)] => {
                        assert_eq!(gates.shape(), [8, 64]);
                        parts.iter().map(|part| part.n()).collect()
                    }
                    other => return Err(format!("{other:?}").into()),
                },
                ProjectionWeight::Plain(_) => vec![],
                other => return Err(format!("{other:?}").into()),
            };
            assert_eq!(rows, parts, "{kinds:?}");
            assert_eq!(own.input.bytes() < dense.input.bytes() / 2, !parts.is_empty(), "{kinds:?}");
        }
    }
    Ok(())
}

/// Keys' and values' projections are apart, and the former transposed; older files have them together.
#[test]
fn deepseek2() -> Outcome {
    let numbers = [
        ("block_count", 3),
        ("context_length", 202_752),
        ("embedding_length", 64),
        ("feed_forward_length", 160),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", 48),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length", 48),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 40),
        ("attention.value_length_mla", 32),
        ("rope.dimension_count", 16),
        ("leading_dense_block_count", 1),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", 48),
        ("expert_gating_func", 2),
    ];
    let mut writer = common("deepseek2", &numbers, 1e-5, 1e6);
    writer.set("deepseek2.expert_weights_scale", Kv::F32(1.8));
    writer.set("deepseek2.expert_weights_norm", Kv::Bool(true));
    let mut whole = writer.clone();
    let mut all = tensors("glm4_moe_lite")?;
    write_rest(&mut whole, all.clone(), "model", &NAMES);
    agrees(&whole, "glm4_moe_lite")?;
    for layer in 0..3 {
        let (_, values) =
            all.remove(&format!("model.layers.{layer}.self_attn.kv_b_proj.weight")).expect("kv_b");
        // Four heads of 24 rows for keys and 32 for values, of 32.
        let (mut keys, mut both) = (Vec::new(), Vec::new());
        for head in values.chunks(56 * 32) {
            keys.extend((0..32).flat_map(|col| (0..24).map(move |row| head[row * 32 + col])));
            both.extend_from_slice(&head[24 * 32..]);
        }
        writer.floats(&format!("blk.{layer}.attn_k_b.weight"), &[4, 32, 24], &keys);
        writer.floats(&format!("blk.{layer}.attn_v_b.weight"), &[4, 32, 32], &both);
    }
    write_rest(&mut writer, all, "model", &NAMES);
    agrees(&writer, "glm4_moe_lite")
}

/// The decoder in one file, the tower in another.
#[test]
fn qwen3vl() -> Outcome {
    let numbers = [
        ("block_count", 4),
        ("context_length", 128_000),
        ("embedding_length", 64),
        ("feed_forward_length", 128),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
    ];
    let mut decoder = common("qwen3vl", &numbers, 1e-6, 5e6);
    decoder.set("qwen3vl.rope.dimension_sections", Kv::I32s(vec![6, 5, 5, 0]));
    decoder.text("tokenizer.ggml.model", "gpt2");
    let token = |id: usize| match id {
        378 => "<|vision_start|>".into(),
        379 => "<|image_pad|>".into(),
        380 => "<|vision_end|>".into(),
        381 => "<|video_pad|>".into(),
        id => format!("t{id}"),
    };
    decoder.set("tokenizer.ggml.tokens", Kv::Texts((0..384).map(token).collect()));
    let mut tower = Writer::new("clip");
    tower.text("clip.projector_type", "qwen3vl_merger");
    let numbers = [
        ("block_count", 3),
        ("embedding_length", 48),
        ("feed_forward_length", 96),
        ("attention.head_count", 3),
        ("patch_size", 16),
        ("projection_dim", 64),
        ("spatial_merge_size", 2),
    ];
    tower.numbers("clip.vision", &numbers);
    tower.set("clip.vision.is_deepstack_layers", Kv::Bools(vec![true, true, false]));
    let (mut seen, text): (Tensors, Tensors) =
        tensors("qwen3_vl")?.into_iter().partition(|(name, _)| name.starts_with("model.visual."));
    let (_, patches) = seen.remove("model.visual.patch_embed.proj.weight").expect("patches");
    let frame = |frame: usize| -> Vec<f32> {
        patches.chunks(512).flat_map(|both| &both[frame * 256..(frame + 1) * 256]).copied().collect()
    };
    tower.floats("v.patch_embd.weight", &[48, 3, 16, 16], &frame(0));
    tower.floats("v.patch_embd.weight.1", &[48, 3, 16, 16], &frame(1));
    for (name, (shape, values)) in seen {
        let own = name
            .trim_start_matches("model.visual.")
            .replace("patch_embed.proj", "v.patch_embd")
            .replace("pos_embed", "v.position_embd")
            .replace("deepstack_merger_list", "v.deepstack")
            .replace("merger.norm", "v.post_ln")
            .replace("merger.linear_fc1", "mm.0")
            .replace("merger.linear_fc2", "mm.2")
            .replace("blocks", "v.blk")
            .replace("attn.qkv", "attn_qkv")
            .replace("attn.proj", "attn_out")
            .replace("mlp.linear_fc1", "ffn_up")
            .replace("mlp.linear_fc2", "ffn_down")
            .replace("norm1", "ln1")
            .replace("norm2", "ln2")
            .replace("linear_fc", "fc");
        tower.floats(&own, &shape, &values);
    }
    write_rest(&mut decoder, text, "model.language_model", &NAMES);
    let folder = tempfile::tempdir()?;
    let (path, tower_path) = (folder.path().join("model.gguf"), folder.path().join("mmproj.gguf"));
    std::fs::write(&path, decoder.bytes())?;
    std::fs::write(&tower_path, tower.bytes())?;
    let (got, want) = logits(&path, Some(&tower_path), "qwen3_vl")?;
    let error = relative_l2(&got, &want);
    assert!(error <= 1e-4, "{error:.2e}");
    // Without its tower it reads text.
    let blind = Checkpoint::open(&path)?;
    assert!(blind.config().vision.is_none());
    Model::from_checkpoint(&Device::cpu(), &blind, DType::F32, &mut |_| {})?;
    Ok(())
}

/// Rows of q and k are permuted, and the stretching of rotary frequencies is a tensor.
#[test]
fn llama() -> Outcome {
    let mut all = tensors("qwen3")?;
    all.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    for layer in 0..3 {
        for (part, rows) in [("q", 256), ("k", 128), ("v", 128), ("o", 128)] {
            let bias = (0..rows).map(|row| (row * 7 % 13) as f32 * 0.05 - 0.3).collect();
            all.insert(format!("model.layers.{layer}.self_attn.{part}_proj.bias"), (vec![rows], bias));
        }
    }
    let folder = tempfile::tempdir()?;
    let published = folder.path().join("published");
    std::fs::create_dir(&published)?;
    let bytes: BTreeMap<&String, (&Vec<usize>, Vec<u8>)> = all
        .iter()
        .map(|(name, (shape, values))| {
            (name, (shape, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        })
        .collect();
    let views = bytes.iter().map(|(name, (shape, bytes))| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, (*shape).clone(), bytes);
        (*name, view.expect("a tensor"))
    });
    safetensors::serialize_to_file(views, None, &published.join("model.safetensors"))?;
    let config = r#"{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "attention_bias": true, "vocab_size": 384,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": true,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}"#;
    std::fs::write(published.join("config.json"), config)?;

    let mut writer = common("llama", &QWEN3, 1e-6, 500_000.0);
    for (name, (shape, values)) in &mut all {
        if name.contains("q_proj") || name.contains("k_proj") {
            let (head_dim, width) = (64, values.len() / shape[0]);
            let old = values.clone();
            for (row, values) in values.chunks_mut(width).enumerate() {
                let (head, place) = (row / head_dim, row % head_dim);
                let from = head * head_dim + place / 2 + place % 2 * 32;
                values.copy_from_slice(&old[from * width..(from + 1) * width]);
            }
        }
    }
    let divisors: Vec<f32> = (0..32)
        .map(|pair| {
            let turns = 8192.0 * 500_000f64.powf(-f64::from(pair) / 32.0) / std::f64::consts::TAU;
            let kept = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
            (1.0 / (kept + (1.0 - kept) / 8.0)) as f32
        })
        .collect();
    writer.floats("rope_freqs.weight", &[32], &divisors);
    write_rest(&mut writer, all, "model", &NAMES);
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, writer.bytes())?;
    assert_eq!(Checkpoint::open(&path)?.config().decoder, Checkpoint::open(&published)?.config().decoder);
    let (want, other) = logits(&published, None, "qwen3")?;
    assert_ne!(want, other, "another model than the one of the case");
    assert_eq!(logits(&path, None, "qwen3")?.0, want);

    // Other divisors are none that a published model has.
    let freqs =
        writer.tensors.iter_mut().find(|tensor| tensor.name == "rope_freqs.weight").expect("divisors");
    freqs.bytes[..4].copy_from_slice(&2f32.to_le_bytes());
    std::fs::write(&path, writer.bytes())?;
    let message = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(message.ends_with("got others") && message.contains("rope_freqs.weight"), "{message}");
    Ok(())
}
