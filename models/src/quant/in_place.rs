//! The weights of a model that is loaded, quantised where they are.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use abi::DType;
use half::{bf16, f16};
use host::weight::{GateUp, Quantised, RowScales, ScaleType, Scheme, Stack, Weight, WeightSource};
use host::{Constant, Error, Stream, Tensor, TensorView};

use super::{QuantReport, QuantisedTensor, of_tensor};
use crate::layers::{FeedForward, Mixer, Mlp, ProjectionWeight};
use crate::loader::{LoadProgress, tell};
use crate::model::Model;

const OP: &str = "Model::quantise";

/// How the rows of a weight lie, and come to lie.
enum Rows {
    /// As they are.
    AsTheyAre,
    /// A gate's above up's, which become rows in turn.
    GateUp,
    /// The last ones stay floats.
    Above { floats: usize },
    /// Those of each expert, in parts above each other.
    OfExperts { parts: usize },
}

/// A weight that may be quantised.
struct Slot<'a> {
    name: String,
    weight: &'a mut ProjectionWeight,
    rows: Rows,
}

impl Model {
    /// Quantises the weights of projections and experts that are floats, one after the other: what
    /// [`Quantise::By`](crate::Quantise::By) does as a model is loaded, of one that is there, such as one of
    /// [`Model::random`]. The report has the errors of each, experts one by one, and what stays as it is: tables, and
    /// what is quantised already. A layer's projections of one input are one weight, whose blocks of rows that share a
    /// scale go over their borders.
    ///
    /// The floats come to the host, one weight at a time, and their memory is given back when its codes are there.
    /// `progress` is told bytes of the weights as they were; [`ControlFlow::Break`] ends it.
    ///
    /// # Errors
    /// [`Error::Invalid`] while a clone of the model, a session or a batch has its weights, for a scheme whose layout
    /// kernels cannot take, and for a value that is not finite, with its weight; [`Error::OutOfMemory`];
    /// [`ModelError::Stopped`](crate::ModelError::Stopped). What has been quantised before stays so: the model can be
    /// used, and quantised on.
    pub fn quantise(
        &mut self,
        scheme: Scheme,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<QuantReport, Error> {
        if let Some(problem) = scheme.layout().problem() {
            return Err(Error::invalid(OP, "scheme", problem, format!("{scheme:?}")));
        }
        let stream = self.device().stream()?;
        let Some(decoder) = Arc::get_mut(self.decoder_mut()) else {
            let expected = "a model whose weights nothing else has";
            return Err(Error::invalid(OP, "self", expected, "a clone, a session or a batch has them"));
        };
        let mut report = QuantReport::default();
        for (name, table) in [("embed_tokens", Some(&decoder.embedding)), ("lm_head", decoder.head.as_ref())]
        {
            if let Some(table) = table {
                report.keep(name, "a table", table.bytes());
            }
        }
        let slots: Vec<Slot<'_>> = decoder
            .layers
            .iter_mut()
            .enumerate()
            .flat_map(|(index, layer)| {
                let mixer = of_mixer(&mut layer.mixer, index);
                mixer.into_iter().chain(of_feed_forward(&mut layer.feed_forward, index))
            })
            .collect();
        let total = slots.iter().map(|slot| slot.weight.bytes() as u64).sum();
        let mut done = 0;
        for slot in slots {
            let bytes = slot.weight.bytes();
            match slot.weight {
                ProjectionWeight::Plain(floats) if !floats.is_empty() => {
                    *slot.weight =
                        slot.rows.quantised(&stream, (&slot.name, floats), &scheme, &mut report)?;
                }
                ProjectionWeight::Plain(_) => {}
                other => report.keep(&slot.name, "quantised already", other.bytes()),
            }
            done += bytes as u64;
            tell(progress, done, total)?;
        }
        Ok(report)
    }
}

impl QuantReport {
    fn keep(&mut self, name: &str, reason: &str, bytes: usize) {
        self.kept.push((name.into(), reason.into()));
        self.bytes_before += bytes as u64;
        self.bytes_after += bytes as u64;
    }

