//! Attention against its reference.

mod case;
mod groups;
mod mistakes;
mod run;
mod tensor_cores;

use proptest::prelude::*;
use proptest::sample::select;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_to;
use testkit::strategies::{Values, dims};
use warpforge::ops::attention::reference::attention;
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, PAGE_SIZES, ScoreBias, ScoreTensors,
    Scores,
};
use warpforge::{Arch, DType, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, cards_of, check, devices, devices_for, every_kernel, on_executors, one_sm,
    through_every_kernel, values,
};
use case::*;
use run::*;

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(8))]

    /// Values in the keys' rows, on tensor cores, also of simulated cards each time.
    #[test]
    fn latent_decode(
        case in latent_case().prop_filter("too much work", |case| case.work() <= 1 << 22),
        floor in select(&[Arch::Sm80, Arch::Sm90a][..]),
    ) {
        let data = case.data();
        let expected = expect(&case, &data);
        for device in &cards_of(floor) {
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expected)?;
        }
    }
}

/// Cases of every kind of kernel.
fn of_every_kernel() -> impl Strategy<Value = Case> {
    let masked = prefill_case().prop_map(|case| {
        let (layout, scores) = (Layout::default(), Scores { bias: ScoreBias::Additive, ..Scores::PLAIN });
        Case { scores, q_layout: layout, kv_layout: layout, ..case }
    });
    prop_oneof![
        4 => prefill_case(),
        4 => decode_case(),
        2 => latent_case(),
        2 => fp8_case(),
        2 => masked,
        3 => paged_case(),
    ]
}

