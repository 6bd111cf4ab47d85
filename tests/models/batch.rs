//! Sequences that come and go: whatever is in a step with it, a sequence has the logits that it has alone.

mod driver;

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use testkit::golden;
use warpforge::models::{Batch, BatchError, BatchOptions, CacheType, RequestId, Scheduler, Work, WorkLogits};

use super::*;
use driver::FEW_ROWS;
pub(super) use driver::{Act, Seen, acts, drive, run, small};

/// Random schedules of each architecture.
fn schedules(name: &str, cases: u32) -> Outcome {
    schedules_on(&Device::cpu(), DType::F32, name, (40, cases))
}

/// So many, of so many acts at most.
fn schedules_on(device: &Device, dtype: DType, name: &str, (most, cases): (usize, u32)) -> Outcome {
    let model = Model::load(device, &golden::folder(name), dtype, &mut |_| {})?;
    let mut runner = TestRunner::new_with_rng(
        Config { cases, failure_persistence: None, ..Config::default() },
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    runner.run(&acts(most), |acts| {
        for max_step_tokens in [40, FEW_ROWS] {
            let options = BatchOptions { max_step_tokens, ..small() };
            run(&model, options, &acts, name).map_err(|error| TestCaseError::fail(error.to_string()))?;
        }
        Ok(())
    })?;
    Ok(())
}

/// One schedule in which everything happens that can: prompts in chunks beside decode steps, a fork and its copy, a
/// removal, a pre-emption, and a beginning that is found again.
fn everything() -> Vec<Act> {
    let all = |parts: &[(usize, usize)]| {
        Act::Step(parts.iter().map(|&(which, tokens)| (which, tokens, WorkLogits::All)).collect())
    };
    vec![
        Act::Add { like: 0, shared: 0, own: 20 },
        all(&[(0, 17)]),
        Act::Add { like: 0, shared: 0, own: 3 },
        all(&[(0, 3), (1, 2)]),
        all(&[(1, 1)]),
        Act::Decode,
        Act::Fork(0),
        Act::Decode,
        Act::Add { like: 0, shared: 18, own: 2 },
        all(&[(3, 4), (0, 1), (1, 1)]),
        Act::Remove(0),
        Act::Preempt(1, true),
        Act::Decode,
        all(&[(1, 24), (0, 1)]),
    ]
}

mod schedules_on_the_cpu {
    use super::*;

    macro_rules! models {
        ($($name:ident,)*) => {$(
            #[test]
            fn $name() -> Outcome {
                schedules(stringify!($name), 24)
            }
        )*};
    }

    models! { qwen3, qwen3_sliding, qwen3_moe, qwen3_next, glm4_moe_lite, qwen3_vl, }
}

#[test]
fn one_schedule_on_the_cpu() -> Outcome {
    for name in GOLDEN {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let stats = run(&model, small(), &everything(), name)?;
        let recurrent = name == "qwen3_next";
        assert_eq!((stats.copied_pages, stats.preemptions), (1, 1), "{name}");
        assert_eq!(stats.reused_tokens, if recurrent { 0 } else { 32 }, "{name}");
    }
    Ok(())
}

mod one_schedule_in_the_simulator {
    use super::*;

    macro_rules! models {
        ($($name:ident on $arch:ident,)*) => {$(
            #[test]
            fn $name() -> Outcome {
                let device = Device::simulated(Arc::new(Card::new(Arch::$arch)))?;
                let name = stringify!($name);
                let model = Model::load(&device, &golden::folder(name), DType::F32, &mut |_| {})?;
                run(&model, small(), &everything(), name)?;
                Ok(())
            }
        )*};
    }

    models! {
        qwen3 on Sm90a,
        qwen3_sliding on Sm61,
        qwen3_moe on Sm80,
        qwen3_next on Sm90a,
        glm4_moe_lite on Sm80,
        qwen3_vl on Sm61,
    }
}

/// Under `Invariance::Batch` a sequence has the bits that it has alone, whatever the schedule.
mod the_same_bits {
    use super::*;

    macro_rules! models {
        ($($name:ident on $($test:ident: $arch:ident),*;)*) => {$(
            mod $name {
                use super::*;

                const NAME: &str = stringify!($name);

                #[test]
                fn on_the_cpu() -> Outcome {
                    let device = Device::cpu().with_invariance(Invariance::Batch);
                    for dtype in [DType::F32, DType::BF16] {
                        schedules_on(&device, dtype, NAME, (40, 12))?;
                    }
                    Ok(())
                }

                $(
                    #[test]
                    fn $test() -> Outcome {
                        in_the_simulator(Arch::$arch, NAME)
                    }
                )*
            }
        )*};
    }

    // Each part of a model on Hopper's floor and an older one; both older ones see a dense model and mixtures.
    models! {
        qwen3 on sm61: Sm61, sm80: Sm80, sm90a: Sm90a;
        qwen3_sliding on sm90a: Sm90a;
        qwen3_moe on sm80: Sm80, sm90a: Sm90a;
        qwen3_next on sm61: Sm61, sm90a: Sm90a;
        glm4_moe_lite on sm61: Sm61, sm80: Sm80, sm90a: Sm90a;
        qwen3_vl on sm80: Sm80, sm90a: Sm90a;
    }

    /// In the type that the floor has tensor cores for, if it has some.
    fn in_the_simulator(arch: Arch, name: &str) -> Outcome {
        let device = Device::simulated(Arc::new(Card::new(arch)))?.with_invariance(Invariance::Batch);
        let dtype = if arch == Arch::Sm61 { DType::F32 } else { DType::BF16 };
        let model = Model::load(&device, &golden::folder(name), dtype, &mut |_| {})?;
        run(&model, small(), &everything(), name)?;
        schedules_on(&device, dtype, name, (8, 1))
    }
}

/// Nor do the kernels of quantised weights, tables and rows let bits depend on the mix; caches in fp8 do not either.
#[test]
fn the_same_bits_of_quantised_models() -> Outcome {
    let card = Device::simulated(Arc::new(Card::new(Arch::Sm80)))?;
    for name in ["ct_w8a8_int8", "gguf_q4_k_m", "fp8_block_moe"] {
        let folder = workspace_root().join("tests/golden-quant").join(name);
        let path = if name.starts_with("gguf") { folder.join("model.gguf") } else { folder };
        for (device, cache_type) in [(&Device::cpu(), CacheType::Fp8), (&card, CacheType::Model)] {
            let device = device.with_invariance(Invariance::Batch);
            let model = Model::load(&device, &path, DType::BF16, &mut |_| {})?;
            run(&model, BatchOptions { cache_type, ..small() }, &everything(), name)?;
        }
    }
    Ok(())
}

#[test]
fn schedules_on_the_card() -> Outcome {
    for device in cards() {
        for name in GOLDEN {
            let model = Model::load(&device, &golden::folder(name), DType::F32, &mut |_| {})?;
            run(&model, small(), &everything(), name)?;
            // Long enough that steps of ones are recorded and launched again.
            let decode = vec![vec![Act::Decode, Act::Decode, Act::Decode, Act::Fork(0)]; 6].concat();
            let acts = [
                vec![Act::Add { like: 0, shared: 0, own: 5 }, Act::Step(vec![(0, 5, WorkLogits::Last)])],
                decode,
            ];
            run(&model, BatchOptions { pages: 16, ..small() }, &acts.concat(), name)?;
            for dtype in [DType::F32, DType::BF16] {
                let device = device.with_invariance(Invariance::Batch);
                let model = Model::load(&device, &golden::folder(name), dtype, &mut |_| {})?;
                run(&model, small(), &everything(), name)?;
                run(&model, BatchOptions { pages: 16, ..small() }, &acts.concat(), name)?;
            }
        }
    }
    Ok(())
}

/// What a finished sequence leaves is found again, and given up for others when room is wanted.
#[test]
fn prefixes_are_found_again() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(BatchOptions { pages: 4, max_step_tokens: 64, ..small() })?;
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 300).collect();
    let first = batch.add(&prompt)?;
    let want = batch.step(&[Work::new(first, 40)])?.logits().to_host()?;
    // Two full pages of three.
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (1, 0));
    let second = batch.add(&prompt)?;
    assert_eq!((batch.pending(second)?, batch.pages(second)?), (8, 2));
    let got = batch.step(&[Work::new(second, 8)])?.logits().to_host()?;
    assert!(relative_l2(&got, &want) <= 1e-4);
    assert_eq!(batch.free_pages(), 0);
    batch.remove(first)?;
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (1, 0), "the second has the others");
    batch.remove(second)?;
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (4, 2));
    // A prompt of exactly the known tokens computes the last page anew: somebody wants its logits.
    let third = batch.add(&prompt[..32])?;
    assert_eq!((batch.pending(third)?, batch.stats().cached_pages), (16, 1));
    batch.remove(third)?;
    // Others take the end of what is known before its beginning.
    let other = batch.add(&[5; 33])?;
    batch.step(&[Work::new(other, 33)])?;
    assert_eq!((batch.stats().evicted_pages, batch.stats().cached_pages), (1, 1));
    assert_eq!(batch.add(&prompt).and_then(|id| batch.pending(id))?, 24);
    let without = model.batch(BatchOptions { prefix_cache: false, ..small() });
    let mut without = without?;
    let id = without.add(&prompt)?;
    without.step(&[Work::new(id, 40)])?;
    assert_eq!(without.add(&prompt).and_then(|id| without.pending(id))?, 40);
    Ok(())
}

