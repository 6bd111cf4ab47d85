//! A case of sampling: its rows, what a device chooses, and whether that is near enough to the reference.

use std::collections::BTreeMap;

use abi::ops::sampling::{EDIT_VARIANTS, LOGPROBS_VARIANTS, SamplingVariant, VARIANTS, draw};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::sampling::{
    Logprobs, NO_TOKEN, PARAMS_LEN, Sampler, SamplingArgs, SamplingBias, SamplingFeatures, SamplingParams,
    SamplingProblem, reference,
};
use warpforge::{DType, Device};

use crate::harness::{Layout, Rows, Wanted, fail, floats, layouts, values};

/// Rounding distance: how far sums of probabilities may be from those of the reference.
const NEAR: f64 = 1e-5;
/// And distances from the entropy.
const NEAR_ENTROPY: f64 = 1e-5;
pub(super) const GREEDY: SamplingParams = SamplingParams {
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
pub(super) const RANDOM: SamplingParams = SamplingParams { temperature: 1.0, seed: 11, ..GREEDY };
/// Everything that a plan may have.
pub(super) const ALL: SamplingFeatures = SamplingFeatures {
    typical_p: true,
    history: 24,
    bias: 5,
    masks: true,
    logprobs: Some(3),
    ..SamplingFeatures::DRAWS
};

/// A block of 1024 threads for a row and a step, with some hundred barriers and shuffles for all of the searches.
pub(super) fn work(rows: usize, vocab: usize) -> usize {
    rows * (1024 * 500 + 20 * vocab)
}

/// A row, and what goes with it.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) logits: Vec<f64>,
    pub(super) params: SamplingParams,
    pub(super) history: Vec<u32>,
    pub(super) bias: Vec<(u32, f32)>,
    /// Which tokens are allowed, if not all.
    pub(super) mask: Option<Vec<bool>>,
}

impl Row {
    pub(super) fn new(logits: Vec<f64>, params: SamplingParams) -> Self {
        Row { logits, params, history: Vec::new(), bias: Vec::new(), mask: None }
    }

    /// The parameters with what the row has.
    pub(super) fn params(&self) -> SamplingParams {
        SamplingParams {
            history_len: self.history.len() as u32,
            num_bias: self.bias.len() as u32,
            is_masked: self.mask.is_some(),
            ..self.params
        }
    }

    pub(super) fn edited(&self) -> Vec<f64> {
        reference::edited(&self.logits, &self.params(), &self.history, &self.bias, self.mask.as_deref())
    }
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) vocab: usize,
    pub(super) rows: Vec<Row>,
    pub(super) features: SamplingFeatures,
    pub(super) layouts: [Layout; 8],
}

impl Case {
    /// What the rows need, and no more.
    pub(super) fn new(dtype: DType, rows: Vec<Row>) -> Self {
        let params: Vec<_> = rows.iter().map(Row::params).collect();
        let vocab = rows.first().map_or(1, |row| row.logits.len());
        Case { dtype, vocab, rows, features: SamplingFeatures::of(&params), layouts: [Layout::default(); 8] }
    }

    /// Rows of the same parameters.
    pub(super) fn of(dtype: DType, params: SamplingParams, logits: &[f64], vocab: usize) -> Self {
        Case::new(dtype, logits.chunks(vocab).map(|row| Row::new(row.to_vec(), params)).collect())
    }

    pub(super) fn problem(&self) -> SamplingProblem {
        let Case { dtype, vocab, features, .. } = *self;
        SamplingProblem { rows: self.rows.len(), vocab, dtype, features }
    }

    pub(super) fn work(&self) -> usize {
        let edits = self.features.history + self.features.bias > 0 || self.features.masks;
        let extra = usize::from(edits) + 2 * usize::from(self.features.logprobs.is_some());
        let typical = 1 + usize::from(self.rows.iter().any(|row| row.params.typical_p < 1.0));
        work(self.rows.len(), self.vocab) * typical + extra * self.rows.len() * (1024 * 100 + 8 * self.vocab)
    }
}

/// What logits look like.
#[derive(Clone, Copy, Debug)]
pub(super) enum Logits {
    /// Of one of the testkit's kinds.
    Of(Values),
    /// A few values only, so that there are many ties.
    Ties,
    /// As a model's: some far above the rest.
    Peaked,
    /// All the same.
    Equal,
}