#[test]
fn every_kernel_is_simulated() -> TestResult {
    every_kernel("attention", of_every_kernel(), |case| 4 * case.work(), run_variants)
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> TestResult {
    let zeros: [fn(&mut Case); 3] = [
        |case| case.lens.clear(),
        |case| case.seq_q = 0,
        |case| {
            case.capacity = 0;
            case.lens.fill(0);
        },
    ];
    through_every_kernel("attention", &zeros, of_every_kernel(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned_prefill((case, on) in on_executors(prefill_case, Case::work)) {
        planned(&case, on)?;
    }

    /// The same for few queries and long caches.
    #[test]
    fn planned_decode((case, on) in on_executors(decode_case, Case::work)) {
        planned(&case, on)?;
    }

    /// The same with keys in fp8.
    #[test]
    fn planned_fp8((case, on) in on_executors(fp8_case, Case::work)) {
        planned(&case, on)?;
    }

    /// The same with keys in pages.
    #[test]
    fn planned_pages((case, on) in on_executors(paged_case, Case::work)) {
        planned(&case, on)?;
    }

    /// Every kernel for keys in pages that can do the case, on every floor.
    #[test]
    fn every_variant_pages((case, on) in on_executors(paged_case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant_prefill((case, on) in on_executors(prefill_case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The same for few queries and long caches.
    #[test]
    fn every_variant_decode((case, on) in on_executors(decode_case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A sequence gives the same bits alone, in views with less room and without `kv_lens`.
    #[test]
    fn sequences_are_independent(
        (case, on) in on_executors(
            || prop_oneof![case(1usize..80, dims(&[64], 150)), case(1usize..5, dims(&[256], 700))],
            |case| 2 * case.work(),
        ),
    ) {
        // Another alignment may take other kernels.
        let scores = Scores { soft_cap: case.scores.soft_cap, ..Scores::PLAIN };
        let case = Case { q_layout: Layout::default(), kv_layout: Layout::default(), scores, ..case };
        let Case { seq_q, capacity, heads: (heads_q, heads_kv), head_dim, head_dim_v, .. } = case;
        let data = case.data();
        for device in &on.devices() {
            let (out, lse) = compute(device, &case, &data, None)?;
            for (index, &len) in case.lens.iter().enumerate() {
                let alone = Case { lens: vec![len], capacity: len, seed: 1, ..case.clone() };
                let part = |data: &[f64], row: usize, len: usize| data[index * row..][..len].to_vec();
                let cached = |data: &[f64], width: usize| {
                    part(data, capacity * heads_kv * width, len * heads_kv * width)
                };
                let q_row = seq_q * heads_q * head_dim;
                let data =
                    [part(&data[0], q_row, q_row), cached(&data[1], head_dim), cached(&data[2], head_dim_v)];
                let (out_alone, lse_alone) = compute(device, &alone, &data, None)?;
                let out_row = seq_q * heads_q * head_dim_v;
                same_bits(&format!("{device:?}, out"), &out[index * out_row..][..out_row], &out_alone)?;
                let lse_row = heads_q * seq_q;
                same_bits(&format!("{device:?}, lse"), &lse[index * lse_row..][..lse_row], &lse_alone)?;
            }
        }
    }

    /// Queries give the same bits together and one by one where the same kernels do both.
    #[test]
    fn queries_are_independent(
        (case, on) in on_executors(
            || case(2usize..5, dims(&[256], 700)),
            |case| (1 + case.seq_q) * case.work(),
        ),
    ) {
        let layout = Layout::default();
        let scores = Scores { soft_cap: case.scores.soft_cap, ..Scores::PLAIN };
        let case = Case { q_layout: layout, kv_layout: layout, mask: Mask::Causal, scores, ..case };
        let Case { seq_q, capacity, heads: (heads_q, _), head_dim, head_dim_v, .. } = case;
        prop_assume!(case.lens.iter().all(|&len| len >= seq_q));
        let [q, k, v] = case.data();
        for device in &on.devices() {
            let (out, _) = compute(device, &case, &[q.clone(), k.clone(), v.clone()], None)?;
            for query in 0..seq_q {
                // The keys up to the query's own place.
                let lens: Vec<usize> = case.lens.iter().map(|len| len + query + 1 - seq_q).collect();
                let one = Case { seq_q: 1, lens, capacity, ..case.clone() };
                let rows = |data: &[f64], width: usize| -> Vec<f64> {
                    let row = heads_q * width;
                    data.chunks(seq_q * row).flat_map(|rows| &rows[query * row..][..row]).copied().collect()
                };
                let (alone, _) = compute(device, &one, &[rows(&q, head_dim), k.clone(), v.clone()], None)?;
                same_bits(&format!("{device:?}, query {query}"), &rows(&out, head_dim_v), &alone)?;
            }
        }
    }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Keys in pages, also in shared ones, give the same bits as in one piece.
    #[test]
    fn pages_change_nothing(
        (case, on) in on_executors(
            || prop_oneof![case(1usize..80, dims(&[64], 150)), case(1usize..6, dims(&[256], 500))],
            |case| 3 * case.work(),
        ),
        page_size in select(&PAGE_SIZES[..]),
    ) {
        let case = Case { q_layout: Layout::default(), kv_layout: Layout::default(), ..case };
        let Case { capacity, heads: (_, heads_kv), head_dim, head_dim_v, ref lens, .. } = case;
        let [q, mut k, mut v] = case.data();
        for sequence in (1..lens.len()).filter(|&sequence| lens[sequence].min(lens[0]) >= page_size) {
            for (values, width) in [(&mut k, head_dim), (&mut v, head_dim_v)] {
                values.copy_within(..page_size * heads_kv * width, sequence * capacity * heads_kv * width);
            }
        }
        let data = [q, k, v];
        let paged = Case { page_size: Some(page_size), ..case.clone() };
        for device in &on.devices() {
            let (out, lse) = compute(device, &paged, &data, None)?;
            let (want, want_lse) = compute(device, &case, &data, None)?;
            same_bits(&format!("{device:?}, out"), &out, &want)?;
            same_bits(&format!("{device:?}, lse"), &lse, &want_lse)?;
        }
    }
}

type TestResult = Result<(), TestCaseError>;

/// Rows that see no key, with and without sinks: more queries than keys under a causal mask, no keys at all, lengths
/// of 0.
#[test]
fn rows_without_keys() -> TestResult {
    let kinds = [(DType::F32, None), (DType::F16, Some(0.5)), (DType::BF16, None), (DType::BF16, Some(-1.0))];
    for (dtype, sinks) in kinds {
        for (seq_q, lens, capacity) in [
            (70, vec![3, 0, 10], 10),
            (3, vec![2, 0, 300], 300),
            (5, vec![0], 0),
            (1, vec![0, 0], 0),
            (0, vec![4], 4),
        ] {
            let case =
                Case { lens, capacity, sinks, mask: Mask::Causal, ..plain(dtype, seq_q, 0, (4, 2), 64) };
            let data = case.data();
            let expected = expect(&case, &data);
            for device in &devices_for(case.work()) {
                let (out, lse) = compute(device, &case, &data, None)?;
                verify((device, None), &case, &(out.clone(), lse.clone()), &expected)?;
                for (sequence, &len) in case.lens.iter().enumerate() {
                    for query in 0..seq_q.saturating_sub(len) {
                        let row = (sequence * seq_q + query) * 4 * 64;
                        assert!(out[row..][..4 * 64].iter().all(|&value| value == 0.0), "{device:?}");
                        for head in 0..4 {
                            let lse = lse[(sequence * 4 + head) * seq_q + query];
                            match case.sinks() {
                                None => assert_eq!(lse, f64::NEG_INFINITY, "{device:?}"),
                                Some(sinks) => assert!((lse - sinks[head]).abs() < 1e-6, "{device:?}"),
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Fifteen results of a size, of mostly one row, whose errors without rounded weights are small by luck.
#[test]
fn few_results_of_a_size() -> TestResult {
    let case = plain(DType::BF16, 37, 63, (4, 1), 64);
    let (mask, kind, seed) = (Mask::Causal, Values::Mixed, 1475478728474061155);
    let case = Case { mask, kind, is_fp8: true, seed, ..case };
    let data = case.data();
    let expected = expect(&case, &data);
    for device in &devices() {
        verify((device, None), &case, &compute(device, &case, &data, None)?, &expected)?;
    }
    Ok(())
}

/// Scores of ±1e30: equal ones share the weight equally, a larger one takes it all. No sentinel hides among them.
#[test]
fn huge_scores() -> TestResult {
    let (heads, head_dim, len) = ((2, 1), 64, 300);
    for dtype in [DType::F32, DType::BF16] {
        for (seq_q, sign, best) in
            [(1, -1.0, None), (70, -1.0, None), (1, 1.0, None), (1, -1.0, Some(280)), (9, -1.0, Some(5))]
        {
            let case = Case { scale: Some(1.0), ..plain(dtype, seq_q, len, heads, head_dim) };
            let [mut q, mut k, v] = case.data();
            let huge = round_to(dtype, 1e15);
            for row in q.chunks_mut(head_dim) {
                row.fill(0.0);
                row[0] = huge;
            }
            for row in k.chunks_mut(head_dim) {
                row.fill(0.0);
                row[0] = sign * huge;
            }
            if let Some(best) = best {
                k[best * head_dim] = 0.0;
            }
            // On every floor: each has a softmax of its own.
            for device in &devices() {
                let data = [q.clone(), k.clone(), v.clone()];
                let (out, lse) = compute(device, &case, &data, None)?;
                for (index, row) in out.chunks(head_dim).enumerate() {
                    for (col, &got) in row.iter().enumerate() {
                        let (want, tolerance) = match best {
                            Some(best) => (v[best * head_dim + col], 0.0),
                            None => {
                                let mean: f64 =
                                    v.iter().skip(col).step_by(head_dim).sum::<f64>() / len as f64;
                                (mean, if dtype == DType::F32 { 1e-6 } else { 2e-3 })
                            }
                        };
                        assert!(
                            (got - want).abs() <= tolerance,
                            "{device:?} row {index} col {col}: {got} {want}"
                        );
                    }
                }
                let want = if best.is_some() { 0.0 } else { sign * huge * huge };
                assert!(
                    lse.iter().all(|lse| (lse - want).abs() <= 1e-6 * want.abs()),
                    "{device:?}: {lse:?}, {want}"
                );
            }
        }
    }
    Ok(())
}

/// Rows of q beside fp8 keys whose elements binary16 has at one scale, and rows for which it has no scale, as they come
/// and by turns: a row does not depend on what the others are like. The first column, the largest, meets zeros only.
#[test]
fn queries_of_many_sizes() -> TestResult {
    for device in &cards_of(Arch::Sm80) {
        for (dtype, head_dim) in [(DType::BF16, 128), (DType::BF16, 64), (DType::BF16, 256), (DType::F16, 64)]
        {
            let small = if dtype == DType::F16 { -8 } else { -20 };
            let case = Case {
                scale: Some(2f32.powi(-small) / 8.0),
                is_fp8: true,
                ..plain(dtype, 3, 300, (4, 2), head_dim)
            };
            let [mut q, mut k, v] = case.data();
            k.chunks_mut(head_dim).for_each(|row| row[0] = 0.0);
            for row in q.chunks_mut(head_dim) {
                row.iter_mut().for_each(|q| *q = round_to(dtype, *q * 2f64.powi(small)));
                row[0] = 1.0;
            }
            let data = [q, k, v];
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
            if dtype == DType::F16 {
                continue;
            }
            // One row of a tile, then all: that much smaller, and their scale as much larger.
            let smaller = |rows: std::ops::Range<usize>| {
                let mut data = data.clone();
                let rows = &mut data[0][rows.start * head_dim..rows.end * head_dim];
                for q in rows.iter_mut().filter(|q| **q != 1.0) {
                    *q *= 2f64.powi(-25);
                }
                data
            };
            let (got, _) = compute(device, &case, &smaller(5..6), None)?;
            for (index, (got, want)) in std::iter::zip(&got, &results.0).enumerate() {
                let row = index / head_dim;
                assert!(row == 5 || got.to_bits() == want.to_bits(), "{device:?} {case:?} row {row}");
            }
            let (case, data) =
                (Case { scale: case.scale.map(|scale| scale * 2f32.powi(25)), ..case }, smaller(0..12));
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
        }
    }
    Ok(())
}

/// Weights beside fp8 keys from 1 down to 2^-121, and columns in which all values but those of one weight are 0: it has
/// all bits that the type of q has, though it is multiplied in binary16. Bits do not depend on another row's weights,
/// nor on what is not finite elsewhere.
#[test]
fn weights_of_many_sizes() -> TestResult {
    let len = 300;
    for device in &cards_of(Arch::Sm80) {
        for (heads, head_dim, mask) in [(4, 64, Mask::None), (6, 128, Mask::Causal), (3, 256, Mask::Causal)] {
            let case = Case {
                scale: Some(1.0),
                is_fp8: true,
                mask,
                seed: 8,
                ..plain(DType::BF16, 2, len, (heads, 1), head_dim)
            };
            let mut q = vec![0.0; 2 * heads * head_dim];
            for (row, q) in q.chunks_mut(head_dim).enumerate() {
                // e to that power is 4; the first head's weights are alike.
                q[0] = if row % heads == 0 { 0.0 } else { round_to(DType::BF16, 4f64.ln()) };
            }
            let (mut k, mut v) = (vec![0.0; len * head_dim], vec![0.0; len * head_dim]);
            let rows = std::iter::zip(k.chunks_mut(head_dim), v.chunks_mut(head_dim));
            for (key, (k, v)) in rows.enumerate() {
                k[0] = -((key % 16) as f64) * if key % 16 < 8 { 1.0 } else { 4.0 };
                v[key % 64] = 1.0 + (key % 8) as f64 / 8.0;
            }
            let (first_query, first_row) = (heads * head_dim, head_dim);
            let data = [q, k, v];
            let (out, _) = compute(device, &case, &data, None)?;
            let own = Own { sinks: None, bias: None, blocks: None };
            let [q, k, v] = &data;
            let (want, _) = attention::<f64>(&case.sequence(len, &own), q, k, v, |value| value);
            for (index, (got, want)) in std::iter::zip(&out, &want).enumerate() {
                let is_near = (got - want).abs() <= want.abs() / 64.0;
                assert!(is_near, "{device:?} {case:?} element {index}: {got} {want}");
            }
            let what = |change| format!("{device:?} {case:?}, {change}");
            let mut changed = data.clone();
            changed[0].fill(0.0);
            let (alike, _) = compute(device, &case, &changed, None)?;
            same_bits(&what("other rows"), &out[..first_row], &alike[..first_row])?;
            if mask == Mask::Causal {
                let mut changed = data.clone();
                changed[2][(len - 1) * head_dim + 1] = f64::NAN;
                let (spoilt, _) = compute(device, &case, &changed, None)?;
                same_bits(&what("NaN"), &out[..first_query], &spoilt[..first_query])?;
                assert!(spoilt[first_query + 1].is_nan());
            }
        }
    }
    Ok(())
}

/// Many splits of few rows, of which a lane of the merge does one part, have the bits that lanes make which do all: on
/// a card of one multiprocessor there are enough rows for that. More splits than are asked for at a time, of their
/// numbers too where that is no work.
#[test]
fn merges_of_many_splits() -> TestResult {
    let case = |len, heads| Case { sinks: Some(0.5), ..plain(DType::BF16, 1, len, heads, 8) };
    let (own, many) = (&cards_of(Arch::Sm90a)[0], case(4400, (8, 1)));
    let data = many.data();
    let results = compute(own, &many, &data, None)?;
    verify((own, None), &many, &results, &expect(&many, &data))?;
    let (out, lse) = compute(&one_sm(), &many, &data, None)?;
    same_bits("out", &out, &results.0)?;
    same_bits("lse", &lse, &results.1)?;
    let more = case(35_000, (1, 1));
    let data = more.data();
    let expected = expect(&more, &data);
    for device in &devices_for(more.work()) {
        verify((device, None), &more, &compute(device, &more, &data, None)?, &expected)?;
    }
    Ok(())
}

/// The splits of a group joined by the block that does them all, as on a card of one multiprocessor, have the bits that
/// they have joined by the merge: whole groups, some of a group's splits only, at either end, and a value that is not
/// finite.
#[test]
fn joined_splits() -> TestResult {
    let own = &cards_of(Arch::Sm90a)[0];
    let case = |dtype, heads, head_dim, lens: &[usize]| Case {
        lens: lens.to_vec(),
        ..plain(dtype, 1, 2048, heads, head_dim)
    };
    let (mask, window, page_size) = (Mask::Causal, Some(900), Some(16));
    for case in [
        Case { sinks: Some(0.5), ..case(DType::BF16, (6, 1), 128, &[1990]) },
        Case { seq_q: 3, mask, window, ..case(DType::F16, (2, 1), 64, &[2048, 1300]) },
        Case { is_fp8: true, page_size, ..case(DType::BF16, (4, 1), 128, &[2048, 0, 700]) },
        Case {
            head_dim_v: 512,
            values: Place::InKeys,
            mask,
            window,
            ..case(DType::BF16, (5, 1), 576, &[1990, 70, 1300])
        },
    ] {
        let mut data = case.data();
        if !case.is_fp8 {
            let values = if case.values == Place::InKeys { 1 } else { 2 };
            data[values][1400 * case.head_dim + 9] = f64::NAN;
        }
        let (want_out, want_lse) = compute(own, &case, &data, None)?;
        let (out, lse) = compute(&one_sm(), &case, &data, None)?;
        same_bits(&format!("{case:?}"), &out, &want_out)?;
        same_bits(&format!("{case:?}, lse"), &lse, &want_lse)?;
    }
    Ok(())
}

/// A page number that the pool does not have is taken as its last page: nothing outside is touched.
#[test]
fn pages_beyond_the_pool() -> TestResult {
    for (seq_q, dtype) in [(20, DType::BF16), (1, DType::BF16), (20, DType::F32), (1, DType::F32)] {
        for device in &devices() {
            let stream = device.stream()?;
            let problem =
                AttentionProblem { page_size: Some(16), ..plain(dtype, seq_q, 30, (4, 1), 64).problem() };
            let plan = Attention::plan(device, problem)?;
            let tensor = |rows: usize, seed| {
                Rows::input(
                    &stream,
                    dtype,
                    &values(Values::Normal, dtype, rows * 64, seed),
                    64,
                    Layout::default(),
                )
            };
            let (q, pool) = (tensor(seq_q * 4, 1)?, tensor(2 * 16, 2)?);
            let kv_lens = Tensor::from_slice(&stream, &[1], &[30u32])?;
            let run = |table: [u32; 2]| -> Result<Vec<f64>, TestCaseError> {
                let table = Tensor::from_slice(&stream, &[1, 2], &table)?;
                let mut out = Rows::output(&stream, dtype, seq_q * 4, 64, Layout::default())?;
                let args = AttentionArgs {
                    q: q.view().reshape(&[1, seq_q, 4, 64])?,
                    k: pool.view().reshape(&[2, 16, 1, 64])?,
                    v: pool.view().reshape(&[2, 16, 1, 64])?,
                    kv_lens: Some(kv_lens.view()),
                    kv_scales: KvScales::default(),
                    out: out.view_mut().reshape(&[1, seq_q, 4, 64])?,
                    lse: None,
                    scores: ScoreTensors::default(),
                    offsets: Offsets::default(),
                    page_table: Some(table.view()),
                };
                plan.run(&stream, args)?;
                out.read(&stream)
            };
            same_bits(&format!("{device:?}"), &run([u32::MAX, 2])?, &run([1, 1])?)?;
        }
    }
    Ok(())
}

/// A prompt in pieces, then token by token, into a cache: each within the bound of the whole.
#[test]
fn chunks_then_decode() -> TestResult {
    let (heads, head_dim, total, capacity) = ((8, 2), 128, 300, 320);
    for dtype in DType::FLOATS {
        let whole = Case { mask: Mask::Causal, ..plain(dtype, total, total, heads, head_dim) };
        let data = whole.data();
        let expected = expect(&whole, &data);
        let row = heads.0 * head_dim;
        let cached = |values: &[f64]| {
            let mut cache = values.to_vec();
            cache.resize(capacity * heads.1 * head_dim, f64::NAN);
            cache
        };
        let (k, v) = (cached(&data[1]), cached(&data[2]));
        for device in &devices_for(whole.work()) {
            let stream = device.stream()?;
            let tensor = |values: &[f64]| Rows::input(&stream, dtype, values, head_dim, Layout::default());
            let (q, k, v) = (tensor(&data[0])?, tensor(&k)?, tensor(&v)?);
            let mut out = Rows::output(&stream, dtype, total * heads.0, head_dim, Layout::default())?;
            let problem = AttentionProblem { seq_kv: capacity, ..whole.problem() };
            let plan = Attention::plan(device, problem)?;
            let ends = [130, 131, 200, 296, 297, 298, 300];
            let mut start = 0;
            for end in ends {
                let cache = [1, capacity, heads.1, head_dim];
                let args = AttentionArgs {
                    q: q.view().reshape(&[1, total, heads.0, head_dim])?.slice(1, start..end)?,
                    k: k.view().reshape(&cache)?.slice(1, 0..end)?,
                    v: v.view().reshape(&cache)?.slice(1, 0..end)?,
                    kv_lens: None,
                    kv_scales: KvScales::default(),
                    out: out.view_mut().reshape(&[1, total, heads.0, head_dim])?.slice(1, start..end)?,
                    lse: None,
                    scores: ScoreTensors::default(),
                    offsets: Offsets::default(),
                    page_table: None,
                };
                plan.run(&stream, args)?;
                start = end;
            }
            let got = out.read(&stream)?;
            assert_eq!(got.len(), total * row);
            let tolerance = Tolerance::new(dtype, Scale::Given(&expected.magnitudes.0), head_dim + total);
            check(&format!("{device:?}"), &got, &expected.reference.0, &expected.naive[0].0, &tolerance)?;
        }
    }
    Ok(())
}

/// q, k and v as parts of a joint projection.
#[test]
fn joint_projection() -> TestResult {
    let (tokens, (heads_q, heads_kv), head_dim) = (40, (4, 2), 96);
    let width = (heads_q + 2 * heads_kv) * head_dim;
    let dtype = DType::BF16;
    let case = Case { mask: Mask::Causal, ..plain(dtype, tokens, tokens, (heads_q, heads_kv), head_dim) };
    let joint = values(Values::Normal, dtype, tokens * width, 11);
    let part = |start: usize, heads: usize| -> Vec<f64> {
        joint.chunks(width).flat_map(|row| &row[start * head_dim..][..heads * head_dim]).copied().collect()
    };
    let data = [part(0, heads_q), part(heads_q, heads_kv), part(heads_q + heads_kv, heads_kv)];
    let expected = expect(&case, &data);
    for device in &devices_for(case.work()) {
        let stream = device.stream()?;
        let rows = Rows::input(&stream, dtype, &joint, width, Layout::default())?;
        let view = |start: usize, heads: usize| {
            let part = rows.view().slice(1, start * head_dim..(start + heads) * head_dim)?;
            part.reshape(&[1, tokens, heads, head_dim])
        };
        let mut out = Tensor::zeros(&stream, &[1, tokens, heads_q, head_dim], dtype)?;
        let args = AttentionArgs {
            q: view(0, heads_q)?,
            k: view(heads_q, heads_kv)?,
            v: view(heads_q + heads_kv, heads_kv)?,
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        Attention::plan(device, case.problem())?.run(&stream, args)?;
        let got: Vec<f64> = out.to_f32_vec(&stream)?.into_iter().map(f64::from).collect();
        let tolerance = Tolerance::new(dtype, Scale::Given(&expected.magnitudes.0), head_dim + tokens);
        check(&format!("{device:?}"), &got, &expected.reference.0, &expected.naive[0].0, &tolerance)?;
    }
    Ok(())
}

/// Runs of one plan in turns in two streams, whose workspace is the same; of a kernel that another plan, with fewer
/// rows, launches with less shared memory.
#[test]
fn two_streams() -> TestResult {
    let case = plain(DType::BF16, 1, 2000, (8, 2), 64);
    let [q, k, v] = case.data();
    for device in &devices_for(20 * case.work()) {
        let (want, _) = compute(device, &case, &[q.clone(), k.clone(), v.clone()], None)?;
        let plan = Attention::plan(device, case.problem())?;
        let _other = Attention::plan(device, plain(DType::BF16, 1, 2000, (2, 2), 64).problem())?;
        let streams = [device.stream()?, device.stream()?];
        let tensor = |values: &[f64], shape: &[usize]| -> Result<Tensor, Error> {
            let values = testkit::round::encode(DType::BF16, values);
            Tensor::from_bytes(&streams[0], shape, DType::BF16, &values)
        };
        let (q, k, v) =
            (tensor(&q, &[1, 1, 8, 64])?, tensor(&k, &[1, 2000, 2, 64])?, tensor(&v, &[1, 2000, 2, 64])?);
        streams[0].synchronize()?;
        let mut outs = Vec::new();
        for turn in 0..20 {
            let stream = &streams[turn % 2];
            let mut out = Tensor::empty(stream, &[1, 1, 8, 64], DType::BF16)?;
            let (q, k, v) = (q.view(), k.view(), v.view());
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores: ScoreTensors::default(),
                offsets: Offsets::default(),
                page_table: None,
            };
            plan.run(stream, args)?;
            outs.push((turn, out));
        }
        for (turn, out) in &outs {
            let got: Vec<f64> = out.to_f32_vec(&streams[turn % 2])?.into_iter().map(f64::from).collect();
            assert_eq!(got, want, "{device:?} turn {turn}");
        }
        streams[1].synchronize()?;
    }
    Ok(())
}