    fn add(&mut self, tensor: QuantisedTensor) {
        self.bytes_before += tensor.bytes_before;
        self.bytes_after += tensor.bytes_after;
        self.tensors.push(tensor);
    }
}

fn of_mixer(mixer: &mut Mixer, index: usize) -> Vec<Slot<'_>> {
    let name = |part: &str| format!("layers.{index}.{part}");
    let slot = |part, weight| Slot { name: name(part), weight, rows: Rows::AsTheyAre };
    match mixer {
        Mixer::Attention(attention) => {
            vec![slot("qkv", &mut attention.qkv.weight), slot("o", &mut attention.o.weight)]
        }
        Mixer::DeltaNet(net) => {
            let rows = Rows::Above { floats: 2 * net.a_log.len() };
            let input = Slot { rows, ..slot("input", &mut net.input.weight) };
            vec![input, slot("out", &mut net.out.weight)]
        }
        Mixer::Latent(latent) => vec![
            slot("a", &mut latent.a.weight),
            slot("q_b", &mut latent.q_b.weight),
            slot("o", &mut latent.o.weight),
        ],
    }
}

fn of_feed_forward(part: &mut FeedForward, index: usize) -> Vec<Slot<'_>> {
    fn of_mlp<'a>(mlp: &'a mut Mlp, name: &str) -> Vec<Slot<'a>> {
        let (gate_up, down) = (&mut mlp.gate_up.weight, &mut mlp.down.weight);
        vec![
            Slot { name: format!("{name}.gate_up"), weight: gate_up, rows: Rows::GateUp },
            Slot { name: format!("{name}.down"), weight: down, rows: Rows::AsTheyAre },
        ]
    }
    let prefix = format!("layers.{index}");
    match part {
        FeedForward::Mlp(mlp) => of_mlp(mlp, &prefix),
        FeedForward::Moe(moe) => {
            let of_experts = |name: &str, weight, parts| Slot {
                name: format!("{prefix}.experts.{name}"),
                weight,
                rows: Rows::OfExperts { parts },
            };
            let mut slots =
                vec![of_experts("gate_up", &mut moe.gate_up, 2), of_experts("down", &mut moe.down, 1)];
            slots.extend(moe.shared.iter_mut().flat_map(|mlp| of_mlp(mlp, &format!("{prefix}.shared"))));
            slots
        }
    }
}

/// Rows of a matrix in host memory, quantised.
struct Matrix {
    values: Vec<f32>,
    cols: usize,
    bytes: usize,
}

impl Matrix {
    fn download(stream: &Stream, view: TensorView<'_>) -> Result<Self, Error> {
        let values = match view.dtype() {
            DType::F16 => view.to_vec::<f16>(stream)?.into_iter().map(f16::to_f32).collect(),
            DType::BF16 => view.to_vec::<bf16>(stream)?.into_iter().map(bf16::to_f32).collect(),
            _ => view.to_vec::<f32>(stream)?,
        };
        let cols = view.shape().last().copied().unwrap_or(0);
        Ok(Matrix { bytes: values.len() * view.dtype().bytes(), values, cols })
    }

    fn rows(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    /// Some of its rows by a scheme, whose global scale is this one if there is one.
    fn quantised(
        &self,
        rows: Range<usize>,
        scheme: &Scheme,
        global: Option<f32>,
    ) -> Result<Quantised<impl Fn(usize, &mut [f32]) + Sync + use<'_>>, Error> {
        let (cols, first) = (self.cols, rows.start);
        let read = move |row: usize, out: &mut [f32]| {
            out.copy_from_slice(&self.values[(first + row) * cols..][..cols]);
        };
        Quantised::with_global([rows.len(), cols], *scheme, read, global)
    }
}

