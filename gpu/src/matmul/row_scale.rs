//! Rows that a product of few rows norms, as `few_rows_mma` does: `a · gain` is what it multiplies, and what comes of
//! that is multiplied by `rsqrt(mean(a²) + eps)`, a number for each row.
//!
//! - The squares are added up beside the product, since a block has read the rows anyway: nothing waits for a norm.
//! - Where the squares do not fit f32, the block multiplies once more, the rows by an exact power of two
//!   ([`abi::range`]). So large or small rows take twice as long.
//! - `a · gain` is rounded where the tensor cores multiply, as the normed row is by a norm of its own.

use abi::ops::matmul::MatmulNorm;
use abi::range;
use cuda_std::cvt::Element;
use cuda_std::{global, math};

/// The norm of rows.
#[derive(Clone, Copy)]
pub struct RowScale<'a, T> {
    /// `[k]`, at a multiple of 16 bytes; null if rows are taken as they are.
    pub gain: *const T,
    /// The rest of it.
    pub norm: &'a MatmulNorm,
}

impl<T: Element> RowScale<'_, T> {
    /// No norm.
    pub const NONE: Self =
        RowScale { gain: core::ptr::null(), norm: &MatmulNorm { eps: 0.0, inv_cols: 0.0, offset: 0.0 } };

    /// A piece of a row by the row's factor and its gains, `at` elements from the row's beginning.
    ///
    /// # Safety
    /// - The piece of the gains *in-bounds*.
    #[inline(always)]
    pub unsafe fn values(&self, piece: [u32; 4], factor: f32, at: usize) -> [f32; 8] {
        let (mut values, mut gains) = ([0.0; 8], [0.0; 8]);
        T::unpack(piece, &mut values);
        // SAFETY: the caller's promise.
        T::unpack(unsafe { global::load_nc_x4(self.gain.add(at)) }, &mut gains);
        let mut j = 0;
        while j < 8 {
            values[j] = values[j] * factor * (gains[j] + self.norm.offset);
            j += 1;
        }
        values
    }

    /// The sum of the squares of a thread's pieces of a row: its `first`, and those `stride` further on.
    ///
    /// # Safety
    /// - `num_pieces` pieces of the row *in-bounds* and *aligned(16)*.
    #[inline(always)]
    pub unsafe fn squares(row: *const T, (first, stride): (u32, u32), num_pieces: u32, factor: f32) -> f32 {
        let mut square = 0.0;
        let mut piece = first;
        while piece < num_pieces {
            let mut values = [0.0; 8];
            // SAFETY: a piece that there is — the caller.
            T::unpack(unsafe { global::load_nc_x4(row.add(piece as usize * T::PER_16_BYTES)) }, &mut values);
            let mut j = 0;
            while j < 8 {
                let value = values[j] * factor;
                square = math::fma(value, value, square);
                j += 1;
            }
            piece += stride;
        }
        square
    }

    /// Given the sum of a row's squares, by its factor: the row's scale, and the factor that it needs.
    #[inline(always)]
    pub fn scale(&self, square: f32, factor: f32) -> (f32, f32) {
        let mean = math::fma(square, self.norm.inv_cols, range::epsilon(self.norm.eps, factor));
        (math::rsqrt(mean), range::factor(mean))
    }
}
