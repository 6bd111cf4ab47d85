//! Attention: `softmax(scale · q·kᵀ + mask) · v`, the scores never stored.
//!
//! Two ways to do it, and a finish for the second:
//! - `prefill`: a block holds a tile of queries and walks over their keys (online softmax); `prefill_mma` does so on
//!   tensor cores from Ampere on, `wgmma` on Hopper's. Where there are few tiles and many keys, several blocks share
//!   those, and `combine` puts a row's results together.
//! - `decode`: few queries and a long cache. A block does 256 keys for all the heads that share them and leaves an
//!   unfinished result; `merge` puts a row's results together. `decode_ring` does so on tensor cores from Ampere on,
//!   `decode_latent` for values in the keys' own rows, `decode_latent_wgmma` on Hopper's.
//!
//! What all share: q is multiplied by the scale when it is read, for the 16-bit types by `scale · log2(e)`, so that
//! `exp` of a difference of scores is [`crate::tile::softmax::weight`] of the difference itself. The difference is
//! taken before anything else, since a product folded into one multiply-add, `s·c − m·c`, would not cancel for scores
//! of 1e30. A row that has seen no key yet has the maximum −∞, which is replaced by 0 in the difference: `ex2(−∞ − 0)`
//! is the 0 that is wanted. `wgmma` reads q as it is, and does the same in another order.
//!
//! Keys and values are in one piece per sequence or in pages of a pool, to which a table leads (`Pages`). One piece is
//! the case of a single page, so no kernel has two forms but `prefill_mma`; what is summed in which order depends on a
//! key's number alone. For the kernels without fp8, all but `decode_ring`, `gather` puts the keys of some sequences at
//! a time into one piece of q's type before.
//!
//! The kernels of decode never let the next one start, as others of few blocks do: the next one is the merge, which
//! would take longer (`gpu/NOTES/attention.md`).
//!
//! A masked weight is not multiplied by its value but left out: 0 · NaN would let a key that a row may not see leak
//! into it. Tensor cores leave nothing out: there the value is.

#[cfg(not(lacks_mma_sync))]
mod cached;
#[cfg(not(lacks_mma_sync))]
mod combine;
mod decode;
#[cfg(not(lacks_mma_sync))]
mod decode_latent;
#[cfg(not(lacks_wgmma))]
mod decode_latent_wgmma;
#[cfg(not(lacks_mma_sync))]
mod decode_ring;
mod gather;
mod merge;
mod prefill;
#[cfg(not(lacks_mma_sync))]
mod prefill_mma;
#[cfg(not(lacks_mma_sync))]
mod queries;
mod scores;
#[cfg(not(lacks_mma_sync))]
mod share;
#[cfg(not(lacks_mma_sync))]
mod softmax;
#[cfg(not(lacks_mma_sync))]
mod tile;
#[cfg(not(lacks_wgmma))]
mod wgmma;
#[cfg(not(lacks_mma_sync))]
mod work;

use abi::ops::attention::AttentionDims;
use cuda_std::cvt::Element;
use cuda_std::{global, thread};

use crate::tile::sequences;

/// Keys that a query may see, `lo..hi`.
#[derive(Clone, Copy)]
struct Visible {
    lo: i32,
    hi: i32,
}

impl Visible {
    /// The same as `visible` of the host; sizes below 2^30 keep every sum inside i32. `ahead` as in [`Sequence`].
    #[inline(always)]
    fn new(dims: &AttentionDims, len: i32, ahead: i32, query: i32) -> Self {
        // One past the key at the query's own place: the last query sees the last key.
        let own = query + 1 + ahead;
        let hi = if dims.causal != 0 { own.min(len).max(0) } else { len };
        Visible { lo: (own - dims.window as i32).max(0), hi }
    }

    #[inline(always)]
    fn has(self, key: i32) -> bool {
        key >= self.lo && key < self.hi
    }
}

/// What says where the sequences are, as a kernel is given it.
#[derive(Clone, Copy)]
struct Tables {
    /// Keys of each sequence, or null if all have `seq_kv`; offsets where keys are packed.
    kv_lens: *const u32,
    /// The sequences' first queries and the end of the last one's, or null if queries are not packed.
    q_offsets: *const u32,
    /// The sequences' pages, or null.
    page_table: *const u32,
}

/// How long a sequence is.
#[derive(Clone, Copy)]
struct Sequence {
    /// Keys: at most `seq_kv`.
    len: i32,
    /// Keys before the place of the first query: as many as it has more keys than queries.
    ahead: i32,
    /// Queries: at most `seq_q`.
    seq_q: u32,
    /// Its first query's row among those of q and out: 0 where sequences have rows of their own.
    first_q: u32,
}

