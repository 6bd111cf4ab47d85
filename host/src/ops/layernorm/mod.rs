//! Layer normalisation of rows: [`LayerNorm`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::layernorm::{LayerNormDims, SCALAR_TILE_THREADS};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_eps, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use crate::ops::rmsnorm::NormResidual;
pub use abi::ops::layernorm::{LayerNormTile, LayerNormVariant, VARIANTS};
pub use cases::{CASES, LayerNormCase, samples};
pub use select::select;

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

impl LayerNormProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(rows: usize, cols: usize, dtype: DType, eps: f32) -> Self {
        LayerNormProblem { rows, cols, dtype, eps }
    }
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

impl<'a> LayerNormArgs<'a> {
    /// With what it must have. The other fields do nothing: `residual: None`.
    pub fn new(
        x: TensorView<'a>,
        weight: TensorView<'a>,
        bias: TensorView<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        LayerNormArgs { x, residual: None, weight, bias, out }
    }
}

/// Layer normalisation of rows.
///
/// `h = x` or `residual + x`; `out = (h − mean(h)) · rsqrt(mean((h − mean(h))²) + eps) · weight + bias`.
///
/// **Arithmetic**: f32 throughout, `rsqrt` within 2^-22.9; out is rounded once, h once if there is a residual. The
/// variance is the biased one, of the differences from the mean; rows far from zero lose nothing. **Range**: any finite
/// row: one whose sums or squares overflow or underflow is multiplied by a power of two first. **Determinism**: bitwise
/// the same from run to run; a row's result does not depend on the other rows or their number. **Aliasing**: out may
/// not overlap the other tensors. **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit;
/// never after work was enqueued. **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by
/// the hardware. **Source**: Ba, Kiros and Hinton, *Layer Normalization* (2016), equations 3 and 4.
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
pub struct LayerNorm(Plan<Self>);

planned!(
    LayerNorm,
    LayerNormProblem,
    LayerNormArgs { x, residual, weight, bias, out },
    &'static LayerNormVariant
);

impl Operator for LayerNorm {
    const OP: &'static str = OP;
    type Problem = LayerNormProblem;
    type Args<'a> = LayerNormArgs<'a>;
    type Dims = LayerNormDims;
    type Variant = &'static LayerNormVariant;
    type Kernels = Pair;

    fn check_problem(problem: &LayerNormProblem) -> Result<(), Error> {
        let LayerNormProblem { rows, cols, dtype, eps } = *problem;
        if cols == 0 {
            return Err(Error::invalid(OP, "problem", "at least one column", "0"));
        }
        check_floats(OP, dtype, &[("rows", rows), ("cols", cols)])?;
        check_eps(OP, eps)
    }

    fn select(limits: &DeviceLimits, problem: &LayerNormProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &LayerNormProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &LayerNormProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let any = select::first(problem, |variant| variant.tile == LayerNormTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], select::SMEM_BYTES)
    }

    fn check(
        at: &Check<'_>,
        problem: &LayerNormProblem,
        args: &LayerNormArgs<'_>,
    ) -> Result<LayerNormDims, Error> {
        let LayerNormArgs { x, residual, weight, bias, out } = args;
        let LayerNormProblem { rows: most, cols, dtype, eps } = *problem;
        let [x_stride] = at.rows("x", *x, dtype, &[None, Some(cols)])?;
        let rows = at.planned("x", "rows", x.shape()[0], most)?;
        let shape = &[x.shape()[0], cols].map(Some);
        let [out_stride] = at.rows("out", out.as_view(), dtype, shape)?;
        let [] = at.rows("weight", *weight, dtype, &[Some(cols)])?;
        let [] = at.rows("bias", *bias, dtype, &[Some(cols)])?;
        let residual =
            residual.as_ref().map(|residual| at.rows("residual", residual.as_view(), dtype, shape));
        let [residual_stride] = residual.transpose()?.unwrap_or_default();
        let (cols, inv_cols) = (cols as u32, 1.0 / cols as f32);
        Ok(LayerNormDims { rows, cols, x_stride, out_stride, residual_stride, inv_cols, eps })
    }

    fn cpu(problem: &LayerNormProblem, dims: &LayerNormDims, args: &mut LayerNormArgs<'_>) {
        cpu::run(problem.dtype, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: LayerNormDims, args: &LayerNormArgs<'_>) -> Result<(), Error> {
        let LayerNormArgs { x, residual, weight, bias, out } = args;
        let params = [
            (*x).into(),
            residual.as_ref().into(),
            (*weight).into(),
            (*bias).into(),
            out.into(),
            (&dims).into(),
        ];
        let (grid, threads) = if run.is_aligned {
            (select::blocks(run.choice, dims.rows), run.choice.threads)
        } else {
            (dims.rows, SCALAR_TILE_THREADS)
        };
        let entry = run.kernels.fitting(run.is_aligned);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what the tile reads in
        // pieces of 16 bytes; the grid covers exactly `rows` rows.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [threads, 1, 1], &params) }
    }

    /// Without a residual.
    fn work(problem: &LayerNormProblem) -> Work {
        let LayerNormProblem { rows, cols, dtype, .. } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            bytes: (rows + count(1)) * cols * count(2 * dtype.bytes()),
            flops: count(7) * rows * cols,
        }
    }

    fn tile(_: &Device, _: &LayerNormProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
