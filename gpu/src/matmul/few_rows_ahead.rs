//! A product of one row with constant weights, for Hopper: as [`few_rows_simt`](super::few_rows_simt), but the first
//! pieces of b are on their way to registers before the kernel ahead has ended.
//!
//! ```text
//! kernel ahead   ... multiplies | adds | stores | ends
//! this one           loads b    | next may start | waits | loads a, multiplies, adds, stores
//! ```
//!
//! - A block is to leave room for one of the next kernel on its multiprocessor, so that this one's loads and that one's
//!   follow each other without a gap: two columns to a warp, 64 registers.
//! - The next kernel may start behind the loads, and not before: its own would come first (`gpu/NOTES/launches.md`).
//! - The order of a sum is that of `few_rows_simt`, and so are its bits.
//! - The row may be normed first. Each block does that for itself: it takes less time than a launch.

use abi::ops::matmul::{
    AHEAD_MAX_NORMED, AHEAD_SUMS_BYTES, MatmulDims, MatmulNorm, NEXT_MAY_START, THREADS, WARPS,
};
use cuda_std::cvt::Element;
use cuda_std::{cp_async, global, grid, shared, thread};

use super::few_rows_simt::{finish_sums, multiply_pieces};
use super::operand::{Operand, Sum};
use crate::tile::row_norm::{for_pieces, norm_row};

/// Loads `UNROLL` pieces of each column, `stride` apart; those that are not there are zero.
///
/// # Safety
/// - Pieces below `num_pieces` *in-bounds* and *aligned(16)*.
#[inline(always)]
unsafe fn load_pieces<T: Operand, const COLS: usize, const UNROLL: usize>(
    cols: &[*const T; COLS],
    piece: u32,
    stride: u32,
    num_pieces: u32,
) -> [[[u32; 4]; COLS]; UNROLL] {
    let mut loaded = [[[0; 4]; COLS]; UNROLL];
    let mut u = 0;
    while u < UNROLL {
        let at = piece + u as u32 * stride;
        if at < num_pieces {
            let mut j = 0;
            while j < COLS {
                // SAFETY: a piece that there is — the caller.
                loaded[u][j] = unsafe { global::load_stream_x4(cols[j].add((at * T::PER_PIECE) as usize)) };
                j += 1;
            }
        }
        u += 1;
    }
    loaded
}

/// The row a, on its way through shared memory, where it may be normed.
#[derive(Clone, Copy)]
pub struct Row<'a, T> {
    /// `[k]`.
    pub a: *const T,
    /// `[k]`, constant: the norm's gains; null if a is taken as it is.
    pub gain: *const T,
    /// The rest of the norm.
    pub norm: &'a MatmulNorm,
}

impl<T: Operand + Element> Row<'_, T> {
    /// Where a piece of the row lies in shared memory, and one of the gains.
    #[inline(always)]
    pub fn row_at(piece: u32) -> u32 {
        shared::base() + AHEAD_SUMS_BYTES + 16 * piece
    }

    #[inline(always)]
    fn gain_at(piece: u32) -> u32 {
        Self::row_at(AHEAD_MAX_NORMED / T::PER_PIECE + piece)
    }

    /// Starts the copies of the gains, each thread those of its pieces; none if there is no norm.
    ///
    /// # Safety
    /// - `num_pieces` pieces of the gains *in-bounds* and *aligned(16)*, no more than [`AHEAD_MAX_NORMED`] elements.
    /// - *exclusive*: shared memory as `MatmulTile::smem_bytes` says.
    #[inline(always)]
    pub unsafe fn start_gains(&self, num_pieces: u32) {
        if !self.gain.is_null() {
            for_pieces::<THREADS>(num_pieces, |piece| {
                let from = self.gain.wrapping_add((piece * T::PER_PIECE) as usize);
                // SAFETY: a piece that there is — the caller.
                unsafe { cp_async::cg_16(Self::gain_at(piece), from) };
            });
        }
    }

    /// Brings the row to shared memory, normed if there is a norm; what `meanwhile` gives, which has loads of its own
    /// while those of the row are on their way.
    ///
    /// # Safety
    /// - *converged*: all threads of the block, which have called `start_gains`; `num_pieces` pieces of a *in-bounds*
    ///   and *aligned(16)*, no more than `AHEAD_MAX_K` elements, or [`AHEAD_MAX_NORMED`] if there is a norm.
    /// - *exclusive*: shared memory as `MatmulTile::smem_bytes` says.
    #[inline(always)]
    pub unsafe fn bring<E>(&self, num_pieces: u32, meanwhile: impl FnOnce() -> E) -> E {
        // SAFETY: pieces that there are; a thread reads what it has copied itself, but for the sums, which have
        // barriers between — the caller.
        unsafe {
            for_pieces::<THREADS>(num_pieces, |piece| {
                cp_async::cg_16(Self::row_at(piece), self.a.wrapping_add((piece * T::PER_PIECE) as usize));
            });
            let given = meanwhile();
            cp_async::wait_all();
            if !self.gain.is_null() {
                let gain = |piece| shared::load_u32x4(Self::gain_at(piece));
                norm_row::<T, THREADS>(Self::row_at(0), num_pieces, gain, self.norm);
            }
            thread::sync_threads();
            given
        }
    }
}

