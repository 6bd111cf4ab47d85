//! Sampling: a token per row of logits, the largest one or one by its probability.
//!
//! Work split: a block of 1024 threads per row, which walks over the row a few times: from L2 after the first time,
//! since a row has more than shared memory holds. All sums are of integers (`abi::ops::sampling`), so neither their
//! order nor the number of threads shows in a result.
//!
//! ```text
//! greedy   walk 1    max of (key, −index)
//! random   walk 1    the same, for the maximum
//!          walks 2–4 if top_k: the key of the k-th largest
//!          walk 5    the weight of what is left
//!          walks 6–8 if top_p: the key at which the weight reaches top_p
//!          walk 9    the token at the drawn point: a 32nd of the row per warp, then a 32nd of that, …
//! ```
//!
//! 1. Thresholds without sorting: 11 bits of the key at a time, a histogram in shared memory says in which bin the k-th
//!    largest lies (or the bin at which the weight is reached), and the next walk looks into that bin alone. 16-bit
//!    logits are told apart by 22 bits, so they take two walks instead of three.
//! 2. Counts and weights are the same search: a count is a weight of 1. A bin is 64 bits wide but has 32-bit atomics: the
//!    upper word is touched only by a carry and by the few weights beyond 2^32.
//! 3. What is kept is a key and a number of ties: every larger key, and that many of the equal ones, lowest index first.
//!
//! ```text
//! shared   | partials: u64 per warp | found: 4 u64 | histogram: 2048 u64 |
//! ```

use abi::ops::sampling::{
    BINS, DIGIT_SHIFTS, GreedyDims, RandomDims, THREADS, TOP_P_ONE, draw, key, logit, nucleus, point, smem,
    ties, weight,
};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

use crate::tile::scan::{block_max_u64, block_scan_u64, load_u64, shuffle_idx_u64, store_u64, warp_scan_u64};

/// Calls `visit(index, logit)` for this thread's share of `start..end`: pieces of `PIECE` elements (1, or as many as 16
/// bytes hold), `member` of `members` in turn.
///
/// # Safety
/// - `start..end` is *in-bounds(the row)*; for pieces of 16 bytes both are multiples of `PIECE`, and the row is
///   *aligned(16)* — checked in `Sampler::run`.
#[inline(always)]
unsafe fn for_each<T: Element, const PIECE: u32>(
    row: *const T,
    start: u32,
    end: u32,
    member: u32,
    members: u32,
    mut visit: impl FnMut(u32, f32),
) {
    let mut first = start + member * PIECE;
    if PIECE == 1 {
        const HELD: usize = 4;
        while first < end {
            let mut held = [0.0; HELD];
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * members;
                if index < end {
                    // SAFETY: inside the row — the caller.
                    held[i] = unsafe { global::load(row.add(index as usize)) }.to_f32();
                }
                i += 1;
            }
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * members;
                if index < end {
                    visit(index, held[i]);
                }
                i += 1;
            }
            first += HELD as u32 * members;
        }
    } else {
        const HELD: usize = 2;
        while first < end {
            let mut held = [[0u32; 4]; HELD];
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * members * PIECE;
                if index < end {
                    // SAFETY: inside the row and aligned — the caller.
                    held[i] = unsafe { global::load_nc_x4(row.add(index as usize)) };
                }
                i += 1;
            }
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * members * PIECE;
                if index < end {
                    let mut values = [0.0; 8];
                    T::unpack(held[i], &mut values);
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        visit(index + j as u32, values[j]);
                        j += 1;
                    }
                }
                i += 1;
            }
            first += HELD as u32 * members * PIECE;
        }
    }
}

/// Key and index of the largest logit, the lowest index among equals: NaN counts least, so 0 if there is nothing else.
///
/// # Safety
/// - *converged*: all threads of the block; the row is *in-bounds* as for [`for_each`].
#[inline(always)]
unsafe fn argmax<T: Element, const PIECE: u32>(row: *const T, vocab: u32) -> (u32, u32) {
    // A thread sees its indices in ascending order, so only a larger key replaces.
    let (mut best_key, mut best_index) = (0, u32::MAX);
    // SAFETY: the whole row — the caller; the partials are used by nothing else.
    let best = unsafe {
        for_each::<T, PIECE>(row, 0, vocab, thread::thread_idx_x(), THREADS, |index, value| {
            let key = key(value);
            if key > best_key {
                (best_key, best_index) = (key, index);
            }
        });
        block_max_u64(u64::from(best_key) << 32 | u64::from(!best_index), shared::base() + smem::PARTIALS)
    };
    let key = (best >> 32) as u32;
    (key, if key == 0 { 0 } else { !(best as u32) })
}

