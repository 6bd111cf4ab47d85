//! Router of a mixture of experts: scores, choice and weights of a token's experts.
//!
//! Work split: a warp per token, four to a block; eight where the block sorts the pairs too, of all tokens that there
//! are. Lane l has the experts l, l + 32, …, whose order it keeps as integer keys in shared memory
//! (`abi::ops::sampling::key`), one more than the key, so that 0 says *not to be chosen*:
//!
//! ```text
//! logits  | e0 | e1 | … | e31 | e32 | …           lane 0: e0, e32, …
//! 1. keys of the logits; their maximum
//! 2. softmax: the sum of e^(logit − max), each lane's in order, then a fixed tree
//! 3. bias: keys of score + bias
//! 4. groups: lane g adds up the two largest of group g; the best groups are taken one after another, and the keys of
//!    the others become 0
//! 5. top_k times: the largest key of the warp, the lowest expert among equals; its lane makes it 0 and finds its next
//! 6. lane j: the weight of the expert that was chosen j-th
//! 7. to sort: a thread per pair counts those that come before it, a thread per expert the pairs of those below it
//! ```
//!
//! Some hundred bytes to a few kilobytes per token: bound by latency, of which step 5 is the most. Rows are read once,
//! by neighbouring lanes side by side; pieces of 16 bytes would leave most lanes without work.

use abi::ops::moe_permute::NO_POSITION;
use abi::ops::moe_router::{
    MoeRouterDims, NORMALISED, ROUND_BF16, ROUND_F16, SIGMOID, SORT_TOKENS, Scores, WARPS, chosen_at, weight,
};
use abi::ops::sampling::{key, logit};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::warp::{FULL_MASK, max_u32, shuffle_idx_f32, sum_f32, sync_warp};
use cuda_std::{global, kernel, shared, thread};

/// Experts of a lane whose numbers are loaded, or worked on, side by side: one hides what another waits for.
const SIDE_BY_SIDE: usize = 8;
/// The same of exponentials, which have more instructions.
const POWERS: usize = 4;

/// The index of the largest key of the warp, the lowest of equals.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
unsafe fn best((key, index): (u32, u32)) -> u32 {
    // SAFETY: all lanes take part — the caller.
    unsafe {
        let largest = max_u32(key);
        !max_u32(if key == largest { !index } else { 0 })
    }
}

