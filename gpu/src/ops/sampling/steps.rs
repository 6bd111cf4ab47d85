//! The steps of a row's block: what it looks for, and what it leaves for the next one.

use super::*;

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
    pub(super) unsafe fn point(&self, total: u64) -> u64 {
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
    pub(super) unsafe fn take<const PIECE: u32>(&self, step: u32) {
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
