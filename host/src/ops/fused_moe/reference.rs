//! The experts as plain loops: the specification.

use crate::ops::glu::Activation;
use crate::ops::glu::reference::act;
use crate::ops::reference::Real;
use crate::ops::rmsnorm::reference::{Input, rmsnorm};

/// What the sums are made of; see [`super::FusedMoeArgs`].
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a row of x and of out.
    pub hidden: usize,
    /// Elements of an expert's gate, and of up.
    pub inner: usize,
    /// Activation of the gate; none: the gate as it is, which is never less than what an activation makes of it.
    pub activation: Option<Activation>,
    /// A row for each token, behind the norm.
    pub x: &'a [f64],
    /// An expert for each pair.
    pub ids: &'a [u32],
    /// A weight for each pair.
    pub weights: &'a [f64],
    /// Gate and up of each expert.
    pub gate_up: &'a [f64],
    /// Down of each expert.
    pub down: &'a [f64],
    /// Gate and up, and down, of the shared expert.
    pub shared: Option<[&'a [f64]; 2]>,
    /// A number for each token.
    pub gate: Option<&'a [f64]>,
    /// What is added.
    pub residual: Option<&'a [f64]>,
}

/// The rows behind the norm; see [`RowNorm`](crate::ops::matmul::RowNorm). `store` is the rounding of a value that is
/// stored: the identity for the specification.
pub fn normed<A: Real>(x: &[f64], gain: &[f64], [eps, offset]: [f64; 2], store: impl Fn(A) -> A) -> Vec<f64> {
    let input = Input { x, residual: None, weight: gain, gate: None };
    if gain.is_empty() { Vec::new() } else { rmsnorm(input, gain.len(), eps, offset, store).0 }
}

/// The rows of out. `store` as for [`normed`].
pub fn fused_moe<A: Real>(tokens: usize, terms: &Terms<'_>, store: impl Fn(A) -> A) -> Vec<f64> {
    let &Terms { top_k, hidden, inner, activation, x, ids, weights, .. } = terms;
    let (size, experts) = (inner * hidden, terms.down.len() / (inner * hidden).max(1));
    let dot = |a: &[A], b: &[f64]| std::iter::zip(a, b).fold(A::zero(), |sum, (&a, &b)| sum + a * A::real(b));
    let mut out = Vec::with_capacity(tokens * hidden);
    for token in 0..tokens {
        let row: Vec<A> = x[token * hidden..][..hidden].iter().map(|&value| A::real(value)).collect();
        let mut sums = vec![A::zero(); hidden];
        let mut add = |weight: A, gate_up: &[f64], down: &[f64]| {
            let activated = |element: usize| {
                let of = |index: usize| dot(&row, &gate_up[index * hidden..][..hidden]);
                let (gate, up) = (of(element), of(inner + element));
                store(activation.map_or(gate, |activation| act(activation, gate)) * up)
            };
            let activated: Vec<A> = (0..inner).map(activated).collect();
            for (col, sum) in sums.iter_mut().enumerate() {
                *sum = *sum + weight * dot(&activated, &down[col * inner..][..inner]);
            }
        };
        for pair in token * top_k..(token + 1) * top_k {
            let expert = ids[pair] as usize;
            if expert < experts {
                let (gate_up, down) = (&terms.gate_up[expert * 2 * size..], &terms.down[expert * size..]);
                add(A::real(weights[pair]), gate_up, down);
            }
        }
        if let Some([gate_up, down]) = terms.shared {
            let open = |gate: &[f64]| A::one() / (A::one() + (-A::real(gate[token])).exp());
            add(terms.gate.map_or(A::one(), open), gate_up, down);
        }
        for (col, sum) in sums.into_iter().enumerate() {
            let added = terms.residual.map_or(A::zero(), |residual| A::real(residual[token * hidden + col]));
            out.push(store(sum + added).to_real());
        }
    }
    out
}
