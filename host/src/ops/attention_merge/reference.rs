//! Attention over two parts of the keys as attention over all of them, as plain loops: the specification.

use crate::ops::reference::Real;

/// `out` and the logarithms: of rows of `dim` elements, a logarithm for each. `store` is the rounding of a value that
/// is stored: the identity for the specification.
pub fn attention_merge<A: Real>(
    [a, b]: [&[f64]; 2],
    [a_lse, b_lse]: [&[f64]; 2],
    dim: usize,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (row, (&a_lse, &b_lse)) in std::iter::zip(a_lse, b_lse).enumerate() {
        let most = a_lse.max(b_lse);
        let is_nan = a_lse.is_nan() || b_lse.is_nan();
        let weight = |lse: f64| match () {
            _ if is_nan => A::nan(),
            _ if lse == f64::NEG_INFINITY => A::zero(),
            _ if lse == most => A::one(),
            _ => (A::real(lse) - A::real(most)).exp(),
        };
        let (of_a, of_b) = (weight(a_lse), weight(b_lse));
        let sum = of_a + of_b;
        lse.push(if sum == A::zero() { f64::NEG_INFINITY } else { (A::real(most) + sum.ln()).to_real() });
        for col in row * dim..(row + 1) * dim {
            // A weight of 0 hides what it is of.
            let part = |weight: A, value: f64| match weight == A::zero() {
                true => A::zero(),
                false => weight / sum * A::real(value),
            };
            out.push(store(part(of_a, a[col]) + part(of_b, b[col])).to_real());
        }
    }
    (out, lse)
}
