//! Quantised checkpoints that are written, read again, and refused.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use half::bf16;
use safetensors::tensor::TensorView as StoredView;
use safetensors::{Dtype, SafeTensors};
use testkit::golden;
use warpforge::Error;
use warpforge::models::{Checkpoint, LoadProgress, ModelError, QuantReport, Quantise};
use warpforge::weight::{ScaleType, Scheme};

use super::*;

/// The small models' columns are no multiples of 128.
const INT4: Scheme = Scheme { group: 32, ..Scheme::INT4 };

pub(super) const SCHEMES: [(&str, Scheme); 8] = [
    ("int8", Scheme::INT8),
    ("int4", INT4),
    ("int4 with zero points", Scheme { asymmetric: true, scale: ScaleType::F16, ..INT4 }),
    ("int8 with zero points", Scheme { asymmetric: true, group: 32, scale: ScaleType::F16, ..Scheme::INT8 }),
    ("fp8", Scheme { group: 64, rows: 32, ..Scheme::FP8 }),
    ("fp8 by channel", Scheme::FP8_CHANNEL),
    ("mxfp4", Scheme::MXFP4),
    ("nvfp4", Scheme::NVFP4),
];

fn save(from: &Path, scheme: &Scheme, to: &Path) -> Result<QuantReport, Error> {
    Checkpoint::open(from)?.save_quantised(scheme, to, &mut |_| ControlFlow::Continue(()))
}

fn logits(model: &Model) -> Result<Vec<f32>, Error> {
    let mut session = model.session(SessionOptions { capacity: 16, ..SessionOptions::default() })?;
    let stream = session.stream().clone();
    session.prefill(0, &[5, 9, 100, 7, 3])?.to_vec::<f32>(&stream)
}

/// What is written is what a model quantises itself to as it loads.
#[test]
fn what_is_written_is_what_is_quantised() -> Outcome {
    let device = Device::cpu();
    let mut are_whole = 0;
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let folder = golden::folder(name);
        for (title, scheme) in SCHEMES {
            let place = tempfile::tempdir()?;
            let target = place.path().join("a").join(name);
            let mut told = LoadProgress { loaded_bytes: 0, total_bytes: 0 };
            let mut progress = |so_far: LoadProgress| {
                assert!(
                    so_far.loaded_bytes >= told.loaded_bytes && so_far.loaded_bytes <= so_far.total_bytes
                );
                told = so_far;
                ControlFlow::Continue(())
            };
            let checkpoint = Checkpoint::open(&folder)?;
            let report = checkpoint.save_quantised(&scheme, &target, &mut progress)?;
            assert_eq!(told.loaded_bytes, told.total_bytes);
            assert_eq!(report.bytes_before, told.total_bytes);
            let is_ragged = |(_, reason): &(String, String)| reason.contains("no whole groups");
            assert!(report.kept.iter().all(is_ragged), "{:?}", report.kept);

            let saved = Model::load(&device, &target, DType::F32, &mut |_| {})?;
            assert!(saved.report().unused_tensors.is_empty(), "{name} {title}: {}", saved.report());
            let made = Model::quantised(&device, &checkpoint, DType::F32, Quantise::By(scheme), &mut |_| {})?;
            let (got, want) = (logits(&saved)?, logits(&made)?);
            let error = relative_l2(&got, &want);
            // A model quantises ragged groups too.
            let bound = if report.kept.is_empty() { 1e-5 } else { 0.3 };
            assert!(error <= bound, "{name} {title}: {error:.2e}");
            are_whole += usize::from(report.kept.is_empty());
            let plain = logits(&Model::load(&device, &folder, DType::F32, &mut |_| {})?)?;
            assert!(relative_l2(&got, &plain) > 1e-4, "{name} {title}: nothing is quantised");

            // The report is of the files.
            let file = std::fs::read(target.join("model.safetensors"))?;
            let file = SafeTensors::deserialize(&file)?;
            let bytes: usize = file.tensors().iter().map(|(_, tensor)| tensor.data().len()).sum();
            assert_eq!(report.bytes_after, bytes as u64);
            for tensor in &report.tensors {
                let module = tensor.name.strip_suffix("weight").ok_or("a weight")?;
                let own = file.tensors().into_iter().filter(|(name, _)| name.starts_with(module));
                let own: usize = own.map(|(_, tensor)| tensor.data().len()).sum();
                assert_eq!((tensor.bytes_after, own > 0), (own as u64, true));
                assert!(tensor.bytes_after < tensor.bytes_before);
                assert!(tensor.errors.relative > 0.0 && tensor.errors.relative < 0.3, "{tensor:?}");
                assert!(tensor.errors.largest > 0.0 && tensor.errors.largest < 0.3, "{tensor:?}");
            }
            let table = report.to_string();
            assert_eq!(table.lines().count(), report.tensors.len() + report.kept.len() + 2);
            let entries: Vec<_> = std::fs::read_dir(place.path().join("a"))?.collect::<Result<_, _>>()?;
            assert_eq!(entries.len(), 1, "{entries:?}");
        }
    }
    assert!(are_whole >= 20, "{are_whole}");
    Ok(())
}

