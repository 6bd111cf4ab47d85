//! A prefix that sequences share, read once for all of them: the logits that each sequence has alone, and those of a
//! batch that reads it once for each.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use testkit::golden;
use warpforge::models::{Batch, SequenceId, Work, WorkLogits};

use super::batch::{Act, Seen, acts, drive, run, small};
use super::*;

/// A small batch that reads what is shared once, wherever there is something.
fn sharing() -> BatchOptions {
    BatchOptions { pages: 16, shared_prefix: SharedPrefix::Always, ..small() }
}

fn load(device: &Device, name: &str, dtype: DType) -> Result<Model, warpforge::Error> {
    Model::load(device, &golden::folder(name), dtype, &mut |_| {})
}

/// Pages that are found again, and a fork's; decode steps, chunks of prompts, and both in a step; a sequence that
/// leaves, one that begins otherwise, and prefixes that end; and in how many steps of it something is read once.
fn one_of_each() -> (Vec<Act>, u64) {
    let step = |parts: &[(usize, usize)]| {
        Act::Step(parts.iter().map(|&(which, tokens)| (which, tokens, WorkLogits::All)).collect())
    };
    let acts = vec![
        Act::Add { like: 0, shared: 0, own: 40 },
        step(&[(0, 40)]),
        // Two pages are found again.
        Act::Add { like: 0, shared: 36, own: 3 },
        Act::Add { like: 0, shared: 33, own: 6 },
        step(&[(1, 4), (2, 7)]), // 1: several tokens each
        Act::Fork(2),
        step(&[(1, 3)]),
        Act::Decode, // 2: four sequences
        // Back to what is found again, so that there is something to compute.
        Act::Preempt(0, true),
        Act::Preempt(1, true),
        step(&[(0, 3), (1, 4)]), // 3
        Act::Preempt(2, true),
        Act::Preempt(3, true),
        step(&[(0, 1), (1, 1), (2, 3), (3, 5)]), // 4: two of each group
        step(&[(0, 1), (1, 2), (2, 1), (3, 1)]), // 5: three tokens beside a chunk
        Act::Remove(3),
        step(&[(0, 1), (1, 1), (2, 1)]), // 6: three that are padded to four
        // Within the second page, so that the first is the only one that all have.
        Act::Truncate(1, 20),
        Act::Preempt(0, true),
        step(&[(0, 8)]),
        Act::Preempt(2, true),
        step(&[(2, 7)]),
        Act::Decode, // 7
        // Within the first: nothing is shared.
        Act::Truncate(1, 10),
        Act::Decode,
        Act::Remove(1),
        Act::Decode, // 8: the two that are left
        // One that begins otherwise, and goes.
        Act::Add { like: 9, shared: 0, own: 5 },
        step(&[(2, 4)]),
        step(&[(2, 1)]),
        Act::Decode,
        Act::Remove(2),
        Act::Decode, // 9
    ];
    (acts, 9)
}

/// Whether some layer of a model can do it: latent attention is read plainly.
fn can_share(name: &str) -> bool {
    name != "glm4_moe_lite"
}

#[test]
fn one_of_each_on_the_cpu() -> Outcome {
    let (acts, shared) = one_of_each();
    // States are not found again: of such a model only forks share something.
    for name in GOLDEN.into_iter().filter(|&name| name != "qwen3_next") {
        let model = load(&Device::cpu(), name, DType::F32)?;
        let stats = run(&model, sharing(), &acts, name)?;
        assert_eq!(stats.shared_prefix_steps, if can_share(name) { shared } else { 0 }, "{name}");
    }
    Ok(())
}

/// Decode steps of forks by turns with a prefix and without one, since one of them begins otherwise: on a card often
/// enough that both kinds are recorded and launched again.
fn by_turns(device: &Device, name: &str) -> Outcome {
    let prompt = |like, own| {
        [Act::Add { like, shared: 0, own }, Act::Step(vec![(like, own, WorkLogits::All)]), Act::Fork(like)]
    };
    let decode = [Act::Decode, Act::Decode, Act::Decode, Act::Decode];
    let mut acts = [&prompt(0, 20)[..], &decode].concat();
    for _ in 0..2 {
        // Two that share one page, and then a third that does not.
        acts.extend([&prompt(2, 5)[..2], &decode[..], &[Act::Remove(2)], &decode[..]].concat());
    }
    let stats = run(&load(device, name, DType::F32)?, sharing(), &acts, name)?;
    assert_eq!(stats.shared_prefix_steps, if can_share(name) { 12 } else { 0 }, "{name}: {stats:?}");
    Ok(())
}

