//! GGUF files: metadata and tensors, memory-mapped and checked when they are opened.
//!
//! The limits are those of the format's reference reader; whatever breaks one is an error that names it. Nothing is
//! allocated by a number in the file: what is kept is a fraction of the bytes that were read.

mod config;
mod names;
mod vocabulary;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::Mmap;

pub(super) use config::config_json;
pub(super) use names::Named;
pub use vocabulary::GgufVocabulary;

use super::ModelError;
use super::files::open_file;
use super::quant::GgmlType;

/// Longest string, and most elements of an array.
const MAX_LENGTH: u64 = 1 << 30;
/// Longest name of a tensor, in bytes.
const MAX_NAME_BYTES: usize = 63;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 4;
/// Most files of a split checkpoint.
const MAX_SPLITS: u64 = 1 << 10;
const DEFAULT_ALIGNMENT: u64 = 32;

/// A GGUF checkpoint: one file, or the files that one was split into. The files must not be truncated or written to
/// while this value lives.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    parts: Vec<Part>,
    /// Of the first file.
    metadata: BTreeMap<String, Stored>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    bytes: Mmap,
}

#[derive(Debug)]
struct Entry {
    part: usize,
    kind: GgmlType,
    /// Outermost first; the file has them the other way round.
    shape: Vec<usize>,
    /// Within the file. In bounds.
    bytes: Range<usize>,
    /// Whether somebody has asked for it.
    is_used: AtomicBool,
}

/// A value of the metadata, where it lies. In bounds.
#[derive(Clone, Debug)]
enum Stored {
    Scalar(Scalar),
    Text(Range<usize>),
    List { kind: Kind, len: usize, bytes: Range<usize> },
}

/// A number or a truth value of the metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scalar {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    fn of(id: u32) -> Option<Kind> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::List,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        KINDS.get(id as usize).copied()
    }

    /// Of a number.
    fn bytes(self) -> Option<usize> {
        Some(match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 => 8,
            Kind::Text | Kind::List => return None,
        })
    }

    /// A number of as many bytes as it has.
    fn scalar(self, bytes: &[u8]) -> Scalar {
        let wide = bytes.iter().rev().fold(0u64, |wide, &byte| wide << 8 | u64::from(byte));
        match self {
            Kind::I8 => Scalar::Signed(i64::from(wide as i8)),
            Kind::I16 => Scalar::Signed(i64::from(wide as i16)),
            Kind::I32 => Scalar::Signed(i64::from(wide as i32)),
            Kind::I64 => Scalar::Signed(wide as i64),
            Kind::F32 => Scalar::Float(f64::from(f32::from_bits(wide as u32))),
            Kind::F64 => Scalar::Float(f64::from_bits(wide)),
            Kind::Bool => Scalar::Bool(wide != 0),
            _ => Scalar::Unsigned(wide),
        }
    }
}

/// A tensor of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgufTensor<'a> {
    pub(super) name: &'a str,
    pub(super) kind: GgmlType,
    /// Outermost first.
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

/// What is wrong with a file: where, what is expected there, what was found.
struct Fault {
    at: String,
    expected: String,
    got: String,
}

fn fault<T>(at: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Result<T, Fault> {
    Err(Fault { at: at.into(), expected: expected.into(), got: got.to_string() })
}

/// Reads forward.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], Fault> {
        match self.bytes.get(self.at..).and_then(|rest| rest.get(..len)) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => fault(
                what,
                format!("{len} bytes"),
                format!("the file's end after {}", self.bytes.len() - self.at),
            ),
        }
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        let (low, high) = (self.u32(what)?, self.u32(what)?);
        Ok(u64::from(high) << 32 | u64::from(low))
    }

    /// The bytes of a string, where they are.
    fn text(&mut self, what: &str) -> Result<Range<usize>, Fault> {
        let len = self.u64(what)?;
        if len > MAX_LENGTH {
            return fault(what, format!("a string of at most {MAX_LENGTH} bytes"), len);
        }
        let start = self.at;
        self.take(len as usize, what)?;
        Ok(start..self.at)
    }

    fn name(&mut self, what: &str) -> Result<&'a str, Fault> {
        let range = self.text(what)?;
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(name) => Ok(name),
            Err(_) => fault(what, "UTF-8", format!("other bytes at {}", range.start)),
        }
    }

    fn kind(&mut self, what: &str) -> Result<Kind, Fault> {
        let id = self.u32(what)?;
        match Kind::of(id) {
            Some(kind) => Ok(kind),
            None => fault(what, "a type from 0 to 12", id),
        }
    }

    fn value(&mut self, key: &str) -> Result<Stored, Fault> {
        let kind = self.kind(key)?;
        if let Some(bytes) = kind.bytes() {
            return Ok(Stored::Scalar(kind.scalar(self.take(bytes, key)?)));
        }
        if kind == Kind::Text {
            return Ok(Stored::Text(self.text(key)?));
        }
        let kind = self.kind(key)?;
        let len = self.u64(key)?;
        if len > MAX_LENGTH {
            return fault(key, format!("an array of at most {MAX_LENGTH} elements"), len);
        }
        let len = len as usize;
        let start = self.at;
        match kind.bytes() {
            // Below 2^33 bytes.
            Some(bytes) => {
                self.take(len.saturating_mul(bytes), key)?;
            }
            None if kind == Kind::Text => {
                for _ in 0..len {
                    self.text(key)?;
                }
            }
            None => return fault(key, "an array of numbers or strings", "an array of arrays"),
        }
        Ok(Stored::List { kind, len, bytes: start..self.at })
    }
}

