//! The sum as plain loops: the specification.

use crate::ops::reference::Real;

/// What a sum is made of; see [`super::MoeCombineArgs`].
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Rows of results.
    pub y: &'a [f64],
    /// A weight for each pair.
    pub weights: &'a [f64],
    /// A row of y for each pair.
    pub positions: &'a [u32],
    /// A row for each token.
    pub shared: Option<&'a [f64]>,
    /// A number for each token.
    pub gate: Option<&'a [f64]>,
    /// What is added.
    pub residual: Option<&'a [f64]>,
}

/// The rows of out. `store` is the rounding of a value that is stored: the identity for the specification.
pub fn moe_combine<A: Real>(tokens: usize, terms: &Terms<'_>, store: impl Fn(A) -> A) -> Vec<f64> {
    let &Terms { top_k, cols, y, weights, positions, shared, gate, residual } = terms;
    let mut out = Vec::with_capacity(tokens * cols);
    for token in 0..tokens {
        for col in 0..cols {
            let mut sum = A::zero();
            for pair in token * top_k..(token + 1) * top_k {
                if let Some(&value) = y.get(positions[pair] as usize * cols + col) {
                    sum = sum + A::real(weights[pair]) * A::real(value);
                }
            }
            if let Some(shared) = shared {
                let gate =
                    gate.map_or(A::one(), |gate| A::one() / (A::one() + (-A::real(gate[token])).exp()));
                sum = sum + gate * A::real(shared[token * cols + col]);
            }
            if let Some(residual) = residual {
                sum = sum + A::real(residual[token * cols + col]);
            }
            out.push(store(sum).to_real());
        }
    }
    out
}
