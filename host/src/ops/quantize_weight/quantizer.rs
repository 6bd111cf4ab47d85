//! Weights that are quantised where their matrices are: on a card as on the CPU.

use abi::DType;
use abi::weight::TILE_ROWS;

use super::{OP, QuantizeWeight, QuantizeWeightArgs, QuantizeWeightProblem};
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};
use crate::weight::{Counts, GateUp, ScaleType, Scheme, Unmade, Weight};

/// A weight that is made of plain matrices, one after the other, as they come: a load needs room for one of them.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{DType, Device, Tensor, ops::quantize_weight::Quantizer, weight::Scheme};
///
/// # fn main() -> Result<(), host::Error> {
/// let stream = Device::cpu().stream()?;
/// let q = Tensor::zeros(&stream, &[2048, 1024], DType::BF16)?;
/// let kv = Tensor::zeros(&stream, &[1024, 1024], DType::BF16)?;
/// let mut weight = Quantizer::new(&stream, Scheme::INT4, 1, [3072, 1024], 1.0)?;
/// weight.push(&stream, q.view())?;
/// weight.push(&stream, kv.view())?;
/// let weight = weight.finish(&stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Quantizer {
    weight: Unmade,
    scheme: Scheme,
    /// Whether rows come in pairs.
    in_turn: bool,
    /// Of each expert.
    globals: Vec<f32>,
    largest: Tensor,
    /// Rows that are there, those that an expert's last tile lacks among them.
    done: usize,
    plan: Option<(QuantizeWeightProblem, QuantizeWeight)>,
}

impl Quantizer {
    /// Room for a weight `[n, k]`, or one for each expert, quantised by a scheme with this global scale
    /// ([`Scheme::global_of`]).
    ///
    /// **Errors**: [`Error::Invalid`] for a scheme that kernels cannot take, or a size of 2^31 or more;
    /// [`Error::OutOfMemory`]; [`Error::Driver`].
    pub fn new(
        stream: &Stream,
        scheme: Scheme,
        experts: usize,
        [n, k]: [usize; 2],
        global: f32,
    ) -> Result<Self, Error> {
        Self::of_layout(stream, (scheme, false), [n, k], vec![global; experts])
    }

    /// The same for pairs of matrices whose rows come in turn, as a gate's and up's do ([`Quantizer::push_pair`]), so
    /// n is the rows of both.
    ///
    /// **Errors**: as [`Quantizer::new`].
    pub fn of_pairs(
        stream: &Stream,
        scheme: Scheme,
        experts: usize,
        [n, k]: [usize; 2],
        global: f32,
    ) -> Result<Self, Error> {
        Self::of_layout(stream, (scheme, true), [n, k], vec![global; experts])
    }

    fn of_layout(
        stream: &Stream,
        (scheme, in_turn): (Scheme, bool),
        size: [usize; 2],
        globals: Vec<f32>,
    ) -> Result<Self, Error> {
        scheme.check(OP)?;
        let layout = if in_turn { GateUp::layout_of(scheme.layout()) } else { scheme.layout() };
        let weight = Unmade::new(stream, layout, size, globals.clone())?;
        let largest = Tensor::zeros(stream, &[1], DType::F32)?;
        Ok(Quantizer { weight, scheme, in_turn, globals, largest, done: 0, plan: None })
    }

    /// Quantises the next rows, in the order of the stream: of one expert, and if they are not its last ones, as many
    /// as share tiles and scales.
    ///
    /// **Errors**: [`Error::Invalid`] for what does not fit; [`Error::Driver`].
    pub fn push(&mut self, stream: &Stream, rows: TensorView<'_>) -> Result<(), Error> {
        self.push_all(stream, rows, None)
    }

