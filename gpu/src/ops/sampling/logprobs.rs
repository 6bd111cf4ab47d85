//! Log-probabilities of the chosen token and of the most probable ones, of the logits as they are: no temperature, no
//! penalties.
//!
//! ```text
//! Top      the largest of each slice, in their order: the block's maximum, and then only the thread that had it
//!          looks for its next one
//! Sum      what each slice weighs: integers, as for drawing
//! Merge    a block per row: the largest of the slices' largest, and logarithms
//! ```

use abi::ops::sampling::logprobs::{MAX_SLICES, THREADS, Task, per_slice, record_len};
use abi::ops::sampling::{
    LOG2_E, SamplingLogprobsDims, index_of, key, log_sum, logit, logprob, ranked, weight,
};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

use crate::tile::scan::{block_max_u64, block_scan_u64};

/// The largest number below a bound of those that the thread has; 0 if there is none.
///
/// # Safety
/// - `number_of` may be called for each of them.
#[inline(always)]
unsafe fn largest_below(bound: u64, from: u32, to: u32, number_of: impl Fn(u32) -> u64) -> u64 {
    let (mut best, mut i) = (0, from + thread::thread_idx_x());
    while i < to {
        let number = number_of(i);
        if number < bound && number > best {
            best = number;
        }
        i += THREADS;
    }
    best
}

/// Calls `tell(n, number)` in the first thread with the largest numbers of all threads in descending order; 0 where
/// there are no more.
///
/// # Safety
/// - *converged*: all threads of the block; `number_of` as for [`largest_below`], and no two numbers but 0 are equal.
#[inline(always)]
unsafe fn descend(
    num: u32,
    from: u32,
    to: u32,
    number_of: impl Fn(u32) -> u64,
    mut tell: impl FnMut(u32, u64),
) {
    // SAFETY: the partials are used by nothing else; the rest is the caller's promise.
    unsafe {
        let mut own = largest_below(u64::MAX, from, to, &number_of);
        let mut n = 0;
        while n < num {
            let largest = block_max_u64(own, shared::base());
            if thread::thread_idx_x() == 0 {
                tell(n, largest);
            }
            if own == largest && largest != 0 {
                own = largest_below(largest, from, to, &number_of);
            }
            n += 1;
        }
    }
}

/// What [`Task::Merge`] writes.
struct Out {
    chosen: *mut f32,
    top_ids: *mut u32,
    top: *mut f32,
}

/// A launch's part for a slice of a row. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`], one for each slice (x; one for [`Task::Merge`]) and row (y); rows *in-bounds*, a record for
///   each row of the launch; the launches of a run follow each other — `Sampler::run`.
#[inline(always)]
unsafe fn tell<T: Element>(
    logits: *const T,
    records: *mut u64,
    ids: *const u32,
    out: &Out,
    dims: &SamplingLogprobsDims,
) {
    let (slice, block_row, member) = (thread::block_idx_x(), thread::block_idx_y(), thread::thread_idx_x());
    let row = dims.first_row + block_row;
    let per_slice = per_slice(dims.top);
    let (start, partials) = (slice * dims.slice_len, shared::base());
    let end = dims.vocab.min(start + dims.slice_len);
    // SAFETY: the row exists — Sampler::run. Branches around barriers depend on parameters and on what all threads
    // know.
    unsafe {
        let logits = logits.add(row as usize * dims.logits_stride as usize);
        let value_of = |index: u32| global::load(logits.add(index as usize)).to_f32();
        let of_slices = records.add(block_row as usize * record_len(dims.top) as usize);
        let sums = of_slices.add((MAX_SLICES * per_slice) as usize);
        if dims.task == Task::Top as u32 {
            let of_slice = of_slices.add((slice * per_slice) as usize);
            let number_of = |index| ranked(key(value_of(index)), index);
            descend(per_slice, start, end, number_of, |n, number| {
                global::store(of_slice.add(n as usize), number);
            });
            return;
        }
        let mut own = 0;
        if member < dims.slices {
            own = global::load(of_slices.add((member * per_slice) as usize));
        }
        let max = logit((block_max_u64(own, partials) >> 32) as u32);
        if dims.task == Task::Sum as u32 {
            let (mut sum, mut i) = (0, start + member);
            while i < end {
                sum += weight(value_of(i), max, LOG2_E);
                i += THREADS;
            }
            let sum = block_scan_u64(sum, partials).total;
            if member == 0 {
                global::store(sums.add(slice as usize), sum);
            }
            return;
        }
        let own = if member < dims.slices { global::load(sums.add(member as usize)) } else { 0 };
        let log_sum = log_sum(block_scan_u64(own, partials).total);
        if member == 0 {
            let id = global::load(ids.add(row as usize));
            let value = if id < dims.vocab { value_of(id) } else { f32::NAN };
            global::store(out.chosen.add(row as usize), logprob(value, max, log_sum));
        }
        let number_of = |i: u32| global::load(of_slices.add(i as usize));
        descend(dims.top, 0, dims.slices * per_slice, number_of, |n, number| {
            let at = |stride: u32| row as usize * stride as usize + n as usize;
            global::store(out.top_ids.add(at(dims.top_strides[0])), index_of(number));
            let value = logit((number >> 32) as u32);
            global::store(out.top.add(at(dims.top_strides[1])), logprob(value, max, log_sum));
        });
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::sampling`.
        ///
        /// # Safety
        /// - Arguments as `Sampler::run` checks them.
        #[kernel(max_threads = 1024, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            logits: *const $type,
            records: *mut u64,
            ids: *const u32,
            chosen: *mut f32,
            top_ids: *mut u32,
            top: *mut f32,
            dims: SamplingLogprobsDims,
        ) {
            // SAFETY: blocks, rows and records as said there — Sampler::run.
            unsafe { tell::<$type>(logits, records, ids, &Out { chosen, top_ids, top }, &dims) }
        }
    )*};
}
abi::sampling_logprobs_table!(entries);
