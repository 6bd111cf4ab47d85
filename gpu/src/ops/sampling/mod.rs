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
mod steps;

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
