//! Products with a packed weight: few rows are bound by the weight's bytes, which are read once, in whole lines.
//!
//! ```text
//! out [ROWS, n] = act(scale · a · wᵀ + bias) + residual: a warp makes 16 columns for all rows, or 2 to 8 warps share their k
//!
//! tile (16 rows, 64 of k) ── 16 bytes a lane ──► registers ── lop3, fma ──► 16-bit floats, exact ──► mma (4 steps of 16 of k)
//! scales of the tile      ── a lane's two rows ─────────────────────────────────────────────────► sums · scale, in f32
//! a                       ── 8 bytes a lane and step, from L1 ────────────────────────────────────► mma's second operand
//! ```
//!
//! - `Mma`: the weight's rows are the rows of `mma`, rows of a its columns. The tensor cores multiply codes less their zero points, which are
//!   exact; a group's sum is multiplied by its scale and added up in f32. Where there are minimums another `mma`, of ones, makes the
//!   sum of a over the group, which the minimum multiplies.
//! - `Simt`: the same tiles and lanes by ordinary arithmetic, for f32 and for GPUs without these tensor cores, and what is not aligned.
//! - How k is shared depends on n, k and the card alone: a row's result depends on that row alone, and is the same for every `rows`
//!   of a kind.
//! - `unpack` makes rows of the weight a plain matrix, for products of many rows.

use abi::ops::matmul::{A_IN_PIECES, MatmulDims, MatmulEpilogue, THREADS, WARPS};
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, shared, thread, warp};

use crate::matmul::epilogue::Epilogue;
use crate::matmul::weight::{self, Code, E2m1, E4m3, Int4, Int8, Packed, RawScales};
use crate::matmul::{few_rows_simt, simt};

#[cfg(not(lacks_mma_sync))]
use crate::matmul::weight::Pair;

/// Where the sum of a row and a column of 16 lies among a warp's.
#[inline(always)]
fn sum_address(row: u32, col: u32) -> u32 {
    (row * TILE_ROWS + (col ^ (row / 2 % 2 * 8))) * 4
}

/// This warp's columns and its part of their k.
struct Part {
    part: u32,
    /// Row of tiles, not beyond the last.
    row_block: u32,
}

#[inline(always)]
fn part(dims: &MatmulDims, col_block: u32) -> Part {
    let groups = WARPS >> dims.split_log2;
    let group = thread::warp_idx() >> dims.split_log2;
    let last = dims.n.div_ceil(TILE_ROWS) - 1;
    Part {
        part: thread::warp_idx() & ((1 << dims.split_log2) - 1),
        row_block: (col_block * groups + group).min(last),
    }
}

/// Adds up the parts' sums, which lie in shared memory, and finishes the block's columns.
///
/// # Safety
/// - *converged*: all threads of the block; each warp has stored its sums of `rows` rows.
#[inline(always)]
unsafe fn end<T: Element>(rows: u32, first_row: u32, col_block: u32, end: &Epilogue<'_, T, T>) {
    let dims = end.dims;
    let (groups, parts) = (WARPS >> dims.split_log2, 1 << dims.split_log2);
    let (base, warp_bytes) = (shared::base(), rows * TILE_ROWS * 4);
    // SAFETY: the caller's promise; every element of out is finished by one thread of one block.
    unsafe {
        thread::sync_threads();
        let quads = rows * TILE_ROWS / 4;
        let mut quad = thread::thread_idx_x();
        while quad < groups * quads {
            let (group, row, col) = (quad / quads, quad % quads / 4, quad % 4 * 4);
            let at = base + (group << dims.split_log2) * warp_bytes + sum_address(row, col);
            let mut total = shared::load_f32x4(at);
            let mut part = 1;
            while part < parts {
                let other = shared::load_f32x4(at + part * warp_bytes);
                let mut i = 0;
                while i < 4 {
                    total[i] += other[i];
                    i += 1;
                }
                part += 1;
            }
            let (row, col) = (first_row + row, (col_block * groups + group) * TILE_ROWS + col);
            if row < dims.m && col < dims.n {
                end.quad(row, col, total, &end.bias(col));
            }
            quad += THREADS;
        }
    }
}

