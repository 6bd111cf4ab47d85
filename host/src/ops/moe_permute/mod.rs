//! (token, expert) pairs sorted by expert: [`MoePermute`].

mod cases;
pub(super) mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::moe_permute::{
    CHUNK_PAIRS, COUNTED_PAIRS, MAX_BINS, MoePermuteDims, MoePermuteStage, THREADS, bins, smem_bytes, warps,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::{Entry, Param};
use crate::ops::check_size;
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Plan, Run, planned};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub use abi::ops::moe_permute::NO_POSITION;
pub use cases::{CASES, MoePermuteCase, samples};
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
    /// The id of the first: 0 where all experts are here.
    pub first_expert: usize,
    /// Kinds of tokens, whose pairs are sorted apart; none: all tokens are alike.
    pub kinds: Option<usize>,
}

impl MoePermuteProblem {
    /// Of experts whose ids begin with 0, and tokens that are alike.
    pub fn new(tokens: usize, top_k: usize, experts: usize) -> Self {
        MoePermuteProblem { tokens, top_k, experts, first_expert: 0, kinds: None }
    }

    /// Experts of all kinds of tokens.
    fn groups(&self) -> usize {
        self.kinds.unwrap_or(1).saturating_mul(self.experts)
    }
}

/// The tensors of a run, all contiguous and u32.
#[derive(Debug)]
pub struct MoePermuteArgs<'a> {
    /// `[tokens, top_k]`: the expert of each pair. A pair whose id is no expert's belongs to none.
    pub ids: TensorView<'a>,
    /// `[tokens]`: the kind of each token, as planned. The pairs of a token whose kind is none belong to no expert.
    pub kinds: Option<TensorView<'a>>,
    /// `[experts + 1]`: where each expert's pairs begin in the order; the last, where those of none do. Of kinds
    /// `[kinds · experts + 1]`: `kind · experts + expert`.
    pub offsets: TensorViewMut<'a>,
    /// `[tokens · top_k]`: the pairs, `token · top_k + j`, sorted by kind, by expert, then as they were.
    pub order: TensorViewMut<'a>,
    /// `[tokens, top_k]`: where each pair is in the order; [`NO_POSITION`] for a pair of no expert.
    pub positions: TensorViewMut<'a>,
}

impl<'a> MoePermuteArgs<'a> {
    /// With what it must have, of tokens that are alike.
    pub fn new(
        ids: TensorView<'a>,
        offsets: TensorViewMut<'a>,
        order: TensorViewMut<'a>,
        positions: TensorViewMut<'a>,
    ) -> Self {
        MoePermuteArgs { ids, kinds: None, offsets, order, positions }
    }
}

/// Sorts (token, expert) pairs by expert: a stable counting sort.
///
/// With pairs `p = token · top_k + j` and their experts `ids[p] - first_expert`:
/// - `offsets[e]` is the number of pairs of experts below e, so the pairs of e are `order[offsets[e]..offsets[e + 1]]`;
/// - `order` is a permutation of the pairs, ascending within each expert; pairs of no expert are at its end;
/// - `positions` is its inverse: `order[positions[p]] = p`.
///
/// Where tokens are of `kinds`, as sequences with adapters of their own are, each kind has experts of its own: the text
/// has `kinds[token] · experts + ids[p] - first_expert` for the expert then.
///
/// Nothing comes back to the host: the counts stay in device memory, for [`super::grouped_matmul`].
///
/// **Arithmetic**: integers. **Determinism**: bitwise the same on every backend and floor. **Streams**: a plan for many
/// pairs has a workspace, so a run in another stream than the last one waits for that. A recorded graph does not know
/// of later runs: do not let it run at the same time as the plan in another stream, nor outlive the plan. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct MoePermute(Plan<Self>);

planned!(
    MoePermute,
    MoePermuteProblem,
    MoePermuteArgs { ids, kinds, offsets, order, positions },
    MoePermutePath
);

#[derive(Debug)]
pub(crate) struct Kernels {
    block: Entry,
    /// For more pairs than each block is to count.
    chunks: Option<Chunks>,
    /// Most pairs of the single kernel.
    most_counted: u32,
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

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        self.chunks.as_ref().map_or(&self.block, |chunks| &chunks.scatter)
    }
}

impl Operator for MoePermute {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "pairs";
    const IS_REPEATABLE: bool = true;
    type Problem = MoePermuteProblem;
    type Args<'a> = MoePermuteArgs<'a>;
    type Dims = MoePermuteDims;
    type Variant = MoePermutePath;
    type Kernels = Kernels;

    fn check_problem(problem: &MoePermuteProblem) -> Result<(), Error> {
        let MoePermuteProblem { tokens, top_k, experts, first_expert, kinds } = *problem;
        if !(1..=MAX_BINS as usize).contains(&problem.groups()) {
            let (expected, got) = match kinds {
                None => (format!("1 to {MAX_BINS} experts"), experts.to_string()),
                Some(kinds) => {
                    (format!("1 to {MAX_BINS} experts of all kinds"), format!("{kinds} kinds of {experts}"))
                }
            };
            return Err(Error::invalid(OP, "problem", expected, got));
        }
        if top_k == 0 {
            return Err(Error::invalid(OP, "problem", "a top_k of at least 1", "0"));
        }
        check_size(OP, "problem", "id of the first expert", first_expert)?;
        check_size(OP, "problem", "number of pairs", tokens.saturating_mul(top_k)).map(|_| ())
    }

    fn select(limits: &DeviceLimits, problem: &MoePermuteProblem) -> Result<Choice<MoePermutePath>, Error> {
        select(limits, problem)
    }

