//! Sampling: a token per row of logits, the largest one or one by its probability, each row by its own parameters.
//!
//! Work split: steps over the row (`abi::ops::sampling::step`), each of which waits for what the one before has found.
//! Up to [`MAX_SLICES`] blocks of 1024 threads share a row, as many as there are multiprocessors for the rows; then a
//! step is a launch. Where a row has one block, it takes all of its steps in one launch. The launches are those of the
//! plan; a block leaves those that its row's parameters do not ask for. Each block leaves two numbers of its slice and
//! adds to the row's histogram in device memory, of which the next step's blocks each make what all of the row come to.
//! All sums are of integers, so neither their order nor the number of threads or slices shows in a result.
//!
//! ```text
//! LARGEST      max of (key, −index)                                  greedy: alone, or with CHOOSE behind it
//! COUNT × 3    if top_k: the key of the k-th largest       a row's only block counts the first digit with LARGEST
//! WEIGH × 3    if top_p: the key at which the weight reaches top_p; the first also what there is to be reached
//! MEAN         if typical_p: the mean depth of what is kept
//! NEAR × 3     if typical_p: how far from it the weight reaches typical_p
//! SUM          the weight of what is kept, of each slice             not for a row's only block
//! CHOOSE       a block per row: the slice of the drawn point, a 32nd of it per warp, then a 32nd of that, …
//! ```
//!
//! 1. Thresholds without sorting: 11 bits of the key at a time, a histogram says in which bin the k-th
//!    largest lies (or the bin at which the weight is reached), and the next step looks into that bin alone. 16-bit
//!    logits are told apart by 22 bits, so they take two steps instead of three.
//! 2. Counts and weights are the same search: a count is a weight of 1. A bin is 64 bits wide but has 32-bit atomics:
//!    the upper word is touched only by a carry and by the few weights beyond 2^32. A block has bins of its own in
//!    shared memory, and adds those that are not 0 to the row's.
//! 3. What is kept is a key and a number of ties: every larger key, and that many of the equal ones, lowest index
//!    first.
//! 4. Once the first digit is known, few tokens are left as a rule. The second step of the row's first search then puts
//!    them on a list, and CHOOSE does all that remains on this list by itself (`list`).
//!
//! min_p and typical_p need no threshold among the keys: they are asked of each token that is kept.
//!
//! `edit` makes logits with bias, penalties and masks beforehand, `logprobs` logarithms of probabilities
//! afterwards.
//!
//! ```text
//! shared   | partials: u64 per warp | found: 4 u64 | histogram: 2048 u64, or the list | tokens for the list |
//! device   | state × 2 | two u64 per slice × 2 | list | histogram × 3 | per row: `abi::ops::sampling::record`
//! ```

mod edit;
mod list;
mod logprobs;

use abi::ops::sampling::{
    BINS, MAX_LISTED, MAX_SLICES, RowParams, SamplingDims, THREADS, depth, digit_shift, digits, draw,
    exponent, index_of, key, logit, mean, moment, nearness, nucleus, point, ranked, record, smem, step, ties,
    weight_at,
};
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

use crate::tile::scan::{block_max_u64, block_scan_u64, load_u64, shuffle_idx_u64, store_u64, warp_scan_u64};

/// Calls `visit(index, logit)` for this thread's share of `start..end`: pieces of `PIECE` elements (1, or as many as 16
/// bytes hold), `member` of `members` in turn. `HELD` pieces are visited while so many are on their way: few where a
/// visit is long, since its code is there for each of their elements.
///
/// # Safety
/// - `start..end` is *in-bounds(the row)*; for pieces of 16 bytes both are multiples of `PIECE`, and the row is
///   *aligned(16)* — checked in `Sampler::run`.
#[inline(always)]
unsafe fn for_each<T: Element, const PIECE: u32, const HELD: usize>(
    row: *const T,
    start: u32,
    end: u32,
    member: u32,
    members: u32,
    mut visit: impl FnMut(u32, f32),
) {
    let mut first = start + member * PIECE;
    if PIECE == 1 {
        const ELEMENTS: usize = 4;
        while first < end {
            let mut held = [0.0; ELEMENTS];
            let mut i = 0;
            while i < ELEMENTS {
                let index = first + i as u32 * members;
                if index < end {
                    // SAFETY: inside the row — the caller.
                    held[i] = unsafe { global::load(row.add(index as usize)) }.to_f32();
                }
                i += 1;
            }
            let mut i = 0;
            while i < ELEMENTS {
                let index = first + i as u32 * members;
                if index < end {
                    visit(index, held[i]);
                }
                i += 1;
            }
            first += ELEMENTS as u32 * members;
        }
    } else {
        let stride = members * PIECE;
        let load = |first: u32| {
            let mut held = [[0u32; 4]; HELD];
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * stride;
                if index < end {
                    // SAFETY: inside the row and aligned — the caller.
                    held[i] = unsafe { global::load_nc_x4(row.add(index as usize)) };
                }
                i += 1;
            }
            held
        };
        let mut next = load(first);
        while first < end {
            let held = next;
            next = load(first + HELD as u32 * stride);
            let mut i = 0;
            while i < HELD {
                let index = first + i as u32 * stride;
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
            first += HELD as u32 * stride;
        }
    }
}

