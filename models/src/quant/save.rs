//! Quantised checkpoints written: compressed-tensors in safetensors, as transformers reads them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use abi::DType;
use host::Error;
use host::weight::{Codes, QuantErrors, Quantised, ScaleType, Scheme, WeightSource};
use rayon::prelude::*;
use safetensors::{Dtype, View};
use serde_json::{Value, json};

use crate::checkpoint::Data;
use crate::config::{MAX_CONFIG_BYTES, parse_json, read_text};
use crate::loader::{ListedExperts, LoadProgress, Progress, tell};
use crate::weights::{DTYPES, Weights};
use crate::{Checkpoint, ModelError};

use super::{RawTensor, of_tensor};

const OP: &str = "save_quantised";
/// What tensors of modules are called.
const WEIGHT: &str = ".weight";
/// The name of a file with all weights.
const WHOLE: &str = "model.safetensors";
/// Of experts that lie in one tensor and stay there.
const NO_FORM: &str = "all experts in one tensor, for which compressed-tensors has no form";
/// Endings of files that hold weights.
const WEIGHT_FILES: [&str; 8] = ["safetensors", "bin", "pt", "pth", "gguf", "onnx", "msgpack", "h5"];

/// What quantising has done to a checkpoint's tensors, or to a model's weights.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct QuantReport {
    /// Those that were quantised, in the order of their names.
    pub tensors: Vec<QuantisedTensor>,
    /// Matrices that a model multiplies by and that stay as they are, with the reason.
    pub kept: Vec<(String, String)>,
    /// Bytes of all tensors before.
    pub bytes_before: u64,
    /// And after.
    pub bytes_after: u64,
}

/// A tensor that was quantised.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantisedTensor {
    /// Its name in the file; of an expert that lay in a tensor with others, the name that it has by itself.
    pub name: String,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// How far its values are from what they were.
    pub errors: QuantErrors,
    /// Its bytes before, of an expert its part of that tensor's.
    pub bytes_before: u64,
    /// And after, with scales and what else belongs to it.
    pub bytes_after: u64,
}

/// A table: a line for each tensor, those that stay, and a sum.
impl fmt::Display for QuantReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0).max(6);
        writeln!(
            f,
            "{:width$}  {:>13}  {:>9}  {:>9}  {:>12}  {:>12}",
            "tensor", "shape", "error", "largest", "bytes before", "after"
        )?;
        for QuantisedTensor { name, shape: [n, k], errors, bytes_before, bytes_after } in &self.tensors {
            let shape = format!("{n} × {k}");
            let [error, largest] = [errors.relative, errors.largest].map(|error| 100.0 * error);
            writeln!(
                f,
                "{name:width$}  {shape:>13}  {error:>7.3} %  {largest:>7.3} %  {bytes_before:>12}  {bytes_after:>12}"
            )?;
        }
        for (name, reason) in &self.kept {
            writeln!(f, "{name:width$}  as it was: {reason}")?;
        }
        let (before, after) = (self.bytes_before, self.bytes_after);
        let share = if before > 0 { 100.0 * after as f64 / before as f64 } else { 100.0 };
        write!(f, "all tensors: {before} bytes before, {after} after ({share:.1} %)")
    }
}

