//! Attention behind a prefix that all sequences share: [`CascadeAttention`].

use abi::DType;

use super::{Attention, AttentionArgs, AttentionProblem, AttentionVariant, Mask, Scores};
use crate::device::Device;
use crate::error::Error;
use crate::ops::attention_merge::{AttentionMerge, AttentionMergeArgs, AttentionMergeProblem};
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};

const OP: &str = "cascade_attention";

/// What is to be attended to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CascadeProblem {
    /// Most keys of the prefix; in pages of `own.page_size` keys, if there are pages.
    pub prefix: usize,
    /// Most queries of all sequences together.
    pub tokens: usize,
    /// Each sequence's queries and its own keys, those behind the prefix. Without a window.
    pub own: AttentionProblem,
}

impl CascadeProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(prefix: usize, tokens: usize, own: AttentionProblem) -> Self {
        CascadeProblem { prefix, tokens, own }
    }
}

/// The keys and values that all sequences share.
#[derive(Clone, Copy, Debug)]
pub struct Prefix<'a> {
    /// `[1, prefix, heads_kv, head_dim]`; with pages the pool of the own keys or another one.
    pub k: TensorView<'a>,
    /// The same of the values.
    pub v: TensorView<'a>,
    /// `[1]` u32, if there: how many of the keys there are, read when the kernel runs.
    pub len: Option<TensorView<'a>>,
    /// `[1, max_pages]` u32, if the problem has pages.
    pub page_table: Option<TensorView<'a>>,
}

impl<'a> Prefix<'a> {
    /// With what it must have. The other fields do nothing: `len: None`, `page_table: None`.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Prefix { k, v, len: None, page_table: None }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct CascadeArgs<'a> {
    /// Of packed queries: `q` is `[1, tokens, heads_q, head_dim]`, with offsets, and every row that of a sequence.
    pub own: AttentionArgs<'a>,
    /// What all of them see before.
    pub prefix: Prefix<'a>,
}

impl<'a> CascadeArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(own: AttentionArgs<'a>, prefix: Prefix<'a>) -> Self {
        CascadeArgs { own, prefix }
    }
}

/// Attention of sequences that begin with the same keys, which are read once for all of them: as
/// [`Attention`] over the prefix and each sequence's own keys behind it.
///
/// Two attentions and a merge ([`AttentionMerge`]): of all queries over the prefix, as queries of one sequence that see
/// all of it, and of each sequence's queries over its own keys, whose mask counts from the last of those. A plain
/// attention reads a prefix once for each sequence; that is worth it from a few sequences and some thousand keys on.
///
/// A **tree of drafts** is verified so too: the prefix is what is there of the one sequence, the own keys are the
/// drafts', and [`Scores::bias`](super::Scores::bias) of the own attention says which draft sees which, `[queries,
/// drafts]` and not `[queries, all keys]`.
///
/// **Arithmetic**: that of the attentions; each part is rounded to its type, and so is what is merged. **Rows of out**
/// that belong to no sequence, or are beyond the planned queries of one, are undefined. **Workspace**: both parts,
/// `tokens · heads_q · (head_dim_v` of q's type `+ 4` bytes`)` each. **Determinism**: that of the attentions.
/// **Errors**: [`Error::Invalid`] for a window, queries that are not packed, and what [`Attention`] refuses; of a run's
/// second attention after the first has been enqueued, which writes to the workspace alone. **Source**: Hydragen
/// (Juravsky et al., arXiv:2402.05099).
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{DType, Device, Tensor, ops::attention::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// // Eight sequences, a query each, behind 4096 keys that they share; up to 64 of their own.
/// let own = AttentionProblem { mask: Mask::Causal, ..AttentionProblem::new(8, [1, 64], [32, 8], 128, DType::BF16) };
/// let cascade = CascadeAttention::plan(&device, CascadeProblem::new(4096, 8, own))?;
/// let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::BF16);
/// let (q, mut out) = (zeros(&[1, 8, 32, 128])?, zeros(&[1, 8, 32, 128])?);
/// let (k, v) = (zeros(&[8, 64, 8, 128])?, zeros(&[8, 64, 8, 128])?);
/// let (prefix_k, prefix_v) = (zeros(&[1, 4096, 8, 128])?, zeros(&[1, 4096, 8, 128])?);
/// let offsets = Tensor::from_slice(&stream, &[9], &[0u32, 1, 2, 3, 4, 5, 6, 7, 8])?;
/// let lens = Tensor::from_slice(&stream, &[8], &[1u32, 9, 64, 3, 3, 3, 20, 41])?;
/// let own = AttentionArgs {
///     kv_lens: Some(lens.view()),
///     offsets: Offsets { q: Some(offsets.view()), ..Offsets::default() },
///     ..AttentionArgs::new(q.view(), k.view(), v.view(), out.view_mut())
/// };
/// let prefix = Prefix::new(prefix_k.view(), prefix_v.view());
/// cascade.run(&stream, CascadeArgs::new(own, prefix))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CascadeAttention {
    problem: CascadeProblem,
    of_prefix: Attention,
    of_own: Attention,
    merge: AttentionMerge,
    /// `[tokens, heads_q, head_dim_v]` and `[heads_q, tokens]` of the prefix, and of the own keys.
    workspace: Workspace<4>,
}

impl CascadeAttention {
    /// Plans both attentions and their merge, and takes the memory that runs need besides their tensors.
    ///
    /// **Errors**: as the type says, and those of the device.
    pub fn plan(device: &Device, problem: CascadeProblem) -> Result<Self, Error> {
        Self::around(device, problem, Attention::plan)
    }

