//! LoRA adapters: sequences of different ones in a batch are those of merged models.

mod experts;
mod merged;
mod refused;

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;

use tempfile::TempDir;
use testkit::golden;
use warpforge::group::Group;
use warpforge::models::{
    Adapter, Batch, Checkpoint, DraftRequest, ModelDraft, ModelError, Prompt, PromptVisual, Quantise,
    SequenceId, Work, load_tensors, save_tensors,
};
use warpforge::ops::sampling::SamplingFeatures;
use warpforge::weight::Scheme;
use warpforge::{Error, Stream, Tensor};

use super::*;

const OPTIONS: BatchOptions = BatchOptions {
    max_sequences: 4,
    max_step_tokens: 40,
    max_prompts: 4,
    max_logits: 40,
    capacity: 64,
    page_tokens: 16,
    pages: 16,
    prefix_cache: true,
    max_patches: 0,
    cache_type: CacheType::Model,
    shared_prefix: SharedPrefix::Auto,
};

const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
/// All modules that adapters of a batch may have, by the ends of their names.
const ALL: [&str; 22] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "linear_attn.in_proj_qkvz",
    "linear_attn.in_proj_ba",
    "linear_attn.out_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_expert.down_proj",
    "shared_experts.gate_proj",
    "shared_experts.up_proj",
    "shared_experts.down_proj",
    "experts.*.gate_proj",
    "experts.*.up_proj",
    "experts.*.down_proj",
];
/// A few of each part.
const FEW: [&str; 9] = [
    "q_proj",
    "v_proj",
    "linear_attn.in_proj_ba",
    "linear_attn.out_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "shared_experts.down_proj",
    "experts.1.up_proj",
    "experts.2.down_proj",
];
/// The modules of two adapters: some and all of every part, and of attention and MLPs alone.
const EVERY: [&[&str]; 2] = [&FEW, &ALL];
const FIRST: [&[&str]; 2] = [
    &["q_proj", "v_proj"],
    &[
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ],
];

/// Whether a module's name ends so; a star is any expert.
fn ends_with(module: &str, end: &str) -> bool {
    match end.strip_prefix("experts.*.") {
        Some(part) => module.contains(".mlp.experts.") && module.ends_with(part),
        None => module.ends_with(end),
    }
}

/// Numbers like normal ones, the same for the same seed.
fn numbers(seed: u32, len: usize, scale: f32) -> Vec<f32> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..3).map(|_| next()).sum::<f32>() * 2.0 * scale).collect()
}

/// The tensors of a checkpoint, as a golden one.
struct Base {
    folder: PathBuf,
    stream: Stream,
    tensors: HashMap<String, Tensor>,
}

/// An adapter of a golden checkpoint: its rank, its scale, and its matrices by module.
struct Made {
    folder: TempDir,
    scale: f32,
    modules: Vec<(String, Vec<f32>, Vec<f32>)>,
    rank: usize,
}

impl Base {
    fn open(name: &str) -> Result<Self, Error> {
        Self::in_folder(golden::folder(name))
    }

    fn in_folder(folder: PathBuf) -> Result<Self, Error> {
        let stream = Device::cpu().stream()?;
        let tensors = load_tensors(&folder.join("model.safetensors"), &stream)?.into_iter().collect();
        Ok(Base { folder, stream, tensors })
    }

