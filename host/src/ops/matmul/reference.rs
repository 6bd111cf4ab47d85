//! The matrix product as plain loops: the specification.

use crate::ops::reference::Real;

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
