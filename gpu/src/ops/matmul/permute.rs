//! Columns in another order: `out[r, j] = x[r, order[j]]`, for weights whose columns lie in one of their own.
//!
//! Work split: a thread makes 8 columns of a row of out; `abi::RowTiles` deals them to blocks, so rows of any length
//! fill them. The order is read in whole lines, out is written in them; what is read of x is anywhere in its row, which
//! the caches hold: a row has some kilobytes. Bound by the number of these reads, one for each element.

use abi::ops::matmul::{PERMUTE_BLOCK_PIECES_LOG2, PERMUTE_PIECE, PermuteColumnsDims};
use cuda_std::cvt::{bf16, f16};
use cuda_std::{global, kernel, thread};

const PIECE: usize = PERMUTE_PIECE as usize;

/// This thread's columns of a row.
///
/// # Safety
/// - x and out *in-bounds* for `dims`, the order of `dims.cols`; out and the order *aligned(16)* where `is_aligned`;
///   elements of 2 or 4 bytes — checked in `PermuteColumns::run`.
#[inline(always)]
unsafe fn permute<T: Copy>(x: *const T, order: *const u32, out: *mut T, dims: &PermuteColumnsDims) {
    let (row, piece) =
        dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), PERMUTE_BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || piece >= dims.tiles.pieces {
        return;
    }
    let first = piece * PERMUTE_PIECE;
    let is_whole = dims.is_aligned != 0 && first + PERMUTE_PIECE <= dims.cols;
    // SAFETY: row < rows, and first < cols; a column beyond a row is not read.
    unsafe {
        let x = x.add(row as usize * dims.x_stride as usize);
        let out = out.add(row as usize * dims.out_stride as usize + first as usize);
        let order = order.add(first as usize);
        let mut places = [u32::MAX; PIECE];
        if is_whole {
            let (low, high) = (global::load_nc_x4(order), global::load_nc_x4(order.add(4)));
            let mut i = 0;
            while i < 4 {
                places[i] = low[i];
                places[4 + i] = high[i];
                i += 1;
            }
        } else {
            let mut i = 0;
            while i < PIECE {
                if first + (i as u32) < dims.cols {
                    places[i] = global::load(order.add(i));
                }
                i += 1;
            }
        }
        let mut bits = [0u32; PIECE];
        let mut i = 0;
        while i < PIECE {
            if places[i] < dims.cols {
                let from = x.add(places[i] as usize);
                bits[i] = match size_of::<T>() {
                    2 => u32::from(global::load(from.cast::<u16>())),
                    _ => global::load(from.cast::<u32>()),
                };
            }
            i += 1;
        }
        if is_whole {
            if size_of::<T>() == 2 {
                let mut words = [0; 4];
                let mut i = 0;
                while i < 4 {
                    words[i] = bits[2 * i] | bits[2 * i + 1] << 16;
                    i += 1;
                }
                global::store_x4(out, words);
            } else {
                global::store_x4(out, [bits[0], bits[1], bits[2], bits[3]]);
                global::store_x4(out.add(4), [bits[4], bits[5], bits[6], bits[7]]);
            }
        } else {
            let mut i = 0;
            while i < PIECE {
                if first + (i as u32) < dims.cols {
                    match size_of::<T>() {
                        2 => global::store(out.add(i).cast::<u16>(), bits[i] as u16),
                        _ => global::store(out.add(i).cast::<u32>(), bits[i]),
                    }
                }
                i += 1;
            }
        }
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `PermuteColumns::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(x: *const $type, order: *const u32, out: *mut $type, dims: PermuteColumnsDims) {
            // SAFETY: the same contract.
            unsafe { permute::<$type>(x, order, out, &dims) }
        }
    )*};
}
abi::permute_columns_table!(entries);
