//! What the ring of `decode_ring` holds of keys and values.

use cuda_std::cvt::{
    E4m3, Element, bf16, bf16x2_from_e4m3, f16, f16x2_from_e4m3, f16x2_from_e4m3x2, f16x2s_from_e4m3,
};
use cuda_std::global;

use crate::tile::multiplicand::Multiplicand;

/// An element of k and v, of which operands of `mma` are made.
///
/// Of k a lane has 16 bytes of a row, whose columns it has of q as well: in which order columns are summed over does not matter.
/// Of v `ldmatrix` brings a lane two bytes and two bytes of a row. Of fp8 these are four neighbours, twice as many as the lane is
/// to have: they make two operands, one of the even columns and one of the odd, so the lane has four neighbours of the result.
pub(super) trait Cached<T: Multiplicand>: Copy + 'static {
    /// What weights and values are multiplied in. For fp8 always binary16, which has its values, without another conversion.
    type Values: Multiplicand;
    /// Elements of 16 bytes.
    const PER_PIECE: u32;
    /// Operands of v that two registers are made into; times two of k that 16 bytes are made into.
    const PARTS: usize = Self::PER_PIECE as usize / 8;
    /// Whether what is stored is to be multiplied by its head's scale.
    const IS_SCALED: bool = false;

    /// The operands of 16 keys' values, from 16 transposed bytes of each.
    fn values(keys: [u32; 2]) -> [[u32; 2]; 2];

    /// A value as half an operand.
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
    /// The operands of a key, from 16 bytes of it: the first two, or four.
    fn keys(piece: [u32; 4]) -> [[u32; 2]; 4];
}

macro_rules! cached_as_it_is {
    ($($type:ident),*) => {$(
        impl Cached<$type> for $type {
            type Values = $type;
            const PER_PIECE: u32 = 8;

            #[inline(always)]
            fn values(keys: [u32; 2]) -> [[u32; 2]; 2] {
                [keys, [0; 2]]
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
            fn keys([a, b, c, d]: [u32; 4]) -> [[u32; 2]; 4] {
                [[a, b], [c, d], [0; 2], [0; 2]]
            }
        }
    )*};
}
cached_as_it_is!(f16, bf16);

macro_rules! cached_as_fp8 {
    ($($type:ident: $widen:ident;)*) => {$(
        impl Cached<$type> for E4m3 {
            type Values = f16;
            const PER_PIECE: u32 = 16;
            const IS_SCALED: bool = true;

            #[inline(always)]
            fn values([low, high]: [u32; 2]) -> [[u32; 2]; 2] {
                let [[a, b], [c, d]] = [f16x2s_from_e4m3(low), f16x2s_from_e4m3(high)];
                [[a, c], [b, d]]
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
            fn keys(piece: [u32; 4]) -> [[u32; 2]; 4] {
                piece.map(|four| [$widen::<0, 1>(four), $widen::<2, 3>(four)])
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
