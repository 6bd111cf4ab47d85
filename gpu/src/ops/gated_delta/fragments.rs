//! Matrices as tensor cores take them: numbers as sums of bf16, whose products are exact, in the order of lanes.
//!
//! ```text
//! f32 number    = b₀ + 2⁻⁸ b₁ + 2⁻¹⁶ b₂     8 bits each, cut off
//! f16 element   = b₀ + b₁                    8 and 3
//! bf16 element  = b₀
//! ```
//!
//! The powers of two make that exact for every f32: without them the parts of a number below 2⁻¹¹⁰ would be cut off at
//! 2⁻¹³³, the least of bf16. Products of one power have sums of their own, from the smallest on (`next_power`).
//!
//! Which elements are multiplied at a time does not matter. So of 16 rows a lane of group g has the neighbours 2 g and
//! 2 g + 1 where products have rows g and g + 8, and sums that a lane holds of them are a word of the next product's
//! second operand as they are: its pair g, which lane g / 2 of four reads as register g % 2.

use abi::ops::gated_delta::{FRAGMENT, GatedDeltaDims, ROWS_IN_PIECES};
use cuda_std::cvt::{bf16, f16, prmt};
use cuda_std::{global, mma, shared, thread};

use crate::matmul::multiplicand::Multiplicand;

/// Parts of an f32.
pub(super) const PARTS: usize = 3;

/// The types of q, k, v and out.
pub trait Parts: Multiplicand {
    /// Of an element: `abi::ops::gated_delta::parts`.
    const PARTS: usize;
}

impl Parts for bf16 {
    const PARTS: usize = 1;
}

impl Parts for f16 {
    const PARTS: usize = 2;
}

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

/// A word's two elements.
#[inline(always)]
pub(super) fn halves<T: Multiplicand>(word: u32) -> [f32; 2] {
    let mut values = [0.0; 8];
    T::unpack([word, 0, 0, 0], &mut values);
    [values[0], values[1]]
}

/// The lower halves of two words, or the upper ones.
#[inline(always)]
pub(super) fn lower_halves(first: u32, second: u32) -> u32 {
    prmt(first, second, 0x5410)
}
#[inline(always)]
pub(super) fn upper_halves(first: u32, second: u32) -> u32 {
    prmt(first, second, 0x7632)
}

/// What a part is multiplied by more than the one before.
const POWER: f32 = 256.0;

/// Sums of the parts of a power as those of the next larger one.
#[inline(always)]
pub(super) fn next_power(sums: [f32; 4]) -> [f32; 4] {
    sums.map(|sum| sum / POWER)
}

const UPPER: u32 = 0xffff_0000;

/// A number as its first 8 bits and the rest; what is not finite has none.
#[inline(always)]
fn cut(value: f32) -> (u32, f32) {
    let high = value.to_bits() & UPPER;
    let rest = value - f32::from_bits(high);
    // Of an infinity the rest is a NaN.
    (high, if rest.is_nan() { 0.0 } else { rest })
}

/// A number as its parts, the largest first.
#[inline(always)]
fn split(value: f32) -> [u32; PARTS] {
    let (high, rest) = cut(value);
    // Below two times the number.
    let rest = rest * POWER;
    let middle = rest.to_bits() & UPPER;
    [high, middle, ((rest - f32::from_bits(middle)) * POWER).to_bits()]
}

/// A number of its parts.
#[inline(always)]
pub(super) fn joined([high, middle, low]: [f32; PARTS]) -> f32 {
    (low / POWER + middle) / POWER + high
}

/// Two numbers as a word of each part.
#[inline(always)]
pub(super) fn split_pair([first, second]: [f32; 2]) -> [u32; PARTS] {
    let (first, second) = (split(first), split(second));
    let mut words = [0; PARTS];
    let mut part = 0;
    while part < PARTS {
        words[part] = upper_halves(first[part], second[part]);
        part += 1;
    }
    words
}

/// A power of two times a word's two elements, as a word of each part that elements have.
#[inline(always)]
pub(super) fn split_elements<T: Parts>(word: u32, power: f32) -> [u32; 2] {
    let [(first_high, first_rest), (second_high, second_rest)] =
        halves::<T>(word).map(|value| cut(value * power));
    [upper_halves(first_high, second_high), upper_halves(first_rest.to_bits(), second_rest.to_bits())]
}

/// A positive, normal number as a power of two times a number from 1 to 2. Of others the first is not finite, or 0.
#[inline(always)]
pub(super) fn power_and_rest(value: f32) -> (f32, f32) {
    let bits = value.to_bits();
    (f32::from_bits(bits & 0x7f80_0000), f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000))
}

/// Fragments of a lower triangle of blocks of 16 by 16 before those of row `i`.
#[inline(always)]
pub(super) const fn before_row(i: u32) -> u32 {
    i * (i + 1) / 2
}

