//! The weights of a model that is loaded, quantised where they are.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use abi::DType;
use half::{bf16, f16};
use host::weight::{
    GateUp, QuantErrors, Quantised, RowScales, ScaleType, Scheme, Stack, Weight, WeightSource,
};
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
    /// Those of each expert, these parts above each other.
    OfExperts { parts: &'static [&'static str] },
}

/// What a gated MLP's first weight is made of.
const GATE_UP: [&str; 2] = ["gate", "up"];

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

    /// The parts of a weight, which were of this type.
    fn add(&mut self, made: Vec<Made>, dtype: DType, weight: &Weight) {
        let bytes_after = weight.bytes() as u64 / made.len().max(1) as u64;
        for Made { name, shape, errors } in made {
            let bytes_before = (shape[0] * shape[1] * dtype.bytes()) as u64;
            self.bytes_before += bytes_before;
            self.bytes_after += bytes_after;
            self.tensors.push(QuantisedTensor { name, shape, errors, bytes_before, bytes_after });
        }
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
            Slot { name: name.into(), weight: gate_up, rows: Rows::GateUp },
            Slot { name: format!("{name}.down"), weight: down, rows: Rows::AsTheyAre },
        ]
    }
    let prefix = format!("layers.{index}");
    match part {
        FeedForward::Mlp(mlp) => of_mlp(mlp, &prefix),
        FeedForward::Moe(moe) => {
            let of_experts = |weight, parts| {
                let name = format!("{prefix}.experts");
                Slot { name, weight, rows: Rows::OfExperts { parts } }
            };
            let mut slots =
                vec![of_experts(&mut moe.gate_up, &GATE_UP), of_experts(&mut moe.down, &["down"])];
            slots.extend(moe.shared.iter_mut().flat_map(|mlp| of_mlp(mlp, &format!("{prefix}.shared"))));
            slots
        }
    }
}

/// A matrix of floats in host memory.
struct Matrix {
    values: Vec<f32>,
    cols: usize,
}

impl Matrix {
    fn download(stream: &Stream, view: TensorView<'_>) -> Result<Arc<Self>, Error> {
        let values = match view.dtype() {
            DType::F16 => view.to_vec::<f16>(stream)?.into_iter().map(f16::to_f32).collect(),
            DType::BF16 => view.to_vec::<bf16>(stream)?.into_iter().map(bf16::to_f32).collect(),
            _ => view.to_vec::<f32>(stream)?,
        };
        Ok(Arc::new(Matrix { values, cols: view.shape().last().copied().unwrap_or(0) }))
    }

    /// Some of its rows by a scheme, whose global scale is this one if there is one.
    fn quantised(
        self: &Arc<Self>,
        rows: Range<usize>,
        (name, scheme): (&str, &Scheme),
        global: Option<f32>,
    ) -> Result<Quantised<impl Fn(usize, &mut [f32]) + Sync + use<>>, Error> {
        let (matrix, cols, first) = (self.clone(), self.cols, rows.start);
        let read = move |row: usize, out: &mut [f32]| {
            out.copy_from_slice(&matrix.values[(first + row) * cols..][..cols]);
        };
        Quantised::with_global([rows.len(), cols], *scheme, read, global).map_err(of_tensor(name))
    }
}

/// What has been quantised into a weight: equal parts of it.
struct Made {
    name: String,
    shape: [usize; 2],
    errors: QuantErrors,
}

impl Made {
    fn new<R: Fn(usize, &mut [f32]) + Sync>(name: &str, source: &Quantised<R>) -> Self {
        Made { name: name.into(), shape: source.size(), errors: source.errors() }
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
        let &[n, cols] = view.shape() else {
            return self.of_experts(stream, (name, view), scheme, report);
        };
        let matrix = Matrix::download(stream, view)?;
        let packed = match *self {
            Rows::GateUp => {
                let names = GATE_UP.map(|part| format!("{name}.{part}"));
                let by = |part: usize, global| {
                    matrix.quantised(part * n / 2..(part + 1) * n / 2, (&names[part], scheme), global)
                };
                let (mut gate, mut up) = (by(0, None)?, by(1, None)?);
                if gate.global() != up.global() {
                    // One global scale for both, so that they are one weight.
                    let global = Some(gate.global().max(up.global()));
                    (gate, up) = (by(0, global)?, by(1, global)?);
                }
                let weight = Weight::pack(stream, &GateUp(&gate, &up))?;
                report.add(
                    vec![Made::new(&names[0], &gate), Made::new(&names[1], &up)],
                    view.dtype(),
                    &weight,
                );
                weight
            }
            _ => {
                let source = matrix.quantised(0..n - self.floats(), (name, scheme), None)?;
                let weight = Weight::pack(stream, &source)?;
                report.add(vec![Made::new(name, &source)], view.dtype(), &weight);
                weight
            }
        };
        let packed = ProjectionWeight::Packed(vec![packed]);
        let kept = self.floats();
        if kept == 0 {
            return Ok(packed);
        }
        let mut rest = Tensor::empty(stream, &[kept, cols], view.dtype())?;
        stream.copy(view.slice(0, n - kept..n)?, rest.view_mut())?;
        report.keep(&format!("{name}, its last {kept} rows"), "gates", rest.bytes());
        let rest = ProjectionWeight::Plain(Constant::new(rest, stream)?);
        Ok(ProjectionWeight::Mixed(vec![packed, rest]))
    }

    /// The last rows, which stay floats.
    fn floats(&self) -> usize {
        if let Rows::Above { floats } = self { *floats } else { 0 }
    }

    /// Experts' matrices `[experts, rows, cols]`, the parts of each above each other: in one weight, or where parts
    /// have global scales of their own in one for each. One expert comes to the host at a time.
    fn of_experts(
        &self,
        stream: &Stream,
        (name, view): (&str, TensorView<'_>),
        scheme: &Scheme,
        report: &mut QuantReport,
    ) -> Result<ProjectionWeight, Error> {
        let (&[experts, rows, cols], &Rows::OfExperts { parts }) = (view.shape(), self) else {
            let got = format!("{name} of {:?}", view.shape());
            return Err(Error::invalid(OP, "self", "matrices, and experts of three dimensions", got));
        };
        let height = rows / parts.len();
        let together = if scheme.scale == ScaleType::E4m3 { 1 } else { parts.len() };
        let mut weights = Vec::new();
        for (index, parts) in parts.chunks(together).enumerate() {
            let own = index * height..(index + parts.len()) * height;
            let mut made = Vec::new();
            let weight = Weight::pack_experts(stream, experts, |expert| {
                let all = view.slice(0, expert..expert + 1)?.reshape(&[rows, cols])?;
                let matrix = Matrix::download(stream, all.slice(0, own.clone())?)?;
                let mut sources: Vec<Box<dyn WeightSource>> = Vec::new();
                for (place, part) in parts.iter().enumerate() {
                    let name = format!("{name}.{expert}.{part}");
                    let rows = place * height..(place + 1) * height;
                    let source = matrix.quantised(rows, (&name, scheme), None)?;
                    made.push(Made::new(&name, &source));
                    let is_whole = height.is_multiple_of(scheme.rows as usize);
                    sources.push(if is_whole { Box::new(source) } else { Box::new(RowScales(source)) });
                }
                let alike = "parts of one layout and global scale";
                Stack::new(sources).ok_or_else(|| Error::invalid(OP, "self", alike, "others"))
            })?;
            report.add(made, view.dtype(), &weight);
            weights.push(weight);
        }
        Ok(ProjectionWeight::Packed(weights))
    }
}
