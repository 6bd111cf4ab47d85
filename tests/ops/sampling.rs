//! Sampling against its reference: the same token, unless the draw lies within rounding distance of a boundary.

use abi::ops::sampling::{EDIT_VARIANTS, LOGPROBS_VARIANTS, SamplingVariant, VARIANTS, draw};
use half::{bf16, f16};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::sampling::{
    Logprobs, NO_TOKEN, PARAMS_LEN, Sampler, SamplingArgs, SamplingBias, SamplingFeatures, SamplingParams,
    SamplingProblem, reference,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel, fail, floats, layouts, on_executors,
    through_every_kernel, values,
};

/// Rounding distance: how far sums of probabilities may be from those of the reference.
const NEAR: f64 = 1e-5;
/// And distances from the entropy.
const NEAR_ENTROPY: f64 = 1e-5;
const GREEDY: SamplingParams = SamplingParams {
    temperature: 0.0,
    top_k: None,
    top_p: 1.0,
    min_p: 0.0,
    typical_p: 1.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    prompt_len: 0,
    history_len: 0,
    num_bias: 0,
    is_masked: false,
    seed: 0,
    step: 0,
};
const RANDOM: SamplingParams = SamplingParams { temperature: 1.0, seed: 11, ..GREEDY };
/// Everything that a plan may have.
const ALL: SamplingFeatures = SamplingFeatures {
    typical_p: true,
    history: 24,
    bias: 5,
    masks: true,
    logprobs: Some(3),
    ..SamplingFeatures::DRAWS
};

/// A block of 1024 threads for a row and a step, with some hundred barriers and shuffles for all of the searches.
fn work(rows: usize, vocab: usize) -> usize {
    rows * (1024 * 500 + 20 * vocab)
}

/// A row, and what goes with it.
#[derive(Clone, Debug)]
struct Row {
    logits: Vec<f64>,
    params: SamplingParams,
    history: Vec<u32>,
    bias: Vec<(u32, f32)>,
    /// Which tokens are allowed, if not all.
    mask: Option<Vec<bool>>,
}

impl Row {
    fn new(logits: Vec<f64>, params: SamplingParams) -> Self {
        Row { logits, params, history: Vec::new(), bias: Vec::new(), mask: None }
    }

    /// The parameters with what the row has.
    fn params(&self) -> SamplingParams {
        SamplingParams {
            history_len: self.history.len() as u32,
            num_bias: self.bias.len() as u32,
            is_masked: self.mask.is_some(),
            ..self.params
        }
    }

    fn edited(&self) -> Vec<f64> {
        reference::edited(&self.logits, &self.params(), &self.history, &self.bias, self.mask.as_deref())
    }
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    vocab: usize,
    rows: Vec<Row>,
    features: SamplingFeatures,
    layouts: [Layout; 8],
}

impl Case {
    /// What the rows need, and no more.
    fn new(dtype: DType, rows: Vec<Row>) -> Self {
        let params: Vec<_> = rows.iter().map(Row::params).collect();
        let vocab = rows.first().map_or(1, |row| row.logits.len());
        Case { dtype, vocab, rows, features: SamplingFeatures::of(&params), layouts: [Layout::default(); 8] }
    }

    /// Rows of the same parameters.
    fn of(dtype: DType, params: SamplingParams, logits: &[f64], vocab: usize) -> Self {
        Case::new(dtype, logits.chunks(vocab).map(|row| Row::new(row.to_vec(), params)).collect())
    }

    fn problem(&self) -> SamplingProblem {
        let Case { dtype, vocab, features, .. } = *self;
        SamplingProblem { rows: self.rows.len(), vocab, dtype, features }
    }

