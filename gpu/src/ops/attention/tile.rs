//! A tile of queries of one head, and the keys that it sees in steps, for the kernels of tensor cores.

use abi::ops::attention::AttentionDims;

use super::{Visible, sequence_len};

/// A tile of queries and the keys that it sees.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) head_kv: u32,
    pub(super) first_query: u32,
    pub(super) len: i32,
    /// Keys that some row sees, and keys that all rows see.
    pub(super) any: Visible,
    pub(super) all: Visible,
    /// Steps of keys, the first and one past the last.
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Tile {
    /// # Safety
    /// - As for [`sequence_len`].
    #[inline(always)]
    pub(super) unsafe fn new<const KEYS: u32, const ROWS: u32>(
        number: u32,
        kv_lens: *const u32,
        dims: &AttentionDims,
    ) -> Self {
        // Sizes are at least 1 where there is a tile at all; `max` tells the compiler.
        let (tiles, heads) = (dims.tiles.max(1), dims.heads_q.max(1));
        let section = number / (dims.section * tiles).max(1) * dims.section;
        let width = dims.section.min(heads * dims.batch - section).max(1);
        let within = number - section * tiles;
        let pair = section + within % width;
        let (head, batch) = (pair % heads, pair / heads);
        let first_query = (tiles - 1 - within / width) * ROWS;
        let end_query = (first_query + ROWS).min(dims.seq_q);
        // SAFETY: the caller's promise.
        let len = unsafe { sequence_len(kv_lens, dims, batch) };
        let first_row = Visible::new(dims, len, first_query as i32);
        let last_row = Visible::new(dims, len, end_query as i32 - 1);
        let any = Visible { lo: first_row.lo, hi: last_row.hi };
        let all = Visible { lo: last_row.lo, hi: first_row.hi };
        let (first, end) =
            if any.lo < any.hi { (any.lo as u32 / KEYS, (any.hi as u32).div_ceil(KEYS)) } else { (0, 0) };
        let head_kv = head / dims.group.max(1);
        Tile { batch, head, head_kv, first_query, len, any, all, first, end }
    }

    /// Whether some row does not see all keys of a step.
    #[inline(always)]
    pub(super) fn is_border<const KEYS: u32>(&self, step: u32) -> bool {
        ((step * KEYS) as i32) < self.all.lo || ((step + 1) * KEYS) as i32 > self.all.hi
    }
}
