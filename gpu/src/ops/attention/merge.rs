//! The results of a row's splits become one: `out = Σ 2^(m_s − m)·o_s / (Σ 2^(m_s − m)·l_s + 2^(sink − m))`, m the largest of
//! the m_s and the sink.
//!
//! Work split: a block per row and [`MERGE_COLUMNS`] columns, four of them to a lane. Every eighth split is of one part of the sum. A
//! block of one warp adds up all eight parts, in registers; one of eight warps, for many splits of few rows, a part with each, and
//! they meet in shared memory. Both do the same additions, whose order depends on the row alone.
//!
//! The results lie in L2, just written, and what takes time is one access waiting for another. So the first results are asked for
//! together with the numbers that they are weighted by, 16 splits at a time; a lane each knows the weight of one of those.

use abi::ops::attention::{AttentionDims, MERGE_COLUMNS, MERGE_PARTS, SPLIT_KEYS};
use cuda_std::cvt::Element;
use cuda_std::{global, math, shared, thread, warp};

use super::scores::sink;
use super::{Sequence, Tables, offset};
use crate::tile::softmax::{base, log_sum_exp, weight};

/// Splits whose results a warp has on their way.
const AHEAD: usize = 16;
/// Groups of 32 splits whose numbers a warp has on their way.
const GROUPS: usize = 4;

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
        if thread::block_dim_x() == 32 {
            parts::<T, { MERGE_PARTS as usize }>(partial, stats, tables, out, lse, sinks, dims)
        } else {
            parts::<T, 1>(partial, stats, tables, out, lse, sinks, dims)
        }
    }
}

/// The same with so many parts of the sum to a warp.
///
/// # Safety
/// - As for [`row`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn parts<T: Element, const PARTS: usize>(
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
        let first = keys.lo as u32 / SPLIT_KEYS;
        let end = if keys.lo < keys.hi { (keys.hi as u32).div_ceil(SPLIT_KEYS) } else { first };
        let stats = stats.add(row as usize * dims.splits as usize * 2);
        let partial = partial.add(row as usize * dims.splits as usize * dim as usize + col as usize);
        // Largest score and sum of the weights.
        let stat = |split: u32| {
            let none = u64::from(f32::NEG_INFINITY.to_bits());
            let both =
                if split < end { global::load(stats.add(2 * split as usize).cast::<u64>()) } else { none };
            (f32::from_bits(both as u32), f32::from_bits((both >> 32) as u32))
        };
        // Of the warp's splits the `i`-th behind `at`, which is one of them.
        let split_of = |at: u32, i: u32| at + i * (MERGE_PARTS / PARTS as u32);
        let fetch = |at: u32| {
            let mut held = [[0u32; 4]; AHEAD];
            let mut i = 0;
            while i < AHEAD {
                let split = split_of(at, i as u32);
                if split < end && col < dim {
                    held[i] = global::load_x4(partial.add((split * dim) as usize));
                }
                i += 1;
            }
            held
        };

        let mut at = first + warp_idx;
        let mut held = fetch(at);
        let lane_stats = |from: u32| {
            let mut stats = [(0.0, 0.0); GROUPS];
            let mut i = 0;
            while i < GROUPS {
                stats[i] = stat(from + 32 * i as u32 + lane);
                i += 1;
            }
            stats
        };
        let mut largest = f32::NEG_INFINITY;
        let mut from = first;
        while from < end {
            let stats = lane_stats(from);
            let mut i = 0;
            while i < GROUPS {
                largest = math::max(largest, stats[i].0);
                i += 1;
            }
            // Opaque, so that the loop stays one.
            from = thread::opaque(from + 32 * GROUPS as u32);
        }
        let sink = sink::<T>(sinks, head);
        let m = math::max(warp::max_f32::<32>(largest), sink);
        let base = base(m);
        let mut sum = 0.0;
        let mut from = first;
        while from < end {
            let stats = lane_stats(from);
            let mut i = 0;
            while i < GROUPS {
                sum = math::fma(weight::<T>(stats[i].0 - base), stats[i].1, sum);
                i += 1;
            }
            // Opaque, so that the loop stays one.
            from = thread::opaque(from + 32 * GROUPS as u32);
        }
        let sum = warp::sum_f32::<32>(sum) + weight::<T>(sink - base);

        let mut totals = [[0f32; 4]; PARTS];
        while at < end {
            let weight = weight::<T>(stat(split_of(at, lane % AHEAD as u32)).0 - base);
            let mut i = 0;
            while i < AHEAD {
                let weight = warp::shuffle_idx_f32(warp::FULL_MASK, weight, i as u32);
                // What is not there is left out, since 0 · 0 would change the sign of a zero.
                if split_of(at, i as u32) < end {
                    let total = &mut totals[i % PARTS];
                    let mut j = 0;
                    while j < 4 {
                        total[j] = math::fma(weight, f32::from_bits(held[i][j]), total[j]);
                        j += 1;
                    }
                }
                i += 1;
            }
            at = split_of(at, AHEAD as u32);
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
