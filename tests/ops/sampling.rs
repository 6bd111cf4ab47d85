//! Sampling against its reference: the same token, unless the draw lies within rounding distance of a boundary.

use abi::ops::sampling::{SamplingVariant, VARIANTS, draw};
use half::{bf16, f16};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::sampling::reference;
use warpforge::ops::sampling::{Sampler, Sampling, SamplingArgs, SamplingProblem};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel, fail, floats, on_executors, values,
};

/// Rounding distance: how far sums of probabilities may be from those of the reference.
const NEAR: f64 = 1e-5;

/// A block of 1024 threads for a row and a walk, with some hundred barriers and shuffles for all of the searches.
fn work(rows: usize, vocab: usize) -> usize {
    rows * (1024 * 500 + 20 * vocab)
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    vocab: usize,
    layout: Layout,
    method: Sampling,
    logits: Vec<f64>,
    step: u64,
}

impl Case {
    fn work(&self) -> usize {
        work(self.rows, self.vocab)
    }
}

/// What logits look like.
#[derive(Clone, Copy, Debug)]
enum Logits {
    /// Of one of the testkit's kinds.
    Of(Values),
    /// A few values only, so that there are many ties.
    Ties,
    /// As a model's: some far above the rest.
    Peaked,
    /// All the same.
    Equal,
}

fn logits(kind: Logits, dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    let mut rng = Rng::new(seed);
    let drawn: Vec<f64> = match kind {
        Logits::Of(kind) => return values(kind, dtype, n, seed),
        Logits::Ties => (0..n).map(|_| rng.below(4) as f64 - 2.0).collect(),
        Logits::Peaked => {
            (0..n).map(|_| 2.0 * rng.normal() + if rng.below(50) == 0 { 8.0 } else { 0.0 }).collect()
        }
        Logits::Equal => vec![rng.normal(); n],
    };
    testkit::round::round_all(dtype, &drawn)
}

fn method() -> impl Strategy<Value = Sampling> {
    let temperature = prop_oneof![4 => 0.1f32..3.0, 1 => Just(1.0f32), 1 => 1e-3f32..1e-2, 1 => 10.0f32..1e3];
    let top_k = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (1u32..100).prop_map(Some), 1 => (1u32..5000).prop_map(Some)];
    let top_p = prop_oneof![2 => Just(1.0f32), 3 => 0.01f32..1.0, 1 => Just(1e-6f32), 1 => Just(0.999_99f32)];
    let random = (temperature, top_k, top_p, any::<u64>())
        .prop_map(|(temperature, top_k, top_p, seed)| Sampling::Random { temperature, top_k, top_p, seed });
    prop_oneof![1 => Just(Sampling::Greedy), 3 => random]
}

fn case() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![
        2 => any_values().prop_map(Logits::Of),
        1 => Just(Logits::Ties),
        2 => Just(Logits::Peaked),
        1 => Just(Logits::Equal)
    ];
    let sizes = (floats(), dims(&[4], 9), dims_from(1, &[32, 256, 1024], 4000));
    let layout = (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9]);
    let draws = (any::<u64>(), prop_oneof![0u64..5, any::<u64>()]);
    (sizes, layout, kind, method(), draws).prop_map(
        |((dtype, rows, vocab), (padding, offset), kind, method, (seed, step))| Case {
            dtype,
            rows,
            vocab,
            layout: Layout { padding, offset },
            method,
            logits: logits(kind, dtype, rows * vocab, seed),
            step,
        },
    )
}