/// The key at which the weights, summed from the largest key down, reach `target`, and the sum over the keys above it.
///
/// # Safety
/// - *converged*: all threads of the block; the row is *in-bounds* as for [`for_each`].
/// - The weights of the whole row sum up to `target` or more, and `target` is at least 1.
#[inline(always)]
unsafe fn threshold<T: Element, const PIECE: u32>(
    row: *const T,
    vocab: u32,
    target: u64,
    weight_of: impl Fn(f32) -> u64,
) -> (u32, u64) {
    let last_shift = if T::PER_16_BYTES == 8 { DIGIT_SHIFTS[1] } else { DIGIT_SHIFTS[2] };
    let base = shared::base();
    let histogram = base + smem::HISTOGRAM;
    let member = thread::thread_idx_x();
    // This thread's two bins; thread 0 has the highest.
    let high_bin = BINS - 1 - 2 * member;
    let (mut prefix, mut mask, mut above) = (0u32, 0u32, 0u64);
    let mut shift = thread::opaque(DIGIT_SHIFTS[0]);
    loop {
        // SAFETY: two bins per thread are the whole histogram. Between the barriers bins are touched by atomics only;
        // they are read after the second, and cleared again after those of the scan. Exactly one thread's bins hold the
        // target, so one writes what is found; the next write comes barriers later.
        unsafe {
            store_u64(histogram + 8 * high_bin, 0);
            store_u64(histogram + 8 * (high_bin - 1), 0);
            thread::sync_threads();
            for_each::<T, PIECE>(row, 0, vocab, member, THREADS, |_, value| {
                let key = key(value);
                if key & mask == prefix {
                    add_to_bin(histogram + 8 * ((key >> shift) & (BINS - 1)), weight_of(value));
                }
            });
            thread::sync_threads();
            let high = load_u64(histogram + 8 * high_bin);
            let low = load_u64(histogram + 8 * (high_bin - 1));
            let before = above + block_scan_u64(high + low, base + smem::PARTIALS).before;
            if before < target && target <= before + high + low {
                let is_high = target <= before + high;
                shared::store_u32(base + smem::FOUND, if is_high { high_bin } else { high_bin - 1 });
                store_u64(base + smem::FOUND + 8, if is_high { before } else { before + high });
            }
            thread::sync_threads();
            prefix |= shared::load_u32(base + smem::FOUND) << shift;
            above = load_u64(base + smem::FOUND + 8);
        }
        if shift <= last_shift {
            break;
        }
        mask = u32::MAX << shift;
        shift = shift.saturating_sub(11);
    }
    // The bits that no 16-bit logit has, as its key has them: keys of negative numbers are inverted.
    let unseen = (1 << last_shift) - 1;
    (if prefix >> 31 == 1 { prefix } else { prefix | unseen }, above)
}

/// Adds to a 64-bit bin with 32-bit atomics: the sum is exact once all threads are done, whatever their order.
///
/// # Safety
/// - *aligned(8)* and *in-bounds(histogram)*; between the barriers of [`threshold`].
#[inline(always)]
unsafe fn add_to_bin(address: u32, weight: u64) {
    if weight == 0 {
        return;
    }
    let (low, high) = (weight as u32, (weight >> 32) as u32);
    // SAFETY: the caller's promise.
    unsafe {
        let old = shared::add_u32(address, low);
        let carry = u32::from(old.wrapping_add(low) < low);
        if high + carry != 0 {
            shared::add_u32(address + 4, high + carry);
        }
    }
}

/// The tokens that may be drawn: those above a key, and some of those at it.
#[derive(Clone, Copy)]
struct Kept {
    key: u32,
    /// Weight of a token at the key.
    tie_weight: u64,
    /// Tokens at the key that are kept, lowest index first.
    num_ties: u64,
    /// Weight of all.
    total: u64,
}

