//! A tile of a matrix product by ordinary arithmetic: the main loop and the way out.
//!
//! A block of 256 threads makes `EDGE` × `EDGE` elements of `a · bᵀ`; thread (ty, tx) of 16 × 16 makes the 4 × 4 at (4
//! ty, 4 tx) of every 64 × 64. A step takes as much of k as gives each thread one piece of 16 bytes of either operand:
//!
//! ```text
//! a, global                    a, shared, as words, k outermost: row r at chunk r/4 ^ swizzle(piece)
//!          k                            row
//! row 0    | piece 0 | piece 1 |        k 0   | 0 1 2 3 | 4 5 6 7 | … EDGE−1
//! row 1    | piece 0 | piece 1 |        k 1   | …
//! ```
//!
//! ```text
//! load the pieces of step 0
//! for each step: pieces → words in the buffer of this parity; barrier; load the next pieces;
//!                for each word of k: 4 rows and 4 columns per 64 × 64 from shared memory, an outer product of them
//! ```
//!
//! - Two buffers and one barrier per step: who writes a buffer has passed the barrier that follows its last reading.
//! - The next pieces are on their way while this step is computed.
//! - Swizzle: the lanes that store write neighbouring rows of 2 or 4 pieces, which lie whole rows of shared memory
//!   apart and so in the same banks. Moving each piece's chunks by a part of 8 spreads a warp's 32 words over 32 banks,
//!   without the padding that would keep a second block out of 64 KiB.
//! - A sum is one chain of multiply-adds in the order of k: the same for both tile sizes and wherever a row lies.

use abi::ops::matmul::{A_IN_PIECES, B_IN_PIECES, MatmulDims, OUT_IN_PIECES, OUT_IN_QUADS, THREADS};
use cuda_std::cvt::Element;
use cuda_std::{global, shared, thread};

use super::operand::{Operand, Sum, load_piece};

/// Rows of tiles that are walked together, so that blocks that run at the same time share rows of both operands in L2.
const BAND: u32 = 16;

/// Tile row and column of this block, tile columns within bands of tile rows.
#[inline(always)]
pub fn tile_of_block<const BM: u32, const BN: u32>(dims: &MatmulDims) -> (u32, u32) {
    // At least 1 each, or there were no blocks; `max` tells the compiler, which would otherwise keep a panic path.
    let tiles_m = dims.m.div_ceil(BM).max(1);
    let tiles_n = dims.n.div_ceil(BN).max(1);
    let block = thread::block_idx_x();
    let (band, within) = (block / (BAND * tiles_n), block % (BAND * tiles_n));
    let first = band * BAND;
    let height = (tiles_m - first).clamp(1, BAND);
    (first + within % height, within / height)
}

/// Where row `row` of a begins, if the rows lie one after another.
#[inline(always)]
pub fn strided<T>(a: *const T, dims: &MatmulDims) -> impl Fn(u32) -> *const T {
    let stride = dims.a_stride as usize;
    move |row| a.wrapping_add(row as usize * stride)
}

/// Where row `row` of b begins, likewise.
#[inline(always)]
pub fn rows_of_b<T>(b: *const T, dims: &MatmulDims) -> impl Fn(u32) -> *const T {
    let stride = dims.b_stride as usize;
    move |row| b.wrapping_add(row as usize * stride)
}

/// Where this thread's elements are: its row and its column, each in groups of four.
#[inline(always)]
fn position() -> (u32, u32) {
    // A warp covers 4 × 8: eight lanes read one group of rows and eight groups of columns.
    let (warp, lane) = (thread::warp_idx(), thread::lane());
    (warp / 2 * 4 + lane / 8, warp % 2 * 8 + lane % 8)
}

/// Words of a piece to shared memory, each to its own row of words.
///
/// # Safety
/// - *exclusive*: the words belong to this thread until the next barrier.
#[inline(always)]
unsafe fn store_piece<T: Operand, const EDGE: u32>(at: u32, piece: [u32; 4]) {
    let mut i = 0;
    while i < T::WORDS {
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32(at + i as u32 * EDGE * 4, T::word(piece, i)) };
        i += 1;
    }
}