/// Forks share their pages, and only the one that both write to is copied.
#[test]
fn forks_share_pages() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(small())?;
    let a = batch.add(&[9; 20])?;
    batch.step(&[Work::new(a, 20)])?;
    let (b, c) = (batch.fork(a)?, batch.fork(a)?);
    assert_eq!(batch.free_pages(), 8);
    for (id, token) in [(a, 1), (b, 2), (c, 3)] {
        batch.push(id, token)?;
    }
    assert_eq!(batch.pages_for(&[Work::new(a, 1)])?, 1);
    assert!(batch.pages_for(&[Work::new(a, usize::MAX), Work::new(a, usize::MAX)])? > usize::MAX / 32);
    // Two of three copy, the last one keeps what nobody else has.
    let work = [a, b, c].map(|id| Work::new(id, 1));
    assert_eq!(batch.pages_for(&work)?, 2);
    batch.step(&work)?;
    assert_eq!((batch.free_pages(), batch.stats().copied_pages), (6, 2));
    Ok(())
}

/// More requests than there is room for: each is answered as if it were alone, and all comes back.
#[test]
fn a_scheduler_answers_all() -> Outcome {
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let prompts: Vec<Vec<u32>> =
            (0..9u32).map(|i| (0..3 + 5 * i % 31).map(|j| (i / 2 * 17 + j * 5) % 300).collect()).collect();
        let mut alone = model.session(SessionOptions { capacity: 64, ..SessionOptions::default() })?;
        let want: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| greedy(&mut alone, prompt, 20)).collect::<Result<_, _>>()?;
        let mut scheduler = Scheduler::new(model.batch(BatchOptions { pages: 6, ..small() })?);
        let ids: Vec<RequestId> =
            prompts.iter().map(|prompt| scheduler.submit(prompt)).collect::<Result<_, _>>()?;
        let cancelled = scheduler.submit(&[1, 2, 3])?;
        let mut got: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
        let mut steps = 0;
        while let Some(step) = scheduler.step()? {
            let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
            assert!(step.tokens <= 40);
            for (request, rows) in step.requests {
                let row = &logits[rows.start * vocab..][..vocab];
                let best =
                    (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token") as u32;
                let answer = got.entry(request).or_default();
                answer.push(best);
                if answer.len() == 20 {
                    scheduler.finish(request)?;
                } else {
                    scheduler.push(request, best)?;
                }
            }
            steps += 1;
            if steps == 2 {
                scheduler.finish(cancelled)?;
            }
            assert!(steps < 1000);
        }
        assert_eq!(ids.iter().map(|id| got[id].clone()).collect::<Vec<_>>(), want, "{name}");
        let stats = scheduler.batch().stats();
        assert_eq!((stats.sequences, stats.free_pages), (0, 6), "{name}");
        assert!(stats.preemptions > 0, "{name}: {stats:?}");
        assert!(matches!(scheduler.finish(cancelled), Err(BatchError::UnknownRequest { .. })));
    }
    Ok(())
}

