//! Products with a packed weight: few rows are bound by the weight's bytes, which are read once, in whole lines.
//!
//! ```text
//! out [ROWS, n] = act(scale · a · wᵀ + bias) + residual: a warp makes 16 columns for all rows, or 2 to 8 warps
//!                 share their k
//!
//! tile (16 rows, 64 of k) ── 16 bytes a lane ──► registers ── lop3, fma ──► 16-bit floats, exact ──► mma, 4 of 16 of k
//! scales of the tile      ── a lane's two rows ─────────────────────────────────────────────────► sums · scale, in f32
//! a, some tiles of k      ── cp.async, in lanes' order ──► shared memory ── 32 bytes a lane ──► mma's second operand
//! ```
//!
//! - `Mma`: the weight's rows are the rows of `mma`, rows of a its columns. The tensor cores multiply codes less their
//!   zero points, which are exact; a group's sum is multiplied by its scale and added up in f32. Where there are
//!   minimums another `mma`, of ones, makes the sum of a over the group, which the minimum multiplies.
//! - `Simt`: the same tiles and lanes by ordinary arithmetic, for f32 and for GPUs without these tensor cores, and what
//!   is not aligned.
//! - How k is shared depends on n, k and the card alone: a row's result depends on that row alone, and is the same for
//!   every `rows` of a kind.
//! - `Wgmma`: the same tiles and lanes by `wgmma`, for dozens of rows: see `packed_wgmma`.
//! - `packed_ahead`: one row, whose weight is read before the kernel ahead has ended.
//! - `unpack` makes rows of the weight a plain matrix, for products of many rows.

use abi::ops::matmul::{A_IN_PIECES, MatmulDims, MatmulEpilogue, THREADS, WARPS};
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
#[cfg(not(lacks_mma_sync))]
use cuda_std::cp_async;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, shared, thread, warp};

use crate::matmul::epilogue::Epilogue;
use crate::matmul::few_rows_simt;
#[cfg(not(lacks_mma_sync))]
use crate::matmul::packed_walk::add_tile;
use crate::matmul::weight::{self, ANY, Code, E2m1, E4m3, E6m9, Int4, Int8, Packed, RawScales};
#[cfg(not(lacks_mma_sync))]
use crate::matmul::weight::{FewWords, MIDDLE, MINIMUMS, OF_32, Row, ZEROS};

#[cfg(not(lacks_wgmma))]
use super::packed_wgmma;

#[cfg(not(lacks_mma_sync))]
use crate::matmul::weight::Pair;

/// Where the sum of a row and a column of 16 lies among a warp's.
#[inline(always)]
pub(super) fn sum_address(row: u32, col: u32) -> u32 {
    (row * TILE_ROWS + (col ^ (row / 2 % 2 * 8))) * 4
}

/// This warp's columns and its part of their k.
pub(super) struct Part {
    pub(super) part: u32,
    /// Row of tiles, not beyond the last.
    pub(super) row_block: u32,
}

