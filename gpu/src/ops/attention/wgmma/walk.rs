//! Which tiles a block does, which keys they see, and where all of it lies in shared memory.

use abi::ops::attention::{AttentionDims, wgmma_out_in_q};
use cuda_std::{shared, thread};

use super::super::{Visible, sequence_len};
use super::STAGES;

/// Marks are kept for so many tiles: loads run ahead of a consumer by less.
pub(super) const MARKS: u32 = 4;

/// A number of steps of keys, counted through all tiles: its place in the rings, in one register.
#[derive(Clone, Copy)]
pub(super) struct Turn(pub(super) u32);

impl Turn {
    #[inline(always)]
    pub(super) fn stage(self) -> u32 {
        self.0 % STAGES
    }

    /// Of the round in the rings.
    #[inline(always)]
    pub(super) fn parity(self) -> u32 {
        (self.0 / STAGES) & 1
    }
}

/// The tiles of a block, in turns from the front and from the back of the blocks.
pub(super) struct Tiles {
    /// How many there were.
    pub(super) round: u32,
    count: u32,
}

impl Tiles {
    #[inline(always)]
    pub(super) fn new(dims: &AttentionDims) -> Self {
        Tiles { round: 0, count: dims.tiles * dims.heads_q * dims.batch }
    }

    /// The next one's number.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<u32> {
        let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let backwards = self.round % 2 == 1;
        let number = self.round * blocks + if backwards { blocks - 1 - block } else { block };
        self.round += 1;
        // Only the last round is not full.
        (number < self.count).then_some(number)
    }
}

/// A tile of queries and the keys that it sees.
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

/// Where things lie in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pub(super) q: u32,
    pub(super) out: u32,
    k: u32,
    v: u32,
    k_bytes: u32,
    v_bytes: u32,
    barriers: u32,
}

impl Places {
    #[inline(always)]
    pub(super) fn new<const DIM: u32, const DIM_V: u32, const KEYS: u32, const ROWS: u32>() -> Self {
        let q = shared::base();
        let (out, k) = if wgmma_out_in_q(DIM) {
            (q, q + ROWS * DIM * 2)
        } else {
            (q + ROWS * DIM * 2, q + ROWS * (DIM + DIM_V) * 2)
        };
        let (k_bytes, v_bytes) = (KEYS * DIM * 2, KEYS * DIM_V * 2);
        let v = k + STAGES * k_bytes;
        Places { q, out, k, v, k_bytes, v_bytes, barriers: v + STAGES * v_bytes }
    }

    #[inline(always)]
    pub(super) fn stage_k(self, stage: u32) -> u32 {
        self.k + stage * self.k_bytes
    }

    #[inline(always)]
    pub(super) fn stage_v(self, stage: u32) -> u32 {
        self.v + stage * self.v_bytes
    }

    #[inline(always)]
    pub(super) fn full_q(self) -> u32 {
        self.barriers
    }

    #[inline(always)]
    pub(super) fn empty_q(self) -> u32 {
        self.barriers + 8
    }

    #[inline(always)]
    pub(super) fn full_k(self, stage: u32) -> u32 {
        self.barriers + 16 + 8 * stage
    }

    #[inline(always)]
    pub(super) fn empty_k(self, stage: u32) -> u32 {
        self.barriers + 16 + 8 * (STAGES + stage)
    }

    #[inline(always)]
    pub(super) fn full_v(self, stage: u32) -> u32 {
        self.barriers + 16 + 8 * (2 * STAGES + stage)
    }

    #[inline(always)]
    pub(super) fn empty_v(self, stage: u32) -> u32 {
        self.barriers + 16 + 8 * (3 * STAGES + stage)
    }

    /// Completed by loads of values that are still to be cleaned.
    #[inline(always)]
    pub(super) fn raw_v(self, stage: u32) -> u32 {
        self.barriers + 16 + 8 * (4 * STAGES + stage)
    }

    /// Where a warp of the cleaners notes the last tile of those numbers in which it found what is not finite.
    #[inline(always)]
    pub(super) fn mark(self, tile: u32, cleaner: u32) -> u32 {
        self.barriers + 16 + 8 * 5 * STAGES + (tile % MARKS * 3 + cleaner) * 4
    }
}
