//! cos and sin of every position.

use abi::DType;
use rayon::prelude::*;

use super::OP;
use crate::error::Error;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{Mirror, Tensor, Views};

/// Elements of a table that are worked out at a time.
const ELEMENTS: usize = 1 << 22;

/// cos and sin of the angles of every position, `[max_position, pairs]` in f32 each: made once, shared by all layers.
///
/// Angles, cos, sin and the product with the attention factor are computed in f64 and rounded once. In f32 the angle
/// alone would be off by up to 0.008 at position 262144.
#[derive(Debug)]
pub struct RopeTables {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl Views for &RopeTables {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        let tables =
            RopeTables { cos: mirror.tensor(name, &self.cos)?, sin: mirror.tensor(name, &self.sin)? };
        // SAFETY: put among the arguments.
        *self = unsafe { mirror.hold(tables) };
        Ok(())
    }
}

impl RopeTables {
    /// Tables of the positions below `max_position`: the angle of pair i at position p is `p · inv_freq[i]`, in
    /// radians, and cos and sin are multiplied by `attention_factor` (1 except for YaRN).
    pub fn new(
        stream: &Stream,
        inv_freq: &[f64],
        attention_factor: f64,
        max_position: usize,
    ) -> Result<Self, Error> {
        let angle = |position: usize, pair: usize| position as f64 * inv_freq[pair];
        Self::build(stream, max_position, inv_freq.len(), attention_factor, angle)
    }

    /// Tables of given angles in radians, `[positions, pairs]`: for embeddings whose angles are not proportional to one
    /// position (two-dimensional ones of images, several position axes). Row p is used for position p.
    pub fn from_angles(
        stream: &Stream,
        angles: &[f64],
        pairs: usize,
        attention_factor: f64,
    ) -> Result<Self, Error> {
        if pairs == 0 || !angles.len().is_multiple_of(pairs) {
            let expected = format!("a multiple of {pairs} angles, at least 1");
            return Err(Error::invalid(OP, "angles", expected, angles.len().to_string()));
        }
        let angle = |position: usize, pair: usize| angles[position * pairs + pair];
        Self::build(stream, angles.len() / pairs, pairs, attention_factor, angle)
    }

    /// Writes given angles in radians, `[positions, pairs]`, over the first positions, after the stream's work so far:
    /// for tables that are made once and serve prompt after prompt. Allocates nothing on the device.
    pub fn set_angles(
        &mut self,
        stream: &Stream,
        angles: &[f64],
        attention_factor: f64,
    ) -> Result<(), Error> {
        let (pairs, most) = (self.pairs(), self.cos.len());
        if !angles.len().is_multiple_of(pairs) || angles.len() > most {
            let expected = format!("a multiple of {pairs} angles, at most {most}");
            return Err(Error::invalid(OP, "angles", expected, angles.len().to_string()));
        }
        let angle = |position: usize, pair: usize| angles[position * pairs + pair];
        let positions = angles.len() / pairs;
        let (cos, sin) = cos_sin(positions, pairs, attention_factor, angle);
        self.cos.view_mut().slice(0, 0..positions)?.write(stream, &cos)?;
        self.sin.view_mut().slice(0, 0..positions)?.write(stream, &sin)
    }

    fn build(
        stream: &Stream,
        max_position: usize,
        pairs: usize,
        attention_factor: f64,
        angle: impl Fn(usize, usize) -> f64 + Sync,
    ) -> Result<Self, Error> {
        check_size(OP, "max_position", "positions", max_position)?;
        if max_position == 0 || pairs == 0 {
            let got = format!("{max_position} positions of {pairs} pairs");
            return Err(Error::invalid(OP, "tables", "at least one position and one pair", got));
        }
        if max_position.checked_mul(pairs).is_none_or(|len| len > isize::MAX as usize / 4) {
            let got = format!("[{max_position}, {pairs}]");
            return Err(Error::invalid(OP, "tables", "a size that fits the address space", got));
        }
        // The device says whether there is room before anything is worked out, and the host holds a part at a time.
        let empty = || Tensor::empty(stream, &[max_position, pairs], DType::F32);
        let mut tables = RopeTables { cos: empty()?, sin: empty()? };
        let step = (ELEMENTS / pairs).max(1);
        for first in (0..max_position).step_by(step) {
            let end = max_position.min(first + step);
            let (cos, sin) =
                cos_sin(end - first, pairs, attention_factor, |position, pair| angle(first + position, pair));
            tables.cos.view_mut().slice(0, first..end)?.write(stream, &cos)?;
            tables.sin.view_mut().slice(0, first..end)?.write(stream, &sin)?;
        }
        Ok(tables)
    }

    /// The cosines, `[max_position, pairs]`.
    pub fn cos(&self) -> &Tensor {
        &self.cos
    }

    /// The sines, `[max_position, pairs]`.
    pub fn sin(&self) -> &Tensor {
        &self.sin
    }

    /// Positions: at least 1.
    pub fn max_position(&self) -> usize {
        self.cos.shape()[0]
    }

    /// Pairs of a head: half the rotary dimension.
    pub fn pairs(&self) -> usize {
        self.cos.shape()[1]
    }
}

/// cos and sin of `[positions, pairs]` angles, times a factor; rounded once.
fn cos_sin(
    positions: usize,
    pairs: usize,
    factor: f64,
    angle: impl Fn(usize, usize) -> f64 + Sync,
) -> (Vec<f32>, Vec<f32>) {
    let (mut cos, mut sin) = (vec![0f32; positions * pairs], vec![0f32; positions * pairs]);
    // Rows in groups, so that a task is worth its start.
    const ROWS: usize = 256;
    let chunks = cos.par_chunks_mut(ROWS * pairs).zip(sin.par_chunks_mut(ROWS * pairs));
    chunks.enumerate().for_each(|(chunk, (cos, sin))| {
        for (row, (cos, sin)) in cos.chunks_mut(pairs).zip(sin.chunks_mut(pairs)).enumerate() {
            for (pair, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
                let (s, c) = angle(chunk * ROWS + row, pair).sin_cos();
                (*cos, *sin) = ((c * factor) as f32, (s * factor) as f32);
            }
        }
    });
    (cos, sin)
}