/// What is known of a row.
#[derive(Clone, Copy)]
struct State {
    /// [`ranked`] of the largest logit; 0 where there are none but NaN.
    largest: u64,
    /// The upper bits of the key, or nearness, that is looked for.
    prefix: u32,
    /// Which bits these are.
    mask: u32,
    /// What those above all with the prefix come to.
    above: u64,
    /// What is to be reached.
    target: u64,
    kept: Kept,
    /// The mean depth.
    mean: u32,
    /// The least nearness of a token that is kept.
    near: u32,
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
        mean: 0,
        near: 0,
    };

    /// # Safety
    /// - *in-bounds(the record)*; a step before has stored it.
    #[inline(always)]
    unsafe fn load(from: *const u64) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (bits, near) = (global::load(from.add(1)), global::load(from.add(7)));
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
                mean: near as u32,
                near: (near >> 32) as u32,
            }
        }
    }

    /// # Safety
    /// - *in-bounds(the record)*, *exclusive*.
    #[inline(always)]
    unsafe fn store(&self, to: *mut u64) {
        let State { largest, prefix, mask, above, target, kept, mean, near } = *self;
        let Kept { key, tie_weight, num_ties } = kept;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let bits = pair(prefix, mask);
        let numbers = [largest, bits, above, target, u64::from(key), tie_weight, num_ties, pair(mean, near)];
        let mut i = 0;
        while i < numbers.len() {
            // SAFETY: the caller's promise.
            unsafe { global::store(to.add(i), numbers[i]) };
            i += 1;
        }
    }

    /// Whether all logits are NaN.
    #[inline(always)]
    fn is_none(&self) -> bool {
        self.largest == 0
    }

    #[inline(always)]
    fn exponent_of(&self, value: f32, scale: f32) -> f32 {
        exponent(value, logit((self.largest >> 32) as u32), scale)
    }

    /// The weight of a token within the bounds of key and ties, with what `min_p` and `typical_p` say of it.
    #[inline(always)]
    fn kept_weight(&self, exponent: f32, min_weight: u64) -> u64 {
        let weight = weight_at(exponent);
        let is_kept =
            weight >= min_weight && (self.near == 0 || nearness(depth(exponent), self.mean) >= self.near);
        if is_kept { weight } else { 0 }
    }
}

/// Where the parts of a row's record lie for a step.
#[derive(Clone, Copy)]
struct Record {
    at: *mut u64,
    /// How many steps of the row came before.
    walk: u32,
}

impl Record {
    /// Of the present step, or `back` before it: what it has found, …
    #[inline(always)]
    fn state(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::STATE + (self.walk + back) % 2 * record::STATE_LEN) as usize)
    }

    /// … two numbers of each slice, …
    #[inline(always)]
    fn slices(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::SLICES + (self.walk + back) % 2 * (2 * MAX_SLICES)) as usize)
    }

    /// … and the histogram, also that of the next step: 2 back in the round of three.
    #[inline(always)]
    fn histogram(self, back: u32) -> *mut u64 {
        self.at.wrapping_add((record::HISTOGRAMS + (self.walk + 3 - back) % 3 * BINS) as usize)
    }

    #[inline(always)]
    fn num_listed(self) -> *mut u32 {
        self.at.wrapping_add(record::NUM_LISTED as usize).cast()
    }

    #[inline(always)]
    fn list(self) -> *mut u64 {
        self.at.wrapping_add(record::LIST as usize)
    }
}

/// What the blocks of the step before have left, as far as a thread needs it. All of it is asked for at once: where the
/// blocks have little to do, a step's time is that of one access waiting for another.
struct Found {
    state: State,
    /// Of the thread's slice, if it has one.
    numbers: [u64; 2],
    /// The thread's two bins, the higher first; thread 0 has the highest.
    bins: [u64; 2],
}

/// Which search a step belongs to, by its first step, and which digit it looks at.
#[inline(always)]
const fn search_of(step: u32) -> Option<(u32, u32)> {
    let first = if step >= step::COUNT && step < step::WEIGH {
        step::COUNT
    } else if step >= step::WEIGH && step < step::MEAN {
        step::WEIGH
    } else if step >= step::NEAR && step < step::SUM {
        step::NEAR
    } else {
        return None;
    };
    Some((first, step - first))
}