/// This thread's part of the tile (`tile_m`, `tile_n`) of `a · bᵀ`. `PER` is `EDGE / 16`. `a_row` and `b_row` say where
/// a row begins; they are asked for rows past the end too, which are not read.
///
/// # Safety
/// - *converged*: all 256 threads of the block.
/// - Rows of a and b *in-bounds* for `dims`, and aligned as `dims.access` says — checked in `run`.
/// - *exclusive*: the block's `2 · 2 · EDGE · bk` words of dynamic shared memory are used for nothing else.
#[inline(always)]
pub unsafe fn multiply<T: Operand, const EDGE: u32, const PER: usize>(
    a_row: impl Fn(u32) -> *const T,
    b_row: impl Fn(u32) -> *const T,
    dims: &MatmulDims,
    tile_m: u32,
    tile_n: u32,
) -> [[T::Sum; PER]; PER] {
    let pieces = THREADS / EDGE;
    let step_elements = pieces * T::PER_PIECE;
    let swizzle = 8 / pieces;
    let operand_bytes = THREADS * T::WORDS as u32 * 4;
    let base = shared::base();

    let (row, piece) = (thread::thread_idx_x() / pieces, thread::thread_idx_x() % pieces);
    let start = piece * T::PER_PIECE;
    let (row_a, row_b) = (tile_m * EDGE + row, tile_n * EDGE + row);
    let len_a = if row_a < dims.m { dims.k } else { 0 };
    let len_b = if row_b < dims.n { dims.k } else { 0 };
    let mut from_a = a_row(row_a).wrapping_add(start as usize);
    let mut from_b = b_row(row_b).wrapping_add(start as usize);
    let (a_in_pieces, b_in_pieces) = (dims.access & A_IN_PIECES != 0, dims.access & B_IN_PIECES != 0);
    let store_at =
        base + piece * T::WORDS as u32 * EDGE * 4 + ((row / 4) ^ (piece * swizzle)) * 16 + row % 4 * 4;

    let (ty, tx) = position();
    let mut sums = [[T::Sum::ZERO; PER]; PER];
    // SAFETY: pieces are read within the first `len` elements of an existing row — dims. Shared memory: each thread
    // stores the words of its own piece, and reads follow the barrier; the buffer of the other parity is stored to only
    // by threads that have passed the barrier after its last reading.
    unsafe {
        let mut held_a = load_piece(from_a, len_a.saturating_sub(start), a_in_pieces);
        let mut held_b = load_piece(from_b, len_b.saturating_sub(start), b_in_pieces);
        let num_steps = dims.k.div_ceil(step_elements);
        let mut step = 0;
        while step < num_steps {
            let buffer = (step & 1) * 2 * operand_bytes;
            store_piece::<T, EDGE>(store_at + buffer, held_a);
            store_piece::<T, EDGE>(store_at + buffer + operand_bytes, held_b);
            thread::sync_threads();
            step += 1;
            from_a = from_a.wrapping_add(step_elements as usize);
            from_b = from_b.wrapping_add(step_elements as usize);
            let next = step * step_elements + start;
            held_a = load_piece(from_a, len_a.saturating_sub(next), a_in_pieces);
            held_b = load_piece(from_b, len_b.saturating_sub(next), b_in_pieces);

            let (a_at, b_at) = (base + buffer, base + buffer + operand_bytes);
            let mut k = 0;
            while k < pieces * T::WORDS as u32 {
                let moved = k / T::WORDS as u32 * swizzle;
                let (mut x, mut y) = ([[0; 4]; PER], [[0; 4]; PER]);
                let mut group = 0;
                while group < PER / 4 {
                    let offset = k * EDGE * 4 + group as u32 * 256;
                    x[group] = shared::load_u32x4(a_at + ((ty ^ moved) * 16) + offset);
                    y[group] = shared::load_u32x4(b_at + ((tx ^ moved) * 16) + offset);
                    group += 1;
                }
                let mut i = 0;
                while i < PER {
                    let mut j = 0;
                    while j < PER {
                        sums[i][j] = T::multiply_add(x[i / 4][i % 4], y[j / 4][j % 4], sums[i][j]);
                        j += 1;
                    }
                    i += 1;
                }
                k += 1;
            }
        }
    }
    sums
}

/// Calls `quad(row, col, sums, of_columns)` for every four neighbouring columns of this thread that begin inside the
/// matrix, with what `columns(col)` is for these columns of all rows.
#[inline(always)]
pub fn for_quads<S: Sum, C, const EDGE: u32, const PER: usize>(
    sums: &[[S; PER]; PER],
    dims: &MatmulDims,
    tile_m: u32,
    tile_n: u32,
    columns: impl Fn(u32) -> C,
    quad: impl Fn(u32, u32, [S; 4], &C),
) {
    let (ty, tx) = position();
    let mut j = 0;
    while j < PER / 4 {
        let col = tile_n * EDGE + j as u32 * 64 + tx * 4;
        let of_columns = columns(col);
        let mut i = 0;
        while i < PER {
            let row = tile_m * EDGE + (i / 4) as u32 * 64 + ty * 4 + (i % 4) as u32;
            if row < dims.m && col < dims.n {
                let j = 4 * j;
                quad(row, col, [sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]], &of_columns);
            }
            i += 1;
        }
        j += 1;
    }
}

