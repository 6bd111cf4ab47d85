//! Tokenizer and chat template of a model's files: a folder, or a GGUF file.

// Each program uses what it needs.
#![allow(dead_code)]

use std::path::Path;

use text::{ChatTemplate, Codec, Vocabulary};
use warpforge::models::{Gguf, ModelConfig};

use crate::output::Failure;

/// The tokenizer; none in a GGUF file that has none.
pub fn codec(model: &Path, config: &ModelConfig) -> Result<Option<Codec>, Failure> {
    if !model.is_file() {
        return Ok(Some(Codec::from_dir(model, config.bos_token_id)?));
    }
    let file = Gguf::open(model)?;
    let Some(known) = file.vocabulary()? else { return Ok(None) };
    let (tokens, types, merges) = (&known.tokens, &known.types, &known.merges);
    let own = Vocabulary { model: known.model, pre: known.pre, tokens, types, merges };
    let first = known.bos.filter(|_| known.adds_bos);
    Ok(Some(Codec::new(own.tokenizer()?, first)?))
}

/// The chat template, if there is one.
pub fn template(model: &Path) -> Result<Option<ChatTemplate>, Failure> {
    if !model.is_file() {
        return Ok(ChatTemplate::from_dir(model)?);
    }
    let file = Gguf::open(model)?;
    let Some(source) = file.text("tokenizer.chat_template")? else { return Ok(None) };
    let vocabulary = file.vocabulary()?;
    let mut tokens = Vec::new();
    for (name, key) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")] {
        let id = file.unsigned(&format!("tokenizer.ggml.{key}_token_id"))?;
        let id = id.and_then(|id| usize::try_from(id).ok());
        let token = vocabulary.as_ref().zip(id).and_then(|(known, id)| known.tokens.get(id));
        tokens.extend(token.map(|token| (name, *token)));
    }
    Ok(Some(ChatTemplate::new(source, &tokens)?))
}