/// A folder with some tensors, in so many files.
fn checkpoint_of(
    folder: &Path,
    files: usize,
    change: impl Fn(&str, &mut Vec<u8>, Dtype),
) -> Result<(), Box<dyn StdError>> {
    let from = golden::folder("qwen3");
    std::fs::copy(from.join("config.json"), folder.join("config.json"))?;
    std::fs::write(folder.join("tokenizer.json"), "{}")?;
    std::fs::write(folder.join("pytorch_model.bin"), "not to be copied")?;
    let bytes = std::fs::read(from.join("model.safetensors"))?;
    let stored = SafeTensors::deserialize(&bytes)?;
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in stored.tensors() {
        let mut data = tensor.data().to_vec();
        change(&name, &mut data, tensor.dtype());
        tensors.push((name, tensor.dtype(), tensor.shape().to_vec(), data));
    }
    let mut index = serde_json::Map::new();
    for file in 0..files {
        let name = format!("model-{:05}-of-{files:05}.safetensors", file + 1);
        let own = tensors.iter().skip(file).step_by(files);
        let views: Result<Vec<_>, _> = own
            .map(|(name, dtype, shape, data)| {
                index.insert(name.clone(), format!("model-{:05}-of-{files:05}.safetensors", file + 1).into());
                StoredView::new(*dtype, shape.clone(), data).map(|view| (name.clone(), view))
            })
            .collect();
        safetensors::serialize_to_file(views?, None, &folder.join(name))?;
    }
    let index = serde_json::json!({ "weight_map": index });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
    Ok(())
}

/// Files stay files, what else is in the folder is copied, and the config keeps what it has.
#[test]
fn shards() -> Outcome {
    let place = tempfile::tempdir()?;
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    std::fs::create_dir(&from)?;
    checkpoint_of(&from, 3, |_, _, _| {})?;
    // An empty folder gives way.
    std::fs::create_dir(&to)?;
    let report = save(&from, &INT4, &to)?;
    let whole = place.path().join("whole");
    save(&golden::folder("qwen3"), &INT4, &whole)?;
    let device = Device::cpu();
    let load = |folder: &Path| Model::load(&device, folder, DType::F32, &mut |_| {});
    assert_eq!(logits(&load(&to)?)?, logits(&load(&whole)?)?);
    let mut names: Vec<String> = std::fs::read_dir(&to)?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_, _>>()?;
    names.sort();
    assert_eq!(
        names,
        [
            "config.json",
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
    );
    let json = |path: PathBuf| -> Result<serde_json::Value, Box<dyn StdError>> {
        Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
    };
    let (before, mut after) = (json(from.join("config.json"))?, json(to.join("config.json"))?);
    let quantisation = after.as_object_mut().and_then(|map| map.remove("quantization_config"));
    assert_eq!(before, after);
    let quantisation = quantisation.ok_or("a quantization_config")?;
    assert_eq!(quantisation["format"], "pack-quantized");
    assert!(quantisation["ignore"].as_array().is_some_and(|all| all.contains(&"lm_head".into())));
    let index = json(to.join("model.safetensors.index.json"))?;
    assert_eq!(index["metadata"]["total_size"], report.bytes_after);

    // One file that an index names is found by an index.
    let (from, to) = (place.path().join("one"), place.path().join("one quantised"));
    std::fs::create_dir(&from)?;
    checkpoint_of(&from, 1, |_, _, _| {})?;
    save(&from, &INT4, &to)?;
    assert!(to.join("model-00001-of-00001.safetensors").is_file());
    assert_eq!(logits(&load(&to)?)?, logits(&load(&whole)?)?);
    Ok(())
}

/// Tensors of a file: type, shape and bytes by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(folder: &Path) -> Result<Tensors, Box<dyn StdError>> {
    let bytes = std::fs::read(folder.join("model.safetensors"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let stored = |tensor: StoredView<'_>| (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
    Ok(file.tensors().into_iter().map(|(name, tensor)| (name, stored(tensor))).collect())
}

fn write(all: &Tensors, folder: &Path) -> Outcome {
    let mut views = Vec::new();
    for (name, (dtype, shape, data)) in all {
        views.push((name, StoredView::new(*dtype, shape.clone(), data)?));
    }
    Ok(safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))?)
}

