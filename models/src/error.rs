//! What can be wrong with a model's files.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

use abi::DType;
use host::Error;

/// A model's files cannot be used, or what it computes with them.
///
/// The paths are as the caller gave them, joined with the file's name. What messages quote from files is cut to a
/// bounded length, and characters that would control a terminal are written as their numbers.
/// [`ModelError::Unsupported`] and [`ModelError::UnknownModelType`] mean a sound file that this library cannot run,
/// [`ModelError::NanLogits`] is a sampler's; the others mean a missing or broken file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or directory is not there.
    #[error("{} does not exist", shown(path))]
    Missing {
        /// What was looked for.
        path: PathBuf,
    },
    /// A file is there but cannot be read or mapped.
    #[error("cannot read {}", shown(path))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A pipe, a device or a directory is where a file should be.
    #[error("{} is not a regular file", shown(path))]
    NotAFile {
        /// What was looked for.
        path: PathBuf,
    },
    /// A file is larger than its kind is allowed to be.
    #[error("{} is larger than {most} bytes", shown(path))]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Most bytes.
        most: u64,
    },
    /// A directory holds no safetensors checkpoint.
    #[error("no weights in {}: neither model.safetensors nor model.safetensors.index.json", shown(dir))]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A repository of the Hugging Face hub is not in its cache.
    #[error("{} is not in the hub's cache: {}", Excerpt(id), Excerpt(reason))]
    NotCached {
        /// The repository.
        id: String,
        /// What is wrong with its name, or what is not there.
        reason: String,
    },
    /// A repository of the Hugging Face hub could not be downloaded.
    #[error("{} cannot be downloaded: {}", Excerpt(id), Excerpt(reason))]
    NotDownloaded {
        /// The repository.
        id: String,
        /// What was asked for, and what the hub, the network or the system said.
        reason: String,
    },
    /// Whoever was told of the progress has stopped the loading.
    #[error("loading was stopped after {loaded_bytes} of {total_bytes} bytes")]
    Stopped {
        /// Bytes of weights on the device by then, which it has given back.
        loaded_bytes: u64,
        /// Bytes of all weights.
        total_bytes: u64,
    },
    /// A file could not be written.
    #[error("cannot write {}: {}", shown(path), Excerpt(reason))]
    Unwritten {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A file is not valid JSON.
    #[error("{}:{line}:{column}: not valid JSON: {}", shown(path), Excerpt(reason))]
    Json {
        /// The file.
        path: PathBuf,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault, from 1; 0 is the end of the line before.
        column: usize,
        /// The parser's words.
        reason: String,
    },
    /// A required field is absent, or a field has the wrong type or range.
    #[error("{}: {}: expected {expected}, got {}", shown(path), Excerpt(field), Excerpt(got))]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with dots between the levels.
        field: String,
        /// What would have been accepted.
        expected: String,
        /// The value as JSON, or `nothing`.
        got: String,
    },
    /// The model type is not one that this library builds.
    #[error("{}: unknown model_type \"{}\"; supported: {}", shown(path), Excerpt(found), supported.join(", "))]
    UnknownModelType {
        /// The configuration file.
        path: PathBuf,
        /// The value of `model_type`.
        found: String,
        /// The values that are built.
        supported: &'static [&'static str],
    },
    /// A field asks for something that this library does not implement.
    #[error("{}: {}: {} is not supported; supported: {}", shown(path), Excerpt(field), Excerpt(value), supported.join(", "))]
    Unsupported {
        /// The configuration file.
        path: PathBuf,
        /// The field, with dots between the levels.
        field: String,
        /// Its value.
        value: String,
        /// The values that are implemented.
        supported: &'static [&'static str],
    },
    /// Fields are sound one by one but contradict each other.
    #[error("{}: {rule}, got {}", shown(path), Excerpt(got))]
    Inconsistent {
        /// The configuration file.
        path: PathBuf,
        /// The rule that they break.
        rule: &'static str,
        /// The values.
        got: String,
    },
    /// A safetensors file is truncated or malformed.
    #[error("{} is not a valid safetensors file: {}", shown(path), Excerpt(reason))]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A GGUF file is truncated or malformed, or its metadata are not those of a model that is built.
    #[error("{}: {}: expected {}, got {}", shown(path), Excerpt(at), Excerpt(expected), Excerpt(got))]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The key, the tensor or the part of the file.
        at: String,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The index of a sharded checkpoint names a file that is not there.
    #[error("shard {} does not exist; the index places tensor {} in it", shown(path), Excerpt(tensor))]
    MissingShard {
        /// The absent file.
        path: PathBuf,
        /// The first tensor, by name, that the index places there.
        tensor: String,
    },
    /// The index of a sharded checkpoint places tensors in a file that does not hold them.
    #[error("shard {} does not hold what the index places in it: {}", shown(path), list(tensors.iter().map(|tensor| Excerpt(tensor)), (tensors.len(), MAX_LIST), ", "))]
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// All such tensors, by name.
        tensors: Vec<String>,
    },
    /// Tensors that a model needs are missing, or have a shape or type that it cannot take.
    #[error("{}: unusable tensors ({count}):\n  {}", shown(dir), list(problems, (*count, MAX_LIST), "\n  "))]
    Tensors {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// How many there are.
        count: usize,
        /// One entry per tensor; of very many the first ones.
        problems: Vec<TensorProblem>,
    },
    /// There is no conversion between two element types.
    #[error(
        "tensor {}: no conversion from {from} to {to}; only f32, f16 and bf16 convert into each other",
        Excerpt(name)
    )]
    Conversion {
        /// The tensor.
        name: String,
        /// Its type in the file.
        from: DType,
        /// The type that was asked for.
        to: DType,
    },
    /// Logits are not numbers, so there is no next token.
    #[error("all logits of sequence {sequence} are NaN: {}", nan_cause(*dtype))]
    NanLogits {
        /// The sequence of the session.
        sequence: usize,
        /// Type of the model's weights and activations.
        dtype: DType,
    },
}