/// Routes a token by this warp. A lane's result is its expert, if it is below top_k.
///
/// # Safety
/// - *converged*: all lanes of the warp, and the token below `tokens`; `bias` is null or holds `experts` numbers;
///   tensors *in-bounds* for `dims` — checked in `MoeRouter::run`.
/// - *exclusive*: `experts` words of dynamic shared memory for each warp are used for nothing else.
#[inline(always)]
unsafe fn route<T: Element>(
    token: u32,
    logits: *const T,
    bias: *const f32,
    ids: *mut u32,
    weights: *mut f32,
    dims: &MoeRouterDims,
) -> u32 {
    let (lane, experts) = (thread::lane(), dims.experts);
    let row = logits.wrapping_add(token as usize * dims.logits_stride as usize);
    let keys = shared::base() + thread::warp_idx() * experts * 4;
    let at = |expert: u32| keys + 4 * expert;
    // SAFETY: experts below `experts` are in the row, the bias and this warp's keys; a warp leaves or stays as a whole,
    // and all branches around shuffles are the same for all lanes. Keys are touched by their own lane only, but for the
    // groups' scores, which lie between two barriers.
    unsafe {
        let mut max_key = 0;
        let mut first = lane;
        while first < experts {
            let mut logits = [0.0; SIDE_BY_SIDE];
            let mut i = 0;
            while i < SIDE_BY_SIDE {
                let expert = first + 32 * i as u32;
                if expert < experts {
                    logits[i] = global::load(row.add(expert as usize)).to_f32();
                }
                i += 1;
            }
            let mut i = 0;
            while i < SIDE_BY_SIDE {
                let expert = first + 32 * i as u32;
                if expert < experts {
                    let key = key(logits[i]);
                    shared::store_u32(at(expert), key + 1);
                    max_key = key.max(max_key);
                }
                i += 1;
            }
            first += 32 * SIDE_BY_SIDE as u32;
        }
        let scores = if dims.options & SIGMOID != 0 {
            Scores::SIGMOID
        } else {
            let max = logit(max_u32(max_key));
            let mut sum = 0.0;
            let mut first = lane;
            while first < experts {
                let mut powers = [0.0; POWERS];
                let mut i = 0;
                while i < POWERS {
                    let expert = first + 32 * i as u32;
                    // One that there is not has the power of any other, which is not added.
                    let entry = shared::load_u32(at(if expert < experts { expert } else { lane }));
                    powers[i] = Scores::power(logit(entry - 1), max);
                    i += 1;
                }
                let mut i = 0;
                while i < POWERS {
                    if first + 32 * (i as u32) < experts {
                        sum += powers[i];
                    }
                    i += 1;
                }
                first += 32 * POWERS as u32;
            }
            Scores::softmax(max, sum_f32::<32>(sum))
        };
        if !bias.is_null() {
            let mut expert = lane;
            while expert < experts {
                let score = scores.of(logit(shared::load_u32(at(expert)) - 1));
                let choice = score + global::load(bias.add(expert as usize));
                shared::store_u32(at(expert), key(choice) + 1);
                expert += 32;
            }
        }
        if dims.num_groups > 1 {
            let value = |entry: u32| {
                let value = logit(entry.saturating_sub(1));
                if bias.is_null() { scores.of(value) } else { value }
            };
            drop_groups(dims, at, value);
        }

        let mine = || {
            let (mut found, mut index) = (0, u32::MAX);
            let mut first = lane;
            while first < experts {
                let mut entries = [0; SIDE_BY_SIDE];
                let mut i = 0;
                while i < SIDE_BY_SIDE {
                    let expert = first + 32 * i as u32;
                    if expert < experts {
                        entries[i] = shared::load_u32(at(expert));
                    }
                    i += 1;
                }
                let mut i = 0;
                while i < SIDE_BY_SIDE {
                    // In ascending order, so only a larger one replaces.
                    if entries[i] > found {
                        (found, index) = (entries[i], first + 32 * i as u32);
                    }
                    i += 1;
                }
                first += 32 * SIDE_BY_SIDE as u32;
            }
            (found, index)
        };
        let mut candidate = mine();
        let mut chosen = 0;
        let mut j = 0;
        while j < dims.top_k {
            // There is one: the groups that are left have top_k experts — MoeRouter::plan.
            let expert = best(candidate);
            chosen = if lane == j { expert } else { chosen };
            if expert & 31 == lane {
                shared::store_u32(at(expert), 0);
                candidate = mine();
            }
            j += 1;
        }

        let score = scores.of(global::load(row.add(chosen as usize)).to_f32());
        let mut sum = 0.0;
        if dims.options & NORMALISED != 0 {
            let mut j = 0;
            while j < dims.top_k {
                sum += shuffle_idx_f32(FULL_MASK, score, j);
                j += 1;
            }
        }
        if lane < dims.top_k {
            let exact = weight(score, sum, dims.options, dims.scale);
            let rounded = match dims.options & (ROUND_F16 | ROUND_BF16) {
                0 => exact,
                ROUND_F16 => f16::from_f32(exact).to_f32(),
                _ => <bf16 as Element>::from_f32(exact).to_f32(),
            };
            let to = token as usize * dims.top_k as usize + lane as usize;
            global::store(ids.add(to), chosen);
            global::store(weights.add(to), rounded);
        }
        chosen
    }
}

/// Pairs that are looked at side by side.
const TOGETHER: u32 = 8;

/// Sorts the block's pairs by expert, as `moe_permute` does: a pair's place is the number of pairs before it.
///
/// # Safety
/// - *converged*: all threads of a block of `32 · SORT_TOKENS`, behind a barrier after which the experts of all pairs
///   are at `chosen`, and behind them ids of none; `offsets` holds `own_experts + 1` numbers, `order` and `positions`
///   one for each pair — checked in `MoeRouter::run`.
#[inline(always)]
unsafe fn sort(chosen: u32, offsets: *mut u32, order: *mut u32, positions: *mut u32, dims: &MoeRouterDims) {
    let pairs = dims.tokens * dims.top_k;
    // SAFETY: words up to a multiple of `TOGETHER` behind the pairs, which are no expert's; places below `pairs`, each
    // of one pair; experts up to `own_experts`.
    unsafe {
        // Of an expert below the first the difference wraps: it is none of those here.
        let bin_of = |expert: u32| expert.wrapping_sub(dims.first_expert).min(dims.own_experts);
        // How many pairs are of a bin below, or of the same and before this one.
        let before = |own: u32, pair: u32| {
            let (mut count, mut first) = (0, 0);
            while first < pairs {
                let mut words = [[0; 4]; TOGETHER as usize / 4];
                let mut i = 0;
                while i < TOGETHER / 4 {
                    words[i as usize] = shared::load_u32x4(chosen + 4 * (first + 4 * i));
                    i += 1;
                }
                let mut i = 0;
                while i < TOGETHER {
                    let bin = bin_of(words[i as usize / 4][i as usize % 4]);
                    count += u32::from(bin < own || (bin == own && first + i < pair));
                    i += 1;
                }
                first += TOGETHER;
            }
            count
        };
        let pair = thread::thread_idx_x();
        if pair < pairs {
            let own = bin_of(shared::load_u32(chosen + 4 * pair));
            let place = before(own, pair);
            global::store(order.add(place as usize), pair);
            let position = if own < dims.own_experts { place } else { NO_POSITION };
            global::store(positions.add(pair as usize), position);
        }
        let mut expert = thread::thread_idx_x();
        while expert <= dims.own_experts {
            global::store(offsets.add(expert as usize), before(expert, 0));
            expert += 32 * SORT_TOKENS;
        }
    }
}

