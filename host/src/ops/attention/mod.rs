//! Attention: `abi::ops::attention` has the kernel table, `gpu/src/ops/attention` the kernels, `tests/ops/attention.rs` the
//! properties, `benches/ops/attention.rs` the bench.

mod cases;
mod cpu;
mod gather;
mod kv_scales;
pub mod reference;
mod scores;
mod select;

use abi::DType;
use abi::ops::attention::{
    AttentionDims, AttentionTile, AttentionVariant, DECODE_RING_ROWS, GROUP_SPLITS, MAX_HEAD_DIM,
    MAX_HEAD_DIM_V, MERGE_COLUMNS, SPLIT_KEYS, ScoreDims, decode_ring_group_bytes, decode_ring_joins,
};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut};
use crate::tensor_map::{Axis, TensorMap, Tiled};
use gather::Gather;

pub use cases::{AttentionCase, CASES};
pub use kv_scales::KvScales;
pub use scores::{Bias, ScoreTensors, Scores};
pub use select::{AttentionChoice, MAX_DECODE_QUERIES, MAX_TENSOR_DECODE_QUERIES, select};

const OP: &str = "attention";

/// What the keys and values of the heads that are worked on at a time may take of L2: on Hopper, half.
const SECTION_BYTES: usize = 24 << 20;

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
    /// Type of k and v: the same, or [`DType::F8E4M3`] where that is f16 or bf16 and both head dims are multiples of 16.
    pub dtype_kv: DType,
    /// What q·kᵀ is multiplied by before the softmax; `head_dim`^−½ if none.
    pub scale: Option<f32>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// A sliding window: of those a query sees only the last W, that is `j > i + len − seq_q − W`.
    pub window: Option<usize>,
    /// What changes scores besides: a soft cap, masks of one's own.
    pub scores: Scores,
    /// Keys of a page, one of [`PAGE_SIZES`], if k and v are pools of pages; `seq_kv` is then the most keys of a sequence that
    /// its pages hold.
    pub page_size: Option<usize>,
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

/// The tensors of a run. Any strides, but 1 in the last dimension.
#[derive(Debug)]
pub struct AttentionArgs<'a> {
    /// `[batch, seq_q, heads_q, head_dim]`; packed `[1, tokens, heads_q, head_dim]`.
    pub q: TensorView<'a>,
    /// `[batch, seq_kv, heads_kv, head_dim]`: of a cache, the part that may be in use. With pages
    /// `[num_pages, page_size, heads_kv, head_dim]`, packed `[1, tokens, heads_kv, head_dim]`.
    pub k: TensorView<'a>,
    /// `[batch, seq_kv, heads_kv, head_dim_v]`, and in pages or packed as k. It may be a part of k's own rows, as in latent attention.
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
    /// `[batch, heads_q, seq_q]`, packed `[1, heads_q, tokens]`, f32, if there: the natural logarithm of the sum of the exponentials of a row's scores,
    /// of which a sink is one.
    pub lse: Option<TensorViewMut<'a>>,
    /// What changes scores.
    pub scores: ScoreTensors<'a>,
    /// `[batch, max_pages]` u32, if the problem has pages: those of each sequence in the order of its keys, read when the kernel
    /// runs. In any order, also shared between sequences; what is beyond a sequence's keys is not read.
    pub page_table: Option<TensorView<'a>>,
}

