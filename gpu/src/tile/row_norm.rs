//! The RMS norm of a row in shared memory, which a block needs as an operand.

use abi::ops::matmul::MatmulNorm;
use abi::range;
use cuda_std::cvt::Element;
use cuda_std::{math, shared, thread, warp};

use super::reduce::block_sum_f32;

/// Norms the row that lies at `row` in shared memory, each thread the pieces that it has put there: its own number, and
/// those `THREADS` further on. `gain` gives a piece of the gains. Elements beyond the row's end are zero.
///
/// # Safety
/// - *converged*: all `THREADS` threads of the block; each has its pieces there, and may call `gain` for them.
/// - *exclusive*: the first 128 bytes of dynamic shared memory are used for nothing else.
#[inline(always)]
pub unsafe fn norm_row<T: Element, const THREADS: u32>(
    row: u32,
    num_pieces: u32,
    gain: impl Fn(u32) -> [u32; 4],
    norm: &MatmulNorm,
) {
    let MatmulNorm { eps, inv_cols, offset } = *norm;
    let square_of_pieces = |factor: f32| {
        let mut square = 0.0;
        for_pieces::<THREADS>(num_pieces, |piece| {
            let mut values = [0.0; 8];
            // SAFETY: this thread's own — the caller.
            T::unpack(unsafe { shared::load_u32x4(row + 16 * piece) }, &mut values);
            let mut j = 0;
            while j < 8 {
                let value = values[j] * factor;
                square = math::fma(value, value, square);
                j += 1;
            }
        });
        square
    };
    // SAFETY: all threads take part, with a barrier between the two sums, and what they read and write of the row is
    // their own — the caller.
    unsafe {
        let mut mean = math::fma(block_sum_f32(square_of_pieces(1.0)), inv_cols, eps);
        let factor = range::factor(mean);
        // The same for all threads, as is the mean; by a vote, so that the compiler knows it of the warp.
        if warp::any(warp::FULL_MASK, factor != 1.0) {
            thread::sync_threads();
            let square = square_of_pieces(factor);
            mean = math::fma(block_sum_f32(square), inv_cols, range::epsilon(eps, factor));
        }
        let scale = math::rsqrt(mean);
        for_pieces::<THREADS>(num_pieces, |piece| {
            let (mut values, mut gains) = ([0.0; 8], [0.0; 8]);
            T::unpack(shared::load_u32x4(row + 16 * piece), &mut values);
            T::unpack(gain(piece), &mut gains);
            let mut j = 0;
            while j < 8 {
                values[j] = values[j] * factor * scale * (gains[j] + offset);
                j += 1;
            }
            shared::store_u32x4(row + 16 * piece, T::pack(&values));
        });
    }
}

/// Calls `body` with each piece that is this thread's.
#[inline(always)]
pub fn for_pieces<const THREADS: u32>(num_pieces: u32, mut body: impl FnMut(u32)) {
    let mut piece = thread::thread_idx_x();
    while piece < num_pieces {
        body(piece);
        piece += THREADS;
    }
}
