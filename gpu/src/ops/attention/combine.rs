//! The results of the parts of a row's keys become one: `out = Σ w_p·o_p / (Σ w_p + 2^(sink − m))`,
//! `w_p = 2^(m_p − m)·l_p`, m the largest of the m_p and the sink, of parts whose results are finished and rounded.
//!
//! Work split: a thread has 8 columns of one row and head. The parts' results and numbers lie in L2, just written; the
//! numbers are read twice, for the largest score and for the weights.

use abi::ops::attention::{AttentionDims, COMBINE_THREADS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

use super::offset;
use super::scores::sink;
use crate::tile::softmax::{base, log_sum_exp, weight};

/// The thread's columns. See the module.
///
/// # Safety
/// - Blocks of [`COMBINE_THREADS`] threads for all pieces of 8 columns, heads and rows; `partial` is `[parts, rows,
///   head, column]` and `numbers` `[head, parts, rows, 2]`, of m_p and l_p, a row being one of all sequences', both
///   *initialised* for the rows of sequences; out and lse *in-bounds* and *aligned(16)* — `Attention::run`.
#[inline(always)]
unsafe fn combine<T: Element>(
    partial: *const T,
    numbers: *const f32,
    q_offsets: *const u32,
    out: *mut T,
    lse: *mut f32,
    sinks: *const f32,
    dims: &AttentionDims,
) {
    let (pieces, heads, parts) = (dims.head_dim_v / 8, dims.heads_q.max(1), 1 << dims.key_parts_log2);
    let rows = if q_offsets.is_null() { dims.batch * dims.seq_q } else { dims.tokens_q };
    let item = thread::block_idx_x() * COMBINE_THREADS + thread::thread_idx_x();
    let (piece, place) = (item % pieces.max(1), item / pieces.max(1));
    let (head, row) = (place % heads, place / heads);
    // SAFETY: a row that there is; the rest is the caller's promise.
    unsafe {
        if row >= rows {
            return;
        }
        if !q_offsets.is_null() {
            // Rows outside of all sequences have no results.
            let ends = [global::load(q_offsets), global::load(q_offsets.add(dims.sequences as usize))];
            if row < ends[0] || row >= ends[1] {
                return;
            }
        }
        let numbers_of = |part: u32| {
            let at = (head as usize * parts as usize + part as usize) * rows as usize + row as usize;
            let word = global::load(numbers.add(2 * at).cast::<u64>());
            [f32::from_bits(word as u32), f32::from_bits((word >> 32) as u32)]
        };
        let sink = sink::<T>(sinks, head);
        let mut m = sink;
        let mut part = 0;
        while part < parts {
            m = math::max(m, numbers_of(part)[0]);
            part += 1;
        }
        let base = base(m);
        let mut sum = weight::<T>(sink - base);
        let mut totals = [0f32; 8];
        let mut part = 0;
        while part < parts {
            let [own, own_sum] = numbers_of(part);
            // What a row does not see makes no difference, whatever it is.
            if own_sum != 0.0 {
                let of_part = weight::<T>(own - base) * own_sum;
                sum += of_part;
                let from = ((part as usize * rows as usize + row as usize) * heads as usize + head as usize)
                    * dims.head_dim_v as usize;
                let mut values = [0f32; 8];
                T::unpack(global::load_x4(partial.add(from + 8 * piece as usize)), &mut values);
                let mut i = 0;
                while i < 8 {
                    totals[i] = math::fma(of_part, values[i], totals[i]);
                    i += 1;
                }
            }
            part += 1;
        }
        let factor = if sum == 0.0 { 0.0 } else { math::rcp(sum) };
        let mut i = 0;
        while i < 8 {
            totals[i] *= factor;
            i += 1;
        }
        // Of packed rows the stride of sequences is nothing.
        let (batch, query) =
            if q_offsets.is_null() { (row / dims.seq_q.max(1), row % dims.seq_q.max(1)) } else { (0, row) };
        let at =
            offset(batch, dims.out_batch_stride, query, dims.out_token_stride, head, dims.out_head_stride);
        global::store_x4(out.add(at + 8 * piece as usize), T::pack(&totals));
        if piece == 0 && !lse.is_null() {
            let at = offset(batch, dims.lse_batch_stride, query, 1, head, dims.lse_head_stride);
            global::store(lse.add(at), log_sum_exp::<T>(m, sum));
        }
    }
}

macro_rules! combine_entries {
    ($($entry:ident => $type:ident, $dtype:ident, Combine {};)*) => {$(
        /// Entry point; see `combine` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            partial: *const $type,
            numbers: *const f32,
            q_offsets: *const u32,
            out: *mut $type,
            lse: *mut f32,
            sinks: *const f32,
            dims: AttentionDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe { combine::<$type>(partial, numbers, q_offsets, out, lse, sinks, &dims) }
        }
    )*};
}
abi::attention_combine_table!(combine_entries);