/// Where sequences begin that are packed one after the other, in ascending order and read when the kernel runs: sequence s has the tokens
/// from `offsets[s]` to `offsets[s + 1]`. Of a sequence with more than are planned, only so many first ones count.
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
/// **Soft cap** ([`Scores::soft_cap`]): a scaled product s becomes `cap · tanh(s / cap)`, before masks (Gemma 2); also one of ±∞.
///
/// **Masks of one's own** ([`Scores::bias`], [`Scores::blocks`]): a number for each query and key that is added to the score, or a byte
/// that says whether the query sees the key; a bit for each block of queries and block of keys. They hide keys besides the mask and
/// the window; a hidden key, also one whose number is −∞, makes no difference whatever it is. Blocks that no query of a kernel's tile
/// sees are not read by the kernels of many queries, so time is in proportion to the others; those of few queries read all. On tensor
/// cores there are kernels of many queries for additive and boolean masks (`mma.sync`, also on Hopper) and for block masks (Hopper's),
/// not for both together.
/// **Sinks** ([`ScoreTensors::sinks`]): a logit of each head joins the softmax's sum, and the log-sum-exp, without a key or value
/// (gpt-oss); one of −∞ changes nothing.
///
/// **Empty rows**: a row that sees no key gives zeros, and its sink as log-sum-exp, −∞ without one.
/// **Arithmetic**: f32 throughout; out is rounded once. On tensor cores weights are rounded to the storage type too, and sums of 16
/// products are cut off below the 25th bit. Scores of any finite size; −∞ weighs nothing. A NaN in q, in a
/// visible key or value, or a score of +∞ gives NaN in the rows that it enters (of a value: in its column) and nowhere
/// else.
/// **Determinism**: bitwise the same from run to run. A row's result depends on its own sequence only: not on the other
/// sequences, their number or lengths, nor on the room in the cache. On a card, up to [`MAX_DECODE_QUERIES`] queries (with tensor
/// cores up to [`MAX_TENSOR_DECODE_QUERIES`]) take other kernels than more do, with another order of the sums, so the last bits may
/// differ between the two; so they may between tensors whose rows are aligned to 16 bytes and others, for which the few queries take
/// the kernels of the many, and the many those without tensor cores.
/// Heads wider than 256 take the same kernels for any number of queries; those of 576 and 512 another one on tensor cores, where
/// rows are aligned, v is the first columns of k's and there is no soft cap.
/// **Pages**: key j of a sequence is row `j mod page_size` of the page that its row of the table has at `j / page_size`. The bits
/// are those of the same keys in one piece. With pages `kv_lens` is needed, as nothing else tells how many keys there are. A page number
/// that the pool does not have gives a result without meaning, and no access outside of it.
/// **Packed sequences** ([`AttentionArgs::offsets`]): the queries of all sequences are one tensor, with or without the keys, so that prompts
/// of different lengths, and single tokens beside them, are one run. A sequence's bits are those that it has alone by the same kernel, which
/// here is that for the planned number of queries. Masks by element and by block keep a place for each sequence, of the planned sizes. Offsets
/// that do not ascend give results without meaning, and no access outside of the tensors.
/// **fp8**: keys and values in e4m3, times a scale of their head ([`KvScales`]): `k = k8 · k_scale[head]`, as `qk_norm_rope` writes them.
/// With tensor cores few queries take them as they are, and the scales join those of the scores and of the results; the other kernels get
/// them rounded to q's type first. On a card the rows of q, k, v and out have to be aligned to 16 bytes.
/// **Streams**: a plan has a workspace, so a run in another stream than the last one waits for that. A recorded graph
/// does not know of later runs: do not let it run at the same time as the plan in another stream, nor outlive the plan.
/// **Aliasing**: out and lse may not overlap the other tensors; q, k and v may overlap each other.
/// **Memory**: the decode kernels leave `head_dim_v` f32 for each query, head and 256 keys, for which the plan has memory. Heads
/// wider than 256 have those kernels only, so plan them for few queries at a time. A plan whose kernels take keys neither from pages nor
/// from fp8 (`mma.sync`, which does prompts on Ampere, the former; all but those of few queries on tensor cores the latter) has memory for
/// all keys and values in q's type.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors, for `head_dim` and `head_dim_v` up to 64, 128 and 256, and up to 576
/// and 512. For f16 and bf16 of head dims up to 256, and of 576 with values of 512 in the keys' own rows, there are kernels for
/// tensor cores from sm_80 on, and on sm_90a others for many queries of the former, if the scale is positive.
/// **Source**: Dao et al., *FlashAttention* (2022), algorithm 1; Milakov and Gimelshein, *Online normalizer calculation
/// for softmax* (2018), algorithm 3; the splits as in Dao et al., *Flash-Decoding* (2023); the warpgroups' turns as in Shah et
/// al., *FlashAttention-3* (2024).
///
/// ```no_run
/// # use host::{Device, DType, Tensor, ops::attention::*};
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
///     q: q.view(), k, v, kv_lens: None, kv_scales: KvScales::default(), offsets: Offsets::default(), out: out.view_mut(),
///     lse: None, scores: ScoreTensors::default(), page_table: None,
/// };
/// attention.run(&stream, args)?;
/// println!("{}", attention.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Attention {
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
        /// What the kernels need besides that take keys from neither pages nor fp8, if there are any.
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

/// Where a run's keys are: fields of [`AttentionDims`].
struct Cache {
    seq_kv: usize,
    page_log2: u32,
    num_pages: u32,
    table_stride: u32,
}

#[derive(Debug)]
struct Loaded {
    variant: &'static AttentionVariant,
    entry: Entry,
    /// Blocks that the card holds at a time, where they are persistent; else as many as there may be.
    places: u32,
    /// Whether a block can join the splits of a group: it has the shared memory.
    joins: bool,
}

impl Loaded {
    /// For so many rows of a decode kernel's block, at most.
    fn new(device: &Device, variant: &'static AttentionVariant, rows: u32) -> Result<Self, Error> {
        let smem_bytes = variant.tile.smem_bytes();
        let load = |smem_bytes| device.entry(OP, variant.entry, smem_bytes);
        let (most, joined_bytes) = match variant.tile {
            AttentionTile::DecodeRing { dim, blocks, .. } if decode_ring_joins(dim) => {
                (blocks, decode_ring_group_bytes(dim, rows))
            }
            AttentionTile::DecodeRing { blocks, .. } => (blocks, 0),
            AttentionTile::DecodeLatent { .. } => (1, 0),
            _ => (0, 0),
        };
        let Some(limits) = device.limits().filter(|_| most != 0) else {
            return Ok(Loaded { variant, entry: load(smem_bytes)?, places: u32::MAX, joins: false });
        };
        // A multiprocessor has one KiB more than a block can take, and takes one for each.
        let held = |bytes: u32| ((limits.smem_per_block_bytes + (1 << 10)) / (bytes + (1 << 10))).min(most);
        let joins = joined_bytes != 0 && held(smem_bytes + joined_bytes) == held(smem_bytes);
        let entry = load(if joins { smem_bytes + joined_bytes } else { smem_bytes })?;
        Ok(Loaded { variant, entry, places: limits.num_sms.max(1) * held(smem_bytes).max(1), joins })
    }
}