/// A row, as a block of it sees it.
struct Row<'a, T> {
    logits: *const T,
    /// Its record.
    at: *mut u64,
    ids: *mut u32,
    index: u32,
    /// Its parameters. What is needed of them throughout is in registers, the rest is read where it is wanted.
    words: *const u32,
    scale: f32,
    min_weight: u64,
    /// The steps that it takes.
    steps: u32,
    /// Whether the first digit is counted with the largest logit.
    counts_first: bool,
    slice: u32,
    dims: &'a SamplingDims,
}

impl<T: Element> Row<'_, T> {
    /// Writes the token.
    ///
    /// # Safety
    /// - In one block of the row.
    #[inline(always)]
    unsafe fn tell(&self, id: u32) {
        if thread::thread_idx_x() == 0 {
            // The address is made here: no register holds it before.
            // SAFETY: each row has an id — Sampler::run.
            unsafe { global::store(self.ids.add(thread::opaque(self.index) as usize), id) };
        }
    }

    #[inline(always)]
    fn record(&self, step: u32) -> Record {
        Record { at: self.at, walk: (self.steps & (step::bit(step) - 1)).count_ones() }
    }

    /// All parameters.
    ///
    /// # Safety
    /// - The row has some.
    #[inline(always)]
    unsafe fn params(&self) -> RowParams {
        // SAFETY: the caller's promise.
        unsafe { load_params(self.words) }
    }

    /// The step that may put what is left on the list: the second one of the first search, if that may leave few.
    #[inline(always)]
    fn gathering(&self) -> u32 {
        // SAFETY: steps of searches are those of rows that have parameters.
        let may_leave_few = || unsafe { self.params() }.top_k <= MAX_LISTED;
        if self.steps & step::bit(step::COUNT + 1) != 0 && may_leave_few() {
            step::COUNT + 1
        } else if self.steps & step::bit(step::WEIGH + 1) != 0 {
            step::WEIGH + 1
        } else {
            u32::MAX
        }
    }

    /// # Safety
    /// - As for [`Self::take`], but the first one.
    #[inline(always)]
    unsafe fn load(&self, before: u32, record: Record) -> Found {
        let member = thread::thread_idx_x();
        let is_first = before == step::LARGEST;
        // SAFETY: the step before has written its state, and two numbers or one of each slice; all bins are in the
        // record.
        unsafe {
            let mut numbers = [0; 2];
            if member < self.dims.slices {
                let of_slice = record.slices(1).add(2 * member as usize);
                numbers = [global::load(of_slice), if is_first { 0 } else { global::load(of_slice.add(1)) }];
            }
            let mut bins = [0; 2];
            if search_of(before).is_some() || is_first && self.counts_first {
                let high = record.histogram(1).add((BINS - 1 - 2 * member) as usize);
                bins = [global::load(high), global::load(high.sub(1))];
            }
            Found { state: if is_first { State::NEW } else { State::load(record.state(1)) }, numbers, bins }
        }
    }

    /// What is known before a step, and what the bin comes to in which the one before has ended.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; the rest as for [`Self::load`].
    #[inline(always)]
    unsafe fn resume(&self, before: u32, step: u32, found: &Found) -> (State, u64) {
        let Found { mut state, numbers, bins } = *found;
        let partials = shared::base() + smem::PARTIALS;
        let mut here = 0;
        // SAFETY: branches around barriers depend on parameters and on what all threads know.
        unsafe {
            let mut search = search_of(before);
            if before == step::LARGEST {
                state.largest = block_max_u64(numbers[0], partials);
                if self.counts_first {
                    (search, state.target) = (Some((step::COUNT, 0)), u64::from(self.params().top_k));
                }
            }
            if state.is_none() {
                return (state, 0);
            }
            if let Some((first, digit)) = search {
                if first == step::WEIGH && digit == 0 {
                    let above = block_scan_u64(numbers[0], partials).total;
                    state.target = nucleus(state.kept.sum(above, state.kept.num_ties), self.params().top_p);
                }
                here = find_bin(bins, digit_shift(digit), &mut state);
                let digits = if first == step::NEAR { 3 } else { digits(16 / T::PER_16_BYTES) };
                if digit + 1 == digits && first == step::NEAR {
                    state.near = state.prefix;
                } else if digit + 1 == digits {
                    // The bits that no 16-bit logit has, as its key has them: keys of negative numbers are inverted.
                    let unseen = (1 << digit_shift(digit)) - 1;
                    let key = if state.prefix >> 31 == 1 { state.prefix } else { state.prefix | unseen };
                    // Among the ties at the top-k key, none that is not kept is reached: the kept ones suffice.
                    let gap = state.target - state.above;
                    let tie_weight = weight_at(state.exponent_of(logit(key), self.scale));
                    let num_ties = ties(gap, if first == step::COUNT { 1 } else { tie_weight });
                    state.kept = Kept { key, tie_weight, num_ties };
                }
            }
            if step >= step::MEAN {
                let exponent = state.exponent_of(logit(state.kept.key), self.scale);
                state.kept.tie_weight = state.kept_weight(exponent, self.min_weight);
                if before == step::MEAN {
                    let Kept { tie_weight, num_ties, .. } = state.kept;
                    let weights = block_scan_u64(numbers[0], partials).total + num_ties * tie_weight;
                    let of_ties = num_ties * moment(tie_weight, depth(exponent));
                    let moments = block_scan_u64(numbers[1], partials).total + of_ties;
                    state.mean = mean(moments, weights);
                    state.target = nucleus(weights, self.params().typical_p);
                }
            }
        }
        if step == step::COUNT || step == step::WEIGH || step == step::NEAR {
            (state.prefix, state.mask, state.above) = (0, 0, 0);
            if step == step::COUNT {
                // SAFETY: a row that counts has parameters.
                state.target = u64::from(unsafe { self.params() }.top_k);
            }
        }
        (state, here)
    }
}

