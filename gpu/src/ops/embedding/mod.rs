//! Embedding: `out[t, :] = table[ids[t], :]`, bit by bit.
//!
//! Work split: a block per token, each thread moves units t, t + n, … of the row, four in flight at a time. A unit is
//! 16 bytes, or one element where rows are not aligned to that. The table goes through the read-only path, since tokens
//! repeat; out is cached as usual, since the next kernel reads it.
//!
//! An id beyond the table reads nothing: its row becomes all ones, NaN in every float type, so that it cannot pass for
//! a result. A kernel has no way to report it; models check ids on the host.

use abi::ops::embedding::{EmbeddingDims, UNITS_PER_THREAD};
use cuda_std::{global, kernel, thread};

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
