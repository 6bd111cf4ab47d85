//! A token from each row of logits, greedy or random: [`Sampler`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::sampling::{
    MAX_SLICES, MAX_VOCAB, SamplingDims, THREADS, TOP_P_ONE, Task, digits, record, smem,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::{Entry, Param};
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub use abi::ops::sampling::{SamplingAccess, SamplingVariant, VARIANTS};
pub use cases::{CASES, SamplingCase, samples};
pub use select::select;

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

impl SamplingProblem {
    /// With what it must have. The other fields do nothing: `method: Sampling::Greedy`.
    pub fn new(rows: usize, vocab: usize, dtype: DType) -> Self {
        SamplingProblem { rows, vocab, dtype, method: Sampling::Greedy }
    }
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

impl<'a> SamplingArgs<'a> {
    /// With what it must have. The other fields do nothing: `step: 0`.
    pub fn new(logits: TensorView<'a>, ids: TensorViewMut<'a>) -> Self {
        SamplingArgs { logits, ids, step: 0 }
    }
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
/// error of about 2^-22, so tokens less probable than 2^-40 of the most probable are never chosen. Sums are exact. A logit that is
/// more than 3.4e38 below the largest counts as −∞, whatever the temperature.
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
pub struct Sampler(Plan<Self>);

planned!(Sampler, SamplingProblem, SamplingArgs, &'static SamplingVariant);

/// The kernels, and what walks leave for the next.
#[derive(Debug)]
pub(crate) struct Kernels {
    entries: Pair,
    records: Workspace<1>,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        self.entries.reported()
    }
}

/// Rows of a launch at most.
const CHUNK_ROWS: usize = 128;
/// Fewest logits of a slice, but for the last.
const MIN_SLICE: u32 = 1024;

impl Operator for Sampler {
    const OP: &'static str = OP;
    type Problem = SamplingProblem;
    type Args<'a> = SamplingArgs<'a>;
    type Dims = SamplingDims;
    type Variant = &'static SamplingVariant;
    type Kernels = Kernels;

    fn check_problem(problem: &SamplingProblem) -> Result<(), Error> {
        let SamplingProblem { rows, vocab, dtype, method } = *problem;
        if vocab == 0 || vocab > MAX_VOCAB as usize {
            let expected = format!("a vocabulary of 1 to {MAX_VOCAB}");
            return Err(Error::invalid(OP, "problem", expected, vocab.to_string()));
        }
        check_floats(OP, dtype, &[("rows", rows)])?;
        let Sampling::Random { temperature, top_p, .. } = method else { return Ok(()) };
        if !(temperature > 0.0 && temperature.is_normal()) {
            let expected = "a normal number above 0";
            return Err(Error::invalid(OP, "temperature", expected, temperature.to_string()));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::invalid(OP, "top_p", "a number above 0 and at most 1", top_p.to_string()));
        }
        Ok(())
    }

    fn select(limits: &DeviceLimits, problem: &SamplingProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &SamplingProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &SamplingProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Kernels, Error> {
        let any = select::by_element(problem)?;
        let entries = Pair::load(device, OP, [choice.variant.entry, any.entry], smem::BYTES)?;
        let is_greedy = problem.method == Sampling::Greedy;
        let len = if is_greedy { record::GREEDY_LEN } else { record::RANDOM_LEN };
        // A record is of u64s.
        let shape = [problem.rows.min(CHUNK_ROWS), 2 * len as usize];
        let records = Workspace::new(device, |stream| Ok([Tensor::empty(stream, &shape, DType::U32)?]))?;
        Ok(Kernels { entries, records })
    }

    fn check(
        at: &Check<'_>,
        problem: &SamplingProblem,
        args: &SamplingArgs<'_>,
    ) -> Result<SamplingDims, Error> {
        let SamplingArgs { logits, ids, step } = args;
        let SamplingProblem { rows: most, vocab, dtype, method } = *problem;
        let [logits_stride] = at.rows("logits", *logits, dtype, &[None, Some(vocab)])?;
        let rows = logits.shape()[0];
        let [] = at.elements("ids", ids.as_view(), DType::U32, &[Some(rows)])?;
        at.planned("logits", "rows", rows, most)?;
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

    fn cpu(problem: &SamplingProblem, dims: &SamplingDims, args: &mut SamplingArgs<'_>) {
        cpu::run(problem.dtype, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: SamplingDims, args: &SamplingArgs<'_>) -> Result<(), Error> {
        let Kernels { entries, records } = run.kernels;
        let SamplingArgs { logits, ids, .. } = args;
        let entry = entries.fitting(run.is_aligned);
        let _alone = records.enter(run.stream)?;
        let records = records.tensors[0].view();
        let rows = logits.shape()[0];
        for first_row in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = CHUNK_ROWS.min(rows - first_row) as u32;
            let (slices, slice_len) = slices(run.device, run.problem, chunk);
            let dims = SamplingDims { first_row: first_row as u32, slices, slice_len, ..dims };
            for dims in walks(run.problem, dims) {
                let params = [(*logits).into(), records.into(), ids.into(), Param::from(&dims)];
                let slices = if dims.task == Task::Choose as u32 { 1 } else { dims.slices };
                // SAFETY: `check` found every row of the logits and every id inside its view, and `is_aligned` what the
                // kernel reads in pieces of 16 bytes; the grid is the slices of the launch's rows, for each of which there
                // is a record that no run of another stream uses until this one is done.
                unsafe { entry.launch(run.stream, [slices, chunk, 1], [THREADS, 1, 1], &params)? };
            }
        }
        Ok(())
    }

    fn work(problem: &SamplingProblem) -> Work {
        let SamplingProblem { rows, vocab, dtype, method } = *problem;
        let [rows, vocab] = [rows, vocab].map(count);
        Work {
            problem: format!("[{rows}, {vocab}] {dtype} {method:?}"),
            bytes: rows * (vocab * count(dtype.bytes()) + count(DType::U32.bytes())),
            flops: rows * vocab,
        }
    }

    fn tile(device: &Device, problem: &SamplingProblem, choice: &Choice<Self::Variant>) -> String {
        let (slices, _) = slices(device, problem, problem.rows.min(CHUNK_ROWS) as u32);
        format!("{slices} blocks to a row, {:?}", choice.variant.access)
    }
}

/// Blocks that share each of so many rows, as many as there are multiprocessors for it, and the logits of a block.
fn slices(device: &Device, problem: &SamplingProblem, rows: u32) -> (u32, u32) {
    let places = (device.profile().num_sms / rows.max(1)).clamp(1, MAX_SLICES);
    let vocab = problem.vocab as u32;
    let slice_len = vocab.div_ceil(places).max(MIN_SLICE).next_multiple_of(8);
    (vocab.div_ceil(slice_len), slice_len)
}

/// The walks over some rows, each with what the one before has done.
fn walks(problem: &SamplingProblem, dims: SamplingDims) -> impl Iterator<Item = SamplingDims> {
    let digits = digits(problem.dtype.bytes());
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
