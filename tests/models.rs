//! Whole models against what transformers computed, and against bad files.

use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use testkit::compare::relative_l2;
use testkit::golden::{self, Array};
use testkit::gpu::workspace_root;
use testkit::simulator::Card;
use warpforge::models::{
    FeedForwardConfig, LayerConfig, Logits, MixerConfig, Model, ModelConfig, Observed, PatchGrid, Session,
    SessionOptions, SessionSampler, Visual,
};
use warpforge::ops::sampling::Sampling;
use warpforge::{Arch, DType, Device, Place};

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
    let mut sampler = SessionSampler::new(session, Sampling::Greedy)?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        ids.push(sampler.sample(session)?[0]);
        session.decode(&ids[ids.len() - 1..])?;
    }
    Ok(ids)
}

/// Logits, hidden states layer by layer and greedy tokens in f32, with the prompt in pieces of `chunk` tokens; on a simulated card
/// of the first sequence alone, and some of the tokens.
fn matches_transformers(device: &Device, case: &Case, chunk: usize) -> Outcome {
    let (sequences, tokens) =
        if matches!(device.place(), Place::Simulated(_)) { (1, 6) } else { (usize::MAX, usize::MAX) };
    let mut session = session(device, &case.folder, DType::F32, options(case, chunk))?;
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
            assert_eq!(go_on(&mut session, want.len())?, want, "{}, {device:?}: greedy tokens", case.name);
        }
    }
    Ok(())
}

