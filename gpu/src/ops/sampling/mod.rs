//! Sampling: a token per row of logits, the largest one or one by its probability.
//!
//! Work split: walks over the row, a launch each, since one waits for what the one before has found. Up to [`MAX_SLICES`] blocks of 1024 threads share
//! a row, as many as there are multiprocessors for the rows. Each leaves two numbers of its slice and adds to the row's histogram in device memory;
//! the next walk's blocks each make of these what all of the row come to. All sums are of integers (`abi::ops::sampling`), so neither their
//! order nor the number of threads or slices shows in a result.
//!
//! ```text
//! Largest     max of (key, −index)                                       greedy: alone, or with Choose behind it
//! Count × 3   if top_k: the key of the k-th largest
//! Weigh × 3   if top_p: the key at which the weight reaches top_p; the first also what there is to be reached
//! Sum         the weight of what is kept
//! Choose      a block per row: the slice of the drawn point, a 32nd of it per warp, then a 32nd of that, …
//! ```
//!
//! 1. Thresholds without sorting: 11 bits of the key at a time, a histogram says in which bin the k-th
//!    largest lies (or the bin at which the weight is reached), and the next walk looks into that bin alone. 16-bit
//!    logits are told apart by 22 bits, so they take two walks instead of three.
//! 2. Counts and weights are the same search: a count is a weight of 1. A bin is 64 bits wide but has 32-bit atomics: the
//!    upper word is touched only by a carry and by the few weights beyond 2^32. A block has bins of its own in shared memory, and adds those that
//!    are not 0 to the row's.
//! 3. What is kept is a key and a number of ties: every larger key, and that many of the equal ones, lowest index first.
//!
//! ```text
//! shared   | partials: u64 per warp | found: 4 u64 | histogram: 2048 u64 |
//! device   | state × 2 | two u64 per slice × 2 | histogram × 3 | per row: `abi::ops::sampling::record`
//! ```
//!
//! # Measured on an H100, 151,936 logits, f32 (µs: a block per row and all walks in one launch / this / the faster of PyTorch's eager and inductor)
//!
//! | rows | greedy | temperature | top_k 20, top_p 0.95 |
//! |---|---|---|---|
//! | 1 | 17.7 / 4.2 / 10.4 | 121 / 15.7 / 57.3 | 221 / 44.1 / 73.5 |
//! | 8 | 18.0 / 6.3 / 12.0 | | 223 / 59.8 / 87.4 |
//! | 32 | 18.5 / 11.1 / 20.4 | | 225 / 106 / 130 |
//! | 128 | 29.1 / 29.6 / 42.9 | | 309 / 369 / 478 |
//!
//! By one block a walk over a row took 15 to 25 µs. Of one row it now takes 2 µs where it looks for the largest, and 5 where it looks at digits: accesses and barriers that
//! wait for each other (and the same with what the walk before has left asked for at once, before it was needed, 44.1). Of 128 rows a walk is 78 MB, more
//! than L2 has, and waits for all blocks of the one before, which walks in one launch did not; 64 rows at a time, by two blocks each, 373. More loads of a
//! thread on their way (`for_each`) have not been tried.

use abi::ops::sampling::{
    BINS, MAX_SLICES, SamplingDims, THREADS, Task, digit_shift, digits, draw, key, logit, nucleus, point,
    record, smem, ties, weight,
};
use cuda_std::atomic::{self, Order};
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

/// What is known of a row.
#[derive(Clone, Copy)]
struct State {
    /// Key and inverted index of the largest logit; a key of 0 where there are none but NaN.
    largest: u64,
    /// The upper bits of the key that is looked for.
    prefix: u32,
    /// Which bits these are.
    mask: u32,
    /// What keys above all with the prefix come to.
    above: u64,
    /// What is to be reached.
    target: u64,
    kept: Kept,
}

/// The tokens that may be drawn: those above a key, and some of those at it.
#[derive(Clone, Copy)]
struct Kept {
    key: u32,
    /// Weight of a token at the key.
    tie_weight: u64,
    /// Tokens at the key that are kept, lowest index first.
    num_ties: u64,
}

impl Kept {
    /// Weight of the kept ones among tokens of which those above the key weigh `above`, and `num_ties` are at it.
    #[inline(always)]
    fn sum(&self, above: u64, num_ties: u64) -> u64 {
        above + num_ties.min(self.num_ties) * self.tie_weight
    }
}