#[inline(always)]
pub(super) fn part(dims: &MatmulDims, col_block: u32) -> Part {
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
pub(super) unsafe fn end<T: Element>(rows: u32, first_row: u32, col_block: u32, end: &Epilogue<'_, T, T>) {
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
                end.quad_to_any(row, col, total);
            }
            quad += thread::block_dim_x();
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
    let tiles = packed.row::<C>(own.row_block);
    grid::begin();
    // SAFETY: the caller's promise; tiles below their number.
    unsafe {
        let mut tile = own.part;
        while tile < packed.dims.tiles {
            let words = tiles.words::<C>(tile);
            let raw = tiles.raw_scales::<C, ANY>(tile, packed.has_minimums::<C>());
            let [scales, minimums] = packed.numbers::<C, ANY>(&raw, packed.has_minimums::<C>());
            let zeros = tiles.raw_zeros::<C, ANY>(tile);
            let mut step = 0;
            while step < 4 {
                let (scale, minimum) = (scales[step], minimums[step]);
                let values = weight::values::<C>(&words, step, packed.any_zero::<C>(zeros, step as u32));
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut i = 0;
                while i < ROWS {
                    let x = load_quad(rows[i], k, dims);
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
        end(ROWS as u32, first_row, col_block, &epilogue);
    }
}

/// Where in a tile's rows of a the lane's two pieces of a row lie, or a quad of theirs: pieces of odd rows change
/// places, so that eight lanes read eight different pieces of 16 bytes of a line.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
const fn piece_address(row: u32, quad_of_step: u32, piece: u32) -> u32 {
    row * A_LINE + quad_of_step * 32 + (piece ^ (row % 2)) * 16
}

/// Bytes of a row of a tile of a.
#[cfg(not(lacks_mma_sync))]
const A_LINE: u32 = TILE_K * 2;

/// Starts the copies of `TILES` tiles' columns of the block's rows of a for each part, from each part's tile `from` on.
///
/// # Safety
/// - All 256 threads of the block; rows of a *in-bounds* for `dims.k` and aligned to 8 bytes, k a multiple of 4; the
///   shared memory at `buffer` is *exclusive*.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn stage<T, const ROWS: u32, const TILES: usize>(
    a: *const T,
    rows: u32,
    (of_part, from): (u32, u32),
    buffer: u32,
    dims: &MatmulDims,
) {
    // A thread's quad of k, and its first row.
    let quads = TILES as u32 * 16;
    let (quad, first) = (thread::thread_idx_x() % quads, thread::thread_idx_x() / quads);
    let (tile, step) = (quad / 16, quad % 16 / 4);
    let mut part = 0;
    while part < 1 << dims.split_log2 {
        let k = (part * of_part + from) * TILE_K + quad * 4;
        // Beyond k there are zeros.
        let (at, bytes) = if k < dims.k { (k, 8) } else { (0, 0) };
        let to = buffer
            + (part * TILES as u32 + tile) * ROWS * A_LINE
            + piece_address(first, quad % 4, step / 2)
            + step % 2 * 8;
        let mut row = 0;
        while row < ROWS {
            let source = a.wrapping_add((first + row) as usize * dims.a_stride as usize + at as usize);
            if first + row < rows {
                // SAFETY: the caller's promise. A thread's rows are all odd or all even.
                unsafe { cp_async::ca_8_fill(to + row * A_LINE, source, bytes) };
            }
            row += THREADS / quads;
        }
        part += 1;
    }
    cp_async::commit_group();
}

/// Parts of k are multiples of so many tiles, whatever the kernel, so that its sums are those of the others.
#[cfg(not(lacks_mma_sync))]
const TILES_OF_PART: u32 = 4;

/// Tiles of a part of k: the last parts may have fewer, or none.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
pub(super) fn tiles_of_part(tiles: u32, dims: &MatmulDims) -> u32 {
    tiles.div_ceil(1 << dims.split_log2).next_multiple_of(TILES_OF_PART)
}

/// Codes and scales of `TILES` tiles from `tile` on, those beyond the last that one's: no branch keeps loads from being
/// started together, or makes one wait for others.
///
/// # Safety
/// - *in-bounds*: the tile `last` exists.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn load_tiles<C: Code<Words = FewWords>, const TILES: usize, const GROUP: u32, const ORIGIN: u32>(
    weight: &Row<'_>,
    tile: u32,
    last: u32,
) -> ([FewWords; TILES], [RawScales; TILES]) {
    let (mut words, mut raw) = ([[0; 8]; TILES], [RawScales::NONE; TILES]);
    let mut i = 0;
    while i < TILES {
        let tile = (tile + i as u32).min(last);
        // SAFETY: the caller's promise.
        unsafe {
            words[i] = weight.words::<C>(tile);
            raw[i] = weight.raw_scales::<C, GROUP>(tile, ORIGIN == MINIMUMS);
        }
        i += 1;
    }
    (words, raw)
}

/// Waits for a's tiles from the parts' tile `at` on, and starts the copies of the next ones into the other buffer.
///
/// # Safety
/// - As [`stage`]; *converged*: all threads of the block. Nobody reads the other buffer behind the barrier.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn stage_next<T, const ROWS: u32, const TILES: usize>(
    a: *const T,
    rows: u32,
    (of_part, at): (u32, u32),
    (buffer, buffer_bytes): (u32, u32),
    dims: &MatmulDims,
) {
    cp_async::wait_all();
    // SAFETY: the caller's promise.
    unsafe {
        thread::sync_threads();
        let next = at + TILES as u32;
        if next < of_part {
            let other = shared::base() + (buffer_bytes - buffer);
            stage::<T, ROWS, TILES>(a, rows, (of_part, next), other, dims);
        }
    }
}

/// Up to `ROWS = 8 · FRAGMENTS` rows by some columns, on tensor cores. `TILES` tiles of the weight are multiplied while
/// as many are on their way, and so are the tiles of a for each part of k, in shared memory.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims`, rows of a aligned to 16 bytes, k a
///   multiple of 4 — checked in `Matmul::run`.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
unsafe fn multiply_mma<
    C: Code<Words = FewWords>,
    T: Pair,
    const ROWS: u32,
    const FRAGMENTS: usize,
    const TILES: usize,
    const GROUP: u32,
