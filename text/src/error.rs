//! What can be wrong with a tokenizer, a template, or what they are given.

use std::path::{Path, PathBuf};

/// Text cannot be made into token ids, or a conversation into text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file is not there.
    #[error("{} does not exist", path.display())]
    Missing {
        /// What was looked for.
        path: PathBuf,
    },
    /// A file is there but cannot be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something else than it should.
    #[error("{}: expected {expected}, got {got}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What would have been accepted.
        expected: &'static str,
        /// What is there.
        got: String,
    },
    /// A vocabulary is of a kind that is not known, or its parts do not fit each other.
    #[error("{key}: expected {expected}, got {got}")]
    Vocabulary {
        /// The key of the metadata.
        key: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The tokenizer refused a text or ids.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// Its words.
        reason: String,
    },
    /// A chat template cannot be parsed, or refuses a conversation.
    #[error("chat template: {reason}")]
    Template {
        /// The engine's words, or those that the template raised.
        reason: String,
    },
}

impl TextError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::NotFound => TextError::Missing { path: path.into() },
            _ => TextError::Unreadable { path: path.into(), source },
        }
    }

    pub(crate) fn file(path: &Path, expected: &'static str, got: impl Into<String>) -> Self {
        TextError::File { path: path.into(), expected, got: got.into() }
    }
}
