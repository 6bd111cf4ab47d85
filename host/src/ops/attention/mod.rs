//! Attention over keys and values of any layout, in pages, packed or in fp8: [`Attention`].

mod cascade;
mod cases;
mod checks;
mod cpu;
mod dims;
mod gather;
mod kv_scales;
mod launch;
pub mod reference;
mod scores;
mod select;

use abi::DType;
use abi::ops::attention::{AttentionDims, DECODE_RING_ROWS, SPLIT_KEYS};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work, count};
use crate::ladder::{Ladder, Rung};
use crate::ops::workspace::Workspace;
use crate::plan::{Check, planned};
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut, views};
use checks::{check_problem, expect_aligned, in_keys, repeats};
use dims::Checked;
use gather::Gather;
use launch::{KeyParts, Loaded, Splits, With};

pub use abi::ops::attention::{
    AttentionTile, AttentionVariant, DECODE_LATENT_VARIANTS, DECODE_LATENT_WGMMA_VARIANTS,
    DECODE_RING_FP8_VARIANTS, DECODE_RING_VARIANTS, PREFILL_MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
pub use cascade::{CascadeArgs, CascadeAttention, CascadeProblem, Prefix};
pub use cases::{AttentionCase, CASES, samples};
pub use kv_scales::KvScales;
pub use scores::{ScoreBias, ScoreTensors, Scores};
pub use select::{AttentionChoice, MAX_DECODE_QUERIES, MAX_TENSOR_DECODE_QUERIES, select};

const OP: &str = "attention";

/// Keys that a page of a pool may have.
pub const PAGE_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All.
    #[default]
    None,
    /// Those up to its own place. The last query's place is that of the last key (bottom-right alignment): query i of
    /// `seq_q` sees key j of `len` if `j ≤ i + len − seq_q`.
    Causal,
}

/// What is to be attended to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Most sequences of a run.
    pub batch: usize,
    /// Most queries of a sequence.
    pub seq_q: usize,
    /// Most keys of a sequence.
    pub seq_kv: usize,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads: query head h uses number `h / (heads_q / heads_kv)`.
    pub heads_kv: usize,
    /// Elements of a head of q and k: a multiple of 8 from 8 to 576.
    pub head_dim: usize,
    /// Elements of a head of v and out: a multiple of 8 from 8 to 512.
    pub head_dim_v: usize,
    /// Type of q and out.
    pub dtype: DType,
    /// Type of k and v: the same, or [`DType::F8E4M3`] where that is f16 or bf16 and both head dims are multiples
    /// of 16.
    pub dtype_kv: DType,
    /// What q·kᵀ is multiplied by before the softmax; `head_dim`^−½ if none.
    pub scale: Option<f32>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// A sliding window: of those a query sees only the last W, that is `j > i + len − seq_q − W`.
    pub window: Option<usize>,
    /// What changes scores besides: a soft cap, masks of one's own.
    pub scores: Scores,
    /// Keys of a page, one of [`PAGE_SIZES`], if k and v are pools of pages; `seq_kv` is then the most keys of a
    /// sequence that its pages hold.
    pub page_size: Option<usize>,
}

impl AttentionProblem {
    /// With what it must have. The other fields do nothing: `head_dim_v: head_dim`, `dtype_kv: dtype`, `scale:
    /// None`, `mask: Mask::None`, `window: None`, `scores: Scores::default()`, `page_size: None`.
    pub fn new(
        batch: usize,
        [seq_q, seq_kv]: [usize; 2],
        [heads_q, heads_kv]: [usize; 2],
        head_dim: usize,
        dtype: DType,
    ) -> Self {
        AttentionProblem {
            batch,
            seq_q,
            seq_kv,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            dtype_kv: dtype,
            scale: None,
            mask: Mask::None,
            window: None,
            scores: Scores::default(),
            page_size: None,
        }
    }
}

impl AttentionProblem {
    /// What q·kᵀ is multiplied by.
    pub fn scale(&self) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (self.head_dim as f32).sqrt())
    }

    fn is_fp8(&self) -> bool {
        self.dtype_kv == DType::F8E4M3
    }
}

