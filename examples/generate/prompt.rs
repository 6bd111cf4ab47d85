//! The prompt: from the command line, from standard input, or by default.

use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use text::{ChatOptions, ChatTemplate, Codec, Message, from_json};
use warpforge::models::ModelConfig;

use crate::language;
use crate::options::Options;
use crate::output::Failure;

/// What is continued where nothing else is asked for.
const DEFAULT: &str = "The borrow checker";
/// Most bytes of a prompt.
const MAX_BYTES: u64 = 1 << 26;

/// The text to continue or to ask, if it does not come from the terminal later.
pub fn text(options: &Options) -> Result<Option<String>, Failure> {
    match options.prompt.as_deref() {
        Some("-") => read(std::io::stdin().lock()).map(Some),
        Some(text) => Ok(Some(text.to_owned())),
        None if is_piped() => read(std::io::stdin().lock()).map(Some),
        None if options.chat => Ok(None),
        None => Ok(Some(DEFAULT.to_owned())),
    }
}

/// Whether somebody sends something: a terminal does not by itself, nor does /dev/null.
fn is_piped() -> bool {
    let Ok(input) = std::fs::metadata("/dev/stdin") else { return false };
    let kind = input.file_type();
    kind.is_fifo() || kind.is_socket() || kind.is_file()
}

/// All of it, without the line's end that most programs put behind a text.
fn read(input: impl Read) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let io = |error| format!("cannot read the prompt from standard input: {error}");
    input.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(
            format!("standard input: expected a prompt of at most {MAX_BYTES} bytes, got more").into()
        );
    }
    let text =
        String::from_utf8(bytes).map_err(|error| format!("standard input: expected UTF-8: {error}"))?;
    let text = text.strip_suffix('\n').map_or(&*text, |text| text.strip_suffix('\r').unwrap_or(text));
    Ok(text.to_owned())
}

/// The model's tokenizer; none if it has none and there are ids.
pub fn codec(options: &Options, config: &ModelConfig) -> Result<Option<Codec>, Failure> {
    let is_file = options.model.is_file();
    if options.ids.is_some() && !is_file && !options.model.join("tokenizer.json").exists() {
        return Ok(None);
    }
    match language::codec(&options.model, config)? {
        None if options.ids.is_none() => {
            Err(format!("no tokenizer in {}; --ids takes token ids", options.model.display()).into())
        }
        codec => Ok(codec),
    }
}

/// A conversation: what was said so far, and the template that makes text of it.
#[derive(Debug)]
pub struct Conversation {
    template: ChatTemplate,
    options: ChatOptions,
    messages: Vec<Message>,
}

impl Conversation {
    pub fn new(options: &Options) -> Result<Self, Failure> {
        let template = language::template(&options.model)?.ok_or_else(|| no_template(&options.model))?;
        let mut variables = Vec::new();
        for variable in &options.template_variable {
            let parts = variable.split_once('=');
            let (name, value) =
                parts.ok_or_else(|| format!("--template-variable: expected NAME=JSON, got {variable:?}"))?;
            let value = from_json(value)
                .map_err(|_| format!("--template-variable {name}: expected JSON, got {value:?}"))?;
            variables.push((name.to_owned(), value));
        }
        let messages = options.system.iter().map(|text| Message::text("system", text)).collect();
        Ok(Conversation { template, options: ChatOptions { variables, ..ChatOptions::default() }, messages })
    }

    /// Adds a question with images before it. Returns the text of all of it, up to where the answer begins.
    pub fn ask(&mut self, text: &str, images: usize) -> Result<String, Failure> {
        self.messages.push(match images {
            0 => Message::text("user", text),
            images => Message::images("user", images, text),
        });
        Ok(self.template.render(&self.messages, &self.options)?)
    }

    pub fn answered(&mut self, text: &str) {
        self.messages.push(Message::text("assistant", text));
    }
}

fn no_template(model: &Path) -> String {
    format!(
        "no chat template in {}: neither chat_template.jinja nor chat_template in tokenizer_config.json; leave --chat out to \
         continue a text",
        model.display()
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn standard_input() -> Result<(), Failure> {
        for (input, want) in
            [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("", ""), ("\r", "\r"), ("ä 漢", "ä 漢")]
        {
            assert_eq!(read(input.as_bytes())?, want, "{input:?}");
        }
        let message = read(&b"a\xff"[..]).err().ok_or("an error")?.to_string();
        assert!(message.starts_with("standard input: expected UTF-8: "), "{message}");
        let message = read(std::io::repeat(b'a')).err().ok_or("an error")?.to_string();
        assert_eq!(message, "standard input: expected a prompt of at most 67108864 bytes, got more");
        Ok(())
    }

    /// Tokenizer and template of a file's metadata.
    #[test]
    fn gguf_files() -> Result<(), Failure> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden-quant/gguf_q4_1/model.gguf");
        let path = path.to_str().ok_or("a path")?;
        let options = Options::parse_from(["generate", "--chat", "--model", path]);
        let config = ModelConfig::from_dir(&options.model)?;
        let codec = codec(&options, &config)?.ok_or("a tokenizer")?;
        let text = Conversation::new(&options)?.ask("Hi", 0)?;
        assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
        let ids = codec.encode_rendered(&text)?;
        let start = codec.token_to_id("<|im_start|>").ok_or("a token")?;
        assert_eq!(ids.iter().filter(|&&id| id == start).count(), 2);
        assert_eq!(codec.encode("The capital of France is")?[..3], [287, 280, 67]);
        Ok(())
    }

    #[test]
    fn conversations() -> Result<(), Failure> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_str().ok_or("a path")?;
        let options = |more: &[&str]| {
            Options::parse_from(
                [&["generate", "--chat", "--model", path, "--system", "Terse."], more].concat(),
            )
        };
        let message = |more: &[&str]| Conversation::new(&options(more)).err().map(|error| error.to_string());
        assert!(message(&[]).ok_or("an error")?.starts_with(&format!("no chat template in {path}: ")));
        let template =
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}";
        std::fs::write(folder.path().join("chat_template.jinja"), template)?;
        let mut conversation = Conversation::new(&options(&["--template-variable", "mood=7"]))?;
        assert_eq!(conversation.ask("Hi?", 0)?, "<system>Terse.<user>Hi?<assistant>7");
        conversation.answered("Yes.");
        assert_eq!(
            conversation.ask("More?", 0)?,
            "<system>Terse.<user>Hi?<assistant>Yes.<user>More?<assistant>7"
        );
        let bad = message(&["--template-variable", "mood"]);
        assert_eq!(bad.as_deref(), Some("--template-variable: expected NAME=JSON, got \"mood\""));
        let bad = message(&["--template-variable", "mood=x"]);
        assert_eq!(bad.as_deref(), Some("--template-variable mood: expected JSON, got \"x\""));
        Ok(())
    }
}