pub(super) fn logits(kind: Logits, dtype: DType, n: usize, seed: u64) -> Vec<f64> {
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
pub(super) fn params() -> impl Strategy<Value = SamplingParams> {
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

pub(super) fn case() -> impl Strategy<Value = Case> {
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
pub(super) struct Output {
    pub(super) ids: Vec<u32>,
    pub(super) chosen: Vec<f64>,
    top_ids: Vec<u32>,
    top: Vec<f64>,
}

/// What a device chooses, after checking that nothing but its results was written.
pub(super) fn output(
    device: &Device,
    case: &Case,
    variant: Option<&'static SamplingVariant>,
) -> Result<Output, TestCaseError> {
    let mut words = vec![0; case.rows.len() * PARAMS_LEN];
    let params: Vec<_> = case.rows.iter().map(Row::params).collect();
    case.problem().write_params(&params, &mut words).map_err(fail)?;
    output_of_words(device, case, variant, &words)
}

pub(super) fn output_of_words(
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
pub(super) fn sample(device: &Device, case: &Case) -> Result<Vec<u32>, TestCaseError> {
    Ok(output(device, case, None)?.ids)
}

/// Whether `id` is drawn from `kept` for some u within a distance of the true one.
fn is_drawn(kept: &[(u32, f64)], u: f64, id: u32, distance: f64) -> bool {
    let total: f64 = kept.iter().map(|&(_, p)| p).sum();
    let before: f64 = kept.iter().filter(|&&(token, _)| token < id).map(|&(_, p)| p).sum();
    let own = kept.iter().find(|&&(token, _)| token == id);
    own.is_some_and(|&(_, p)| before / total <= u + distance && u - distance <= (before + p) / total)
}

/// The same of some set between these two: where tokens are about as probable, or as far from the entropy, each
/// rounding says which of them are kept.
fn is_drawn_between(
    (sure, possible): (&BTreeMap<u32, f64>, &BTreeMap<u32, f64>),
    u: f64,
    id: u32,
    distance: f64,
) -> bool {
    let Some(own) = possible.get(&id) else { return false };
    let before = |kept: &BTreeMap<u32, f64>| -> f64 { kept.range(..id).map(|(_, p)| p).sum() };
    let behind = |kept: &BTreeMap<u32, f64>| -> f64 { kept.range(id + 1..).map(|(_, p)| p).sum() };
    let least = before(sure) / (before(sure) + own + behind(possible));
    let most = (before(possible) + own) / (before(possible) + own + behind(sure));
    least <= u + distance && u - distance <= most
}

/// Whether `id` is what the definition gives, for some u and some shares within [`NEAR`] of the true ones.
pub(super) fn is_near(logits: &[f64], params: &SamplingParams, id: u32) -> bool {
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
    // What any of the shares keeps for sure, and what some may.
    let (mut sure, mut possible) = (None, BTreeMap::new());
    for top_p in around(params.top_p, 1.0) {
        let mut prefix = ranked.clone();
        prefix.truncate(reference::nucleus(&prefix, f64::from(params.top_p) + top_p));
        for min_p in around(params.min_p, 0.0) {
            let likely = reference::likely(prefix.clone(), f64::from(params.min_p) * (1.0 + min_p));
            let typical_p = f64::from(params.typical_p);
            let [least, most] = if params.typical_p < 1.0 {
                [
                    reference::typical(likely.clone(), typical_p - NEAR, -NEAR_ENTROPY),
                    reference::typical(likely, typical_p + NEAR, NEAR_ENTROPY),
                ]
            } else {
                [likely.clone(), likely]
            };
            possible.extend(most);
            let least: BTreeMap<u32, f64> = least.into_iter().collect();
            let kept = sure.get_or_insert_with(|| least.clone());
            kept.retain(|token, _| least.contains_key(token));
        }
    }
    is_drawn_between((&sure.unwrap_or_default(), &possible), u, id, 4.0 * NEAR)
}

pub(super) fn check(what: &str, case: &Case, output: &Output) -> Result<(), TestCaseError> {
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
pub(super) fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
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
