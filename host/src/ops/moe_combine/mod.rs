//! The weighted sum of each token's experts: [`MoeCombine`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::moe_combine::{BLOCK_PIECES_LOG2, MoeCombineDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::{Store, check_blocks};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::moe_combine::{MoeCombineTile, MoeCombineVariant, VARIANTS};
pub use cases::{CASES, MoeCombineCase, SharedTerm, samples};
pub use select::select;

const OP: &str = "moe_combine";

/// What is to be summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeCombineProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of the results and out.
    pub dtype: DType,
    /// What becomes of what out holds.
    pub store: Store,
}

impl MoeCombineProblem {
    /// With what it must have. The other fields do nothing: `store: Store::Replace`.
    pub fn new(tokens: usize, top_k: usize, cols: usize, dtype: DType) -> Self {
        MoeCombineProblem { tokens, top_k, cols, dtype, store: Store::Replace }
    }
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct MoeCombineArgs<'a> {
    /// `[any, cols]`: the experts' results.
    pub y: TensorView<'a>,
    /// `[tokens, top_k]` f32, contiguous.
    pub weights: TensorView<'a>,
    /// `[tokens, top_k]` u32, contiguous: the row of y of each; one beyond y is left out.
    pub positions: TensorView<'a>,
    /// `[tokens, cols]`: the shared expert's result, added to the sum.
    pub shared: Option<TensorView<'a>>,
    /// `[tokens, 1]` f32, rows of any stride: the logit of the shared expert's gate; none: the gate is 1.
    pub gate: Option<TensorView<'a>>,
    /// `[tokens, cols]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> MoeCombineArgs<'a> {
    /// With what it must have. The other fields do nothing: `shared: None`, `gate: None`.
    pub fn new(
        y: TensorView<'a>,
        weights: TensorView<'a>,
        positions: TensorView<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        MoeCombineArgs { y, weights, positions, shared: None, gate: None, out }
    }
}

/// Sums the results of each token's experts by weight, and adds the shared expert's.
///
/// `out[t] = Σ_j weights[t, j] · y[positions[t, j]] + sigmoid(gate[t]) · shared[t]`, without the last term or its gate
/// where there is none; or the same added to out. An empty sum is 0.
///
/// **Arithmetic**: f32, in the order of j, then the shared expert, what out holds last; out is rounded once. Where the
/// sizes of the terms add up to more than 3.4e38, out may be infinite or NaN. **Determinism**: bitwise the same from
/// run to run; a token's result depends on its own rows alone. **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors. **Source**: Shazeer et al., *Outrageously Large Neural Networks*
/// (2017), equation 1.
#[derive(Debug)]
pub struct MoeCombine(Plan<Self>);

planned!(
    MoeCombine,
    MoeCombineProblem,
    MoeCombineArgs { y, weights, positions, shared, gate, out },
    &'static MoeCombineVariant
);

impl Operator for MoeCombine {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "tokens";
    type Problem = MoeCombineProblem;
    type Args<'a> = MoeCombineArgs<'a>;
    type Dims = MoeCombineDims;
    type Variant = &'static MoeCombineVariant;
    type Kernels = Pair;

    fn check_problem(problem: &MoeCombineProblem) -> Result<(), Error> {
        let MoeCombineProblem { tokens, top_k, cols, dtype, .. } = *problem;
        let pairs = tokens.saturating_mul(top_k);
        check_floats(OP, dtype, &[("tokens", tokens), ("cols", cols), ("number of pairs", pairs)])
    }

    fn select(limits: &DeviceLimits, problem: &MoeCombineProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &MoeCombineProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &MoeCombineProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::scalar(problem.dtype)?.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &MoeCombineProblem,
        args: &MoeCombineArgs<'_>,
    ) -> Result<MoeCombineDims, Error> {
        let MoeCombineArgs { y, weights, positions, shared, gate, out } = args;
        let MoeCombineProblem { tokens: most, top_k, cols, dtype, store } = *problem;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[None, Some(cols)])?;
        let len = out.shape()[0];
        let tokens = at.planned("out", "tokens", len, most)?;
        let [y_stride] = at.rows("y", *y, dtype, &[None, Some(cols)])?;
        at.contiguous("weights", *weights, DType::F32, &[len, top_k].map(Some))?;
        at.contiguous("positions", *positions, DType::U32, &[len, top_k].map(Some))?;
        let shared_strides = shared.map(|shared| at.rows("shared", shared, dtype, &[len, cols].map(Some)));
        let [shared_stride] = shared_strides.transpose()?.unwrap_or_default();
        let gate_strides = gate.map(|gate| at.strided("gate", gate, DType::F32, &[len, 1].map(Some)));
        let [gate_stride] = gate_strides.transpose()?.unwrap_or_default();
        if gate.is_some() && shared.is_none() {
            return at.refuse("gate", "none without a shared expert", "a tensor");
        }
        at.apart("out", out_stride, out.shape())?;
        Ok(MoeCombineDims {
            tiles: RowTiles::new(tokens, cols as u32, BLOCK_PIECES_LOG2),
            top_k: top_k as u32,
            y_rows: at.size("y", "rows", y.shape()[0])?,
            y_stride,
            shared_stride,
            gate_stride,
            out_stride,
            adds: (store == Store::Add).into(),
        })
    }

    fn cpu(problem: &MoeCombineProblem, dims: &MoeCombineDims, args: &mut MoeCombineArgs<'_>) {
        cpu::run(*problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, mut dims: MoeCombineDims, args: &MoeCombineArgs<'_>) -> Result<(), Error> {
        let MoeCombineArgs { y, weights, positions, shared, gate, out } = args;
        let MoeCombineProblem { cols, dtype, .. } = *run.problem;
        let in_pieces = run.is_aligned && run.choice.variant.tile == MoeCombineTile::Pieces;
        let per_piece = if in_pieces { 16 / dtype.bytes() } else { 1 };
        dims.tiles = RowTiles::new(dims.tiles.rows, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "out", dims.tiles.blocks(BLOCK_PIECES_LOG2))?;
        let params = [
            (*y).into(),
            (*weights).into(),
            (*positions).into(),
            (*shared).into(),
            (*gate).into(),
            out.into(),
            (&dims).into(),
        ];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what is moved in pieces of
        // 16 bytes; the grid has a thread for every piece.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &MoeCombineProblem) -> Work {
        let MoeCombineProblem { tokens, top_k, cols, dtype, .. } = *problem;
        let [tokens, top_k, cols, bytes] = [tokens, top_k, cols, dtype.bytes()].map(count);
        Work {
            problem: format!("[{tokens}, {cols}] {dtype} of {top_k} experts"),
            bytes: tokens * ((top_k + count(1)) * cols * bytes + top_k * count(8)),
            flops: count(2) * tokens * top_k * cols,
        }
    }

    fn tile(_: &Device, _: &MoeCombineProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
