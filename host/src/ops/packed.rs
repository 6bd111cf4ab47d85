//! Sequences packed one after the other.

use std::ops::Range;

/// The tokens of a sequence. No token is taken to be beyond `tokens`, whatever the offsets say.
pub(crate) fn sequence(offsets: &[u32], index: usize, tokens: u32) -> Range<usize> {
    let (start, end) = (offsets[index].min(tokens), offsets[index + 1].min(tokens));
    start as usize..end.max(start) as usize
}
