//! The published models, by their configurations.

use std::collections::BTreeMap;

use testkit::golden;

use super::*;

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

/// The published configurations: name, file, and what the checkpoint has: parameters and tensors, those aside that are
/// of no use to inference (GLM's block for drafting, a copy of the tied head).
const PUBLISHED: [(&str, &str, &str, usize, usize); 6] = [
    ("Qwen3-0.6B", "qwen3-0.6b", "qwen3", 596_049_920, 310),
    ("Qwen3-4B-Instruct-2507", "qwen3-4b-instruct-2507", "qwen3", 4_022_468_096, 398),
    ("Qwen3-Coder-30B-A3B", "qwen3-coder-30b-a3b-instruct", "qwen3_moe", 30_532_122_624, 18_867),
    ("Qwen3-Coder-Next", "qwen3-coder-next", "qwen3_next", 79_674_391_296, 74_391),
    ("GLM-4.7-Flash", "glm-4.7-flash", "glm4_moe_lite", 29_943_393_920, 9_491),
    ("Qwen3-VL-2B-Instruct", "qwen3-vl-2b-instruct", "qwen3_vl", 2_127_532_032, 625),
];

fn published(file: &str) -> Result<ModelConfig, Box<dyn StdError>> {
    let path = workspace_root().join(format!("assets/configs/{file}.json"));
    Ok(ModelConfig::from_json(&std::fs::read_to_string(&path)?, &path)?)
}

/// No layer, expert or head is dropped: the tensors that are asked for are as many, and as large, as those that were
/// published.
#[test]
fn published_models_are_whole() -> Outcome {
    for (name, file, _, parameters, tensors) in PUBLISHED {
        let all = Model::tensors(&published(file)?)?;
        let names: std::collections::HashSet<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), all.len(), "{name}: a tensor is asked for twice");
        let total: usize = all.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!((total, all.len()), (parameters, tensors), "{name}");
    }
    Ok(())
}

/// The README's table of models, made by what this build can do; `WARPFORGE_UPDATE_README=1` writes it.
#[test]
fn the_readme_says_which_models_run_where() -> Outcome {
    let mut devices = vec![("CPU".to_owned(), Device::cpu())];
    for arch in Arch::ALL {
        devices.push((arch.to_string(), Device::simulated(Arc::new(Card::new(arch)))?));
    }
    let mut table =
        "| model | layers | parameters | in bf16 | cache of a token |\n|---|---|---|---|---|\n".to_owned();
    let mut runs = BTreeMap::<String, Vec<&str>>::new();
    for (name, file, small, ..) in PUBLISHED {
        let config = published(file)?;
        let decoder = &config.decoder;
        let count = |matches: &dyn Fn(&MixerConfig) -> bool| {
            decoder.layers.iter().filter(|layer| matches(&layer.mixer)).count()
        };
        let kinds = [
            ("attention", count(&|mixer| matches!(mixer, MixerConfig::Attention(_)))),
            ("delta net", count(&|mixer| matches!(mixer, MixerConfig::DeltaNet(_)))),
            ("latent attention", count(&|mixer| matches!(mixer, MixerConfig::Latent(_)))),
        ];
        let mut layers: Vec<String> = kinds
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(kind, count)| format!("{count} {kind}"))
            .collect();
        let experts = decoder.layers.iter().find_map(|layer| match layer.feed_forward {
            FeedForwardConfig::Moe(moe) => Some(format!("{} of {} experts", moe.top_k, moe.num_experts)),
            _ => None,
        });
        layers.extend(experts);
        layers.extend(config.vision.as_ref().map(|vision| format!("{} of vision", vision.depth)));
        let parameters: usize =
            Model::tensors(&config)?.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        let fixed = decoder.cache_bytes(DType::BF16, 0);
        let token = decoder.cache_bytes(DType::BF16, 1) - fixed;
        table += &format!(
            "| {name} | {} | {:.2} G | {:.1} GiB | {:.0} KiB",
            layers.join(", "),
            parameters as f64 * 1e-9,
            parameters as f64 * 2.0 / f64::from(1 << 30),
            token as f64 / 1024.0,
        );
        if fixed > 0 {
            table += &format!(", {:.1} MiB a sequence", fixed as f64 / f64::from(1 << 20));
        }
        table += " |\n";
        // What runs is found out with the small model of the same kind, whose results other tests compare.
        let mut places = BTreeMap::<String, Vec<&str>>::new();
        for (place, device) in &devices {
            let options = SessionOptions { capacity: 8, ..SessionOptions::default() };
            let is_possible = |dtype| session(device, &golden::folder(small), dtype, options).is_ok();
            let dtypes: Vec<&str> =
                DType::FLOATS.into_iter().filter(|&dtype| is_possible(dtype)).map(DType::name).collect();
            places.entry(dtypes.join(", ")).or_default().push(place);
        }
        let places: Vec<String> =
            places.iter().map(|(dtypes, places)| format!("on {} in {dtypes}", places.join(", "))).collect();
        runs.entry(places.join("; ")).or_default().push(name);
    }
    for (places, models) in &runs {
        let models = if models.len() == PUBLISHED.len() { "all".to_owned() } else { models.join(", ") };
        table += &format!("\nRun {places}: {models}.\n");
    }
    let path = workspace_root().join("README.md");
    let readme = std::fs::read_to_string(&path)?;
    let (start, end) = ("<!-- models -->\n", "<!-- /models -->");
    let first = readme.find(start).ok_or("no place for the table")? + start.len();
    let last = readme.find(end).ok_or("no end of the table")?;
    if std::env::var_os("WARPFORGE_UPDATE_README").is_some() {
        std::fs::write(&path, format!("{}{table}{}", &readme[..first], &readme[last..]))?;
    } else {
        assert_eq!(readme[first..last], table, "run with WARPFORGE_UPDATE_README=1");
    }
    Ok(())
}