fn nan_cause(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => {
            "a value is beyond 65504, which f16 ends at, or a weight is NaN; bf16 and f32 reach further"
        }
        _ => "a weight is infinite or NaN, or a value is beyond what its type holds",
    }
}

/// What is wrong with one tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorProblem {
    /// No file holds it.
    #[error("{}: missing{}", Excerpt(name), shape_clause(expected))]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape, where the caller stated one.
        expected: Option<Vec<usize>>,
    },
    /// Its shape is not the one that the configuration implies.
    #[error("{}: expected shape {}, got {}", Excerpt(name), dims(expected), dims(got))]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// It does not fit the other tensors of a quantised matrix, or holds what no such tensor may.
    #[error("{}: expected {}, got {}", Excerpt(name), Excerpt(expected), Excerpt(got))]
    Unfit {
        /// The tensor.
        name: String,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// Its element type is not one that can be loaded.
    #[error("{}: type {} is not supported; supported: {}", Excerpt(name), Excerpt(got), names(supported))]
    Dtype {
        /// The tensor.
        name: String,
        /// The type in the file, in the file format's spelling.
        got: String,
        /// The types that can be loaded.
        supported: &'static [DType],
    },
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        Error::Model(Box::new(error))
    }
}

impl ModelError {
    /// What is wrong with a model's files, if that is what `error` says.
    pub fn of(error: &Error) -> Option<&Self> {
        match error {
            Error::Model(error) => error.downcast_ref(),
            _ => None,
        }
    }

    /// The error for `source`, with absence told apart from other failures.
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::NotFound => ModelError::Missing { path: path.into() },
            _ => ModelError::Unreadable { path: path.into(), source },
        }
    }
}

/// Text from a file or a path for a message: without control characters, and not longer than a screen.
pub(super) struct Excerpt<'a>(pub(super) &'a str);

/// Most characters of an [`Excerpt`].
const MAX_EXCERPT: usize = 400;

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for char in chars.by_ref().take(MAX_EXCERPT) {
            // Those that control a terminal, break lines or turn the direction of writing.
            match char {
                '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => {
                    write!(f, "{}", char.escape_unicode())?;
                }
                _ if char.is_control() => write!(f, "{}", char.escape_default())?,
                _ => f.write_char(char)?,
            }
        }
        match chars.as_str().len() {
            0 => Ok(()),
            bytes => write!(f, "… ({bytes} more bytes)"),
        }
    }
}

fn shown(path: &Path) -> String {
    // A path is for finding the file: the end counts as much as the beginning.
    let text = path.to_string_lossy();
    match text.char_indices().rev().nth(MAX_EXCERPT) {
        None => Excerpt(&text).to_string(),
        Some((from, _)) => format!("…{}", Excerpt(&text[from..])),
    }
}

/// Most things that an error names.
const MAX_LIST: usize = 32;

/// The first ones of `count` things, at most `most` of them.
pub(super) fn list<T: fmt::Display>(
    items: impl IntoIterator<Item = T>,
    (count, most): (usize, usize),
    separator: &str,
) -> String {
    let mut shown: Vec<String> = items.into_iter().take(most).map(|item| item.to_string()).collect();
    if count > shown.len() {
        shown.push(format!("… and {} more", count - shown.len()));
    }
    shown.join(separator)
}

fn dims(shape: &[usize]) -> String {
    const MOST: usize = 16;
    match shape.len() {
        0..=MOST => format!("{shape:?}"),
        rank => format!("of {rank} dimensions"),
    }
}

fn shape_clause(shape: &Option<Vec<usize>>) -> String {
    shape.as_ref().map_or(String::new(), |shape| format!(", expected shape {}", dims(shape)))
}

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
}