/// The tensors of a run. The last dimension must have stride 1; the others may have any stride.
#[derive(Debug)]
pub struct AttentionArgs<'a> {
    /// `[batch, seq_q, heads_q, head_dim]`; packed `[1, tokens, heads_q, head_dim]`.
    pub q: TensorView<'a>,
    /// `[batch, seq_kv, heads_kv, head_dim]`: of a cache, the part that may be in use. With pages
    /// `[num_pages, page_size, heads_kv, head_dim]`, packed `[1, tokens, heads_kv, head_dim]`.
    pub k: TensorView<'a>,
    /// `[batch, seq_kv, heads_kv, head_dim_v]`, and in pages or packed as k. It may be a part of k's own rows, as in
    /// latent attention.
    pub v: TensorView<'a>,
    /// `[batch]` u32, if there: how many of the `seq_kv` keys each sequence has, read when the kernel runs. More than
    /// `seq_kv` is taken as `seq_kv`. What lies beyond makes no difference, whatever it is.
    pub kv_lens: Option<TensorView<'a>>,
    /// Where packed sequences begin.
    pub offsets: Offsets<'a>,
    /// What k and v are multiplied by, if they are fp8.
    pub kv_scales: KvScales<'a>,
    /// `[batch, seq_q, heads_q, head_dim_v]`; packed `[1, tokens, heads_q, head_dim_v]`.
    pub out: TensorViewMut<'a>,
    /// `[batch, heads_q, seq_q]`, packed `[1, heads_q, tokens]`, f32, if there: the natural logarithm of the sum of the
    /// exponentials of a row's scores, of which a sink is one.
    pub lse: Option<TensorViewMut<'a>>,
    /// What changes scores.
    pub scores: ScoreTensors<'a>,
    /// `[batch, max_pages]` u32, if the problem has pages: those of each sequence in the order of its keys, read when
    /// the kernel runs. In any order, also shared between sequences; what is beyond a sequence's keys is not read.
    pub page_table: Option<TensorView<'a>>,
}

impl<'a> AttentionArgs<'a> {
    /// With what it must have. The other fields do nothing: `kv_lens: None`, `kv_scales: KvScales::default()`,
    /// `offsets: Offsets::default()`, `lse: None`, `scores: ScoreTensors::default()`, `page_table: None`.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        AttentionArgs {
            q,
            k,
            v,
            kv_lens: None,
            offsets: Offsets::default(),
            kv_scales: KvScales::default(),
            out,
            lse: None,
            scores: ScoreTensors::default(),
            page_table: None,
        }
    }
}

impl AttentionArgs<'_> {
    /// The same tensors, of which others may be put in their place.
    fn reborrow(&mut self) -> AttentionArgs<'_> {
        let AttentionArgs { q, k, v, kv_lens, offsets, kv_scales, out, lse, scores, page_table } = self;
        AttentionArgs {
            q: *q,
            k: *k,
            v: *v,
            kv_lens: *kv_lens,
            offsets: *offsets,
            kv_scales: *kv_scales,
            out: out.reborrow(),
            lse: lse.as_mut().map(TensorViewMut::reborrow),
            scores: *scores,
            page_table: *page_table,
        }
    }
}

/// Where sequences begin that are packed one after the other, in ascending order and read when the kernel runs:
/// sequence s has the tokens from `offsets[s]` to `offsets[s + 1]`. Of a sequence with more than are planned, only so
/// many first ones count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Offsets<'a> {
    /// `[batch + 1]` u32, if queries are packed. A row of out that is outside of all sequences is left as it is.
    pub q: Option<TensorView<'a>>,
    /// `[batch + 1]` u32, if keys are packed, which have neither `kv_lens` nor pages then, and are not fp8.
    pub kv: Option<TensorView<'a>>,
}

