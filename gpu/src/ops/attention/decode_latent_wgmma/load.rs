//! The thread that loads keys, and the warps that load q.

use abi::ops::attention::AttentionDims;
use cuda_std::tma::TensorMap;
use cuda_std::{cp_async, fence, mbarrier, thread, tma, warp};

use super::super::work::{Splits, Work};
use super::super::{Tables, offset};
use super::places::{STEP_BYTES, Turn};
use super::{BOXES, KEYS, Q_THREADS, ROW_BYTES, ROWS, steps_of};
use crate::matmul::multiplicand::Multiplicand;

/// Pieces of 16 bytes of so many rows of q that a thread copies.
const Q_LOTS: usize = 3;
const Q_LOT_ROWS: u32 = Q_LOTS as u32 * Q_THREADS / (BOXES * 8);

/// The thread that loads keys.
///
/// # Safety
/// - One thread; the rest is the caller's promise to [`super::splits`].
#[inline(always)]
pub(super) unsafe fn load_keys(k: *const TensorMap, tables: Tables, dims: &AttentionDims) {
    let mut splits = Splits::new(dims, true);
    let mut turn = Turn(0);
    // SAFETY: a stage is loaded when both warpgroups of values have given it back. A page beyond the last key that is
    // seen is not looked up: another comes in its place.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        while work.has_keys() {
            let [mut step, end] = steps_of(&work);
            while step < end {
                mbarrier::wait_parity(turn.empty_k(), turn.parity() ^ 1);
                mbarrier::arrive_expect_tx(turn.full_k(), STEP_BYTES);
                let mut row = 0;
                while row < KEYS {
                    let key = step * KEYS as i32 + row as i32;
                    let page = work.pages.page(dims, key.min(work.any.hi - 1)) as i32;
                    let token = work.pages.row_in_page(dims, key) as i32;
                    let mut col = 0;
                    while col < BOXES {
                        let from = [(64 * col) as i32, token, work.head_kv as i32, page];
                        tma::load(turn.keys() + (col * KEYS + row) * ROW_BYTES, k, from, turn.full_k());
                        // Opaque, so that the loop stays one.
                        col = thread::opaque(col + 1);
                    }
                    row += dims.box_keys;
                }
                turn.0 += 1;
                step += 1;
            }
            work = splits.next(tables, dims);
        }
    }
}

/// The warps that load q, as the splits of a result have it in common.
///
/// # Safety
/// - Threads 32 to 127; the rest is the caller's promise to [`super::splits`].
#[inline(always)]
pub(super) unsafe fn load_queries<T: Multiplicand>(q: *const T, tables: Tables, dims: &AttentionDims) {
    let lane = thread::lane();
    // Row and piece of each lot: four rows' pieces are three of each thread.
    let mut lots = [[0; 2]; Q_LOTS];
    let mut i = 0;
    while i < Q_LOTS {
        let piece = i as u32 * Q_THREADS + thread::thread_idx_x() - 32;
        lots[i] = [piece / (BOXES * 8), piece % (BOXES * 8)];
        i += 1;
    }
    let mut splits = Splits::new(dims, true);
    let mut turn = Turn(0);
    // SAFETY: rows below `end_row` are inside q; a place is written when the warpgroup of scores has given it back.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        while work.has_keys() {
            if splits.is_first {
                mbarrier::wait_parity(turn.empty_q(), turn.parity() ^ 1);
                // Each lane finds a row, the last one instead of those that there are not, of which there are zeros.
                let (query, head) = work.place((work.first_row + lane).min(work.end_row - 1), dims);
                let query = work.own.first_q + query;
                let strides = (dims.q_batch_stride, dims.q_token_stride, dims.q_head_stride);
                let of_lane = offset(work.batch, strides.0, query, strides.1, head, strides.2) as u64;
                let num_rows = work.end_row - work.first_row;
                let mut first_row = 0;
                while first_row < ROWS {
                    let mut i = 0;
                    while i < Q_LOTS {
                        let (row, piece) = (first_row + lots[i][0], lots[i][1]);
                        let to = turn.q()
                            + (piece / 8 * ROWS + row) * ROW_BYTES
                            + (((piece % 8) ^ (row % 8)) << 4);
                        let [low, high] = [of_lane as u32, (of_lane >> 32) as u32]
                            .map(|half| warp::shuffle_idx(warp::FULL_MASK, half, row));
                        let at = u64::from(low) | u64::from(high) << 32;
                        let from = q.wrapping_add(at as usize + piece as usize * 8);
                        cp_async::cg_16_fill(to, from, if row < num_rows { 16 } else { 0 });
                        i += 1;
                    }
                    // Opaque, so that the loop stays one.
                    first_row = thread::opaque(first_row + Q_LOT_ROWS);
                }
                cp_async::commit_group();
                cp_async::wait_group::<0>();
                fence::proxy_async_shared();
                mbarrier::arrive(turn.full_q());
                turn.0 += 1;
            }
            work = splits.next(tables, dims);
        }
    }
}
