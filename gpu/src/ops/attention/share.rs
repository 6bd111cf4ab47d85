//! The share that a thread of `prefill_mma` has of what a block copies: rows to their places in shared memory, from one
//! piece or from pages.

use abi::ops::attention::AttentionDims;
use cuda_std::{cp_async, shared, thread};

use super::{Visible, offset};
use crate::matmul::multiplicand::{Multiplicand, finite_halves, not_finite};

/// Where the piece of a row is, in bytes from its start.
#[inline(always)]
pub(super) fn moved(piece: u32, row: u32) -> u32 {
    (piece ^ (row & 7)) << 4
}

/// The pieces that a thread copies: one of eight neighbours, of every 16th row.
#[derive(Clone, Copy)]
pub(super) struct Share {
    row: u32,
    piece: u32,
}

impl Share {
    #[inline(always)]
    pub(super) fn new(thread: u32) -> Self {
        Share { row: thread / 8, piece: thread % 8 }
    }

    /// The thread's place in the first rows of a tensor in shared memory.
    #[inline(always)]
    fn place<const WIDTH: u32>(self) -> u32 {
        self.row * (WIDTH * 2) + moved(self.piece, self.row)
    }

    /// Starts the copies of `COUNT` rows of `WIDTH` columns: zeros for rows that are not among `rows`, and beyond
    /// `columns`.
    ///
    /// # Safety
    /// - `rows` *in-bounds* and *aligned(16)*; nobody reads the tensor at `to`.
    #[inline(always)]
    pub(super) unsafe fn copy<T, const WIDTH: u32, const COUNT: u32>(
        self,
        from: *const T,
        (stride, columns): (u32, u32),
        first_row: i32,
        rows: Visible,
        to: u32,
    ) {
        let to = to + self.place::<WIDTH>();
        let step = 16 * stride as usize;
        let first_row = first_row + self.row as i32;
        let mut from = from.wrapping_add(first_row as usize * stride as usize + self.piece as usize * 8);
        let mut i = 0;
        while i < COUNT / 16 {
            let is_row = rows.has(first_row + 16 * i as i32);
            let mut column = 0;
            while column < WIDTH {
                let bytes = if is_row && column + self.piece * 8 < columns { 16 } else { 0 };
                let to = to + i * (16 * WIDTH * 2) + column * 2;
                // SAFETY: an existing piece, or no byte of it; inside the tensor at `to`.
                unsafe { cp_async::cg_16_fill(to, from.wrapping_add(column as usize), bytes) };
                column += 64;
            }
            from = from.wrapping_add(step);
            i += 1;
        }
    }

    /// The same of keys in pages, whose numbers are at `pages`, one for every 16 rows from `first_row` on.
    ///
    /// # Safety
    /// - Rows *in-bounds* in the pages of a pool, and *aligned(16)*; nobody reads the tensor at `to`; the numbers are
    ///   there.
    #[inline(always)]
    pub(super) unsafe fn copy_pages<T, const WIDTH: u32, const COUNT: u32>(
        self,
        from: *const T,
        [page_stride, stride, columns]: [u32; 3],
        first_row: u32,
        rows: Visible,
        [pages, to]: [u32; 2],
        dims: &AttentionDims,
    ) {
        let to = to + self.place::<WIDTH>();
        let first_row = first_row + self.row;
        let from = from.wrapping_add(self.piece as usize * 8);
        let mut i = 0;
        while i < COUNT / 16 {
            let row = first_row + 16 * i;
            let is_row = rows.has(row as i32);
            // SAFETY: the caller's promise: a number of every 16 rows.
            let page = unsafe { shared::load_u32(pages + 4 * i) }.min(dims.num_pages - 1);
            let in_page = row & ((1 << dims.page_log2) - 1);
            let from = from.wrapping_add(offset(page, page_stride, in_page, stride, 0, 0));
            let mut column = 0;
            while column < WIDTH {
                let bytes = if is_row && column + self.piece * 8 < columns { 16 } else { 0 };
                let to = to + i * (16 * WIDTH * 2) + column * 2;
                // SAFETY: an existing piece, or no byte of it; inside the tensor at `to`.
                unsafe { cp_async::cg_16_fill(to, from.wrapping_add(column as usize), bytes) };
                column += 64;
            }
            i += 1;
        }
    }

    /// Clears what is not finite in the thread's own pieces; whether there was anything.
    ///
    /// # Safety
    /// - The thread's copies are done; nobody else touches the tensor.
    #[inline(always)]
    pub(super) unsafe fn clean<T: Multiplicand, const WIDTH: u32, const COUNT: u32>(self, at: u32) -> bool {
        let bad = not_finite::<T>;
        let kept = finite_halves::<T>;
        let mut found = 0;
        let mut i = 0;
        // Opaque, so that the loop stays one.
        while i < thread::opaque(COUNT / 16 * (WIDTH / 64)) {
            let at =
                at + self.place::<WIDTH>() + i / (WIDTH / 64) * (16 * WIDTH * 2) + i % (WIDTH / 64) * 128;
            // SAFETY: the caller's promise.
            unsafe {
                let [a, b, c, d] = shared::load_u32x4(at);
                found |= bad(a) | bad(b) | bad(c) | bad(d);
                shared::store_u32x4(at, [kept(a), kept(b), kept(c), kept(d)]);
            }
            i += 1;
        }
        found != 0
    }
}
