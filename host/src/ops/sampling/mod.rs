//! Sampling: `abi::ops::sampling` has the kernel table and the shared arithmetic, `gpu/src/ops/sampling` the kernels,
//! `tests/ops/sampling.rs` the properties, `benches/ops/sampling.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::sampling::{GreedyDims, MAX_VOCAB, RandomDims, THREADS, TOP_P_ONE};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::sampling::{SamplingAccess, SamplingMethod, SamplingVariant, VARIANTS};
pub use cases::{CASES, SamplingCase};
pub use select::{SamplingChoice, select};

const OP: &str = "sampling";

/// How a token is chosen; [`Sampler`] has the exact definition.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Sampling {
    /// The largest logit.
    #[default]
    Greedy,
    /// By its probability.
    Random {
        /// What logits are divided by; above 0 and neither infinite nor subnormal. Small values approach
        /// [`Sampling::Greedy`].
        temperature: f32,
        /// Only the so many largest logits; none, 0 or the vocabulary's size: all.
        top_k: Option<u32>,
        /// Of these only the most probable, until their probabilities sum up to this; above 0 and at most 1 (all).
        top_p: f32,
        /// The generator's key.
        seed: u64,
    },
}

impl Sampling {
    /// The kind of kernel.
    pub(crate) fn method(&self) -> SamplingMethod {
        match self {
            Sampling::Greedy => SamplingMethod::Greedy,
            Sampling::Random { .. } => SamplingMethod::Random,
        }
    }
}

/// What is to be sampled from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingProblem {
    /// Most rows of a run: sequences.
    pub rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// Type of the logits.
    pub dtype: DType,
    /// How a token is chosen.
    pub method: Sampling,
}

/// The tensors of a run.
#[derive(Debug)]
pub struct SamplingArgs<'a> {
    /// `[rows, vocab]`, rows of any stride.
    pub logits: TensorView<'a>,
    /// `[rows]`, u32: the chosen tokens.
    pub ids: TensorViewMut<'a>,
    /// Counts the generated tokens: another step draws other random numbers. Without effect on [`Sampling::Greedy`].
    pub step: u64,
}

/// Chooses a token per row of logits.
///
/// **Greedy**: the index of the largest logit, the lowest among equals (−0 and +0 are equal). NaN is ignored, so −∞ is
/// chosen only where there is nothing but −∞ and NaN; where all are NaN, 0.
///
/// **Random**: tokens are ordered by descending logit, equal ones by ascending index; NaN has no probability.
/// 1. `p = softmax(logits / temperature)` over the first `top_k`. Where the largest logit is infinite, those that equal it
///    have the same probability and the others none.
/// 2. The shortest prefix whose p sum up to `top_p` or more is kept, and p renormalised.
/// 3. With `u = Philox4x32-10(key = seed, counter = (step, row))`, 64 bits as a number in [0, 1): the token with
///    `c ≤ u < c + p`, where c is the sum of p over the kept tokens of lower index. All NaN: 0.
///
/// **Arithmetic**: unnormalised p are integers, `⌊2^40 · e^((logit − max) / temperature)⌋` of an f32 exponent with a relative
/// error of about 2^-22, so tokens less probable than 2^-40 of the most probable are never chosen. Sums are exact.
/// **Determinism**: the same token for the same logits, parameters, step and row index: on every backend and floor, bit
/// for bit, whatever the other rows are. The exact definition in real numbers may give another token only where u, or
/// `top_p`, lies within rounding distance (about 1e-6) of a boundary.
/// **Cost**: a block per row, so a run takes about the time of one row up to as many rows as there are multiprocessors.
/// Greedy reads a row once; random 3 times, and for each of `top_k` and `top_p` 3 times more (2 for 16-bit logits), from L2
/// after the first time. `top_k` and `top_p` that bound nothing cost nothing.
/// **Recorded graphs**: `step` is a number, not a tensor: a recorded run repeats its step.
/// **Errors**: [`Error::Invalid`] for a parameter, shape, stride, type or place that does not fit; never after work was
/// enqueued.
/// **Architectures**: the same kernels on all floors.
/// **Source**: Fan, Lewis and Dauphin, *Hierarchical Neural Story Generation* (2018), section 5.4, for top_k; Holtzman et
/// al., *The Curious Case of Neural Text Degeneration* (2020), section 3.1, for top_p.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::sampling::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let method = Sampling::Random { temperature: 0.6, top_k: Some(20), top_p: 0.95, seed: 1 };
/// let problem = SamplingProblem { rows: 4, vocab: 1000, dtype: DType::F32, method };
/// let sampler = Sampler::plan(&device, problem)?;
/// let logits = Tensor::zeros(&stream, &[4, 1000], DType::F32)?;
/// let mut ids = Tensor::empty(&stream, &[4], DType::U32)?;
/// for step in 0..10 {
///     sampler.run(&stream, SamplingArgs { logits: logits.view(), ids: ids.view_mut(), step })?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Sampler {
    device: Device,
    problem: SamplingProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for logits that are not aligned to 16 bytes.
    Cuda {
        choice: SamplingChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

/// The parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dims {
    Greedy(GreedyDims),
    Random(RandomDims),
}

