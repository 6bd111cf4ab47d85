//! A tokenizer that adds and cuts nothing of its own.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::TextError;
use crate::files;

/// Text to token ids and back.
#[derive(Clone, Debug)]
pub struct Codec {
    tokenizer: Tokenizer,
    /// In front of a text, where the tokenizer's own post-processor does not put it there.
    first: Option<u32>,
}

impl Codec {
    /// Of `tokenizer.json` and `tokenizer_config.json` in `dir`; the latter may be absent.
    ///
    /// Texts begin with the token that `tokenizer_config.json` calls `bos_token`, or else with `bos`, if its
    /// `add_bos_token` says so or if the tokenizer does that by itself: once in either case.
    pub fn from_dir(dir: &Path, bos: Option<u32>) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(files::read(&path)?)
            .map_err(|error| TextError::file(&path, "a tokenizer", error.to_string()))?;
        let config = files::read_json(&dir.join("tokenizer_config.json"))?;
        let named = files::token(&config["bos_token"]).and_then(|token| tokenizer.token_to_id(token));
        let first = if config["add_bos_token"] == true { named.or(bos) } else { None };
        Codec::new(tokenizer, first)
    }

    /// Of a tokenizer, for texts that begin with the token `first` if there is one. What the tokenizer's file says of
    /// cutting and filling up texts is for training, and switched off.
    pub fn new(mut tokenizer: Tokenizer, first: Option<u32>) -> Result<Self, TextError> {
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(refused)?;
        let own = tokenizer.encode("", true).map_err(refused)?;
        let first = first.filter(|first| own.get_ids().first() != Some(first));
        Ok(Codec { tokenizer, first })
    }

    /// The ids of a text that begins a sequence.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoded = self.tokenizer.encode(text, true).map_err(refused)?;
        Ok(self.first.into_iter().chain(encoded.get_ids().iter().copied()).collect())
    }

    /// The ids of a text that has all its special tokens in it, as one that a template made.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(self.tokenizer.encode(text, false).map_err(refused)?.get_ids().to_vec())
    }

    /// The text of ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(ids, true).map_err(refused)
    }

    /// The id of a token by its name.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }
}

pub(crate) fn refused(error: tokenizers::Error) -> TextError {
    TextError::Tokenizer { reason: error.to_string() }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::error::Error;

    use serde_json::{Value, json};

    use super::*;

    type Outcome = Result<(), Box<dyn Error>>;

    /// The demo model's tokenizer, whose first token is 0.
    pub(crate) fn demo() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo-model")
    }

    /// The codec of the demo's tokenizer with some fields replaced.
    fn with(changes: Value, config: Value) -> Result<Codec, Box<dyn Error>> {
        let mut file: Value = serde_json::from_slice(&std::fs::read(demo().join("tokenizer.json"))?)?;
        for (key, value) in changes.as_object().ok_or("an object")? {
            file[key] = value.clone();
        }
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string())?;
        if !config.is_null() {
            std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string())?;
        }
        Ok(Codec::from_dir(folder.path(), Some(0))?)
    }

    const TEXT: &str = "The borrow checker, a fearless friend of yours";

    #[test]
    fn truncation_and_padding_are_off() -> Outcome {
        let want = with(json!({}), json!({}))?.encode(TEXT)?;
        assert!(want.len() > 4, "{want:?}");
        let truncation =
            json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
        let padding = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 1, "pad_type_id": 0, "pad_token": "x"});
        for changes in [
            json!({"truncation": truncation}),
            json!({"padding": padding}),
            json!({"truncation": truncation, "padding": padding}),
        ] {
            let codec = with(changes.clone(), json!({}))?;
            assert_eq!(codec.encode(TEXT)?, want, "{changes}");
            assert_eq!(codec.encode_rendered(TEXT)?, want, "{changes}");
        }
        Ok(())
    }

    /// Whoever asks for it, post-processor or configuration or both: once.
    #[test]
    fn one_first_token() -> Outcome {
        let tokenizer: Value = serde_json::from_slice(&std::fs::read(demo().join("tokenizer.json"))?)?;
        let vocab = tokenizer["model"]["vocab"].as_object().ok_or("a vocabulary")?;
        let name = |id: u64| vocab.iter().find(|(_, own)| own.as_u64() == Some(id)).map(|(name, _)| name);
        let (zero, seven) = (name(0).ok_or("token 0")?, name(7).ok_or("token 7")?);
        let adds = json!({"post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": zero, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {zero: {"id": zero, "ids": [0], "tokens": [zero]}}}});
        let bare = with(json!({}), json!(null))?.encode(TEXT)?;
        assert_ne!(bare[0], 0, "nothing is added without the file");
        let started = |id: u32| [&[id], &bare[..]].concat();
        let table = [
            (json!({}), json!({"add_bos_token": true}), started(0)),
            (json!({}), json!({"add_bos_token": false}), bare.clone()),
            (json!({}), json!({}), bare.clone()),
            (json!({}), json!({"add_bos_token": true, "bos_token": seven}), started(7)),
            (json!({}), json!({"add_bos_token": true, "bos_token": {"content": seven}}), started(7)),
            (json!({}), json!({"add_bos_token": true, "bos_token": "no such token"}), started(0)),
            (adds.clone(), json!({"add_bos_token": true}), started(0)),
            (adds.clone(), json!({}), started(0)),
        ];
        for (changes, config, want) in table {
            assert_eq!(with(changes, config.clone())?.encode(TEXT)?, want, "{config}");
        }
        // A text that begins with the token itself has two.
        let codec = with(adds, json!({"add_bos_token": true}))?;
        assert_eq!(codec.encode(zero)?, [0, 0]);
        assert_eq!(codec.encode_rendered(TEXT)?, bare, "a template has written its own");
        Ok(())
    }

    #[test]
    fn files_that_are_not_right() -> Outcome {
        let folder = tempfile::tempdir()?;
        let message = || Codec::from_dir(folder.path(), None).err().map(|error| error.to_string());
        let path = folder.path().join("tokenizer.json");
        assert_eq!(message(), Some(format!("{} does not exist", path.display())));
        std::fs::create_dir(&path)?;
        let regular = format!("{}: expected a regular file, got something else", path.display());
        assert_eq!(message(), Some(regular));
        std::fs::remove_dir(&path)?;
        std::fs::write(&path, "{}")?;
        let refused = message().ok_or("an error")?;
        assert!(refused.starts_with(&format!("{}: expected a tokenizer, got ", path.display())), "{refused}");
        std::fs::copy(demo().join("tokenizer.json"), &path)?;
        assert_eq!(message(), None);
        std::fs::write(folder.path().join("tokenizer_config.json"), "{")?;
        let refused = message().ok_or("an error")?;
        assert!(refused.contains("tokenizer_config.json: expected JSON, got EOF"), "{refused}");
        Ok(())
    }
}
