//! The results of a row's splits become one: `out = Σ 2^(m_s − m)·o_s / (Σ 2^(m_s − m)·l_s + 2^(sink − m))`, m the
//! largest of the m_s and the sink.
//!
//! Work split: a block is one warp, for a piece of one row. The splits of a group are joined one after another, unless
//! the decode kernel has done that. Every fourth group is of one part of the sum. Of few rows a lane does one part of
//! four columns: a warp has [`MERGE_COLUMNS`] of them then, and a row is spread over many multiprocessors. Of many rows
//! a lane does all four parts, so that a warp has four times as many columns, and fewer warps work out the same
//! numbers. All of these do the same additions, whose order depends on the row alone.
//!
//! The results lie in L2, just written. What takes time is one access waiting for another, and instructions, hardly one
//! of which is used twice. So each lane knows the numbers of one group of 32, works out once what its results are
//! multiplied by, and hands that to the others; the first results, up to 16 of a lane, are asked for before these
//! numbers have come; batches that a row does not have are passed over, and within a batch what is not there is
//! multiplied by 0. Of few rows two accesses wait for each other, the number of keys and all the rest, up to 32 joined
//! groups or 16 others; then one more for each further 16 results of a lane.

use core::ptr::null;

use abi::ops::attention::{AttentionDims, GROUP_SPLITS, MERGE_COLUMNS, MERGE_PARTS, SPLIT_KEYS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread, warp};

use super::scores::sink;
use super::{Sequence, Tables, offset};
use crate::tile::softmax::{base, log_sum_exp, meet, weight};

/// Results that a lane asks for, or passes over, at a time.
const BATCH: usize = 4;
/// Groups of which the lanes of a warp know the numbers, one each.
const CHUNK: u32 = 32;

/// What a lane knows of its group.
#[derive(Clone, Copy)]
struct Group<const RESULTS: usize> {
    /// Largest score and sum of the weights.
    m: f32,
    sum: f32,
    /// For each result: what those before it have come to, and itself, are multiplied by. The first is taken as it is.
    factors: [[f32; 2]; RESULTS],
}

impl<const RESULTS: usize> Group<RESULTS> {
    /// From the largest score and sum of each result, in one word.
    #[inline(always)]
    fn new<T: Element>(numbers: [u64; RESULTS]) -> Self {
        let [m, sum] = halves(numbers[0]);
        let mut group = Group { m, sum, factors: [[0.0; 2]; RESULTS] };
        let mut i = 1;
        while i < RESULTS {
            let [m, sum] = halves(numbers[i]);
            let [of_before, of_this] = meet::<T>(&mut group.m, m);
            group.sum = math::fma(sum, of_this, group.sum * of_before);
            group.factors[i] = [of_before, of_this];
            i += 1;
        }
        group
    }
}

#[inline(always)]
fn halves(word: u64) -> [f32; 2] {
    [f32::from_bits(word as u32), f32::from_bits((word >> 32) as u32)]
}

/// The whole block. See the module.
///
/// # Safety
/// - One block of a warp per sequence and query (x), head (y) and piece of [`MERGE_COLUMNS`] for each part of a lane
///   (z); the decode kernel before it had the same `dims` — `Attention::run`.
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
        match (dims.merge_parts == MERGE_PARTS, dims.result_shift == 0) {
            (true, true) => parts::<T, ALL, SPLITS, 4>(partial, stats, tables, out, lse, sinks, dims),
            (true, false) => parts::<T, ALL, 1, 4>(partial, stats, tables, out, lse, sinks, dims),
            (false, true) => parts::<T, 1, SPLITS, 4>(partial, stats, tables, out, lse, sinks, dims),
            (false, false) => parts::<T, 1, 1, 2>(partial, stats, tables, out, lse, sinks, dims),
        }
    }
}

