//! The tensors of a safetensors checkpoint, memory-mapped and validated when it is opened.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use abi::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::config::{parse_json, read_text};
use super::files::open_file;
use super::quant::RawTensor;
use super::{ModelError, TensorProblem};

const _: () =
    assert!(cfg!(target_endian = "little"), "tensor bytes are little-endian and are not swapped here");

/// Bytes of the header's length, in front of the header.
const PREFIX_BYTES: usize = size_of::<u64>();
/// The format's limit on the header.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// Largest index of a sharded checkpoint, in bytes: those of a hundred thousand tensors have a quarter of it.
const MAX_INDEX_BYTES: u64 = 1 << 26;
/// Of very many unusable tensors, so many are kept by name.
pub(super) const MAX_PROBLEMS: usize = 1 << 10;
/// Elements that one task converts: large enough to hide the cost of a task.
const TASK_ELEMS: usize = 1 << 16;
/// Elements that are converted at a time, through the stack.
const BLOCK_ELEMS: usize = 1024;

/// The element types that can be read, and their spelling in the file format.
pub(super) const DTYPES: [(Dtype, DType); 6] = [
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::I8, DType::I8),
    (Dtype::I32, DType::I32),
    (Dtype::U32, DType::U32),
];
const READABLE: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::I8, DType::I32, DType::U32];

/// The tensors of one checkpoint.
///
/// The files are memory-mapped, so opening reads only their headers and the system may drop pages again after use. They
/// must not be truncated or written to while this value lives: an access behind a new end of file kills the process,
/// and changed bytes change the tensors.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    /// Of the files, as many.
    paths: Vec<PathBuf>,
    files: Vec<Mmap>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Index into `Weights::files`.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Within the file. In bounds: established by `read_header`.
    bytes: Range<usize>,
    /// Whether somebody has asked for it.
    is_used: AtomicBool,
}

/// One tensor as it lies in the file: row-major, little-endian.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct TensorData<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions, outermost first; none for a scalar.
    pub shape: &'a [usize],
    /// Its elements, possibly not aligned for the type.
    pub bytes: &'a [u8],
}

/// Collects the tensors that a model needs, to report everything that is wrong at once and before anything is loaded.
#[derive(Debug)]
pub struct Requirements<'a> {
    weights: &'a Weights,
    count: usize,
    problems: Vec<TensorProblem>,
}

impl Weights {
    /// Opens the checkpoint in `dir`: `model.safetensors`, or else the shards that `model.safetensors.index.json`
    /// names.
    ///
    /// Headers, offsets and file lengths are validated here; tensor values are not looked at. In a sharded checkpoint
    /// only the tensors that the index lists exist.
    ///
    /// # Errors
    /// [`ModelError::Missing`], [`ModelError::NoWeights`] and [`ModelError::Unreadable`] for absent files;
    /// [`ModelError::Safetensors`] for truncated or malformed ones; [`ModelError::Json`] and [`ModelError::Field`] for
    /// a bad index; [`ModelError::MissingShard`] and [`ModelError::NotInShard`] where the index and the files disagree.
    pub fn open(dir: &Path) -> Result<Weights, ModelError> {
        let exists = |path: &Path| path.try_exists().map_err(|source| ModelError::io(path, source));
        if !exists(dir)? {
            return Err(ModelError::Missing { path: dir.into() });
        }
        let single = dir.join("model.safetensors");
        if exists(&single)? {
            let (file, tensors) = map(&single, 0)?;
            return Ok(Weights { dir: dir.into(), paths: vec![single], files: vec![file], tensors });
        }
        let index = dir.join("model.safetensors.index.json");
        if exists(&index)? {
            Weights::open_sharded(dir, &index)
        } else {
            Err(ModelError::NoWeights { dir: dir.into() })
        }
    }

    /// The tensors of one safetensors file. **Errors**: as [`Self::open`].
    pub(super) fn open_file(path: &Path) -> Result<Weights, ModelError> {
        let (file, tensors) = map(path, 0)?;
        let dir = path.parent().unwrap_or(path).into();
        Ok(Weights { dir, paths: vec![path.into()], files: vec![file], tensors })
    }

    fn open_sharded(dir: &Path, index: &Path) -> Result<Weights, ModelError> {
        let (mut paths, mut files) = (Vec::new(), Vec::new());
        let mut tensors = BTreeMap::new();
        for (shard, names) in read_index(index)? {
            let path = dir.join(shard);
            let (file, mut held) = map(&path, files.len()).map_err(|error| match error {
                ModelError::Missing { path } => ModelError::MissingShard { path, tensor: names[0].clone() },
                other => other,
            })?;
            let (found, absent): (Vec<_>, Vec<_>) =
                names.into_iter().partition(|name| held.contains_key(name));
            if !absent.is_empty() {
                return Err(ModelError::NotInShard { path, tensors: absent });
            }
            files.push(file);
            paths.push(path);
            tensors.extend(found.into_iter().filter_map(|name| held.remove_entry(&name)));
        }
        Ok(Weights { dir: dir.into(), paths, files, tensors })
    }

