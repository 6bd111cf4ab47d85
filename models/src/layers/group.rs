//! A group of a step's sequences, which mixers treat alike, and where their keys are.

use std::ops::Range;

use super::Phase;
use host::Error;
use host::Stream;
use host::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Offsets, ScoreTensors, select,
};
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
}

impl GroupPhase {
    /// Attention of heads that `problem` describes.
    pub(super) fn attention(&self, phase: &Phase<'_>, problem: AttentionProblem) -> Result<Attention, Error> {
        let &GroupPhase { sequences: batch, seq: seq_q, capacity: seq_kv, page_tokens: page_size, .. } = self;
        let (device, problem) =
            (phase.stream.device(), AttentionProblem { batch, seq_q, seq_kv, page_size, ..problem });
        match device.limits() {
            // Runs of it are always for the planned number of queries, so a kernel, and memory, for fewer would never
            // be used.
            Some(limits) if self.ragged => {
                Attention::plan_with(device, problem, select(&limits, &problem, seq_q)?.variant)
            }
            _ => Attention::plan(device, problem),
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
pub(crate) enum Keys<'a> {
    /// These sequences of a cache `[batch, capacity]`.
    Rows { sequences: Range<usize>, visible: Visible<'a> },
    /// Pages of a cache `[pages, page_tokens]`: `[sequences, pages of one]` u32, and how many keys each sequence has,
    /// `[sequences]` u32.
    Pages { table: TensorView<'a>, lens: TensorView<'a> },
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
            Keys::Pages { table, lens } => (k, v, Some(*lens), Some(*table)),
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
}
