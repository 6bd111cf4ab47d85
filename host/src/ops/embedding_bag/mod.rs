//! Weighted sums of table rows: `abi::ops::embedding_bag` has the kernel table, `gpu/src/ops/embedding_bag` the kernels,
//! `tests/ops/embedding_bag.rs` the properties, `benches/ops/embedding_bag.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::embedding_bag::{BLOCK_PIECES_LOG2, EmbeddingBagDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::{Store, check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::embedding_bag::{EmbeddingBagTile, EmbeddingBagVariant, VARIANTS};
pub use cases::{CASES, EmbeddingBagCase};
pub use select::{EmbeddingBagChoice, select};

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

/// Weighted sums of rows of a table: `out[t, :] = Σ_j weights[t, j] · table[ids[t, j], :]`, or added to out.
///
/// With four neighbours and bilinear weights it interpolates a table of positions on a grid, as vision transformers do for
/// images of any size.
///
/// **Arithmetic**: f32, in the order of the bag and from out's value on where that is added to; rounded once.
/// **Invalid ids**: a kernel cannot report an id of `vocab` or more, and reading the table there would be unsound. The
/// token's row becomes NaN, whatever the weight.
/// **Aliasing**: out may not overlap the other tensors.
/// **Determinism**: bitwise the same from run to run; a token's row does not depend on the other tokens or their number.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: the operator is PyTorch's `EmbeddingBag` with `per_sample_weights`.
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
pub struct EmbeddingBag {
    device: Device,
    problem: EmbeddingBagProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: EmbeddingBagChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl EmbeddingBag {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &EmbeddingBagProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: EmbeddingBagProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: EmbeddingBagProblem,
        variant: &'static EmbeddingBagVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| EmbeddingBagChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: EmbeddingBagProblem,
        choice: Option<EmbeddingBagChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let scalar = select::variant(&problem, EmbeddingBagTile::Scalar)?;
                let unaligned = device.entry(OP, scalar.entry, 0)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(EmbeddingBag { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`EmbeddingBag`].
    pub fn run(&self, stream: &Stream, mut args: EmbeddingBagArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let (tokens, [table_stride, out_stride]) = self.check(&args)?;
        let EmbeddingBagProblem { bag, vocab, cols, dtype, store, .. } = self.problem;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(&self.problem, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let EmbeddingBagArgs { table, ids, weights, out } = &args;
                let aligned = choice.variant.tile == EmbeddingBagTile::Pieces
                    && table.is_aligned_16()
                    && out.is_aligned_16();
                let (entry, per_piece) = if aligned { (entry, 16 / dtype.bytes()) } else { (unaligned, 1) };
                let tiles = RowTiles::new(tokens, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
                let grid = check_blocks(OP, "out", tiles.blocks(BLOCK_PIECES_LOG2))?;
                let (bag, vocab, adds) = (bag as u32, vocab as u32, u32::from(store == Store::Add));
                let dims = EmbeddingBagDims { tiles, bag, vocab, table_stride, out_stride, adds };
                let params = [(*table).into(), (*ids).into(), (*weights).into(), out.into(), (&dims).into()];
                // SAFETY: `check` found every row of every tensor inside its view, and an id and a weight for each place of
                // each bag; `aligned` what the tile reads in pieces of 16 bytes; the kernel leaves out what is beyond
                // tokens, cols and vocab.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    /// Tokens, and the row strides of table and out.
    fn check(&self, args: &EmbeddingBagArgs<'_>) -> Result<(u32, [u32; 2]), Error> {
        let EmbeddingBagArgs { table, ids, weights, out } = args;
        let EmbeddingBagProblem { tokens: max_tokens, bag, vocab, cols, dtype, .. } = self.problem;
        table.expect(OP, "table", &self.device, dtype, &[Some(vocab), Some(cols)])?;
        table.expect_inner_contiguous(OP, "table")?;
        ids.expect(OP, "ids", &self.device, DType::U32, &[None, Some(bag)])?;
        let tokens = ids.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "ids", expected, tokens.to_string()));
        }
        weights.expect(OP, "weights", &self.device, DType::F32, &[Some(tokens), Some(bag)])?;
        for (argument, view) in [("ids", ids), ("weights", weights)] {
            if !view.is_contiguous() {
                return Err(Error::invalid(OP, argument, "a contiguous view", "gaps between the elements"));
            }
        }
        out.expect(OP, "out", &self.device, dtype, &[Some(tokens), Some(cols)])?;
        out.expect_inner_contiguous(OP, "out")?;
        let table_stride = check_size(OP, "table", "stride", table.strides()[0])?;
        let out_stride = check_size(OP, "out", "stride", out.strides()[0])?;
        Ok((tokens as u32, [table_stride, out_stride]))
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, store } = self.problem;
        let passes = match store {
            Store::Replace => 1,
            Store::Add => 2,
        };
        let [tokens, bag, vocab, cols, bytes] = [tokens, bag, vocab, cols, dtype.bytes()].map(count);
        let rows = (bag * tokens).min(vocab) + count(passes) * tokens;
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("[{tokens}, {bag}] of [{vocab}, {cols}] {dtype}"),
            why: why.into(),
            tile,
            threads,
            // At best each row of the table is read from memory once.
            bytes: rows * cols * bytes + count(8) * tokens * bag,
            flops: count(2) * tokens * bag * cols,
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

impl Kernel for EmbeddingBag {
    type Args<'a> = EmbeddingBagArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: EmbeddingBagArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &EmbeddingBagProblem) -> Result<(), Error> {
    let EmbeddingBagProblem { tokens, bag, vocab, cols, dtype, .. } = *problem;
    check_size(OP, "problem", "vocab", vocab)?;
    check_size(OP, "problem", "cols", cols)?;
    check_size(OP, "problem", "bag", bag)?;
    check_size(OP, "problem", "tokens", tokens)?;
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    Ok(())
}