    /// The names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The names of all tensors, and whether they are of floats that are not quantised.
    pub(super) fn types(&self) -> impl Iterator<Item = (&str, bool)> {
        let is_float =
            |entry: &Entry| matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        self.tensors.iter().map(move |(name, entry)| (name.as_str(), is_float(entry)))
    }

    /// The files.
    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The tensors of a file, by its place among the paths, in the order of their names.
    pub(super) fn of_file(&self, file: usize) -> impl Iterator<Item = RawTensor<'_>> {
        let own = self.tensors.iter().filter(move |(_, entry)| entry.file == file);
        own.map(|(name, entry)| RawTensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.files[entry.file][entry.bytes.clone()],
        })
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The names of those that nobody has asked for yet, in order.
    pub(super) fn unused(&self) -> impl Iterator<Item = &str> {
        let unused = self.tensors.iter().filter(|(_, entry)| !entry.is_used.load(Ordering::Relaxed));
        unused.map(|(name, _)| name.as_str())
    }

    /// Whether two names are of tensors of the same type, shape and elements, which have been asked for then.
    pub(super) fn is_same(&self, first: &str, second: &str) -> bool {
        let entry = |name| self.tensors.get(name);
        let (Some(first), Some(second)) = (entry(first), entry(second)) else { return false };
        let bytes = |entry: &Entry| &self.files[entry.file][entry.bytes.clone()];
        let is_same =
            first.dtype == second.dtype && first.shape == second.shape && bytes(first) == bytes(second);
        if is_same {
            first.is_used.store(true, Ordering::Relaxed);
            second.is_used.store(true, Ordering::Relaxed);
        }
        is_same
    }

    /// Size of all tensors as stored, in bytes.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(|entry| entry.bytes.len()).sum()
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`ModelError::Tensors`] if it is missing or its element type has no [`DType`].
    pub fn get(&self, name: &str) -> Result<TensorData<'_>, ModelError> {
        let Some((name, entry)) = self.tensors.get_key_value(name) else {
            return Err(self.unusable(1, vec![TensorProblem::Missing { name: name.into(), expected: None }]));
        };
        entry.is_used.store(true, Ordering::Relaxed);
        match entry.readable() {
            Some(dtype) => Ok(TensorData {
                name,
                dtype,
                shape: &entry.shape,
                bytes: &self.files[entry.file][entry.bytes.clone()],
            }),
            None => Err(self.unusable(1, vec![entry.dtype_problem(name, &READABLE)])),
        }
    }

    /// The tensor `name`, of whatever type.
    pub(super) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        entry.is_used.store(true, Ordering::Relaxed);
        let bytes = &self.files[entry.file][entry.bytes.clone()];
        Some(RawTensor { name, dtype: entry.dtype, shape: &entry.shape, bytes })
    }

    /// Starts a list of required tensors.
    pub fn require(&self) -> Requirements<'_> {
        Requirements { weights: self, count: 0, problems: Vec::new() }
    }

    fn unusable(&self, count: usize, problems: Vec<TensorProblem>) -> ModelError {
        ModelError::Tensors { dir: self.dir.clone(), count, problems }
    }
}

impl Entry {
    fn readable(&self) -> Option<DType> {
        DTYPES.iter().find(|(stored, _)| *stored == self.dtype).map(|(_, dtype)| *dtype)
    }

    fn dtype_problem(&self, name: &str, supported: &'static [DType]) -> TensorProblem {
        TensorProblem::Dtype { name: name.into(), got: self.dtype.to_string(), supported }
    }
}

impl Requirements<'_> {
    /// Requires the tensor `name` with this shape and one of the types [`DType::FLOATS`].
    pub fn tensor(&mut self, name: impl Into<String>, shape: &[usize]) -> &mut Self {
        let name = name.into();
        let problem = match self.weights.tensors.get(&name) {
            None => TensorProblem::Missing { name, expected: Some(shape.into()) },
            Some(entry) if entry.shape != shape => {
                TensorProblem::Shape { name, expected: shape.into(), got: entry.shape.clone() }
            }
            Some(entry) if !entry.readable().is_some_and(DType::is_float) => {
                entry.dtype_problem(&name, &DType::FLOATS)
            }
            Some(_) => return self,
        };
        self.count += 1;
        if self.count <= MAX_PROBLEMS {
            self.problems.push(problem);
        }
        self
    }

    /// Ends the list.
    ///
    /// # Errors
    /// [`ModelError::Tensors`] with every required tensor that is missing or does not fit, of very many with the first
    /// ones.
    pub fn finish(self) -> Result<(), ModelError> {
        if self.count == 0 { Ok(()) } else { Err(self.weights.unusable(self.count, self.problems)) }
    }
}

