//! Gated linear unit activation: `abi::ops::glu` has the kernel table, `gpu/src/ops/glu` the kernels,
//! `tests/ops/glu.rs` the properties, `benches/ops/glu.rs` the bench.

mod cases;
pub(crate) mod cpu;
pub mod reference;
mod select;

use abi::ops::glu::{BLOCK_PIECES_LOG2, GluDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::glu::{Activation, GluTile, GluVariant, VARIANTS};
pub use cases::{CASES, GluCase};
pub(crate) use cpu::{sigmoid, silu};
pub use select::{GluChoice, select};

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

/// Gated linear unit activation, elementwise.
///
/// `out = act(gate) · up`, with act of [`Activation`]; `out = act(gate)` if there is no up.
///
/// **Arithmetic**: f32, out rounded once. On a card the relative error of act is below 2^-21 for SiLU and the sigmoid,
/// 2^-20.5 for GELU with erf, and (1 + |z|)·2^-21 for GELU with tanh, z being twice the argument of tanh; nothing cancels
/// for negative gates.
/// **Extremes**: act(+inf) = inf, act(−inf) = −0 (its limit), for the sigmoid 1 and 0; act(NaN) = NaN; the product is that
/// of IEEE 754, so that act(−inf) · inf is NaN.
/// **Determinism**: bitwise the same from run to run; a row's result does not depend on the other rows or their number.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: Shazeer, *GLU Variants Improve Transformer* (2020), section 2; Hendrycks and Gimpel, *Gaussian Error
/// Linear Units* (2016), section 2.
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
pub struct Glu {
    device: Device,
    problem: GluProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: GluChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl Glu {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &GluProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: GluProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: GluProblem,
        variant: &'static GluVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| GluChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(device: &Device, problem: GluProblem, choice: Option<GluChoice>) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let unaligned = device.entry(OP, select::variant(&problem, GluTile::Scalar)?.entry, 0)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(Glu { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Glu`].
    pub fn run(&self, stream: &Stream, mut args: GluArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let (rows, strides) = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(self.problem.dtype, self.problem.activation, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let GluArgs { gate, up, out } = &args;
                let aligned = choice.variant.tile == GluTile::Pieces
                    && gate.is_aligned_16()
                    && up.is_none_or(|up| up.is_aligned_16())
                    && out.is_aligned_16();
                let (entry, per_piece) =
                    if aligned { (entry, 16 / self.problem.dtype.bytes()) } else { (unaligned, 1) };
                let tiles = RowTiles::new(rows, (self.problem.cols / per_piece) as u32, BLOCK_PIECES_LOG2);
                let grid = check_blocks(OP, "out", tiles.blocks(BLOCK_PIECES_LOG2))?;
                let [gate_stride, up_stride, out_stride] = strides;
                let dims = GluDims { tiles, gate_stride, up_stride, out_stride };
                let params =
                    [(*gate).into(), up.map_or(Param::Address(0), Param::from), out.into(), (&dims).into()];
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what the tile reads in
                // pieces of 16 bytes; the kernel leaves out what is beyond rows and cols.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    /// Rows, and the row strides of gate, up and out.
    fn check(&self, args: &GluArgs<'_>) -> Result<(u32, [u32; 3]), Error> {
        let GluArgs { gate, up, out } = args;
        let GluProblem { rows: max_rows, cols, dtype, .. } = self.problem;
        gate.expect(OP, "gate", &self.device, dtype, &[None, Some(cols)])?;
        let rows = gate.shape()[0];
        if rows > max_rows {
            let expected = format!("at most {max_rows} rows, as planned");
            return Err(Error::invalid(OP, "gate", expected, rows.to_string()));
        }
        out.expect(OP, "out", &self.device, dtype, &[Some(rows), Some(cols)])?;
        gate.expect_inner_contiguous(OP, "gate")?;
        out.expect_inner_contiguous(OP, "out")?;
        let up_stride = match up {
            Some(up) => {
                up.expect(OP, "up", &self.device, dtype, &[Some(rows), Some(cols)])?;
                up.expect_inner_contiguous(OP, "up")?;
                check_size(OP, "up", "stride", up.strides()[0])?
            }
            None => 0,
        };
        let gate_stride = check_size(OP, "gate", "stride", gate.strides()[0])?;
        Ok((rows as u32, [gate_stride, up_stride, check_size(OP, "out", "stride", out.strides()[0])?]))
    }

    /// What was chosen, and what a run of the planned size with an up should take.
    pub fn report(&self) -> OptimizationReport {
        let GluProblem { rows, cols, dtype, activation } = self.problem;
        let [rows, cols] = [rows, cols].map(count);
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("{} [{rows}, {cols}] {dtype}", activation.name()),
            why: why.into(),
            tile,
            threads,
            bytes: count(3 * dtype.bytes()) * rows * cols,
            // Negation, exponential, sum, reciprocal and two products.
            flops: count(6) * rows * cols,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let work = work(choice.why, format!("{:?}", choice.variant.tile), THREADS);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
    }
}

impl Kernel for Glu {
    type Args<'a> = GluArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: GluArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &GluProblem) -> Result<(), Error> {
    check_size(OP, "problem", "rows", problem.rows)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    Ok(())
}
