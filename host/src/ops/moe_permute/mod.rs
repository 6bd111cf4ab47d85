//! Sorting (token, expert) pairs by expert: `abi::ops::moe_permute` has the kernel table, `gpu/src/ops/moe_permute` the
//! kernels, `tests/ops/moe_permute.rs` the properties, `benches/ops/moe_permute.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::moe_permute::{
    CHUNK_PAIRS, MAX_EXPERTS, MoePermuteDims, MoePermuteStage, THREADS, bins, smem_bytes, warps,
};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub use abi::ops::moe_permute::NO_POSITION;
pub use cases::{CASES, MoePermuteCase};
pub use select::{MoePermutePath, select};

const OP: &str = "moe_permute";

/// What is to be sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoePermuteProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts.
    pub experts: usize,
}

/// The tensors of a run, all contiguous and u32.
#[derive(Debug)]
pub struct MoePermuteArgs<'a> {
    /// `[tokens, top_k]`: the expert of each pair. A pair whose id is no expert's belongs to none.
    pub ids: TensorView<'a>,
    /// `[experts + 1]`: where each expert's pairs begin in the order; the last, where those of none do.
    pub offsets: TensorViewMut<'a>,
    /// `[tokens · top_k]`: the pairs, `token · top_k + j`, sorted by expert, then as they were.
    pub order: TensorViewMut<'a>,
    /// `[tokens, top_k]`: where each pair is in the order; [`NO_POSITION`] for a pair of no expert.
    pub positions: TensorViewMut<'a>,
}

/// Sorts (token, expert) pairs by expert: a stable counting sort.
///
/// With pairs `p = token · top_k + j` and their experts `ids[p]`:
/// - `offsets[e]` is the number of pairs of experts below e, so the pairs of e are `order[offsets[e]..offsets[e + 1]]`;
/// - `order` is a permutation of the pairs, ascending within each expert; pairs of no expert are at its end;
/// - `positions` is its inverse: `order[positions[p]] = p`.
///
/// Nothing comes back to the host: the counts stay in device memory, for [`super::grouped_matmul`].
///
/// **Arithmetic**: integers. **Determinism**: bitwise the same on every backend and floor.
/// **Streams**: a plan for many pairs has a workspace, so a run in another stream than the last one waits for that. A
/// recorded graph does not know of later runs: do not let it run at the same time as the plan in another stream, nor outlive
/// the plan.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct MoePermute {
    device: Device,
    problem: MoePermuteProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    Cuda {
        block: Entry,
        /// For more pairs than one block is to sort.
        chunks: Option<Box<Chunks>>,
        /// Most pairs of the single block.
        block_pairs: u32,
    },
}

/// The kernels for many pairs.
#[derive(Debug)]
struct Chunks {
    count: Entry,
    scan: Entry,
    scatter: Entry,
    /// A count for each chunk and bin.
    counts: Workspace<1>,
}

impl MoePermute {
    /// Whether `device` can do it.
    pub fn supports(_device: &Device, problem: &MoePermuteProblem) -> Result<(), Error> {
        check_problem(problem).map(|_| ())
    }

    /// Checks the problem, loads the kernels, and allocates the workspace.
    pub fn plan(device: &Device, problem: MoePermuteProblem) -> Result<Self, Error> {
        let pairs = check_problem(&problem)?;
        Self::new(device, problem, device.limits().map(|_| select(pairs)), CHUNK_PAIRS)
    }

    /// Plans for one way, whatever the number of pairs.
    pub fn plan_with(
        device: &Device,
        problem: MoePermuteProblem,
        path: MoePermutePath,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let block_pairs = match path {
            MoePermutePath::Block => u32::MAX,
            MoePermutePath::Chunks => 0,
        };
        Self::new(device, problem, device.limits().map(|_| path), block_pairs)
    }

