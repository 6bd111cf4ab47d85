//! The gated delta rule against its reference.

use std::ops::Range;

use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_all;
use testkit::strategies::{Rng, Values, dims_from, stride_padding};
use warpforge::ops::gated_delta::{Form, GatedDelta, GatedDeltaArgs, GatedDeltaProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, floats, heads_of, layouts,
    on_executors, store, swapped, through_every_kernel, values,
};

/// How much tokens forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decay {
    /// g of about −0.1 to −20.
    Usual,
    /// g of about −1e-6.
    Least,
    /// g of about −1e4.
    Most,
    /// Each token one of these.
    Mixed,
    /// Gates and rates of all sizes, whose exponentials overflow and underflow.
    Wide,
}

/// Gates beside which softplus is 0 in f32, next to that, or as large as there is room for.
const WIDE_GATES: [f64; 10] = [-6e4, -200.0, -149.0, -106.0, -104.5, -90.0, -86.0, 0.5, 90.0, 6e4];

/// Logarithms of rates, of which e^a_log is 0, next to that, next to infinity, or beyond.
const WIDE_RATES: [f64; 9] = [-3e38, -120.0, -100.0, 0.0, 87.0, 88.73, 105.0, 150.0, 3e38];

/// What the keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keys {
    Of(Values),
    /// All the same: the correction of one token is undone by the next.
    Same,
    /// As long as the contract allows: sums of their squares and of their products reach far up in f32.
    Long,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    heads_k: usize,
    group: usize,
    dim_k: usize,
    dim_v: usize,
    /// Tokens of each sequence.
    lens: Vec<usize>,
    /// Of q, k, v, b, a, the state and out; the weights are where the state is.
    layouts: [Layout; 7],
    /// Of q, k, v and out: whether the tokens of a head are next to each other, not the heads of a token.
    by_head: [bool; 4],
    decay: Decay,
    keys: Keys,
    values: Values,
    /// Most places of a pass of the chunked form.
    pass: u32,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let len = prop_oneof![
        2 => proptest::sample::select(&[0usize, 1, 2, 3, 5][..]),
        2 => proptest::sample::select(&[16usize, 63, 64, 65, 129][..]),
        1 => 0usize..100,
    ];
    let sizes = (
        floats(),
        1usize..3,
        1usize..3,
        dims_from(1, &[8, 32, 64], 128),
        dims_from(1, &[4, 32], 40),
        proptest::collection::vec(len, 0..4),
    );
    let layout = || {
        (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
            .prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let by_head = || prop_oneof![3 => Just(false), 1 => Just(true)];
    let layouts = (layouts(layout), [by_head(), by_head(), by_head(), by_head()]);
    let decay = prop_oneof![
        3 => Just(Decay::Usual),
        1 => Just(Decay::Least),
        1 => Just(Decay::Most),
        1 => Just(Decay::Mixed),
        1 => Just(Decay::Wide),
    ];
    let keys = prop_oneof![
        4 => Just(Keys::Of(Values::Normal)),
        1 => Just(Keys::Of(Values::Tiny)),
        1 => Just(Keys::Of(Values::Zeros)),
        1 => Just(Keys::Same),
        1 => Just(Keys::Long),
    ];
    // Not mixed: a decay over a chunk reaches down to 2^-149 only, so a huge value leaves nothing there of which, token
    // by token, something would be left beside tiny ones. Nor subnormal, beside a state that decays to their size.
    let values = prop_oneof![
        3 => Just(Values::Normal),
        1 => proptest::sample::select(&[Values::Huge, Values::Tiny, Values::Zeros][..]),
    ];
    let kinds = (layouts, decay, keys, values, 1u32..6, any::<u64>());
    (sizes, kinds).prop_map(
        |(
            (dtype, heads_k, group, dim_k, dim_v, lens),
            ((layouts, by_head), decay, keys, values, pass, seed),
        )| Case {
            dtype,
            heads_k,
            group,
            dim_k,
            dim_v,
            lens,
            layouts,
            by_head,
            decay,
            keys,
            values,
            pass,
            seed,
        },
    )
}

impl Case {
    fn heads_v(&self) -> usize {
        self.heads_k * self.group
    }

    fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    fn work(&self, form: Form) -> usize {
        match form {
            Form::Recurrent => self.tokens() * self.heads_v() * self.dim_v.div_ceil(8) * 5500,
            Form::Chunked { .. } => {
                let chunks: usize = self.lens.iter().map(|len| len.div_ceil(64)).sum();
                let chunk = 256 * (300 + 100 * self.dim_k.div_ceil(32));
                let scan = 256 * (500 + 600 * self.dim_k.div_ceil(64));
                chunks * self.heads_v() * (chunk + scan * self.dim_v.div_ceil(32))
            }
        }
    }

    fn both(&self) -> usize {
        self.work(Form::Recurrent) + self.work(self.chunked())
    }

    fn chunked(&self) -> Form {
        Form::Chunked { pass: self.pass }
    }

    fn problem(&self) -> GatedDeltaProblem {
        let Case { dtype, heads_k, dim_k, dim_v, .. } = *self;
        let (tokens, sequences) = (self.tokens(), self.lens.len());
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        let heads_v = self.heads_v();
        GatedDeltaProblem { tokens, sequences, longest, heads_k, heads_v, dim_k, dim_v, dtype }
    }
}

/// The inputs of a run.
#[derive(Clone)]
struct Data {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    b: Vec<f64>,
    a: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    slots: Vec<u32>,
    state: Vec<f64>,
}

impl Data {
    fn new(case: &Case) -> Self {
        let Case { dtype, heads_k, dim_k, dim_v, decay, keys, seed, .. } = *case;
        let (tokens, heads_v, sequences) = (case.tokens(), case.heads_v(), case.lens.len());
        let mut rng = Rng::new(seed);
        // Distinct slots in a random order, of one more than there are sequences.
        let mut slots: Vec<u32> = (0..sequences as u32 + 1).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, rng.below(i + 1));
        }
        slots.truncate(sequences);
        let keys_width = heads_k * dim_k;
        let k = match keys {
            Keys::Of(kind) => values(kind, dtype, tokens * keys_width, seed ^ 1),
            Keys::Same => values(Values::Normal, dtype, keys_width, seed ^ 1).repeat(tokens),
            Keys::Long => {
                let normal = values(Values::Normal, dtype, tokens * keys_width, seed ^ 1);
                let long = if dtype == DType::F16 { 2f64.powi(12) } else { 2f64.powi(56) };
                round_all(dtype, &normal.iter().map(|value| value * long).collect::<Vec<_>>())
            }
        };
        let mut a = |_| match (decay, rng.below(4)) {
            (Decay::Wide, _) => WIDE_GATES[rng.below(WIDE_GATES.len())],
            (Decay::Least, _) | (Decay::Mixed, 0) => -14.0,
            (Decay::Most, _) | (Decay::Mixed, 1) => 600.0,
            _ => rng.normal(),
        };
        let a: Vec<f64> = (0..tokens * heads_v).map(&mut a).collect();
        let b = values(Values::Normal, dtype, tokens * heads_v, seed ^ 2);
        Data {
            q: values(Values::Normal, dtype, tokens * keys_width, seed ^ 3),
            k,
            v: values(case.values, dtype, tokens * heads_v * dim_v, seed ^ 4),
            b: round_all(dtype, &b.iter().map(|b| 3.0 * b).collect::<Vec<_>>()),
            a: round_all(dtype, &a),
            // As they are initialised: ln of 1 to 16.
            a_log: {
                let usual = |rng: &mut Rng| (1.0 + 15.0 * rng.uniform()).ln();
                let wide = |rng: &mut Rng| WIDE_RATES[rng.below(WIDE_RATES.len())];
                let rate = if decay == Decay::Wide { wide } else { usual };
                round_all(DType::F32, &(0..heads_v).map(|_| rate(&mut rng)).collect::<Vec<_>>())
            },
            dt_bias: values(Values::Normal, DType::F32, heads_v, seed ^ 5),
            state: values(Values::Normal, DType::F32, (sequences + 1) * heads_v * dim_k * dim_v, seed ^ 6),
            slots,
        }
    }

    /// Only the tokens of these ranges, one range for each sequence.
    fn part(&self, case: &Case, ranges: &[Range<usize>]) -> Self {
        let pick = |rows: &[f64], width: usize| -> Vec<f64> {
            ranges.iter().flat_map(|range| &rows[range.start * width..range.end * width]).copied().collect()
        };
        let (keys_width, heads_v) = (case.heads_k * case.dim_k, case.heads_v());
        Data {
            q: pick(&self.q, keys_width),
            k: pick(&self.k, keys_width),
            v: pick(&self.v, heads_v * case.dim_v),
            b: pick(&self.b, heads_v),
            a: pick(&self.a, heads_v),
            ..self.clone()
        }
    }
}

