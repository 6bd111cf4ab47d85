//! The results of a row's splits become one: `out = Σ 2^(m_s − m)·o_s / (Σ 2^(m_s − m)·l_s + 2^(sink − m))`, m the largest of
//! the m_s and the sink.
//!
//! Work split: a block per row and [`MERGE_COLUMNS`] columns, four of them to a lane. The splits of a group are joined one after
//! another, unless the decode kernel has done that. Every fourth group is of one part of the sum. A block of one warp adds up all
//! four parts, in registers; one of four warps, for many splits of few rows, a part with each, and they meet in shared memory. All
//! of these do the same additions, whose order depends on the row alone.
//!
//! The results lie in L2, just written, and what takes time is one access waiting for another. So the first results are asked for
//! together with the numbers that they are weighted by, 16 at a time; a lane each knows the weight of one of those.

use abi::ops::attention::{AttentionDims, GROUP_SPLITS, MERGE_COLUMNS, MERGE_PARTS, SPLIT_KEYS};
use cuda_std::cvt::Element;
use cuda_std::{global, math, shared, thread, warp};

use super::scores::sink;
use super::{Sequence, Tables, offset};
use crate::tile::softmax::{base, log_sum_exp, meet, weight};

/// Results that a warp has on their way.
const AHEAD: usize = 16;
/// Times 32 groups whose numbers a warp has on their way.
const NUMBERS_AHEAD: usize = 2;

/// The whole block. See the module.
///
/// # Safety
/// - One block per row, in the order sequence, head, query, and per [`MERGE_COLUMNS`] columns (y), of a warp or of
///   [`MERGE_PARTS`]; the decode kernel before it had the same `dims` — `Attention::run`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn row<T: Element>(
    partial: *const f32,
    stats: *const f32,
    tables: Tables,
    out: *mut T,
    lse: *mut f32,
    sinks: *const f32,
    dims: &AttentionDims,
) {
    // SAFETY: the caller's promise.
    unsafe {
        const ALL: usize = MERGE_PARTS as usize;
        const SPLITS: usize = GROUP_SPLITS as usize;
        match (thread::block_dim_x() == 32, dims.result_shift == 0) {
            (true, true) => parts::<T, ALL, SPLITS>(partial, stats, tables, out, lse, sinks, dims),
            (true, false) => parts::<T, ALL, 1>(partial, stats, tables, out, lse, sinks, dims),
            (false, true) => parts::<T, 1, SPLITS>(partial, stats, tables, out, lse, sinks, dims),
            (false, false) => parts::<T, 1, 1>(partial, stats, tables, out, lse, sinks, dims),
        }
    }
}