impl Rows {
    fn quantised(
        &self,
        stream: &Stream,
        (name, floats): (&str, &Constant),
        scheme: &Scheme,
        report: &mut QuantReport,
    ) -> Result<ProjectionWeight, Error> {
        let view = floats.view();
        if let &Rows::OfExperts { parts } = self {
            return of_experts(stream, (name, view), parts, scheme, report);
        }
        let matrix = Matrix::download(stream, view)?;
        let (n, bytes) = (matrix.rows(), matrix.bytes);
        let by = |rows: Range<usize>, global| matrix.quantised(rows, scheme, global).map_err(of_tensor(name));
        let mut add = |rows: usize, errors, weight: &Weight| {
            let bytes_before = (bytes / n * rows) as u64;
            let shape = [rows, matrix.cols];
            let bytes_after = weight.bytes() as u64;
            report.add(QuantisedTensor { name: name.into(), shape, errors, bytes_before, bytes_after });
        };
        match *self {
            Rows::GateUp => {
                let (gate, up) = (by(0..n / 2, None)?, by(n / 2..n, None)?);
                // One global scale for both, so that they are one weight.
                let global = (scheme.scale == ScaleType::E4m3).then(|| gate.global().max(up.global()));
                let (gate, up) = (by(0..n / 2, global)?, by(n / 2..n, global)?);
                let weight = Weight::pack(stream, &GateUp(&gate, &up))?;
                add(n, by(0..n, global)?.errors(), &weight);
                Ok(ProjectionWeight::Packed(vec![weight]))
            }
            Rows::Above { floats: kept } => {
                let own = n.saturating_sub(kept);
                let source = by(0..own, None)?;
                let weight = Weight::pack(stream, &source)?;
                add(own, source.errors(), &weight);
                let mut rest = Tensor::empty(stream, &[n - own, matrix.cols], view.dtype())?;
                stream.copy(view.slice(0, own..n)?, rest.view_mut())?;
                let rest = ProjectionWeight::Plain(Constant::new(rest, stream)?);
                report.keep(&format!("{name}, its last {} rows", n - own), "gates", rest.bytes());
                Ok(ProjectionWeight::Mixed(vec![ProjectionWeight::Packed(vec![weight]), rest]))
            }
            Rows::AsTheyAre | Rows::OfExperts { .. } => {
                let source = by(0..n, None)?;
                let weight = Weight::pack(stream, &source)?;
                add(n, source.errors(), &weight);
                Ok(ProjectionWeight::Packed(vec![weight]))
            }
        }
    }
}

/// Experts' matrices `[experts, rows, cols]`, of `parts` above each other: in one weight, or where parts have global
/// scales of their own in one for each.
fn of_experts(
    stream: &Stream,
    (name, view): (&str, TensorView<'_>),
    parts: usize,
    scheme: &Scheme,
    report: &mut QuantReport,
) -> Result<ProjectionWeight, Error> {
    let &[experts, rows, cols] = view.shape() else {
        return Err(Error::invalid(OP, "self", "experts of three dimensions", format!("{:?}", view.shape())));
    };
    let height = rows / parts;
    let together = if scheme.scale == ScaleType::E4m3 { 1 } else { parts };
    let mut weights = Vec::new();
    for first in (0..parts).step_by(together) {
        let own = first * height..(first + together) * height;
        // Of one expert at a time.
        let mut matrices = Vec::new();
        for expert in 0..experts {
            let all = view.slice(0, expert..expert + 1)?.reshape(&[rows, cols])?;
            matrices.push(all.slice(0, own.clone())?);
        }
        let mut made = Vec::new();
        let weight = Weight::pack_experts(stream, experts, |expert| {
            let name = format!("{name}.{expert}");
            let matrix = Arc::new(Matrix::download(stream, matrices[expert])?);
            let mut sources: Vec<Box<dyn WeightSource>> = Vec::new();
            for part in 0..together {
                let (matrix, first) = (matrix.clone(), part * height);
                let read = move |row: usize, out: &mut [f32]| {
                    out.copy_from_slice(&matrix.values[(first + row) * cols..][..cols]);
                };
                let source = Quantised::new([height, cols], *scheme, read).map_err(of_tensor(&name))?;
                made.push((name.clone(), source.errors(), matrix_bytes(height, cols, view.dtype())));
                let is_whole = height.is_multiple_of(scheme.rows as usize);
                sources.push(if is_whole { Box::new(source) } else { Box::new(RowScales(source)) });
            }
            let alike = "parts of one layout and global scale";
            Stack::new(sources).ok_or_else(|| Error::invalid(OP, "self", alike, "others"))
        })?;
        let share = weight.bytes() as u64 / made.len().max(1) as u64;
        for (name, errors, bytes_before) in made {
            let shape = [height, cols];
            report.add(QuantisedTensor { name, shape, errors, bytes_before, bytes_after: share });
        }
        weights.push(weight);
    }
    Ok(ProjectionWeight::Packed(weights))
}

fn matrix_bytes(rows: usize, cols: usize, dtype: DType) -> u64 {
    (rows * cols * dtype.bytes()) as u64
}