    fn forced(path: MoePermutePath, _: &MoePermuteProblem) -> Result<Choice<MoePermutePath>, Error> {
        Ok(Choice::asked_for(path, THREADS))
    }

    fn load(
        device: &Device,
        problem: &MoePermuteProblem,
        choice: &Choice<MoePermutePath>,
    ) -> Result<Kernels, Error> {
        let smem = smem_bytes(problem.groups() as u32);
        let load = |stage| device.entry(OP, select::variant(stage)?.entry, smem);
        let chunks = || {
            let chunks = (problem.tokens * problem.top_k).div_ceil(CHUNK_PAIRS as usize);
            let shape = [chunks, bins(problem.groups() as u32) as usize];
            let counts = Workspace::new(device, |stream| Ok([Tensor::empty(stream, &shape, DType::U32)?]))?;
            let [count, scan, scatter] = [
                load(MoePermuteStage::Count)?,
                load(MoePermuteStage::Scan)?,
                load(MoePermuteStage::Scatter)?,
            ];
            Ok::<_, Error>(Chunks { count, scan, scatter, counts })
        };
        let chunks = (choice.variant != MoePermutePath::Block).then(chunks).transpose()?;
        let most_counted = match choice.variant {
            MoePermutePath::Block => u32::MAX,
            MoePermutePath::Chunks => 0,
            MoePermutePath::ByPairs => COUNTED_PAIRS,
        };
        Ok(Kernels { block: load(MoePermuteStage::Block)?, chunks, most_counted })
    }

    fn check(
        at: &Check<'_>,
        problem: &MoePermuteProblem,
        args: &MoePermuteArgs<'_>,
    ) -> Result<MoePermuteDims, Error> {
        let MoePermuteArgs { ids, kinds, offsets, order, positions } = args;
        let MoePermuteProblem { tokens: most, top_k, experts, first_expert, .. } = *problem;
        at.contiguous("ids", *ids, DType::U32, &[None, Some(top_k)])?;
        let tokens = ids.shape()[0];
        at.planned("ids", "tokens", tokens, most)?;
        match (kinds, problem.kinds) {
            (Some(kinds), Some(_)) => at.contiguous("kinds", *kinds, DType::U32, &[Some(tokens)])?,
            (None, None) => {}
            (Some(_), None) => return at.refuse("kinds", "none, as planned", "some"),
            (None, Some(_)) => return at.refuse("kinds", "those of the tokens, as planned", "none"),
        }
        at.contiguous("offsets", offsets.as_view(), DType::U32, &[Some(problem.groups() + 1)])?;
        at.contiguous("order", order.as_view(), DType::U32, &[Some(tokens * top_k)])?;
        at.contiguous("positions", positions.as_view(), DType::U32, &[tokens, top_k].map(Some))?;
        let pairs = (tokens * top_k) as u32;
        Ok(MoePermuteDims {
            pairs,
            experts: experts as u32,
            first_expert: first_expert as u32,
            kinds: problem.kinds.unwrap_or(1) as u32,
            top_k: top_k as u32,
            block_pairs: pairs.min(THREADS),
            warps: warps(problem.groups() as u32),
        })
    }

    fn cpu(problem: &MoePermuteProblem, _: &MoePermuteDims, args: &mut MoePermuteArgs<'_>) {
        cpu::run(problem, args);
    }

    fn launch(run: &Run<'_, Self>, mut dims: MoePermuteDims, args: &MoePermuteArgs<'_>) -> Result<(), Error> {
        let MoePermuteArgs { ids, kinds, offsets, order, positions } = args;
        let launch = |entry: &Entry, grid: u32, counts: Param<'_>, dims: &MoePermuteDims| {
            let kinds = kinds.map_or(Param::Address(0), Param::from);
            let params =
                [(*ids).into(), kinds, counts, offsets.into(), order.into(), positions.into(), dims.into()];
            // SAFETY: `check` found the tensors contiguous and of the sizes of `dims`; the grid has a block for every
            // chunk, and shared memory for the histograms; the counts are a word for each planned chunk and bin.
            unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
        };
        let Kernels { block, chunks, most_counted } = run.kernels;
        match chunks {
            Some(chunks) if dims.pairs > *most_counted => {
                dims.block_pairs = CHUNK_PAIRS;
                let grid = dims.pairs.div_ceil(CHUNK_PAIRS);
                let [counts] = &chunks.counts.tensors;
                let counts = || counts.view().into();
                let _alone = chunks.counts.enter(run.stream)?;
                launch(&chunks.count, grid, counts(), &dims)?;
                launch(&chunks.scan, 1, counts(), &dims)?;
                launch(&chunks.scatter, grid, counts(), &dims)
            }
            // At least one block, which leaves the offsets.
            _ => launch(block, dims.pairs.div_ceil(THREADS).max(1), Param::Address(0), &dims),
        }
    }

    fn work(problem: &MoePermuteProblem) -> Work {
        let MoePermuteProblem { tokens, top_k, kinds, .. } = *problem;
        let [tokens, top_k, experts] = [tokens, top_k, problem.groups()].map(count);
        Work {
            problem: match kinds {
                None => format!("[{tokens}, {top_k}] of {experts}"),
                Some(kinds) => format!("[{tokens}, {top_k}] of {experts} of {kinds} kinds"),
            },
            bytes: count(12) * tokens * top_k + count(4) * (experts + count(1)),
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &MoePermuteProblem, _: &Choice<MoePermutePath>) -> String {
        format!("{CHUNK_PAIRS} pairs")
    }
}
