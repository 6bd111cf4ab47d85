//! Matrix products of few rows on tensor cores: b streams through shared memory once, as fast as memory gives it.
//!
//! ```text
//! out [ROWS, n] = a · bᵀ: a block makes 64 columns for all rows; rows of b are the rows of `mma`, rows of a its columns
//!
//! a step: 128 of k     b 64 × 256 bytes, a ROWS × 256 bytes ── cp.async ──► one of 4 stages
//! each of the 8 warps  16 of the 128: 4 × ldmatrix b, a ── 4 · ROWS / 8 × mma m16n8k16
//! at the end           sums of the 8 warps through shared memory, in their order; then those of the cluster's blocks
//! ```
//!
//! - Every byte of b is read once, in runs of 256, with three steps on their way: 48 KiB to a block. That, not arithmetic, is
//!   what few rows need.
//! - All warps share k, so that a block has few columns and there are many blocks. Where there are still too few, the blocks of
//!   a cluster share k too and add their sums through distributed shared memory: no workspace, no second kernel. How k is
//!   shared depends on n, k and the card alone, and all orders are fixed: a row's result does not depend on the other rows.
//! - Rows of 256 bytes lie without gaps, a piece of 16 bytes moved by an exclusive or with its row: `ldmatrix` has no bank
//!   conflicts. Sums are moved in the same way.

use abi::ops::matmul::{MatmulDims, SKINNY_BK, SKINNY_COLS, THREADS, WARPS};
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
use cuda_std::cluster;
use cuda_std::cvt::Element;
use cuda_std::{cp_async, matrix, shared, thread};

use super::mma::Multiplicand;
use crate::tile::simt;

const COLS: u32 = SKINNY_COLS;
const BK: u32 = SKINNY_BK;
const ROW_BYTES: u32 = BK * 2;
/// Pieces of 16 bytes in a row of a stage.
const PIECES: u32 = ROW_BYTES / 16;
/// Rows that the block's threads copy at a time.
const ROWS_AT_A_TIME: u32 = THREADS / PIECES;

/// The blocks that share k.
pub trait Sharing {
    /// This block's place among them, and how many there are.
    fn rank() -> (u32, u32);
    /// Waits for all of them.
    ///
    /// # Safety
    /// - *converged*: all threads of all of them come here.
    unsafe fn sync();
    /// Four numbers at `address` in the shared memory of block `rank`.
    ///
    /// # Safety
    /// - *initialised*: by a write and [`Self::sync`] before; *aligned(16)*.
    unsafe fn load(address: u32, rank: u32) -> [f32; 4];
}

/// A block has all of k.
pub struct Alone;

impl Sharing for Alone {
    #[inline(always)]
    fn rank() -> (u32, u32) {
        (0, 1)
    }
    #[inline(always)]
    unsafe fn sync() {
        // SAFETY: the caller's promise.
        unsafe { thread::sync_threads() }
    }
    #[inline(always)]
    unsafe fn load(address: u32, _: u32) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { shared::load_f32x4(address) }
    }
}

/// The blocks of a cluster share k.
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
pub struct Cluster;

#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
impl Sharing for Cluster {
    #[inline(always)]
    fn rank() -> (u32, u32) {
        (cluster::block_rank(), cluster::num_blocks().max(1))
    }
    #[inline(always)]
    unsafe fn sync() {
        // SAFETY: the caller's promise.
        unsafe { cluster::sync() }
    }
    #[inline(always)]
    unsafe fn load(address: u32, rank: u32) -> [f32; 4] {
        // SAFETY: the caller's promise; all blocks stay until the last `sync`.
        unsafe { cluster::load_x4(cluster::map_shared(address, rank)) }.map(f32::from_bits)
    }
}

