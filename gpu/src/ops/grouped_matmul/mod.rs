//! Grouped matrix product: rows sorted by expert, each expert's rows times its own weight,
//! `out[i] = x[row(i)] · w[expert(i)]ᵀ`.
//!
//! | kernels | for | a block makes |
//! |---|---|---|
//! | `Gemv` | few rows per expert | up to 8 rows of an expert by some columns: [`crate::tile::gemv`] |
//! | `Simt` | many | 64 × 64 or 128 × 128 of an expert's product: [`crate::tile::simt`] |
//!
//! Which expert and rows a block has it finds itself, from the offsets in device memory: block b has slot
//! `b / col_blocks`, of either kind (`abi::ops::grouped_matmul`).
//!
//! ```text
//! tiles of 4 rows
//! offsets        0              5 5             37
//! sorted rows    e0 e0 e0 e0 e0 | e2 e2 e2 … e2 | e3 …
//! slots of rows  0  -  -  -  4  | 5  -  -  - 9 …           a slot per row, those inside a tile empty
//! slots of tiles 0: e0 rows 0–3; 1: e0 row 4; 2: e1, empty; 3: e2 rows 0–3; …
//! ```
//!
//! 1. A lane compares every 32nd offset with the slot and the warp adds up: all loads are under way together, where a binary
//!    search would wait for each. An empty slot costs a block that ends there.
//! 2. The blocks of a slot are neighbours, and so are the slots of an expert: a weight is read from memory once.
//! 3. Rows of x are gathered through the order as they are loaded; no sorted copy of x is made.
//! 4. What the offsets and the order say is bounded by the sizes of the launch: wrong ones give wrong rows, never an access
//!    out of bounds.

use abi::ops::grouped_matmul::{GroupedMatmulDims, SLOTS_ARE_ROWS};
use abi::ops::matmul::MatmulDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread, warp};

use crate::tile::operand::Operand;
use crate::tile::{gemv, simt};

/// The rows of a block.
struct Group {
    expert: u32,
    /// Sorted rows of the expert.
    start: u32,
    rows: u32,
    /// First row of this block's tile among them, a multiple of the tile's rows.
    first: u32,
}

/// The group of this block's slot; none if the slot is empty.
///
/// # Safety
/// - *converged*: all threads of the block.
/// - `offsets` holds `experts + 1` numbers — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn group<const TILE_ROWS: u32>(
    offsets: *const u32,
    dims: &GroupedMatmulDims,
    slot: u32,
) -> Option<Group> {
    let by_row = dims.slots == SLOTS_ARE_ROWS;
    // SAFETY: experts up to and with `experts` — the caller; all lanes take part in the shuffles.
    unsafe {
        let first_slot = |expert: u32| {
            let offset = global::load(offsets.add(expert as usize)).min(dims.rows);
            if by_row { offset } else { offset / TILE_ROWS + expert }
        };
        // How many experts' slots have ended.
        let mut expert = 0;
        let mut next = 1 + thread::lane();
        while next <= dims.experts {
            expert += u32::from(first_slot(next) <= slot);
            next += 32;
        }
        let mut step = 16;
        while step > 0 {
            expert += warp::shuffle_xor(warp::FULL_MASK, expert, step);
            step /= 2;
        }
        if expert >= dims.experts {
            return None;
        }
        let start = global::load(offsets.add(expert as usize)).min(dims.rows);
        let end = global::load(offsets.add(expert as usize + 1)).min(dims.rows);
        let rows = end.saturating_sub(start);
        let within = slot.wrapping_sub(first_slot(expert));
        let first = if by_row { within } else { within.wrapping_mul(TILE_ROWS) };
        (first < rows && first % TILE_ROWS == 0).then_some(Group { expert, start, rows, first })
    }
}

impl Group {
    /// The product of this group, as one of its own.
    #[inline(always)]
    fn dims(&self, dims: &GroupedMatmulDims) -> MatmulDims {
        MatmulDims {
            m: self.rows,
            n: dims.n,
            k: dims.k,
            a_stride: dims.x_stride,
            b_stride: dims.w_stride,
            out_stride: dims.out_stride,
            a_batch_stride: 0,
            b_batch_stride: 0,
            out_batch_stride: 0,
            access: dims.access,
            split_log2: dims.split_log2,
        }
    }
}

