//! Attention over two parts of the keys as attention over all of them: [`AttentionMerge`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::attention_merge::{AttentionMergeDims, BLOCK_PIECES_LOG2, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::param::Param;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::attention_merge::{AttentionMergeTile, AttentionMergeVariant, VARIANTS};
pub use cases::{AttentionMergeCase, CASES, samples};
pub use select::select;

const OP: &str = "attention_merge";

/// What is to be merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionMergeProblem {
    /// Most queries of a run.
    pub tokens: usize,
    /// Heads of a query.
    pub heads: usize,
    /// Elements of a head, at least 1.
    pub dim: usize,
    /// Type of the parts and the result.
    pub dtype: DType,
}

impl AttentionMergeProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(tokens: usize, heads: usize, dim: usize, dtype: DType) -> Self {
        AttentionMergeProblem { tokens, heads, dim, dtype }
    }
}

/// The tensors of a run. The last dimension must have stride 1; the others may have any stride.
#[derive(Debug)]
pub struct AttentionMergeArgs<'a> {
    /// `[tokens, heads, dim]`: what attention over some keys gives.
    pub a: TensorView<'a>,
    /// `[heads, tokens]` f32: its `lse` ([`AttentionArgs::lse`](crate::ops::attention::AttentionArgs::lse)).
    pub a_lse: TensorView<'a>,
    /// `[tokens, heads, dim]`: what attention over the other keys gives.
    pub b: TensorView<'a>,
    /// `[heads, tokens]` f32: its `lse`.
    pub b_lse: TensorView<'a>,
    /// `[tokens, heads, dim]`.
    pub out: TensorViewMut<'a>,
    /// `[heads, tokens]` f32, if there: the `lse` of all keys, for a further part.
    pub lse: Option<TensorViewMut<'a>>,
}

impl<'a> AttentionMergeArgs<'a> {
    /// Both parts, each with its logarithms, and the result. The other field does nothing: `lse: None`.
    pub fn new(
        [(a, a_lse), (b, b_lse)]: [(TensorView<'a>, TensorView<'a>); 2],
        out: TensorViewMut<'a>,
    ) -> Self {
        AttentionMergeArgs { a, a_lse, b, b_lse, out, lse: None }
    }
}

