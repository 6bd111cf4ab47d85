//! What a session promises: batches, copies, cuts, failed calls, mistakes.

use testkit::golden;
use testkit::simulator::{Refuses, Refusing};
use warpforge::Fallback;
use warpforge::models::{BatchOptions, Work, WorkLogits};

use super::*;

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
        let mut sampler = SessionSampler::new(&together, SamplingParams::default())?;
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

/// A prompt that a callback ends half-way is not in the sequence, of any model: written again it gives what it gives at
/// once, or, where a state cannot go back, is refused until the sequence is begun anew.
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
    let method = SamplingParams { temperature: 100.0, seed: 7, ..SamplingParams::default() };
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

/// A penalty looks at the tokens that each sequence is said to have.
#[test]
fn samplers_with_penalties() -> Outcome {
    let options = SessionOptions { batch: 2, capacity: 64, ..SessionOptions::default() };
    let mut session = session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, options)?;
    let penalty = SamplingParams { repetition_penalty: 1e6, ..SamplingParams::default() };
    let mut sampler = SessionSampler::of_sequences(&session, vec![penalty, SamplingParams::default()])?;
    let mut plain = SessionSampler::new(&session, SamplingParams::default())?;
    let mut tokens = [vec![5, 6, 7], vec![5, 6, 7]];
    // The logits are of the second alone, which has no penalty.
    session.prefill(0, &tokens[0])?;
    session.prefill(1, &tokens[1])?;
    let first = plain.sample(&session)?[0];
    assert_eq!(sampler.sample_behind(&session, &[&tokens[0], &tokens[1]])?, [first]);
    let mut next = [first, first];
    for _ in 0..30 {
        std::iter::zip(&mut tokens, next).for_each(|(own, token)| own.push(token));
        session.decode(&next)?;
        let got = sampler.sample_behind(&session, &[&tokens[0], &tokens[1]])?;
        assert_eq!(got[1], plain.sample(&session)?[1]);
        assert!(!tokens[0].contains(&got[0]), "{tokens:?} {got:?}");
        next = [got[0], got[1]];
    }
    assert_ne!(tokens[0], tokens[1]);
    let message = |error: Result<Vec<u32>, warpforge::Error>| error.unwrap_err().to_string();
    let want =
        "SessionSampler: histories: expected the tokens of each of 2 sequences, as there are penalties, got";
    assert_eq!(message(sampler.sample(&session)), format!("{want} 0"));
    assert_eq!(message(sampler.sample_behind(&session, &[&[1]])), format!("{want} 1"));
    let long = message(sampler.sample_behind(&session, &[&[1; 65], &[]]));
    assert!(long.contains("history"), "{long}");
    Ok(())
}