/// Tokens of each sequence.
fn ranges(lens: &[usize]) -> Vec<Range<usize>> {
    lens.iter()
        .scan(0, |end, &len| {
            *end += len;
            Some(*end - len..*end)
        })
        .collect()
}

/// Output and state after a run of sequences of these lengths.
fn run_once(
    device: &Device,
    case: &Case,
    data: &Data,
    lens: &[usize],
    form: Option<Form>,
) -> Result<(Vec<f64>, Vec<f64>), TestCaseError> {
    let Case { dtype, heads_k, dim_k, dim_v, layouts, by_head, .. } = *case;
    let (heads_v, tokens) = (case.heads_v(), lens.iter().sum::<usize>());
    let stream = device.stream().map_err(fail)?;
    let plan = match form {
        None => GatedDelta::plan(device, case.problem()),
        Some(form) => GatedDelta::plan_with(device, case.problem(), form),
    };
    let plan = plan.map_err(fail)?;
    let rows = |dtype, values: &[f64], width, layout: usize| {
        Rows::input(&stream, dtype, values, width, layouts[layout]).map_err(fail)
    };
    // q, k, v: the heads of a token are a row, or each is one.
    let (shape_k, shape_v) = ([tokens, heads_k, dim_k], [tokens, heads_v, dim_v]);
    let heads = |values: &[f64], shape: [usize; 3], tensor: usize| {
        if by_head[tensor] {
            rows(dtype, &swapped(values, shape), shape[2], tensor)
        } else {
            rows(dtype, values, shape[1] * shape[2], tensor)
        }
    };
    let (q, k, v) = (heads(&data.q, shape_k, 0)?, heads(&data.k, shape_k, 1)?, heads(&data.v, shape_v, 2)?);
    let (b, a) = (rows(dtype, &data.b, heads_v, 3)?, rows(dtype, &data.a, heads_v, 4)?);
    let (a_log, dt_bias) =
        (rows(DType::F32, &data.a_log, heads_v, 5)?, rows(DType::F32, &data.dt_bias, heads_v, 5)?);
    let mut state = rows(DType::F32, &data.state, heads_v * dim_k * dim_v, 5)?;
    let num_slots = data.state.len() / (heads_v * dim_k * dim_v);
    let (out_rows, out_width) =
        if by_head[3] { (heads_v * tokens, dim_v) } else { (tokens, heads_v * dim_v) };
    let mut out = Rows::output(&stream, dtype, out_rows, out_width, layouts[6]).map_err(fail)?;
    let out_view = if by_head[3] {
        out.view_mut().reshape(&[heads_v, tokens, dim_v]).and_then(|out| out.swap_axes(0, 1))
    } else {
        out.view_mut().reshape(&shape_v)
    };
    let mut offsets = vec![0];
    offsets.extend(ranges(lens).iter().map(|range| range.end as u32));
    let offsets = Tensor::from_slice(&stream, &[lens.len() + 1], &offsets).map_err(fail)?;
    let slots = Tensor::from_slice(&stream, &[lens.len()], &data.slots).map_err(fail)?;
    let args = GatedDeltaArgs {
        q: heads_of(q.view(), shape_k, by_head[0]).map_err(fail)?,
        k: heads_of(k.view(), shape_k, by_head[1]).map_err(fail)?,
        v: heads_of(v.view(), shape_v, by_head[2]).map_err(fail)?,
        b: b.view(),
        a: a.view(),
        a_log: a_log.view().reshape(&[heads_v]).map_err(fail)?,
        dt_bias: dt_bias.view().reshape(&[heads_v]).map_err(fail)?,
        offsets: offsets.view(),
        slots: slots.view(),
        state: state.view_mut().reshape(&[num_slots, heads_v, dim_k, dim_v]).map_err(fail)?,
        out: out_view.map_err(fail)?,
    };
    plan.run(&stream, args).map_err(fail)?;
    let out = out.read(&stream)?;
    let out = if by_head[3] { swapped(&out, [heads_v, tokens, dim_v]) } else { out };
    Ok((out, state.read(&stream)?))
}