    fn work(&self) -> usize {
        let edits = self.features.history + self.features.bias > 0 || self.features.masks;
        let extra = usize::from(edits) + 2 * usize::from(self.features.logprobs.is_some());
        let typical = 1 + usize::from(self.rows.iter().any(|row| row.params.typical_p < 1.0));
        work(self.rows.len(), self.vocab) * typical + extra * self.rows.len() * (1024 * 100 + 8 * self.vocab)
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

/// Parameters of a row, but for those of its history, bias and mask.
fn params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![4 => 0.1f32..3.0, 1 => Just(1.0f32), 1 => 1e-3f32..1e-2, 1 => 10.0f32..1e3];
    let top_k = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (1u32..100).prop_map(Some), 1 => (1u32..5000).prop_map(Some)];
    let share =
        || prop_oneof![3 => Just(1.0f32), 3 => 0.01f32..1.0, 1 => Just(1e-6f32), 1 => Just(0.999_99f32)];
    let min_p = prop_oneof![3 => Just(0.0f32), 1 => 0.0f32..0.3, 1 => Just(1.0f32)];
    let typical_p = prop_oneof![2 => Just(1.0f32), 1 => 0.05f32..1.0];
    let draws = (any::<u64>(), prop_oneof![0u64..5, any::<u64>()]);
    let random = (temperature, top_k, share(), min_p, typical_p, draws).prop_map(
        |(temperature, top_k, top_p, min_p, typical_p, (seed, step))| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            typical_p,
            seed,
            step,
            ..GREEDY
        },
    );
    prop_oneof![1 => Just(GREEDY), 4 => random]
}

/// A row's history, bias and mask, or some of them.
fn edit(row: &mut Row, vocab: usize, rng: &mut Rng) {
    if rng.below(2) == 0 {
        let len = rng.below(25);
        // Few tokens, so that some come often; and one beyond the vocabulary.
        row.history = (0..len).map(|_| rng.below(vocab.min(9) + 1) as u32).collect();
        row.params.prompt_len = rng.below(len + 1) as u32;
        row.params.repetition_penalty = [1.0, 1.3, 0.7][rng.below(3)];
        row.params.presence_penalty = [0.0, 0.5, -1.5][rng.below(3)];
        row.params.frequency_penalty = [0.0, 0.25, -0.3][rng.below(3)];
    }
    if rng.below(2) == 0 {
        let first = rng.below(vocab) as u32;
        let bias = |i: u32| (first + 3 * i, [-100.0, 2.5, 1e-3, -0.5, 30.0][i as usize]);
        row.bias = (0..rng.below(6) as u32).map(bias).collect();
    }
    if rng.below(2) == 0 {
        let share = 1 + rng.below(4);
        row.mask = Some((0..vocab).map(|_| rng.below(share) == 0).collect());
    }
}