/// The tokens that a device chooses, after checking that nothing but them was written.
fn sample(
    device: &Device,
    case: &Case,
    variant: Option<&'static SamplingVariant>,
) -> Result<Vec<u32>, TestCaseError> {
    let Case { dtype, rows, vocab, layout, method, step, .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let problem = SamplingProblem { rows, vocab, dtype, method };
    let plan = match variant {
        None => Sampler::plan(device, problem),
        Some(variant) => Sampler::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let logits = Rows::input(&stream, dtype, &case.logits, vocab, layout).map_err(fail)?;
    let mut ids = Rows::output(&stream, DType::U32, 1, rows, Layout::default()).map_err(fail)?;
    let view = ids.view_mut().reshape(&[rows]).map_err(fail)?;
    plan.run(&stream, SamplingArgs { logits: logits.view(), ids: view, step }).map_err(fail)?;
    Ok(ids.read(&stream)?.into_iter().map(|id| id as u32).collect())
}

/// Whether `id` is what the definition gives, for some `u` and some `top_p` within [`NEAR`] of the true ones.
fn is_near(ranked: &[(u32, f64)], top_p: f64, u: f64, id: u32) -> bool {
    if ranked.is_empty() {
        return id == 0;
    }
    // Lengths of the kept prefix, from the shortest to the longest that `top_p` within its distance gives.
    let (mut sum, mut before, mut own) = (0.0, 0.0, None);
    for &(token, p) in ranked {
        let reached_before = sum >= top_p + NEAR;
        if reached_before {
            return false;
        }
        sum += p;
        if token < id {
            before += p;
        } else if token == id {
            own = Some(p);
        }
        let may_end = sum >= top_p - NEAR;
        if let (true, Some(own)) = (may_end, own)
            && before / sum <= u + NEAR
            && u - NEAR <= (before + own) / sum
        {
            return true;
        }
    }
    false
}

fn check(what: &str, case: &Case, ids: &[u32]) -> Result<(), TestCaseError> {
    prop_assert_eq!(ids.len(), case.rows);
    for (row, (&id, logits)) in std::iter::zip(ids, case.logits.chunks(case.vocab)).enumerate() {
        match case.method {
            Sampling::Greedy => prop_assert_eq!(id, reference::greedy(logits), "{}: row {}", what, row),
            Sampling::Random { temperature, top_k, top_p, seed } => {
                let u = draw(seed, case.step, row as u32) as f64 / 2f64.powi(64);
                let ranked = reference::ranked(logits, f64::from(temperature), top_k);
                let want = reference::random(logits, f64::from(temperature), top_k, f64::from(top_p), u);
                prop_assert!(
                    is_near(&ranked, f64::from(top_p), u, id),
                    "{what}: row {row}: token {id}, expected {want} for u = {u}"
                );
            }
        }
    }
    Ok(())
}

/// The wanted kernels that can do the case; each chooses what the CPU does.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let want = sample(&Device::cpu(), case, None)?;
    for device in cards {
        for variant in VARIANTS {
            let Case { dtype, rows, vocab, method, .. } = *case;
            if wanted(variant.entry)
                && Sampler::plan_with(device, SamplingProblem { rows, vocab, dtype, method }, variant).is_ok()
            {
                prop_assert_eq!(&sample(device, case, Some(variant))?, &want, "{}", variant.entry);
            }
        }
    }
    Ok(())
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
        let mut first: Option<Vec<u32>> = None;
        for device in &on.devices() {
            let ids = sample(device, &case, None)?;
            check(&format!("{device:?}"), &case, &ids)?;
            prop_assert_eq!(first.get_or_insert_with(|| ids.clone()), &ids, "{:?}", device);
        }
    }

    /// Every kernel that can do the case, on every floor, chooses what the CPU does.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The reference itself is within its own distance: `is_near` refuses nothing that is right.
    #[test]
    fn reference_is_near_itself(case in case()) {
        if let Sampling::Random { temperature, top_k, top_p, seed } = case.method {
            for (row, logits) in case.logits.chunks(case.vocab).enumerate() {
                let u = draw(seed, case.step, row as u32) as f64 / 2f64.powi(64);
                let ranked = reference::ranked(logits, f64::from(temperature), top_k);
                let id = reference::random(logits, f64::from(temperature), top_k, f64::from(top_p), u);
                prop_assert!(is_near(&ranked, f64::from(top_p), u, id));
            }
        }
    }

    /// The best token alone, and the limit of small temperatures, are greedy; so is the narrowest nucleus.
    #[test]
    fn limits_are_greedy((case, on) in on_executors(case, |case| 3 * case.work()), seed: u64) {
        let greedy: Vec<u32> = case.logits.chunks(case.vocab).map(reference::greedy).collect();
        let one = Sampling::Random { temperature: 0.7, top_k: Some(1), top_p: 0.9, seed };
        let narrow = Sampling::Random { temperature: 0.7, top_k: None, top_p: f32::MIN_POSITIVE, seed };
        // With ties for the best, only top_k and top_p single one out.
        let cold = Sampling::Random { temperature: f32::MIN_POSITIVE, top_k: None, top_p: 1.0, seed };
        for device in &on.devices() {
            for method in [one, narrow] {
                prop_assert_eq!(&sample(device, &Case { method, ..case.clone() }, None)?, &greedy);
            }
            let ids = sample(device, &Case { method: cold, ..case.clone() }, None)?;
            for ((id, best), logits) in ids.iter().zip(&greedy).zip(case.logits.chunks(case.vocab)) {
                let (got, max) = (logits[*id as usize], logits[*best as usize]);
                // Subnormal logits may differ by less than even this temperature tells apart.
                let is_best = got == max || max - got < 60.0 * f64::from(f32::MIN_POSITIVE);
                prop_assert!(is_best || max.is_nan() && *id == 0, "{got} of {max}");
            }
        }
    }

    /// A row's token does not depend on the other rows.
    #[test]
    fn rows_are_independent(
        (case, on) in on_executors(case, |case| (1 + case.rows) * case.work()),
        seed: u64,
    ) {
        for device in &on.devices() {
            let together = sample(device, &case, None)?;
            for (row, &id) in together.iter().enumerate() {
                // Other rows before it, none after.
                let mut other = Case { rows: row + 1, ..case.clone() };
                other.logits = logits(Logits::Peaked, case.dtype, (row + 1) * case.vocab, seed);
                let own = row * case.vocab..(row + 1) * case.vocab;
                other.logits[own.clone()].copy_from_slice(&case.logits[own]);
                prop_assert_eq!(sample(device, &other, None)?[row], id);
            }
        }
    }
}