/// The same with so many parts of the sum to a lane, results to a group, and times [`BATCH`] results of a lane on their
/// way.
///
/// # Safety
/// - As for [`row`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn parts<T: Element, const PARTS: usize, const RESULTS: usize, const AHEAD: usize>(
    partial: *const f32,
    stats: *const f32,
    tables: Tables,
    out: *mut T,
    lse: *mut f32,
    sinks: *const f32,
    dims: &AttentionDims,
) {
    // Lanes that have a part's columns; from one of a lane's groups to the next; from one batch to the next.
    let quads = MERGE_COLUMNS / 4 * PARTS as u32;
    let step = MERGE_PARTS / PARTS as u32;
    let batch_step = (BATCH / RESULTS) as u32 * step;
    let dim = dims.head_dim_v;
    let (row, head, piece) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    // Of a single query without a division.
    let (batch, query) = if dims.seq_q <= 1 { (row, 0) } else { (row / dims.seq_q, row % dims.seq_q) };
    let lane = thread::lane();
    let part = lane / quads;
    let col = 4 * (piece * quads + lane % quads);
    // SAFETY: splits in which the row sees a key were written by the decode kernel, and lie inside the workspace —
    // Attention::run. What the branches around shuffles depend on is the same in the whole block.
    unsafe {
        let sink = sink::<T>(sinks, head);
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
        let (first, end) = (first_result / RESULTS as u32, end_result.div_ceil(RESULTS as u32));
        let results = (dims.splits >> dims.result_shift) as usize;
        let row = ((batch * dims.heads_q + head) * dims.seq_q + query) as usize;
        let stats = stats.add(row * results * 2).cast::<u64>();
        let partial = partial.add(row * results * dim as usize + col as usize);
        let count = end_result - first_result;
        let numbers = |group: u32| {
            let mut numbers = [u64::from(f32::NEG_INFINITY.to_bits()); RESULTS];
            let mut i = 0;
            while i < RESULTS {
                let result = group * RESULTS as u32 + i as u32;
                if result.wrapping_sub(first_result) < count {
                    numbers[i] = global::load(stats.add(result as usize));
                }
                i += 1;
            }
            numbers
        };
        let lane_count = if col < dim { count } else { 0 };
        // Whether the row has any groups of a batch, the same for all lanes.
        let has = |at: u32, batch: usize| at + batch as u32 * batch_step < end;
        let fetch = |at: u32| {
            // −0 times the weight of what is not there, 0, changes no sum, not even the sign of a zero.
            let mut held = [[[(-0f32).to_bits(); 4]; BATCH]; AHEAD];
            let result = (at + part) * RESULTS as u32;
            let from = result * dim;
            let mut batch = 0;
            while batch < AHEAD {
                if has(at, batch) {
                    let mut i = 0;
                    while i < BATCH {
                        let group = batch * (BATCH / RESULTS) + i / RESULTS;
                        let next = group as u32 * step * RESULTS as u32 + (i % RESULTS) as u32;
                        if (result + next).wrapping_sub(first_result) < lane_count {
                            held[batch][i] = global::load_x4(partial.add((from + next * dim) as usize));
                        }
                        i += 1;
                    }
                }
                batch += 1;
            }
            held
        };

        let own_numbers = numbers(first + lane);
        let mut held = fetch(first);
        let mut group = Group::<RESULTS>::new::<T>(own_numbers);
        let (mut m, mut sum) = (group.m, group.sum);
        let mut from = first + CHUNK;
        while from < end {
            let more = Group::<RESULTS>::new::<T>(numbers(from + lane));
            let [of_before, of_this] = meet::<T>(&mut m, more.m);
            sum = math::fma(more.sum, of_this, sum * of_before);
            // Opaque, so that the loop stays one.
            from = thread::opaque(from + CHUNK);
        }
        let of_lane = m;
        let m = math::max(warp::max_f32::<32>(m), sink);
        let base = base(m);
        let sum = sum * weight::<T>(of_lane - base);

        let mut of_group = weight::<T>(group.m - base);
        let mut totals = [[0f32; 4]; PARTS];
        let mut at = first;
        while at < end {
            let mut batch = 0;
            while batch < AHEAD {
                if has(at, batch) {
                    let mut i = 0;
                    while i < BATCH / RESULTS {
                        let next = batch * (BATCH / RESULTS) + i;
                        let owner = at - first + part + next as u32 * step;
                        let mut values = held[batch][i * RESULTS].map(f32::from_bits);
                        let mut result = 1;
                        while result < RESULTS {
                            let factors = group.factors[result];
                            let [of_before, of_this] =
                                factors.map(|factor| warp::shuffle_idx_f32(warp::FULL_MASK, factor, owner));
                            let this = held[batch][i * RESULTS + result].map(f32::from_bits);
                            let mut j = 0;
                            while j < 4 {
                                values[j] = math::fma(this[j], of_this, values[j] * of_before);
                                j += 1;
                            }
                            result += 1;
                        }
                        let weight = warp::shuffle_idx_f32(warp::FULL_MASK, of_group, owner);
                        let mut j = 0;
                        while j < 4 {
                            let total = &mut totals[next % PARTS][j];
                            *total = math::fma(weight, values[j], *total);
                            j += 1;
                        }
                        i += 1;
                    }
                }
                batch += 1;
            }
            // Opaque, or all places of the next round would be worked out before this one.
            at = thread::opaque(at + AHEAD as u32 * batch_step);
            if at < end {
                held = fetch(at);
                if (at - first).is_multiple_of(CHUNK) {
                    group = Group::new::<T>(numbers(at + lane));
                    of_group = weight::<T>(group.m - base);
                }
            }
        }

        let mut total = totals[0];
        let mut next = 1;
        while next < MERGE_PARTS {
            let mut j = 0;
            while j < 4 {
                total[j] += if PARTS == 1 {
                    warp::shuffle_idx_f32(warp::FULL_MASK, totals[0][j], lane + next * quads)
                } else {
                    totals[next as usize % PARTS][j]
                };
                j += 1;
            }
            next += 1;
        }
        // Only now, as nothing before has to wait for it.
        let sum = warp::sum_f32::<32>(sum) + weight::<T>(sink - base);
        let inverse = math::rcp(sum);
        if part == 0 && col < dim {
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
        if lane == 0 && piece == 0 && !lse.is_null() {
            let at = offset(batch, dims.lse_batch_stride, own.first_q + query, 1, head, dims.lse_head_stride);
            global::store(lse.add(at), log_sum_exp::<T>(m, sum));
        }
    }
}

macro_rules! entry {
    ($entry:ident, $type:ident, Merge $(,)?) => {
        /// Entry point; see `merge` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 32)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            partial: *const f32,
            stats: *const f32,
            kv_lens: *const u32,
            q_offsets: *const u32,
            out: *mut $type,
            lse: *mut f32,
            sinks: *const f32,
            dims: AttentionDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table: null() };
                row::<$type>(partial, stats, tables, out, lse, sinks, &dims)
            }
        }
    };
    ($($of_others:tt)*) => {};
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        $(entry!($entry, $type, $tile, $($value),*);)*
    };
}
abi::attention_table!(entries);