impl State {
    /// Without bounds everything is above the key: NaN, at 0, has no weight anyway.
    const NEW: Self = State {
        largest: 0,
        prefix: 0,
        mask: 0,
        above: 0,
        target: 0,
        kept: Kept { key: 0, tie_weight: 0, num_ties: 0 },
    };

    /// # Safety
    /// - *in-bounds(the record)*; a walk before has stored it.
    #[inline(always)]
    unsafe fn load(from: *const u64) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = global::load(from.add(1));
            State {
                largest: global::load(from),
                prefix: bits as u32,
                mask: (bits >> 32) as u32,
                above: global::load(from.add(2)),
                target: global::load(from.add(3)),
                kept: Kept {
                    key: global::load(from.add(4)) as u32,
                    tie_weight: global::load(from.add(5)),
                    num_ties: global::load(from.add(6)),
                },
            }
        }
    }

    /// # Safety
    /// - *in-bounds(the record)*, *exclusive*.
    #[inline(always)]
    unsafe fn store(&self, to: *mut u64) {
        let State { largest, prefix, mask, above, target, kept } = *self;
        let Kept { key, tie_weight, num_ties } = kept;
        let bits = u64::from(prefix) | u64::from(mask) << 32;
        let numbers = [largest, bits, above, target, u64::from(key), tie_weight, num_ties];
        let mut i = 0;
        while i < numbers.len() {
            // SAFETY: the caller's promise.
            unsafe { global::store(to.add(i), numbers[i]) };
            i += 1;
        }
    }

    #[inline(always)]
    fn weight_of(&self, value: f32, dims: &SamplingDims) -> u64 {
        weight(value, logit((self.largest >> 32) as u32), dims.scale)
    }
}

/// Where the parts of a row's record lie for a walk.
#[derive(Clone, Copy)]
struct Record {
    at: *mut u64,
    walk: u32,
}

impl Record {
    /// Of the present walk, or `back` before it: what it has found, …
    #[inline(always)]
    fn state(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::STATE + (self.walk + back) % 2 * record::STATE_LEN) as usize)
    }

    /// … two numbers of each slice, …
    #[inline(always)]
    fn slices(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::SLICES + (self.walk + back) % 2 * (2 * MAX_SLICES)) as usize)
    }

    /// … and the histogram, also that of the next walk: 2 back in the round of three.
    #[inline(always)]
    fn histogram(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::HISTOGRAMS + (self.walk + 3 - back) % 3 * BINS) as usize)
    }
}

/// What the blocks of the walk before have left, as far as a thread needs it. All of it is asked for at once: where the blocks have little to do, a walk's
/// time is that of one access waiting for another.
struct Found {
    state: State,
    /// Of the thread's slice, if it has one.
    numbers: [u64; 2],
    /// The thread's two bins, the higher first; thread 0 has the highest.
    bins: [u64; 2],
}

impl Found {
    /// # Safety
    /// - As for [`walk`], but the first one.
    #[inline(always)]
    unsafe fn load(record: Record, dims: &SamplingDims) -> Self {
        let member = thread::thread_idx_x();
        let is_first = dims.before == Task::Largest as u32;
        // SAFETY: the walk before has written its state, and two numbers or one of each slice; all bins are in the record.
        unsafe {
            let mut numbers = [0; 2];
            if member < dims.slices {
                let of_slice = record.slices(1).add(2 * member as usize);
                numbers = [global::load(of_slice), if is_first { 0 } else { global::load(of_slice.add(1)) }];
            }
            let mut bins = [0; 2];
            if dims.before == Task::Count as u32 || dims.before == Task::Weigh as u32 {
                let high = record.histogram(1).add((BINS - 1 - 2 * member) as usize);
                bins = [global::load(high), global::load(high.sub(1))];
            }
            Found { state: if is_first { State::NEW } else { State::load(record.state(1)) }, numbers, bins }
        }
    }

