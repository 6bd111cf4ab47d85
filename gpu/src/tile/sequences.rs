//! Sequences packed one after the other, cut into pieces of a fixed length: which piece is a block's.
//!
//! Sequence s has the tokens `offsets[s]..offsets[s + 1]`, and its pieces are at the *places* from
//! `offsets[s] / size + s` on. That leaves at least as many as the sequence has pieces, so a place's sequence is found
//! by bisection of the offsets alone, and the grid needs nothing but the number of tokens: `tokens / size + sequences`
//! places, some of them empty.

use cuda_std::global;

/// A sequence's tokens among those of the run.
#[derive(Clone, Copy)]
pub struct Sequence {
    /// Its number.
    pub index: u32,
    /// Its first token.
    pub start: u32,
    /// Its tokens.
    pub len: u32,
}

impl Sequence {
    /// Sequence number `index`. No token is taken to be beyond `tokens`, whatever the offsets say.
    ///
    /// # Safety
    /// - `offsets` holds one u32 more than there are sequences, and `index` is one of them.
    #[inline(always)]
    pub unsafe fn load(offsets: *const u32, index: u32, tokens: u32) -> Self {
        // SAFETY: index + 1 is at most the number of sequences — the caller.
        let (start, end) = unsafe {
            let at = offsets.add(index as usize);
            (global::load(at).min(tokens), global::load(at.add(1)).min(tokens))
        };
        Sequence { index, start, len: end.saturating_sub(start) }
    }

    /// The place of its first piece of `size` tokens.
    #[inline(always)]
    pub fn first_place(self, size: u32) -> u32 {
        self.start / size + self.index
    }
}

/// The piece of `size` tokens at a place: its sequence, and its first token counted from the sequence's first; none
/// for an empty place.
///
/// # Safety
/// - As for [`Sequence::load`]; `sequences` is at least 1.
#[inline(always)]
pub unsafe fn piece_at(
    offsets: *const u32,
    sequences: u32,
    tokens: u32,
    place: u32,
    size: u32,
) -> Option<(Sequence, u32)> {
    // The last sequence that begins at this place or before.
    let (mut low, mut high) = (0, sequences);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        // SAFETY: middle < sequences.
        let start = unsafe { global::load(offsets.add(middle as usize)) }.min(tokens);
        if start / size + middle <= place {
            low = middle;
        } else {
            high = middle;
        }
    }
    // SAFETY: low < sequences.
    let sequence = unsafe { Sequence::load(offsets, low, tokens) };
    let first = place.wrapping_sub(sequence.first_place(size)).wrapping_mul(size);
    // Before the first sequence the difference is huge, and its product may not be: compare the places too.
    let is_piece = place >= sequence.first_place(size) && first < sequence.len;
    is_piece.then_some((sequence, first))
}
