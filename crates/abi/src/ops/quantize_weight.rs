//! Plain matrices as packed, quantised weights: parameters, arithmetic and entry points.

use crate::DType;
use crate::weight::{Codes, WeightDims};

/// Sizes of one launch, and how it quantises.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeWeightDims {
    /// Rows of the weight: those of both matrices, where there are two.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// From one row to the next, in elements, of either matrix.
    pub strides: [u32; 2],
    /// Matrices: 1, or 2 whose rows come in turn.
    pub matrices: u32,
    /// Whether four elements can be read at once: a multiple of four of a row at a multiple of their size.
    pub in_quads: u32,
    /// The largest magnitude of a code, and the largest code of an integer.
    pub largest: f32,
    /// See there.
    pub most: u32,
    /// Up to this magnitude a scale is 1; −1 where it never is for that.
    pub unscaled_to: f32,
    /// The scheme's `ScaleType`, which may be stored as another.
    pub scale: u32,
    /// Elements of a row that share a scale: 16, 32, 64, …, or k and at least 1 for all of them.
    pub group: u32,
    /// Rows of a matrix that share a scale.
    pub rows: u32,
    /// Whether there are zero points: 1 or 0.
    pub asymmetric: u32,
    /// The share of a group's magnitudes that the range covers.
    pub percentile: f32,
    /// The weight.
    pub weight: WeightDims,
}

const _: () = assert!(size_of::<QuantizeWeightDims>() == 88);
impl crate::Params for QuantizeWeightDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Warps of a block.
pub const WARPS: u32 = THREADS / 32;
/// Elements of a row that a warp looks at together.
pub const SPAN: u32 = 128;

/// The nearest integer, ties to even, of a number below 2^22.
#[inline(always)]
fn round(x: f32) -> f32 {
    // From 1.5 · 2^23 on the last place is 1.
    const UNIT: f32 = 12_582_912.0;
    (x + UNIT) - UNIT
}

/// The code of an integer for a value over its scale.
#[inline(always)]
pub fn integer_code(scaled: f32, zero: u8, most: u8) -> u8 {
    let within = scaled.max(-f32::from(zero)).min(f32::from(most - zero));
    (round(within) + f32::from(zero)) as u8
}

/// The zero point of a range from `low`, at most 0, with this scale.
#[inline(always)]
pub fn zero_point(low: f32, scale: f32, most: u8) -> u8 {
    if scale > 0.0 { round((-low / scale).min(f32::from(most))) as u8 } else { 0 }
}

/// The nearest fp4, ties to the even code.
#[inline(always)]
pub fn e2m1_code(scaled: f32) -> u8 {
    // Halfway between neighbouring codes; those of an odd code belong to the next.
    let x = scaled.abs();
    let below = |bound: f32| u8::from(x > bound);
    let up_to = |bound: f32| u8::from(x >= bound);
    let code = below(0.25) + up_to(0.75) + below(1.25) + up_to(1.75) + below(2.5) + up_to(3.5) + below(5.0);
    code | if scaled.is_sign_negative() { 8 } else { 0 }
}

/// The exponent of a positive number: the largest power of two that it is not below.
#[inline(always)]
const fn exponent(x: f32) -> i32 {
    let bits = x.to_bits();
    if bits < 0x0080_0000 { 31 - bits.leading_zeros() as i32 - 149 } else { (bits >> 23) as i32 - 127 }
}

/// The scale that is a power of two: that of the group's largest magnitude over that of the largest code.
#[inline(always)]
pub fn e8m0_scale(magnitude: f32, largest: f32) -> u8 {
    if magnitude <= 0.0 {
        return 0;
    }
    let exponent = exponent(magnitude) - exponent(largest);
    (if exponent < -127 { -127 } else { exponent } + 127) as u8
}

/// Which of `len` magnitudes, at least one, in ascending order is the largest that this share of them covers.
#[inline(always)]
pub fn covered_rank(len: u32, percentile: f32) -> u32 {
    let (last, share) = (len - 1, percentile.max(0.0));
    ((last as f32 * share + 0.5) as u32).min(last)
}

/// The magnitude of a rank: `count` says how many of them have at most these bits.
#[inline(always)]
pub fn magnitude_of_rank(rank: u32, mut count: impl FnMut(u32) -> u32) -> f32 {
    // The bits of what is not negative are in its order.
    let (mut bits, mut place) = (0u32, 1u32 << 30);
    while place > 0 {
        if count(bits + (place - 1)) <= rank {
            bits += place;
        }
        place >>= 1;
    }
    f32::from_bits(bits)
}

