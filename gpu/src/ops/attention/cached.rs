//! What the ring of `decode_ring` holds of keys and values.

use cuda_std::cvt::{
    E4m3, Element, bf16, bf16x2_from_e4m3, f16, f16x2_from_e4m3, f16x2_from_e4m3x2, f16x2s_from_e4m3,
};
use cuda_std::global;

use crate::matmul::multiplicand::Multiplicand;

/// An element of k and v, beside a q of `T`s.
///
/// Operands of `mma` whose rows are keys, of k, or columns, of v, are made of the registers that `ldmatrix` brings of
/// two neighbouring pieces of 16 rows: each piece's first eight rows and the eight behind them. Two bytes and two bytes
/// are what a lane is to have of an operand's row. Of fp8 these are four neighbours, twice as many: they make two
/// operands, of k 16 columns each, of v a piece each, whose even columns are its first eight rows and the odd ones the
/// others.
pub(super) trait Cached<T: Multiplicand>: Copy + 'static {
    /// What weights and values are multiplied in, and keys if q has such values. For fp8 always binary16, to which the
    /// way is shorter than to bfloat16.
    type Narrow: Multiplicand;
    /// Elements of 16 bytes.
    const PER_PIECE: u32;
    /// Operands that four registers are made into.
    const PARTS: usize = Self::PER_PIECE as usize / 8;
    /// Whether what is stored is to be multiplied by its head's scale.
    const IS_SCALED: bool = false;

    /// Operands of v from transposed registers: eight keys of both pieces, then the other keys of both.
    fn values(registers: [u32; 4]) -> [[u32; 4]; 2];

    /// A value as half a word of an operand.
    ///
    /// # Safety
    /// - *in-bounds*.
    unsafe fn value_bits(value: *const Self) -> u32;

    /// A value without its scale.
    ///
    /// # Safety
    /// - *in-bounds*.
    unsafe fn value(value: *const Self) -> f32;
}

/// What is multiplied with q as an `M`.
pub(super) trait Keys<M: Multiplicand>: Copy + 'static {
    /// Operands of k from eight keys of the one piece, eight of the other, then the keys behind them.
    fn keys(registers: [u32; 4]) -> [[u32; 4]; 2];
}

macro_rules! cached_as_it_is {
    ($($type:ident),*) => {$(
        impl Cached<$type> for $type {
            type Narrow = $type;
            const PER_PIECE: u32 = 8;

            #[inline(always)]
            fn values(registers: [u32; 4]) -> [[u32; 4]; 2] {
                [registers, [0; 4]]
            }

            #[inline(always)]
            unsafe fn value_bits(value: *const Self) -> u32 {
                // SAFETY: the caller's promise.
                u32::from(unsafe { global::load(value.cast::<u16>()) })
            }

            #[inline(always)]
            unsafe fn value(value: *const Self) -> f32 {
                // SAFETY: the caller's promise.
                Element::to_f32(unsafe { global::load(value) })
            }
        }

        impl Keys<$type> for $type {
            #[inline(always)]
            fn keys(registers: [u32; 4]) -> [[u32; 4]; 2] {
                [registers, [0; 4]]
            }
        }
    )*};
}
cached_as_it_is!(f16, bf16);

macro_rules! cached_as_fp8 {
    ($($type:ident: $widen:ident;)*) => {$(
        impl Cached<$type> for E4m3 {
            type Narrow = f16;
            const PER_PIECE: u32 = 16;
            const IS_SCALED: bool = true;

            #[inline(always)]
            fn values([a, b, c, d]: [u32; 4]) -> [[u32; 4]; 2] {
                let piece = |near: u32, far: u32| {
                    let [[a, b], [c, d]] = [f16x2s_from_e4m3(near), f16x2s_from_e4m3(far)];
                    [a, b, c, d]
                };
                [piece(a, c), piece(b, d)]
            }

            #[inline(always)]
            unsafe fn value_bits(value: *const Self) -> u32 {
                // SAFETY: the caller's promise.
                f16x2_from_e4m3x2(unsafe { global::load(value.cast::<u8>()) }.into()) & 0xffff
            }

            #[inline(always)]
            unsafe fn value(value: *const Self) -> f32 {
                // SAFETY: the caller's promise.
                unsafe { global::load(value) }.to_f32()
            }
        }

        impl Keys<$type> for E4m3 {
            #[inline(always)]
            fn keys([a, b, c, d]: [u32; 4]) -> [[u32; 4]; 2] {
                let piece = |near: u32, far: u32| {
                    [$widen::<0, 1>(near), $widen::<0, 1>(far), $widen::<2, 3>(near), $widen::<2, 3>(far)]
                };
                [piece(a, b), piece(c, d)]
            }
        }
    )*};
}
cached_as_fp8! { f16: f16x2_from_e4m3; bf16: bf16x2_from_e4m3; }

/// The scale of a head's keys or values: 1 if there are none.
///
/// # Safety
/// - `scales` is null or has an element for every key head — checked in `Attention::run`.
#[inline(always)]
pub(super) unsafe fn head_scale<T: Multiplicand, C: Cached<T>>(scales: *const f32, head: u32) -> f32 {
    if !C::IS_SCALED || scales.is_null() {
        return 1.0;
    }
    // SAFETY: the caller's promise.
    unsafe { global::load(scales.add(head as usize)) }
}
