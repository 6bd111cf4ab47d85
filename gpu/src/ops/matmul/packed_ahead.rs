//! One row by a packed weight, for Hopper: what the tensor cores of [`packed`](super::packed) do, but the weight's
//! first tiles are on their way to registers before the kernel ahead has ended, and the row, which may be normed first,
//! is in shared memory as a whole.
//!
//! ```text
//! kernel ahead   ... multiplies | adds | stores | ends
//! this one           loads tiles | next may start | waits | row, norm | multiplies, loads more | adds, stores
//! ```
//!
//! - [`few_rows_ahead`](crate::matmul::few_rows_ahead) does the same with plain weights; the row and its norm are its.
//! - A warp holds a ring of tiles in registers (`packed_walk`), and brings as many more to L2 before the wait.
//! - The order of a sum is that of `packed`, and so are its bits.

use abi::ops::matmul::{MatmulDims, MatmulEpilogue, MatmulNorm, NEXT_MAY_START, WARPS};
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{grid, kernel, shared, thread, warp};

use super::packed::{part, tiles_of_part};
use crate::matmul::epilogue::Epilogue;
use crate::matmul::few_rows_ahead;
use crate::matmul::operand::Operand;
use crate::matmul::packed_walk::Walk;
use crate::matmul::weight::{Code, E2m1, E4m3, FewWords, Int4, Int8, Packed, Pair};

/// Bytes of a warp's sums.
const SUMS_BYTES: u32 = TILE_ROWS * 4;

/// One row by some columns.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims`; the row aligned to 16 bytes, k a
///   multiple of 8, not 0, and at most `AHEAD_MAX_K`, or `AHEAD_MAX_NORMED` if there is a norm — checked in `run`.
/// - The weight and the gains are constant.
/// - *exclusive*: shared memory as `PackedTile::smem_bytes` says.
#[inline(always)]
unsafe fn multiply<C, T, const TILES: usize, const GROUP: u32>(
    row: few_rows_ahead::Row<'_, T>,
    packed: &Packed,
    end: Epilogue<'_, T, T>,
) where
    C: Code<Words = FewWords>,
    T: Pair + Operand + Element,
{
    let dims = end.dims;
    let own = part(dims, thread::block_idx_x());
    let (tiles, of_part) = (packed.dims.tiles, tiles_of_part(packed.dims.tiles, dims));
    // By one lane's word, so that ptxas knows that a warp stays together.
    // SAFETY: all lanes take part.
    let first = unsafe { warp::shuffle_idx(warp::FULL_MASK, own.part * of_part, 0) };
    let walk =
        Walk { packed, weight: packed.row::<C>(own.row_block), first, end: tiles.min(first + of_part) };
    let num_pieces = dims.k / T::PER_PIECE;
    let a = few_rows_ahead::Row::<T>::row_at(0);
    // The columns of the block, of which this thread finishes one, if there is one for it.
    let cols = TILE_ROWS * (WARPS >> dims.split_log2);
    let (member, col) = (thread::thread_idx_x(), thread::block_idx_x() * cols + thread::thread_idx_x());
    let finishes = member < cols && col < dims.n;
    // SAFETY: tiles and pieces that there are; what is read before the wait is constant — the caller. The row is in
    // shared memory behind `bring`, sums are where the norm's were, and are read behind a barrier; every element of out
    // is finished by one thread of one block.
    unsafe {
        let early = || {
            row.start_gains(num_pieces);
            let held = walk.first_tiles::<C, TILES, GROUP>();
            let next = first + TILES as u32;
            walk.weight.to_l2::<C>(next, walk.end.saturating_sub(next).min(TILES as u32));
            held
        };
        let held = grid::begin_ahead(early, dims.access & NEXT_MAY_START != 0);
        let added = row.bring(num_pieces, || {
            // What the last tile has beyond k.
            let piece = num_pieces + member;
            if piece < tiles * (TILE_K / T::PER_PIECE) {
                shared::store_u32x4(few_rows_ahead::Row::<T>::row_at(piece), [0; 4]);
            }
            // Of the column that this thread finishes: others' may be written meanwhile.
            if finishes { end.residual_of(0, col) } else { 0.0 }
        });
        let sums = walk.sums::<C, T, TILES, GROUP>(a, held);
        let (base, lane) = (shared::base(), thread::lane());
        if lane.is_multiple_of(4) {
            let at = base + thread::warp_idx() * SUMS_BYTES + lane;
            shared::store_f32(at, sums[0]);
            shared::store_f32(at + 32, sums[1]);
        }
        thread::sync_threads();
        let is_pair = end.is_gated();
        if finishes && !(is_pair && member % 2 != 0) {
            let at = base + ((member / TILE_ROWS) << dims.split_log2) * SUMS_BYTES + member % TILE_ROWS * 4;
            let total = |at: u32| {
                let mut total = shared::load_f32(at);
                let mut part = 1;
                while part < 1 << dims.split_log2 {
                    total += shared::load_f32(at + part * SUMS_BYTES);
                    part += 1;
                }
                total
            };
            end.element_of(0, col, [total(at), if is_pair { total(at + 4) } else { 0.0 }], added);
        }
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       Ahead { tiles: $tiles:literal, group: $group:literal };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 4, waits)]
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
            gain: *const $type,
            norm: MatmulNorm,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            let end = Epilogue::new(bias, residual, out, &dims, &how);
            let row = few_rows_ahead::Row { a, gain, norm: &norm };
            // SAFETY: the tile's threads and shared memory, a block per columns, constants, and a row of a length that
            // can be normed — Matmul::run.
            unsafe { multiply::<$codes, $type, $tiles, $group>(row, &packed, end) }
        }
    )*};
}
abi::matmul_packed_ahead_table!(entries);
