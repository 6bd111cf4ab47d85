//! Packed weights on the CPU: rows of tiles as f32.

use std::sync::LazyLock;

use abi::weight::{Codes, SUPER_K, ScaleType, TILE_K, TILE_ROWS, scale_place};
use half::f16;

use super::{Counts, Weight};
use crate::fp8::F8E4M3;
use crate::tensor::Tensor;

/// Rows of a row of tiles.
pub(crate) const ROWS: usize = TILE_ROWS as usize;

/// A packed weight's bytes in host memory.
pub(crate) struct Packed<'a> {
    weight: &'a Weight,
    counts: Counts,
    codes: &'a [u8],
    scales: &'a [u8],
    zeros: &'a [u8],
    minimums: &'a [u8],
    supers: &'a [u8],
    super_minimums: &'a [u8],
}

/// The value of an fp4.
pub(crate) fn e2m1(code: u8) -> f32 {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = VALUES[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

fn e4m3(code: u8) -> f32 {
    static VALUES: LazyLock<[f32; 256]> =
        LazyLock::new(|| std::array::from_fn(|code| F8E4M3(code as u8).to_f32()));
    VALUES[usize::from(code)]
}

/// The value of a scale's bits; `factor` is its super or global scale.
pub(crate) fn number(kind: ScaleType, bytes: &[u8], factor: f32) -> f32 {
    match kind {
        ScaleType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleType::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16),
        ScaleType::E8m0 => f32::from_bits(match bytes[0] {
            0 => 0x0040_0000,
            0xff => 0x7fc0_0000,
            exponent => u32::from(exponent) << 23,
        }),
        ScaleType::E4m3 => e4m3(bytes[0]) * factor,
        ScaleType::U8Super => f32::from(bytes[0]) * factor,
        ScaleType::I8Super => f32::from(bytes[0] as i8) * factor,
    }
}

impl<'a> Packed<'a> {
    /// Of a weight in host memory.
    pub(crate) fn new(weight: &'a Weight) -> Self {
        let bytes = |tensor: &'a Tensor| bytemuck::cast_slice(tensor.host_slice::<i8>());
        let optional = |tensor: &'a Option<Tensor>| tensor.as_ref().map_or(&[][..], bytes);
        Packed {
            weight,
            counts: weight.counts(),
            codes: bytes(&weight.codes),
            scales: bytes(&weight.scales),
            zeros: optional(&weight.zeros),
            minimums: optional(&weight.minimums),
            supers: optional(&weight.supers),
            super_minimums: optional(&weight.super_minimums),
        }
    }

    /// The values of a row of tiles, [`ROWS`] rows of `tiles · 64`, of which those beyond k are not the matrix's.
    pub(crate) fn row_block(&self, expert: usize, block: usize, values: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has what the function is compiled for, as it has just said.
            return unsafe { self.row_block_by_avx2(expert, block, values) };
        }
        self.row_block_by(expert, block, values);
    }

    /// The same instructions for wider vectors.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn row_block_by_avx2(&self, expert: usize, block: usize, values: &mut [f32]) {
        self.row_block_by(expert, block, values);
    }

    #[inline(always)]
    fn row_block_by(&self, expert: usize, block: usize, values: &mut [f32]) {
        let Counts { row_blocks, tiles, .. } = self.counts;
        let block_of_all = expert * row_blocks + block;
        let tile_bytes = self.weight.layout.codes.tile_bytes() as usize;
        let stride = tiles * TILE;
        let has_minimums = self.weight.layout.minimums;
        let has_supers = self.weight.layout.scale.has_supers();
        // Steps that share a scale.
        let steps = STEPS / self.counts.per_stretch;
        let mut levels = [[Level { scale: 0.0, minimum: 0.0, zero: 0.0 }; STEPS]; ROWS];
        let mut known = usize::MAX;
        for tile in 0..tiles {
            let codes = &self.codes[(block_of_all * tiles + tile) * tile_bytes..][..tile_bytes];
            let mut decoded = [[0.0f32; TILE]; ROWS];
            match self.weight.layout.codes {
                Codes::Int4 => decode_nibbles(codes, &mut decoded, |code| code as f32),
                Codes::E2m1 => decode_nibbles(codes, &mut decoded, |code| {
                    // Sign, exponent and mantissa where f32 has them, and its bias made up for.
                    f32::from_bits((code & 8) << 28 | (code & 7) << 22) * 2f32.powi(126)
                }),
                Codes::Int8 => decode_bytes(codes, &mut decoded, |code| code as f32),
                Codes::E4m3 => decode_bytes(codes, &mut decoded, |code| {
                    let value = f32::from_bits((code & 0x80) << 24 | (code & 0x7f) << 20) * 2f32.powi(120);
                    if code & 0x7f == 0x7f { f32::NAN } else { value }
                }),
            }
            // Groups of several tiles have theirs from the first.
            let stretch = self.stretch(tile);
            if stretch != known || has_supers {
                known = stretch;
                for (row, levels) in levels.iter_mut().enumerate() {
                    for step in (0..STEPS).step_by(steps) {
                        levels[step..step + steps].fill(self.level(expert, block_of_all, tile, row, step));
                    }
                }
            }
            for (row, (decoded, levels)) in std::iter::zip(&decoded, &levels).enumerate() {
                let out = &mut values[row * stride + tile * TILE..][..TILE];
                for (step, &Level { scale, minimum, zero }) in levels.iter().enumerate() {
                    for i in step * 16..step * 16 + 16 {
                        out[i] = (decoded[i] - zero) * scale;
                    }
                    if has_minimums {
                        out[step * 16..][..16].iter_mut().for_each(|out| *out -= minimum);
                    }
                }
            }
        }
    }

    /// Where the scales of a tile begin, in stretches.
    #[inline(always)]
    fn stretch(&self, tile: usize) -> usize {
        let group = self.weight.layout.group as usize;
        if group != 0 && group <= TILE { tile } else { (tile * TILE).checked_div(group).unwrap_or(0) }
    }

    /// What the codes of a row of a tile become values by, in a step of 16 columns.
    #[inline(always)]
    fn level(&self, expert: usize, block_of_all: usize, tile: usize, row: usize, step: usize) -> Level {
        let Counts { stretches, per_stretch, supers, .. } = self.counts;
        let layout = &self.weight.layout;
        let stored = layout.stored_scale();
        let scale_bytes = stored.bytes() as usize;
        let stretch = self.stretch(tile);
        let i = step * per_stretch / STEPS;
        let of_row = scale_place(row as u32) as usize;
        let index = if layout.rows > 1 {
            (block_of_all / (layout.rows as usize / ROWS) * stretches + stretch) * 2
        } else {
            ((block_of_all * stretches + stretch) * ROWS + of_row) * per_stretch + i
        };
        let of = |supers_of: &[u8]| {
            if layout.scale.has_supers() {
                let place = (block_of_all * supers + tile / (SUPER_K / TILE_K) as usize) * ROWS + of_row;
                f16::from_le_bytes([supers_of[2 * place], supers_of[2 * place + 1]]).to_f32()
            } else {
                self.weight.globals[expert]
            }
        };
        let scale = number(stored, &self.scales[index * scale_bytes..], of(self.supers));
        let minimum = if layout.minimums {
            number(stored, &self.minimums[index * scale_bytes..], of(self.super_minimums))
        } else {
            0.0
        };
        let zero = if layout.zeros { self.zeros[index] } else { layout.zero() };
        Level { scale, minimum, zero: f32::from(zero) }
    }
}

