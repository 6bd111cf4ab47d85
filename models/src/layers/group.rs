//! A group of a step's sequences, which mixers treat alike, and where their keys are.

use std::ops::Range;

use super::Phase;
use host::Device;
use host::Error;
use host::Stream;
use host::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, AttentionVariant, CascadeArgs, CascadeAttention,
    CascadeProblem, KvScales, Offsets, Prefix, ScoreTensors, select,
};
use host::{Kernel, OptimizationReport};
use host::{TensorView, TensorViewMut};

/// What a group of sequences is planned for.
#[derive(Clone, Copy)]
pub(crate) struct GroupPhase {
    /// Most sequences.
    pub(crate) sequences: usize,
    /// Most tokens of a sequence.
    pub(crate) seq: usize,
    /// Most tokens of all.
    pub(crate) tokens: usize,
    /// Whether sequences may have different numbers of tokens.
    pub(crate) ragged: bool,
    /// Most keys of a sequence.
    pub(crate) capacity: usize,
    /// Tokens of a page of the cache; none if a sequence's are in a row.
    pub(crate) page_tokens: Option<usize>,
    /// Pages of the cache.
    pub(crate) pages: usize,
    /// Whether a step may have a prefix that its sequences share.
    pub(crate) shares: bool,
}

impl GroupPhase {
    /// Attention of heads that `problem` describes.
    pub(super) fn attention(&self, phase: &Phase<'_>, problem: AttentionProblem) -> Result<Attention, Error> {
        let (device, problem) = (phase.stream.device(), self.sized(problem));
        match self.variant(device, &problem)? {
            Some(variant) => Attention::plan_with(device, problem, variant),
            None => Attention::plan(device, problem),
        }
    }

    /// The same, also behind a prefix that the sequences share if the group may have one. A window has none: its
    /// queries see different parts of a prefix, or nothing of it.
    pub(super) fn shared_attention(
        &self,
        phase: &Phase<'_>,
        problem: AttentionProblem,
    ) -> Result<GroupAttention, Error> {
        if !self.shares || problem.window.is_some() {
            return Ok(GroupAttention::Plain(self.attention(phase, problem)?));
        }
        let (device, own) = (phase.stream.device(), self.sized(problem));
        let problem = CascadeProblem { prefix: self.capacity, tokens: self.tokens, own };
        let cascade = match self.variant(device, &own)? {
            Some(variant) => CascadeAttention::plan_with(device, problem, variant)?,
            None => CascadeAttention::plan(device, problem)?,
        };
        Ok(GroupAttention::Cascade(cascade))
    }

    fn sized(&self, problem: AttentionProblem) -> AttentionProblem {
        let &GroupPhase { sequences: batch, seq: seq_q, capacity: seq_kv, page_tokens: page_size, .. } = self;
        AttentionProblem { batch, seq_q, seq_kv, page_size, ..problem }
    }

    /// The one kernel of a ragged group, whose runs are always for the planned number of queries: another one, and
    /// memory, for fewer would never be used.
    fn variant(
        &self,
        device: &Device,
        problem: &AttentionProblem,
    ) -> Result<Option<&'static AttentionVariant>, Error> {
        let limits = device.limits().filter(|_| self.ragged);
        limits.map(|limits| Ok(select(&limits, problem, problem.seq_q)?.variant)).transpose()
    }
}

/// Attention of a group.
// One per kind and group, which stays where it is made.
#[expect(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum GroupAttention {
    Plain(Attention),
    /// Also behind a prefix that the sequences share.
    Cascade(CascadeAttention),
}

impl GroupAttention {
    /// Of each sequence by itself.
    fn plain(&self) -> &Attention {
        match self {
            GroupAttention::Plain(attention) => attention,
            GroupAttention::Cascade(cascade) => cascade.own(),
        }
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        match self {
            GroupAttention::Plain(attention) => vec![attention.optimization_report()],
            GroupAttention::Cascade(cascade) => cascade.reports().to_vec(),
        }
    }
}

/// Some sequences of a step.
pub(crate) struct Group<'a> {
    /// The step's rows that are theirs, one sequence after the other.
    pub(crate) rows: Range<usize>,
    /// How many sequences.
    pub(crate) sequences: usize,
    /// As planned: otherwise all have as many rows.
    pub(crate) ragged: bool,
    /// `[sequences]` u32: where each one's state is.
    pub(crate) states: TensorView<'a>,
    /// `[sequences + 1]` u32: where each one's rows begin, counted from the group's first, and their end.
    pub(crate) offsets: TensorView<'a>,
    /// Where the keys are.
    pub(crate) keys: Keys<'a>,
    /// The same of each sequence as far as the host knows it; nothing in a step that may be recorded.
    pub(crate) spans: &'a [Span],
}