/// Logits are read by what a call returns; before a call there are none to draw from.
#[test]
fn logits_of_a_call() -> Outcome {
    let options = SessionOptions { capacity: 8, ..SessionOptions::default() };
    let mut session = session(&Device::cpu(), &golden::folder("qwen3"), DType::F32, options)?;
    let mut sampler = SessionSampler::new(&session, SamplingParams::default())?;
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

/// A step of one token works on the residual itself where there are kernels for that, which a step that shows its inner
/// tensors does not: it rounds less often, and is no further from what f32 gives.
#[test]
fn steps_on_the_residual() -> Outcome {
    let options = SessionOptions { capacity: 16, ..SessionOptions::default() };
    let folder = |name: &str| match name {
        "awq_int4_moe" | "fp8_block_moe" => workspace_root().join("tests/golden-quant").join(name),
        _ => golden::folder(name),
    };
    let steps = |device: &Device, name: &str, dtype, shown: bool| {
        let mut session = session(device, &folder(name), dtype, options)?;
        session.prefill(0, &[5, 6, 7, 8, 9])?;
        let mut all = Vec::new();
        for id in [10, 11, 12] {
            let logits = if shown {
                session.decode_with(&[id], &mut |_, _| Ok(()))?
            } else {
                session.decode(&[id])?
            };
            all.extend(logits.to_host()?);
        }
        let [.., (_, reports)] = session.optimization_reports();
        let kernels: Vec<_> = reports.into_iter().map(|report| report.variant).collect();
        Ok::<_, Box<dyn StdError>>((all, kernels))
    };
    let card = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "awq_int4_moe", "fp8_block_moe"] {
        let (exact, _) = steps(&Device::cpu(), name, DType::F32, false)?;
        let [in_place, shown] = [false, true].map(|shown| steps(&card, name, DType::BF16, shown));
        let ((in_place, kernels), (shown, _)) = (in_place?, shown?);
        let error = |logits: &[f32]| -> f32 {
            std::iter::zip(logits, &exact).map(|(got, want)| (got - want).powi(2)).sum::<f32>().sqrt()
        };
        assert_ne!(in_place, shown, "{name}: both ways are the same");
        let (error, of_shown) = (error(&in_place), error(&shown));
        assert!(error <= 1.5 * of_shown, "{name}: {error}, shown {of_shown}");
        let has = |what: &str| kernels.iter().any(|kernel| kernel.contains(what));
        // The shared expert of qwen3_next is larger than the others here.
        assert_eq!(has("fused_moe"), !matches!(name, "qwen3" | "qwen3_next"), "{name}: {kernels:?}");
        let is_quantised = matches!(name, "awq_int4_moe" | "fp8_block_moe");
        assert_eq!(has("__packedup"), is_quantised, "{name}: {kernels:?}");
        assert_eq!(has("moe_combine"), name == "qwen3_next", "{name}: {kernels:?}");
        assert_eq!(has("latent_append"), name == "glm4_moe_lite", "{name}: {kernels:?}");
    }
    Ok(())
}

/// A decoder of attention and MLPs whose heads are of 128: a step of one token is one launch of its layers, of a
/// session's rows and of a batch's pages, and gives what the operators one by one give.
#[test]
fn one_token_in_one_launch() -> Outcome {
    let config = r#"{"model_type": "qwen3", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 384, "rope_theta": 1e4,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": true}"#;
    let model = |device: &Device| {
        let config = ModelConfig::from_json(config, Path::new("config.json"))?;
        Ok::<_, Box<dyn StdError>>(Model::random(device, config, DType::BF16, 3)?)
    };
    let card = Device::simulated(Arc::new(Card::with_sms(Arch::Sm90a, 5)))?;
    let (prompt, then) = ([5, 6, 7, 8, 9], [10, 11, 12]);
    let options = SessionOptions { capacity: 16, ..SessionOptions::default() };
    let steps = |device: &Device, shown: bool| {
        let mut session = model(device)?.session(options)?;
        session.prefill(0, &prompt)?;
        let mut all = Vec::new();
        for id in then {
            let logits = match shown {
                true => session.decode_with(&[id], &mut |_, _| Ok(()))?,
                false => session.decode(&[id])?,
            };
            all.extend(logits.to_host()?);
        }
        let [.., (_, reports)] = session.optimization_reports();
        let is_planned = reports.iter().any(|report| report.variant.starts_with("decoder_layers"));
        Ok::<_, Box<dyn StdError>>((all, is_planned))
    };
    let (one, is_planned) = steps(&card, false)?;
    let (shown, _) = steps(&card, true)?;
    assert!(is_planned && one != shown, "the layers are operators");
    let wide = |logits: &[f32]| logits.iter().map(|&logit| f64::from(logit)).collect::<Vec<_>>();
    let error = |logits: &[f32]| testkit::compare::relative_l2(&wide(logits), &wide(&shown));
    assert!(error(&one) <= 0.02, "{}", error(&one));
    let (invariant, is_planned) = steps(&card.with_invariance(Invariance::Batch), false)?;
    assert!(!is_planned && error(&invariant) <= 0.02, "{}", error(&invariant));
    // Where the card refuses it, the operators, whichever way: their bits, and the reports of what ran.
    let mut operators = None;
    for refuses in [
        Refuses::Kernels(|entry, _| entry.starts_with("decoder_layers")),
        Refuses::Launches(|entry, _| entry.starts_with("decoder_layers")),
    ] {
        let refusing = || Device::simulated(Arc::new(Refusing::new(Card::with_sms(Arch::Sm90a, 5), refuses)));
        for fallback in [Fallback::LowerFloor, Fallback::Cpu] {
            let device = refusing()?.with_fallback(fallback);
            let (got, is_planned) = steps(&device, false)?;
            assert!(!is_planned && got != one && error(&got) <= 0.02, "{refuses:?}, {fallback:?}");
            assert!(*operators.get_or_insert(got.clone()) == got, "{refuses:?}, {fallback:?}");
            let fallen = device.fallen();
            assert!(
                matches!(&fallen[..], [line] if line.starts_with("decoder_layers falls back to the operators"))
            );
        }
        let refusal = steps(&refusing()?, false).unwrap_err().to_string();
        assert!(refusal.contains("decoder_layers"), "{refuses:?}: {refusal}");
    }

    let options = BatchOptions {
        max_sequences: 2,
        max_step_tokens: 8,
        capacity: 32,
        page_tokens: 16,
        pages: 8,
        ..BatchOptions::default()
    };
    let mut batch = model(&card)?.batch(options)?;
    let id = batch.add(&prompt)?;
    batch.step(&[Work { id, tokens: prompt.len(), logits: WorkLogits::Nothing }])?;
    let mut paged = Vec::new();
    for token in then {
        batch.push(id, token)?;
        paged.extend(batch.step(&[Work { id, tokens: 1, logits: WorkLogits::Last }])?.logits().to_host()?);
    }
    assert!(error(&paged) <= 0.02, "{}", error(&paged));
    Ok(())
}

