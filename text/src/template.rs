//! Chat templates: a conversation to the text of a prompt.

use std::collections::BTreeMap;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::TextError;
use crate::files::{read_json, read_text, token};
use crate::json::tojson;

/// What a template may do at most: instructions, and a 64th of the bytes that it makes. A conversation of a million
/// characters takes some hundred thousand.
const FUEL: u64 = 20_000_000;

/// Tokens that templates know by these names.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A model's chat template, in the language of Hugging Face's: Jinja with blocks that take their line, Python's methods
/// of texts and dictionaries, `tojson` as Python's `json.dumps`, `raise_exception`, `strftime_now`, `break` and
/// `continue`, and `generation` blocks, which only training looks at.
///
/// A template is a program of the model's file. It reads nothing but the conversation and the time, and its work is
/// bounded.
#[derive(Debug)]
pub struct ChatTemplate {
    engine: Environment<'static>,
    /// Special tokens by name.
    tokens: BTreeMap<String, Value>,
}

/// One message of a conversation: an object as a chat API has it, with `role`, `content` and what else a template looks
/// at.
#[derive(Clone, Debug)]
pub struct Message(Value);

impl Message {
    /// A text of the role `system`, `user` or `assistant`.
    pub fn text(role: &str, text: &str) -> Self {
        Message(Value::from_pairs([("role", role), ("content", text)]))
    }

    /// A text behind this number of images.
    pub fn images(role: &str, images: usize, text: &str) -> Self {
        let image = Value::from_pairs([("type", "image")]);
        let text = Value::from_pairs([("type", "text"), ("text", text)]);
        let content: Vec<Value> = std::iter::repeat_n(image, images).chain([text]).collect();
        Message(Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))]))
    }
}

/// Of an object as a chat API has it; [`crate::from_json`] makes it of text.
impl From<Value> for Message {
    fn from(message: Value) -> Self {
        Message(message)
    }
}

/// What a template gets beside the messages.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// Whether the text ends with the beginning of an answer, for the model to go on.
    pub add_generation_prompt: bool,
    /// Descriptions of tools, as chat APIs have them; see [`crate::from_json`].
    pub tools: Vec<Value>,
    /// Further variables, such as `enable_thinking`.
    pub variables: Vec<(String, Value)>,
}

impl Default for ChatOptions {
    /// For an answer, without tools.
    fn default() -> Self {
        ChatOptions { add_generation_prompt: true, tools: Vec::new(), variables: Vec::new() }
    }
}

impl ChatTemplate {
    /// The template of a model's folder: of `chat_template.jinja`, else that in `tokenizer_config.json`, else that in
    /// `chat_template.json`; none where none has one. Special tokens are those of `tokenizer_config.json`.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, TextError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?;
        let jinja_path = dir.join("chat_template.jinja");
        let mut path = jinja_path.clone();
        let mut sources = BTreeMap::new();
        if let Some(source) = read_text(&jinja_path)? {
            sources.insert("default".to_owned(), source);
        } else {
            let json_path = dir.join("chat_template.json");
            let json = read_json(&json_path)?;
            let (found, template) = match &config["chat_template"] {
                serde_json::Value::Null => (json_path, &json["chat_template"]),
                template => (config_path, template),
            };
            path = found;
            match template {
                serde_json::Value::Null => return Ok(None),
                serde_json::Value::String(source) => {
                    sources.insert("default".to_owned(), source.clone());
                }
                serde_json::Value::Array(named) => {
                    for entry in named {
                        let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str())
                        else {
                            let expected = "chat_template with a name and a template in each entry";
                            return Err(TextError::file(&path, expected, entry.to_string()));
                        };
                        sources.insert(name.to_owned(), source.to_owned());
                    }
                }
                other => {
                    let expected = "chat_template as a text or a list";
                    return Err(TextError::file(&path, expected, kind_of(other)));
                }
            }
        }
        let tokens = SPECIAL_TOKENS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), Value::from(token(&config[*name])?))))
            .collect();
        let template = Self::build(sources, tokens).map_err(|error| match error {
            TextError::Template { reason } => TextError::file(&path, "a chat template", reason),
            other => other,
        })?;
        Ok(Some(template))
    }

    /// Of a template's source and special tokens, such as `bos_token`, by name.
    pub fn new(source: &str, tokens: &[(&str, &str)]) -> Result<Self, TextError> {
        let tokens = tokens.iter().map(|(name, token)| ((*name).to_owned(), Value::from(*token))).collect();
        Self::build(BTreeMap::from([("default".to_owned(), source.to_owned())]), tokens)
    }

    fn build(sources: BTreeMap<String, String>, tokens: BTreeMap<String, Value>) -> Result<Self, TextError> {
        let mut engine = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(reason)?;
        engine.set_syntax(syntax);
        engine.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.set_fuel(Some(FUEL));
        engine.add_filter("tojson", tojson);
        engine.add_function("raise_exception", raise_exception);
        engine.add_function("strftime_now", strftime_now);
        for (name, source) in sources {
            engine.add_template_owned(name, without_generation(&source)).map_err(reason)?;
        }
        Ok(ChatTemplate { engine, tokens })
    }

    /// The text of a conversation. It holds its special tokens: [`crate::Codec::encode_rendered`] makes ids of it.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String, TextError> {
        let has_tools = !options.tools.is_empty();
        let tool_use = has_tools.then(|| self.engine.get_template("tool_use").ok()).flatten();
        let template = match tool_use {
            Some(template) => template,
            None => self.engine.get_template("default").map_err(reason)?,
        };
        let messages: Vec<Value> = messages.iter().map(|Message(message)| message.clone()).collect();
        let mut variables: Vec<(String, Value)> =
            self.tokens.iter().map(|(name, token)| (name.clone(), token.clone())).collect();
        variables.extend(options.variables.iter().cloned());
        variables.extend([
            ("messages".to_owned(), Value::from(messages)),
            (
                "tools".to_owned(),
                if has_tools { Value::from(options.tools.clone()) } else { Value::from(()) },
            ),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(options.add_generation_prompt)),
        ]);
        template.render(Value::from_pairs(variables)).map_err(reason)
    }
}

fn reason(error: Error) -> TextError {
    let line = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    let reason = match error.detail() {
        // What the template itself says.
        Some(detail) if detail.starts_with(RAISED) => detail[RAISED.len()..].to_owned(),
        Some(detail) => format!("{}: {detail}{line}", error.kind()),
        None => format!("{}{line}", error.kind()),
    };
    TextError::Template { reason }
}

/// In front of what a template raises, to tell it from the engine's own words.
const RAISED: &str = "raised: ";

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// The local time, by a format of C's strftime.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// The source with `generation` blocks, which the engine does not know, as blocks that are always there.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let Some(end) = rest.find("%}") else { break };
        let (tag, behind) = rest.split_at(end);
        let words = tag[2..].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match words {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

fn kind_of(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "nothing",
        serde_json::Value::Bool(_) => "true or false",
        serde_json::Value::Number(_) => "a number",
        serde_json::Value::String(_) => "a text",
        serde_json::Value::Array(_) => "a list",
        serde_json::Value::Object(_) => "an object",
    }
}
