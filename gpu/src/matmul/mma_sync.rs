//! Matrix products on the tensor cores of Ampere and later: `cp.async` fills a ring of stages, warps multiply by
//! `mma.sync`.
//!
//! ```text
//! block: BM × BN, a warp per 64 × 64 or 32 × 32 of it; a step is rows of 64 bytes: 32 of k, of f32 16, of int8 64
//!
//! before     steps 0 … STAGES−1 are on their way; ldmatrix of the first half of step 0
//! each step  ldmatrix of its second half ── mma m16n8k16, of f32 m16n8k8, of int8 m16n8k32, of its first half
//!            wait for the next step's copies ── barrier ── ldmatrix of the next step's first half
//!            start the copies of step + STAGES into the stage that everybody has left ── mma of the second half
//! at the end epilogue, rounding, 16-byte stores straight from registers
//! ```
//!
//! - Rows of 64 bytes lie without gaps; a piece of 16 bytes is moved by an exclusive or with bits of its row, so that
//!   the eight rows that `ldmatrix` reads at a time come from different banks: rows r … r + 7 of a by `r / 2 % 4`.
//! - The columns of an `mma` are dealt out so that a thread ends up with neighbouring ones. With `W` columns to a warp,
//!   column i of the j-th `mma` is column `i / 2 · W / 4 + 2 j + i % 2`: a thread's sums of a row are `W / 4` in a row,
//!   which it stores by 16 bytes and without shared memory. Rows of b are therefore moved by `r / (W / 4) % 4`.
//! - The tails of m, n and k are filled with zeros by `cp.async`.
//! - A sum is one chain over k in steps of 32 bytes, the same in every tile and wherever a row lies.
//! - f32 is multiplied as tf32: the instruction leaves its lower 13 bits aside, so that nothing is to be converted.
//!
//! The tensor cores bound it, and behind them the card's power (`gpu/NOTES/matmul.md`). The order of a step matters:
//! copies started before the barrier would keep it behind all of the `mma`, since ptxas puts their addresses there. A
//! branch around the loads that the last step does not need would do the same, so the last step loads its own first
//! half again instead. Two blocks of 128 × 128 to a multiprocessor stay for what has few tiles.

use abi::ops::matmul::{MMA_ROW_BYTES, MMA_STAGES, MatmulDims};
use cuda_std::cvt::Element;
use cuda_std::{cp_async, matrix, shared, thread};

use super::epilogue::Epilogue;
use super::multiplicand::Factor;
use super::operand::Sum;
use super::simt;

const ROW_BYTES: u32 = MMA_ROW_BYTES;
const STAGES: u32 = MMA_STAGES;
/// Pieces of a row of a step.
const PIECES: u32 = ROW_BYTES / 16;

/// Rows and columns of a warp's part of a tile.
pub const fn warp_edge(bm: u32, bn: u32, threads: u32) -> usize {
    (bm * bn / (threads / 32)).isqrt() as usize
}

/// Where the pieces begin that a thread copies of an operand whose rows lie one after another: of every
/// `THREADS / 4`-th row from its own on, the piece of one column of pieces.
///
/// `halved` is 1 where two rows of the tile are one of the gate and one of up: a row of each operand for every two.
#[inline(always)]
pub fn strided<T, const THREADS: u32>(
    operand_row: impl Fn(u32) -> *const T,
    (stride, halved): (u32, u32),
    first_row: u32,
) -> impl Fn(usize) -> *const T {
    let from = piece_of(operand_row(first_row + own_row()));
    // A multiple of 32 rows on: as many pairs of the gate and up.
    move |i| from.wrapping_add(((i as u32 * (THREADS / PIECES)) >> halved) as usize * stride as usize)
}

/// The same where they lie anywhere: each is asked for once.
#[inline(always)]
pub fn gathered<T, const COUNT: usize, const THREADS: u32>(
    operand_row: impl Fn(u32) -> *const T,
    first_row: u32,
) -> impl Fn(usize) -> *const T {
    let mut from = [core::ptr::null(); COUNT];
    let mut i = 0;
    while i < COUNT {
        from[i] = piece_of(operand_row(first_row + own_row() + i as u32 * (THREADS / PIECES)));
        i += 1;
    }
    move |i| from[i]
}

/// The first row of a tile that this thread copies pieces of.
#[inline(always)]
fn own_row() -> u32 {
    thread::thread_idx_x() / PIECES
}

