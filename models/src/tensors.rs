//! Tensors in safetensors files of their own.

use std::borrow::Cow;
use std::path::Path;

use abi::DType;
use host::{Element, Error, F8E4M3, Stream, Tensor};
use safetensors::{Dtype, View};

use super::weights::{DTYPES, RawFile};
use super::{ModelError, TensorProblem};

/// Writes tensors into a safetensors file, in place of one that is there.
///
/// # Errors
/// [`Error::Invalid`] for a stream of another device; [`ModelError::Unwritten`]; [`Error::Driver`].
pub fn save_tensors<'a>(
    path: &Path,
    stream: &Stream,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<(), Error> {
    let stored = tensors.into_iter().map(|(name, tensor)| Ok((name.to_owned(), Stored::of(tensor, stream)?)));
    let stored = stored.collect::<Result<Vec<_>, Error>>()?;
    let unwritten = |reason: String| ModelError::Unwritten { path: path.into(), reason };
    // A map of the format's: of two tensors of one name it would keep one.
    let mut names: Vec<&String> = stored.iter().map(|(name, _)| name).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(unwritten(format!("there are two tensors {:?}", pair[0])).into());
    }
    safetensors::serialize_to_file(stored, None, path).map_err(|error| unwritten(error.to_string()).into())
}

/// The tensors of a safetensors file, by name.
///
/// # Errors [`ModelError::Missing`], [`ModelError::Unreadable`] and [`ModelError::Safetensors`] for the file, which
/// must not be written to meanwhile; [`ModelError::Tensors`] for a type that no [`DType`] is; those of
/// [`Tensor::from_bytes`].
pub fn load_tensors(path: &Path, stream: &Stream) -> Result<Vec<(String, Tensor)>, Error> {
    let file = RawFile::open(path)?;
    let readable = |stored| (stored == Dtype::F8_E4M3).then_some(DType::F8E4M3).or_else(|| known(stored));
    let problems: Vec<TensorProblem> = file
        .tensors()
        .filter(|tensor| readable(tensor.dtype).is_none())
        .map(|tensor| TensorProblem::Dtype {
            name: tensor.name.into(),
            got: tensor.dtype.to_string(),
            supported: &DType::ALL,
        })
        .collect();
    if !problems.is_empty() {
        return Err(ModelError::Tensors { dir: path.into(), count: problems.len(), problems }.into());
    }
    file.tensors()
        .filter_map(|tensor| Some((tensor, readable(tensor.dtype)?)))
        .map(|(tensor, dtype)| {
            let loaded = Tensor::from_bytes(stream, tensor.shape, dtype, tensor.bytes)?;
            Ok((tensor.name.to_owned(), loaded))
        })
        .collect()
}

fn known(stored: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(name, _)| *name == stored).map(|&(_, dtype)| dtype)
}

