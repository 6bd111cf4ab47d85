//! Prompts with images.

use testkit::golden;
use warpforge::models::{Batch, Prompt, PromptVisual, RequestId, SequenceId, Work, WorkLogits};

use super::*;

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

/// More patches than there is memory for: the device says so, whatever the host would make of them. More than there
/// can be are refused before.
#[test]
fn more_patches_than_memory() -> Outcome {
    // What a host would promise is its own affair.
    let device = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
    let model = Model::load(&device, &golden::folder("qwen3_vl"), DType::F32, &mut |_| {})?;
    let error = |max_patches| {
        let options = SessionOptions { capacity: 8, max_patches, ..SessionOptions::default() };
        model.session(options).map(|_| ()).unwrap_err()
    };
    let refused = "Session: max_patches: expected below 2^30, got 1073741824";
    assert_eq!(error(1 << 30).to_string(), refused);
    let error = error((1 << 30) - 4);
    assert!(matches!(error, warpforge::Error::OutOfMemory { .. }), "{error}");
    Ok(())
}

/// A batch with room for the images of a prompt.
fn in_batch(case: &Case) -> BatchOptions {
    BatchOptions {
        max_sequences: 4,
        max_step_tokens: 40,
        max_prompts: 3,
        max_logits: 40,
        capacity: 128,
        page_tokens: 16,
        pages: 40,
        max_patches: case.images().0.iter().map(PatchGrid::patches).sum(),
        ..BatchOptions::default()
    }
}

fn owned(visuals: &[Visual<'_>]) -> Vec<PromptVisual> {
    visuals.iter().map(|visual| PromptVisual { grid: visual.grid, patches: visual.patches.into() }).collect()
}

/// What a session gives: logits of all tokens of the prompt, and of those behind it.
fn by_session(
    model: &Model,
    prompt: &[u32],
    images: &[Visual<'_>],
    behind: &[u32],
) -> Result<Vec<f32>, warpforge::Error> {
    let max_patches = images.iter().map(|image| image.grid.patches()).sum();
    let options = SessionOptions {
        capacity: 128,
        chunk: 64,
        logits: Logits::All,
        max_patches,
        ..SessionOptions::default()
    };
    let mut session = model.session(options)?;
    let stream = session.stream().clone();
    let mut rows = Vec::new();
    session.prefill_visual_with(0, prompt, images, &mut |_, _| Ok(()), &mut |_, part| {
        rows.extend(part.to_vec::<f32>(&stream)?);
        Ok(())
    })?;
    for &token in behind {
        rows.extend(session.decode(&[token])?.to_host()?);
    }
    Ok(rows)
}

/// A step for the logits of all tokens, which come behind those of each sequence.
fn step(batch: &mut Batch, rows: &mut [(SequenceId, Vec<f32>)], tokens: &[(usize, usize)]) -> Outcome {
    let vocab = batch.model().config().decoder.vocab_size;
    let work =
        |&(which, tokens): &(usize, usize)| Work { id: rows[which].0, tokens, logits: WorkLogits::All };
    let work: Vec<Work> = tokens.iter().map(work).collect();
    let output = batch.step(&work)?;
    let (places, logits) = (output.rows().to_vec(), output.logits().to_host()?);
    for (&(which, _), place) in std::iter::zip(tokens, places) {
        rows[which].1.extend(&logits[place.start * vocab..place.end * vocab]);
    }
    Ok(())
}

/// A prompt with an image in chunks of any size, beside a prompt of text and decode steps, forked and pre-empted in the
/// midst of it, and what follows it in steps that may be recorded: as in a session of its own.
fn mixed(device: &Device, case: &Case, chunks: &[usize]) -> Outcome {
    let (grids, patches) = case.images();
    let images = visuals((&grids, patches));
    let model = Model::load(device, &case.folder, DType::F32, &mut |_| {})?;
    let (prompt, text, behind) = (&case.prompts()[0], [5u32, 6, 7, 8, 9], [11u32, 12, 13, 14]);
    let want = by_session(&model, prompt, &images, &behind)?;
    let text_want = by_session(&model, &text, &[], &behind)?;
    for &chunk in chunks {
        let mut batch = model.batch(in_batch(case))?;
        let seen = batch.add_prompt(Prompt { visuals: owned(&images), ..prompt[..].into() })?;
        let mut rows = vec![(seen, Vec::new()), (batch.add(&text)?, Vec::new())];
        step(&mut batch, &mut rows, &[(1, 4)])?;
        let (mut left, mut others) = (prompt.len(), vec![1].into_iter());
        let mut fork = None;
        while left > 0 {
            let tokens = chunk.min(left);
            let beside = others.next().map(|tokens| (1, tokens));
            let work: Vec<_> = beside.into_iter().chain([(0, tokens)]).collect();
            step(&mut batch, &mut rows, &work)?;
            left -= tokens;
            if fork.is_none() && left < prompt.len() / 2 && left > 0 {
                fork = Some(rows.len());
                rows.push((batch.fork(seen)?, rows[0].1.clone()));
            }
        }
        if let Some(fork) = fork {
            // From its beginning, behind others' images.
            let vocab = model.config().decoder.vocab_size;
            batch.preempt(rows[fork].0)?;
            let found = batch.reuse(rows[fork].0)?;
            rows[fork].1.truncate(found * vocab);
            while batch.pending(rows[fork].0)? > 0 {
                let tokens = batch.pending(rows[fork].0)?.min(chunk);
                step(&mut batch, &mut rows, &[(fork, tokens)])?;
            }
        }
        for token in behind {
            for (id, _) in &rows {
                batch.push(*id, token)?;
            }
            let work: Vec<_> = (0..rows.len()).map(|which| (which, 1)).collect();
            step(&mut batch, &mut rows, &work)?;
        }
        for (index, (id, got)) in rows.into_iter().enumerate() {
            let want = if index == 1 { &text_want } else { &want };
            assert_eq!(got.len(), want.len());
            let error = relative_l2(&got, want);
            assert!(error <= 1e-5, "{device:?}, chunks of {chunk}, sequence {index}: {error:.2e}");
            batch.remove(id)?;
        }
        assert_eq!(batch.free_pages(), batch.options().pages);
    }
    Ok(())
}

#[test]
fn images_in_batches() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    mixed(&Device::cpu(), &case, &[1, 5, 17, 35])?;
    mixed(&Device::simulated(Arc::new(Card::new(Arch::Sm61)))?, &case, &[17])?;
    cards().iter().try_for_each(|device| mixed(device, &case, &[1, 17]))
}

/// More prompts with images than a step has room for, other images behind the same tokens, and text: each is answered
/// as if it were alone.
#[test]
fn a_scheduler_sees_all() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let other: Vec<f32> = patches.iter().map(|value| 0.5 - value).collect();
    let (first, second) = (visuals((&grids, patches)), visuals((&grids, &other)));
    let model = Model::load(&Device::cpu(), &case.folder, DType::F32, &mut |_| {})?;
    let prompt = &case.prompts()[0];
    // With whole pages before the image.
    let longer = [&[3u32; 20][..], prompt].concat();
    let asked: [(&[u32], &[Visual<'_>]); 7] = [
        (prompt, &first),
        (&[5, 6, 7], &[]),
        (prompt, &second),
        (&longer, &second),
        (&longer, &first),
        (&longer[..18], &[]),
        (prompt, &first),
    ];
    let mut session = model.session(SessionOptions { capacity: 128, ..options(&case, 64) })?;
    let mut want = Vec::new();
    for (prompt, images) in asked {
        want.push(greedy_visual(&mut session, prompt, images, 8)?);
    }
    assert_ne!(want[0], want[2], "the images differ");
    let mut scheduler = Scheduler::new(model.batch(BatchOptions { max_step_tokens: 24, ..in_batch(&case) })?);
    let mut got: Vec<(RequestId, Vec<u32>)> = Vec::new();
    for (tokens, images) in asked {
        let prompt = Prompt { visuals: owned(images), ..tokens.into() };
        got.push((scheduler.submit_prompt(prompt)?, Vec::new()));
    }
    while let Some(step) = scheduler.step()? {
        let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
        for (request, rows) in step.requests {
            let row = &logits[rows.start * vocab..][..vocab];
            let best = (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).ok_or("a token")? as u32;
            let (_, answer) = got.iter_mut().find(|(id, _)| *id == request).ok_or("a request")?;
            answer.push(best);
            if answer.len() == 8 { scheduler.finish(request)? } else { scheduler.push(request, best)? }
        }
    }
    assert_eq!(got.into_iter().map(|(_, answer)| answer).collect::<Vec<_>>(), want);
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, stats.free_pages), (0, 40));
    // The page before the image, of the one that came behind it, and of the text.
    assert_eq!(stats.reused_tokens, 32);
    Ok(())
}

