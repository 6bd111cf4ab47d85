//! A checkpoint: a model's configuration and its tensors under their published names, whatever files they are in and
//! however they are stored there.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use abi::DType;
use rayon::prelude::*;
use safetensors::Dtype;

use super::adapter::Added;
use super::config::{MAX_CONFIG_BYTES, QuantConfig, Scheme, read_json};
use super::gguf::{Gguf, Named};
use super::loader::ListedExperts;
use super::quant::{Module, QuantMatrix, mxfp4_blocks};
use super::weights::{decode, encode, transcode};
use super::{Adapter, Model, ModelConfig, ModelError, Quantise, TensorProblem, Weights};
use host::Error;
use host::ops::matmul::Activations;

/// A model's files, opened: `config.json` and safetensors in a folder, or a GGUF file. They must not be truncated or
/// written to while this value lives.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    source: Source,
    /// What is added to its weights as they are read.
    adapter: Option<Adapter>,
    /// Instead of what the files say.
    activations: Option<Activations>,
}

#[derive(Debug)]
enum Source {
    Safetensors { weights: Box<Weights>, quantised: Option<QuantConfig>, names: Names },
    Gguf { file: Box<Gguf>, tower: Option<Box<Gguf>>, is_permuted: bool },
}

/// What a folder's tensors are called.
enum Names {
    /// As in published models.
    Published,
    /// Without what they begin with in a published model with a head: an embeddings model is saved so.
    Bare,
    /// As the caller says.
    Custom(Box<dyn Fn(&str) -> StoredName + Send + Sync>),
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Names::Published => "Published",
            Names::Bare => "Bare",
            Names::Custom(_) => "Custom",
        })
    }
}

/// Where a checkpoint has a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredName {
    /// All of the tensor of this name.
    Whole(String),
    /// These of its rows, along the first dimension: a part of projections that are stored as one.
    Rows(String, Range<usize>),
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Stored<'a> {
    pub(super) shape: Vec<usize>,
    pub(super) data: Data<'a>,
}

