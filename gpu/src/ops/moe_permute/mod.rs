//! Sorting (token, expert) pairs by expert: a counting sort that keeps the order of each expert's pairs.
//!
//! | kernels | for | work split |
//! |---|---|---|
//! | `Block` | not too many pairs | a block per chunk of pairs, which counts all others too |
//! | `Count`, `Scan`, `Scatter` | many | a block per chunk; one; a block per chunk |
//!
//! A block gives each of its warps a stretch of its pairs and a histogram in shared memory:
//!
//! ```text
//! pairs       | warp 0 …      | warp 1 …      | …        histograms   bin 0  1  2 … experts (pairs of no expert)
//! ids         | 3 0 3 7 …     | 0 0 5 …       | …        warp 0           1  0  0
//!                                                        warp 1           2  0  0
//! 1. each warp counts its pairs
//! 2. a thread per bin: where the bin begins (a scan over the bins, or the work of `Scan`) and how many are in it
//!    before the chunk, then running sums down the warps: each warp's count becomes the place of its first pair
//! 3. each warp goes through its pairs in order, 32 at a time: the lanes with the same id find one another by a ballot
//!    for each bit of the id, and take places in the order of lanes
//! ```
//!
//! Where tokens are of kinds, each kind has bins of its own: they are what the text calls experts.
//!
//! Counts are integers and places follow from them, so nothing depends on timing. Bound by latency for few pairs, and
//! by the scattered stores for many.

use abi::ops::moe_permute::{MoePermuteDims, NO_POSITION, THREADS, bins, smem};
use cuda_std::warp::{FULL_MASK, ballot, sync_warp};
use cuda_std::{global, kernel, shared, thread};

use crate::tile::scan::block_scan_u64;

/// What says which bin a pair has.
#[derive(Clone, Copy)]
struct Keys {
    ids: *const u32,
    /// The kind of each token; null where all are of one.
    kinds: *const u32,
}

impl Keys {
    /// The bin of a pair; of an id below the first expert's that of no expert, as the difference wraps.
    ///
    /// # Safety
    /// - The pair *in-bounds*.
    #[inline(always)]
    unsafe fn bin(self, pair: u32, dims: &MoePermuteDims) -> u32 {
        // SAFETY: the caller's promise; top_k is at least 1, as `max` tells the compiler.
        unsafe {
            let expert = global::load(self.ids.add(pair as usize)).wrapping_sub(dims.first_expert);
            if self.kinds.is_null() {
                return expert.min(dims.experts);
            }
            let kind = global::load(self.kinds.add((pair / dims.top_k.max(1)) as usize));
            if expert < dims.experts && kind < dims.kinds { kind * dims.experts + expert } else { none(dims) }
        }
    }
}

/// The bin of the pairs of no expert, the last one.
#[inline(always)]
fn none(dims: &MoePermuteDims) -> u32 {
    dims.kinds * dims.experts
}

/// Shared address of a warp's count of a bin.
#[inline(always)]
fn count_at(warp: u32, bin: u32, dims: &MoePermuteDims) -> u32 {
    shared::base() + smem::HISTOGRAMS + 4 * (warp * bins(none(dims)) + bin)
}

/// Shared address of the count of a bin's pairs in chunks before the block's, or behind it.
#[inline(always)]
fn others_at(is_behind: bool, bin: u32, dims: &MoePermuteDims) -> u32 {
    count_at(dims.warps, u32::from(is_behind) * bins(none(dims)) + bin, dims)
}

/// The pairs of this thread's warp, which are a multiple of 32 but for the last: from, to.
#[inline(always)]
fn pairs_of_warp(dims: &MoePermuteDims) -> (u32, u32) {
    let start = thread::block_idx_x() * dims.block_pairs;
    let end = dims.pairs.min(start + dims.block_pairs);
    // At least 1 — MoePermute::run; `max` tells the compiler, which would otherwise keep a panic path.
    let share = dims.block_pairs.div_ceil(dims.warps.max(1)).next_multiple_of(32);
    let from = start.saturating_add(thread::warp_idx().saturating_mul(share)).min(end);
    (from, from.saturating_add(share).min(end))
}