impl<'a> TensorData<'a> {
    /// The elements as f32. Exact: f32 holds every f16 and bf16 value.
    ///
    /// # Errors
    /// [`ModelError::Conversion`] for an integer tensor.
    pub fn to_f32(&self) -> Result<Vec<f32>, ModelError> {
        self.check_conversion(DType::F32)?;
        let mut out = vec![0.0; self.bytes.len() / self.dtype.bytes()];
        out.par_chunks_mut(TASK_ELEMS)
            .zip(self.bytes.par_chunks(TASK_ELEMS * self.dtype.bytes()))
            .for_each(|(out, bytes)| decode(self.dtype, bytes, out));
        Ok(out)
    }

    /// The elements as `dtype`, little-endian. Borrows if that is the stored type; otherwise rounds to nearest, ties to
    /// even, and overflows to infinity.
    ///
    /// # Errors
    /// [`ModelError::Conversion`] unless the types are equal or both among [`DType::FLOATS`].
    pub fn convert(&self, dtype: DType) -> Result<Cow<'a, [u8]>, ModelError> {
        if dtype == self.dtype {
            return Ok(Cow::Borrowed(self.bytes));
        }
        self.check_conversion(dtype)?;
        let mut out = vec![0; self.bytes.len() / self.dtype.bytes() * dtype.bytes()];
        out.par_chunks_mut(TASK_ELEMS * dtype.bytes())
            .zip(self.bytes.par_chunks(TASK_ELEMS * self.dtype.bytes()))
            .for_each(|(out, bytes)| transcode(self.dtype, bytes, dtype, out));
        Ok(Cow::Owned(out))
    }

    fn check_conversion(&self, to: DType) -> Result<(), ModelError> {
        if self.dtype.is_float() && to.is_float() {
            Ok(())
        } else {
            Err(ModelError::Conversion { name: self.name.into(), from: self.dtype, to })
        }
    }
}

impl std::fmt::Debug for TensorData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TensorData { name, dtype, shape, bytes } = self;
        write!(f, "TensorData({name}: {dtype} {shape:?}, {} bytes)", bytes.len())
    }
}

/// A safetensors file by itself.
pub(super) struct RawFile {
    bytes: Mmap,
    tensors: BTreeMap<String, Entry>,
}

impl RawFile {
    /// Maps it, and validates its header.
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let (bytes, tensors) = map(path, 0)?;
        Ok(RawFile { bytes, tensors })
    }

    /// Its tensors by name, in order.
    pub(super) fn tensors(&self) -> impl Iterator<Item = RawTensor<'_>> {
        self.tensors.iter().map(|(name, entry)| RawTensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.bytes[entry.bytes.clone()],
        })
    }
}

/// Maps a file and reads its header; the entries say that it is file number `file`.
fn map(path: &Path, file: usize) -> Result<(Mmap, BTreeMap<String, Entry>), ModelError> {
    let handle = open_file(path)?;
    // SAFETY: the file is not truncated or written to while it is mapped — required of the caller by the documentation
    // of `Weights`; a file system cannot promise it.
    let bytes = unsafe { Mmap::map(&handle) }.map_err(|source| ModelError::io(path, source))?;
    let entries =
        read_header(&bytes, file).map_err(|reason| ModelError::Safetensors { path: path.into(), reason })?;
    Ok((bytes, entries))
}

/// The entries of a safetensors file, every byte range within `bytes`.
///
/// The `safetensors` crate checks that the ranges follow each other without gaps and fit shapes and types. The length
/// of the file is compared here, with checked additions: a crafted header can make the crate's own sum wrap around.
fn read_header(bytes: &[u8], file: usize) -> Result<BTreeMap<String, Entry>, String> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(format!("{} bytes are too few for the header's length", bytes.len()));
    };
    let header_bytes = usize::try_from(u64::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(format!("the header claims {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}"));
    }
    let Some((header, data)) = rest.split_at_checked(header_bytes) else {
        return Err(format!("truncated: the header claims {header_bytes} bytes, {} follow", rest.len()));
    };
    let malformed = |error| format!("malformed header: {error}");
    let metadata: Metadata = serde_json::from_slice(header).map_err(malformed)?;
    if let Repeated(Some(name)) = serde_json::from_slice(header).map_err(malformed)? {
        return Err(format!("malformed header: two tensors are named {name}"));
    }
    if metadata.data_len() != data.len() {
        let kind =
            if metadata.data_len() > data.len() { "truncated" } else { "bytes behind the last tensor" };
        return Err(format!(
            "{kind}: the header describes {} bytes of tensors, {} follow it",
            metadata.data_len(),
            data.len()
        ));
    }
    let start = PREFIX_BYTES + header_bytes;
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (from, to) = info.data_offsets;
        (
            name,
            Entry {
                file,
                dtype: info.dtype,
                shape: info.shape.clone(),
                bytes: start + from..start + to,
                is_used: AtomicBool::new(false),
            },
        )
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}

