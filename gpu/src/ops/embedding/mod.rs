//! Embedding: `out[t, :] = table[ids[t], :]`, bit by bit.
//!
//! Work split: a block per token, each thread moves units t, t + n, … of the row, four in flight at a time. A unit is
//! 16 bytes, or one element where rows are not aligned to that. The table goes through the read-only path, since tokens
//! repeat; out is cached as usual, since the next kernel reads it.
//!
//! An id beyond the table reads nothing: its row becomes all ones, NaN in every float type, so that it cannot pass for
//! a result. A kernel has no way to report it; models check ids on the host.
//!
//! Of a packed table (`abi::weight`) a row is a part of each tile of a row of tiles. Four threads have a tile, each as
//! a lane of a product would that has this row and another: it decodes both and keeps one.

use abi::ops::embedding::{EmbeddingDims, UNITS_PER_THREAD};
use abi::ops::matmul::{MatmulDims, OUT_IN_QUADS};
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

use crate::matmul::simt;
use crate::matmul::weight::{self, ANY, Code, E2m1, E4m3, E6m9, Int4, Int8, Packed};

/// What a thread moves at a time.
trait Unit: Copy + 'static {
    const ALL_ONES: Self;

    /// # Safety
    /// - *aligned(size)*, *in-bounds*, *initialised*, not written by this kernel.
    unsafe fn load(pointer: *const Self) -> Self;

    /// # Safety
    /// - *aligned(size)*, *in-bounds*, *exclusive*.
    unsafe fn store(pointer: *mut Self, value: Self);
}

impl Unit for [u32; 4] {
    const ALL_ONES: Self = [u32::MAX; 4];

    #[inline(always)]
    unsafe fn load(pointer: *const Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { global::load_nc_x4(pointer) }
    }

    #[inline(always)]
    unsafe fn store(pointer: *mut Self, value: Self) {
        // SAFETY: the caller's promise.
        unsafe { global::store_x4(pointer, value) }
    }
}

macro_rules! scalar_unit {
    ($type:ty) => {
        impl Unit for $type {
            const ALL_ONES: Self = <$type>::MAX;

            #[inline(always)]
            unsafe fn load(pointer: *const Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { global::load(pointer) }
            }

            #[inline(always)]
            unsafe fn store(pointer: *mut Self, value: Self) {
                // SAFETY: the caller's promise.
                unsafe { global::store(pointer, value) }
            }
        }
    };
}
scalar_unit!(u32);
scalar_unit!(u16);

/// One row by one block.
///
/// # Safety
/// - A grid of one block per token; rows of table and out *in-bounds* and *aligned(size of a unit)* — checked in
///   `Embedding::run`.
#[inline(always)]
unsafe fn copy_row<U: Unit>(table: *const U, ids: *const u32, out: *mut U, dims: &EmbeddingDims) {
    const HELD: usize = UNITS_PER_THREAD as usize;
    let token = thread::block_idx_x() as usize;
    let members = thread::block_dim_x();
    // SAFETY: the grid has one block per id — Embedding::run.
    let id = unsafe { global::load(ids.add(token)) };
    let is_valid = id < dims.vocab;
    let (from, to) = (id as usize * dims.table_stride as usize, token * dims.out_stride as usize);
    let mut first = thread::thread_idx_x();
    while first < dims.cols {
        let mut held = [U::ALL_ONES; HELD];
        // SAFETY: id < vocab and col < cols keep every access inside its row, and the rows inside their buffers —
        // Embedding::run.
        unsafe {
            let mut i = 0;
            while i < HELD {
                let col = first + i as u32 * members;
                if is_valid && col < dims.cols {
                    held[i] = U::load(table.add(from + col as usize));
                }
                i += 1;
            }
            let mut i = 0;
            while i < HELD {
                let col = first + i as u32 * members;
                if col < dims.cols {
                    U::store(out.add(to + col as usize), held[i]);
                }
                i += 1;
            }
        }
        first += UNITS_PER_THREAD * members;
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ty, $bytes:literal;)*) => {$(
        const _: () = assert!(size_of::<$type>() == $bytes);

        /// Entry point; see the module and `abi::ops::embedding`.
        ///
        /// # Safety
        /// - Arguments as `Embedding::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(table: *const $type, ids: *const u32, out: *mut $type, dims: EmbeddingDims) {
            // SAFETY: one block per token — Embedding::run.
            unsafe { copy_row::<$type>(table, ids, out, &dims) }
        }
    )*};
}
abi::embedding_table!(entries);