/// What must come out, how far the naive computation is from it, and what errors are relative to.
struct Expected {
    out: Vec<f64>,
    out_naive: Vec<f64>,
    out_terms: Vec<f64>,
    state: Vec<f64>,
    state_naive: Vec<f64>,
    state_terms: Vec<f64>,
}

/// The naive computation that errors are measured by: the formula of the form, as plain loops.
fn naive(input: reference::Head<'_>, case: &Case, form: Form) -> (Vec<f64>, Vec<f64>) {
    match form {
        Form::Recurrent => {
            let outcome = reference::gated_delta::<f32>(input, case.dim_k, store(case.dtype));
            (outcome.out, outcome.state)
        }
        Form::Chunked { .. } => {
            reference::gated_delta_chunked::<f32>(input, case.dim_k, 64, store(case.dtype))
        }
    }
}

fn expected(case: &Case, data: &Data, form: Form) -> Expected {
    let Case { heads_k, group, dim_k, dim_v, .. } = *case;
    let (heads_v, tokens) = (case.heads_v(), case.tokens());
    let outs = || vec![0.0; tokens * heads_v * dim_v];
    let mut all = Expected {
        out: outs(),
        out_naive: outs(),
        out_terms: outs(),
        state: data.state.clone(),
        state_naive: data.state.clone(),
        state_terms: data.state.clone(),
    };
    for (range, &slot) in ranges(&case.lens).into_iter().zip(&data.slots) {
        for head in 0..heads_v {
            let column = |rows: &[f64], heads: usize, head: usize, dim: usize| -> Vec<f64> {
                range.clone().flat_map(|t| &rows[(t * heads + head) * dim..][..dim]).copied().collect()
            };
            let size = dim_k * dim_v;
            let at = (slot as usize * heads_v + head) * size..(slot as usize * heads_v + head + 1) * size;
            let (q, k) = (
                column(&data.q, heads_k, head / group, dim_k),
                column(&data.k, heads_k, head / group, dim_k),
            );
            let v = column(&data.v, heads_v, head, dim_v);
            let (b, a) = (column(&data.b, heads_v, head, 1), column(&data.a, heads_v, head, 1));
            let input = reference::Head {
                q: &q,
                k: &k,
                v: &v,
                b: &b,
                a: &a,
                a_log: data.a_log[head],
                dt_bias: data.dt_bias[head],
                state: &data.state[at.clone()],
            };
            let want = reference::gated_delta::<f64>(input, dim_k, |v| v);
            let (naive_out, naive_state) = naive(input, case, form);
            all.state[at.clone()].copy_from_slice(&want.state);
            all.state_naive[at.clone()].copy_from_slice(&naive_state);
            all.state_terms[at].copy_from_slice(&want.state_terms);
            for (i, t) in range.clone().enumerate() {
                let (from, to) = (i * dim_v..(i + 1) * dim_v, (t * heads_v + head) * dim_v);
                all.out[to..to + dim_v].copy_from_slice(&want.out[from.clone()]);
                all.out_naive[to..to + dim_v].copy_from_slice(&naive_out[from.clone()]);
                all.out_terms[to..to + dim_v].copy_from_slice(&want.out_terms[from]);
            }
        }
    }
    all
}

