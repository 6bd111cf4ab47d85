//! What can be wrong with a model's files.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use abi::DType;
use host::Error;

/// A model's files cannot be used, or what it computes with them.
///
/// The paths are as the caller gave them, joined with the file's name. [`ModelError::Unsupported`] and
/// [`ModelError::UnknownModelType`] mean a sound file that this library cannot run, [`ModelError::NanLogits`] is a sampler's; the
/// others mean a missing or broken file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or directory is not there.
    #[error("{} does not exist", path.display())]
    Missing {
        /// What was looked for.
        path: PathBuf,
    },
    /// A file is there but cannot be read or mapped.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A directory holds no safetensors checkpoint.
    #[error("no weights in {}: neither model.safetensors nor model.safetensors.index.json", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A file is not valid JSON.
    #[error("{}:{line}:{column}: not valid JSON: {reason}", path.display())]
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
    #[error("{}: {field}: expected {expected}, got {got}", path.display())]
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
    #[error("{}: unknown model_type {found:?}; supported: {}", path.display(), supported.join(", "))]
    UnknownModelType {
        /// The configuration file.
        path: PathBuf,
        /// The value of `model_type`.
        found: String,
        /// The values that are built.
        supported: &'static [&'static str],
    },
    /// A field asks for something that this library does not implement.
    #[error("{}: {field}: {value} is not supported; supported: {}", path.display(), supported.join(", "))]
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
    #[error("{}: {rule}, got {got}", path.display())]
    Inconsistent {
        /// The configuration file.
        path: PathBuf,
        /// The rule that they break.
        rule: &'static str,
        /// The values.
        got: String,
    },
    /// A safetensors file is truncated or malformed.
    #[error("{} is not a valid safetensors file: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A GGUF file is truncated or malformed, or its metadata are not those of a model that is built.
    #[error("{}: {at}: expected {expected}, got {got}", path.display())]
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
    #[error("shard {} does not exist; the index places tensor {tensor} in it", path.display())]
    MissingShard {
        /// The absent file.
        path: PathBuf,
        /// The first tensor, by name, that the index places there.
        tensor: String,
    },
    /// The index of a sharded checkpoint places tensors in a file that does not hold them.
    #[error("shard {} does not hold what the index places in it: {}", path.display(), tensors.join(", "))]
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// All such tensors, by name.
        tensors: Vec<String>,
    },
    /// Tensors that a model needs are missing, or have a shape or type that it cannot take: all of them.
    #[error("{}: unusable tensors ({}):{}", dir.display(), problems.len(), list(problems))]
    Tensors {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// One entry per tensor.
        problems: Vec<TensorProblem>,
    },
    /// There is no conversion between two element types.
    #[error(
        "tensor {name}: no conversion from {from} to {to}; only f32, f16 and bf16 convert into each other"
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
    #[error("{name}: missing{}", shape_clause(expected))]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape, where the caller stated one.
        expected: Option<Vec<usize>>,
    },
    /// Its shape is not the one that the configuration implies.
    #[error("{name}: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// It does not fit the other tensors of a quantised matrix, or holds what no such tensor may.
    #[error("{name}: expected {expected}, got {got}")]
    Unfit {
        /// The tensor.
        name: String,
        /// What would have been accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// Its element type is not one that can be loaded.
    #[error("{name}: type {got} is not supported; supported: {}", names(supported))]
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

fn list(problems: &[TensorProblem]) -> String {
    problems.iter().fold(String::new(), |mut text, problem| {
        let _ = write!(text, "\n  {problem}");
        text
    })
}

fn shape_clause(shape: &Option<Vec<usize>>) -> String {
    shape.as_ref().map_or(String::new(), |shape| format!(", expected shape {shape:?}"))
}

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
}