/// A tensor's elements, as they are written.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn of(tensor: &Tensor, stream: &Stream) -> Result<Self, Error> {
        fn bytes<T: Element>(tensor: &Tensor, stream: &Stream) -> Result<Vec<u8>, Error> {
            Ok(bytemuck::cast_slice(&tensor.to_vec::<T>(stream)?).to_vec())
        }
        let bytes = match tensor.dtype() {
            DType::F32 => bytes::<f32>(tensor, stream),
            DType::F16 => bytes::<half::f16>(tensor, stream),
            DType::BF16 => bytes::<half::bf16>(tensor, stream),
            DType::F8E4M3 => bytes::<F8E4M3>(tensor, stream),
            DType::I8 => bytes::<i8>(tensor, stream),
            DType::I32 => bytes::<i32>(tensor, stream),
            DType::U32 => bytes::<u32>(tensor, stream),
        }?;
        let name = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype());
        let dtype = name.map_or(Dtype::F8_E4M3, |(name, _)| *name);
        Ok(Stored { dtype, shape: tensor.shape().to_vec(), bytes })
    }
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use host::Device;

    use super::*;

    #[test]
    fn what_is_saved_is_loaded() {
        let stream = Device::cpu().stream().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tensors.safetensors");
        let make = |shape: &[usize], dtype: DType| {
            let count: usize = shape.iter().product();
            let bytes: Vec<u8> = (0..count * dtype.bytes()).map(|index| (index * 37 % 251) as u8).collect();
            (Tensor::from_bytes(&stream, shape, dtype, &bytes).unwrap(), bytes)
        };
        let cases: Vec<(String, Vec<usize>, DType)> = DType::ALL
            .into_iter()
            .flat_map(|dtype| {
                [vec![2, 3], vec![], vec![0, 4], vec![7]]
                    .into_iter()
                    .map(move |shape| (format!("{dtype}.{shape:?}"), shape, dtype))
            })
            .collect();
        let made: Vec<(Tensor, Vec<u8>)> =
            cases.iter().map(|(_, shape, dtype)| make(shape, *dtype)).collect();
        let named = || cases.iter().zip(&made).map(|((name, ..), (tensor, _))| (name.as_str(), tensor));
        // Twice: a file that is there is replaced.
        save_tensors(&path, &stream, [("other", &made[0].0)]).unwrap();
        save_tensors(&path, &stream, named()).unwrap();
        let loaded = load_tensors(&path, &stream).unwrap();
        assert_eq!(loaded.len(), cases.len());
        for (name, tensor) in &loaded {
            let at = cases.iter().position(|case| case.0 == *name).expect("one of those that were saved");
            assert_eq!((tensor.shape(), tensor.dtype()), (&cases[at].1[..], cases[at].2), "{name}");
            assert_eq!(Stored::of(tensor, &stream).unwrap().bytes, made[at].1, "{name}");
        }
    }

    #[test]
    fn values_keep_their_types() {
        let stream = Device::cpu().stream().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let x = Tensor::from_slice(&stream, &[2], &[f16::from_f32(1.5), f16::NEG_INFINITY]).unwrap();
        let y = Tensor::from_slice(&stream, &[1], &[bf16::from_f32(-3.0)]).unwrap();
        save_tensors(&path, &stream, [("x", &x), ("y", &y)]).unwrap();
        let loaded = load_tensors(&path, &stream).unwrap();
        let of = |wanted| &loaded.iter().find(|(name, _)| name == wanted).unwrap().1;
        assert_eq!(of("x").to_vec::<f16>(&stream).unwrap(), [f16::from_f32(1.5), f16::NEG_INFINITY]);
        assert_eq!(of("y").to_vec::<bf16>(&stream).unwrap(), [bf16::from_f32(-3.0)]);
    }

    #[test]
    fn what_cannot_be_written_or_read_is_an_error() {
        let stream = Device::cpu().stream().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let tensor = Tensor::zeros(&stream, &[2], DType::F32).unwrap();
        let missing = folder.path().join("no/such/folder.safetensors");
        let message = save_tensors(&missing, &stream, [("x", &tensor)]).unwrap_err().to_string();
        assert!(message.contains("cannot write"), "{message}");
        let path = folder.path().join("t.safetensors");
        let twice = save_tensors(&path, &stream, [("x", &tensor), ("x", &tensor)]).unwrap_err().to_string();
        assert!(twice.contains("two tensors \"x\"") && !path.exists(), "{twice}");
        assert!(load_tensors(&path, &stream).unwrap_err().to_string().contains("does not exist"));
        std::fs::write(&path, b"short").unwrap();
        assert!(load_tensors(&path, &stream).unwrap_err().to_string().contains("not a valid safetensors"));
        let f64s = safetensors::tensor::TensorView::new(Dtype::F64, vec![1], &[0; 8]).unwrap();
        safetensors::serialize_to_file([("d", f64s)], None, &path).unwrap();
        let message = load_tensors(&path, &stream).unwrap_err().to_string();
        assert!(message.contains("d: ") && message.contains("F64"), "{message}");
    }
}