/// Elements of a head that are compared with each other. All elements of a head share the errors of its gates and
/// norms, so however many there are, they say as little of how large an error can be as a few do: fewer than
/// `compare::SAMPLE`, so that the error to be expected of the roundings counts too.
const ALIKE: usize = 32;

impl Expected {
    /// Of the two naive computations, which the parts of a run are each one of, the one that is further off.
    fn or(mut self, other: Expected) -> Self {
        let pairs = [
            (&self.out, &mut self.out_naive, &other.out_naive),
            (&self.state, &mut self.state_naive, &other.state_naive),
        ];
        for (want, naive, other) in pairs {
            for ((&want, naive), &other) in want.iter().zip(naive).zip(other) {
                if (other - want).abs() > (*naive - want).abs() {
                    *naive = other;
                }
            }
        }
        self
    }

    fn check(&self, what: &str, case: &Case, out: &[f64], state: &[f64]) -> Result<(), TestCaseError> {
        // The norms, the prediction, the correction and the read of one token.
        let roundings = 3 * case.dim_k + 12;
        let all = [
            ("out", case.dtype, out, &self.out, &self.out_naive, &self.out_terms),
            ("state", DType::F32, state, &self.state, &self.state_naive, &self.state_terms),
        ];
        for (part, dtype, got, want, naive, terms) in all {
            prop_assert_eq!(got.len(), want.len());
            for start in (0..want.len()).step_by(ALIKE) {
                let some = start..want.len().min(start + ALIKE);
                let tolerance = Tolerance::new(dtype, Scale::Given(&terms[some.clone()]), roundings);
                let what = format!("{what}, {part} from {start}");
                check(&what, &got[some.clone()], &want[some.clone()], &naive[some], &tolerance)?;
            }
        }
        Ok(())
    }
}

fn run(device: &Device, case: &Case, form: Option<Form>) -> Result<(), TestCaseError> {
    let data = Data::new(case);
    let (out, state) = run_once(device, case, &data, &case.lens, form)?;
    let plan = GatedDelta::plan(device, case.problem()).map_err(fail)?;
    let taken = match form {
        Some(form) if device.limits().is_some() => form,
        None if plan.report().variant.contains("scan") => case.chunked(),
        _ => Form::Recurrent,
    };
    expected(case, &data, taken).check(&format!("{form:?}"), case, &out, &state)
}