    /// What is known now.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; the rest as for [`Self::load`].
    #[inline(always)]
    unsafe fn resume<T: Element>(&self, dims: &SamplingDims) -> State {
        let Found { mut state, numbers, bins } = *self;
        let partials = shared::base() + smem::PARTIALS;
        let digits = digits(16 / T::PER_16_BYTES);
        // SAFETY: branches around barriers depend on parameters and on what all threads know.
        unsafe {
            if dims.before == Task::Largest as u32 {
                state.largest = block_max_u64(numbers[0], partials);
            } else if dims.before != Task::Sum as u32 && state.largest >> 32 != 0 {
                let digit = if dims.task == dims.before { dims.digit } else { digits } - 1;
                if dims.before == Task::Weigh as u32 && digit == 0 {
                    let above = block_scan_u64(numbers[0], partials).total;
                    state.target = nucleus(state.kept.sum(above, state.kept.num_ties), dims.top_p_q32);
                }
                find_bin(bins, digit_shift(digit), &mut state);
                if digit + 1 == digits {
                    // The bits that no 16-bit logit has, as its key has them: keys of negative numbers are inverted.
                    let unseen = (1 << digit_shift(digit)) - 1;
                    let key = if state.prefix >> 31 == 1 { state.prefix } else { state.prefix | unseen };
                    // Among the ties at the top-k key, none that is not kept is reached: the kept ones suffice.
                    let (gap, tie_weight) = (state.target - state.above, state.weight_of(logit(key), dims));
                    let num_ties = ties(gap, if dims.before == Task::Count as u32 { 1 } else { tie_weight });
                    state.kept = Kept { key, tie_weight, num_ties };
                }
            }
        }
        if dims.digit == 0 {
            (state.prefix, state.mask, state.above) = (0, 0, 0);
            if dims.task == Task::Count as u32 {
                state.target = u64::from(dims.top_k);
            }
        }
        state
    }
}

/// Goes on to the bin at which the sum of the bins, from the highest down, reaches the target: of each thread's two.
///
/// # Safety
/// - *converged*: all threads of the block.
/// - All bins and what is above sum up to the target or more, and that is at least 1.
#[inline(always)]
unsafe fn find_bin([high, low]: [u64; 2], shift: u32, state: &mut State) {
    let base = shared::base();
    let high_bin = BINS - 1 - 2 * thread::thread_idx_x();
    // SAFETY: exactly one thread's bins hold the target, so one writes what is found; the next write comes barriers later.
    unsafe {
        let before = state.above + block_scan_u64(high + low, base + smem::PARTIALS).before;
        if before < state.target && state.target <= before + high + low {
            let is_high = state.target <= before + high;
            shared::store_u32(base + smem::FOUND, if is_high { high_bin } else { high_bin - 1 });
            store_u64(base + smem::FOUND + 8, if is_high { before } else { before + high });
        }
        thread::sync_threads();
        state.prefix |= shared::load_u32(base + smem::FOUND) << shift;
        state.mask = u32::MAX << shift;
        state.above = load_u64(base + smem::FOUND + 8);
    }
}

/// Key and inverted index of the largest logit of a slice: the lowest index among equals.
///
/// # Safety
/// - *converged*: all threads of the block; the slice is *in-bounds* as for [`for_each`].
#[inline(always)]
unsafe fn largest<T: Element, const PIECE: u32>(row: *const T, start: u32, end: u32) -> u64 {
    // A thread sees its indices in ascending order, so only a larger key replaces.
    let (mut best_key, mut best_index) = (0, u32::MAX);
    // SAFETY: the caller's promise; the partials are used by nothing else.
    unsafe {
        for_each::<T, PIECE>(row, start, end, thread::thread_idx_x(), THREADS, |index, value| {
            let key = key(value);
            if key > best_key {
                (best_key, best_index) = (key, index);
            }
        });
        block_max_u64(u64::from(best_key) << 32 | u64::from(!best_index), shared::base() + smem::PARTIALS)
    }
}