/// The experts of a few sequences' tokens are one operator, unless nothing may depend on how many there are: no further
/// from what f32 gives than sorted ones.
#[test]
fn experts_of_few_tokens() -> Outcome {
    let options = SessionOptions { batch: 2, capacity: 16, ..SessionOptions::default() };
    let steps = |device: &Device, name: &str, dtype| {
        let folder = match name {
            "fp8_block_moe" => workspace_root().join("tests/golden-quant").join(name),
            _ => golden::folder(name),
        };
        let mut session = session(device, &folder, dtype, options)?;
        session.prefill(0, &[5, 6, 7, 8, 9])?;
        session.prefill(1, &[3, 2])?;
        let mut all = Vec::new();
        for ids in [[10, 4], [11, 5], [12, 6]] {
            all.extend(session.decode(&ids)?.to_host()?);
        }
        let [.., (_, reports)] = session.optimization_reports();
        let kernels: Vec<_> = reports.into_iter().map(|report| report.variant).collect();
        Ok::<_, Box<dyn StdError>>((all, kernels))
    };
    let card = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
    let invariant = card.with_invariance(Invariance::Batch);
    for name in ["qwen3_moe", "glm4_moe_lite", "fp8_block_moe"] {
        let (exact, _) = steps(&Device::cpu(), name, DType::F32)?;
        let error = |logits: &[f32]| -> f32 {
            std::iter::zip(logits, &exact).map(|(got, want)| (got - want).powi(2)).sum::<f32>().sqrt()
        };
        let [few, sorted] = [&card, &invariant].map(|device| steps(device, name, DType::BF16));
        let ((few, kernels), (sorted, of_sorted)) = (few?, sorted?);
        let has = |kernels: &[&str], what: &str| kernels.iter().any(|kernel| kernel.contains(what));
        assert!(has(&kernels, "fused_moe") && !has(&kernels, "moe_combine"), "{name}: {kernels:?}");
        assert!(has(&of_sorted, "moe_combine") && !has(&of_sorted, "fused_moe"), "{name}: {of_sorted:?}");
        let (error, of_sorted) = (error(&few), error(&sorted));
        assert!(error <= 1.5 * of_sorted, "{name}: {error}, sorted {of_sorted}");
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

/// A NaN in a weight, and an f16 that overflows: the sampler says that there are no numbers, and an observer where the
/// first was lost.
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
        let mut sampler = SessionSampler::new(&session, SamplingParams::default())?;
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
