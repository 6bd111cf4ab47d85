//! What changes scores besides the scale and the mask by places.

use abi::ops::attention::{ADDED, AttentionDims, NO_BIAS, ScoreDims};
use cuda_std::cvt::Element;
use cuda_std::global;

use super::offset;
use crate::tile::activation::tanh;
use crate::tile::softmax::in_unit;

/// Whether there is a soft cap: the same for all threads.
#[inline(always)]
pub(super) fn has_cap(dims: &AttentionDims) -> bool {
    dims.scores.cap_in != 0.0
}

/// A score under the soft cap.
#[inline(always)]
pub(super) fn capped(score: f32, dims: &AttentionDims) -> f32 {
    dims.scores.cap_out * tanh(score * dims.scores.cap_in)
}

/// A head's sink, in the unit of the scores; −∞ if there are none.
///
/// # Safety
/// - `sinks` is null or has an element for every head — checked in `Attention::run`.
#[inline(always)]
pub(super) unsafe fn sink<T: Element>(sinks: *const f32, head: u32) -> f32 {
    if sinks.is_null() {
        return f32::NEG_INFINITY;
    }
    // SAFETY: the caller's promise.
    in_unit::<T>(unsafe { global::load(sinks.add(head as usize)) })
}

/// Whether there are masks of one's own: the same for all threads.
#[inline(always)]
pub(super) fn has_masks(dims: &AttentionDims) -> bool {
    dims.scores.bias != NO_BIAS || has_blocks(dims)
}

/// Whether there is a block mask.
#[inline(always)]
pub(super) fn has_blocks(dims: &AttentionDims) -> bool {
    dims.scores.block_shift != 0
}

/// The masks of one's own, as a kernel is given them.
#[derive(Clone, Copy)]
pub(super) struct Masks {
    /// Numbers or bytes, or null.
    pub bias: *const u8,
    /// Words, or null.
    pub blocks: *const u32,
}

impl Masks {
    /// What is added to the score of a query and a key, in the unit of the scores; nothing if the query does not see
    /// the key.
    ///
    /// # Safety
    /// - Sequence, head, query and key are some of `dims`, for which the masks are *in-bounds* — checked in
    ///   `Attention::run`.
    #[inline(always)]
    pub(super) unsafe fn term<T: Element>(
        self,
        [batch, head, query]: [u32; 3],
        key: u32,
        dims: &AttentionDims,
    ) -> Option<f32> {
        let scores = &dims.scores;
        // SAFETY: the caller's promise.
        unsafe {
            if has_blocks(dims) && !Blocks::new(self.blocks, batch, head, dims).has(query, key, dims) {
                return None;
            }
            if scores.bias == NO_BIAS {
                return Some(0.0);
            }
            let row = offset(
                batch,
                scores.bias_batch_stride,
                query,
                scores.bias_query_stride,
                head,
                scores.bias_head_stride,
            );
            if scores.bias == ADDED {
                let term = global::load(self.bias.cast::<T>().add(row + key as usize)).to_f32();
                if term == f32::NEG_INFINITY { None } else { Some(in_unit::<T>(term)) }
            } else if global::load(self.bias.add(row + key as usize)) != 0 {
                Some(0.0)
            } else {
                None
            }
        }
    }
}

/// The block mask of a head: a row of bits, a bit per block of keys, for each block of queries.
#[derive(Clone, Copy)]
pub(super) struct Blocks(pub(super) *const u32);

impl Blocks {
    #[inline(always)]
    pub(super) fn new(blocks: *const u32, batch: u32, head: u32, dims: &AttentionDims) -> Self {
        Blocks(blocks).of_head(Self::place(batch, head, dims))
    }

    /// Where a head's begins.
    #[inline(always)]
    pub(super) fn place(batch: u32, head: u32, dims: &AttentionDims) -> u32 {
        let ScoreDims { blocks_group, blocks_batch_stride, blocks_head_stride, .. } = dims.scores;
        batch * blocks_batch_stride + head / blocks_group.max(1) * blocks_head_stride
    }

    /// That at a place.
    #[inline(always)]
    pub(super) fn of_head(self, place: u32) -> Self {
        Blocks(self.0.wrapping_add(place as usize))
    }

