//! All layers of a dense decoder for one token, in one launch: [`DecoderLayers`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use std::num::Saturating;

use abi::DType;
use abi::ops::decoder_layers::{
    COLS_UNIT, DecoderLayersDims, Exchange, HEAD_DIM, LayerAddresses, LayerTable, MAX_COLS, MAX_LAYERS,
    THREADS, smem,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::Entry;
use crate::ops::attention::PAGE_SIZES;
use crate::ops::rmsnorm::NormWeight;
use crate::ops::rope::RopeTables;
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Plan, Run, check_eps, check_size, planned};
use crate::tensor::{Tensor, TensorView, TensorViewMut, views};

pub use abi::ops::decoder_layers::{DecoderLayersVariant, VARIANTS};
pub use cases::{CASES, DecoderLayersCase, samples};
pub use select::{DecoderLayersKernel, select};

const OP: &str = "decoder_layers";

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderLayersProblem {
    /// Layers, all alike: 1 to 40.
    pub layers: usize,
    /// Columns of the residual: a multiple of 32.
    pub hidden: usize,
    /// Columns between the MLP's products: a multiple of 32.
    pub intermediate: usize,
    /// Query heads, of 128 elements.
    pub heads_q: usize,
    /// Key heads, which divide them.
    pub heads_kv: usize,
    /// Most keys, the token's own among them.
    pub max_keys: usize,
    /// Keys of a page, one of [`PAGE_SIZES`], if the caches are pools of pages.
    pub page_size: Option<usize>,
    /// Type of all but the tables: bf16.
    pub dtype: DType,
    /// Added to the mean of squares, inside the root, by all norms.
    pub eps: f32,
    /// What the stored gains mean.
    pub weight: NormWeight,
    /// Whether query and key heads are normed.
    pub qk_norm: bool,
}

impl DecoderLayersProblem {
    /// With what it must have. The other fields do nothing: `page_size: None`, `weight: NormWeight::Plain`,
    /// `qk_norm: false`.
    pub fn new(
        layers: usize,
        [hidden, intermediate]: [usize; 2],
        [heads_q, heads_kv]: [usize; 2],
        max_keys: usize,
        dtype: DType,
        eps: f32,
    ) -> Self {
        DecoderLayersProblem {
            layers,
            hidden,
            intermediate,
            heads_q,
            heads_kv,
            max_keys,
            page_size: None,
            dtype,
            eps,
            weight: NormWeight::Plain,
            qk_norm: false,
        }
    }

    fn qkv_rows(&self) -> Saturating<u64> {
        (count(self.heads_q) + count(2) * count(self.heads_kv)) * count(HEAD_DIM as usize)
    }

    /// Elements of a layer's weights.
    fn weights(&self) -> Saturating<u64> {
        let [hidden, intermediate, heads_q] = [self.hidden, self.intermediate, self.heads_q].map(count);
        hidden * (self.qkv_rows() + heads_q * count(HEAD_DIM as usize) + count(3) * intermediate)
    }

    /// Elements of a layer's keys and values, of the planned number.
    fn cached(&self) -> Saturating<u64> {
        count(2) * count(self.max_keys) * count(self.heads_kv) * count(HEAD_DIM as usize)
    }

    /// Fewest bytes of a run with the planned number of keys: weights, keys and values are read once.
    pub fn bytes(&self) -> u64 {
        (count(self.layers * self.dtype.bytes()) * (self.weights() + self.cached())).0
    }

    /// Operations of such a run.
    pub fn flops(&self) -> u64 {
        let group = count(self.heads_q / self.heads_kv.max(1));
        (count(2 * self.layers) * (self.weights() + group * self.cached())).0
    }
}

/// A layer's tensors, without gaps.
#[derive(Debug)]
pub struct LayerTensors<'a> {
    /// `[(heads_q + 2 heads_kv) · 128, hidden]`: rows of q, k and v, above each other.
    pub qkv: TensorView<'a>,
    /// `[hidden, heads_q · 128]`.
    pub o: TensorView<'a>,
    /// `[2 · intermediate, hidden]`: the gate's rows above up's.
    pub gate_up: TensorView<'a>,
    /// `[hidden, intermediate]`.
    pub down: TensorView<'a>,
    /// `[hidden]`: the gain before attention.
    pub input_norm: TensorView<'a>,
    /// `[hidden]`: the gain before the MLP.
    pub post_attention_norm: TensorView<'a>,
    /// `[128]`, if heads are normed.
    pub q_norm: Option<TensorView<'a>>,
    /// The same.
    pub k_norm: Option<TensorView<'a>>,
    /// `[slots, heads_kv, 128]`: key `t` is in slot `t`, or where its page is.
    pub k_cache: TensorViewMut<'a>,
    /// The same.
    pub v_cache: TensorViewMut<'a>,
}