/// Experts that lie in one tensor become modules of their own, the same as those that lie apart, and what a model
/// quantises itself to as it loads them.
#[test]
fn experts_in_one_tensor() -> Outcome {
    let device = Device::cpu();
    let load = |folder: &Path| Model::load(&device, folder, DType::F32, &mut |_| {});
    let mut are_whole = 0;
    // With the rows of an expert's gate.
    for (name, inner) in [("qwen3_moe", 48), ("qwen3_next", 32), ("glm4_moe_lite", 48)] {
        let place = tempfile::tempdir()?;
        let from = place.path().join("from");
        std::fs::create_dir(&from)?;
        super::golden::with_experts_in_one_tensor(name, &from)?;
        for (title, scheme) in SCHEMES {
            let (to, apart) = (place.path().join(title), place.path().join(format!("{title} apart")));
            let report = save(&from, &scheme, &to)?;
            let of_apart = save(&golden::folder(name), &scheme, &apart)?;
            let (got, want) = (tensors(&to)?, tensors(&apart)?);
            assert_eq!((&report.kept, got.len()), (&of_apart.kept, want.len()), "{name} {title}");
            for (tensor, (dtype, shape, bytes)) in &got {
                let (as_apart, shape_apart, bytes_apart) =
                    want.get(tensor).ok_or("a tensor of those apart")?;
                assert_eq!((dtype, shape), (as_apart, shape_apart), "{name} {title}: {tensor}");
                // Gate and up have a factor in common here, and none where they lie apart.
                let is_gate_up = tensor.contains(".experts.") && !tensor.contains(".down_proj.");
                let differs = title == "nvfp4" && is_gate_up;
                assert!(differs || bytes == bytes_apart, "{name} {title}: {tensor}");
            }
            let listed = |report: &QuantReport| -> Vec<(String, [usize; 2], u64, u64)> {
                let all = report.tensors.iter();
                all.map(|own| (own.name.clone(), own.shape, own.bytes_before, own.bytes_after)).collect()
            };
            assert_eq!(listed(&report), listed(&of_apart), "{name} {title}");
            assert_eq!(report.bytes_before, of_apart.bytes_before);
            let file: usize = got.values().map(|(.., bytes)| bytes.len()).sum();
            assert_eq!(report.bytes_after, file as u64, "{name} {title}");

            let saved = load(&to)?;
            assert!(saved.report().unused_tensors.is_empty(), "{name} {title}: {}", saved.report());
            let (got, own) = (logits(&saved)?, logits(&load(&apart)?)?);
            let bound = if title == "nvfp4" { 0.3 } else { 0.0 };
            assert!(relative_l2(&got, &own) <= bound, "{name} {title}");
            // A model quantises ragged groups too, and blocks of fp8 go on from gate to up.
            let blocks_go_on = scheme.rows > 1 && inner % scheme.rows as usize != 0;
            if report.kept.is_empty() && !blocks_go_on {
                let checkpoint = Checkpoint::open(&from)?;
                let made =
                    Model::quantised(&device, &checkpoint, DType::F32, Quantise::By(scheme), &mut |_| {})?;
                let error = relative_l2(&got, &logits(&made)?);
                assert!(error <= 1e-5, "{name} {title}: {error:.2e}");
                are_whole += 1;
            }
        }
    }
    assert!(are_whole >= 9, "{are_whole}");
    Ok(())
}

