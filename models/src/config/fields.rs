//! Reading JSON, with messages that name the file and the field.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::MAX_SIZE;
use crate::ModelError;

/// Reads and parses a JSON file.
pub(in super::super) fn read_json(path: &Path) -> Result<Value, ModelError> {
    parse_json(&fs::read_to_string(path).map_err(|source| ModelError::io(path, source))?, path)
}

pub(super) fn parse_json(text: &str, path: &Path) -> Result<Value, ModelError> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let message = error.to_string();
        let reason = message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
        ModelError::Json { path: path.into(), line, column, reason: reason.into() }
    })
}

/// One JSON object, with what a message needs to name its fields.
pub(super) struct Fields<'a> {
    pub(super) path: &'a Path,
    /// In front of each field's name in messages.
    pub(super) prefix: &'a str,
    pub(super) map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn top(root: &'a Value, path: &'a Path) -> Result<Fields<'a>, ModelError> {
        match root {
            Value::Object(map) => Ok(Fields { path, prefix: "", map }),
            other => Err(ModelError::Field {
                path: path.into(),
                field: "the file's content".into(),
                expected: "an object".into(),
                got: other.to_string(),
            }),
        }
    }

    /// The field's value by `parse`, which refuses with `None`; `None` if the field is absent.
    pub(super) fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.map.get(key) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| self.error(key, expected, value.to_string()))
    }

    /// As [`Fields::optional`], with null read as absent.
    pub(super) fn nullable<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        if self.map.get(key).is_some_and(Value::is_null) {
            Ok(None)
        } else {
            self.optional(key, expected, parse)
        }
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
        let parse = |value: &Value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n))
        };
        self.optional(key, &expected, parse)
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

    /// JSON has no infinities, so every number is finite.
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
}