/// One row of a packed table by one block, each value rounded once.
///
/// # Safety
/// - A grid of one block per token; the table has `dims.vocab` rows of `dims.cols`, rows of out *in-bounds* and aligned
///   as `dims.in_quads` says — checked in `Embedding::run`.
#[inline(always)]
unsafe fn unpack_row<C: Code, T: Element>(
    table: &Packed,
    ids: *const u32,
    out: *mut T,
    dims: &EmbeddingDims,
) {
    let token = thread::block_idx_x();
    // SAFETY: the grid has one block per id — Embedding::run.
    let id = unsafe { global::load(ids.add(token as usize)) };
    let is_valid = id < dims.vocab;
    let shape = MatmulDims {
        m: 0,
        n: dims.cols,
        k: 0,
        a_stride: 0,
        b_stride: 0,
        out_stride: dims.out_stride,
        a_batch_stride: 0,
        b_batch_stride: 0,
        out_batch_stride: 0,
        access: OUT_IN_QUADS * dims.in_quads,
        split_log2: 0,
    };
    let has_minimums = table.has_minimums::<C>();
    let mut piece = thread::thread_idx_x();
    while piece < table.dims.tiles * 4 {
        let (tile, part) = (piece / 4, piece % 4);
        let mut quads = [[f32::from_bits(u32::MAX); 4]; 4];
        if is_valid {
            let row = table.row_of_lane::<C>(id / TILE_ROWS, id % 8 * 4 + part);
            let is_upper = id % TILE_ROWS >= 8;
            // SAFETY: the id is one of the table's rows, and so is the tile.
            let (words, raw, zeros) = unsafe {
                (
                    row.words::<C>(tile),
                    row.raw_scales::<C, ANY>(tile, has_minimums),
                    row.raw_zeros::<C, ANY>(tile),
                )
            };
            let [scales, minimums] = table.numbers::<C, ANY>(&raw, has_minimums);
            let mut step = 0;
            while step < 4 {
                let [lower, upper] =
                    weight::values::<C>(&words, step, table.any_zero::<C>(zeros, step as u32));
                let (values, scale, minimum) = if is_upper {
                    (upper, scales[step][1], minimums[step][1])
                } else {
                    (lower, scales[step][0], minimums[step][0])
                };
                let mut i = 0;
                while i < 4 {
                    quads[step][i] = values[i] * scale;
                    if has_minimums {
                        quads[step][i] -= minimum;
                    }
                    i += 1;
                }
                step += 1;
            }
        }
        let mut step = 0;
        while step < 4 {
            let col = tile * TILE_K + step as u32 * 16 + part * 4;
            if col < dims.cols {
                // SAFETY: the row is the block's, its columns exist, and these are this thread's.
                unsafe { simt::store_quad(out, token, col, quads[step], &shape) };
            }
            step += 1;
        }
        piece += thread::block_dim_x();
    }
}

macro_rules! packed_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::embedding`.
        ///
        /// # Safety
        /// - Arguments as `Embedding::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            ids: *const u32,
            out: *mut $type,
            dims: EmbeddingDims,
            weight: WeightDims,
        ) {
            let table = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            // SAFETY: one block per token — Embedding::run.
            unsafe { unpack_row::<$codes, $type>(&table, ids, out, &dims) }
        }
    )*};
}
abi::embedding_packed_table!(packed_entries);