/// The wanted kernels that can do the case.
fn run_forms(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for (form, kernel) in [(Form::Recurrent, "recurrent"), (case.chunked(), "scan")] {
            if wanted(&format!("gated_delta_{}__{kernel}__sm61", case.dtype)) {
                run(device, case, Some(form))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "gated_delta",
        &[|case: &mut Case| case.lens.clear(), |case: &mut Case| case.lens.fill(0)],
        case(),
        Case::both,
        run_forms,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("gated_delta", case(), Case::both, run_forms)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(48))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::both)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Both forms, on every floor.
    #[test]
    fn every_form((case, on) in on_executors(case, Case::both)) {
        run_forms(&on.cards(), &case, EVERY)?;
    }

    /// Sequences give the same bits packed together and alone.
    #[test]
    fn packing_does_not_show((case, on) in on_executors(case, |case| 2 * case.both())) {
        let data = Data::new(&case);
        for device in &on.devices() {
            for form in [Form::Recurrent, case.chunked()] {
                let (out, state) = run_once(device, &case, &data, &case.lens, Some(form))?;
                let (mut alone, mut alone_state) = (Vec::new(), data.state.clone());
                for (range, &slot) in ranges(&case.lens).iter().zip(&data.slots) {
                    let part = Data { slots: vec![slot], state: alone_state, ..data.part(&case, std::slice::from_ref(range)) };
                    let (rows, next) = run_once(device, &case, &part, &[range.len()], Some(form))?;
                    alone.extend(rows);
                    alone_state = next;
                }
                prop_assert_eq!(&out, &alone);
                prop_assert_eq!(&state, &alone_state);
            }
        }
    }

    /// Prefill in pieces of any size and then decode is as good as one pass; in the recurrent form, bit for bit.
    #[test]
    fn cuts_do_not_matter(
        ((case, cuts), on) in on_executors(
            || (case(), [0.0f64..=1.0, 0.0..=1.0]),
            |(case, _)| 2 * case.both(),
        ),
    ) {
        let data = Data::new(&case);
        for device in &on.devices() {
            let (whole, whole_state) = run_once(device, &case, &data, &case.lens, Some(Form::Recurrent))?;
            for last in [case.chunked(), Form::Recurrent] {
                let want = expected(&case, &data, last).or(expected(&case, &data, Form::Recurrent));
                // Two pieces, and the rest.
                let mut out = vec![f64::NAN; want.out.len()];
                let width = case.heads_v() * case.dim_v;
                let at = |range: &Range<usize>, cut: f64| range.start + (range.len() as f64 * cut) as usize;
                let (low, high) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
                let mut state = data.state.clone();
                for (from, to, form) in [(0.0, low, last), (low, high, last), (high, 1.0, Form::Recurrent)] {
                    let pieces: Vec<Range<usize>> =
                        ranges(&case.lens).iter().map(|range| at(range, from)..at(range, to)).collect();
                    let lens: Vec<usize> = pieces.iter().map(|piece| piece.len()).collect();
                    let part = Data { state, ..data.part(&case, &pieces) };
                    let (rows, next) = run_once(device, &case, &part, &lens, Some(form))?;
                    state = next;
                    for (piece, rows_at) in pieces.iter().zip(ranges(&lens)) {
                        out[piece.start * width..piece.end * width]
                            .copy_from_slice(&rows[rows_at.start * width..rows_at.end * width]);
                    }
                }
                if last == Form::Recurrent {
                    prop_assert_eq!(&out, &whole);
                    prop_assert_eq!(&state, &whole_state);
                }
                want.check(&format!("{last:?} in pieces"), &case, &out, &state)?;
            }
        }
    }
}

fn one_head(dtype: DType, tokens: usize, dim_k: usize, dim_v: usize) -> Case {
    Case {
        dtype,
        heads_k: 1,
        group: 1,
        dim_k,
        dim_v,
        lens: vec![tokens],
        layouts: [Layout::default(); 7],
        by_head: [false; 4],
        decay: Decay::Usual,
        keys: Keys::Of(Values::Normal),
        values: Values::Normal,
        pass: 64,
        seed: 11,
    }
}

/// On the CPU a slot that is there twice is no race of its threads: one sequence goes on from the other's state.
#[test]
fn a_slot_that_is_there_twice() -> Result<(), TestCaseError> {
    let case = Case { heads_k: 4, group: 2, lens: vec![9, 17, 5], ..one_head(DType::F32, 0, 32, 64) };
    let (device, mut data) = (Device::cpu(), Data::new(&case));
    data.slots = vec![1, 1, 1];
    let (out, state) = run_once(&device, &case, &data, &case.lens, Some(Form::Recurrent))?;
    let (mut alone, mut alone_state) = (Vec::new(), data.state.clone());
    for range in ranges(&case.lens) {
        let part =
            Data { slots: vec![1], state: alone_state, ..data.part(&case, std::slice::from_ref(&range)) };
        let (rows, next) = run_once(&device, &case, &part, &[range.len()], Some(Form::Recurrent))?;
        alone.extend(rows);
        alone_state = next;
    }
    prop_assert_eq!(out, alone);
    prop_assert_eq!(state, alone_state);
    Ok(())
}