/// Softmax attention with grouped heads, causal and sliding-window masks, and sequences of different lengths.
///
/// `out = softmax(scale · q·kᵀ + mask) · v`, in memory linear in the number of keys: the scores are never stored.
///
/// **Soft cap** ([`Scores::soft_cap`]): a scaled product s becomes `cap · tanh(s / cap)`, before masks (Gemma 2); also
/// one of ±∞.
///
/// **Masks of one's own** ([`Scores::bias`], [`Scores::blocks`]): a number for each query and key that is added to the
/// score, or a byte that says whether the query sees the key; a bit for each block of queries and block of keys. They
/// hide keys besides the mask and the window; a hidden key, also one whose number is −∞, makes no difference whatever
/// it is. Blocks that no query of a kernel's tile sees are not read by the kernels of many queries, so time is in
/// proportion to the others; those of few queries read all. On tensor cores there are kernels of many queries for
/// additive and boolean masks, and on Hopper for block masks too, alone or beside the others (values of up to 128).
/// **Sinks** ([`ScoreTensors::sinks`]): a logit of each head joins the softmax's sum, and the log-sum-exp, without a
/// key or value (gpt-oss); one of −∞ changes nothing.
///
/// **Empty rows**: a row that sees no key gives zeros, and its sink as log-sum-exp, −∞ without one. **Arithmetic**: f32
/// throughout; out is rounded once. On tensor cores weights are rounded to the storage type too, and sums of 16
/// products are cut off below the 25th bit. Scores of any finite size, if Σ|q·k| is finite in f32; −∞ weighs nothing.
/// Values are added up with weights of up to 2^8 and divided in the end: where 2^8 · keys · |v| is more than 3.4e38,
/// out may be infinite or NaN. A NaN in q, in a visible key or value, or a score of +∞ gives NaN in the rows that it
/// enters (of a value: in its column) and nowhere else. **Determinism**: bitwise the same from run to run. A row's
/// result depends on its own sequence only: not on the other sequences, their number or lengths, nor on the room in the
/// cache. On a card, up to [`MAX_DECODE_QUERIES`] queries (with tensor cores up to [`MAX_TENSOR_DECODE_QUERIES`]) take
/// other kernels than more do, with another order of the sums, so the last bits may differ between the two; so they may
/// between tensors whose rows are aligned to 16 bytes and others, for which the few queries take the kernels of the
/// many, and the many those without tensor cores. **Few tiles, many keys**: where the tiles of many queries are fewer
/// than half of the multiprocessors and there are 1024 keys or more, 2 to 32 blocks share the keys of each, whose
/// results, rounded to q's type, are put together by a kernel behind: one rounding more. Into how many parts depends on
/// the run's sequences and queries and the planned keys, so the last bits do, too. Heads wider than 256 take the same
/// kernels for any number of queries; those of 576 and 512 another one on tensor cores, where rows are aligned, v is
/// the first columns of k's and there is no soft cap. **Pages**: key j of a sequence is row `j mod page_size` of the
/// page that its row of the table has at `j / page_size`. The bits are those of the same keys in one piece. With pages
/// `kv_lens` is needed, as nothing else tells how many keys there are. A page number that the pool does not have gives
/// a result without meaning, and no access outside of it. **Packed sequences** ([`AttentionArgs::offsets`]): the
/// queries of all sequences are one tensor, with or without the keys, so that prompts of different lengths, and single
/// tokens beside them, are one run. A sequence's bits are those that it has alone by the same kernel, which here is
/// that for the planned number of queries. Masks by element and by block keep a place for each sequence, of the planned
/// sizes. Offsets that do not ascend give results without meaning, and no access outside of the tensors. **fp8**: keys
/// and values in e4m3, times a scale of their head ([`KvScales`]): `k = k8 · k_scale[head]`, as `qk_norm_rope` writes
/// them. With tensor cores few queries take them as they are, and the scales join those of the scores and of the
/// results; the other kernels get them rounded to q's type first. On a card the rows of q, k, v and out have to be
/// aligned to 16 bytes. **Streams**: a plan has a workspace, so a run in another stream than the last one waits for
/// that. A recorded graph does not know of later runs: do not let it run at the same time as the plan in another
/// stream, nor outlive the plan. **Aliasing**: out and lse may not overlap the other tensors; q, k and v may overlap
/// each other. **Memory**: the decode kernels leave `head_dim_v` f32 for each query, head and 256 keys, for which the
/// plan has memory; the kernels of many queries whose blocks share keys a tile of results for each multiprocessor.
/// Heads wider than 256 have those kernels only, so plan them for few queries at a time. A plan for fp8 whose
/// kernels do not take it (all but those of few queries on tensor cores) has memory for keys and values in q's type: of
/// one planned sequence, or of as many as fit into 1 GiB and a 64th of the card's memory. A run brings those of so many
/// sequences there and attends to them, then the next ones', with the same bits; fewer planned sequences or keys need
/// less. **Errors**: [`Error::Invalid`] for a
/// shape, stride, type or place that does not fit; never after work was enqueued that writes out or lse (keys that are
/// gathered go into the plan's memory before). **Architectures**: the same kernels on all floors, for `head_dim` and
/// `head_dim_v` up to 64, 128 and 256, and up to 576 and 512. For f16 and bf16 of head dims up to 256, and of 576 with
/// values of 512 in the keys' own rows, there are kernels for tensor cores from sm_80 on, and on sm_90a others for many
/// queries of the former, if the scale is positive. **Source**: Dao et al., *FlashAttention* (2022), algorithm 1;
/// Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018), algorithm 3; the splits as in Dao et
/// al., *Flash-Decoding* (2023); the warpgroups' turns as in Shah et al., *FlashAttention-3* (2024).
/// **Invariance**: under [`Invariance::Batch`](crate::Invariance::Batch) there is one kernel for any number of queries,
/// that of many, or for heads wider than 256 theirs, and its blocks share no keys.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::attention::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = AttentionProblem {
///     batch: 1, seq_q: 512, seq_kv: 4096, heads_q: 32, heads_kv: 8, head_dim: 128, head_dim_v: 128,
///     dtype: DType::BF16, dtype_kv: DType::BF16, scale: None, mask: Mask::Causal, window: None,
///     scores: Scores::default(), page_size: None,
/// };
/// let attention = Attention::plan(&device, problem)?;
/// let q = Tensor::zeros(&stream, &[1, 512, 32, 128], DType::BF16)?;
/// let cache = Tensor::zeros(&stream, &[2, 4096, 8, 128], DType::BF16)?;
/// let mut out = Tensor::empty(&stream, &[1, 512, 32, 128], DType::BF16)?;
/// let (k, v) = (cache.view().slice(0, 0..1)?, cache.view().slice(0, 1..2)?);
/// let args = AttentionArgs {
///     q: q.view(), k, v, kv_lens: None, kv_scales: KvScales::default(), offsets: Offsets::default(),
///     out: out.view_mut(), lse: None, scores: ScoreTensors::default(), page_table: None,
/// };
/// attention.run(&stream, args)?;
/// println!("{}", attention.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Attention(Ladder<Planned>);

