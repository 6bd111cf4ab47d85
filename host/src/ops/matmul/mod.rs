//! Matrix products `a · bᵀ` with bias, activation, gate and residual: [`Matmul`].

mod cases;
mod check;
pub(crate) mod cpu;
mod dot;
mod packed;
pub mod reference;
pub(crate) mod select;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{
    A_IN_PIECES, B_IN_PIECES, B_IS_CONSTANT, MatmulDims, MatmulEpilogue, MatmulNorm, OUT_BY_TMA,
    OUT_IN_PIECES, THREADS, WGMMA_OUT_ROWS, WGMMA_ROW_BYTES,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work, count};
use crate::ladder::{Ladder, Rung};
use crate::launch::{Entry, Param};
use crate::ops::rmsnorm::NormWeight;
use crate::plan::{Check, planned};
use crate::stream::Stream;
use crate::tensor::{Mirror, TensorView, TensorViewMut, Views};
use crate::tensor_map::{TensorMap, Tiled};
use crate::weight::{Layout, Weight};
use packed::PackedKernels;

pub use abi::ops::matmul::{
    AHEAD_VARIANTS, MMA_VARIANTS, MatmulTile, MatmulVariant, PACKED_MMA_VARIANTS, PACKED_VARIANTS,
    PackedTile, PackedVariant, STREAM_VARIANTS, UNPACK_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
pub use cases::{CASES, MatmulCase, samples};
pub(crate) use cases::{linear, plain};
use check::{Launch, check_problem};
pub(crate) use check::{Shapes, check_bias, rows_aligned};
pub use packed::{PackedChoice, PackedChoices, select as select_packed};
pub(crate) use packed::{split_log2 as packed_split_log2, takes};
pub use select::{MatmulChoice, select};

const OP: &str = "matmul";

/// What is added to a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Bias {
    /// Nothing.
    #[default]
    None,
    /// A value for each column of out, the same for all rows.
    PerColumn,
}

/// What a product goes through on its way to out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Act {
    /// Nothing.
    #[default]
    None,
    /// The activation of each element.
    Of(Activation),
    /// A gated linear unit: b is two weights, that of the gate and that of up, and out is the activation of the gate's
    /// product times up's.
    Gated(Activation),
}

/// What is made of a product before it is stored: `act(scale · product + bias) + residual`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    /// Factor of the product.
    pub scale: f32,
    /// Activation, by itself or as a gate: SiLU or a GELU.
    pub act: Act,
    /// Whether a residual is added.
    pub residual: bool,
}

impl Epilogue {
    /// The product as it is.
    pub const NONE: Epilogue = Epilogue { scale: 1.0, act: Act::None, residual: false };

    /// The product's activation.
    pub const fn of(act: Act) -> Self {
        Epilogue { act, ..Self::NONE }
    }
}

impl Default for Epilogue {
    fn default() -> Self {
        Self::NONE
    }
}

/// How operands of f32 may be multiplied. Those of 16 bits always are exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Exactly.
    #[default]
    Full,
    /// Tensor cores may leave aside the lower 13 bits of both factors, as tf32 has it: each is up to 2^-10 too small,
    /// and a NaN that has bits there only is taken as an infinity.
    Tf32,
}

/// The RMS norm of a row of a, before it is multiplied: `a · rsqrt(mean(a²) + eps) · gain`, rounded to its type, as by
/// [`RmsNorm`](crate::ops::rmsnorm::RmsNorm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Added to the mean of the squares, inside the root.
    pub eps: f32,
    /// What the gain is.
    pub weight: NormWeight,
}

/// What is to be multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulProblem {
    /// Most products of a run, all of the same size: 1 for a single one.
    pub batch: usize,
    /// Most rows of a in a run.
    pub m: usize,
    /// Columns of out, and rows of b; twice as many rows if the product is gated.
    pub n: usize,
    /// Columns of a and b.
    pub k: usize,
    /// Type of a, b and bias.
    pub dtype: DType,
    /// Type of out: that of the operands, or f32.
    pub out_dtype: DType,
    /// What f32 may lose.
    pub precision: Precision,
    /// What is added to the sums.
    pub bias: Bias,
    /// What becomes of them then.
    pub epilogue: Epilogue,
    /// How b is packed; none if it is a plain matrix.
    pub weight: Option<Layout>,
    /// The norm of a single row of a; none if a is multiplied as it is.
    pub norm: Option<RowNorm>,
}