/// A kernel that makes codes.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantizeWeightVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the matrix.
    pub dtype: DType,
    /// What it makes.
    pub codes: Codes,
}

/// A kernel that makes scales.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantizeScalesVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the matrix.
    pub dtype: DType,
}

/// Hands every row of the table of those that make codes to the macro `$callback`.
#[macro_export]
macro_rules! quantize_weight_table {
    ($callback:path) => {
        $callback! {
            quantize_weight_f32_int4__codes__sm61 => f32, F32, Int4;
            quantize_weight_f32_int8__codes__sm61 => f32, F32, Int8;
            quantize_weight_f32_e2m1__codes__sm61 => f32, F32, E2m1;
            quantize_weight_f32_e4m3__codes__sm61 => f32, F32, E4m3;
            quantize_weight_f32_e6m9__codes__sm61 => f32, F32, E6m9;
            quantize_weight_f16_int4__codes__sm61 => f16, F16, Int4;
            quantize_weight_f16_int8__codes__sm61 => f16, F16, Int8;
            quantize_weight_f16_e2m1__codes__sm61 => f16, F16, E2m1;
            quantize_weight_f16_e4m3__codes__sm61 => f16, F16, E4m3;
            quantize_weight_f16_e6m9__codes__sm61 => f16, F16, E6m9;
            quantize_weight_bf16_int4__codes__sm61 => bf16, BF16, Int4;
            quantize_weight_bf16_int8__codes__sm61 => bf16, BF16, Int8;
            quantize_weight_bf16_e2m1__codes__sm61 => bf16, BF16, E2m1;
            quantize_weight_bf16_e4m3__codes__sm61 => bf16, BF16, E4m3;
            quantize_weight_bf16_e6m9__codes__sm61 => bf16, BF16, E6m9;
        }
    };
}

/// Hands every row of the table of those that make scales to the macro `$callback`.
#[macro_export]
macro_rules! quantize_weight_scales_table {
    ($callback:path) => {
        $callback! {
            quantize_weight_f32__scales__sm61 => f32, F32;
            quantize_weight_f16__scales__sm61 => f16, F16;
            quantize_weight_bf16__scales__sm61 => bf16, BF16;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident;)*) => {
        /// Every kernel that makes codes.
        pub const VARIANTS: &[QuantizeWeightVariant] = &[$(QuantizeWeightVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            codes: Codes::$codes,
        }),*];
    };
}
quantize_weight_table!(variants);

macro_rules! scales_variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel that makes scales.
        pub const SCALES_VARIANTS: &[QuantizeScalesVariant] =
            &[$(QuantizeScalesVariant { entry: stringify!($entry), dtype: DType::$dtype }),*];
    };
}
quantize_weight_scales_table!(scales_variants);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_by_their_rank() {
        let magnitudes = [3.0f32, 0.0, 1e-40, 7.5, 3.0, 1e30, f32::MAX];
        let mut sorted = magnitudes;
        sorted.sort_by(f32::total_cmp);
        for (rank, &wanted) in sorted.iter().enumerate() {
            let count = |bits| magnitudes.iter().filter(|value| value.to_bits() <= bits).count() as u32;
            assert_eq!(magnitude_of_rank(rank as u32, count), wanted);
        }
    }

    #[test]
    fn nearest_fours() {
        let values = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for code in 0..7u8 {
            let [low, high] = [values[usize::from(code)], values[usize::from(code) + 1]];
            let middle = (low + high) / 2.0;
            let found = [middle.next_down(), middle, middle.next_up()].map(e2m1_code);
            assert_eq!(found, [code, code + code % 2, code + 1], "{low} to {high}");
            assert_eq!(e2m1_code(-high), (code + 1) | 8);
        }
        assert_eq!([1e9, f32::INFINITY].map(e2m1_code), [7, 7]);
    }

    #[test]
    fn powers_of_two_are_not_beyond_their_magnitude() {
        // Just below a power of two, at it, subnormal, and the ends.
        let table = [
            (6.0, 127),
            (4.0f32.next_down(), 126),
            (2f32.powi(100).next_down(), 97 + 127),
            (f32::MAX, 125 + 127),
            (1e-40, 0),
            (0.0, 0),
        ];
        for (magnitude, scale) in table {
            assert_eq!(e8m0_scale(magnitude, Codes::E2m1.largest()), scale, "{magnitude:e}");
        }
    }
}
