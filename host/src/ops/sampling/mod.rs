//! A token from each row of logits, greedy or random, by the row's own parameters: [`Sampler`].

mod cases;
mod cpu;
mod params;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::sampling::{
    EDIT_VARIANTS, LOGPROBS_VARIANTS, MAX_SLICES, MAX_VOCAB, SamplingDims, SamplingEditDims, SamplingHelper,
    SamplingLogprobsDims, THREADS, edit, logprobs, record, smem, step,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::{Entry, Param};
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Pair, Plan, Run, check_floats, check_size, planned};
use crate::tensor::{Tensor, TensorView, TensorViewMut, views};

pub use abi::ops::sampling::{NO_TOKEN, SamplingAccess, SamplingVariant, VARIANTS};
pub use cases::{CASES, SamplingCase, SamplingRows, samples};
pub use params::{PARAMS_LEN, SamplingFeatures, SamplingParams};
pub use select::select;

const OP: &str = "sampling";

/// What is to be sampled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingProblem {
    /// Most rows of a run: sequences.
    pub rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// Type of the logits.
    pub dtype: DType,
    /// What rows may ask for.
    pub features: SamplingFeatures,
}

impl SamplingProblem {
    /// With what it must have. The other fields do nothing: `features: SamplingFeatures::GREEDY`.
    pub fn new(rows: usize, vocab: usize, dtype: DType) -> Self {
        SamplingProblem { rows, vocab, dtype, features: SamplingFeatures::GREEDY }
    }

    /// The type of the logits that a token is chosen from.
    fn chosen_dtype(&self) -> DType {
        if self.features.edits() { DType::F32 } else { self.dtype }
    }
}

/// Numbers that are added to logits, for each row those of some tokens. Rows of any stride.
#[derive(Debug)]
pub struct SamplingBias<'a> {
    /// `[rows, features.bias]`, u32: tokens, of a row's first `num_bias` no two the same. Those beyond the vocabulary
    /// are of no account.
    pub ids: TensorView<'a>,
    /// `[rows, features.bias]`, f32: what is added.
    pub values: TensorView<'a>,
}

/// Natural logarithms of probabilities, of the logits as they are given: no temperature, penalty, bias or mask. Rows of
/// any stride.
#[derive(Debug)]
pub struct Logprobs<'a> {
    /// `[rows]`, f32: of the chosen token. −∞ where there is none.
    pub chosen: TensorViewMut<'a>,
    /// `[rows, n]`, u32, for `logprobs: Some(n)`: the most probable tokens, in descending order, equal ones by index;
    /// [`NO_TOKEN`] where there are fewer that are not NaN.
    pub top_ids: TensorViewMut<'a>,
    /// `[rows, n]`, f32: of these, or −∞.
    pub top: TensorViewMut<'a>,
}

/// The tensors of a run.
#[derive(Debug)]
pub struct SamplingArgs<'a> {
    /// `[rows, vocab]`, rows of any stride.
    pub logits: TensorView<'a>,
    /// `[rows, PARAMS_LEN]`, u32, rows of any stride: what [`SamplingProblem::write_params`] writes. None where rows
    /// have nothing to ask for: of features without draws, history, bias and masks.
    pub params: Option<TensorView<'a>>,
    /// `[rows, features.history]`, u32, rows of any stride: of each row the prompt's tokens and then those that were
    /// generated, as many as its parameters say.
    pub history: Option<TensorView<'a>>,
    /// What is added to logits.
    pub bias: Option<SamplingBias<'a>>,
    /// `[rows, vocab / 32 rounded up]`, u32, rows of any stride: bit `i % 32` of word `i / 32` allows token `i`, in
    /// rows whose parameters say that they are masked.
    pub masks: Option<TensorView<'a>>,
    /// `[rows]`, u32: the chosen tokens.
    pub ids: TensorViewMut<'a>,
    /// What probabilities they have.
    pub logprobs: Option<Logprobs<'a>>,
}

impl<'a> SamplingArgs<'a> {
    /// With what it must have. There is nothing else: it is what a plan of [`SamplingFeatures::GREEDY`] takes.
    pub fn new(logits: TensorView<'a>, ids: TensorViewMut<'a>) -> Self {
        SamplingArgs { logits, params: None, history: None, bias: None, masks: None, ids, logprobs: None }
    }
}