impl Kept {
    /// Weight of the kept ones among tokens of which those above the key weigh `above`, and `num_ties` are at it.
    #[inline(always)]
    fn sum(&self, above: u64, num_ties: u64) -> u64 {
        above + num_ties.min(self.num_ties) * self.tie_weight
    }
}

/// The kept token in whose stretch of the running sum, by ascending index, `target` lies.
///
/// # Safety
/// - *converged*: all threads of the block; the row is *in-bounds* as for [`for_each`].
/// - `target < kept.total`.
#[inline(always)]
unsafe fn find<T: Element, const PIECE: u32>(
    row: *const T,
    vocab: u32,
    kept: Kept,
    target: u64,
    weight_of: impl Fn(f32) -> u64,
) -> u32 {
    let base = shared::base();
    let (lane, warp) = (thread::lane(), thread::warp_idx());
    // What lies before `start`: weight above the key, and ties.
    let (mut start, mut len, mut above, mut num_ties) = (0, vocab, 0u64, 0u64);
    while len > 32 {
        let span = len.div_ceil(32).next_multiple_of(PIECE);
        let from = (start + warp * span).min(start + len);
        let to = (from + span).min(start + len);
        let (mut my_above, mut my_ties) = (0u64, 0u64);
        // SAFETY: all threads go through the loop together, as `len` is the same for all. Ranges of the warps lie in the
        // row, in multiples of PIECE, as `vocab` is one. The running sum grows through the warps and the target is
        // below its end, so exactly one warp finds it; the next write comes barriers later.
        unsafe {
            for_each::<T, PIECE>(row, from, to, lane, 32, |_, value| {
                let key = key(value);
                my_above += if key > kept.key { weight_of(value) } else { 0 };
                my_ties += u64::from(key == kept.key);
            });
            let above_before = above + block_scan_u64(my_above, base + smem::PARTIALS).before;
            let ties_before = num_ties + block_scan_u64(my_ties, base + smem::PARTIALS).before;
            let (above_after, ties_after) = (above_before + my_above, ties_before + my_ties);
            // Of the whole warp: from before its first lane to after its last.
            let (above_before, ties_before) =
                (shuffle_idx_u64(above_before, 0), shuffle_idx_u64(ties_before, 0));
            let (above_after, ties_after) =
                (shuffle_idx_u64(above_after, 31), shuffle_idx_u64(ties_after, 31));
            let is_here =
                kept.sum(above_before, ties_before) <= target && target < kept.sum(above_after, ties_after);
            if is_here && lane == 0 {
                shared::store_u32(base + smem::FOUND, from);
                shared::store_u32(base + smem::FOUND + 4, to - from);
                store_u64(base + smem::FOUND + 8, above_before);
                store_u64(base + smem::FOUND + 16, ties_before);
            }
            thread::sync_threads();
            start = shared::load_u32(base + smem::FOUND);
            len = shared::load_u32(base + smem::FOUND + 4);
            above = load_u64(base + smem::FOUND + 8);
            num_ties = load_u64(base + smem::FOUND + 16);
        }
    }
    // One lane per token; every warp does the same.
    let (mut my_above, mut my_ties) = (0u64, 0u64);
    // SAFETY: lane < len keeps the access inside the row; whole warps take part in the scans.
    unsafe {
        if lane < len {
            let value = global::load(row.add((start + lane) as usize)).to_f32();
            let key = key(value);
            my_above = if key > kept.key { weight_of(value) } else { 0 };
            my_ties = u64::from(key == kept.key);
        }
        let (above_after, ties_after) = (above + warp_scan_u64(my_above), num_ties + warp_scan_u64(my_ties));
        let passed = kept.sum(above_after, ties_after) > target;
        // The first lane that passes the target; there is one, as the target is in this range.
        start + cuda_std::warp::ballot(cuda_std::warp::FULL_MASK, passed).trailing_zeros()
    }
}

/// The largest logit of a row.
///
/// # Safety
/// - One block of [`THREADS`] per row; rows *in-bounds*, for pieces of 16 bytes *aligned(16)* — checked in
///   `Sampler::run`.
#[inline(always)]
unsafe fn greedy<T: Element, const PIECE: u32>(logits: *const T, ids: *mut u32, dims: &GreedyDims) {
    let row = thread::block_idx_x() as usize;
    // SAFETY: row < rows, as the grid has `rows` blocks — Sampler::run.
    unsafe {
        let (_, index) = argmax::<T, PIECE>(logits.add(row * dims.logits_stride as usize), dims.vocab);
        if thread::thread_idx_x() == 0 {
            global::store(ids.add(row), index);
        }
    }
}