/// Layers of full size with random weights on the CPU, one of each kind that a model has, and the whole vision tower: a
/// prompt and decode steps.
#[test]
fn layers_of_full_size() -> Outcome {
    for (name, file, ..) in PUBLISHED {
        let mut config = published(file)?;
        let mut layers: Vec<LayerConfig> = Vec::new();
        for layer in &config.decoder.layers {
            if !layers.contains(layer) {
                layers.push(*layer);
            }
        }
        if let Some(vision) = &config.vision {
            // Deepstack features go to the first layers.
            layers = vec![layers[0]; vision.deepstack_blocks.len()];
        }
        config.decoder.layers = layers;
        let elements = |config: &ModelConfig| -> Result<usize, warpforge::Error> {
            Ok(Model::tensors(config)?.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum())
        };
        let mib = (2 * elements(&config)?) >> 20;
        let model = Model::random(&Device::cpu(), config, DType::BF16, 1)?;
        let max_patches = if model.tower().is_some() { 16 } else { 0 };
        let options = SessionOptions { capacity: 16, chunk: 16, max_patches, ..SessionOptions::default() };
        let mut session = model.session(options)?;
        let stream = session.stream().clone();
        let started = std::time::Instant::now();
        let mut prompt: Vec<u32> = (0..5).map(|i| i * 251).collect();
        let patches: Vec<f32> = (0..16 * 1536).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
        let mut visuals = Vec::new();
        if let Some(vision) = &model.config().vision {
            prompt.extend([vision.image_token; 4]);
            visuals.push(Visual { grid: PatchGrid { frames: 1, rows: 4, cols: 4 }, patches: &patches });
        }
        let mut logits = session.prefill_visual(0, &prompt, &visuals)?.to_vec::<f32>(&stream)?;
        let prefill = started.elapsed();
        for id in [7, 9] {
            logits.extend(session.decode(&[id])?.to_vec::<f32>(&stream)?);
        }
        assert!(logits.iter().all(|logit| logit.is_finite()), "{name}");
        let decode = (started.elapsed() - prefill) / 2;
        println!("{name}: {mib} MiB of weights, prompt {prefill:.0?}, a token {decode:.0?}");
    }
    Ok(())
}
