//! RMSNorm as plain loops: the specification.

use crate::ops::glu::Activation;
use crate::ops::glu::reference::act;
use crate::ops::reference::{Real, epsilon, factor};

/// The rows of a run.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Input.
    pub x: &'a [f64],
    /// What it is added to.
    pub residual: Option<&'a [f64]>,
    /// Stored weights.
    pub weight: &'a [f64],
    /// Gates.
    pub gate: Option<&'a [f64]>,
}

/// Normalises rows of `cols`; see [`super::RmsNorm`]. Returns out, and the residual after the addition.
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn rmsnorm<A: Real>(
    input: Input<'_>,
    cols: usize,
    eps: f64,
    offset: f64,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let Input { x, residual, weight, gate } = input;
    let mut h: Vec<A> = x.iter().map(|&value| A::real(value)).collect();
    if let Some(residual) = residual {
        for (h, &residual) in std::iter::zip(&mut h, residual) {
            *h = store(*h + A::real(residual));
        }
    }
    let mut out = Vec::with_capacity(x.len());
    for (index, row) in h.chunks_exact(cols).enumerate() {
        let mean = |factor: A| {
            let square: A = row.iter().map(|&value| value * factor * (value * factor)).sum();
            square / A::real(cols as f64) + epsilon(A::real(eps), factor)
        };
        let factor = factor(mean(A::one()));
        let scale = A::one() / mean(factor).sqrt();
        for (col, (&value, &weight)) in std::iter::zip(row, weight).enumerate() {
            let normed = value * factor * scale * (A::real(weight) + A::real(offset));
            let gate = gate.map(|gate| act(Activation::Silu, A::real(gate[index * cols + col])));
            out.push(store(gate.map_or(normed, |gate| normed * gate)).to_real());
        }
    }
    (out, h.into_iter().map(A::to_real).collect())
}
