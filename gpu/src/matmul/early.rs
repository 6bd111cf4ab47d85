//! What a block does before the kernel ahead of it has ended: it brings the first bytes of its weights to L2.
//!
//! Nothing is read, so it is right whoever writes them. The instruction (`cp.async.bulk.prefetch.L2`) takes uniform
//! registers, so that a warp's lanes issue theirs one after the other: the rows are spread over warps.
//!
//! | kernels | bytes of each row |
//! |---|---|
//! | `Gemv` | 1024 |
//! | `Stream` that fills the card | what its warps load first |
//! | other `Stream`, `Split` by two | 512 |
//! | `Wgmma`, one row of tiles; `Swapped` of 128 rows by two | 1024 |
//!
//! Tiles of `wgmma` do so where their blocks fill the card, each a multiprocessor: their blocks come when those ahead
//! end. The bytes of blocks that are there long before, as of tiles that share k by four, of which a multiprocessor
//! holds two, would hold up what the kernel ahead loads. What it gains, and what was tried: `gpu/NOTES/matmul.md`.

use abi::ops::matmul::{B_IN_PIECES, MatmulDims, WARPS};
use cuda_std::{global, grid, thread};

use super::operand::Operand;

/// Brings the first `bytes` of `rows` rows to L2: a lane a row, rows spread over `warps` warps, of which the caller's
/// is the `warp`th.
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

/// How a block of `Gemv` or `Stream` begins, whose warps make `cols` columns each: `bytes` of its rows of b, then it
/// waits, and lets the next kernel start if that may so early.
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
    /// Brings the first `bytes` of a tile's weights to L2, from element `k` of each row on: of `rows` rows of b from
    /// `row` on, or of half as many of the gate and of up. By the `warps` warps behind the first warpgroup, which has
    /// loads to start.
    ///
    /// # Safety
    /// - The weights *in-bounds* for `dims`, rows *aligned(16)* and whole pieces of 16 bytes, also before `k`, which is
    ///   inside a row.
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
