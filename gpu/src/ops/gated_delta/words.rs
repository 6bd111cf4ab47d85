//! Rows of 16-bit elements as the words that tensor cores take, and numbers as the sums of two that they multiply
//! exactly.

use abi::ops::gated_delta::{GatedDeltaDims, ROWS_IN_PIECES};
use cuda_std::cvt::tf32_from_f32;
use cuda_std::global;

use crate::matmul::multiplicand::Multiplicand;

/// The first `len` (up to 8) elements of a row's part, two to a word, and zeros.
///
/// # Safety
/// - As for `load_8`.
#[inline(always)]
pub(super) unsafe fn load_words<T: Multiplicand>(
    from: *const T,
    len: u32,
    dims: &GatedDeltaDims,
) -> [u32; 4] {
    // SAFETY: the caller's promise; where rows are in whole pieces of 16 bytes, `len` is 0 or 8.
    unsafe {
        if dims.access & ROWS_IN_PIECES != 0 {
            return if len == 0 { [0; 4] } else { global::load_nc_x4(from) };
        }
        let from = from.cast::<u16>();
        let mut words = [0; 4];
        let mut i = 0;
        while i < 8 {
            if (i as u32) < len {
                words[i / 2] |= u32::from(global::load(from.add(i))) << (16 * (i % 2));
            }
            i += 1;
        }
        words
    }
}

/// The first `len` (up to 2) elements of a row's part in a word.
///
/// # Safety
/// - As for `load_8`; the part begins at an even element.
#[inline(always)]
pub(super) unsafe fn load_pair<T: Multiplicand>(from: *const T, len: u32, dims: &GatedDeltaDims) -> u32 {
    // SAFETY: the caller's promise; where rows are in whole pieces of 16 bytes, `len` is 0 or 2.
    unsafe {
        if dims.access & ROWS_IN_PIECES != 0 {
            return if len == 0 { 0 } else { global::load(from.cast::<u32>()) };
        }
        let from = from.cast::<u16>();
        let low = if len > 0 { u32::from(global::load(from)) } else { 0 };
        let high = if len > 1 { u32::from(global::load(from.add(1))) } else { 0 };
        low | high << 16
    }
}

/// A word's two elements.
#[inline(always)]
pub(super) fn halves<T: Multiplicand>(word: u32) -> [f32; 2] {
    let mut values = [0.0; 8];
    T::unpack([word, 0, 0, 0], &mut values);
    [values[0], values[1]]
}

/// A number as the sum of two that tensor cores take whole: 22 bits of it. What is not finite is the first alone.
#[derive(Clone, Copy)]
pub(super) struct Split {
    pub high: u32,
    pub low: u32,
}

impl Split {
    #[inline(always)]
    pub(super) fn new(value: f32) -> Self {
        let high = tf32_from_f32(value);
        let rest = value - f32::from_bits(high);
        // Of an infinity the rest is a NaN.
        let rest = if rest.is_nan() { 0.0 } else { rest };
        Split { high, low: tf32_from_f32(rest) }
    }
}

/// A positive, normal number as a power of two times a number from 1 to 2. Of others the first is not finite, or 0.
#[inline(always)]
pub(super) fn parts(value: f32) -> (f32, f32) {
    let bits = value.to_bits();
    (f32::from_bits(bits & 0x7f80_0000), f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000))
}