planned!(
    Attention,
    AttentionProblem,
    AttentionArgs { q, k, v, kv_lens, offsets, kv_scales, out, lse, scores, page_table },
    &'static AttentionVariant,
    Planned
);
views!(Offsets { q, kv });

/// Attention, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Planned {
    device: Device,
    problem: AttentionProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    Cuda {
        /// The choice for the most queries, or the caller's.
        choice: AttentionChoice,
        origin: Origin,
        /// Every kernel that a run may take.
        kernels: Vec<Loaded>,
        /// What the decode kernels need besides, if there are any.
        splits: Option<Box<Splits>>,
        /// What the kernels need besides whose blocks share keys, if there are any.
        key_parts: Option<Box<KeyParts>>,
        /// What the kernels need besides that take no keys in fp8, if those are and there are any such kernels.
        gather: Option<Box<Gather>>,
        /// The number from which blocks draw tiles, 0 between runs, if a kernel does that.
        tile_counter: Option<Box<Workspace<1>>>,
    },
}

/// Who chose the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// `select`, anew for each run's number of queries.
    Selected,
    /// The caller, for all runs.
    Forced,
}

impl Rung for Planned {
    const OP: &'static str = OP;
    type Problem = AttentionProblem;
    type Args<'a> = AttentionArgs<'a>;
    type Variant = &'static AttentionVariant;