/// Where a group's keys and values are.
// Two of them in a step, on the stack.
#[expect(clippy::large_enum_variant)]
pub(crate) enum Keys<'a> {
    /// These sequences of a cache `[batch, capacity]`.
    Rows { sequences: Range<usize>, visible: Visible<'a> },
    /// Pages of a cache `[pages, page_tokens]`: `[sequences, pages of one]` u32, and how many keys each sequence has,
    /// `[sequences]` u32; of a prefix that they share the same again, if it is read once.
    Pages { table: TensorView<'a>, lens: TensorView<'a>, shared: Option<SharedPages<'a>> },
}

/// A prefix that all sequences of a group share: whole pages, with which each one's row of the table begins.
#[derive(Clone, Copy)]
pub(crate) struct SharedPages<'a> {
    /// `[1]` u32: keys of the prefix.
    pub(crate) prefix: TensorView<'a>,
    /// `[sequences, pages of one]` u32: the pages behind it.
    pub(crate) table: TensorView<'a>,
    /// `[sequences]` u32: how many keys these hold.
    pub(crate) lens: TensorView<'a>,
}

/// Keys that are visible to the last token of a sequence.
#[derive(Clone, Copy)]
pub(crate) enum Visible<'a> {
    /// All sequences have as many, known to the host.
    Uniform(usize),
    /// In device memory, `[batch]` u32.
    PerSequence(TensorView<'a>),
}

/// The tokens of a sequence in a step.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    /// Its rows, counted from the group's first.
    pub(crate) rows: Range<usize>,
    /// Its keys, these tokens' own among them.
    pub(crate) keys: usize,
}

impl Group<'_> {
    /// The attention of its rows `q` `[rows, heads, head_dim]` over a cache `[outer, inner, heads, head_dim]`, with its
    /// scales; `out` is like q.
    pub(super) fn attend(
        &self,
        stream: &Stream,
        plan: &Attention,
        q: TensorView<'_>,
        ([k, v], kv_scales): ([TensorView<'_>; 2], KvScales<'_>),
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let (batch, seq) = match self.ragged {
            true => (1, self.rows.len()),
            false => (self.sequences, self.rows.len() / self.sequences.max(1)),
        };
        let shape = |heads: &[usize]| [batch, seq, heads[1], heads[2]];
        let (k, v, kv_lens, page_table) = match &self.keys {
            Keys::Rows { sequences, visible } => {
                let (keys, lens) = match *visible {
                    Visible::Uniform(keys) => (keys, None),
                    Visible::PerSequence(lens) => (k.shape()[1], Some(lens)),
                };
                let [k, v] = [k, v].map(|x| x.slice(0, sequences.clone())?.slice(1, 0..keys));
                (k?, v?, lens, None)
            }
            Keys::Pages { table, lens, .. } => (k, v, Some(*lens), Some(*table)),
        };
        let args = AttentionArgs {
            q: q.reshape(&shape(q.shape()))?,
            k,
            v,
            kv_lens,
            kv_scales,
            out: {
                let shape = shape(out.shape());
                out.reshape(&shape)?
            },
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets { q: self.ragged.then_some(self.offsets), kv: None },
            page_table,
        };
        plan.run(stream, args)
    }

    /// The same, with a prefix that the sequences share read once if there is one and the plan is for it.
    pub(super) fn attend_shared(
        &self,
        stream: &Stream,
        plan: &GroupAttention,
        q: TensorView<'_>,
        ([k, v], kv_scales): ([TensorView<'_>; 2], KvScales<'_>),
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let (cascade, table, shared) = match (plan, &self.keys) {
            (GroupAttention::Cascade(cascade), Keys::Pages { table, shared: Some(shared), .. }) => {
                (cascade, table, shared)
            }
            _ => return self.attend(stream, plan.plain(), q, ([k, v], kv_scales), out),
        };
        let packed = |heads: &[usize]| [1, heads[0], heads[1], heads[2]];
        let (q_shape, out_shape) = (packed(q.shape()), packed(out.shape()));
        let own = AttentionArgs {
            kv_lens: Some(shared.lens),
            kv_scales,
            offsets: Offsets { q: Some(self.offsets), kv: None },
            page_table: Some(shared.table),
            ..AttentionArgs::new(q.reshape(&q_shape)?, k, v, out.reshape(&out_shape)?)
        };
        let page_table = Some(table.slice(0, 0..1)?);
        let prefix = Prefix { len: Some(shared.prefix), page_table, ..Prefix::new(k, v) };
        cascade.run(stream, CascadeArgs::new(own, prefix))
    }
}
