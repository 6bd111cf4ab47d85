//! The merge without a launch of its own, where each block has one split: the last one to be done of those of a tile's
//! rows merges their results, by the operations of `merge`. Which one that is does not tell in the bits.

use abi::ops::attention::AttentionDims;
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::Element;
use cuda_std::{grid, shared, thread};

use super::super::Tables;
use super::super::merge::{self, Place, WARP_COLUMNS};
use super::super::work::{Splits, Work};
use super::WARPS;

/// Where merged results go, and what is needed for it.
pub(super) struct Merged<T> {
    /// `[sequence, key head, tile of rows]`: splits that are done; 0 before a launch and behind it.
    pub(super) counters: *mut u32,
    pub(super) out: *mut T,
    pub(super) lse: *mut f32,
    pub(super) sinks: *const f32,
}

/// Says that the block's split is done, and merges the rows if all are.
///
/// # Safety
/// - *converged*: all threads of the block, which have stored its results, and have no copies to shared memory under
///   way; a block for each tile of rows, key head, split and sequence, and counters of all but the splits; out, lse and
///   sinks as for `merge` — `Attention::run`.
#[inline(always)]
pub(super) unsafe fn merge_last<T: Element, const ROWS: u32>(
    partial: *const f32,
    stats: *const f32,
    tables: Tables,
    to: &Merged<T>,
    dims: &AttentionDims,
) {
    if dims.merges == 1 {
        grid::near_end();
    }
    // SAFETY: the caller's promise. What the branches around barriers depend on is the same in the whole block: numbers
    // of the block, and a word that all read behind the barrier after which it is written. The results of the other
    // blocks are visible: they are stored ahead of a barrier and of an addition that releases, and this block's addition
    // acquires, ahead of its barrier. All splits in which a row sees a key are among those counted.
    unsafe {
        let work: Work<ROWS> = Splits::only(tables, dims);
        let Work { batch, head_kv, split, first_row, end_row, .. } = work;
        if first_row >= end_row {
            return;
        }
        let [first, end] = work.splits_seen(dims);
        // Rows that see no key have one block all the same: the first split's.
        let blocks = (end - first).max(1);
        if split.wrapping_sub(first) >= blocks {
            return;
        }
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let at = (batch * dims.heads_kv + head_kv) * dims.tiles + first_row / ROWS;
            let counter = to.counters.add(at as usize);
            let is_last = atomic::add_u32(counter, 1, Order::AcqRel) + 1 == blocks;
            if is_last {
                atomic::store_u32(counter, 0, Order::Relaxed);
            }
            shared::store_u32(shared::base(), u32::from(is_last));
        }
        thread::sync_threads();
        if shared::load_u32(shared::base()) == 0 {
            return;
        }
        let pieces = dims.head_dim_v.div_ceil(WARP_COLUMNS).max(1);
        let mut item = thread::warp_idx();
        while item < (end_row - first_row) * pieces {
            let (row, piece) = (first_row + item / pieces, item % pieces);
            let (query, head) = work.place(row, dims);
            let at = Place { batch, query, head, piece };
            merge::by_warp(at, partial, stats, tables, to.out, to.lse, to.sinks, dims);
            // Opaque, so that the loop stays one.
            item = thread::opaque(item + WARPS);
        }
    }
}