views!(LayerTensors {
    qkv,
    o,
    gate_up,
    down,
    input_norm,
    post_attention_norm,
    q_norm,
    k_norm,
    k_cache,
    v_cache
});

/// The tensors of a run.
#[derive(Debug)]
pub struct DecoderLayersArgs<'a> {
    /// `[1, hidden]`.
    pub x: TensorView<'a>,
    /// Each layer's.
    pub layers: &'a mut [LayerTensors<'a>],
    /// `[1]` u32: the token's row of the tables. One beyond them is treated as their last.
    pub positions: TensorView<'a>,
    /// cos and sin, 64 pairs.
    pub tables: &'a RopeTables,
    /// `[1]` u32: where its key and value go. One beyond the caches is skipped.
    pub slots: TensorView<'a>,
    /// `[1]` u32: how many keys there are, its own as the last of them; as `max_keys` if it is more, as 1 if it is 0.
    pub lens: TensorView<'a>,
    /// `[1, pages]` u32: the pages of its keys, if the problem has pages. A page beyond the caches is read as their
    /// last slot.
    pub pages: Option<TensorView<'a>>,
    /// `[1, hidden]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> DecoderLayersArgs<'a> {
    /// With what it must have. The other field does nothing: `pages: None`.
    pub fn new(
        x: TensorView<'a>,
        layers: &'a mut [LayerTensors<'a>],
        [positions, slots, lens]: [TensorView<'a>; 3],
        tables: &'a RopeTables,
        out: TensorViewMut<'a>,
    ) -> Self {
        DecoderLayersArgs { x, layers, positions, tables, slots, lens, pages: None, out }
    }
}

/// All layers of a dense decoder for one token, in one launch:
///
/// ```text
/// q | k | v = Wqkv · norm(x)      q, k ← rope(norm(q)), rope(norm(k))      caches[slot] ← k, v
/// x ← x + Wo · softmax(q · keysᵀ / √128) · values
/// x ← x + Wdown · (silu(Wgate · norm(x)) ⊙ Wup · norm(x))
/// ```
///
/// with [`RmsNorm`](super::rmsnorm::RmsNorm), half-split [`Rope`](super::rope::Rope) and, per head of 128, perhaps a
/// norm on q and k, as Qwen3 has them; keys are those before the token, from the caches, and its own. A step of one
/// sequence is bound by its launches where each operator is one; here weights come from memory without a pause.
///
/// **Arithmetic**: products of bf16, sums in f32. A product's right side is rounded to bf16: `x · gain` before the
/// norm's scale, attention's output, the MLP's middle. The residual, q, scores and weights stay f32; keys and values
/// are those of the caches, rounded to bf16. So the result errs less than that of the operators one by one, but the
/// bits are not theirs. Sums over |x|² must stay below 3e38. **Determinism**: bitwise the same from run to run, on
/// cards with as many multiprocessors. **Aliasing**: `out` and the caches may not overlap another tensor. **Streams**:
/// a plan has a workspace, so a run in another stream than the last one waits for that. A recorded graph does not know
/// of later runs: do not let it run at the same time as the plan in another stream. The launch is a cooperative one:
/// its blocks, one to a multiprocessor, wait for each other. **Special values**: a NaN or infinity reaches what the
/// formula says. **Errors**: [`Error::Invalid`] for a shape, stride or type that does not fit; never after work was
/// enqueued. **Architectures**: sm_90a, by copies that barriers in shared memory wait for; elsewhere
/// [`Error::Unsupported`] (on the CPU plain loops: the operators one by one are faster there). **Source**: B. Spector
/// et al., *Look Ma, No Bubbles!* (Hazy Research, 2025), for one kernel a step; the low-latency protocol of NCCL, for
/// values that bring their own flag.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::ops::{decoder_layers::*, rope::RopeTables};
/// use warpforge::{DType, Device, Tensor};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::best();
/// let stream = device.stream()?;
/// let (layers, hidden, heads, dtype) = (1, 1024, [16, 8], DType::BF16);
/// let plan =
///     DecoderLayers::plan(&device, DecoderLayersProblem::new(layers, [hidden, 3072], heads, 4096, dtype, 1e-6))?;
/// let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, dtype);
/// let (qkv, o, gain) = (zeros(&[4096, hidden])?, zeros(&[hidden, 2048])?, zeros(&[hidden])?);
/// let (gate_up, down) = (zeros(&[6144, hidden])?, zeros(&[hidden, 3072])?);
/// let (mut k, mut v) = (zeros(&[4096, 8, 128])?, zeros(&[4096, 8, 128])?);
/// let (x, mut out) = (zeros(&[1, hidden])?, zeros(&[1, hidden])?);
/// let [position, len] = [[7u32], [8]].map(|number| Tensor::from_slice(&stream, &[1], &number));
/// let (position, len) = (position?, len?);
/// let inv_freq: Vec<f64> = (0..64).map(|i| 1e6f64.powf(-2.0 * i as f64 / 128.0)).collect();
/// let tables = RopeTables::new(&stream, &inv_freq, 1.0, 4096)?;
/// plan.run(&stream, DecoderLayersArgs {
///     x: x.view(),
///     layers: &mut [LayerTensors {
///         qkv: qkv.view(),
///         o: o.view(),
///         gate_up: gate_up.view(),
///         down: down.view(),
///         input_norm: gain.view(),
///         post_attention_norm: gain.view(),
///         q_norm: None,
///         k_norm: None,
///         k_cache: k.view_mut(),
///         v_cache: v.view_mut(),
///     }],
///     positions: position.view(),
///     tables: &tables,
///     slots: position.view(),
///     lens: len.view(),
///     pages: None,
///     out: out.view_mut(),
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecoderLayers(Plan<Self>);