/// Chooses a token per row of logits, each row by its own [`SamplingParams`].
///
/// For a row's logits x, in this order, which is that of transformers (and of vLLM, but for `min_p`, which vLLM asks
/// for before `top_k` and `top_p`):
///
/// 1. **Bias**: `x[i] += bias[i]`.
/// 2. **Penalties**: for tokens of the history `x = x > 0 ? x / repetition_penalty : x · repetition_penalty`; for
///    tokens that were generated c times, c > 0, `x −= frequency_penalty · c + presence_penalty`.
/// 3. **Mask**: a token that is not allowed becomes NaN, which is never chosen. Logits of 1 to 3 are in f32, each
///    operation rounded.
/// 4. **Temperature 0**: the index of the largest x, the lowest among equals (−0 and +0 are equal). NaN is ignored, so
///    −∞ is chosen only where there is nothing but −∞ and NaN. The rest is for other temperatures.
/// 5. **Temperature**: `p = softmax(x / temperature)`. Tokens are ordered by descending x, equal ones by ascending
///    index; NaN has no probability. Where the largest is infinite, those that equal it have the same probability and
///    the others none.
/// 6. **top_k**: the first `top_k` are kept, and p renormalised.
/// 7. **top_p**: the shortest prefix whose p sum up to `top_p` or more is kept.
/// 8. **min_p**: of these those with `p ≥ min_p · max p`, and p renormalised.
/// 9. **typical_p**: with the entropy `H = −Σ p ln p` they are ordered by ascending `|−ln p − H|`; the shortest prefix
///    whose p sum up to `typical_p` or more is kept, and those that equal its last one. p is renormalised.
/// 10. **Draw**: with `u = Philox4x32-10(key = seed, counter = step)`, 64 bits as a number in [0, 1): the token with
///     `c ≤ u < c + p`, where c is the sum of p over the kept tokens of lower index.
///
/// **No token**: where all are NaN or not allowed, [`NO_TOKEN`].
///
/// **Log-probabilities**, where the features have them, are of the logits as given: `ln softmax(logits)`, as vLLM's and
/// the OpenAI API's.
///
/// **Arithmetic**: unnormalised p are integers, `⌊2^40 · e^((x − max) / temperature)⌋` of an f32 exponent with a
/// relative error of about 2^-22, so tokens less probable than 2^-40 of the most probable are never chosen. Sums are
/// exact. A logit that is more than 3.4e38 below the largest counts as −∞, whatever the temperature. Shares (`top_p`,
/// `min_p`, `typical_p`) are multiples of 2^-32, distances from the entropy of 2^-24 bits. Log-probabilities have an
/// error of about 10^-6 beside their rounding.
/// **Determinism**: the same token for the same logits, history, bias, mask and parameters: on every backend and floor,
/// bit for bit, whatever the other rows are, wherever in the batch the row is, and whatever features its plan has
/// beside those that it asks for. The exact definition in real numbers may give another token only where u, or a share,
/// lies within rounding distance (about 1e-6) of a boundary.
/// **Parameters in device memory**: a run reads them there, so a recorded graph takes whatever the tensor holds when it
/// is replayed. What is there and the plan's features do not have is not looked at ([`SamplingProblem::write_params`]
/// refuses it); lengths beyond what there is are cut.
/// **Cost**: walks over the rows, a launch each, from L2 after the first, for 128 rows at a time. Greedy 1 or, of few
/// rows, a short second one; draws 3; for each of `top_k` and `top_p` 3 more (2 for 16-bit logits), for `typical_p` 4.
/// A row leaves a walk that it does not ask for; once a digit of a search leaves 512 tokens or fewer, as it does with
/// `top_k` of some dozens, a row leaves all walks but one more. Where rows are more than half the multiprocessors, all
/// walks are one launch. `history`, `bias` and `masks` cost a pass that writes all logits anew, in f32;
/// log-probabilities three more. The plan holds 59 KiB of device memory for each of 128 rows, or of as many as it is
/// for, for greedy 4 KiB; and 4 bytes for each of their logits where these are made anew.
/// **Streams**: a plan has a workspace, so a run in another stream than the last one waits for that. A recorded graph
/// does not know of later runs: do not let it run at the same time as the plan in another stream, nor outlive the plan.
/// **Errors**: [`Error::Invalid`] for features, a shape, stride, type or place that do not fit, for a tensor that the
/// features do not ask for, and for one that they do and that is not there; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
/// **Source**: Fan, Lewis and Dauphin, *Hierarchical Neural Story Generation* (2018), section 5.4, for top_k; Holtzman
/// et al., *The Curious Case of Neural Text Degeneration* (2020), section 3.1, for top_p; Meister et al., *Locally
/// Typical Sampling* (2023), for typical_p; Nguyen et al., *Turning Up the Heat* (2024), for min_p; Keskar et al.,
/// *CTRL* (2019), section 4.1, for the repetition penalty.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::sampling::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// // A greedy row beside random ones.
/// let random = SamplingParams { temperature: 0.6, top_k: Some(20), top_p: 0.95, ..SamplingParams::default() };
/// let rows = [SamplingParams::default(), SamplingParams { seed: 1, ..random }, SamplingParams { seed: 2, ..random }];
/// let features = SamplingFeatures::of(&rows);
/// let problem = SamplingProblem { features, ..SamplingProblem::new(3, 1000, DType::F32) };
/// let sampler = Sampler::plan(&device, problem)?;
/// let logits = Tensor::zeros(&stream, &[3, 1000], DType::F32)?;
/// let mut params = Tensor::zeros(&stream, &[3, PARAMS_LEN], DType::U32)?;
/// let mut ids = Tensor::empty(&stream, &[3], DType::U32)?;
/// let mut words = [0; 3 * PARAMS_LEN];
/// for step in 0..10 {
///     problem.write_params(&rows.map(|row| SamplingParams { step, ..row }), &mut words)?;
///     params.view_mut().write(&stream, &words)?;
///     let args = SamplingArgs { params: Some(params.view()), ..SamplingArgs::new(logits.view(), ids.view_mut()) };
///     sampler.run(&stream, args)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Sampler(Plan<Self>);