/// Makes the keys of all groups but the best 0. The score of a group is the sum of its two largest values.
///
/// # Safety
/// - *converged*: all 32 lanes; keys as in [`route`].
#[inline(always)]
unsafe fn drop_groups(dims: &MoeRouterDims, at: impl Fn(u32) -> u32, value: impl Fn(u32) -> f32) {
    let lane = thread::lane();
    let mut candidate = (0, u32::MAX);
    // SAFETY: lane < num_groups keeps experts below num_groups · group_size = experts; the keys were written before the
    // first barrier and change after the second.
    unsafe {
        sync_warp(FULL_MASK);
        if lane < dims.num_groups {
            let (mut first, mut second) = (0, 0);
            let mut i = 0;
            while i < dims.group_size {
                let entry = shared::load_u32(at(lane * dims.group_size + i));
                (first, second) = if entry > first { (entry, first) } else { (first, entry.max(second)) };
                i += 1;
            }
            candidate = (key(value(first) + value(second)) + 1, lane);
        }
        sync_warp(FULL_MASK);
        let mut kept = 0u32;
        let mut i = 0;
        while i < dims.top_groups {
            let group = best(candidate);
            kept |= 1 << (group & 31);
            if group == lane {
                candidate = (0, u32::MAX);
            }
            i += 1;
        }
        let mut expert = lane;
        while expert < dims.experts {
            // At least 2 — MoeRouter::plan; `max` tells the compiler, which would otherwise keep a panic path.
            if kept >> ((expert / dims.group_size.max(1)) & 31) & 1 == 0 {
                shared::store_u32(at(expert), 0);
            }
            expert += 32;
        }
    }
}

macro_rules! entry {
    ($entry:ident, $type:ident, Route) => {
        /// Entry point; see the module and `abi::ops::moe_router`.
        ///
        /// # Safety
        /// - Arguments as `MoeRouter::run` checks them.
        #[kernel(max_threads = 128)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            logits: *const $type,
            bias: *const f32,
            ids: *mut u32,
            weights: *mut f32,
            dims: MoeRouterDims,
        ) {
            let token = thread::block_idx_x() * WARPS + thread::warp_idx();
            if token < dims.tokens {
                // SAFETY: a token that there is, the same for all lanes; the rest is the same contract.
                unsafe { route(token, logits, bias, ids, weights, &dims) };
            }
        }
    };
    ($entry:ident, $type:ident, Sort) => {
        /// Entry point; see the module and `abi::ops::moe_router`.
        ///
        /// # Safety
        /// - Arguments as `MoeRouter::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            logits: *const $type,
            bias: *const f32,
            ids: *mut u32,
            weights: *mut f32,
            offsets: *mut u32,
            order: *mut u32,
            positions: *mut u32,
            dims: MoeRouterDims,
        ) {
            let (token, lane) = (thread::warp_idx(), thread::lane());
            let chosen = shared::base() + chosen_at(dims.experts);
            // SAFETY: as above; each word of `chosen` is one lane's, and read behind the barrier.
            unsafe {
                if token < dims.tokens {
                    let expert = route(token, logits, bias, ids, weights, &dims);
                    if lane < dims.top_k {
                        shared::store_u32(chosen + 4 * (token * dims.top_k + lane), expert);
                    }
                }
                // As many words as a block has threads: those that are no pair's are no expert's.
                let word = thread::thread_idx_x();
                if word >= dims.tokens * dims.top_k {
                    shared::store_u32(chosen + 4 * word, NO_POSITION);
                }
                thread::sync_threads();
                sort(chosen, offsets, order, positions, &dims);
            }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $stage:ident;)*) => {
        $(entry!($entry, $type, $stage);)*
    };
}
abi::moe_router_table!(entries);
