//! A tile of queries of one head, and the keys that it sees in steps, for the kernels of tensor cores.

use abi::ops::attention::AttentionDims;
use cuda_std::thread;

use super::{Sequence, Tables, Visible};
use crate::tile::sequences::piece_at;

/// A tile of queries and the keys that it sees.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) head_kv: u32,
    pub(super) first_query: u32,
    pub(super) own: Sequence,
    /// Keys that some row sees, and keys that all rows see, also of other parts.
    pub(super) any: Visible,
    pub(super) all: Visible,
    /// Steps of keys, the first and one past the last.
    pub(super) first: u32,
    pub(super) end: u32,
    /// Which part of its keys it is, where blocks share them.
    pub(super) part: u32,
}

impl Tile {
    /// The tile of this number, of the sequences that `dims` has.
    ///
    /// # Safety
    /// - As for [`Sequence::new`].
    #[inline(always)]
    pub(super) unsafe fn new<const KEYS: u32, const ROWS: u32, const SPLIT: bool>(
        number: u32,
        sequences: u32,
        tables: Tables,
        dims: &AttentionDims,
    ) -> Self {
        // Sizes are at least 1 where there is a tile at all; `max` tells the compiler.
        let (tiles, heads) = (dims.tiles.max(1), dims.heads_q.max(1));
        let (number, part) = if SPLIT {
            (number >> dims.key_parts_log2, number & ((1 << dims.key_parts_log2) - 1))
        } else {
            (number, 0)
        };
        // Opaque, or a kernel of many tiles would keep the product in a register.
        let section = number / (thread::opaque(dims.section) * tiles).max(1) * dims.section;
        let width = dims.section.min(heads * dims.batch - section).max(1);
        let within = number - section * tiles;
        let pair = section + within % width;
        let (head, mut batch) = (pair % heads, pair / heads);
        let place = tiles - 1 - within / width;
        let mut first_query = place * ROWS;
        // SAFETY: the caller's promise.
        let own = unsafe {
            if !tables.q_offsets.is_null() {
                // Beyond the queries of any sequence there is an empty place.
                let piece = piece_at(tables.q_offsets, sequences.max(1), dims.tokens_q, place, ROWS);
                (batch, first_query) =
                    piece.map_or((0, dims.seq_q), |(sequence, first)| (sequence.index, first));
            }
            Sequence::new(tables, dims, batch)
        };
        // Of an empty place, of which nothing below is used, there may be none at all.
        let end_query = (first_query + ROWS).min(own.seq_q).max(1);
        let (first_row, last_row) = (own.visible(dims, first_query), own.visible(dims, end_query - 1));
        let any = Visible { lo: first_row.lo, hi: last_row.hi };
        let all = Visible { lo: last_row.lo, hi: first_row.hi };
        let (mut first, mut end) = if first_query < own.seq_q && any.lo < any.hi {
            (any.lo as u32 / KEYS, (any.hi as u32).div_ceil(KEYS))
        } else {
            (0, 0)
        };
        if SPLIT {
            let steps = end - first;
            end = first + ((steps * (part + 1)) >> dims.key_parts_log2);
            first += (steps * part) >> dims.key_parts_log2;
        }
        let head_kv = head / dims.group.max(1);
        Tile { batch, head, head_kv, first_query, own, any, all, first, end, part }
    }

    /// Keys of the tile's part that some row sees.
    #[inline(always)]
    pub(super) fn keys<const KEYS: u32, const SPLIT: bool>(&self) -> Visible {
        let Visible { lo, hi } = self.any;
        if SPLIT {
            Visible { lo: lo.max((self.first * KEYS) as i32), hi: hi.min((self.end * KEYS) as i32) }
        } else {
            Visible { lo, hi }
        }
    }

    /// Sequence and row, the tile's first query's, of out and the log-sum-exp: each part's are behind those of the part
    /// before, of all sequences, or of all packed rows.
    #[inline(always)]
    pub(super) fn out_place(&self, tables: Tables, dims: &AttentionDims) -> (u32, u32) {
        let row = self.own.first_q + self.first_query;
        if tables.q_offsets.is_null() {
            (self.batch + self.part * dims.batch, row)
        } else {
            (self.batch, row + self.part * dims.tokens_q)
        }
    }

    /// Whether some row does not see all keys of a step.
    #[inline(always)]
    pub(super) fn is_border<const KEYS: u32>(&self, step: u32) -> bool {
        ((step * KEYS) as i32) < self.all.lo || ((step + 1) * KEYS) as i32 > self.all.hi
    }
}
