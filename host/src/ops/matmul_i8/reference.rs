//! The int8 product and the quantisation as plain loops: the specification.
//!
//! In f32 with every stored value rounded, both are not a yardstick but the very bits that a kernel gives: the sums are
//! exact, and each of the few steps after them is rounded once.

use crate::ops::reference::Real;

/// `(Σ qa · qb) · sa · sb + bias` of rows of k; see [`super::MatmulI8`].
pub fn matmul_i8<A: Real>(
    qa: &[i8],
    qb: &[i8],
    a_scale: &[f64],
    b_scale: &[f64],
    bias: Option<&[f64]>,
    k: usize,
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let mut out = Vec::with_capacity(a_scale.len() * b_scale.len());
    for (row, &a_scale) in a_scale.iter().enumerate() {
        for (col, &b_scale) in b_scale.iter().enumerate() {
            let pairs = std::iter::zip(&qa[row * k..][..k], &qb[col * k..][..k]);
            let sum: i64 = pairs.map(|(&a, &b)| i64::from(a) * i64::from(b)).sum();
            let mut value = A::real(sum as f64) * A::real(a_scale) * A::real(b_scale);
            if let Some(bias) = bias {
                value = value + A::real(bias[col]);
            }
            out.push(store(value).to_real());
        }
    }
    out
}

/// Rows of `cols` as int8, and their scales; see [`super::QuantizeRows`].
pub fn quantize_rows<A: Real>(x: &[f64], cols: usize) -> (Vec<i8>, Vec<f64>) {
    let (mut q, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(cols) {
        let mut most = A::zero();
        for &value in row {
            let magnitude = A::real(value).abs();
            if magnitude > most || magnitude.is_nan() {
                most = magnitude;
            }
            if most.is_nan() {
                break;
            }
        }
        let scale = most / A::real(127.0);
        scales.push(scale.to_real());
        for &value in row {
            let ratio = if scale.is_zero() { 0.0 } else { (A::real(value) / scale).to_real() };
            // `as` saturates, and takes NaN to 0.
            q.push(ratio.round_ties_even() as i8);
        }
    }
    (q, scales)
}