#[test]
fn golden_f32_on_the_cpu() -> Outcome {
    for name in GOLDEN {
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
    for name in GOLDEN {
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

/// The kernels of a whole model one after the other, with every access watched: a test for each model, so that they run side by
/// side.
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
    }
}

#[test]
fn golden_f32_on_the_card() -> Outcome {
    for device in cards() {
        for name in GOLDEN {
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
        for name in GOLDEN {
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
    let demo: [&[u32]; 3] = [&[0, 439, 1153, 994, 265], &[0, 457, 519, 352, 314, 307, 438], &[0]];
    let small: [&[u32]; 3] = [&[3, 370, 21, 99, 265], &[8, 57, 219, 352, 314, 307, 38], &[5]];
    let models = [
        (workspace_root().join("assets/demo-model"), demo),
        // A cache of latent rows, and experts that the sequences share.
        (golden::folder("glm4_moe_lite"), small),
    ];
    let mut devices = cards();
    devices.push(Device::cpu());
    for (device, (folder, prompts)) in
        devices.iter().flat_map(|device| models.iter().map(move |model| (device, model)))
    {
        let model = Model::load(device, folder, DType::F32, &mut |_| {})?;
        let options = SessionOptions { capacity: 64, ..SessionOptions::default() };
        let mut alone = model.session(options)?;
        let want: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| greedy(&mut alone, prompt, 20)).collect::<Result<_, _>>()?;
        let mut together = model.session(SessionOptions { batch: prompts.len(), ..options })?;
        let mut sampler = SessionSampler::new(&together, Sampling::Greedy)?;
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

/// The tokens behind an image one after another, and a continuation, against the whole prompt each time.
#[test]
fn decode_after_an_image() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let images = visuals((&grids, patches));
    let mut prompt = case.prompts()[0].clone();
    let want = case.sequence("logits", 0);
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let mut session = session(&device, &case.folder, DType::F32, options(&case, 64))?;
        let stream = session.stream().clone();
        let config = session.model().config();
        let (vocab, image_token) = (config.decoder.vocab_size, config.vision.as_ref().unwrap().image_token);
        let first = prompt.iter().rposition(|&id| id == image_token).unwrap() + 1;
        assert!(first < prompt.len());
        session.prefill_visual(0, &prompt[..first], &images)?;
        for index in first..prompt.len() {
            let logits = session.decode(&prompt[index..index + 1])?.to_vec::<f32>(&stream)?;
            let error = relative_l2(&logits, &want[index * vocab..(index + 1) * vocab]);
            assert!(error <= 1e-4, "{device:?}: logits of token {index}: {error:.2e}");
        }
        let continuation = greedy_visual(&mut session, &prompt, &images, 12)?;
        prompt.truncate(case.prompts()[0].len());
        for &id in &continuation {
            assert_eq!(greedy_visual(&mut session, &prompt, &images, 1)?, [id], "{device:?}");
            prompt.push(id);
        }
        prompt.truncate(case.prompts()[0].len());
    }
    Ok(())
}

/// A decode step of a sequence with an image among others of text: each goes on as it does alone.
#[test]
fn an_image_in_one_sequence_of_a_batch() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let (images, prompt, text) = (visuals((&grids, patches)), &case.prompts()[0], [5, 6, 7]);
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let model = Model::load(&device, &case.folder, DType::F32, &mut |_| {})?;
        let after = |prompts: &[(&[u32], &[Visual<'_>])]| -> Result<Vec<f32>, warpforge::Error> {
            let mut session = model.session(SessionOptions { batch: prompts.len(), ..options(&case, 64) })?;
            for (sequence, (ids, images)) in prompts.iter().enumerate() {
                session.prefill_visual(sequence, ids, images)?;
            }
            let stream = session.stream().clone();
            session.decode(&vec![9; prompts.len()])?.to_vec(&stream)
        };
        let (text, image) = ((&text[..], &[][..]), (&prompt[..], &images[..]));
        let want = [after(&[text])?, after(&[image])?, after(&[text])?].concat();
        let error = relative_l2(&after(&[text, image, text])?, &want);
        assert!(error <= 1e-5, "{device:?}: {error:.2e}");
    }
    Ok(())
}

/// What a session remembers of images: later prompts, copies and cuts of a sequence go on as one long prompt would.
#[test]
fn prompts_go_on_after_images() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let images = visuals((&grids, patches));
    let image = &case.prompts()[0];
    let prompt = [&image[..], &[5, 6, 7], &image[..], &[9]].concat();
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let options = SessionOptions { batch: 2, capacity: 120, max_patches: 192, ..options(&case, 32) };
        let mut session = session(&device, &case.folder, DType::F32, options)?;
        let stream = session.stream().clone();
        let both = [images[0], images[0]];
        let whole = session.prefill_visual(0, &prompt, &both)?.to_vec::<f32>(&stream)?;

        session.prefill_visual(1, image, &images)?;
        session.prefill(1, &[1, 2])?;
        session.truncate(1, image.len())?;
        // Right behind the image too.
        let image_token = session.model().config().vision.as_ref().unwrap().image_token;
        let behind = image.iter().rposition(|&id| id == image_token).unwrap() + 1;
        session.truncate(1, behind)?;
        session.prefill(1, &image[behind..])?;
        session.prefill(1, &[5, 6, 7])?;
        session.fork(1, 0)?;
        session.prefill_visual(0, image, &images)?;
        let parts = session.prefill(0, &[9])?.to_vec::<f32>(&stream)?;

        // A video of the same image twice, its frames where the images were.
        let config = session.model().config().vision.clone().unwrap();
        let frames = [patches, patches].concat();
        let video = Visual { grid: PatchGrid { frames: 2, ..grids[0] }, patches: &frames };
        let frame = |&id: &u32| if id == config.image_token { config.video_token } else { id };
        session.truncate(0, 0)?;
        let prompt: Vec<u32> = prompt.iter().map(frame).collect();
        let of_video = session.prefill_visual(0, &prompt, &[video])?.to_vec::<f32>(&stream)?;
        assert_eq!(of_video, whole, "{device:?}");
        let error = relative_l2(&parts, &whole);
        assert!(error <= 1e-5, "{device:?}: {error:.2e}");
    }
    Ok(())
}

/// Mistakes with images: each is an error that names what was expected, and leaves the session as it was.
#[test]
fn bad_images() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let image = visuals((&grids, patches))[0];
    let ids = &case.prompts()[0];
    let device = Device::cpu();
    let mut blind =
        session(&device, &case.folder, DType::F32, SessionOptions { max_patches: 0, ..options(&case, 64) })?;
    assert_eq!(
        blind.prefill_visual(0, ids, &[image]).unwrap_err().to_string(),
        "Session: visuals: expected none in a session without max_patches, got 1"
    );
    let mut session = session(&device, &case.folder, DType::F32, options(&case, 64))?;
    let mut message = |ids: &[u32], visuals: &[Visual<'_>]| {
        session.prefill_visual(0, ids, visuals).unwrap_err().to_string()
    };
    assert_eq!(
        message(ids, &[image, image]),
        "Session: visuals: expected at most 96 patches altogether, got 192"
    );
    let odd = Visual { grid: PatchGrid { frames: 1, rows: 3, cols: 32 }, ..image };
    assert_eq!(
        message(ids, &[odd]),
        "Session: visuals: expected rows and columns in multiples of 2, 1 to 96 patches, got 1 x 3 x 32"
    );
    let short = Visual { patches: &image.patches[1..], ..image };
    assert_eq!(
        message(ids, &[short]),
        "Session: visuals: expected 1536 numbers for each of 96 patches, got 147455"
    );
    assert_eq!(
        message(&[1, 2, 3], &[image]),
        "Session: ids: expected placeholders for every image and frame, got 1 without"
    );
    let without = "Session: visuals: expected an image or frame for each run of placeholders, got none, and a placeholder at";
    let placeholder = ids.iter().position(|&id| id == 379 || id == 381).ok_or("a placeholder")?;
    assert_eq!(message(ids, &[]), format!("{without} token {placeholder}"));
    let message = blind.prefill(0, ids).unwrap_err().to_string();
    assert_eq!(message, format!("{without} token {placeholder}"));
    assert_eq!(session.len(0), 0);
    let text = Model::load(&device, &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    assert_eq!(
        text.session(SessionOptions { max_patches: 4, ..SessionOptions::default() }).unwrap_err().to_string(),
        "Session: max_patches: expected 0 for a model without a vision tower, got 4"
    );
    Ok(())
}

/// A copy of a sequence writes what the sequence itself writes, and neither disturbs the other.
#[test]
fn a_fork_goes_on_as_its_sequence() -> Outcome {
    let mut devices = cards();
    devices.push(Device::cpu());
    for (device, name) in devices.iter().flat_map(|device| GOLDEN.map(|name| (device, name))) {
        let options = SessionOptions { batch: 3, capacity: 24, ..SessionOptions::default() };
        let mut session = session(device, &golden::folder(name), DType::F32, options)?;
        let stream = session.stream().clone();
        session.prefill(2, &[5, 6, 7, 8])?;
        session.prefill(0, &[9])?;
        session.fork(2, 1)?;
        session.fork(1, 0)?;
        assert_eq!((session.len(0), session.len(1), session.len(2)), (4, 4, 4));
        let vocab = session.model().config().decoder.vocab_size;
        for ids in [[1, 1, 1], [2, 3, 2], [4, 4, 4]] {
            let logits = session.decode(&ids)?.to_vec::<f32>(&stream)?;
            assert_eq!(logits[..vocab], logits[2 * vocab..], "{name} on {device:?}");
            let is_same = logits[..vocab] == logits[vocab..2 * vocab];
            assert_eq!(is_same, ids == [1, 1, 1], "{name} on {device:?}");
        }
        assert_eq!(
            session.fork(0, 3).unwrap_err().to_string(),
            "Session: to: expected a sequence below 3, got 3"
        );
    }
    Ok(())
}

/// A delta net forgets all or nothing: a sequence begins anew, but does not go back a few tokens.
#[test]
fn a_recurrent_state_is_not_cropped() -> Outcome {
    let mut devices = cards();
    devices.push(Device::cpu());
    for device in devices {
        let options = SessionOptions { batch: 2, capacity: 24, ..SessionOptions::default() };
        let mut session = session(&device, &golden::folder("qwen3_next"), DType::F32, options)?;
        let stream = session.stream().clone();
        session.prefill(1, &[7, 7, 7])?;
        let first = session.prefill(0, &[5, 6, 7])?.to_vec::<f32>(&stream)?;
        assert_eq!(
            session.truncate(0, 2).unwrap_err().to_string(),
            "Session: len: expected 0 or 3: a recurrent state cannot be cropped, got 2"
        );
        session.truncate(0, 3)?;
        assert_eq!(session.len(0), 3);
        session.truncate(0, 0)?;
        let again = session.prefill(0, &[5, 6, 7])?.to_vec::<f32>(&stream)?;
        assert_eq!(first, again, "{device:?}");
        assert_eq!((session.len(0), session.len(1)), (3, 3));
    }
    Ok(())
}

/// An error of a callback.
fn stop() -> Result<(), warpforge::Error> {
    let (expected, got) = ("nothing".into(), "a reason to stop".into());
    Err(warpforge::Error::Invalid { op: "test", argument: "callback", expected, got })
}

/// A prompt that a callback ends half-way is not in the sequence, of any model: written again it gives what it gives at once, or,
/// where a state cannot go back, is refused until the sequence is begun anew.
#[test]
fn failed_prompts_leave_nothing() -> Outcome {
    let mut devices = cards();
    devices.push(Device::cpu());
    for (device, name) in devices.iter().flat_map(|device| GOLDEN.map(|name| (device, name))) {
        let case = Case::load(name)?;
        let mut session =
            session(device, &case.folder, DType::F32, SessionOptions { batch: 2, ..options(&case, 3) })?;
        let stream = session.stream().clone();
        let (grids, patches) = case.images();
        let images = visuals((&grids, patches));
        let rest = case.prompts()[0].clone();
        let prefill = |session: &mut Session| -> Result<Vec<f32>, warpforge::Error> {
            session.prefill_visual(0, &rest, &images)?.to_vec::<f32>(&stream)
        };
        session.prefill(0, &[5, 6])?;
        session.fork(0, 1)?;
        let want = prefill(&mut session)?;
        let is_recurrent = name == "qwen3_next";
        let torn = "Session: sequence: expected a sequence that no failed call left half-way: truncate it to 0 first, got 0";
        // Behind the first layer; and behind the second chunk, with one in the cache.
        for layer in [Some(1), None] {
            session.fork(1, 0)?;
            let error = session.prefill_visual_with(
                0,
                &rest,
                &images,
                &mut |which, _| match layer {
                    Some(layer) if which == Observed::LayerInput(layer) => stop(),
                    _ => Ok(()),
                },
                &mut |first, _| if layer.is_none() && first == 3 { stop() } else { Ok(()) },
            );
            assert!(error.unwrap_err().to_string().contains("a reason to stop"), "{name} on {device:?}");
            assert_eq!((session.len(0), session.logits()?.shape()[0]), (2, 0), "{name} on {device:?}");
            if is_recurrent {
                assert_eq!(session.prefill(0, &rest).unwrap_err().to_string(), torn);
                assert_eq!(session.decode(&[1, 1]).unwrap_err().to_string(), torn);
                assert_eq!(session.truncate(0, 1).unwrap_err().to_string(), torn);
                assert!(session.fork(0, 1).unwrap_err().to_string().starts_with("Session: from: "));
                session.truncate(0, 0)?;
                session.prefill(0, &[5, 6])?;
            }
            assert_eq!(prefill(&mut session)?, want, "{name} on {device:?}");
        }
        // At length 0 too.
        session.truncate(0, 0)?;
        let whole = prefill(&mut session)?;
        session.truncate(0, 0)?;
        let mut observe =
            |which, _: warpforge::TensorView<'_>| if which == Observed::FinalNorm { stop() } else { Ok(()) };
        session.prefill_visual_with(0, &rest, &images, &mut observe, &mut |_, _| Ok(())).unwrap_err();
        session.truncate(0, 0)?;
        assert_eq!(prefill(&mut session)?, whole, "{name} on {device:?}");
    }
    Ok(())
}

/// A full sequence is named, and out of the way once it is truncated.
#[test]
fn a_full_sequence_among_others() -> Outcome {
    let options = SessionOptions { batch: 3, capacity: 8, ..SessionOptions::default() };
    let mut session = session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, options)?;
    for (sequence, len) in [(0, 2), (1, 8), (2, 3)] {
        session.prefill(sequence, &vec![7; len])?;
    }
    assert_eq!(
        session.decode(&[1, 1, 1]).unwrap_err().to_string(),
        "Session: ids: expected at most 0 more tokens in sequence 1 (its cache holds 8 of 8), got 1"
    );
    session.truncate(1, 7)?;
    session.decode(&[1, 1, 1])?;
    assert_eq!([0, 1, 2].map(|sequence| session.len(sequence)), [3, 8, 4]);
    Ok(())
}