#[derive(Debug)]
struct Splits {
    merge: Loaded,
    /// From so many rows on the merge does each with one warp, whatever the number of splits.
    many_rows: u32,
    /// What the splits leave for the merge, both `[sequence, head, query, result, …]` f32, a result being a split's or a group's: unfinished results of `head_dim`;
    /// maximum and sum of the weights.
    workspace: Workspace<2>,
}

impl AttentionArgs<'_> {
    /// What tells how many keys sequences have, and, if they are packed, where.
    fn lens(&self) -> Param<'_> {
        optional(if self.offsets.kv.is_some() { &self.offsets.kv } else { &self.kv_lens })
    }
}

impl Attention {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &AttentionProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem, problem.seq_q).map(|_| ()))
    }

    /// Checks the problem, chooses the kernels, loads them, and allocates the workspace.
    pub fn plan(device: &Device, problem: AttentionProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Attention { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let choice = select(&limits, &problem, problem.seq_q)?;
        let mut variants = vec![choice.variant];
        let mut decoded = if choice.variant.tile.is_decode() { problem.seq_q } else { 0 };
        for seq_q in 1..=problem.seq_q.min(MAX_TENSOR_DECODE_QUERIES) {
            let variant = select(&limits, &problem, seq_q)?.variant;
            if !variants.contains(&variant) {
                variants.push(variant);
            }
            if variant.tile.is_decode() {
                decoded = decoded.max(seq_q);
            }
        }
        Self::new(device, problem, choice, Origin::Selected, &variants, decoded)
    }

    /// Plans with a kernel of the caller's choice for all runs; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: AttentionProblem,
        variant: &'static AttentionVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Attention { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let choice = AttentionChoice::forced(&limits, variant, &problem)?;
        let decoded = if variant.tile.is_decode() { problem.seq_q } else { 0 };
        Self::new(device, problem, choice, Origin::Forced, &[variant], decoded)
    }

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
                let many_rows = 8 * device.profile().num_sms;
                Some(Box::new(Splits { merge: load(merge)?, many_rows, workspace }))
            }
            _ => None,
        };
        let gathers = kernels.iter().any(|kernel| select::gathers(kernel.variant, &problem));
        let gather = gathers.then(|| Gather::new(device, &problem).map(Box::new)).transpose()?;
        let draws = kernels.iter().any(|kernel| matches!(kernel.variant.tile, AttentionTile::Wgmma { .. }));
        let counter = || Workspace::new(device, |stream| Ok([Tensor::zeros(stream, &[1], DType::U32)?]));
        let tile_counter = draws.then(counter).transpose()?.map(Box::new);
        let backend = Backend::Cuda { choice, origin, kernels, splits, gather, tile_counter };
        Ok(Attention { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Attention`].
    pub fn run(&self, stream: &Stream, mut args: AttentionArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        if dims.batch == 0 || dims.seq_q == 0 || (args.offsets.q.is_some() && dims.tokens_q == 0) {
            return Ok(());
        }
        match &self.backend {
            Backend::Cpu => cpu::run(&self.problem, &dims, &mut args),
            Backend::Cuda { choice, origin, kernels, splits, gather, tile_counter } => {
                let variant = match (origin, self.device.limits()) {
                    (Origin::Selected, Some(limits)) => {
                        select(&limits, &self.problem, dims.seq_q as usize)?.variant
                    }
                    _ => choice.variant,
                };
                if self.problem.is_fp8() {
                    expect_aligned(&args)?;
                }
                // Decode kernels, `cp.async` and TMA access memory in pieces of 16 bytes only.
                let variant = match variant.tile {
                    AttentionTile::DecodeLatent { .. } if !in_keys(&args) => {
                        select::unaligned(&self.problem)?
                    }
                    tile if tile.is_decode() && dims.vector == 0 => select::unaligned(&self.problem)?,
                    AttentionTile::PrefillMma { .. } if dims.vector == 0 => select::unaligned(&self.problem)?,
                    AttentionTile::Wgmma { .. } if dims.vector == 0 || repeats(&args) => {
                        select::unaligned(&self.problem)?
                    }
                    _ => variant,
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
                let [cap_in, cap_out] = scores::cap(&self.problem, Some(variant.tile));
                dims.scores = ScoreDims { cap_in, cap_out, ..dims.scores };
                let gather = gather.as_ref().filter(|_| select::gathers(variant, &self.problem));
                let _alone = gather.map(|gather| gather.workspace.enter(stream)).transpose()?;
                let (args, mut dims) = match gather {
                    Some(gather) => gather.run(stream, args, &dims)?,
                    None => (args, dims),
                };
                match (variant.tile, splits, tile_counter) {
                    (tile, Some(splits), _) if tile.is_decode() => {
                        dims.tiles = (dims.seq_q * dims.group).div_ceil(tile.rows());
                        decode(stream, kernel, splits, &args, dims)
                    }
                    (AttentionTile::Wgmma { keys, .. }, _, Some(counter)) => {
                        tile_queries(&mut dims, variant.tile);
                        let page_size = self.problem.page_size.filter(|_| args.page_table.is_some());
                        dims.box_keys = box_keys(page_size, keys);
                        self.wgmma(stream, kernel, counter, &args, &dims)
                    }
                    _ => {
                        tile_queries(&mut dims, variant.tile);
                        prefill(stream, kernel, &args, &dims)
                    }
                }
            }
        }
    }

    /// Runs a kernel that takes tensor maps.
    fn wgmma(
        &self,
        stream: &Stream,
        kernel: &Loaded,
        counter: &Workspace<1>,
        args: &AttentionArgs<'_>,
        dims: &AttentionDims,
    ) -> Result<(), Error> {
        let AttentionArgs { q, k, v, out, lse, scores, page_table, .. } = args;
        let [next_tile] = &counter.tensors;
        let (tile, out_view) = (kernel.variant.tile, out.as_view());
        let map = |view, box_rows| self.tensor_map(view, box_rows);
        let (q_map, out_map) = (map(q, tile.rows())?, map(&out_view, 64)?);
        // Without keys nothing is loaded from them.
        let (k_map, v_map) =
            if dims.seq_kv == 0 { (q_map, q_map) } else { (map(k, dims.box_keys)?, map(v, dims.box_keys)?) };
        let items = blocks(&[dims.tiles, dims.batch, dims.heads_q])?;
        let grid = items.min(self.device.profile().num_sms.max(1));
        let params = [
            (&q_map).into(),
            (&k_map).into(),
            (&v_map).into(),
            (&out_map).into(),
            (*v).into(),
            out.into(),
            args.lens(),
            optional(&args.offsets.q),
            optional(page_table),
            Param::optional(lse.as_ref()),
            optional(&scores.sinks),
            optional(&scores.blocks),
            next_tile.view().into(),
            dims.into(),
        ];
        let _alone = counter.enter(stream)?;
        // SAFETY: `check` found every row of every tensor inside its view, and the maps have its sizes and strides; the blocks
        // draw all tiles of all heads and sequences, by a number that no other stream's run uses until this one is done; threads and
        // shared memory are the tile's.
        unsafe { kernel.entry.launch(stream, [grid, 1, 1], [tile.threads(), 1, 1], &params) }
    }

    /// The map of `[sequence, token, head, column]` in boxes of 64 columns of a head.
    fn tensor_map(&self, view: &TensorView<'_>, box_rows: u32) -> Result<TensorMap, Error> {
        let bytes = view.dtype().bytes();
        // The stride of a single one is not used; it must be one all the same.
        let axis = |axis: usize| {
            let (size, stride) = (view.shape()[axis], view.strides()[axis] * bytes);
            Axis { size: size as u64, stride_bytes: if size <= 1 { 16 } else { stride as u64 } }
        };
        let tokens = axis(1);
        let tiled = Tiled {
            dtype: view.dtype(),
            address: view.address(),
            rows: tokens.size,
            cols: view.shape()[3] as u64,
            stride_bytes: tokens.stride_bytes,
            outer: Some([axis(2), axis(0)]),
            box_rows,
            box_cols: 64,
        };
        self.device.tensor_map(OP, &tiled)
    }

    fn check(&self, args: &AttentionArgs<'_>) -> Result<AttentionDims, Error> {
        let AttentionArgs { q, k, v, kv_lens, kv_scales, offsets, out, lse, scores, page_table: _ } = args;
        let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, dtype, dtype_kv, .. } = self.problem;
        let device = &self.device;
        q.expect(OP, "q", device, dtype, &[None, None, Some(heads_q), Some(head_dim)])?;
        let (outer_q, tokens_q) = (q.shape()[0], q.shape()[1]);
        let sequences = |argument, of: &TensorView<'_>| {
            of.expect(OP, argument, device, DType::U32, &[None])?;
            of.expect_inner_contiguous(OP, argument)?;
            of.shape()[0].checked_sub(1).ok_or_else(|| {
                Error::invalid(
                    OP,
                    argument,
                    "the sequences' first tokens and the end",
                    "no number".to_string(),
                )
            })
        };
        let (batch, seq_q) = match &offsets.q {
            None => (outer_q, tokens_q),
            Some(of) if outer_q == 1 => (sequences("offsets.q", of)?, self.problem.seq_q),
            Some(_) => {
                return Err(Error::invalid(OP, "q", "one row of packed sequences", outer_q.to_string()));
            }
        };
        if let Some(of) = &offsets.kv {
            of.expect(OP, "offsets.kv", device, DType::U32, &[Some(batch + 1)])?;
            of.expect_inner_contiguous(OP, "offsets.kv")?;
        }
        let cache = self.check_cache(args, batch)?;
        let [outer, tokens] = [k.shape()[0], k.shape()[1]];
        v.expect(OP, "v", device, dtype_kv, &[Some(outer), Some(tokens), Some(heads_kv), Some(head_dim_v)])?;
        let seq_kv = cache.seq_kv;
        out.expect(
            OP,
            "out",
            device,
            dtype,
            &[Some(outer_q), Some(tokens_q), Some(heads_q), Some(head_dim_v)],
        )?;
        for (argument, view) in [("q", q), ("k", k), ("v", v)] {
            view.expect_inner_contiguous(OP, argument)?;
        }
        out.expect_inner_contiguous(OP, "out")?;
        if let Some(kv_lens) = kv_lens {
            kv_lens.expect(OP, "kv_lens", device, DType::U32, &[Some(batch)])?;
            kv_lens.expect_inner_contiguous(OP, "kv_lens")?;
        }
        if let Some(lse) = lse {
            lse.expect(OP, "lse", device, DType::F32, &[Some(outer_q), Some(heads_q), Some(tokens_q)])?;
            lse.expect_inner_contiguous(OP, "lse")?;
        }
        kv_scales.check(&self.problem, device)?;
        let scores = scores.check(&self.problem, device, [batch, seq_q, seq_kv])?;
        let planned = [
            ("q", "sequences", batch, self.problem.batch),
            ("q", "queries", seq_q, self.problem.seq_q),
            ("k", "keys", seq_kv, self.problem.seq_kv),
        ];
        for (argument, what, got, most) in planned {
            if got > most {
                return Err(Error::invalid(
                    OP,
                    argument,
                    format!("at most {most} {what}, as planned"),
                    got.to_string(),
                ));
            }
        }
        let strides = |argument, shape: &[usize], strides: &[usize]| -> Result<[u32; 3], Error> {
            // That of a single one may be anything, and kernels address rows beyond the last, of which they read no byte: aligned
            // all the same.
            let stride = |axis: usize| if shape[axis] <= 1 { 0 } else { strides[axis] };
            let stride = |axis: usize| check_size(OP, argument, "stride", stride(axis));
            Ok([stride(0)?, stride(1)?, stride(2)?])
        };
        let [q_batch_stride, q_token_stride, q_head_stride] = strides("q", q.shape(), q.strides())?;
        let [k_batch_stride, k_token_stride, k_head_stride] = strides("k", k.shape(), k.strides())?;
        let [v_batch_stride, v_token_stride, v_head_stride] = strides("v", v.shape(), v.strides())?;
        let [out_batch_stride, out_token_stride, out_head_stride] =
            strides("out", out.shape(), out.strides())?;
        let [lse_batch_stride, lse_head_stride, _] = match lse {
            Some(lse) => strides("lse", lse.shape(), lse.strides())?,
            None => [0; 3],
        };
        // Packed sequences are told apart by their first rows.
        let of_sequence =
            |stride: u32, offsets: &Option<TensorView<'_>>| if offsets.is_some() { 0 } else { stride };
        let q_batch_stride = of_sequence(q_batch_stride, &offsets.q);
        let out_batch_stride = of_sequence(out_batch_stride, &offsets.q);
        let lse_batch_stride = of_sequence(lse_batch_stride, &offsets.q);
        let packed =
            |tokens: usize, offsets: &Option<TensorView<'_>>| if offsets.is_some() { tokens } else { 0 };
        let vector = q.is_aligned_16() && k.is_aligned_16() && v.is_aligned_16() && out.is_aligned_16();
        Ok(AttentionDims {
            batch: batch as u32,
            seq_q: seq_q as u32,
            seq_kv: seq_kv as u32,
            sequences: batch as u32,
            tokens_q: check_size(OP, "q", "number of tokens", packed(tokens_q, &offsets.q))?,
            tokens_kv: check_size(OP, "k", "number of tokens", packed(tokens, &offsets.kv))?,
            heads_q: heads_q as u32,
            heads_kv: heads_kv as u32,
            group: (heads_q / heads_kv) as u32,
            head_dim: head_dim as u32,
            head_dim_v: head_dim_v as u32,
            causal: u32::from(self.problem.mask == Mask::Causal),
            window: self.problem.window.unwrap_or(seq_kv).min(seq_kv) as u32,
            vector: u32::from(vector),
            tiles: 0,
            splits: (seq_kv as u32).div_ceil(SPLIT_KEYS),
            section: section(&self.problem, seq_kv).min((batch * heads_q) as u32),
            q_batch_stride,
            q_token_stride,
            q_head_stride,
            k_batch_stride,
            k_token_stride,
            k_head_stride,
            v_batch_stride,
            v_token_stride,
            v_head_stride,
            out_batch_stride,
            out_token_stride,
            out_head_stride,
            lse_batch_stride,
            lse_head_stride,
            scale: match self.problem.dtype {
                DType::F32 => self.problem.scale(),
                _ => self.problem.scale() * std::f32::consts::LOG2_E,
            },
            scores,
            page_log2: cache.page_log2,
            num_pages: cache.num_pages,
            table_stride: cache.table_stride,
            box_keys: 0,
            result_shift: 0,
        })
    }

    /// Checks k, and what tells where a sequence's keys are.
    fn check_cache(&self, args: &AttentionArgs<'_>, batch: usize) -> Result<Cache, Error> {
        let AttentionArgs { k, kv_lens, offsets, page_table, .. } = args;
        let AttentionProblem { heads_kv, head_dim, dtype_kv, page_size, .. } = self.problem;
        let rows = |outer, tokens| [outer, tokens, Some(heads_kv), Some(head_dim)];
        let invalid =
            |argument, expected: &str, got: String| Err(Error::invalid(OP, argument, expected, got));
        let (page_size, table) = match (page_size, page_table) {
            (None, None) if offsets.kv.is_some() => {
                if self.problem.is_fp8() {
                    return invalid("offsets.kv", "none, as k and v are fp8", "a tensor".into());
                }
                k.expect(OP, "k", &self.device, dtype_kv, &rows(Some(1), None))?;
                if kv_lens.is_some() {
                    return invalid("kv_lens", "none, as keys are packed", "a tensor".into());
                }
                let seq_kv = if k.shape()[1] == 0 { 0 } else { self.problem.seq_kv };
                return Ok(Cache { seq_kv, page_log2: 31, num_pages: 1, table_stride: 0 });
            }
            _ if offsets.kv.is_some() => {
                return invalid("offsets.kv", "none, as there are pages", "a tensor".into());
            }
            (None, None) => {
                k.expect(OP, "k", &self.device, dtype_kv, &rows(Some(batch), None))?;
                return Ok(Cache { seq_kv: k.shape()[1], page_log2: 31, num_pages: 1, table_stride: 0 });
            }
            (Some(_), None) => return invalid("page_table", "a table, as planned", "none".into()),
            (None, Some(_)) => {
                return invalid("page_table", "none, as planned without pages", "a table".into());
            }
            (Some(page_size), Some(table)) => (page_size, table),
        };
        k.expect(OP, "k", &self.device, dtype_kv, &rows(None, Some(page_size)))?;
        table.expect(OP, "page_table", &self.device, DType::U32, &[Some(batch), None])?;
        table.expect_inner_contiguous(OP, "page_table")?;
        if kv_lens.is_none() {
            return invalid("kv_lens", "the sequences' lengths, as there are pages", "none".into());
        }
        let (num_pages, most) = (k.shape()[0], self.problem.seq_kv.div_ceil(page_size));
        if table.shape()[1] > most {
            let expected = format!("at most {most} pages of a sequence, as planned");
            return invalid("page_table", &expected, table.shape()[1].to_string());
        }
        let stride = table.strides()[0];
        check_size(OP, "page_table", "number of elements", batch.saturating_mul(stride))?;
        // Of a pool without pages there is nothing to see.
        let room = if num_pages == 0 { 0 } else { table.shape()[1] * page_size };
        Ok(Cache {
            seq_kv: room.min(self.problem.seq_kv),
            page_log2: page_size.ilog2(),
            num_pages: check_size(OP, "k", "number of pages", num_pages)?.max(1),
            table_stride: stride as u32,
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
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
        // Pairs of a query and a key that it sees.
        let window = window.unwrap_or(seq_kv).min(seq_kv);
        let pairs: usize = (0..seq_q)
            .map(|query| {
                let own = (query + 1 + seq_kv).saturating_sub(seq_q);
                let hi = if mask == Mask::Causal { own } else { seq_kv };
                hi - own.saturating_sub(window).min(hi)
            })
            .sum();
        let row_bytes = seq_q * heads_q * dtype.bytes() + seq_kv * heads_kv * dtype_kv.bytes();
        let values = if head_dim_v == head_dim { String::new() } else { format!(" and {head_dim_v}") };
        let fp8 = if self.problem.is_fp8() { format!(" {dtype_kv}") } else { String::new() };
        let pages = page_size.map_or(String::new(), |page_size| format!(" in pages of {page_size}"));
        let work = |why, tile, threads| Work {
            problem: format!(
                "[{batch}, {seq_q}, {heads_q}, {head_dim}] {dtype} against [{batch}, {seq_kv}, {heads_kv}, {head_dim}]{fp8}{values}{pages}"
            ),
            why,
            tile,
            threads,
            bytes: (batch * (head_dim + head_dim_v) * row_bytes) as u64,
            flops: (2 * batch * heads_q * (head_dim + head_dim_v) * pairs) as u64,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card".into(), "tiles".into(), 1))
            }
            Backend::Cuda { choice, kernels, .. } => {
                let tile = choice.variant.tile;
                let work = work(choice.why.clone(), format!("{tile:?}"), tile.threads());
                let kernel = kernels.iter().find(|kernel| kernel.variant == choice.variant);
                OptimizationReport::new(OP, &self.device, kernel.map(|kernel| &kernel.entry), work)
            }
        }
    }
}

fn prefill(
    stream: &Stream,
    kernel: &Loaded,
    args: &AttentionArgs<'_>,
    dims: &AttentionDims,
) -> Result<(), Error> {
    let AttentionArgs { q, k, v, out, lse, scores, page_table, .. } = args;
    let grid = blocks(&[dims.tiles, dims.batch, dims.heads_q])?;
    let params = [
        (*q).into(),
        (*k).into(),
        (*v).into(),
        args.lens(),
        optional(&args.offsets.q),
        optional(page_table),
        out.into(),
        Param::optional(lse.as_ref()),
        optional(&scores.sinks),
        optional(&scores.bias),
        optional(&scores.blocks),
        dims.into(),
    ];
    // SAFETY: `check` found every row of every tensor inside its view, and `vector` what is read in pieces of 16 bytes; the
    // grid covers exactly the tiles of all heads and sequences.
    unsafe { kernel.entry.launch(stream, [grid, 1, 1], [kernel.variant.tile.threads(), 1, 1], &params) }
}

fn decode(
    stream: &Stream,
    kernel: &Loaded,
    splits: &Splits,
    args: &AttentionArgs<'_>,
    mut dims: AttentionDims,
) -> Result<(), Error> {
    let AttentionArgs { q, k, v, kv_scales, out, lse, scores, page_table, .. } = args;
    let Splits { merge, many_rows, workspace } = splits;
    // A block joins the splits of a group where no block does more of them then than it else would, but for a sixteenth.
    let results =
        |splits: u32| blocks(&[dims.splits.div_ceil(splits), dims.tiles, dims.heads_kv, dims.batch]);
    let each = |results: u32| results.div_ceil(kernel.places).max(1);
    let (alone, joined) = (results(1)?, results(GROUP_SPLITS)?);
    let joins = kernel.joins && each(joined).saturating_mul(GROUP_SPLITS) <= each(alone) + each(alone) / 16;
    if joins {
        dims.splits = dims.splits.next_multiple_of(GROUP_SPLITS);
        dims.result_shift = GROUP_SPLITS.ilog2();
    }
    // No more blocks than do as many results each as the one with most: 8192 are 32 for each of 256, not 31 for 256 of 264.
    let items = if joins { joined } else { alone };
    let grid = items.div_ceil(each(items));
    let (merge_rows, merge_pieces) =
        (blocks(&[dims.batch, dims.heads_q, dims.seq_q])?, dims.head_dim_v.div_ceil(MERGE_COLUMNS));
    // As many results as a warp asks for at a time are quickest added up by one.
    let is_by_warps = dims.splits >> dims.result_shift <= 16 || merge_rows >= *many_rows;
    let merge_threads = if is_by_warps { 32 } else { merge.variant.tile.threads() };
    let dims = &dims;
    let [partial, stats] = &workspace.tensors;
    let (partial, stats) = (partial.view(), stats.view());
    let params = [
        optional(&kv_scales.k),
        optional(&kv_scales.v),
        (*q).into(),
        (*k).into(),
        (*v).into(),
        args.lens(),
        optional(&args.offsets.q),
        optional(page_table),
        optional(&scores.bias),
        optional(&scores.blocks),
        partial.into(),
        stats.into(),
        dims.into(),
    ];
    // Only the kernels for fp8 know scales.
    let params = if kernel.variant.dtype_kv == DType::F8E4M3 { &params[..] } else { &params[2..] };
    let merge_params = [
        partial.into(),
        stats.into(),
        args.lens(),
        optional(&args.offsets.q),
        out.into(),
        Param::optional(lse.as_ref()),
        optional(&scores.sinks),
        dims.into(),
    ];
    let _alone = workspace.enter(stream)?;
    // SAFETY: as for prefill; the workspace has room for the rows and splits of the planned sizes, which `check` found the
    // run's not to exceed, and no run of another stream uses it until this one is done. The merge has the same dims.
    unsafe {
        kernel.entry.launch(stream, [grid, 1, 1], [kernel.variant.tile.threads(), 1, 1], params)?;
        merge.entry.launch(stream, [merge_rows, merge_pieces, 1], [merge_threads, 1, 1], &merge_params)
    }
}

/// Whether v is the first columns of k's rows.
fn in_keys(args: &AttentionArgs<'_>) -> bool {
    let AttentionArgs { k, v, .. } = args;
    k.address() == v.address() && k.strides() == v.strides()
}

/// An error where a tensor's rows are not aligned to 16 bytes, as no kernel takes fp8 then.
fn expect_aligned(args: &AttentionArgs<'_>) -> Result<(), Error> {
    let AttentionArgs { q, k, v, out, .. } = args;
    for (argument, view) in [("q", q), ("k", k), ("v", v), ("out", &out.as_view())] {
        if !view.is_aligned_16() {
            let expected = "rows aligned to 16 bytes, as k and v are fp8";
            let got = format!("strides {:?} at {:#x}", view.strides(), view.address());
            return Err(Error::invalid(OP, argument, expected, got));
        }
    }
    Ok(())
}

/// Whether a tensor has a row in several places, as after a broadcast, of which tensor maps know nothing.
fn repeats(args: &AttentionArgs<'_>) -> bool {
    let AttentionArgs { q, k, v, out, .. } = args;
    [q.strides(), k.strides(), v.strides(), out.strides()]
        .iter()
        .zip([q.shape(), k.shape(), v.shape(), out.shape()])
        .any(|(strides, shape)| (0..3).any(|axis| shape[axis] > 1 && strides[axis] == 0))
}

/// Query heads of a section: those of as many key heads as L2 holds the keys and values of.
fn section(problem: &AttentionProblem, seq_kv: usize) -> u32 {
    let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, dtype, .. } = *problem;
    let bytes = seq_kv * (head_dim + head_dim_v) * dtype.bytes();
    let heads = (SECTION_BYTES / bytes.max(1)).max(1).saturating_mul(heads_q / heads_kv);
    u32::try_from(heads).unwrap_or(u32::MAX)
}

/// Keys of a box of the tensor maps of k and v: all boxes of a step lie in one page each.
fn box_keys(page_size: Option<usize>, step_keys: u32) -> u32 {
    // Page sizes are powers of two: the largest that divides the step is that of its lowest bit.
    let divisor = 1 << step_keys.trailing_zeros();
    page_size.map_or(step_keys, |page_size| divisor.min(page_size as u32))
}

/// Cuts queries into a kernel's tiles.
fn tile_queries(dims: &mut AttentionDims, tile: AttentionTile) {
    if dims.tokens_q == 0 {
        dims.tiles = dims.seq_q.div_ceil(tile.rows());
    } else {
        // The places of `tile::sequences`, for all sequences together.
        (dims.tiles, dims.batch) = (dims.tokens_q / tile.rows() + dims.sequences, 1);
        dims.section = dims.section.min(dims.heads_q);
    }
}

/// The address of a tensor that there may be, else null.
fn optional<'a>(view: &Option<TensorView<'a>>) -> Param<'a> {
    view.map_or(Param::Address(0), Param::from)
}

/// Blocks altogether.
fn blocks(factors: &[u32]) -> Result<u32, Error> {
    let blocks = factors.iter().try_fold(1usize, |blocks, &factor| blocks.checked_mul(factor as usize));
    check_size(OP, "problem", "number of blocks", blocks.unwrap_or(usize::MAX))
}

/// Keys that `query` sees, the first and one past the last, in a sequence of `len`; the same as the kernels' `Visible`.
fn visible(dims: &AttentionDims, [len, seq_q]: [u32; 2], query: u32) -> (usize, usize) {
    let own = i64::from(query) + 1 + i64::from(len) - i64::from(seq_q);
    let hi = if dims.causal != 0 { own.max(0) } else { i64::from(len) };
    let lo = (own - i64::from(dims.window)).max(0);
    (lo as usize, hi as usize)
}

impl Kernel for Attention {
    type Args<'a> = AttentionArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: AttentionArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &AttentionProblem) -> Result<(), Error> {
    let AttentionProblem { batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, head_dim_v, dtype, .. } =
        *problem;
    let invalid = |expected: &str, got: String| Err(Error::invalid(OP, "problem", expected, got));
    for (what, size) in [("batch", batch), ("heads_q", heads_q)] {
        check_size(OP, "problem", what, size)?;
    }
    // The kernels add and subtract the two and the window in i32.
    for (name, size) in [("seq_q", seq_q), ("seq_kv", seq_kv)] {
        if size >= 1 << 30 {
            return invalid(&format!("{name} below 2^30"), size.to_string());
        }
    }
    if heads_kv == 0 || heads_q == 0 || !heads_q.is_multiple_of(heads_kv) {
        return invalid(
            "heads_q a multiple of heads_kv, both at least 1",
            format!("{heads_q} and {heads_kv}"),
        );
    }
    for (name, size, most) in
        [("head_dim", head_dim, MAX_HEAD_DIM), ("head_dim_v", head_dim_v, MAX_HEAD_DIM_V)]
    {
        if !(8..=most as usize).contains(&size) || !size.is_multiple_of(8) {
            return invalid(&format!("{name} a multiple of 8 from 8 to {most}"), size.to_string());
        }
    }
    if !dtype.is_float() {
        return invalid("dtype f32, f16 or bf16", dtype.name().into());
    }
    if problem.dtype_kv != dtype {
        if !problem.is_fp8() || dtype == DType::F32 {
            let expected = if dtype == DType::F32 {
                "dtype_kv f32".into()
            } else {
                format!("dtype_kv {dtype} or f8e4m3")
            };
            return invalid(&expected, problem.dtype_kv.name().into());
        }
        for (name, size) in [("head_dim", head_dim), ("head_dim_v", head_dim_v)] {
            if !size.is_multiple_of(16) {
                return invalid(&format!("{name} a multiple of 16, as k and v are fp8"), size.to_string());
            }
        }
    }
    if !problem.scale().is_finite() {
        return invalid("a finite scale", problem.scale().to_string());
    }
    if let Some(page_size) = problem.page_size.filter(|size| !PAGE_SIZES.contains(size)) {
        return invalid("pages of 16, 32, 64, 128 or 256 keys", page_size.to_string());
    }
    if problem.window == Some(0) {
        return invalid("a window of at least 1 key", "0".into());
    }
    problem.scores.check()
}