fn one_row(dtype: DType, method: Sampling, logits: Vec<f64>) -> Case {
    Case { dtype, rows: 1, vocab: logits.len(), layout: Layout::default(), method, logits, step: 0 }
}

const ALL: Sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: 1.0, seed: 11 };

#[test]
fn greedy_special_values() -> Result<(), TestCaseError> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let table: [(&[f64], u32); 12] = [
        (&[3.0], 0),
        (&[nan], 0),
        (&[-inf], 0),
        (&[nan, nan, nan], 0),
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
                let case = one_row(dtype, Sampling::Greedy, logits.to_vec());
                assert_eq!(sample(device, &case, None)?, [want], "{device:?} {dtype} {logits:?}");
                assert_eq!(reference::greedy(logits), want, "reference {logits:?}");
            }
        }
    }
    Ok(())
}

/// Where a logit is infinite or NaN, draws still follow the definition.
#[test]
fn random_special_values() -> Result<(), TestCaseError> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let table: [(&[f64], &[u32]); 7] = [
        (&[nan, nan], &[0]),
        (&[nan, 1.0, nan], &[1]),
        (&[-inf, -inf, nan], &[0, 1]),
        (&[1.0, inf, 3.0, inf], &[1, 3]),
        (&[-inf, 1.0, 1.0], &[1, 2]),
        (&[-1e4, 1e4], &[1]),
        (&[-0.0, 0.0, -inf], &[0, 1]),
    ];
    for device in &devices_for(work(7 * 3 * 40, 3)) {
        for dtype in DType::FLOATS {
            for (logits, wanted) in table {
                let mut seen = Vec::new();
                for step in 0..40 {
                    let case = Case { step, ..one_row(dtype, ALL, logits.to_vec()) };
                    seen.extend(sample(device, &case, None)?);
                }
                seen.sort();
                seen.dedup();
                assert_eq!(seen, wanted, "{device:?} {dtype} {logits:?}");
            }
        }
    }
    Ok(())
}

/// The longest vocabulary that occurs, with the parameters that occur: every level of the searches is used.
#[test]
fn long_rows() -> Result<(), TestCaseError> {
    for (dtype, vocab) in [(DType::F32, 262_144), (DType::BF16, 151_936), (DType::F16, 50_257)] {
        for device in &devices_for(6 * work(2, vocab)) {
            let data = logits(Logits::Peaked, dtype, 2 * vocab, 21);
            for (top_k, top_p) in
                [(None, 1.0), (Some(50), 1.0), (None, 0.9), (Some(1000), 0.95), (Some(100_000), 0.999)]
            {
                let method = Sampling::Random { temperature: 0.8, top_k, top_p, seed: 5 };
                let case = Case {
                    rows: 2,
                    vocab,
                    logits: data.clone(),
                    step: 3,
                    ..one_row(dtype, method, vec![0.0])
                };
                let ids = sample(device, &case, None)?;
                check(&format!("{device:?} {dtype} {top_k:?} {top_p}"), &case, &ids)?;
            }
            let case = Case { rows: 2, vocab, logits: data, ..one_row(dtype, Sampling::Greedy, vec![0.0]) };
            check(&format!("{device:?}"), &case, &sample(device, &case, None)?)?;
        }
    }
    Ok(())
}