/// Columns of a tile, and its steps of 16.
const TILE: usize = TILE_K as usize;
const STEPS: usize = TILE / 16;

/// A value is `(code − zero) · scale − minimum`.
#[derive(Clone, Copy)]
struct Level {
    scale: f32,
    minimum: f32,
    zero: f32,
}

/// The codes of a tile of four bits each, by [`Codes::place`]: a lane's word has four columns of a row and of that
/// eight rows below.
#[inline(always)]
fn decode_nibbles(codes: &[u8], out: &mut [[f32; TILE]; ROWS], value: impl Fn(u32) -> f32) {
    const SHIFTS: [u32; 4] = [0, 16, 8, 24];
    let (upper, lower) = out.split_at_mut(ROWS / 2);
    for (row, words) in codes.chunks_exact(64).enumerate() {
        for (index, word) in words.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            let first = index % STEPS * 16 + index / STEPS * 4;
            for (i, shift) in SHIFTS.into_iter().enumerate() {
                upper[row][first + i] = value(word >> shift & 15);
                lower[row][first + i] = value(word >> (shift + 4) & 15);
            }
        }
    }
}

/// The same of eight bits each: a row has its columns in words of four, those of every 16th beside each other.
#[inline(always)]
fn decode_bytes(codes: &[u8], out: &mut [[f32; TILE]; ROWS], value: impl Fn(u32) -> f32) {
    for (out, words) in std::iter::zip(out, codes.chunks_exact(TILE)) {
        for (index, word) in words.chunks_exact(4).enumerate() {
            let first = index % STEPS * 16 + index / STEPS * 4;
            for (out, &code) in std::iter::zip(&mut out[first..first + 4], word) {
                *out = value(code.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code of every place, as [`Codes::place`] has it.
    #[test]
    fn codes_are_where_the_layout_says() {
        for codes in Codes::ALL {
            let bytes: Vec<u8> =
                (0..codes.tile_bytes()).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            let mut decoded = [[0.0; TILE]; ROWS];
            match codes.bits() {
                4 => decode_nibbles(&bytes, &mut decoded, |code| code as f32),
                _ => decode_bytes(&bytes, &mut decoded, |code| code as f32),
            }
            for (row, decoded) in decoded.iter().enumerate() {
                for (col, &got) in decoded.iter().enumerate() {
                    let (word, bit) = codes.place(row as u32, col as u32);
                    let byte = bytes[word as usize * 4 + bit as usize / 8];
                    let want = if codes.bits() == 4 { byte >> (bit % 8) & 15 } else { byte };
                    assert_eq!(got, f32::from(want), "{codes:?} {row} {col}");
                }
            }
        }
    }

    /// Floats by their bits are those of the tables.
    #[test]
    fn floats_by_their_bits() {
        for code in 0..16u8 {
            let bits = u32::from(code);
            let value = f32::from_bits((bits & 8) << 28 | (bits & 7) << 22) * 2f32.powi(126);
            assert_eq!(value.to_bits(), e2m1(code).to_bits(), "{code}");
        }
        for code in 0..=255u8 {
            let bits = u32::from(code);
            let value = f32::from_bits((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 2f32.powi(120);
            let value = if bits & 0x7f == 0x7f { f32::NAN } else { value };
            assert!(value == e4m3(code) || (value.is_nan() && e4m3(code).is_nan()), "{code}");
        }
    }
}
