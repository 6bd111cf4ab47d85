//! Grouped matrix product: rows sorted by expert, each expert's rows times its own weight,
//! `out[i] = x[row(i)] · w[expert(i)]ᵀ`.
//!
//! | kernels | for | a block makes |
//! |---|---|---|
//! | `Gemv` | few rows per expert | up to 8 rows of an expert by some columns: [`crate::matmul::few_rows_simt`] |
//! | `Simt` | many | 64 × 64 or 128 × 128 of an expert's product: [`crate::matmul::simt`] |
//! | `Stream` | few, from sm_80 on | up to 16 rows of an expert by some columns: `matmul::few_rows_mma` |
//! | `Mma` | many, from sm_80 on | 64 × 64 or 128 × 128 of an expert's product: `matmul::mma_sync` |
//! | `Wgmma` | many, from sm_90a on | tiles of 128 × 256 in turn: `wgmma` |
//! | fp8 | many, of packed fp8 weights, where rows may be fp8, on sm_90a | tiles of 128 × 128 in turn: `matmul::fp8` |
//! | packed | few, of packed weights; and to unpack them | up to 64 rows of an expert by some columns: `packed` |
//!
//! `Gemv` and `Stream` of 8 rows also make gated linear units: of a weight with rows of the gate above those of up they
//! read one of either in turn, as the products of one weight do ([`Epilogue`]).
//!
//! Those of the tensor cores take types of 16 bits in pieces of 16 bytes; what is not aligned to them is for the
//! others.
//!
//! Which expert and rows a block has it finds itself, from the offsets in device memory: block b has slot
//! `b / col_blocks`, of either kind (`abi::ops::grouped_matmul`). Those of `Wgmma` walk over the tiles that there are.
//!
//! ```text
//! tiles of 4 rows
//! offsets        0              5 5             37
//! sorted rows    e0 e0 e0 e0 e0 | e2 e2 e2 … e2 | e3 …
//! slots of rows  0  -  -  -  4  | 5  -  -  - 9 …           a slot per row, those inside a tile empty
//! slots of tiles 0: e0 rows 0–3; 1: e0 row 4; 2: e1, empty; 3: e2 rows 0–3; …
//! ```
//!
//! 1. A lane compares every 32nd offset with the slot and the warp adds up: all loads are under way together, where a
//!    binary search would wait for each. An empty slot costs a block that ends there.
//! 2. The blocks of a slot are neighbours, and so are the slots of an expert: x and the weights are read from memory
//!    once. With the columns of a row of tiles beside each other an expert's weight, 3 to 13 MB, stays in L2 while its
//!    rows go by, however many they are; with the rows beside each other it would be the rows that have to stay, which
//!    may be all that there are.
//! 3. Rows of x are gathered through the order as they are loaded; no sorted copy of x is made. A thread of an `Mma`
//!    tile copies pieces of the same rows in every step, and keeps where they begin in registers.
//! 4. What the offsets and the order say is bounded by the sizes of the launch: wrong ones give wrong rows, never an
//!    access out of bounds.

mod packed;
#[cfg(not(lacks_wgmma))]
mod wgmma;

use core::ptr::null;

use abi::ops::grouped_matmul::{GroupedMatmulDims, SLOTS_ARE_ROWS};
use abi::ops::matmul::{MatmulDims, MatmulEpilogue};
#[cfg(not(lacks_wgmma))]
use abi::{matmul_fp8::QuantiseDims, weight::WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread, warp};