impl Gguf {
    /// Opens a file, and with it those that it was split into.
    ///
    /// # Errors
    /// [`ModelError::Missing`] and [`ModelError::Unreadable`] for absent files, [`ModelError::Gguf`] for what breaks
    /// the format.
    pub fn open(path: &Path) -> Result<Gguf, ModelError> {
        let mut gguf = Gguf {
            path: path.into(),
            parts: Vec::new(),
            metadata: BTreeMap::new(),
            tensors: BTreeMap::new(),
        };
        gguf.metadata = gguf.add(path)?;
        let splits = match gguf.metadata.get("split.count") {
            Some(Stored::Scalar(Scalar::Unsigned(count))) => *count,
            _ => 1,
        };
        if splits > 1 {
            for path in gguf.split_paths(splits)? {
                gguf.add(&path)?;
            }
        }
        Ok(gguf)
    }

    /// The other files, where this is the first of so many: `name-00001-of-00003.gguf`.
    fn split_paths(&self, splits: u64) -> Result<Vec<PathBuf>, ModelError> {
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let suffix = format!("-00001-of-{splits:05}.gguf");
        match name.strip_suffix(&suffix) {
            Some(name) if splits <= MAX_SPLITS => Ok((2..=splits)
                .map(|number| self.path.with_file_name(format!("{name}-{number:05}-of-{splits:05}.gguf")))
                .collect()),
            _ => {
                let expected = format!("the first file, which ends in {suffix}, of at most {MAX_SPLITS}");
                Err(self.error("split.count", expected, name))
            }
        }
    }

    /// Maps a file and takes its tensors; gives its metadata.
    fn add(&mut self, path: &Path) -> Result<BTreeMap<String, Stored>, ModelError> {
        let handle = open_file(path)?;
        // SAFETY: the file is not truncated or written to while it is mapped — required of the caller by the
        // documentation of `Gguf`; a file system cannot promise it.
        let bytes = unsafe { Mmap::map(&handle) }.map_err(|source| ModelError::io(path, source))?;
        let part = self.parts.len();
        let (metadata, tensors) = read(&bytes, part).map_err(|Fault { at, expected, got }| {
            ModelError::Gguf { path: path.into(), at, expected, got }
        })?;
        for (name, entry) in tensors {
            if self.tensors.contains_key(&name) {
                let (expected, got) = ("a name that no other file has".into(), "it again".into());
                return Err(ModelError::Gguf { path: path.into(), at: name, expected, got });
            }
            self.tensors.insert(name, entry);
        }
        self.parts.push(Part { path: path.into(), bytes });
        Ok(metadata)
    }