/// Every warp's count of each bin. One barrier before and one after.
///
/// # Safety
/// - *converged*: all threads of the block; `keys` *in-bounds* for `dims` — checked in `MoePermute::run`.
#[inline(always)]
unsafe fn count(keys: Keys, dims: &MoePermuteDims) {
    let mut word = thread::thread_idx_x();
    // SAFETY: words of the histograms; between the barriers they are touched by atomics only.
    unsafe {
        while word < dims.warps * bins(none(dims)) {
            shared::store_u32(count_at(0, word, dims), 0);
            word += THREADS;
        }
        thread::sync_threads();
        if thread::warp_idx() < dims.warps {
            let (from, to) = pairs_of_warp(dims);
            let mut pair = from + thread::lane();
            while pair < to {
                let bin = keys.bin(pair, dims);
                shared::add_u32(count_at(thread::warp_idx(), bin, dims), 1);
                pair += 32;
            }
        }
        thread::sync_threads();
    }
}

/// Pairs of a thread that are loaded side by side.
const SIDE_BY_SIDE: usize = 8;

/// The counts of each bin in all other chunks. One barrier before and one after.
///
/// # Safety
/// - As for [`count`].
#[inline(always)]
unsafe fn count_others(keys: Keys, dims: &MoePermuteDims) {
    let start = thread::block_idx_x() * dims.block_pairs;
    let end = start.saturating_add(dims.block_pairs);
    let mut word = thread::thread_idx_x();
    // SAFETY: words of two histograms; between the barriers they are touched by atomics only.
    unsafe {
        while word < 2 * bins(none(dims)) {
            shared::store_u32(others_at(false, word, dims), 0);
            word += THREADS;
        }
        thread::sync_threads();
        let mut first = thread::thread_idx_x();
        while first < dims.pairs {
            let pair = |i: usize| first + i as u32 * THREADS;
            let mut found = [0; SIDE_BY_SIDE];
            let mut i = 0;
            while i < SIDE_BY_SIDE {
                if pair(i) < dims.pairs {
                    found[i] = keys.bin(pair(i), dims);
                }
                i += 1;
            }
            let mut i = 0;
            while i < SIDE_BY_SIDE {
                if pair(i) < start || (pair(i) >= end && pair(i) < dims.pairs) {
                    shared::add_u32(others_at(pair(i) >= end, found[i], dims), 1);
                }
                i += 1;
            }
            first += SIDE_BY_SIDE as u32 * THREADS;
        }
        thread::sync_threads();
    }
}

/// Calls `place(bin, first)` for each bin with the sum of `total(bin)` over the bins before.
///
/// # Safety
/// - *converged*: all threads of the block; the scan's scratch is used for nothing else.
#[inline(always)]
unsafe fn scan_bins(dims: &MoePermuteDims, total: impl Fn(u32) -> u32, place: impl Fn(u32, u32)) {
    let bins = bins(none(dims));
    let (mut start, mut before) = (thread::opaque(0), 0);
    while start < bins {
        let bin = start + thread::thread_idx_x();
        let own = if bin < bins { total(bin) } else { 0 };
        // SAFETY: all threads of a block of 1024 — the caller.
        let scan = unsafe { block_scan_u64(u64::from(own), shared::base() + smem::SCAN) };
        if bin < bins {
            place(bin, before + scan.before as u32);
        }
        before += scan.total as u32;
        start += THREADS;
    }
}

/// Sum of the warps' counts of a bin.
///
/// # Safety
/// - The counts are there: after [`count`].
#[inline(always)]
unsafe fn sum_of_warps(bin: u32, dims: &MoePermuteDims) -> u32 {
    let (mut sum, mut warp) = (0, 0);
    while warp < dims.warps {
        // SAFETY: a count of an existing warp and bin.
        sum += unsafe { shared::load_u32(count_at(warp, bin, dims)) };
        warp += 1;
    }
    sum
}

