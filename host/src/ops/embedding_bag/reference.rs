//! Weighted sums of table rows as plain loops: the specification.

use crate::ops::reference::Real;

/// Adds to each row of `out` the weighted sum of its bag; see [`super::EmbeddingBag`]. Bags and rows of out are as
/// many; NaN for ids that the table does not have.
///
/// Returns for each element the sum of the absolute values of its terms. `store` is the rounding of a value that is
/// stored: the identity for the specification.
pub fn embedding_bag<A: Real>(
    table: &[f64],
    bags: &[(Vec<u32>, Vec<f32>)],
    out: &mut [f64],
    cols: usize,
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let mut magnitudes = Vec::with_capacity(out.len());
    for (row, (ids, weights)) in std::iter::zip(out.chunks_exact_mut(cols.max(1)), bags) {
        for (col, out) in row.iter_mut().enumerate() {
            let mut sum = A::real(*out);
            let mut magnitude = sum.abs();
            for (&id, &weight) in std::iter::zip(ids, weights) {
                let value = table.chunks_exact(cols).nth(id as usize).map_or(f64::NAN, |row| row[col]);
                let term = A::real(f64::from(weight)) * A::real(value);
                sum = sum + term;
                magnitude = magnitude + term.abs();
            }
            *out = store(sum).to_real();
            magnitudes.push(magnitude.to_real());
        }
    }
    magnitudes
}