impl Sequence {
    /// # Safety
    /// - The tables have an element for every sequence, offsets one more, and `index` is one of them — checked in
    ///   `Attention::run`.
    #[inline(always)]
    unsafe fn new(tables: Tables, dims: &AttentionDims, index: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let len = if tables.kv_lens.is_null() {
                dims.seq_kv
            } else if thread::opaque(dims.tokens_kv) != 0 {
                sequences::Sequence::load(tables.kv_lens, index, dims.tokens_kv).len
            } else {
                global::load(tables.kv_lens.add(index as usize))
            };
            let len = len.min(dims.seq_kv) as i32;
            let (first_q, seq_q) = if tables.q_offsets.is_null() {
                (0, dims.seq_q)
            } else {
                let own = sequences::Sequence::load(tables.q_offsets, index, dims.tokens_q);
                (own.start, own.len.min(dims.seq_q))
            };
            Sequence { len, ahead: len - seq_q as i32, seq_q, first_q }
        }
    }

    #[inline(always)]
    fn visible(self, dims: &AttentionDims, query: u32) -> Visible {
        Visible::new(dims, self.len, self.ahead, query as i32)
    }
}

/// Where a sequence's keys are: in the pages that a table lists, or in one page, whose number is the sequence's; all
/// packed sequences are in one.
#[derive(Clone, Copy)]
struct Pages {
    table: *const u32,
    /// Of the sequence in the table, or the only page.
    first: u32,
    /// Of the sequence's first key in the only page.
    first_row: u32,
}

impl Pages {
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    unsafe fn new(tables: Tables, dims: &AttentionDims, index: u32) -> Self {
        let table = tables.page_table;
        let (first, first_row) = if !table.is_null() {
            (index * dims.table_stride, 0)
        } else if thread::opaque(dims.tokens_kv) != 0 {
            // SAFETY: the caller's promise.
            (0, unsafe { sequences::Sequence::load(tables.kv_lens, index, dims.tokens_kv) }.start)
        } else {
            (index, 0)
        };
        Pages { table, first, first_row }
    }

    /// The page of a key. Whatever the table says, it is one of the pool.
    ///
    /// # Safety
    /// - The key is below the sequence's length, which is at most what the table has room for — checked in
    ///   `Attention::run`.
    #[inline(always)]
    unsafe fn page(self, dims: &AttentionDims, key: i32) -> u32 {
        if self.table.is_null() {
            return self.first;
        }
        // SAFETY: the caller's promise.
        let page =
            unsafe { global::load(self.table.add((self.first + (key as u32 >> dims.page_log2)) as usize)) };
        page.min(dims.num_pages - 1)
    }

    /// Where a key's row starts in k or v, of which these are the strides.
    ///
    /// # Safety
    /// - As for [`Pages::page`].
    #[inline(always)]
    unsafe fn row(self, dims: &AttentionDims, key: i32, page_stride: u32, token_stride: u32) -> usize {
        // SAFETY: the caller's promise.
        let page = unsafe { self.page(dims, key) };
        offset(page, page_stride, self.row_in_page(dims, key), token_stride, 0, 0)
    }

    /// The place of a key in its page.
    #[inline(always)]
    fn row_in_page(self, dims: &AttentionDims, key: i32) -> u32 {
        self.first_row + (key as u32 & ((1 << dims.page_log2) - 1))
    }
}

/// 16 bytes of a row: in one access, or element by element where the rows are not aligned.
///
/// # Safety
/// - *in-bounds*; *aligned(16)* if `dims.vector` — checked in `Attention::run`.
#[inline(always)]
unsafe fn load_piece<T: Element>(pointer: *const T, dims: &AttentionDims) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        if dims.vector != 0 {
            global::load_nc_x4(pointer)
        } else {
            let mut values = [0.0; 8];
            let mut j = 0;
            while j < T::PER_16_BYTES {
                values[j] = global::load(pointer.add(j)).to_f32();
                j += 1;
            }
            T::pack(&values)
        }
    }
}

/// The start of a row: `batch`, `token` and `head` with their strides.
#[inline(always)]
fn offset(
    batch: u32,
    batch_stride: u32,
    token: u32,
    token_stride: u32,
    head: u32,
    head_stride: u32,
) -> usize {
    batch as usize * batch_stride as usize
        + token as usize * token_stride as usize
        + head as usize * head_stride as usize
}