planned!(
    Sampler,
    SamplingProblem,
    SamplingArgs { logits, params, history, bias, masks, ids, logprobs },
    &'static SamplingVariant
);
views!(SamplingBias { ids, values });
views!(Logprobs { chosen, top_ids, top });

/// The kernels, and what launches leave for the next.
#[derive(Debug)]
pub(crate) struct Kernels {
    entries: Pair,
    edit: Option<Entry>,
    logprobs: Option<Entry>,
    /// Records of rows, their edited logits, their records of log-probabilities: of the rows of a launch.
    memory: Workspace<3>,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        self.entries.reported()
    }
}

/// Sizes of a run.
pub(crate) struct Dims {
    sampling: SamplingDims,
    edit: SamplingEditDims,
    logprobs: SamplingLogprobsDims,
}

/// Rows of a launch at most.
const CHUNK_ROWS: usize = 128;
/// Fewest logits of a slice, but for the last.
const MIN_SLICE: u32 = 1024;

/// Logits from one edited row to the next, so that each is aligned.
fn edited_stride(problem: &SamplingProblem) -> usize {
    problem.vocab.next_multiple_of(4)
}

impl Operator for Sampler {
    const OP: &'static str = OP;
    const IS_REPEATABLE: bool = true;
    type Problem = SamplingProblem;
    type Args<'a> = SamplingArgs<'a>;
    type Dims = Dims;
    type Variant = &'static SamplingVariant;
    type Kernels = Kernels;