fn case() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![
        2 => any_values().prop_map(Logits::Of),
        1 => Just(Logits::Ties),
        2 => Just(Logits::Peaked),
        1 => Just(Logits::Equal)
    ];
    let sizes = (floats(), dims(&[4], 9), dims_from(1, &[32, 256, 1024], 4000));
    let layout = || {
        (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
            .prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let how = (
        proptest::collection::vec(params(), 9),
        any::<u64>(),
        0..3u32,
        prop_oneof![2 => Just(None), 1 => (0usize..6).prop_map(Some)],
    );
    (sizes, layouts(layout), kind, how).prop_map(
        |((dtype, rows, vocab), layouts, kind, (params, seed, edits, logprobs))| {
            let mut rng = Rng::new(seed);
            let values = logits(kind, dtype, rows * vocab, seed);
            let of = |(logits, params): (&[f64], &SamplingParams)| {
                let mut row = Row::new(logits.to_vec(), *params);
                if edits == 0 {
                    edit(&mut row, vocab, &mut rng);
                }
                row
            };
            let rows: Vec<Row> = values.chunks(vocab).zip(&params).map(of).collect();
            let mut case = Case { layouts, vocab, ..Case::new(dtype, rows) };
            if edits == 0 {
                // A history is needed for penalties, if only of one row.
                case.features.history = case.features.history.max(1);
            }
            if edits == 1 {
                case.features = ALL;
            }
            case.features.logprobs = logprobs;
            case
        },
    )
}

/// What a run tells.
#[derive(Clone, Debug, PartialEq)]
struct Output {
    ids: Vec<u32>,
    chosen: Vec<f64>,
    top_ids: Vec<u32>,
    top: Vec<f64>,
}

/// What a device chooses, after checking that nothing but its results was written.
fn output(
    device: &Device,
    case: &Case,
    variant: Option<&'static SamplingVariant>,
) -> Result<Output, TestCaseError> {
    let mut words = vec![0; case.rows.len() * PARAMS_LEN];
    let params: Vec<_> = case.rows.iter().map(Row::params).collect();
    case.problem().write_params(&params, &mut words).map_err(fail)?;
    output_of_words(device, case, variant, &words)
}

fn output_of_words(
    device: &Device,
    case: &Case,
    variant: Option<&'static SamplingVariant>,
    words: &[u32],
) -> Result<Output, TestCaseError> {
    let Case { dtype, vocab, features, layouts, .. } = *case;
    let rows = case.rows.len();
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => Sampler::plan(device, case.problem()),
        Some(variant) => Sampler::plan_with(device, case.problem(), variant),
    };
    let plan = plan.map_err(fail)?;
    let input = |dtype, layout: usize, cols: usize, of: &dyn Fn(&Row) -> Vec<f64>| {
        // What a row has, and poison behind it: ones.
        let row = |row: &Row| {
            let mut row = of(row);
            row.resize(cols, f64::from(u32::MAX));
            row
        };
        let values: Vec<f64> = case.rows.iter().flat_map(row).collect();
        Rows::input(&stream, dtype, &values, cols, layouts[layout]).map_err(fail)
    };
    let logits = input(dtype, 0, vocab, &|row| row.logits.clone())?;
    let words: Vec<f64> = words.iter().map(|&word| f64::from(word)).collect();
    let params = Rows::input(&stream, DType::U32, &words, PARAMS_LEN, layouts[1]).map_err(fail)?;
    let history =
        input(DType::U32, 2, features.history, &|row| row.history.iter().map(|&id| f64::from(id)).collect())?;
    let ids = |row: &Row| row.bias.iter().map(|&(id, _)| f64::from(id)).collect();
    let bias_ids = input(DType::U32, 3, features.bias, &ids)?;
    let bias =
        input(DType::F32, 4, features.bias, &|row| row.bias.iter().map(|&(_, x)| f64::from(x)).collect())?;
    let masks = input(DType::U32, 5, vocab.div_ceil(32), &|row| {
        let words = |mask: &Vec<bool>| {
            let bits = |bits: &[bool]| bits.iter().rev().fold(0, |word, &bit| word << 1 | u32::from(bit));
            mask.chunks(32).map(|chunk| f64::from(bits(chunk))).collect()
        };
        row.mask.as_ref().map_or(Vec::new(), words)
    })?;
    let one_row = |dtype| Rows::output(&stream, dtype, 1, rows, Layout::default()).map_err(fail);
    let (mut ids, mut chosen) = (one_row(DType::U32)?, one_row(DType::F32)?);
    let top = features.logprobs.unwrap_or(0);
    let mut top_ids = Rows::output(&stream, DType::U32, rows, top, layouts[6]).map_err(fail)?;
    let mut top = Rows::output(&stream, DType::F32, rows, top, layouts[7]).map_err(fail)?;
    let has_params = features.draws || features.history > 0 || features.bias > 0 || features.masks;
    let args = SamplingArgs {
        logits: logits.view(),
        params: has_params.then(|| params.view()),
        history: (features.history > 0).then(|| history.view()),
        bias: (features.bias > 0).then(|| SamplingBias { ids: bias_ids.view(), values: bias.view() }),
        masks: features.masks.then(|| masks.view()),
        ids: ids.view_mut().reshape(&[rows]).map_err(fail)?,
        logprobs: match features.logprobs {
            Some(_) => Some(Logprobs {
                chosen: chosen.view_mut().reshape(&[rows]).map_err(fail)?,
                top_ids: top_ids.view_mut(),
                top: top.view_mut(),
            }),
            None => None,
        },
    };
    plan.run(&stream, args).map_err(fail)?;
    let whole = |values: Vec<f64>| values.into_iter().map(|id| id as u32).collect();
    let ids = whole(ids.read(&stream)?);
    let Some(_) = features.logprobs else {
        return Ok(Output { ids, chosen: Vec::new(), top_ids: Vec::new(), top: Vec::new() });
    };
    let (chosen, top_ids) = (chosen.read(&stream)?, whole(top_ids.read(&stream)?));
    Ok(Output { ids, chosen, top_ids, top: top.read(&stream)? })
}

/// The tokens that a device chooses.
fn sample(device: &Device, case: &Case) -> Result<Vec<u32>, TestCaseError> {
    Ok(output(device, case, None)?.ids)
}

/// Whether `id` is drawn from `kept` for some u within a distance of the true one.
fn is_drawn(kept: &[(u32, f64)], u: f64, id: u32, distance: f64) -> bool {
    let total: f64 = kept.iter().map(|&(_, p)| p).sum();
    let before: f64 = kept.iter().filter(|&&(token, _)| token < id).map(|&(_, p)| p).sum();
    let own = kept.iter().find(|&&(token, _)| token == id);
    own.is_some_and(|&(_, p)| before / total <= u + distance && u - distance <= (before + p) / total)
}

