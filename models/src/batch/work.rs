//! What a step is asked for, and what it gives.

use std::fmt;
use std::ops::Range;

use crate::LogitRows;

/// A sequence of a batch. Numbers are not used again, and later sequences have larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// What a step does for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Which one.
    pub id: SequenceId,
    /// How many of its pending tokens, from the first on.
    pub tokens: usize,
    /// Which of their logits are asked for.
    pub logits: WorkLogits,
}

impl Work {
    /// On so many tokens, for the logits of the last.
    pub fn new(id: SequenceId, tokens: usize) -> Self {
        Work { id, tokens, logits: WorkLogits::Last }
    }
}

/// Which logits of a step's tokens are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkLogits {
    /// None.
    Nothing,
    /// Those of the last token.
    #[default]
    Last,
    /// Those of each token.
    All,
}

/// What a step gives.
#[derive(Clone, Debug)]
pub struct StepOutput<'a> {
    pub(super) logits: LogitRows<'a>,
    pub(super) rows: &'a [Range<usize>],
}

impl<'a> StepOutput<'a> {
    /// `[rows, vocab]` f32 on the device, until the next step. There may be more rows than were asked for.
    pub fn logits(&self) -> LogitRows<'a> {
        self.logits
    }

    /// Of each work, in the order of the step's, the rows that it asked for.
    pub fn rows(&self) -> &'a [Range<usize>] {
        self.rows
    }
}

/// Numbers of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchStats {
    /// Sequences in the batch.
    pub sequences: usize,
    /// Pages of the caches.
    pub pages: usize,
    /// Pages that no sequence holds: free ones, and those of the prefix cache alone.
    pub free_pages: usize,
    /// Of these the latter.
    pub cached_pages: usize,
    /// Steps so far.
    pub steps: u64,
    /// Tokens computed so far.
    pub computed_tokens: u64,
    /// Tokens that were found in the prefix cache instead.
    pub reused_tokens: u64,
    /// Steps that read a prefix once for several sequences.
    pub shared_prefix_steps: u64,
    /// Pages that left the prefix cache for others.
    pub evicted_pages: u64,
    /// Pages copied, since several sequences held them and one went on.
    pub copied_pages: u64,
    /// Sequences that were pre-empted.
    pub preemptions: u64,
}
