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
        let Counts { row_blocks, tiles, stretches, per_stretch, supers } = self.counts;
        let layout = &self.weight.layout;
        let block_of_all = expert * row_blocks + block;
        let tile_bytes = layout.codes.tile_bytes() as usize;
        let stored = layout.stored_scale();
        let scale_bytes = stored.bytes() as usize;
        let tile_k = TILE_K as usize;
        let stride = tiles * tile_k;
        let group = if layout.group == 0 { usize::MAX } else { layout.group as usize };
        for tile in 0..tiles {
            let codes = &self.codes[(block_of_all * tiles + tile) * tile_bytes..][..tile_bytes];
            let stretch = if group <= tile_k { tile } else { tile * tile_k / group };
            for step in 0..4 {
                let i = if per_stretch > 1 { step * 16 / group } else { 0 };
                for row in 0..ROWS {
                    let of_row = scale_place(row as u32) as usize;
                    let index = if layout.rows > 1 {
                        (block_of_all / (layout.rows as usize / ROWS) * stretches + stretch) * 2
                    } else {
                        ((block_of_all * stretches + stretch) * ROWS + of_row) * per_stretch + i
                    };
                    let of = |supers_of: &[u8]| {
                        if layout.scale.has_supers() {
                            let place =
                                (block_of_all * supers + tile / (SUPER_K / TILE_K) as usize) * ROWS + of_row;
                            f16::from_le_bytes([supers_of[2 * place], supers_of[2 * place + 1]]).to_f32()
                        } else {
                            self.weight.globals[expert]
                        }
                    };
                    let scale = number(stored, &self.scales[index * scale_bytes..], of(self.supers));
                    let minimum = if layout.minimums {
                        let bytes = &self.minimums[index * scale_bytes..];
                        number(stored, bytes, of(self.super_minimums))
                    } else {
                        0.0
                    };
                    let zero = if layout.zeros { self.zeros[index] } else { layout.zero() };
                    let out = &mut values[row * stride + tile * tile_k + 16 * step..][..16];
                    for (col, out) in out.iter_mut().enumerate() {
                        let (word, bit) = layout.codes.place(row as u32, (16 * step + col) as u32);
                        let byte = codes[word as usize * 4 + bit as usize / 8];
                        let code = if layout.codes.bits() == 4 { byte >> (bit % 8) & 15 } else { byte };
                        let value = match layout.codes {
                            Codes::Int4 | Codes::Int8 => f32::from(i16::from(code) - i16::from(zero)),
                            Codes::E2m1 => e2m1(code),
                            Codes::E4m3 => e4m3(code),
                        };
                        *out = value * scale;
                        if layout.minimums {
                            *out -= minimum;
                        }
                    }
                }
            }
        }
    }
}