/// Which tokens a prompt's logits are of: the last one, once, or all, chunk by chunk.
#[test]
fn logits_name_their_tokens() -> Outcome {
    for (logits, want) in [(Logits::Last, vec![(7, 1)]), (Logits::All, vec![(0, 3), (3, 3), (6, 2)])] {
        let options = SessionOptions { capacity: 16, chunk: 3, logits, ..SessionOptions::default() };
        let mut session = session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, options)?;
        session.prefill(0, &[1, 2])?;
        let mut got = Vec::new();
        session.prefill_with(0, &[7; 8], &mut |_, _| Ok(()), &mut |first, rows| {
            got.push((first, rows.shape()[0]));
            Ok(())
        })?;
        assert_eq!(got, want, "{logits:?}");
    }
    Ok(())
}

/// Each call draws anew, also from the same logits; a new sampler of the same seed draws the same again.
#[test]
fn samplers_draw_anew() -> Outcome {
    let mut session =
        session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, SessionOptions::default())?;
    session.prefill(0, &[1, 2, 3])?;
    let method = Sampling::Random { temperature: 100.0, top_k: None, top_p: 1.0, seed: 7 };
    let draw = || -> Result<Vec<u32>, warpforge::Error> {
        let mut sampler = SessionSampler::new(&session, method)?;
        (0..20).map(|_| Ok(sampler.sample(&session)?[0])).collect()
    };
    let ids = draw()?;
    let mut distinct = ids.clone();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() > 10, "{ids:?}");
    assert_eq!(draw()?, ids);
    Ok(())
}