/// A sequence without a slot, and tokens that no sequence has, are left as they are, in both forms.
#[test]
fn what_belongs_to_nobody_is_left() -> Result<(), TestCaseError> {
    let (tokens, heads, dim) = (210, 2, 8);
    let case = Case { heads_k: heads, lens: vec![70; 3], ..one_head(DType::F32, 0, dim, dim) };
    let data = Data::new(&case);
    for device in &devices() {
        for form in [Form::Recurrent, case.chunked()] {
            let stream = device.stream()?;
            let rows = |values: &[f64], width| {
                Rows::input(&stream, DType::F32, values, width, Layout::default()).map_err(fail)
            };
            let (q, k, v) =
                (rows(&data.q, heads * dim)?, rows(&data.k, heads * dim)?, rows(&data.v, heads * dim)?);
            let (b, a) = (rows(&data.b, heads)?, rows(&data.a, heads)?);
            let (a_log, dt_bias) = (rows(&data.a_log, heads)?, rows(&data.dt_bias, heads)?);
            let state_before = &data.state[..2 * heads * dim * dim];
            let mut state = rows(state_before, heads * dim * dim)?;
            let mut out = rows(&vec![7.0; tokens * heads * dim], heads * dim)?;
            // Of two slots, the second is sequence 1's; sequences 0 and 2 have none. Tokens 0 to 3 are nobody's.
            let offsets = Tensor::from_slice(&stream, &[4], &[4u32, 70, 140, u32::MAX])?;
            let slots = Tensor::from_slice(&stream, &[3], &[2u32, 1, u32::MAX])?;
            let shape = [tokens, heads, dim];
            let args = GatedDeltaArgs {
                q: q.view().reshape(&shape)?,
                k: k.view().reshape(&shape)?,
                v: v.view().reshape(&shape)?,
                b: b.view(),
                a: a.view(),
                a_log: a_log.view().reshape(&[heads])?,
                dt_bias: dt_bias.view().reshape(&[heads])?,
                offsets: offsets.view(),
                slots: slots.view(),
                state: state.view_mut().reshape(&[2, heads, dim, dim])?,
                out: out.view_mut().reshape(&shape)?,
            };
            GatedDelta::plan_with(device, case.problem(), form)?.run(&stream, args)?;
            for (token, row) in out.read(&stream)?.chunks(heads * dim).enumerate() {
                let is_left = row.iter().all(|&value| value == 7.0);
                assert_eq!(is_left, !(70..140).contains(&token), "{token}, {form:?}, {device:?}");
            }
            let state = state.read(&stream)?;
            let (first, second) = state.split_at(heads * dim * dim);
            assert_eq!(first, &state_before[..first.len()], "{form:?}, {device:?}");
            assert_ne!(second, &state_before[first.len()..], "{form:?}, {device:?}");
        }
    }
    Ok(())
}

/// In f64 the chunked formula is the recurrent one.
#[test]
fn the_two_formulas_agree() {
    for (tokens, decay) in [(1, Decay::Usual), (65, Decay::Usual), (130, Decay::Least), (70, Decay::Mixed)] {
        let case = Case { decay, ..one_head(DType::F32, tokens, 8, 4) };
        let data = Data::new(&case);
        let at = data.slots[0] as usize * 32;
        let input = reference::Head {
            q: &data.q,
            k: &data.k,
            v: &data.v,
            b: &data.b,
            a: &data.a,
            a_log: data.a_log[0],
            dt_bias: data.dt_bias[0],
            state: &data.state[at..at + 32],
        };
        let recurrent = reference::gated_delta::<f64>(input, 8, |v| v);
        let (out, state) = reference::gated_delta_chunked::<f64>(input, 8, 64, |v| v);
        for (got, want) in out.iter().zip(&recurrent.out).chain(state.iter().zip(&recurrent.state)) {
            assert!((got - want).abs() <= 1e-9, "{tokens} {decay:?}: {got:e} {want:e}");
        }
    }
}