/// Many ties at the threshold: the lowest indices are kept, exactly as many as asked for.
#[test]
fn ties_are_kept_by_index() -> Result<(), TestCaseError> {
    let vocab = 5000;
    for device in &devices_for(work(250, vocab)) {
        let mut seen = vec![false; vocab];
        for step in 0..200 {
            let method = Sampling::Random { temperature: 1.0, top_k: Some(7), top_p: 1.0, seed: 3 };
            let case = Case { step, ..one_row(DType::BF16, method, vec![1.5; vocab]) };
            seen[sample(device, &case, None)?[0] as usize] = true;
        }
        let seen: Vec<usize> = (0..vocab).filter(|&index| seen[index]).collect();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6], "{device:?}");
        // 5000 tokens of the same probability: a thousandth are the first five.
        for step in 0..50 {
            let method = Sampling::Random { temperature: 1.0, top_k: None, top_p: 0.000_999, seed: 3 };
            let case = Case { step, ..one_row(DType::F32, method, vec![-2.0; vocab]) };
            assert!(sample(device, &case, None)?[0] < 5, "{device:?}");
        }
    }
    Ok(())
}

/// All but one: the last of equal tokens is never drawn, each of the others is.
#[test]
fn all_but_one() -> Result<(), TestCaseError> {
    let rows = 8;
    for vocab in [2, 3] {
        let method =
            Sampling::Random { temperature: 1.0, top_k: Some(vocab as u32 - 1), top_p: 1.0, seed: 3 };
        for device in &devices_for(work(rows, vocab)) {
            let case = Case { rows, vocab, ..one_row(DType::F32, method, vec![0.5; rows * vocab]) };
            let mut seen = sample(device, &case, None)?;
            seen.sort();
            seen.dedup();
            assert_eq!(seen, (0..vocab as u32 - 1).collect::<Vec<u32>>(), "{device:?}");
        }
    }
    Ok(())
}

/// χ² of 4096 draws against the probabilities, over steps and over rows. 15 degrees of freedom exceed 50 once in 10^5;
/// the seed is fixed.
#[test]
fn draws_follow_the_probabilities() -> Result<(), TestCaseError> {
    let row: Vec<f64> = (0..16).map(|i| f64::from(i * 7 % 16) / 8.0).collect();
    let probabilities = reference::ranked(&row, 1.0, None);
    for (rows, steps) in [(4096, 1), (16, 256)] {
        for device in &devices_for(work(rows * steps as usize, row.len())) {
            let mut counts = [0u32; 16];
            for step in 0..steps {
                let logits = row.repeat(rows);
                let case = Case { rows, step, vocab: 16, logits, ..one_row(DType::F32, ALL, vec![0.0]) };
                for id in sample(device, &case, None)? {
                    counts[id as usize] += 1;
                }
            }
            let chi2: f64 = probabilities
                .iter()
                .map(|&(token, p)| (f64::from(counts[token as usize]) - 4096.0 * p).powi(2) / (4096.0 * p))
                .sum();
            assert!(chi2 < 50.0, "{device:?} {rows} rows: χ² {chi2}: {counts:?}");
        }
    }
    Ok(())
}

/// The same seed and step repeat; another seed, step or row draws anew.
#[test]
fn draws_are_reproducible() -> Result<(), TestCaseError> {
    let rows = 64;
    for device in &devices_for(work(4 * rows, 1000)) {
        let logits = vec![0.0; rows * 1000];
        let case = Case { rows, vocab: 1000, logits, ..one_row(DType::F16, ALL, vec![0.0]) };
        let ids = sample(device, &case, None)?;
        assert_eq!(sample(device, &case, None)?, ids);
        let differing = |other: Vec<u32>| std::iter::zip(&ids, &other).filter(|(a, b)| a != b).count();
        assert!(differing(sample(device, &Case { step: 1, ..case.clone() }, None)?) > rows / 2);
        let reseeded = Sampling::Random { temperature: 1.0, top_k: None, top_p: 1.0, seed: 12 };
        assert!(differing(sample(device, &Case { method: reseeded, ..case.clone() }, None)?) > rows / 2);
        let mut distinct = ids.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > rows / 2, "{distinct:?}");
    }
    Ok(())
}

