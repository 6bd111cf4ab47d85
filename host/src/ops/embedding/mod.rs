//! Embedding: `abi::ops::embedding` has the kernel table, `gpu/src/ops/embedding` the kernels, `tests/ops/embedding.rs`
//! the properties, `benches/ops/embedding.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::embedding::EmbeddingDims;

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::embedding::{EmbeddingVariant, VARIANTS};
pub use cases::{CASES, EmbeddingCase};
pub use select::{EmbeddingChoice, select};

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

/// Rows of a table by index: `out[t, :] = table[ids[t], :]`.
///
/// **Arithmetic**: none; rows are copied bit by bit.
/// **Invalid ids**: a kernel cannot report an id of `vocab` or more, and reading the table there would be unsound. Every
/// byte of its output row becomes 0xff, which is NaN in every float type and so cannot go unnoticed; the other rows are
/// as they should be. Check ids on the host, where they come from, to get an error.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
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
pub struct Embedding {
    device: Device,
    problem: EmbeddingProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to its unit, with its threads.
    Cuda {
        choice: EmbeddingChoice,
        entry: Entry,
        unaligned: Entry,
        unaligned_threads: u32,
    },
}

impl Embedding {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &EmbeddingProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: EmbeddingProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: EmbeddingProblem,
        variant: &'static EmbeddingVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| EmbeddingChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: EmbeddingProblem,
        choice: Option<EmbeddingChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let fallback = EmbeddingChoice::by_element(&problem)?;
                let unaligned = device.entry(OP, fallback.variant.entry, 0)?;
                Backend::Cuda { choice, entry, unaligned, unaligned_threads: fallback.threads }
            }
        };
        Ok(Embedding { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Embedding`].
    pub fn run(&self, stream: &Stream, mut args: EmbeddingArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let tokens = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => cpu::run(self.problem.dtype, &mut args),
            Backend::Cuda { choice, entry, unaligned, unaligned_threads } => {
                let EmbeddingArgs { table, ids, out } = &args;
                let aligned = table.is_aligned_16() && out.is_aligned_16();
                let element_bytes = self.problem.dtype.bytes();
                let (entry, threads, unit_bytes) = if aligned {
                    (entry, choice.threads, choice.variant.unit_bytes)
                } else {
                    (unaligned, *unaligned_threads, element_bytes)
                };
                let units = |elements: u32| (elements as usize * element_bytes / unit_bytes) as u32;
                let dims = EmbeddingDims {
                    cols: units(self.problem.cols as u32),
                    vocab: self.problem.vocab as u32,
                    table_stride: units(row_stride("table", table.shape(), table.strides())?),
                    out_stride: units(row_stride("out", out.shape(), out.strides())?),
                };
                let params = [(*table).into(), (*ids).into(), out.into(), (&dims).into()];
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what is moved in units
                // of 16 bytes; the grid is one block per id.
                unsafe { entry.launch(stream, [tokens, 1, 1], [threads, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &EmbeddingArgs<'_>) -> Result<u32, Error> {
        let EmbeddingArgs { table, ids, out } = args;
        let EmbeddingProblem { tokens: max_tokens, vocab, cols, dtype } = self.problem;
        table.expect(OP, "table", &self.device, dtype, &[Some(vocab), Some(cols)])?;
        table.expect_inner_contiguous(OP, "table")?;
        ids.expect(OP, "ids", &self.device, DType::U32, &[None])?;
        ids.expect_inner_contiguous(OP, "ids")?;
        out.expect(OP, "out", &self.device, dtype, &[Some(ids.len()), Some(cols)])?;
        out.expect_inner_contiguous(OP, "out")?;
        if ids.len() > max_tokens {
            let expected = format!("at most {max_tokens} ids, as planned");
            return Err(Error::invalid(OP, "ids", expected, ids.len().to_string()));
        }
        row_stride("table", table.shape(), table.strides())?;
        row_stride("out", out.shape(), out.strides())?;
        Ok(ids.len() as u32)
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let EmbeddingProblem { tokens, vocab, cols, dtype } = self.problem;
        let [tokens, cols, bytes] = [tokens, cols, dtype.bytes()].map(count);
        let work = |why, tile, threads| Work {
            problem: format!("[{tokens}] of [{vocab}, {cols}] {dtype}"),
            why,
            tile,
            threads,
            bytes: count(2) * tokens * cols * bytes + tokens * count(DType::U32.bytes()),
            flops: count(0),
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card".into(), "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let tile = format!("a row per block in units of {} bytes", choice.variant.unit_bytes);
                let work = work(choice.why.clone(), tile, choice.threads);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
    }
}

impl Kernel for Embedding {
    type Args<'a> = EmbeddingArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: EmbeddingArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

/// From one row to the next, in elements; 0 where there is no next, whatever the view says.
fn row_stride(argument: &'static str, shape: &[usize], strides: &[usize]) -> Result<u32, Error> {
    if shape[0] > 1 { check_size(OP, argument, "stride", strides[0]) } else { Ok(0) }
}

fn check_problem(problem: &EmbeddingProblem) -> Result<(), Error> {
    check_size(OP, "problem", "tokens", problem.tokens)?;
    check_size(OP, "problem", "vocab", problem.vocab)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    Ok(())
}
