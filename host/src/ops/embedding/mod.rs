//! Rows of a table by number: [`Embedding`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::embedding::EmbeddingDims;

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::embedding::{EmbeddingVariant, VARIANTS};
pub use cases::{CASES, EmbeddingCase, samples};
pub use select::select;

const OP: &str = "embedding";

/// What is to be looked up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingProblem {
    /// Most ids of a run.
    pub tokens: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of table and out.
    pub dtype: DType,
}

impl EmbeddingProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(tokens: usize, vocab: usize, cols: usize, dtype: DType) -> Self {
        EmbeddingProblem { tokens, vocab, cols, dtype }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct EmbeddingArgs<'a> {
    /// `[vocab, cols]`, rows of any stride.
    pub table: TensorView<'a>,
    /// `[tokens]`, u32.
    pub ids: TensorView<'a>,
    /// `[tokens, cols]`, rows of any stride.
    pub out: TensorViewMut<'a>,
}

impl<'a> EmbeddingArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(table: TensorView<'a>, ids: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        EmbeddingArgs { table, ids, out }
    }
}

/// Rows of a table by index: `out[t, :] = table[ids[t], :]`.
///
/// **Arithmetic**: none; rows are copied bit by bit. **Invalid ids**: a kernel cannot report an id of `vocab` or more,
/// and reading the table there would be unsound. Every byte of its output row becomes 0xff, which is NaN in every float
/// type and so cannot go unnoticed; the other rows are as they should be. Check ids on the host, where they come from,
/// to get an error. **Aliasing**: out may not overlap the other tensors. **Errors**: [`Error::Invalid`] for a shape,
/// stride, type or place that does not fit; never after work was enqueued. **Architectures**: the same kernels on all
/// floors. Rows that are not whole, aligned pieces of 16 bytes are copied element by element.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::embedding::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = EmbeddingProblem { tokens: 3, vocab: 1000, cols: 64, dtype: DType::BF16 };
/// let embedding = Embedding::plan(&device, problem)?;
/// let table = Tensor::zeros(&stream, &[1000, 64], DType::BF16)?;
/// let ids = Tensor::from_slice(&stream, &[3], &[7u32, 0, 999])?;
/// let mut out = Tensor::empty(&stream, &[3, 64], DType::BF16)?;
/// let args = EmbeddingArgs { table: table.view(), ids: ids.view(), out: out.view_mut() };
/// embedding.run(&stream, args)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Embedding(Plan<Self>);

planned!(Embedding, EmbeddingProblem, EmbeddingArgs { table, ids, out }, &'static EmbeddingVariant);

/// Ids of a run, and the strides of table and out.
pub(crate) struct Rows {
    tokens: u32,
    strides: [u32; 2],
}

impl Operator for Embedding {
    const OP: &'static str = OP;
    type Problem = EmbeddingProblem;
    type Args<'a> = EmbeddingArgs<'a>;
    type Dims = Rows;
    type Variant = &'static EmbeddingVariant;
    type Kernels = Pair;

    fn check_problem(problem: &EmbeddingProblem) -> Result<(), Error> {
        let EmbeddingProblem { tokens, vocab, cols, dtype } = *problem;
        check_floats(OP, dtype, &[("tokens", tokens), ("vocab", vocab), ("cols", cols)])
    }

    fn select(limits: &DeviceLimits, problem: &EmbeddingProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &EmbeddingProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &EmbeddingProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::by_element(problem)?.entry], 0)
    }

    fn check(at: &Check<'_>, problem: &EmbeddingProblem, args: &EmbeddingArgs<'_>) -> Result<Rows, Error> {
        let EmbeddingArgs { table, ids, out } = args;
        let EmbeddingProblem { tokens: most, vocab, cols, dtype } = *problem;
        let [table_stride] = at.rows("table", *table, dtype, &[vocab, cols].map(Some))?;
        let [] = at.elements("ids", *ids, DType::U32, &[None])?;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[ids.len(), cols].map(Some))?;
        Ok(Rows { tokens: at.planned("ids", "ids", ids.len(), most)?, strides: [table_stride, out_stride] })
    }

    fn cpu(problem: &EmbeddingProblem, rows: &Rows, args: &mut EmbeddingArgs<'_>) {
        cpu::run(problem.dtype, rows.strides, args);
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &EmbeddingArgs<'_>) -> Result<(), Error> {
        let EmbeddingArgs { table, ids, out } = args;
        let EmbeddingProblem { vocab, cols, dtype, .. } = *run.problem;
        let (unit_bytes, threads) = if run.is_aligned {
            (run.choice.variant.unit_bytes, run.choice.threads)
        } else {
            (dtype.bytes(), select::threads(cols as u32))
        };
        let units = |elements: u32| (elements as usize * dtype.bytes() / unit_bytes) as u32;
        let [table_stride, out_stride] = rows.strides.map(units);
        let dims = EmbeddingDims { cols: units(cols as u32), vocab: vocab as u32, table_stride, out_stride };
        let params = [(*table).into(), (*ids).into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(run.is_aligned);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what is moved in units of
        // 16 bytes; the grid is one block per id.
        unsafe { entry.launch(run.stream, [rows.tokens, 1, 1], [threads, 1, 1], &params) }
    }

    fn work(problem: &EmbeddingProblem) -> Work {
        let EmbeddingProblem { tokens, vocab, cols, dtype } = *problem;
        let [tokens, cols, bytes] = [tokens, cols, dtype.bytes()].map(count);
        Work {
            problem: format!("[{tokens}] of [{vocab}, {cols}] {dtype}"),
            bytes: count(2) * tokens * cols * bytes + tokens * count(DType::U32.bytes()),
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &EmbeddingProblem, choice: &Choice<Self::Variant>) -> String {
        format!("a row per block in units of {} bytes", choice.variant.unit_bytes)
    }
}