/// Logits are read by what a call returns; before a call there are none to draw from.
#[test]
fn logits_of_a_call() -> Outcome {
    let options = SessionOptions { capacity: 8, ..SessionOptions::default() };
    let mut session = session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, options)?;
    let mut sampler = SessionSampler::new(&session, Sampling::Greedy)?;
    let none = "SessionSampler: session: expected a prompt or a decode step that went well, got a session without logits";
    assert_eq!(sampler.sample(&session).unwrap_err().to_string(), none);
    let prompt = session.prefill(0, &[1, 2, 3])?.to_host()?;
    assert_eq!(session.logits()?.to_host()?, prompt);
    let next = session.decode(&[4])?;
    assert_eq!((next.shape(), next.view().shape()), (&[1, 384][..], &[1, 384][..]));
    assert_ne!(next.to_host()?, prompt);
    session.prefill(0, &[384]).unwrap_err();
    assert_eq!(sampler.sample(&session)?.len(), 1);
    Ok(())
}

/// More patches than there is memory for: the device says so, whatever the host would make of them.
#[test]
fn more_patches_than_memory() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3_vl"), DType::F32, &mut |_| {})?;
    let message = |max_patches| {
        let options = SessionOptions { capacity: 8, max_patches, ..SessionOptions::default() };
        model.session(options).map(|_| ()).unwrap_err()
    };
    assert_eq!(message(1 << 31).to_string(), "Session: max_patches: expected below 2^31, got 2147483648");
    let error = message((1 << 31) - 4);
    assert!(
        matches!(error, warpforge::Error::OutOfMemory { .. } | warpforge::Error::Invalid { .. }),
        "{error}"
    );
    Ok(())
}

