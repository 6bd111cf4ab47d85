//! Norm and rotary embedding of q and k, and their append to a cache, in one pass: [`QkNormRope`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use std::num::Saturating;

use abi::DType;
use abi::ops::qk_norm_rope::{BLOCK_TILE_THREADS, LANES_TILE_THREADS, QkNormRopeDims};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::ops::rmsnorm::NormWeight;
use crate::ops::rope::{RopeInput, RopeStyle, RopeTables};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_eps, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut, views};

pub use abi::ops::qk_norm_rope::{QkNormRopeTile, QkNormRopeVariant, VARIANTS};
pub use cases::{CASES, QkNormRopeCase, samples};
pub use select::{QkNormRopeKernel, select};

const OP: &str = "qk_norm_rope";

/// The norm of every query and key head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// Added to the mean of a head's squares, inside the root.
    pub eps: f32,
    /// What the stored weights mean.
    pub weight: NormWeight,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormRopeProblem {
    /// Most tokens of a run, over all sequences.
    pub tokens: usize,
    /// Query heads of a token.
    pub heads_q: usize,
    /// Key heads of a token, and value heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated, the first ones: even, at least 2. The rest is only normalised.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Type of heads and weights.
    pub dtype: DType,
    /// Type of the caches: the same, or [`DType::F8E4M3`].
    pub cache_dtype: DType,
    /// None if q and k are rotated as they are.
    pub norm: Option<QkNorm>,
}

impl QkNormRopeProblem {
    /// With what it must have. The other fields do nothing: `rotary_dim: head_dim`, `style: RopeStyle::HalfSplit`,
    /// `cache_dtype: dtype`, `norm: None`.
    pub fn new(tokens: usize, [heads_q, heads_kv]: [usize; 2], head_dim: usize, dtype: DType) -> Self {
        QkNormRopeProblem {
            tokens,
            heads_q,
            heads_kv,
            head_dim,
            rotary_dim: head_dim,
            style: RopeStyle::HalfSplit,
            dtype,
            cache_dtype: dtype,
            norm: None,
        }
    }
}

/// Weights of the norm, `[head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub struct QkNormWeights<'a> {
    /// Of the query heads.
    pub q: TensorView<'a>,
    /// Of the key heads.
    pub k: TensorView<'a>,
}

views!(QkNormWeights { q, k });

/// The tensors of a run. Heads are `[tokens, heads, head_dim]`: q, k and v are often parts of a joint projection's
/// rows. The last dimension must have stride 1; the others may have any stride.
#[derive(Debug)]
pub struct QkNormRopeArgs<'a> {
    /// Query heads.
    pub q: RopeInput<'a>,
    /// Key heads.
    pub k: TensorView<'a>,
    /// Value heads.
    pub v: TensorView<'a>,
    /// There if the problem has a norm.
    pub weights: Option<QkNormWeights<'a>>,
    /// `[tokens]` u32, any stride: each token's row of the tables. One beyond them is treated as their last.
    pub positions: TensorView<'a>,
    /// cos and sin, `rotary_dim / 2` pairs; for positions on several axes those of
    /// [`RopeTables::from_angles`](super::rope::RopeTables::from_angles).
    pub tables: &'a RopeTables,
    /// `[tokens]` u32: where each token's keys and values go. Distinct; one beyond the caches is skipped.
    pub slots: TensorView<'a>,
    /// Query heads, normalised and rotated.
    pub q_out: TensorViewMut<'a>,
    /// `[slots, heads_kv, head_dim]`, stride 1 in the last dimension.
    pub k_cache: TensorViewMut<'a>,
    /// The same shape and strides.
    pub v_cache: TensorViewMut<'a>,
    /// `[heads_kv]` f32, there if the caches are fp8: what is read from k_cache is to be multiplied by.
    pub k_scale: Option<TensorView<'a>>,
    /// The same for v_cache.
    pub v_scale: Option<TensorView<'a>>,
}

