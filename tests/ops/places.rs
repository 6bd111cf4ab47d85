//! What the tests of operators that rotate and append share: where tokens are, by their positions and slots, with the
//! tables of angles; and whether the bits are those of the operators one after another.

use proptest::prelude::*;
use testkit::compare::check_bits_eq;
use testkit::strategies::Rng;
use warpforge::ops::rope::{RopeStyle, RopeTables};
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::fail;

/// Positions of the tables in the property tests.
pub const MAX_POSITION: usize = 97;

/// Angles of a position to the next one.
pub fn inv_freq(rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect()
}

/// Out of order, repeated, and one beyond the tables now and then.
pub fn positions(rng: &mut Rng, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| rng.below(MAX_POSITION + 2) as u32).collect()
}

/// Distinct slots in a random order, some of them beyond the cache.
pub fn slots(rng: &mut Rng, tokens: usize, num_slots: usize) -> Vec<u32> {
    let mut slots: Vec<u32> = (0..(num_slots.max(tokens) + 3) as u32).collect();
    for i in (1..slots.len()).rev() {
        slots.swap(i, rng.below(i + 1));
    }
    slots.truncate(tokens);
    slots
}

/// cos and sin of the tables, as a reference takes them.
pub fn angles(stream: &Stream, tables: &RopeTables) -> Result<[Vec<f64>; 2], Error> {
    let wide = |table: &Tensor| -> Result<Vec<f64>, Error> {
        Ok(table.to_vec::<f32>(stream)?.into_iter().map(f64::from).collect())
    };
    Ok([wide(tables.cos())?, wide(tables.sin())?])
}

/// Whether the kernels that rotate add the squares of an aligned row in the order in which `rmsnorm` does it: of a row
/// of `normed` elements, at most `most`, beside so many that are rotated.
pub fn adds_as_rmsnorm(
    dtype: DType,
    style: RopeStyle,
    (normed, most): (usize, usize),
    rotary_dim: usize,
) -> bool {
    let per_piece = 16 / dtype.bytes();
    let in_halves = if style == RopeStyle::HalfSplit { 2 } else { 1 };
    let is_whole = rotary_dim.is_multiple_of(in_halves * per_piece);
    !normed.is_multiple_of(per_piece) || (is_whole && normed <= most)
}

/// The numbers as bits, also of zeros: each is one of the type.
pub fn expect_bits(what: &str, got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    let bits = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
    check_bits_eq(&bits(got), &bits(want)).map_err(|error| fail(format!("{what}: {error}")))
}