planned!(
    DecoderLayers,
    DecoderLayersProblem,
    DecoderLayersArgs { x, layers, positions, tables, slots, lens, pages, out },
    DecoderLayersKernel
);

/// The kernel, and the words that its blocks tell each other values by.
#[derive(Debug)]
pub(crate) struct Kernels {
    entry: Entry,
    exchange: Workspace<1>,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        &self.entry
    }
}

impl Operator for DecoderLayers {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "one after the other";
    type Problem = DecoderLayersProblem;
    type Args<'a> = DecoderLayersArgs<'a>;
    type Dims = (DecoderLayersDims, LayerTable);
    type Variant = DecoderLayersKernel;
    type Kernels = Kernels;

    fn check_problem(problem: &DecoderLayersProblem) -> Result<(), Error> {
        let DecoderLayersProblem { layers, hidden, intermediate, heads_q, heads_kv, .. } = *problem;
        let DecoderLayersProblem { max_keys, page_size, dtype, eps, .. } = *problem;
        let refuse = |expected: String, got: String| Err(Error::invalid(OP, "problem", expected, got));
        if dtype != DType::BF16 {
            return refuse("dtype bf16".into(), dtype.name().into());
        }
        if !(1..=MAX_LAYERS).contains(&layers) {
            return refuse(format!("1 to {MAX_LAYERS} layers"), layers.to_string());
        }
        if heads_kv == 0 || heads_q == 0 || !heads_q.is_multiple_of(heads_kv) {
            return refuse("key heads that divide the query heads, of both at least 1".into(), {
                format!("{heads_q} query heads, {heads_kv} key heads")
            });
        }
        let q_cols = heads_q.saturating_mul(HEAD_DIM as usize);
        for (name, cols) in [("hidden", hidden), ("intermediate", intermediate), ("heads_q · 128", q_cols)] {
            if cols == 0 || !cols.is_multiple_of(COLS_UNIT as usize) || cols > MAX_COLS as usize {
                return refuse(
                    format!("{name} a multiple of {COLS_UNIT}, from that to {MAX_COLS}"),
                    cols.to_string(),
                );
            }
        }
        if max_keys == 0 {
            return refuse("max_keys of at least 1".into(), "0".into());
        }
        check_size(OP, "problem", "max_keys", max_keys)?;
        if let Some(size) = page_size.filter(|size| !PAGE_SIZES.contains(size)) {
            return refuse(format!("a page_size of {PAGE_SIZES:?}"), size.to_string());
        }
        check_eps(OP, eps)
    }