/// Four elements of a row from `k` on in f32, those beyond the row 0.
///
/// # Safety
/// - The row *in-bounds* for `dims.k`, and aligned as `dims.access` says.
#[inline(always)]
unsafe fn load_quad<T: Element>(row: *const T, k: u32, dims: &MatmulDims) -> [f32; 4] {
    let mut values = [0.0; 8];
    // SAFETY: the caller's promise.
    unsafe {
        let at = row.add(k as usize);
        if dims.access & A_IN_PIECES != 0 && k + 4 <= dims.k {
            if T::PER_16_BYTES == 4 {
                T::unpack(global::load_nc_x4(at), &mut values);
            } else {
                let pair = global::load(at.cast::<u64>());
                T::unpack([pair as u32, (pair >> 32) as u32, 0, 0], &mut values);
            }
        } else {
            let mut i = 0;
            while i < 4 {
                if k + (i as u32) < dims.k {
                    values[i] = global::load(at.add(i)).to_f32();
                }
                i += 1;
            }
        }
    }
    [values[0], values[1], values[2], values[3]]
}

/// Up to `ROWS` rows by some columns, by ordinary arithmetic.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims` — checked in `Matmul::run`.
#[inline(always)]
unsafe fn multiply<C: Code, T: Element, const ROWS: usize>(
    a: *const T,
    packed: &Packed,
    epilogue: Epilogue<'_, T, T>,
) {
    let dims = epilogue.dims;
    let (first_row, col_block) = few_rows_simt::place_of_block::<ROWS>(dims);
    let own = part(dims, col_block);
    let lane = thread::lane();
    let mut rows = [core::ptr::null(); ROWS];
    let mut i = 0;
    while i < ROWS {
        let row = (first_row + i as u32).min(dims.m - 1);
        rows[i] = a.wrapping_add(row as usize * dims.a_stride as usize);
        i += 1;
    }
    let mut sums = [[0f32; 2]; ROWS];
    // SAFETY: the caller's promise; tiles below their number.
    unsafe {
        let mut tile = own.part;
        while tile < packed.dims.tiles {
            let words = packed.words::<C>(own.row_block, tile);
            let raw = packed.scales::<false>(own.row_block, tile);
            let mut step = 0;
            while step < 4 {
                let scale = packed.scale(&raw, step as u32);
                let values = weight::values::<C>(&words, step, packed.zero::<C>(&raw, step as u32));
                let minimum =
                    if packed.has_minimums() { packed.minimum(&raw, step as u32) } else { [0.0; 2] };
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut i = 0;
                while i < ROWS {
                    let x = load_quad(rows[i], k, dims);
                    let mut row = 0;
                    while row < 2 {
                        let v = &values[row];
                        let sum = v[0] * x[0] + v[1] * x[1] + (v[2] * x[2] + v[3] * x[3]);
                        sums[i][row] += scale[row] * sum;
                        if packed.has_minimums() {
                            sums[i][row] -= minimum[row] * (x[0] + x[1] + (x[2] + x[3]));
                        }
                        row += 1;
                    }
                    i += 1;
                }
                step += 1;
            }
            tile += 1 << dims.split_log2;
        }
        let base = shared::base() + thread::warp_idx() * ROWS as u32 * TILE_ROWS * 4;
        let mut i = 0;
        while i < ROWS {
            let mut row = 0;
            while row < 2 {
                let mut sum = sums[i][row];
                sum += warp::shuffle_xor_f32(warp::FULL_MASK, sum, 1);
                sum += warp::shuffle_xor_f32(warp::FULL_MASK, sum, 2);
                if lane.is_multiple_of(4) {
                    shared::store_f32(base + sum_address(i as u32, lane / 4 + 8 * row as u32), sum);
                }
                row += 1;
            }
            i += 1;
        }
        end(ROWS as u32, first_row, col_block, &epilogue);
    }
}

