//! Matrix products of few rows, bound by reading b.
//!
//! A warp makes `ROWS` rows of `COLS` columns of `a · bᵀ`; where there are few columns, 2, 4 or 8 warps of a block
//! share the k of theirs. Lane l of part p takes the pieces `32 p + l`, and so on in steps of 32 times the parts:
//!
//! ```text
//! row of b | piece 0 | … | piece 31 | piece 32 | … | piece 63 | piece 64 | …     2 parts
//! lane          0    part 0    31         0   part 1    31         0  part 0
//! ```
//!
//! - `COLS · UNROLL` = 4 loads of b are issued before the first is used, or for one row 5 where that divides its pieces
//!   and 4 does not; b streams, a comes from L1.
//! - The columns of a warp share the pieces of a, which otherwise saturate L1 from 8 rows on.
//! - The lanes' sums are added by halving: with xor 16 a lane gives half of its sums away and gets the other half's
//!   partner, and so on: 31 shuffles for 32 sums instead of 160, and the same tree of additions for any number of sums.
//! - A round with fewer loads costs as much as a whole one, so rounds are alike.
//! - The first bytes of b are on their way before the kernel ahead has ended: [`early`](super::early).
//! - The order of a sum is that of its lane's pieces, then that tree, then the parts in order: it depends on k and the
//!   split, and not on `ROWS`, `COLS`, `UNROLL` or alignment.

use abi::ops::matmul::{A_IN_PIECES, B_IN_PIECES, MatmulDims, WARPS};
use cuda_std::{global, shared, thread, warp};

use super::operand::{Operand, Sum};

/// Bytes of each row of b that a block brings to L2 at first: see [`early`](super::early).
pub const EARLY_BYTES: u32 = 1024;

/// Adds the products of `UNROLL` pieces of each row, `stride` pieces apart. `GUARDED`: pieces from `num_pieces` on are
/// zero and not read.
///
/// # Safety
/// - The pieces *in-bounds* and *aligned(16)*.
#[inline(always)]
unsafe fn add_pieces<
    T: Operand,
    const ROWS: usize,
    const COLS: usize,
    const SUMS: usize,
    const UNROLL: usize,
    const GUARDED: bool,
>(
    a: &[*const T; ROWS],
    b: &[*const T; COLS],
    piece: u32,
    stride: u32,
    num_pieces: u32,
    sums: &mut [T::Sum; SUMS],
) {
    let mut x = [[[0; 4]; ROWS]; UNROLL];
    let mut y = [[[0; 4]; COLS]; UNROLL];
    let offset = |u: usize| (piece + u as u32 * stride) as usize * T::PER_PIECE as usize;
    let inside = |u: usize| !GUARDED || piece + (u as u32) * stride < num_pieces;
    // SAFETY: pieces below num_pieces lie in their rows — the caller.
    unsafe {
        let mut u = 0;
        while u < UNROLL {
            if inside(u) {
                let mut j = 0;
                while j < COLS {
                    y[u][j] = global::load_stream_x4(b[j].add(offset(u)));
                    j += 1;
                }
            }
            u += 1;
        }
        let mut u = 0;
        while u < UNROLL {
            if inside(u) {
                let mut i = 0;
                while i < ROWS {
                    x[u][i] = global::load_nc_x4(a[i].add(offset(u)));
                    i += 1;
                }
            }
            u += 1;
        }
    }
    let mut u = 0;
    while u < UNROLL {
        multiply_pieces::<T, ROWS, COLS, SUMS>(&x[u], &y[u], sums);
        u += 1;
    }
}

/// Adds the products of one piece of each row.
#[inline(always)]
pub fn multiply_pieces<T: Operand, const ROWS: usize, const COLS: usize, const SUMS: usize>(
    x: &[[u32; 4]; ROWS],
    y: &[[u32; 4]; COLS],
    sums: &mut [T::Sum; SUMS],
) {
    let mut w = 0;
    while w < T::WORDS {
        let (mut x_words, mut y_words) = ([0; ROWS], [0; COLS]);
        let mut i = 0;
        while i < ROWS {
            x_words[i] = T::word(x[i], w);
            i += 1;
        }
        let mut j = 0;
        while j < COLS {
            y_words[j] = T::word(y[j], w);
            j += 1;
        }
        multiply_words::<T, ROWS, COLS, SUMS>(&x_words, &y_words, sums);
        w += 1;
    }
}

/// Adds the product of one word of each row of a with one of each row of b.
#[inline(always)]
fn multiply_words<T: Operand, const ROWS: usize, const COLS: usize, const SUMS: usize>(
    x: &[u32; ROWS],
    y: &[u32; COLS],
    sums: &mut [T::Sum; SUMS],
) {
    let mut i = 0;
    while i < ROWS {
        let mut j = 0;
        while j < COLS {
            sums[i * COLS + j] = T::multiply_add(x[i], y[j], sums[i * COLS + j]);
            j += 1;
        }
        i += 1;
    }
}