>(
    a: *const T,
    packed: &Packed,
    epilogue: Epilogue<'_, T, T>,
) {
    let dims = epilogue.dims;
    let (first_row, col_block) = match FRAGMENTS {
        1 => few_rows_simt::place_of_block::<8>(dims),
        2 => few_rows_simt::place_of_block::<16>(dims),
        4 => few_rows_simt::place_of_block::<32>(dims),
        _ => few_rows_simt::place_of_block::<64>(dims),
    };
    let own = part(dims, col_block);
    let lane = thread::lane();
    let a = a.wrapping_add(first_row as usize * dims.a_stride as usize);
    let rows = (dims.m - first_row).min(ROWS);
    // Rows past the end are computed from the last one, and not stored.
    let mut pieces = [[0; 2]; FRAGMENTS];
    let mut i = 0;
    while i < FRAGMENTS {
        let row = (8 * i as u32 + lane / 4).min(rows - 1);
        pieces[i] = [piece_address(row, lane % 4, 0), piece_address(row, lane % 4, 1)];
        i += 1;
    }
    let tiles = packed.dims.tiles;
    let of_part = tiles_of_part(tiles, dims);
    let weight = packed.row::<C>(own.row_block);
    let walk = Walk { a, rows, of_part, first: own.part * of_part, part: own.part, pieces: &pieces };
    let early = tiles.min(walk.first + TILES as u32).saturating_sub(walk.first);
    // SAFETY: the caller's promise; tiles that exist.
    grid::begin_with(|| unsafe { weight.to_l2::<C>(walk.first, early) });
    // SAFETY: the caller's promise; the sums lie where a was.
    unsafe {
        // The same for the whole launch. A loop for each: registers do not suffice for all in one.
        let sums = match packed.origin::<C>() {
            ZEROS => walk.sums::<C, ROWS, TILES, GROUP, ZEROS>((packed, &weight), dims),
            MINIMUMS if GROUP == OF_32 => {
                walk.sums::<C, ROWS, TILES, GROUP, MINIMUMS>((packed, &weight), dims)
            }
            _ => walk.sums::<C, ROWS, TILES, GROUP, MIDDLE>((packed, &weight), dims),
        };
        thread::sync_threads();
        let base = shared::base() + thread::warp_idx() * ROWS * TILE_ROWS * 4;
        let mut i = 0;
        while i < FRAGMENTS * 4 {
            let (fragment, element) = (i / 4, i % 4);
            let row = (8 * fragment + element % 2) as u32 + lane % 4 * 2;
            let col = lane / 4 + 8 * (element / 2) as u32;
            shared::store_f32(base + sum_address(row, col), sums[fragment][element]);
            i += 1;
        }
        end(ROWS, first_row, col_block, &epilogue);
    }
}

/// A warp's way through its part of k, and the block's rows of a on it.
#[cfg(not(lacks_mma_sync))]
struct Walk<'a, T, const FRAGMENTS: usize> {
    /// The block's first row, and how many there are.
    a: *const T,
    rows: u32,
    /// Tiles of a part, the first of the warp's, and which part it is.
    of_part: u32,
    first: u32,
    part: u32,
    /// Where in a tile of a the lane's pieces lie.
    pieces: &'a [[u32; 2]; FRAGMENTS],
}