/// Up to `8 · FRAGMENTS` rows by some columns, on tensor cores.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims`, rows of a aligned to 16 bytes, k a multiple of 4
///   — checked in `Matmul::run`.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn multiply_mma<C: Code, T: Pair, const FRAGMENTS: usize, const UNROLL: usize, const WIDE: bool>(
    a: *const T,
    packed: &Packed,
    epilogue: Epilogue<'_, T, T>,
) {
    let dims = epilogue.dims;
    let rows = 8 * FRAGMENTS as u32;
    let (first_row, col_block) = match FRAGMENTS {
        1 => few_rows_simt::place_of_block::<8>(dims),
        2 => few_rows_simt::place_of_block::<16>(dims),
        4 => few_rows_simt::place_of_block::<32>(dims),
        _ => few_rows_simt::place_of_block::<64>(dims),
    };
    let own = part(dims, col_block);
    let lane = thread::lane();
    let mut from = [core::ptr::null(); FRAGMENTS];
    let mut i = 0;
    while i < FRAGMENTS {
        let row = (first_row + 8 * i as u32 + lane / 4).min(dims.m - 1);
        from[i] = a.wrapping_add(row as usize * dims.a_stride as usize);
        i += 1;
    }
    let mut sums = [[0f32; 4]; FRAGMENTS];
    let tiles = packed.dims.tiles;
    // SAFETY: the caller's promise; tiles below their number.
    unsafe {
        // A stretch of k for each part, in whose order tiles are added however many are in flight.
        let of_part = tiles.div_ceil(1 << dims.split_log2);
        let mut tile = own.part * of_part;
        let end_tile = tiles.min(tile + of_part);
        while tile < end_tile {
            let mut words = [[0; 8]; UNROLL];
            let mut raw = [RawScales::NONE; UNROLL];
            let mut u = 0;
            while u < UNROLL {
                // Beyond the last tile that one once more, of which nothing is added.
                let tile = (tile + u as u32).min(end_tile - 1);
                words[u] = packed.words::<C>(own.row_block, tile);
                raw[u] = packed.scales::<WIDE>(own.row_block, tile);
                u += 1;
            }
            let mut u = 0;
            while u < UNROLL {
                let k = (tile + u as u32) * TILE_K + lane % 4 * 4;
                if tile + (u as u32) < end_tile {
                    add_tile::<C, T, FRAGMENTS, WIDE>(
                        packed, &words[u], &raw[u], &from, k, dims.k, &mut sums,
                    );
                }
                u += 1;
            }
            tile += UNROLL as u32;
        }
        let base = shared::base() + thread::warp_idx() * rows * TILE_ROWS * 4;
        let mut i = 0;
        while i < FRAGMENTS * 4 {
            let (fragment, element) = (i / 4, i % 4);
            let row = (8 * fragment + element % 2) as u32 + lane % 4 * 2;
            let col = lane / 4 + 8 * (element / 2) as u32;
            shared::store_f32(base + sum_address(row, col), sums[fragment][element]);
            i += 1;
        }
        end(rows, first_row, col_block, &epilogue);
    }
}

/// Adds the product of a tile, of which the lane has k's from `k` on in every step of 16.
///
/// # Safety
/// - *converged*: all 32 lanes; rows *in-bounds* for `k_end`, and aligned to 8 bytes.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn add_tile<C: Code, T: Pair, const FRAGMENTS: usize, const WIDE: bool>(
    packed: &Packed,
    words: &[u32; 8],
    raw: &RawScales,
    from: &[*const T; FRAGMENTS],
    k: u32,
    k_end: u32,
    sums: &mut [[f32; 4]; FRAGMENTS],
) {
    let has_minimums = packed.has_minimums();
    let (mut weights, mut scales, mut minimums) = ([[0; 4]; 4], [[0.0; 2]; 4], [[0.0; 2]; 4]);
    let mut step = 0;
    while step < 4 {
        weights[step] = weight::fragment::<C, T>(words, step, packed.zero::<C>(raw, step as u32));
        if !WIDE || step == 3 {
            scales[step] = packed.scale(raw, step as u32);
            if has_minimums {
                minimums[step] = packed.minimum(raw, step as u32);
            }
        }
        step += 1;
    }
    let mut i = 0;
    while i < FRAGMENTS {
        let (mut part, mut total) = ([0f32; 4], [0f32; 4]);
        let mut step = 0;
        while step < 4 {
            let at = k + 16 * step as u32;
            // SAFETY: the caller's promise.
            unsafe {
                let pair = if at < k_end { global::load(from[i].add(at as usize).cast::<u64>()) } else { 0 };
                let x = [pair as u32, (pair >> 32) as u32];
                part = T::multiply_add(weights[step], x, part);
                if has_minimums {
                    total = T::multiply_add([T::ONES; 4], x, total);
                }
            }
            if !WIDE || step == 3 {
                let mut e = 0;
                while e < 4 {
                    sums[i][e] += scales[step][e / 2] * part[e];
                    part[e] = 0.0;
                    if has_minimums {
                        sums[i][e] -= minimums[step][e / 2] * total[e];
                        total[e] = 0.0;
                    }
                    e += 1;
                }
            }
            step += 1;
        }
        i += 1;
    }
}

