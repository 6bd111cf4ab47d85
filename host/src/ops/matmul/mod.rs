//! Matrix products `a · bᵀ` with bias, activation, gate and residual: [`Matmul`].

mod cases;
mod check;
pub(crate) mod cpu;
mod dot;
mod fp8;
mod int8;
mod packed;
mod permute;
mod planned;
pub mod reference;
pub(crate) mod select;
mod tile;
mod tuned;
mod tuning;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{
    A_IN_PIECES, B_IN_PIECES, B_IS_CONSTANT, MatmulDims, MatmulEpilogue, MatmulNorm, OUT_BY_TMA,
    OUT_IN_PIECES, WGMMA_OUT_ROWS, WGMMA_ROW_BYTES, swapped_rows,
};

use crate::device::{Device, DeviceLimits, Invariance};
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work, count};
use crate::ladder::{Ladder, Rung};
use crate::launch::{Entry, Param};
use crate::ops::rmsnorm::NormWeight;
use crate::plan::{Check, planned};
use crate::stream::Stream;
use crate::tensor::{Mirror, TensorView, TensorViewMut, Views};
use crate::tensor_map::{Swizzle, TensorMap, Tiled};
use crate::weight::{Layout, Weight};
use planned::{Backend, Planned, residual};

pub use abi::ops::matmul::{
    AHEAD_VARIANTS, FP8_VARIANTS, MMA_VARIANTS, MatmulTile, MatmulVariant, PACKED_AHEAD_VARIANTS,
    PACKED_MMA_VARIANTS, PACKED_VARIANTS, PACKED_WGMMA_VARIANTS, PackedTile, PackedVariant, STREAM_VARIANTS,
    UNPACK_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
pub use cases::{CASES, MatmulCase, samples};
pub(crate) use cases::{linear, plain};
pub(crate) use check::curve;
use check::{Launch, check_problem};
pub(crate) use check::{Shapes, check_bias, rows_aligned};
pub(crate) use packed::{
    FEW_MAX_ROWS_E6M9, INVARIANT_ROWS, split_log2 as packed_split_log2, takes, unpacks_early,
};
pub use packed::{PackedChoice, PackedChoices, select as select_packed};
pub use permute::{PermuteColumns, PermuteColumnsArgs, PermuteColumnsProblem, PermuteColumnsVariant};
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

/// The RMS norm of rows of a, before they are multiplied: `a · rsqrt(mean(a²) + eps) · gain`, as by
/// [`RmsNorm`](crate::ops::rmsnorm::RmsNorm). What is rounded to a's type is that, or `a · gain`, or nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Added to the mean of the squares, inside the root.
    pub eps: f32,
    /// What the gain is.
    pub weight: NormWeight,
}

impl RowNorm {
    /// Most rows that a product norms.
    pub const MAX_ROWS: usize = 8;
}

/// What may become of the rows that are multiplied with packed weights of fp8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activations {
    /// They are multiplied as they are.
    #[default]
    AsGiven,
    /// Where kernels multiply fp8 by fp8 (Hopper; weights with scales of blocks of 128 rows or a multiple and of 128 of
    /// k or all, or but for experts one scale for each row; rows in pieces of 16 bytes, more of them than the weights'
    /// bytes bound), rows may become e4m3 too, each 128 of them by a scale of their own, `max|x| / 448`: an element
    /// then errs by up to 2^-4 of itself, or 2^-10 of that scale. That is what checkpoints with `activation_scheme:
    /// dynamic` were made for. Elsewhere, and under [`Invariance::Batch`], they are multiplied as they are.
    Fp8,
    /// Rows become int8, each by a scale of its own, `max|x| / 127`
    /// ([`QuantizeRows`](crate::ops::matmul_i8::QuantizeRows)), and are multiplied with int8 weights
    /// ([`MatmulB::Int8`]): on every device, whatever their number. That is what checkpoints of int8 weights and
    /// activations (W8A8) were made for. Sums are exact ([`MatmulI8`](crate::ops::matmul_i8::MatmulI8)), so a row's
    /// bits depend on that row alone. With a bias or an activation, but no other part of an epilogue; what is
    /// activated is rounded to its type before. Not of a [`GroupedMatmul`](crate::ops::grouped_matmul::GroupedMatmul).
    Int8,
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
    /// How b is packed; none if it is a plain matrix. Of a [permuted](Layout::permuted) layout the rows of a are
    /// brought into its order first ([`PermuteColumns`]), in memory that the plan has for m of them.
    pub weight: Option<Layout>,
    /// What may become of a.
    pub activations: Activations,
    /// The norm of the rows of a, [`RowNorm::MAX_ROWS`] at most; none if a is multiplied as it is.
    pub norm: Option<RowNorm>,
}

