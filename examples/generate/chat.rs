//! A conversation from a terminal.

use std::io::BufRead;

use text::Codec;
use warpforge::models::ModelConfig;

use crate::answer::{Writer, print_speed};
use crate::output::{self, Failure};
use crate::prompt::Conversation;

/// Questions from `input`, a line each, and answers to standard output, until there are no more. What earlier turns
/// left in the cache is used as far as the new text begins with it.
pub fn talk(
    writer: &mut Writer<'_>,
    codec: &Codec,
    config: &ModelConfig,
    mut conversation: Conversation,
    mut input: impl BufRead,
) -> Result<(), Failure> {
    // The tokens in the cache.
    let mut cached: Vec<u32> = Vec::new();
    let most = writer.max_new_tokens;
    loop {
        output::write(format_args!("> "))?;
        let mut line = String::new();
        let read = input.read_line(&mut line);
        if read.map_err(|error| format!("cannot read from standard input: {error}"))? == 0 {
            output::write(format_args!("\n"))?;
            return Ok(());
        }
        let question = line.trim();
        if question.is_empty() {
            continue;
        }
        let ids = codec.encode_rendered(&conversation.ask(question, 0)?)?;
        config.decoder.check_ids(&ids)?;
        let capacity = writer.session.options().capacity;
        if ids.len() >= capacity {
            return Err(format!(
                "the conversation has {} tokens, of {capacity} that there is room for: --context makes more",
                ids.len()
            )
            .into());
        }
        let known = reusable(&mut cached, &ids);
        if writer.truncate(known).is_err() {
            // A recurrent state cannot go back.
            writer.truncate(0)?;
            cached.clear();
        }
        let new = &ids[cached.len()..];
        let prefill = writer.read(new, &[], &mut |_| {}, false)?;
        writer.max_new_tokens = most.min(capacity - ids.len() + 1);
        let answer = writer.write()?;
        print_speed(new.len(), prefill, answer.ids.len(), answer.time);
        // The last token of an answer was not run.
        let run = writer.session.len(0) - ids.len();
        cached = ids;
        cached.extend(&answer.ids[..run]);
        conversation.answered(&codec.decode(&answer.ids)?);
    }
}

/// Shortens `cached` to what `ids` begins with, but for its last token, whose logits are wanted. Returns the length.
fn reusable(cached: &mut Vec<u32>, ids: &[u32]) -> usize {
    let same = std::iter::zip(&*cached, ids).take_while(|(a, b)| a == b).count();
    cached.truncate(same.min(ids.len().saturating_sub(1)));
    cached.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_in_the_cache() {
        for (cached, ids, want) in [
            (&[][..], &[1, 2][..], 0),
            (&[1, 2], &[1, 2, 3], 2),
            (&[1, 2, 3], &[1, 2, 3], 2),
            (&[1, 9, 3], &[1, 2, 3], 1),
            (&[1, 2, 3, 4], &[1, 2], 1),
        ] {
            let mut left = cached.to_vec();
            assert_eq!((reusable(&mut left, ids), left.len()), (want, want), "{cached:?} {ids:?}");
        }
    }
}