/// A type that no model is in is named.
#[test]
fn models_are_of_floats() -> Outcome {
    let folder = golden::folder("qwen3");
    let config = ModelConfig::from_dir(&folder)?;
    for dtype in [DType::I8, DType::U32] {
        let want = format!("Model: dtype: expected weights and activations in f32, f16 or bf16, got {dtype}");
        let random = Model::random(&Device::cpu(), config.clone(), dtype, 1);
        assert_eq!(random.map(|_| ()).unwrap_err().to_string(), want);
        let loaded = Model::load(&Device::cpu(), &folder, dtype, &mut |_| {});
        assert_eq!(loaded.map(|_| ()).unwrap_err().to_string(), want);
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
        "Session: ids: expected at most 5 more tokens in sequence 0 (its cache holds 3 of 8), got 6"
    );
    assert_eq!(message(1, &[1]), "Session: sequence: expected a sequence below 1, got 1");
    assert_eq!(message(0, &[]), "Session: ids: expected at least one token, got none");
    assert_eq!(session.len(0), 3);
    assert_eq!(
        session.decode(&[1, 2]).unwrap_err().to_string(),
        "Session: ids: expected one token for each of 1 sequences, got 2"
    );
    assert_eq!(
        session.decode(&[384]).unwrap_err().to_string(),
        "Session: ids: expected token ids below 384, got 384 at index 0"
    );
    assert_eq!(session.len(0), 3);
    for id in 0..5 {
        session.decode(&[id])?;
    }
    assert_eq!(
        session.decode(&[1]).unwrap_err().to_string(),
        "Session: ids: expected at most 0 more tokens in sequence 0 (its cache holds 8 of 8), got 1"
    );
    Ok(())
}