impl Checkpoint {
    /// Writes this checkpoint, of floats in safetensors, with its projections and experts quantised: a folder
    /// `target` that [`Checkpoint::open`] and transformers read (compressed-tensors: `pack-quantized`,
    /// `float-quantized`, `mxfp4-pack-quantized` or `nvfp4-pack-quantized`). Tables, head, router, norms and all else
    /// stay as they are, and so do projections whose columns are no whole groups; the report names the latter. Other
    /// files of the folder are copied.
    ///
    /// Experts that lie in one tensor (`experts.gate_up_proj` and `experts.down_proj`, as transformers 5 saves them)
    /// are written one by one, as `experts.0.gate_proj` and so on: compressed-tensors has no other form of experts.
    /// Such a tensor stays, and the report names it, where it is not one of the model's, has another shape, or where
    /// the file has one of those names already.
    ///
    /// The folder appears under its name once all is in it. Host memory is for the scales of a file's tensors, and one
    /// tensor's codes. `progress` is told bytes of the tensors as they were; [`ControlFlow::Break`] ends it, and
    /// nothing is left.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a GGUF file, for a checkpoint with an adapter, for a scheme that no format of
    /// compressed-tensors has, and for a value that is not finite, with its tensor; [`ModelError::Unsupported`] for a
    /// checkpoint that is quantised already; [`ModelError::Unwritten`], also where `target` is there and not an empty
    /// folder; [`ModelError::Stopped`].
    pub fn save_quantised(
        &self,
        scheme: &Scheme,
        target: &Path,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<QuantReport, Error> {
        let Some((folder, weights)) = self.float_weights()? else {
            let got = format!("{}, a GGUF file", self.path().display());
            return Err(Error::invalid(OP, "self", "a checkpoint in safetensors", got));
        };
        if let Some(adapter) = self.adapter() {
            let got = format!("one with that of {}", adapter.dir().display());
            let expected = "a checkpoint without an adapter, which is added when weights are loaded";
            return Err(Error::invalid(OP, "self", expected, got));
        }
        let format = Format::of(scheme)?;
        let unwritten = |path: &Path| {
            let path = path.to_path_buf();
            move |error: std::io::Error| ModelError::Unwritten { path, reason: error.to_string() }
        };
        if fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some()) || target.is_file() {
            let reason = "it is there already, and no empty folder".to_owned();
            return Err(ModelError::Unwritten { path: target.into(), reason }.into());
        }
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(unwritten(parent))?;
        // Beside it, so that it can be renamed; gone with an error.
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let beside = parent.join(format!(".{name}.{}.part", std::process::id()));
        fs::create_dir(&beside).map_err(unwritten(&beside))?;
        let beside = Beside(beside);

        let wanted = self.projections()?;
        let fused = self.fused_experts()?.into_iter().map(|own| (own.fused.clone(), own)).collect();
        let mut writer = Writer {
            scheme,
            format,
            wanted: &wanted,
            fused: &fused,
            weights,
            report: QuantReport::default(),
            ignored: BTreeSet::from(["lm_head".to_owned()]),
            done: 0,
            total: weights.total_bytes() as u64,
            progress,
        };
        let mut index = BTreeMap::new();
        for (file, path) in weights.paths().iter().enumerate() {
            let name = path.file_name().unwrap_or_default();
            for tensor in writer.write(file, &beside.0.join(name))? {
                index.insert(tensor, name.to_string_lossy().into_owned());
            }
        }
        let Writer { mut report, ignored, .. } = writer;
        report.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        report.kept.sort();
        let write = |name: &str, text: String| {
            let path = beside.0.join(name);
            fs::write(&path, text).map_err(unwritten(&path))
        };
        // Without an index there is one file, of this name.
        if !matches!(weights.paths(), [only] if only.file_name() == Some(OsStr::new(WHOLE))) {
            let index = json!({ "metadata": { "total_size": report.bytes_after }, "weight_map": index });
            write("model.safetensors.index.json", format!("{index:#}\n"))?;
        }
        write("config.json", with_quantisation(folder, &format.config(scheme, &ignored))?)?;
        copy_others(folder, &beside.0)?;
        // An empty folder gives way to another.
        fs::rename(&beside.0, target).map_err(unwritten(target))?;
        Ok(report)
    }
}

/// A folder that goes where it has not been given its name.
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        // An error is that it has been renamed, or that the file system has had enough.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The text of `config.json` with a `quantization_config`.
fn with_quantisation(folder: &Path, quantisation: &Value) -> Result<String, ModelError> {
    let path = folder.join("config.json");
    let text = read_text(&path, MAX_CONFIG_BYTES)?;
    let mut parsed: Value = parse_json(&text, &path)?;
    if let Some(known) = parsed.get_mut("quantization_config") {
        // A null.
        *known = quantisation.clone();
        return Ok(format!("{parsed:#}\n"));
    }
    // What is there stays as it is, also what Python alone can read.
    Ok(text.replacen('{', &format!("{{\n  \"quantization_config\": {quantisation},"), 1))
}

