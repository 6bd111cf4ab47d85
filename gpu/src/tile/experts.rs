//! The choice of a token's experts by a warp: `moe_router`, and kernels that choose for themselves.
//!
//! Lane l has the experts l, l + 32, …, whose order it keeps as integer keys in shared memory
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
//! ```
//!
//! Some hundred bytes to a few kilobytes per token: bound by latency, of which step 5 is the most. Rows are read once,
//! by neighbouring lanes side by side; pieces of 16 bytes would leave most lanes without work.

use abi::ops::moe_router::{MoeRouterDims, NORMALISED, ROUND_BF16, ROUND_F16, SIGMOID, Scores, weight};
use abi::ops::sampling::{key, logit};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::warp::{FULL_MASK, max_u32, shuffle_idx_f32, sum_f32, sync_warp};
use cuda_std::{global, shared, thread};

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

/// Chooses the first `rounds` experts of a token by this warp. A lane's result is its expert, if it is below `rounds`;
/// and the scores, of which a softmax is left out unless the choice or what follows it (`has_weights`) needs them.
///
/// # Safety
/// - *converged*: all lanes of the warp; `row` holds `experts` logits, `bias` is null or holds as many numbers;
///   `rounds` is at most `top_k`.
/// - *exclusive*: `experts` words of shared memory at `keys` are used for nothing else.
#[inline(always)]
pub unsafe fn choose<T: Element>(
    (row, bias): (*const T, *const f32),
    keys: u32,
    (rounds, has_weights): (u32, bool),
    dims: &MoeRouterDims,
) -> (u32, Scores) {
    let (lane, experts) = (thread::lane(), dims.experts);
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
        let needs_sum = has_weights || !bias.is_null() || dims.num_groups > 1;
        let scores = if dims.options & SIGMOID != 0 || !needs_sum {
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
        while j < rounds {
            // There is one: the groups that are left have top_k experts — MoeRouter::plan.
            let expert = best(candidate);
            chosen = if lane == j { expert } else { chosen };
            if expert & 31 == lane {
                shared::store_u32(at(expert), 0);
                candidate = mine();
            }
            j += 1;
        }
        (chosen, scores)
    }
}

/// The weight of the expert that this lane's `chosen` is, rounded, if the lane is below `top_k`.
///
/// # Safety
/// - *converged*: all lanes of the warp; `row` holds `experts` logits; `chosen` and the scores are those of [`choose`].
#[inline(always)]
pub unsafe fn weigh<T: Element>(row: *const T, (chosen, scores): (u32, Scores), dims: &MoeRouterDims) -> f32 {
    // SAFETY: `chosen` is an expert, or 0; all lanes take part.
    unsafe {
        let score = scores.of(global::load(row.add(chosen as usize)).to_f32());
        let mut sum = 0.0;
        if dims.options & NORMALISED != 0 {
            let mut j = 0;
            while j < dims.top_k {
                sum += shuffle_idx_f32(FULL_MASK, score, j);
                j += 1;
            }
        }
        let exact = weight(score, sum, dims.options, dims.scale);
        match dims.options & (ROUND_F16 | ROUND_BF16) {
            0 => exact,
            ROUND_F16 => f16::from_f32(exact).to_f32(),
            _ => <bf16 as Element>::from_f32(exact).to_f32(),
        }
    }
}

/// Stores what a warp has chosen for a token, and the weights.
///
/// # Safety
/// - `ids` and `weights` hold `top_k` numbers for each token; those of this one are this warp's.
#[inline(always)]
pub unsafe fn store_choice(
    (token, chosen, weight): (u32, u32, f32),
    ids: *mut u32,
    weights: *mut f32,
    dims: &MoeRouterDims,
) {
    let lane = thread::lane();
    if lane < dims.top_k {
        let to = token as usize * dims.top_k as usize + lane as usize;
        // SAFETY: lane < top_k; the token's own — the caller.
        unsafe {
            global::store(ids.wrapping_add(to), chosen);
            global::store(weights.wrapping_add(to), weight);
        }
    }
}

/// Makes the keys of all groups but the best 0. The score of a group is the sum of its two largest values.
///
/// # Safety
/// - *converged*: all 32 lanes; keys as in [`choose`].
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