impl<'a> QkNormRopeArgs<'a> {
    /// With what it must have. The other fields do nothing: `weights: None`, `k_scale: None`, `v_scale: None`.
    pub fn new(
        q: RopeInput<'a>,
        [k, v]: [TensorView<'a>; 2],
        positions: TensorView<'a>,
        tables: &'a RopeTables,
        slots: TensorView<'a>,
        q_out: TensorViewMut<'a>,
        [k_cache, v_cache]: [TensorViewMut<'a>; 2],
    ) -> Self {
        QkNormRopeArgs {
            q,
            k,
            v,
            weights: None,
            positions,
            tables,
            slots,
            q_out,
            k_cache,
            v_cache,
            k_scale: None,
            v_scale: None,
        }
    }
}

/// What stands between the joint projection of attention and its product with the keys, in one pass: per token and head
///
/// `q_out[t] = rope(norm(q[t]))`, `k_cache[slots[t]] = rope(norm(k[t]))`, `v_cache[slots[t]] = v[t]`,
///
/// with [`RmsNorm`](super::rmsnorm::RmsNorm) over the elements of a head, if there is a norm,
/// [`Rope`](super::rope::Rope) by the token's position, and [`KvAppend`](super::kv_append::KvAppend) for contiguous and
/// paged caches alike: position p in page g of a pool `[pages, page_size, heads, head_dim]` is slot
/// `g · page_size + p`. In fp8 caches heads are stored times `1 / k_scale[head]` and `1 / v_scale[head]`, at most ±448.
///
/// **Arithmetic**: f32, rounded to the type after the norm and after the rotation, where models round, too. The bits
/// are those of the three operators one after another. Only on a card, if heads have more than 512 bytes, or whole
/// pieces of 16 bytes but not their rotated part (each half of it, if the pairs are half of it apart), or addresses
/// that are not multiples of 16, their squares may be added in another order. fp8 is rounded from the type once more,
/// to nearest even. **Aliasing**: q in place by [`RopeInput::InPlace`]; otherwise no output may overlap another tensor.
/// **Determinism**: bitwise the same from run to run, if the slots are distinct; a token's result does not depend on
/// the other tokens or their number. **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not
/// fit; never after work was enqueued. **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed
/// by the hardware. **Source**: those of the three operators; norms of q and k as in Henry et al., *Query-Key
/// Normalization for Transformers* (2020), in the form of Qwen3.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor};
/// use warpforge::ops::{qk_norm_rope::*, rmsnorm::NormWeight, rope::{RopeInput, RopeStyle, RopeTables}};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (tokens, heads_q, heads_kv, head_dim) = (3, 16, 8, 128);
/// let norm = Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain });
/// let (style, dtype) = (RopeStyle::HalfSplit, DType::BF16);
/// let (rotary_dim, cache_dtype) = (head_dim, dtype);
/// let problem =
///     QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, style, dtype, cache_dtype, norm };
/// let plan = QkNormRope::plan(&device, problem)?;
/// let inv_freq: Vec<f64> = (0..64).map(|i| 1e6f64.powf(-2.0 * i as f64 / 128.0)).collect();
/// let tables = RopeTables::new(&stream, &inv_freq, 1.0, 40960)?;
/// let heads = |heads| Tensor::zeros(&stream, &[tokens, heads, head_dim], dtype);
/// let cache = || Tensor::zeros(&stream, &[4096, heads_kv, head_dim], dtype);
/// let (q, k, v, mut q_out) = (heads(heads_q)?, heads(heads_kv)?, heads(heads_kv)?, heads(heads_q)?);
/// let (mut k_cache, mut v_cache) = (cache()?, cache()?);
/// let weight = Tensor::zeros(&stream, &[head_dim], dtype)?;
/// let positions = Tensor::from_slice(&stream, &[tokens], &[7u32, 8, 9])?;
/// plan.run(&stream, QkNormRopeArgs {
///     q: RopeInput::From(q.view()),
///     k: k.view(),
///     v: v.view(),
///     weights: Some(QkNormWeights { q: weight.view(), k: weight.view() }),
///     positions: positions.view(),
///     tables: &tables,
///     slots: positions.view(),
///     q_out: q_out.view_mut(),
///     k_cache: k_cache.view_mut(),
///     v_cache: v_cache.view_mut(),
///     k_scale: None,
///     v_scale: None,
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct QkNormRope(Plan<Self>);

planned!(
    QkNormRope,
    QkNormRopeProblem,
    QkNormRopeArgs { q, k, v, weights, positions, tables, slots, q_out, k_cache, v_cache, k_scale, v_scale },
    QkNormRopeKernel
);

impl Operator for QkNormRope {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "heads";
    type Problem = QkNormRopeProblem;
    type Args<'a> = QkNormRopeArgs<'a>;
    type Dims = QkNormRopeDims;
    type Variant = QkNormRopeKernel;
    type Kernels = Pair;

    fn check_problem(problem: &QkNormRopeProblem) -> Result<(), Error> {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, dtype, norm, .. } = *problem;
        if heads_q == 0 || heads_kv == 0 {
            let got = format!("{heads_q} and {heads_kv}");
            return Err(Error::invalid(OP, "problem", "at least one query head and one key head", got));
        }
        if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            let expected = format!("an even rotary_dim from 2 to head_dim {head_dim}");
            return Err(Error::invalid(OP, "problem", expected, rotary_dim.to_string()));
        }
        let heads = heads_q.saturating_add(heads_kv.saturating_mul(2));
        let of_token = heads.saturating_mul(head_dim);
        check_floats(OP, dtype, &[("tokens", tokens), ("elements of a token", of_token)])?;
        if problem.cache_dtype != dtype && !problem.is_fp8() {
            let expected = format!("cache_dtype {dtype} or f8e4m3");
            return Err(Error::invalid(OP, "problem", expected, problem.cache_dtype.name()));
        }
        norm.map_or(Ok(()), |norm| check_eps(OP, norm.eps))
    }

