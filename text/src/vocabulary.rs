//! A tokenizer from a vocabulary, as GGUF files have it in their metadata.

use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use crate::TextError;
use crate::codec::refused;

/// How text is split before its pieces are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pieces {
    /// As GPT-2: words with the space before them, numbers.
    Gpt2,
    /// The same with each digit alone.
    Gpt2Digits,
    /// As Qwen2: words with the sign before them, each digit alone; texts are composed before.
    Qwen2,
    /// As Llama 3: words with the sign before them, up to three digits.
    Llama3,
}

/// The names that llama.cpp has for them.
const NAMES: [(&str, Pieces); 12] = [
    ("gpt-2", Pieces::Gpt2),
    ("gpt2", Pieces::Gpt2),
    ("olmo", Pieces::Gpt2),
    ("smollm", Pieces::Gpt2Digits),
    ("starcoder", Pieces::Gpt2Digits),
    ("qwen2", Pieces::Qwen2),
    ("deepseek-r1-qwen", Pieces::Qwen2),
    ("llama-bpe", Pieces::Llama3),
    ("llama3", Pieces::Llama3),
    ("llama-v3", Pieces::Llama3),
    ("glm4", Pieces::Llama3),
    ("chatglm-bpe", Pieces::Llama3),
];

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A token that stands for itself wherever it is written, and that is no text: a special one.
const CONTROL: i64 = 3;
/// A token that stands for itself wherever it is written.
const USER_DEFINED: i64 = 4;

/// The vocabulary of a file.
#[derive(Clone, Copy, Debug)]
pub struct Vocabulary<'a> {
    /// Which kind of tokenizer: only `gpt2`, byte-level BPE, is known.
    pub model: &'a str,
    /// How text is split before it, by llama.cpp's name.
    pub pre: Option<&'a str>,
    /// The tokens, by id.
    pub tokens: &'a [&'a str],
    /// What each is, by llama.cpp's numbers.
    pub types: &'a [i64],
    /// Pairs that are merged, the most wanted first, with a space between both parts.
    pub merges: &'a [&'a str],
}