/// The same with so many parts of the sum to a warp, and results to a group.
///
/// # Safety
/// - As for [`row`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn parts<T: Element, const PARTS: usize, const RESULTS: usize>(
    partial: *const f32,
    stats: *const f32,
    tables: Tables,
    out: *mut T,
    lse: *mut f32,
    sinks: *const f32,
    dims: &AttentionDims,
) {
    let dim = dims.head_dim_v;
    let (row, piece) = (thread::block_idx_x(), thread::block_idx_y());
    let (seq_q, heads) = (dims.seq_q.max(1), dims.heads_q.max(1));
    // Of a single query without a division.
    let (query, rest) = if seq_q == 1 { (0, row) } else { (row % seq_q, row / seq_q) };
    let (head, batch) = (rest % heads, rest / heads);
    let (lane, warp_idx) = (thread::lane(), thread::warp_idx());
    let col = piece * MERGE_COLUMNS + 4 * lane;
    // SAFETY: splits in which the row sees a key were written by the decode kernel, and lie inside the workspace —
    // Attention::run. What the branches around shuffles and the barrier depend on is the same in the whole block.
    unsafe {
        let own = Sequence::new(tables, dims, batch);
        if query >= own.seq_q {
            return;
        }
        let keys = own.visible(dims, query);
        // Results that the row has a part in, and their groups.
        let result_keys = SPLIT_KEYS * GROUP_SPLITS / RESULTS as u32;
        let first_result = keys.lo as u32 / result_keys;
        let end_result =
            if keys.lo < keys.hi { (keys.hi as u32).div_ceil(result_keys) } else { first_result };
        let exists = |result: u32| first_result <= result && result < end_result;
        let (first, end) = (first_result / RESULTS as u32, end_result.div_ceil(RESULTS as u32));
        let results = (dims.splits >> dims.result_shift) as usize;
        let stats = stats.add(row as usize * results * 2);
        let partial = partial.add(row as usize * results * dim as usize + col as usize);
        // Largest score and sum of the weights.
        let stat = |result: u32| {
            let none = u64::from(f32::NEG_INFINITY.to_bits());
            let both = if exists(result) {
                global::load(stats.add(2 * result as usize).cast::<u64>())
            } else {
                none
            };
            (f32::from_bits(both as u32), f32::from_bits((both >> 32) as u32))
        };
        // The same of a group; and what its `own`-th result, and what the others before it have come to, are multiplied by.
        let join = |group: u32, own: usize| {
            let (mut m, mut sum, mut before, mut this) = (f32::NEG_INFINITY, 0.0, 0.0, 1.0);
            let mut i = 0;
            while i < RESULTS {
                let (m_i, sum_i) = stat(group * RESULTS as u32 + i as u32);
                if RESULTS == 1 {
                    (m, sum) = (m_i, sum_i);
                } else {
                    let [of_before, of_this] = meet::<T>(&mut m, m_i);
                    sum = math::fma(sum_i, of_this, sum * of_before);
                    before = if i == own { of_before } else { before };
                    this = if i == own { of_this } else { this };
                }
                i += 1;
            }
            (m, sum, before, this)
        };
        // Of the warp's groups the `i`-th behind `at`, which is one of them.
        let group_of = |at: u32, i: u32| at + i * (MERGE_PARTS / PARTS as u32);
        let result_of =
            |at: u32, i: u32| group_of(at, i / RESULTS as u32) * RESULTS as u32 + i % RESULTS as u32;
        let fetch = |at: u32| {
            let mut held = [[0u32; 4]; AHEAD];
            let mut i = 0;
            while i < AHEAD {
                let result = result_of(at, i as u32);
                if exists(result) && col < dim {
                    held[i] = global::load_x4(partial.add((result * dim) as usize));
                }
                i += 1;
            }
            held
        };

        let mut at = first + warp_idx;
        let mut held = fetch(at);
        let (mut m, mut sum) = (f32::NEG_INFINITY, 0.0);
        let mut from = first + lane;
        while from - lane < end {
            let mut numbers = [(0.0, 0.0); NUMBERS_AHEAD];
            let mut i = 0;
            while i < NUMBERS_AHEAD {
                let (m_i, sum_i, ..) = join(from + 32 * i as u32, 0);
                numbers[i] = (m_i, sum_i);
                i += 1;
            }
            let mut i = 0;
            while i < NUMBERS_AHEAD {
                let [of_before, of_this] = meet::<T>(&mut m, numbers[i].0);
                sum = math::fma(numbers[i].1, of_this, sum * of_before);
                i += 1;
            }
            // Opaque, so that the loop stays one.
            from = thread::opaque(from + 32 * NUMBERS_AHEAD as u32);
        }
        let sink = sink::<T>(sinks, head);
        let of_lane = m;
        let m = math::max(warp::max_f32::<32>(m), sink);
        let base = base(m);
        let sum = warp::sum_f32::<32>(sum * weight::<T>(of_lane - base)) + weight::<T>(sink - base);

        let mut totals = [[0f32; 4]; PARTS];
        while at < end {
            let own = lane % AHEAD as u32;
            let (m, _, of_before, of_this) = join(group_of(at, own / RESULTS as u32), own as usize % RESULTS);
            let weight = weight::<T>(m - base);
            let mut group = [0f32; 4];
            let mut i = 0;
            while i < AHEAD {
                // What is not there is left out, since 0 · 0 would change the sign of a zero.
                let is_there = exists(result_of(at, i as u32));
                let values = held[i].map(f32::from_bits);
                if RESULTS == 1 {
                    group = values;
                } else {
                    let of_before = warp::shuffle_idx_f32(warp::FULL_MASK, of_before, i as u32);
                    let of_this = warp::shuffle_idx_f32(warp::FULL_MASK, of_this, i as u32);
                    if i % RESULTS == 0 {
                        group = [0.0; 4];
                    }
                    if is_there {
                        let mut j = 0;
                        while j < 4 {
                            group[j] = math::fma(values[j], of_this, group[j] * of_before);
                            j += 1;
                        }
                    }
                }
                if i % RESULTS == RESULTS - 1 {
                    let weight = warp::shuffle_idx_f32(warp::FULL_MASK, weight, i as u32);
                    if group_of(at, (i / RESULTS) as u32) < end {
                        let total = &mut totals[i / RESULTS % PARTS];
                        let mut j = 0;
                        while j < 4 {
                            total[j] = math::fma(weight, group[j], total[j]);
                            j += 1;
                        }
                    }
                }
                i += 1;
            }
            at = group_of(at, (AHEAD / RESULTS) as u32);
            if at < end {
                held = fetch(at);
            }
        }

        let mut total = totals[0];
        if PARTS == 1 {
            let place = |part: u32| shared::base() + (part * MERGE_COLUMNS + 4 * lane) * 4;
            shared::store_f32x4(place(warp_idx), total);
            thread::sync_threads();
            total = shared::load_f32x4(place(0));
            let mut part = 1;
            while part < MERGE_PARTS {
                let more = shared::load_f32x4(place(part));
                let mut j = 0;
                while j < 4 {
                    total[j] += more[j];
                    j += 1;
                }
                part += 1;
            }
        } else {
            let mut part = 1;
            while part < PARTS {
                let mut j = 0;
                while j < 4 {
                    total[j] += totals[part][j];
                    j += 1;
                }
                part += 1;
            }
        }
        let inverse = math::rcp(sum);
        if warp_idx == 0 && col < dim {
            let at = offset(
                batch,
                dims.out_batch_stride,
                own.first_q + query,
                dims.out_token_stride,
                head,
                dims.out_head_stride,
            );
            let out = out.add(at + col as usize);
            let total = total.map(|total| if sum == 0.0 { 0.0 } else { total * inverse });
            if dims.vector != 0 {
                let [a, b, c, d] = total;
                let words = T::pack(&[a, b, c, d, 0.0, 0.0, 0.0, 0.0]);
                if T::PER_16_BYTES == 4 {
                    global::store_x4(out, words);
                } else {
                    global::store(out.cast::<u64>(), u64::from(words[0]) | u64::from(words[1]) << 32);
                }
            } else {
                let mut j = 0;
                while j < 4 {
                    global::store(out.add(j), T::from_f32(total[j]));
                    j += 1;
                }
            }
        }
        if thread::thread_idx_x() == 0 && piece == 0 && !lse.is_null() {
            let at = offset(batch, dims.lse_batch_stride, own.first_q + query, 1, head, dims.lse_head_stride);
            global::store(lse.add(at), log_sum_exp::<T>(m, sum));
        }
    }
}