/// Experts as transformers stacks them in memory, gate rows above up rows, give what those of the published files do.
#[test]
fn experts_in_one_tensor() -> Outcome {
    let golden = golden::folder("qwen3_moe");
    let folder = tempfile::tempdir()?;
    std::fs::copy(golden.join("config.json"), folder.path().join("config.json"))?;
    let bytes = std::fs::read(golden.join("model.safetensors"))?;
    let all = safetensors::SafeTensors::deserialize(&bytes)?;
    let mut tensors: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in all.tensors() {
        if !name.contains(".experts.") {
            tensors.push((name, view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    for layer in 0..3 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        for (fused, parts, shape) in [
            ("gate_up_proj", &["gate_proj", "up_proj"][..], vec![8, 96, 64]),
            ("down_proj", &["down_proj"], vec![8, 64, 48]),
        ] {
            let mut data = Vec::new();
            for expert in 0..8 {
                for part in parts {
                    data.extend_from_slice(all.tensor(&format!("{prefix}.{expert}.{part}.weight"))?.data());
                }
            }
            tensors.push((format!("{prefix}.{fused}"), safetensors::Dtype::F32, shape, data));
        }
    }
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            Ok((name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data)?))
        })
        .collect::<Result<_, safetensors::SafeTensorError>>()?;
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors"))?;
    let logits = |folder: &Path| -> Result<Vec<f32>, warpforge::Error> {
        let mut session = session(&Device::cpu(), folder, DType::F32, SessionOptions::default())?;
        let stream = session.stream().clone();
        session.prefill(0, &[3, 1, 4, 1, 5])?.to_vec(&stream)
    };
    assert_eq!(logits(folder.path())?, logits(&golden)?);
    Ok(())
}

