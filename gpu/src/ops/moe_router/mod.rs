//! Router of a mixture of experts: scores, choice and weights of a token's experts.
//!
//! Work split: a warp per token, four to a block; eight where the block sorts the pairs too, of all tokens that there
//! are. How a warp chooses is in `tile::experts`. To sort, a thread per pair counts those that come before it, a thread
//! per expert the pairs of those below it.

use abi::ops::moe_permute::NO_POSITION;
use abi::ops::moe_router::{MoeRouterDims, SORT_TOKENS, WARPS, chosen_at};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

use crate::tile::experts::{choose, store_choice, weigh};

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
    let row = logits.wrapping_add(token as usize * dims.logits_stride as usize);
    let keys = shared::base() + thread::warp_idx() * dims.experts * 4;
    // SAFETY: a row of the logits, and keys of this warp — the caller.
    unsafe {
        let (chosen, scores) = choose((row, bias), keys, (dims.top_k, true), dims);
        let weight = weigh(row, (chosen, scores), dims);
        store_choice((token, chosen, weight), ids, weights, dims);
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