/// The elements of a tensor.
#[derive(Clone, Debug)]
pub(super) enum Data<'a> {
    /// Floats as they lie in the file.
    Dense { dtype: DType, bytes: &'a [u8] },
    /// The rows of a quantised matrix.
    Quantised(QuantMatrix<'a>),
    /// Rows of several matrices of this width: of which one, and its row there.
    Rows { cols: usize, parts: Vec<Data<'a>>, order: Vec<(u32, u32)> },
    /// Small tensors that are not in the file as they were published.
    Values(Vec<f32>),
    /// A matrix of floats, and what an adapter adds to it.
    Merged { base: Box<Data<'a>>, added: Added },
}

/// What names of tensors begin with, but for the head's.
const PREFIX: &str = "model.";
/// Names of a decoder's embedding without it.
const BARE_EMBEDDINGS: [&str; 2] = ["embed_tokens.weight", "language_model.embed_tokens.weight"];
/// Elements that one task converts.
const TASK_ELEMS: usize = 1 << 16;
/// Files beside `config.json` that say how weights are quantised, where it does not.
const OWN_FILES: [&str; 3] = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

impl Checkpoint {
    /// Opens a folder with `config.json` and safetensors, or a GGUF file.
    ///
    /// # Errors
    /// Those of [`ModelConfig::from_dir`], [`Weights::open`] and [`Gguf::open`]; [`ModelError::Unsupported`] for
    /// weights that are quantised in a way that is not read, [`ModelError::Field`] for a `quantization_config` beside
    /// weights of which none is quantised.
    pub fn open(path: &Path) -> Result<Checkpoint, ModelError> {
        Checkpoint::open_with_tower(path, None)
    }

    /// The same of a GGUF file whose vision tower is in another one.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_with_tower(path: &Path, tower: Option<&Path>) -> Result<Checkpoint, ModelError> {
        let is_file = path.is_file() || path.extension().is_some_and(|name| name == "gguf") && !path.is_dir();
        if !is_file && tower.is_none() {
            let config = ModelConfig::from_dir(path)?;
            let quantised = quantisation(path)?;
            let weights = Weights::open(path)?;
            if let Some(quantised) = &quantised {
                quantised.check_tensors(weights.types())?;
            }
            let has_embeddings = BARE_EMBEDDINGS.iter().any(|name| weights.contains(name));
            let is_bare = has_embeddings && !weights.names().any(|name| name.starts_with(PREFIX));
            let names = if is_bare { Names::Bare } else { Names::Published };
            let source = Source::Safetensors { weights: Box::new(weights), quantised, names };
            return Ok(Checkpoint { path: path.into(), config, source, adapter: None, activations: None });
        }
        let file = Box::new(Gguf::open(path)?);
        let tower = tower.map(Gguf::open).transpose()?.map(Box::new);
        let config = ModelConfig::from_gguf(&file, tower.as_deref())?;
        let is_permuted = file.text("general.architecture")? == Some("llama");
        let source = Source::Gguf { file, tower, is_permuted };
        Ok(Checkpoint { path: path.into(), config, source, adapter: None, activations: None })
    }

    /// Opens the safetensors of a folder as a model of this configuration, whose tensors are where `names` says: it is
    /// asked for each tensor by the name that it has in [`Model::tensors`](super::Model::tensors). A
    /// `quantization_config` in `config.json` is read as in published models.
    ///
    /// # Errors
    /// Those of [`ModelConfig::check`] and [`Weights::open`]; [`ModelError::Unsupported`] for weights that are
    /// quantised in a way that is not read.
    pub fn open_custom(
        path: &Path,
        config: ModelConfig,
        names: impl Fn(&str) -> StoredName + Send + Sync + 'static,
    ) -> Result<Checkpoint, Error> {
        config.check()?;
        let (weights, quantised) = (Box::new(Weights::open(path)?), quantisation(path)?);
        let source = Source::Safetensors { weights, quantised, names: Names::Custom(Box::new(names)) };
        Ok(Checkpoint { path: path.into(), config, source, adapter: None, activations: None })
    }

    /// The checkpoint with an adapter added to its weights: each is `W + scale · B · A` when it is loaded, in f32
    /// before it is converted or quantised. Any linear layer whose weight the checkpoint has under its published name
    /// can be changed. An adapter that was there before is gone.
    ///
    /// # Errors
    /// [`ModelError::Tensors`] for an adapter's tensors that are of no such layer; those of [`ModelConfig::check`].
    /// Loading fails with [`ModelError::Tensors`] for matrices that do not fit, and for a weight that is quantised:
    /// adapters of such models go beside the weights ([`Model::batch_with`]).
    pub fn with_adapter(self, adapter: Adapter) -> Result<Checkpoint, Error> {
        adapter.check_modules(&Model::tensors(&self.config)?)?;
        Ok(Checkpoint { adapter: Some(adapter), ..self })
    }

    /// The checkpoint with what becomes of rows before products with its quantised weights, instead of what its files
    /// say: [`Activations::Fp8`] where `activation_scheme` is `dynamic`, or where all weights in fp8 of
    /// compressed-tensors have `input_activations` of fp8 by token, [`Activations::Int8`] for linear layers of
    /// compressed-tensors whose `input_activations` are so; the scale of a token is one that is found when it is there.
    ///
    /// Rows become int8 before int8 weights with a scale for each of their rows, of linear layers, stored so or
    /// quantised so as they are loaded (`int8`); before those of experts they stay as they are. At a rank of a group
    /// each part of a row has a scale of its own.
    pub fn with_activations(self, activations: Activations) -> Checkpoint {
        Checkpoint { activations: Some(activations), ..self }
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The adapter that is added to its weights.
    pub(super) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The folder, or the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder and the tensors of safetensors of which none is quantised; none for a GGUF file.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] if they are quantised.
    pub(super) fn float_weights(&self) -> Result<Option<(&Path, &Weights)>, ModelError> {
        match &self.source {
            Source::Gguf { .. } => Ok(None),
            Source::Safetensors { quantised: Some(_), .. } => Err(ModelError::Unsupported {
                path: self.path.join("config.json"),
                field: "quantization_config".into(),
                value: "of weights that are quantised already".into(),
                supported: &["weights of floats"],
            }),
            Source::Safetensors { weights, quantised: None, .. } => Ok(Some((&self.path, &**weights))),
        }
    }

    /// What the files call the projections and experts of the model, each with those that it is one product with.
    pub(super) fn projections(&self) -> Result<BTreeMap<String, Vec<String>>, Error> {
        let Source::Safetensors { names, .. } = &self.source else { return Ok(BTreeMap::new()) };
        let mut projections = BTreeMap::new();
        for product in Model::listed(&self.config)?.projections {
            let product: Vec<String> = product.iter().map(|name| names.place(name).0.into_owned()).collect();
            projections.extend(product.iter().map(|name| (name.clone(), product.clone())));
        }
        Ok(projections)
    }

    /// The matrices of experts that the model may have in one tensor, all by the names that files have for them; those
    /// alone that are tensors as a whole.
    pub(super) fn fused_experts(&self) -> Result<Vec<ListedExperts>, Error> {
        let Source::Safetensors { names, .. } = &self.source else { return Ok(Vec::new()) };
        let whole = |name: &String| match names.place(name) {
            (name, None) => Some(name.into_owned()),
            _ => None,
        };
        let in_files = |ListedExperts { fused, shape, parts }: ListedExperts| {
            let parts = parts.iter().map(|parts| parts.iter().map(whole).collect()).collect::<Option<_>>()?;
            Some(ListedExperts { fused: whole(&fused)?, shape, parts })
        };
        Ok(Model::listed(&self.config)?.experts.into_iter().filter_map(in_files).collect())
    }

    /// How many neighbouring columns and rows of its projections may not be parted from each other, where it has them
    /// quantised or they are as they are loaded.
    pub(super) fn unit(&self, quantise: Quantise) -> Result<usize, Error> {
        let stored = match (&self.source, quantise) {
            (_, Quantise::Dense | Quantise::Requantise(_)) => 1,
            (Source::Safetensors { quantised: None, .. }, _) => 1,
            _ => {
                let projections = Model::listed(&self.config)?.projections;
                // A name that does not fit is said when all are checked.
                let matrices = projections.iter().flatten().filter_map(|name| self.quantised(name).ok()?);
                matrices.map(|matrix| matrix.unit()).max().unwrap_or(1)
            }
        };
        Ok(stored.max(quantise.unit()))
    }

    /// What becomes of rows before products with its packed weights.
    pub(super) fn activations(&self) -> Activations {
        match (self.activations, &self.source) {
            (Some(Activations::Int8), _) => Activations::AsGiven,
            (Some(activations), _) => activations,
            (None, Source::Safetensors { quantised: Some(quantised), .. }) => quantised.activations(),
            _ => Activations::AsGiven,
        }
    }

    /// Fields of `config.json` that say what becomes of rows, where that is not done.
    pub(super) fn undone_keys(&self) -> Vec<String> {
        match (self.activations, &self.source) {
            (None, Source::Safetensors { quantised: Some(quantised), .. }) => quantised.undone().to_vec(),
            _ => Vec::new(),
        }
    }

    /// Whether rows become int8 before they are multiplied with this weight, if it is int8.
    pub(super) fn rows_become_int8(&self, name: &str) -> bool {
        match (self.activations, &self.source) {
            (Some(activations), _) => activations == Activations::Int8,
            (None, Source::Safetensors { quantised: Some(quantised), names, .. }) => {
                let (name, _) = names.place(name);
                quantised.rows_become_int8(name.strip_suffix(".weight").unwrap_or(&name))
            }
            _ => false,
        }
    }

    /// The GGUF file, if it is one: it has the tokenizer.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.source {
            Source::Gguf { file, .. } => Some(file),
            Source::Safetensors { .. } => None,
        }
    }

    /// A matrix as it is quantised in the file; none if it is not there, or not quantised.
    ///
    /// # Errors
    /// [`ModelError::Tensors`] for tensors that do not fit each other.
    pub fn quantised(&self, name: &str) -> Result<Option<QuantMatrix<'_>>, ModelError> {
        match self.find(name).map_err(|problem| self.unusable(1, vec![problem]))? {
            Some(Stored { data: Data::Quantised(matrix), .. }) => Ok(Some(matrix)),
            _ => Ok(None),
        }
    }

    pub(super) fn unusable(&self, count: usize, problems: Vec<TensorProblem>) -> ModelError {
        ModelError::Tensors { dir: self.path.clone(), count, problems }
    }

    /// The tensors that nobody has asked for yet, by their names in the files.
    pub fn unused_tensors(&self) -> Vec<String> {
        match &self.source {
            Source::Safetensors { weights, .. } => weights.unused().map(str::to_owned).collect(),
            Source::Gguf { file, tower, .. } => {
                let files = [Some(file), tower.as_ref()];
                files.into_iter().flatten().flat_map(|file| file.unused().map(str::to_owned)).collect()
            }
        }
    }

    /// Whether two published names are of tensors of the same type, shape and elements.
    pub(super) fn is_same(&self, first: &str, second: &str) -> bool {
        match &self.source {
            Source::Safetensors { weights, names, .. } => match (names.place(first), names.place(second)) {
                ((first, None), (second, None)) => weights.is_same(&first, &second),
                (first, second) => first == second,
            },
            // One of them is left out there.
            Source::Gguf { .. } => false,
        }
    }

    /// Whether there is a tensor of this published name.
    pub(super) fn contains(&self, name: &str) -> bool {
        match &self.source {
            Source::Safetensors { weights, quantised, names } => {
                let (name, _) = names.place(name);
                let has_blocks = quantised.as_ref().is_some_and(QuantConfig::has_blocks);
                weights.contains(&name) || has_blocks && weights.contains(&format!("{name}_blocks"))
            }
            Source::Gguf { .. } => self.named().is_some_and(|named| named.contains(name)),
        }
    }

    /// The tensor of this name, which must have this shape.
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>, TensorProblem> {
        let Some(stored) = self.find(name)? else {
            return Err(TensorProblem::Missing { name: name.into(), expected: Some(shape.into()) });
        };
        let without_ones =
            |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|&size| size != 1).collect() };
        let fits = match self.source {
            Source::Safetensors { .. } => stored.shape == shape,
            // The format leaves out dimensions of 1.
            Source::Gguf { .. } => without_ones(&stored.shape) == without_ones(shape),
        };
        if !fits {
            return Err(TensorProblem::Shape {
                name: name.into(),
                expected: shape.into(),
                got: stored.shape,
            });
        }
        // A type is looked at last: of tensors of a wrong shape that is what is said.
        match stored.data {
            Data::Dense { dtype, .. } if !dtype.is_float() => Err(TensorProblem::Dtype {
                name: name.into(),
                got: self.stored_type(name),
                supported: &DType::FLOATS,
            }),
            _ => self.merged(name, stored),
        }
    }

    /// Numbers above 0, one for all of so many heads or one for each: of each head.
    pub(super) fn head_scales(&self, name: &str, heads: usize) -> Result<Vec<f32>, TensorProblem> {
        let found = self.find(name)?.map(|stored| stored.shape);
        let shape = match &found {
            Some(shape) if shape.iter().product::<usize>() == 1 => &shape[..],
            _ => &[heads],
        };
        let Stored { data, .. } = self.tensor(name, shape)?;
        let count = shape.iter().product::<usize>();
        let mut bytes = vec![0; count * DType::F32.bytes()];
        let unfit = |got| TensorProblem::Unfit {
            name: name.into(),
            expected: "scales that are finite and above 0".into(),
            got,
        };
        data.read(0..count, DType::F32, &mut bytes).map_err(unfit)?;
        let numbers: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        if let Some(wrong) = numbers.iter().find(|number| !(number.is_finite() && **number > 0.0)) {
            return Err(unfit(wrong.to_string()));
        }
        Ok(if count == 1 { vec![numbers[0]; heads] } else { numbers })
    }

    /// With what the adapter adds to it.
    fn merged<'a>(&'a self, name: &str, stored: Stored<'a>) -> Result<Stored<'a>, TensorProblem> {
        let unfit = |expected: &str, got: String| {
            let (name, expected) = (name.to_owned(), expected.to_owned());
            TensorProblem::Unfit { name, expected, got }
        };
        let (Some(adapter), Some(module), &[rows, cols]) =
            (&self.adapter, name.strip_suffix(".weight"), &stored.shape[..])
        else {
            return Ok(stored);
        };
        if !adapter.has(module) {
            return Ok(stored);
        }
        if stored.data.is_quantised() {
            return Err(unfit("a weight in floats, to add an adapter to", "a quantised one".into()));
        }
        let added = adapter.added(module, [rows, cols]);
        let added = added.map_err(|error| unfit("an adapter's matrices that fit", error.to_string()))?;
        let base = Box::new(stored.data);
        Ok(Stored { shape: stored.shape, data: Data::Merged { base, added } })
    }

    fn stored_type(&self, name: &str) -> String {
        match &self.source {
            Source::Safetensors { weights, names, .. } => {
                weights.raw(&names.place(name).0).map_or_else(String::new, |tensor| tensor.dtype.to_string())
            }
            Source::Gguf { .. } => String::new(),
        }
    }

    fn named(&self) -> Option<Named<'_>> {
        match &self.source {
            Source::Gguf { file, tower, is_permuted } => {
                Some(Named { file, tower: tower.as_deref(), config: &self.config, is_permuted: *is_permuted })
            }
            Source::Safetensors { .. } => None,
        }
    }

    fn find(&self, name: &str) -> Result<Option<Stored<'_>>, TensorProblem> {
        match &self.source {
            Source::Gguf { .. } => self.named().map_or(Ok(None), |named| named.tensor(name)),
            Source::Safetensors { weights, quantised, names } => {
                let (name, rows) = names.place(name);
                let stored = match quantised {
                    Some(quantised) => quantised_tensor(weights, quantised, &name)?,
                    None => None,
                };
                let stored = stored.map(|(shape, matrix)| Stored { shape, data: Data::Quantised(matrix) });
                let stored = stored.or_else(|| {
                    let tensor = weights.raw(&name)?;
                    let dtype = match tensor.dtype {
                        Dtype::F32 => DType::F32,
                        Dtype::F16 => DType::F16,
                        Dtype::BF16 => DType::BF16,
                        // No float that can be loaded as it is.
                        _ => DType::I8,
                    };
                    Some(Stored {
                        shape: tensor.shape.into(),
                        data: Data::Dense { dtype, bytes: tensor.bytes },
                    })
                });
                match (stored, rows) {
                    (Some(stored), Some(rows)) => stored.rows(&name, rows).map(Some),
                    (stored, _) => Ok(stored),
                }
            }
        }
    }
}

