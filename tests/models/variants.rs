//! One-key changes of the golden checkpoints: what transformers computes, or a stated decision. See `variants/make.py`
//! there.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use testkit::golden;

use super::*;

/// A tensor to write: name, shape, elements in f32.
type Stored = (String, Vec<usize>, Vec<u8>);

fn table() -> Result<Value, Box<dyn StdError>> {
    Ok(serde_json::from_slice(&std::fs::read(golden::folder("variants").join("variants.json"))?)?)
}

/// The object that holds the last part of a path with dots between its parts, and that part.
fn inside<'a>(
    mut value: &'a mut Value,
    path: &'a str,
) -> Option<(&'a mut serde_json::Map<String, Value>, &'a str)> {
    let (parents, key) = path.rsplit_once('.').map_or((None, path), |(parents, key)| (Some(parents), key));
    for parent in parents.iter().flat_map(|parents| parents.split('.')) {
        value = value.as_object_mut()?.entry(parent).or_insert_with(|| Value::Object(Default::default()));
    }
    Some((value.as_object_mut()?, key))
}

/// The text of its config.json.
fn config(variant: &Value, base: &Path) -> Result<String, Box<dyn StdError>> {
    if let Some(text) = variant["text"].as_str() {
        return Ok(text.to_owned());
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(base.join("config.json"))?)?;
    for path in variant["remove"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if variant["keep"] != true {
            let (map, key) = inside(&mut config, path).ok_or("no such object")?;
            map.remove(key).ok_or("no such key")?;
        }
    }
    for (path, value) in variant["set"].as_object().into_iter().flatten() {
        let (map, key) = inside(&mut config, path).ok_or("no such object")?;
        map.insert(key.to_owned(), value.clone());
    }
    Ok(config.to_string())
}

/// What make.py does to the tensors.
fn change(tensors: &mut Vec<Stored>, what: &str) -> Outcome {
    let head = "lm_head.weight";
    let find = |tensors: &[Stored], end: &str| {
        tensors.iter().position(|(name, ..)| name.ends_with(end)).ok_or("no such tensor")
    };
    let embedding = find(tensors, "embed_tokens.weight")?;
    let (_, shape, bytes) = tensors[embedding].clone();
    let zeros = |len: usize| vec![0; 4 * len];
    match what {
        "head" => {
            tensors.retain(|(name, ..)| name != head);
            let (rows, cols) = (shape[0] as i32, shape[1] as i32);
            let values = (0..rows).flat_map(|i| (0..cols).map(move |j| (i * 31 + j * 17) % 101 - 50));
            let bytes = values.flat_map(|value| (value as f32 / 500.0).to_le_bytes()).collect();
            tensors.push((head.into(), shape, bytes));
        }
        "same head" => tensors.push((head.into(), shape, bytes)),
        "only head" => tensors[embedding].0 = head.into(),
        "headless" => tensors.retain(|(name, ..)| name != head),
        "extra" => {
            tensors.push(("model.layers.0.self_attn.surplus.weight".into(), vec![2, 2], zeros(4)));
        }
        "mtp" => tensors.push(("mtp.norm.weight".into(), vec![2], zeros(2))),
        "no prefix" => {
            for (name, ..) in tensors.iter_mut() {
                *name = name.strip_prefix("model.").unwrap_or(name).to_owned();
            }
        }
        other => return Err(format!("unknown change {other}").into()),
    }
    Ok(())
}

fn write(variant: &Value, base: &Path, folder: &Path) -> Outcome {
    std::fs::write(folder.join("config.json"), config(variant, base)?)?;
    std::fs::copy(base.join("generation_config.json"), folder.join("generation_config.json"))?;
    let Some(what) = variant["tensors"].as_str() else {
        std::fs::copy(base.join("model.safetensors"), folder.join("model.safetensors"))?;
        return Ok(());
    };
    let bytes = std::fs::read(base.join("model.safetensors"))?;
    let all = SafeTensors::deserialize(&bytes)?;
    let stored = |(name, view): (String, TensorView<'_>)| (name, view.shape().to_vec(), view.data().to_vec());
    let mut tensors: Vec<Stored> = all.tensors().into_iter().map(stored).collect();
    change(&mut tensors, what)?;
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<_, safetensors::SafeTensorError>>()?;
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))?;
    Ok(())
}