    /// As PEFT writes it, for the modules whose names end so.
    fn adapter(
        &self,
        seed: u32,
        (rank, alpha, rslora): (usize, f32, bool),
        ends: &[&str],
    ) -> Result<Made, Box<dyn StdError>> {
        let folder = tempfile::tempdir()?;
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort();
        let mut modules = Vec::new();
        for name in names {
            let Some(module) = name.strip_suffix(".weight") else { continue };
            if !ends.iter().any(|end| ends_with(module, end)) || module.contains("visual") {
                continue;
            }
            let &[rows, cols] = self.tensors[name].shape() else { continue };
            let seed = seed * 1000 + modules.len() as u32;
            let (a, b) = (numbers(seed, rank * cols, 0.1), numbers(seed + 500, rows * rank, 0.1));
            modules.push((module.to_owned(), a, b));
        }
        let mut stored = Vec::new();
        for (module, a, b) in &modules {
            for (which, values, shape) in [("A", a, [rank, a.len() / rank]), ("B", b, [b.len() / rank, rank])]
            {
                let tensor = Tensor::from_slice(&self.stream, &shape, values)?;
                stored.push((format!("base_model.model.{module}.lora_{which}.weight"), tensor));
            }
        }
        let tensors = stored.iter().map(|(name, tensor)| (name.as_str(), tensor));
        save_tensors(&folder.path().join("adapter_model.safetensors"), &self.stream, tensors)?;
        let config = format!(
            r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {alpha}, "use_rslora": {rslora}, "bias": "none",
                "target_modules": ["q_proj"], "use_dora": false, "modules_to_save": null, "rank_pattern": {{}}}}"#
        );
        fs::write(folder.path().join("adapter_config.json"), config)?;
        let rank_f = rank as f32;
        let scale = alpha / if rslora { rank_f.sqrt() } else { rank_f };
        Ok(Made { folder, scale, modules, rank })
    }

    /// The checkpoint with the adapter in its weights.
    fn merged(&self, adapter: &Made, device: &Device, dtype: DType) -> Result<Model, Box<dyn StdError>> {
        let folder = tempfile::tempdir()?;
        for file in ["config.json", "generation_config.json"] {
            fs::copy(self.folder.join(file), folder.path().join(file))?;
        }
        let mut merged = HashMap::new();
        for (module, a, b) in &adapter.modules {
            let name = format!("{module}.weight");
            let base = &self.tensors[&name];
            let (rank, cols) = (adapter.rank, base.shape()[1]);
            let mut values: Vec<f32> = base.to_vec(&self.stream)?;
            for (row, values) in values.chunks_mut(cols).enumerate() {
                for (col, value) in values.iter_mut().enumerate() {
                    let sum: f64 =
                        (0..rank).map(|j| f64::from(b[row * rank + j]) * f64::from(a[j * cols + col])).sum();
                    *value += (f64::from(adapter.scale) * sum) as f32;
                }
            }
            merged.insert(name, Tensor::from_slice(&self.stream, base.shape(), &values)?);
        }
        let tensors = self.tensors.iter();
        let tensors = tensors.map(|(name, tensor)| (name.as_str(), merged.get(name).unwrap_or(tensor)));
        save_tensors(&folder.path().join("model.safetensors"), &self.stream, tensors)?;
        Ok(Model::load(device, folder.path(), dtype, &mut |_| {})?)
    }
}

const PROMPTS: [&[u32]; 4] =
    [&[5, 9, 100, 7, 3, 5, 9, 101, 44, 17], &[1, 2, 3], &[40, 41, 42, 43, 40], &[77, 8]];
const NEW: [u32; 3] = [11, 250, 34];

/// Logits of a sequence's last tokens: behind its prompt, and behind each of [`NEW`].
type Rows = Vec<Vec<f32>>;

/// In a batch: some prompts at once, one in chunks beside decode steps of the others.
fn together(batch: &mut Batch, adapters: &[Option<usize>]) -> Result<Vec<Rows>, Box<dyn StdError>> {
    let vocab = batch.model().config().decoder.vocab_size;
    let mut rows: Vec<Rows> = vec![Vec::new(); adapters.len()];
    let mut step = |batch: &mut Batch, work: &[(usize, SequenceId, usize)]| -> Outcome {
        let asked: Vec<_> = work.iter().map(|&(_, id, tokens)| Work::new(id, tokens)).collect();
        let output = batch.step(&asked)?;
        let (places, logits) = (output.rows().to_vec(), output.logits().to_host()?);
        for (&(which, id, _), place) in std::iter::zip(work, places) {
            if batch.pending(id)? == 0 {
                rows[which].push(logits[place.start * vocab..][..vocab].to_vec());
            }
        }
        Ok(())
    };
    let mut ids = Vec::new();
    for (which, &adapter) in adapters.iter().enumerate() {
        ids.push(batch.add_prompt(Prompt { adapter, ..PROMPTS[which].into() })?);
    }
    let rest = |which: usize| (which, ids[which], PROMPTS[which].len());
    // The first in two chunks, the second of which is beside the others' first new token.
    let others: Vec<_> = (1..ids.len()).map(rest).collect();
    step(batch, &[&[(0, ids[0], 6)], &others[..]].concat())?;
    let mut new = [&NEW[..]; 4];
    for round in 0..NEW.len() {
        let mut work = Vec::new();
        for (which, &id) in ids.iter().enumerate() {
            if round > 0 || which > 0 {
                let (&token, left) = new[which].split_first().ok_or("a token")?;
                new[which] = left;
                batch.push(id, token)?;
            }
            work.push((which, id, batch.pending(id)?));
        }
        step(batch, &work)?;
    }
    batch.push(ids[0], NEW[2])?;
    step(batch, &[(0, ids[0], 1)])?;
    ids.into_iter().try_for_each(|id| batch.remove(id))?;
    Ok(rows)
}