    /// Quantises the next rows of both matrices of a pair.
    ///
    /// **Errors**: as [`Quantizer::push`].
    pub fn push_pair(&mut self, stream: &Stream, [first, second]: [TensorView<'_>; 2]) -> Result<(), Error> {
        self.push_all(stream, first, Some(second))
    }

    fn push_all(
        &mut self,
        stream: &Stream,
        rows: TensorView<'_>,
        second: Option<TensorView<'_>>,
    ) -> Result<(), Error> {
        let (layout, experts, [n, k]) = self.weight.what();
        let in_turn = self.in_turn;
        if in_turn != second.is_some() {
            let names = ["rows alone", "pairs"];
            let [expected, got] = if in_turn { [names[1], names[0]] } else { names };
            return Err(Error::invalid(OP, "rows", expected, got));
        }
        let [of_each, cols] = *rows.shape() else {
            return Err(Error::invalid(OP, "rows", "a matrix", format!("shape {:?}", rows.shape())));
        };
        let per_expert = n.next_multiple_of(TILE_ROWS as usize).max(1);
        let (expert, first) = (self.done / per_expert, self.done % per_expert);
        let new = if in_turn { 2 * of_each } else { of_each };
        let unit = layout.rows.max(TILE_ROWS) as usize;
        let is_last = first + new == n;
        if cols != k || expert >= experts || first + new > n || !(is_last || new.is_multiple_of(unit)) {
            let left = n.saturating_sub(first);
            let expected =
                format!("columns {k}, and {left} rows of the weight or a multiple of {unit} below");
            let got = format!("[{new}, {cols}] behind row {first} of expert {expert} of {experts}");
            return Err(Error::invalid(OP, "rows", expected, got));
        }
        if k == 0 || new == 0 {
            return Ok(());
        }
        let problem = QuantizeWeightProblem {
            in_turn,
            global: self.globals[expert],
            ..QuantizeWeightProblem::new(of_each, k, rows.dtype(), self.scheme)
        };
        let plan = match self.plan.take() {
            Some((planned, plan)) if planned == problem => plan,
            _ => QuantizeWeight::plan(stream.device(), problem)?,
        };
        // Where these rows' parts lie: those before are whole blocks and tiles.
        let bytes = |rows: usize| {
            let before = Counts::new(&layout, rows, k);
            let scales = before.scales(&layout)?;
            let scale_bytes = scales.checked_mul(layout.stored_scale().bytes() as usize)?;
            Some([before.codes(&layout)?, scale_bytes, scales])
        };
        let [start, end] = [self.done, self.done + new].map(|rows| bytes(rows).unwrap_or_default());
        let part = |which: usize| start[which]..end[which];
        let (codes, scales, zeros) = self.weight.parts();
        let zeros = zeros.map(|zeros| zeros.view_mut().slice(0, part(2))).transpose()?;
        let parts = [
            codes.view_mut().slice(0, part(0))?,
            scales.view_mut().slice(0, part(1))?,
            self.largest.view_mut(),
        ];
        plan.run(stream, QuantizeWeightArgs { second, zeros, ..QuantizeWeightArgs::new(rows, parts) })?;
        self.plan = Some((problem, plan));
        self.done += if is_last { per_expert - first } else { new };
        Ok(())
    }

    /// The weight, when all of it is there: waits for the stream, so that products of any stream may take it.
    ///
    /// **Errors**: [`Error::Invalid`] if rows are missing, values were not finite, or scales of their type are too
    /// small for some; [`Error::Driver`].
    pub fn finish(self, stream: &Stream) -> Result<Weight, Error> {
        let (_, experts, [n, k]) = self.weight.what();
        let all = experts * n.next_multiple_of(TILE_ROWS as usize);
        if self.done != all && n * k > 0 {
            let got = format!("{} of {all}, in whole tiles", self.done);
            return Err(Error::invalid(OP, "rows", "all of them", got));
        }
        let largest = self.largest(stream)?;
        let global = self.globals.iter().copied().fold(0.0, f32::max);
        self.scheme.check_largest((OP, "rows"), largest, global)?;
        self.weight.finish(stream)
    }

    /// The largest magnitude so far. Waits for the stream.
    ///
    /// **Errors**: [`Error::Invalid`] for values that are not finite; [`Error::Driver`].
    pub fn largest(&self, stream: &Stream) -> Result<f32, Error> {
        let largest = self.largest.to_vec::<f32>(stream)?;
        match largest.first() {
            Some(value) if value.is_finite() => Ok(*value),
            value => Err(Error::invalid(OP, "rows", "finite values", format!("{value:?}"))),
        }
    }
}

impl Weight {
    /// Quantises a matrix `[n, k]`, or one for each expert, `[experts, n, k]`, by a scheme: the same bits as
    /// [`Weight::pack`], or [`Weight::pack_experts`], of [`Quantised`](crate::weight::Quantised), where the matrix is.
    /// Waits until it is there.
    ///
    /// **Errors**: [`Error::Invalid`] for a scheme that kernels cannot take, a shape that is none of these, values that
    /// are not finite, or such for which a scale of its type is too small; [`Error::OutOfMemory`]; [`Error::Driver`].
    pub fn quantize(stream: &Stream, matrix: TensorView<'_>, scheme: Scheme) -> Result<Weight, Error> {
        let (experts, size) = match *matrix.shape() {
            [n, k] => (1, [n, k]),
            [experts, n, k] => (experts, [n, k]),
            _ => {
                let got = format!("shape {:?}", matrix.shape());
                return Err(Error::invalid(OP, "matrix", "[n, k] or [experts, n, k]", got));
            }
        };
        let of_expert = |expert: usize| match matrix.shape() {
            [_, _] => Ok(matrix),
            _ => matrix.slice(0, expert..expert + 1)?.reshape(&size),
        };
        let mut globals = vec![1.0; experts];
        if scheme.scale == ScaleType::E4m3 {
            // Once for the largest magnitude of each alone.
            for (expert, global) in globals.iter_mut().enumerate() {
                let mut quantizer = Quantizer::new(stream, scheme, 1, size, 1.0)?;
                quantizer.push(stream, of_expert(expert)?)?;
                *global = scheme.global_of(quantizer.largest(stream)?);
            }
        }
        let mut quantizer = Quantizer::of_layout(stream, (scheme, false), size, globals)?;
        for expert in 0..experts {
            quantizer.push(stream, of_expert(expert)?)?;
        }
        quantizer.finish(stream)
    }
}