    /// The bits of 32 blocks of keys for a block of queries.
    ///
    /// # Safety
    /// - There are blocks (*in-bounds*), of these queries and keys.
    #[inline(always)]
    unsafe fn word(self, query_block: u32, word: u32, dims: &AttentionDims) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            global::load(
                self.0.add(query_block as usize * dims.scores.blocks_query_stride as usize + word as usize),
            )
        }
    }

    /// Whether a query sees the block of a key.
    ///
    /// # Safety
    /// - As for [`Blocks::word`].
    #[inline(always)]
    pub(super) unsafe fn has(self, query: u32, key: u32, dims: &AttentionDims) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.bits(query, key, dims) & 1 != 0 }
    }

    /// The bits of the block of a key and of those behind it, up to a multiple of 32 blocks.
    ///
    /// # Safety
    /// - As for [`Blocks::word`].
    #[inline(always)]
    pub(super) unsafe fn bits(self, query: u32, key: u32, dims: &AttentionDims) -> u32 {
        let shift = dims.scores.block_shift;
        let block = key >> shift;
        // SAFETY: the caller's promise.
        unsafe { self.word(query >> shift, block / 32, dims) >> (block % 32) }
    }

    /// The same as [`Blocks::word`] for the blocks of the queries from `first` to `last`: what some of them see, and
    /// what all see.
    ///
    /// # Safety
    /// - As for [`Blocks::word`].
    #[inline(always)]
    unsafe fn words(self, [first, last]: [u32; 2], word: u32, dims: &AttentionDims) -> (u32, u32) {
        let shift = dims.scores.block_shift;
        let (mut some, mut all) = (0, !0);
        let mut block = first >> shift;
        while block <= last >> shift {
            // SAFETY: the caller's promise.
            let bits = unsafe { self.word(block, word, dims) };
            (some, all) = (some | bits, all & bits);
            block += 1;
        }
        (some, all)
    }

    /// The first key from `key` on, below `end`, whose block some of the queries from `first` to `last` sees; `end` if
    /// there is none.
    ///
    /// # Safety
    /// - As for [`Blocks::word`]; `end` is at most the number of keys.
    #[inline(always)]
    pub(super) unsafe fn next(self, queries: [u32; 2], key: u32, end: u32, dims: &AttentionDims) -> u32 {
        let shift = dims.scores.block_shift;
        let mut block = key >> shift;
        while block << shift < end {
            // SAFETY: the caller's promise: the block has a key below `end`.
            let (some, _) = unsafe { self.words(queries, block / 32, dims) };
            let rest = some >> (block % 32);
            if rest != 0 {
                return ((block + rest.trailing_zeros()) << shift).max(key).min(end);
            }
            block = (block | 31) + 1;
        }
        end
    }

    /// One past the last key below `end`, from `start` on, whose block some of the queries sees; `start` if there is
    /// none.
    ///
    /// # Safety
    /// - As for [`Blocks::next`].
    #[inline(always)]
    pub(super) unsafe fn last(self, queries: [u32; 2], start: u32, end: u32, dims: &AttentionDims) -> u32 {
        let shift = dims.scores.block_shift;
        let mut end = end;
        while end > start {
            let block = (end - 1) >> shift;
            // SAFETY: the caller's promise: the block has a key below `end`.
            let (some, _) = unsafe { self.words(queries, block / 32, dims) };
            let rest = some << (31 - block % 32);
            if rest != 0 {
                return ((block - rest.leading_zeros() + 1) << shift).min(end).max(start);
            }
            end = (block & !31) << shift;
        }
        start
    }

    /// Whether all of the queries see all blocks of the keys from `start` to `end`.
    ///
    /// # Safety
    /// - As for [`Blocks::next`].
    #[inline(always)]
    pub(super) unsafe fn all(self, queries: [u32; 2], start: u32, end: u32, dims: &AttentionDims) -> bool {
        let shift = dims.scores.block_shift;
        let mut block = start >> shift;
        while block << shift < end {
            // SAFETY: the caller's promise: the block has a key below `end`.
            let (_, all) = unsafe { self.words(queries, block / 32, dims) };
            let last = ((end - 1) >> shift).min(block | 31);
            let wanted = (!0 >> (31 - (last - block))) << (block % 32);
            if all & wanted != wanted {
                return false;
            }
            block = last + 1;
        }
        true
    }
}