    fn check_problem(problem: &SamplingProblem) -> Result<(), Error> {
        let SamplingProblem { rows, vocab, dtype, features } = *problem;
        if vocab == 0 || vocab > MAX_VOCAB as usize {
            let expected = format!("a vocabulary of 1 to {MAX_VOCAB}");
            return Err(Error::invalid(OP, "problem", expected, vocab.to_string()));
        }
        check_floats(OP, dtype, &[("rows", rows), ("history", features.history), ("bias", features.bias)])?;
        features.check()
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
        let SamplingProblem { features, dtype, .. } = *problem;
        let any = select::by_element(problem)?;
        let entries = Pair::load(device, OP, [choice.variant.entry, any.entry], smem::BYTES)?;
        let helper = |is_wanted: bool, table: &'static [SamplingHelper], bytes| {
            let variant = plan::first(OP, table, dtype, |variant| variant.dtype == dtype)?;
            is_wanted.then(|| device.entry(OP, variant.entry, bytes)).transpose()
        };
        let edit = helper(features.edits(), EDIT_VARIANTS, edit::smem::BYTES)?;
        let logprobs = helper(features.logprobs.is_some(), LOGPROBS_VARIANTS, logprobs::SMEM_BYTES)?;
        let rows = problem.rows.min(CHUNK_ROWS);
        let len = if features.draws { record::RANDOM_LEN } else { record::GREEDY_LEN };
        let of_logprobs = features.logprobs.map_or(0, |top| logprobs::record_len(top as u32));
        let edited = if features.edits() { edited_stride(problem) } else { 0 };
        // Records are of u64s.
        let memory = Workspace::new(device, |stream| {
            Ok([
                Tensor::empty(stream, &[rows, 2 * len as usize], DType::U32)?,
                Tensor::empty(stream, &[rows, edited], DType::F32)?,
                Tensor::empty(stream, &[rows, 2 * of_logprobs as usize], DType::U32)?,
            ])
        })?;
        Ok(Kernels { entries, edit, logprobs, memory })
    }

    fn check(at: &Check<'_>, problem: &SamplingProblem, args: &SamplingArgs<'_>) -> Result<Dims, Error> {
        let SamplingArgs { logits, params, history, bias, masks, ids, logprobs } = args;
        let SamplingProblem { rows: most, vocab, dtype, features } = *problem;
        let [logits_stride] = at.rows("logits", *logits, dtype, &[None, Some(vocab)])?;
        let rows = logits.shape()[0];
        let [] = at.elements("ids", ids.as_view(), DType::U32, &[Some(rows)])?;
        at.planned("logits", "rows", rows, most)?;
        // A tensor of parts of rows, if it was planned.
        let part = |name, view: Option<TensorView<'_>>, dtype, cols: usize, is_planned, why| {
            let Some(view) = at.given(name, is_planned, view, why)? else { return Ok(0) };
            let [stride] = at.elements(name, view, dtype, &[Some(rows), Some(cols)])?;
            Ok::<u32, Error>(stride)
        };
        let why = ["the features have parameters", "the features have no parameters"];
        let params_stride = part("params", *params, DType::U32, PARAMS_LEN, features.has_params(), why)?;
        let why = ["the features have a history", "the features have no history"];
        let history_stride =
            part("history", *history, DType::U32, features.history, features.history > 0, why)?;
        let why = ["the features have a bias", "the features have no bias"];
        let has_bias = features.bias > 0;
        let [bias_ids, bias] = [bias.as_ref().map(|bias| bias.ids), bias.as_ref().map(|bias| bias.values)];
        let bias_strides = [
            part("bias.ids", bias_ids, DType::U32, features.bias, has_bias, why)?,
            part("bias.values", bias, DType::F32, features.bias, has_bias, why)?,
        ];
        let why = ["the features have masks", "the features have no masks"];
        let mask_stride = part("masks", *masks, DType::U32, vocab.div_ceil(32), features.masks, why)?;
        let why = ["the features have log-probabilities", "the features have no log-probabilities"];
        let logprobs = at.given("logprobs", features.logprobs.is_some(), logprobs.as_ref(), why)?;
        let (mut top, mut top_strides) = (0, [0; 2]);
        if let Some(Logprobs { chosen, top_ids, top: values }) = logprobs {
            let [] = at.elements("logprobs.chosen", chosen.as_view(), DType::F32, &[Some(rows)])?;
            let cols = features.logprobs.unwrap_or(0);
            let views = [
                ("logprobs.top_ids", top_ids.as_view(), DType::U32),
                ("logprobs.top", values.as_view(), DType::F32),
            ];
            for (stride, (name, view, dtype)) in std::iter::zip(&mut top_strides, views) {
                [*stride] = at.elements(name, view, dtype, &[Some(rows), Some(cols)])?;
                at.apart(name, *stride, view.shape())?;
            }
            top = cols as u32;
        }
        let vocab = vocab as u32;
        let slices = vocab.div_ceil(logprobs::MIN_SLICE).min(logprobs::MAX_SLICES);
        Ok(Dims {
            sampling: SamplingDims {
                vocab,
                logits_stride: if features.edits() { edited_stride(problem) as u32 } else { logits_stride },
                params_stride,
                first_row: 0,
                first_logits_row: 0,
                slices: 1,
                slice_len: vocab,
                planned: features.steps(problem.chosen_dtype()),
                launched: 0,
            },
            edit: SamplingEditDims {
                vocab,
                logits_stride,
                edited_stride: edited_stride(problem) as u32,
                params_stride,
                first_row: 0,
                history: check_size(OP, "problem", "history", features.history)?,
                history_stride,
                bias: check_size(OP, "problem", "bias", features.bias)?,
                bias_strides,
                mask_stride,
                has_masks: u32::from(features.masks),
            },
            logprobs: SamplingLogprobsDims {
                vocab,
                logits_stride,
                first_row: 0,
                slices: vocab.div_ceil(vocab.div_ceil(slices)),
                slice_len: vocab.div_ceil(slices),
                top,
                top_strides,
                task: 0,
            },
        })
    }

    fn cpu(problem: &SamplingProblem, dims: &Dims, args: &mut SamplingArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: Dims, args: &SamplingArgs<'_>) -> Result<(), Error> {
        let SamplingArgs { logits, params, history, bias, masks, ids, logprobs } = args;
        let memory = &run.kernels.memory;
        let _alone = memory.enter(run.stream)?;
        let [records, edited, of_logprobs] = memory.tensors.each_ref().map(Tensor::view);
        let edits = run.problem.features.edits();
        let entry = run.kernels.entries.fitting(run.is_aligned || edits);
        let rows = logits.shape()[0];
        for first_row in (0..rows).step_by(CHUNK_ROWS) {
            let chunk = CHUNK_ROWS.min(rows - first_row) as u32;
            let first_row = first_row as u32;
            if let Some(entry) = &run.kernels.edit {
                let dims = SamplingEditDims { first_row, ..dims.edit };
                let launched = [
                    (*logits).into(),
                    (*params).into(),
                    (*history).into(),
                    bias.as_ref().map(|bias| bias.ids).into(),
                    bias.as_ref().map(|bias| bias.values).into(),
                    (*masks).into(),
                    edited.into(),
                    Param::from(&dims),
                ];
                let grid = [dims.vocab.div_ceil(edit::SLICE), chunk, 1];
                // SAFETY: `check` found every row of the tensors inside its view, and the tensors there that the dims
                // speak of; the grid is all slices of the launch's rows, for each of which there is one in the plan's
                // memory, which no run of another stream uses until this one is done.
                unsafe { entry.launch(run.stream, grid, [edit::THREADS, 1, 1], &launched)? };
            }
            let (slices, slice_len) = slices(run.device, run.problem, chunk);
            let first_logits_row = if edits { 0 } else { first_row };
            let dims_of = |launched| SamplingDims {
                first_row,
                first_logits_row,
                slices,
                slice_len,
                launched,
                ..dims.sampling
            };
            let all = dims.sampling.planned;
            let steps = (0..u32::BITS).map(step::bit).filter(|bit| slices > 1 && all & bit != 0);
            for launched in steps.chain((slices == 1).then_some(all)) {
                let dims = dims_of(launched);
                let from = if edits { edited } else { *logits };
                let params = [from.into(), (*params).into(), records.into(), ids.into(), Param::from(&dims)];
                let slices = if launched == step::bit(step::CHOOSE) { 1 } else { slices };
                // SAFETY: as above: every row of logits and parameters, and every id; `is_aligned`, or the plan's own
                // memory, is what the kernel reads in pieces of 16 bytes. The grid is the slices of the launch's rows,
                // for each of which there is a record.
                unsafe { entry.launch(run.stream, [slices, chunk, 1], [THREADS, 1, 1], &params)? };
            }
            if let (Some(entry), Some(Logprobs { chosen, top_ids, top })) = (&run.kernels.logprobs, logprobs)
            {
                use logprobs::Task;
                for task in [Task::Top, Task::Sum, Task::Merge] {
                    let dims = SamplingLogprobsDims { first_row, task: task as u32, ..dims.logprobs };
                    let params = [
                        (*logits).into(),
                        of_logprobs.into(),
                        ids.into(),
                        chosen.into(),
                        top_ids.into(),
                        top.into(),
                        Param::from(&dims),
                    ];
                    let slices = if task == Task::Merge { 1 } else { dims.slices };
                    // SAFETY: as above, and every row of what is told.
                    unsafe {
                        entry.launch(run.stream, [slices, chunk, 1], [logprobs::THREADS, 1, 1], &params)?
                    };
                }
            }
        }
        Ok(())
    }

    fn work(problem: &SamplingProblem) -> Work {
        let SamplingProblem { rows, vocab, dtype, features } = *problem;
        let [rows, vocab] = [rows, vocab].map(count);
        Work {
            problem: format!("[{rows}, {vocab}] {dtype} {features:?}"),
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