#[test]
fn by_turns_on_the_cpu() -> Outcome {
    GOLDEN.iter().try_for_each(|name| by_turns(&Device::cpu(), name))
}

/// Random schedules, in which much is shared.
#[test]
fn schedules_on_the_cpu() -> Outcome {
    for name in ["qwen3", "qwen3_sliding", "qwen3_next"] {
        let model = load(&Device::cpu(), name, DType::F32)?;
        let mut runner = TestRunner::new_with_rng(
            Config { cases: 24, failure_persistence: None, ..Config::default() },
            TestRng::deterministic_rng(RngAlgorithm::ChaCha),
        );
        let shared = Cell::new(0);
        runner.run(&acts(40), |acts| {
            let beginning = [
                Act::Add { like: 0, shared: 0, own: 36 },
                Act::Step(vec![(0, 36, WorkLogits::All)]),
                Act::Add { like: 0, shared: 33, own: 5 },
                Act::Fork(0),
            ];
            let acts = [&beginning, &acts[..]].concat();
            let stats = run(&model, sharing(), &acts, name);
            let stats = stats.map_err(|error| TestCaseError::fail(error.to_string()))?;
            shared.set(shared.get() + stats.shared_prefix_steps);
            Ok(())
        })?;
        assert!(shared.get() >= 48, "{name}: {} steps", shared.get());
    }
    Ok(())
}

/// The largest error of a row of logits against the same of another batch, which computed as many.
fn apart(got: &Seen, want: &Seen) -> f64 {
    assert!(got.keys().eq(want.keys()));
    let rows = std::iter::zip(got.values(), want.values()).flat_map(|(got, want)| {
        assert_eq!(got.len(), want.len());
        std::iter::zip(got, want)
    });
    rows.map(|(got, want)| relative_l2(got, want)).fold(0.0, f64::max)
}

/// Against the batch that reads plainly.
fn against_the_plain_one(
    device: &Device,
    (name, dtype, cache_type): (&str, DType, CacheType),
    (acts, shared): (Vec<Act>, u64),
    bound: f64,
) -> Outcome {
    let model = load(device, name, dtype)?;
    let of =
        |shared_prefix| drive(&model, BatchOptions { shared_prefix, cache_type, ..sharing() }, &acts, name);
    let [(off, plain), (always, got)] = [of(SharedPrefix::Off)?, of(SharedPrefix::Always)?];
    let steps = [off, always].map(|stats| stats.shared_prefix_steps);
    assert_eq!(steps, [0, shared], "{name} in {dtype} on {device:?}");
    let error = apart(&got, &plain);
    assert!(error > 0.0 && error <= bound, "{name} in {dtype} on {device:?}: {error:.2e}");
    Ok(())
}

#[test]
fn against_the_plain_batch() -> Outcome {
    for (name, dtype, cache_type, bound) in [
        ("qwen3", DType::F32, CacheType::Model, 2e-6),
        ("qwen3_sliding", DType::F32, CacheType::Model, 2e-6),
        ("qwen3", DType::BF16, CacheType::Model, 0.02),
        ("qwen3", DType::BF16, CacheType::Fp8, 0.02),
    ] {
        against_the_plain_one(&Device::cpu(), (name, dtype, cache_type), one_of_each(), bound)?;
    }
    Ok(())
}

mod in_the_simulator {
    use super::*;

    /// Three tokens that are padded to four, and two chunks with more queries than the kernels of few take.
    fn few() -> (Vec<Act>, u64) {
        let step = |parts: &[(usize, usize)]| {
            Act::Step(parts.iter().map(|&(which, tokens)| (which, tokens, WorkLogits::Last)).collect())
        };
        let acts = vec![
            Act::Add { like: 0, shared: 0, own: 28 },
            step(&[(0, 28)]),
            Act::Add { like: 0, shared: 20, own: 8 },
            step(&[(1, 12)]),
            Act::Fork(0),
            Act::Decode,
            Act::Preempt(0, true),
            Act::Preempt(1, true),
            step(&[(0, 10), (1, 11)]),
        ];
        (acts, 2)
    }

    macro_rules! cases {
        ($($name:ident: $arch:ident, $dtype:ident, $cache_type:ident, $bound:expr;)*) => {$(
            #[test]
            fn $name() -> Outcome {
                let device = Device::simulated(Arc::new(Card::new(Arch::$arch)))?;
                let case = ("qwen3", DType::$dtype, CacheType::$cache_type);
                against_the_plain_one(&device, case, few(), $bound)
            }
        )*};
    }

