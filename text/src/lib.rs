//! What lies between text and a model's token ids: a tokenizer that adds nothing of its own ([`Codec`]), text that is
//! written while tokens come ([`StreamedText`]), and the templates that make a prompt of a conversation
//! ([`ChatTemplate`]).
//!
//! It knows no device and no model, so that the library needs neither a tokenizer nor a template engine, and every
//! program around a model (a command line, a server) has the same text. Both types are made of a model's folder, or of
//! what another file format has in its metadata: [`Codec::new`], [`ChatTemplate::new`].

#![forbid(unsafe_code)]

mod codec;
mod error;
mod files;
mod json;
mod stream;
mod template;
mod vocabulary;

pub use codec::Codec;
pub use error::TextError;
pub use json::from_json;
pub use minijinja::Value;
pub use stream::StreamedText;
pub use template::{ChatOptions, ChatTemplate, Message};
pub use tokenizers::Tokenizer;
pub use vocabulary::Vocabulary;
