//! Sampling against its reference: the same token, unless the draw lies within rounding distance of a boundary.

mod case;
mod mistakes;

use half::{bf16, f16};
use proptest::prelude::*;
use testkit::strategies::Rng;
use warpforge::ops::sampling::{
    NO_TOKEN, PARAMS_LEN, Sampler, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem, reference,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{EVERY, devices, devices_for, every_kernel, on_executors, through_every_kernel};
use case::*;

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel("sampling", &[|case: &mut Case| case.rows.clear()], case(), Case::work, run_variants)
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("sampling", case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device; all devices choose the same.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        let mut first: Option<Output> = None;
        for device in &on.devices() {
            let output = output(device, &case, None)?;
            check(&format!("{device:?}"), &case, &output)?;
            prop_assert_eq!(first.get_or_insert_with(|| output.clone()), &output, "{:?}", device);
        }
    }

    /// Every kernel that can do the case, on every floor, chooses what the CPU does.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A row's token is what it is alone, planned for what it alone needs: it depends on no other row, nor on its
    /// place, nor on what else the plan has.
    #[test]
    fn rows_are_independent((case, on) in on_executors(case, |case| 3 * case.work())) {
        for device in &on.devices() {
            let together = output(device, &case, None)?;
            for (row, &id) in std::iter::zip(&case.rows, &together.ids) {
                let mut alone = Case::new(case.dtype, vec![row.clone()]);
                alone.features.history = alone.features.history.max(1);
                prop_assert_eq!(sample(device, &alone)?, [id]);
            }
            let mut turned = case.clone();
            turned.rows.reverse();
            let mut ids = sample(device, &turned)?;
            ids.reverse();
            prop_assert_eq!(ids, together.ids);
        }
    }

    /// The best token alone, and the limit of small temperatures, are greedy; so are the narrowest nucleus and the
    /// highest min_p, all in one call.
    #[test]
    fn limits_are_greedy((case, on) in on_executors(case, |case| 5 * case.work()), seed: u64) {
        let random = SamplingParams { temperature: 0.7, seed, ..GREEDY };
        let limits = [
            GREEDY,
            SamplingParams { top_k: Some(1), top_p: 0.9, typical_p: 0.9, ..random },
            SamplingParams { top_p: f32::MIN_POSITIVE, ..random },
            // With ties for the best, only top_k and top_p single one out.
            SamplingParams { min_p: 1.0, ..random },
            SamplingParams { temperature: f32::MIN_POSITIVE, ..random },
        ];
        let rows = |logits: &Vec<f64>| limits.map(|params| Row::new(logits.clone(), params));
        let limited = Case::new(case.dtype, case.rows.iter().map(|row| &row.logits).flat_map(rows).collect());
        for device in &on.devices() {
            for (ids, row) in sample(device, &limited)?.chunks(limits.len()).zip(&case.rows) {
                let greedy = reference::greedy(&row.logits);
                prop_assert_eq!(&ids[..3], &[greedy.unwrap_or(NO_TOKEN); 3]);
                let Some(best) = greedy else {
                    prop_assert_eq!(&ids[3..], &[NO_TOKEN; 2]);
                    continue;
                };
                let max = row.logits[best as usize];
                let below = |id: u32| max - row.logits[id as usize];
                // Infinite ones are equal or not.
                let is_near = |id: u32, distance: f64| row.logits[id as usize] == max || below(id) < distance;
                prop_assert!(is_near(ids[3], 1e-6), "{} below {}", below(ids[3]), max);
                // Subnormal logits may differ by less than even this temperature tells apart.
                let apart = 60.0 * f64::from(f32::MIN_POSITIVE);
                prop_assert!(is_near(ids[4], apart), "{} below {}", below(ids[4]), max);
            }
        }
    }
}

fn one_row(dtype: DType, params: SamplingParams, logits: Vec<f64>) -> Case {
    Case::new(dtype, vec![Row::new(logits, params)])
}

