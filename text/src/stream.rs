//! Text that is written while its tokens come.

use crate::{Codec, TextError};

/// Text as soon as it is whole characters: a token may end in the middle of one. (The tokenizer's own `DecodeStream`
/// keeps what is left at the end to itself.)
#[derive(Debug)]
pub struct StreamedText<'a> {
    codec: Option<&'a Codec>,
    /// The last ids whose text was given, and those whose text was not.
    ids: Vec<u32>,
    /// How many the former are. They are decoded with the latter: some decoders write a first token in another way.
    given: usize,
}

impl<'a> StreamedText<'a> {
    /// From the start of a text. Without a codec ids are written as numbers.
    pub fn new(codec: Option<&'a Codec>) -> Self {
        StreamedText { codec, ids: Vec::new(), given: 0 }
    }

    /// What there is to write after this id: nothing while a character is not whole.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if self.codec.is_none() {
            return Ok(format!("{id} "));
        }
        self.ids.push(id);
        let text = self.rest()?;
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text)
    }

    /// What is left at the end, whole or not.
    pub fn finish(self) -> Result<String, TextError> {
        self.rest()
    }

    /// The text of the ids that was not given.
    fn rest(&self) -> Result<String, TextError> {
        let Some(codec) = self.codec else { return Ok(String::new()) };
        let (given, text) = (codec.decode(&self.ids[..self.given])?, codec.decode(&self.ids)?);
        Ok(text.get(given.len()..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces make up the text, none ends in the middle of a character, and few ids are kept; what is cut at the
    /// end is there.
    #[test]
    fn streamed_text() -> Result<(), TextError> {
        let codec = Codec::from_dir(&crate::codec::tests::demo(), None)?;
        let whole = "The borrow checker … naïve 漢字 🦀🦀 done. ".repeat(20);
        let mut text = StreamedText::new(Some(&codec));
        let mut written = String::new();
        for id in codec.encode_rendered(&whole)? {
            written += &text.push(id)?;
            assert!(whole.starts_with(&written));
            assert!(text.ids.len() <= 8, "{} ids are kept", text.ids.len());
        }
        assert_eq!(written.clone() + &text.finish()?, whole);

        let ids = codec.encode_rendered("a 🦀")?;
        let mut text = StreamedText::new(Some(&codec));
        let pieces: Vec<String> =
            ids[..ids.len() - 1].iter().map(|&id| text.push(id)).collect::<Result<_, _>>()?;
        assert_eq!(pieces.concat().trim_end(), "a");
        assert!(text.finish()?.ends_with('\u{fffd}'));

        let mut text = StreamedText::new(None);
        assert_eq!((text.push(7)? + &text.push(8)?, text.finish()?), ("7 8 ".into(), String::new()));
        Ok(())
    }
}