    /// Where it is: the first file, if it was split.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The keys of the metadata, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// A string of the metadata; none if the key is absent.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] if the value is of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::Text(range)) => match std::str::from_utf8(&self.parts[0].bytes[range.clone()]) {
                Ok(text) => Ok(Some(text)),
                Err(_) => Err(self.error(key, "UTF-8", "other bytes")),
            },
            Some(other) => Err(self.error(key, "a string", other)),
        }
    }

    /// A number without sign; none if the key is absent.
    ///
    /// # Errors
    /// As [`Gguf::text`].
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::Scalar(Scalar::Unsigned(value))) => Ok(Some(*value)),
            Some(&Stored::Scalar(Scalar::Signed(value))) if value >= 0 => Ok(Some(value as u64)),
            Some(other) => Err(self.error(key, "a number without sign", other)),
        }
    }

    /// A float that is finite; none if the key is absent.
    ///
    /// # Errors
    /// As [`Gguf::text`].
    pub fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::Scalar(Scalar::Float(value))) if value.is_finite() => Ok(Some(*value)),
            Some(other) => Err(self.error(key, "a finite float", other)),
        }
    }

    /// A truth value; none if the key is absent.
    ///
    /// # Errors
    /// As [`Gguf::text`].
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::Scalar(Scalar::Bool(value))) => Ok(Some(*value)),
            Some(other) => Err(self.error(key, "true or false", other)),
        }
    }

    /// A list of strings; none if the key is absent.
    ///
    /// # Errors
    /// As [`Gguf::text`].
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::List { kind: Kind::Text, len, bytes }) => {
                let mut reader = Reader { bytes: &self.parts[0].bytes, at: bytes.start };
                let texts: Result<Vec<&str>, Fault> = (0..*len).map(|_| reader.name(key)).collect();
                texts.map(Some).map_err(|fault| self.error(key, fault.expected, fault.got))
            }
            Some(other) => Err(self.error(key, "a list of strings", other)),
        }
    }

    /// A list of integers; none if the key is absent.
    ///
    /// # Errors
    /// As [`Gguf::text`].
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        let Some(scalars) = self.scalars(key, "a list of integers")? else { return Ok(None) };
        let integer = |scalar: Scalar| match scalar {
            Scalar::Unsigned(value) => i64::try_from(value).ok(),
            Scalar::Signed(value) => Some(value),
            Scalar::Bool(value) => Some(i64::from(value)),
            Scalar::Float(_) => None,
        };
        let integers: Option<Vec<i64>> = scalars.map(integer).collect();
        integers.map(Some).ok_or_else(|| self.error(key, "a list of integers", "others"))
    }

    fn scalars<'s>(
        &'s self,
        key: &str,
        expected: &str,
    ) -> Result<Option<impl Iterator<Item = Scalar> + 's>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Stored::List { kind, bytes, .. }) if kind.bytes().is_some() => {
                let kind = *kind;
                let bytes = &self.parts[0].bytes[bytes.clone()];
                Ok(Some(bytes.chunks_exact(kind.bytes().unwrap_or(1)).map(move |bytes| kind.scalar(bytes))))
            }
            Some(other) => Err(self.error(key, expected, other)),
        }
    }

    /// The names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor, outermost dimension first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| entry.shape.as_slice())
    }

    /// The names of those that nobody has asked for yet, in order.
    pub(super) fn unused(&self) -> impl Iterator<Item = &str> {
        let unused = self.tensors.iter().filter(|(_, entry)| !entry.is_used.load(Ordering::Relaxed));
        unused.map(|(name, _)| name.as_str())
    }

    /// A tensor, with the name as the file has it; none if it is not there.
    pub(super) fn tensor(&self, name: &str) -> Option<GgufTensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        entry.is_used.store(true, Ordering::Relaxed);
        let bytes = &self.parts[entry.part].bytes[entry.bytes.clone()];
        Some(GgufTensor { name, kind: entry.kind, shape: &entry.shape, bytes })
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes.len()).sum()
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    pub(super) fn error(&self, at: &str, expected: impl Into<String>, got: impl ToString) -> ModelError {
        ModelError::Gguf {
            path: self.path.clone(),
            at: at.into(),
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stored::Scalar(Scalar::Unsigned(value)) => write!(f, "{value}"),
            Stored::Scalar(Scalar::Signed(value)) => write!(f, "{value}"),
            Stored::Scalar(Scalar::Float(value)) => write!(f, "{value}"),
            Stored::Scalar(Scalar::Bool(value)) => write!(f, "{value}"),
            Stored::Text(range) => write!(f, "a string of {} bytes", range.len()),
            Stored::List { kind, len, .. } => write!(f, "a list of {len} elements of type {kind:?}"),
        }
    }
}

/// Metadata, and tensors that are in file number `part`.
type Contents = (BTreeMap<String, Stored>, BTreeMap<String, Entry>);

