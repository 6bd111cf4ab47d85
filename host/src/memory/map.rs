//! What a pool holds, piece by piece.

use std::collections::BTreeMap;

use super::PoolStats;

/// What a pool holds at a time: [`Pool::map`](crate::Pool::map).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolMap {
    /// The same in numbers.
    pub stats: PoolStats,
    /// What the device gave, by address.
    pub segments: Vec<PoolSegment>,
}

/// Memory that the device gave in one call, and can have back when all of it is free; on a CUDA card also of several
/// calls, side by side, each of which can go back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolSegment {
    /// Where it begins.
    pub address: u64,
    /// All of it.
    pub bytes: usize,
    /// Its pieces, side by side from the first byte to the last.
    pub pieces: Vec<PoolPiece>,
}

/// A part of a segment: one block, or free. Free pieces lie side by side where different streams used them last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolPiece {
    /// Its size.
    pub bytes: usize,
    /// Whether a tensor has it.
    pub is_live: bool,
}

/// How many pieces of a size there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SizeCount {
    /// The size of each: of live ones a size class.
    pub bytes: usize,
    /// Those that tensors have.
    pub num_live: usize,
    /// Those that are free.
    pub num_free: usize,
}

impl PoolMap {
    /// The pieces counted by size, the smallest first.
    pub fn sizes(&self) -> Vec<SizeCount> {
        let mut sizes = BTreeMap::<usize, SizeCount>::new();
        for piece in self.segments.iter().flat_map(|segment| &segment.pieces) {
            let size =
                sizes.entry(piece.bytes).or_insert(SizeCount { bytes: piece.bytes, ..SizeCount::default() });
            match piece.is_live {
                true => size.num_live += 1,
                false => size.num_free += 1,
            }
        }
        sizes.into_values().collect()
    }
}