    fn select(limits: &DeviceLimits, problem: &QkNormRopeProblem) -> Result<Choice<QkNormRopeKernel>, Error> {
        select(limits, problem)
    }

    fn forced(
        kernel: QkNormRopeKernel,
        problem: &QkNormRopeProblem,
    ) -> Result<Choice<QkNormRopeKernel>, Error> {
        select::forced(kernel, problem)
    }

    fn load(
        device: &Device,
        problem: &QkNormRopeProblem,
        choice: &Choice<QkNormRopeKernel>,
    ) -> Result<Pair, Error> {
        let entries = [choice.variant.variant.entry, select::block(problem)?.entry];
        Pair::load(device, OP, entries, select::SMEM_BYTES)
    }

    fn check(
        at: &Check<'_>,
        problem: &QkNormRopeProblem,
        args: &QkNormRopeArgs<'_>,
    ) -> Result<QkNormRopeDims, Error> {
        let QkNormRopeArgs { q, k, v, weights, positions, tables, slots, q_out, .. } = args;
        let QkNormRopeArgs { k_cache, v_cache, k_scale, v_scale, .. } = args;
        let QkNormRopeProblem { heads_q, heads_kv, head_dim, rotary_dim, dtype, norm, .. } = *problem;
        let shape = |outer, heads| [outer, Some(heads), Some(head_dim)];
        let q_out_strides = at.rows("q_out", q_out.as_view(), dtype, &shape(None, heads_q))?;
        let [q_out_token_stride, q_out_head_stride] = q_out_strides;
        let len = q_out.shape()[0];
        let tokens = at.planned("q_out", "tokens", len, problem.tokens)?;
        let [q_token_stride, q_head_stride] = match q {
            RopeInput::From(q) => at.rows("q", *q, dtype, &shape(Some(len), heads_q))?,
            RopeInput::InPlace => q_out_strides,
        };
        let [k_token_stride, k_head_stride] = at.rows("k", *k, dtype, &shape(Some(len), heads_kv))?;
        let [v_token_stride, v_head_stride] = at.rows("v", *v, dtype, &shape(Some(len), heads_kv))?;
        match (norm, weights) {
            (None, None) => {}
            (Some(_), Some(QkNormWeights { q, k })) => {
                let [] = at.rows("weights.q", *q, dtype, &[Some(head_dim)])?;
                let [] = at.rows("weights.k", *k, dtype, &[Some(head_dim)])?;
            }
            (Some(_), None) => return at.refuse("weights", "tensors, as the problem has a norm", "none"),
            (None, Some(_)) => return at.refuse("weights", "none, as the problem has no norm", "tensors"),
        }
        let [position_stride] = at.strided("positions", *positions, DType::U32, &[Some(len)])?;
        // The tables' rows are whole pieces where those of q are, and they start where a pool block does.
        at.contiguous("tables", tables.cos().view(), DType::F32, &[None, Some(rotary_dim / 2)])?;
        let [] = at.elements("slots", *slots, DType::U32, &[Some(len)])?;
        let cache = |name, view: &TensorViewMut<'_>, slots| {
            at.rows::<2>(name, view.as_view(), problem.cache_dtype, &shape(slots, heads_kv))
        };
        let cache_strides = cache("k_cache", k_cache, None)?;
        let [slot_stride, cache_head_stride] = cache_strides;
        let num_slots = k_cache.shape()[0];
        if cache("v_cache", v_cache, Some(num_slots))? != cache_strides {
            let expected = format!("strides {:?}", k_cache.strides());
            return at.refuse("v_cache", expected, format!("{:?}", v_cache.strides()));
        }
        let why = ["the caches are fp8", "the caches are not fp8"];
        for (name, scale) in [("k_scale", k_scale), ("v_scale", v_scale)] {
            if let Some(scale) = at.given(name, problem.is_fp8(), *scale, why)? {
                let [] = at.elements(name, scale, DType::F32, &[Some(heads_kv)])?;
            }
        }
        Ok(QkNormRopeDims {
            tokens,
            heads_q: heads_q as u32,
            heads_kv: heads_kv as u32,
            // Of the kernel that needs no alignment; `launch` knows whether there is another.
            q_groups: heads_q as u32,
            kv_groups: heads_kv as u32,
            warps_log2: 0,
            head_dim: head_dim as u32,
            rotary_dim: rotary_dim as u32,
            is_interleaved: u32::from(problem.style == RopeStyle::Interleaved),
            max_position: tables.max_position() as u32,
            num_slots: at.size("k_cache", "number of slots", num_slots)?,
            q_token_stride,
            q_head_stride,
            k_token_stride,
            k_head_stride,
            v_token_stride,
            v_head_stride,
            q_out_token_stride,
            q_out_head_stride,
            slot_stride,
            cache_head_stride,
            position_stride,
            inv_head_dim: 1.0 / head_dim as f32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            weight_offset: norm.map_or(0.0, |norm| norm.weight.offset()),
        })
    }

    fn cpu(problem: &QkNormRopeProblem, dims: &QkNormRopeDims, args: &mut QkNormRopeArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, mut dims: QkNormRopeDims, args: &QkNormRopeArgs<'_>) -> Result<(), Error> {
        let QkNormRopeArgs { q, k, v, weights, positions, tables, slots, q_out, .. } = args;
        let QkNormRopeArgs { k_cache, v_cache, k_scale, v_scale, .. } = args;
        let q = match q {
            RopeInput::From(q) => (*q).into(),
            RopeInput::InPlace => q_out.into(),
        };
        // The lanes of a warp have the same group of several tokens.
        let (threads, heads, tokens, warps) = match run.choice.variant {
            QkNormRopeKernel { variant, heads_per_group } if run.is_aligned => match variant.tile {
                QkNormRopeTile::Lanes { lanes } => {
                    (LANES_TILE_THREADS, heads_per_group, 32 / lanes, LANES_TILE_THREADS / 32)
                }
                QkNormRopeTile::Block => (BLOCK_TILE_THREADS, 1, 1, 1),
            },
            _ => (BLOCK_TILE_THREADS, 1, 1, 1),
        };
        dims.q_groups = dims.heads_q.div_ceil(heads);
        dims.kv_groups = dims.heads_kv.div_ceil(heads);
        let groups = u64::from(dims.q_groups + 2 * dims.kv_groups);
        // And the warps of a block that of more, where groups have several heads: not all have as many.
        let same = if heads > 1 { warps } else { 1 };
        dims.warps_log2 = same.ilog2();
        let token_warps = u64::from(dims.tokens.div_ceil(tokens)).next_multiple_of(same.into());
        let items = token_warps * groups;
        let grid = check_blocks(OP, "q_out", items)?.div_ceil(warps);
        let params = [
            q,
            (*k).into(),
            (*v).into(),
            weights.map(|weights| weights.q).into(),
            weights.map(|weights| weights.k).into(),
            (*positions).into(),
            tables.cos().view().into(),
            tables.sin().view().into(),
            (*slots).into(),
            q_out.into(),
            k_cache.into(),
            v_cache.into(),
            (*k_scale).into(),
            (*v_scale).into(),
            (&dims).into(),
        ];
        let entry = run.kernels.fitting(run.is_aligned);
        // SAFETY: `check` found every head of every tensor inside its view, and as many positions and slots as tokens;
        // the tables have max_position rows, which the kernel keeps to. What is not `is_aligned` takes the kernel for
        // any address; the tables' rows are whole pieces where the other reads them so.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [threads, 1, 1], &params) }
    }

    fn work(problem: &QkNormRopeProblem) -> Work {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, style, dtype, .. } =
            *problem;
        let cache = if problem.is_fp8() { ", fp8 cache" } else { "" };
        let normalised = if problem.norm.is_some() { "normalised, " } else { "" };
        Work {
            problem: format!(
                "{normalised}{} {rotary_dim} of [{tokens}, {heads_q}/{heads_kv}, {head_dim}] {dtype}{cache}",
                style.name()
            ),
            bytes: Saturating(problem.bytes()),
            flops: Saturating(problem.flops()),
        }
    }

    fn tile(_: &Device, _: &QkNormRopeProblem, choice: &Choice<QkNormRopeKernel>) -> String {
        let QkNormRopeKernel { variant, heads_per_group } = choice.variant;
        match variant.tile {
            QkNormRopeTile::Lanes { lanes } => format!("{lanes} lanes, {heads_per_group} heads each"),
            QkNormRopeTile::Block => "a block per head".into(),
        }
    }
}

impl QkNormRopeProblem {
    /// Fewest bytes of a run of the planned size: heads are read and written once, each token's numbers and angles read
    /// once.
    pub fn bytes(&self) -> u64 {
        let [heads_q, heads_kv, head_dim] = [self.heads_q, self.heads_kv, self.head_dim].map(count);
        let (q, kv) = (heads_q * head_dim, count(2) * heads_kv * head_dim);
        let own = (count(2) * q + kv) * count(self.dtype.bytes());
        let heads = own + kv * count(self.cache_dtype.bytes());
        (count(self.tokens) * (heads + count(4) * (count(self.rotary_dim) + count(2)))).0
    }

    fn is_fp8(&self) -> bool {
        self.cache_dtype == DType::F8E4M3
    }

    /// Operations of a run of the planned size.
    pub fn flops(&self) -> u64 {
        let norm = if self.norm.is_some() { count(4) * count(self.head_dim) } else { count(0) };
        let heads = count(self.heads_q) + count(self.heads_kv);
        (count(self.tokens) * heads * (norm + count(3) * count(self.rotary_dim))).0
    }
}