/// Where the row of x begins that a sorted row is made of.
///
/// # Safety
/// - `sorted` is below the number of rows; `order`, if there is a fan-out, holds a number for every row of out — checked in
///   `GroupedMatmul::run`.
#[inline(always)]
unsafe fn x_row<T>(x: *const T, order: *const u32, dims: &GroupedMatmulDims, sorted: u32) -> *const T {
    let row = if dims.fan_out == 0 {
        sorted
    } else {
        // SAFETY: the caller's promise.
        let pair = unsafe { global::load(order.add(sorted as usize)) };
        // At least 1 here; `max` tells the compiler, which would otherwise keep a panic path.
        (pair / dims.fan_out.max(1)).min(dims.x_rows - 1)
    };
    x.wrapping_add(row as usize * dims.x_stride as usize)
}

/// One tile of a group's product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn tile<T, const EDGE: u32, const PER: usize>(
    x: *const T,
    w: *const T,
    offsets: *const u32,
    order: *const u32,
    out: *mut T,
    dims: &GroupedMatmulDims,
) where
    T: Operand<Sum = f32> + Element,
{
    // At least 1, or there were no blocks; `max` tells the compiler.
    let col_blocks = dims.col_blocks.max(1);
    let (slot, tile_n) = (thread::block_idx_x() / col_blocks, thread::block_idx_x() % col_blocks);
    // SAFETY: the caller's promise; the slot is the same for all threads, so they leave together. Every element of out
    // belongs to one thread of one block, as every tile has one slot.
    unsafe {
        let Some(group) = group::<EDGE>(offsets, dims, slot) else { return };
        let w = w.add(group.expert as usize * dims.w_expert_stride as usize);
        let out = out.add(group.start as usize * dims.out_stride as usize);
        let (own, tile_m) = (group.dims(dims), group.first / EDGE);
        // Rows past the end are not read; the last stands for them.
        let x_row = |row: u32| x_row(x, order, dims, group.start + row.min(group.rows - 1));
        let sums = simt::multiply::<T, EDGE, PER>(x_row, simt::rows_of_b(w, &own), &own, tile_m, tile_n);
        simt::for_quads::<f32, _, EDGE, PER>(
            &sums,
            &own,
            tile_m,
            tile_n,
            |_| (),
            |row, col, values, ()| {
                simt::store_quad(out, row, col, values, &own);
            },
        );
    }
}

/// Some columns of up to `ROWS` rows of a group's product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn few_rows<
    T,
    const ROWS: u32,
    const COLS: usize,
    const SUMS: usize,
    const UNROLL: usize,
    const R: usize,
>(
    x: *const T,
    w: *const T,
    offsets: *const u32,
    order: *const u32,
    out: *mut T,
    dims: &GroupedMatmulDims,
) where
    T: Operand<Sum = f32> + Element,
{
    // At least 1, or there were no blocks; `max` tells the compiler.
    let col_blocks = dims.col_blocks.max(1);
    let (slot, col_block) = (thread::block_idx_x() / col_blocks, thread::block_idx_x() % col_blocks);
    // SAFETY: as in `tile`.
    unsafe {
        let Some(group) = group::<ROWS>(offsets, dims, slot) else { return };
        let w = w.add(group.expert as usize * dims.w_expert_stride as usize);
        // Rows are counted from the first of all groups here: what ends the group and where this block begins is all that
        // the loop's registers need to hold of it.
        let end = group.start + group.rows;
        let own = MatmulDims { m: end, ..group.dims(dims) };
        let place = (group.start + group.first, col_block);
        let x_row = |sorted| x_row(x, order, dims, sorted);
        let w_row = simt::rows_of_b(w, &own);
        gemv::multiply::<T, R, COLS, SUMS, UNROLL>(x_row, w_row, &own, place, false, |row, col, [sum, _]| {
            let to = out.add(row as usize * dims.out_stride as usize + col as usize);
            global::store(to, T::from_f32(sum));
        });
    }
}

macro_rules! body {
    (Simt, $type:ident, $args:tt, $bm:literal, $bn:literal, $bk:literal) => {
        // SAFETY: blocks of 256 threads, col_blocks of them per slot, shared memory for both buffers — GroupedMatmul::run.
        unsafe { tile::<$type, $bm, { $bm / 16 }> $args }
    };
    (Gemv, $type:ident, $args:tt, $rows:literal, $cols:literal, $unroll:literal) => {
        // SAFETY: blocks of 256 threads, col_blocks of them per slot — GroupedMatmul::run.
        unsafe { few_rows::<$type, $rows, $cols, { $rows * $cols }, $unroll, $rows> $args }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            x: *const $type,
            w: *const $type,
            offsets: *const u32,
            order: *const u32,
            out: *mut $type,
            dims: GroupedMatmulDims,
        ) {
            body!($tile, $type, (x, w, offsets, order, out, &dims), $($value),*)
        }
    )*};
}
abi::grouped_matmul_table!(entries);
