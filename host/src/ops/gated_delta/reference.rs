//! The gated delta rule as plain loops: the specification, in its recurrent form.

use crate::ops::glu::Activation;
use crate::ops::glu::reference::act;
use crate::ops::reference::Real;

/// Added to the sums of squares of q and k, inside the root.
pub const EPS: f64 = 1e-6;

/// A logarithm of a decay below this counts as this: the decay is 0 in f32.
pub const LEAST_LOG_DECAY: f64 = -256.0;

/// One value head of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[tokens, dim_k]`.
    pub q: &'a [f64],
    /// `[tokens, dim_k]`.
    pub k: &'a [f64],
    /// `[tokens, dim_v]`.
    pub v: &'a [f64],
    /// `[tokens]`.
    pub b: &'a [f64],
    /// `[tokens]`.
    pub a: &'a [f64],
    /// Of the head.
    pub a_log: f64,
    /// Of the head.
    pub dt_bias: f64,
    /// `[dim_k, dim_v]`, before the first token.
    pub state: &'a [f64],
}

/// What a head's tokens give.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `[tokens, dim_v]`.
    pub out: Vec<f64>,
    /// `[dim_k, dim_v]`, after the last token.
    pub state: Vec<f64>,
    /// What the errors of out are relative to: the read with all terms absolute, of the terms of the state.
    pub out_terms: Vec<f64>,
    /// What those of the state are relative to: the terms of the last step, all absolute, and what is left of the steps
    /// before. A step multiplies a column's error by e^g (I − β k kᵀ), which makes it no longer than e^g does; how much
    /// shorter is left out, and with it what cancels where a token overwrites what another wrote.
    pub state_terms: Vec<f64>,
}

/// Runs through the tokens of a head; see [`super::GatedDelta`].
///
/// `store` is the rounding of an output: the identity for the specification. The state is not rounded, since it is f32.
pub fn gated_delta<A: Real>(head: Head<'_>, dim_k: usize, store: impl Fn(A) -> A) -> Outcome {
    let Head { q, k, v, b, a, a_log, dt_bias, state } = head;
    let dim_v = state.len() / dim_k;
    let unit = |row: &[f64]| -> Vec<A> {
        let row: Vec<A> = row.iter().map(|&value| A::real(value)).collect();
        let square: A = row.iter().map(|&value| value * value).sum();
        let scale = A::one() / (square + A::real(EPS)).sqrt();
        row.into_iter().map(|value| value * scale).collect()
    };
    let softplus = |x: A| {
        let threshold = A::real(20.0);
        if x > threshold { x } else { x.max(A::zero()) + (-x.abs()).exp().ln_1p() }
    };
    let mut state: Vec<A> = state.iter().map(|&value| A::real(value)).collect();
    let mut state_terms: Vec<f64> = state.iter().map(|value| value.to_real().abs()).collect();
    // Of each column, the length of the terms of all steps so far.
    let mut lengths = vec![0.0f64; dim_v];
    let (mut out, mut out_terms) = (Vec::with_capacity(v.len()), Vec::with_capacity(v.len()));
    for (t, v) in v.chunks_exact(dim_v).enumerate() {
        let (q, k) = (unit(&q[t * dim_k..][..dim_k]), unit(&k[t * dim_k..][..dim_k]));
        let scale = A::one() / A::real(dim_k as f64).sqrt();
        let beta = act(Activation::Sigmoid, A::real(b[t]));
        let log_decay = -A::real(a_log).exp() * softplus(A::real(a[t]) + A::real(dt_bias));
        let decay = if log_decay < A::real(LEAST_LOG_DECAY) { A::zero() } else { log_decay.exp() };
        for (j, &v) in v.iter().enumerate() {
            let mut predicted = A::zero();
            let mut predicted_terms = 0.0;
            for (i, &k) in k.iter().enumerate() {
                let at = i * dim_v + j;
                state[at] = decay * state[at];
                predicted = predicted + state[at] * k;
                predicted_terms += (state[at] * k).to_real().abs();
            }
            let change = beta * (A::real(v) - predicted);
            let change_terms = beta.to_real() * (v.abs() + predicted_terms);
            let before = decay.to_real() * lengths[j];
            let mut square = before * before;
            let (mut read, mut read_terms) = (A::zero(), before * scale.to_real());
            for (i, (&k, &q)) in std::iter::zip(&k, &q).enumerate() {
                let at = i * dim_v + j;
                let terms = state[at].to_real().abs() + k.to_real().abs() * change_terms;
                square += terms * terms;
                state_terms[at] = before + terms;
                state[at] = state[at] + k * change;
                read = read + state[at] * (q * scale);
                read_terms += (q * scale).to_real().abs() * terms;
            }
            lengths[j] = square.sqrt();
            out.push(store(read).to_real());
            out_terms.push(read_terms);
        }
    }
    let state = state.into_iter().map(A::to_real).collect();
    Outcome { out, state, out_terms, state_terms }
}