/// Calls `finish(col, [sum, next], added)` for every column of the block's stretch, as
/// [`few_rows_simt::multiply`](super::few_rows_simt::multiply) does. `added` is what `prepare(col)` has given, before
/// the sum was there.
///
/// # Safety
/// - *converged*: all 256 threads of the block.
/// - a, the gains and the rows of b *in-bounds* for `dims`, whole pieces, *aligned(16)*; n not 0; k at most
///   `AHEAD_MAX_K`, or [`AHEAD_MAX_NORMED`] if there is a norm — checked in `run`.
/// - b and the gains are constant.
/// - *exclusive*: shared memory as `MatmulTile::smem_bytes` says.
#[inline(always)]
pub unsafe fn multiply<T: Operand + Element, const COLS: usize, const UNROLL: usize, E: Copy + Default>(
    row: Row<'_, T>,
    b_row: impl Fn(u32) -> *const T,
    dims: &MatmulDims,
    paired: bool,
    prepare: impl Fn(u32) -> E,
    finish: impl Fn(u32, [T::Sum; 2], E),
) {
    let groups = WARPS >> dims.split_log2;
    let first_group = thread::block_idx_x() * groups;
    let group = thread::warp_idx() >> dims.split_log2;
    let part = thread::warp_idx() & ((1 << dims.split_log2) - 1);
    // Columns past the end are computed from the last one, and not stored.
    let mut cols = [core::ptr::null(); COLS];
    let mut j = 0;
    while j < COLS {
        cols[j] = b_row(((first_group + group) * COLS as u32 + j as u32).min(dims.n - 1));
        j += 1;
    }
    let num_pieces = dims.k / T::PER_PIECE;
    let stride = 32u32 << dims.split_log2;
    let mut piece = part * 32 + thread::lane();
    let mut sums = [T::Sum::ZERO; COLS];
    // SAFETY: pieces below `num_pieces` are whole and aligned, b and the gains are constant — the caller.
    unsafe {
        let early = || {
            row.start_gains(num_pieces);
            load_pieces::<T, COLS, UNROLL>(&cols, piece, stride, num_pieces)
        };
        let mut held = grid::begin_ahead(early, dims.access & NEXT_MAY_START != 0);
        // Of the column that this thread finishes, if it does: others' may be written meanwhile.
        let member = thread::thread_idx_x();
        let col = first_group * COLS as u32 + member;
        let added = row.bring(num_pieces, || {
            if member < groups * COLS as u32 && col < dims.n { prepare(col) } else { E::default() }
        });
        while piece < num_pieces {
            let mut u = 0;
            while u < UNROLL {
                let at = piece + u as u32 * stride;
                if at < num_pieces {
                    let x = shared::load_u32x4(Row::<T>::row_at(at));
                    multiply_pieces::<T, 1, COLS, COLS>(&[x], &held[u], &mut sums);
                }
                u += 1;
            }
            piece += UNROLL as u32 * stride;
            held = load_pieces::<T, COLS, UNROLL>(&cols, piece, stride, num_pieces);
        }
        finish_sums::<T, COLS, COLS>(sums, dims, (0, first_group), paired, |_, col, sums| {
            finish(col, sums, added)
        });
    }
}