impl MatmulProblem {
    /// With what it must have. The other fields do nothing: `batch: 1`, `out_dtype: dtype`, `precision:
    /// Precision::default()`, `bias: Bias::None`, `epilogue: Epilogue::default()`, `weight: None`, `norm: None`.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        MatmulProblem {
            batch: 1,
            m,
            n,
            k,
            dtype,
            out_dtype: dtype,
            precision: Precision::default(),
            bias: Bias::None,
            epilogue: Epilogue::default(),
            weight: None,
            norm: None,
        }
    }
}

impl MatmulProblem {
    /// Whether b is a gate's weight and another.
    pub(crate) fn is_gated(&self) -> bool {
        matches!(self.epilogue.act, Act::Gated(_))
    }

    /// Rows of b, those of up among them.
    pub(crate) fn b_rows(&self) -> usize {
        if self.is_gated() { self.n.saturating_mul(2) } else { self.n }
    }
}

/// The tensors of a run: matrices, or for several products stacks of them. Rows and matrices may have any stride,
/// elements of a row are neighbours.
#[derive(Debug)]
pub struct MatmulArgs<'a> {
    /// `[m, k]` or `[batch, m, k]`.
    pub a: TensorView<'a>,
    /// `[n, k]` or `[batch, n, k]`: a weight as checkpoints store it, out features × in features. Of a gated product
    /// `[2 n, k]` or `[batch, 2 n, k]`: the gate's rows, then up's. Or a packed weight as planned, of a gated product
    /// with the rows of the gate and of up in turn ([`GateUp`](crate::weight::GateUp)).
    pub b: MatmulB<'a>,
    /// The rows of up, if they are not in b: then both are `[n, k]` or `[batch, n, k]`, of the same strides.
    /// Interleaved rows are two such views of every second row.
    pub up: Option<TensorView<'a>>,
    /// `[k]`, the gain of the norm; there if a norm was planned.
    pub gain: Option<TensorView<'a>>,
    /// `[n]`, of a gated product `[2 n]` with the gate's first; there if it was planned, the same for all products.
    pub bias: Option<TensorView<'a>>,
    /// There if it was planned.
    pub residual: Option<Residual<'a>>,
    /// `[m, n]` or `[batch, m, n]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> MatmulArgs<'a> {
    /// The operands and the result alone.
    pub fn new(a: TensorView<'a>, b: impl Into<MatmulB<'a>>, out: TensorViewMut<'a>) -> Self {
        MatmulArgs { a, b: b.into(), up: None, gain: None, bias: None, residual: None, out }
    }

    /// The same tensors, of which others may be put in their place.
    fn reborrow(&mut self) -> MatmulArgs<'_> {
        let MatmulArgs { a, b, up, gain, bias, residual, out } = self;
        MatmulArgs {
            a: *a,
            b: *b,
            up: *up,
            gain: *gain,
            bias: *bias,
            residual: *residual,
            out: out.reborrow(),
        }
    }
}

/// The right operand of a product.
#[derive(Clone, Copy, Debug)]
pub enum MatmulB<'a> {
    /// A matrix, or several.
    Matrix(TensorView<'a>),
    /// A packed weight.
    Packed(&'a Weight),
}

impl<'a> From<TensorView<'a>> for MatmulB<'a> {
    fn from(matrix: TensorView<'a>) -> Self {
        MatmulB::Matrix(matrix)
    }
}

impl<'a> From<&'a Weight> for MatmulB<'a> {
    fn from(weight: &'a Weight) -> Self {
        MatmulB::Packed(weight)
    }
}

impl Views for MatmulB<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        match self {
            MatmulB::Matrix(matrix) => matrix.bring(name, mirror),
            MatmulB::Packed(weight) => weight.bring(name, mirror),
        }
    }
}

/// What is added to a product's activation.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a> {
    /// What is in out.
    InPlace,
    /// Of out's shape and type, rows and matrices of any stride.
    Tensor(TensorView<'a>),
}

