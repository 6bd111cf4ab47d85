//! Sampling: `abi::ops::sampling` has the kernel table and the shared arithmetic, `gpu/src/ops/sampling` the kernels,
//! `tests/ops/sampling.rs` the properties, `benches/ops/sampling.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::sampling::{
    MAX_SLICES, MAX_VOCAB, SamplingDims, THREADS, TOP_P_ONE, Task, digits, record, smem,
};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub use abi::ops::sampling::{SamplingAccess, SamplingVariant, VARIANTS};
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
/// **Cost**: walks over the rows, a launch each, from L2 after the first: greedy 1 or, of few rows, a short second one; random 3, and for each of `top_k` and
/// `top_p` 3 more (2 for 16-bit logits), for 128 rows at a time. `top_k` and `top_p` that bound nothing cost nothing. As many blocks share a row as
/// there are multiprocessors for it. The plan holds 53 KiB of device memory for each of 128 rows, or of as many as it is for; for greedy 4 KiB.
/// **Streams**: a plan has a workspace, so a run in another stream than the last one waits for that. A recorded graph
/// does not know of later runs: do not let it run at the same time as the plan in another stream, nor outlive the plan.
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
    Cuda(Box<Kernels>),
}

/// The chosen kernel, and the one for logits that are not aligned to 16 bytes; what walks leave for the next.
#[derive(Debug)]
struct Kernels {
    choice: SamplingChoice,
    entry: Entry,
    unaligned: Entry,
    records: Workspace<1>,
}

/// Rows of a launch at most.
const CHUNK_ROWS: usize = 128;
/// Fewest logits of a slice, but for the last.
const MIN_SLICE: u32 = 1024;

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
                let entry = device.entry(OP, choice.variant.entry, smem::BYTES)?;
                let fallback = SamplingChoice::by_element(&problem)?;
                let unaligned = device.entry(OP, fallback.variant.entry, smem::BYTES)?;
                let is_greedy = problem.method == Sampling::Greedy;
                let len = if is_greedy { record::GREEDY_LEN } else { record::RANDOM_LEN };
                // A record is of u64s.
                let shape = [problem.rows.min(CHUNK_ROWS), 2 * len as usize];
                let records =
                    Workspace::new(device, |stream| Ok([Tensor::empty(stream, &shape, DType::U32)?]))?;
                Backend::Cuda(Box::new(Kernels { choice, entry, unaligned, records }))
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
            Backend::Cuda(kernels) => {
                let Kernels { choice, entry, unaligned, records } = &**kernels;
                let SamplingArgs { logits, ids, .. } = &args;
                let scalar = choice.variant.access == SamplingAccess::Scalar;
                let entry = if scalar || logits.is_aligned_16() { entry } else { unaligned };
                let _alone = records.enter(stream)?;
                let records = records.tensors[0].view();
                let rows = logits.shape()[0];
                for first_row in (0..rows).step_by(CHUNK_ROWS) {
                    let chunk = CHUNK_ROWS.min(rows - first_row) as u32;
                    let (slices, slice_len) = self.slices(chunk);
                    let dims = SamplingDims { first_row: first_row as u32, slices, slice_len, ..dims };
                    for dims in self.walks(dims) {
                        let params = [(*logits).into(), records.into(), ids.into(), Param::from(&dims)];
                        let slices = if dims.task == Task::Choose as u32 { 1 } else { dims.slices };
                        // SAFETY: `check` found every row of the logits and every id inside its view, and the alignment is what
                        // the kernel reads by; the grid is the slices of the launch's rows, for each of which there is a record
                        // that no run of another stream uses until this one is done.
                        unsafe { entry.launch(stream, [slices, chunk, 1], [THREADS, 1, 1], &params)? };
                    }
                }
                Ok(())
            }
        }
    }

    /// Blocks that share each of so many rows, as many as there are multiprocessors for it, and the logits of a block.
    fn slices(&self, rows: u32) -> (u32, u32) {
        let places = (self.device.profile().num_sms / rows.max(1)).clamp(1, MAX_SLICES);
        let vocab = self.problem.vocab as u32;
        let slice_len = vocab.div_ceil(places).max(MIN_SLICE).next_multiple_of(8);
        (vocab.div_ceil(slice_len), slice_len)
    }

    /// The walks over some rows, each with what the one before has done.
    fn walks(&self, dims: SamplingDims) -> impl Iterator<Item = SamplingDims> {
        let digits = digits(self.problem.dtype.bytes());
        let is_random = dims.is_greedy == 0;
        let bounds = [(Task::Count, dims.top_k < dims.vocab), (Task::Weigh, dims.top_p_q32 < TOP_P_ONE)];
        let searches = bounds.into_iter().filter(move |&(_, is_bounded)| is_random && is_bounded);
        let by_digit = searches.flat_map(move |(task, _)| (0..digits).map(move |digit| (task, digit)));
        let sum = is_random.then_some((Task::Sum, 0));
        let choose = (is_random || dims.slices > 1).then_some((Task::Choose, 0));
        let mut before = Task::Largest;
        let tasks = std::iter::once((Task::Largest, 0)).chain(by_digit).chain(sum).chain(choose);
        tasks.zip(0..).map(move |((task, digit), walk)| {
            let before = std::mem::replace(&mut before, task) as u32;
            SamplingDims { task: task as u32, digit, walk, before, ..dims }
        })
    }

    fn check(&self, args: &SamplingArgs<'_>) -> Result<SamplingDims, Error> {
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
        let greedy = SamplingDims {
            seed: 0,
            step: *step,
            top_p_q32: TOP_P_ONE,
            vocab,
            logits_stride,
            top_k: vocab,
            scale: 1.0,
            is_greedy: 1,
            first_row: 0,
            slices: 1,
            slice_len: vocab,
            walk: 0,
            task: Task::Largest as u32,
            digit: 0,
            before: Task::Largest as u32,
        };
        Ok(match method {
            Sampling::Greedy => greedy,
            Sampling::Random { temperature, top_k, top_p, seed } => SamplingDims {
                seed,
                // Exact but for top_p below 2^-8, whose last bits may be rounded away.
                top_p_q32: ((f64::from(top_p) * TOP_P_ONE as f64).round() as u64).max(1),
                top_k: top_k.filter(|&k| k > 0).map_or(vocab, |k| k.min(vocab)),
                // Finite, as the temperature is not subnormal.
                scale: (std::f64::consts::LOG2_E / f64::from(temperature)) as f32,
                is_greedy: 0,
                ..greedy
            },
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
            Backend::Cuda(kernels) => {
                let Kernels { choice, entry, .. } = &**kernels;
                let (slices, _) = self.slices(self.problem.rows.min(CHUNK_ROWS) as u32);
                let tile = format!("{slices} blocks to a row, {:?}", choice.variant.access);
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