/// e^a_log · softplus(a + dt_bias) where one factor is beyond f32 and the other below it: no NaN, and the decay that it
/// is.
#[test]
fn rates_and_gates_beyond_f32() -> Result<(), TestCaseError> {
    let (dim, max) = (8, f64::from(f32::MAX));
    // a_log, a, dt_bias, and the logarithm of the decay.
    let gates = [
        (88.73, -104.5, 0.0, -(88.73f64 - 104.5).exp()),
        (88.73, -200.0, -5.0, 0.0),
        (105.0, -105.0, -1.0, -(-1f64).exp()),
        (150.0, -104.5, 0.0, f64::NEG_INFINITY),
        (max, -max, -max, 0.0),
        (max, max, max, f64::NEG_INFINITY),
        (-max, max, max, 0.0),
        (-100.0, 100.0, 0.0, 0.0),
        (0.0, -max, 0.0, 0.0),
    ];
    for (a_log, a, dt_bias, log_decay) in gates {
        let case = one_head(DType::F32, 3, dim, dim);
        let mut data = Data::new(&case);
        data.a.fill(a);
        data.b.fill(-200.0);
        data.a_log.fill(f64::from(a_log as f32));
        data.dt_bias.fill(dt_bias);
        let size = dim * dim;
        let at = data.slots[0] as usize * size;
        for device in &devices_for(case.both()) {
            for form in [Form::Recurrent, case.chunked()] {
                let (out, state) = run_once(device, &case, &data, &case.lens, Some(form))?;
                let what = format!("{a_log} {a} {dt_bias} {form:?} {device:?}");
                prop_assert!(out.iter().all(|value| value.is_finite()), "{}", what);
                for (got, before) in std::iter::zip(&state[at..at + size], &data.state[at..at + size]) {
                    let want = before * (3.0 * log_decay).exp();
                    let error = (got - want).abs();
                    prop_assert!(error <= 1e-5 * want.abs(), "{}: {} {}", what, got, want);
                }
            }
        }
    }
    Ok(())
}

/// What a token that forgets everything leaves is as exact as if nothing had been before it.
#[test]
fn decays_after_a_reset_keep_their_digits() -> Result<(), TestCaseError> {
    let mut case = one_head(DType::F32, 64, 16, 8);
    case.decay = Decay::Least;
    for device in &devices_for(case.both()) {
        let mut data = Data::new(&case);
        data.b.fill(-4.0);
        let forgetful =
            Data { a: (0..64).map(|t| if t < 8 { 600.0 } else { -14.0 }).collect(), ..data.clone() };
        let (out, _) = run_once(device, &case, &forgetful, &case.lens, Some(case.chunked()))?;
        // By the recurrence's errors, which do not depend on what was forgotten.
        let want = expected(&case, &forgetful, Form::Recurrent);
        let tolerance = Tolerance::new(DType::F32, Scale::Given(&want.out_terms), 60);
        check("reset", &out, &want.out, &want.out_naive, &tolerance)?;
    }
    Ok(())
}

