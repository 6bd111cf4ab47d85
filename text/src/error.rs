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
    #[error("{}: expected {expected}, got {}", path.display(), shown(got))]
    File {
        /// The file.
        path: PathBuf,
        /// What would have been accepted.
        expected: &'static str,
        /// What is there.
        got: String,
    },
    /// A vocabulary is of a kind that is not known, or its parts do not fit each other.
    #[error("{key}: expected {}, got {}", shown(expected), shown(got))]
    Vocabulary {
        /// The key of the metadata.
        key: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The tokenizer refused a text or ids.
    #[error("tokenizer: {}", shown(reason))]
    Tokenizer {
        /// Its words.
        reason: String,
    },
    /// A chat template cannot be parsed, or refuses a conversation.
    #[error("chat template: {}", shown(reason))]
    Template {
        /// The engine's words, or those that the template raised.
        reason: String,
    },
}

/// Words of a file or a library in a message: the first of very many, and what would steer a terminal as it is written
/// in Rust.
fn shown(words: &str) -> String {
    const MOST: usize = 400;
    let mut chars = words.chars();
    let mut shown: String = chars
        .by_ref()
        .take(MOST)
        .flat_map(|char| match char {
            '\n' | '\t' => vec![char],
            _ if char.is_control() => char.escape_default().collect(),
            _ => vec![char],
        })
        .collect();
    if !chars.as_str().is_empty() {
        shown += &format!("… ({} more bytes)", chars.as_str().len());
    }
    shown
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What a template raises may be anything.
    #[test]
    fn messages_are_bounded_and_plain() {
        let reason = format!("\u{1b}[31mno\n{}", "x".repeat(1 << 20));
        let message = TextError::Template { reason }.to_string();
        assert!(message.starts_with("chat template: \\u{1b}[31mno\nxxx"), "{}", &message[..40]);
        assert!(message.ends_with("… (1048184 more bytes)") && message.len() < 500, "{}", message.len());
    }
}
