//! LayerNorm as plain loops: the specification.

use crate::ops::reference::Real;

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
        let mean = row.iter().copied().sum::<A>() / cols;
        let size = row.iter().map(|value| value.abs()).sum::<A>() / cols;
        let variance = row.iter().map(|&value| (value - mean) * (value - mean)).sum::<A>() / cols;
        let scale = A::one() / (variance + A::real(eps)).sqrt();
        for ((&value, &weight), &bias) in std::iter::zip(row, weight).zip(bias) {
            let (weight, bias) = (A::real(weight), A::real(bias));
            out.push(store((value - mean) * scale * weight + bias).to_real());
            terms.push(((value.abs() + size) * scale * weight.abs() + bias.abs()).to_real());
        }
    }
    Normed { out, sum: h.into_iter().map(A::to_real).collect(), terms }
}
