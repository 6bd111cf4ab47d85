//! Norm, rotation and append as plain loops: the specification, which is that of the three operators one after another.

use super::QkNorm;
use crate::ops::reference::Real;
use crate::ops::rmsnorm::reference::{Input, rmsnorm};
use crate::ops::rope::reference::{RopeShape, rope};

/// Normalises and rotates the heads of every token, `[positions.len(), shape.heads, shape.head_dim]`; see
/// [`super::QkNormRope`]. What goes into a cache goes there by
/// [`kv_append`](crate::ops::kv_append::reference::kv_append).
///
/// Returns the heads, and for each element the sum of the absolute values of the rotation's two products. `store` is
/// the rounding of a value that is stored: the identity for the specification.
pub fn qk_norm_rope<A: Real>(
    x: &[f64],
    norm: Option<(QkNorm, &[f64])>,
    positions: &[u32],
    tables: (&[f64], &[f64]),
    shape: RopeShape,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let Some((QkNorm { eps, weight: kind }, weight)) = norm else {
        return rope(x, positions, tables, shape, store);
    };
    let input = Input { x, residual: None, weight, gate: None };
    let offset = f64::from(kind.offset());
    let (normed, _) = rmsnorm(input, shape.head_dim, f64::from(eps), offset, &store);
    rope(&normed, positions, tables, shape, store)
}