#[test]
fn the_reference_refuses_other_tokens() {
    let row: Vec<f64> = (0..16).map(|i| f64::from(i * 7 % 16) / 8.0).collect();
    let params = SamplingParams { top_k: Some(12), top_p: 0.9, min_p: 0.3, typical_p: 0.8, ..RANDOM };
    let near: Vec<u32> = (0..16).filter(|&id| is_near(&row, &params, id)).collect();
    assert_eq!(near.len(), 1, "{near:?}");
    let cut = SamplingParams { top_p: 1.0, min_p: 0.0, typical_p: 1.0, ..params };
    assert!(reference::kept(&row, &params).len() < reference::kept(&row, &cut).len());
}

#[test]
fn greedy_special_values() -> Result<(), TestCaseError> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let table: [(&[f64], u32); 12] = [
        (&[3.0], 0),
        (&[nan], NO_TOKEN),
        (&[-inf], 0),
        (&[nan, nan, nan], NO_TOKEN),
        (&[nan, -inf, -inf], 1),
        (&[-inf, nan, -1e4], 2),
        (&[1.0, 2.0, 2.0, nan], 1),
        (&[-0.0, 0.0], 0),
        (&[0.0, -0.0], 0),
        (&[1.0, inf, nan, inf], 1),
        (&[nan, -1.0, -2.0], 1),
        (&[5.0, 5.0, 5.0, 5.0, 5.0], 0),
    ];
    for device in &devices() {
        for dtype in DType::FLOATS {
            for (logits, want) in table {
                let case = one_row(dtype, GREEDY, logits.to_vec());
                assert_eq!(sample(device, &case)?, [want], "{device:?} {dtype} {logits:?}");
                assert_eq!(reference::greedy(logits).unwrap_or(NO_TOKEN), want, "reference {logits:?}");
            }
        }
    }
    Ok(())
}

/// Where a logit is infinite or NaN, draws still follow the definition, and so do log-probabilities.
#[test]
fn random_special_values() -> Result<(), TestCaseError> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let table: [(&[f64], &[u32]); 7] = [
        (&[nan, nan], &[NO_TOKEN]),
        (&[nan, 1.0, nan], &[1]),
        (&[-inf, -inf, nan], &[0, 1]),
        (&[1.0, inf, 3.0, inf], &[1, 3]),
        (&[-inf, 1.0, 1.0], &[1, 2]),
        (&[-9984.0, 9984.0], &[1]),
        (&[-0.0, 0.0, -inf], &[0, 1]),
    ];
    for device in &devices_for(2 * work(7 * 3 * 40, 3)) {
        for dtype in DType::FLOATS {
            for (logits, wanted) in table {
                let rows = (0..40).map(|step| Row::new(logits.to_vec(), SamplingParams { step, ..RANDOM }));
                let mut case = Case::new(dtype, rows.collect());
                case.features.logprobs = Some(3);
                let output = output(device, &case, None)?;
                check(&format!("{device:?} {dtype}"), &case, &output)?;
                let mut seen = output.ids;
                seen.sort();
                seen.dedup();
                assert_eq!(seen, wanted, "{device:?} {dtype} {logits:?}");
            }
        }
    }
    Ok(())
}

