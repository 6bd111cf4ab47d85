//! The matrix product as plain loops: the specification.

use super::{Act, Epilogue, RowNorm};
use crate::ops::glu::reference::act;
use crate::ops::reference::Real;
use crate::ops::rmsnorm::NormWeight;

/// `a · bᵀ + bias` of rows of k; see [`super::Matmul`]. `store` is the rounding of a value that is stored: the identity
/// for the specification.
pub fn matmul<A: Real>(
    a: &[f64],
    b: &[f64],
    bias: Option<&[f64]>,
    [m, n, k]: [usize; 3],
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let real = |values: &[f64]| values.iter().map(|&value| A::real(value)).collect::<Vec<A>>();
    let (a, b) = (real(a), real(b));
    let mut out = Vec::with_capacity(m * n);
    for row in 0..m {
        for col in 0..n {
            let (a, b) = (&a[row * k..][..k], &b[col * k..][..k]);
            let mut sum = std::iter::zip(a, b).fold(A::zero(), |sum, (&a, &b)| sum + a * b);
            if let Some(bias) = bias {
                sum = sum + A::real(bias[col]);
            }
            out.push(store(sum).to_real());
        }
    }
    out
}

/// Rows of a behind their norm, each rounded by `store`: `a · rsqrt(mean(a²) + eps) · gain`.
pub fn normed<A: Real>(a: &[f64], gain: &[f64], norm: &RowNorm, store: impl Fn(A) -> A) -> Vec<f64> {
    let weight = match norm.weight {
        NormWeight::Plain => 0.0,
        NormWeight::ZeroCentred => 1.0,
    };
    let of_row = |row: &[f64]| -> Vec<f64> {
        let (values, eps) = (row.iter().map(|&value| A::real(value)), A::real(f64::from(norm.eps)));
        let square = values.clone().fold(A::zero(), |sum, value| sum + value * value);
        let root = (square / A::real(row.len() as f64) + eps).sqrt();
        let gained = |(value, &gain): (A, &f64)| value / root * (A::real(gain) + A::real(weight));
        std::iter::zip(values, gain).map(|pair| store(gained(pair)).to_real()).collect()
    };
    a.chunks(gain.len().max(1)).flat_map(of_row).collect()
}

/// `act(scale · a · bᵀ + bias) + residual`, or gated with the rows of the gate above those of up in b.
pub fn fused<A: Real>(
    (a, b): (&[f64], &[f64]),
    bias: Option<&[f64]>,
    residual: Option<&[f64]>,
    [m, n, k]: [usize; 3],
    epilogue: &Epilogue,
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let is_gated = matches!(epilogue.act, Act::Gated(_));
    let b_rows = if is_gated { 2 * n } else { n };
    // Sums in A are exact in f64, whose rounding to A does nothing.
    let sums = matmul::<A>(a, b, None, [m, b_rows, k], |sum| sum);
    let mut out = Vec::with_capacity(m * n);
    for row in 0..m {
        let linear = |col: usize| {
            let sum = A::real(sums[row * b_rows + col]) * A::real(f64::from(epilogue.scale));
            bias.map_or(sum, |bias| sum + A::real(bias[col]))
        };
        for col in 0..n {
            let value = match epilogue.act {
                Act::None => linear(col),
                Act::Of(activation) => act(activation, linear(col)),
                Act::Gated(activation) => act(activation, linear(col)) * linear(n + col),
            };
            let value = residual.map_or(value, |residual| value + A::real(residual[row * n + col]));
            out.push(store(value).to_real());
        }
    }
    out
}

/// Rows of `cols` with their columns in this order; see [`super::PermuteColumns`].
pub fn permute_columns(x: &[f64], cols: usize, order: &[u32]) -> Vec<f64> {
    let of_row = |row: &[f64]| -> Vec<f64> {
        order.iter().map(|&from| row.get(from as usize).copied().unwrap_or(0.0)).collect()
    };
    x.chunks(cols.max(1)).flat_map(of_row).collect()
}