impl MatmulProblem {
    /// With what it must have. The other fields do nothing: `batch: 1`, `out_dtype: dtype`, `precision:
    /// Precision::default()`, `bias: Bias::None`, `epilogue: Epilogue::default()`, `weight: None`, `activations:
    /// Activations::AsGiven`, `norm: None`.
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
            activations: Activations::AsGiven,
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
    /// Of a product with [`Activations::Int8`].
    Int8 {
        /// `[n, k]` i8, rows of any stride; if the product is gated, the gate's rows above up's.
        codes: TensorView<'a>,
        /// `[n]` f32: what 1 means in each row.
        scales: TensorView<'a>,
    },
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

impl<'a> MatmulB<'a> {
    /// The matrix, or of a packed weight one of its size, of which nothing may be read: of as many experts if a number
    /// is given. An error if it is not as planned, but for a matrix's shape and type.
    pub(crate) fn planned(
        self,
        at: &Check<'_>,
        name: &'static str,
        (layout, dtype): (Option<Layout>, DType),
        (experts, [n, k]): (Option<usize>, [usize; 2]),
    ) -> Result<TensorView<'a>, Error> {
        match (self, layout) {
            (MatmulB::Matrix(matrix), None) => Ok(matrix),
            (MatmulB::Packed(weight), Some(layout)) => {
                if weight.layout() != layout {
                    let (expected, got) =
                        (format!("{layout:?}, as planned"), format!("{:?}", weight.layout()));
                    return at.refuse(name, expected, got);
                }
                let sizes = [experts.unwrap_or(1), n, k];
                let got = [weight.experts(), weight.n(), weight.k()];
                if got != sizes {
                    let expected = format!("experts, rows and columns {sizes:?}");
                    return at.refuse(name, expected, format!("{got:?}"));
                }
                if experts.is_some() { weight.outline_of_experts(dtype) } else { weight.outline(dtype) }
            }
            (MatmulB::Matrix(_), Some(_)) => at.refuse(name, "a packed weight, as planned", "a matrix"),
            (MatmulB::Packed(_), None) => at.refuse(name, "a matrix, as planned", "a packed weight"),
            (MatmulB::Int8 { .. }, _) => {
                let expected =
                    if layout.is_some() { "a packed weight, as planned" } else { "a matrix, as planned" };
                at.refuse(name, expected, "int8 weights")
            }
        }
    }
}

impl Views for MatmulB<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        match self {
            MatmulB::Matrix(matrix) => matrix.bring(name, mirror),
            MatmulB::Packed(weight) => weight.bring(name, mirror),
            MatmulB::Int8 { codes, scales } => {
                codes.bring(name, mirror)?;
                scales.bring(name, mirror)
            }
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
/// With a [`RowNorm`] the rows of a are normed first, a decode step's norm and product in one launch. Cards do it where
/// addresses, strides and k are multiples of 16 bytes:
///
/// - one row from Hopper on, in f16 and bf16. A plain b has to be small enough to be loaded whole before the kernel
///   ahead has ended (Qwen3-0.6B's layers: 1024 × 6144), and is taken as a [constant](crate::Constant), which a packed
///   one always is; that is of 4 or 8 bits, and a row has up to 6144 elements. The gain is a constant too;
/// - up to 8 rows from sm_80 on, in bf16 with a plain b that is as small. A mean of squares that f32 does not hold is
///   no obstacle, but of others out may be infinite or NaN where `Σ|a · gain · b|`, before the norm's scale, is more
///   than 3.4e38.
///
/// The CPU does it in any case. `supports` says so; [`RmsNorm`](crate::ops::rmsnorm::RmsNorm) before the product is for
/// all else.
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
/// addresses differ in that. Rows that are normed are of two kinds more, one row and up to 8 as planned. Among the
/// products of one kind a row's result depends on that row alone, not on the
/// others or their number. On the CPU that holds for up to 8 rows. A product among others may differ in the last bits
/// from the same one alone, since the planned number decides how many warps share a sum. Under
/// [`Invariance::Batch`] there is one kernel for any number of rows, of plain and of packed
/// weights, chosen by n, k, types and the planned number of products; another where k, the addresses or strides are no
/// multiples of 16 bytes, of which the stride of a single row does not count. On the CPU rows go by eight then.
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
            None => Planned { device: device.clone(), problem, backend: Backend::Cpu }.permuted(),
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
        box_matrices: 1,
        swizzle: Swizzle::Bytes128,
    };
    device.tensor_map(op, &tiled)
}
