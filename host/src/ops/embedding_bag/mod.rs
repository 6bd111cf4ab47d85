//! Weighted sums of rows of a table: [`EmbeddingBag`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::embedding_bag::{BLOCK_PIECES_LOG2, EmbeddingBagDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::{Store, check_blocks};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::embedding_bag::{EmbeddingBagTile, EmbeddingBagVariant, VARIANTS};
pub use cases::{CASES, EmbeddingBagCase, samples};
pub use select::select;

const OP: &str = "embedding_bag";

/// What is to be looked up and added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingBagProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Table rows of a token.
    pub bag: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of table and out.
    pub dtype: DType,
    /// What becomes of what out holds.
    pub store: Store,
}

impl EmbeddingBagProblem {
    /// With what it must have. The other fields do nothing: `store: Store::Replace`.
    pub fn new(tokens: usize, bag: usize, vocab: usize, cols: usize, dtype: DType) -> Self {
        EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, store: Store::Replace }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct EmbeddingBagArgs<'a> {
    /// `[vocab, cols]`, rows of any stride.
    pub table: TensorView<'a>,
    /// `[tokens, bag]` u32, without gaps.
    pub ids: TensorView<'a>,
    /// `[tokens, bag]` f32, without gaps.
    pub weights: TensorView<'a>,
    /// `[tokens, cols]`, rows of any stride.
    pub out: TensorViewMut<'a>,
}

impl<'a> EmbeddingBagArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(
        table: TensorView<'a>,
        ids: TensorView<'a>,
        weights: TensorView<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        EmbeddingBagArgs { table, ids, weights, out }
    }
}

/// Weighted sums of rows of a table: `out[t, :] = Σ_j weights[t, j] · table[ids[t, j], :]`, or added to out.
///
/// With four neighbours and bilinear weights it interpolates a table of positions on a grid, as vision transformers do
/// for images of any size.
///
/// **Arithmetic**: f32, in the order of the bag and from out's value on where that is added to; rounded once. Where the
/// sizes of the terms add up to more than 3.4e38, out may be infinite or NaN. **Invalid ids**: a kernel cannot report
/// an id of `vocab` or more, and reading the table there would be unsound. The token's row becomes NaN, whatever the
/// weight. **Aliasing**: out may not overlap the other tensors. **Determinism**: bitwise the same from run to run; a
/// token's row does not depend on the other tokens or their number. **Errors**: [`Error::Invalid`] for a shape, stride,
/// type or place that does not fit; never after work was enqueued. **Architectures**: the same kernels on all floors;
/// from sm_80 on bf16 is packed by the hardware. **Source**: the operator is PyTorch's `EmbeddingBag` with
/// `per_sample_weights`.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::{Store, embedding_bag::*}};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (dtype, store) = (DType::BF16, Store::Replace);
/// let problem = EmbeddingBagProblem { tokens: 2, bag: 2, vocab: 100, cols: 64, dtype, store };
/// let sums = EmbeddingBag::plan(&device, problem)?;
/// let table = Tensor::zeros(&stream, &[100, 64], dtype)?;
/// let ids = Tensor::from_slice(&stream, &[2, 2], &[7u32, 8, 0, 99])?;
/// let weights = Tensor::from_slice(&stream, &[2, 2], &[0.25f32, 0.75, 0.5, 0.5])?;
/// let mut out = Tensor::empty(&stream, &[2, 64], dtype)?;
/// let (table, ids, weights) = (table.view(), ids.view(), weights.view());
/// sums.run(&stream, EmbeddingBagArgs { table, ids, weights, out: out.view_mut() })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EmbeddingBag(Plan<Self>);

planned!(
    EmbeddingBag,
    EmbeddingBagProblem,
    EmbeddingBagArgs { table, ids, weights, out },
    &'static EmbeddingBagVariant
);

/// Tokens of a run, and the strides of table and out.
pub(crate) struct Rows {
    tokens: u32,
    strides: [u32; 2],
}

impl Operator for EmbeddingBag {
    const OP: &'static str = OP;
    type Problem = EmbeddingBagProblem;
    type Args<'a> = EmbeddingBagArgs<'a>;
    type Dims = Rows;
    type Variant = &'static EmbeddingBagVariant;
    type Kernels = Pair;

    fn check_problem(problem: &EmbeddingBagProblem) -> Result<(), Error> {
        let EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, .. } = *problem;
        check_floats(OP, dtype, &[("vocab", vocab), ("cols", cols), ("bag", bag), ("tokens", tokens)])
    }

    fn select(limits: &DeviceLimits, problem: &EmbeddingBagProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &EmbeddingBagProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &EmbeddingBagProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let any = select::variant(problem, EmbeddingBagTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &EmbeddingBagProblem,
        args: &EmbeddingBagArgs<'_>,
    ) -> Result<Rows, Error> {
        let EmbeddingBagArgs { table, ids, weights, out } = args;
        let EmbeddingBagProblem { tokens: most, bag, vocab, cols, dtype, .. } = *problem;
        let [table_stride] = at.rows("table", *table, dtype, &[vocab, cols].map(Some))?;
        at.contiguous("ids", *ids, DType::U32, &[None, Some(bag)])?;
        let len = ids.shape()[0];
        let tokens = at.planned("ids", "tokens", len, most)?;
        at.contiguous("weights", *weights, DType::F32, &[len, bag].map(Some))?;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[len, cols].map(Some))?;
        Ok(Rows { tokens, strides: [table_stride, out_stride] })
    }

    fn cpu(problem: &EmbeddingBagProblem, _: &Rows, args: &mut EmbeddingBagArgs<'_>) {
        cpu::run(problem, args);
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &EmbeddingBagArgs<'_>) -> Result<(), Error> {
        let EmbeddingBagArgs { table, ids, weights, out } = args;
        let EmbeddingBagProblem { bag, vocab, cols, dtype, store, .. } = *run.problem;
        let in_pieces = run.is_aligned && run.choice.variant.tile == EmbeddingBagTile::Pieces;
        let per_piece = if in_pieces { 16 / dtype.bytes() } else { 1 };
        let tiles = RowTiles::new(rows.tokens, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "out", tiles.blocks(BLOCK_PIECES_LOG2))?;
        let (bag, vocab, adds) = (bag as u32, vocab as u32, u32::from(store == Store::Add));
        let [table_stride, out_stride] = rows.strides;
        let dims = EmbeddingBagDims { tiles, bag, vocab, table_stride, out_stride, adds };
        let params = [(*table).into(), (*ids).into(), (*weights).into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and an id and a weight for each place of
        // each bag; `is_aligned` what the tile reads in pieces of 16 bytes; the kernel leaves out what is beyond
        // tokens, cols and vocab.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &EmbeddingBagProblem) -> Work {
        let EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, store } = *problem;
        let passes = match store {
            Store::Replace => 1,
            Store::Add => 2,
        };
        let [tokens, bag, vocab, cols, bytes] = [tokens, bag, vocab, cols, dtype.bytes()].map(count);
        let rows = (bag * tokens).min(vocab) + count(passes) * tokens;
        Work {
            problem: format!("[{tokens}, {bag}] of [{vocab}, {cols}] {dtype}"),
            // At best each row of the table is read from memory once.
            bytes: rows * cols * bytes + count(8) * tokens * bag,
            flops: count(2) * tokens * bag * cols,
        }
    }

    fn tile(_: &Device, _: &EmbeddingBagProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
