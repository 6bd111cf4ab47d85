//! The row that latent attention caches, normalised and rotated into its cache, and its queries' rotated parts:
//! [`LatentAppend`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use std::num::Saturating;

use abi::ops::latent_append::{BLOCK_TILE_THREADS, LatentAppendDims, PIECES_PER_THREAD, WARPS_TILE_THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::ops::rmsnorm::NormWeight;
use crate::ops::rope::{RopeInput, RopeStyle, RopeTables};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_eps, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::latent_append::{LatentAppendTile, LatentAppendVariant, VARIANTS};
pub use cases::{CASES, LatentAppendCase, samples};
pub use select::{LatentAppendKernel, select};

const OP: &str = "latent_append";

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAppendProblem {
    /// Most tokens of a run, over all sequences.
    pub tokens: usize,
    /// Query heads of a token; may be none.
    pub heads: usize,
    /// Elements of a row that are normalised: the first ones.
    pub latent: usize,
    /// Elements of a row that are rotated, behind them, and of a query head: even, at least 2.
    pub rope: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Type of rows, heads, weight and cache.
    pub dtype: DType,
    /// Added to the mean of a row's squares, inside the root.
    pub eps: f32,
    /// What the stored weight means.
    pub weight: NormWeight,
}

impl LatentAppendProblem {
    /// With what it must have. The other fields do nothing: `style: RopeStyle::HalfSplit`,
    /// `weight: NormWeight::Plain`.
    pub fn new(tokens: usize, heads: usize, [latent, rope]: [usize; 2], dtype: DType, eps: f32) -> Self {
        let (style, weight) = (RopeStyle::HalfSplit, NormWeight::Plain);
        LatentAppendProblem { tokens, heads, latent, rope, style, dtype, eps, weight }
    }
}

/// The tensors of a run. The last dimension of q, x, weight, q_out and cache must have stride 1; the others may have
/// any stride.
#[derive(Debug)]
pub struct LatentAppendArgs<'a> {
    /// `[tokens, heads, rope]`: the parts of the query heads that are rotated.
    pub q: RopeInput<'a>,
    /// `[tokens, latent + rope]`: often a part of a joint projection's rows.
    pub x: TensorView<'a>,
    /// `[latent]`.
    pub weight: TensorView<'a>,
    /// `[tokens]` u32, any stride: each token's row of the tables. One beyond them is treated as their last.
    pub positions: TensorView<'a>,
    /// cos and sin, `rope / 2` pairs.
    pub tables: &'a RopeTables,
    /// `[tokens]` u32: where each token's row goes. Distinct; one beyond the cache is skipped.
    pub slots: TensorView<'a>,
    /// `[tokens, heads, rope]`.
    pub q_out: TensorViewMut<'a>,
    /// `[slots, latent + rope]`.
    pub cache: TensorViewMut<'a>,
}

impl<'a> LatentAppendArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(
        q: RopeInput<'a>,
        [x, weight]: [TensorView<'a>; 2],
        positions: TensorView<'a>,
        tables: &'a RopeTables,
        slots: TensorView<'a>,
        q_out: TensorViewMut<'a>,
        cache: TensorViewMut<'a>,
    ) -> Self {
        LatentAppendArgs { q, x, weight, positions, tables, slots, q_out, cache }
    }
}

/// What stands between the projections of latent attention and its product with the cache, in one launch: per token
///
/// `cache[slots[t]] = norm(x[t, ..latent]) | rope(x[t, latent..])`, `q_out[t, h] = rope(q[t, h])`,
///
/// with [`RmsNorm`](super::rmsnorm::RmsNorm), [`Rope`](super::rope::Rope) by the token's position, and
/// [`KvAppend`](super::kv_append::KvAppend) for contiguous and paged caches alike: position p in page g of a pool
/// `[pages, page_size, latent + rope]` is slot `g · page_size + p`. A token whose slot is beyond the cache leaves
/// nothing there; its queries are rotated.
///
/// **Arithmetic**: f32, rounded to the type once. The bits are those of the operators one after another. Only on a
/// card, if a latent part has more than 512 elements, or is whole pieces of 16 bytes but the rotated part (each half of
/// it, if the pairs are half of it apart) is not, or addresses and strides are not multiples of 16 bytes, its squares
/// may be added in another order. **Aliasing**: q in place by [`RopeInput::InPlace`]; otherwise no output may overlap
/// another tensor. **Determinism**: bitwise the same from run to run, if the slots are distinct; a token's result does
/// not depend on the other tokens, nor, where rows are multiples of 16 bytes apart, on their number. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware. **Source**:
/// DeepSeek-AI, *DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model* (2024), 2.1, and
/// those of the operators.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor};
/// use warpforge::ops::{latent_append::*, rope::{RopeInput, RopeStyle, RopeTables}};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (tokens, heads, latent, rope, dtype) = (3, 20, 512, 64, DType::BF16);
/// let problem = LatentAppendProblem {
///     style: RopeStyle::Interleaved,
///     ..LatentAppendProblem::new(tokens, heads, [latent, rope], dtype, 1e-5)
/// };
/// let plan = LatentAppend::plan(&device, problem)?;
/// let inv_freq: Vec<f64> = (0..32).map(|i| 1e6f64.powf(-2.0 * i as f64 / 64.0)).collect();
/// let tables = RopeTables::new(&stream, &inv_freq, 1.0, 40960)?;
/// let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, dtype);
/// let (x, weight) = (zeros(&[tokens, latent + rope])?, zeros(&[latent])?);
/// let (mut q, mut cache) = (zeros(&[tokens, heads, rope])?, zeros(&[4096, latent + rope])?);
/// let positions = Tensor::from_slice(&stream, &[tokens], &[7u32, 8, 9])?;
/// plan.run(&stream, LatentAppendArgs {
///     q: RopeInput::InPlace,
///     x: x.view(),
///     weight: weight.view(),
///     positions: positions.view(),
///     tables: &tables,
///     slots: positions.view(),
///     q_out: q.view_mut(),
///     cache: cache.view_mut(),
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LatentAppend(Plan<Self>);