/// Copies the files that are neither weights nor written anew.
fn copy_others(folder: &Path, to: &Path) -> Result<(), ModelError> {
    let unreadable = |source| ModelError::Unreadable { path: folder.into(), source };
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let Some(name) = path.file_name() else { continue };
        let text = name.to_string_lossy();
        let is_weights = path.extension().is_some_and(|ending| WEIGHT_FILES.iter().any(|own| ending == *own));
        let is_index = text.ends_with(".index.json") || text == "config.json";
        // Through links: a hub's cache is made of them.
        if is_weights || is_index || text.starts_with('.') || !path.is_file() {
            continue;
        }
        let target = to.join(name);
        fs::copy(&path, &target)
            .map_err(|error| ModelError::Unwritten { path: target, reason: error.to_string() })?;
    }
    Ok(())
}

/// How compressed-tensors stores a scheme's matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    /// Integers in 32-bit words.
    Packed {
        bits: u32,
    },
    /// fp8, a byte each.
    Fp8,
    /// fp4 in pairs.
    Mxfp4,
    Nvfp4,
}

impl Format {
    fn of(scheme: &Scheme) -> Result<Self, Error> {
        if let Some(problem) = scheme.layout().problem() {
            return Err(Error::invalid(OP, "scheme", problem, format!("{scheme:?}")));
        }
        let Scheme { codes, group, rows, scale, .. } = *scheme;
        let is_plain = matches!(scale, ScaleType::F32 | ScaleType::F16 | ScaleType::Bf16);
        match (codes, scale) {
            (Codes::Int4, _) if is_plain && rows == 1 => Ok(Format::Packed { bits: 4 }),
            (Codes::Int8, _) if is_plain && rows == 1 => Ok(Format::Packed { bits: 8 }),
            // A scale for all columns of a row, or for blocks.
            (Codes::E4m3, _) if is_plain && (rows == 1 && group == 0 || rows > 1 && group > 0) => {
                Ok(Format::Fp8)
            }
            (Codes::E2m1, ScaleType::E8m0) if (group, rows) == (32, 1) => Ok(Format::Mxfp4),
            (Codes::E2m1, ScaleType::E4m3) if (group, rows) == (16, 1) => Ok(Format::Nvfp4),
            _ => {
                let expected = "integers with a scale for groups or rows, fp8 with one for rows or blocks, \
                                mxfp4 or nvfp4";
                Err(Error::invalid(OP, "scheme", expected, format!("{scheme:?}")))
            }
        }
    }

    /// The `quantization_config` of the whole.
    fn config(self, scheme: &Scheme, ignored: &BTreeSet<String>) -> Value {
        let Scheme { group, rows, asymmetric, .. } = *scheme;
        let (name, bits, kind) = match self {
            Format::Packed { bits } => ("pack-quantized", bits, "int"),
            Format::Fp8 => ("float-quantized", 8, "float"),
            Format::Mxfp4 => ("mxfp4-pack-quantized", 4, "float"),
            Format::Nvfp4 => ("nvfp4-pack-quantized", 4, "float"),
        };
        let strategy = match self {
            Format::Nvfp4 => "tensor_group",
            _ if rows > 1 => "block",
            _ if group > 0 => "group",
            _ => "channel",
        };
        let group_size = (rows == 1 && group > 0).then_some(group);
        let block = (rows > 1).then_some([rows, group]);
        let scale_dtype = match self {
            Format::Mxfp4 => Some("torch.uint8"),
            Format::Nvfp4 => Some("torch.float8_e4m3fn"),
            _ => None,
        };
        json!({
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": name,
            "config_groups": { "group_0": {
                "targets": ["Linear"],
                "format": name,
                "input_activations": null,
                "output_activations": null,
                "weights": { "num_bits": bits, "type": kind, "symmetric": !asymmetric, "strategy": strategy,
                    "group_size": group_size, "block_structure": block, "dynamic": false, "actorder": null,
                    "observer": "minmax", "scale_dtype": scale_dtype },
            } },
            "ignore": ignored,
            "kv_cache_scheme": null,
        })
    }

