//! Caches of keys and values in fp8: near what the model's own type gives, in a session and in a batch, with and
//! without scales of the checkpoint.

use std::fs;

use warpforge::models::{Batch, Prompt, SequenceId, Work, WorkLogits, load_tensors, save_tensors};
use warpforge::{Error, Tensor};

use super::*;

/// What follows a prompt.
const NEW: [u32; 4] = [11, 250, 34, 7];

/// Logits of a prompt and behind each of [`NEW`], and the bytes of the caches.
fn in_session(
    model: &Model,
    cache_type: CacheType,
    prompt: &[u32],
) -> Result<(Vec<f32>, usize), Box<dyn StdError>> {
    let options = SessionOptions { capacity: 96, chunk: 24, cache_type, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let mut logits = session.prefill(0, prompt)?.to_host()?;
    for token in NEW {
        logits.extend(session.decode(&[token])?.to_host()?);
    }
    Ok((logits, session.cache_bytes()))
}

/// The same in a batch, beside another sequence and its fork.
fn in_batch(model: &Model, cache_type: CacheType, prompt: &[u32]) -> Result<Vec<f32>, Box<dyn StdError>> {
    let options = BatchOptions {
        max_sequences: 4,
        max_step_tokens: 48,
        capacity: 96,
        page_tokens: 16,
        pages: 24,
        cache_type,
        ..BatchOptions::default()
    };
    let mut batch = model.batch(options)?;
    let vocab = model.config().decoder.vocab_size;
    let mut logits = Vec::new();
    let mut step = |batch: &mut Batch, id: SequenceId, others: &[SequenceId]| -> Outcome {
        let tokens = batch.pending(id)?;
        let mut work = vec![Work::new(id, tokens)];
        for &other in others {
            work.push(Work { logits: WorkLogits::Nothing, ..Work::new(other, batch.pending(other)?) });
        }
        let output = batch.step(&work)?;
        let first = output.rows()[0].start;
        logits.extend_from_slice(&output.logits().to_host()?[first * vocab..][..vocab]);
        Ok(())
    };
    let other = batch.add_prompt(Prompt::from(&prompt[..5]))?;
    let id = batch.add_prompt(Prompt::from(prompt))?;
    step(&mut batch, id, &[other])?;
    let fork = batch.fork(other)?;
    for token in NEW {
        for id in [id, other, fork] {
            batch.push(id, token)?;
        }
        step(&mut batch, id, &[other, fork])?;
    }
    Ok(logits)
}

/// Each with the most that its logits may differ. Where a router takes other experts for a little, much follows.
const MODELS: [(&str, f64); 4] =
    [("qwen3", 0.08), ("qwen3_sliding", 0.08), ("qwen3_moe", 0.4), ("qwen3_next", 0.4)];

fn near_the_models_type(
    device: &Device,
    models: &[(&'static str, f64)],
    (dtypes, tokens): (&[DType], usize),
) -> Outcome {
    for &(name, most) in models {
        let case = Case::load(name)?;
        let prompt = &case.prompts()[0][..tokens];
        for &dtype in dtypes {
            let model = Model::load(device, &case.folder, dtype, &mut |_| {})?;
            let (want, bytes) = in_session(&model, CacheType::Model, prompt)?;
            let (got, fp8_bytes) = in_session(&model, CacheType::Fp8, prompt)?;
            let error = relative_l2(&got, &want);
            assert!(error > 1e-3 && error < most, "{name} in {dtype} on {device:?}: {error:.2e}");
            let decoder = &model.config().decoder;
            assert_eq!(bytes, decoder.cache_bytes(dtype, 96), "{name}");
            assert_eq!(fp8_bytes, decoder.cache_bytes_as(dtype, CacheType::Fp8, 96), "{name}");
            let states = decoder.cache_bytes(dtype, 0);
            assert_eq!(2 * (fp8_bytes - states), bytes - states, "{name}");
            // Pages hold the same bytes; what differs is how kernels sum.
            let error = relative_l2(&in_batch(&model, CacheType::Fp8, prompt)?, &got);
            assert!(error < most / 2.0, "{name} in {dtype} on {device:?}, in a batch: {error:.2e}");
        }
    }
    Ok(())
}

#[test]
fn fp8_caches() -> Outcome {
    near_the_models_type(&Device::cpu(), &MODELS, (&[DType::BF16, DType::F16], 30))
}

#[test]
fn fp8_caches_on_simulated_cards() -> Outcome {
    for arch in [Arch::Sm61, Arch::Sm90a] {
        let card = Device::simulated(Arc::new(Card::new(arch)))?;
        near_the_models_type(&card, &MODELS[..1], (&[DType::BF16], 9))?;
    }
    Ok(())
}

#[test]
fn fp8_caches_on_the_card() -> Outcome {
    cards().iter().try_for_each(|card| near_the_models_type(card, &MODELS, (&[DType::BF16, DType::F16], 30)))
}

/// A golden checkpoint with scales of its keys and values beside its tensors.
fn with_scales(
    case: &Case,
    scales: &[(&str, &[usize], &[f32])],
) -> Result<tempfile::TempDir, Box<dyn StdError>> {
    let stream = Device::cpu().stream()?;
    let folder = tempfile::tempdir()?;
    fs::copy(case.folder.join("config.json"), folder.path().join("config.json"))?;
    let mut tensors = load_tensors(&case.folder.join("model.safetensors"), &stream)?;
    for layer in 0..3 {
        for &(name, shape, scales) in scales {
            let tensor = Tensor::from_slice(&stream, shape, scales)?;
            tensors.push((format!("model.layers.{layer}.self_attn.{name}"), tensor));
        }
    }
    let views = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    save_tensors(&folder.path().join("model.safetensors"), &stream, views)?;
    Ok(folder)
}

/// Scales of a checkpoint are those of its fp8 caches, for all heads or each, by either name; of other caches they are
/// none.
#[test]
fn scales_of_checkpoints() -> Outcome {
    let case = Case::load("qwen3")?;
    let prompt = &case.prompts()[0];
    let load = |scales: &[(&str, &[usize], &[f32])]| -> Result<Model, Box<dyn StdError>> {
        let folder = with_scales(&case, scales)?;
        Ok(Model::load(&Device::cpu(), folder.path(), DType::BF16, &mut |_| {})?)
    };
    let plain = load(&[])?;
    let (want, _) = in_session(&plain, CacheType::Model, prompt)?;
    let (unscaled, _) = in_session(&plain, CacheType::Fp8, prompt)?;
    let error_of = |scales: &[(&str, &[usize], &[f32])]| -> Result<f64, Box<dyn StdError>> {
        let model = load(scales)?;
        assert!(model.report().is_empty(), "{}", model.report());
        assert_eq!(in_session(&model, CacheType::Model, prompt)?.0, want);
        Ok(relative_l2(&in_session(&model, CacheType::Fp8, prompt)?.0, &want))
    };
    // Fewer subnormal numbers, and else the same digits: about as near.
    let finer = error_of(&[("k_scale", &[1], &[0.0625]), ("v_scale", &[1], &[0.015625])])?;
    let by_one = relative_l2(&unscaled, &want);
    assert!(finer < 1.5 * by_one && finer > 1e-3, "{finer:.2e}, unscaled {by_one:.2e}");
    let each = error_of(&[("k_scale", &[2], &[0.07, 0.11]), ("v_scale", &[2], &[0.013, 0.02])])?;
    assert!(each < 0.08, "{each:.2e}");
    let of_modelopt = error_of(&[("k_proj.k_scale", &[], &[0.0625]), ("v_proj.v_scale", &[], &[0.015625])])?;
    assert_eq!(of_modelopt, finer);
    // Keys that come to nothing.
    let coarse = error_of(&[("k_scale", &[1], &[3e5]), ("v_scale", &[1], &[3e5])])?;
    assert!(coarse > 0.1, "{coarse:.2e}");
    for (scales, expected) in [
        (
            vec![("k_scale", &[1][..], &[0.0][..])],
            "self_attn.k_scale: expected scales that are finite and above 0, got 0",
        ),
        (
            vec![("v_scale", &[1], &[f32::NAN])],
            "self_attn.v_scale: expected scales that are finite and above 0, got NaN",
        ),
        (vec![("v_scale", &[3], &[1.0, 1.0, 1.0])], "self_attn.v_scale: expected shape [2], got [3]"),
    ] {
        let message = load(&scales).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
    Ok(())
}

/// What cannot be in fp8 is refused, with what can.
#[test]
fn fp8_caches_that_cannot_be() -> Outcome {
    for (name, dtype, got) in
        [("qwen3", DType::F32, "got f32"), ("glm4_moe_lite", DType::BF16, "got latent attention")]
    {
        let case = Case::load(name)?;
        let model = Model::load(&Device::cpu(), &case.folder, dtype, &mut |_| {})?;
        let cache_type = CacheType::Fp8;
        let of_session = model.session(SessionOptions { cache_type, ..SessionOptions::default() });
        let of_batch = model.batch(BatchOptions { cache_type, ..BatchOptions::default() });
        for message in [of_session.unwrap_err().to_string(), of_batch.unwrap_err().to_string()] {
            assert!(
                message.contains("cache_type: expected the model's type; or fp8 for f16 and bf16"),
                "{message}"
            );
            assert!(message.ends_with(got), "{message}");
        }
    }
    let error: Error = "fp4".parse::<CacheType>().unwrap_err();
    assert_eq!(error.to_string(), "CacheType: name: expected model or fp8, got fp4");
    Ok(())
}