/// Starts the copies of this thread's pieces of `COUNT · 16` rows of an operand.
///
/// # Safety
/// - Rows of the operand *in-bounds* and aligned to 16 bytes; the stage at `to` is nobody's.
#[inline(always)]
unsafe fn start<T, const COUNT: usize>(from: *const T, stride: u32, rows: u32, k: u32, end: u32, to: u32) {
    let (first, piece) = (thread::thread_idx_x() / PIECES, thread::thread_idx_x() % PIECES);
    let left = end.saturating_sub(k + piece * 8);
    let bytes = if left < 8 { left * 2 } else { 16 };
    let moved = piece ^ (first % 8);
    let mut i = 0;
    while i < COUNT {
        let row = first + i as u32 * ROWS_AT_A_TIME;
        let at = row as usize * stride as usize + (k + piece * 8) as usize;
        let bytes = if row < rows { bytes } else { 0 };
        // SAFETY: `bytes` bytes from an existing row on; none where there is no row.
        unsafe { cp_async::cg_16_fill(to + row * ROW_BYTES + moved * 16, from.wrapping_add(at), bytes) };
        i += 1;
    }
}

/// Where the sum of a row and column lies among those of a warp.
#[inline(always)]
fn sum_address(row: u32, col: u32) -> u32 {
    (row * COLS + (col ^ (row / 2 % 4 * 8))) * 4
}

/// 64 columns of `out = a · bᵀ + bias` for up to `8 · FRAGMENTS` rows.
///
/// # Safety
/// - *converged*: all 256 threads of the block, and the cluster; shared memory as `MatmulTile::smem_bytes` says.
/// - Tensors *in-bounds* for `dims`, rows of a and b aligned to 16 bytes — checked in `Matmul::run`.
#[inline(always)]
pub unsafe fn multiply<
    T: Multiplicand,
    O: Element,
    S: Sharing,
    const ROWS: u32,
    const FRAGMENTS: usize,
    const COPIES: usize,
    const STAGES: u32,