/// Mistakes of a caller: each has a type of its own, and changes nothing.
#[test]
fn bad_work() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(BatchOptions { max_logits: 0, ..small() })?;
    let (a, b, c, d) = (batch.add(&[1; 5])?, batch.add(&[2; 50])?, batch.add(&[3; 5])?, batch.add(&[4; 5])?);
    let before = batch.stats();
    let mut message =
        |work: &[Work]| batch.step(work).err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(message(&[]), "a step without work");
    assert_eq!(message(&[Work::new(a, 0)]), "the work on sequence 1 has no tokens");
    assert_eq!(message(&[Work::new(a, 6)]), "work on 6 tokens of sequence 1, of which 5 are pending");
    assert_eq!(message(&[Work::new(a, 1), Work::new(a, 1)]), "sequence 1 is in the step twice");
    assert_eq!(message(&[Work::new(b, 41)]), "a step of 41 tokens is above the budget of 40");
    assert_eq!(
        message(&[Work::new(a, 2), Work::new(c, 2), Work::new(d, 2)]),
        "a step with several tokens of 3 sequences, which is for 2"
    );
    assert_eq!(
        message(&[Work { id: a, tokens: 5, logits: WorkLogits::All }]),
        "a step that asks for 5 rows of logits, which has room for 4"
    );
    assert_eq!(batch.stats(), before);
    let message = |error: BatchError| error.to_string();
    assert_eq!(message(batch.add(&[]).unwrap_err()), "the prompt has no tokens");
    assert_eq!(message(batch.add(&[1; 65]).unwrap_err()), "a sequence of 65 tokens is longer than 64");
    assert_eq!(message(batch.add(&[1]).unwrap_err()), "the batch has 4 sequences, as many as it is for");
    assert!(matches!(batch.fork(a), Err(BatchError::OutOfSequences { most: 4 })));
    assert!(batch.add(&[384]).unwrap_err().to_string().contains("token ids below 384"));
    assert!(batch.push(a, 384).unwrap_err().to_string().contains("token ids below 384"));
    batch.remove(c)?;
    assert_eq!(message(batch.push(c, 1).unwrap_err()), "sequence 3 is not in the batch");
    assert!(matches!(batch.step(&[Work::new(c, 1)]), Err(BatchError::Unknown { id }) if id == c));
    let full = batch.add(&[1; 64])?;
    assert!(matches!(batch.push(full, 1), Err(BatchError::TooLong { tokens: 65, capacity: 64 })));
    assert!(matches!(batch.truncate(full, 0), Err(BatchError::Empty { .. })));
    let error: warpforge::Error = BatchError::NoWork.into();
    assert_eq!(error.to_string(), "a step without work");
    for (options, want) in [
        (BatchOptions { page_tokens: 48, ..small() }, "page_tokens: expected 16, 32, 64, 128 or 256, got 48"),
        (
            BatchOptions { pages: 3, ..small() },
            "pages: expected at least 4 for a sequence of 64 tokens, and below 2^31 tokens, got 3",
        ),
        (
            BatchOptions { max_sequences: 0, ..small() },
            "max_sequences: expected at least 1 and below 2^31, got 0",
        ),
    ] {
        assert_eq!(options.check().unwrap_err().to_string(), format!("Batch: {want}"));
    }
    Ok(())
}

