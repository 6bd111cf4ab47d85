//! RMSNorm per head and rotary embedding of q and k, with the append to a key/value cache: `abi::ops::qk_norm_rope` has the
//! kernel table, `gpu/src/ops/qk_norm_rope` the kernels, `tests/ops/qk_norm_rope.rs` the properties,
//! `benches/ops/qk_norm_rope.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use std::num::Saturating;

use abi::DType;
use abi::ops::qk_norm_rope::{BLOCK_TILE_THREADS, LANES_TILE_THREADS, QkNormRopeDims};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::rmsnorm::NormWeight;
use crate::ops::rope::{RopeInput, RopeStyle, RopeTables};
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::qk_norm_rope::{QkNormRopeTile, QkNormRopeVariant, VARIANTS};
pub use cases::{CASES, QkNormRopeCase};
pub use select::{QkNormRopeChoice, select};

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

/// Weights of the norm, `[head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub struct QkNormWeights<'a> {
    /// Of the query heads.
    pub q: TensorView<'a>,
    /// Of the key heads.
    pub k: TensorView<'a>,
}

/// The tensors of a run. Heads are `[tokens, heads, head_dim]`: q, k and v are often parts of a joint projection's rows. The
/// last dimension must have stride 1; the others may have any stride.
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

/// What stands between the joint projection of attention and its product with the keys, in one pass: per token and head
///
/// `q_out[t] = rope(norm(q[t]))`, `k_cache[slots[t]] = rope(norm(k[t]))`, `v_cache[slots[t]] = v[t]`,
///
/// with [`RmsNorm`](super::rmsnorm::RmsNorm) over the elements of a head, if there is a norm, [`Rope`](super::rope::Rope)
/// by the token's position, and [`KvAppend`](super::kv_append::KvAppend) for contiguous and paged caches alike: position p
/// in page g of a pool `[pages, page_size, heads, head_dim]` is slot `g · page_size + p`. In fp8 caches heads are stored
/// times `1 / k_scale[head]` and `1 / v_scale[head]`, at most ±448.
///
/// **Arithmetic**: f32, rounded to the type after the norm and after the rotation, where models round, too. The bits are
/// those of the three operators one after another. Only on a card, if heads have more than 512 bytes, or whole pieces of
/// 16 bytes but not their rotated part (each half of it, if the pairs are half of it apart), or addresses that are not
/// multiples of 16, their squares may be added in another order. fp8 is rounded from the type once more, to nearest even.
/// **Aliasing**: q in place by [`RopeInput::InPlace`]; otherwise no output may overlap another tensor.
/// **Determinism**: bitwise the same from run to run, if the slots are distinct; a token's result does not depend on the
/// other tokens or their number.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: those of the three operators; norms of q and k as in Henry et al., *Query-Key Normalization for
/// Transformers* (2020), in the form of Qwen3.
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
pub struct QkNormRope {
    device: Device,
    problem: QkNormRopeProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: QkNormRopeChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl QkNormRope {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &QkNormRopeProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: QkNormRopeProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice, and most heads that a group of its lanes takes; an error if it cannot
    /// do the problem.
    pub fn plan_with(
        device: &Device,
        problem: QkNormRopeProblem,
        variant: &'static QkNormRopeVariant,
        heads_per_group: u32,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let forced = |_| QkNormRopeChoice::forced(variant, heads_per_group, &problem);
        let choice = device.limits().map(forced).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: QkNormRopeProblem,
        choice: Option<QkNormRopeChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, select::SMEM_BYTES)?;
                let unaligned = device.entry(OP, select::block(&problem)?.entry, select::SMEM_BYTES)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(QkNormRope { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`QkNormRope`].
    pub fn run(&self, stream: &Stream, mut args: QkNormRopeArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(&self.problem, &dims, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let QkNormRopeArgs { q, k, v, weights, positions, tables, slots, q_out, .. } = &args;
                let QkNormRopeArgs { k_cache, v_cache, k_scale, v_scale, .. } = &args;
                let (q, q_is_aligned) = match q {
                    RopeInput::From(q) => (Param::from(*q), q.is_aligned_16()),
                    RopeInput::InPlace => (Param::from(q_out), true),
                };
                let is_aligned = q_is_aligned
                    && [*k, *v].iter().all(TensorView::is_aligned_16)
                    && weights.is_none_or(|weights| weights.q.is_aligned_16() && weights.k.is_aligned_16())
                    && [q_out, k_cache, v_cache].iter().all(|out| out.is_aligned_16());
                // The lanes of a warp have the same group of several tokens.
                let (entry, threads, heads, tokens, warps) = match choice.variant.tile {
                    QkNormRopeTile::Lanes { lanes } if is_aligned => (
                        entry,
                        LANES_TILE_THREADS,
                        choice.heads_per_group,
                        32 / lanes,
                        LANES_TILE_THREADS / 32,
                    ),
                    _ => (unaligned, BLOCK_TILE_THREADS, 1, 1, 1),
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
                let [q_weight, k_weight] = match *weights {
                    Some(QkNormWeights { q, k }) => [q.into(), k.into()],
                    None => [Param::Address(0), Param::Address(0)],
                };
                let params = [
                    q,
                    (*k).into(),
                    (*v).into(),
                    q_weight,
                    k_weight,
                    (*positions).into(),
                    tables.cos().view().into(),
                    tables.sin().view().into(),
                    (*slots).into(),
                    q_out.into(),
                    k_cache.into(),
                    v_cache.into(),
                    k_scale.map_or(Param::Address(0), Param::from),
                    v_scale.map_or(Param::Address(0), Param::from),
                    (&dims).into(),
                ];
                // SAFETY: `check` found every head of every tensor inside its view, and as many positions and slots as
                // tokens; the tables have max_position rows, which the kernel keeps to. What is not `is_aligned` takes the
                // kernel for any address; the tables' rows are whole pieces where the other reads them so.
                unsafe { entry.launch(stream, [grid, 1, 1], [threads, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &QkNormRopeArgs<'_>) -> Result<QkNormRopeDims, Error> {
        let QkNormRopeArgs { q, k, v, weights, positions, tables, slots, q_out, .. } = args;
        let QkNormRopeArgs { k_cache, v_cache, k_scale, v_scale, .. } = args;
        let QkNormRopeProblem { tokens: max_tokens, heads_q, heads_kv, head_dim, rotary_dim, .. } =
            self.problem;
        let QkNormRopeProblem { dtype, cache_dtype, norm, .. } = self.problem;
        let device = &self.device;
        let input = |argument, view: &TensorView<'_>, outer, heads| -> Result<[u32; 2], Error> {
            view.expect(OP, argument, device, dtype, &[outer, Some(heads), Some(head_dim)])?;
            view.expect_inner_contiguous(OP, argument)?;
            strides(argument, view.strides())
        };
        let output = |argument, view: &TensorViewMut<'_>, dtype, outer, heads| -> Result<[u32; 2], Error> {
            view.expect(OP, argument, device, dtype, &[outer, Some(heads), Some(head_dim)])?;
            view.expect_inner_contiguous(OP, argument)?;
            strides(argument, view.strides())
        };
        let q_out_strides = output("q_out", q_out, dtype, None, heads_q)?;
        let tokens = q_out.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "q_out", expected, tokens.to_string()));
        }
        let q_strides = match q {
            RopeInput::From(q) => input("q", q, Some(tokens), heads_q)?,
            RopeInput::InPlace => q_out_strides,
        };
        let k_strides = input("k", k, Some(tokens), heads_kv)?;
        let v_strides = input("v", v, Some(tokens), heads_kv)?;
        match (norm, weights) {
            (None, None) => {}
            (Some(_), Some(weights)) => {
                for (argument, weight) in [("weights.q", &weights.q), ("weights.k", &weights.k)] {
                    weight.expect(OP, argument, device, dtype, &[Some(head_dim)])?;
                    weight.expect_inner_contiguous(OP, argument)?;
                }
            }
            (Some(_), None) => {
                return Err(Error::invalid(OP, "weights", "tensors, as the problem has a norm", "none"));
            }
            (None, Some(_)) => {
                return Err(Error::invalid(OP, "weights", "none, as the problem has no norm", "tensors"));
            }
        }
        positions.expect(OP, "positions", device, DType::U32, &[Some(tokens)])?;
        let position_stride = check_size(OP, "positions", "stride", positions.strides()[0])?;
        tables.cos().view().expect(OP, "tables", device, DType::F32, &[None, Some(rotary_dim / 2)])?;
        slots.expect(OP, "slots", device, DType::U32, &[Some(tokens)])?;
        slots.expect_inner_contiguous(OP, "slots")?;
        let [slot_stride, cache_head_stride] = output("k_cache", k_cache, cache_dtype, None, heads_kv)?;
        let num_slots = k_cache.shape()[0];
        output("v_cache", v_cache, cache_dtype, Some(num_slots), heads_kv)?;
        if k_cache.strides() != v_cache.strides() {
            let expected = format!("strides {:?}", k_cache.strides());
            return Err(Error::invalid(OP, "v_cache", expected, format!("{:?}", v_cache.strides())));
        }
        for (argument, scale) in [("k_scale", k_scale), ("v_scale", v_scale)] {
            match (scale, self.problem.is_fp8()) {
                (None, false) => {}
                (Some(scale), true) => {
                    scale.expect(OP, argument, device, DType::F32, &[Some(heads_kv)])?;
                    scale.expect_inner_contiguous(OP, argument)?;
                }
                (None, true) => {
                    return Err(Error::invalid(OP, argument, "a tensor, as the caches are fp8", "none"));
                }
                (Some(_), false) => {
                    return Err(Error::invalid(OP, argument, "none, as the caches are not fp8", "a tensor"));
                }
            }
        }
        Ok(QkNormRopeDims {
            tokens: tokens as u32,
            heads_q: heads_q as u32,
            heads_kv: heads_kv as u32,
            // Of the kernel that needs no alignment; `run` knows whether there is another.
            q_groups: heads_q as u32,
            kv_groups: heads_kv as u32,
            warps_log2: 0,
            head_dim: head_dim as u32,
            rotary_dim: rotary_dim as u32,
            is_interleaved: u32::from(self.problem.style == RopeStyle::Interleaved),
            max_position: tables.max_position() as u32,
            num_slots: check_size(OP, "k_cache", "number of slots", num_slots)?,
            q_token_stride: q_strides[0],
            q_head_stride: q_strides[1],
            k_token_stride: k_strides[0],
            k_head_stride: k_strides[1],
            v_token_stride: v_strides[0],
            v_head_stride: v_strides[1],
            q_out_token_stride: q_out_strides[0],
            q_out_head_stride: q_out_strides[1],
            slot_stride,
            cache_head_stride,
            position_stride,
            inv_head_dim: 1.0 / head_dim as f32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            weight_offset: norm.map_or(0.0, |norm| norm.weight.offset()),
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, style, dtype, .. } =
            self.problem;
        let norm = self.problem.norm;
        let cache = if self.problem.is_fp8() { ", fp8 cache" } else { "" };
        let normalised = if norm.is_some() { "normalised, " } else { "" };
        let work = |why: &str, tile: String, threads| Work {
            problem: format!(
                "{normalised}{} {rotary_dim} of [{tokens}, {heads_q}/{heads_kv}, {head_dim}] {dtype}{cache}",
                style.name()
            ),
            why: why.into(),
            tile,
            threads,
            bytes: Saturating(self.problem.bytes()),
            flops: Saturating(self.problem.flops()),
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "heads".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let (tile, threads) = match choice.variant.tile {
                    QkNormRopeTile::Lanes { lanes } => {
                        (format!("{lanes} lanes, {} heads each", choice.heads_per_group), LANES_TILE_THREADS)
                    }
                    QkNormRopeTile::Block => ("a block per head".into(), BLOCK_TILE_THREADS),
                };
                OptimizationReport::new(OP, &self.device, Some(entry), work(choice.why, tile, threads))
            }
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

impl Kernel for QkNormRope {
    type Args<'a> = QkNormRopeArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: QkNormRopeArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

/// Of tokens and heads.
fn strides(argument: &'static str, strides: &[usize]) -> Result<[u32; 2], Error> {
    let token = check_size(OP, argument, "stride", strides[0])?;
    Ok([token, check_size(OP, argument, "stride", strides[1])?])
}

fn check_problem(problem: &QkNormRopeProblem) -> Result<(), Error> {
    let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, dtype, norm, .. } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    let heads = heads_q.saturating_add(heads_kv.saturating_mul(2));
    check_size(OP, "problem", "elements of a token", heads.saturating_mul(head_dim))?;
    if heads_q == 0 || heads_kv == 0 {
        let got = format!("{heads_q} and {heads_kv}");
        return Err(Error::invalid(OP, "problem", "at least one query head and one key head", got));
    }
    if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
        let expected = format!("an even rotary_dim from 2 to head_dim {head_dim}");
        return Err(Error::invalid(OP, "problem", expected, rotary_dim.to_string()));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    if problem.cache_dtype != dtype && !problem.is_fp8() {
        let expected = format!("cache_dtype {dtype} or f8e4m3");
        return Err(Error::invalid(OP, "problem", expected, problem.cache_dtype.name()));
    }
    if let Some(QkNorm { eps, .. }) = norm.filter(|norm| !(norm.eps >= 0.0 && norm.eps.is_finite())) {
        return Err(Error::invalid(OP, "problem", "a finite eps of at least 0", eps.to_string()));
    }
    Ok(())
}