impl Names {
    /// What a file calls the tensor of this published name, and which of its rows are that.
    fn place<'n>(&self, name: &'n str) -> (Cow<'n, str>, Option<Range<usize>>) {
        match self {
            Names::Published => (name.into(), None),
            Names::Bare => (name.strip_prefix(PREFIX).unwrap_or(name).into(), None),
            Names::Custom(names) => match names(name) {
                StoredName::Whole(name) => (name.into(), None),
                StoredName::Rows(name, rows) => (name.into(), Some(rows)),
            },
        }
    }
}

impl Stored<'_> {
    /// Some of its rows.
    fn rows(self, name: &str, rows: Range<usize>) -> Result<Self, TensorProblem> {
        let count = self.shape.first().copied().unwrap_or(0);
        if rows.is_empty() || rows.end > count {
            let (expected, got) = (format!("rows {} to {}", rows.start, rows.end), format!("{count} rows"));
            return Err(TensorProblem::Unfit { name: name.into(), expected, got });
        }
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        let data = match self.data {
            Data::Dense { dtype, bytes } => {
                // The file's reader has found as many bytes as the shape wants.
                let row = bytes.len() / count;
                Data::Dense { dtype, bytes: &bytes[rows.start * row..rows.end * row] }
            }
            Data::Quantised(matrix) => {
                let (cols, order) = (matrix.k(), rows.map(|row| (0, row as u32)).collect());
                Data::Rows { cols, parts: vec![Data::Quantised(matrix)], order }
            }
            // Of files of ggml alone; adapters are added later.
            Data::Rows { .. } | Data::Values(_) | Data::Merged { .. } => {
                let (expected, got) = ("a tensor as it is stored".into(), "one that is put together".into());
                return Err(TensorProblem::Unfit { name: name.into(), expected, got });
            }
        };
        Ok(Stored { shape, data })
    }
}

