//! Which tiles a block does, and where all of it lies in shared memory.

use abi::ops::attention::{AttentionDims, wgmma_out_in_q};
use cuda_std::{shared, thread};

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
