//! The splits of few queries' long caches, and which of them a block does: what `decode_ring` and `decode_latent`
//! share.

use abi::ops::attention::{AttentionDims, DECODE_RING_ROWS, SPLIT_KEYS};
use cuda_std::thread;

use super::{Pages, Sequence, Tables, Visible};

/// A split of some rows' keys, `TILE` rows at most.
#[derive(Clone, Copy)]
pub(super) struct Work<const TILE: u32 = DECODE_RING_ROWS> {
    pub(super) batch: u32,
    pub(super) head_kv: u32,
    pub(super) split: u32,
    pub(super) first_row: u32,
    pub(super) end_row: u32,
    pub(super) own: Sequence,
    pub(super) pages: Pages,
    /// Keys of the split that some row sees.
    pub(super) any: Visible,
    /// Keys that all rows see.
    pub(super) all: Visible,
}

impl<const TILE: u32> Work<TILE> {
    /// The split at a place of the order of all; without keys beyond the last one.
    ///
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    unsafe fn new([tile, head_kv, split, batch]: [u32; 4], tables: Tables, dims: &AttentionDims) -> Self {
        let first_row = tile * TILE;
        let index = batch.min(dims.batch - 1);
        // SAFETY: the caller's promise.
        let (own, pages) = unsafe { (Sequence::new(tables, dims, index), Pages::new(tables, dims, index)) };
        let end_row = (first_row + TILE).min(own.seq_q * dims.group);
        let none = Visible { lo: 0, hi: 0 };
        let mut work = Work { batch, head_kv, split, first_row, end_row, own, pages, any: none, all: none };
        if batch >= dims.batch || first_row >= end_row {
            return work;
        }
        let (top, bottom) = (work.sees(first_row, dims), work.sees(end_row - 1, dims));
        let first = work.first_key();
        work.any =
            Visible { lo: top.lo.max(first), hi: bottom.hi.min(first + SPLIT_KEYS as i32).min(own.len) };
        work.all = Visible { lo: bottom.lo, hi: top.hi };
        work
    }

    /// The same found again: where not all of it is worth the registers in between.
    ///
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    pub(super) unsafe fn again(&self, tables: Tables, dims: &AttentionDims) -> Self {
        // Opaque, or the compiler would keep it nevertheless.
        let split = thread::opaque(self.split);
        // SAFETY: the caller's promise.
        unsafe { Work::new([self.first_row / TILE, self.head_kv, split, self.batch], tables, dims) }
    }

    #[inline(always)]
    pub(super) fn has_keys(&self) -> bool {
        self.any.lo < self.any.hi
    }

    #[inline(always)]
    pub(super) fn first_key(&self) -> i32 {
        (self.split * SPLIT_KEYS) as i32
    }

    /// Query and head of a row.
    #[inline(always)]
    pub(super) fn place(&self, row: u32, dims: &AttentionDims) -> (u32, u32) {
        let group = dims.group.max(1);
        // Of a single query without a division.
        let query = if dims.seq_q == 1 { 0 } else { row / group };
        (query, self.head_kv * group + (row - query * group))
    }

    #[inline(always)]
    fn sees(&self, row: u32, dims: &AttentionDims) -> Visible {
        self.own.visible(dims, self.place(row, dims).0)
    }

    /// What a row sees; nothing if there is no such row.
    #[inline(always)]
    pub(super) fn visible(&self, row: u32, dims: &AttentionDims) -> Visible {
        if row < self.end_row { self.sees(row, dims) } else { Visible { lo: 0, hi: 0 } }
    }

    /// Whether all rows see the same keys of the split.
    #[inline(always)]
    pub(super) fn is_alike(&self) -> bool {
        self.any.lo >= self.all.lo && self.any.hi <= self.all.hi
    }

    /// Whether all rows see all keys of the split.
    #[inline(always)]
    pub(super) fn is_whole(&self) -> bool {
        self.is_alike() && self.any.hi - self.any.lo == SPLIT_KEYS as i32
    }

    /// Where a row's results go: `[row][result]`.
    #[inline(always)]
    pub(super) fn slot(&self, row: u32, dims: &AttentionDims) -> usize {
        let (query, head) = self.place(row, dims);
        ((self.batch * dims.heads_q + head) as usize * dims.seq_q as usize + query as usize)
            * (dims.splits >> dims.result_shift) as usize
            + (self.split >> dims.result_shift) as usize
    }
}

/// The splits of a block, in order: those of every so many-th result of all, whose tiles of rows come first, then key
/// heads, results of a row and sequences.
pub(super) struct Splits {
    /// Numbers of tile, key head, split and sequence.
    place: [u32; 4],
    /// As many results as there are blocks, in the same way.
    step: [u32; 4],
    /// log2 of the splits of a result.
    shift: u32,
    /// Whether the split last found is the first one of its result that has keys.
    pub(super) is_first: bool,
}

impl Splits {
    /// From the block's first one on, for a kernel that `joins` the splits of a result, or one of which each is a
    /// result.
    #[inline(always)]
    pub(super) fn new(dims: &AttentionDims, joins: bool) -> Self {
        let shift = if joins { dims.result_shift } else { 0 };
        // Sizes are at least 1 where there is work at all; `max` tells the compiler.
        let (tiles, heads_kv, results) =
            (dims.tiles.max(1), dims.heads_kv.max(1), (dims.splits >> shift).max(1));
        let digits = |item: u32| {
            let (tile, rest) = (item % tiles, item / tiles);
            let (head_kv, rest) = (rest % heads_kv, rest / heads_kv);
            [tile, head_kv, (rest % results) << shift, rest / results]
        };
        let (place, step) = (digits(thread::block_idx_x()), digits(thread::grid_dim_x()));
        Splits { place, step, shift, is_first: true }
    }

    /// The present one, or the next that has keys; without keys if there is none.
    ///
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    pub(super) unsafe fn find<const TILE: u32>(
        &mut self,
        tables: Tables,
        dims: &AttentionDims,
    ) -> Work<TILE> {
        loop {
            // SAFETY: the caller's promise.
            let work: Work<TILE> = unsafe { Work::new(self.place, tables, dims) };
            if work.has_keys() || work.batch >= dims.batch {
                return work;
            }
            self.advance(dims);
        }
    }

    /// The next one that has keys, as above.
    ///
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    pub(super) unsafe fn next<const TILE: u32>(
        &mut self,
        tables: Tables,
        dims: &AttentionDims,
    ) -> Work<TILE> {
        self.is_first = false;
        self.advance(dims);
        // SAFETY: the caller's promise.
        unsafe { self.find(tables, dims) }
    }

    /// Adds as with pencil and paper: a division each time would cost more.
    #[inline(always)]
    fn advance(&mut self, dims: &AttentionDims) {
        let [tile, head_kv, split, batch] = &mut self.place;
        let result = *split >> self.shift;
        if (*split + 1) >> self.shift == result {
            *split += 1;
            return;
        }
        *split = result << self.shift;
        self.is_first = true;
        let add = |digit: &mut u32, step: u32, size: u32| {
            *digit += step;
            let carry = *digit >= size;
            *digit -= if carry { size } else { 0 };
            u32::from(carry)
        };
        let carry = add(tile, self.step[0], dims.tiles);
        let carry = add(head_kv, self.step[1] + carry, dims.heads_kv);
        let carry = add(split, self.step[2] + (carry << self.shift), dims.splits);
        *batch += self.step[3] + carry;
    }
}