>(
    a: *const T,
    b: *const T,
    bias: *const T,
    out: *mut O,
    dims: &MatmulDims,
) {
    let (rank, ranks) = S::rank();
    let first_col = thread::block_idx_x() / ranks * COLS;
    let steps = dims.k.div_ceil(BK);
    let (first, end) = (steps * rank / ranks, steps * (rank + 1) / ranks);
    let base = shared::base();
    let b_bytes = COLS * ROW_BYTES;
    let stage_bytes = b_bytes + ROWS * ROW_BYTES;
    let cols = dims.n - first_col;
    let b = b.wrapping_add(first_col as usize * dims.b_stride as usize);

    let (warp, lane) = (thread::warp_idx(), thread::lane());
    let (b_row, b_piece) = (lane % 16, 2 * warp + lane / 16);
    let (a_row, a_piece) = (lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
    let b_at = b_row * ROW_BYTES + (b_piece ^ (b_row % 8)) * 16;
    let a_at = b_bytes + a_row * ROW_BYTES + (a_piece ^ (a_row % 8)) * 16;

    // See `mma`: where out is f32, each product is added by itself.
    let promotes = size_of::<O>() == 4;
    let mut sums = [[[0f32; 4]; FRAGMENTS]; 4];
    // SAFETY: a stage is filled by copies that all threads have waited for before the barrier, and filled anew after the
    // barrier that follows its last reading.
    unsafe {
        let start = |step: u32| {
            if step < end {
                let (k, to) = (step * BK, base + step % STAGES * stage_bytes);
                start::<T, 4>(b, dims.b_stride, cols, k, dims.k, to);
                start::<T, COPIES>(a, dims.a_stride, dims.m, k, dims.k, to + b_bytes);
            }
            cp_async::commit_group();
        };
        let mut step = first;
        while step + 1 < first + STAGES {
            start(step);
            step += 1;
        }
        let mut step = first;
        while step < end {
            cp_async::wait_group::<2>();
            thread::sync_threads();
            start(step + STAGES - 1);
            let at = base + step % STAGES * stage_bytes;
            let mut rows_b = [[0u32; 4]; 4];
            let mut i = 0;
            while i < 4 {
                rows_b[i] = matrix::load_x4(at + b_at + i as u32 * 16 * ROW_BYTES);
                i += 1;
            }
            let mut j = 0;
            while j < FRAGMENTS {
                let [a0, a1, a2, a3] = matrix::load_x4(at + a_at + j as u32 * 8 * ROW_BYTES);
                let mut i = 0;
                while i < 4 {
                    multiply_add::<T>(&mut sums[i][j], rows_b[i], [a0, a1], promotes);
                    multiply_add::<T>(&mut sums[i][j + 1], rows_b[i], [a2, a3], promotes);
                    i += 1;
                }
                j += 2;
            }
            step += 1;
        }
        cp_async::wait_group::<0>();
        thread::sync_threads();

        // The stages are free: the warps' sums take their place.
        let mut i = 0;
        while i < 16 * FRAGMENTS {
            let (fragment, element) = (i / 4, i % 4);
            let col = (fragment / FRAGMENTS * 16 + element / 2 * 8) as u32 + lane / 4;
            let row = (fragment % FRAGMENTS * 8 + element % 2) as u32 + lane % 4 * 2;
            let value = sums[fragment / FRAGMENTS][fragment % FRAGMENTS][element];
            shared::store_f32(base + warp * ROWS * COLS * 4 + sum_address(row, col), value);
            i += 1;
        }
        thread::sync_threads();

        let quads = ROWS * COLS / 4;
        let mut quad = thread::thread_idx_x();
        while quad < quads {
            let at = base + sum_address(quad * 4 / COLS, quad * 4 % COLS);
            let mut total = [0f32; 4];
            let mut warp = 0;
            while warp < WARPS {
                add(&mut total, shared::load_f32x4(at + warp * ROWS * COLS * 4));
                warp += 1;
            }
            shared::store_f32x4(at, total);
            quad += THREADS;
        }
        S::sync();
        let mut quad = thread::thread_idx_x() + rank * THREADS;
        while quad < quads {
            let at = base + sum_address(quad * 4 / COLS, quad * 4 % COLS);
            let mut total = [0f32; 4];
            let mut from = 0;
            while from < ranks {
                add(&mut total, S::load(at, from));
                from += 1;
            }
            finish(total, quad, first_col, bias, out, dims);
            quad += ranks * THREADS;
        }
        // Others may still read this block's sums.
        S::sync();
    }
}

/// Adds a product to its sum: in the tensor cores, or where it `promotes` in f32.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
unsafe fn multiply_add<T: Multiplicand>(sum: &mut [f32; 4], b: [u32; 4], a: [u32; 2], promotes: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if promotes {
            add(sum, T::multiply_add(b, a, [0.0; 4]));
        } else {
            *sum = T::multiply_add(b, a, *sum);
        }
    }
}

#[inline(always)]
fn add(total: &mut [f32; 4], part: [f32; 4]) {
    let mut i = 0;
    while i < 4 {
        total[i] += part[i];
        i += 1;
    }
}

/// Adds the bias to four neighbouring columns, rounds and stores them, as far as they exist.
///
/// # Safety
/// - *in-bounds(bias)* and *in-bounds(out)* for `dims`; *exclusive*: the elements are this thread's.
#[inline(always)]
unsafe fn finish<T: Element, O: Element>(
    mut values: [f32; 4],
    quad: u32,
    first_col: u32,
    bias: *const T,
    out: *mut O,
    dims: &MatmulDims,
) {
    let (row, col) = (quad * 4 / COLS, first_col + quad * 4 % COLS);
    if row < dims.m && col < dims.n {
        // SAFETY: the caller's promise.
        unsafe {
            if !bias.is_null() {
                add(&mut values, simt::load_quad(bias, col, dims.n));
            }
            simt::store_quad(out, row, col, values, dims);
        }
    }
}
