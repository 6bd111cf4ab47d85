//! Reference arrays from safetensors files, as the golden checkpoints hold them.

use crate::gpu::workspace_root;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// An array of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Elements, last dimension contiguous.
    pub data: Data,
}

/// The elements of an array.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 32-bit integers.
    I32(Vec<i32>),
}

impl Array {
    /// The elements, if they are floats.
    pub fn f32(&self) -> Option<&[f32]> {
        match &self.data {
            Data::F32(values) => Some(values),
            Data::I32(_) => None,
        }
    }

    /// The elements, if they are integers.
    pub fn i32(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(values) => Some(values),
            Data::F32(_) => None,
        }
    }
}

/// Why a file could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not a safetensors file.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: safetensors::SafeTensorError,
    },
    /// An array is neither f32 nor i32.
    #[error("{}: array {name} is {dtype:?}, expected F32 or I32", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The array.
        name: String,
        /// Its element type.
        dtype: Dtype,
    },
}

/// The folder of a golden checkpoint in the checkout that [`workspace_root`] finds.
pub fn folder(name: &str) -> PathBuf {
    workspace_root().join("tests/golden").join(name)
}

/// All arrays of a safetensors file.
pub fn load(path: &Path) -> Result<HashMap<String, Array>, GoldenError> {
    let path_buf = || path.to_path_buf();
    let bytes = std::fs::read(path).map_err(|source| GoldenError::Read { path: path_buf(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|source| GoldenError::Format { path: path_buf(), source })?;
    let mut arrays = HashMap::new();
    for (name, view) in file.iter() {
        // The format is little-endian.
        let words = view.data().as_chunks::<4>().0.iter().copied();
        let data = match view.dtype() {
            Dtype::F32 => Data::F32(words.map(f32::from_le_bytes).collect()),
            Dtype::I32 => Data::I32(words.map(i32::from_le_bytes).collect()),
            dtype => return Err(GoldenError::Type { path: path_buf(), name: name.to_owned(), dtype }),
        };
        arrays.insert(name.to_owned(), Array { shape: view.shape().to_vec(), data });
    }
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{TensorView, serialize};

    fn write(arrays: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let views = arrays.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        std::fs::write(dir.path().join("case.safetensors"), serialize(views, None).unwrap()).unwrap();
        dir
    }

    #[test]
    fn floats_and_integers() {
        let floats = [1.5f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let integers = (-7i32).to_le_bytes().to_vec();
        let dir = write(&[("x", Dtype::F32, vec![1, 2], floats), ("ids", Dtype::I32, vec![1], integers)]);
        let arrays = load(&dir.path().join("case.safetensors")).unwrap();
        assert_eq!(arrays.len(), 2);
        assert_eq!(arrays["x"], Array { shape: vec![1, 2], data: Data::F32(vec![1.5, -2.0]) });
        assert_eq!(arrays["ids"].i32(), Some(&[-7][..]));
        assert_eq!(arrays["ids"].f32(), None);
        assert_eq!(arrays["x"].i32(), None);
    }

    #[test]
    fn the_checked_in_cases_load() {
        let arrays = load(&folder("qwen3").join("case.safetensors")).unwrap();
        let logits = &arrays["logits"];
        assert_eq!(logits.shape.iter().product::<usize>(), logits.f32().unwrap().len());
        assert_eq!(arrays["greedy"].i32().unwrap().len(), 24);
    }

    #[test]
    fn errors_name_file_and_array() {
        let dir = write(&[("half", Dtype::F16, vec![1], vec![0, 0])]);
        let path = dir.path().join("case.safetensors");
        let message = load(&path).unwrap_err().to_string();
        assert_eq!(message, format!("{}: array half is F16, expected F32 or I32", path.display()));
        let missing = dir.path().join("none");
        assert!(load(&missing).unwrap_err().to_string().starts_with(&format!("{}: ", missing.display())));
        std::fs::write(&path, b"no such thing").unwrap();
        assert!(matches!(load(&path), Err(GoldenError::Format { .. })));
    }
}
