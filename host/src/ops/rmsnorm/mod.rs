//! RMSNorm: `abi::ops::rmsnorm` has the kernel table, `gpu/src/ops/rmsnorm` the kernels, `tests/ops/rmsnorm.rs` the
//! properties, `benches/ops/rmsnorm.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::rmsnorm::RmsNormDims;

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::rmsnorm::{RmsNormTile, RmsNormVariant, VARIANTS};
pub use cases::{CASES, Gate, Residual, RmsNormCase};
pub use select::{RmsNormChoice, select};

const OP: &str = "rmsnorm";

/// What the stored weights mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NormWeight {
    /// The gain itself.
    #[default]
    Plain,
    /// The gain less 1 (Qwen3-Next).
    ZeroCentred,
}

impl NormWeight {
    /// What is added to a stored weight.
    pub(in crate::ops) fn offset(self) -> f32 {
        match self {
            NormWeight::Plain => 0.0,
            NormWeight::ZeroCentred => 1.0,
        }
    }
}

/// What is to be normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormProblem {
    /// Most rows of a run: tokens, times heads for a norm per head.
    pub rows: usize,
    /// Elements of a row, over which the mean is taken.
    pub cols: usize,
    /// Type of all tensors.
    pub dtype: DType,
    /// Added to the mean of the squares, inside the root.
    pub eps: f32,
    /// What the stored weights mean.
    pub weight: NormWeight,
}

/// The tensors of a run. `T` rows are `[T, cols]`, or `[T / heads, heads, cols]`; all row tensors have the same
/// shape. The last dimension must have stride 1; the others may have any stride.
#[derive(Debug)]
pub struct RmsNormArgs<'a> {
    /// Input.
    pub x: TensorView<'a>,
    /// If there: x is added to it, and the sum, rounded to the type, is what is normalised. It holds the sum then.
    pub residual: Option<TensorViewMut<'a>>,
    /// `[cols]`.
    pub weight: TensorView<'a>,
    /// If there: what is normalised and weighted is multiplied by its SiLU.
    pub gate: Option<TensorView<'a>>,
    /// Output.
    pub out: TensorViewMut<'a>,
}