/// Names, types and shapes are those of published checkpoints of such models.
#[test]
fn names_of_experts() -> Outcome {
    let place = tempfile::tempdir()?;
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    std::fs::create_dir(&from)?;
    super::golden::with_experts_in_one_tensor("qwen3_next", &from)?;
    let (mut told, mut calls) = (0, 0);
    Checkpoint::open(&from)?.save_quantised(&INT4, &to, &mut |so_far| {
        assert!(so_far.loaded_bytes > told);
        (told, calls) = (so_far.loaded_bytes, calls + 1);
        ControlFlow::Continue(())
    })?;
    // Each expert's gate, up and down in four layers is told of.
    assert!(calls >= 4 * 8 * 3, "{calls}");
    let tensors = tensors(&to)?;
    for (part, [n, k]) in [("gate_proj", [32, 64]), ("up_proj", [32, 64]), ("down_proj", [64, 32])] {
        for expert in 0..8 {
            let module = format!("model.layers.3.mlp.experts.{expert}.{part}");
            let of = |what: &str| {
                tensors.get(&format!("{module}.{what}")).map(|(dtype, shape, _)| (*dtype, shape.clone()))
            };
            assert_eq!(of("weight_packed"), Some((Dtype::I32, vec![n, k / 8])), "{module}");
            assert_eq!(of("weight_scale").map(|(_, shape)| shape), Some(vec![n, k / 32]), "{module}");
            assert_eq!(of("weight_shape"), Some((Dtype::I64, vec![2])), "{module}");
            assert_eq!(of("weight"), None, "{module}");
        }
    }
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(to.join("config.json"))?)?;
    let ignored = config["quantization_config"]["ignore"].as_array().ok_or("a list")?;
    assert!(ignored.contains(&"model.layers.3.mlp.gate".into()));
    assert!(ignored.iter().all(|module| !module.as_str().unwrap_or("").contains(".experts.")), "{ignored:?}");
    Ok(())
}

/// Experts of a form that is not known stay in their tensor, and the report says why.
#[test]
fn experts_that_stay() -> Outcome {
    let place = tempfile::tempdir()?;
    let from = place.path().join("from");
    std::fs::create_dir(&from)?;
    super::golden::with_experts_in_one_tensor("qwen3_moe", &from)?;
    let layer = |layer: usize| format!("model.layers.{layer}.mlp.experts");
    let mut all = tensors(&from)?;
    let turned = format!("{}.gate_up_proj", layer(0));
    all.get_mut(&turned).ok_or("experts")?.1 = vec![8, 64, 96];
    let taken = format!("{}.2.down_proj.weight", layer(1));
    all.insert(taken.clone(), (Dtype::F32, vec![64, 48], vec![0; 64 * 48 * 4]));
    let other = "mtp.layers.0.mlp.experts.gate_up_proj".to_owned();
    let copy = all[&format!("{}.gate_up_proj", layer(1))].clone();
    all.insert(other.clone(), copy);
    write(&all, &from)?;
    let to = place.path().join("to");
    let report = save(&from, &Scheme::INT8, &to)?;
    let saved = tensors(&to)?;
    let twice = format!("{}.down_proj", layer(1));
    for (name, why) in [(&turned, "[8, 64, 96]"), (&twice, &taken), (&other, "no form")] {
        let reason = report.kept.iter().find(|(kept, _)| kept == name).map(|(_, reason)| reason.as_str());
        assert!(reason.is_some_and(|reason| reason.contains(why)), "{name}: {reason:?}");
        assert_eq!(saved.get(name), all.get(name), "{name}");
    }
    assert_eq!(report.kept.len(), 3, "{:?}", report.kept);
    assert!(saved.contains_key(&format!("{}.7.up_proj.weight_packed", layer(2))), "the others do not");
    Ok(())
}