impl Sampler {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &SamplingProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: SamplingProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: SamplingProblem,
        variant: &'static SamplingVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| SamplingChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(device: &Device, problem: SamplingProblem, choice: Option<SamplingChoice>) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, choice.smem_bytes())?;
                let fallback = SamplingChoice::by_element(&problem)?;
                let unaligned = device.entry(OP, fallback.variant.entry, fallback.smem_bytes())?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(Sampler { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Sampler`].
    pub fn run(&self, stream: &Stream, mut args: SamplingArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(self.problem.dtype, &dims, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let SamplingArgs { logits, ids, .. } = &args;
                let scalar = choice.variant.access == SamplingAccess::Scalar;
                let entry = if scalar || logits.is_aligned_16() { entry } else { unaligned };
                let dims = match &dims {
                    Dims::Greedy(dims) => Param::from(dims),
                    Dims::Random(dims) => Param::from(dims),
                };
                let params = [(*logits).into(), ids.into(), dims];
                let rows = logits.shape()[0] as u32;
                // SAFETY: `check` found every row of the logits and every id inside its view, and the alignment is what
                // the kernel reads by; the grid is one block per row.
                unsafe { entry.launch(stream, [rows, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &SamplingArgs<'_>) -> Result<Dims, Error> {
        let SamplingArgs { logits, ids, step } = args;
        let SamplingProblem { rows: max_rows, vocab, dtype, method } = self.problem;
        logits.expect(OP, "logits", &self.device, dtype, &[None, Some(vocab)])?;
        logits.expect_inner_contiguous(OP, "logits")?;
        let rows = logits.shape()[0];
        ids.expect(OP, "ids", &self.device, DType::U32, &[Some(rows)])?;
        ids.expect_inner_contiguous(OP, "ids")?;
        if rows > max_rows {
            let expected = format!("at most {max_rows} rows, as planned");
            return Err(Error::invalid(OP, "logits", expected, rows.to_string()));
        }
        let logits_stride =
            if rows > 1 { check_size(OP, "logits", "stride", logits.strides()[0])? } else { 0 };
        let vocab = vocab as u32;
        Ok(match method {
            Sampling::Greedy => Dims::Greedy(GreedyDims { vocab, logits_stride }),
            Sampling::Random { temperature, top_k, top_p, seed } => Dims::Random(RandomDims {
                seed,
                step: *step,
                // Exact but for top_p below 2^-8, whose last bits may be rounded away.
                top_p_q32: ((f64::from(top_p) * TOP_P_ONE as f64).round() as u64).max(1),
                vocab,
                logits_stride,
                top_k: top_k.filter(|&k| k > 0).map_or(vocab, |k| k.min(vocab)),
                // Finite, as the temperature is not subnormal.
                scale: (std::f64::consts::LOG2_E / f64::from(temperature)) as f32,
            }),
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let SamplingProblem { rows, vocab, dtype, method } = self.problem;
        let [rows, vocab] = [rows, vocab].map(count);
        let work = |why, tile, threads| Work {
            problem: format!("[{rows}, {vocab}] {dtype} {method:?}"),
            why,
            tile,
            threads,
            bytes: rows * (vocab * count(dtype.bytes()) + count(DType::U32.bytes())),
            flops: rows * vocab,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card".into(), "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let tile = format!("a row per block, {:?}", choice.variant.access);
                OptimizationReport::new(
                    OP,
                    &self.device,
                    Some(entry),
                    work(choice.why.clone(), tile, THREADS),
                )
            }
        }
    }
}

impl Kernel for Sampler {
    type Args<'a> = SamplingArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: SamplingArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &SamplingProblem) -> Result<(), Error> {
    check_size(OP, "problem", "rows", problem.rows)?;
    if problem.vocab == 0 || problem.vocab > MAX_VOCAB as usize {
        let expected = format!("a vocabulary of 1 to {MAX_VOCAB}");
        return Err(Error::invalid(OP, "problem", expected, problem.vocab.to_string()));
    }
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    if let Sampling::Random { temperature, top_p, .. } = problem.method {
        if !(temperature > 0.0 && temperature.is_normal()) {
            return Err(Error::invalid(
                OP,
                "temperature",
                "a normal number above 0",
                temperature.to_string(),
            ));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::invalid(OP, "top_p", "a number above 0 and at most 1", top_p.to_string()));
        }
    }
    Ok(())
}