/// Goes on to the bin at which the sum of the bins, from the highest down, reaches the target: of each thread's two.
/// Returns what the bin comes to.
///
/// # Safety
/// - *converged*: all threads of the block.
/// - All bins and what is above sum up to the target or more, and that is at least 1.
#[inline(always)]
unsafe fn find_bin([high, low]: [u64; 2], shift: u32, state: &mut State) -> u64 {
    let base = shared::base();
    let high_bin = BINS - 1 - 2 * thread::thread_idx_x();
    // SAFETY: exactly one thread's bins hold the target, so one writes what is found; the next write comes barriers
    // later.
    unsafe {
        let before = state.above + block_scan_u64(high + low, base + smem::PARTIALS).before;
        if before < state.target && state.target <= before + high + low {
            let is_high = state.target <= before + high;
            shared::store_u32(base + smem::FOUND, if is_high { high_bin } else { high_bin - 1 });
            store_u64(base + smem::FOUND + 8, if is_high { before } else { before + high });
            store_u64(base + smem::FOUND + 16, if is_high { high } else { low });
        }
        thread::sync_threads();
        state.prefix |= shared::load_u32(base + smem::FOUND) << shift;
        state.mask = u32::MAX << shift;
        state.above = load_u64(base + smem::FOUND + 8);
        load_u64(base + smem::FOUND + 16)
    }
}

/// Adds to a 64-bit bin with 32-bit atomics: the sum is exact once all threads are done, whatever their order.
///
/// # Safety
/// - *aligned(8)* and *in-bounds(histogram)*; between the barriers of [`Row::walk`].
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