fn read(bytes: &[u8], part: usize) -> Result<Contents, Fault> {
    let mut reader = Reader { bytes, at: 0 };
    let magic = reader.take(4, "the magic number")?;
    if magic != b"GGUF" {
        return fault("the magic number", "GGUF", format!("{magic:?}"));
    }
    match reader.u32("the version")? {
        3 | 2 => {}
        version if version & 0xffff == 0 => {
            return fault(
                "the version",
                "3 in little-endian order",
                format!("{version:#x}, of another byte order"),
            );
        }
        version => return fault("the version", "2 or 3", version),
    }
    let (num_tensors, num_keys) = (reader.u64("the number of tensors")?, reader.u64("the number of keys")?);
    // A key, its type and a byte; a name, a number of dimensions, a type and an offset.
    for (what, count, least) in
        [("the number of tensors", num_tensors, 24), ("the number of keys", num_keys, 13)]
    {
        if count.checked_mul(least).is_none_or(|least| least > bytes.len() as u64) {
            return fault(what, format!("as many as fit into {} bytes", bytes.len()), count);
        }
    }
    let mut metadata = BTreeMap::new();
    for index in 0..num_keys {
        let key = reader.name(&format!("key {index}"))?;
        let value = reader.value(key)?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return fault(key, "a key that is there once", "it again");
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(Stored::Scalar(Scalar::Unsigned(alignment)))
            if alignment.is_power_of_two() && *alignment <= 1 << 31 =>
        {
            *alignment
        }
        Some(other) => return fault("general.alignment", "a power of two below 2^32", other),
    };
    let aligned = |bytes: u64| bytes.checked_next_multiple_of(alignment);
    let mut infos = Vec::new();
    let mut expected_offset = 0u64;
    for index in 0..num_tensors {
        let name = reader.name(&format!("the name of tensor {index}"))?;
        if name.len() > MAX_NAME_BYTES {
            return fault(name, format!("a name of at most {MAX_NAME_BYTES} bytes"), name.len());
        }
        let num_dims = reader.u32(name)? as usize;
        if num_dims > MAX_DIMS {
            return fault(name, format!("at most {MAX_DIMS} dimensions"), num_dims);
        }
        let mut shape = Vec::with_capacity(num_dims);
        for _ in 0..num_dims {
            let size = reader.u64(name)?;
            match usize::try_from(size).ok().filter(|&size| size <= i64::MAX as usize) {
                Some(size) => shape.push(size),
                None => return fault(name, "sizes below 2^63", size),
            }
        }
        shape.reverse();
        let id = reader.u32(name)?;
        let offset = reader.u64(name)?;
        if offset != expected_offset {
            return fault(name, format!("its data at {expected_offset}, behind the tensor before"), offset);
        }
        // Without its size nothing behind it can be found either.
        let Some(kind) = GgmlType::of(id) else {
            return fault(name, format!("one of the types {}", GgmlType::READABLE), GgmlType::name_of(id));
        };
        let Some(len) = data_bytes(kind, &shape) else {
            let expected =
                format!("rows of whole blocks of {}, and a size that can be counted", kind.block().0);
            return fault(name, expected, format!("{} {shape:?}", GgmlType::name_of(id)));
        };
        match offset.checked_add(len).and_then(aligned) {
            Some(next) => expected_offset = next,
            None => return fault(name, "an end below 2^64", format!("{offset} + {len}")),
        }
        infos.push((name, kind, shape, offset, len));
    }
    let start = match aligned(reader.at as u64) {
        Some(start) => start,
        None => return fault("the data", "a beginning below 2^64", reader.at),
    };
    let mut tensors = BTreeMap::new();
    for (name, kind, shape, offset, len) in infos {
        let range = start.checked_add(offset).and_then(|from| Some((from, from.checked_add(len)?)));
        let Some((from, to)) = range.filter(|&(_, to)| to <= bytes.len() as u64) else {
            let end = bytes.len() as u64 - start.min(bytes.len() as u64);
            return fault(
                name,
                format!("data up to byte {} of the data section", offset.saturating_add(len)),
                format!("its end at {end}"),
            );
        };
        let bytes = from as usize..to as usize;
        let entry = Entry { part, kind, shape, bytes, is_used: AtomicBool::new(false) };
        if tensors.insert(name.to_owned(), entry).is_some() {
            return fault(name, "a tensor that is there once", "it again");
        }
    }
    Ok((metadata, tensors))
}

/// Bytes of a tensor; none if it has no whole blocks, or they are too many.
fn data_bytes(kind: GgmlType, shape: &[usize]) -> Option<u64> {
    let (&k, outer) = shape.split_last().unwrap_or((&1, &[]));
    let rows = outer.iter().try_fold(1usize, |rows, &size| rows.checked_mul(size))?;
    Some(kind.row_bytes(k)?.checked_mul(rows)? as u64)
}