/// The tokens of fixed logits, as they were on the day this was written: neither a backend nor a release may change
/// them.
#[test]
fn tokens_do_not_change() -> Result<(), TestCaseError> {
    let logits: Vec<f64> = (0..1000).map(|i| f64::from(i * 37 % 101) / 16.0).collect();
    let method =
        Sampling::Random { temperature: 0.75, top_k: Some(200), top_p: 0.9, seed: 0x1234_5678_9abc_def0 };
    for device in &devices() {
        let mut ids = Vec::new();
        for step in [0, 1, 2, 1 << 40] {
            ids.extend(sample(device, &Case { step, ..one_row(DType::F32, method, logits.clone()) }, None)?);
        }
        assert_eq!(ids, [464, 379, 191, 666], "{device:?}");
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = SamplingProblem { rows: 4, vocab: 64, dtype: DType::F32, method: Sampling::Greedy };
        let plan = Sampler::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |logits: &Tensor, ids: &mut Tensor| {
            let args = SamplingArgs { logits: logits.view(), ids: ids.view_mut(), step: 0 };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let mut ids = tensor(&[4], DType::U32)?;
        assert_eq!(
            message(&tensor(&[4, 65], DType::F32)?, &mut ids),
            "sampling: logits: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F16)?, &mut ids),
            "sampling: logits: expected f32, got f16"
        );
        assert_eq!(
            message(&tensor(&[5, 64], DType::F32)?, &mut tensor(&[5], DType::U32)?),
            "sampling: logits: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F32)?, &mut tensor(&[3], DType::U32)?),
            "sampling: ids: expected shape [4], got [3]"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F32)?, &mut tensor(&[4], DType::I32)?),
            "sampling: ids: expected u32, got i32"
        );
        let refused = |problem| Sampler::plan(device, problem).unwrap_err().to_string();
        let random = |temperature, top_p| {
            let method = Sampling::Random { temperature, top_k: None, top_p, seed: 0 };
            refused(SamplingProblem { method, ..problem })
        };
        for (temperature, got) in [
            (0.0, "0"),
            (-0.5, "-0.5"),
            (f32::NAN, "NaN"),
            (f32::INFINITY, "inf"),
            (1e-40, "0.0000000000000000000000000000000000000001"),
        ] {
            let expected = format!("sampling: temperature: expected a normal number above 0, got {got}");
            assert_eq!(random(temperature, 1.0), expected);
        }
        for (top_p, got) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (f32::NAN, "NaN")] {
            let expected = format!("sampling: top_p: expected a number above 0 and at most 1, got {got}");
            assert_eq!(random(1.0, top_p), expected);
        }
        assert_eq!(
            refused(SamplingProblem { vocab: 0, ..problem }),
            "sampling: problem: expected a vocabulary of 1 to 8388608, got 0"
        );
        assert_eq!(
            refused(SamplingProblem { vocab: (1 << 23) + 1, ..problem }),
            "sampling: problem: expected a vocabulary of 1 to 8388608, got 8388609"
        );
        assert_eq!(
            refused(SamplingProblem { dtype: DType::U32, ..problem }),
            "sampling: problem: expected dtype f32, f16 or bf16, got u32"
        );
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
        let problem = SamplingProblem { rows: 1, vocab: 3, dtype: T::DTYPE, method: Sampling::Greedy };
        let args = SamplingArgs { logits: logits.view(), ids: ids.view_mut(), step: 0 };
        Sampler::plan(device, problem)?.run(&stream, args)?;
        Ok(ids.to_vec::<u32>(&stream)?[0])
    }
    for device in &devices() {
        assert_eq!(run(device, [1.0f32, 3.0, 2.0])?, 1);
        assert_eq!(run(device, [1.0, 2.0, 3.0].map(f16::from_f32))?, 2);
        assert_eq!(run(device, [3.0, 1.0, 2.0].map(bf16::from_f32))?, 0);
    }
    Ok(())
}