    /// The tensors of a matrix, by what comes behind the module's name.
    fn parts<'a, 'q>(self, matrix: &'q Matrix<'a>) -> Vec<(&'static str, Part<'a, 'q>)> {
        let [n, k] = matrix.size();
        let (rows, group) = (matrix.scheme.rows as usize, matrix.scheme.group as usize);
        let groups = if group == 0 { 1 } else { k.div_ceil(group) };
        let part = |what, dtype, shape: &[usize]| Part::Made { matrix, what, dtype, shape: shape.to_vec() };
        let scale = match matrix.scheme.scale {
            ScaleType::F16 => Dtype::F16,
            ScaleType::Bf16 => Dtype::BF16,
            ScaleType::E8m0 => Dtype::U8,
            ScaleType::E4m3 => Dtype::F8_E4M3,
            _ => Dtype::F32,
        };
        let scales = part(What::Scales, scale, &[n.div_ceil(rows), groups]);
        match self {
            Format::Packed { bits } => {
                let per_word = (32 / bits) as usize;
                let codes = part(What::Bits(bits), Dtype::I32, &[n, k.div_ceil(per_word)]);
                let shape = part(What::Shape, Dtype::I64, &[2]);
                let mut parts =
                    vec![("weight_packed", codes), ("weight_scale", scales), ("weight_shape", shape)];
                if matrix.scheme.asymmetric {
                    let zeros = part(What::Zeros(bits), Dtype::I32, &[n.div_ceil(per_word), groups]);
                    parts.push(("weight_zero_point", zeros));
                }
                parts
            }
            Format::Fp8 => {
                vec![("weight", part(What::Bits(8), Dtype::F8_E4M3, &[n, k])), ("weight_scale", scales)]
            }
            Format::Mxfp4 | Format::Nvfp4 => {
                let codes = part(What::Bits(4), Dtype::U8, &[n, k.div_ceil(2)]);
                let mut parts = vec![("weight_packed", codes), ("weight_scale", scales)];
                if self == Format::Nvfp4 {
                    parts.push(("weight_global_scale", part(What::Divisor, Dtype::F32, &[1])));
                }
                parts
            }
        }
    }
}

/// A matrix with its scales.
struct Matrix<'a> {
    scheme: Scheme,
    source: Quantised<Rows<'a>>,
}

/// What writes a row of a matrix.
type Rows<'a> = Box<dyn Fn(usize, &mut [f32]) + Sync + Send + 'a>;

impl Matrix<'_> {
    fn size(&self) -> [usize; 2] {
        self.source.size()
    }
}

