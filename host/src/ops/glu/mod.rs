//! Gated linear units and their activations: [`Glu`].

mod cases;
pub(crate) mod cpu;
pub mod reference;
mod select;

use abi::ops::glu::{BLOCK_PIECES_LOG2, GluDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::glu::{Activation, GluTile, GluVariant, VARIANTS};
pub use cases::{CASES, GluCase, samples};
pub(crate) use cpu::{sigmoid, silu};
pub use select::select;

const OP: &str = "glu";

/// What is to be computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GluProblem {
    /// Most rows of a run.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of all tensors.
    pub dtype: DType,
    /// Activation of the gate.
    pub activation: Activation,
}

impl GluProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(rows: usize, cols: usize, dtype: DType, activation: Activation) -> Self {
        GluProblem { rows, cols, dtype, activation }
    }
}

/// The tensors of a run: `[rows, cols]` each, with any row strides. Gate and up may be the two halves of one
/// `[rows, 2·cols]` matmul output.
#[derive(Debug)]
pub struct GluArgs<'a> {
    /// What the activation is applied to.
    pub gate: TensorView<'a>,
    /// What it gates; without, the result is the activation itself.
    pub up: Option<TensorView<'a>>,
    /// Output.
    pub out: TensorViewMut<'a>,
}

impl<'a> GluArgs<'a> {
    /// With what it must have. The other fields do nothing: `up: None`.
    pub fn new(gate: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        GluArgs { gate, up: None, out }
    }
}

/// Gated linear unit activation, elementwise.
///
/// `out = act(gate) · up`, with act of [`Activation`]; `out = act(gate)` if there is no up.
///
/// **Arithmetic**: f32, out rounded once. On a card the relative error of act is below 2^-21 for SiLU and the sigmoid,
/// 2^-20.5 for GELU with erf, and (1 + |z|)·2^-21 for GELU with tanh, z being twice the argument of tanh; for f16 and
/// bf16 below 2^-16 for SiLU and the sigmoid, and as much more for GELU with tanh. Nothing cancels for negative gates.
/// Where act is below 2^-126, it has the digits that are left there, also if up is large; for f16 and bf16, but not of
/// GELU with erf, those of e^z alone, up to seven bits less: of gates between −92 and −104 for SiLU.
/// **Extremes**: act(+inf) = inf, act(−inf) = −0 (its limit), for the sigmoid 1 and 0; act(NaN) = NaN; the product is
/// that of IEEE 754, so that act(−inf) · inf is NaN. **Determinism**: bitwise the same from run to run; a row's result
/// does not depend on the other rows or their number. **Aliasing**: out may not overlap the other tensors. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware. **Source**:
/// Shazeer, *GLU Variants Improve Transformer* (2020), section 2; Hendrycks and Gimpel, *Gaussian Error Linear Units*
/// (2016), section 2.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::glu::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = GluProblem { rows: 4, cols: 9728, dtype: DType::BF16, activation: Activation::Silu };
/// let glu = Glu::plan(&device, problem)?;
/// let gate_up = Tensor::zeros(&stream, &[4, 2 * 9728], DType::BF16)?;
/// let mut out = Tensor::empty(&stream, &[4, 9728], DType::BF16)?;
/// let (gate, up) = (gate_up.view().slice(1, 0..9728)?, gate_up.view().slice(1, 9728..2 * 9728)?);
/// glu.run(&stream, GluArgs { gate, up: Some(up), out: out.view_mut() })?;
/// println!("{}", glu.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Glu(Plan<Self>);

planned!(Glu, GluProblem, GluArgs { gate, up, out }, &'static GluVariant);

/// Rows of a run, and the strides of gate, up and out.
pub(crate) struct Rows {
    rows: u32,
    strides: [u32; 3],
}

impl Operator for Glu {
    const OP: &'static str = OP;
    type Problem = GluProblem;
    type Args<'a> = GluArgs<'a>;
    type Dims = Rows;
    type Variant = &'static GluVariant;
    type Kernels = Pair;

    fn check_problem(problem: &GluProblem) -> Result<(), Error> {
        check_floats(OP, problem.dtype, &[("rows", problem.rows), ("cols", problem.cols)])
    }

    fn select(limits: &DeviceLimits, problem: &GluProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &GluProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(device: &Device, problem: &GluProblem, choice: &Choice<Self::Variant>) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::variant(problem, GluTile::Scalar)?.entry], 0)
    }

    fn check(at: &Check<'_>, problem: &GluProblem, args: &GluArgs<'_>) -> Result<Rows, Error> {
        let GluArgs { gate, up, out } = args;
        let GluProblem { rows: most, cols, dtype, .. } = *problem;
        let [gate_stride] = at.rows("gate", *gate, dtype, &[None, Some(cols)])?;
        let rows = at.planned("gate", "rows", gate.shape()[0], most)?;
        let shape = &[gate.shape()[0], cols].map(Some);
        let [out_stride] = at.rows("out", out.as_view(), dtype, shape)?;
        let [up_stride] = up.map(|up| at.rows("up", up, dtype, shape)).transpose()?.unwrap_or_default();
        Ok(Rows { rows, strides: [gate_stride, up_stride, out_stride] })
    }

    fn cpu(problem: &GluProblem, _: &Rows, args: &mut GluArgs<'_>) {
        cpu::run(problem.dtype, problem.activation, args);
    }

    fn launch(run: &Run<'_, Self>, Rows { rows, strides }: Rows, args: &GluArgs<'_>) -> Result<(), Error> {
        let GluArgs { gate, up, out } = args;
        let GluProblem { cols, dtype, .. } = *run.problem;
        let in_pieces = run.is_aligned && run.choice.variant.tile == GluTile::Pieces;
        let per_piece = if in_pieces { 16 / dtype.bytes() } else { 1 };
        let tiles = RowTiles::new(rows, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "out", tiles.blocks(BLOCK_PIECES_LOG2))?;
        let [gate_stride, up_stride, out_stride] = strides;
        let dims = GluDims { tiles, gate_stride, up_stride, out_stride };
        let params = [(*gate).into(), (*up).into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what the tile reads in
        // pieces of 16 bytes; the kernel leaves out what is beyond rows and cols.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    /// With an up.
    fn work(problem: &GluProblem) -> Work {
        let GluProblem { rows, cols, dtype, activation } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        Work {
            problem: format!("{} [{rows}, {cols}] {dtype}", activation.name()),
            bytes: count(3 * dtype.bytes()) * rows * cols,
            // Negation, exponential, sum, reciprocal and two products.
            flops: count(6) * rows * cols,
        }
    }

    fn tile(_: &Device, _: &GluProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
