//! The results of a row's splits become one: `out = Σ 2^(m_s − m)·o_s / (Σ 2^(m_s − m)·l_s + 2^(sink − m))`, m the largest of
//! the m_s and the sink.
//!
//! Work split: a block per row. Each of its 8 warps finds m and the sum of the weights by itself, a split per lane, and
//! adds up every eighth split's result, four columns per lane and access; the eight sums meet in shared memory. All of
//! it is in the order of the splits, which depends on the row alone.

use abi::ops::attention::{AttentionDims, MAX_HEAD_DIM_V, MERGE_THREADS, SPLIT_KEYS};
use cuda_std::cvt::Element;
use cuda_std::{global, math, shared, thread, warp};

use super::scores::sink;
use super::{Sequence, Tables, offset};
use crate::tile::softmax::{self, log_sum_exp};

const WARPS: u32 = MERGE_THREADS / 32;
/// Splits whose loads are in flight at a time.
const UNROLL: usize = 4;

/// The whole block. See the module.
///
/// # Safety
/// - One block of [`MERGE_THREADS`] threads per row, in the order sequence, head, query; the decode kernel before it had
///   the same `dims` — `Attention::run`.
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
    let row = thread::block_idx_x();
    let (seq_q, heads) = (dims.seq_q.max(1), dims.heads_q.max(1));
    let (query, head, batch) = (row % seq_q, row / seq_q % heads, row / seq_q / heads);
    let (lane, warp_idx) = (thread::lane(), thread::warp_idx());
    let dim = dims.head_dim_v;
    // SAFETY: splits in which the row sees a key were written by the decode kernel, and lie inside the workspace —
    // Attention::run. The loops' bounds are the same in a whole warp, the barrier is outside of all.
    unsafe {
        let own = Sequence::new(tables, dims, batch);
        if query >= own.seq_q {
            return;
        }
        let keys = own.visible(dims, query);
        let first = keys.lo as u32 / SPLIT_KEYS;
        let end = if keys.lo < keys.hi { (keys.hi as u32).div_ceil(SPLIT_KEYS) } else { first };
        let stats = stats.add(row as usize * dims.splits as usize * 2);
        let partial = partial.add(row as usize * dims.splits as usize * dim as usize);

        let mut largest = f32::NEG_INFINITY;
        let mut split = first + lane;
        while split < end {
            largest = math::max(largest, global::load(stats.add(2 * split as usize)));
            split += 32;
        }
        let sink = sink::<T>(sinks, head);
        let m = math::max(warp::max_f32::<32>(largest), sink);
        let base = if m == f32::NEG_INFINITY { 0.0 } else { m };
        let weight = |split: u32| softmax::weight::<T>(global::load(stats.add(2 * split as usize)) - base);
        let mut sum = 0.0;
        let mut split = first + lane;
        while split < end {
            sum = math::fma(weight(split), global::load(stats.add(2 * split as usize + 1)), sum);
            split += 32;
        }
        let sum = warp::sum_f32::<32>(sum) + softmax::weight::<T>(sink - base);

        let mut col = 4 * lane;
        while col < dim {
            let mut total = [0.0f32; 4];
            let mut split = first + warp_idx;
            while split < end {
                let mut weights = [0.0; UNROLL];
                let mut held = [[0u32; 4]; UNROLL];
                let mut i = 0;
                while i < UNROLL {
                    let split = split + i as u32 * WARPS;
                    if split < end {
                        held[i] = global::load_x4(partial.add(split as usize * dim as usize + col as usize));
                        weights[i] = weight(split);
                    }
                    i += 1;
                }
                let mut i = 0;
                while i < UNROLL {
                    let mut j = 0;
                    while j < 4 {
                        total[j] = math::fma(weights[i], f32::from_bits(held[i][j]), total[j]);
                        j += 1;
                    }
                    i += 1;
                }
                split += UNROLL as u32 * WARPS;
            }
            shared::store_f32x4(shared::base() + (warp_idx * MAX_HEAD_DIM_V + col) * 4, total);
            col += 128;
        }
        thread::sync_threads();
        let mut col = thread::thread_idx_x();
        while col < dim {
            let mut total = 0.0;
            let mut i = 0;
            while i < WARPS {
                total += shared::load_f32(shared::base() + (i * MAX_HEAD_DIM_V + col) * 4);
                i += 1;
            }
            let value = if sum == 0.0 { 0.0 } else { total * math::rcp(sum) };
            let at = offset(
                batch,
                dims.out_batch_stride,
                own.first_q + query,
                dims.out_token_stride,
                head,
                dims.out_head_stride,
            );
            global::store(out.add(at + col as usize), T::from_f32(value));
            col += MERGE_THREADS;
        }
        if thread::thread_idx_x() == 0 && !lse.is_null() {
            let at = offset(batch, dims.lse_batch_stride, own.first_q + query, 1, head, dims.lse_head_stride);
            global::store(lse.add(at), log_sum_exp::<T>(m, sum));
        }
    }
}