/// Attention over two parts of the keys as attention over all of them, by the logarithms of the sums of exponentials:
/// `out = (w_a · a + w_b · b) / (w_a + w_b)`, `lse = m + ln(w_a + w_b)`, where `m = max(lse_a, lse_b)` and `w = exp(lse
/// − m)`.
///
/// That is how keys which sequences share are read once for all of them, how a tree of drafts is verified behind the
/// keys that all of them see, and how a key cache is shared out:
/// [`CascadeAttention`](crate::ops::attention::CascadeAttention).
///
/// **No keys**: a part whose logarithm is −∞, or so far below the other's that its weight is 0, counts nothing,
/// whatever it holds; of no keys at all the result is 0 and its logarithm −∞. **Arithmetic**: in f32, rounded once;
/// weights err by a few units in the last place and by the rounding of `lse_a − lse_b`, lse by a few units. A logarithm
/// of NaN makes its row so. **Aliasing**: out and lse may not overlap the other tensors. **Determinism**: bitwise the
/// same from run to run. **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never
/// after work was enqueued. **Architectures**: the same kernels on all floors. **Source**: the sum of two online
/// softmax states (Milakov and Gimelshein, arXiv:1805.02867).
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{DType, Device, Tensor, ops::attention_merge::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let merge = AttentionMerge::plan(&device, AttentionMergeProblem::new(7, 32, 128, DType::BF16))?;
/// let part = || Tensor::zeros(&stream, &[7, 32, 128], DType::BF16);
/// let lse = || Tensor::zeros(&stream, &[32, 7], DType::F32);
/// let (a, a_lse, b, b_lse, mut out) = (part()?, lse()?, part()?, lse()?, part()?);
/// let parts = [(a.view(), a_lse.view()), (b.view(), b_lse.view())];
/// merge.run(&stream, AttentionMergeArgs::new(parts, out.view_mut()))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AttentionMerge(Plan<Self>);

planned!(
    AttentionMerge,
    AttentionMergeProblem,
    AttentionMergeArgs { a, a_lse, b, b_lse, out, lse },
    &'static AttentionMergeVariant
);

/// What `check` finds.
pub(crate) struct Rows {
    tokens: u32,
    heads: u32,
    strides: [[u32; 2]; 3],
    lse_strides: [u32; 3],
}

impl Operator for AttentionMerge {
    const OP: &'static str = OP;
    type Problem = AttentionMergeProblem;
    type Args<'a> = AttentionMergeArgs<'a>;
    type Dims = Rows;
    type Variant = &'static AttentionMergeVariant;
    type Kernels = Pair;

    fn check_problem(problem: &AttentionMergeProblem) -> Result<(), Error> {
        let AttentionMergeProblem { tokens, heads, dim, dtype } = *problem;
        let rows = tokens.saturating_mul(heads);
        if dim == 0 {
            return Err(Error::invalid(OP, "problem", "a dim of at least 1", "0"));
        }
        check_floats(
            OP,
            dtype,
            &[("tokens", tokens), ("heads", heads), ("dim", dim), ("tokens · heads", rows)],
        )
    }

    fn select(
        limits: &DeviceLimits,
        problem: &AttentionMergeProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(
        variant: Self::Variant,
        problem: &AttentionMergeProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &AttentionMergeProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let any = select::variant(problem, AttentionMergeTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &AttentionMergeProblem,
        args: &AttentionMergeArgs<'_>,
    ) -> Result<Rows, Error> {
        let AttentionMergeArgs { a, a_lse, b, b_lse, out, lse } = args;
        let AttentionMergeProblem { tokens: most, heads, dim, dtype } = *problem;
        let of_a = at.rows("a", *a, dtype, &[None, Some(heads), Some(dim)])?;
        let tokens = at.planned("a", "tokens", a.shape()[0], most)?;
        let shape = [Some(a.shape()[0]), Some(heads), Some(dim)];
        let lses = [Some(heads), Some(a.shape()[0])];
        let [of_a_lse] = at.elements("a_lse", *a_lse, DType::F32, &lses)?;
        let of_b = at.rows("b", *b, dtype, &shape)?;
        let [of_b_lse] = at.elements("b_lse", *b_lse, DType::F32, &lses)?;
        let of_out = at.rows("out", out.as_view(), dtype, &shape)?;
        let of_lse = match lse {
            Some(lse) => {
                let [stride] = at.elements("lse", lse.as_view(), DType::F32, &lses)?;
                stride
            }
            None => 0,
        };
        Ok(Rows {
            tokens,
            heads: at.size("a", "heads", heads)?,
            strides: [of_a, of_b, of_out],
            lse_strides: [of_a_lse, of_b_lse, of_lse],
        })
    }

    fn cpu(problem: &AttentionMergeProblem, _: &Rows, args: &mut AttentionMergeArgs<'_>) {
        cpu::run(problem.dtype, args);
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &AttentionMergeArgs<'_>) -> Result<(), Error> {
        let AttentionMergeArgs { a, a_lse, b, b_lse, out, lse } = args;
        let AttentionMergeProblem { dim, dtype, .. } = *run.problem;
        let Rows { tokens, heads, strides: [a_strides, b_strides, out_strides], lse_strides } = rows;
        let in_pieces = run.is_aligned && run.choice.variant.tile == AttentionMergeTile::Pieces;
        let per_piece = if in_pieces { 16 / dtype.bytes() } else { 1 };
        let tiles = RowTiles::new(tokens * heads, (dim / per_piece) as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "a", tiles.blocks(BLOCK_PIECES_LOG2))?;
        let dims = AttentionMergeDims { tiles, heads, a_strides, b_strides, out_strides, lse_strides };
        let lse = lse.as_ref().map_or(Param::Address(0), |lse| lse.into());
        let params =
            [(*a).into(), (*a_lse).into(), (*b).into(), (*b_lse).into(), out.into(), lse, (&dims).into()];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and a logarithm for each; `is_aligned` what
        // the tile reads in pieces of 16 bytes; the kernel leaves out what is beyond tokens, heads and dim.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &AttentionMergeProblem) -> Work {
        let AttentionMergeProblem { tokens, heads, dim, dtype } = *problem;
        let [tokens, heads, dim] = [tokens, heads, dim].map(count);
        let rows = tokens * heads;
        Work {
            problem: format!("[{tokens}, {heads}, {dim}] {dtype}"),
            bytes: rows * (count(3 * dtype.bytes()) * dim + count(12)),
            flops: count(3) * rows * dim,
        }
    }

    fn tile(_: &Device, _: &AttentionMergeProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