    fn new(
        device: &Device,
        problem: MoePermuteProblem,
        path: Option<MoePermutePath>,
        block_pairs: u32,
    ) -> Result<Self, Error> {
        let smem = smem_bytes(problem.experts as u32);
        let load = |stage| device.entry(OP, select::variant(stage)?.entry, smem);
        let chunks = || {
            let chunks = (problem.tokens * problem.top_k).div_ceil(CHUNK_PAIRS as usize);
            let shape = [chunks, bins(problem.experts as u32) as usize];
            let counts = Workspace::new(device, |stream| Ok([Tensor::empty(stream, &shape, DType::U32)?]))?;
            let [count, scan, scatter] = [
                load(MoePermuteStage::Count)?,
                load(MoePermuteStage::Scan)?,
                load(MoePermuteStage::Scatter)?,
            ];
            Ok::<_, Error>(Box::new(Chunks { count, scan, scatter, counts }))
        };
        let backend = match path {
            None => Backend::Cpu,
            Some(path) => {
                let chunks = (path == MoePermutePath::Chunks).then(chunks).transpose()?;
                Backend::Cuda { block: load(MoePermuteStage::Block)?, chunks, block_pairs }
            }
        };
        Ok(MoePermute { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`MoePermute`].
    pub fn run(&self, stream: &Stream, mut args: MoePermuteArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        let (block, chunks, block_pairs) = match &self.backend {
            Backend::Cpu => {
                cpu::run(self.problem.experts, &mut args);
                return Ok(());
            }
            Backend::Cuda { block, chunks, block_pairs } => (block, chunks, *block_pairs),
        };
        let MoePermuteArgs { ids, offsets, order, positions } = &args;
        let launch = |entry: &Entry, grid: u32, counts: Param<'_>, dims: &MoePermuteDims| {
            let params = [(*ids).into(), counts, offsets.into(), order.into(), positions.into(), dims.into()];
            // SAFETY: `check` found the tensors contiguous and of the sizes of `dims`; the grid has a block for every chunk,
            // and shared memory for the histograms; the counts are a word for each planned chunk and bin.
            unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
        };
        match chunks {
            Some(chunks) if dims.pairs > block_pairs => {
                dims.block_pairs = CHUNK_PAIRS;
                let [counts] = &chunks.counts.tensors;
                let counts = || counts.view().into();
                let grid = dims.pairs.div_ceil(CHUNK_PAIRS);
                let _alone = chunks.counts.enter(stream)?;
                launch(&chunks.count, grid, counts(), &dims)?;
                launch(&chunks.scan, 1, counts(), &dims)?;
                launch(&chunks.scatter, grid, counts(), &dims)
            }
            _ => launch(block, 1, Param::Address(0), &dims),
        }
    }

    fn check(&self, args: &MoePermuteArgs<'_>) -> Result<MoePermuteDims, Error> {
        let MoePermuteArgs { ids, offsets, order, positions } = args;
        let MoePermuteProblem { tokens: max_tokens, top_k, experts } = self.problem;
        let device = &self.device;
        ids.expect(OP, "ids", device, DType::U32, &[None, Some(top_k)])?;
        let tokens = ids.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "ids", expected, tokens.to_string()));
        }
        offsets.expect(OP, "offsets", device, DType::U32, &[Some(experts + 1)])?;
        order.expect(OP, "order", device, DType::U32, &[Some(tokens * top_k)])?;
        positions.expect(OP, "positions", device, DType::U32, &[Some(tokens), Some(top_k)])?;
        ids.expect_contiguous(OP, "ids")?;
        offsets.expect_contiguous(OP, "offsets")?;
        order.expect_contiguous(OP, "order")?;
        positions.expect_contiguous(OP, "positions")?;
        let (pairs, experts) = ((tokens * top_k) as u32, experts as u32);
        Ok(MoePermuteDims { pairs, experts, block_pairs: pairs, warps: warps(experts) })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let MoePermuteProblem { tokens, top_k, experts } = self.problem;
        let (entry, why) = match &self.backend {
            Backend::Cpu => (None, "no card".into()),
            Backend::Cuda { chunks: Some(chunks), .. } => {
                (Some(&chunks.scatter), format!("more than {CHUNK_PAIRS} pairs: counted and scanned before"))
            }
            Backend::Cuda { block, .. } => (Some(block), "few pairs, or asked for".into()),
        };
        let [tokens, top_k, experts] = [tokens, top_k, experts].map(count);
        let work = Work {
            problem: format!("[{tokens}, {top_k}] of {experts}"),
            why,
            tile: format!("{CHUNK_PAIRS} pairs"),
            threads: THREADS,
            bytes: count(12) * tokens * top_k + count(4) * (experts + count(1)),
            flops: count(0),
        };
        OptimizationReport::new(OP, &self.device, entry, work)
    }
}

impl Kernel for MoePermute {
    type Args<'a> = MoePermuteArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: MoePermuteArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

/// The number of pairs, if the problem can be done.
fn check_problem(problem: &MoePermuteProblem) -> Result<usize, Error> {
    let MoePermuteProblem { tokens, top_k, experts } = *problem;
    if experts == 0 || experts > MAX_EXPERTS as usize {
        let expected = format!("1 to {MAX_EXPERTS} experts");
        return Err(Error::invalid(OP, "problem", expected, experts.to_string()));
    }
    if top_k == 0 {
        return Err(Error::invalid(OP, "problem", "a top_k of at least 1", "0"));
    }
    let pairs = tokens.saturating_mul(top_k);
    check_size(OP, "problem", "number of pairs", pairs)?;
    Ok(pairs)
}
