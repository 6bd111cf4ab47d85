//! Norm, rotation and append as plain loops: the specification, which is that of the operators one after another.

use super::LatentAppendProblem;
use crate::ops::reference::Real;
use crate::ops::rmsnorm::reference::{Input, rmsnorm};
use crate::ops::rope::reference::{RopeShape, rope};

/// The rows that go to the cache, `[positions.len(), latent + rope]`, in two parts: latent ones, which are normalised,
/// and rotated ones; see [`super::LatentAppend`]. They go there by
/// [`kv_append`](crate::ops::kv_append::reference::kv_append), and queries are rotated by
/// [`rope`].
///
/// Returns the latent parts, the rotated ones, and for each element of these the sum of the absolute values of the
/// rotation's two products. `store` is the rounding of a value that is stored: the identity for the specification.
pub fn latent_rows<A: Real>(
    x: &[f64],
    weight: &[f64],
    positions: &[u32],
    tables: (&[f64], &[f64]),
    problem: &LatentAppendProblem,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let LatentAppendProblem { latent, rope: head_dim, style, eps, weight: kind, .. } = *problem;
    let columns = |from: usize, to: usize| -> Vec<f64> {
        x.chunks(latent + head_dim).flat_map(|row| &row[from..to]).copied().collect()
    };
    let input = Input { x: &columns(0, latent), residual: None, weight, gate: None };
    let (normed, _) = rmsnorm(input, latent, f64::from(eps), f64::from(kind.offset()), &store);
    let shape = RopeShape { heads: 1, head_dim, rotary_dim: head_dim, style };
    let (rotated, terms) = rope(&columns(latent, latent + head_dim), positions, tables, shape, store);
    (normed, rotated, terms)
}