/// Rows of a weight as a plain matrix, each value rounded once: warps take tiles in turn.
///
/// # Safety
/// - *converged*: all threads of the block; `out` has `dims.n` rows of `dims.k`, the weight as many from `first_block` on — checked in
///   `Matmul::run`.
#[inline(always)]
unsafe fn unpack<C: Code, T: Element>(packed: &Packed, out: *mut T, dims: &MatmulDims) {
    // At least 1, or there were no blocks; `max` tells the compiler.
    let tiles = packed.dims.tiles.max(1);
    let blocks = dims.n.div_ceil(TILE_ROWS);
    let lane = thread::lane();
    let mut index = thread::block_idx_x() * WARPS + thread::warp_idx();
    // SAFETY: the caller's promise; each element is one lane's.
    unsafe {
        grid::begin();
        while index < blocks * tiles {
            let (row_block, tile) = (index / tiles, index % tiles);
            let words = packed.words::<C>(row_block, tile);
            let raw = packed.scales::<false>(row_block, tile);
            let mut step = 0;
            while step < 4 {
                let scale = packed.scale(&raw, step as u32);
                let minimum =
                    if packed.has_minimums() { packed.minimum(&raw, step as u32) } else { [0.0; 2] };
                let values = weight::values::<C>(&words, step, packed.zero::<C>(&raw, step as u32));
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut half = 0;
                while half < 2 {
                    let row = row_block * TILE_ROWS + lane / 4 + 8 * half as u32;
                    if row < dims.n && k < dims.k {
                        let mut quad = [0.0; 4];
                        let mut i = 0;
                        while i < 4 {
                            quad[i] = values[half][i] * scale[half];
                            if packed.has_minimums() {
                                quad[i] -= minimum[half];
                            }
                            i += 1;
                        }
                        // The matrix is n rows of k here.
                        simt::store_quad(out, row, k, quad, &MatmulDims { n: dims.k, ..*dims });
                    }
                    half += 1;
                }
                step += 1;
            }
            index += thread::grid_dim_x() * WARPS;
        }
    }
}

/// An entry point of a product.
macro_rules! entry {
    ($entry:ident, $type:ident, $blocks:literal, |$a:ident, $packed:ident, $end:ident| $body:expr) => {
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = $blocks, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            a: *const $type,
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            bias: *const $type,
            residual: *const $type,
            out: *mut $type,
            dims: MatmulDims,
            how: MatmulEpilogue,
            weight: WeightDims,
        ) {
            let $packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            let $end = Epilogue::new(bias, residual, out, &dims, &how);
            let $a = a;
            grid::begin();
            // SAFETY: 256 threads, a block per rows and columns, the tile's shared memory — Matmul::run.
            unsafe { $body }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident, Simt { rows: $rows:literal };)*) => {
        $(entry!($entry, $type, 2, |a, packed, end| multiply::<$codes, $type, $rows>(a, &packed, end));)*
    };
}
abi::matmul_packed_table!(entries);

/// The sums of 64 rows leave room for one block on a multiprocessor.
#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entry {
    ($entry:ident, $type:ident, $codes:ident, 64, $unroll:literal, $wide:literal) => {
        entry!($entry, $type, 1, |a, packed, end| {
            multiply_mma::<$codes, $type, 8, $unroll, $wide>(a, &packed, end)
        });
    };
    ($entry:ident, $type:ident, $codes:ident, $rows:literal, $unroll:literal, $wide:literal) => {
        entry!($entry, $type, 2, |a, packed, end| {
            multiply_mma::<$codes, $type, { $rows / 8 }, $unroll, $wide>(a, &packed, end)
        });
    };
}

#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       Mma { rows: $rows:tt, unroll: $unroll:literal, wide: $wide:literal };)*) => {
        $(mma_entry!($entry, $type, $codes, $rows, $unroll, $wide);)*
    };
}
#[cfg(not(lacks_mma_sync))]
abi::matmul_packed_mma_table!(mma_entries);

macro_rules! unpack_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            out: *mut $type,
            dims: MatmulDims,
            weight: WeightDims,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            // SAFETY: 256 threads; the weight's rows and out's — Matmul::run.
            unsafe { unpack::<$codes, $type>(&packed, out, &dims) }
        }
    )*};
}
abi::matmul_unpack_table!(unpack_entries);
