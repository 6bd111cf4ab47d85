//! The grouped product as plain loops: the specification.

use abi::ops::glu::Activation;

use crate::ops::matmul::reference::fused;
use crate::ops::matmul::{Act, Epilogue};
use crate::ops::reference::Real;

/// Sizes of a grouped product.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Columns of out: rows of a weight, or of its gate.
    pub n: usize,
    /// Columns of x and of the weights.
    pub k: usize,
    /// Rows of out for each row of x, which the order names.
    pub fan_out: Option<usize>,
    /// A gated linear unit, of weights of `2 n` rows.
    pub gate: Option<Activation>,
}

/// The rows of out; NaN in those of no expert. See [`super::GroupedMatmul`].
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn grouped_matmul<A: Real>(
    x: &[f64],
    w: &[f64],
    offsets: &[u32],
    order: &[u32],
    Sizes { n, k, fan_out, gate }: Sizes,
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let epilogue = gate.map_or(Epilogue::NONE, |activation| Epilogue::of(Act::Gated(activation)));
    let w_rows = if gate.is_some() { 2 * n } else { n };
    let mut out = vec![f64::NAN; order.len() * n];
    for (expert, bounds) in offsets.windows(2).enumerate() {
        for row in bounds[0] as usize..bounds[1] as usize {
            let from = fan_out.map_or(row, |fan_out| order[row] as usize / fan_out);
            let (x, w) = (&x[from * k..][..k], &w[expert * w_rows * k..][..w_rows * k]);
            out[row * n..][..n].copy_from_slice(&fused((x, w), None, None, [1, n, k], &epilogue, &store));
        }
    }
    out
}