/// This thread's piece of a row.
#[inline(always)]
fn piece_of<T>(row: *const T) -> *const T {
    row.wrapping_add((thread::thread_idx_x() % PIECES) as usize * (16 / size_of::<T>()))
}

/// This thread's share of the rows of an operand that a step copies.
struct Share<F> {
    /// The piece of the i-th of its rows.
    from: F,
    /// Rows of the operand from the first one on.
    rows: u32,
    row: u32,
    piece: u32,
}

impl<F> Share<F> {
    #[inline(always)]
    fn new(from: F, rows: u32, first_row: u32) -> Self {
        let piece = thread::thread_idx_x() % PIECES;
        Share { from, rows: rows.saturating_sub(first_row), row: own_row(), piece }
    }

    /// Starts the copies of `COUNT` pieces at column `k` of `end`, rows moved by `row / MOVE % 4`.
    ///
    /// # Safety
    /// - Rows of the operand *in-bounds* and aligned to 16 bytes; the stage at `to` is nobody's.
    #[inline(always)]
    unsafe fn start<T, const COUNT: usize, const THREADS: u32, const MOVE: u32>(
        &self,
        k: u32,
        end: u32,
        to: u32,
    ) where
        F: Fn(usize) -> *const T,
    {
        let per_piece = 16 / size_of::<T>() as u32;
        let left = end.saturating_sub(k + self.piece * per_piece);
        let bytes = left.min(per_piece) * size_of::<T>() as u32;
        let mut i = 0;
        while i < COUNT {
            let row = self.row + i as u32 * (THREADS / PIECES);
            let moved = self.piece ^ (row / MOVE % 4);
            let bytes = if row < self.rows { bytes } else { 0 };
            let from = (self.from)(i).wrapping_add(k as usize);
            // SAFETY: `bytes` bytes from an existing row on; none where there is no row.
            unsafe { cp_async::cg_16_fill(to + row * ROW_BYTES + moved * 16, from, bytes) };
            i += 1;
        }
    }
}

/// What a thread has of a tile's sums: `[i][j]` is of rows `first_row + 16 · i` and 8 further on, two columns of each.
pub struct Sums<S, const FM: usize, const FN: usize> {
    sums: [[[S; 4]; FN]; FM],
    first_row: u32,
    first_col: u32,
}

impl<S: Sum, const FM: usize, const FN: usize> Sums<S, FM, FN> {
    /// The first of the j-th eight columns.
    #[inline(always)]
    fn col(&self, j: usize) -> u32 {
        self.first_col + 8 * j as u32
    }

    /// The i-th row.
    #[inline(always)]
    fn row(&self, i: usize) -> u32 {
        self.first_row + 8 * i as u32
    }

    /// The j-th eight neighbouring columns of the i-th row: four `mma` of two.
    #[inline(always)]
    fn octet(&self, i: usize, j: usize) -> [S; 8] {
        let mut values = [S::ZERO; 8];
        let mut c = 0;
        while c < 8 {
            values[c] = self.sums[i / 2][4 * j + c / 2][i % 2 * 2 + c % 2];
            c += 1;
        }
        values
    }

    /// Hands every eight columns of a row to `each`, as far as the first of them is one of `dims`; with what
    /// `of_columns` says of them.
    #[inline(always)]
    pub fn for_octets<C>(
        &self,
        dims: &MatmulDims,
        of_columns: impl Fn(u32) -> C,
        each: impl Fn(u32, u32, [S; 8], &C),
    ) {
        let mut j = 0;
        while j < FN / 4 {
            let col = self.col(j);
            let columns = of_columns(col);
            let mut i = 0;
            while i < 2 * FM {
                if self.row(i) < dims.m && col < dims.n {
                    each(self.row(i), col, self.octet(i, j), &columns);
                }
                i += 1;
            }
            j += 1;
        }
    }
}

/// The sums of the tile from `row` and `col` on: a warp makes `16 · FM` rows and `8 · FN` columns, a thread copies
/// `COUNT_A` pieces of a and `COUNT_B` of b per step, which `a` and `b` say where they begin. `promotes`: each step's
/// sum is added by itself.
///
/// # Safety
/// - *converged*: all `THREADS` threads of the block, a warp for each part of the tile; shared memory as
///   `MatmulTile::smem_bytes` says.
/// - Tensors *in-bounds* for `dims`, rows of a and b aligned to 16 bytes — checked in `run`.
#[inline(always)]
pub unsafe fn sums<
    T: Factor,
    const BM: u32,
    const BN: u32,
    const FM: usize,
    const FN: usize,
    const COUNT_A: usize,
    const COUNT_B: usize,
    const THREADS: u32,
