//! What a sequence begins with.

use super::PromptVisual;

/// A prompt, and how a sequence goes on from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The adapter that the sequence has, by its place among those of the batch
    /// ([`Model::batch_with`](crate::Model::batch_with)); none: the model alone.
    pub adapter: Option<usize>,
    /// Its images and videos, in order of their appearance; placeholder tokens stand for them, as for
    /// [`Session::prefill_visual`](crate::Session::prefill_visual).
    pub visuals: Vec<PromptVisual>,
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Self {
        Prompt { tokens: tokens.to_vec(), ..Prompt::default() }
    }
}
