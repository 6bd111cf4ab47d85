//! Reading JSON, with messages that name the file and the field, and notes of what was read.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::MAX_SIZE;
use crate::ModelError;
use crate::files::read_file;

/// Reads and parses a JSON file of at most `most` bytes.
pub(in super::super) fn read_json(path: &Path, most: u64) -> Result<Value, ModelError> {
    parse_json(&read_text(path, most)?, path)
}

/// Reads a text file of at most `most` bytes.
pub(in super::super) fn read_text(path: &Path, most: u64) -> Result<String, ModelError> {
    String::from_utf8(read_file(path, most)?).map_err(|error| {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
        ModelError::Unreadable { path: path.into(), source }
    })
}

/// Parses JSON, and what Python writes beside it: `NaN`, `Infinity` and `-Infinity` become strings of these names, so
/// that they do no harm where nobody reads them and are named where somebody does.
pub(in super::super) fn parse_json<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ModelError> {
    serde_json::from_str(text)
        .or_else(|error| match without_infinities(text) {
            Some(text) => serde_json::from_str(&text),
            None => Err(error),
        })
        .map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let message = error.to_string();
            let reason =
                message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
            ModelError::Json { path: path.into(), line, column, reason: reason.into() }
        })
}

/// The text with its `NaN` and infinities as strings; `None` if it has none outside of its strings.
fn without_infinities(text: &str) -> Option<String> {
    let (mut out, mut rest) = (String::new(), text);
    let (mut in_string, mut found) = (false, false);
    while let Some(first) = rest.chars().next() {
        let word =
            ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !in_string && rest.starts_with(word));
        let len = match (word, first) {
            (Some(word), _) => {
                found = true;
                out.extend(["\"", word, "\""]);
                rest = &rest[word.len()..];
                continue;
            }
            // An escape, of which the second character ends no string.
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, '"') => {
                in_string = !in_string;
                1
            }
            (None, other) => other.len_utf8(),
        };
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    found.then_some(out)
}

/// Which fields of a file were read, with dots between the levels; an object whose own fields are read has a dot at its
/// end.
#[derive(Default)]
pub(super) struct Seen(RefCell<BTreeSet<String>>);

/// Keys without effect on what a model computes, at any level: how it was trained, initialised and classified with,
/// what a program that runs it may show, and what is said a second time elsewhere.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "experts_implementation",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "mrope_interleaved",
    "name_or_path",
    "num_labels",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "return_dict",
    "router_aux_loss_coef",
    "tokenizer_class",
    "transformers_version",
    "use_cache",
];

impl Seen {
    /// The fields of `map` that were not read, that may be of effect, and that ask for something: neither null nor
    /// false.
    pub(super) fn unread(&self, map: &Map<String, Value>) -> Vec<String> {
        let mut unread = Vec::new();
        self.collect(map, "", &mut unread);
        unread
    }

    fn collect(&self, map: &Map<String, Value>, prefix: &str, unread: &mut Vec<String>) {
        for (key, value) in map {
            let name = format!("{prefix}{key}");
            let inside = format!("{name}.");
            match value {
                Value::Object(map) if self.0.borrow().contains(&inside) => self.collect(map, &inside, unread),
                Value::Null | Value::Bool(false) => {}
                _ if HARMLESS.contains(&key.as_str()) || self.0.borrow().contains(&name) => {}
                _ => unread.push(name),
            }
        }
    }
}

/// One JSON object, with what a message needs to name its fields.
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    /// In front of each field's name in messages.
    prefix: Cow<'a, str>,
    map: &'a Map<String, Value>,
    seen: &'a Seen,
}

impl<'a> Fields<'a> {
    pub(super) fn top(root: &'a Value, path: &'a Path, seen: &'a Seen) -> Result<Fields<'a>, ModelError> {
        match root {
            Value::Object(map) => Ok(Fields { path, prefix: "".into(), map, seen }),
            other => Err(ModelError::Field {
                path: path.into(),
                field: "the file's content".into(),
                expected: "an object".into(),
                got: other.to_string(),
            }),
        }
    }

    /// The field, which counts as read from now on.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        let value = self.map.get(key)?;
        self.seen.0.borrow_mut().insert(format!("{}{key}", self.prefix));
        Some(value)
    }

    /// Counts the field as read if it says what is assumed anyway.
    pub(super) fn assume(&self, key: &str, is_assumed: impl FnOnce(&Value) -> bool) {
        if self.map.get(key).is_some_and(is_assumed) {
            self.get(key);
        }
    }