impl<T: Element> Row<'_, T> {
    /// The address of a key's bin.
    #[inline(always)]
    fn bin(key: u32, shift: u32) -> u32 {
        shared::base() + smem::HISTOGRAM + 8 * ((key >> shift) & (BINS - 1))
    }

    /// Puts a token on the block's list.
    ///
    /// # Safety
    /// - Between the barriers of [`Self::walk`].
    #[inline(always)]
    unsafe fn put(ranked: u64) {
        let base = shared::base();
        // SAFETY: a place is one thread's alone, and inside the list.
        unsafe {
            let place = shared::add_u32(base + smem::NUM_GATHERED, 1);
            if place < MAX_LISTED {
                store_u64(base + smem::GATHERED + 8 * place, ranked);
            }
        }
    }

    /// Looks at each logit of the slice: returns [`ranked`] of the thread's largest for [`step::LARGEST`], else two
    /// numbers, and leaves the slice's histogram in shared memory.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; the slice is *in-bounds* as for [`for_each`].
    #[inline(always)]
    unsafe fn visit<const PIECE: u32>(
        &self,
        [start, end]: [u32; 2],
        step: u32,
        record: Record,
        state: &State,
        gathers: bool,
    ) -> [u64; 2] {
        /// So many tokens of one thread for the list, where it is not known to have room: more are many in all.
        const MOST: u32 = 8;
        let (row, member) = (self.logits, thread::thread_idx_x());
        let (mut first, mut second) = (0u64, 0u64);
        let mut mine = 0;
        // SAFETY: the caller's promise; bins and list are touched by atomics, or at a place of its own, only.
        unsafe {
            if step == step::LARGEST {
                // A thread sees its indices in ascending order, so only a larger key replaces.
                let (mut best_key, mut best_index) = (0, 0);
                for_each::<T, PIECE, 2>(row, start, end, member, THREADS, |index, value| {
                    let key = key(value);
                    if key > best_key {
                        (best_key, best_index) = (key, index);
                    }
                    if self.counts_first {
                        shared::add_u32(Self::bin(key, digit_shift(0)), 1);
                    }
                });
                first = ranked(best_key, best_index);
            } else if step < step::WEIGH {
                let shift = digit_shift(step - step::COUNT);
                for_each::<T, PIECE, 2>(row, start, end, member, THREADS, |index, value| {
                    let key = key(value);
                    if gathers {
                        if key >= state.prefix {
                            Self::put(ranked(key, index));
                        }
                    } else if key & state.mask == state.prefix {
                        shared::add_u32(Self::bin(key, shift), 1);
                    }
                });
            } else {
                let weighs = step < step::MEAN;
                let has_bins = search_of(step).is_some();
                let shift =
                    digit_shift(if weighs { step - step::WEIGH } else { step.wrapping_sub(step::NEAR) });
                // What is below these does not count: NaN, those that are not kept, and those that the search has left
                // behind.
                let least = state.kept.key.max(if weighs { state.prefix } else { 0 }).max(1);
                for_each::<T, PIECE, 1>(row, start, end, member, THREADS, |index, value| {
                    let key = key(value);
                    if key < least {
                        return;
                    }
                    let is_tie = key == state.kept.key;
                    if gathers {
                        mine += 1;
                        if mine <= MOST {
                            Self::put(ranked(key, index));
                        }
                    }
                    if weighs && key & state.mask != state.prefix || !weighs && is_tie {
                        second += u64::from(step == step::SUM);
                        return;
                    }
                    let exponent = state.exponent_of(value, self.scale);
                    let (mut weight, mut digits) = (weight_at(exponent), key);
                    if !weighs {
                        let depth = depth(exponent);
                        let near = nearness(depth, state.mean);
                        // Without a weight there is no depth.
                        if weight < self.min_weight.max(1) || near < state.near {
                            return;
                        }
                        if step == step::MEAN {
                            second += moment(weight, depth);
                        }
                        first += weight;
                        digits = near;
                        if near & state.mask != state.prefix {
                            weight = 0;
                        }
                    } else if !is_tie {
                        first += weight;
                    }
                    if has_bins {
                        add_to_bin(Self::bin(digits, shift), weight);
                    }
                });
                if mine > MOST {
                    shared::add_u32(shared::base() + smem::NUM_GATHERED, MAX_LISTED + 1);
                }
                if has_bins && !weighs && self.slice == 0 && member == 0 {
                    // The ties that are kept are the same wherever they are. This thread has stored the state: it comes
                    // from there, so that no register holds their number meanwhile.
                    let state = State::load(record.state(0));
                    let exponent = state.exponent_of(logit(state.kept.key), self.scale);
                    let near = nearness(depth(exponent), state.mean);
                    if near & state.mask == state.prefix {
                        add_to_bin(Self::bin(near, shift), state.kept.num_ties * state.kept.tie_weight);
                    }
                }
            }
        }
        [first, second]
    }

    /// Leaves what a step over the slice finds in the record, for the next one.
    ///
    /// # Safety
    /// - As for [`Self::take`].
    #[inline(always)]
    unsafe fn walk<const PIECE: u32>(&self, step: u32, record: Record, state: &State, gathers: bool) {
        let (member, base) = (thread::thread_idx_x(), shared::base());
        let own = base + smem::HISTOGRAM + 16 * member;
        let has_bins = search_of(step).is_some() || step == step::LARGEST && self.counts_first;
        let start = self.slice * self.dims.slice_len;
        let end = self.dims.vocab.min(start + self.dims.slice_len);
        // SAFETY: branches around barriers depend on parameters and on what all threads know. Two bins per thread are
        // the whole histogram. Between the barriers bins are touched by atomics only. Each block has two numbers of its
        // own in the record.
        unsafe {
            if has_bins {
                shared::store_u32x4(own, [0; 4]);
                if member == 0 {
                    shared::store_u32(base + smem::NUM_GATHERED, 0);
                }
                thread::sync_threads();
            }
            let [first, second] = self.visit::<PIECE>([start, end], step, record, state, gathers);
            // Two barriers each: what was added to bins and list is there.
            let numbers = record.slices(0).add(2 * self.slice as usize);
            if step == step::LARGEST {
                let largest = block_max_u64(first, base + smem::PARTIALS);
                if member == 0 {
                    global::store(numbers, largest);
                }
            } else {
                let first = block_scan_u64(first, base + smem::PARTIALS).total;
                let second = block_scan_u64(second, base + smem::PARTIALS).total;
                if member == 0 {
                    global::store(numbers, first);
                    global::store(numbers.add(1), second);
                }
            }
            if gathers {
                self.list_gathered(record);
            }
            if has_bins && !(gathers && step < step::WEIGH) {
                self.add_bins(own, record);
            }
        }
    }

    /// Adds the block's bins to the row's; they are the row's if it has no other block.
    ///
    /// # Safety
    /// - As for [`Self::walk`].
    #[inline(always)]
    unsafe fn add_bins(&self, own: u32, record: Record) {
        let mut second = 0;
        while second < 2 {
            // SAFETY: the thread's two bins, in shared memory and in the record; other blocks have cleared and add to
            // these by atomics only.
            unsafe {
                let sum = load_u64(own + 8 * second);
                let to = record.histogram(0).add((2 * thread::thread_idx_x() + second) as usize);
                if self.dims.slices == 1 {
                    global::store(to, sum);
                } else if sum != 0 {
                    let to = to.cast::<u32>();
                    let (low, high) = (sum as u32, (sum >> 32) as u32);
                    let old = atomic::add_u32(to, low, Order::Relaxed);
                    let high = high + u32::from(old.wrapping_add(low) < low);
                    if high != 0 {
                        atomic::add_u32(to.add(1), high, Order::Relaxed);
                    }
                }
            }
            second += 1;
        }
    }

    /// Adds the block's list to the row's.
    ///
    /// # Safety
    /// - *converged*: all threads of the block, behind a barrier; the rest as for [`Self::walk`].
    #[inline(always)]
    unsafe fn list_gathered(&self, record: Record) {
        let (member, base) = (thread::thread_idx_x(), shared::base());
        // SAFETY: places from what the counter was on are this block's alone, and inside the list.
        unsafe {
            let gathered = shared::load_u32(base + smem::NUM_GATHERED);
            if member == 0 {
                let place = atomic::add_u32(record.num_listed(), gathered, Order::Relaxed);
                shared::store_u32(base + smem::NUM_GATHERED + 4, place);
            }
            thread::sync_threads();
            let place = shared::load_u32(base + smem::NUM_GATHERED + 4).saturating_add(member);
            if gathered <= MAX_LISTED && member < gathered && place < MAX_LISTED {
                global::store(
                    record.list().add(place as usize),
                    load_u64(base + smem::GATHERED + 8 * member),
                );
            }
        }
    }

    /// The kept token in whose stretch of the running sum, by ascending index, the drawn point lies.
    ///
    /// The slice, a first index and a length, is that of the point, before which kept tokens above the key have the
    /// weight and ties are as many as `before` says; where the target is not known, the slice is the row.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; the slice is *in-bounds* as for [`for_each`].
    #[inline(always)]
    unsafe fn find<const PIECE: u32>(
        &self,
        [mut start, mut len]: [u32; 2],
        [mut above, mut num_ties]: [u64; 2],
        state: &State,
        target: Option<u64>,
    ) -> u32 {
        let (base, kept) = (shared::base(), state.kept);
        let (lane, warp) = (thread::lane(), thread::warp_idx());
        let weight_of = |value| state.kept_weight(state.exponent_of(value, self.scale), self.min_weight);
        let (mut target, mut is_known) = (target.unwrap_or(0), target.is_some());
        while len > 32 || !is_known {
            let span = len.div_ceil(32).next_multiple_of(PIECE);
            let from = (start + warp * span).min(start + len);
            let to = (from + span).min(start + len);
            let (mut my_above, mut my_ties) = (0u64, 0u32);
            // SAFETY: all threads go through the loop together, as `len` is the same for all. Ranges of the warps lie
            // in the row, in multiples of PIECE, as `vocab` is one. The running sum grows through the warps and the
            // target is below its end, so exactly one warp finds it; the next write comes barriers later.
            unsafe {
                for_each::<T, PIECE, 1>(self.logits, from, to, lane, 32, |_, value| {
                    let key = key(value);
                    if key > kept.key {
                        my_above += weight_of(value);
                    }
                    my_ties += u32::from(key == kept.key);
                });
                let my_ties = u64::from(my_ties);
                let of_above = block_scan_u64(my_above, base + smem::PARTIALS);
                let of_ties = block_scan_u64(my_ties, base + smem::PARTIALS);
                if !is_known {
                    target = self.point(kept.sum(of_above.total, of_ties.total));
                    is_known = true;
                }
                let (above_before, ties_before) = (above + of_above.before, num_ties + of_ties.before);
                let (above_after, ties_after) = (above_before + my_above, ties_before + my_ties);
                // Of the whole warp: from before its first lane to after its last.
                let (above_before, ties_before) =
                    (shuffle_idx_u64(above_before, 0), shuffle_idx_u64(ties_before, 0));
                let (above_after, ties_after) =
                    (shuffle_idx_u64(above_after, 31), shuffle_idx_u64(ties_after, 31));
                let is_here = kept.sum(above_before, ties_before) <= target
                    && target < kept.sum(above_after, ties_after);
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
                let value = global::load(self.logits.add((start + lane) as usize)).to_f32();
                let key = key(value);
                my_above = if key > kept.key { weight_of(value) } else { 0 };
                my_ties = u64::from(key == kept.key);
            }
            let above_after = above + warp_scan_u64(my_above);
            let ties_after = num_ties + warp_scan_u64(my_ties);
            let passed = kept.sum(above_after, ties_after) > target;
            // The first lane that passes the target; there is one, as the target is in this range.
            start + cuda_std::warp::ballot(cuda_std::warp::FULL_MASK, passed).trailing_zeros()
        }
    }

    /// The drawn point.
    ///
    /// # Safety
    /// - The row has parameters.
    #[inline(always)]
    unsafe fn point(&self, total: u64) -> u64 {
        // SAFETY: the caller's promise.
        let RowParams { seed, step, .. } = unsafe { self.params() };
        point(draw(seed, step), total)
    }

    /// The token at the drawn point of what is kept, of which the thread's slice has `own_above` and `own_ties`.
    ///
    /// # Safety
    /// - As for [`Self::take`] of [`step::CHOOSE`]; there is a logit that is not NaN.
    #[inline(always)]
    unsafe fn choose<const PIECE: u32>(&self, [own_above, own_ties]: [u64; 2], state: &State) -> u32 {
        let (member, base, dims) = (thread::thread_idx_x(), shared::base(), self.dims);
        let (mut slice, mut before, mut target) = ([0, dims.vocab], [0; 2], None);
        if dims.slices > 1 {
            // SAFETY: the target is below what all slices come to, so exactly one holds it; that one's thread writes.
            unsafe {
                let above = block_scan_u64(own_above, base + smem::PARTIALS);
                let ties = block_scan_u64(own_ties, base + smem::PARTIALS);
                let point = self.point(state.kept.sum(above.total, ties.total));
                let from = state.kept.sum(above.before, ties.before);
                let to = state.kept.sum(above.before + own_above, ties.before + own_ties);
                if member < dims.slices && from <= point && point < to {
                    let start = member * dims.slice_len;
                    shared::store_u32(base + smem::FOUND, start);
                    shared::store_u32(base + smem::FOUND + 4, dims.slice_len.min(dims.vocab - start));
                    store_u64(base + smem::FOUND + 8, above.before);
                    store_u64(base + smem::FOUND + 16, ties.before);
                }
                thread::sync_threads();
                slice = [shared::load_u32(base + smem::FOUND), shared::load_u32(base + smem::FOUND + 4)];
                before = [load_u64(base + smem::FOUND + 8), load_u64(base + smem::FOUND + 16)];
                target = Some(point);
                thread::sync_threads();
            }
        }
        // SAFETY: a slice of the row, or all of it.
        unsafe { self.find::<PIECE>(slice, before, state, target) }
    }

    /// Takes a step. See the module.
    ///
    /// # Safety
    /// - *converged*: all threads of the block, a barrier after the step before.
    /// - Blocks of [`THREADS`], one for each slice (one for [`step::CHOOSE`]); the row *in-bounds*, for pieces of 16
    ///   bytes *aligned(16)*, a record; the row's steps follow each other, and no step of another run is between them —
    ///   `Sampler::run`.
    #[inline(always)]
    unsafe fn take<const PIECE: u32>(&self, step: u32) {
        let (member, dims, record) = (thread::thread_idx_x(), self.dims, self.record(step));
        // SAFETY: all branches around barriers are the same for all threads: they depend on parameters and on what the
        // whole block found. The targets are within reach: top_k is below `vocab`, the others at most what the sum was.
        unsafe {
            if dims.slices > 1 && step < step::SUM && self.steps & step::bit(step::SUM) != 0 {
                // The next step's histogram, a part by each block.
                let part = BINS.div_ceil(dims.slices);
                let mut bin = self.slice * part + member;
                while bin < BINS.min((self.slice + 1) * part) {
                    global::store(record.histogram(2).add(bin as usize), 0u64);
                    bin += THREADS;
                }
            }
            if step == step::LARGEST {
                if self.slice == 0 && member == 0 {
                    global::store(record.num_listed(), 0u32);
                }
                self.walk::<PIECE>(step, record, &State::NEW, false);
                return;
            }
            let gathering = self.gathering();
            if step > gathering {
                let num_listed = global::load(record.num_listed());
                if num_listed != 0 && num_listed <= MAX_LISTED {
                    if step == step::CHOOSE {
                        let gathered = self.record(gathering);
                        let state = State::load(gathered.state(0));
                        let id =
                            self.choose_listed(gathered, num_listed, &state, gathering == step::COUNT + 1);
                        self.tell(id);
                    }
                    return;
                }
            }
            let before = 31 - (self.steps & (step::bit(step) - 1)).leading_zeros();
            let found = self.load(before, record);
            let (state, here) = self.resume(before, step, &found);
            if step == step::CHOOSE {
                let id = if self.scale == 0.0 || state.is_none() {
                    index_of(state.largest)
                } else {
                    self.choose::<PIECE>(found.numbers, &state)
                };
                self.tell(id);
                return;
            }
            if self.slice == 0 && member == 0 {
                state.store(record.state(0));
            }
            if !state.is_none() {
                // Of a count it is known how many there are.
                let gathers =
                    step == gathering && (step >= step::WEIGH || state.above + here <= u64::from(MAX_LISTED));
                self.walk::<PIECE>(step, record, &state, gathers);
            } else {
                // No sums and no bins, which the next step reads all the same.
                if dims.slices == 1 && search_of(step).is_some() {
                    let mut bin = member;
                    while bin < BINS {
                        global::store(record.histogram(0).add(bin as usize), 0u64);
                        bin += THREADS;
                    }
                }
                if member == 0 {
                    let numbers = record.slices(0).add(2 * self.slice as usize);
                    global::store(numbers, 0u64);
                    global::store(numbers.add(1), 0u64);
                }
            }
        }
    }
}

