//! Append to a key/value cache: `k_cache[slots[t]] = k[t]`, `v_cache[slots[t]] = v[t]`; v may be null.
//!
//! Work split: a thread copies one piece of 16 bytes of a (token, head) row, of k and of v; neighbouring threads take
//! neighbouring pieces. The slots come from device memory, so a recorded decode step appends at the right place each
//! time it runs. A few kilobytes per token: bound by the launch, not by memory.

use abi::ops::kv_append::KvAppendDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

/// This thread's piece, in elements: offsets in k, in v and in the caches; none past the end or for a slot that is not
/// in the cache.
///
/// # Safety
/// - `slots` holds one u32 per token — KvAppend::run.
#[inline(always)]
unsafe fn place<const PIECE: u32>(slots: *const u32, dims: &KvAppendDims) -> Option<[usize; 3]> {
    // Both are at least 1 (KvAppend::run); `max` tells the compiler, which would otherwise keep a panic path.
    let (pieces, heads) = (dims.pieces.max(1), dims.heads.max(1));
    let index = thread::block_idx_x() as u64 * thread::block_dim_x() as u64 + thread::thread_idx_x() as u64;
    if index >= dims.rows as u64 * pieces as u64 {
        return None;
    }
    let (row, piece) = ((index / pieces as u64) as u32, (index % pieces as u64) as u32);
    let (token, head) = (row / heads, row % heads);
    // SAFETY: token < tokens.
    let slot = unsafe { global::load(slots.add(token as usize)) };
    if slot >= dims.num_slots {
        return None;
    }
    let at = |outer: u32, outer_stride: u32, head_stride: u32| {
        outer as usize * outer_stride as usize
            + head as usize * head_stride as usize
            + (piece * PIECE) as usize
    };
    Some([
        at(token, dims.k_token_stride, dims.k_head_stride),
        at(token, dims.v_token_stride, dims.v_head_stride),
        at(slot, dims.slot_stride, dims.cache_head_stride),
    ])
}

/// # Safety
/// - Tensors *in-bounds* and, for the vector tile, *aligned(16)*; slots distinct (*exclusive*) — KvAppend::run, and its
///   caller for the slots.
#[inline(always)]
unsafe fn vector<T: Element, const PIECE: u32>(
    k: *const T,
    v: *const T,
    slots: *const u32,
    k_cache: *mut T,
    v_cache: *mut T,
    dims: &KvAppendDims,
) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        if let Some([from_k, from_v, to]) = place::<PIECE>(slots, dims) {
            let key = global::load_x4(k.add(from_k));
            if !v.is_null() {
                global::store_x4(v_cache.add(to), global::load_x4(v.add(from_v)));
            }
            global::store_x4(k_cache.add(to), key);
        }
    }
}

/// # Safety
/// - As `vector`, without the alignment.
#[inline(always)]
unsafe fn scalar<T: Element>(
    k: *const T,
    v: *const T,
    slots: *const u32,
    k_cache: *mut T,
    v_cache: *mut T,
    dims: &KvAppendDims,
) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        if let Some([from_k, from_v, to]) = place::<1>(slots, dims) {
            global::store(k_cache.add(to), global::load(k.add(from_k)));
            if !v.is_null() {
                global::store(v_cache.add(to), global::load(v.add(from_v)));
            }
        }
    }
}

macro_rules! body {
    (Vector, $type:ident, $($arg:ident),*) => {
        vector::<$type, { <$type as Element>::PER_16_BYTES as u32 }>($($arg),*)
    };
    (Scalar, $type:ident, $($arg:ident),*) => {
        scalar::<$type>($($arg),*)
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::kv_append`.
        ///
        /// # Safety
        /// - Arguments as `KvAppend::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            k: *const $type,
            v: *const $type,
            slots: *const u32,
            k_cache: *mut $type,
            v_cache: *mut $type,
            dims: KvAppendDims,
        ) {
            let dims = &dims;
            // SAFETY: the same contract.
            unsafe { body!($tile, $type, k, v, slots, k_cache, v_cache, dims) }
        }
    )*};
}
abi::kv_append_table!(entries);