impl Views for Residual<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        match self {
            Residual::InPlace => Ok(()),
            Residual::Tensor(residual) => residual.bring(name, mirror),
        }
    }
}

/// Matrix product with a transposed right operand, a linear layer: `out[i, j] = Σ_l a[i, l] · b[j, l] + bias[j]`.
///
/// With an [`Epilogue`] it is `act(scale · Σ + bias) + residual`, and gated `act(scale · Σ a · gate + bias) · (scale ·
/// Σ a · up + bias') + residual`: SwiGLU with SiLU, GEGLU with a GELU (Shazeer, "GLU Variants Improve Transformer",
/// 2020). The sums never go through memory. |x| times 2^-22 is the most by which the activation of x errs, as a sum
/// errs that is x; what it makes of large negative x may be 0 below 2^-126.
///
/// With a [`RowNorm`] the row of a is normed first, a decode step's norm and product in one launch: of one row, with a
/// plain b. A card does it from Hopper on, for f16 and bf16, where b is small enough to be loaded whole before the
/// kernel ahead has ended (Qwen3-0.6B's layers: 1024 × 6144), and takes b and the gain as
/// [constants](crate::Constant) at multiples of 16 bytes; the CPU does it in any case. `supports` says so;
/// [`RmsNorm`](crate::ops::rmsnorm::RmsNorm) before the product is for all else.
///
/// An empty sum (k = 0) is 0. Several products of the same size are one run: `out[p] = a[p] · b[p]ᵀ` for every p.
///
/// **Arithmetic**: products and sums in f32, whatever the operands' type; the epilogue is computed in f32, and out is
/// rounded once. On tensor cores the sums of 16 products are cut off below the 25th bit; where out is f32, those of 16
/// to 64 are added in f32. f32 itself is multiplied there only if [`Precision::Tf32`] allows it, from 17 rows on and
/// where it suits them; the sums of 8 products are cut off then. Where Σ|a·b|, before the scale, or with bias and
/// residual is more than 3.4e38, out may be infinite or NaN, by the order of the sums.
/// **Determinism**: bitwise the same from run to run. A card has several kinds of kernels, which sum in different
/// orders. For f16 and bf16 from sm_80 on, where addresses, strides and k are multiples of 16 bytes: one row, few
/// rows, and more. Few are up to 64, on Hopper up to 16; and there is a kind for up to 128 where tiles of 64 × 64 are
/// at most three to eight multiprocessors and k is at least 1024, or tiles of 64 × 128 one to four (of more than 64
/// rows, one to three) and k is at least 4096. Else: up to 16 rows, and more, which for tf32 are two kinds where the
/// addresses differ in that. Among the products of one kind a row's result depends on that row alone, not on the
/// others or their number. On the CPU that holds for up to 8 rows. A product among others may differ in the last bits
/// from the same one alone, since the planned number decides how many warps share a sum.
/// **Aliasing**: out may not overlap the other tensors; as a residual it is [`Residual::InPlace`].
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the SIMT kernels on all floors; tensor cores for f16, bf16 and tf32 from sm_80 on, with Hopper's
/// own kernels for single products from sm_90a on.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::matmul::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (m, n, k, dtype) = (4, 6144, 1024, DType::BF16);
/// let (precision, bias, epilogue) = (Precision::Full, Bias::None, Epilogue::NONE);
/// let problem = MatmulProblem { precision, bias, epilogue, ..MatmulProblem::new(m, n, k, dtype) };
/// let matmul = Matmul::plan(&device, problem)?;
/// let a = Tensor::zeros(&stream, &[m, k], dtype)?;
/// let b = Tensor::zeros(&stream, &[n, k], dtype)?;
/// let mut out = Tensor::empty(&stream, &[m, n], dtype)?;
/// matmul.run(&stream, MatmulArgs::new(a.view(), b.view(), out.view_mut()))?;
/// println!("{}", matmul.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Matmul(Ladder<Planned>);

planned!(
    Matmul,
    MatmulProblem,
    MatmulArgs { a, b, up, gain, bias, residual, out },
    &'static MatmulVariant,
    Planned
);