/// The longest vocabulary that occurs, with the parameters that occur, in one call: every level of the searches is
/// used, with few tokens left and with many.
#[test]
fn long_rows() -> Result<(), TestCaseError> {
    let params = SamplingParams { temperature: 0.8, seed: 5, step: 3, ..GREEDY };
    let bounds = [
        (None, 1.0, 0.0, 1.0),
        (Some(50), 1.0, 0.0, 1.0),
        (None, 0.9, 0.0, 1.0),
        (Some(1000), 0.95, 0.0, 1.0),
        (Some(100_000), 0.999, 1e-4, 1.0),
        (Some(40), 0.95, 0.05, 0.9),
        (None, 1.0, 0.0, 0.3),
        (Some(2000), 1.0, 1e-3, 0.95),
    ];
    for (dtype, vocab) in [(DType::F32, 262_144), (DType::BF16, 151_936), (DType::F16, 50_257)] {
        for device in &devices_for(9 * work(2, vocab)) {
            let data = logits(Logits::Peaked, dtype, vocab, 21);
            let of = |(top_k, top_p, min_p, typical_p)| {
                let params = SamplingParams { top_k, top_p, min_p, typical_p, ..params };
                Row::new(data.clone(), params)
            };
            let mut case = Case::new(dtype, bounds.map(of).to_vec());
            case.rows.push(Row::new(data.clone(), GREEDY));
            case.features.logprobs = Some(20);
            let output = output(device, &case, None)?;
            check(&format!("{device:?} {dtype}"), &case, &output)?;
            // In more rows than half the multiprocessors have room for, each has one block.
            let many = Case { rows: case.rows.iter().cycle().take(9 * 9).cloned().collect(), ..case.clone() };
            if !format!("{:?}", device.place()).contains("Simulated") {
                assert_eq!(sample(device, &many)?, output.ids.repeat(9), "{device:?} {dtype}");
            }
        }
    }
    Ok(())
}

/// A plan takes as many rows as it is for, in launches of 128: the others are where they belong.
#[test]
fn more_rows_than_a_launch() -> Result<(), TestCaseError> {
    let (rows, vocab) = (131, 40);
    for device in &devices_for(2 * work(rows, vocab)) {
        let data = logits(Logits::Peaked, DType::F32, rows * vocab, 3);
        let row = |(index, logits): (usize, &[f64])| {
            let params = SamplingParams { seed: index as u64, top_k: Some(5), ..RANDOM };
            let mut row = Row::new(logits.to_vec(), params);
            row.mask = Some((0..vocab).map(|token| (token + index) % 3 > 0).collect());
            row
        };
        let mut case = Case::new(DType::F32, data.chunks(vocab).enumerate().map(row).collect());
        case.features.logprobs = Some(2);
        check(&format!("{device:?}"), &case, &output(device, &case, None)?)?;
    }
    Ok(())
}

/// Many ties at the threshold: the lowest indices are kept, exactly as many as asked for.
#[test]
fn ties_are_kept_by_index() -> Result<(), TestCaseError> {
    for vocab in [500, 5000] {
        let rows = 100;
        for device in &devices_for(2 * work(rows, vocab)) {
            let params = |step| SamplingParams { top_k: Some(7), seed: 3, step, ..RANDOM };
            let row = |step| Row::new(vec![1.5; vocab], params(step));
            let mut seen = sample(device, &Case::new(DType::BF16, (0..rows as u64).map(row).collect()))?;
            seen.sort();
            seen.dedup();
            assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6], "{device:?}");
            // Tokens of the same probability: a share of them are the first five.
            let top_p = 4.995 / vocab as f32;
            let row = |step| Row::new(vec![-2.0; vocab], SamplingParams { top_p, seed: 3, step, ..RANDOM });
            let mut seen = sample(device, &Case::new(DType::F32, (0..rows as u64).map(row).collect()))?;
            seen.sort();
            seen.dedup();
            assert_eq!(seen, [0, 1, 2, 3, 4], "{device:?}");
        }
    }
    Ok(())
}

/// All but one: the last of equal tokens is never drawn, each of the others is.
#[test]
fn all_but_one() -> Result<(), TestCaseError> {
    for vocab in [2, 3] {
        let row = |seed| {
            let params = SamplingParams { top_k: Some(vocab as u32 - 1), seed, ..RANDOM };
            Row::new(vec![0.5; vocab], params)
        };
        for device in &devices_for(work(8, vocab)) {
            let mut seen = sample(device, &Case::new(DType::F32, (0..8).map(row).collect()))?;
            seen.sort();
            seen.dedup();
            assert_eq!(seen, (0..vocab as u32 - 1).collect::<Vec<u32>>(), "{device:?}");
        }
    }
    Ok(())
}

