//! Logits as their row's parameters want them, in f32: bias, penalties for what the history holds, and NaN where the
//! mask does not allow a token.
//!
//! Work split: a block for each 4096 logits of a row. It counts in shared memory how often the row's history has each
//! of its tokens, so that there is no table of counts to keep; each block reads the row's history and bias, which are
//! in L2 for all but the first. Then it reads its logits once and writes them once.

use abi::ops::sampling::edit::{SLICE, THREADS, smem};
use abi::ops::sampling::{SamplingEditDims, edited};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

use super::load_params;

/// In a count: the prompt has the token.
const SEEN: u32 = 1 << 31;

/// The tensors of a launch. Those that there are not are null.
struct Tensors<T> {
    logits: *const T,
    params: *const u32,
    history: *const u32,
    bias_ids: *const u32,
    bias: *const f32,
    masks: *const u32,
    edited: *mut f32,
}

/// Counts the tokens of the slice in a part of a history.
///
/// # Safety
/// - The part is *in-bounds(the history)*, the counts are cleared.
#[inline(always)]
unsafe fn count(history: *const u32, from: u32, to: u32, start: u32, len: u32) {
    let mut i = from + thread::thread_idx_x();
    while i < to {
        // SAFETY: the caller's promise; whatever the token is, only those of the slice are counted.
        unsafe {
            let offset = global::load(history.add(i as usize)).wrapping_sub(start);
            if offset < len {
                shared::add_u32(shared::base() + smem::COUNTS + 4 * offset, 1);
            }
        }
        i += THREADS;
    }
}

/// Edits a slice of a row. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`], one for each [`SLICE`] (x) and row (y); rows *in-bounds* — `Sampler::run`.
#[inline(always)]
unsafe fn edit<T: Element>(tensors: &Tensors<T>, dims: &SamplingEditDims) {
    let (block_row, member, base) = (thread::block_idx_y(), thread::thread_idx_x(), shared::base());
    let row = dims.first_row + block_row;
    let start = thread::block_idx_x() * SLICE;
    let len = SLICE.min(dims.vocab - start);
    let at = |stride: u32| row as usize * stride as usize;
    // SAFETY: the row exists — Sampler::run; what the parameters say of lengths is bounded by what there is. Between
    // barriers counts are touched by atomics, or each by its own thread; the tokens of a bias differ, so each value has
    // one writer.
    unsafe {
        let params = load_params(tensors.params.add(at(dims.params_stride)));
        let history = tensors.history.wrapping_add(at(dims.history_stride));
        let has_penalties = params.repetition != 1.0 || params.presence != 0.0 || params.frequency != 0.0;
        let history_len = if has_penalties { params.history_len.min(dims.history) } else { 0 };
        let prompt_len = params.prompt_len.min(history_len);
        let num_bias = params.num_bias.min(dims.bias);
        let mut i = member;
        while i < SLICE {
            shared::store_u32(base + smem::COUNTS + 4 * i, 0);
            shared::store_f32(base + smem::BIAS + 4 * i, 0.0);
            i += THREADS;
        }
        thread::sync_threads();
        // Only the repetition penalty asks for the prompt.
        if params.repetition != 1.0 {
            count(history, 0, prompt_len, start, len);
        }
        let mut i = member;
        while i < num_bias {
            let id = global::load(tensors.bias_ids.add(at(dims.bias_strides[0]) + i as usize));
            let offset = id.wrapping_sub(start);
            if offset < len {
                let value = global::load(tensors.bias.add(at(dims.bias_strides[1]) + i as usize));
                shared::store_f32(base + smem::BIAS + 4 * offset, value);
            }
            i += THREADS;
        }
        thread::sync_threads();
        let mut i = member;
        while i < SLICE {
            let times = shared::load_u32(base + smem::COUNTS + 4 * i);
            shared::store_u32(base + smem::COUNTS + 4 * i, if times == 0 { 0 } else { SEEN });
            i += THREADS;
        }
        thread::sync_threads();
        count(history, prompt_len, history_len, start, len);
        thread::sync_threads();
        let logits = tensors.logits.add(at(dims.logits_stride) + start as usize);
        let out = tensors.edited.add(block_row as usize * dims.edited_stride as usize + start as usize);
        let is_masked = params.is_masked != 0 && dims.has_masks != 0;
        let mut i = member;
        while i < len {
            let logit = global::load(logits.add(i as usize)).to_f32();
            let counted = shared::load_u32(base + smem::COUNTS + 4 * i);
            let bias = shared::load_f32(base + smem::BIAS + 4 * i);
            let mut value = edited(logit, bias, counted != 0, counted & !SEEN, &params);
            if is_masked {
                let token = start + i;
                let word = tensors.masks.add(at(dims.mask_stride) + (token / 32) as usize);
                if global::load(word) >> (token % 32) & 1 == 0 {
                    value = f32::NAN;
                }
            }
            global::store(out.add(i as usize), value);
            i += THREADS;
        }
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::sampling`.
        ///
        /// # Safety
        /// - Arguments as `Sampler::run` checks them.
        #[kernel(max_threads = 512, min_blocks = 1)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            logits: *const $type,
            params: *const u32,
            history: *const u32,
            bias_ids: *const u32,
            bias: *const f32,
            masks: *const u32,
            edited: *mut f32,
            dims: SamplingEditDims,
        ) {
            let tensors = Tensors { logits, params, history, bias_ids, bias, masks, edited };
            // SAFETY: blocks and rows as said there — Sampler::run.
            unsafe { edit::<$type>(&tensors, &dims) }
        }
    )*};
}
abi::sampling_edit_table!(entries);
