//! Grouped products with packed weights: the loops of `ops::matmul`'s packed products, over an expert's rows.
//!
//! A block has a slot of rows and a stretch of columns, as in the other grouped kernels, and so reads the tiles of
//! experts that have rows and of no others. `unpack` makes the experts of a stretch that have rows plain matrices, for
//! products of many rows.

use abi::ops::grouped_matmul::{GroupedMatmulDims, UnpackDims};
use abi::ops::matmul::{A_IN_PIECES, MatmulDims, OUT_IN_QUADS, THREADS, WARPS};
#[cfg(not(lacks_mma_sync))]
use abi::weight::STEP_K;
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
#[cfg(not(lacks_mma_sync))]
use cuda_std::math;
use cuda_std::{global, kernel, shared, thread, warp};

use super::{Group, group, product, x_row};
use crate::matmul::simt;
use crate::matmul::weight::{self, ANY, Code, E2m1, E4m3, E6m9, Experts, Int4, Int8, Packed};

#[cfg(not(lacks_mma_sync))]
use crate::matmul::weight::{FewWords, MIDDLE, MINIMUMS, OF_32, Pair, RawScales, Row, ZEROS};

/// Where rows of x begin, and which row of it a sorted row is made of.
#[derive(Clone, Copy)]
struct Rows<T> {
    x: *const T,
    offsets: *const u32,
    order: *const u32,
}

/// What a warp makes: 16 columns of some rows of a group, or its part of their k.
struct Own {
    packed: Packed,
    /// The group's product: its rows end where the group does.
    dims: MatmulDims,
    first_row: u32,
    col_block: u32,
    /// Row of tiles, not beyond the last.
    row_block: u32,
    part: u32,
}

/// This warp's; none if the block's slot is empty.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn own(
    experts: &Experts,
    offsets: *const u32,
    dims: &GroupedMatmulDims,
    tile_rows: u32,
) -> Option<Own> {
    // At least 1, or there were no blocks; `max` tells the compiler.
    let col_blocks = dims.col_blocks.max(1);
    let (slot, col_block) = (thread::block_idx_x() / col_blocks, thread::block_idx_x() % col_blocks);
    // SAFETY: the caller's promise; the slot is the same for all threads, so they leave together, and its expert is one
    // of them.
    unsafe {
        let Group { expert, start, rows, first } = group(offsets, dims, slot, tile_rows)?;
        let groups = WARPS >> dims.split_log2;
        let last = dims.n.div_ceil(TILE_ROWS) - 1;
        Some(Own {
            packed: experts.of(expert),
            dims: MatmulDims { m: start + rows, ..product(dims) },
            first_row: start + first,
            col_block,
            row_block: (col_block * groups + (thread::warp_idx() >> dims.split_log2)).min(last),
            part: thread::warp_idx() & ((1 << dims.split_log2) - 1),
        })
    }
}

/// Where the sum of a row and a column of 16 lies among a warp's.
#[inline(always)]
fn sum_address(row: u32, col: u32) -> u32 {
    (row * TILE_ROWS + (col ^ (row / 2 % 2 * 8))) * 4
}