impl Vocabulary<'_> {
    /// The tokenizer.
    ///
    /// # Errors
    /// [`TextError::Vocabulary`] for kinds that are not known, and for lists that do not fit each other.
    pub fn tokenizer(&self) -> Result<Tokenizer, TextError> {
        let wrong = |key: &'static str, expected: String, got: String| {
            Err(TextError::Vocabulary { key, expected, got })
        };
        if self.model != "gpt2" {
            return wrong("tokenizer.ggml.model", "gpt2".into(), self.model.into());
        }
        let pieces = match self.pre {
            None => Pieces::Gpt2,
            Some(name) => match NAMES.iter().find(|(known, _)| *known == name) {
                Some((_, pieces)) => *pieces,
                None => {
                    let known = NAMES.map(|(name, _)| name).join(", ");
                    return wrong("tokenizer.ggml.pre", format!("one of {known}"), name.into());
                }
            },
        };
        if self.types.len() != self.tokens.len() {
            let expected = format!("one for each of {} tokens", self.tokens.len());
            return wrong("tokenizer.ggml.token_type", expected, self.types.len().to_string());
        }
        if u32::try_from(self.tokens.len()).is_err() {
            return wrong("tokenizer.ggml.tokens", "fewer than 2^32".into(), self.tokens.len().to_string());
        }
        let ids = self.tokens.iter().zip(0u32..);
        let vocabulary: Vocab = ids.map(|(token, id)| ((*token).to_owned(), id)).collect();
        if vocabulary.len() != self.tokens.len() {
            let twice = (self.tokens.len() - vocabulary.len()).to_string();
            return wrong(
                "tokenizer.ggml.tokens",
                "tokens that are there once".into(),
                format!("{twice} again"),
            );
        }
        let mut merges = Vec::with_capacity(self.merges.len());
        for merge in self.merges {
            // A part may begin with a space only where it is none of bytes, as here.
            match merge.split_once(' ') {
                Some((first, second)) => merges.push((first.to_owned(), second.to_owned())),
                None => return wrong("tokenizer.ggml.merges", "two parts".into(), format!("{merge:?}")),
            }
        }
        let model = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(pieces == Pieces::Llama3 && self.pre != Some("glm4"))
            .build()
            .map_err(refused)?;
        let mut tokenizer = Tokenizer::new(model);
        let split = |pattern: &str| -> Result<PreTokenizerWrapper, TextError> {
            let pattern = SplitPattern::Regex(pattern.into());
            Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(refused)?.into())
        };
        let bytes = |splits: bool| PreTokenizerWrapper::from(ByteLevel::new(false, true, splits));
        let parts = match pieces {
            Pieces::Gpt2 => vec![bytes(true)],
            Pieces::Gpt2Digits => vec![Digits::new(true).into(), bytes(true)],
            Pieces::Qwen2 => vec![split(QWEN2)?, bytes(false)],
            Pieces::Llama3 => vec![split(LLAMA3)?, bytes(false)],
        };
        tokenizer.with_pre_tokenizer(Some(Sequence::new(parts)));
        tokenizer.with_decoder(Some(ByteLevelDecoder::default()));
        if pieces == Pieces::Qwen2 {
            tokenizer.with_normalizer(Some(NFC));
        }
        let of_type = |wanted: i64, special: bool| -> Vec<AddedToken> {
            let tokens = self.tokens.iter().zip(self.types).filter(|(_, kind)| **kind == wanted);
            tokens.map(|(token, _)| AddedToken::from(*token, special).normalized(false)).collect()
        };
        tokenizer.add_special_tokens(&of_type(CONTROL, true));
        tokenizer.add_tokens(&of_type(USER_DEFINED, false));
        Ok(tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [&str; 9] = ["a", "b", "ab", "1", "12", "<x>", "Ġ", "<y>", "'"];

    fn vocabulary<'a>(pre: &'a str, merges: &'a [&'a str]) -> Vocabulary<'a> {
        let types = &[1, 1, 1, 1, 1, 3, 1, 4, 1];
        Vocabulary { model: "gpt2", pre: Some(pre), tokens: &TOKENS, types, merges }
    }

    fn ids(pre: &str, text: &str) -> Vec<u32> {
        let tokenizer = vocabulary(pre, &["a b", "1 1"]).tokenizer();
        // The second merge makes no token of the vocabulary.
        assert!(tokenizer.is_err());
        let tokenizer = vocabulary(pre, &["a b"]).tokenizer().expect("a tokenizer");
        tokenizer.encode(text, false).expect("ids").get_ids().to_vec()
    }

    #[test]
    fn tokens_that_stand_for_themselves() {
        for (name, _) in NAMES {
            assert_eq!(ids(name, "ab<x>ab<y>1 a"), [2, 5, 2, 7, 3, 6, 0], "{name}");
        }
        let tokenizer = vocabulary("gpt-2", &["a b"]).tokenizer().expect("a tokenizer");
        let text = |skip: bool| tokenizer.decode(&[2, 5, 7, 6, 0], skip).expect("text");
        assert_eq!((text(true), text(false)), ("ab<y> a".into(), "ab<x><y> a".into()));
    }

    #[test]
    fn what_does_not_fit() {
        let message = |vocabulary: Vocabulary<'_>| {
            vocabulary.tokenizer().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let sound = vocabulary("gpt-2", &[]);
        assert_eq!(message(sound), "");
        for (vocabulary, want) in [
            (Vocabulary { model: "llama", ..sound }, "tokenizer.ggml.model: expected gpt2, got llama"),
            (
                Vocabulary { pre: Some("tekken"), ..sound },
                "tokenizer.ggml.pre: expected one of gpt-2, gpt2, olmo",
            ),
            (
                Vocabulary { types: &[1], ..sound },
                "tokenizer.ggml.token_type: expected one for each of 9 tokens, got 1",
            ),
            (
                Vocabulary { tokens: &["a", "a"], types: &[1, 1], ..sound },
                "tokenizer.ggml.tokens: expected tokens that are there once, got 1 again",
            ),
            (
                Vocabulary { merges: &["ab"], ..sound },
                "tokenizer.ggml.merges: expected two parts, got \"ab\"",
            ),
            (Vocabulary { merges: &["a c"], ..sound }, "tokenizer: Token `c` out of vocabulary"),
        ] {
            let got = message(vocabulary);
            assert!(got.contains(want), "{want}: {got}");
        }
    }
}
