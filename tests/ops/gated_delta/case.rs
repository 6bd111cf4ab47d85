//! A case of the gated delta rule: what it is made of, how a device computes it, what is expected of it.

use std::ops::Range;

use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_all;
use testkit::strategies::{Rng, Values, dims_from, stride_padding};
use warpforge::ops::gated_delta::{Form, GatedDelta, GatedDeltaArgs, GatedDeltaProblem, reference};
use warpforge::{Arch, DType, Device, Tensor};

use crate::harness::{Layout, Rows, Wanted, check, fail, floats, heads_of, layouts, store, swapped, values};

/// How much tokens forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decay {
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
pub(super) enum Keys {
    Of(Values),
    /// All the same: the correction of one token is undone by the next.
    Same,
    /// As long as the contract allows: sums of their squares and of their products reach far up in f32.
    Long,
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) heads_k: usize,
    pub(super) group: usize,
    pub(super) dim_k: usize,
    pub(super) dim_v: usize,
    /// Tokens of each sequence.
    pub(super) lens: Vec<usize>,
    /// Of q, k, v, b, a, the state and out; the weights are where the state is.
    pub(super) layouts: [Layout; 7],
    /// Of q, k, v and out: whether the tokens of a head are next to each other, not the heads of a token.
    pub(super) by_head: [bool; 4],
    pub(super) decay: Decay,
    pub(super) keys: Keys,
    pub(super) values: Values,
    /// Most places of a pass of the chunked form.
    pub(super) pass: u32,
    pub(super) seed: u64,
}

pub(super) fn case() -> impl Strategy<Value = Case> {
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
    pub(super) fn heads_v(&self) -> usize {
        self.heads_k * self.group
    }

    pub(super) fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    fn work(&self, form: Form) -> usize {
        match form {
            Form::Recurrent => self.tokens() * self.heads_v() * self.dim_v.div_ceil(8) * 5500,
            Form::Chunked { .. } | Form::ChunkedMma { .. } => {
                let chunks: usize = self.lens.iter().map(|len| len.div_ceil(64)).sum();
                let chunk = 256 * (300 + 100 * self.dim_k.div_ceil(32));
                let scan = 256 * (500 + 600 * self.dim_k.div_ceil(64));
                chunks * self.heads_v() * (chunk + scan * self.dim_v.div_ceil(32))
            }
        }
    }

    pub(super) fn both(&self) -> usize {
        self.work(Form::Recurrent) + self.work(self.chunked())
    }

    pub(super) fn chunked(&self) -> Form {
        Form::Chunked { pass: self.pass }
    }

    /// Every form that a device has for the case.
    pub(super) fn forms(&self, device: &Device) -> Vec<Form> {
        let has_mma = device.limits().is_none_or(|limits| limits.floor.runs(Arch::Sm80));
        let mma = (has_mma && self.dtype != DType::F32).then_some(Form::ChunkedMma { pass: self.pass });
        [Form::Recurrent, self.chunked()].into_iter().chain(mma).collect()
    }

    pub(super) fn problem(&self) -> GatedDeltaProblem {
        let Case { dtype, heads_k, dim_k, dim_v, .. } = *self;
        let (tokens, sequences) = (self.tokens(), self.lens.len());
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        let heads_v = self.heads_v();
        GatedDeltaProblem { tokens, sequences, longest, heads_k, heads_v, dim_k, dim_v, dtype }
    }
}

/// The inputs of a run.
#[derive(Clone)]
pub(super) struct Data {
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) b: Vec<f64>,
    pub(super) a: Vec<f64>,
    pub(super) a_log: Vec<f64>,
    pub(super) dt_bias: Vec<f64>,
    pub(super) slots: Vec<u32>,
    pub(super) state: Vec<f64>,
}

impl Data {
    pub(super) fn new(case: &Case) -> Self {
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
        let v = values(case.values, dtype, tokens * heads_v * dim_v, seed ^ 4);
        // Sums of terms beyond f32 may be anything: room for those of all tokens and elements.
        let room = if case.values == Values::Huge && dtype != DType::F16 { 2f64.powi(-16) } else { 1.0 };
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
            v: v.iter().map(|v| v * room).collect(),
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
    pub(super) fn part(&self, case: &Case, ranges: &[Range<usize>]) -> Self {
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
pub(super) fn ranges(lens: &[usize]) -> Vec<Range<usize>> {
    lens.iter()
        .scan(0, |end, &len| {
            *end += len;
            Some(*end - len..*end)
        })
        .collect()
}

/// Output and state after a run of sequences of these lengths.
pub(super) fn run_once(
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
pub(super) struct Expected {
    pub(super) out: Vec<f64>,
    pub(super) out_naive: Vec<f64>,
    pub(super) out_terms: Vec<f64>,
    pub(super) state: Vec<f64>,
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
        Form::Chunked { .. } | Form::ChunkedMma { .. } => {
            reference::gated_delta_chunked::<f32>(input, case.dim_k, 64, store(case.dtype))
        }
    }
}

pub(super) fn expected(case: &Case, data: &Data, form: Form) -> Expected {
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
    pub(super) fn or(mut self, other: Expected) -> Self {
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

    pub(super) fn check(
        &self,
        what: &str,
        case: &Case,
        out: &[f64],
        state: &[f64],
    ) -> Result<(), TestCaseError> {
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

pub(super) fn run(device: &Device, case: &Case, form: Option<Form>) -> Result<(), TestCaseError> {
    let data = Data::new(case);
    let (out, state) = run_once(device, case, &data, &case.lens, form)?;
    let plan = GatedDelta::plan(device, case.problem()).map_err(fail)?;
    let taken = match form {
        Some(form) if device.limits().is_some() => form,
        None if plan.report().variant.ends_with("scan__sm80") => Form::ChunkedMma { pass: case.pass },
        None if plan.report().variant.contains("scan") => case.chunked(),
        _ => Form::Recurrent,
    };
    expected(case, &data, taken).check(&format!("{form:?}"), case, &out, &state)
}

/// The wanted kernels that can do the case.
pub(super) fn run_forms(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for form in case.forms(device) {
            let kernel = match form {
                Form::Recurrent => "recurrent__sm61",
                Form::Chunked { .. } => "scan__sm61",
                Form::ChunkedMma { .. } => "scan__sm80",
            };
            if wanted(&format!("gated_delta_{}__{kernel}", case.dtype)) {
                run(device, case, Some(form))?;
            }
        }
    }
    Ok(())
}
