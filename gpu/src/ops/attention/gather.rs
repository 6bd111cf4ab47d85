//! Keys and values of some sequences from fp8, in one piece or in pages, to where the kernels take them from that know
//! no fp8: `[sequence, key, head, column]` without gaps, in q's type.
//!
//! Work split: a block takes 16 keys of a sequence, which are of one page, its threads eight elements of k or v each,
//! four times before the first is stored. Bound by memory. Keys beyond a sequence's are not read, and nothing is
//! written for them.

use core::ptr::null;

use abi::ops::attention::{AttentionDims, GATHER_KEYS, GATHER_THREADS};
use cuda_std::cvt::{E4m3, Element, bf16, f16, f16x2_from_e4m3};
use cuda_std::{global, kernel, thread};

use super::{Pages, Sequence, Tables, offset};

/// Pieces of a thread on their way at a time.
const AHEAD: usize = 4;

/// An element of k and v.
pub(super) trait Gathered<T: Element>: Copy + 'static {
    /// Eight elements times their scale, as T.
    ///
    /// # Safety
    /// - *in-bounds*, *aligned* to as many elements.
    unsafe fn eight(from: *const Self, scale: f32) -> [u32; 4];
}

macro_rules! gathered {
    ($($type:ident),*) => {$(
        impl Gathered<$type> for E4m3 {
            #[inline(always)]
            unsafe fn eight(from: *const Self, scale: f32) -> [u32; 4] {
                // SAFETY: the caller's promise.
                let bytes = unsafe { global::load(from.cast::<u64>()) };
                let mut values = [0f32; 8];
                let mut i = 0;
                while i < 2 {
                    let word = (bytes >> (32 * i)) as u32;
                    let pairs = [f16x2_from_e4m3::<0, 1>(word), f16x2_from_e4m3::<2, 3>(word)];
                    let mut j = 0;
                    while j < 4 {
                        let half = f16::from_bits((pairs[j / 2] >> (16 * (j % 2))) as u16);
                        values[4 * i + j] = Element::to_f32(half) * scale;
                        j += 1;
                    }
                    i += 1;
                }
                $type::pack(&values)
            }
        }
    )*};
}
gathered!(f16, bf16);

/// k or v of a launch.
#[derive(Clone, Copy)]
struct Rows<T, C> {
    from: *const C,
    /// Null if there are no scales.
    scales: *const f32,
    to: *mut T,
    page_stride: u32,
    token_stride: u32,
    head_stride: u32,
    width: u32,
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of [`GATHER_THREADS`] threads, one for every [`GATHER_KEYS`] of the `seq_kv` keys of every sequence;
///   tensors and workspace *in-bounds* and their rows *aligned(16)* — checked in `Attention::run`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn keys<T: Element, C: Gathered<T>>(
    k: *const C,
    v: *const C,
    k_scale: *const f32,
    v_scale: *const f32,
    tables: Tables,
    k_out: *mut T,
    v_out: *mut T,
    dims: &AttentionDims,
) {
    let blocks = dims.seq_kv.div_ceil(GATHER_KEYS).max(1);
    let (batch, first_key) = (thread::block_idx_x() / blocks, thread::block_idx_x() % blocks * GATHER_KEYS);
    let k = Rows {
        from: k,
        scales: k_scale,
        to: k_out,
        page_stride: dims.k_batch_stride,
        token_stride: dims.k_token_stride,
        head_stride: dims.k_head_stride,
        width: dims.head_dim,
    };
    let v = Rows {
        from: v,
        scales: v_scale,
        to: v_out,
        page_stride: dims.v_batch_stride,
        token_stride: dims.v_token_stride,
        head_stride: dims.v_head_stride,
        width: dims.head_dim_v,
    };
    // SAFETY: batch is below the number of sequences, of which the grid has so many blocks; the keys are below the
    // sequence's length.
    unsafe {
        let len = Sequence::new(tables, dims, batch).len as u32;
        if first_key >= len {
            return;
        }
        let num_keys = (len - first_key).min(GATHER_KEYS);
        let pages = Pages::new(tables, dims, batch);
        let from = (pages.page(dims, first_key as i32), pages.row_in_page(dims, first_key as i32));
        let to = batch as usize * dims.seq_kv as usize + first_key as usize;
        rows(k, from, to, num_keys, dims);
        rows(v, from, to, num_keys, dims);
    }
}

/// The rows of some keys, from those of one page on, to those from `first_to` on.
///
/// # Safety
/// - The keys are the sequence's; the rest is the caller's promise to [`keys`].
#[inline(always)]
unsafe fn rows<T: Element, C: Gathered<T>>(
    rows: Rows<T, C>,
    (page, first_row): (u32, u32),
    first_to: usize,
    num_keys: u32,
    dims: &AttentionDims,
) {
    // Sizes are at least 1 where there is work at all; `max` tells the compiler.
    let (pieces, heads) = ((rows.width / 8).max(1), dims.heads_kv.max(1));
    let to = rows.to.wrapping_add(first_to * heads as usize * rows.width as usize);
    let num_items = num_keys * heads * pieces;
    let mut item = thread::thread_idx_x();
    while item < num_items {
        let mut eight = [[0u32; 4]; AHEAD];
        let mut i = 0;
        while i < AHEAD {
            let item = item + i as u32 * GATHER_THREADS;
            if item < num_items {
                let (row, piece) = (item / pieces, item % pieces);
                let (key, head) = (first_row + row / heads, row % heads);
                let at = offset(page, rows.page_stride, key, rows.token_stride, head, rows.head_stride);
                // SAFETY: a head of one of the keys; a piece of its columns.
                unsafe {
                    let scale = if rows.scales.is_null() {
                        1.0
                    } else {
                        global::load(rows.scales.add(head as usize))
                    };
                    eight[i] = C::eight(rows.from.add(at + piece as usize * 8), scale);
                }
            }
            i += 1;
        }
        let mut i = 0;
        while i < AHEAD {
            let item = item + i as u32 * GATHER_THREADS;
            if item < num_items {
                // SAFETY: as above, of the keys that the workspace has room for, one after the other.
                unsafe { global::store_x4(to.add(item as usize * 8), eight[i]) };
            }
            i += 1;
        }
        item += AHEAD as u32 * GATHER_THREADS;
    }
}

macro_rules! gather_entry {
    ($entry:ident, $type:ident, $type_kv:ident) => {
        /// Entry point; see `gather` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            k: *const $type_kv,
            v: *const $type_kv,
            k_scale: *const f32,
            v_scale: *const f32,
            kv_lens: *const u32,
            page_table: *const u32,
            k_out: *mut $type,
            v_out: *mut $type,
            dims: AttentionDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets: null(), page_table };
                keys::<$type, $type_kv>(k, v, k_scale, v_scale, tables, k_out, v_out, &dims)
            }
        }
    };
}

macro_rules! gather_fp8_entries {
    ($($entry:ident => $type:ident, $dtype:ident, Gather {};)*) => { $(gather_entry!($entry, $type, E4m3);)* };
}
abi::attention_gather_table!(gather_fp8_entries);
