//! What a file says of its tokenizer.

use super::Gguf;
use crate::ModelError;

/// The vocabulary of a file, and how text becomes tokens of it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GgufVocabulary<'a> {
    /// `tokenizer.ggml.model`: which kind of tokenizer, `gpt2` for byte-level BPE.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: how text is split before it.
    pub pre: Option<&'a str>,
    /// The tokens, by id.
    pub tokens: Vec<&'a str>,
    /// What each is: 1 for a usual one, 3 for one that controls, 4 for one that a user added, 5 for one without use, 6
    /// for a byte.
    pub types: Vec<i64>,
    /// Pairs that are merged, the most wanted first, with a space between both parts.
    pub merges: Vec<&'a str>,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// Whether a text begins with it.
    pub adds_bos: bool,
    /// The template of a conversation.
    pub chat_template: Option<&'a str>,
}

impl Gguf {
    /// The vocabulary; none if the file has none.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] for keys of other types, or lists of different lengths.
    pub fn vocabulary(&self) -> Result<Option<GgufVocabulary<'_>>, ModelError> {
        let Some(model) = self.text("tokenizer.ggml.model")? else { return Ok(None) };
        let key = "tokenizer.ggml.tokens";
        let Some(tokens) = self.texts(key)? else {
            return Err(self.error(key, "a list of strings", "nothing"));
        };
        let key = "tokenizer.ggml.token_type";
        let types = match self.integers(key)? {
            Some(types) if types.len() == tokens.len() => types,
            Some(types) => {
                return Err(self.error(key, format!("one for each of {} tokens", tokens.len()), types.len()));
            }
            None => vec![1; tokens.len()],
        };
        Ok(Some(GgufVocabulary {
            model,
            pre: self.text("tokenizer.ggml.pre")?,
            tokens,
            types,
            merges: self.texts("tokenizer.ggml.merges")?.unwrap_or_default(),
            bos: self.token_id("tokenizer.ggml.bos_token_id")?,
            adds_bos: self.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
            chat_template: self.text("tokenizer.chat_template")?,
        }))
    }

    pub(super) fn token_id(&self, key: &str) -> Result<Option<u32>, ModelError> {
        match self.unsigned(key)? {
            None => Ok(None),
            Some(id) => match u32::try_from(id) {
                Ok(id) => Ok(Some(id)),
                Err(_) => Err(self.error(key, "a token id", id)),
            },
        }
    }
}
