//! What a batch refuses.

use host::Error;

use super::{RequestId, SequenceId};

/// Why a batch did not do what was asked. But for [`BatchError::Device`] nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// There are not as many pages that no sequence holds.
    #[error("the step needs {needed} pages, and {available} of {pages} are not held by a sequence")]
    OutOfPages {
        /// Pages that the step would take.
        needed: usize,
        /// Pages that can be taken: the free ones and those of the prefix cache alone.
        available: usize,
        /// Pages of the batch.
        pages: usize,
    },
    /// All places for sequences are taken.
    #[error("the batch has {most} sequences, as many as it is for")]
    OutOfSequences {
        /// [`BatchOptions::max_sequences`](super::BatchOptions::max_sequences).
        most: usize,
    },
    /// The sequence is not, or no longer, one of the batch.
    #[error("{id} is not in the batch")]
    Unknown {
        /// The sequence.
        id: SequenceId,
    },
    /// The request is not, or no longer, one of the scheduler's, or has no place in the batch yet.
    #[error("{id} is not running")]
    UnknownRequest {
        /// The request.
        id: RequestId,
    },
    /// A sequence without tokens, or work on none.
    #[error("{what} has no tokens")]
    Empty {
        /// The prompt, or the work of which sequence.
        what: String,
    },
    /// A step without work.
    #[error("a step without work")]
    NoWork,
    /// A sequence would be longer than it may be.
    #[error("a sequence of {tokens} tokens is longer than {capacity}")]
    TooLong {
        /// Its tokens.
        tokens: usize,
        /// [`BatchOptions::capacity`](super::BatchOptions::capacity).
        capacity: usize,
    },
    /// Work on more tokens than the sequence has pending.
    #[error("work on {tokens} tokens of {id}, of which {pending} are pending")]
    NotPending {
        /// The sequence.
        id: SequenceId,
        /// Tokens of the work.
        tokens: usize,
        /// Tokens of the sequence that no step has seen.
        pending: usize,
    },
    /// A sequence twice in one step.
    #[error("{id} is in the step twice")]
    Twice {
        /// The sequence.
        id: SequenceId,
    },
    /// A step with more tokens than it may have.
    #[error("a step of {tokens} tokens is above the budget of {budget}")]
    OverBudget {
        /// Tokens of all work.
        tokens: usize,
        /// [`BatchOptions::max_step_tokens`](super::BatchOptions::max_step_tokens).
        budget: usize,
    },
    /// A step with more sequences of several tokens than it may have.
    #[error("a step with several tokens of {prompts} sequences, which is for {most}")]
    TooManyPrompts {
        /// Sequences with more than one token.
        prompts: usize,
        /// [`BatchOptions::max_prompts`](super::BatchOptions::max_prompts).
        most: usize,
    },
    /// A step that asks for more rows of logits than there is room for.
    #[error("a step that asks for {rows} rows of logits, which has room for {most}")]
    TooManyLogits {
        /// Rows that are asked for.
        rows: usize,
        /// Rows that there are.
        most: usize,
    },
    /// A step on parts of images of several sequences: the tower has the features of one.
    #[error("a step on images of {first} and of {second}: expected those of one sequence")]
    SeveralVisuals {
        /// One of them.
        first: SequenceId,
        /// Another.
        second: SequenceId,
    },
    /// A sequence cannot be cut within its images, nor before them.
    #[error("{id} cannot be cut to {tokens} tokens: its images end behind {images}")]
    Images {
        /// The sequence.
        id: SequenceId,
        /// Tokens that should be left.
        tokens: usize,
        /// Tokens up to the end of the last image.
        images: usize,
    },
    /// Chosen tokens that are not one for each draft of a computed request, and one more.
    #[error("{tokens} tokens for {id}, which has {drafted} drafts: expected one more, behind a step")]
    Drafts {
        /// The request.
        id: RequestId,
        /// The tokens.
        tokens: usize,
        /// Its drafts.
        drafted: usize,
    },
    /// A draft model of another vocabulary than that of the model whose tokens it should draft.
    #[error("a draft model of {draft} tokens for a model of {target}: expected the same vocabulary")]
    DraftVocabulary {
        /// Tokens that the draft model has.
        draft: usize,
        /// Tokens that the other has.
        target: usize,
    },
    /// A draft model with recurrent states, which cannot go back behind drafts that were not kept.
    #[error("a draft model with recurrent states, which cannot go back: expected one without")]
    DraftRecurrent,
    /// A tree of drafts for a model with recurrent states, which cannot go back behind those that were not kept.
    #[error("a tree of drafts for {id}: expected a model without recurrent states, which cannot go back")]
    RecurrentTree {
        /// The request.
        id: RequestId,
    },
    /// A recurrent state cannot go back.
    #[error("{id} cannot be cut to {tokens} tokens: its recurrent state is of {computed}; pre-empt it first")]
    Recurrent {
        /// The sequence.
        id: SequenceId,
        /// Tokens that should be left.
        tokens: usize,
        /// Tokens that its state has seen.
        computed: usize,
    },
    /// An option or an argument is wrong in itself, or the device has failed. After the latter the sequences that took
    /// part are as before the step, or have to be computed anew ([`Batch::preempt`](super::Batch::preempt)) where a
    /// state cannot go back.
    #[error(transparent)]
    Device(#[from] Error),
}

impl From<BatchError> for Error {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Device(error) => error,
            error => Error::Model(Box::new(error)),
        }
    }
}