/// Adds the products of one element of each row.
///
/// # Safety
/// - The elements *in-bounds*.
#[inline(always)]
unsafe fn add_element<T: Operand, const ROWS: usize, const COLS: usize, const SUMS: usize>(
    a: &[*const T; ROWS],
    b: &[*const T; COLS],
    element: usize,
    sums: &mut [T::Sum; SUMS],
) {
    let (mut x, mut y) = ([0; ROWS], [0; COLS]);
    // SAFETY: the caller's promise.
    unsafe {
        let mut i = 0;
        while i < ROWS {
            x[i] = T::load_alone(a[i].add(element));
            i += 1;
        }
        let mut j = 0;
        while j < COLS {
            y[j] = T::load_alone(b[j].add(element));
            j += 1;
        }
    }
    multiply_words::<T, ROWS, COLS, SUMS>(&x, &y, sums);
}

/// Sums over the lanes of the warp: lane l gets that of `sums[l · SUMS / 32]`.
///
/// # Safety
/// - *converged*: all 32 lanes.
#[inline(always)]
pub unsafe fn sum_over_lanes<S: Sum, const SUMS: usize>(mut sums: [S; SUMS]) -> S {
    let lane = thread::lane();
    let (mut width, mut step) = (SUMS, 16);
    // SAFETY: all lanes take part — the caller.
    unsafe {
        while width > 1 {
            width /= 2;
            let upper = lane & step != 0;
            let mut i = 0;
            while i < width {
                let (low, high) = (sums[i], sums[width + i]);
                let (kept, given) = if upper { (high, low) } else { (low, high) };
                sums[i] = kept.plus(S::from_word(warp::shuffle_xor(warp::FULL_MASK, given.to_word(), step)));
                i += 1;
            }
            step /= 2;
        }
        while step > 0 {
            let other = warp::shuffle_xor(warp::FULL_MASK, sums[0].to_word(), step);
            sums[0] = sums[0].plus(S::from_word(other));
            step /= 2;
        }
    }
    sums[0]
}

/// First row and stretch of columns of this block. Blocks of the same columns are neighbours, so that b is read from
/// memory once.
#[inline(always)]
pub fn place_of_block<const ROWS: usize>(dims: &MatmulDims) -> (u32, u32) {
    let row_blocks = dims.m.div_ceil(ROWS as u32).max(1);
    (thread::block_idx_x() % row_blocks * ROWS as u32, thread::block_idx_x() / row_blocks)
}

/// Calls `finish(row, col, [sum, next])` for every element of `a · bᵀ` that is this block's: of the rows from
/// `first_row` and the stretch `col_block` of columns. `SUMS` is `ROWS · COLS`. `a_row` and `b_row` say where a row
/// begins.
///
/// `by_fives`: the kernel has registers for rounds of five loads, where it has one row.
///
/// `next` is the sum of the next column, if it is `paired`: then `finish` is called for even columns only.
///
/// # Safety
/// - *converged*: all 256 threads of the block.
/// - Rows of a and b *in-bounds* for `dims`, and aligned as `dims.access` says; m and n not 0 — checked in `run`.
/// - If it is paired, n is even, and so are the block's columns: not all warps share a single one.
/// - *exclusive*: the first `8 · SUMS` words of dynamic shared memory are used for nothing else.
#[inline(always)]
pub unsafe fn multiply<
    T: Operand,
    const ROWS: usize,
    const COLS: usize,
    const SUMS: usize,
    const UNROLL: usize,