    fn supports(device: &Device, problem: &AttentionProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem, problem.seq_q).map(|_| ()))
    }

    fn plan(device: &Device, problem: AttentionProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let mut choice = select(&limits, &problem, problem.seq_q)?;
        let mut variants = vec![choice.variant];
        let mut decoded = if choice.variant.tile.is_decode() { problem.seq_q } else { 0 };
        for seq_q in 1..=problem.seq_q.min(MAX_TENSOR_DECODE_QUERIES) {
            let (variant, _) = select::choose(&limits, &problem, seq_q)?;
            if !variants.contains(&variant) {
                variants.push(variant);
            }
            if variant.tile.is_decode() {
                decoded = decoded.max(seq_q);
            }
        }
        // Of few queries, if not of the planned ones, blocks may share keys.
        let tile = choice.variant.tile;
        let parts_log2 = |tiles| select::key_parts_log2(limits.num_sms, tile, tiles, seen(&problem));
        if let Some(split) = select::split(choice.variant)
            && !limits.is_invariant()
            && parts_log2(problem.heads_q as u32) > 0
        {
            variants.push(split);
            let tiles = problem.seq_q.div_ceil(split.tile.rows() as usize).saturating_mul(problem.batch);
            let tiles = tiles.saturating_mul(problem.heads_q).min(u32::MAX as usize) as u32;
            if parts_log2(tiles) > 0 {
                let blocks = 1 << parts_log2(tiles);
                let why = format!("{}, {blocks} blocks share the keys of each tile", choice.why);
                choice = AttentionChoice { variant: split, why };
            }
        }
        Self::new(device, problem, choice, Origin::Selected, &variants, decoded)
    }

    fn plan_with(
        device: &Device,
        problem: AttentionProblem,
        variant: &'static AttentionVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let choice = AttentionChoice::forced(&limits, variant, &problem)?;
        let decoded = if variant.tile.is_decode() { problem.seq_q } else { 0 };
        Self::new(device, problem, choice, Origin::Forced, &[variant], decoded)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        true
    }

    fn run(&self, stream: &Stream, args: &mut AttentionArgs<'_>) -> Result<(), Error> {
        let at = Check::new(OP, &self.device);
        at.stream(stream)?;
        let dims = self.check(&at, args)?;
        if dims.batch == 0 || dims.seq_q == 0 || (args.offsets.q.is_some() && dims.tokens_q == 0) {
            return Ok(());
        }
        match &self.backend {
            Backend::Cpu => cpu::run(&self.problem, &dims, args),
            Backend::Cuda { choice, origin, kernels, splits, key_parts, gather, tile_counter } => {
                let variant = match (origin, self.device.limits()) {
                    (Origin::Selected, Some(limits)) => {
                        select::choose(&limits, &self.problem, dims.seq_q as usize)?.0
                    }
                    _ => choice.variant,
                };
                if self.problem.is_fp8() {
                    expect_aligned(args)?;
                }
                // Decode kernels, `cp.async` and TMA access memory in pieces of 16 bytes only.
                let variant = match variant.tile {
                    tile if tile.is_latent() && !in_keys(args) => select::unaligned(&self.problem)?,
                    // The others are read and written without a map.
                    AttentionTile::DecodeLatentWgmma {} if repeats(&args.k) => {
                        select::unaligned(&self.problem)?
                    }
                    tile if tile.is_decode() && dims.vector == 0 => select::unaligned(&self.problem)?,
                    AttentionTile::PrefillMma { .. } if dims.vector == 0 => select::unaligned(&self.problem)?,
                    AttentionTile::Wgmma { .. }
                        if dims.vector == 0
                            || [args.q, args.k, args.v, args.out.as_view()].iter().any(repeats) =>
                    {
                        select::unaligned(&self.problem)?
                    }
                    _ => variant,
                };
                let (variant, parts_log2) = match key_parts {
                    Some(parts) => self.in_parts(*origin, variant, parts, dims)?,
                    None => (variant, 0),
                };
                // `new` loaded all that `select` can return.
                let Some(kernel) = kernels.iter().find(|kernel| kernel.variant == variant) else {
                    return Err(Error::invalid(
                        OP,
                        "q",
                        "a planned number of queries",
                        dims.seq_q.to_string(),
                    ));
                };
                let dims = dims.capped(scores::cap(&self.problem, Some(variant.tile)));
                let with = With {
                    kernel,
                    splits: splits.as_deref(),
                    key_parts: key_parts.as_deref().map(|parts| (parts, parts_log2)),
                    counter: tile_counter.as_deref(),
                };
                match gather.as_ref().filter(|_| select::gathers(variant, &self.problem)) {
                    Some(gather) => {
                        gather.each(stream, args, dims, |args, dims| self.attend(stream, &with, args, dims))
                    }
                    None => self.attend(stream, &with, args, dims),
                }
            }
        }
    }

    fn report(&self) -> OptimizationReport {
        let AttentionProblem {
            batch,
            seq_q,
            seq_kv,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            dtype,
            dtype_kv,
            mask,
            window,
            page_size,
            ..
        } = self.problem;
        let pairs = count(pairs(seq_q, seq_kv, mask, window));
        let row_bytes = count(seq_q) * count(heads_q * dtype.bytes())
            + count(seq_kv) * count(heads_kv * dtype_kv.bytes());
        let per_row = count(batch) * count(head_dim + head_dim_v);
        let values = if head_dim_v == head_dim { String::new() } else { format!(" and {head_dim_v}") };
        let fp8 = if self.problem.is_fp8() { format!(" {dtype_kv}") } else { String::new() };
        let pages = page_size.map_or(String::new(), |page_size| format!(" in pages of {page_size}"));
        let work = Work {
            problem: format!(
                "[{batch}, {seq_q}, {heads_q}, {head_dim}] {dtype} against [{batch}, {seq_kv}, {heads_kv}, {head_dim}]{fp8}{values}{pages}"
            ),
            bytes: per_row * row_bytes,
            flops: count(2 * heads_q) * per_row * pairs,
        };
        match &self.backend {
            Backend::Cpu => OptimizationReport::new(OP, &self.device, None, work, Cut::cpu("tiles")),
            Backend::Cuda { choice, kernels, gather, .. } => {
                let tile = choice.variant.tile;
                let gather = gather.as_ref().filter(|_| select::gathers(choice.variant, &self.problem));
                let gathered = gather.map_or(String::new(), |gather| {
                    format!(
                        ", {} of {batch} sequences are gathered at a time",
                        gather.room(seq_kv, heads_kv).min(batch)
                    )
                });
                let why = format!("{}{gathered}", choice.why);
                let cut = Cut { why, tile: format!("{tile:?}"), threads: tile.threads() };
                let kernel = kernels.iter().find(|kernel| kernel.variant == choice.variant);
                OptimizationReport::new(OP, &self.device, kernel.map(|kernel| &kernel.entry), work, cut)
            }
        }
    }
}