/// A token that is not a number reaches no earlier token and no other column.
#[test]
fn nan_goes_forward_only() -> Result<(), TestCaseError> {
    let (tokens, bad, dim_v) = (70, 40, 8);
    let case = one_head(DType::F32, tokens, 8, dim_v);
    for device in &devices_for(case.both()) {
        for form in [Form::Recurrent, case.chunked()] {
            let data = Data::new(&case);
            let mut value = data.clone();
            value.v[bad * dim_v + 3] = f64::NAN;
            let mut key = data.clone();
            key.k[bad * 8] = f64::NAN;
            let mut gate = data.clone();
            gate.a[bad] = f64::NAN;
            let mut query = data;
            query.q[bad * 8] = f64::NAN;
            let whole = |token: usize, _: usize| token >= bad;
            let column = |token: usize, col: usize| token >= bad && col == 3;
            let row = |token: usize, _: usize| token == bad;
            type IsNan<'a> = &'a dyn Fn(usize, usize) -> bool;
            let cases: [(_, &Data, IsNan<'_>); 4] =
                [("v", &value, &column), ("k", &key, &whole), ("a", &gate, &whole), ("q", &query, &row)];
            for (what, data, is_nan) in cases {
                let (out, _) = run_once(device, &case, data, &case.lens, Some(form))?;
                for (index, value) in out.iter().enumerate() {
                    let (token, col) = (index / dim_v, index % dim_v);
                    assert_eq!(
                        value.is_nan(),
                        is_nan(token, col),
                        "{what} {token} {col} {form:?} {device:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// A copied slot goes on as the original does, and the original is not touched by it.
#[test]
fn a_copy_of_a_slot_is_a_fork() -> Result<(), Box<dyn std::error::Error>> {
    let (heads, dim) = (2, 16);
    for device in &devices() {
        let stream = device.stream()?;
        let (tokens, dtype) = (3, DType::F32);
        let problem = GatedDeltaProblem {
            tokens,
            sequences: 2,
            longest: tokens,
            heads_k: heads,
            heads_v: heads,
            dim_k: dim,
            dim_v: dim,
            dtype,
        };
        let plan = GatedDelta::plan(device, problem)?;
        let random = |shape: &[usize], seed| {
            let values = testkit::strategies::fill(Values::Normal, dtype, shape.iter().product(), seed);
            Tensor::from_slice(&stream, shape, &values)
        };
        let mut state = random(&[3, heads, dim, dim], 1)?;
        let weights = random(&[heads], 2)?;
        let step = |state: &mut Tensor, slots: &[u32], seeds: &[u64]| -> Result<Vec<f32>, Error> {
            let tokens = slots.len();
            let rows = |width: usize, which: u64| -> Result<Tensor, Error> {
                let values: Vec<f32> = seeds
                    .iter()
                    .flat_map(|seed| {
                        testkit::strategies::fill(Values::Normal, dtype, width, 10 * seed + which)
                    })
                    .collect();
                Tensor::from_slice(&stream, &[tokens, width], &values)
            };
            let (q, k, v) = (rows(heads * dim, 0)?, rows(heads * dim, 1)?, rows(heads * dim, 2)?);
            let (b, a) = (rows(heads, 3)?, rows(heads, 4)?);
            let offsets: Vec<u32> = (0..=tokens as u32).collect();
            let offsets = Tensor::from_slice(&stream, &[tokens + 1], &offsets)?;
            let slots = Tensor::from_slice(&stream, &[tokens], slots)?;
            let mut out = Tensor::empty(&stream, &[tokens, heads, dim], dtype)?;
            let shape = [tokens, heads, dim];
            let args = GatedDeltaArgs {
                q: q.view().reshape(&shape)?,
                k: k.view().reshape(&shape)?,
                v: v.view().reshape(&shape)?,
                b: b.view(),
                a: a.view(),
                a_log: weights.view(),
                dt_bias: weights.view(),
                offsets: offsets.view(),
                slots: slots.view(),
                state: state.view_mut(),
                out: out.view_mut(),
            };
            plan.run(&stream, args)?;
            out.to_vec(&stream)
        };
        step(&mut state, &[0], &[1])?;
        let copy = Tensor::from_slice(&stream, &[3, heads, dim, dim], &state.to_vec::<f32>(&stream)?)?;
        stream.copy(copy.view().slice(0, 0..1)?, state.view_mut().slice(0, 2..3)?)?;
        // The same token for both, then different ones.
        let both = step(&mut state, &[0, 2], &[2, 2])?;
        assert_eq!(both[..heads * dim], both[heads * dim..], "{device:?}");
        let apart = step(&mut state, &[0, 2], &[3, 4])?;
        assert_ne!(apart[..heads * dim], apart[heads * dim..], "{device:?}");
        let mut unforked = copy;
        step(&mut unforked, &[0], &[2])?;
        assert_eq!(step(&mut unforked, &[0], &[3])?, apart[..heads * dim], "{device:?}");
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = GatedDeltaProblem {
            tokens: 4,
            sequences: 2,
            longest: 4,
            heads_k: 1,
            heads_v: 2,
            dim_k: 8,
            dim_v: 4,
            dtype: DType::BF16,
        };
        let plan = GatedDelta::plan(device, problem)?;
        let zeros = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message =
            |tokens: usize, heads_v: usize, sequences: usize, state_type| -> Result<String, Error> {
                let (q, v) =
                    (zeros(&[tokens, 1, 8], DType::BF16)?, zeros(&[tokens, heads_v, 4], DType::BF16)?);
                let (gates, weights) = (zeros(&[tokens, 2], DType::BF16)?, zeros(&[2], DType::F32)?);
                let (offsets, slots) =
                    (zeros(&[sequences + 1], DType::U32)?, zeros(&[sequences], DType::U32)?);
                let mut state = zeros(&[2, 2, 8, 4], state_type)?;
                let mut out = zeros(&[tokens, 2, 4], DType::BF16)?;
                let args = GatedDeltaArgs {
                    q: q.view(),
                    k: q.view(),
                    v: v.view(),
                    b: gates.view(),
                    a: gates.view(),
                    a_log: weights.view(),
                    dt_bias: weights.view(),
                    offsets: offsets.view(),
                    slots: slots.view(),
                    state: state.view_mut(),
                    out: out.view_mut(),
                };
                Ok(plan.run(&stream, args).unwrap_err().to_string())
            };
        assert_eq!(
            message(5, 2, 2, DType::F32)?,
            "gated_delta: q: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(message(4, 3, 2, DType::F32)?, "gated_delta: v: expected shape [4, 2, 4], got [4, 3, 4]");
        assert_eq!(
            message(4, 2, 3, DType::F32)?,
            "gated_delta: slots: expected at most 2 sequences, as planned, got 3"
        );
        assert_eq!(message(4, 2, 2, DType::BF16)?, "gated_delta: state: expected f32, got bf16");
        for (wrong, expected) in [
            (GatedDeltaProblem { dim_k: 129, ..problem }, "dim_k from 1 to 128, got 129"),
            (
                GatedDeltaProblem { heads_k: 3, ..problem },
                "heads_v a multiple of heads_k, both at least 1, got 2 and 3",
            ),
            (GatedDeltaProblem { dtype: DType::U32, ..problem }, "dtype f32, f16 or bf16, got u32"),
        ] {
            assert_eq!(
                GatedDelta::supports(device, &wrong).unwrap_err().to_string(),
                format!("gated_delta: problem: expected {expected}")
            );
        }
    }
    Ok(())
}
