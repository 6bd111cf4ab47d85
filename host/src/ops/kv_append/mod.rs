//! Append to a key/value cache: `abi::ops::kv_append` has the kernel table, `gpu/src/ops/kv_append` the kernels,
//! `tests/ops/kv_append.rs` the properties, `benches/ops/kv_append.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::kv_append::{KvAppendDims, THREADS};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::kv_append::{KvAppendTile, KvAppendVariant, VARIANTS};
pub use cases::{CASES, KvAppendCase};
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

/// Copies the keys and values of new tokens into their slots of a cache.
///
/// `k_cache[slots[t]] = k[t]`, `v_cache[slots[t]] = v[t]` for every token t. For a cache `[batch, capacity, heads, head_dim]`
/// seen as `[batch · capacity, heads, head_dim]`, position p of sequence b is slot `b · capacity + p`.
///
/// **Arithmetic**: none, bits are copied. **Determinism**: bitwise, if the slots are distinct; else their
/// rows may hold any of the tokens in any of their parts.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct KvAppend {
    device: Device,
    problem: KvAppendProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        variant: &'static KvAppendVariant,
        entry: Entry,
        unaligned: Entry,
    },
}

impl KvAppend {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &KvAppendProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: KvAppendProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let variant = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, variant)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: KvAppendProblem,
        variant: &'static KvAppendVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        select::check_fits(variant, &problem)?;
        Self::new(device, problem, device.limits().map(|_| variant))
    }

    fn new(
        device: &Device,
        problem: KvAppendProblem,
        variant: Option<&'static KvAppendVariant>,
    ) -> Result<Self, Error> {
        let backend = match variant {
            None => Backend::Cpu,
            Some(variant) => {
                let entry = device.entry(OP, variant.entry, 0)?;
                let unaligned = device.entry(OP, select::scalar(problem.dtype)?.entry, 0)?;
                Backend::Cuda { variant, entry, unaligned }
            }
        };
        Ok(KvAppend { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`KvAppend`].
    pub fn run(&self, stream: &Stream, mut args: KvAppendArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => cpu::run(self.problem, &dims, &mut args),
            Backend::Cuda { variant, entry, unaligned } => {
                let KvAppendArgs { k, v, slots, k_cache, v_cache } = &args;
                let aligned = k.is_aligned_16()
                    && k_cache.is_aligned_16()
                    && v.is_none_or(|v| v.is_aligned_16())
                    && v_cache.as_ref().is_none_or(TensorViewMut::is_aligned_16);
                let vector = variant.tile == KvAppendTile::Vector && aligned;
                let per_piece = if vector { 16 / self.problem.dtype.bytes() } else { 1 };
                let entry = if vector { entry } else { unaligned };
                dims.pieces = (self.problem.head_dim / per_piece) as u32;
                let blocks = (u64::from(dims.rows) * u64::from(dims.pieces)).div_ceil(u64::from(THREADS));
                let grid = check_size(OP, "k", "number of blocks", blocks as usize)?;
                let params = [
                    (*k).into(),
                    v.map_or(Param::Address(0), Param::from),
                    (*slots).into(),
                    k_cache.into(),
                    Param::optional(v_cache.as_ref()),
                    (&dims).into(),
                ];
                // SAFETY: `check` found every row inside its view, and `aligned` what is copied in pieces of 16 bytes.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &KvAppendArgs<'_>) -> Result<KvAppendDims, Error> {
        let KvAppendArgs { k, v, slots, k_cache, v_cache } = args;
        let KvAppendProblem { tokens: max_tokens, heads, head_dim, dtype } = self.problem;
        let device = &self.device;
        k.expect(OP, "k", device, dtype, &[None, Some(heads), Some(head_dim)])?;
        let tokens = k.shape()[0];
        slots.expect(OP, "slots", device, DType::U32, &[Some(tokens)])?;
        k_cache.expect(OP, "k_cache", device, dtype, &[None, Some(heads), Some(head_dim)])?;
        let num_slots = k_cache.shape()[0];
        k.expect_inner_contiguous(OP, "k")?;
        slots.expect_inner_contiguous(OP, "slots")?;
        k_cache.expect_inner_contiguous(OP, "k_cache")?;
        match (v, v_cache) {
            (None, None) => {}
            (Some(v), Some(v_cache)) => {
                v.expect(OP, "v", device, dtype, &[Some(tokens), Some(heads), Some(head_dim)])?;
                v_cache.expect(
                    OP,
                    "v_cache",
                    device,
                    dtype,
                    &[Some(num_slots), Some(heads), Some(head_dim)],
                )?;
                v.expect_inner_contiguous(OP, "v")?;
                v_cache.expect_inner_contiguous(OP, "v_cache")?;
                if k_cache.strides() != v_cache.strides() {
                    let (expected, got) =
                        (format!("strides {:?}", k_cache.strides()), format!("{:?}", v_cache.strides()));
                    return Err(Error::invalid(OP, "v_cache", expected, got));
                }
            }
            (Some(_), None) => return Err(Error::invalid(OP, "v_cache", "a tensor, as v is one", "none")),
            (None, Some(_)) => return Err(Error::invalid(OP, "v_cache", "none, as v is none", "a tensor")),
        }
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "k", expected, tokens.to_string()));
        }
        let stride = |argument, value| check_size(OP, argument, "stride", value);
        Ok(KvAppendDims {
            rows: check_size(OP, "k", "number of rows", tokens * heads)?,
            heads: heads as u32,
            pieces: head_dim as u32,
            num_slots: check_size(OP, "k_cache", "number of slots", num_slots)?,
            k_token_stride: stride("k", k.strides()[0])?,
            k_head_stride: stride("k", k.strides()[1])?,
            v_token_stride: v.map_or(Ok(0), |v| stride("v", v.strides()[0]))?,
            v_head_stride: v.map_or(Ok(0), |v| stride("v", v.strides()[1]))?,
            slot_stride: stride("k_cache", k_cache.strides()[0])?,
            cache_head_stride: stride("k_cache", k_cache.strides()[1])?,
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let KvAppendProblem { tokens, heads, head_dim, dtype } = self.problem;
        let (entry, tile) = match &self.backend {
            Backend::Cpu => (None, "tokens".into()),
            Backend::Cuda { variant, entry, .. } => (Some(entry), format!("{:?}", variant.tile)),
        };
        let [tokens, heads, head_dim] = [tokens, heads, head_dim].map(count);
        let work = Work {
            problem: format!("[{tokens}, {heads}, {head_dim}] {dtype}"),
            why: "copies".into(),
            tile,
            threads: THREADS,
            bytes: count(4 * dtype.bytes()) * tokens * heads * head_dim,
            flops: count(0),
        };
        OptimizationReport::new(OP, &self.device, entry, work)
    }
}

impl Kernel for KvAppend {
    type Args<'a> = KvAppendArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: KvAppendArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &KvAppendProblem) -> Result<(), Error> {
    let KvAppendProblem { tokens, heads, head_dim, dtype } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    if heads == 0 || head_dim == 0 || heads.saturating_mul(head_dim) >= 1 << 31 {
        let got = format!("{heads} heads of {head_dim}");
        let expected = "heads and head_dim at least 1, and heads · head_dim below 2^31";
        return Err(Error::invalid(OP, "problem", expected, got));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    Ok(())
}