#[cfg(not(lacks_mma_sync))]
impl<T: Pair, const FRAGMENTS: usize> Walk<'_, T, FRAGMENTS> {
    /// The warp's sums.
    ///
    /// # Safety
    /// - As [`multiply_mma`].
    #[inline(always)]
    unsafe fn sums<
        C: Code<Words = FewWords>,
        const ROWS: u32,
        const TILES: usize,
        const GROUP: u32,
        const ORIGIN: u32,
    >(
        &self,
        (packed, weight): (&Packed, &Row<'_>),
        dims: &MatmulDims,
    ) -> [[f32; 4]; FRAGMENTS] {
        let &Walk { a, rows, of_part, first, part, .. } = self;
        let mut sums = [[0f32; 4]; FRAGMENTS];
        if of_part == 0 {
            return sums;
        }
        let last = packed.dims.tiles - 1;
        let (tile_bytes, buffer_bytes) = (ROWS * A_LINE, (TILES as u32 * ROWS * A_LINE) << dims.split_log2);
        let of_warp = shared::base() + part * TILES as u32 * tile_bytes;
        let step = TILES as u32;
        // Of the part: the tiles before `at` have been multiplied. `buffer`: where a is for the next ones.
        let (mut at, mut buffer) = (0, 0);
        // SAFETY: the caller's promise; tiles below their number; what has been staged is read behind a barrier, and is
        // overwritten behind the next one.
        unsafe {
            stage::<T, ROWS, TILES>(a, rows, (of_part, 0), shared::base(), dims);
            let mut even = load_tiles::<C, TILES, GROUP, ORIGIN>(weight, first, last);
            while at < of_part {
                let odd = load_tiles::<C, TILES, GROUP, ORIGIN>(weight, first + at + step, last);
                stage_next::<T, ROWS, TILES>(a, rows, (of_part, at), (buffer, buffer_bytes), dims);
                self.add::<C, TILES, GROUP, ORIGIN>((packed, weight), &even, at, of_warp + buffer, &mut sums);
                (at, buffer) = (at + step, buffer_bytes - buffer);
                if at >= of_part {
                    break;
                }
                even = load_tiles::<C, TILES, GROUP, ORIGIN>(weight, first + at + step, last);
                stage_next::<T, ROWS, TILES>(a, rows, (of_part, at), (buffer, buffer_bytes), dims);
                self.add::<C, TILES, GROUP, ORIGIN>((packed, weight), &odd, at, of_warp + buffer, &mut sums);
                (at, buffer) = (at + step, buffer_bytes - buffer);
            }
        }
        sums
    }

    /// Adds the products of `TILES` tiles, from the part's tile `at` on, and the rows of a at `of_a`.
    ///
    /// # Safety
    /// - As [`add_tile`].
    #[inline(always)]
    unsafe fn add<C: Code<Words = FewWords>, const TILES: usize, const GROUP: u32, const ORIGIN: u32>(
        &self,
        (packed, weight): (&Packed, &Row<'_>),
        (words, raw): &([FewWords; TILES], [RawScales; TILES]),
        at: u32,
        of_a: u32,
        sums: &mut [[f32; 4]; FRAGMENTS],
    ) {
        let mut i = 0;
        while i < TILES {
            let tile = self.first + at + i as u32;
            let raw = raw[i].of_tile(tile < packed.dims.tiles);
            let of_tile = of_a + (i * FRAGMENTS) as u32 * 8 * A_LINE;
            // SAFETY: the caller's promise; a tile that exists. Registers do not suffice for the zero points of tiles
            // on their way.
            unsafe {
                let zeros = if ORIGIN == ZEROS {
                    weight.raw_zeros::<C, GROUP>(tile.min(packed.dims.tiles - 1))
                } else {
                    [0; 2]
                };
                let steps = |fragment: usize| {
                    let [first, second] = self.pieces[fragment];
                    let [a, b, c, d] = shared::load_u32x4(of_tile + first);
                    let [e, f, g, h] = shared::load_u32x4(of_tile + second);
                    [[a, b], [c, d], [e, f], [g, h]]
                };
                add_tile::<C, T, FRAGMENTS, GROUP, ORIGIN>(packed, (&words[i], &raw, zeros), steps, sums);
            }
            i += 1;
        }
    }
}

/// An entry point of a product.
macro_rules! entry {
    ($entry:ident, $type:ident, $threads:literal, $blocks:literal, |$a:ident, $packed:ident, $end:ident| $body:expr) => {
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = $blocks, waits)]
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
            // SAFETY: the tile's threads and shared memory, a block per rows and columns — Matmul::run.
            unsafe { $body }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident, Simt { rows: $rows:literal };)*) => {
        $(entry!($entry, $type, 256, 1, |a, packed, end| multiply::<$codes, $type, $rows>(a, &packed, end));)*
    };
}
abi::matmul_packed_table!(entries);

/// The sums of 64 rows leave room for one block on a multiprocessor.
#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entry {
    ($entry:ident, $type:ident, $codes:ident, 64, $tiles:literal, $group:literal) => {
        entry!($entry, $type, 256, 1, |a, packed, end| {
            multiply_mma::<$codes, $type, 64, 8, $tiles, $group>(a, &packed, end)
        });
    };
    ($entry:ident, $type:ident, $codes:ident, $rows:literal, $tiles:literal, $group:literal) => {
        entry!($entry, $type, 256, 2, |a, packed, end| {
            multiply_mma::<$codes, $type, $rows, { $rows / 8 }, $tiles, $group>(a, &packed, end)
        });
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
abi::matmul_packed_mma_table!(mma_entries);

/// The totals of 64 rows leave room for one block on a multiprocessor.
#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident, Wgmma { rows: $rows:literal };)*) => {
        $(entry!($entry, $type, 384, 1, |a, packed, end| {
            packed_wgmma::multiply::<$codes, $type, $rows, { $rows / 2 }, { $rows / 4 }>(a, &packed, end)
        });)*
    };
}
#[cfg(not(lacks_wgmma))]
abi::matmul_packed_wgmma_table!(wgmma_entries);
