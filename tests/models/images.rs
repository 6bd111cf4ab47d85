//! Prompts with images.

use testkit::golden;

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
