//! Where modules get their weights from.

mod experts;
mod on_card;
mod packed;
mod quantise;

use std::collections::{BTreeSet, HashSet};
use std::ops::{ControlFlow, Range};

use abi::DType;

use super::checkpoint::{Checkpoint, Data, Stored};
use super::layers::ProjectionWeight;
use super::part::{Cut, Part};
use super::weights::MAX_PROBLEMS;
use super::{ModelError, TensorProblem};
use on_card::Order;

pub use quantise::Quantise;

use host::weight::{GateUp, Layout, Part as WeightPart, RowScales, Stack, Weight, WeightSource};
use host::{Constant, Error, Stream, Tensor};

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
    part: Part,
    /// Tensors that are quantised in the files, and floats now though nobody asked for that.
    dequantised: Vec<String>,
}

/// Who is told how far loading is, and says whether it goes on.
pub(super) type Progress<'a> = &'a mut dyn FnMut(LoadProgress) -> ControlFlow<()>;

/// Tells it. **Errors**: [`ModelError::Stopped`] if it does not go on.
pub(super) fn tell(progress: Progress<'_>, loaded_bytes: u64, total_bytes: u64) -> Result<(), Error> {
    #[cfg(feature = "tracing")]
    tracing::debug!(target: "warpforge", loaded_bytes, total_bytes, "loading");
    match progress(LoadProgress { loaded_bytes, total_bytes }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(ModelError::Stopped { loaded_bytes, total_bytes }.into()),
    }
}

enum Source<'a> {
    /// Notes what does not fit, and hands out empty tensors.
    Check(&'a Checkpoint, Problems),
    Checkpoint(&'a Checkpoint),
    /// Notes names and shapes, and hands out empty tensors.
    List(Listed),
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
    /// Those of experts again, with the tensors that they may be in together.
    pub(super) experts: Vec<ListedExperts>,
}

/// Matrices of a mixture's experts, which a checkpoint has one by one or in one tensor.
pub(super) struct ListedExperts {
    /// The name of that tensor.
    pub(super) fused: String,
    /// And its shape, `[experts, rows, cols]`.
    pub(super) shape: [usize; 3],
    /// The names of the others: of each expert, those whose rows are above each other, of equal heights.
    pub(super) parts: Vec<Vec<String>>,
}

/// What does not fit: how much, and of very much the first.
#[derive(Default)]
struct Problems {
    count: usize,
    first: Vec<TensorProblem>,
    /// Tensors that have been looked at.
    seen: HashSet<String>,
}

impl Problems {
    fn extend(&mut self, problem: Option<TensorProblem>) {
        self.count += usize::from(problem.is_some());
        self.first.extend(problem.filter(|_| self.count <= MAX_PROBLEMS));
    }
}

/// A tensor of the files, and what is taken of it.
struct Piece<'n> {
    name: &'n str,
    /// The tensor's.
    shape: Vec<usize>,
    /// Elements of a row.
    row: usize,
    rows: Cut,
    /// Of each row.
    cols: Range<usize>,
}

impl<'n> Piece<'n> {
    /// These rows of a vector or a matrix, of each of which `cols` are taken.
    fn new(name: &'n str, rows: &Cut, row_shape: &[usize], cols: Option<&Cut>) -> Self {
        let row = row_shape.iter().product();
        let cols = cols.and_then(|cols| cols.ranges.first().cloned()).unwrap_or(0..row);
        Piece { name, shape: [&[rows.of], row_shape].concat(), row, rows: rows.clone(), cols }
    }

    /// Elements that are taken.
    fn len(&self) -> usize {
        self.rows.len().saturating_mul(self.cols.len())
    }

    /// Elements of the tensor.
    fn whole(&self) -> usize {
        self.rows.of * self.row
    }

    /// Where in the tensor the first of them is.
    fn start(&self) -> usize {
        self.rows.ranges.first().map_or(0, |rows| rows.start) * self.row + self.cols.start
    }
}

/// Elements that are converted at a time, through one buffer; a row that has more is converted whole.
const BUFFER_ELEMS: usize = 1 << 22;
/// Elements of the random block: a prime, so that rows do not repeat in step with their length.
const RANDOM_BLOCK: usize = 1_048_573;