/// What a batch refuses of images.
#[test]
fn bad_images_in_batches() -> Outcome {
    let case = Case::load("qwen3_vl")?;
    let (grids, patches) = case.images();
    let images = owned(&visuals((&grids, patches)));
    let prompt = &case.prompts()[0];
    let model = Model::load(&Device::cpu(), &case.folder, DType::F32, &mut |_| {})?;
    let mut batch = model.batch(in_batch(&case))?;
    let with = |visuals: &[PromptVisual]| Prompt { visuals: visuals.to_vec(), ..prompt[..].into() };
    let mut blind = model.batch(BatchOptions { max_patches: 0, ..in_batch(&case) })?;
    assert_eq!(
        blind.add_prompt(with(&images)).unwrap_err().to_string(),
        "Batch: visuals: expected none in a batch without max_patches, got 1"
    );
    let placeholder = prompt.iter().position(|&id| id == 379 || id == 381).ok_or("a placeholder")?;
    assert_eq!(
        batch.add(prompt).unwrap_err().to_string(),
        format!("Batch: tokens: expected text, got a placeholder of an image at {placeholder}")
    );
    let twice = [images[0].clone(), images[0].clone()];
    assert_eq!(
        batch.add_prompt(with(&twice)).unwrap_err().to_string(),
        "Batch: visuals: expected at most 96 patches altogether, got 192"
    );
    let (a, b) = (batch.add_prompt(with(&images))?, batch.add_prompt(with(&images))?);
    let before = batch.stats();
    let error = batch.step(&[Work::new(a, placeholder + 1), Work::new(b, placeholder + 1)]).map(|_| ());
    assert!(
        matches!(error, Err(BatchError::SeveralVisuals { first, second }) if (first, second) == (a, b)),
        "{error:?}"
    );
    assert_eq!(batch.stats(), before);
    // Before its image it is text, as far as the other is concerned.
    if placeholder > 0 {
        batch.step(&[Work::new(a, placeholder + 1), Work::new(b, placeholder)])?;
    }
    let error = batch.truncate(a, placeholder + 1).unwrap_err();
    assert!(matches!(error, BatchError::Images { id, .. } if id == a), "{error}");
    let text = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    assert_eq!(
        text.batch(BatchOptions { max_patches: 4, ..in_batch(&case) }).unwrap_err().to_string(),
        "Batch: max_patches: expected 0 for a model without a vision tower, got 4"
    );
    Ok(())
}