impl Planned {
    /// `decoded` is the largest number of queries that decode kernels may do.
    fn new(
        device: &Device,
        problem: AttentionProblem,
        choice: AttentionChoice,
        origin: Origin,
        variants: &[&'static AttentionVariant],
        decoded: usize,
    ) -> Result<Self, Error> {
        let unaligned = select::unaligned(&problem)?;
        // fp8 has to be aligned, and only tensor maps need another kernel then.
        let is_reachable =
            !problem.is_fp8() || variants.iter().any(|v| matches!(v.tile, AttentionTile::Wgmma { .. }));
        let fallback = (is_reachable && !variants.contains(&unaligned)).then_some(unaligned);
        let rows = (decoded * (problem.heads_q / problem.heads_kv)).min(DECODE_RING_ROWS as usize) as u32;
        let load = |variant| Loaded::new(device, variant, rows);
        let kernels = variants.iter().copied().chain(fallback).map(load);
        let kernels = kernels.collect::<Result<Vec<_>, _>>()?;
        let decodes = variants.iter().any(|variant| variant.tile.is_decode());
        let splits = match select::merge(problem.dtype) {
            Some(merge) if decodes => {
                let num_splits = problem.seq_kv.div_ceil(SPLIT_KEYS as usize);
                let workspace = Workspace::new(device, |stream| {
                    let tensor = |width| {
                        let shape = [problem.batch, problem.heads_q, decoded, num_splits, width];
                        Tensor::empty(stream, &shape, DType::F32)
                    };
                    Ok([tensor(problem.head_dim_v)?, tensor(2)?])
                })?;
                let many_pieces = device.profile().num_sms;
                Some(Box::new(Splits { merge: load(merge)?, many_pieces, workspace }))
            }
            _ => None,
        };
        let splits_keys = variants.iter().find(|variant| variant.tile.splits_keys());
        let key_parts = splits_keys.map(|split| {
            let mut rows =
                (select::key_places(device.profile().num_sms, split.tile) * split.tile.rows()) as usize;
            if origin == Origin::Forced {
                let all = problem.batch.saturating_mul(problem.seq_q).saturating_mul(problem.heads_q);
                rows = rows.max(all.saturating_mul(1 << FORCED_KEY_PARTS_LOG2));
            }
            KeyParts::new(device, &problem, rows).map(Box::new)
        });
        let key_parts = key_parts.transpose()?;
        let gathers = kernels.iter().any(|kernel| select::gathers(kernel.variant, &problem));
        let gather = gathers.then(|| Gather::new(device, &problem).map(Box::new)).transpose()?;
        let draws = kernels.iter().any(|kernel| matches!(kernel.variant.tile, AttentionTile::Wgmma { .. }));
        let counter = || Workspace::new(device, |stream| Ok([Tensor::zeros(stream, &[1], DType::U32)?]));
        let tile_counter = draws.then(counter).transpose()?.map(Box::new);
        let backend = Backend::Cuda { choice, origin, kernels, splits, key_parts, gather, tile_counter };
        Ok(Planned { device: device.clone(), problem, backend })
    }
}

/// log2 of the parts of the keys where the caller chose a kernel whose blocks share them: so they do.
const FORCED_KEY_PARTS_LOG2: u32 = 2;

impl Planned {
    /// The kernel of a run of many queries, and log2 of the parts of its keys: one whose blocks share them, where that
    /// pays and there is room.
    fn in_parts(
        &self,
        origin: Origin,
        variant: &'static AttentionVariant,
        parts: &KeyParts,
        dims: Checked,
    ) -> Result<(&'static AttentionVariant, u32), Error> {
        let most = parts.most_log2(&dims);
        if origin == Origin::Forced && variant.tile.splits_keys() {
            let expected = "as many tokens as sequences and queries are planned";
            return match most {
                Some(most) => Ok((variant, most.min(FORCED_KEY_PARTS_LOG2))),
                None => Err(Error::invalid(OP, "q", expected, dims.rows().to_string())),
            };
        }
        let (Some(split), Some(most)) = (select::split(variant), most) else { return Ok((variant, 0)) };
        let num_sms = self.device.profile().num_sms;
        let tiles = dims.prefill_tiles(split.tile)?;
        match select::key_parts_log2(num_sms, split.tile, tiles, seen(&self.problem)).min(most) {
            0 => Ok((variant, 0)),
            parts_log2 => Ok((split, parts_log2)),
        }
    }
}

/// Keys that the queries of a planned sequence see together, at most.
fn seen(problem: &AttentionProblem) -> usize {
    problem.window.map_or(problem.seq_kv, |window| problem.seq_kv.min(window.saturating_add(problem.seq_q)))
}

/// Pairs of a query and a key that it sees, in a sequence of so many of both, each below 2^30.
fn pairs(seq_q: usize, seq_kv: usize, mask: Mask, window: Option<usize>) -> usize {
    let triangle = |n: usize| n * (n + 1) / 2;
    // The sum over the queries of `most`, `most` − 1, …, as far as that is positive.
    let descending = |most: usize| triangle(most) - triangle(most.saturating_sub(seq_q));
    // From the last query on, which is at the last key.
    let all = match mask {
        Mask::None => seq_q * seq_kv,
        Mask::Causal => descending(seq_kv),
    };
    all - window.map_or(0, |window| descending(seq_kv.saturating_sub(window)))
}

/// Keys that `query` sees, the first and one past the last, in a sequence of `len`; the same as the kernels' `Visible`.
fn visible(dims: &AttentionDims, [len, seq_q]: [u32; 2], query: u32) -> (usize, usize) {
    let own = i64::from(query) + 1 + i64::from(len) - i64::from(seq_q);
    let hi = if dims.causal != 0 { own.max(0) } else { i64::from(len) };
    let lo = (own - i64::from(dims.window)).max(0);
    (lo as usize, hi as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_of_each_query() {
        for (seq_q, seq_kv) in (0..9).flat_map(|seq_q| (0..9).map(move |seq_kv| (seq_q, seq_kv))) {
            for window in [None, Some(1), Some(3), Some(8), Some(100)] {
                for mask in [Mask::None, Mask::Causal] {
                    let sees = |&(query, key): &(usize, usize)| {
                        // Places plus seq_q: the last query's is the last key's.
                        let (own, place) = (query + seq_kv, key + seq_q);
                        (mask == Mask::None || place <= own)
                            && window.is_none_or(|window| place + window > own)
                    };
                    let all = (0..seq_q).flat_map(|query| (0..seq_kv).map(move |key| (query, key)));
                    assert_eq!(
                        pairs(seq_q, seq_kv, mask, window),
                        all.filter(sees).count(),
                        "{seq_q} {seq_kv} {mask:?} {window:?}"
                    );
                }
            }
        }
    }
}