/// Adds up the parts' sums, which lie in shared memory, and stores the block's columns.
///
/// # Safety
/// - *converged*: all threads of the block; each warp has stored its sums of `rows` rows.
#[inline(always)]
unsafe fn end<T: Element>(rows: u32, own: &Own, out: *mut T) {
    let dims = &own.dims;
    let (groups, parts) = (WARPS >> dims.split_log2, 1 << dims.split_log2);
    let (base, warp_bytes) = (shared::base(), rows * TILE_ROWS * 4);
    // SAFETY: the caller's promise; every element of out is stored by one thread of one block, as every tile has one
    // slot.
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
            let (row, col) = (own.first_row + row, (own.col_block * groups + group) * TILE_ROWS + col);
            if row < dims.m && col < dims.n {
                simt::store_quad(out, row, col, total, dims);
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
    // SAFETY: the caller's promise.
    unsafe {
        if dims.access & A_IN_PIECES == 0 || k + 4 > dims.k {
            return simt::load_quad(row, k, dims.k);
        }
        let mut values = [0.0; 8];
        let at = row.add(k as usize);
        if T::PER_16_BYTES == 4 {
            T::unpack(global::load_nc_x4(at), &mut values);
        } else {
            let pair = global::load(at.cast::<u64>());
            T::unpack([pair as u32, (pair >> 32) as u32, 0, 0], &mut values);
        }
        [values[0], values[1], values[2], values[3]]
    }
}

/// Up to `ROWS` rows of a group by some columns, by ordinary arithmetic.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims` — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn multiply<C: Code, T: Element, const ROWS: usize>(
    from: &Rows<T>,
    experts: &Experts,
    out: *mut T,
    dims: &GroupedMatmulDims,
) {
    let lane = thread::lane();
    // SAFETY: the caller's promise; tiles below their number, rows of the group.
    unsafe {
        let Some(own) = own(experts, from.offsets, dims, ROWS as u32) else { return };
        let packed = &own.packed;
        let mut rows = [core::ptr::null(); ROWS];
        let mut i = 0;
        while i < ROWS {
            rows[i] = x_row(from.x, from.order, dims, (own.first_row + i as u32).min(own.dims.m - 1));
            i += 1;
        }
        let mut sums = [[0f32; 2]; ROWS];
        let weights = packed.row::<C>(own.row_block);
        let mut tile = own.part;
        while tile < packed.dims.tiles {
            let words = weights.words::<C>(tile);
            let raw = weights.raw_scales::<C, ANY>(tile, packed.has_minimums::<C>());
            let [scales, minimums] = packed.numbers::<C, ANY>(&raw, packed.has_minimums::<C>());
            let zeros = weights.raw_zeros::<C, ANY>(tile);
            let mut step = 0;
            while step < 4 {
                let (scale, minimum) = (scales[step], minimums[step]);
                let values = weight::values::<C>(&words, step, packed.any_zero::<C>(zeros, step as u32));
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut i = 0;
                while i < ROWS {
                    let x = load_quad(rows[i], k, &own.dims);
                    let mut row = 0;
                    while row < 2 {
                        let v = &values[row];
                        let sum = v[0] * x[0] + v[1] * x[1] + (v[2] * x[2] + v[3] * x[3]);
                        sums[i][row] += scale[row] * sum;
                        if packed.has_minimums::<C>() {
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
        end(ROWS as u32, &own, out);
    }
}

/// Up to `8 · FRAGMENTS` rows of a group by some columns, on tensor cores.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims`, rows of x aligned to 16 bytes, k a
///   multiple of 4 — checked in `GroupedMatmul::run`.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn multiply_mma<
    C: Code<Words = FewWords>,
    T: Pair,
    const FRAGMENTS: usize,
    const TILES: usize,
    const GROUP: u32,
>(
    from: &Rows<T>,
    experts: &Experts,
    out: *mut T,
    dims: &GroupedMatmulDims,
) {
    let rows = 8 * FRAGMENTS as u32;
    let lane = thread::lane();
    // SAFETY: the caller's promise; tiles below their number, rows of the group.
    unsafe {
        let Some(own) = own(experts, from.offsets, dims, rows) else { return };
        let packed = &own.packed;
        let mut x_rows = [core::ptr::null(); FRAGMENTS];
        let mut i = 0;
        while i < FRAGMENTS {
            let row = (own.first_row + 8 * i as u32 + lane / 4).min(own.dims.m - 1);
            x_rows[i] = x_row(from.x, from.order, dims, row);
            i += 1;
        }
        let weights = packed.row::<C>(own.row_block);
        // The same for the whole launch. A loop for each: registers do not suffice for all in one.
        let sums = match packed.origin::<C>() {
            ZEROS => sums_of::<C, T, FRAGMENTS, TILES, GROUP, ZEROS>(&own, &weights, &x_rows),
            MINIMUMS if GROUP == OF_32 => {
                sums_of::<C, T, FRAGMENTS, TILES, GROUP, MINIMUMS>(&own, &weights, &x_rows)
            }
            _ => sums_of::<C, T, FRAGMENTS, TILES, GROUP, MIDDLE>(&own, &weights, &x_rows),
        };
        let base = shared::base() + thread::warp_idx() * rows * TILE_ROWS * 4;
        let mut i = 0;
        while i < FRAGMENTS * 4 {
            let (fragment, element) = (i / 4, i % 4);
            let row = (8 * fragment + element % 2) as u32 + lane % 4 * 2;
            let col = lane / 4 + 8 * (element / 2) as u32;
            shared::store_f32(base + sum_address(row, col), sums[fragment][element]);
            i += 1;
        }
        end(rows, &own, out);
    }
}

/// The warp's sums.
///
/// # Safety
/// - As [`multiply_mma`].
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn sums_of<
    C: Code<Words = FewWords>,
    T: Pair,
    const FRAGMENTS: usize,
    const TILES: usize,
    const GROUP: u32,
    const ORIGIN: u32,
>(
    own: &Own,
    weights: &Row<'_>,
    x_rows: &[*const T; FRAGMENTS],
) -> [[f32; 4]; FRAGMENTS] {
    let packed = &own.packed;
    let lane = thread::lane();
    let mut sums = [[0f32; 4]; FRAGMENTS];
    // A stretch of k for each part, in whose order tiles are added however many are in flight.
    let of_part = packed.dims.tiles.div_ceil(1 << own.dims.split_log2);
    let mut tile = own.part * of_part;
    let end_tile = packed.dims.tiles.min(tile + of_part);
    // SAFETY: the caller's promise; tiles below their number.
    unsafe {
        while tile < end_tile {
            let mut words = [[0; 8]; TILES];
            let mut raw = [RawScales::NONE; TILES];
            let mut u = 0;
            while u < TILES {
                // Beyond the last tile that one once more, of which nothing is added.
                let tile = (tile + u as u32).min(end_tile - 1);
                words[u] = weights.words::<C>(tile);
                raw[u] = weights.raw_scales::<C, GROUP>(tile, ORIGIN == MINIMUMS);
                u += 1;
            }
            let mut u = 0;
            while u < TILES {
                let tile = tile + u as u32;
                if tile < end_tile {
                    let zeros = if ORIGIN == ZEROS { weights.raw_zeros::<C, GROUP>(tile) } else { [0; 2] };
                    let k = tile * TILE_K + lane % 4 * 4;
                    add_tile::<C, T, FRAGMENTS, GROUP, ORIGIN>(
                        packed,
                        (&words[u], &raw[u], zeros),
                        x_rows,
                        (k, own.dims.k),
                        &mut sums,
                    );
                }
                u += 1;
            }
            tile += TILES as u32;
        }
    }
    sums
}

/// Adds the product of a tile, of which the lane has k's from `k` on in every step of 16.
///
/// # Safety
/// - *converged*: all 32 lanes; rows *in-bounds* for `k_end`, and aligned to 8 bytes.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn add_tile<
    C: Code<Words = FewWords>,
    T: Pair,
    const FRAGMENTS: usize,
    const GROUP: u32,
    const ORIGIN: u32,
>(
    packed: &Packed,
    (words, raw, zeros): (&FewWords, &RawScales, [u32; 2]),
    x_rows: &[*const T; FRAGMENTS],
    (k, k_end): (u32, u32),
    sums: &mut [[f32; 4]; FRAGMENTS],
) {
    let has_minimums = ORIGIN == MINIMUMS;
    let [scales, minimums] = packed.numbers::<C, GROUP>(raw, has_minimums);
    let mut weights = [[0; 4]; 4];
    let mut step = 0;
    while step < 4 {
        let zero = packed.zero::<C, GROUP, ORIGIN>(zeros, step as u32);
        weights[step] = weight::fragment::<C, T>(words, step, zero);
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
                let pair =
                    if at < k_end { global::load(x_rows[i].add(at as usize).cast::<u64>()) } else { 0 };
                let x = [pair as u32, (pair >> 32) as u32];
                part = T::multiply_add(weights[step], x, part);
                if has_minimums {
                    total = T::multiply_add([T::ONES; 4], x, total);
                }
            }
            // At the end of a group.
            if (step as u32 + 1).is_multiple_of(GROUP / STEP_K) {
                let mut e = 0;
                while e < 4 {
                    sums[i][e] = math::fma(scales[step][e / 2], part[e], sums[i][e]);
                    part[e] = 0.0;
                    if has_minimums {
                        sums[i][e] = math::fma(-minimums[step][e / 2], total[e], sums[i][e]);
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

/// The weights of the experts that have rows as plain matrices, each value rounded once: `block_idx_y` is the expert,
/// whose tiles warps take in turn.
///
/// # Safety
/// - *converged*: all threads of the block; `out` has `dims.experts` matrices of `dims.n` rows of `dims.k`, one for
///   each y of the grid; `offsets` has a number for each expert and one more — checked in `GroupedMatmul::run`.
#[inline(always)]
unsafe fn unpack<C: Code, T: Element>(
    experts: &Experts,
    offsets: *const u32,
    out: *mut T,
    dims: &UnpackDims,
) {
    let own = thread::block_idx_y();
    let expert = dims.first + own;
    let lane = thread::lane();
    let row_blocks = dims.n.div_ceil(TILE_ROWS);
    // SAFETY: the caller's promise; each element is one lane's. All threads of a block leave together.
    unsafe {
        let start = global::load(offsets.add(expert as usize));
        if global::load(offsets.add(expert as usize + 1)) <= start {
            return;
        }
        let packed = experts.of(expert);
        let out = out.add(own as usize * dims.n as usize * dims.k as usize);
        // A matrix of n rows of k.
        let shape = MatmulDims {
            m: dims.n,
            n: dims.k,
            k: dims.k,
            a_stride: 0,
            b_stride: 0,
            out_stride: dims.k,
            a_batch_stride: 0,
            b_batch_stride: 0,
            out_batch_stride: 0,
            // Out is memory of the plan's own, whose rows begin at quads if k is a multiple of 4.
            access: if dims.k.is_multiple_of(4) { OUT_IN_QUADS } else { 0 },
            split_log2: 0,
        };
        // `max` tells the compiler; of none there is nothing to do.
        let tiles = packed.dims.tiles.max(1);
        let mut index = thread::block_idx_x() * WARPS + thread::warp_idx();
        while index < row_blocks * packed.dims.tiles {
            let (row_block, tile) = (index / tiles, index % tiles);
            let row = packed.row::<C>(row_block);
            let words = row.words::<C>(tile);
            let raw = row.raw_scales::<C, ANY>(tile, packed.has_minimums::<C>());
            let [scales, minimums] = packed.numbers::<C, ANY>(&raw, packed.has_minimums::<C>());
            let zeros = row.raw_zeros::<C, ANY>(tile);
            let mut step = 0;
            while step < 4 {
                let (scale, minimum) = (scales[step], minimums[step]);
                let values = weight::values::<C>(&words, step, packed.any_zero::<C>(zeros, step as u32));
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut half = 0;
                while half < 2 {
                    let row = row_block * TILE_ROWS + lane / 4 + 8 * half as u32;
                    if row < dims.n && k < dims.k {
                        let mut quad = [0.0; 4];
                        let mut i = 0;
                        while i < 4 {
                            quad[i] = values[half][i] * scale[half];
                            if packed.has_minimums::<C>() {
                                quad[i] -= minimum[half];
                            }
                            i += 1;
                        }
                        simt::store_quad(out, row, k, quad, &shape);
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
    ($entry:ident, $type:ident, $blocks:literal, $body:expr) => {
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = $blocks)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *const $type,
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            globals: *const f32,
            offsets: *const u32,
            order: *const u32,
            out: *mut $type,
            dims: GroupedMatmulDims,
            weight: WeightDims,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            // SAFETY: 256 threads, a block per slot and columns, the tile's shared memory — GroupedMatmul::run.
            unsafe { $body(&Rows { x, offsets, order }, &Experts { packed, globals }, out, &dims) }
        }
    };
}

// fp8 is decoded by ordinary arithmetic, which takes more registers than two blocks leave a thread.
macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident, Simt { rows: $rows:literal };)*) => {
        $(entry!($entry, $type, 1, multiply::<$codes, $type, $rows>);)*
    };
}
abi::grouped_matmul_packed_table!(entries);

/// The sums of 64 rows leave room for one block on a multiprocessor.
#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entry {
    ($entry:ident, $type:ident, $codes:ident, 64, $tiles:literal, $group:literal) => {
        entry!($entry, $type, 1, multiply_mma::<$codes, $type, 8, $tiles, $group>);
    };
    ($entry:ident, $type:ident, $codes:ident, $rows:literal, $tiles:literal, $group:literal) => {
        entry!($entry, $type, 2, multiply_mma::<$codes, $type, { $rows / 8 }, $tiles, $group>);
    };
}

#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       Mma { rows: $rows:tt, tiles: $tiles:literal, group: $group:literal };)*) => {
        $(mma_entry!($entry, $type, $codes, $rows, $tiles, $group);)*
    };
}
#[cfg(not(lacks_mma_sync))]
abi::grouped_matmul_packed_mma_table!(mma_entries);

macro_rules! unpack_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::grouped_matmul`.
        ///
        /// # Safety
        /// - Arguments as `GroupedMatmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            globals: *const f32,
            offsets: *const u32,
            out: *mut $type,
            dims: UnpackDims,
            weight: WeightDims,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            // SAFETY: 256 threads; a y for each expert; the weights' rows and out's — GroupedMatmul::run.
            unsafe { unpack::<$codes, $type>(&Experts { packed, globals }, offsets, out, &dims) }
        }
    )*};
}
abi::grouped_matmul_unpack_table!(unpack_entries);