/// A tensor to write.
enum Part<'a, 'q> {
    /// As it was.
    Plain { dtype: Dtype, shape: Vec<usize>, bytes: &'a [u8] },
    /// Made when it is written.
    Made { matrix: &'q Matrix<'a>, what: What, dtype: Dtype, shape: Vec<usize> },
}

#[derive(Clone, Copy)]
enum What {
    /// Codes of so many bits, rows of whole words or bytes, the lowest first.
    Bits(u32),
    Scales,
    Shape,
    /// Zero points of so many bits, along the rows of a column of groups.
    Zeros(u32),
    /// One over the factor of all scales.
    Divisor,
}

impl View for &Part<'_, '_> {
    fn dtype(&self) -> Dtype {
        match self {
            Part::Plain { dtype, .. } | Part::Made { dtype, .. } => *dtype,
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Part::Plain { shape, .. } | Part::Made { shape, .. } => shape,
        }
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let Part::Made { matrix, what, dtype, shape } = self else {
            let Part::Plain { bytes, .. } = self else { return Cow::Borrowed(&[]) };
            return Cow::Borrowed(bytes);
        };
        let (source, [n, k]) = (&matrix.source, matrix.size());
        let mut bytes = vec![0; self.data_len()];
        match *what {
            Bits(bits) => {
                let stride = bytes.len().checked_div(n).unwrap_or(0);
                bytes.par_chunks_mut(stride.max(1)).enumerate().for_each(|(row, bytes)| {
                    let mut codes = vec![0; k];
                    source.codes(row, &mut codes);
                    if bits == 8 {
                        bytes[..k].copy_from_slice(&codes);
                    } else {
                        for (byte, pair) in std::iter::zip(bytes, codes.chunks(2)) {
                            *byte = pair[0] | pair.get(1).copied().unwrap_or(0) << 4;
                        }
                    }
                });
            }
            Scales => {
                let (rows, groups) = (matrix.scheme.rows as usize, shape[1]);
                let size = dtype.bitsize() / 8;
                for (index, bytes) in bytes.chunks_exact_mut(size).enumerate() {
                    let scale = source.scale(index / groups * rows, index % groups);
                    bytes.copy_from_slice(&scale.to_le_bytes()[..size]);
                }
            }
            Shape => {
                bytes[..8].copy_from_slice(&(n as u64).to_le_bytes());
                bytes[8..].copy_from_slice(&(k as u64).to_le_bytes());
            }
            Zeros(bits) => {
                let (per_word, groups) = ((32 / bits) as usize, shape[1]);
                for (index, bytes) in bytes.chunks_exact_mut(4).enumerate() {
                    let first = index / groups * per_word;
                    let fields = first..n.min(first + per_word);
                    let zero =
                        |row| u32::from(source.zero(row, index % groups)) << (bits as usize * (row - first));
                    bytes.copy_from_slice(&fields.map(zero).fold(0, |word, zero| word | zero).to_le_bytes());
                }
            }
            Divisor => bytes.copy_from_slice(&(1.0 / source.global()).to_le_bytes()),
        }
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        match self {
            Part::Plain { bytes, .. } => bytes.len(),
            Part::Made { dtype, shape, .. } => shape.iter().product::<usize>() * dtype.bitsize() / 8,
        }
    }
}

use What::{Bits, Divisor, Scales, Shape, Zeros};

/// Writes the files, one after the other.
struct Writer<'a, 'w> {
    scheme: &'w Scheme,
    format: Format,
    /// Names of the tensors to be quantised, each with those that it is one product with.
    wanted: &'w BTreeMap<String, Vec<String>>,
    /// Experts that may be in one tensor, by its name.
    fused: &'w BTreeMap<String, ListedExperts>,
    weights: &'a Weights,
    report: QuantReport,
    /// Modules that stay as they are.
    ignored: BTreeSet<String>,
    done: u64,
    total: u64,
    progress: Progress<'w>,
}

/// A matrix in the files.
struct Floats<'a> {
    /// Where it is: a tensor's name, with more where it is a part of it.
    place: String,
    size: [usize; 2],
    dtype: Dtype,
    bytes: &'a [u8],
}

/// The weight of a module that is a `Linear` of its own in what is written.
struct Linear<'a> {
    /// The module's name.
    name: String,
    weight: Floats<'a>,
    /// What it has one factor of all scales with, if not with itself alone.
    product: Vec<Floats<'a>>,
}

impl<'a> Floats<'a> {
    /// A tensor as a whole, if it is a matrix.
    fn of(tensor: RawTensor<'a>) -> Option<Self> {
        let &[n, k] = tensor.shape else { return None };
        let place = tensor.name.to_owned();
        Some(Floats { place, size: [n, k], dtype: tensor.dtype, bytes: tensor.bytes })
    }
}