/// Whether `id` is what the definition gives, for some u and some shares within [`NEAR`] of the true ones.
fn is_near(logits: &[f64], params: &SamplingParams, id: u32) -> bool {
    let exact = reference::kept(logits, params);
    if exact.is_empty() {
        return id == NO_TOKEN;
    }
    let u = draw(params.seed, params.step) as f64 / 2f64.powi(64);
    if is_drawn(&exact, u, id, NEAR) {
        return true;
    }
    let ranked = reference::ranked(logits, f64::from(params.temperature), params.top_k);
    let around = |p: f32, most: f32| if p == most { vec![0.0] } else { vec![-NEAR, 0.0, NEAR] };
    for top_p in around(params.top_p, 1.0) {
        let mut prefix = ranked.clone();
        prefix.truncate(reference::nucleus(&prefix, f64::from(params.top_p) + top_p));
        for min_p in around(params.min_p, 0.0) {
            let likely = reference::likely(prefix.clone(), f64::from(params.min_p) * (1.0 + min_p));
            for typical_p in around(params.typical_p, 1.0) {
                for slack in [-NEAR_ENTROPY, 0.0, NEAR_ENTROPY] {
                    let typical_p = f64::from(params.typical_p) + typical_p;
                    let is_typical = params.typical_p < 1.0;
                    let kept = match is_typical {
                        true => reference::typical(likely.clone(), typical_p, slack),
                        false => likely.clone(),
                    };
                    if is_drawn(&kept, u, id, 4.0 * NEAR) {
                        return true;
                    }
                }
            }
        }
    }
    false
}

fn check(what: &str, case: &Case, output: &Output) -> Result<(), TestCaseError> {
    prop_assert_eq!(output.ids.len(), case.rows.len());
    for (index, (&id, row)) in std::iter::zip(&output.ids, &case.rows).enumerate() {
        let (logits, params) = (row.edited(), row.params());
        if params.temperature == 0.0 {
            let want = reference::greedy(&logits).unwrap_or(NO_TOKEN);
            prop_assert_eq!(id, want, "{}: row {}", what, index);
        } else {
            let u = draw(params.seed, params.step) as f64 / 2f64.powi(64);
            let want = reference::random(reference::kept(&logits, &params), u);
            prop_assert!(
                is_near(&logits, &params, id),
                "{what}: row {index}: token {id}, expected {want:?} for u = {u}"
            );
        }
        let Some(top) = case.features.logprobs else { continue };
        let logprobs = reference::logprobs(&row.logits);
        let near = |got: f64, want: f64| got == want || (got - want).abs() <= 1e-5 + 3e-7 * want.abs();
        let of = |id: u32| logprobs.get(id as usize).copied().unwrap_or(f64::NEG_INFINITY);
        let chosen = output.chosen[index];
        prop_assert!(near(chosen, of(id)), "{what}: row {index}: chosen {chosen}, expected {}", of(id));
        let order = reference::ranked(&row.logits, 1.0, None);
        for n in 0..top {
            let want = order.get(n).map_or(NO_TOKEN, |&(token, _)| token);
            let (token, value) = (output.top_ids[index * top + n], output.top[index * top + n]);
            prop_assert_eq!(token, want, "{}: row {}: number {}", what, index, n);
            prop_assert!(near(value, of(want)), "{what}: row {index}: {value}, expected {}", of(want));
        }
    }
    Ok(())
}

/// The wanted kernels that can do the case; each chooses what the CPU does.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let want = output(&Device::cpu(), case, None)?;
    let helper = |table: &[abi::ops::sampling::SamplingHelper]| {
        table.iter().any(|variant| variant.dtype == case.dtype && wanted(variant.entry))
    };
    let SamplingFeatures { history, bias, masks, logprobs, .. } = case.features;
    let helps = (history + bias > 0 || masks) && helper(EDIT_VARIANTS)
        || logprobs.is_some() && helper(LOGPROBS_VARIANTS);
    for device in cards {
        for variant in VARIANTS {
            if (wanted(variant.entry) || helps) && Sampler::plan_with(device, case.problem(), variant).is_ok()
            {
                prop_assert_eq!(&output(device, case, Some(variant))?, &want, "{}", variant.entry);
            }
        }
    }
    Ok(())
}

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