/// The lane's words of a fragment.
///
/// # Safety
/// - *in-bounds*: the fragment; *initialised*: by an earlier kernel; *aligned(16)*.
#[inline(always)]
pub(super) unsafe fn load_fragment(fragments: *const f32, index: usize) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        global::load_nc_x4(fragments.wrapping_add(4 * thread::lane() as usize + index * FRAGMENT as usize))
    }
}

/// # Safety
/// - *in-bounds*: the fragment; *exclusive*: it is the warp's; *aligned(16)*.
#[inline(always)]
pub(super) unsafe fn store_fragment(fragments: *mut f32, index: usize, words: [u32; 4]) {
    let to = fragments.wrapping_add(4 * thread::lane() as usize + index * FRAGMENT as usize);
    // SAFETY: the caller's promise.
    unsafe { global::store_x4(to, words) }
}

/// Where a number of a matrix of second operands is in each part.
#[inline(always)]
pub(super) const fn at_pair(pair: u32, col: u32) -> u32 {
    // Lanes that store have eight neighbouring pairs, and columns 2 apart: moved so that these are 32 banks.
    4 * ((8 * col + pair) ^ ((col & 4) << 1))
}

/// Bytes of a part of 16 rows and 8 columns, and of all its parts.
const PART_BYTES: u32 = 256;
pub(super) const BLOCK_BYTES: u32 = PARTS as u32 * PART_BYTES;

/// A lane's places in a block of 16 rows and 8 columns of a matrix in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    write: [u32; 2],
    read: u32,
}

impl Lane {
    #[inline(always)]
    pub(super) fn new(group: u32, member: u32) -> Self {
        Lane {
            write: [at_pair(group, 2 * member), at_pair(group, 2 * member + 1)],
            read: at_pair(2 * member, group),
        }
    }

    /// Puts sums there.
    ///
    /// # Safety
    /// - *exclusive*: the lane's words of the block at `to`.
    #[inline(always)]
    pub(super) unsafe fn store(self, to: u32, sums: [f32; 4]) {
        let mut col = 0;
        while col < 2 {
            let words = split_pair([sums[col], sums[2 + col]]);
            let mut part = 0;
            while part < PARTS {
                // SAFETY: the caller's promise.
                unsafe { shared::store_u32(to + part as u32 * PART_BYTES + self.write[col], words[part]) };
                part += 1;
            }
            col += 1;
        }
    }

    /// A part of the second operand.
    ///
    /// # Safety
    /// - *initialised*: the block at `from`, and a barrier since.
    #[inline(always)]
    pub(super) unsafe fn load(self, from: u32, part: usize) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe { shared::load_u32x2(from + part as u32 * PART_BYTES + self.read) }
    }
}

/// A number of a block in shared memory, of the first or second row of a pair.
///
/// # Safety
/// - As for [`Lane::load`].
#[inline(always)]
pub(super) unsafe fn load_number(from: u32, pair: u32, second: u32, col: u32) -> f32 {
    // SAFETY: the caller's promise.
    let part =
        |part: u32| unsafe { half(shared::load_u32(from + part * PART_BYTES + at_pair(pair, col)), second) };
    joined([part(0), part(1), part(2)])
}

/// A half of a word, of bf16.
#[inline(always)]
pub(super) fn half(word: u32, second: u32) -> f32 {
    f32::from_bits(word >> (16 * second) << 16)
}

/// Adds the product of elements, as their parts, and a part of numbers.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn add_elements<T: Parts>(
    mut sums: [f32; 4],
    a: &[[u32; 4]; 2],
    b: [u32; 2],
    part: usize,
) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        // Beside the smallest part the second one of elements is below 2⁻²⁴.
        if T::PARTS > 1 && part + 1 < PARTS {
            sums = mma::m16n8k16_f32_bf16(a[1], b, sums);
        }
        mma::m16n8k16_f32_bf16(a[0], b, sums)
    }
}

/// Adds the product of numbers and numbers to sums of each power, without those below 2⁻²⁴ of it.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn add_numbers(
    [whole, middle, small]: [[f32; 4]; PARTS],
    a: &[[u32; 4]; PARTS],
    b: &[[u32; 2]; PARTS],
) -> [[f32; 4]; PARTS] {
    // SAFETY: the caller's promise.
    unsafe {
        let small = mma::m16n8k16_f32_bf16(a[2], b[0], small);
        let middle = mma::m16n8k16_f32_bf16(a[1], b[0], middle);
        let small = mma::m16n8k16_f32_bf16(a[1], b[1], small);
        let middle = mma::m16n8k16_f32_bf16(a[0], b[1], middle);
        let small = mma::m16n8k16_f32_bf16(a[0], b[2], small);
        [mma::m16n8k16_f32_bf16(a[0], b[0], whole), middle, small]
    }
}