/// Adds to the row's histogram what a slice's keys with the prefix count or weigh by their digit; the weight of the keys above the kept one where that
/// is wanted too.
///
/// # Safety
/// - *converged*: all threads of the block; the slice is *in-bounds* as for [`for_each`], the histogram *in-bounds(the record)*.
#[inline(always)]
unsafe fn add_digits<T: Element, const PIECE: u32>(
    row: *const T,
    [start, end]: [u32; 2],
    histogram: *mut u64,
    state: &State,
    dims: &SamplingDims,
) -> u64 {
    let (member, bins) = (thread::thread_idx_x(), shared::base() + smem::HISTOGRAM);
    let by_count = dims.task == Task::Count as u32;
    let shift = digit_shift(dims.digit);
    let mut above = 0;
    // SAFETY: two bins per thread are the whole histogram. Between the barriers bins are touched by atomics only.
    unsafe {
        let own = bins + 16 * member;
        shared::store_u32x4(own, [0; 4]);
        thread::sync_threads();
        for_each::<T, PIECE>(row, start, end, member, THREADS, |_, value| {
            let key = key(value);
            let is_above = !by_count && dims.digit == 0 && key > state.kept.key;
            if key & state.mask == state.prefix {
                let weight = if by_count { 1 } else { state.weight_of(value, dims) };
                add_to_bin(bins + 8 * ((key >> shift) & (BINS - 1)), weight);
                above += if is_above { weight } else { 0 };
            }
        });
        thread::sync_threads();
        let mut second = 0;
        while second < 2 {
            let sum = load_u64(own + 8 * second);
            if sum != 0 {
                let to = histogram.wrapping_add((2 * member + second) as usize).cast::<u32>();
                let (low, high) = (sum as u32, (sum >> 32) as u32);
                let old = atomic::add_u32(to, low, Order::Relaxed);
                let high = high + u32::from(old.wrapping_add(low) < low);
                if high != 0 {
                    atomic::add_u32(to.add(1), high, Order::Relaxed);
                }
            }
            second += 1;
        }
    }
    above
}

/// Adds to a 64-bit bin with 32-bit atomics: the sum is exact once all threads are done, whatever their order.
///
/// # Safety
/// - *aligned(8)* and *in-bounds(histogram)*; between the barriers of [`add_digits`].
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

