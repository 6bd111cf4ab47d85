//! LayerNorm as plain loops: the specification.

use crate::ops::reference::{Real, epsilon, factor};

/// What [`layernorm`] gives.
#[derive(Clone, Debug)]
pub struct Normed {
    /// The normalised rows.
    pub out: Vec<f64>,
    /// The residual after the addition: what was normalised.
    pub sum: Vec<f64>,
    /// For each element of out its formula with all terms taken absolute.
    pub terms: Vec<f64>,
}

/// Normalises rows of as many elements as `weight` and `bias` have; see [`super::LayerNorm`].
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn layernorm<A: Real>(
    x: &[f64],
    residual: Option<&[f64]>,
    (weight, bias): (&[f64], &[f64]),
    eps: f64,
    store: impl Fn(A) -> A,
) -> Normed {
    let mut h: Vec<A> = x.iter().map(|&value| A::real(value)).collect();
    if let Some(residual) = residual {
        for (h, &residual) in std::iter::zip(&mut h, residual) {
            *h = store(*h + A::real(residual));
        }
    }
    let cols = A::real(weight.len() as f64);
    let (mut out, mut terms) = (Vec::with_capacity(x.len()), Vec::with_capacity(x.len()));
    for row in h.chunks_exact(weight.len()) {
        let moments = |factor: A| {
            let mean = row.iter().map(|&value| value * factor).sum::<A>() / cols;
            let difference = |value: A| value * factor - mean;
            let square = row.iter().map(|&value| difference(value) * difference(value)).sum::<A>();
            (mean, square / cols + epsilon(A::real(eps), factor))
        };
        let (mean, variance) = moments(A::one());
        // Of larger numbers the squares of differences do not underflow.
        let factor = if mean.abs() < A::one() || !variance.is_finite() { factor(variance) } else { A::one() };
        let (mean, variance) = if factor == A::one() { (mean, variance) } else { moments(factor) };
        let scale = A::one() / variance.sqrt();
        let size = row.iter().map(|value| (*value * factor).abs()).sum::<A>() / cols;
        for ((&value, &weight), &bias) in std::iter::zip(row, weight).zip(bias) {
            let value = value * factor;
            let (weight, bias) = (A::real(weight), A::real(bias));
            out.push(store((value - mean) * scale * weight + bias).to_real());
            terms.push(((value.abs() + size) * scale * weight.abs() + bias.abs()).to_real());
        }
    }
    Normed { out, sum: h.into_iter().map(A::to_real).collect(), terms }
}