planned!(
    LatentAppend,
    LatentAppendProblem,
    LatentAppendArgs { q, x, weight, positions, tables, slots, q_out, cache },
    LatentAppendKernel
);

impl Operator for LatentAppend {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "heads and rows";
    type Problem = LatentAppendProblem;
    type Args<'a> = LatentAppendArgs<'a>;
    type Dims = LatentAppendDims;
    type Variant = LatentAppendKernel;
    type Kernels = Pair;

    fn check_problem(problem: &LatentAppendProblem) -> Result<(), Error> {
        let LatentAppendProblem { tokens, heads, latent, rope, dtype, eps, .. } = *problem;
        if latent == 0 {
            return Err(Error::invalid(OP, "problem", "latent at least 1", "0"));
        }
        if rope < 2 || !rope.is_multiple_of(2) {
            return Err(Error::invalid(OP, "problem", "an even rope, at least 2", rope.to_string()));
        }
        let of_token = heads.saturating_add(1).saturating_mul(rope).saturating_add(latent);
        check_floats(OP, dtype, &[("tokens", tokens), ("elements of a token", of_token)])?;
        check_eps(OP, eps)
    }

    fn select(limits: &DeviceLimits, problem: &LatentAppendProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(
        kernel: LatentAppendKernel,
        problem: &LatentAppendProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        select::forced(kernel, problem)
    }

    fn load(
        device: &Device,
        problem: &LatentAppendProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let entries = [choice.variant.variant.entry, select::block(problem)?.entry];
        Pair::load(device, OP, entries, select::SMEM_BYTES)
    }

    fn check(
        at: &Check<'_>,
        problem: &LatentAppendProblem,
        args: &LatentAppendArgs<'_>,
    ) -> Result<LatentAppendDims, Error> {
        let LatentAppendArgs { q, x, weight, positions, tables, slots, q_out, cache } = args;
        let LatentAppendProblem { heads, latent, rope, dtype, eps, .. } = *problem;
        let row = Some(latent + rope);
        let [x_stride] = at.rows("x", *x, dtype, &[None, row])?;
        let len = x.shape()[0];
        let tokens = at.planned("x", "tokens", len, problem.tokens)?;
        let [] = at.rows("weight", *weight, dtype, &[Some(latent)])?;
        let shape = [Some(len), Some(heads), Some(rope)];
        let q_out_strides = at.rows("q_out", q_out.as_view(), dtype, &shape)?;
        let [q_out_token_stride, q_out_head_stride] = q_out_strides;
        let [q_token_stride, q_head_stride] = match q {
            RopeInput::From(q) => at.rows("q", *q, dtype, &shape)?,
            RopeInput::InPlace => q_out_strides,
        };
        let [position_stride] = at.strided("positions", *positions, DType::U32, &[Some(len)])?;
        // The tables' rows are whole pieces where those of q are, and they start where a pool block does.
        at.contiguous("tables", tables.cos().view(), DType::F32, &[None, Some(rope / 2)])?;
        let [] = at.elements("slots", *slots, DType::U32, &[Some(len)])?;
        let [slot_stride] = at.rows("cache", cache.as_view(), dtype, &[None, row])?;
        Ok(LatentAppendDims {
            // Of the kernel that needs no alignment; `launch` knows whether there is another.
            tiles: tiles(tokens, heads as u32 + 1, (rope / 2) as u32, BLOCK_TILE_THREADS),
            norm_blocks: tokens,
            heads: heads as u32,
            groups: heads as u32 + 1,
            units: (rope / 2) as u32,
            latent: latent as u32,
            rope: rope as u32,
            is_interleaved: u32::from(problem.style == RopeStyle::Interleaved),
            max_position: tables.max_position() as u32,
            num_slots: at.size("cache", "number of slots", cache.shape()[0])?,
            x_stride,
            q_token_stride,
            q_head_stride,
            q_out_token_stride,
            q_out_head_stride,
            slot_stride,
            position_stride,
            inv_latent: 1.0 / latent as f32,
            eps,
            weight_offset: problem.weight.offset(),
        })
    }

    fn cpu(problem: &LatentAppendProblem, dims: &LatentAppendDims, args: &mut LatentAppendArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(
        run: &Run<'_, Self>,
        mut dims: LatentAppendDims,
        args: &LatentAppendArgs<'_>,
    ) -> Result<(), Error> {
        let LatentAppendArgs { q, x, weight, positions, tables, slots, q_out, cache } = args;
        let q = match q {
            RopeInput::From(q) => (*q).into(),
            RopeInput::InPlace => q_out.into(),
        };
        let LatentAppendKernel { variant, heads_per_thread } = run.choice.variant;
        let in_pieces = run.is_aligned && variant.tile != LatentAppendTile::Block;
        let threads = if in_pieces { WARPS_TILE_THREADS } else { BLOCK_TILE_THREADS };
        if in_pieces {
            dims.norm_blocks = dims.tiles.rows.div_ceil(WARPS_TILE_THREADS / 32);
            dims.groups = (dims.heads + 1).div_ceil(heads_per_thread);
            dims.units = run.problem.places() as u32;
            dims.tiles = tiles(dims.tiles.rows, dims.groups, dims.units, threads);
        }
        let blocks = u64::from(dims.norm_blocks) + dims.tiles.blocks(threads.ilog2());
        let grid = check_blocks(OP, "x", blocks)?;
        let params = [
            q,
            (*x).into(),
            (*weight).into(),
            (*positions).into(),
            tables.cos().view().into(),
            tables.sin().view().into(),
            (*slots).into(),
            q_out.into(),
            cache.into(),
            (&dims).into(),
        ];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row and head of every tensor inside its view, and as many positions and slots as
        // tokens; the tables have max_position rows, which the kernel keeps to. What is not `is_aligned` takes the
        // kernel for any address; the tables' rows are whole pieces where the other reads them so.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [threads, 1, 1], &params) }
    }

    fn work(problem: &LatentAppendProblem) -> Work {
        let LatentAppendProblem { tokens, heads, latent, rope, style, dtype, .. } = *problem;
        Work {
            problem: format!(
                "[{tokens}, {latent} + {rope}] normalised + {}, and [{tokens}, {heads}, {rope}] {dtype}",
                style.name()
            ),
            bytes: Saturating(problem.bytes()),
            flops: Saturating(problem.flops()),
        }
    }

    fn tile(_: &Device, _: &LatentAppendProblem, choice: &Choice<LatentAppendKernel>) -> String {
        let LatentAppendKernel { variant, heads_per_thread } = choice.variant;
        match variant.tile {
            LatentAppendTile::Warps { .. } => format!("a warp per row, {heads_per_thread} heads per thread"),
            LatentAppendTile::Block => "a block per row, a thread per pair".into(),
        }
    }
}

/// What is rotated, in blocks of so many threads.
fn tiles(tokens: u32, groups: u32, units: u32, threads: u32) -> RowTiles {
    RowTiles::new(tokens, groups * units, threads.ilog2())
}

impl LatentAppendProblem {
    /// Fewest bytes of a run of the planned size: rows and heads are read and written once, each token's numbers and
    /// angles read once.
    pub fn bytes(&self) -> u64 {
        let [heads, latent, rope] = [self.heads, self.latent, self.rope].map(count);
        let elements = latent + (heads + count(1)) * rope;
        let own = count(2 * self.dtype.bytes()) * elements;
        (count(self.tokens) * (own + count(4) * (rope + count(2)))).0
    }

    /// Operations of a run of the planned size.
    pub fn flops(&self) -> u64 {
        let [heads, latent, rope] = [self.heads, self.latent, self.rope].map(count);
        (count(self.tokens) * (count(4) * latent + count(3) * (heads + count(1)) * rope)).0
    }

    /// Pieces of 16 bytes of a rotated part, or pairs of them if the pairs of elements are half of it apart.
    fn places(&self) -> usize {
        self.half() / (16 / self.dtype.bytes())
    }

    /// The elements of a rotated part that are read together: all, or half of them if pairs are that far apart.
    fn half(&self) -> usize {
        match self.style {
            RopeStyle::HalfSplit => self.rope / 2,
            RopeStyle::Interleaved => self.rope,
        }
    }

    /// Most heads that a thread of the `Warps` tile rotates.
    fn most_heads_per_thread(&self) -> u32 {
        match self.style {
            RopeStyle::HalfSplit => PIECES_PER_THREAD / 2,
            RopeStyle::Interleaved => PIECES_PER_THREAD,
        }
    }
}