/// One-key changes of the golden checkpoints: what transformers computes, or a stated decision. See `variants/make.py` there.
mod variants {
    use safetensors::tensor::{Dtype, SafeTensors, TensorView};
    use serde_json::Value;

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
        let (parents, key) =
            path.rsplit_once('.').map_or((None, path), |(parents, key)| (Some(parents), key));
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
        let stored =
            |(name, view): (String, TensorView<'_>)| (name, view.shape().to_vec(), view.data().to_vec());
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
                    let unread: Vec<&str> = variant["unread"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .filter_map(Value::as_str)
                        .collect();
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

/// Sizes that no checkpoint has: an error that says so, whatever they are, and nothing that is as large as they are.
#[test]
fn bad_sizes() -> Outcome {
    let folder = tempfile::tempdir()?;
    std::fs::copy(
        golden::folder("qwen3").join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )?;
    let load = |config: &str| -> Result<String, Box<dyn StdError>> {
        std::fs::write(folder.path().join("config.json"), config.replace('N', "2147483647"))?;
        let model =
            Model::load(&Device::cpu(), folder.path(), DType::F32, &mut |_| panic!("nothing is loaded"));
        Ok(model.map(|_| ()).unwrap_err().to_string())
    };
    for (config, field) in [
        (r#"{"model_type":"qwen3_moe","num_experts":N}"#, "num_experts"),
        (
            r#"{"model_type":"qwen3_next","linear_num_key_heads":N,"linear_num_value_heads":N}"#,
            "linear_num_key_heads",
        ),
        (
            r#"{"model_type":"qwen3_next","num_attention_heads":N,"num_key_value_heads":1,"full_attention_interval":1}"#,
            "num_attention_heads",
        ),
        (
            r#"{"model_type":"qwen3","vocab_size":N,"hidden_size":N}"#,
            "expected shape [2147483647, 2147483647]",
        ),
        (
            r#"{"model_type":"qwen3_vl","text_config":{"hidden_size":3584},"vision_config":{"patch_size":N}}"#,
            "patch_size",
        ),
        (
            r#"{"model_type":"glm4_moe_lite","n_shared_experts":N,"moe_intermediate_size":N}"#,
            "moe_intermediate_size",
        ),
        (
            r#"{"model_type":"qwen3_vl","text_config":{"hidden_size":3584,"rope_scaling":{"mrope_section":
            [64,9223372036854775808,9223372036854775808]}},"vision_config":{}}"#,
            "mrope_section",
        ),
        // What the bounds let through.
        (
            r#"{"model_type":"qwen3_moe","num_experts":2048,"moe_intermediate_size":1073741823,"hidden_size":N,"head_dim":8}"#,
            "unusable tensors (147675):",
        ),
        (
            r#"{"model_type":"qwen3_next","linear_num_value_heads":65535,"linear_num_key_heads":65535}"#,
            "linear_attn",
        ),
    ] {
        let message = load(config)?;
        assert!(message.contains(field), "{config}: {}", &message[..message.len().min(500)]);
        assert!(message.len() < 10_000, "{config}: {} bytes", message.len());
    }
    // A session's own sizes.
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let options = SessionOptions { capacity: usize::MAX, ..SessionOptions::default() };
        for options in [options, SessionOptions { batch: usize::MAX, capacity: 8, ..options }] {
            let message = model.session(options).unwrap_err().to_string();
            assert!(
                message.contains("Session: capacity: expected batch · capacity below 2^31, got "),
                "{message}"
            );
        }
    }
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

/// The published configurations: name, file, and what the checkpoint has: parameters and tensors, those aside that are of no use to
/// inference (GLM's block for drafting, a copy of the tied head).
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

/// No layer, expert or head is dropped: the tensors that are asked for are as many, and as large, as those that were published.
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
    let names: Vec<&str> = devices.iter().map(|(name, _)| name.as_str()).collect();
    let mut table = format!(
        "| model | layers | parameters | bf16 weights | cache of a token | of a sequence | {} |\n|{}\n",
        names.join(" | "),
        "---|".repeat(6 + names.len()),
    );
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
            "| {name} | {} | {:.2} G | {:.1} GiB | {:.0} KiB | {:.1} MiB |",
            layers.join(", "),
            parameters as f64 * 1e-9,
            parameters as f64 * 2.0 / f64::from(1 << 30),
            token as f64 / 1024.0,
            fixed as f64 / f64::from(1 << 20),
        );
        // What runs is found out with the small model of the same kind, whose results other tests compare.
        for (_, device) in &devices {
            let mut dtypes = Vec::new();
            for dtype in DType::FLOATS {
                let options = SessionOptions { capacity: 8, ..SessionOptions::default() };
                if session(device, &golden::folder(small), dtype, options).is_ok() {
                    dtypes.push(dtype.name());
                }
            }
            table += &format!(" {} |", dtypes.join(" "));
        }
        table += "\n";
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

/// Layers of full size with random weights on the CPU, one of each kind that a model has, and the whole vision tower: a prompt and
/// decode steps.
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