/// The logits that the table has of a row, and what was not used.
fn run(variant: &Value, places: &[usize]) -> Result<(Vec<f32>, Model), Box<dyn StdError>> {
    let name = variant["base"].as_str().ok_or("no base")?;
    let base = golden::folder(name);
    let folder = tempfile::tempdir()?;
    write(variant, &base, folder.path())?;
    let case = (variant["image"] == true)
        .then(|| Case::load(GOLDEN.into_iter().find(|golden| *golden == name).expect("a golden name")))
        .transpose()?;
    let (ids, grids, patches): (Vec<u32>, _, _) = match &case {
        Some(case) => {
            let (grids, patches) = case.images();
            (case.prompts().swap_remove(0), grids, patches)
        }
        None => (serde_json::from_value(variant["ids"].clone())?, Vec::new(), &[][..]),
    };
    let row = variant["row"].as_u64().map_or(ids.len() - 1, |row| row as usize);
    let options = SessionOptions {
        capacity: 96,
        logits: Logits::All,
        max_patches: grids.iter().map(PatchGrid::patches).sum(),
        ..SessionOptions::default()
    };
    let model = Model::load(&Device::cpu(), folder.path(), DType::F32, &mut |_| {})?;
    let mut session = model.session(options)?;
    let stream = session.stream().clone();
    let mut logits = Vec::new();
    session.prefill_visual_with(
        0,
        &ids,
        &visuals((&grids, patches)),
        &mut |_, _| Ok(()),
        &mut |_, rows| {
            logits.extend(rows.to_vec::<f32>(&stream)?);
            Ok(())
        },
    )?;
    let vocab = model.config().decoder.vocab_size;
    Ok((places.iter().map(|place| logits[row * vocab + place]).collect(), model))
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).map(|value| value as f32).collect()
}

#[test]
fn one_key_changes() -> Outcome {
    let table = table()?;
    let places: Vec<usize> = serde_json::from_value(table["places"].clone())?;
    let all = table["variants"].as_array().ok_or("no variants")?;
    let mut wrong = Vec::new();
    for variant in all {
        let (base, name) = (&variant["base"], &variant["name"]);
        let (ours, theirs) = (&variant["ours"], &variant["transformers"]);
        let found = match (run(variant, &places), ours["refused"].as_str()) {
            (Err(error), Some(words)) if error.to_string().contains(words) => None,
            (Err(error), _) => Some(error.to_string()),
            (Ok(_), Some(_)) => Some("not refused".into()),
            (Ok((logits, model)), None) => {
                let like = |other: &&Value| other["base"] == *base && other["name"] == ours["like"];
                let want = match theirs["logits"].is_null() || !ours["like"].is_null() {
                    true => all.iter().find(like).map(|other| floats(&other["transformers"]["logits"])),
                    false => Some(floats(&theirs["logits"])),
                };
                let want = want.ok_or(format!("{base}: {name}: nothing to compare with"))?;
                let error = relative_l2(&logits, &want);
                let unread: Vec<&str> =
                    variant["unread"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                let report = model.report();
                let unused = variant["unused"].as_u64().unwrap_or(0) as usize;
                if error > 1e-4 {
                    Some(format!("off by {error:.2e}: {logits:?}, expected {want:?}"))
                } else if report.unread_keys != unread || report.unused_tensors.len() != unused {
                    Some(format!("not used: {report}; expected {unread:?} and {unused} tensors"))
                } else {
                    None
                }
            }
        };
        wrong.extend(found.map(|found| format!("{base}: {name}: {found}")));
    }
    assert!(all.len() >= 60, "{} variants", all.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    Ok(())
}
