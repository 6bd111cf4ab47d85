//! Whole models against what transformers computed, and against bad files.

mod adapters;
mod batch;
mod cache_type;
mod fallback;
mod files;
mod golden;
mod group;
mod images;
mod published;
mod quantising;
mod sampling;
mod saving;
mod session;
mod shared_prefix;
mod variants;

use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use testkit::compare::relative_l2;
use testkit::golden::Array;
use testkit::gpu::workspace_root;
use testkit::simulator::Card;
use warpforge::models::{
    BatchError, BatchOptions, CacheType, FeedForwardConfig, LayerConfig, Logits, MixerConfig, Model,
    ModelConfig, Observed, PatchGrid, Scheduler, Session, SessionOptions, SessionSampler, SharedPrefix,
    Visual,
};
use warpforge::ops::sampling::SamplingParams;
use warpforge::{Arch, DType, Device, Invariance, Place};

type Outcome = Result<(), Box<dyn StdError>>;

/// The card once for every floor that it runs; says so if there is none.
fn cards() -> Vec<Device> {
    match Device::cuda(0) {
        Ok(card) => {
            let held = |arch: &Arch| warpforge::IMAGES.iter().any(|image| image.arch == *arch);
            Arch::ALL.into_iter().filter(held).filter_map(|arch| card.with_arch(arch).ok()).collect()
        }
        Err(error) => {
            testkit::gpu::skip(&format!("models were not run on a card: {error}"));
            Vec::new()
        }
    }
}

/// The golden checkpoints of the models that are built.
const GOLDEN: [&str; 6] = ["qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "qwen3_vl"];

/// Others of the same parts: heads of 128, for which all layers may be one launch, and three more architectures.
const RELATED: [&str; 4] = ["qwen3_heads128", "llama", "mistral", "qwen2"];

struct Case {
    name: &'static str,
    folder: PathBuf,
    arrays: std::collections::HashMap<String, Array>,
}

impl Case {
    fn load(name: &'static str) -> Result<Self, Box<dyn StdError>> {
        let folder = testkit::golden::folder(name);
        let arrays = testkit::golden::load(&folder.join("case.safetensors"))?;
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

    /// The images of the prompt, if it has any: how many patches each has, and the patches of all.
    fn images(&self) -> (Vec<PatchGrid>, &[f32]) {
        let Some(grids) = self.arrays.get("image_grid_thw") else { return (Vec::new(), &[]) };
        let sizes: Vec<usize> = grids.i32().expect("sizes").iter().map(|&size| size as usize).collect();
        let grid = |size: &[usize]| PatchGrid { frames: size[0], rows: size[1], cols: size[2] };
        (sizes.chunks(3).map(grid).collect(), self.arrays["pixel_values"].f32().expect("pixel_values"))
    }

    /// What transformers continued the first prompt with, if it did.
    fn greedy(&self) -> Option<Vec<u32>> {
        let ids = self.arrays.get("greedy")?.i32().expect("greedy");
        Some(ids.iter().map(|&id| id as u32).collect())
    }
}

/// Images cut out of the patches of all.
fn visuals<'a>((grids, mut patches): (&[PatchGrid], &'a [f32])) -> Vec<Visual<'a>> {
    let len = patches.len() / grids.iter().map(PatchGrid::patches).sum::<usize>().max(1);
    let mut cut = |&grid: &PatchGrid| {
        let (own, rest) = patches.split_at(grid.patches() * len);
        patches = rest;
        Visual { grid, patches: own }
    };
    grids.iter().map(&mut cut).collect()
}

/// Sessions of the golden cases: f32 or bf16, with room for their images.
fn options(case: &Case, chunk: usize) -> SessionOptions {
    let max_patches = case.images().0.iter().map(PatchGrid::patches).sum();
    SessionOptions { capacity: 96, chunk, logits: Logits::All, max_patches, ..SessionOptions::default() }
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
    greedy_visual(session, prompt, &[], num_tokens)
}

fn greedy_visual(
    session: &mut Session,
    prompt: &[u32],
    visuals: &[Visual<'_>],
    num_tokens: usize,
) -> Result<Vec<u32>, warpforge::Error> {
    session.truncate(0, 0)?;
    session.prefill_visual(0, prompt, visuals)?;
    go_on(session, num_tokens)
}

/// The tokens after those that a session has read.
fn go_on(session: &mut Session, num_tokens: usize) -> Result<Vec<u32>, warpforge::Error> {
    let mut sampler = SessionSampler::new(session, SamplingParams::default())?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        ids.push(sampler.sample(session)?[0]);
        session.decode(&ids[ids.len() - 1..])?;
    }
    Ok(ids)
}

/// Tokens after each prompt, all prompts at once, in pages.
fn together(model: Model, prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>, BatchError> {
    let options = BatchOptions { max_sequences: 4, capacity: 96, ..BatchOptions::default() };
    let mut scheduler = Scheduler::new(model.batch(options)?);
    let requests: Vec<_> = prompts.iter().map(|prompt| scheduler.submit(prompt)).collect::<Result<_, _>>()?;
    let mut answers: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    while let Some(step) = scheduler.step()? {
        let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
        for (request, rows) in step.requests {
            let row = &logits[rows.start * vocab..][..vocab];
            let best = (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token") as u32;
            let answer = &mut answers[requests.iter().position(|&id| id == request).expect("one of them")];
            answer.push(best);
            if answer.len() == 6 { scheduler.finish(request)? } else { scheduler.push(request, best)? }
        }
    }
    Ok(answers)
}