/// A token of a row by its probability.
///
/// # Safety
/// - As [`greedy`].
#[inline(always)]
unsafe fn random<T: Element, const PIECE: u32>(logits: *const T, ids: *mut u32, dims: &RandomDims) {
    let (block, member, vocab) = (thread::block_idx_x(), thread::thread_idx_x(), dims.vocab);
    let mut chosen = 0;
    // SAFETY: block < rows, as the grid has `rows` blocks — Sampler::run. All branches around barriers are the same
    // for all threads: they depend on parameters and on what the whole block found. The targets are within reach: top_k
    // is at most `vocab`, the nucleus and the point at most what the sum was.
    unsafe {
        let row = logits.add(block as usize * dims.logits_stride as usize);
        let (max_key, _) = argmax::<T, PIECE>(row, vocab);
        if max_key != 0 {
            let max = logit(max_key);
            let weight_of = |value: f32| weight(value, max, dims.scale);
            // Without bounds everything is above the key: NaN, at 0, has no weight anyway.
            let mut kept = Kept { key: 0, tie_weight: 0, num_ties: 0, total: 0 };
            // By count, then by weight: one loop, so that the large search is there once.
            let mut search = thread::opaque(0);
            while search < 2 {
                let by_count = search == 0;
                let (is_bounded, target) = if by_count {
                    (dims.top_k < vocab, u64::from(dims.top_k))
                } else {
                    (dims.top_p_q32 < TOP_P_ONE, nucleus(kept.total, dims.top_p_q32))
                };
                if is_bounded {
                    // Among the ties at the top-k key, none that is not kept is reached: the kept ones suffice.
                    let (key, above) = threshold::<T, PIECE>(row, vocab, target, |value| {
                        if by_count { 1 } else { weight_of(value) }
                    });
                    let (gap, tie_weight) = (target - above, weight_of(logit(key)));
                    let num_ties = ties(gap, if by_count { 1 } else { tie_weight });
                    kept = Kept { key, tie_weight, num_ties, total: above + num_ties * tie_weight };
                }
                if by_count {
                    let mut my_above = 0u64;
                    for_each::<T, PIECE>(row, 0, vocab, member, THREADS, |_, value| {
                        my_above += if key(value) > kept.key { weight_of(value) } else { 0 };
                    });
                    let above = block_scan_u64(my_above, shared::base() + smem::PARTIALS).total;
                    kept.total = kept.sum(above, kept.num_ties);
                }
                search += 1;
            }
            let target = point(draw(dims.seed, dims.step, block), kept.total);
            chosen = find::<T, PIECE>(row, vocab, kept, target, weight_of);
        }
        if member == 0 {
            global::store(ids.add(block as usize), chosen);
        }
    }
}

macro_rules! piece {
    (Vector, $type:ident) => {{ <$type as Element>::PER_16_BYTES as u32 }};
    (Scalar, $type:ident) => {
        1
    };
}

macro_rules! entry {
    ($entry:ident, $type:ident, Greedy, $access:ident) => {
        /// Entry point; see the module and `abi::ops::sampling`.
        ///
        /// # Safety
        /// - Arguments as `Sampler::run` checks them.
        #[kernel(max_threads = 1024, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(logits: *const $type, ids: *mut u32, dims: GreedyDims) {
            // SAFETY: one block per row — Sampler::run.
            unsafe { greedy::<$type, { piece!($access, $type) }>(logits, ids, &dims) }
        }
    };
    ($entry:ident, $type:ident, Random, $access:ident) => {
        /// Entry point; see the module and `abi::ops::sampling`.
        ///
        /// # Safety
        /// - Arguments as `Sampler::run` checks them.
        #[kernel(max_threads = 1024, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(logits: *const $type, ids: *mut u32, dims: RandomDims) {
            // SAFETY: one block per row — Sampler::run.
            unsafe { random::<$type, { piece!($access, $type) }>(logits, ids, &dims) }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $method:ident, $access:ident;)*) => {$(
        entry!($entry, $type, $method, $access);
    )*};
}
abi::sampling_table!(entries);
