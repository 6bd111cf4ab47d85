//! The ring of places of a warp: how chunks of k and v lie in it, and how they come there.

use cuda_std::{cp_async, thread, warp};

use super::super::Visible;
use super::super::work::Work;
use super::{CHUNK, WARPS};

/// What the pieces of a row are moved by, of which it has so many: of rows without a bit in common that is what each is
/// moved by, together.
#[inline(always)]
pub(super) fn turn(pieces: u32, row: u32) -> u32 {
    // Of four pieces, two rows lie in all the banks. Of more, the exclusive or takes two neighbours to different halves
    // of them: v is read eight rows at a time, a piece of each, and k two rows, four pieces of each.
    row / 2 % 4 + if pieces < 8 { 0 } else { row % 2 * 4 }
}

/// What a lane copies of a chunk: a piece of every so many-th row.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub(super) first_row: u32,
    pub(super) piece: u32,
}

impl Share {
    #[inline(always)]
    pub(super) fn new(pieces: u32, lane: u32) -> Self {
        Share { first_row: lane / pieces, piece: lane % pieces }
    }

    /// Starts the copies of a chunk, all of which there is, from the share's first piece on.
    ///
    /// # Safety
    /// - *converged*: the whole warp, whose own the place is; the rows *in-bounds* and *aligned(16)*.
    #[inline(always)]
    pub(super) unsafe fn copy<C>(self, pieces: u32, from: *const C, stride: u32, place: u32) {
        let rows_at_once = 32 / pieces;
        let place = place + self.first_row * pieces * 16 + ((self.piece ^ turn(pieces, self.first_row)) << 4);
        let mut from = from;
        let mut i = 0;
        while i < pieces / 2 {
            let row = i * rows_at_once;
            // SAFETY: an existing row; inside the place, which begins at a multiple of 128 bytes.
            unsafe { cp_async::cg_16((place ^ turn(pieces, row) << 4) + row * pieces * 16, from) };
            from = from.wrapping_add(rows_at_once as usize * stride as usize);
            i += 1;
        }
    }

    /// The same with zeros for keys that are not among `keys`, the chunk's first being 0, and beyond the first
    /// `width_pieces`.
    ///
    /// # Safety
    /// - As for [`Share::copy`] of those that there are.
    #[inline(always)]
    pub(super) unsafe fn copy_some<C>(
        self,
        pieces: u32,
        from: *const C,
        stride: u32,
        place: u32,
        keys: Visible,
        width_pieces: u32,
    ) {
        let rows_at_once = 32 / pieces;
        let mut from = from;
        let mut i = 0;
        while i < pieces / 2 {
            let row = self.first_row + i * rows_at_once;
            let bytes = if keys.has(row as i32) && self.piece < width_pieces { 16 } else { 0 };
            let to = place + row * pieces * 16 + ((self.piece ^ turn(pieces, row)) << 4);
            // SAFETY: an existing row, or no byte of it; inside the place.
            unsafe { cp_async::cg_16_fill(to, from, bytes) };
            from = from.wrapping_add(rows_at_once as usize * stride as usize);
            // Opaque, so that the loop stays one.
            i = thread::opaque(i + 1);
        }
    }
}

/// Waits for the copies of the chunk that comes next, `PLACES` of which are under way.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn wait<const PLACES: usize>() {
    match PLACES {
        8 => cp_async::wait_group::<7>(),
        4 => cp_async::wait_group::<3>(),
        _ => cp_async::wait_group::<1>(),
    }
    // SAFETY: the caller's promise.
    unsafe { warp::sync_warp(warp::FULL_MASK) };
}

/// The first key of a chunk.
#[inline(always)]
pub(super) fn key_of<const ROWS: u32>(work: &Work<ROWS>, chunk: usize, warp_idx: u32) -> i32 {
    work.first_key() + ((chunk as u32 * WARPS + warp_idx) * CHUNK) as i32
}

/// Where a lane's row of two neighbouring pieces begins in a chunk of 16 rows, for `ldmatrix`: the second piece's or
/// not.
#[inline(always)]
pub(super) fn row_of_pair(pieces: u32, row: u32, is_second: u32) -> u32 {
    row * pieces * 16 + ((is_second ^ turn(pieces, row)) << 4)
}

/// The same of pair number `pair`: the exclusive or of [`turn`] has its own bits.
#[inline(always)]
pub(super) fn pair(row_of_first: u32, pair: u32) -> u32 {
    (row_of_first ^ (pair % 4 * 2) << 4) + pair / 4 * 128
}