impl Matmul {
    /// Plans a product with a packed weight by a kernel of the caller's choice, for all numbers of rows; an error if
    /// it cannot do the problem.
    pub fn plan_packed_with(
        device: &Device,
        problem: MatmulProblem,
        variant: &'static PackedVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let planned = match device.limits() {
            Some(limits) => {
                Planned::with_packed(device, problem, packed::forced(&limits, &problem, variant)?)
            }
            None => Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu }),
        };
        Ladder::from_rung(device, problem, planned).map(Matmul)
    }

    /// Plans a product with a packed weight by choices of the caller's, as [`select_packed`] makes them.
    pub fn plan_packed(
        device: &Device,
        problem: MatmulProblem,
        choices: PackedChoices,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        Ladder::from_rung(device, problem, Planned::with_packed(device, problem, choices)).map(Matmul)
    }
}

/// A product, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Planned {
    device: Device,
    problem: MatmulProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    Cuda {
        /// Kernels for every number of rows up to the planned one, fewest first, which take any address and stride.
        kernels: Vec<(MatmulChoice, Entry)>,
        /// The tensor cores' kernels, which take operands in pieces of 16 bytes, from `tensor_from` rows on.
        tensor: Vec<(&'static MatmulVariant, Entry)>,
        tensor_from: usize,
        /// The kernel of one row with constant b, if there is one.
        ahead: Option<(&'static MatmulVariant, Entry)>,
    },
    /// With a packed weight.
    Packed(Box<PackedKernels>),
}

impl Rung for Planned {
    const OP: &'static str = OP;
    type Problem = MatmulProblem;
    type Args<'a> = MatmulArgs<'a>;
    type Variant = &'static MatmulVariant;

    fn supports(device: &Device, problem: &MatmulProblem) -> Result<(), Error> {
        check_problem(problem)?;
        let Some(limits) = device.limits() else { return Ok(()) };
        if problem.norm.is_some() {
            return normed(&limits, problem).map(|_| ());
        }
        let plain = match &problem.weight {
            None => *problem,
            Some(layout) => {
                let choices = select_packed(&limits, problem, layout);
                if choices.dense_from.is_none() {
                    return Ok(());
                }
                // Its stripes are multiplied as plain matrices.
                MatmulProblem { n: choices.stripe, weight: None, ..*problem }
            }
        };
        select(&limits, &plain).map(|_| ())
    }

    fn plan(device: &Device, problem: MatmulProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        if let Some(layout) = &problem.weight {
            return Self::with_packed(device, problem, packed::select(&limits, &problem, layout));
        }
        if problem.norm.is_some() {
            let variant = normed(&limits, &problem)?;
            return Self::new(
                device,
                problem,
                select(&limits, &problem)?,
                Vec::new(),
                usize::MAX,
                Some(variant),
            );
        }
        let tensor = select::tensor(&limits, &problem);
        let from = select::tensor_min_rows(problem.dtype);
        let ahead = select::ahead(&limits, &problem);
        Self::new(device, problem, select(&limits, &problem)?, tensor, from, ahead)
    }

    fn plan_with(
        device: &Device,
        problem: MatmulProblem,
        variant: &'static MatmulVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let choice = MatmulChoice::forced(&limits, variant, &problem)?;
        if problem.norm.is_some() && !matches!(variant.tile, MatmulTile::Ahead { .. }) {
            return Err(Error::invalid(OP, "variant", "one that norms its row", variant.entry));
        }
        match variant.tile {
            MatmulTile::Simt { .. } | MatmulTile::Gemv { .. } => {
                Self::new(device, problem, vec![choice], Vec::new(), 0, None)
            }
            MatmulTile::Ahead { .. } => {
                let choices = select(&limits, &problem)?;
                Self::new(device, problem, choices, Vec::new(), usize::MAX, Some(variant))
            }
            _ => Self::new(device, problem, select(&limits, &problem)?, vec![variant], 0, None),
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        // A residual in place is read by each stripe of a packed weight before that is written.
        !self.problem.epilogue.residual
    }

    fn run(&self, stream: &Stream, args: &mut MatmulArgs<'_>) -> Result<(), Error> {
        let MatmulProblem { m, dtype, out_dtype, .. } = self.problem;
        let at = Check::new(OP, &self.device);
        at.stream(stream)?;
        let Some(Launch { batch, mut dims, how, b, up }) = self.check(&at, args)? else { return Ok(()) };
        let mut args = args.reborrow();
        let weight = match args.b {
            MatmulB::Packed(weight) => Some(weight),
            MatmulB::Matrix(_) => None,
        };
        if weight.is_none() {
            args.up = up;
        }
        match &self.backend {
            // No rows or columns: nothing is launched.
            Backend::Packed(_) if dims.m == 0 || dims.n == 0 => Ok(()),
            Backend::Packed(kernels) => {
                let Some(weight) = weight else {
                    return at.refuse("b", "a packed weight, as planned", "a matrix");
                };
                kernels.run(stream, (args, weight), dims, &how)
            }
            Backend::Cpu => {
                let activation = match self.problem.epilogue.act {
                    Act::None => None,
                    Act::Of(activation) | Act::Gated(activation) => Some(activation),
                };
                let (how, norm) = ((&how, activation), self.problem.norm);
                cpu::run(dtype, out_dtype, batch, &dims, (how, norm), (weight.ok_or(b), &mut args));
                Ok(())
            }
            Backend::Cuda { kernels, tensor, tensor_from, ahead } => {
                let rows = dims.m as usize;
                if let Some((variant, entry)) = ahead
                    && rows == 1
                    && dims.k <= select::ahead_max_k(&self.problem)
                    && in_pieces(&dims, dtype)
                    && dims.access & B_IS_CONSTANT != 0
                {
                    dims.split_log2 = kernels.first().map_or(0, |(choice, _)| choice.split_log2);
                    return self.launch(stream, variant, entry, batch, (&args, b), (dims, &how));
                }
                if self.problem.norm.is_some() {
                    return self.refuse_unnormed(&at, &dims);
                }
                if rows >= *tensor_from
                    && let Some((variant, entry)) = self.fastest(tensor, batch, &dims)
                {
                    dims.split_log2 = self.stream_split_log2();
                    return match variant.tile {
                        MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } => {
                            self.run_wgmma(stream, variant, entry, (&args, b), dims, &how)
                        }
                        _ => self.launch(stream, variant, entry, batch, (&args, b), (dims, &how)),
                    };
                }
                let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
                    return Err(Error::invalid(
                        OP,
                        "a",
                        format!("at most {m} rows, as planned"),
                        rows.to_string(),
                    ));
                };
                dims.split_log2 = choice.split_log2;
                self.launch(stream, choice.variant, entry, batch, (&args, b), (dims, &how))
            }
        }
    }

    fn report(&self) -> OptimizationReport {
        let MatmulProblem { batch, m, n, k, dtype, out_dtype, bias, epilogue, .. } = self.problem;
        let b_rows = self.problem.b_rows();
        let [products, rows, cols, depth, b_cols] = [batch, m, n, k, b_rows].map(count);
        let bias = if bias == Bias::PerColumn { b_cols } else { count(0) };
        let (b_elements, b_bytes) = match self.problem.weight.map(|layout| layout.bits_per_weight(k as u32)) {
            Some(bits) => (count(0), count((b_rows as f64 * k as f64 * f64::from(bits) / 8.0) as usize)),
            None => (b_cols * depth, count(0)),
        };
        let operands = products * (rows * depth + b_elements) + bias;
        let outs = products * rows * cols * count(if epilogue.residual { 2 } else { 1 });
        let act = match epilogue.act {
            Act::None => String::new(),
            Act::Of(activation) => format!(", {}", activation.name()),
            Act::Gated(activation) => format!(", gated by {}", activation.name()),
        };
        let times = if batch == 1 { String::new() } else { format!("{batch} times ") };
        let work = Work {
            problem: format!("{times}[{m}, {k}] · [{b_rows}, {k}]ᵀ {dtype} to {out_dtype}{act}"),
            bytes: operands * count(dtype.bytes()) + b_bytes + outs * count(out_dtype.bytes()),
            flops: count(2) * products * rows * b_cols * depth,
        };
        match &self.backend {
            Backend::Cuda { ahead: Some((variant, entry)), .. } if m == 1 => {
                let why =
                    "one row: b is loaded before the kernel ahead has ended, where it is a constant".into();
                let cut = Cut { why, tile: format!("{:?}", variant.tile), threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { tensor, tensor_from, .. }
                if m >= *tensor_from
                    && let Some((variant, entry)) =
                        self.fastest(tensor, batch as u32, &aligned_dims([m, b_rows, k])) =>
            {
                let why = select::why_of_tensor(variant.tile, tensor.len());
                let cut = Cut { why, tile: format!("{:?}", variant.tile), threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { kernels, .. } if let Some((choice, entry)) = kernels.last() => {
                let tile = choice.variant.tile;
                let cut = Cut { why: choice.why.clone(), tile: format!("{tile:?}"), threads: tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Packed(kernels) => {
                let (entry, tile, why) = kernels.report(m);
                OptimizationReport::new(OP, &self.device, entry, work, Cut { why, tile, threads: THREADS })
            }
            _ => OptimizationReport::new(OP, &self.device, None, work, Cut::cpu("panels")),
        }
    }
}

impl Planned {
    fn new(
        device: &Device,
        problem: MatmulProblem,
        choices: Vec<MatmulChoice>,
        tensor: Vec<&'static MatmulVariant>,
        tensor_from: usize,
        ahead: Option<&'static MatmulVariant>,
    ) -> Result<Self, Error> {
        let load = |variant: &'static MatmulVariant| {
            let entry = device.entry(OP, variant.entry, variant.tile.smem_bytes(problem.dtype))?;
            Ok::<_, Error>(match variant.tile {
                MatmulTile::Wgmma { threads, cluster, .. } | MatmulTile::Split { threads, cluster, .. } => {
                    entry.in_clusters(cluster, threads, device.profile().num_sms)?
                }
                _ => entry,
            })
        };
        let kernels = choices.into_iter().map(|choice| Ok((choice.clone(), load(choice.variant)?)));
        let kernels = kernels.collect::<Result<_, Error>>()?;
        let tensor = tensor.into_iter().map(|variant| Ok((variant, load(variant)?)));
        let tensor = tensor.collect::<Result<_, Error>>()?;
        let ahead = ahead.map(|variant| Ok::<_, Error>((variant, load(variant)?))).transpose()?;
        let backend = Backend::Cuda { kernels, tensor, tensor_from, ahead };
        Ok(Planned { device: device.clone(), problem, backend })
    }

    fn with_packed(device: &Device, problem: MatmulProblem, choices: PackedChoices) -> Result<Self, Error> {
        let backend = Backend::Packed(Box::new(PackedKernels::new(device, &problem, choices)?));
        Ok(Planned { device: device.clone(), problem, backend })
    }

    /// The fastest of the tensor cores' kernels for a launch; none if they cannot take the operands in pieces.
    fn fastest<'a>(
        &self,
        tensor: &'a [(&'static MatmulVariant, Entry)],
        batch: u32,
        dims: &MatmulDims,
    ) -> Option<&'a (&'static MatmulVariant, Entry)> {
        let (sizes, num_sms) = ([dims.m, dims.n, dims.k], self.device.profile().num_sms);
        in_pieces(dims, self.problem.dtype)
            .then(|| select::fastest(tensor, &self.problem, batch, sizes, num_sms))
            .flatten()
    }

    /// Binary logarithm of the warps that share a column's k in the `Stream` tiles.
    fn stream_split_log2(&self) -> u32 {
        let MatmulProblem { batch, k, .. } = self.problem;
        let num_sms = self.device.profile().num_sms;
        select::stream_split_log2(num_sms, self.problem.b_rows().saturating_mul(batch), k)
    }

    fn run_wgmma(
        &self,
        stream: &Stream,
        variant: &MatmulVariant,
        entry: &Entry,
        (args, b): (&MatmulArgs<'_>, TensorView<'_>),
        mut dims: MatmulDims,
        how: &MatmulEpilogue,
    ) -> Result<(), Error> {
        let ([bm, bn], cluster) = match variant.tile {
            MatmulTile::Wgmma { bm, bn, cluster, .. } => ([bm, bn], cluster),
            MatmulTile::Split { bn, cluster, .. } => ([64, bn], cluster),
            tile => return Err(Error::invalid(OP, "variant", "a tile of `wgmma`", format!("{tile:?}"))),
        };
        let MatmulArgs { a, up, bias, out, .. } = args;
        let (dtype, out_dtype) = (self.problem.dtype, self.problem.out_dtype);
        let matrix = |dtype: DType, address: u64, sizes: [u32; 3], box_rows: u32| {
            matrix_map(OP, &self.device, dtype, address, sizes, box_rows)
        };
        let (n, b_rows) = if up.is_some() { (dims.n / 2, bn / 2) } else { (dims.n, bn) };
        // The blocks of a cluster load an equal part each of what they share; of the gate and of up one has each.
        // What a block has for itself is of the rows that there are.
        let own_rows = dims.m.next_multiple_of(8).min(bm);
        let (a_box, b_box) = match (variant.tile, up) {
            (MatmulTile::Wgmma { shares_a: true, .. }, _) => (bm / cluster, b_rows),
            (MatmulTile::Wgmma { .. }, None) => (own_rows, b_rows / cluster),
            (MatmulTile::Wgmma { .. }, Some(_)) => (own_rows, b_rows),
            // They share none: each loads another part of k.
            _ => (own_rows, b_rows),
        };
        let a_map = matrix(dtype, a.address(), [dims.m, dims.k, dims.a_stride], a_box)?;
        let b_map = matrix(dtype, b.address(), [n, dims.k, dims.b_stride], b_box)?;
        let up_map = match up {
            Some(up) => matrix(dtype, up.address(), [n, dims.k, dims.b_stride], b_box)?,
            None => b_map,
        };
        // TMA loads single elements at a tensor's edge, but stores them in whole words: a tail of n that does not fill
        // 16 bytes would be written over.
        let whole_boxes = up.is_none() || bn.is_multiple_of(128);
        let persists = matches!(variant.tile, MatmulTile::Wgmma { .. });
        let in_boxes = persists
            && whole_boxes
            && out_dtype.bytes() == 2
            && n.is_multiple_of(8)
            && dims.access & OUT_IN_PIECES != 0;
        let out_map = if in_boxes {
            dims.access |= OUT_BY_TMA;
            matrix(out_dtype, out.address(), [dims.m, n, dims.out_stride], WGMMA_OUT_ROWS)?
        } else {
            a_map
        };
        let tiles = variant.tile.blocks(dims.m, dims.n, 0);
        let clusters = if persists { entry.clusters_for(tiles) } else { tiles as u32 };
        let blocks = clusters * cluster;
        let num_sms = self.device.profile().num_sms;
        dims.access |= select::next_may_start(variant.tile, dtype, blocks.into(), num_sms);
        let params = [
            (&dims).into(),
            how.into(),
            (&a_map).into(),
            (&b_map).into(),
            (&up_map).into(),
            (&out_map).into(),
            (*bias).into(),
            residual(args),
            out.into(),
            b.into(),
            up.unwrap_or(b).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view, and the maps have its sizes and strides; the
        // blocks walk over all tiles; shared memory and clusters are the tile's.
        unsafe { entry.launch(stream, [blocks, 1, 1], [variant.tile.threads(), 1, 1], &params) }
    }

    /// A kernel with a block per tile.
    fn launch(
        &self,
        stream: &Stream,
        variant: &MatmulVariant,
        entry: &Entry,
        batch: u32,
        (args, b): (&MatmulArgs<'_>, TensorView<'_>),
        (mut dims, how): (MatmulDims, &MatmulEpilogue),
    ) -> Result<(), Error> {
        let tiles = variant.tile.blocks(dims.m, dims.n, dims.split_log2);
        let blocks = tiles * u64::from(batch);
        let num_sms = self.device.profile().num_sms;
        dims.access |= select::next_may_start(variant.tile, self.problem.dtype, blocks, num_sms);
        let MatmulArgs { a, up, bias, out, .. } = args;
        let norm = self.problem.norm.unwrap_or(RowNorm { eps: 0.0, weight: NormWeight::Plain });
        let norm = MatmulNorm { eps: norm.eps, inv_cols: 1.0 / dims.k as f32, offset: norm.weight.offset() };
        let params = [
            (*a).into(),
            b.into(),
            (*up).into(),
            (*bias).into(),
            residual(args),
            out.into(),
            (&dims).into(),
            how.into(),
            args.gain.into(),
            (&norm).into(),
        ];
        // The others norm nothing.
        let params = match variant.tile {
            MatmulTile::Ahead { .. } => &params[..],
            _ => &params[..8],
        };
        // SAFETY: `check` found every row of every tensor inside its view and set `access` by what is aligned, which
        // `fastest` looks at for the tensor cores; the grid covers the products exactly, which `select` found to fit;
        // shared memory is the tile's.
        unsafe { entry.launch(stream, [tiles as u32, 1, batch], [variant.tile.threads(), 1, 1], params) }
    }

    /// Why a row is not normed whose norm has been planned; nothing if there is none.
    fn refuse_unnormed(&self, at: &Check<'_>, dims: &MatmulDims) -> Result<(), Error> {
        if [dims.m, dims.n].contains(&0) {
            return Ok(());
        }
        for (name, flag) in [("a", A_IN_PIECES), ("b", B_IN_PIECES)] {
            if dims.access & flag == 0 {
                return at.refuse(name, "a view at multiples of 16 bytes, beside a norm", "another");
            }
        }
        at.refuse(
            "b",
            "a constant beside a norm, and a gain that is one, at multiples of 16 bytes",
            "another",
        )
    }
}

/// The kernel that norms the row it multiplies.
fn normed(limits: &DeviceLimits, problem: &MatmulProblem) -> Result<&'static MatmulVariant, Error> {
    select::ahead(limits, problem).ok_or_else(|| {
        let expected = "without a norm, which this device or problem has no kernel for";
        let got = format!(
            "[1, {}] · [{}, {0}]ᵀ {} on {}",
            problem.k,
            problem.b_rows(),
            problem.dtype,
            limits.floor
        );
        Error::invalid(OP, "problem", expected, got)
    })
}

/// The address of the residual: null if there is none.
fn residual<'a>(args: &MatmulArgs<'_>) -> Param<'a> {
    Param::Address(match &args.residual {
        None => 0,
        Some(Residual::InPlace) => args.out.address(),
        Some(Residual::Tensor(residual)) => residual.address(),
    })
}

