//! Rows of a table by number: [`Embedding`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::embedding::EmbeddingDims;
use abi::weight::Layout;

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::matmul::{MatmulB, rows_aligned};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::embedding::{EmbeddingVariant, PACKED_VARIANTS, VARIANTS};
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
    /// Type of table and out; of a packed table that of out.
    pub dtype: DType,
    /// How the table is packed; none if it is a plain matrix.
    pub weight: Option<Layout>,
}

impl EmbeddingProblem {
    /// With what it must have. The other fields do nothing: `weight: None`.
    pub fn new(tokens: usize, vocab: usize, cols: usize, dtype: DType) -> Self {
        EmbeddingProblem { tokens, vocab, cols, dtype, weight: None }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct EmbeddingArgs<'a> {
    /// `[vocab, cols]`, rows of any stride; or a packed weight of this size, as planned.
    pub table: MatmulB<'a>,
    /// `[tokens]`, u32.
    pub ids: TensorView<'a>,
    /// `[tokens, cols]`, rows of any stride.
    pub out: TensorViewMut<'a>,
}

impl<'a> EmbeddingArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(table: impl Into<MatmulB<'a>>, ids: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        EmbeddingArgs { table: table.into(), ids, out }
    }
}

/// Rows of a table by index: `out[t, :] = table[ids[t], :]`.
///
/// **Arithmetic**: none; rows are copied bit by bit. Those of a packed table become `scale · (code − zero) − minimum`,
/// computed in f32 and rounded once. **Invalid ids**: a kernel cannot report an id of `vocab` or more, and reading the
/// table there would be unsound. Every byte of its output row becomes 0xff, which is NaN in every float type and so
/// cannot go unnoticed; the other rows are as they should be. (Of a packed table it becomes NaN.) Check ids on the
/// host, where they come from, to get an error. **Aliasing**: out may not overlap the other tensors. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors. Rows that are not whole, aligned pieces of 16 bytes are copied
/// element by element.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::embedding::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = EmbeddingProblem::new(3, 1000, 64, DType::BF16);
/// let embedding = Embedding::plan(&device, problem)?;
/// let table = Tensor::zeros(&stream, &[1000, 64], DType::BF16)?;
/// let ids = Tensor::from_slice(&stream, &[3], &[7u32, 0, 999])?;
/// let mut out = Tensor::empty(&stream, &[3, 64], DType::BF16)?;
/// let args = EmbeddingArgs::new(table.view(), ids.view(), out.view_mut());
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
        let EmbeddingProblem { tokens, vocab, cols, dtype, weight } = *problem;
        if let Some(expected) = weight.and_then(|layout| layout.problem_in_order()) {
            return Err(Error::invalid(
                OP,
                "problem",
                format!("a table with {expected}"),
                format!("{weight:?}"),
            ));
        }
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
        let EmbeddingProblem { tokens: most, vocab, cols, dtype, weight } = *problem;
        let matrix = table.planned(at, "table", (weight, dtype), (None, [vocab, cols]))?;
        let [table_stride] = at.rows("table", matrix, dtype, &[vocab, cols].map(Some))?;
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
        let table = match table {
            MatmulB::Matrix(table) => *table,
            // Refused.
            MatmulB::Int8 { .. } => return Ok(()),
            MatmulB::Packed(weight) => {
                let dims = EmbeddingDims {
                    cols: cols as u32,
                    vocab: vocab as u32,
                    table_stride: 0,
                    out_stride: rows.strides[1],
                    in_quads: u32::from(rows_aligned(out.as_view(), 4)),
                };
                let of_weight = weight.dims();
                let [codes, scales, zeros, minimums, supers, super_minimums] = weight.params();
                let (ids, out) = ((*ids).into(), out.into());
                let (dims, of_weight) = ((&dims).into(), (&of_weight).into());
                let params =
                    [codes, scales, zeros, minimums, supers, super_minimums, ids, out, dims, of_weight];
                let (entry, threads) = (&run.kernels.chosen, run.choice.threads);
                // SAFETY: `check` found every row of ids and out inside its view, and the weight's layout and size to
                // be the planned ones; the grid is one block per id.
                return unsafe { entry.launch(run.stream, [rows.tokens, 1, 1], [threads, 1, 1], &params) };
            }
        };
        let (unit_bytes, threads) = if run.is_aligned {
            (run.choice.variant.unit_bytes, run.choice.threads)
        } else {
            (dtype.bytes(), select::threads(cols as u32))
        };
        let units = |elements: u32| (elements as usize * dtype.bytes() / unit_bytes) as u32;
        let [table_stride, out_stride] = rows.strides.map(units);
        let (cols, vocab) = (units(cols as u32), vocab as u32);
        let dims = EmbeddingDims { cols, vocab, table_stride, out_stride, in_quads: 0 };
        let params = [table.into(), (*ids).into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(run.is_aligned);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what is moved in units of
        // 16 bytes; the grid is one block per id.
        unsafe { entry.launch(run.stream, [rows.tokens, 1, 1], [threads, 1, 1], &params) }
    }

    fn work(problem: &EmbeddingProblem) -> Work {
        let EmbeddingProblem { tokens, vocab, cols, dtype, weight } = *problem;
        let bits = weight.map_or(8.0 * dtype.bytes() as f32, |layout| layout.bits_per_weight(cols as u32));
        let row_bytes = count((cols as f64 * f64::from(bits) / 8.0) as usize);
        let of = weight.map_or(String::new(), |layout| format!(" {}", layout.codes.name()));
        let [tokens, cols, bytes] = [tokens, cols, dtype.bytes()].map(count);
        Work {
            problem: format!("[{tokens}] of [{vocab}, {cols}]{of} {dtype}"),
            bytes: tokens * (cols * bytes + row_bytes) + tokens * count(DType::U32.bytes()),
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &EmbeddingProblem, choice: &Choice<Self::Variant>) -> String {
        match choice.variant.packed {
            None => format!("a row per block in units of {} bytes", choice.variant.unit_bytes),
            Some(_) => "a row per block, four threads to a tile of 64".into(),
        }
    }
}
