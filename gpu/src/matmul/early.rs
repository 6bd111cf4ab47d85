//! What a block does before the kernel ahead of it has ended: it brings the first bytes of its weights to L2.
//!
//! Nothing is read, so it is right whoever writes them. The instruction (`cp.async.bulk.prefetch.L2`) takes uniform registers, so that a warp's lanes
//! issue theirs one after the other: the rows are spread over warps (8 × 6144 × 2560 9.05 µs instead of 9.22). A line by each thread (`prefetch.global.L2`) is up to 3 % slower.
//!
//! How much, in bytes of each row, and what that gains (µs without it, with it):
//!
//! | kernels | bytes | H200 | H100 |
//! |---|---|---|---|
//! | `Gemv` | 1024 | one row of 4096 × 4096 9.66, 8.83, of 19456 × 2560 24.1, 21.7 (blocks that come later gain by it too), of 2560 × 2560 6.91, 6.45; 512 come to 9.03 and 22.6, 1536 to 8.79 and 22.1 | |
//! | `Stream` that fills the card | what its warps load first | 16 × 4096 × 4096 11.3, 10.7 | 13.3, 12.4; twice as much 12.8 |
//! | other `Stream` | 512 | 8 × 6144 × 2560 9.05; what its warps load first 10.1, with a next kernel that starts early; a step of 8 sequences of Qwen3-0.6B 1607, with 1024 1637, with 2048 1696, without 1615 | |
//! | `Split` by two | 512 | 64 × 4096 × 4096 11.1, 10.85 | 14.2, 13.6; 256 or 1024 come to 13.9 |
//! | `Wgmma`, one row of tiles | 1024 | 128 × 16384 × 4096 41.1, 40.4, with SiLU 41.6, 41.0 | 50.3, 49.2, with SiLU 51.5, 50.2 |
//!
//! Tiles of `wgmma` do so where their blocks fill the card, each a multiprocessor: their blocks come when those ahead end. Of blocks that are there long before
//! (tiles that share k by four, of which a multiprocessor holds two) the bytes hold up what the kernel ahead loads, and a decode step takes 1 to 4 % longer. By boxes
//! (`cp.async.bulk.prefetch.tensor`) it gains nothing, and 128 × 16384 × 4096 takes up to 10 % longer: TMA takes one box after the other. With a next kernel that may start when
//! one row of tiles has multiplied its last, also where they do not fill the card, 32 and 128 × 6144 × 2560 take 13.6 and 14.6 instead of 13.9 and 14.9 (H100): not there yet.

use abi::ops::matmul::{B_IN_PIECES, MatmulDims, WARPS};
use cuda_std::{global, grid, thread};

use super::operand::Operand;

/// Brings the first `bytes` of `rows` rows to L2: a lane a row, rows spread over `warps` warps, of which the caller's is the `warp`th.
///
/// # Safety
/// - Rows *in-bounds* for `bytes`, a multiple of 16, and *aligned(16)*; no more than 32 for each warp.
#[inline(always)]
unsafe fn rows_to_l2<T>(row: impl Fn(u32) -> *const T, rows: u32, bytes: u32, warp: u32, warps: u32) {
    let of_warp = rows.div_ceil(warps);
    let (lane, index) = (thread::lane(), warp * of_warp + thread::lane());
    // Rows of no bytes lie nowhere.
    if bytes > 0 && lane < of_warp && index < rows {
        // SAFETY: the caller's promise.
        unsafe { global::prefetch_l2(row(index), bytes) };
    }
}

/// How a block of `Gemv` or `Stream` begins, whose warps make `cols` columns each: `bytes` of its rows of b, then it waits, and lets the next kernel start if that
/// may so early.
///
/// # Safety
/// - Rows of b *in-bounds* for `dims`, and aligned as `dims.access` says; n not 0.
#[inline(always)]
pub unsafe fn begin<T: Operand>(
    b_row: impl Fn(u32) -> *const T,
    dims: &MatmulDims,
    col_block: u32,
    cols: u32,
    bytes: u32,
    next_may_start: bool,
) {
    let prefetch = || {
        if dims.access & B_IN_PIECES != 0 {
            let cols = cols * (WARPS >> dims.split_log2);
            let row = |index: u32| b_row((col_block * cols + index).min(dims.n - 1));
            let bytes = (dims.k / T::PER_PIECE * 16).min(bytes);
            // SAFETY: whole pieces of rows that exist.
            unsafe { rows_to_l2(row, cols, bytes, thread::warp_idx(), WARPS) };
        }
    };
    grid::begin_early(prefetch, next_may_start);
}

/// Where the weights of a product by `wgmma` lie: b, or the gate, and up.
#[derive(Clone, Copy)]
pub struct Weights<T> {
    /// b, or the gate if the product is gated.
    pub b: *const T,
    /// Up, if it is.
    pub up: *const T,
}

impl<T> Weights<T> {
    /// Brings the first `bytes` of a tile's weights to L2, from element `k` of each row on: of `rows` rows of b from `row` on, or of half as many of the gate and
    /// of up. By the `warps` warps behind the first warpgroup, which has loads to start.
    ///
    /// # Safety
    /// - The weights *in-bounds* for `dims`, rows *aligned(16)* and whole pieces of 16 bytes, also before `k`, which is inside a row.
    #[inline(always)]
    pub unsafe fn to_l2(
        &self,
        dims: &MatmulDims,
        gated: bool,
        (row, rows): (u32, u32),
        k: u32,
        bytes: u32,
        warps: u32,
    ) {
        let warp = thread::warp_idx();
        if warp < 4 {
            return;
        }
        let (n, half) = if gated { (dims.n / 2, rows / 2) } else { (dims.n, rows) };
        let from = |index: u32| {
            let (b, index) = if index < half { (self.b, index) } else { (self.up, index - half) };
            b.wrapping_add((row + index).min(n - 1) as usize * dims.b_stride as usize + k as usize)
        };
        let bytes = bytes.min((dims.k - k) * size_of::<T>() as u32);
        // SAFETY: of rows that exist, and no more than there is of them.
        unsafe { rows_to_l2(from, rows, bytes, warp - 4, warps) };
    }
}