/// χ² of 4096 draws against the probabilities, over steps and over seeds, with each bound: 15 degrees of freedom or
/// fewer exceed 50 once in 10^5; the seeds are fixed.
#[test]
fn draws_follow_the_probabilities() -> Result<(), TestCaseError> {
    const DRAWS: u64 = 4096;
    let row: Vec<f64> = (0..16).map(|i| f64::from(i * 7 % 16) / 8.0).collect();
    let bounded = [
        RANDOM,
        SamplingParams { temperature: 0.5, top_k: Some(9), ..RANDOM },
        SamplingParams { top_p: 0.8, ..RANDOM },
        SamplingParams { min_p: 0.4, ..RANDOM },
        SamplingParams { typical_p: 0.6, ..RANDOM },
        SamplingParams {
            temperature: 1.5,
            top_k: Some(14),
            top_p: 0.95,
            min_p: 0.2,
            typical_p: 0.9,
            ..RANDOM
        },
    ];
    for params in bounded {
        let kept = reference::kept(&row, &params);
        for by_seed in [false, true] {
            for device in &devices_for(work(DRAWS as usize, row.len())) {
                let of = |n| {
                    let (seed, step) = if by_seed { (n, 5) } else { (11, n) };
                    Row::new(row.clone(), SamplingParams { seed, step, ..params })
                };
                let mut counts = [0u32; 16];
                for id in sample(device, &Case::new(DType::F32, (0..DRAWS).map(of).collect()))? {
                    counts[id as usize] += 1;
                }
                let of_kept: u32 = kept.iter().map(|&(token, _)| counts[token as usize]).sum();
                assert_eq!(u64::from(of_kept), DRAWS, "{device:?} {params:?}: {counts:?}");
                let expected = |p: f64| DRAWS as f64 * p;
                let chi2: f64 = kept
                    .iter()
                    .map(|&(token, p)| {
                        (f64::from(counts[token as usize]) - expected(p)).powi(2) / expected(p)
                    })
                    .sum();
                assert!(chi2 < 50.0, "{device:?} {params:?}: χ² {chi2}: {counts:?}");
            }
        }
    }
    Ok(())
}

/// The same seed and step repeat; another seed or step draws anew.
#[test]
fn draws_are_reproducible() -> Result<(), TestCaseError> {
    let rows = 64u64;
    for device in &devices_for(work(3 * rows as usize, 1000)) {
        let draw = |of: &dyn Fn(u64) -> SamplingParams| {
            let row = |n| Row::new(vec![0.0; 1000], of(n));
            sample(device, &Case::new(DType::F16, (0..rows).map(row).collect()))
        };
        let same = draw(&|_| RANDOM)?;
        assert!(same.iter().all(|id| *id == same[0]), "{same:?}");
        let mut seen = draw(&|step| SamplingParams { step, ..RANDOM })?;
        assert_eq!(seen[0], same[0]);
        seen.extend(draw(&|seed| SamplingParams { seed: seed + 100, ..RANDOM })?);
        seen.sort();
        seen.dedup();
        assert!(seen.len() > rows as usize, "{seen:?}");
    }
    Ok(())
}

/// The tokens of fixed logits, as they were on the day this was written: neither a backend nor a release may change
/// them.
#[test]
fn tokens_do_not_change() -> Result<(), TestCaseError> {
    let logits: Vec<f64> = (0..1000).map(|i| f64::from(i * 37 % 101) / 16.0).collect();
    let params = SamplingParams {
        temperature: 0.75,
        top_k: Some(200),
        top_p: 0.9,
        seed: 0x1234_5678_9abc_def0,
        ..GREEDY
    };
    let row = |step| Row::new(logits.clone(), SamplingParams { step, ..params });
    for device in &devices() {
        let ids = sample(device, &Case::new(DType::F32, [0, 1, 2, 1 << 40].map(row).to_vec()))?;
        assert_eq!(ids, [464, 379, 191, 666], "{device:?}");
    }
    Ok(())
}