>(
    a: impl Fn(usize) -> *const T,
    b: impl Fn(usize) -> *const T,
    (row, col): (u32, u32),
    dims: &MatmulDims,
    promotes: bool,
) -> Sums<T::Sum, FM, FN> {
    let (warp_rows, warp_cols) = (16 * FM as u32, 8 * FN as u32);
    let per_thread = warp_cols / 4;
    let stage_bytes = (BM + BN) * ROW_BYTES;
    let base = shared::base();
    // Elements of k per step.
    let bk = ROW_BYTES / size_of::<T>() as u32;
    // No k is a step of zeros.
    let steps = dims.k.div_ceil(bk).max(1);

    let (warp, lane) = (thread::warp_idx(), thread::lane());
    let warp_row = warp % (BM / warp_rows) * warp_rows;
    let warp_col = warp / (BM / warp_rows) * warp_cols;
    // Which row of the first 16, and which piece of its 2, this lane tells `ldmatrix`.
    let (a_row, a_piece) = (warp_row + lane % 16, lane / 16);
    let b_col = lane % 8;
    let b_row = warp_col + b_col / 2 * per_thread + b_col % 2 + lane / 16 * 2;
    let b_piece = lane / 8 % 2;

    let (share_a, share_b) = (Share::new(a, dims.m, row), Share::new(b, dims.n, col));
    let mut sums = [[[T::Sum::ZERO; 4]; FN]; FM];
    // SAFETY: a stage is filled by copies that all threads have waited for before the barrier, and filled anew after
    // the barrier that follows its last reading.
    unsafe {
        let start = |step: u32| {
            if step < steps {
                let (k, to) = (step * bk, base + step % STAGES * stage_bytes);
                share_a.start::<T, COUNT_A, THREADS, 2>(k, dims.k, to);
                if FN == 8 {
                    share_b.start::<T, COUNT_B, THREADS, 16>(k, dims.k, to + BM * ROW_BYTES);
                } else {
                    share_b.start::<T, COUNT_B, THREADS, 8>(k, dims.k, to + BM * ROW_BYTES);
                }
            }
            cp_async::commit_group();
        };
        // The pieces that half of a step multiplies.
        let load = |step: u32, half: u32| {
            let a_at = base + step % STAGES * stage_bytes;
            let b_at = a_at + BM * ROW_BYTES;
            let mut rows_a = [[0u32; 4]; FM];
            let mut i = 0;
            while i < FM {
                let row = a_row + 16 * i as u32;
                let moved = (2 * half + a_piece) ^ (row / 2 % 4);
                rows_a[i] = matrix::load_x4(a_at + row * ROW_BYTES + moved * 16);
                i += 1;
            }
            let mut rows_b = [[0u32; 2]; FN];
            let mut j = 0;
            while j < FN {
                let row = b_row + 2 * j as u32;
                let moved = (2 * half + b_piece) ^ (row / per_thread % 4);
                let [b0, b1, b2, b3] = matrix::load_x4(b_at + row * ROW_BYTES + moved * 16);
                rows_b[j] = [b0, b1];
                rows_b[j + 1] = [b2, b3];
                j += 2;
            }
            (rows_a, rows_b)
        };
        let mut step = 0;
        while step < STAGES {
            start(step);
            step += 1;
        }
        cp_async::wait_group::<{ STAGES - 1 }>();
        thread::sync_threads();
        let mut step = 0;
        let mut first = load(0, 0);
        while step < steps {
            let mut step_sums = [[[T::Sum::ZERO; 4]; FN]; FM];
            let to = if promotes { &mut step_sums } else { &mut sums };
            let second = load(step, 1);
            multiply_half::<T, FM, FN>(&first, to);
            cp_async::wait_group::<{ STAGES - 2 }>();
            thread::sync_threads();
            first = load((step + 1).min(steps - 1), 0);
            start(step + STAGES);
            multiply_half::<T, FM, FN>(&second, to);
            if promotes {
                add(&mut sums, &step_sums);
            }
            step += 1;
        }
        cp_async::wait_group::<0>();
    }
    Sums { sums, first_row: row + warp_row + lane / 4, first_col: col + warp_col + lane % 4 * per_thread }
}