/// How the weights of a folder are quantised.
fn quantisation(dir: &Path) -> Result<Option<QuantConfig>, ModelError> {
    let path = dir.join("config.json");
    if let Some(config) = QuantConfig::read(&read_json(&path, MAX_CONFIG_BYTES)?, &path)? {
        return Ok(Some(config));
    }
    for file in OWN_FILES {
        let path = dir.join(file);
        match read_json(&path, MAX_CONFIG_BYTES) {
            Ok(root) => return QuantConfig::read_own(&root, &path),
            Err(ModelError::Missing { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A tensor that the configuration says is quantised, with its shape; none if the file has it as it is.
fn quantised_tensor<'a>(
    weights: &'a Weights,
    quantised: &QuantConfig,
    name: &str,
) -> Result<Option<(Vec<usize>, QuantMatrix<'a>)>, TensorProblem> {
    let find = |name: &str| weights.raw(name);
    let prefix = name.strip_suffix(".weight").unwrap_or(name);
    let Some(scheme) = quantised.scheme_of(prefix) else { return Ok(None) };
    if scheme == Scheme::Mxfp4Blocks {
        return mxfp4_blocks(&find, name);
    }
    if prefix == name {
        return Ok(None);
    }
    let module = Module { find: &find, prefix };
    let matrix = match scheme {
        Scheme::Fp8 { block } => match module.bytes("weight_scale_inv", block)? {
            None => module.bytes("weight_scale", block)?,
            found => found,
        },
        Scheme::Gptq { bits, group, is_v1 } => module.gptq(bits, group, is_v1)?,
        Scheme::Awq { group } => module.awq(group)?,
        Scheme::Packed { bits, group, is_symmetric } => module.packed(bits, group, is_symmetric)?,
        Scheme::Bytes { block, .. } => module.bytes("weight_scale", block)?,
        Scheme::Nvfp4Packed => module.nvfp4_packed()?,
        Scheme::Mxfp4Packed => module.mxfp4_packed()?,
        Scheme::Nvfp4Modelopt => module.nvfp4_modelopt()?,
        Scheme::Mxfp4Blocks => None,
    };
    Ok(matrix.map(|matrix| (vec![matrix.n(), matrix.k()], matrix)))
}

impl<'a> Data<'a> {
    /// In how many pieces the elements can be read, and how many a piece has: rows, or single elements.
    pub(super) fn pieces(&self) -> (usize, usize) {
        match self {
            Data::Dense { dtype, bytes } => (bytes.len() / dtype.bytes(), 1),
            Data::Quantised(matrix) => (matrix.n(), matrix.k()),
            Data::Rows { cols, order, .. } => (order.len(), *cols),
            Data::Values(values) => (values.len(), 1),
            Data::Merged { added, .. } => (added.rows(), added.cols()),
        }
    }

    /// Pieces as they lie in the file, if they are of this type there.
    pub(super) fn borrow(&self, pieces: Range<usize>, dtype: DType) -> Option<&'a [u8]> {
        match self {
            Data::Dense { dtype: stored, bytes } if *stored == dtype => {
                Some(&bytes[pieces.start * dtype.bytes()..pieces.end * dtype.bytes()])
            }
            _ => None,
        }
    }

    /// Pieces in this type, into as many bytes as they are then.
    ///
    /// **Errors**: what a scale is that is no number, and where.
    pub(super) fn read(&self, pieces: Range<usize>, dtype: DType, out: &mut [u8]) -> Result<(), String> {
        match self {
            Data::Dense { dtype: stored, bytes } => {
                let bytes = &bytes[pieces.start * stored.bytes()..pieces.end * stored.bytes()];
                out.par_chunks_mut(TASK_ELEMS * dtype.bytes())
                    .zip(bytes.par_chunks(TASK_ELEMS * stored.bytes()))
                    .for_each(|(out, bytes)| transcode(*stored, bytes, dtype, out));
                Ok(())
            }
            Data::Values(values) => {
                encode(&values[pieces], dtype, out);
                Ok(())
            }
            Data::Quantised(_) | Data::Rows { .. } | Data::Merged { .. } => {
                let (_, cols) = self.pieces();
                if cols == 0 {
                    return Ok(());
                }
                let rows = (TASK_ELEMS / cols).max(1);
                let tasks = out.par_chunks_mut(rows * cols * dtype.bytes()).enumerate();
                tasks.try_for_each(|(task, out)| {
                    let mut values = vec![0.0; cols];
                    for (row, out) in out.chunks_exact_mut(cols * dtype.bytes()).enumerate() {
                        self.row(pieces.start + task * rows + row, &mut values)?;
                        encode(&values, dtype, out);
                    }
                    Ok(())
                })
            }
        }
    }

    /// A row of as many values as it has: NaN where a scale is not finite.
    pub(super) fn floats(&self, row: usize, out: &mut [f32]) {
        if self.row(row, out).is_err() {
            out.fill(f32::NAN);
        }
    }

    /// Whether any of it is quantised.
    pub(super) fn is_quantised(&self) -> bool {
        match self {
            Data::Quantised(_) => true,
            Data::Rows { parts, .. } => parts.iter().any(Data::is_quantised),
            Data::Dense { .. } | Data::Values(_) | Data::Merged { .. } => false,
        }
    }

    /// A row of as many values as it has.
    fn row(&self, row: usize, out: &mut [f32]) -> Result<(), String> {
        match self {
            Data::Dense { dtype, bytes } => {
                let len = out.len() * dtype.bytes();
                decode(*dtype, &bytes[row * len..(row + 1) * len], out);
            }
            Data::Values(values) => out.copy_from_slice(&values[row * out.len()..(row + 1) * out.len()]),
            Data::Quantised(matrix) => {
                if let Some((row, group, scale)) = matrix.unsound_scale(row) {
                    return Err(format!("{scale} in row {row}, group {group}"));
                }
                matrix.dequantise_row(row, out);
            }
            Data::Rows { parts, order, .. } => {
                let (part, row) = order[row];
                parts[part as usize].row(row as usize, out)?;
            }
            Data::Merged { base, added } => {
                base.row(row, out)?;
                added.add(row, out);
            }
        }
        Ok(())
    }
}
