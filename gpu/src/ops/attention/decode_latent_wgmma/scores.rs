//! The warpgroup of scores: products of keys and q, masks, weights.

use abi::ops::attention::{AttentionDims, MAX_HEAD_DIM, MAX_HEAD_DIM_V};
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Swizzle};
use cuda_std::{barrier, fence, global, math, mbarrier, shared, thread, warp, wgmma};

use super::super::Tables;
use super::super::work::{Splits, Work};
use super::places::{
    DECAYS, END, FIRST, LAST, LAST_SPLIT, NO_SLOT, NONE, Turn, largest, load_own, store_own, totals,
};
use super::{KEYS, OWN, ROW_BYTES, ROWS, SCORES, SUMS, steps_of};
use crate::matmul::multiplicand::{Multiplicand, finite_halves};
use crate::tile::softmax::{base, meet, weight};

/// How far, in powers of two, a score may be above what weights are relative to: those are 256 at most then, which f16
/// has room for.
const SLACK: f32 = 8.0;

/// The larger of two numbers of each of a thread's rows.
#[inline(always)]
fn larger(a: [f32; OWN], b: [f32; OWN]) -> [f32; OWN] {
    let mut larger = a;
    let mut i = 0;
    while i < OWN {
        larger[i] = math::max(larger[i], b[i]);
        i += 1;
    }
    larger
}

/// What the lanes of eight keys have of a thread's rows, together.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn over_keys(mut own: [f32; OWN], join: fn(f32, f32) -> f32) -> [f32; OWN] {
    let mut step = 4;
    while step < 32 {
        let mut i = 0;
        while i < OWN {
            // SAFETY: the caller's promise.
            own[i] = join(own[i], unsafe { warp::shuffle_xor_f32(warp::FULL_MASK, own[i], step) });
            i += 1;
        }
        step *= 2;
    }
    own
}

