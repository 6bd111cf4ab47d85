//! Keys and values of new tokens into their slots of a cache: [`KvAppend`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::kv_append::{KvAppendDims, THREADS};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::kv_append::{KvAppendTile, KvAppendVariant, VARIANTS};
pub use cases::{CASES, KvAppendCase, samples};
pub use select::select;

const OP: &str = "kv_append";

/// What is to be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvAppendProblem {
    /// Most tokens of a run, over all sequences.
    pub tokens: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Type of keys, values and caches.
    pub dtype: DType,
}

impl KvAppendProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(tokens: usize, heads: usize, head_dim: usize, dtype: DType) -> Self {
        KvAppendProblem { tokens, heads, head_dim, dtype }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct KvAppendArgs<'a> {
    /// `[tokens, heads, head_dim]`, stride 1 in the last dimension.
    pub k: TensorView<'a>,
    /// The same shape; none for a cache whose rows are keys and values at once (latent attention).
    pub v: Option<TensorView<'a>>,
    /// `[tokens]` u32: where each token goes. Distinct; one beyond the caches is skipped.
    pub slots: TensorView<'a>,
    /// `[slots, heads, head_dim]`, stride 1 in the last dimension.
    pub k_cache: TensorViewMut<'a>,
    /// The same shape and strides; there if v is.
    pub v_cache: Option<TensorViewMut<'a>>,
}

impl<'a> KvAppendArgs<'a> {
    /// With what it must have. The other fields do nothing: `v: None`, `v_cache: None`.
    pub fn new(k: TensorView<'a>, slots: TensorView<'a>, k_cache: TensorViewMut<'a>) -> Self {
        KvAppendArgs { k, v: None, slots, k_cache, v_cache: None }
    }
}

/// Copies the keys and values of new tokens into their slots of a cache.
///
/// `k_cache[slots[t]] = k[t]`, `v_cache[slots[t]] = v[t]` for every token t. For a cache
/// `[batch, capacity, heads, head_dim]` seen as `[batch · capacity, heads, head_dim]`, position p of sequence b is slot
/// `b · capacity + p`.
///
/// **Arithmetic**: none, bits are copied. **Determinism**: bitwise, if the slots are distinct; else their
/// rows may hold any of the tokens in any of their parts.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct KvAppend(Plan<Self>);

planned!(KvAppend, KvAppendProblem, KvAppendArgs { k, v, slots, k_cache, v_cache }, &'static KvAppendVariant);

impl Operator for KvAppend {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "tokens";
    type Problem = KvAppendProblem;
    type Args<'a> = KvAppendArgs<'a>;
    type Dims = KvAppendDims;
    type Variant = &'static KvAppendVariant;
    type Kernels = Pair;

    fn check_problem(problem: &KvAppendProblem) -> Result<(), Error> {
        let KvAppendProblem { tokens, heads, head_dim, dtype } = *problem;
        if heads == 0 || head_dim == 0 || heads.saturating_mul(head_dim) >= 1 << 31 {
            let got = format!("{heads} heads of {head_dim}");
            let expected = "heads and head_dim at least 1, and heads · head_dim below 2^31";
            return Err(Error::invalid(OP, "problem", expected, got));
        }
        check_floats(OP, dtype, &[("tokens", tokens)])
    }

    fn select(limits: &DeviceLimits, problem: &KvAppendProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &KvAppendProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &KvAppendProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::scalar(problem.dtype)?.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &KvAppendProblem,
        args: &KvAppendArgs<'_>,
    ) -> Result<KvAppendDims, Error> {
        let KvAppendArgs { k, v, slots, k_cache, v_cache } = args;
        let KvAppendProblem { tokens: most, heads, head_dim, dtype } = *problem;
        let shape = |outer| [outer, Some(heads), Some(head_dim)];
        let [k_token_stride, k_head_stride] = at.rows("k", *k, dtype, &shape(None))?;
        let tokens = k.shape()[0];
        let [] = at.elements("slots", *slots, DType::U32, &[Some(tokens)])?;
        let cache_strides = at.rows("k_cache", k_cache.as_view(), dtype, &shape(None))?;
        let [slot_stride, cache_head_stride] = cache_strides;
        let num_slots = k_cache.shape()[0];
        let v_cache = v_cache.as_ref().map(TensorViewMut::as_view);
        let v_cache = at.given("v_cache", v.is_some(), v_cache, ["v is one", "v is none"])?;
        let v_strides = v.map(|v| at.rows("v", v, dtype, &shape(Some(tokens))));
        let [v_token_stride, v_head_stride] = v_strides.transpose()?.unwrap_or_default();
        if let Some(v_cache) = v_cache {
            let strides: [u32; 2] = at.rows("v_cache", v_cache, dtype, &shape(Some(num_slots)))?;
            if strides != cache_strides {
                let expected = format!("strides {:?}", k_cache.strides());
                return at.refuse("v_cache", expected, format!("{:?}", v_cache.strides()));
            }
        }
        at.planned("k", "tokens", tokens, most)?;
        Ok(KvAppendDims {
            rows: at.size("k", "number of rows", tokens * heads)?,
            heads: heads as u32,
            pieces: head_dim as u32,
            num_slots: at.size("k_cache", "number of slots", num_slots)?,
            k_token_stride,
            k_head_stride,
            v_token_stride,
            v_head_stride,
            slot_stride,
            cache_head_stride,
        })
    }

    fn cpu(problem: &KvAppendProblem, dims: &KvAppendDims, args: &mut KvAppendArgs<'_>) {
        cpu::run(*problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, mut dims: KvAppendDims, args: &KvAppendArgs<'_>) -> Result<(), Error> {
        let KvAppendArgs { k, v, slots, k_cache, v_cache } = args;
        let in_pieces = run.is_aligned && run.choice.variant.tile == KvAppendTile::Vector;
        if in_pieces {
            dims.pieces /= 16 / run.problem.dtype.bytes() as u32;
        }
        let blocks = (u64::from(dims.rows) * u64::from(dims.pieces)).div_ceil(u64::from(THREADS));
        let grid = check_blocks(OP, "k", blocks)?;
        let params = [
            (*k).into(),
            (*v).into(),
            (*slots).into(),
            k_cache.into(),
            v_cache.as_ref().into(),
            (&dims).into(),
        ];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row inside its view, and `is_aligned` what is copied in pieces of 16 bytes.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &KvAppendProblem) -> Work {
        let KvAppendProblem { tokens, heads, head_dim, dtype } = *problem;
        let [tokens, heads, head_dim] = [tokens, heads, head_dim].map(count);
        Work {
            problem: format!("[{tokens}, {heads}, {head_dim}] {dtype}"),
            bytes: count(4 * dtype.bytes()) * tokens * heads * head_dim,
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &KvAppendProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