fn alone(model: &Model, prompt: &[u32]) -> Result<Rows, Error> {
    let options = SessionOptions { capacity: 64, logits: Logits::Last, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let mut rows = vec![session.prefill(0, prompt)?.to_host()?];
    for token in NEW {
        rows.push(session.decode(&[token])?.to_host()?);
    }
    Ok(rows)
}

/// The largest relative error of sequences of two adapters, and of none, to the merged models in f32 on the CPU; and
/// how far apart these are at least.
fn errors(
    base: &Base,
    device: &Device,
    (dtype, quantise): (DType, Quantise),
    [few, all]: [&[&str]; 2],
) -> Result<(f64, f64), Box<dyn StdError>> {
    let model = Model::quantised(device, &Checkpoint::open(&base.folder)?, dtype, quantise, &mut |_| {})?;
    let a = base.adapter(1, (4, 6.0, false), few)?;
    let b = base.adapter(2, (11, 3.0, true), all)?;
    let open = [&a, &b].map(|made| Adapter::open(made.folder.path()));
    let [one, two] = open;
    let (one, two) = (one?, two?);
    assert_eq!((one.rank(), one.scale(), two.rank()), (4, 1.5, 11));
    let mut batch = model.batch_with(OPTIONS, &[&one, &two])?;
    assert_eq!(batch.num_adapters(), 2);
    let adapters = [Some(1), None, Some(0), Some(1)];
    let got = together(&mut batch, &adapters)?;
    let cpu = Device::cpu();
    let merged = [base.merged(&a, &cpu, DType::F32)?, base.merged(&b, &cpu, DType::F32)?];
    let plain = Model::load(&cpu, &base.folder, DType::F32, &mut |_| {})?;
    let (mut most, mut least) = (0f64, f64::INFINITY);
    for ((prompt, adapter), got) in std::iter::zip(std::iter::zip(PROMPTS, adapters), &got) {
        let want = alone(adapter.map_or(&plain, |which| &merged[which]), prompt)?;
        assert_eq!(got.len(), want.len());
        for (got, want) in std::iter::zip(got, &want) {
            most = most.max(relative_l2(got, want));
        }
        if adapter.is_some() {
            let plain = alone(&plain, prompt)?;
            let apart = std::iter::zip(&plain, &want).map(|(a, b)| relative_l2(a, b));
            least = least.min(apart.fold(f64::INFINITY, f64::min));
        }
    }
    Ok((most, least))
}

/// In f32 the sums differ in their order alone.
#[test]
fn sequences_have_their_own() -> Outcome {
    for name in ["qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_next", "qwen3_vl", "glm4_moe_lite"] {
        let (error, apart) =
            errors(&Base::open(name)?, &Device::cpu(), (DType::F32, Quantise::Dense), EVERY)?;
        assert!(error <= 1e-4 && apart >= 0.02, "{name}: {error:.2e}, apart {apart:.2e}");
    }
    Ok(())
}

/// Latent attention whose queries are made of the hidden state.
#[test]
fn without_a_latent_row_of_queries() -> Outcome {
    let place = tempfile::tempdir()?;
    let mut base = Base::open("glm4_moe_lite")?;
    let config = fs::read_to_string(base.folder.join("config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&config)?;
    config["q_lora_rank"] = serde_json::Value::Null;
    fs::write(place.path().join("config.json"), config.to_string())?;
    fs::copy(base.folder.join("generation_config.json"), place.path().join("generation_config.json"))?;
    base.tensors.retain(|name, _| !name.contains(".q_a_") && !name.contains(".q_b_"));
    for layer in 0..3 {
        let values = numbers(900 + layer, 160 * 64, 0.05);
        let name = format!("model.layers.{layer}.self_attn.q_proj.weight");
        base.tensors.insert(name, Tensor::from_slice(&base.stream, &[160, 64], &values)?);
    }
    let tensors = base.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_tensors(&place.path().join("model.safetensors"), &base.stream, tensors)?;
    let base = Base::in_folder(place.path().into())?;
    let (error, apart) = errors(&base, &Device::cpu(), (DType::F32, Quantise::Dense), EVERY)?;
    assert!(error <= 1e-4 && apart >= 0.02, "{error:.2e}, apart {apart:.2e}");
    Ok(())
}

/// In bf16 weights and activations are rounded; in f32 the order of the sums differs.
#[test]
fn on_simulated_cards() -> Outcome {
    let int8: Quantise = "int8".parse()?;
    for (name, arch, dtype, quantise, bound) in [
        ("qwen3", Arch::Sm61, DType::F32, Quantise::Dense, 1e-4),
        ("qwen3", Arch::Sm80, DType::BF16, Quantise::Dense, 0.03),
        ("qwen3", Arch::Sm80, DType::BF16, int8, 0.04),
        ("qwen3", Arch::Sm90a, DType::F32, Quantise::Dense, 1e-4),
        ("qwen3_next", Arch::Sm80, DType::F32, Quantise::Dense, 1e-4),
        ("glm4_moe_lite", Arch::Sm90a, DType::F32, Quantise::Dense, 1e-4),
    ] {
        let device = Device::simulated(Arc::new(Card::new(arch)))?;
        let (error, apart) = errors(&Base::open(name)?, &device, (dtype, quantise), EVERY)?;
        assert!(error <= bound && apart >= 0.02, "{name}: {error:.2e}, apart {apart:.2e}");
    }
    Ok(())
}

#[test]
fn on_the_card() -> Outcome {
    let names = ["qwen3", "qwen3_next", "qwen3_vl", "glm4_moe_lite"];
    for device in cards() {
        // Of mixtures in bf16 there is more in `rounded_no_more_than_the_model`.
        let in_bf16 = names[..3].iter().map(|name| (name, DType::BF16, FIRST, 0.03));
        for (name, dtype, modules, bound) in
            names.iter().map(|name| (name, DType::F32, EVERY, 1e-4)).chain(in_bf16)
        {
            let (error, apart) = errors(&Base::open(name)?, &device, (dtype, Quantise::Dense), modules)?;
            assert!(error <= bound && apart >= 0.02, "{name} {dtype}: {error:.2e}, apart {apart:.2e}");
        }
    }
    Ok(())
}

/// In bf16 tokens of these small mixtures get other experts than in f32: the model itself errs by that.
#[test]
fn rounded_no_more_than_the_model() -> Outcome {
    let card = |arch| Device::simulated(Arc::new(Card::new(arch)));
    let mut devices = cards();
    devices.push(Device::cpu());
    let with =
        |name: &'static str, card| devices.iter().cloned().chain([card]).map(move |device| (name, device));
    let of_all = with("qwen3_next", card(Arch::Sm80)?).chain(with("glm4_moe_lite", card(Arch::Sm90a)?));
    for (name, device) in of_all {
        let base = Base::open(name)?;
        let model = |device: &Device, dtype| Model::load(device, &base.folder, dtype, &mut |_| {});
        let (exact, rounded) = (model(&Device::cpu(), DType::F32)?, model(&device, DType::BF16)?);
        let mut own = 0f64;
        for prompt in PROMPTS {
            let (want, got) = (alone(&exact, prompt)?, alone(&rounded, prompt)?);
            own = std::iter::zip(&got, &want).map(|(got, want)| relative_l2(got, want)).fold(own, f64::max);
        }
        let (error, apart) = errors(&base, &device, (DType::BF16, Quantise::Dense), EVERY)?;
        let is_near = error <= 2.0 * own && error <= apart / 4.0;
        assert!(is_near, "{name} {device:?}: {error:.2e}, the model's {own:.2e}, apart {apart:.2e}");
    }
    Ok(())
}

/// A quantised model's weights stay as they are: what is left is the error of its own quantisation.
#[test]
fn beside_quantised_weights() -> Outcome {
    let (error, apart) = errors(&Base::open("qwen3")?, &Device::cpu(), (DType::F32, "int8".parse()?), EVERY)?;
    assert!(error <= 0.02 && apart >= 0.05, "{error:.2e}, apart {apart:.2e}");
    Ok(())
}

/// Where int8 holds the weights exactly nothing is left. Gates and ups have their rows in turn, shared experts' too.
#[test]
fn beside_weights_that_int8_holds() -> Outcome {
    let scheme: Quantise = "int8".parse()?;
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let place = tempfile::tempdir()?;
        let (saved, exact) = (place.path().join("saved"), place.path().join("exact"));
        let mut base = Base::open(name)?;
        let mut go_on = |_| ControlFlow::Continue(());
        Checkpoint::open(&base.folder)?.save_quantised(&Scheme::INT8, &saved, &mut go_on)?;
        let saved = Checkpoint::open(&saved)?;
        let mut rounded = 0;
        for (name, tensor) in &mut base.tensors {
            let Some(matrix) = saved.quantised(name)? else { continue };
            let mut values = vec![0.0; matrix.n() * matrix.k()];
            let rows = values.chunks_mut(matrix.k()).enumerate();
            rows.for_each(|(row, values)| matrix.dequantise_row(row, values));
            *tensor = Tensor::from_slice(&base.stream, &[matrix.n(), matrix.k()], &values)?;
            rounded += 1;
        }
        assert!(rounded > 0);
        fs::create_dir(&exact)?;
        for file in ["config.json", "generation_config.json"] {
            fs::copy(base.folder.join(file), exact.join(file))?;
        }
        let tensors = base.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        save_tensors(&exact.join("model.safetensors"), &base.stream, tensors)?;
        let (error, apart) = errors(&Base::in_folder(exact)?, &Device::cpu(), (DType::F32, scheme), EVERY)?;
        assert!(error <= 1e-4 && apart >= 0.02, "{name}: {error:.2e}, apart {apart:.2e}");
    }
    Ok(())
}

/// Neither adapters nor images nor drafts take memory in a step: all of it is taken when a batch is made.
#[test]
fn steps_allocate_nothing() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let device = Device::cpu();
    let base = Base::open("qwen3_vl")?;
    let made = base.adapter(7, (8, 8.0, false), &ATTENTION)?;
    let adapter = Adapter::open(made.folder.path())?;
    let model = Model::load(&device, &case.folder, DType::F32, &mut |_| {})?;
    let options = BatchOptions {
        capacity: 128,
        pages: 32,
        max_patches: grids.iter().map(PatchGrid::patches).sum(),
        ..OPTIONS
    };
    let mut scheduler = Scheduler::new(model.batch_with(options, &[&adapter])?);
    let small = BatchOptions { max_patches: 0, ..options };
    let mut draft = ModelDraft::new(model.batch(small)?, &model, SamplingFeatures::GREEDY, 3)?;
    let visuals = visuals((&grids, patches));
    let visuals = visuals.iter().map(|own| PromptVisual { grid: own.grid, patches: own.patches.into() });
    let (visuals, prompt) = (visuals.collect::<Vec<_>>(), case.prompts()[0].clone());
    scheduler.submit_prompt(Prompt { tokens: prompt, adapter: Some(0), visuals })?;
    scheduler.submit_prompt(Prompt { adapter: Some(0), ..PROMPTS[0].into() })?;
    scheduler.submit(PROMPTS[2])?;
    let allocations = || device.pool().stats().num_allocations;
    let (before, mut drafted) = (allocations(), 0);
    for _ in 0..12 {
        let step = scheduler.step()?.ok_or("work")?;
        let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
        let requests = step.requests;
        for (id, rows) in &requests {
            let best = |row: &[f32]| {
                (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token") as u32
            };
            let rows = logits[rows.start * vocab..rows.end * vocab].chunks(vocab);
            scheduler.accept(*id, &rows.map(best).collect::<Vec<_>>())?;
        }
        let asked: Vec<_> = requests.iter().map(|&(id, _)| DraftRequest::greedy(id)).collect();
        drafted += draft.draft(&mut scheduler, &asked)?;
    }
    assert!(drafted > 0);
    assert_eq!(allocations(), before);
    Ok(())
}

/// Neither do those of every part that adapters may add to.
#[test]
fn steps_of_all_parts_allocate_nothing() -> Outcome {
    for name in ["qwen3_next", "glm4_moe_lite"] {
        let (device, base) = (Device::cpu(), Base::open(name)?);
        let made = base.adapter(7, (8, 8.0, false), &ALL)?;
        let adapter = Adapter::open(made.folder.path())?;
        let model = Model::load(&device, &base.folder, DType::F32, &mut |_| {})?;
        let mut batch = model.batch_with(OPTIONS, &[&adapter])?;
        let allocations = || device.pool().stats().num_allocations;
        let before = allocations();
        together(&mut batch, &[Some(0), None, Some(0), None])?;
        assert_eq!(allocations(), before, "{name}");
    }
    Ok(())
}

/// The ranks of a group have no adapters.
#[test]
fn ranks_take_none() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(3, (8, 8.0, false), &ATTENTION)?;
    let checkpoint = Checkpoint::open(&golden::folder("qwen3"))?;
    let messages = Group::new(&[Device::cpu(), Device::cpu()])?.run(|rank| -> Result<String, String> {
        let mut go_on = |_| ControlFlow::Continue(());
        let model = Model::of_rank(rank, &checkpoint, DType::F32, Quantise::AsStored, &mut go_on);
        let adapter = Adapter::open(made.folder.path()).map_err(|error| error.to_string())?;
        let batch = model.map_err(|error| error.to_string())?.batch_with(OPTIONS, &[&adapter]);
        Ok(batch.err().map(|error| error.to_string()).unwrap_or_default())
    });
    for message in messages {
        let want = "Batch: adapters: expected none of a model that ranks have together, got 1";
        assert_eq!(message?, want);
    }
    Ok(())
}

/// Nothing is added to sequences without an adapter, and nothing else runs where a step has no other.
#[test]
fn others_are_as_before() -> Outcome {
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let base = Base::open(name)?;
        let made = base.adapter(3, (8, 8.0, false), &ALL)?;
        let model = Model::load(&Device::cpu(), &base.folder, DType::F32, &mut |_| {})?;
        let adapter = Adapter::open(made.folder.path())?;
        let mut batch = model.batch_with(OPTIONS, &[&adapter])?;
        let none = together(&mut batch, &[None; 4])?;
        assert_eq!(none, together(&mut model.batch(OPTIONS)?, &[None; 4])?, "{name}: the same bits");
    }
    Ok(())
}