    /// The same with this kernel over the own keys, as [`Attention::plan_with`] has it.
    ///
    /// **Errors**: as [`Self::plan`], and [`Error::Invalid`] for a kernel that cannot do it.
    pub fn plan_with(
        device: &Device,
        problem: CascadeProblem,
        variant: &'static AttentionVariant,
    ) -> Result<Self, Error> {
        Self::around(device, problem, |device, own| Attention::plan_with(device, own, variant))
    }

    fn around(
        device: &Device,
        problem: CascadeProblem,
        plan_own: impl FnOnce(&Device, AttentionProblem) -> Result<Attention, Error>,
    ) -> Result<Self, Error> {
        let CascadeProblem { prefix, tokens, own } = problem;
        if own.window.is_some() {
            return Err(Error::invalid(OP, "problem", "no window, as all queries see the prefix", "one"));
        }
        let of_prefix = AttentionProblem {
            batch: 1,
            seq_q: tokens,
            seq_kv: prefix,
            mask: Mask::None,
            scores: Scores { soft_cap: own.scores.soft_cap, ..Scores::PLAIN },
            ..own
        };
        let (heads, dim) = (own.heads_q, own.head_dim_v);
        let merge = AttentionMergeProblem::new(tokens, heads, dim, own.dtype);
        let workspace = Workspace::new(device, |stream| {
            let part = || Tensor::empty(stream, &[1, tokens, heads, dim], own.dtype);
            let lse = || Tensor::empty(stream, &[1, heads, tokens], DType::F32);
            Ok([part()?, lse()?, part()?, lse()?])
        })?;
        Ok(CascadeAttention {
            problem,
            of_prefix: Attention::plan(device, of_prefix)?,
            of_own: plan_own(device, own)?,
            merge: AttentionMerge::plan(device, merge)?,
            workspace,
        })
    }

    /// The attention over the own keys, which is also one by itself: for a run without a prefix, whose plan and memory
    /// are this one's then.
    pub fn own(&self) -> &Attention {
        &self.of_own
    }

    /// The attention over the prefix, over the own keys, and the merge.
    pub fn reports(&self) -> [crate::OptimizationReport; 3] {
        [self.of_prefix.report(), self.of_own.report(), self.merge.report()]
    }

    /// Enqueues the work, without allocating.
    ///
    /// **Errors**: as the type says.
    pub fn run(&self, stream: &Stream, args: CascadeArgs<'_>) -> Result<(), Error> {
        let CascadeArgs { own, prefix } = args;
        let AttentionArgs { q, k, v, kv_lens, offsets, kv_scales, out, lse, scores, page_table } = own;
        let [prefix_out, prefix_lse, own_out, own_lse] = &self.workspace.tensors;
        stream.expect_place(OP, prefix_out.view().place())?;
        let &[1, tokens, _, _] = q.shape() else {
            let got = format!("shape {:?}", q.shape());
            return Err(Error::invalid(OP, "q", "packed queries, shape [1, tokens, heads_q, head_dim]", got));
        };
        if offsets.q.is_none() {
            return Err(Error::invalid(OP, "offsets.q", "where the sequences' queries begin", "none"));
        }
        if tokens > self.problem.tokens {
            let expected = format!("at most {} tokens, as planned", self.problem.tokens);
            return Err(Error::invalid(OP, "q", expected, tokens.to_string()));
        }
        let whole = [1, tokens, self.problem.own.heads_q, self.problem.own.head_dim_v];
        if out.shape() != whole {
            let got = format!("{:?}", out.shape());
            return Err(Error::invalid(OP, "out", format!("shape {whole:?}"), got));
        }
        let _alone = self.workspace.enter(stream)?;
        // SAFETY: of the workspace, which nobody else has entered; a launch writes what the ones before it in the same
        // stream have read. So are the other three.
        let to_prefix_out = unsafe { prefix_out.view_mut_alone() }.slice(1, 0..tokens)?;
        // SAFETY: as above.
        let to_prefix_lse = unsafe { prefix_lse.view_mut_alone() }.slice(2, 0..tokens)?;
        // SAFETY: as above.
        let to_own_out = unsafe { own_out.view_mut_alone() }.slice(1, 0..tokens)?;
        // SAFETY: as above.
        let to_own_lse = unsafe { own_lse.view_mut_alone() }.slice(2, 0..tokens)?;
        let of_prefix = AttentionArgs {
            kv_lens: prefix.len,
            kv_scales,
            lse: Some(to_prefix_lse),
            page_table: prefix.page_table,
            ..AttentionArgs::new(q, prefix.k, prefix.v, to_prefix_out)
        };
        self.of_prefix.run(stream, of_prefix)?;
        let of_own = AttentionArgs {
            kv_lens,
            offsets,
            kv_scales,
            lse: Some(to_own_lse),
            scores,
            page_table,
            ..AttentionArgs::new(q, k, v, to_own_out)
        };
        self.of_own.run(stream, of_own)?;
        let parts = [part(prefix_out, prefix_lse, &whole[1..])?, part(own_out, own_lse, &whole[1..])?];
        let lse = lse.map(|lse| lse.reshape(&[whole[2], tokens])).transpose()?;
        let args = AttentionMergeArgs { lse, ..AttentionMergeArgs::new(parts, out.reshape(&whole[1..])?) };
        self.merge.run(stream, args)
    }
}

/// The first rows of a part and their logarithms, of `[tokens, heads, dim]`.
fn part<'a>(
    out: &'a Tensor,
    lse: &'a Tensor,
    shape: &[usize],
) -> Result<(TensorView<'a>, TensorView<'a>), Error> {
    let tokens = 0..shape[0];
    let rows = out.view().slice(1, tokens.clone())?.reshape(shape)?;
    Ok((rows, lse.view().slice(2, tokens)?.reshape(&[shape[1], shape[0]])?))
}
