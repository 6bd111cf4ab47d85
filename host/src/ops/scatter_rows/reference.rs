//! Rows into places that are named by number, as plain loops: the specification.

use crate::ops::Store;
use crate::ops::reference::Real;

/// `out[ids[t]] = x[t]`, or `+=`, for rows of `cols` elements; numbers beyond out are skipped.
///
/// `round` is the rounding of a value that is stored: the identity for the specification.
pub fn scatter_rows<A: Real>(
    x: &[f64],
    ids: &[u32],
    out: &mut [f64],
    cols: usize,
    store: Store,
    round: impl Fn(A) -> A,
) {
    for (x, &id) in std::iter::zip(x.chunks_exact(cols.max(1)), ids) {
        let Some(out) = out.chunks_exact_mut(cols).nth(id as usize) else { continue };
        for (out, &x) in std::iter::zip(out, x) {
            *out = match store {
                Store::Replace => x,
                Store::Add => round(A::real(*out) + A::real(x)).to_real(),
            };
        }
    }
}