/// The warpgroup of scores and weights.
///
/// # Safety
/// - All 128 threads (*converged*); the rest is the caller's promise to [`super::splits`].
#[inline(always)]
pub(super) unsafe fn scores<T: Multiplicand + Multiply<[f32; SUMS]>>(
    tables: Tables,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let own_thread = thread::thread_idx_x() % 128;
    let (lane, warp_idx) = (own_thread % 32, own_thread / 32);
    let (group, member) = (lane / 4, lane % 4);
    let mut splits = Splits::new(dims, true);
    let (mut turn, mut q_turn) = (Turn(0), Turn(0));
    // Of the row that is the first warp's lane, of the splits of the result so far.
    let (mut joined_m, mut joined_sum) = (0.0, 0.0);
    // SAFETY: what comes from shared memory has come; what is told of a step is written between its keys' arrival and
    // its own, to places that are read before the keys are given back.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        if !work.has_keys() {
            if own_thread == 0 {
                shared::store_u32(turn.note(), NONE);
            }
            mbarrier::arrive(turn.full_p());
            return;
        }
        loop {
            let is_first_split = splits.is_first;
            if is_first_split {
                mbarrier::wait_parity(q_turn.full_q(), q_turn.parity());
            }
            let [first_step, end] = steps_of(&work);
            let (mut is_last_split, mut goes_on) = (false, false);
            let mut m = [f32::NEG_INFINITY; OWN];
            let mut sums = [0f32; OWN];
            let mut step = first_step;
            while step < end {
                let is_last = step + 1 == end;
                if is_last {
                    let next: Work<ROWS> = splits.next(tables, dims);
                    goes_on = next.has_keys();
                    is_last_split = splits.is_first || !goes_on;
                }
                mbarrier::wait_parity(turn.full_k(), turn.parity());
                // By a shuffle, as above; else the places of all parts of q would be kept in registers.
                let of_warp = |at| warp::shuffle_idx(warp::FULL_MASK, at, 0);
                let mut s = products::<T>(of_warp(turn.keys()), of_warp(q_turn.q()));
                if is_last && is_last_split {
                    warp::sync_warp(warp::FULL_MASK);
                    if lane == 0 {
                        mbarrier::arrive(q_turn.empty_q());
                    }
                }

                let mut i = 0;
                while i < SUMS {
                    s[i] *= dims.scale;
                    i += 1;
                }
                let first_key = step * KEYS as i32;
                if !(work.all.lo <= first_key && first_key + KEYS as i32 <= work.all.hi) {
                    clean::<T>(&work, first_key, turn, own_thread);
                    let mut i = 0;
                    while i < OWN {
                        let row = work.first_row + 4 * (i as u32 & !1) + 2 * member + i as u32 % 2;
                        let visible = work.visible(row, dims);
                        let mut half = 0;
                        while half < 2 {
                            let key = first_key + (16 * warp_idx + group) as i32 + 8 * half as i32;
                            let s = &mut s[i / 2 * 4 + 2 * half + i % 2];
                            *s = if visible.has(key) { *s } else { f32::NEG_INFINITY };
                            half += 1;
                        }
                        i += 1;
                    }
                }

                // Bases stay where no score is far above them: then one word of each warp is all that they have to tell
                // each other.
                let mut is_far = false;
                let mut i = 0;
                while i < OWN {
                    let (at, limit) = (i / 2 * 4 + i % 2, m[i] + SLACK);
                    is_far |= s[at] > limit || s[at + 2] > limit;
                    i += 1;
                }
                let is_far = warp::any(warp::FULL_MASK, is_far);
                if lane == 0 {
                    shared::store_u32(turn.votes() + warp_idx * 4, u32::from(is_far));
                }
                barrier::sync(SCORES, 128);
                let [a, b, c, d] = shared::load_u32x4(turn.votes());
                let is_new = a | b | c | d != 0;
                if is_new {
                    let mut new = m;
                    let mut i = 0;
                    while i < OWN {
                        let at = i / 2 * 4 + i % 2;
                        new[i] = math::max(s[at], s[at + 2]);
                        i += 1;
                    }
                    new = over_keys(new, math::max);
                    if lane < 4 {
                        store_own(turn.maxima() + warp_idx * ROWS * 4, member, new);
                    }
                    barrier::sync(SCORES, 128);
                    new = [f32::NEG_INFINITY; OWN];
                    let mut other = 0;
                    while other < 4 {
                        new = larger(new, load_own(turn.maxima() + other * ROWS * 4, member));
                        other += 1;
                    }
                    let mut decays = [1.0; OWN];
                    let mut i = 0;
                    while i < OWN {
                        // As the row's own scores alone decide.
                        if new[i] > m[i] + SLACK {
                            decays[i] = weight::<T>(m[i] - base(new[i]));
                            sums[i] *= decays[i];
                            m[i] = new[i];
                        }
                        i += 1;
                    }
                    if warp_idx == 0 && lane < 4 {
                        store_own(turn.decays(), member, decays);
                    }
                }
                let mut i = 0;
                while i < OWN {
                    let (at, base) = (i / 2 * 4 + i % 2, base(m[i]));
                    [s[at], s[at + 2]] = [weight::<T>(s[at] - base), weight::<T>(s[at + 2] - base)];
                    sums[i] += s[at] + s[at + 2];
                    i += 1;
                }
                // A word is a key's two neighbouring rows; the exclusive or is that of the key's row of 64 bytes.
                let own_key = 16 * warp_idx + group;
                let own_weights = turn.weights() + own_key * ROWS * 2 + 4 * member;
                let mut i = 0;
                while i < OWN / 2 {
                    let at = 4 * i;
                    let words = T::pack(&[s[at], s[at + 1], s[at + 2], s[at + 3], 0.0, 0.0, 0.0, 0.0]);
                    let to = own_weights + ((i as u32 ^ (own_key / 2 % 4)) << 4);
                    shared::store_u32(to, words[0]);
                    shared::store_u32(to + 8 * ROWS * 2, words[1]);
                    i += 1;
                }
                if is_last {
                    sums = over_keys(sums, |a, b| a + b);
                    if lane < 4 {
                        store_own(totals() + warp_idx * ROWS * 4, member, sums);
                    }
                    if lane < 4 && warp_idx == 0 {
                        store_own(largest(), member, m);
                    }
                    barrier::sync(SCORES, 128);
                    if warp_idx == 0 {
                        let of = |at: u32| shared::load_f32(at + lane * 4);
                        let total = |warp: u32| of(totals() + warp * ROWS * 4);
                        let mut total = (total(0) + total(1)) + (total(2) + total(3));
                        let mut m = of(largest());
                        let mut factors = [1.0; 2];
                        if !is_first_split {
                            factors = meet::<T>(&mut m, joined_m);
                            total = math::fma(total, factors[0], joined_sum * factors[1]);
                        }
                        shared::store_f32(turn.factors()[0] + lane * 4, factors[0]);
                        shared::store_f32(turn.factors()[1] + lane * 4, factors[1]);
                        (joined_m, joined_sum) = (m, total);
                        if is_last_split {
                            let row = work.first_row + lane;
                            let mut slot = NO_SLOT;
                            if row < work.end_row {
                                let at = work.slot(row, dims);
                                // 2^32 results would be 8 TiB of workspace.
                                slot = at as u32;
                                global::store(stats.add(2 * at), m);
                                global::store(stats.add(2 * at + 1), total);
                            }
                            shared::store_u32(turn.slots() + lane * 4, slot);
                        }
                    }
                }
                if own_thread == 0 {
                    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
                    let word = flag(step == first_step, FIRST)
                        | flag(is_last, LAST)
                        | flag(is_new && step != first_step, DECAYS)
                        | flag(is_last && is_last_split, LAST_SPLIT)
                        | flag(is_last && !goes_on, END);
                    shared::store_u32(turn.note(), word);
                }
                fence::proxy_async_shared();
                mbarrier::arrive(turn.full_p());
                turn.0 += 1;
                step += 1;
            }
            if is_last_split {
                q_turn.0 += 1;
            }
            if !goes_on {
                return;
            }
            // Found again, as it was not worth the registers.
            work = splits.find(tables, dims);
        }
    }
}