#[cfg(not(lacks_wgmma))]
use crate::matmul::fp8;
use crate::matmul::operand::Operand;
#[cfg(not(lacks_mma_sync))]
use crate::matmul::{
    epilogue::PLAIN,
    few_rows_mma, mma_sync,
    multiplicand::{Factor, Multiplicand},
    row_scale::RowScale,
};
use crate::matmul::{
    epilogue::{Epilogue, rows_of_b},
    few_rows_simt, simt,
};

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
unsafe fn group(offsets: *const u32, dims: &GroupedMatmulDims, slot: u32, tile_rows: u32) -> Option<Group> {
    let by_row = dims.slots == SLOTS_ARE_ROWS;
    // SAFETY: experts up to and with `experts` — the caller; all lanes take part in the shuffles.
    unsafe {
        let first_slot = |expert: u32| {
            let offset = global::load(offsets.add(expert as usize)).min(dims.rows);
            if by_row { offset } else { offset / tile_rows + expert }
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
        let first = if by_row { within } else { within.wrapping_mul(tile_rows) };
        (first < rows && first % tile_rows == 0).then_some(Group { expert, start, rows, first })
    }
}

/// The product of a group but for the end of its rows, as one of its own.
#[inline(always)]
fn product(dims: &GroupedMatmulDims) -> MatmulDims {
    MatmulDims {
        m: 0,
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

/// The row of x that a sorted row is made of.
///
/// # Safety
/// - `sorted` is below the number of rows; `order`, if there is a fan-out, holds a number for every row of out —
///   checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn x_number(order: *const u32, dims: &GroupedMatmulDims, sorted: u32) -> u32 {
    if dims.fan_out == 0 {
        sorted
    } else {
        // SAFETY: the caller's promise.
        let pair = unsafe { global::load(order.add(sorted as usize)) };
        // At least 1 here; `max` tells the compiler, which would otherwise keep a panic path.
        (pair / dims.fan_out.max(1)).min(dims.x_rows - 1)
    }
}

/// Where it begins.
///
/// # Safety
/// - As [`x_number`].
#[inline(always)]
unsafe fn x_row<T>(x: *const T, order: *const u32, dims: &GroupedMatmulDims, sorted: u32) -> *const T {
    // SAFETY: the caller's promise.
    let row = unsafe { x_number(order, dims, sorted) };
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
        let Some(group) = group(offsets, dims, slot, EDGE) else { return };
        let w = w.add(group.expert as usize * dims.w_expert_stride as usize);
        let out = out.add(group.start as usize * dims.out_stride as usize);
        let own = MatmulDims { m: group.rows, ..product(dims) };
        let tile_m = group.first / EDGE;
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

/// What a block does where rows are counted from the first of all groups: the end of the group and where the block
/// begins are all of the group that a main loop's registers hold.
struct Stretch<T> {
    /// The expert's weight.
    w: *const T,
    /// The group's product: its rows end where the group does.
    own: MatmulDims,
    /// First row.
    row: u32,
    /// Which stretch of columns.
    col_block: u32,
}

/// This block's, in tiles of `tile_rows` rows; none if its slot is empty.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn stretch<T>(
    w: *const T,
    offsets: *const u32,
    dims: &GroupedMatmulDims,
    tile_rows: u32,
) -> Option<Stretch<T>> {
    // At least 1, or there were no blocks; `max` tells the compiler.
    let col_blocks = dims.col_blocks.max(1);
    let (slot, col_block) = (thread::block_idx_x() / col_blocks, thread::block_idx_x() % col_blocks);
    // SAFETY: the caller's promise; the slot is the same for all threads, so they leave together.
    let group = unsafe { group(offsets, dims, slot, tile_rows) }?;
    let own = MatmulDims { m: group.start + group.rows, ..product(dims) };
    let w = w.wrapping_add(group.expert as usize * dims.w_expert_stride as usize);
    Some(Stretch { w, own, row: group.start + group.first, col_block })
}

/// Some columns of up to `ROWS` rows of a group's product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn few_rows<T, const ROWS: usize, const COLS: usize, const SUMS: usize, const UNROLL: usize>(
    x: *const T,
    w: *const T,
    offsets: *const u32,
    order: *const u32,
    out: *mut T,
    dims: &GroupedMatmulDims,
    how: &MatmulEpilogue,
) where
    T: Operand<Sum = f32> + Element,
{
    // SAFETY: as in `tile`. Where the product is gated, `GroupedMatmul::plan` leaves at least two columns to a block.
    unsafe {
        let Some(Stretch { w, own, row, col_block }) = stretch(w, offsets, dims, ROWS as u32) else { return };
        let x_row = |sorted| x_row(x, order, dims, sorted);
        let end = Epilogue::new(null::<T>(), null(), out, &own, how);
        few_rows_simt::multiply::<T, ROWS, COLS, SUMS, UNROLL>(
            x_row,
            gated_rows(w, &own, how),
            &own,
            (row, col_block),
            end.is_gated(),
            false,
            |row, col, sums| end.element(row, col, sums),
        );
    }
}

/// Where the rows of an expert's weight begin, as the product takes them: of a gated one the gate's are above up's.
#[inline(always)]
fn gated_rows<T>(w: *const T, own: &MatmulDims, how: &MatmulEpilogue) -> impl Fn(u32) -> *const T + use<T> {
    rows_of_b(w, w.wrapping_add((own.n / 2) as usize * own.b_stride as usize), own, how)
}

/// Some columns of up to `ROWS` rows of a group's product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims`, x and the weights in pieces — checked in
///   `GroupedMatmul::run`.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn streamed<
    T: Multiplicand,
    const ROWS: usize,
    const LANES: u32,
    const FRAGMENTS: usize,
    const TILES: usize,
    const PIECES: usize,
    const UNROLL: usize,
>(
    x: *const T,
    w: *const T,
    offsets: *const u32,
    order: *const u32,
    out: *mut T,
    dims: &GroupedMatmulDims,
    how: &MatmulEpilogue,
) {
    // Those of 16 rows have no registers for a gate on Ampere.
    let how = if ROWS == 8 { how } else { &PLAIN };
    // SAFETY: as in `tile`.
    unsafe {
        let Some(Stretch { w, own, row, col_block }) = stretch(w, offsets, dims, ROWS as u32) else { return };
        few_rows_mma::multiply::<T, T, ROWS, LANES, FRAGMENTS, TILES, PIECES, UNROLL, false>(
            (|sorted| x_row(x, order, dims, sorted), RowScale::NONE),
            gated_rows(w, &own, how),
            (row, col_block),
            Epilogue::new(null(), null(), out, &own, how),
        );
    }
}

/// One tile of a group's product on the tensor cores.
///
/// # Safety
/// - As [`streamed`].
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn tensor_tile<
    T: Factor<Sum = f32> + Element,
    const BM: u32,
    const BN: u32,
    const FM: usize,
    const FN: usize,
    const COUNT_A: usize,
    const COUNT_B: usize,
    const THREADS: u32,
>(
    x: *const T,
    w: *const T,
    offsets: *const u32,
    order: *const u32,
    out: *mut T,
    dims: &GroupedMatmulDims,
) {
    // SAFETY: as in `tile`.
    unsafe {
        let Some(Stretch { w, own, row, col_block }) = stretch(w, offsets, dims, BM) else { return };
        let col = col_block * BN;
        // Rows past the end are not read; the last stands for them.
        let x_row = |sorted: u32| x_row(x, order, dims, sorted.min(own.m - 1));
        mma_sync::multiply::<T, T, BM, BN, FM, FN, COUNT_A, COUNT_B, THREADS>(
            mma_sync::gathered::<T, COUNT_A, THREADS>(x_row, row),
            mma_sync::strided::<T, THREADS>(simt::rows_of_b(w, &own), (own.b_stride, 0), col),
            (row, col),
            Epilogue::new(null(), null(), out, &own, &PLAIN),
        );
    }
}

macro_rules! body {
    (Simt, $type:ident, $args:tt, $how:expr, $bm:literal, $bn:literal, $bk:literal) => {
        // SAFETY: blocks of 256 threads, col_blocks of them per slot, shared memory for both buffers —
        // GroupedMatmul::run.
        unsafe { tile::<$type, $bm, { $bm / 16 }> $args }
    };
    (Gemv, $type:ident, $args:tt, $how:expr, $rows:literal, $cols:literal, $unroll:literal) => {
        // SAFETY: blocks of 256 threads, col_blocks of them per slot — GroupedMatmul::run.
        unsafe {
            let (x, w, offsets, order, out, dims) = $args;
            few_rows::<$type, $rows, $cols, { $rows * $cols }, $unroll>(x, w, offsets, order, out, dims, $how)
        }
    };
    (Stream, $type:ident, $args:tt, $how:expr, $rows:literal, $cols:literal, $lanes:literal, $unroll:literal) => {
        // SAFETY: as `Gemv`, and `GroupedMatmul::run` takes these kernels where x and the weights are in pieces.
        unsafe {
            let (x, w, offsets, order, out, dims) = $args;
            streamed::<$type, $rows, $lanes, { $rows / 8 }, { $cols * $lanes / 64 }, { $cols * $lanes / 32 }, $unroll>(
                x, w, offsets, order, out, dims, $how,
            )
        }
    };
    (Mma, $type:ident, $args:tt, $how:expr, $bm:literal, $bn:literal, $threads:literal) => {{
        const EDGE: usize = mma_sync::warp_edge($bm, $bn, $threads);
        // SAFETY: blocks of the tile's threads, col_blocks of them per slot, shared memory for its stages, x and the
        // weights in pieces — GroupedMatmul::run.
        unsafe {
            tensor_tile::<
                $type,
                $bm,
                $bn,
                { EDGE / 16 },
                { EDGE / 8 },
                { $bm * 4 / $threads },
                { $bn * 4 / $threads },
                $threads,
            > $args
        }
    }};
}

macro_rules! entry {
    ($entry:ident, $type:ident, $threads:literal, $blocks:literal, $tile:ident, $($value:tt),*) => {
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
        #[allow(non_snake_case, unused_variables, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *const $type,
            w: *const $type,
            offsets: *const u32,
            order: *const u32,
            out: *mut $type,
            dims: GroupedMatmulDims,
            how: MatmulEpilogue,
        ) {
            body!($tile, $type, (x, w, offsets, order, out, &dims), &how, $($value),*)
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {
        $(entry!($entry, $type, 256, 2, $tile, $($value),*);)*
    };
}
abi::grouped_matmul_table!(entries);

#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entries {
    () => {};
    ($entry:ident => $type:ident, $dtype:ident, $floor:ident,
     Stream { rows: $rows:literal, cols: $cols:literal, lanes: $lanes:literal, unroll: $unroll:literal }; $($rest:tt)*) => {
        entry!($entry, $type, 256, 2, Stream, $rows, $cols, $lanes, $unroll);
        mma_entries!($($rest)*);
    };
    ($entry:ident => $type:ident, $dtype:ident, $floor:ident,
     Mma { bm: $bm:literal, bn: $bn:literal, threads: $threads:literal, blocks: $blocks:literal }; $($rest:tt)*) => {
        entry!($entry, $type, $threads, $blocks, Mma, $bm, $bn, $threads);
        mma_entries!($($rest)*);
    };
}
#[cfg(not(lacks_mma_sync))]
abi::grouped_matmul_mma_table!(mma_entries);

#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident,
       Wgmma { bm: 128, bn: $bn:literal, stages: $stages:literal };)*) => {$(
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` makes them.
        #[kernel(max_threads = 384, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            dims: GroupedMatmulDims,
            #[grid_constant] x_map: cuda_std::tma::TensorMap,
            #[grid_constant] w: cuda_std::tma::TensorMap,
            x: *const $type,
            offsets: *const u32,
            order: *const u32,
            out: *mut $type,
        ) {
            let rows = wgmma::Rows { x, map: x_map, offsets, order };
            // SAFETY: threads and shared memory of the tile, the maps, x in pieces — GroupedMatmul::run.
            unsafe {
                wgmma::multiply::<$type, $type, _, $bn, { $bn / 2 }, { $bn / 64 }, $stages>(
                    rows,
                    wgmma::Plain { map: w },
                    out,
                    &dims,
                );
            }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::grouped_matmul_wgmma_table!(wgmma_entries);

#[cfg(not(lacks_wgmma))]
macro_rules! fp8_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident,
       Wgmma { bm: 128, bn: $bn:literal, stages: $stages:literal };)*) => {$(
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` makes them.
        #[kernel(max_threads = 384, min_blocks = 1)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            dims: GroupedMatmulDims,
            #[grid_constant] x_map: cuda_std::tma::TensorMap,
            #[grid_constant] w: cuda_std::tma::TensorMap,
            x: *const cuda_std::cvt::E4m3,
            x_scales: *const f32,
            scales: *const f32,
            offsets: *const u32,
            out: *mut $type,
            weight: WeightDims,
        ) {
            let rows = wgmma::Rows { x, map: x_map, offsets, order: null() };
            let weights = wgmma::Fp8 { map: w, scales, x_scales, weight: &weight, dims: &dims };
            // SAFETY: threads and shared memory of the tile, the maps, x as `quantise` makes it — GroupedMatmul::run.
            unsafe {
                wgmma::multiply::<_, $type, _, $bn, { $bn / 2 }, { $bn / 64 }, $stages>(rows, weights, out, &dims);
            }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::grouped_matmul_fp8_table!(fp8_entries);

#[cfg(not(lacks_wgmma))]
macro_rules! quantise_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident;)*) => {$(
        /// Entry point; see `matmul::fp8`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` makes them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            x: *const $type,
            order: *const u32,
            q: *mut u32,
            scales: *mut f32,
            dims: QuantiseDims,
        ) {
            // SAFETY: whole warps, x in pieces, q and scales of the workspace — GroupedMatmul::run.
            unsafe { fp8::quantise(x, order, q, scales, &dims) }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::grouped_matmul_quantise_table!(quantise_entries);
