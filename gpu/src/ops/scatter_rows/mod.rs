//! Rows into places that are named by number: `out[ids[t], :] = x[t, :]`, or `+=`.
//!
//! Work split: a thread moves one piece of 16 bytes of a row of x; `abi::RowTiles` deals the pieces to blocks, so rows
//! of any length fill them. x is read once and streamed; only the named rows of out are touched. The numbers come from
//! device memory. Bound by memory.

use abi::ops::scatter_rows::{BLOCK_PIECES_LOG2, ScatterRowsDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

use crate::tile::packed::add_packed;

/// This thread's piece: offsets in x and in out, in elements; none past the end or for a row that out has not.
///
/// # Safety
/// - `ids` holds a u32 per row — ScatterRows::run.
#[inline(always)]
unsafe fn place<const PIECE: usize>(ids: *const u32, dims: &ScatterRowsDims) -> Option<(usize, usize)> {
    let (row, piece) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || piece >= dims.tiles.pieces {
        return None;
    }
    // SAFETY: row < rows.
    let target = unsafe { global::load(ids.add(row as usize)) };
    if target >= dims.num_rows {
        return None;
    }
    let col = piece as usize * PIECE;
    Some((row as usize * dims.x_stride as usize + col, target as usize * dims.out_stride as usize + col))
}

/// # Safety
/// - Tensors *in-bounds* and *aligned(16)*; numbers distinct (*exclusive*) — ScatterRows::run, and its caller for the
///   numbers.
#[inline(always)]
unsafe fn by_piece<T: Element, const PIECE: usize>(
    x: *const T,
    ids: *const u32,
    out: *mut T,
    dims: &ScatterRowsDims,
) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        if let Some((from, to)) = place::<PIECE>(ids, dims) {
            let mut value = global::load_stream_x4(x.add(from));
            if dims.adds != 0 {
                value = add_packed::<T>(global::load_x4(out.add(to)), value);
            }
            global::store_x4(out.add(to), value);
        }
    }
}

/// # Safety
/// - As `by_piece`, without the alignment.
#[inline(always)]
unsafe fn by_element<T: Element>(x: *const T, ids: *const u32, out: *mut T, dims: &ScatterRowsDims) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        if let Some((from, to)) = place::<1>(ids, dims) {
            let mut value = global::load(x.add(from));
            if dims.adds != 0 {
                value = T::from_f32(global::load(out.add(to)).to_f32() + value.to_f32());
            }
            global::store(out.add(to), value);
        }
    }
}

macro_rules! body {
    (Pieces, $type:ident, $($arg:ident),*) => {
        by_piece::<$type, { <$type as Element>::PER_16_BYTES }>($($arg),*)
    };
    (Scalar, $type:ident, $($arg:ident),*) => {
        by_element::<$type>($($arg),*)
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::scatter_rows`.
        ///
        /// # Safety
        /// - Arguments as `ScatterRows::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(x: *const $type, ids: *const u32, out: *mut $type, dims: ScatterRowsDims) {
            let dims = &dims;
            // SAFETY: the same contract.
            unsafe { body!($tile, $type, x, ids, out, dims) }
        }
    )*};
}
abi::scatter_rows_table!(entries);