/// Parameters out of their range, and those that a plan was not made for: the message names the field.
#[test]
fn bad_params() {
    let problem = |features| SamplingProblem { features, ..SamplingProblem::new(4, 64, DType::F32) };
    let refused = |features, params| {
        let error = problem(features).write_params(&[params], &mut [0; PARAMS_LEN]);
        error.unwrap_err().to_string()
    };
    for (temperature, got) in [
        (-0.5, "-0.5"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (1e-40, "0.0000000000000000000000000000000000000001"),
    ] {
        let expected = format!("sampling: temperature: expected 0, or a normal number above 0, got {got}");
        assert_eq!(refused(ALL, SamplingParams { temperature, ..RANDOM }), expected);
    }
    for (p, got) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (f32::NAN, "NaN")] {
        let expected = |name| format!("sampling: {name}: expected a number above 0 and at most 1, got {got}");
        assert_eq!(refused(ALL, SamplingParams { top_p: p, ..RANDOM }), expected("top_p"));
        assert_eq!(refused(ALL, SamplingParams { typical_p: p, ..RANDOM }), expected("typical_p"));
    }
    let table = [
        (SamplingParams { min_p: -0.1, ..RANDOM }, "min_p: expected a number from 0 to 1, got -0.1"),
        (
            SamplingParams { repetition_penalty: 0.0, ..GREEDY },
            "repetition_penalty: expected a finite number above 0, got 0",
        ),
        (
            SamplingParams { presence_penalty: f32::NAN, ..GREEDY },
            "presence_penalty: expected a finite number, got NaN",
        ),
        (SamplingParams { history_len: 25, ..GREEDY }, "history_len: expected at most 24, got 25"),
        (SamplingParams { num_bias: 6, ..GREEDY }, "num_bias: expected at most 5, got 6"),
        (SamplingParams { history_len: 3, prompt_len: 4, ..GREEDY }, "prompt_len: expected at most 3, got 4"),
    ];
    for (params, expected) in table {
        assert_eq!(refused(ALL, params), format!("sampling: {expected}"));
    }
    let without =
        |name| format!("sampling: {name}: expected none, as the plan's features are without, got one");
    let bare = SamplingFeatures { draws: true, ..SamplingFeatures::GREEDY };
    for (name, params) in [
        ("top_k", SamplingParams { top_k: Some(3), ..RANDOM }),
        ("top_p", SamplingParams { top_p: 0.5, ..RANDOM }),
        ("typical_p", SamplingParams { typical_p: 0.5, ..RANDOM }),
        ("is_masked", SamplingParams { is_masked: true, ..GREEDY }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 1.1, ..GREEDY }),
    ] {
        assert_eq!(refused(bare, params), without(name));
    }
    assert_eq!(refused(SamplingFeatures::GREEDY, RANDOM), without("temperature"));
    let error = problem(ALL).write_params(&[GREEDY; 2], &mut [0; PARAMS_LEN]).unwrap_err();
    assert_eq!(error.to_string(), "sampling: words: expected 16 words for each of 2 rows, got 16");
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = SamplingProblem::new(4, 64, DType::F32);
        let plan = Sampler::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |logits: &Tensor, ids: &mut Tensor| {
            plan.run(&stream, SamplingArgs::new(logits.view(), ids.view_mut())).unwrap_err().to_string()
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
        let logits = tensor(&[4, 64], DType::F32)?;
        let params = tensor(&[4, PARAMS_LEN], DType::U32)?;
        let args = SamplingArgs::new(logits.view(), ids.view_mut());
        assert_eq!(
            plan.run(&stream, SamplingArgs { params: Some(params.view()), ..args }).unwrap_err().to_string(),
            "sampling: params: expected none, as the features have no parameters, got a tensor"
        );
        let all = Sampler::plan(device, SamplingProblem { features: ALL, ..problem })?;
        assert_eq!(
            all.run(&stream, SamplingArgs::new(logits.view(), ids.view_mut())).unwrap_err().to_string(),
            "sampling: params: expected a tensor, as the features have parameters, got none"
        );
        let refused = |problem| Sampler::plan(device, problem).unwrap_err().to_string();
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
        let features = SamplingFeatures { logprobs: Some(65), ..SamplingFeatures::GREEDY };
        assert_eq!(
            refused(SamplingProblem { features, ..problem }),
            "sampling: features: expected logprobs of at most 64, got 65"
        );
        let features = SamplingFeatures { top_k: true, ..SamplingFeatures::GREEDY };
        let error = refused(SamplingProblem { features, ..problem });
        assert!(
            error.starts_with("sampling: features: expected draws, as what is drawn from is bounded"),
            "{error}"
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