/// The same by a loop: the sums go through shared memory, so that there are few copies of a long `quad`.
///
/// # Safety
/// - *converged*: all 256 threads of the block; its first 16 KiB of dynamic shared memory are used for nothing else any
///   more.
#[inline(always)]
pub unsafe fn loop_over_quads<C, const EDGE: u32, const PER: usize>(
    sums: &[[f32; PER]; PER],
    dims: &MatmulDims,
    tile_m: u32,
    tile_n: u32,
    columns: impl Fn(u32) -> C,
    quad: impl Fn(u32, u32, [f32; 4], &C),
) {
    let (ty, tx) = position();
    let at = |i: u32| shared::base() + (i * THREADS + thread::thread_idx_x()) * 16;
    // SAFETY: behind the barrier everybody has read the operands; from then on each thread has places of its own.
    unsafe {
        thread::sync_threads();
        let mut j = 0;
        while j < PER / 4 {
            let col = tile_n * EDGE + j as u32 * 64 + tx * 4;
            let of_columns = columns(col);
            let mut group = 0;
            while group < PER / 4 {
                let mut i = 0;
                while i < 4 {
                    let (row, j) = (&sums[4 * group + i], 4 * j);
                    shared::store_f32x4(at(i as u32), [row[j], row[j + 1], row[j + 2], row[j + 3]]);
                    i += 1;
                }
                let first = tile_m * EDGE + group as u32 * 64 + ty * 4;
                let rows = dims.m.saturating_sub(first).min(4);
                let mut i = 0;
                while i < rows && col < dims.n {
                    quad(first + i, col, shared::load_f32x4(at(i)), &of_columns);
                    i += 1;
                }
                group += 1;
            }
            j += 1;
        }
    }
}

/// Elements `col..col + 4` of a vector of n, as far as they exist; else 0.
///
/// # Safety
/// - n elements *in-bounds(the buffer of `vector`)*.
#[inline(always)]
pub unsafe fn load_quad<T: Element>(vector: *const T, col: u32, n: u32) -> [f32; 4] {
    let mut values = [0.0; 4];
    let mut i = 0;
    while i < 4 {
        if col + (i as u32) < n {
            // SAFETY: col + i < n — the caller.
            values[i] = unsafe { global::load(vector.add(col as usize + i)) }.to_f32();
        }
        i += 1;
    }
    values
}

/// Rounds and stores the elements `col..col + 4` of a row of out, as far as they exist.
///
/// # Safety
/// - The row *in-bounds(out)* and aligned as `dims.access` says; *exclusive*: these elements are this thread's.
#[inline(always)]
pub unsafe fn store_quad<T: Element>(out: *mut T, row: u32, col: u32, values: [f32; 4], dims: &MatmulDims) {
    // SAFETY: col + i < n in every branch — the caller's row.
    unsafe {
        let to = out.add(row as usize * dims.out_stride as usize + col as usize);
        let packed = T::pack(&[values[0], values[1], values[2], values[3], 0.0, 0.0, 0.0, 0.0]);
        if dims.access & OUT_IN_QUADS != 0 && dims.n - col >= 4 {
            if T::PER_16_BYTES == 4 {
                global::store_x4(to, packed);
            } else {
                global::store(to.cast::<u64>(), u64::from(packed[0]) | u64::from(packed[1]) << 32);
            }
        } else {
            let mut i = 0;
            while i < 4 {
                if (i as u32) < dims.n - col {
                    store_packed(to.add(i), packed, i);
                }
                i += 1;
            }
        }
    }
}

/// Stores one of the elements that were packed.
///
/// # Safety
/// - *in-bounds(the buffer of `to`)*; *exclusive*: the element is this thread's.
#[inline(always)]
pub unsafe fn store_packed<T: Element>(to: *mut T, packed: [u32; 4], element: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if T::PER_16_BYTES == 4 {
            global::store(to.cast::<u32>(), packed[element]);
        } else {
            global::store(to.cast::<u16>(), (packed[element / 2] >> (element % 2 * 16)) as u16);
        }
    }
}

/// Rounds and stores the elements `col..col + 8` of a row of out, as far as they exist.
///
/// # Safety
/// - The row *in-bounds(out)* and aligned as `dims.access` says; *exclusive*: these elements are this thread's.
#[inline(always)]
pub unsafe fn store_octet<O: Element>(out: *mut O, row: u32, col: u32, values: &[f32; 8], dims: &MatmulDims) {
    let [v0, v1, v2, v3, v4, v5, v6, v7] = *values;
    // 16 bytes; of four elements, the second four too.
    let (low, high) = (O::pack(values), O::pack(&[v4, v5, v6, v7, v0, v1, v2, v3]));
    // SAFETY: col + i < n in every branch — the caller's row.
    unsafe {
        let to = out.add(row as usize * dims.out_stride as usize + col as usize);
        if dims.access & OUT_IN_PIECES != 0 && dims.n - col >= 8 {
            global::store_x4(to, low);
            if O::PER_16_BYTES == 4 {
                global::store_x4(to.add(4), high);
            }
        } else {
            let mut i = 0;
            while i < 8 {
                if (i as u32) < dims.n - col {
                    let packed = if i < O::PER_16_BYTES { low } else { high };
                    store_packed(to.add(i), packed, i % O::PER_16_BYTES);
                }
                i += 1;
            }
        }
    }
}