/// The kept token in whose stretch of the running sum, by ascending index, `target` lies.
///
/// # Safety
/// - *converged*: all threads of the block; the slice, a first index and a length, is *in-bounds* as for [`for_each`].
/// - The token is in the slice, before which kept tokens above the key have the weight and ties are as many as `before` says.
#[inline(always)]
unsafe fn find<T: Element, const PIECE: u32>(
    row: *const T,
    [mut start, mut len]: [u32; 2],
    [mut above, mut num_ties]: [u64; 2],
    kept: Kept,
    target: u64,
    weight_of: impl Fn(f32) -> u64,
) -> u32 {
    let base = shared::base();
    let (lane, warp) = (thread::lane(), thread::warp_idx());
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

/// The token at the drawn point of what is kept, of which the thread's slice has `own_above` and `own_ties`.
///
/// # Safety
/// - As for [`walk`], behind `Task::Sum`; there is a logit that is not NaN.
#[inline(always)]
unsafe fn choose<T: Element, const PIECE: u32>(
    row: *const T,
    row_index: u32,
    [own_above, own_ties]: [u64; 2],
    state: &State,
    dims: &SamplingDims,
) -> u32 {
    let (member, base) = (thread::thread_idx_x(), shared::base());
    // SAFETY: the target is below what all slices come to, so exactly one holds it; that one's thread writes.
    unsafe {
        let above = block_scan_u64(own_above, base + smem::PARTIALS);
        let ties = block_scan_u64(own_ties, base + smem::PARTIALS);
        let total = state.kept.sum(above.total, ties.total);
        let target = point(draw(dims.seed, dims.step, row_index), total);
        let before = state.kept.sum(above.before, ties.before);
        let after = state.kept.sum(above.before + own_above, ties.before + own_ties);
        if member < dims.slices && before <= target && target < after {
            let start = member * dims.slice_len;
            shared::store_u32(base + smem::FOUND, start);
            shared::store_u32(base + smem::FOUND + 4, dims.slice_len.min(dims.vocab - start));
            store_u64(base + smem::FOUND + 8, above.before);
            store_u64(base + smem::FOUND + 16, ties.before);
        }
        thread::sync_threads();
        let slice = [shared::load_u32(base + smem::FOUND), shared::load_u32(base + smem::FOUND + 4)];
        let before = [load_u64(base + smem::FOUND + 8), load_u64(base + smem::FOUND + 16)];
        thread::sync_threads();
        find::<T, PIECE>(row, slice, before, state.kept, target, |value| state.weight_of(value, dims))
    }
}

/// A walk over a slice of a row. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`], one for each slice (x; one for `Task::Choose`) and row (y); rows *in-bounds*, for pieces of 16 bytes *aligned(16)*, a
///   record for each row of the launch; the walks of a run follow each other — `Sampler::run`.
#[inline(always)]
unsafe fn walk<T: Element, const PIECE: u32>(
    logits: *const T,
    records: *mut u64,
    ids: *mut u32,
    dims: &SamplingDims,
) {
    let (slice, block_row, member) = (thread::block_idx_x(), thread::block_idx_y(), thread::thread_idx_x());
    let row_index = dims.first_row + block_row;
    let record_len = if dims.is_greedy != 0 { record::GREEDY_LEN } else { record::RANDOM_LEN };
    let record = Record { at: records.wrapping_add((block_row * record_len) as usize), walk: dims.walk };
    let start = slice * dims.slice_len;
    let end = dims.vocab.min(start + dims.slice_len);
    let is = |task: Task| dims.task == task as u32;
    // SAFETY: the row exists, as the grid has as many as the launch — Sampler::run. All branches around barriers are the same
    // for all threads: they depend on parameters and on what the whole block found. The targets are within reach: top_k
    // is at most `vocab`, the nucleus and the point at most what the sum was.
    unsafe {
        let row = logits.add(row_index as usize * dims.logits_stride as usize);
        let own = record.slices(0).add(2 * slice as usize);
        if dims.is_greedy == 0 && (is(Task::Largest) || is(Task::Count) || is(Task::Weigh)) {
            // The next walk's histogram, a part by each block.
            let part = BINS.div_ceil(dims.slices.max(1));
            let mut bin = slice * part + member;
            while bin < BINS.min((slice + 1) * part) {
                global::store(record.histogram(2).add(bin as usize), 0u64);
                bin += THREADS;
            }
        }
        if is(Task::Largest) {
            let best = largest::<T, PIECE>(row, start, end);
            if member == 0 {
                if dims.is_greedy != 0 && dims.slices == 1 {
                    global::store(ids.add(row_index as usize), index_of(best));
                } else {
                    global::store(own, best);
                }
            }
            return;
        }
        let found = Found::load(record, dims);
        let state = found.resume::<T>(dims);
        if is(Task::Choose) {
            let id = if dims.is_greedy != 0 || state.largest >> 32 == 0 {
                index_of(state.largest)
            } else {
                choose::<T, PIECE>(row, row_index, found.numbers, &state, dims)
            };
            if member == 0 {
                global::store(ids.add(row_index as usize), id);
            }
            return;
        }
        if slice == 0 && member == 0 {
            state.store(record.state(0));
        }
        let (mut above, mut num_ties) = (0, 0);
        if state.largest >> 32 == 0 {
            // Nothing but NaN: no sums, which the next walk reads all the same.
        } else if is(Task::Sum) {
            for_each::<T, PIECE>(row, start, end, member, THREADS, |_, value| {
                let key = key(value);
                above += if key > state.kept.key { state.weight_of(value, dims) } else { 0 };
                num_ties += u64::from(key == state.kept.key);
            });
            num_ties = block_scan_u64(num_ties, shared::base() + smem::PARTIALS).total;
        } else {
            above = add_digits::<T, PIECE>(row, [start, end], record.histogram(0), &state, dims);
        }
        above = block_scan_u64(above, shared::base() + smem::PARTIALS).total;
        if member == 0 {
            global::store(own, above);
            global::store(own.add(1), num_ties);
        }
    }
}

/// The index in a number of [`largest`]; 0 where all are NaN.
#[inline(always)]
fn index_of(best: u64) -> u32 {
    if best >> 32 == 0 { 0 } else { !(best as u32) }
}

macro_rules! piece {
    (Vector, $type:ident) => {{ <$type as Element>::PER_16_BYTES as u32 }};
    (Scalar, $type:ident) => {
        1
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $access:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::sampling`.
        ///
        /// # Safety
        /// - Arguments as `Sampler::run` checks them.
        #[kernel(max_threads = 1024, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(logits: *const $type, records: *mut u64, ids: *mut u32, dims: SamplingDims) {
            // SAFETY: blocks, rows and records as said there — Sampler::run.
            unsafe { walk::<$type, { piece!($access, $type) }>(logits, records, ids, &dims) }
        }
    )*};
}
abi::sampling_table!(entries);