/// Turns the warps' counts of a bin into the places of their first pairs.
///
/// # Safety
/// - The counts are there: after [`count`]; *exclusive*: the bin is this thread's.
#[inline(always)]
unsafe fn give_places(bin: u32, mut place: u32, dims: &MoePermuteDims) {
    let mut warp = 0;
    while warp < dims.warps {
        // SAFETY: a count of an existing warp and bin.
        unsafe {
            let at = count_at(warp, bin, dims);
            let count = shared::load_u32(at);
            shared::store_u32(at, place);
            place += count;
        }
        warp += 1;
    }
}

/// Puts the pairs in their places.
///
/// # Safety
/// - *converged*: all threads of the block, after a barrier that follows [`give_places`] for every bin.
/// - Tensors *in-bounds* for `dims` — checked in `MoePermute::run`.
#[inline(always)]
unsafe fn scatter(keys: Keys, order: *mut u32, positions: *mut u32, dims: &MoePermuteDims) {
    let (warp, lane) = (thread::warp_idx(), thread::lane());
    if warp >= dims.warps {
        return;
    }
    let bins = bins(none(dims));
    let (mut first, to) = pairs_of_warp(dims);
    // SAFETY: `first` and `to` are the same for all lanes, so they stay together. The places of a bin run from its
    // start up to its count over all warps and blocks, below `pairs`, and each is taken once. A warp's places are its
    // own; they are read and changed with a barrier between.
    unsafe {
        while first < to {
            let pair = first + lane;
            // Lanes past the end have a bin that no pair has.
            let bin = if pair < to { keys.bin(pair, dims) } else { bins };
            let mut same = FULL_MASK;
            let mut bit = 0;
            while bins >> bit != 0 {
                let is_set = bin >> bit & 1 != 0;
                let with = ballot(FULL_MASK, is_set);
                same &= if is_set { with } else { !with };
                bit += 1;
            }
            let at = count_at(warp, bin, dims);
            if pair < to {
                let place = shared::load_u32(at) + (same & ((1 << lane) - 1)).count_ones();
                // Not so only where somebody has changed the ids since they were counted.
                if place < dims.pairs {
                    global::store(order.add(place as usize), pair);
                }
                global::store(
                    positions.add(pair as usize),
                    if bin < none(dims) { place } else { NO_POSITION },
                );
            }
            sync_warp(FULL_MASK);
            if pair < to && same >> lane == 1 {
                shared::store_u32(at, shared::load_u32(at) + same.count_ones());
            }
            sync_warp(FULL_MASK);
            first += 32;
        }
    }
}

/// All of it.
///
/// # Safety
/// - A block of [`THREADS`] per chunk; tensors *in-bounds* for `dims` — checked in `MoePermute::run`.
#[inline(always)]
unsafe fn block(keys: Keys, offsets: *mut u32, order: *mut u32, positions: *mut u32, dims: &MoePermuteDims) {
    let has_others = dims.pairs > dims.block_pairs;
    // SAFETY: each bin is one thread's, and read by others only after the barrier. Offsets are the first block's.
    unsafe {
        count(keys, dims);
        if has_others {
            count_others(keys, dims);
        }
        let others = |is_behind: bool, bin: u32| {
            if has_others { shared::load_u32(others_at(is_behind, bin, dims)) } else { 0 }
        };
        scan_bins(
            dims,
            |bin| others(false, bin) + sum_of_warps(bin, dims) + others(true, bin),
            |bin, place| {
                if thread::block_idx_x() == 0 {
                    global::store(offsets.add(bin as usize), place);
                }
                give_places(bin, place + others(false, bin), dims);
            },
        );
        thread::sync_threads();
        scatter(keys, order, positions, dims);
    }
}

/// The counts of this block's chunk.
///
/// # Safety
/// - A block of [`THREADS`] per chunk; `counts` holds a word per chunk and bin — MoePermute::run.
#[inline(always)]
unsafe fn count_chunk(keys: Keys, counts: *mut u32, dims: &MoePermuteDims) {
    let bins = bins(none(dims));
    // SAFETY: bins of this chunk, one thread each.
    unsafe {
        count(keys, dims);
        let mut bin = thread::thread_idx_x();
        while bin < bins {
            let to = thread::block_idx_x() as usize * bins as usize + bin as usize;
            global::store(counts.add(to), sum_of_warps(bin, dims));
            bin += THREADS;
        }
    }
}

