//! Reading the files of a model's folder.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::TextError;

/// Largest file that is read whole: a tokenizer of a million tokens has some 50 MB.
const MAX_BYTES: u64 = 1 << 29;

/// The bytes of a regular file: a pipe or a device would hang, or never end.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let io = |source| TextError::io(path, source);
    if !fs::metadata(path).map_err(io)?.is_file() {
        return Err(TextError::file(path, "a regular file", "something else"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(TextError::file(path, "at most 512 MiB", "more"));
    }
    Ok(bytes)
}

/// As [`read`]; `None` where there is no such file.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(TextError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The JSON of a file, `Value::Null` where there is none.
pub(crate) fn read_json(path: &Path) -> Result<Value, TextError> {
    let Some(bytes) = read_optional(path)? else { return Ok(Value::Null) };
    serde_json::from_slice(&bytes).map_err(|error| TextError::file(path, "JSON", error.to_string()))
}

pub(crate) fn read_text(path: &Path) -> Result<Option<String>, TextError> {
    let Some(bytes) = read_optional(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|error| TextError::file(path, "UTF-8", error.to_string()))
}

/// A special token of tokenizer_config.json: a string, or an object with its `content`.
pub(crate) fn token(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}