/// Masks: one token, of any logit that is a number, is the token; none is none, beside rows that have some.
#[test]
fn masks() -> Result<(), TestCaseError> {
    let vocab = 70;
    let of = |params, allowed: &[usize]| {
        let mut row = Row::new((0..vocab).map(|i| f64::from(i as u32)).collect(), params);
        row.logits[3] = f64::NEG_INFINITY;
        row.logits[4] = f64::NAN;
        row.mask = Some((0..vocab).map(|token| allowed.contains(&token)).collect());
        row
    };
    let random = SamplingParams { top_k: Some(5), top_p: 0.9, typical_p: 0.9, ..RANDOM };
    for device in &devices_for(3 * work(14, vocab)) {
        for params in [GREEDY, RANDOM, random] {
            let mut rows: Vec<Row> =
                [&[0][..], &[31], &[32], &[69], &[3], &[], &[4]].map(|allowed| of(params, allowed)).to_vec();
            rows.push(Row { mask: None, ..of(GREEDY, &[]) });
            let mut case = Case::new(DType::F32, rows);
            case.features.logprobs = Some(0);
            let output = output(device, &case, None)?;
            assert_eq!(output.ids, [0, 31, 32, 69, 3, NO_TOKEN, NO_TOKEN, 69], "{device:?} {params:?}");
            // Of the logits as they are.
            assert!(output.chosen[0] < -68.0 && output.chosen[5] == f64::NEG_INFINITY, "{:?}", output.chosen);
        }
    }
    Ok(())
}

/// Bias and penalties are those of the naive formula: the tokens, and so their probabilities, are those of logits
/// edited beforehand.
#[test]
fn edits_are_those_of_the_reference() -> Result<(), TestCaseError> {
    let vocab = 9000;
    for device in &devices_for(8 * work(6, vocab)) {
        for dtype in [DType::F32, DType::BF16] {
            let row = |seed: u64| {
                let mut rng = Rng::new(seed);
                let values = logits(Logits::Peaked, dtype, vocab, seed);
                let params = SamplingParams { top_k: Some(200), temperature: 2.0, seed, ..RANDOM };
                let mut row = Row::new(values, params);
                row.params.repetition_penalty = 1.5;
                row.params.presence_penalty = 1.0;
                row.params.frequency_penalty = 0.375;
                row.params.prompt_len = 300;
                row.history = (0..700).map(|_| rng.below(vocab / 8) as u32 * 8).collect();
                row.bias = (0..40).map(|i| (i * 211, 4.0 * rng.normal() as f32)).collect();
                row
            };
            let case = Case::new(dtype, (0..6).map(row).collect());
            let plain = |row: &Row| Row::new(row.edited(), row.params);
            let mut edited = Case::new(DType::F32, case.rows.iter().map(plain).collect());
            for row in &mut edited.rows {
                row.params = SamplingParams {
                    repetition_penalty: 1.0,
                    presence_penalty: 0.0,
                    frequency_penalty: 0.0,
                    prompt_len: 0,
                    ..row.params
                };
            }
            let ids = sample(device, &case)?;
            assert_eq!(ids, sample(device, &edited)?, "{device:?} {dtype}");
            let plain = |row: &Row| Row::new(row.logits.clone(), edited.rows[0].params);
            assert_ne!(ids, sample(device, &Case::new(dtype, case.rows.iter().map(plain).collect()))?);
        }
    }
    Ok(())
}