/// The tile from `row` and `col` on, as [`sums`] and to its end.
///
/// # Safety
/// - As for [`sums`].
#[inline(always)]
pub unsafe fn multiply<
    T: Factor<Sum = f32> + Element,
    O: Element,
    const BM: u32,
    const BN: u32,
    const FM: usize,
    const FN: usize,
    const COUNT_A: usize,
    const COUNT_B: usize,
    const THREADS: u32,
>(
    a: impl Fn(usize) -> *const T,
    b: impl Fn(usize) -> *const T,
    at: (u32, u32),
    end: Epilogue<'_, T, O>,
) {
    let (dims, base) = (end.dims, shared::base());
    // The tensor cores cut sums off instead of rounding them, which over a long k adds up to more than a rounding of
    // the whole: where out is f32, each step's sum is added by itself. An out of 16 bits does not show it, nor do
    // operands that are cut off themselves.
    let promotes = size_of::<O>() == 4 && size_of::<T>() == 2;
    // SAFETY: the caller's promise.
    let sums = unsafe { sums::<T, BM, BN, FM, FN, COUNT_A, COUNT_B, THREADS>(a, b, at, dims, promotes) };
    if end.is_plain() {
        // SAFETY: of columns that exist — the method.
        let bias = |col| unsafe { end.bias::<8>(col) };
        sums.for_octets(dims, bias, |row, col, mut values, bias| {
            let mut c = 0;
            while c < 8 {
                values[c] += bias[c];
                c += 1;
            }
            // SAFETY: a row and columns that exist, and this thread's alone.
            unsafe { simt::store_octet(end.out(), row, col, &values, dims) };
        });
        return;
    }
    // SAFETY: all threads are here; behind the barrier nobody reads the stages any more.
    unsafe { thread::sync_threads() };
    let mut j = 0;
    while j < FN / 4 {
        let col = sums.col(j);
        // A loop, not eight copies of it: a long epilogue takes its sums from shared memory.
        let place = |i: u32, half: u32| base + ((2 * i + half) * THREADS + thread::thread_idx_x()) * 16;
        // SAFETY: what is stored are rows and columns that exist, and this thread's alone; so are its places in the
        // stages, as many as 32 bytes of 2 · FM are: half of the tile's sums at most.
        unsafe {
            let bias = end.bias::<8>(col);
            let mut i = 0;
            while i < 2 * FM {
                let [v0, v1, v2, v3, v4, v5, v6, v7] = sums.octet(i, j);
                shared::store_f32x4(place(i as u32, 0), [v0, v1, v2, v3]);
                shared::store_f32x4(place(i as u32, 1), [v4, v5, v6, v7]);
                i += 1;
            }
            let rows = dims.m.saturating_sub(sums.row(0)).div_ceil(8).min(2 * FM as u32);
            let mut i = 0;
            while i < rows && col < dims.n {
                let [v0, v1, v2, v3] = shared::load_f32x4(place(i, 0));
                let [v4, v5, v6, v7] = shared::load_f32x4(place(i, 1));
                end.octet(sums.row(i as usize), col, [v0, v1, v2, v3, v4, v5, v6, v7], &bias);
                i += 1;
            }
        }
        j += 1;
    }
}

/// Multiplies the pieces of half a step.
///
/// # Safety
/// - *converged*: all threads of the warp.
#[inline(always)]
unsafe fn multiply_half<T: Factor, const FM: usize, const FN: usize>(
    (a, b): &([[u32; 4]; FM], [[u32; 2]; FN]),
    to: &mut [[[T::Sum; 4]; FN]; FM],
) {
    let mut i = 0;
    while i < FM {
        let mut j = 0;
        while j < FN {
            // SAFETY: the caller's promise.
            to[i][j] = unsafe { T::multiply_add(a[i], b[j], to[i][j]) };
            j += 1;
        }
        i += 1;
    }
}

/// Adds each sum to its total; floats are rounded to nearest.
#[inline(always)]
fn add<S: Sum, const FM: usize, const FN: usize>(total: &mut [[[S; 4]; FN]; FM], sums: &[[[S; 4]; FN]; FM]) {
    let mut i = 0;
    while i < FM * FN * 4 {
        let total = &mut total[i / 4 / FN][i / 4 % FN][i % 4];
        *total = total.plus(sums[i / 4 / FN][i / 4 % FN][i % 4]);
        i += 1;
    }
}