/// An engine's thread owns them.
#[test]
fn batches_go_to_other_threads() {
    fn is_send<T: Send>() {}
    is_send::<Batch>();
    is_send::<Scheduler>();
    is_send::<BatchError>();
}

/// Placeholders of images are no text.
#[test]
fn images_are_refused() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3_vl"), DType::F32, &mut |_| {})?;
    let image = model.config().vision.as_ref().expect("a tower").image_token;
    let error = model.batch(small())?.add(&[1, image]).unwrap_err().to_string();
    assert_eq!(error, "Batch: tokens: expected text, got a placeholder of an image at 1");
    Ok(())
}

/// Budgets at their smallest: a token a step, a page a sequence.
#[test]
fn smallest_batches() -> Outcome {
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        for (max_step_tokens, max_prompts) in [(1, 1), (2, 1), (3, 2), (4, 4)] {
            let options = BatchOptions { max_step_tokens, max_prompts, ..small() };
            let parts = [(0, max_step_tokens, WorkLogits::Last)];
            let acts = [
                vec![Act::Add { like: 0, shared: 0, own: 5 }],
                vec![Act::Step(parts.to_vec()); 5],
                vec![Act::Decode],
            ];
            run(&model, options, &acts.concat(), name)?;
        }
    }
    Ok(())
}
