//! Rotary position embedding as plain loops: the specification.

use super::RopeStyle;
use crate::ops::reference::Real;

/// cos and sin of every position up to `max_position`, `[max_position, inv_freq.len()]`; see [`super::RopeTables`].
pub fn tables(inv_freq: &[f64], attention_factor: f64, max_position: usize) -> (Vec<f64>, Vec<f64>) {
    let angle = |position: usize| inv_freq.iter().map(move |freq| position as f64 * freq);
    let angles = || (0..max_position).flat_map(angle);
    (
        angles().map(|angle| angle.cos() * attention_factor).collect(),
        angles().map(|angle| angle.sin() * attention_factor).collect(),
    )
}

/// Sizes of [`rope`].
#[derive(Clone, Copy, Debug)]
pub struct RopeShape {
    /// Heads of a token.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
}

impl RopeShape {
    /// The elements of pair `i`.
    fn pair(&self, i: usize) -> (usize, usize) {
        match self.style {
            RopeStyle::HalfSplit => (i, i + self.rotary_dim / 2),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        }
    }
}

/// Rotates the heads of every token by its position's angles; see [`super::Rope`].
///
/// Returns out, and for each element the sum of the absolute values of its two products. `store` is the rounding of a
/// value that is stored: the identity for the specification.
pub fn rope<A: Real>(
    x: &[f64],
    positions: &[u32],
    (cos, sin): (&[f64], &[f64]),
    shape: RopeShape,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let RopeShape { heads, head_dim, rotary_dim, .. } = shape;
    let pairs = rotary_dim / 2;
    let (mut out, mut terms) = (x.to_vec(), x.iter().map(|value| value.abs()).collect::<Vec<f64>>());
    for (token, &position) in positions.iter().enumerate() {
        let position = (position as usize).min(cos.len() / pairs - 1);
        for head in 0..heads {
            let start = (token * heads + head) * head_dim;
            for i in 0..pairs {
                let (first, second) = shape.pair(i);
                let (first, second) = (start + first, start + second);
                let (c, s) = (A::real(cos[position * pairs + i]), A::real(sin[position * pairs + i]));
                let (a, b) = (A::real(x[first]), A::real(x[second]));
                out[first] = store(a * c - b * s).to_real();
                out[second] = store(b * c + a * s).to_real();
                terms[first] = ((a * c).abs() + (b * s).abs()).to_real();
                terms[second] = ((b * c).abs() + (a * s).abs()).to_real();
            }
        }
    }
    (out, terms)
}