    cases! {
        f32_on_sm61: Sm61, F32, Model, 2e-6;
        bf16_on_sm80: Sm80, BF16, Model, 0.02;
        bf16_on_sm90a: Sm90a, BF16, Model, 0.02;
        fp8_on_sm90a: Sm90a, BF16, Fp8, 0.02;
    }
}

#[test]
fn on_the_card() -> Outcome {
    for device in cards() {
        against_the_plain_one(&device, ("qwen3", DType::F32, CacheType::Model), one_of_each(), 2e-6)?;
        against_the_plain_one(&device, ("qwen3", DType::BF16, CacheType::Model), one_of_each(), 0.02)?;
        against_the_plain_one(&device, ("qwen3", DType::BF16, CacheType::Fp8), one_of_each(), 0.02)?;
        for name in GOLDEN {
            by_turns(&device, name)?;
        }
    }
    Ok(())
}

/// A batch that shares too little for it to pay, and one where it is off, have the same bits.
#[test]
fn what_does_not_pay_is_read_plainly() -> Outcome {
    let acts = one_of_each().0;
    for name in ["qwen3", "qwen3_sliding"] {
        let model = load(&Device::cpu(), name, DType::F32)?;
        let of = |shared_prefix| drive(&model, BatchOptions { shared_prefix, ..sharing() }, &acts, name);
        let ((off, plain), (auto, same)) = (of(SharedPrefix::Off)?, of(SharedPrefix::Auto)?);
        assert_eq!((plain, off), (same, auto), "{name}");
        assert_eq!(off.shared_prefix_steps, 0, "{name}");
    }
    Ok(())
}

/// Where bits may not depend on the mix nothing is shared.
#[test]
fn not_where_bits_stay_the_same() -> Outcome {
    let model = load(&Device::cpu().with_invariance(Invariance::Batch), "qwen3", DType::F32)?;
    let stats = run(&model, sharing(), &one_of_each().0, "qwen3")?;
    assert_eq!(stats.shared_prefix_steps, 0);
    Ok(())
}

/// Plans are made where a step can gain by them, and not where the most that can be shared is too little.
#[test]
fn plans_are_made_where_they_pay() -> Outcome {
    let model = load(&Device::cpu(), "qwen3", DType::F32)?;
    let merges = |options: BatchOptions| -> Result<usize, BatchError> {
        let reports = model.batch(options)?.optimization_reports();
        Ok(reports.iter().filter(|report| report.to_string().contains("attention_merge")).count())
    };
    let of = |shared_prefix| BatchOptions { shared_prefix, ..small() };
    let plans = [SharedPrefix::Off, SharedPrefix::Auto, SharedPrefix::Always].map(|own| merges(of(own)));
    let [off, auto, always] = plans;
    // One of each group.
    assert_eq!([off?, auto?, always?], [0, 0, 2]);
    let long = BatchOptions { max_sequences: 64, capacity: 8192, pages: 1024, ..of(SharedPrefix::Auto) };
    assert_eq!(merges(BatchOptions { max_prompts: 1, ..long })?, 1, "a single prompt shares nothing");
    Ok(())
}

/// All memory is taken when the batch is made.
#[test]
fn steps_allocate_nothing() -> Outcome {
    let device = Device::cpu();
    let model = load(&device, "qwen3", DType::F32)?;
    let mut batch = model.batch(sharing())?;
    let allocations = || device.pool().stats().num_allocations;
    let before = allocations();
    let decode = |batch: &mut Batch, ids: &[SequenceId]| -> Outcome {
        for &id in ids {
            batch.push(id, 7)?;
        }
        batch.step(&ids.iter().map(|&id| Work::new(id, 1)).collect::<Vec<_>>())?;
        Ok(())
    };
    let first = batch.add(&[5; 40])?;
    batch.step(&[Work::new(first, 40)])?;
    let second = batch.add(&[5; 36])?;
    batch.step(&[Work::new(second, 4)])?;
    let fork = batch.fork(first)?;
    decode(&mut batch, &[first, second, fork])?;
    for id in [first, fork] {
        batch.preempt(id)?;
        batch.reuse(id)?;
    }
    batch.step(&[Work::new(first, 9), Work::new(fork, 9)])?;
    decode(&mut batch, &[first, second, fork])?;
    assert_eq!((allocations(), batch.stats().shared_prefix_steps), (before, 3));
    Ok(())
}