/// Whatever the table holds, a run ends, with tokens of the vocabulary, the same on every device.
#[test]
fn any_table() -> Result<(), TestCaseError> {
    let (rows, vocab) = (12, 600);
    let mut rng = Rng::new(5);
    let data = logits(Logits::Peaked, DType::BF16, rows * vocab, 9);
    let mut case = Case::of(DType::BF16, GREEDY, &data, vocab);
    case.features = ALL;
    for row in &mut case.rows {
        row.history = (0..24).map(|_| rng.below(1 << 32) as u32 >> rng.below(32)).collect();
        row.bias = (0..5)
            .map(|i| (i * 1000 + rng.below(1000) as u32, f32::from_bits(rng.below(1 << 32) as u32)))
            .collect();
        row.mask = Some((0..vocab).map(|_| rng.below(2) == 0).collect());
    }
    for _ in 0..8 {
        let words: Vec<u32> =
            (0..rows * PARAMS_LEN).map(|_| rng.below(1 << 32) as u32 >> (rng.below(3) * 12)).collect();
        let want = output_of_words(&Device::cpu(), &case, None, &words)?;
        assert!(want.ids.iter().all(|&id| id == NO_TOKEN || (id as usize) < vocab), "{:?}", want.ids);
        for device in &devices_for(5 * work(rows, vocab)) {
            assert_eq!(output_of_words(device, &case, None, &words)?, want, "{device:?} {words:?}");
        }
    }
    Ok(())
}

/// A recorded run takes what the table holds when it is replayed.
#[test]
fn recorded_runs_read_the_table() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let row = |seed| SamplingParams { top_k: Some(50), seed, ..RANDOM };
        let problem =
            SamplingProblem { features: SamplingFeatures::DRAWS, ..SamplingProblem::new(3, 100, DType::F32) };
        let plan = Sampler::plan(device, problem)?;
        let logits = Tensor::zeros(&stream, &[3, 100], DType::F32)?;
        let mut table = Tensor::zeros(&stream, &[3, PARAMS_LEN], DType::U32)?;
        let mut ids = Tensor::zeros(&stream, &[3], DType::U32)?;
        let Ok(graph) = stream.capture(|stream| {
            let args = SamplingArgs::new(logits.view(), ids.view_mut());
            plan.run(stream, SamplingArgs { params: Some(table.view()), ..args })
        }) else {
            // The CPU and simulated cards record nothing.
            continue;
        };
        let mut seen = Vec::new();
        for seeds in [[1, 2, 3], [4, 5, 6]] {
            let mut words = [0; 3 * PARAMS_LEN];
            problem.write_params(&seeds.map(row), &mut words)?;
            table.view_mut().write(&stream, &words)?;
            // SAFETY: tensors and plan are there, and nobody else uses them.
            unsafe { graph.launch(&stream)? };
            let replayed = ids.to_vec::<u32>(&stream)?;
            let args = SamplingArgs::new(logits.view(), ids.view_mut());
            plan.run(&stream, SamplingArgs { params: Some(table.view()), ..args })?;
            assert_eq!(ids.to_vec::<u32>(&stream)?, replayed, "{device:?}");
            seen.push(replayed);
        }
        assert_ne!(seen[0], seen[1]);
    }
    Ok(())
}

/// Types of a tensor that a test may hold are the harness's business; this one takes all three kinds of float directly.
#[test]
fn tensors_of_every_float_type() -> Result<(), Error> {
    fn run<T: warpforge::Element>(device: &Device, values: [T; 3]) -> Result<u32, Error> {
        let stream = device.stream()?;
        let logits = Tensor::from_slice(&stream, &[1, 3], &values)?;
        let mut ids = Tensor::zeros(&stream, &[1], DType::U32)?;
        let plan = Sampler::plan(device, SamplingProblem::new(1, 3, T::DTYPE))?;
        plan.run(&stream, SamplingArgs::new(logits.view(), ids.view_mut()))?;
        Ok(ids.to_vec::<u32>(&stream)?[0])
    }
    for device in &devices() {
        assert_eq!(run(device, [1.0f32, 3.0, 2.0])?, 1);
        assert_eq!(run(device, [1.0, 2.0, 3.0].map(f16::from_f32))?, 2);
        assert_eq!(run(device, [3.0, 1.0, 2.0].map(bf16::from_f32))?, 0);
    }
    Ok(())
}
