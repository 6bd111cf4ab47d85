//! LoRA adapters: sequences of different ones in a batch are those of merged models.

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
};

const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// Numbers like normal ones, the same for the same seed.
fn numbers(seed: u32, len: usize, scale: f32) -> Vec<f32> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..3).map(|_| next()).sum::<f32>() * 2.0 * scale).collect()
}

/// A golden checkpoint's tensors.
struct Base {
    name: &'static str,
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
    fn open(name: &'static str) -> Result<Self, Error> {
        let stream = Device::cpu().stream()?;
        let file = golden::folder(name).join("model.safetensors");
        let tensors = load_tensors(&file, &stream)?.into_iter().collect();
        Ok(Base { name, stream, tensors })
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
            if !ends.iter().any(|end| module.ends_with(end)) || module.contains("visual") {
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
        let source = golden::folder(self.name);
        for file in ["config.json", "generation_config.json"] {
            fs::copy(source.join(file), folder.path().join(file))?;
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
    name: &'static str,
    device: &Device,
    dtype: DType,
    quantise: Quantise,
) -> Result<(f64, f64), Box<dyn StdError>> {
    let base = Base::open(name)?;
    let model =
        Model::quantised(device, &Checkpoint::open(&golden::folder(name))?, dtype, quantise, &mut |_| {})?;
    let has_mlp = matches!(model.config().decoder.layers[0].feed_forward, FeedForwardConfig::Mlp(_));
    // Where there are experts, attention alone.
    let all = if has_mlp { [&ATTENTION[..], &MLP].concat() } else { ATTENTION.to_vec() };
    let a = base.adapter(1, (4, 6.0, false), &["q_proj", "v_proj"])?;
    let b = base.adapter(2, (11, 3.0, true), &all)?;
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
    let plain = Model::load(&cpu, &golden::folder(name), DType::F32, &mut |_| {})?;
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
    for name in ["qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_next", "qwen3_vl"] {
        let (error, apart) = errors(name, &Device::cpu(), DType::F32, Quantise::Dense)?;
        assert!(error <= 1e-4 && apart >= 0.02, "{name}: {error:.2e}, apart {apart:.2e}");
    }
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
    ] {
        let device = Device::simulated(Arc::new(Card::new(arch)))?;
        let (error, apart) = errors(name, &device, dtype, quantise)?;
        assert!(error <= bound && apart >= 0.02, "{name}: {error:.2e}, apart {apart:.2e}");
    }
    Ok(())
}

#[test]
fn on_the_card() -> Outcome {
    for device in cards() {
        for (dtype, bound) in [(DType::F32, 1e-4), (DType::BF16, 0.03)] {
            for name in ["qwen3", "qwen3_next", "qwen3_vl"] {
                let (error, apart) = errors(name, &device, dtype, Quantise::Dense)?;
                assert!(error <= bound && apart >= 0.02, "{name} {dtype}: {error:.2e}, apart {apart:.2e}");
            }
        }
    }
    Ok(())
}

/// A quantised model's weights stay as they are: what is left is the error of its own quantisation.
#[test]
fn beside_quantised_weights() -> Outcome {
    let (error, apart) = errors("qwen3", &Device::cpu(), DType::F32, "int8".parse()?)?;
    assert!(error <= 0.02 && apart >= 0.05, "{error:.2e}, apart {apart:.2e}");
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
    let base = Base::open("qwen3")?;
    let made = base.adapter(3, (8, 8.0, false), &ATTENTION)?;
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let adapter = Adapter::open(made.folder.path())?;
    let mut batch = model.batch_with(OPTIONS, &[&adapter])?;
    let none = together(&mut batch, &[None; 4])?;
    assert_eq!(none, together(&mut model.batch(OPTIONS)?, &[None; 4])?, "the same bits");
    Ok(())
}

/// Under `Invariance::Batch` sequences with adapters and without have the bits that they have alone in such a batch.
#[test]
fn the_same_bits_beside_others() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = [
        base.adapter(1, (4, 6.0, false), &["q_proj", "v_proj"])?,
        base.adapter(2, (11, 3.0, true), &[&ATTENTION[..], &MLP].concat())?,
    ];
    let [one, two] = made.each_ref().map(|made| Adapter::open(made.folder.path()));
    let (one, two) = (one?, two?);
    let card = |arch| Device::simulated(Arc::new(Card::new(arch)));
    for (device, dtype) in
        [(Device::cpu(), DType::F32), (card(Arch::Sm80)?, DType::BF16), (card(Arch::Sm90a)?, DType::BF16)]
    {
        let device = device.with_invariance(Invariance::Batch);
        let model = Model::load(&device, &golden::folder("qwen3"), dtype, &mut |_| {})?;
        let mut batch = model.batch_with(BatchOptions { prefix_cache: false, ..OPTIONS }, &[&one, &two])?;
        let vocab = model.config().decoder.vocab_size;
        let adapters = [Some(1), None, Some(0), Some(1)];
        let got = together(&mut batch, &adapters)?;
        for ((prompt, adapter), got) in std::iter::zip(std::iter::zip(PROMPTS, adapters), &got) {
            let id = batch.add_prompt(Prompt { adapter, ..prompt.into() })?;
            for (place, row) in got.iter().enumerate() {
                let logits = batch.step(&[Work::new(id, batch.pending(id)?)])?.logits().to_host()?;
                assert!(logits[..vocab] == row[..], "{device:?}: {adapter:?}, row {place}");
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

/// An adapter that is added to the weights as they are loaded, also those of delta nets and latent attention.
#[test]
fn merged_while_loading() -> Outcome {
    for (name, ends) in [
        ("qwen3", &[&ATTENTION[..], &MLP].concat()[..]),
        ("qwen3_next", &["q_proj", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"]),
        ("glm4_moe_lite", &["q_a_proj", "kv_b_proj", "shared_experts.down_proj"]),
    ] {
        let base = Base::open(name)?;
        let made = base.adapter(5, (4, 6.0, false), ends)?;
        let open = || -> Result<Checkpoint, Box<dyn StdError>> {
            let checkpoint = Checkpoint::open(&golden::folder(name))?;
            Ok(checkpoint.with_adapter(Adapter::open(made.folder.path())?)?)
        };
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
            let model = Model::from_checkpoint(&Device::cpu(), &open()?, dtype, &mut |_| {})?;
            let (got, want) =
                (alone(&model, PROMPTS[0])?, alone(&base.merged(&made, &Device::cpu(), dtype)?, PROMPTS[0])?);
            let plain =
                alone(&Model::load(&Device::cpu(), &golden::folder(name), dtype, &mut |_| {})?, PROMPTS[0])?;
            for ((got, want), plain) in got.iter().zip(&want).zip(&plain) {
                let (error, apart) = (relative_l2(got, want), relative_l2(plain, want));
                assert!(error <= bound && apart >= 0.01, "{name} {dtype}: {error:.2e}, apart {apart:.2e}");
            }
        }
    }
    Ok(())
}

/// Ranks read their parts of the sums: rows and columns, as of the weights alone.
#[test]
fn merged_at_ranks() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(5, (4, 6.0, false), &[&ATTENTION[..], &MLP].concat())?;
    let open = || Checkpoint::open(&golden::folder("qwen3"));
    let checkpoint = open()?.with_adapter(Adapter::open(made.folder.path())?)?;
    let want = alone(&base.merged(&made, &Device::cpu(), DType::F32)?, PROMPTS[0])?;
    let got = Group::new(&vec![Device::cpu(); 3])?.run(|rank| {
        let mut go_on = |_| ControlFlow::Continue(());
        let model = Model::of_rank(rank, &checkpoint, DType::F32, Quantise::AsStored, &mut go_on);
        model.and_then(|model| alone(&model, PROMPTS[0])).map_err(|error| error.to_string())
    });
    for of_rank in got {
        for (got, want) in std::iter::zip(of_rank?, &want) {
            let error = relative_l2(&got, want);
            assert!(error <= 1e-5, "{error:.2e}");
        }
    }
    Ok(())
}

/// What cannot be merged is said by name.
#[test]
fn what_cannot_be_merged() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(5, (4, 6.0, false), &["layers.0.self_attn.q_proj"])?;
    let adapter = || Adapter::open(made.folder.path());
    let other = Checkpoint::open(&golden::folder("glm4_moe_lite"))?;
    let error = other.with_adapter(adapter()?).unwrap_err().to_string();
    assert!(error.contains("self_attn.q_proj.lora_A.weight: expected lora_A or lora_B"), "{error}");
    let other = Checkpoint::open(&golden::folder("qwen3_sliding"))?.with_adapter(adapter()?)?;
    let error =
        Model::from_checkpoint(&Device::cpu(), &other, DType::F32, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("q_proj.weight: expected an adapter's matrices that fit"), "{error}");
    let quantised = testkit::gpu::workspace_root().join("tests/golden-quant");
    let mut tried = 0;
    for folder in fs::read_dir(quantised)? {
        let Ok(checkpoint) = Checkpoint::open(&folder?.path()) else { continue };
        let Ok(checkpoint) = checkpoint.with_adapter(adapter()?) else { continue };
        let error = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {});
        let error = error.map(|_| ()).unwrap_err().to_string();
        tried += usize::from(error.contains("expected a weight in floats, to add an adapter to"));
    }
    assert!(tried > 0);
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