/// The first key of an object that is there twice, if one is: a map would keep one of the two.
struct Repeated(Option<String>);

impl<'de> Deserialize<'de> for Repeated {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Repeated;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Repeated, A::Error> {
                let (mut keys, mut repeated) = (HashSet::new(), None);
                while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if keys.contains(&key) {
                        repeated.get_or_insert(key);
                    } else {
                        keys.insert(key);
                    }
                }
                Ok(Repeated(repeated))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// The part of an index whose keys must be distinct.
#[derive(Deserialize)]
struct IndexKeys {
    weight_map: Repeated,
}

/// The tensors of each shard, both in order of their names.
fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    let field = |field: String, expected: &str, got: Option<&serde_json::Value>| ModelError::Field {
        path: path.into(),
        field,
        expected: expected.into(),
        got: got.map_or("nothing".into(), |value| value.to_string()),
    };
    let text = read_text(path, MAX_INDEX_BYTES)?;
    let index: serde_json::Value = parse_json(&text, path)?;
    let map = index.get("weight_map");
    let Some(map) = map.and_then(|map| map.as_object()) else {
        return Err(field("weight_map".into(), "an object", map));
    };
    if let IndexKeys { weight_map: Repeated(Some(tensor)) } = parse_json(&text, path)? {
        return Err(ModelError::Field {
            path: path.into(),
            field: format!("weight_map.{tensor}"),
            expected: "each tensor once".into(),
            got: "it twice".into(),
        });
    }
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in map {
        // A shard is a plain file beside the index: no path may lead out of the directory.
        let Some(name) = shard.as_str().filter(|name| is_file_name(name)) else {
            return Err(field(
                format!("weight_map.{tensor}"),
                "the name of a file in the same directory",
                Some(shard),
            ));
        };
        shards.entry(name.into()).or_default().push(tensor.clone());
    }
    shards.values_mut().for_each(|tensors| tensors.sort());
    Ok(shards)
}

fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// Converts elements of a floating-point type to f32.
pub(super) fn decode(from: DType, bytes: &[u8], out: &mut [f32]) {
    match from {
        DType::F16 => decode_half::<f16>(bytes, out),
        DType::BF16 => decode_half::<bf16>(bytes, out),
        _ => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
    }
}

/// Converts f32 to elements of a floating-point type.
pub(super) fn encode(values: &[f32], to: DType, out: &mut [u8]) {
    match to {
        DType::F16 => encode_half::<f16>(values, out),
        DType::BF16 => encode_half::<bf16>(values, out),
        _ => out.copy_from_slice(bytemuck::cast_slice(values)),
    }
}

pub(super) fn transcode(from: DType, bytes: &[u8], to: DType, out: &mut [u8]) {
    let mut block = [0.0; BLOCK_ELEMS];
    for (bytes, out) in bytes.chunks(BLOCK_ELEMS * from.bytes()).zip(out.chunks_mut(BLOCK_ELEMS * to.bytes()))
    {
        let values = &mut block[..bytes.len() / from.bytes()];
        decode(from, bytes, values);
        encode(values, to, out);
    }
}

/// Goes through an aligned block, because the bytes in a file need not be aligned.
fn decode_half<T: bytemuck::Pod>(bytes: &[u8], out: &mut [f32])
where
    [T]: HalfFloatSliceExt,
{
    let mut block = [T::zeroed(); BLOCK_ELEMS];
    for (bytes, out) in bytes.chunks(BLOCK_ELEMS * size_of::<T>()).zip(out.chunks_mut(BLOCK_ELEMS)) {
        let halves = &mut block[..out.len()];
        bytemuck::cast_slice_mut(halves).copy_from_slice(bytes);
        halves.convert_to_f32_slice(out);
    }
}

fn encode_half<T: bytemuck::Pod>(values: &[f32], out: &mut [u8])
where
    [T]: HalfFloatSliceExt,
{
    let mut block = [T::zeroed(); BLOCK_ELEMS];
    for (values, out) in values.chunks(BLOCK_ELEMS).zip(out.chunks_mut(BLOCK_ELEMS * size_of::<T>())) {
        let halves = &mut block[..values.len()];
        halves.convert_from_f32_slice(values);
        out.copy_from_slice(bytemuck::cast_slice(halves));
    }
}

#[cfg(test)]
mod tests;