/// A NaN in a weight, and an f16 that overflows: the sampler says that there are no numbers, and an observer where the first was lost.
#[test]
fn logits_that_are_not_numbers() -> Outcome {
    let (folder, source) = (tempfile::tempdir()?, golden::folder("qwen3"));
    std::fs::copy(source.join("config.json"), folder.path().join("config.json"))?;
    let bytes = std::fs::read(source.join("model.safetensors"))?;
    let tensors = safetensors::SafeTensors::deserialize(&bytes)?;
    for (name, value, dtype, want) in [
        ("model.layers.1.mlp.down_proj.weight", f32::NAN, DType::F32, Observed::FeedForwardOutput(1)),
        ("model.layers.2.input_layernorm.weight", f32::NAN, DType::BF16, Observed::MixerInput(2)),
        ("model.layers.0.self_attn.o_proj.weight", 3e4, DType::F16, Observed::MixerOutput(0)),
        ("model.norm.weight", f32::NAN, DType::F32, Observed::FinalNorm),
    ] {
        let changed: Vec<u8> =
            tensors.tensor(name)?.data().chunks(4).flat_map(|_| value.to_le_bytes()).collect();
        let views = tensors.tensors().into_iter().map(|(key, view)| {
            let data = if key == name { changed.as_slice() } else { view.data() };
            let view = safetensors::tensor::TensorView::new(view.dtype(), view.shape().to_vec(), data)?;
            Ok((key, view))
        });
        let views: Vec<_> = views.collect::<Result<_, safetensors::SafeTensorError>>()?;
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors"))?;
        let options = SessionOptions { batch: 2, capacity: 8, ..SessionOptions::default() };
        let mut session = session(&Device::cpu(), folder.path(), dtype, options)?;
        let stream = session.stream().clone();
        let mut sampler = SessionSampler::new(&session, Sampling::Greedy)?;
        let mut first = None;
        let mut observe = |which, tensor: warpforge::TensorView<'_>| {
            let finite: Vec<bool> = match tensor.dtype() {
                DType::F16 => tensor.to_vec::<half::f16>(&stream)?.iter().map(|x| x.is_finite()).collect(),
                DType::BF16 => tensor.to_vec::<half::bf16>(&stream)?.iter().map(|x| x.is_finite()).collect(),
                _ => tensor.to_vec::<f32>(&stream)?.iter().map(|x| x.is_finite()).collect(),
            };
            if first.is_none() && finite.contains(&false) {
                first = Some(which);
            }
            Ok(())
        };
        session.prefill_with(1, &[5, 6, 7], &mut observe, &mut |_, _| Ok(()))?;
        assert_eq!(first, Some(want), "{name}");
        let message = sampler.sample(&session).unwrap_err().to_string();
        assert!(message.starts_with("all logits of sequence 1 are NaN: "), "{message}");
        assert_eq!(message.contains("bf16 and f32 reach further"), dtype == DType::F16, "{message}");
        // A decode step, of both sequences.
        let mut last = None;
        let mut observe = |which, _: warpforge::TensorView<'_>| {
            last = Some(which);
            Ok(())
        };
        session.truncate(1, 0)?;
        session.decode_with(&[5, 6], &mut observe)?;
        assert_eq!(last, Some(Observed::FinalNorm));
        let message = sampler.sample(&session).unwrap_err().to_string();
        assert!(message.starts_with("all logits of sequence 0 are NaN: "), "{message}");
    }
    Ok(())
}

/// What a session refuses for its sizes is known before the model is.
#[test]
fn sessions_are_checked_before_loading() -> Outcome {
    let config = warpforge::models::ModelConfig::from_dir(&golden::folder("qwen3"))?;
    let of = |options: SessionOptions| options.check(&config).map_err(|error| error.to_string());
    let options = SessionOptions::default();
    assert_eq!(of(options), Ok(()));
    for (options, want) in [
        (SessionOptions { chunk: 0, ..options }, "chunk: expected at least 1, got 0"),
        (
            SessionOptions { capacity: 1 << 31, ..options },
            "capacity: expected batch · capacity below 2^31, got 1 · 2147483648",
        ),
        (
            SessionOptions { max_patches: 4, ..options },
            "max_patches: expected 0 for a model without a vision tower, got 4",
        ),
    ] {
        assert_eq!(of(options), Err(format!("Session: {want}")));
    }
    let ids = config.decoder.check_ids(&[1, 2, 99999]).unwrap_err().to_string();
    assert_eq!(ids, "Session: ids: expected token ids below 384, got 99999 at index 2");
    Ok(())
}
