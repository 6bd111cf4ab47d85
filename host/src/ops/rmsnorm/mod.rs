//! Root mean square normalisation of rows, with residual and gate: [`RmsNorm`].

mod cases;
pub(crate) mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::rmsnorm::{RmsNormDims, SCALAR_TILE_THREADS};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_eps, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::rmsnorm::{RmsNormTile, RmsNormVariant, VARIANTS};
pub use cases::{CASES, Gate, NormResidual, RmsNormCase, samples};
pub use select::select;

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

impl RmsNormProblem {
    /// With what it must have. The other fields do nothing: `weight: NormWeight::Plain`.
    pub fn new(rows: usize, cols: usize, dtype: DType, eps: f32) -> Self {
        RmsNormProblem { rows, cols, dtype, eps, weight: NormWeight::Plain }
    }
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

impl<'a> RmsNormArgs<'a> {
    /// With what it must have. The other fields do nothing: `residual: None`, `gate: None`.
    pub fn new(x: TensorView<'a>, weight: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        RmsNormArgs { x, residual: None, weight, gate: None, out }
    }
}

/// Root mean square layer normalisation of rows.
///
/// `h = x` or `residual + x`; `out = h · rsqrt(mean(h²) + eps) · (weight + offset)`, offset 1 for zero-centred weights;
/// with a gate `out · silu(gate)`: norm first, gate second.
///
/// **Arithmetic**: f32 throughout, `rsqrt` within 2^-22.9; out is rounded once, h once if there is a residual.
/// **Range**: any finite row: one whose squares overflow or underflow is multiplied by a power of two first. What it is
/// multiplied by after the norm is so in f32, weight first: a product on the way that is beyond 3.4e38 is infinite,
/// below 1.2e-38 perhaps 0. **Determinism**: bitwise the same from run to run; a row's result does not depend on the
/// other rows or their number. **Aliasing**: out may not overlap the other tensors. **Errors**: [`Error::Invalid`] for
/// a shape, stride, type or place that does not fit; never after work was enqueued. **Architectures**: the same kernels
/// on all floors; from sm_80 on bf16 is packed by the hardware. **Source**: Zhang and Sennrich, *Root Mean Square Layer
/// Normalization* (2019), equation 4; the gate as in Yang et al., *Gated Delta Networks* (2024), section 3.4.
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
pub struct RmsNorm(Plan<Self>);

planned!(RmsNorm, RmsNormProblem, RmsNormArgs { x, residual, weight, gate, out }, &'static RmsNormVariant);

impl Operator for RmsNorm {
    const OP: &'static str = OP;
    type Problem = RmsNormProblem;
    type Args<'a> = RmsNormArgs<'a>;
    type Dims = RmsNormDims;
    type Variant = &'static RmsNormVariant;
    type Kernels = Pair;

    fn check_problem(problem: &RmsNormProblem) -> Result<(), Error> {
        let RmsNormProblem { rows, cols, dtype, eps, .. } = *problem;
        if cols == 0 {
            return Err(Error::invalid(OP, "problem", "at least one column", "0"));
        }
        check_floats(OP, dtype, &[("rows", rows), ("cols", cols)])?;
        check_eps(OP, eps)
    }

    fn select(limits: &DeviceLimits, problem: &RmsNormProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &RmsNormProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &RmsNormProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let any = select::first(problem, |variant| variant.tile == RmsNormTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], select::SMEM_BYTES)
    }

    fn check(at: &Check<'_>, problem: &RmsNormProblem, args: &RmsNormArgs<'_>) -> Result<RmsNormDims, Error> {
        let RmsNormArgs { x, residual, weight, gate, out } = args;
        let RmsNormProblem { rows, cols, dtype, eps, weight: kind } = *problem;
        let any = [None, None, Some(cols)];
        let any = if x.shape().len() == 3 { &any[..] } else { &any[1..] };
        let [x_token_stride, x_head_stride] = at.rows("x", *x, dtype, any)?;
        let mut same = [None; 3];
        for (size, &of_x) in std::iter::zip(&mut same, x.shape()) {
            *size = Some(of_x);
        }
        let same = &same[..x.shape().len()];
        let [out_token_stride, out_head_stride] = at.rows("out", out.as_view(), dtype, same)?;
        let [] = at.rows("weight", *weight, dtype, &[Some(cols)])?;
        let residual_strides =
            residual.as_ref().map(|residual| at.rows("residual", residual.as_view(), dtype, same));
        let [residual_token_stride, residual_head_stride] = residual_strides.transpose()?.unwrap_or_default();
        let gate_strides = gate.map(|gate| at.rows("gate", gate, dtype, same));
        let [gate_token_stride, gate_head_stride] = gate_strides.transpose()?.unwrap_or_default();
        Ok(RmsNormDims {
            rows: at.planned("x", "rows", x.len() / cols, rows)?,
            cols: cols as u32,
            heads: if let [_, heads, _] = *x.shape() { heads.max(1) as u32 } else { 1 },
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

    fn cpu(problem: &RmsNormProblem, dims: &RmsNormDims, args: &mut RmsNormArgs<'_>) {
        cpu::run(problem.dtype, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: RmsNormDims, args: &RmsNormArgs<'_>) -> Result<(), Error> {
        let RmsNormArgs { x, residual, weight, gate, out } = args;
        let params = [
            (*x).into(),
            residual.as_ref().into(),
            (*weight).into(),
            (*gate).into(),
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

    fn work(problem: &RmsNormProblem) -> Work {
        let RmsNormProblem { rows, cols, dtype, .. } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            bytes: (count(2) * rows + count(1)) * cols * count(dtype.bytes()),
            flops: count(4) * rows * cols,
        }
    }

    fn tile(_: &Device, _: &RmsNormProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