    /// The object `key`, whose fields count as read one by one; null is absent.
    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        let Some(map) = self.nullable(key, "an object", Value::as_object)? else { return Ok(None) };
        let prefix = format!("{}{key}.", self.prefix);
        self.seen.0.borrow_mut().insert(prefix.clone());
        Ok(Some(Fields { path: self.path, prefix: prefix.into(), map, seen: self.seen }))
    }

    /// Fields of an object inside, wherever it is from.
    pub(super) fn inside<'b>(
        &self,
        prefix: impl Into<Cow<'b, str>>,
        map: &'b Map<String, Value>,
    ) -> Fields<'b>
    where
        'a: 'b,
    {
        Fields { path: self.path, prefix: prefix.into(), map, seen: self.seen }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// An object that the file does not have.
    pub(super) fn none(&self, empty: &'a Map<String, Value>) -> Fields<'a> {
        Fields { path: self.path, prefix: self.prefix.clone(), map: empty, seen: self.seen }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// A field whose value is an object, with that.
    pub(super) fn first_object(&self) -> Option<(&'a str, &'a Value)> {
        self.map.iter().find(|(_, value)| value.is_object()).map(|(key, value)| (key.as_str(), value))
    }

    /// The field's value by `parse`, which refuses with `None`; `None` if the field is absent.
    pub(super) fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| self.error(key, expected, value.to_string()))
    }

    /// As [`Fields::optional`], with null read as absent.
    pub(super) fn nullable<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        if self.get(key).is_some_and(Value::is_null) { Ok(None) } else { self.optional(key, expected, parse) }
    }

    pub(super) fn required<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, expected, parse)?.ok_or_else(|| self.error(key, expected, "nothing".into()))
    }

    pub(super) fn integer(
        &self,
        key: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ModelError> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.optional(key, &expected, |value| whole(value).filter(|n| range.contains(n)))
    }

    pub(super) fn size(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        self.size_up_to(key, MAX_SIZE, default)
    }

    /// At most what the kernels take.
    pub(super) fn size_up_to(&self, key: &str, most: usize, default: usize) -> Result<usize, ModelError> {
        Ok(self.integer(key, 1..=most)?.unwrap_or(default))
    }

    /// The error if a head's width is none that attention takes, wherever it is from.
    pub(super) fn check_head_dim(&self, key: &str, head_dim: usize, most: usize) -> Result<(), ModelError> {
        if (8..=most).contains(&head_dim) && head_dim.is_multiple_of(8) {
            return Ok(());
        }
        Err(self.error(key, &format!("a multiple of 8 from 8 to {most}"), head_dim.to_string()))
    }

    /// Infinities are strings here, so every number is finite.
    pub(super) fn number(
        &self,
        key: &str,
        expected: &str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ModelError> {
        self.nullable(key, expected, |value| value.as_f64().filter(|number| accepts(*number)))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.optional(key, "true or false", Value::as_bool)
    }

    pub(super) fn error(&self, key: &str, expected: &str, got: String) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Field { path: self.path.into(), field, expected: expected.into(), got }
    }

    pub(super) fn unsupported(
        &self,
        key: &str,
        value: String,
        supported: &'static [&'static str],
    ) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Unsupported { path: self.path.into(), field, value, supported }
    }

    pub(super) fn inconsistent(&self, rule: &'static str, got: String) -> ModelError {
        ModelError::Inconsistent { path: self.path.into(), rule, got }
    }
}

/// A whole number, however it is written: `1024`, `1024.0`, `1e3`.
pub(super) fn whole(value: &Value) -> Option<usize> {
    /// From here on a float stands for several whole numbers.
    const MOST: f64 = (1u64 << 53) as f64;
    let of_float = |number: &f64| number.fract() == 0.0 && (0.0..MOST).contains(number);
    match value.as_u64() {
        Some(number) => usize::try_from(number).ok(),
        None => value.as_f64().filter(of_float).map(|number| number as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_are_strings() {
        let parse =
            |text: &str| parse_json::<Value>(text, Path::new("x.json")).map_err(|error| error.to_string());
        let want =
            serde_json::json!({"a": ["NaN", "Infinity", "-Infinity"], "NaN \\\" Infinity": "é -Infinity"});
        let text = r#"{"a": [NaN,Infinity, -Infinity], "NaN \\\" Infinity": "é -Infinity"}"#;
        assert_eq!(parse(text).unwrap(), want);
        assert_eq!(parse("[NaN, }").unwrap_err(), "x.json:1:9: not valid JSON: expected value");
        assert_eq!(parse("[1, }").unwrap_err(), "x.json:1:5: not valid JSON: expected value");
        assert_eq!(parse("\"\\").unwrap_err(), "x.json:1:2: not valid JSON: EOF while parsing a string");
        assert_eq!(parse("[Infinity \"\\").unwrap_err(), "x.json:1:13: not valid JSON: expected `,` or `]`");
    }

    #[test]
    fn whole_numbers() {
        let of = |text: &str| whole(&serde_json::from_str(text).unwrap());
        assert_eq!([of("7"), of("1024.0"), of("1e3"), of("0.0")], [Some(7), Some(1024), Some(1000), Some(0)]);
        assert_eq!([of("-1"), of("1.5"), of("1e300"), of("\"1\""), of("true")], [None; 5]);
    }
}
