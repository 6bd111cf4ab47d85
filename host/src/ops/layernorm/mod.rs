//! LayerNorm: `abi::ops::layernorm` has the kernel table, `gpu/src/ops/layernorm` the kernels, `tests/ops/layernorm.rs` the
//! properties, `benches/ops/layernorm.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::layernorm::{LayerNormDims, SCALAR_TILE_THREADS};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use crate::ops::rmsnorm::Residual;
pub use abi::ops::layernorm::{LayerNormTile, LayerNormVariant, VARIANTS};
pub use cases::{CASES, LayerNormCase};
pub use select::{LayerNormChoice, select};

const OP: &str = "layernorm";

/// What is to be normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormProblem {
    /// Most rows of a run.
    pub rows: usize,
    /// Elements of a row, over which mean and variance are taken.
    pub cols: usize,
    /// Type of all tensors.
    pub dtype: DType,
    /// Added to the variance, inside the root.
    pub eps: f32,
}

/// The tensors of a run. Rows are `[rows, cols]` with any row stride.
#[derive(Debug)]
pub struct LayerNormArgs<'a> {
    /// Input.
    pub x: TensorView<'a>,
    /// If there: x is added to it, and the sum, rounded to the type, is what is normalised. It holds the sum then.
    pub residual: Option<TensorViewMut<'a>>,
    /// `[cols]`.
    pub weight: TensorView<'a>,
    /// `[cols]`.
    pub bias: TensorView<'a>,
    /// Output.
    pub out: TensorViewMut<'a>,
}

/// Layer normalisation of rows.
///
/// `h = x` or `residual + x`; `out = (h − mean(h)) · rsqrt(mean((h − mean(h))²) + eps) · weight + bias`.
///
/// **Arithmetic**: f32 throughout, `rsqrt` within 2^-22.9; out is rounded once, h once if there is a residual. The variance
/// is the biased one, of the differences from the mean; rows far from zero lose nothing.
/// **Determinism**: bitwise the same from run to run; a row's result does not depend on the other rows or their number.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: Ba, Kiros and Hinton, *Layer Normalization* (2016), equations 3 and 4.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::layernorm::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let layernorm =
///     LayerNorm::plan(&device, LayerNormProblem { rows: 4, cols: 1024, dtype: DType::BF16, eps: 1e-6 })?;
/// let x = Tensor::zeros(&stream, &[4, 1024], DType::BF16)?;
/// let (weight, bias) =
///     (Tensor::zeros(&stream, &[1024], DType::BF16)?, Tensor::zeros(&stream, &[1024], DType::BF16)?);
/// let mut out = Tensor::empty(&stream, &[4, 1024], DType::BF16)?;
/// let (weight, bias, out) = (weight.view(), bias.view(), out.view_mut());
/// layernorm.run(&stream, LayerNormArgs { x: x.view(), residual: None, weight, bias, out })?;
/// println!("{}", layernorm.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LayerNorm {
    device: Device,
    problem: LayerNormProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: LayerNormChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl LayerNorm {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &LayerNormProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: LayerNormProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: LayerNormProblem,
        variant: &'static LayerNormVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| LayerNormChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: LayerNormProblem,
        choice: Option<LayerNormChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, select::SMEM_BYTES)?;
                let fallback =
                    VARIANTS.iter().find(|v| v.dtype == problem.dtype && v.tile == LayerNormTile::Scalar);
                let fallback = fallback.map_or(choice.variant, |variant| variant);
                let unaligned = device.entry(OP, fallback.entry, select::SMEM_BYTES)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(LayerNorm { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`LayerNorm`].
    pub fn run(&self, stream: &Stream, mut args: LayerNormArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(self.problem.dtype, &dims, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let LayerNormArgs { x, residual, weight, bias, out } = &args;
                let aligned = x.is_aligned_16()
                    && weight.is_aligned_16()
                    && bias.is_aligned_16()
                    && out.is_aligned_16()
                    && residual.as_ref().is_none_or(|residual| residual.is_aligned_16());
                let params = [
                    (*x).into(),
                    Param::optional(residual.as_ref()),
                    (*weight).into(),
                    (*bias).into(),
                    out.into(),
                    (&dims).into(),
                ];
                let (entry, grid, threads) = if aligned {
                    (entry, choice.blocks(dims.rows), choice.threads)
                } else {
                    (unaligned, dims.rows, SCALAR_TILE_THREADS)
                };
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what the tile reads in
                // pieces of 16 bytes; the grid covers exactly `rows` rows.
                unsafe { entry.launch(stream, [grid, 1, 1], [threads, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &LayerNormArgs<'_>) -> Result<LayerNormDims, Error> {
        let LayerNormArgs { x, residual, weight, bias, out } = args;
        let LayerNormProblem { rows: max_rows, cols, dtype, eps } = self.problem;
        x.expect(OP, "x", &self.device, dtype, &[None, Some(cols)])?;
        x.expect_inner_contiguous(OP, "x")?;
        let rows = x.shape()[0];
        if rows > max_rows {
            let expected = format!("at most {max_rows} rows, as planned");
            return Err(Error::invalid(OP, "x", expected, rows.to_string()));
        }
        out.expect(OP, "out", &self.device, dtype, &[Some(rows), Some(cols)])?;
        out.expect_inner_contiguous(OP, "out")?;
        for (argument, vector) in [("weight", weight), ("bias", bias)] {
            vector.expect(OP, argument, &self.device, dtype, &[Some(cols)])?;
            vector.expect_inner_contiguous(OP, argument)?;
        }
        let residual_stride = match residual {
            Some(residual) => {
                residual.expect(OP, "residual", &self.device, dtype, &[Some(rows), Some(cols)])?;
                residual.expect_inner_contiguous(OP, "residual")?;
                check_size(OP, "residual", "stride", residual.strides()[0])?
            }
            None => 0,
        };
        Ok(LayerNormDims {
            rows: rows as u32,
            cols: cols as u32,
            x_stride: check_size(OP, "x", "stride", x.strides()[0])?,
            out_stride: check_size(OP, "out", "stride", out.strides()[0])?,
            residual_stride,
            inv_cols: 1.0 / cols as f32,
            eps,
        })
    }

    /// What was chosen, and what a run of the planned size without a residual should take.
    pub fn report(&self) -> OptimizationReport {
        let LayerNormProblem { rows, cols, dtype, .. } = self.problem;
        let [rows, cols] = [rows, cols].map(count);
        let work = |why, tile, threads| Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            why,
            tile,
            threads,
            bytes: (rows + count(1)) * cols * count(2 * dtype.bytes()),
            flops: count(7) * rows * cols,
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

impl Kernel for LayerNorm {
    type Args<'a> = LayerNormArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: LayerNormArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &LayerNormProblem) -> Result<(), Error> {
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