impl<'a> Loader<'a> {
    /// Runs `build` twice on a checkpoint: to check that all its tensors are there, and to load what is a rank's part.
    /// Beside what it makes, the names of quantised tensors that have become floats though nobody asked for that.
    pub(super) fn from_checkpoint<T>(
        checkpoint: &'a Checkpoint,
        (stream, part): (&'a Stream, Part),
        (dtype, quantise): (DType, Quantise),
        progress: Progress<'a>,
        build: impl Fn(&mut Loader<'_>) -> Result<T, Error>,
    ) -> Result<(T, Vec<String>), Error> {
        let source = Source::Check(checkpoint, Problems::default());
        let mut silent = |_| ControlFlow::Continue(());
        let mut checker = Loader { part, ..Loader::new(stream, dtype, source, &mut silent) };
        build(&mut checker)?;
        let total_bytes = checker.total_bytes;
        if let Source::Check(_, Problems { count, first, .. }) = checker.source
            && count > 0
        {
            return Err(checkpoint.unusable(count, first).into());
        }
        let source = Source::Checkpoint(checkpoint);
        let mut loader =
            Loader { total_bytes, quantise, part, ..Loader::new(stream, dtype, source, progress) };
        let built = build(&mut loader)?;
        // One of which rows are taken in several places is there several times.
        loader.dequantised.sort_unstable();
        loader.dequantised.dedup();
        Ok((built, loader.dequantised))
    }

    fn new(stream: &'a Stream, dtype: DType, source: Source<'a>, progress: Progress<'a>) -> Self {
        let (quantise, part) = (Quantise::Dense, Part::WHOLE);
        let dequantised = Vec::new();
        Loader {
            stream,
            dtype,
            source,
            loaded_bytes: 0,
            total_bytes: 0,
            progress,
            quantise,
            part,
            dequantised,
        }
    }

    /// Random weights: normal with a standard deviation of 0.02, stored gains of 1, and zeros for a tensor of another
    /// type than `dtype`. For tests and measurements.
    pub(super) fn random<T>(
        seed: u64,
        (stream, part): (&'a Stream, Part),
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
        build(&mut Loader { quantise, part, ..Loader::new(stream, dtype, source, &mut go_on) })
    }

    /// Names and shapes of what `build` asks for.
    pub(super) fn list<T>(
        stream: &'a Stream,
        dtype: DType,
        build: impl Fn(&mut Loader<'_>) -> Result<T, Error>,
    ) -> Result<Listed, Error> {
        let source = Source::List(Listed::default());
        let mut silent = |_| ControlFlow::Continue(());
        let mut loader = Loader::new(stream, dtype, source, &mut silent);
        build(&mut loader)?;
        Ok(match loader.source {
            Source::List(listed) => listed,
            _ => Listed::default(),
        })
    }

    /// The stream that tensors are loaded in.
    pub(super) fn stream(&self) -> &Stream {
        self.stream
    }

    /// What is loaded of a model.
    pub(super) fn part(&self) -> Part {
        self.part
    }

    /// Rows of a matrix `[rows, cols]`.
    pub(super) fn matrix(&mut self, name: &str, rows: Cut, cols: usize) -> Result<Constant, Error> {
        self.stacked(&[(name.into(), rows)], &cols.into())
    }

    /// A tensor of more dimensions as a matrix: all but the first in one.
    pub(super) fn flattened(&mut self, name: &str, rows: usize, rest: &[usize]) -> Result<Constant, Error> {
        let piece = Piece::new(name, &rows.into(), rest, None);
        self.load(self.dtype, &[piece], &[rows, rest.iter().product()])
    }

    /// Rows of matrices of the same width above each other.
    pub(super) fn stacked(&mut self, parts: &[(String, Cut)], cols: &Cut) -> Result<Constant, Error> {
        let pieces = matrices(parts, cols);
        self.load(self.dtype, &pieces, &[height(parts), cols.len()])
    }

    /// Matrices of the same width above each other, packed if all of them are quantised in layouts that kernels take.
    pub(super) fn projection(
        &mut self,
        parts: &[(String, Cut)],
        cols: &Cut,
    ) -> Result<ProjectionWeight, Error> {
        match self.quantised_projection(parts, cols)? {
            Some(weight) => Ok(weight),
            None => Ok(ProjectionWeight::Plain(self.stacked(parts, cols)?)),
        }
    }

    /// The same with matrices of floats below them.
    pub(super) fn projection_beside(
        &mut self,
        parts: &[(String, Cut)],
        floats: &[(String, Cut)],
        cols: &Cut,
    ) -> Result<ProjectionWeight, Error> {
        match self.quantised_projection(parts, cols)? {
            Some(weight) => {
                let floats = ProjectionWeight::Plain(self.stacked(floats, cols)?);
                Ok(ProjectionWeight::Mixed(vec![weight, floats]))
            }
            // One product.
            None => Ok(ProjectionWeight::Plain(self.stacked(&[parts, floats].concat(), cols)?)),
        }
    }

    /// Matrices of the same width above each other, packed or as int8; none if one of them is, or becomes, floats.
    fn quantised_projection(
        &mut self,
        parts: &[(String, Cut)],
        cols: &Cut,
    ) -> Result<Option<ProjectionWeight>, Error> {
        self.note_projection(parts.iter().map(|(name, _)| name));
        let rows = height(parts);
        if let Some(weight) = self.random_packed(self.random_layout(self.quantise), [rows, cols.len()])? {
            return Ok(Some(ProjectionWeight::Packed(vec![weight])));
        }
        if let Some(weight) = self.quantised_by_card(parts, cols, self.quantise, Order::Above)? {
            return Ok(Some(ProjectionWeight::Packed(vec![weight])));
        }
        let Some(sources) = self.packable(parts, cols, self.quantise)? else { return Ok(None) };
        if self.rows_become_int8(parts, &sources) {
            return self.int8(&sources).map(Some);
        }
        // One product, if they are alike.
        let refs: Vec<&dyn WeightSource> = sources.iter().map(|source| &**source).collect();
        let weights = match Stack::new(refs.clone()) {
            Some(stack) => self.pack(&[&stack])?,
            None => self.pack(&refs)?,
        };
        Ok(Some(ProjectionWeight::Packed(weights)))
    }

    /// Rows of a table that tokens are looked up in or scored by. It stays as it is in the checkpoint, or becomes
    /// dense, unless there is a scheme for tables.
    pub(super) fn table(&mut self, name: &str, rows: Cut, cols: usize) -> Result<ProjectionWeight, Error> {
        let (parts, cols) = ([(name.to_owned(), rows)], Cut::from(cols));
        let quantise = self.quantise.for_tables();
        let size = [height(&parts), cols.len()];
        if let Some(weight) = self.random_packed(self.random_layout(quantise), size)? {
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        if let Some(weight) = self.quantised_by_card(&parts, &cols, quantise, Order::Above)? {
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        if let Some([source]) = self.packable(&parts, &cols, quantise)?.as_deref()
            && !source.layout().permuted
        {
            return Ok(ProjectionWeight::Packed(self.pack(&[&**source])?));
        }
        Ok(ProjectionWeight::Plain(self.stacked(&parts, &cols)?))
    }

    /// A gate and up: packed with their rows in turn if both are quantised alike, else above each other.
    pub(super) fn gate_up(
        &mut self,
        parts: &[(String, Cut); 2],
        cols: &Cut,
    ) -> Result<ProjectionWeight, Error> {
        self.note_projection(parts.iter().map(|(name, _)| name));
        let rows = height(parts);
        let layout = self.random_layout(self.quantise).map(GateUp::layout_of);
        if let Some(weight) = self.random_packed(layout, [rows, cols.len()])? {
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        if let Some(weight) = self.quantised_by_card(parts, cols, self.quantise, Order::InTurn)? {
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        let sources = self.packable(parts, cols, self.quantise)?;
        if let Some(sources) = &sources
            && self.rows_become_int8(parts, sources)
        {
            return self.int8(sources);
        }
        if let Some(sources) = sources
            && let [gate, up] = &sources[..]
            && gate.layout() == up.layout()
            && gate.global() == up.global()
            && gate.order() == up.order()
        {
            return Ok(ProjectionWeight::Packed(self.pack(&[&GateUp(&**gate, &**up)])?));
        }
        Ok(ProjectionWeight::Plain(self.stacked(parts, cols)?))
    }

    /// A matrix of random codes, if it has elements and a layout of random weights.
    fn random_packed(&self, layout: Option<Layout>, size: [usize; 2]) -> Result<Option<Weight>, Error> {
        let layout = layout.filter(|_| !size.contains(&0));
        layout.map(|layout| Weight::random(self.stream, layout, 1, size, size[0] as u64)).transpose()
    }

    /// While it is listed what there is: these are what [`Quantise::By`] quantises.
    fn note_projection<'n>(&mut self, names: impl Iterator<Item = &'n String>) {
        if let Source::List(listed) = &mut self.source {
            // Of one of which rows are taken in two places there is one.
            let unique: BTreeSet<String> = names.cloned().collect();
            listed.projections.push(unique.into_iter().collect());
        }
    }

    /// The layout of random weights, if they are to be quantised.
    fn random_layout(&self, quantise: Quantise) -> Option<Layout> {
        match self.source {
            Source::Random { .. } => quantise.of_projections().map(|scheme| scheme.layout()),
            _ => None,
        }
    }

    /// Matrices of these experts, of each these rows and columns, `[experts, rows, cols]`: the tensor `fused` if the
    /// checkpoint has it, else those that `parts` names for each expert, of equal heights, above each other. Packed if
    /// all of them are quantised in layouts that kernels take, a part's alike in all experts.
    pub(super) fn of_experts(
        &mut self,
        fused: &str,
        experts: &Cut,
        [rows, cols]: [&Cut; 2],
        parts: impl Fn(usize) -> Vec<String>,
    ) -> Result<ProjectionWeight, Error> {
        let shape = [experts.len(), rows.len(), cols.len()];
        if let Some(layout) = self.random_layout(self.quantise)
            && !shape.contains(&0)
        {
            let whole = rows.len().is_multiple_of(layout.rows as usize);
            let layout = Layout { rows: if whole { layout.rows } else { 1 }, ..layout };
            let size = [rows.len(), cols.len()];
            let weight = Weight::random(self.stream, layout, experts.len(), size, rows.len() as u64)?;
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        let is_fused = self.contains(fused);
        let names: Vec<Vec<String>> =
            if is_fused { vec![vec![fused.to_owned()]] } else { (0..experts.of).map(parts).collect() };
        names.iter().flatten().for_each(|name| self.note_projection([name].into_iter()));
        if let Source::List(listed) = &mut self.source {
            let (fused, shape) = (fused.to_owned(), [experts.of, rows.of, cols.of]);
            listed.experts.push(ListedExperts { fused, shape, parts: names.clone() });
        }
        if !shape.contains(&0)
            && let Some(weight) = self.experts_by_card((&names, is_fused), experts, [rows, cols])?
        {
            return Ok(ProjectionWeight::Packed(vec![weight]));
        }
        if let Source::Checkpoint(checkpoint) = self.source
            && self.quantise != Quantise::Dense
            && !shape.contains(&0)
            && let Some(packed) =
                self.packed_experts(checkpoint, (&names, is_fused), experts, [rows, cols])?
        {
            return Ok(ProjectionWeight::Packed(packed));
        }
        if is_fused {
            let all = Piece {
                shape: vec![experts.of, rows.of, cols.of],
                ..Piece::new(fused, &rows.repeated(experts.clone()), &[cols.of], Some(cols))
            };
            return Ok(ProjectionWeight::Plain(self.load(self.dtype, &[all], &shape)?));
        }
        let of_expert = |(expert, names): (usize, &Vec<String>)| -> Vec<(String, Cut)> {
            let own = |part: usize| match experts.contains(expert) {
                true => rows.within(names.len(), part),
                false => Cut::none(rows.of / names.len()),
            };
            names.iter().enumerate().map(|(part, name)| (name.clone(), own(part))).collect()
        };
        let parts: Vec<(String, Cut)> = names.iter().enumerate().flat_map(of_expert).collect();
        let pieces = matrices(&parts, cols);
        Ok(ProjectionWeight::Plain(self.load(self.dtype, &pieces, &shape)?))
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
            Source::List(_) | Source::Random { .. } => None,
        }
    }

    /// The taps of a depthwise convolution, `[channels, width]`; a checkpoint has them as `[channels, 1, width]`.
    pub(super) fn depthwise(&mut self, name: &str, channels: Cut, width: usize) -> Result<Constant, Error> {
        let piece = Piece::new(name, &channels, &[1, width], None);
        self.load(self.dtype, &[piece], &[channels.len(), width])
    }

    /// Elements of vectors, one after another.
    pub(super) fn vectors(&mut self, parts: &[(String, Cut)]) -> Result<Constant, Error> {
        self.vectors_as(self.dtype, parts)
    }

    /// The same in a type of their own.
    pub(super) fn vectors_as(&mut self, dtype: DType, parts: &[(String, Cut)]) -> Result<Constant, Error> {
        let pieces: Vec<Piece<'_>> =
            parts.iter().map(|(name, places)| Piece::new(name, places, &[], None)).collect();
        self.load(dtype, &pieces, &[height(parts)])
    }

    /// What keys or values of these heads are multiplied by when they are fp8: of the first of these names that the
    /// checkpoint has, one number for all heads or one for each; or 1. In f32.
    pub(super) fn head_scales(&mut self, names: &[String], heads: &Cut) -> Result<Constant, Error> {
        let name = names.iter().find(|name| self.contains(name));
        let ones = vec![1.0; heads.of];
        let all = match (name, &mut self.source) {
            (Some(name), Source::Check(checkpoint, problems)) => {
                problems.extend(checkpoint.head_scales(name, heads.of).err());
                ones
            }
            (Some(name), Source::Checkpoint(checkpoint)) => checkpoint
                .head_scales(name, heads.of)
                .map_err(|problem| checkpoint.unusable(1, vec![problem]))?,
            _ => ones,
        };
        let own: Vec<f32> = heads.ranges.iter().flat_map(|range| all[range.clone()].to_vec()).collect();
        Constant::new(Tensor::from_slice(self.stream, &[own.len()], &own)?, self.stream)
    }

    /// The gains of a norm.
    pub(super) fn gain(&mut self, name: &str, len: usize) -> Result<Constant, Error> {
        if let Source::Random { .. } = self.source {
            let ones = encode(&vec![1.0; len], self.dtype);
            let gain = Tensor::from_bytes(self.stream, &[len], self.dtype, &ones)?;
            return Constant::new(gain, self.stream);
        }
        self.vectors(&[(name.into(), len.into())])
    }

    fn load(&mut self, dtype: DType, pieces: &[Piece<'_>], shape: &[usize]) -> Result<Constant, Error> {
        let stream = self.stream;
        let tensor = match &mut self.source {
            Source::Check(checkpoint, problems) => {
                for piece in pieces {
                    // A wrong file's shapes are reported as such at the end; until then their size may be anything.
                    let bytes = piece.len().saturating_mul(dtype.bytes());
                    self.total_bytes = self.total_bytes.saturating_add(bytes as u64);
                    if problems.seen.insert(piece.name.to_owned()) {
                        problems.extend(checkpoint.tensor(piece.name, &piece.shape).err());
                    }
                }
                Tensor::empty(stream, &[0], dtype)?
            }
            Source::List(Listed { tensors, .. }) => {
                for (index, Piece { name, shape, .. }) in pieces.iter().enumerate() {
                    // One of which rows are taken in several places is there several times.
                    if pieces[..index].iter().all(|other| other.name != *name) {
                        tensors.push(((*name).to_owned(), shape.clone()));
                    }
                }
                Tensor::empty(stream, &[0], dtype)?
            }
            Source::Checkpoint(checkpoint) => {
                let checkpoint = *checkpoint;
                let mut tensor = Tensor::empty(stream, shape, dtype)?;
                let (len, mut done) = (tensor.len(), 0);
                let mut buffer = Vec::new();
                for piece in pieces {
                    let unfit = |got| {
                        let (name, expected) = (piece.name.to_owned(), "finite scales".to_owned());
                        checkpoint.unusable(1, vec![TensorProblem::Unfit { name, expected, got }])
                    };
                    let Stored { data, .. } = checkpoint
                        .tensor(piece.name, &piece.shape)
                        .map_err(|problem| checkpoint.unusable(1, vec![problem]))?;
                    let asked_for = matches!(self.quantise, Quantise::Dense | Quantise::Requantise(_));
                    if data.is_quantised() && !asked_for && piece.len() > 0 {
                        self.dequantised.push(piece.name.to_owned());
                    }
                    let step = (BUFFER_ELEMS / piece.cols.len().max(1)).max(1);
                    for rows in &piece.rows.ranges {
                        for start in rows.clone().step_by(step) {
                            let rows = start..rows.end.min(start + step);
                            let elements = rows.len() * piece.cols.len();
                            let bytes = read(&data, piece, rows, dtype, &mut buffer).map_err(unfit)?;
                            let mut target =
                                tensor.view_mut().reshape(&[len])?.slice(0, done..done + elements)?;
                            target.write_bytes(stream, bytes)?;
                            done += elements;
                            self.loaded_bytes += bytes.len() as u64;
                            tell(self.progress, self.loaded_bytes, self.total_bytes)?;
                        }
                    }
                }
                tensor
            }
            // The block is of the weights' type; what has one of its own is a bias.
            Source::Random { block, .. } if block.dtype() != dtype => Tensor::zeros(stream, shape, dtype)?,
            Source::Random { block, start } => {
                let mut tensor = Tensor::empty(stream, shape, dtype)?;
                let (len, whole) = (tensor.len(), pieces.iter().map(Piece::whole).sum::<usize>());
                // Ranks that have the same of a tensor have the same numbers, and those that have not, others.
                let empty = pieces.iter().take_while(|piece| piece.rows.len() == 0);
                let (skipped, before) =
                    empty.fold((0, 0), |(count, sum), piece| (count + 1, sum + piece.whole()));
                let first = pieces.get(skipped).map_or(0, |piece| before + piece.start());
                let mut at = (*start + first) % RANDOM_BLOCK;
                let mut done = 0;
                while done < len {
                    let part = (RANDOM_BLOCK - at).min(len - done);
                    let target = tensor.view_mut().reshape(&[len])?.slice(0, done..done + part)?;
                    stream.copy(block.view().slice(0, at..at + part)?, target)?;
                    done += part;
                    at = (at + part) % RANDOM_BLOCK;
                }
                *start = (*start + whole) % RANDOM_BLOCK;
                tensor
            }
        };
        Constant::new(tensor, stream)
    }
}

/// Rows of matrices, of each these columns.
fn matrices<'n>(parts: &'n [(String, Cut)], cols: &Cut) -> Vec<Piece<'n>> {
    parts.iter().map(|(name, rows)| Piece::new(name, rows, &[cols.of], Some(cols))).collect()
}

/// Rows of all of them.
fn height(parts: &[(String, Cut)]) -> usize {
    parts.iter().map(|(_, rows)| rows.len()).sum()
}

/// Whether a weight of this layout has these rows and columns by themselves.
fn can_be_cut(layout: &Layout, rows: &Cut, cols: &Cut) -> bool {
    let is_all = rows.is_all() && cols.is_all();
    is_all
        || matches!(&cols.ranges[..], [own] if WeightPart::<&dyn WeightSource>::fits(layout, [rows.of, cols.of], &rows.ranges, own))
}

/// These rows and columns of a weight; none if that is not between its groups. Where blocks of rows are cut, each row
/// has their scale by itself.
fn part_of<'a>(
    source: Box<dyn WeightSource + 'a>,
    rows: &Cut,
    cols: &Cut,
) -> Option<Box<dyn WeightSource + 'a>> {
    match &cols.ranges[..] {
        _ if rows.is_all() && cols.is_all() => Some(source),
        [own] if can_be_cut(&source.layout(), rows, cols) => {
            Some(Box::new(WeightPart::new(source, rows.ranges.clone(), own.clone())?))
        }
        [own] => Some(Box::new(WeightPart::new(RowScales(source), rows.ranges.clone(), own.clone())?)),
        _ => None,
    }
}

/// Rows of a tensor in this type, of each the columns that are taken: from the file, or through the buffer. Of floats
/// nothing else is read.
fn read<'b>(
    data: &Data<'b>,
    piece: &Piece<'_>,
    rows: Range<usize>,
    dtype: DType,
    buffer: &'b mut Vec<u8>,
) -> Result<&'b [u8], String> {
    let (row, cols) = (piece.row, &piece.cols);
    // In what they can be read: elements, or rows.
    let (_, unit) = data.pieces();
    let units = |elements: Range<usize>| elements.start / unit.max(1)..elements.end / unit.max(1);
    if cols.len() == row {
        let all = units(rows.start * row..rows.end * row);
        if let Some(bytes) = data.borrow(all.clone(), dtype) {
            return Ok(bytes);
        }
        buffer.resize(rows.len() * row * dtype.bytes(), 0);
        data.read(all, dtype, buffer)?;
        return Ok(buffer);
    }
    let width = cols.len() * dtype.bytes();
    buffer.resize(rows.len() * width, 0);
    let mut whole = vec![0; if unit == 1 { 0 } else { row * dtype.bytes() }];
    for (out, index) in std::iter::zip(buffer.chunks_exact_mut(width.max(1)), rows) {
        let start = index * row;
        let own = start + cols.start..start + cols.end;
        if unit != 1 {
            data.read(units(start..start + row), dtype, &mut whole)?;
            out.copy_from_slice(&whole[cols.start * dtype.bytes()..][..width]);
        } else if let Some(bytes) = data.borrow(own.clone(), dtype) {
            out.copy_from_slice(bytes);
        } else {
            data.read(own, dtype, out)?;
        }
    }
    Ok(buffer)
}

/// Values in their storage type.
pub(super) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
    }
}