/// Under `Invariance::Batch` sequences with adapters and without have the bits that they have alone in such a batch.
#[test]
fn the_same_bits_beside_others() -> Outcome {
    let card = |arch| Device::simulated(Arc::new(Card::new(arch)));
    for (name, device, dtype) in [
        ("qwen3", Device::cpu(), DType::F32),
        ("qwen3_next", Device::cpu(), DType::F32),
        ("glm4_moe_lite", Device::cpu(), DType::F32),
        ("qwen3", card(Arch::Sm80)?, DType::BF16),
        ("qwen3", card(Arch::Sm90a)?, DType::BF16),
    ] {
        let base = Base::open(name)?;
        let made = [base.adapter(1, (4, 6.0, false), &FEW)?, base.adapter(2, (11, 3.0, true), &ALL)?];
        let [one, two] = made.each_ref().map(|made| Adapter::open(made.folder.path()));
        let (one, two) = (one?, two?);
        let device = device.with_invariance(Invariance::Batch);
        let model = Model::load(&device, &base.folder, dtype, &mut |_| {})?;
        let mut batch = model.batch_with(BatchOptions { prefix_cache: false, ..OPTIONS }, &[&one, &two])?;
        let vocab = model.config().decoder.vocab_size;
        let adapters = [Some(1), None, Some(0), Some(1)];
        let got = together(&mut batch, &adapters)?;
        let all: Vec<_> = std::iter::zip(std::iter::zip(PROMPTS, adapters), &got).collect();
        // In the simulator, which takes its time, one with an adapter and one without.
        let alone = if device.limits().is_none() { &all[..] } else { &all[1..3] };
        for &((prompt, adapter), got) in alone {
            let id = batch.add_prompt(Prompt { adapter, ..prompt.into() })?;
            for (place, row) in got.iter().enumerate() {
                let logits = batch.step(&[Work::new(id, batch.pending(id)?)])?.logits().to_host()?;
                assert!(logits[..vocab] == row[..], "{name}, {device:?}: {adapter:?}, row {place}");
                if place < NEW.len() {
                    batch.push(id, NEW[place])?;
                }
            }
            batch.remove(id)?;
        }
    }
    Ok(())
}

/// Pages are found again by sequences of the same adapter alone.
#[test]
fn prefixes_are_of_one_adapter() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(3, (8, 8.0, false), &ATTENTION)?;
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let adapter = Adapter::open(made.folder.path())?;
    let mut batch = model.batch_with(OPTIONS, &[&adapter, &adapter])?;
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 300).collect();
    let prompt = |adapter| Prompt { adapter, ..tokens[..].into() };
    let mut computed = Vec::new();
    for adapter in [Some(0), Some(1), None, Some(0), Some(1), None] {
        let id = batch.add_prompt(prompt(adapter))?;
        computed.push(batch.pending(id)?);
        batch.step(&[Work::new(id, batch.pending(id)?)])?;
        // One that goes on from another is of its adapter.
        let fork = batch.fork(id)?;
        batch.preempt(fork)?;
        assert_eq!(batch.reuse(fork)?, 32);
        batch.remove(fork)?;
        batch.remove(id)?;
    }
    assert_eq!(computed, [40, 40, 40, 8, 8, 8]);
    Ok(())
}
