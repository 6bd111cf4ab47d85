//! The gated delta rule against its reference.

mod case;

use std::ops::Range;

use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::Values;
use warpforge::ops::gated_delta::{Form, GatedDelta, GatedDeltaArgs, GatedDeltaProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, check, devices, devices_for, every_kernel, fail, on_executors, through_every_kernel,
};
use case::*;

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

/// The same bits; any NaN equals any NaN, which huge values may make.
fn same_bits(got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    testkit::compare::check_bits_eq(got, want).map_err(|mismatch| fail(mismatch.to_string()))
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
            for form in case.forms(device) {
                let (out, state) = run_once(device, &case, &data, &case.lens, Some(form))?;
                let (mut alone, mut alone_state) = (Vec::new(), data.state.clone());
                for (range, &slot) in ranges(&case.lens).iter().zip(&data.slots) {
                    let part = Data { slots: vec![slot], state: alone_state, ..data.part(&case, std::slice::from_ref(range)) };
                    let (rows, next) = run_once(device, &case, &part, &[range.len()], Some(form))?;
                    alone.extend(rows);
                    alone_state = next;
                }
                same_bits(&out, &alone)?;
                same_bits(&state, &alone_state)?;
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
            for last in case.forms(device) {
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
                    same_bits(&out, &whole)?;
                    same_bits(&state, &whole_state)?;
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
        for form in case.forms(device) {
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
            for form in case.forms(device) {
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
    let cases = [DType::F32, DType::BF16].map(|dtype| one_head(dtype, tokens, 8, dim_v));
    for device in &devices_for(2 * cases[0].both()) {
        let forms =
            cases.iter().flat_map(|case| case.forms(device).into_iter().map(move |form| (case, form)));
        for (case, form) in forms {
            let data = Data::new(case);
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
                let (out, _) = run_once(device, case, data, &case.lens, Some(form))?;
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