impl<'a> Writer<'a, '_> {
    /// One file. Returns the names of its tensors.
    fn write(&mut self, file: usize, path: &Path) -> Result<Vec<String>, Error> {
        let mut matrices: Vec<(Linear<'a>, Matrix<'a>)> = Vec::new();
        let mut parts: Vec<(String, Part<'a, '_>)> = Vec::new();
        for tensor in self.weights.of_file(file) {
            let linears = if tensor.shape.len() == 3 { self.experts(tensor) } else { self.linear(tensor) };
            if linears.is_empty() {
                let RawTensor { dtype, bytes, .. } = tensor;
                parts
                    .push((tensor.name.to_owned(), Part::Plain { dtype, shape: tensor.shape.into(), bytes }));
                self.advance(bytes.len(), Some(bytes.len()))?;
            }
            // Of a tensor of many experts one after the other, each from its own part of the file.
            for linear in linears {
                let Floats { size, dtype: stored, bytes, .. } = linear.weight;
                match self.fitting(&linear.weight) {
                    Ok(dtype) => {
                        let matrix = self.matrix(&linear, dtype)?;
                        matrices.push((linear, matrix));
                        self.advance(bytes.len(), None)?;
                    }
                    Err(reason) => {
                        let name = format!("{}{WEIGHT}", linear.name);
                        parts.push((name.clone(), Part::Plain { dtype: stored, shape: size.into(), bytes }));
                        self.report.kept.push((name, reason));
                        self.ignored.insert(linear.name);
                        self.advance(bytes.len(), Some(bytes.len()))?;
                    }
                }
            }
        }
        for (linear, matrix) in &matrices {
            let made = self.format.parts(matrix);
            let bytes_after = made.iter().map(|(_, part)| part.data_len() as u64).sum();
            self.report.bytes_after += bytes_after;
            self.report.tensors.push(QuantisedTensor {
                name: format!("{}{WEIGHT}", linear.name),
                shape: matrix.size(),
                errors: matrix.source.errors(),
                bytes_before: linear.weight.bytes.len() as u64,
                bytes_after,
            });
            parts.extend(made.into_iter().map(|(name, part)| (format!("{}.{name}", linear.name), part)));
        }
        let names: Vec<String> = parts.iter().map(|(name, _)| name.clone()).collect();
        let views = parts.iter().map(|(name, part)| (name, part));
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        safetensors::serialize_to_file(views, Some(metadata), path)
            .map_err(|error| ModelError::Unwritten { path: path.into(), reason: error.to_string() })?;
        Ok(names)
    }

    /// So many bytes are done, which are so many behind it if that is known.
    fn advance(&mut self, bytes: usize, after: Option<usize>) -> Result<(), Error> {
        self.report.bytes_before += bytes as u64;
        self.report.bytes_after += after.unwrap_or(0) as u64;
        self.done += bytes as u64;
        tell(self.progress, self.done, self.total)
    }

    /// A linear layer's weight; none for a tensor that is no projection's.
    fn linear(&mut self, tensor: RawTensor<'a>) -> Vec<Linear<'a>> {
        let (Some(module), Some(weight)) = (tensor.name.strip_suffix(WEIGHT), Floats::of(tensor)) else {
            return Vec::new();
        };
        let Some(product) = self.wanted.get(tensor.name) else {
            // A table is no `Linear`.
            if !module.ends_with("embed_tokens") {
                self.ignored.insert(module.to_owned());
            }
            return Vec::new();
        };
        let others = product.iter().filter(|_| product.len() > 1);
        let product = others.filter_map(|name| Floats::of(self.weights.raw(name)?)).collect();
        vec![Linear { name: module.to_owned(), weight, product }]
    }

    /// The parts of experts that lie in one tensor, by the names that they have where each is a tensor; none if the
    /// tensor stays, which is noted.
    fn experts(&mut self, tensor: RawTensor<'a>) -> Vec<Linear<'a>> {
        let known = self.fused.get(tensor.name);
        if known.is_none() && !tensor.name.contains(".experts.") {
            return Vec::new();
        }
        match known.ok_or_else(|| NO_FORM.to_owned()).and_then(|known| self.split(tensor, known)) {
            Ok(linears) => linears,
            Err(reason) => {
                self.report.kept.push((tensor.name.to_owned(), reason));
                Vec::new()
            }
        }
    }

    /// **Errors**: why the experts cannot be written one by one.
    fn split(&self, tensor: RawTensor<'a>, known: &ListedExperts) -> Result<Vec<Linear<'a>>, String> {
        let ([experts, rows, k], dtype) = (known.shape, tensor.dtype);
        if tensor.shape != known.shape {
            return Err(format!("{NO_FORM}, of shape {:?} and not {:?}", tensor.shape, known.shape));
        }
        if float(dtype).is_none() {
            return Err(format!("{NO_FORM}, of type {dtype}"));
        }
        let mut linears = Vec::new();
        let of_expert = tensor.bytes.chunks_exact(tensor.bytes.len() / experts);
        for (expert, (names, bytes)) in std::iter::zip(&known.parts, of_expert).enumerate() {
            let place = format!("{}, expert {expert}", tensor.name);
            for (name, own) in std::iter::zip(names, bytes.chunks_exact(bytes.len() / names.len())) {
                let module = name.strip_suffix(WEIGHT).filter(|_| !self.weights.contains(name));
                let module = module.ok_or_else(|| format!("{NO_FORM}, and {name} is no name for one"))?;
                let size = [rows / names.len(), k];
                let weight = Floats { place: format!("{place}, {module}"), size, dtype, bytes: own };
                // Gate and up are one product: a model that quantises them as it loads them gives them one factor.
                let whole = Floats { place: place.clone(), size: [rows, k], dtype, bytes };
                let product = if names.len() > 1 { vec![whole] } else { Vec::new() };
                linears.push(Linear { name: module.to_owned(), weight, product });
            }
        }
        Ok(linears)
    }

    /// The type of a matrix. **Errors**: why it cannot be quantised.
    fn fitting(&self, matrix: &Floats<'_>) -> Result<DType, String> {
        let (group, [n, k]) = (self.scheme.group as usize, matrix.size);
        let Some(dtype) = float(matrix.dtype) else { return Err(format!("type {}", matrix.dtype)) };
        if n == 0 || k == 0 {
            Err("it is empty".into())
        } else if self.scheme.rows == 1 && group > 0 && !k.is_multiple_of(group) {
            Err(format!("{k} columns are no whole groups of {group}"))
        } else if matches!(self.format, Format::Packed { bits } if !k.is_multiple_of(32 / bits as usize)) {
            Err(format!("{k} columns are no whole words"))
        } else {
            Ok(dtype)
        }
    }

    fn matrix(&self, linear: &Linear<'a>, dtype: DType) -> Result<Matrix<'a>, Error> {
        // One factor for what is one product.
        let mut global = None;
        if self.format == Format::Nvfp4 {
            for other in &linear.product {
                let Some(dtype) = float(other.dtype) else { continue };
                let other = quantise(other, dtype, self.scheme, None)?.global();
                global = global.into_iter().chain([other]).reduce(f32::max);
            }
        }
        Ok(Matrix { scheme: *self.scheme, source: quantise(&linear.weight, dtype, self.scheme, global)? })
    }
}

/// A stored type, if it is one of floats.
fn float(stored: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(own, dtype)| *own == stored && dtype.is_float()).map(|&(_, dtype)| dtype)
}

fn quantise<'a>(
    floats: &Floats<'a>,
    dtype: DType,
    scheme: &Scheme,
    global: Option<f32>,
) -> Result<Quantised<Rows<'a>>, Error> {
    let data = Data::Dense { dtype, bytes: floats.bytes };
    let rows: Rows<'a> = Box::new(move |row, values| data.floats(row, values));
    Quantised::with_global(floats.size, *scheme, rows, global).map_err(of_tensor(&floats.place))
}