/// `k·qᵀ` of a step.
///
/// # Safety
/// - As for [`wgmma::ss`]: a step of keys and 32 rows of q.
#[inline(always)]
unsafe fn products<T: Multiply<[f32; SUMS]>>(keys: u32, q: u32) -> [f32; SUMS] {
    let keys = Descriptor::<KMajor>::new(keys, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    let q = Descriptor::<KMajor>::new(q, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    // Three sums, as a product waits for the one before it in its sum.
    let (mut a, mut b, mut c) = ([0.0; SUMS], [0.0; SUMS], [0.0; SUMS]);
    // SAFETY: the caller's promise.
    unsafe {
        wgmma::fence();
        let mut i = 0;
        while i < MAX_HEAD_DIM / 16 {
            let accumulate = if i < 3 { Accumulate::Overwrite } else { Accumulate::Add };
            let (column, within) = (i / 4 * ROW_BYTES, i % 4 * 32);
            let (keys, q) = (keys.advance(column * KEYS + within), q.advance(column * ROWS + within));
            let sum = match i % 3 {
                0 => &mut a,
                1 => &mut b,
                _ => &mut c,
            };
            wgmma::ss::<T, _, _, _>(sum, keys, q, accumulate);
            i += 1;
        }
        wgmma::commit_group();
        wgmma::wait_group::<0>(&mut (&mut a, &mut (&mut b, &mut c)));
    }
    let mut i = 0;
    while i < SUMS {
        a[i] += b[i] + c[i];
        i += 1;
    }
    a
}

/// Of a step's keys that not all rows see, the values that are not finite become 0.
///
/// # Safety
/// - All 128 threads; the step's scores are done, and nobody has been told of it.
#[inline(always)]
unsafe fn clean<T: Multiplicand>(work: &Work<ROWS>, first_key: i32, turn: Turn, own_thread: u32) {
    let key = own_thread / 2;
    if work.all.has(first_key + key as i32) {
        return;
    }
    // Every second box is the thread's.
    let mut at = turn.keys() + (own_thread % 2 * KEYS + key) * ROW_BYTES;
    let end = turn.keys() + MAX_HEAD_DIM_V / 64 * KEYS * ROW_BYTES;
    while at < end {
        let mut i = 0;
        while i < 8 {
            // SAFETY: the key's row of a box.
            unsafe {
                let words = shared::load_u32x4(at + i * 16);
                shared::store_u32x4(at + i * 16, words.map(finite_halves::<T>));
            }
            i += 1;
        }
        at += 2 * KEYS * ROW_BYTES;
    }
}
