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

/// A row divided by its length.
fn unit<A: Real>(row: &[f64]) -> Vec<A> {
    let row: Vec<A> = row.iter().map(|&value| A::real(value)).collect();
    let square: A = row.iter().map(|&value| value * value).sum();
    let scale = A::one() / (square + A::real(EPS)).sqrt();
    row.into_iter().map(|value| value * scale).collect()
}

/// β and g of a token.
fn gates<A: Real>(head: Head<'_>, t: usize) -> (A, A) {
    let (a_log, x) = (A::real(head.a_log), A::real(head.a[t]) + A::real(head.dt_bias));
    let x = if x > A::max_value() { A::max_value() } else { x };
    let softplus = if x > A::real(20.0) { x } else { x.max(A::zero()) + (-x.abs()).exp().ln_1p() };
    // softplus(x) is e^x there, to all digits; the product of the two could be ∞ · 0.
    let log_decay = if x < A::real(-40.0) { -(a_log + x).exp() } else { -a_log.exp() * softplus };
    (act(Activation::Sigmoid, A::real(head.b[t])), log_decay.max(A::real(LEAST_LOG_DECAY)))
}

/// Runs through the tokens of a head; see [`super::GatedDelta`].
///
/// `store` is the rounding of an output: the identity for the specification. The state is not rounded, since it is f32.
pub fn gated_delta<A: Real>(head: Head<'_>, dim_k: usize, store: impl Fn(A) -> A) -> Outcome {
    let Head { q, k, v, state, .. } = head;
    let dim_v = state.len() / dim_k;
    let mut state: Vec<A> = state.iter().map(|&value| A::real(value)).collect();
    let mut state_terms: Vec<f64> = state.iter().map(|value| value.to_real().abs()).collect();
    // Of each column, the length of the terms of all steps so far.
    let mut lengths = vec![0.0f64; dim_v];
    let (mut out, mut out_terms) = (Vec::with_capacity(v.len()), Vec::with_capacity(v.len()));
    for (t, v) in v.chunks_exact(dim_v).enumerate() {
        let (q, k) = (unit::<A>(&q[t * dim_k..][..dim_k]), unit::<A>(&k[t * dim_k..][..dim_k]));
        let scale = A::one() / A::real(dim_k as f64).sqrt();
        let (beta, log_decay) = gates::<A>(head, t);
        let decay = log_decay.exp();
        // A relative error of g is one of e^g times |g|.
        let stretch = 1.0 + log_decay.to_real().abs();
        for (j, &v) in v.iter().enumerate() {
            let mut predicted = A::zero();
            let mut predicted_terms = 0.0;
            for (i, &k) in k.iter().enumerate() {
                let at = i * dim_v + j;
                state[at] = decay * state[at];
                predicted = predicted + state[at] * k;
                predicted_terms += stretch * (state[at] * k).to_real().abs();
            }
            let change = beta * (A::real(v) - predicted);
            let change_terms = beta.to_real() * (v.abs() + predicted_terms);
            let before = decay.to_real() * lengths[j];
            let mut square = before * before;
            let (mut read, mut read_terms) = (A::zero(), before * scale.to_real());
            for (i, (&k, &q)) in std::iter::zip(&k, &q).enumerate() {
                let at = i * dim_v + j;
                let terms = stretch * state[at].to_real().abs() + k.to_real().abs() * change_terms;
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

/// The same in chunks of so many tokens, as plain loops: in f64 equal to the specification, in f32 what the errors of
/// the chunked form are measured by. Returns out and the state.
///
/// With γ the sums of g in a chunk and D_ts = e^(γ_t − γ_s) for s ≤ t, the corrections of all tokens, d_t = β_t (v_t −
/// e^γ_t Sᵀ k_t − Σ_{s<t} D_ts (k_t · k_s) d_s), are found from the first to the last. Then `out_t = e^γ_t Sᵀ q_t +
/// Σ_{s≤t} D_ts (q_t · k_s) d_s`, and `S ← e^γ_C S + Σ_t e^(γ_C − γ_t) k_t ⊗ d_t`.
pub fn gated_delta_chunked<A: Real>(
    head: Head<'_>,
    dim_k: usize,
    chunk: usize,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let Head { q, k, v, state, .. } = head;
    let dim_v = state.len() / dim_k;
    let tokens = v.len() / dim_v;
    let scale = A::one() / A::real(dim_k as f64).sqrt();
    let dot = |a: &[A], b: &[A]| std::iter::zip(a, b).map(|(&a, &b)| a * b).sum::<A>();
    let mut state: Vec<A> = state.iter().map(|&value| A::real(value)).collect();
    let mut out = vec![0.0; v.len()];
    for start in (0..tokens).step_by(chunk) {
        let len = chunk.min(tokens - start);
        let rows = |rows: &[f64]| -> Vec<Vec<A>> {
            (start..start + len).map(|t| unit::<A>(&rows[t * dim_k..][..dim_k])).collect()
        };
        let (q, k) = (rows(q), rows(k));
        let gates: Vec<(A, A)> = (start..start + len).map(|t| gates::<A>(head, t)).collect();
        let gamma: Vec<A> = gates
            .iter()
            .scan(A::zero(), |sum, &(_, log_decay)| {
                *sum = *sum + log_decay;
                Some(*sum)
            })
            .collect();
        let read = |state: &[A], row: &[A], j: usize| -> A {
            row.iter().enumerate().map(|(i, &value)| state[i * dim_v + j] * value).sum()
        };
        let weights = |rows: &[Vec<A>]| -> Vec<Vec<A>> {
            let weight = |t: usize, s: usize| (gamma[t] - gamma[s]).exp() * dot(&rows[t], &k[s]);
            (0..len).map(|t| (0..=t).map(|s| weight(t, s)).collect()).collect()
        };
        let (of_keys, of_queries) = (weights(&k), weights(&q));
        let mut changes: Vec<Vec<A>> = Vec::new();
        for t in 0..len {
            let change = |j: usize| {
                let before: A = (0..t).map(|s| of_keys[t][s] * changes[s][j]).sum();
                let predicted = gamma[t].exp() * read(&state, &k[t], j) + before;
                gates[t].0 * (A::real(v[(start + t) * dim_v + j]) - predicted)
            };
            let change = (0..dim_v).map(change).collect();
            changes.push(change);
        }
        for t in 0..len {
            for j in 0..dim_v {
                let inside: A = (0..=t).map(|s| of_queries[t][s] * changes[s][j]).sum();
                let value = gamma[t].exp() * read(&state, &q[t], j) + inside;
                out[(start + t) * dim_v + j] = store(value * scale).to_real();
            }
        }
        let whole = gamma[len - 1];
        for i in 0..dim_k {
            for j in 0..dim_v {
                let added: A = (0..len).map(|t| (whole - gamma[t]).exp() * k[t][i] * changes[t][j]).sum();
                state[i * dim_v + j] = whole.exp() * state[i * dim_v + j] + added;
            }
        }
    }
    (out, state.into_iter().map(A::to_real).collect())
}