/// A folder beside the target that is somebody else's stays.
#[test]
fn what_is_not_ours_stays() -> Outcome {
    let place = tempfile::tempdir()?;
    let foreign = place.path().join(format!(".to.{}.part", std::process::id()));
    std::fs::create_dir(&foreign)?;
    std::fs::write(foreign.join("file"), "")?;
    let error = save(&golden::folder("qwen3"), &INT4, &place.path().join("to")).err().ok_or("refused")?;
    assert!(error.to_string().contains(".part"), "{error}");
    assert!(foreign.join("file").is_file());
    Ok(())
}

/// What cannot be quantised stays, and is named; what is wrong is refused, and leaves nothing.
#[test]
fn what_stays_and_what_is_refused() -> Outcome {
    let place = tempfile::tempdir()?;
    let golden = golden::folder("qwen3");
    let to = place.path().join("to");
    // Columns of the small models are no whole groups.
    let report = save(&golden, &Scheme { group: 48, ..Scheme::INT4 }, &to);
    let message = report.err().ok_or("a layout that kernels cannot take")?.to_string();
    assert!(message.contains("group"), "{message}");
    let wide = Scheme { group: 256, ..Scheme::INT4 };
    let report = save(&golden, &wide, &to)?;
    assert!(!report.kept.is_empty() && report.kept[0].1.contains("whole groups of 256"), "{:?}", report.kept);
    // And is read as it is.
    Model::load(&Device::cpu(), &to, DType::F32, &mut |_| {})?;

    let refused = |from: &Path, scheme: &Scheme, to: &Path, want: &[&str]| -> Outcome {
        let error = save(from, scheme, to).err().ok_or_else(|| format!("{want:?}"))?.to_string();
        assert!(want.iter().all(|want| error.contains(want)), "{error}: {want:?}");
        Ok(())
    };
    refused(&golden, &INT4, &to, &["to", "there already"])?;
    let new = place.path().join("new");
    refused(&golden, &Scheme { rows: 16, ..INT4 }, &new, &["scheme"])?;
    refused(&golden, &Scheme { rows: 1, ..Scheme::FP8 }, &new, &["scheme"])?;
    refused(&golden::folder("../golden-quant/fp8_block"), &INT4, &new, &["quantization_config"])?;
    let bad = place.path().join("bad");
    std::fs::create_dir(&bad)?;
    let name = "model.layers.1.mlp.up_proj.weight";
    checkpoint_of(&bad, 2, |own, data, dtype| {
        if own == name {
            match dtype {
                Dtype::BF16 => data[..2].copy_from_slice(&bf16::NAN.to_le_bytes()),
                _ => data[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
            }
        }
    })?;
    refused(&bad, &INT4, &new, &[name, "finite"])?;
    // The last value of all is of the last expert.
    super::golden::with_experts_in_one_tensor("qwen3_moe", &bad)?;
    std::fs::remove_file(bad.join("model.safetensors.index.json"))?;
    let mut all = tensors(&bad)?;
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    let (.., data) = all.get_mut(name).ok_or("experts")?;
    let last = data.len() - 4;
    data[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&all, &bad)?;
    for scheme in [INT4, Scheme::NVFP4] {
        refused(&bad, &scheme, &new, &[name, "expert 7", "finite"])?;
    }
    // Stopped half-way.
    let mut calls = 0;
    let stopped = Checkpoint::open(&golden)?.save_quantised(&INT4, &new, &mut |_| {
        calls += 1;
        if calls == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let is_stopped = |error: &Error| matches!(error, Error::Model(error) if matches!(error.downcast_ref(), Some(ModelError::Stopped { .. })));
    assert!(stopped.as_ref().err().is_some_and(is_stopped), "{stopped:?}");
    assert_eq!(std::fs::read_dir(place.path())?.count(), 2, "the folder and the bad one");
    Ok(())
}