>(
    a_row: impl Fn(u32) -> *const T,
    b_row: impl Fn(u32) -> *const T,
    dims: &MatmulDims,
    (first_row, col_block): (u32, u32),
    paired: bool,
    by_fives: bool,
    finish: impl Fn(u32, u32, [T::Sum; 2]),
) {
    let groups = WARPS >> dims.split_log2;
    let first_group = col_block * groups;
    let first_col = |group: u32| (first_group + group) * COLS as u32;

    let group = thread::warp_idx() >> dims.split_log2;
    let part = thread::warp_idx() & ((1 << dims.split_log2) - 1);
    // Rows and columns past the end are computed from the last one, and not stored.
    let mut rows = [core::ptr::null(); ROWS];
    let mut i = 0;
    while i < ROWS {
        rows[i] = a_row((first_row + i as u32).min(dims.m - 1));
        i += 1;
    }
    let mut cols = [core::ptr::null(); COLS];
    let mut j = 0;
    while j < COLS {
        cols[j] = b_row((first_col(group) + j as u32).min(dims.n - 1));
        j += 1;
    }

    let in_pieces = dims.access & (A_IN_PIECES | B_IN_PIECES) == A_IN_PIECES | B_IN_PIECES;
    let num_whole = if in_pieces { dims.k / T::PER_PIECE } else { 0 };
    let stride = 32u32 << dims.split_log2;
    let first = part * 32 + thread::lane();
    let mut sums = [T::Sum::ZERO; SUMS];
    // SAFETY: pieces below `num_whole` are whole and aligned; the others are read up to k — dims. The words of
    // shared memory are the caller's promise.
    unsafe {
        let mut piece = first;
        let of_lane = num_whole >> (5 + dims.split_log2);
        let is_even = num_whole & (stride - 1) == 0;
        // By fives where that leaves no round half full, as of a row of 2560 elements of 16 bits.
        if by_fives && SUMS == 1 && is_even && of_lane.is_multiple_of(5) && !of_lane.is_multiple_of(4) {
            while piece < num_whole {
                add_pieces::<T, ROWS, COLS, SUMS, 5, false>(
                    &rows, &cols, piece, stride, num_whole, &mut sums,
                );
                piece += 5 * stride;
            }
        }
        let last = (UNROLL as u32 - 1) * stride;
        while (piece | 31) + last < num_whole {
            add_pieces::<T, ROWS, COLS, SUMS, UNROLL, false>(
                &rows, &cols, piece, stride, num_whole, &mut sums,
            );
            piece += UNROLL as u32 * stride;
        }
        while piece < num_whole {
            add_pieces::<T, ROWS, COLS, SUMS, UNROLL, true>(
                &rows, &cols, piece, stride, num_whole, &mut sums,
            );
            piece += UNROLL as u32 * stride;
        }
        // The last piece, if it is not whole; all of them, if they are not aligned: element by element, in the same
        // order.
        piece = num_whole + (first.wrapping_sub(num_whole) & (stride - 1));
        while piece < dims.k.div_ceil(T::PER_PIECE) {
            let mut element = piece * T::PER_PIECE;
            let end = dims.k.min(element + T::PER_PIECE);
            while element < end {
                add_element::<T, ROWS, COLS, SUMS>(&rows, &cols, element as usize, &mut sums);
                element += 1;
            }
            piece += stride;
        }

        finish_sums::<T, COLS, SUMS>(sums, dims, (first_row, first_group), paired, finish);
    }
}

/// Adds up what the lanes, and the warps that share k, have of a block's sums, and calls `finish` for each as
/// [`multiply`] does: `first` are the block's first row and group of columns.
///
/// # Safety
/// - *converged*: all 256 threads of the block.
/// - If it is paired, n is even, and so are the block's columns.
/// - *exclusive*: the first `8 · SUMS` words of dynamic shared memory are used for nothing else.
#[inline(always)]
pub(super) unsafe fn finish_sums<T: Operand, const COLS: usize, const SUMS: usize>(
    sums: [T::Sum; SUMS],
    dims: &MatmulDims,
    (first_row, first_group): (u32, u32),
    paired: bool,
    finish: impl Fn(u32, u32, [T::Sum; 2]),
) {
    let groups = WARPS >> dims.split_log2;
    let first_col = |group: u32| (first_group + group) * COLS as u32;
    // SAFETY: each warp stores sums in its own words, and they are read after the barrier.
    unsafe {
        let sum = sum_over_lanes(sums);
        let (base, lane, sums) = (shared::base(), thread::lane(), SUMS as u32);
        let lanes_per_sum = 32 / sums;
        if lane % lanes_per_sum == 0 {
            let slot = thread::warp_idx() * sums + lane / lanes_per_sum;
            shared::store_u32(base + 4 * slot, sum.to_word());
        }
        thread::sync_threads();
        let member = thread::thread_idx_x();
        if member < groups * sums {
            let (group, index) = (member / sums, member % sums);
            let (row, col) = (first_row + index / COLS as u32, first_col(group) + index % COLS as u32);
            let total = |group: u32, index: u32| {
                let slot = |part: u32| ((group << dims.split_log2) + part) * sums + index;
                let mut total = T::Sum::from_word(shared::load_u32(base + 4 * slot(0)));
                let mut part = 1;
                while part < 1 << dims.split_log2 {
                    total = total.plus(T::Sum::from_word(shared::load_u32(base + 4 * slot(part))));
                    part += 1;
                }
                total
            };
            if paired && col % 2 != 0 {
                return;
            }
            let next = match (paired, COLS) {
                (false, _) => T::Sum::ZERO,
                (true, 1) => total(group + 1, index),
                (true, _) => total(group, index + 1),
            };
            if row < dims.m && col < dims.n {
                finish(row, col, [total(group, index), next]);
            }
        }
    }
}
