//! What the matrix products ask of an operand's type: floats are multiplied in f32, int8 four at a time.
//!
//! A *piece* is 16 bytes of a row, what one load brings. A *word* is what the arithmetic takes: an f32, or four int8.

use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, math};

/// The sum of products.
pub trait Sum: Copy {
    /// The empty sum.
    const ZERO: Self;

    /// Both together.
    fn plus(self, other: Self) -> Self;

    /// As it is kept in shared memory.
    fn to_word(self) -> u32;

    /// The inverse.
    fn from_word(word: u32) -> Self;
}

impl Sum for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self + other
    }

    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        f32::from_bits(word)
    }
}

impl Sum for i32 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    #[inline(always)]
    fn to_word(self) -> u32 {
        self as u32
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        word as i32
    }
}

/// The element type of an operand.
pub trait Operand: Copy + 'static {
    /// What products are summed in.
    type Sum: Sum;
    /// Elements of a piece.
    const PER_PIECE: u32;
    /// Words of a piece.
    const WORDS: usize;

    /// The first `len` elements (up to a piece) one by one, and zeros.
    ///
    /// # Safety
    /// - *aligned(`size_of::<Self>()`)*, and `len` elements *in-bounds(the buffer of `from`)*.
    unsafe fn gather(from: *const Self, len: u32) -> [u32; 4];

    /// One element as a word, alone in it.
    ///
    /// # Safety
    /// - *aligned(`size_of::<Self>()`)* and *in-bounds(the buffer of `from`)*.
    unsafe fn load_alone(from: *const Self) -> u32;

    /// Word `index` of a piece.
    fn word(piece: [u32; 4], index: usize) -> u32;

    /// `sum` plus the product of two words.
    fn multiply_add(a: u32, b: u32, sum: Self::Sum) -> Self::Sum;
}

macro_rules! float_operand {
    ($($type:ident),*) => {$(
        impl Operand for $type {
            type Sum = f32;
            const PER_PIECE: u32 = <$type as Element>::PER_16_BYTES as u32;
            const WORDS: usize = <$type as Element>::PER_16_BYTES;

            #[inline(always)]
            unsafe fn gather(from: *const Self, len: u32) -> [u32; 4] {
                let mut values = [0.0; 8];
                let mut i = 0;
                while i < Self::WORDS {
                    if (i as u32) < len {
                        // SAFETY: i < len — the caller.
                        values[i] = unsafe { global::load(from.add(i)) }.to_f32();
                    }
                    i += 1;
                }
                <Self as Element>::pack(&values)
            }

            #[inline(always)]
            unsafe fn load_alone(from: *const Self) -> u32 {
                // SAFETY: the caller's promise.
                unsafe { global::load(from) }.to_f32().to_bits()
            }

            #[inline(always)]
            fn word(piece: [u32; 4], index: usize) -> u32 {
                let mut values = [0.0; 8];
                <Self as Element>::unpack(piece, &mut values);
                values[index].to_bits()
            }

            #[inline(always)]
            fn multiply_add(a: u32, b: u32, sum: f32) -> f32 {
                math::fma(f32::from_bits(a), f32::from_bits(b), sum)
            }
        }
    )*};
}
float_operand!(f32, f16, bf16);

impl Operand for i8 {
    type Sum = i32;
    const PER_PIECE: u32 = 16;
    const WORDS: usize = 4;

    #[inline(always)]
    unsafe fn gather(from: *const Self, len: u32) -> [u32; 4] {
        let mut piece = [0; 4];
        let mut i = 0;
        while i < 16 {
            if (i as u32) < len {
                // SAFETY: i < len — the caller.
                let byte = unsafe { global::load(from.add(i)) } as u8;
                piece[i / 4] |= u32::from(byte) << (8 * (i % 4));
            }
            i += 1;
        }
        piece
    }

    #[inline(always)]
    unsafe fn load_alone(from: *const Self) -> u32 {
        // SAFETY: the caller's promise.
        u32::from(unsafe { global::load(from) } as u8)
    }

    #[inline(always)]
    fn word(piece: [u32; 4], index: usize) -> u32 {
        piece[index]
    }

    #[inline(always)]
    fn multiply_add(a: u32, b: u32, sum: i32) -> i32 {
        math::dp4a(a, b, sum)
    }
}

/// A piece of a row of which `len` elements are left: whole in one load where `in_pieces` allows, else its elements,
/// and zeros past the end.
///
/// # Safety
/// - `len` elements, up to a piece, *in-bounds(the buffer of `from`)*; *aligned(16)* if `in_pieces`.
#[inline(always)]
pub unsafe fn load_piece<T: Operand>(from: *const T, len: u32, in_pieces: bool) -> [u32; 4] {
    // SAFETY: the caller's promise; nothing is read for a `len` of 0.
    unsafe {
        if in_pieces && len >= T::PER_PIECE {
            global::load_nc_x4(from)
        } else if len > 0 {
            T::gather(from, len)
        } else {
            [0; 4]
        }
    }
}
