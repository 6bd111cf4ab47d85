//! Where modules get their weights from.

mod experts;

use std::ops::{ControlFlow, Range};

use abi::DType;

use super::checkpoint::{Checkpoint, Data, Stored};
use super::layers::ProjectionWeight;
use super::quant::Packable;
use super::weights::MAX_PROBLEMS;
use super::{ModelError, TensorProblem};
use host::weight::{GateUp, Layout, Quantised, ScaleType, Scheme, Stack, Weight, WeightSource};
use host::{Error, Stream, Tensor};

/// How far loading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the weights that are on the device, in the type that they are converted to.
    pub loaded_bytes: u64,
    /// Bytes of all weights in that type, whatever their size in the checkpoint.
    pub total_bytes: u64,
}

/// Hands out weight tensors: first it only notes what is asked for, so that everything that is missing is reported at
/// once and before anything is loaded; then it loads.
pub(super) struct Loader<'a> {
    stream: &'a Stream,
    dtype: DType,
    source: Source<'a>,
    loaded_bytes: u64,
    total_bytes: u64,
    progress: Progress<'a>,
    quantise: Quantise,
}

/// Who is told how far loading is, and says whether it goes on.
pub(super) type Progress<'a> = &'a mut dyn FnMut(LoadProgress) -> ControlFlow<()>;

/// Tells it. **Errors**: [`ModelError::Stopped`] if it does not go on.
pub(super) fn tell(progress: Progress<'_>, loaded_bytes: u64, total_bytes: u64) -> Result<(), Error> {
    match progress(LoadProgress { loaded_bytes, total_bytes }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(ModelError::Stopped { loaded_bytes, total_bytes }.into()),
    }
}

/// What becomes of the weights of a model's projections. As text: `as-stored`, `dense`, or a scheme's name
/// ([`Scheme::NAMED`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Quantise {
    /// They stay as they are in the checkpoint, quantised or not. What kernels have no layout for is dequantised:
    /// tables, and columns in an order of their own (GPTQ's `desc_act`).
    #[default]
    AsStored,
    /// All are dequantised.
    Dense,
    /// Those that are not quantised are, by this scheme, as they are loaded.
    By(Scheme),
    /// All are by this scheme as they are loaded; those that are quantised already from the values that they stand for,
    /// so with the errors of both.
    Requantise(Scheme),
}

impl Quantise {
    /// The scheme by which this tensor of a file is quantised.
    fn scheme(self, data: &Data<'_>) -> Option<Scheme> {
        match self {
            Quantise::By(scheme) if !data.is_quantised() => Some(scheme),
            Quantise::Requantise(scheme) => Some(scheme),
            Quantise::AsStored | Quantise::Dense | Quantise::By(_) => None,
        }
    }
}

impl std::str::FromStr for Quantise {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "as-stored" => Ok(Quantise::AsStored),
            "dense" => Ok(Quantise::Dense),
            _ => match text.strip_prefix("requantise-") {
                Some(scheme) => scheme.parse().map(Quantise::Requantise),
                None => text.parse().map(Quantise::By),
            },
        }
    }
}