/// Whether both operands can be taken in pieces of 16 bytes, as the tensor cores' kernels do, and there is a product.
/// A k that is not a multiple of a piece is left out for all numbers of rows alike. Rows that lie over each other, as
/// after a broadcast, are not for tensor maps.
pub(crate) fn in_pieces(dims: &MatmulDims, dtype: DType) -> bool {
    let operands = A_IN_PIECES | B_IN_PIECES;
    dims.access & operands == operands
        && dims.k.is_multiple_of(16 / dtype.bytes() as u32)
        && ![dims.m, dims.n, dims.k].contains(&0)
        && dims.a_stride >= dims.k
        && dims.b_stride >= dims.k
}

/// A product of this size, n the rows of b, with operands that suit every kernel: for reports.
pub(crate) fn aligned_dims(sizes: [usize; 3]) -> MatmulDims {
    let [m, n, k] = sizes.map(|size| size as u32);
    let [a_batch_stride, b_batch_stride, out_batch_stride] = [0; 3];
    MatmulDims {
        m,
        n,
        k,
        a_stride: k,
        b_stride: k,
        out_stride: n,
        a_batch_stride,
        b_batch_stride,
        out_batch_stride,
        access: A_IN_PIECES | B_IN_PIECES,
        split_log2: 0,
    }
}

/// The tensor map of a matrix of rows, columns and a stride, in boxes whose rows are those of a `Wgmma` tile's stages.
pub(crate) fn matrix_map(
    op: &'static str,
    device: &Device,
    dtype: DType,
    address: u64,
    [rows, cols, stride]: [u32; 3],
    box_rows: u32,
) -> Result<TensorMap, Error> {
    let bytes = dtype.bytes() as u64;
    // The stride of a single row is not used; it must be one all the same.
    let stride = if rows <= 1 { u64::from(cols).next_multiple_of(16) } else { u64::from(stride) };
    let (rows, cols) = (u64::from(rows), u64::from(cols));
    let tiled = Tiled {
        dtype,
        address,
        rows,
        cols,
        stride_bytes: stride * bytes,
        outer: None,
        box_rows,
        box_cols: WGMMA_ROW_BYTES / dtype.bytes() as u32,
    };
    device.tensor_map(op, &tiled)
}
