//! Weighted sums of table rows: `out[t, :] (+)= Σ_j weights[t, j] · table[ids[t, j], :]`.
//!
//! Work split: a thread takes one piece of 16 bytes of a row of out and walks over the token's bag; `abi::RowTiles`
//! deals the pieces to blocks. Neighbouring lanes read neighbouring pieces of the same table rows, through the
//! read-only path, since tokens side by side share rows. A token's ids and weights are the same for all its pieces and
//! come from L1.
//!
//! An id beyond the table reads nothing and makes its token's row NaN: a kernel has no way to report it.

use abi::ops::embedding_bag::{BLOCK_PIECES_LOG2, EmbeddingBagDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

/// A row of the table and its weight; none for an id that the table does not have.
///
/// # Safety
/// - `entry` is *in-bounds* of ids and weights.
#[inline(always)]
unsafe fn entry_of(ids: *const u32, weights: *const f32, entry: usize, vocab: u32) -> Option<(usize, f32)> {
    // SAFETY: the caller's promise.
    let (id, weight) = unsafe { (global::load(ids.add(entry)), global::load(weights.add(entry))) };
    if id < vocab { Some((id as usize, weight)) } else { None }
}

/// Pieces of 16 bytes.
///
/// # Safety
/// - Pointers, strides and row lengths are *in-bounds* and *aligned(16)* — checked in `EmbeddingBag::run`, which takes
///   the scalar tile otherwise.
#[inline(always)]
unsafe fn by_piece<T: Element>(
    table: *const T,
    ids: *const u32,
    weights: *const f32,
    out: *mut T,
    dims: &EmbeddingBagDims,
) {
    let (row, piece) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || piece >= dims.tiles.pieces {
        return;
    }
    let col = piece as usize * T::PER_16_BYTES;
    let mut sums = [0.0; 8];
    // SAFETY: row < rows, piece < pieces and id < vocab keep every access inside the views — EmbeddingBag::run.
    unsafe {
        let out = out.add(row as usize * dims.out_stride as usize + col);
        if dims.adds != 0 {
            T::unpack(global::load_x4(out), &mut sums);
        }
        let mut j = 0;
        while j < dims.bag {
            let entry = row as usize * dims.bag as usize + j as usize;
            let (mut values, mut weight) = ([0.0; 8], f32::NAN);
            if let Some((id, of_row)) = entry_of(ids, weights, entry, dims.vocab) {
                T::unpack(global::load_nc_x4(table.add(id * dims.table_stride as usize + col)), &mut values);
                weight = of_row;
            }
            let mut i = 0;
            while i < T::PER_16_BYTES {
                sums[i] = math::fma(weight, values[i], sums[i]);
                i += 1;
            }
            j += 1;
        }
        global::store_x4(out, T::pack(&sums));
    }
}

/// Element by element: the fallback for any length, stride and alignment.
///
/// # Safety
/// - Pointers, strides and row lengths are *in-bounds* — checked in `EmbeddingBag::run`.
#[inline(always)]
unsafe fn by_element<T: Element>(
    table: *const T,
    ids: *const u32,
    weights: *const f32,
    out: *mut T,
    dims: &EmbeddingBagDims,
) {
    let (row, col) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || col >= dims.tiles.pieces {
        return;
    }
    // SAFETY: row < rows, col < cols and id < vocab keep every access inside the views — EmbeddingBag::run.
    unsafe {
        let out = out.add(row as usize * dims.out_stride as usize + col as usize);
        let mut sum = if dims.adds != 0 { global::load(out).to_f32() } else { 0.0 };
        let mut j = 0;
        while j < dims.bag {
            let entry = row as usize * dims.bag as usize + j as usize;
            let (mut value, mut weight) = (0.0, f32::NAN);
            if let Some((id, of_row)) = entry_of(ids, weights, entry, dims.vocab) {
                value = global::load(table.add(id * dims.table_stride as usize + col as usize)).to_f32();
                weight = of_row;
            }
            sum = math::fma(weight, value, sum);
            j += 1;
        }
        global::store(out, T::from_f32(sum));
    }
}

macro_rules! body {
    (Pieces) => {
        by_piece
    };
    (Scalar) => {
        by_element
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::embedding_bag`.
        ///
        /// # Safety
        /// - Arguments as `EmbeddingBag::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            table: *const $type,
            ids: *const u32,
            weights: *const f32,
            out: *mut $type,
            dims: EmbeddingBagDims,
        ) {
            // SAFETY: arguments as the body asks, by `EmbeddingBag::run`.
            unsafe { body!($tile)(table, ids, weights, out, &dims) }
        }
    )*};
}
abi::embedding_bag_table!(entries);