    fn select(
        limits: &DeviceLimits,
        problem: &DecoderLayersProblem,
    ) -> Result<Choice<DecoderLayersKernel>, Error> {
        select(limits, problem)
    }

    fn forced(
        kernel: DecoderLayersKernel,
        problem: &DecoderLayersProblem,
    ) -> Result<Choice<DecoderLayersKernel>, Error> {
        select::forced(kernel, problem)
    }

    fn load(
        device: &Device,
        problem: &DecoderLayersProblem,
        choice: &Choice<DecoderLayersKernel>,
    ) -> Result<Kernels, Error> {
        let entry = device.entry(OP, choice.variant.variant.entry, smem::BYTES)?.all_at_once();
        let dims = dims(problem, choice.variant.splits(problem));
        let words = 2 * Exchange::of(&dims).words as usize;
        let exchange = Workspace::new(device, |stream| Ok([Tensor::zeros(stream, &[words], DType::U32)?]))?;
        Ok(Kernels { entry, exchange })
    }

    fn check(
        at: &Check<'_>,
        problem: &DecoderLayersProblem,
        args: &DecoderLayersArgs<'_>,
    ) -> Result<(DecoderLayersDims, LayerTable), Error> {
        let DecoderLayersArgs { x, layers, positions, tables, slots, lens, pages, out } = args;
        let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, dtype, .. } = *problem;
        let (head_dim, one) = (HEAD_DIM as usize, [Some(1)]);
        at.block("x", *x, dtype, &[Some(1), Some(hidden)])?;
        at.block("out", out.as_view(), dtype, &[Some(1), Some(hidden)])?;
        at.contiguous("positions", *positions, DType::U32, &one)?;
        at.contiguous("slots", *slots, DType::U32, &one)?;
        at.contiguous("lens", *lens, DType::U32, &one)?;
        at.contiguous("tables", tables.cos().view(), DType::F32, &[None, Some(head_dim / 2)])?;
        let reasons = ["the problem has pages", "the problem has no pages"];
        let pages = at.given("pages", problem.page_size.is_some(), *pages, reasons)?;
        if let (Some(pages), Some(page_size)) = (pages, problem.page_size) {
            at.contiguous("pages", pages, DType::U32, &[Some(1), None])?;
            let most = problem.max_keys.div_ceil(page_size);
            if pages.shape()[1] < most {
                return at.refuse("pages", format!("at least {most} of them"), pages.shape()[1].to_string());
            }
        }
        if layers.len() != problem.layers {
            return at.refuse("layers", format!("{} of them", problem.layers), layers.len().to_string());
        }
        let mut dims = dims(problem, 1);
        let mut table = LayerTable { layers: [LayerAddresses::default(); MAX_LAYERS] };
        dims.max_position = tables.max_position() as u32;
        let mut num_slots = None;
        let (q_cols, qkv_rows) = (heads_q * head_dim, problem.qkv_rows().0 as usize);
        for (layer, address) in std::iter::zip(layers.iter(), &mut table.layers) {
            let matrix =
                |name, view, [rows, cols]: [usize; 2]| at.block(name, view, dtype, &[Some(rows), Some(cols)]);
            matrix("qkv", layer.qkv, [qkv_rows, hidden])?;
            matrix("o", layer.o, [hidden, q_cols])?;
            matrix("gate_up", layer.gate_up, [2 * intermediate, hidden])?;
            matrix("down", layer.down, [hidden, intermediate])?;
            at.block("input_norm", layer.input_norm, dtype, &[Some(hidden)])?;
            at.block("post_attention_norm", layer.post_attention_norm, dtype, &[Some(hidden)])?;
            let reasons = ["the problem has norms of q and k", "the problem has no norms of q and k"];
            let q_norm = at.given("q_norm", problem.qk_norm, layer.q_norm, reasons)?;
            let k_norm = at.given("k_norm", problem.qk_norm, layer.k_norm, reasons)?;
            for (name, norm) in [("q_norm", q_norm), ("k_norm", k_norm)] {
                if let Some(norm) = norm {
                    at.block(name, norm, dtype, &[Some(head_dim)])?;
                }
            }
            for (name, cache) in [("k_cache", &layer.k_cache), ("v_cache", &layer.v_cache)] {
                at.block(name, cache.as_view(), dtype, &[num_slots, Some(heads_kv), Some(head_dim)])?;
                num_slots = Some(cache.shape()[0]);
            }
            let of = |view: Option<TensorView<'_>>| view.map_or(0, |view| view.address());
            *address = LayerAddresses {
                qkv: layer.qkv.address(),
                o: layer.o.address(),
                gate_up: layer.gate_up.address(),
                down: layer.down.address(),
                input_norm: layer.input_norm.address(),
                post_attention_norm: layer.post_attention_norm.address(),
                q_norm: of(q_norm),
                k_norm: of(k_norm),
                k_cache: layer.k_cache.address(),
                v_cache: layer.v_cache.address(),
            };
        }
        let num_slots = num_slots.unwrap_or(0);
        dims.num_slots = at.size("k_cache", "number of slots", num_slots)?;
        // What key t is found by.
        let least = if problem.page_size.is_some() { 1 } else { problem.max_keys };
        if num_slots < least {
            return at.refuse("k_cache", format!("at least {least} slots"), num_slots.to_string());
        }
        if !at.is_aligned() {
            return at.refuse("layers", "tensors at multiples of 16 bytes", "others");
        }
        Ok((dims, table))
    }

    fn cpu(problem: &DecoderLayersProblem, (dims, _): &Self::Dims, args: &mut DecoderLayersArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(
        run: &Run<'_, Self>,
        (mut dims, table): Self::Dims,
        args: &DecoderLayersArgs<'_>,
    ) -> Result<(), Error> {
        let DecoderLayersArgs { x, layers: _, positions, tables, slots, lens, pages, out } = args;
        let kernel = run.choice.variant;
        dims.splits = kernel.splits(run.problem);
        let Kernels { entry, exchange } = run.kernels;
        let _guard = exchange.enter(run.stream)?;
        let params = [
            (*x).into(),
            (*positions).into(),
            tables.cos().view().into(),
            tables.sin().view().into(),
            (*slots).into(),
            (*lens).into(),
            (*pages).into(),
            out.into(),
            exchange.tensors[0].view().into(),
            (&dims).into(),
            (&table).into(),
        ];
        // SAFETY: `check` found every tensor of every layer of the problem's sizes, without gaps and at multiples of 16
        // bytes; positions, keys and slots are bounded by the kernel; the exchange is of this plan alone, whose runs
        // come one after the other, with room for this number of splits.
        unsafe { entry.launch(run.stream, [kernel.blocks, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &DecoderLayersProblem) -> Work {
        let DecoderLayersProblem { layers, hidden, intermediate, heads_q, heads_kv, max_keys, dtype, .. } =
            *problem;
        Work {
            problem: format!(
                "{layers} layers of {hidden} and {intermediate}, {heads_q} heads on {heads_kv}, {max_keys} keys, {dtype}"
            ),
            bytes: Saturating(problem.bytes()),
            flops: Saturating(problem.flops()),
        }
    }

    fn tile(_: &Device, problem: &DecoderLayersProblem, choice: &Choice<DecoderLayersKernel>) -> String {
        let kernel = choice.variant;
        format!("{} blocks, {} to a key head", kernel.blocks, kernel.splits(problem))
    }
}

/// The sizes, without those of the tensors.
fn dims(problem: &DecoderLayersProblem, splits: u32) -> DecoderLayersDims {
    DecoderLayersDims {
        num_layers: problem.layers as u32,
        hidden: problem.hidden as u32,
        intermediate: problem.intermediate as u32,
        heads_q: problem.heads_q as u32,
        heads_kv: problem.heads_kv as u32,
        splits,
        num_slots: 0,
        slot_stride: problem.heads_kv as u32 * HEAD_DIM,
        max_position: 1,
        max_keys: problem.max_keys as u32,
        page_tokens: problem.page_size.unwrap_or(0) as u32,
        inv_hidden: 1.0 / problem.hidden as f32,
        eps: problem.eps,
        weight_offset: problem.weight.offset(),
        scale_log2: std::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt(),
    }
}