enum Source<'a> {
    /// Notes what does not fit, and hands out empty tensors.
    Check(&'a Checkpoint, Problems),
    Checkpoint(&'a Checkpoint),
    /// Notes names and shapes, and hands out empty tensors.
    List {
        tensors: Vec<(String, Vec<usize>)>,
        projections: Vec<Vec<String>>,
    },
    /// A block of random elements, which all tensors are made of.
    Random {
        block: Tensor,
        start: usize,
    },
}

/// What a model asks for.
#[derive(Default)]
pub(super) struct Listed {
    /// Names and shapes.
    pub(super) tensors: Vec<(String, Vec<usize>)>,
    /// Names of the projections and experts; those together that are one product.
    pub(super) projections: Vec<Vec<String>>,
}

/// What does not fit: how much, and of very much the first.
#[derive(Default)]
struct Problems {
    count: usize,
    first: Vec<TensorProblem>,
}

impl Problems {
    fn extend(&mut self, problem: Option<TensorProblem>) {
        self.count += usize::from(problem.is_some());
        self.first.extend(problem.filter(|_| self.count <= MAX_PROBLEMS));
    }
}

/// Elements that are converted at a time, through one buffer; a row that has more is converted whole.
const BUFFER_ELEMS: usize = 1 << 22;
/// Elements of the random block: a prime, so that rows do not repeat in step with their length.
const RANDOM_BLOCK: usize = 1_048_573;

impl<'a> Loader<'a> {
    /// Runs `build` twice on a checkpoint: to check that all its tensors are there, and to load them.
    pub(super) fn from_checkpoint<T>(
        checkpoint: &'a Checkpoint,
        stream: &'a Stream,
        (dtype, quantise): (DType, Quantise),
        progress: Progress<'a>,
        build: impl Fn(&mut Loader<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let source = Source::Check(checkpoint, Problems::default());
        let mut silent = |_| ControlFlow::Continue(());
        let mut checker = Loader::new(stream, dtype, source, &mut silent);
        build(&mut checker)?;
        let total_bytes = checker.total_bytes;
        if let Source::Check(_, Problems { count, first }) = checker.source
            && count > 0
        {
            return Err(checkpoint.unusable(count, first).into());
        }
        let source = Source::Checkpoint(checkpoint);
        build(&mut Loader { total_bytes, quantise, ..Loader::new(stream, dtype, source, progress) })
    }

    fn new(stream: &'a Stream, dtype: DType, source: Source<'a>, progress: Progress<'a>) -> Self {
        Loader { stream, dtype, source, loaded_bytes: 0, total_bytes: 0, progress, quantise: Quantise::Dense }
    }

    /// Random weights: normal with a standard deviation of 0.02, stored gains of 1, and zeros for a tensor of another
    /// type than `dtype`. For tests and measurements.
    pub(super) fn random<T>(
        seed: u64,
        stream: &'a Stream,
        (dtype, quantise): (DType, Quantise),
        build: impl Fn(&mut Loader<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = seed;
        let mut uniform = move || {
            // An LCG is enough here; its upper bits are the good ones (Knuth's MMIX constants).
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        // The sum of four uniform numbers is close enough to normal; its variance is 1/3.
        let values = (0..RANDOM_BLOCK).map(|_| {
            let sum: f32 = (0..4).map(|_| uniform() - 0.5).sum();
            sum * 3f32.sqrt() * 0.02
        });
        let values: Vec<f32> = values.collect();
        let block = Tensor::from_bytes(stream, &[RANDOM_BLOCK], dtype, &encode(&values, dtype))?;
        let source = Source::Random { block, start: 0 };
        let mut go_on = |_| ControlFlow::Continue(());
        build(&mut Loader { quantise, ..Loader::new(stream, dtype, source, &mut go_on) })
    }

    /// Names and shapes of what `build` asks for.
    pub(super) fn list<T>(
        stream: &'a Stream,
        dtype: DType,
        build: impl Fn(&mut Loader<'_>) -> Result<T, Error>,
    ) -> Result<Listed, Error> {
        let source = Source::List { tensors: Vec::new(), projections: Vec::new() };
        let mut silent = |_| ControlFlow::Continue(());
        let mut loader = Loader::new(stream, dtype, source, &mut silent);
        build(&mut loader)?;
        Ok(match loader.source {
            Source::List { tensors, projections } => Listed { tensors, projections },
            _ => Listed::default(),
        })
    }

    /// The stream that tensors are loaded in.
    pub(super) fn stream(&self) -> &Stream {
        self.stream
    }

    /// A matrix `[rows, cols]`.
    pub(super) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Tensor, Error> {
        self.stacked(&[(name.into(), rows)], cols)
    }

    /// A tensor of more dimensions as a matrix: all but the first in one.
    pub(super) fn flattened(&mut self, name: &str, rows: usize, rest: &[usize]) -> Result<Tensor, Error> {
        self.load(self.dtype, &[(name, [&[rows], rest].concat())], &[rows, rest.iter().product()])
    }

    /// Matrices of the same width above each other: their names and rows.
    pub(super) fn stacked(&mut self, parts: &[(String, usize)], cols: usize) -> Result<Tensor, Error> {
        let shapes: Vec<(&str, Vec<usize>)> =
            parts.iter().map(|(name, rows)| (name.as_str(), vec![*rows, cols])).collect();
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        self.load(self.dtype, &shapes, &[rows, cols])
    }

    /// Matrices of the same width above each other, packed if all of them are quantised in layouts that kernels take.
    pub(super) fn projection(
        &mut self,
        parts: &[(String, usize)],
        cols: usize,
    ) -> Result<ProjectionWeight, Error> {
        self.note_projection(parts.iter().map(|(name, _)| name));
        if let Some(layout) = self.random_layout() {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            let weight = Weight::random(self.stream, layout, 1, [rows, cols], rows as u64)?;
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        let Some(sources) = self.packable(parts, cols)? else {
            return Ok(ProjectionWeight::Plain(self.stacked(parts, cols)?));
        };
        // One product, if they are alike.
        let refs: Vec<&dyn WeightSource> = sources.iter().map(|source| &**source).collect();
        let weights = match Stack::new(refs.clone()) {
            Some(stack) => self.pack(&[&stack])?,
            None => self.pack(&refs)?,
        };
        Ok(ProjectionWeight::Packed(weights))
    }

    /// A gate and up: packed with their rows in turn if both are quantised alike, else above each other.
    pub(super) fn gate_up(
        &mut self,
        parts: &[(String, usize); 2],
        cols: usize,
    ) -> Result<ProjectionWeight, Error> {
        self.note_projection(parts.iter().map(|(name, _)| name));
        if let Some(layout) = self.random_layout() {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            // Neighbouring rows are of different weights.
            let layout = Layout { rows: 1, ..layout };
            let weight = Weight::random(self.stream, layout, 1, [rows, cols], rows as u64)?;
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        if let Some(sources) = self.packable(parts, cols)?
            && let [gate, up] = &sources[..]
            && gate.layout() == up.layout()
            && gate.global() == up.global()
        {
            return Ok(ProjectionWeight::Packed(self.pack(&[&GateUp(&**gate, &**up)])?));
        }
        Ok(ProjectionWeight::Plain(self.stacked(parts, cols)?))
    }

    /// While it is listed what there is: these are what [`Quantise::By`] quantises.
    fn note_projection<'n>(&mut self, names: impl Iterator<Item = &'n String>) {
        if let Source::List { projections, .. } = &mut self.source {
            projections.push(names.cloned().collect());
        }
    }

    /// The layout of random weights, if they are to be quantised.
    fn random_layout(&self) -> Option<Layout> {
        match (&self.source, self.quantise) {
            (Source::Random { .. }, Quantise::By(scheme) | Quantise::Requantise(scheme)) => {
                Some(scheme.layout())
            }
            _ => None,
        }
    }

    /// The sources of packed weights, if all parts can be packed; while it is only checked what is there, none.
    fn packable(
        &self,
        parts: &[(String, usize)],
        cols: usize,
    ) -> Result<Option<Vec<Box<dyn WeightSource + 'a>>>, Error> {
        let &Source::Checkpoint(checkpoint) = &self.source else { return Ok(None) };
        if self.quantise == Quantise::Dense {
            return Ok(None);
        }
        let unusable = |problem| checkpoint.unusable(1, vec![problem]);
        let stored = |name: &str, rows: usize| checkpoint.tensor(name, &[rows, cols]).map_err(unusable);
        let global = match self.quantise {
            Quantise::By(scheme) | Quantise::Requantise(scheme) if scheme.scale == ScaleType::E4m3 => {
                let own = |(name, rows): &(String, usize)| {
                    let Stored { data, .. } = stored(name, *rows)?;
                    let read = move |row: usize, values: &mut [f32]| data.floats(row, values);
                    Ok::<_, Error>(Quantised::new([*rows, cols], scheme, read)?.global())
                };
                // One factor for all of them, so that they are one product.
                let globals = parts.iter().map(own).collect::<Result<Vec<f32>, _>>()?;
                globals.into_iter().reduce(f32::max)
            }
            _ => None,
        };
        let mut sources: Vec<Box<dyn WeightSource + 'a>> = Vec::new();
        for (name, rows) in parts {
            let Stored { data, .. } = stored(name, *rows)?;
            let unfit = |got| {
                let expected = "finite scales".to_owned();
                unusable(TensorProblem::Unfit { name: name.clone(), expected, got })
            };
            match (self.quantise.scheme(&data), data) {
                (Some(scheme), data) => {
                    let read = move |row: usize, values: &mut [f32]| data.floats(row, values);
                    sources.push(Box::new(Quantised::with_global([*rows, cols], scheme, read, global)?));
                }
                (None, Data::Quantised(matrix)) => {
                    let Some(source) = Packable::new(matrix) else { return Ok(None) };
                    if let Some(got) = source.unsound() {
                        return Err(unfit(got).into());
                    }
                    sources.push(Box::new(source));
                }
                (None, _) => return Ok(None),
            }
        }
        Ok(Some(sources))
    }

    fn pack(&mut self, sources: &[&dyn WeightSource]) -> Result<Vec<Weight>, Error> {
        let mut weights = Vec::new();
        for source in sources {
            let weight = Weight::pack(self.stream, *source)?;
            // Counted as the matrix that it stands for, as in the total.
            let [n, k] = source.size();
            self.loaded_bytes += (n * k * self.dtype.bytes()) as u64;
            tell(self.progress, self.loaded_bytes, self.total_bytes)?;
            weights.push(weight);
        }
        Ok(weights)
    }

    /// Matrices of all experts, `[experts, rows, cols]`: the tensor `fused` if the checkpoint has it, else those that
    /// `parts` names for each expert, of equal heights, above each other. Packed if all of them are quantised in
    /// layouts that kernels take, a part's alike in all experts.
    pub(super) fn of_experts(
        &mut self,
        fused: &str,
        shape: [usize; 3],
        parts: impl Fn(usize) -> Vec<String>,
    ) -> Result<ProjectionWeight, Error> {
        let [experts, rows, cols] = shape;
        if let Some(layout) = self.random_layout() {
            let whole = rows.is_multiple_of(layout.rows as usize);
            let layout = Layout { rows: if whole { layout.rows } else { 1 }, ..layout };
            let weight = Weight::random(self.stream, layout, experts, [rows, cols], rows as u64)?;
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        let is_fused = self.contains(fused);
        let names: Vec<Vec<String>> =
            if is_fused { vec![vec![fused.to_owned()]] } else { (0..experts).map(parts).collect() };
        names.iter().flatten().for_each(|name| self.note_projection([name].into_iter()));
        if let Source::Checkpoint(checkpoint) = self.source
            && self.quantise != Quantise::Dense
            && let Some(packed) = self.packed_experts(checkpoint, (&names, is_fused), shape)?
        {
            return Ok(ProjectionWeight::Packed(packed));
        }
        if is_fused {
            let fused = self.load(self.dtype, &[(fused, shape.to_vec())], &shape)?;
            return Ok(ProjectionWeight::Plain(fused));
        }
        let shapes: Vec<(&str, Vec<usize>)> = names
            .iter()
            .flat_map(|names| names.iter().map(|name| (name.as_str(), vec![rows / names.len(), cols])))
            .collect();
        Ok(ProjectionWeight::Plain(self.load(self.dtype, &shapes, &shape)?))
    }

    /// Whether the checkpoint has a tensor of this name.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.checkpoint().is_some_and(|checkpoint| checkpoint.contains(name))
    }

    /// Whether the checkpoint has the same tensor under both names.
    pub(super) fn is_same(&self, first: &str, second: &str) -> bool {
        self.checkpoint().is_some_and(|checkpoint| checkpoint.is_same(first, second))
    }

    /// The checkpoint, if there is one.
    fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::Check(checkpoint, _) | Source::Checkpoint(checkpoint) => Some(checkpoint),
            Source::List { .. } | Source::Random { .. } => None,
        }
    }

    /// Matrices above each other (`row` is the shape of a row), with the rows of all of them then in another order:
    /// ranges of rows, each row in one.
    pub(super) fn reordered(
        &mut self,
        parts: &[(String, usize)],
        row: &[usize],
        order: &[Range<usize>],
    ) -> Result<Tensor, Error> {
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let shapes: Vec<(&str, Vec<usize>)> =
            parts.iter().map(|(name, rows)| (name.as_str(), [&[*rows], row].concat())).collect();
        let tensor = self.load(self.dtype, &shapes, &[&[rows], row].concat())?;
        // While it is only checked what is there, and of random rows, the order is of no account.
        if !matches!(self.source, Source::Checkpoint(_)) {
            return Ok(tensor);
        }
        let mut reordered = Tensor::empty(self.stream, tensor.shape(), self.dtype)?;
        let mut end = 0;
        for range in order {
            let to = reordered.view_mut().slice(0, end..end + range.len())?;
            self.stream.copy(tensor.view().slice(0, range.clone())?, to)?;
            end += range.len();
        }
        Ok(reordered)
    }

    /// The taps of a depthwise convolution, `[channels, width]`; a checkpoint has them as `[channels, 1, width]`.
    pub(super) fn depthwise(&mut self, name: &str, channels: usize, width: usize) -> Result<Tensor, Error> {
        self.load(self.dtype, &[(name, vec![channels, 1, width])], &[channels, width])
    }

    /// Vectors one after another: their names and lengths.
    pub(super) fn vectors(&mut self, parts: &[(String, usize)]) -> Result<Tensor, Error> {
        self.vectors_as(self.dtype, parts)
    }

    /// The same in a type of their own.
    pub(super) fn vectors_as(&mut self, dtype: DType, parts: &[(String, usize)]) -> Result<Tensor, Error> {
        let shapes: Vec<(&str, Vec<usize>)> =
            parts.iter().map(|(name, len)| (name.as_str(), vec![*len])).collect();
        self.load(dtype, &shapes, &[parts.iter().map(|(_, len)| len).sum()])
    }

    /// The gains of a norm.
    pub(super) fn gain(&mut self, name: &str, len: usize) -> Result<Tensor, Error> {
        if let Source::Random { .. } = self.source {
            return Tensor::from_bytes(self.stream, &[len], self.dtype, &encode(&vec![1.0; len], self.dtype));
        }
        self.vectors(&[(name.into(), len)])
    }

    fn load(&mut self, dtype: DType, parts: &[(&str, Vec<usize>)], shape: &[usize]) -> Result<Tensor, Error> {
        let stream = self.stream;
        match &mut self.source {
            Source::Check(checkpoint, problems) => {
                for (name, shape) in parts {
                    problems.extend(checkpoint.tensor(name, shape).err());
                    // A wrong file's shapes are reported as such at the end; until then their size may be anything.
                    let bytes = shape.iter().fold(dtype.bytes(), |bytes, &size| bytes.saturating_mul(size));
                    self.total_bytes = self.total_bytes.saturating_add(bytes as u64);
                }
                Tensor::empty(stream, &[0], dtype)
            }
            Source::List { tensors, .. } => {
                tensors.extend(parts.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())));
                Tensor::empty(stream, &[0], dtype)
            }
            Source::Checkpoint(checkpoint) => {
                let unusable = |problem| checkpoint.unusable(1, vec![problem]);
                let mut tensor = Tensor::empty(stream, shape, dtype)?;
                let (len, mut done) = (tensor.len(), 0);
                let mut buffer = Vec::new();
                for (name, shape) in parts {
                    let Stored { data, .. } = checkpoint.tensor(name, shape).map_err(unusable)?;
                    let (pieces, piece) = data.pieces();
                    let step = (BUFFER_ELEMS / piece.max(1)).max(1);
                    for start in (0..pieces).step_by(step) {
                        let range = start..pieces.min(start + step);
                        let elements = range.len() * piece;
                        let bytes = match data.borrow(range.clone(), dtype) {
                            Some(bytes) => bytes,
                            None => {
                                buffer.resize(elements * dtype.bytes(), 0);
                                data.read(range, dtype, &mut buffer).map_err(|got| {
                                    let (name, expected) = ((*name).to_owned(), "finite scales".to_owned());
                                    unusable(TensorProblem::Unfit { name, expected, got })
                                })?;
                                &buffer
                            }
                        };
                        let mut target =
                            tensor.view_mut().reshape(&[len])?.slice(0, done..done + elements)?;
                        target.write_bytes(stream, bytes)?;
                        done += elements;
                        self.loaded_bytes += bytes.len() as u64;
                        tell(self.progress, self.loaded_bytes, self.total_bytes)?;
                    }
                }
                Ok(tensor)
            }
            // The block is of the weights' type; what has one of its own is a bias.
            Source::Random { block, .. } if block.dtype() != dtype => Tensor::zeros(stream, shape, dtype),
            Source::Random { block, start } => {
                let mut tensor = Tensor::empty(stream, shape, dtype)?;
                let len = tensor.len();
                let mut done = 0;
                while done < len {
                    let part = (RANDOM_BLOCK - *start).min(len - done);
                    let target = tensor.view_mut().reshape(&[len])?.slice(0, done..done + part)?;
                    stream.copy(block.view().slice(0, *start..*start + part)?, target)?;
                    done += part;
                    *start = (*start + part) % RANDOM_BLOCK;
                }
                Ok(tensor)
            }
        }
    }
}

/// Values in their storage type.
pub(super) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
    }
}