/// Root mean square layer normalisation of rows.
///
/// `h = x` or `residual + x`; `out = h · rsqrt(mean(h²) + eps) · (weight + offset)`, offset 1 for zero-centred weights;
/// with a gate `out · silu(gate)`: norm first, gate second.
///
/// **Arithmetic**: f32 throughout, `rsqrt` within 2^-22.9; out is rounded once, h once if there is a residual.
/// **Determinism**: bitwise the same from run to run; a row's result does not depend on the other rows or their number.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: Zhang and Sennrich, *Root Mean Square Layer Normalization* (2019), equation 4; the gate as in Yang et al.,
/// *Gated Delta Networks* (2024), section 3.4.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::rmsnorm::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = RmsNormProblem { rows: 4, cols: 2560, dtype: DType::BF16, eps: 1e-6, weight: NormWeight::Plain };
/// let rmsnorm = RmsNorm::plan(&device, problem)?;
/// let x = Tensor::zeros(&stream, &[4, 2560], DType::BF16)?;
/// let weight = Tensor::zeros(&stream, &[2560], DType::BF16)?;
/// let mut out = Tensor::empty(&stream, &[4, 2560], DType::BF16)?;
/// let (weight, out) = (weight.view(), out.view_mut());
/// let args = RmsNormArgs { x: x.view(), residual: None, weight, gate: None, out };
/// rmsnorm.run(&stream, args)?;
/// println!("{}", rmsnorm.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RmsNorm {
    device: Device,
    problem: RmsNormProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: RmsNormChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl RmsNorm {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &RmsNormProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: RmsNormProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: RmsNormProblem,
        variant: &'static RmsNormVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| RmsNormChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(device: &Device, problem: RmsNormProblem, choice: Option<RmsNormChoice>) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, choice.smem_bytes())?;
                let fallback =
                    VARIANTS.iter().find(|v| v.dtype == problem.dtype && v.tile == RmsNormTile::Scalar);
                let fallback = fallback.map_or(choice.variant, |variant| variant);
                let unaligned = device.entry(OP, fallback.entry, select::SMEM_BYTES)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(RmsNorm { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`RmsNorm`].
    pub fn run(&self, stream: &Stream, mut args: RmsNormArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => cpu::run(self.problem.dtype, &dims, &mut args),
            Backend::Cuda { choice, entry, unaligned } => {
                let RmsNormArgs { x, residual, weight, gate, out } = &args;
                let aligned = x.is_aligned_16()
                    && weight.is_aligned_16()
                    && out.is_aligned_16()
                    && residual.as_ref().is_none_or(|residual| residual.is_aligned_16())
                    && gate.is_none_or(|gate| gate.is_aligned_16());
                let params = [
                    (*x).into(),
                    Param::optional(residual.as_ref()),
                    (*weight).into(),
                    gate.map_or(Param::Address(0), Param::from),
                    out.into(),
                    (&dims).into(),
                ];
                let (entry, grid, threads) = if aligned {
                    (entry, choice.blocks(dims.rows), choice.threads)
                } else {
                    (unaligned, dims.rows, abi::ops::rmsnorm::SCALAR_TILE_THREADS)
                };
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what the tile reads in
                // pieces of 16 bytes; the grid covers exactly `rows` rows.
                unsafe { entry.launch(stream, [grid, 1, 1], [threads, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &RmsNormArgs<'_>) -> Result<RmsNormDims, Error> {
        let RmsNormArgs { x, residual, weight, gate, out } = args;
        let RmsNormProblem { rows: max_rows, cols, dtype, eps, weight: kind } = self.problem;
        let shape: &[Option<usize>] = match x.shape().len() {
            3 => &[None, None, Some(cols)],
            _ => &[None, Some(cols)],
        };
        x.expect(OP, "x", &self.device, dtype, shape)?;
        out.expect_same(OP, "out", &self.device, dtype, x.shape())?;
        weight.expect(OP, "weight", &self.device, dtype, &[Some(cols)])?;
        weight.expect_inner_contiguous(OP, "weight")?;
        x.expect_inner_contiguous(OP, "x")?;
        out.expect_inner_contiguous(OP, "out")?;
        if let Some(residual) = residual {
            residual.expect_same(OP, "residual", &self.device, dtype, x.shape())?;
            residual.expect_inner_contiguous(OP, "residual")?;
        }
        if let Some(gate) = gate {
            gate.expect_same(OP, "gate", &self.device, dtype, x.shape())?;
            gate.expect_inner_contiguous(OP, "gate")?;
        }
        let rows = x.len() / cols;
        if rows > max_rows {
            return Err(Error::invalid(
                OP,
                "x",
                format!("at most {max_rows} rows, as planned"),
                rows.to_string(),
            ));
        }
        let strides = |argument, strides: &[usize]| -> Result<(u32, u32), Error> {
            match *strides {
                [token, head, _] => Ok((
                    check_size(OP, argument, "stride", token)?,
                    check_size(OP, argument, "stride", head)?,
                )),
                [token, ..] => Ok((check_size(OP, argument, "stride", token)?, 0)),
                [] => Ok((0, 0)),
            }
        };
        let (x_token_stride, x_head_stride) = strides("x", x.strides())?;
        let (out_token_stride, out_head_stride) = strides("out", out.strides())?;
        let residual_strides =
            residual.as_ref().map(|residual| strides("residual", residual.strides())).transpose()?;
        let (residual_token_stride, residual_head_stride) = residual_strides.unwrap_or((0, 0));
        let gate_strides = gate.map(|gate| strides("gate", gate.strides())).transpose()?;
        let (gate_token_stride, gate_head_stride) = gate_strides.unwrap_or((0, 0));
        let heads = if let [_, heads, _] = *x.shape() { heads.max(1) as u32 } else { 1 };
        Ok(RmsNormDims {
            rows: rows as u32,
            cols: cols as u32,
            heads,
            x_token_stride,
            x_head_stride,
            out_token_stride,
            out_head_stride,
            residual_token_stride,
            residual_head_stride,
            gate_token_stride,
            gate_head_stride,
            inv_cols: 1.0 / cols as f32,
            eps,
            weight_offset: kind.offset(),
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let RmsNormProblem { rows, cols, dtype, .. } = self.problem;
        let [rows, cols] = [rows, cols].map(count);
        let work = |why, tile, threads| Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            why,
            tile,
            threads,
            bytes: (count(2) * rows + count(1)) * cols * count(dtype.bytes()),
            flops: count(4) * rows * cols,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card".into(), "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let work = work(choice.why.clone(), format!("{:?}", choice.variant.tile), choice.threads);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
    }
}

impl Kernel for RmsNorm {
    type Args<'a> = RmsNormArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: RmsNormArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &RmsNormProblem) -> Result<(), Error> {
    check_size(OP, "problem", "rows", problem.rows)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    if problem.cols == 0 {
        return Err(Error::invalid(OP, "problem", "at least one column", "0"));
    }
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    if !(problem.eps >= 0.0 && problem.eps.is_finite()) {
        return Err(Error::invalid(OP, "problem", "a finite eps of at least 0", problem.eps.to_string()));
    }
    Ok(())
}
