//! The end of the search on a list of few tokens, a thread each: every question is how much lies ahead of a token in
//! some order, which each thread answers by looking at the whole list.
//!
//! ```text
//! top_k        by rank: how many are ahead                      kept if fewer than top_k
//! top_p        by rank: what weighs ahead                       kept if below the target
//! typical_p    by nearness: what weighs ahead                   kept if below the target
//! the token    by index: what weighs ahead                      that whose stretch the drawn point lies in
//! ```

use abi::ops::sampling::{depth, index_of, logit, mean, moment, nearness, nucleus, smem, step, weight_at};
use cuda_std::cvt::Element;
use cuda_std::{global, shared, thread};

use super::{Record, Row, State};
use crate::tile::scan::{block_scan_u64, store_u64};

/// What the tokens weigh in all that are ahead of the thread's own: of a larger `order`. Threads beyond the list have
/// no use for theirs.
///
/// # Safety
/// - *converged*: all threads of the block; `len` is the same for all, and at most as many as there are.
#[inline(always)]
unsafe fn ahead(len: u32, order: u64, weight: u64) -> u64 {
    let (member, list) = (thread::thread_idx_x(), shared::base() + smem::HISTOGRAM);
    let mut sum = 0;
    // SAFETY: a place for each thread, which is inside the histogram's memory; barriers around the accesses of all.
    unsafe {
        thread::sync_threads();
        if member < len {
            store_u64(list + 16 * member, order);
            store_u64(list + 16 * member + 8, weight);
        }
        thread::sync_threads();
        if member < len {
            let mut other = 0;
            while other < len {
                let [low, high, weight_low, weight_high] = shared::load_u32x4(list + 16 * other);
                let is_ahead = (u64::from(low) | u64::from(high) << 32) > order;
                sum += if is_ahead { u64::from(weight_low) | u64::from(weight_high) << 32 } else { 0 };
                other += 1;
            }
        }
    }
    sum
}

impl<T: Element> Row<'_, T> {
    /// The token, of a list of so many. `is_counted`: nothing is known of what they weigh.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; the step that gathers has left the state and the list, which holds
    ///   whatever may be kept.
    #[inline(always)]
    pub(super) unsafe fn choose_listed(
        &self,
        record: Record,
        len: u32,
        state: &State,
        is_counted: bool,
    ) -> u32 {
        // Opaque: what is made of it would be made for all steps, and held in registers.
        let (member, base) = (thread::opaque(thread::thread_idx_x()), shared::base());
        let partials = base + smem::PARTIALS;
        let takes = |step| self.steps & step::bit(step) != 0;
        // SAFETY: the list has so many; branches around barriers depend on parameters alone.
        unsafe {
            let params = self.params();
            let token = if member < len { global::load(record.list().add(member as usize)) } else { 0 };
            let exponent = state.exponent_of(logit((token >> 32) as u32), self.scale);
            let mut weight = if member < len { weight_at(exponent) } else { 0 };
            if takes(step::COUNT + 1) && ahead(len, token, 1) >= u64::from(params.top_k) {
                weight = 0;
            }
            if takes(step::WEIGH) {
                let target = if is_counted {
                    nucleus(block_scan_u64(weight, partials).total, params.top_p)
                } else {
                    state.target
                };
                if ahead(len, token, weight) >= target {
                    weight = 0;
                }
            }
            if weight < self.min_weight {
                weight = 0;
            }
            if takes(step::MEAN) {
                // Of those without a weight too, which have no moment: a branch here would be followed by barriers.
                let depth = depth(exponent);
                let weights = block_scan_u64(weight, partials).total;
                let moments = block_scan_u64(moment(weight, depth), partials).total;
                let order = u64::from(nearness(depth, mean(moments, weights)));
                if ahead(len, order, weight) >= nucleus(weights, params.typical_p) {
                    weight = 0;
                }
            }
            let point = self.point(block_scan_u64(weight, partials).total);
            // The lower half descends with the index.
            let before = ahead(len, u64::from(token as u32), weight);
            if before <= point && point < before + weight {
                shared::store_u32(base + smem::FOUND, index_of(token));
            }
            thread::sync_threads();
            shared::load_u32(base + smem::FOUND)
        }
    }
}
