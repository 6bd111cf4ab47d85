//! What the tensor cores multiply: floats, summed in f32, and int8, summed exactly.

use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::mma;

use super::operand::Sum;

/// What `mma` takes.
pub trait Factor: Copy {
    /// What it is summed in.
    type Sum: Sum;

    /// `c + a · b` for 16 × 8 and 32 bytes of k. In shared memory the pieces of a and b lie alike for all types, so
    /// that `ldmatrix` brings the registers of each.
    ///
    /// # Safety
    /// - *converged*: all 32 lanes execute it.
    unsafe fn multiply_add(a: [u32; 4], b: [u32; 2], c: [Self::Sum; 4]) -> [Self::Sum; 4];
}

macro_rules! factors {
    ($($type:ident, $sum:ident: $instruction:ident;)*) => {$(
        impl Factor for $type {
            type Sum = $sum;

            #[inline(always)]
            unsafe fn multiply_add(a: [u32; 4], b: [u32; 2], c: [$sum; 4]) -> [$sum; 4] {
                // SAFETY: the caller's promise.
                unsafe { mma::$instruction(a, b, c) }
            }
        }
    )*};
}
// f32 without its lower 13 bits.
factors! {
    bf16, f32: m16n8k16_f32_bf16;
    f16, f32: m16n8k16_f32_f16;
    f32, f32: m16n8k8_f32_tf32;
    i8, i32: m16n8k32_s32_s8;
}

/// The types of 16 bits.
pub trait Multiplicand: Factor<Sum = f32> + Element {
    /// Two infinities in a word: the bits of the exponents.
    const INFINITIES: u32;
}

impl Multiplicand for bf16 {
    const INFINITIES: u32 = bf16::INFINITY.to_bits() as u32 * 0x1_0001;
}

impl Multiplicand for f16 {
    const INFINITIES: u32 = f16::INFINITY.to_bits() as u32 * 0x1_0001;
}

/// The halves of a word that are not finite, by their highest bits.
#[inline(always)]
pub fn not_finite<T: Multiplicand>(word: u32) -> u32 {
    // An exponent of ones and its lowest bit: their sum carries into the sign.
    let one = T::INFINITIES & !(T::INFINITIES << 1);
    (word & T::INFINITIES).wrapping_add(one) & 0x8000_8000
}

/// A word whose halves that are not finite are 0.
#[inline(always)]
pub fn finite_halves<T: Multiplicand>(word: u32) -> u32 {
    // From the halves' highest bits to all of theirs.
    word & !((not_finite::<T>(word) >> 15) * 0xffff)
}