/// The counts of all chunks become the places of their first pairs.
///
/// # Safety
/// - One block of [`THREADS`], after [`count_chunk`] of every chunk.
#[inline(always)]
unsafe fn scan_chunks(counts: *mut u32, offsets: *mut u32, dims: &MoePermuteDims) {
    let bins = bins(none(dims)) as usize;
    // At least 1 — MoePermute::run.
    let chunks = dims.pairs.div_ceil(dims.block_pairs.max(1));
    let at = |chunk: u32, bin: u32| counts.wrapping_add(chunk as usize * bins + bin as usize);
    // SAFETY: counts of existing chunks and bins; each bin is one thread's.
    unsafe {
        scan_bins(
            dims,
            |bin| {
                let (mut sum, mut chunk) = (0, 0);
                while chunk < chunks {
                    sum += global::load(at(chunk, bin).cast_const());
                    chunk += 1;
                }
                sum
            },
            |bin, mut place| {
                global::store(offsets.add(bin as usize), place);
                let mut chunk = 0;
                while chunk < chunks {
                    let count = global::load(at(chunk, bin).cast_const());
                    global::store(at(chunk, bin), place);
                    place += count;
                    chunk += 1;
                }
            },
        );
    }
}

/// Puts the pairs of this block's chunk in their places.
///
/// # Safety
/// - A block of [`THREADS`] per chunk, after [`scan_chunks`]; tensors *in-bounds* for `dims` — MoePermute::run.
#[inline(always)]
unsafe fn scatter_chunk(
    keys: Keys,
    counts: *const u32,
    order: *mut u32,
    positions: *mut u32,
    dims: &MoePermuteDims,
) {
    let bins = bins(none(dims));
    // SAFETY: bins of this chunk, one thread each, read by others only after the barrier.
    unsafe {
        count(keys, dims);
        let mut bin = thread::thread_idx_x();
        while bin < bins {
            let from = thread::block_idx_x() as usize * bins as usize + bin as usize;
            give_places(bin, global::load(counts.add(from)), dims);
            bin += THREADS;
        }
        thread::sync_threads();
        scatter(keys, order, positions, dims);
    }
}

macro_rules! body {
    (Block, $keys:ident, $counts:ident, $offsets:ident, $order:ident, $positions:ident, $dims:expr) => {
        block($keys, $offsets, $order, $positions, $dims)
    };
    (Count, $keys:ident, $counts:ident, $offsets:ident, $order:ident, $positions:ident, $dims:expr) => {
        count_chunk($keys, $counts, $dims)
    };
    (Scan, $keys:ident, $counts:ident, $offsets:ident, $order:ident, $positions:ident, $dims:expr) => {
        scan_chunks($counts, $offsets, $dims)
    };
    (Scatter, $keys:ident, $counts:ident, $offsets:ident, $order:ident, $positions:ident, $dims:expr) => {
        scatter_chunk($keys, $counts, $order, $positions, $dims)
    };
}

macro_rules! entries {
    ($($entry:ident => $stage:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::moe_permute`.
        ///
        /// # Safety
        /// - Arguments as `MoePermute::run` checks them.
        #[kernel(max_threads = 1024)]
        #[allow(non_snake_case, unused_variables)]
        pub unsafe fn $entry(
            ids: *const u32,
            kinds: *const u32,
            counts: *mut u32,
            offsets: *mut u32,
            order: *mut u32,
            positions: *mut u32,
            dims: MoePermuteDims,
        ) {
            let keys = Keys { ids, kinds };
            // SAFETY: the same contract.
            unsafe { body!($stage, keys, counts, offsets, order, positions, &dims) }
        }
    )*};
}
abi::moe_permute_table!(entries);