/// What a plan that draws nothing samples by.
const GREEDY: RowParams = RowParams::of_words([0; RowParams::LEN]);

/// A row's parameters.
///
/// # Safety
/// - *in-bounds(the table)*: as many words as there are.
#[inline(always)]
unsafe fn load_params(from: *const u32) -> RowParams {
    let mut words = [0; RowParams::LEN];
    let mut i = 0;
    while i < RowParams::LEN {
        // SAFETY: the caller's promise.
        words[i] = unsafe { global::load(from.add(i)) };
        i += 1;
    }
    RowParams::of_words(words)
}

/// Takes the launch's steps for a slice of a row. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`], one for each slice (x; one for [`step::CHOOSE`]) and row (y); rows *in-bounds*, for pieces
///   of 16 bytes *aligned(16)*, parameters for each row if the plan draws, a record for each row of the launch; the
///   launches of a run follow each other — `Sampler::run`.
#[inline(always)]
unsafe fn sample<T: Element, const PIECE: u32>(
    logits: *const T,
    table: *const u32,
    records: *mut u64,
    ids: *mut u32,
    dims: &SamplingDims,
) {
    let block_row = thread::block_idx_y();
    let row = dims.first_row + block_row;
    let draws = dims.planned & step::bit(step::SUM) != 0;
    // SAFETY: the row exists, as the grid has as many as the launch — Sampler::run.
    unsafe {
        let words = table.wrapping_add(row as usize * dims.params_stride as usize);
        let params = if draws { load_params(words) } else { GREEDY };
        let mut steps = params.steps(dims.planned, dims.vocab);
        let mut counts_first = false;
        if dims.slices == 1 {
            counts_first = steps & step::bit(step::COUNT) != 0;
            steps &= !(step::bit(step::COUNT) | step::bit(step::SUM));
        }
        let record_len = if draws { record::RANDOM_LEN } else { record::GREEDY_LEN };
        let row = Row {
            logits: logits.add((dims.first_logits_row + block_row) as usize * dims.logits_stride as usize),
            at: records.add(block_row as usize * record_len as usize),
            ids,
            index: row,
            words,
            scale: params.scale,
            min_weight: params.min_weight(),
            steps,
            counts_first,
            slice: thread::block_idx_x(),
            dims,
        };
        let mut left = steps & dims.launched;
        while left != 0 {
            row.take::<PIECE>(left.trailing_zeros());
            left &= left - 1;
            // What the step has left, the next one reads.
            thread::sync_threads();
        }
    }
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
        pub unsafe fn $entry(
            logits: *const $type,
            params: *const u32,
            records: *mut u64,
            ids: *mut u32,
            dims: SamplingDims,
        ) {
            // SAFETY: blocks, rows and records as said there — Sampler::run.
            unsafe { sample::<$type, { piece!($access, $type) }>(logits, params, records, ids, &dims) }
        }
    )*};
}
abi::sampling_table!(entries);
