//! RMSNorm as plain loops: the specification.

use crate::ops::reference::Real;

/// Normalises `rows` rows of `cols`; see [`super::RmsNorm`]. Returns out, and the residual after the addition.
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn rmsnorm<A: Real>(
    x: &[f64],
    residual: Option<&[f64]>,
    weight: &[f64],
    cols: usize,
    eps: f64,
    offset: f64,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let mut h: Vec<A> = x.iter().map(|&value| A::real(value)).collect();
    if let Some(residual) = residual {
        for (h, &residual) in std::iter::zip(&mut h, residual) {
            *h = store(*h + A::real(residual));
        }
    }
    let mut out = Vec::with_capacity(x.len());
    for row in h.chunks_exact(cols) {
        let square: A = row.iter().map(|&value| value * value).sum();
        let scale = A::one() / (square / A::real(cols as f64) + A::real(eps)).sqrt();
        for (&value, &weight) in std::iter::zip(row, weight) {
            out.push(store(value * scale * (A::real(weight) + A::real(offset))).to_real());
        }
    }
    (out, h.into_iter().map(A::to_real).collect())
}
