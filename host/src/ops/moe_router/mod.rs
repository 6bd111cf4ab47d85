//! Router of a mixture of experts: `abi::ops::moe_router` has the kernel table and the shared arithmetic,
//! `gpu/src/ops/moe_router` the kernels, `tests/ops/moe_router.rs` the properties, `benches/ops/moe_router.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::moe_router::{
    MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, MoeRouterDims, NORMALISED, ROUND_BF16, ROUND_F16, SIGMOID, THREADS,
    WARPS, smem_bytes,
};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::matmul::{optional, row_stride};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::moe_router::{MoeRouterVariant, VARIANTS};
pub use cases::{CASES, MoeRouterCase};
pub use select::select;

const OP: &str = "moe_router";

/// What a logit is turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterScore {
    /// e^logit over the sum of all experts'.
    Softmax,
    /// 1 / (1 + e^−logit).
    Sigmoid,
}

/// What the chosen experts' weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterWeights {
    /// Their scores.
    Scores,
    /// Their scores over the sum of their scores; of sigmoid scores over that sum and 1e-20.
    Normalised,
}

/// Groups of neighbouring experts, of which a token may use some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Groups: a divisor of the number of experts.
    pub num_groups: usize,
    /// Groups that a token chooses its experts from.
    pub top_groups: usize,
}

/// What is to be routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeRouterProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Type of the logits.
    pub dtype: DType,
    /// What a logit is turned into.
    pub score: RouterScore,
    /// Groups that bound the choice; none: all experts.
    pub groups: Option<ExpertGroups>,
    /// What the weights are.
    pub weights: RouterWeights,
    /// What the weights are multiplied by.
    pub scale: f32,
    /// The weights are rounded to this type, and stored in f32.
    pub weight_dtype: DType,
}

/// The tensors of a run.
#[derive(Debug)]
pub struct MoeRouterArgs<'a> {
    /// `[tokens, experts]`, rows of any stride.
    pub logits: TensorView<'a>,
    /// `[experts]` f32: added to the scores for the choice only.
    pub bias: Option<TensorView<'a>>,
    /// `[tokens, top_k]` u32, contiguous: the experts of each token, best first.
    pub ids: TensorViewMut<'a>,
    /// `[tokens, top_k]` f32, contiguous: their weights.
    pub weights: TensorViewMut<'a>,
}

/// Chooses the experts of each token, and their weights.
///
/// With `s = softmax(logits)` over all experts, or `sigmoid(logits)`:
/// 1. Experts are ordered by descending `s + bias`; without a bias by the logit, which is the same order. Equal ones are
///    ordered by ascending index.
/// 2. Where there are groups: a group's score is the sum of its two largest `s + bias`; the `top_groups` best are kept, the
///    lowest index among equals.
/// 3. `ids` are the first `top_k` experts (of the kept groups), in that order.
/// 4. `weights = s[ids]`, without the bias; divided by their sum ([`RouterWeights`]), multiplied by `scale`, rounded to
///    `weight_dtype`.
///
/// **Arithmetic**: f32, of exactly rounded operations in a fixed order; the relative error of a score is about 2^-21.
/// **NaN**: a NaN logit (or sum with the bias) comes after −∞, so ids are always different and in range. The softmax of a row
/// with a NaN or +∞ is NaN, and so are all its weights; a sigmoid is NaN where its logit is.
/// **Determinism**: the same ids and weights, bit for bit, on every backend and floor, whatever the other tokens are.
/// **Errors**: [`Error::Invalid`] for a parameter, shape, stride, type or place that does not fit; never after work was
/// enqueued.
/// **Architectures**: the same kernels on all floors.
/// **Source**: Shazeer et al., *Outrageously Large Neural Networks* (2017), section 2.1; for sigmoid scores, bias and groups
/// DeepSeek-AI, *DeepSeek-V3 Technical Report* (2024), section 2.1.2.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::moe_router::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = MoeRouterProblem {
///     tokens: 4,
///     experts: 128,
///     top_k: 8,
///     dtype: DType::BF16,
///     score: RouterScore::Softmax,
///     groups: None,
///     weights: RouterWeights::Normalised,
///     scale: 1.0,
///     weight_dtype: DType::BF16,
/// };
/// let router = MoeRouter::plan(&device, problem)?;
/// let logits = Tensor::zeros(&stream, &[4, 128], DType::BF16)?;
/// let mut ids = Tensor::empty(&stream, &[4, 8], DType::U32)?;
/// let mut weights = Tensor::empty(&stream, &[4, 8], DType::F32)?;
/// let (ids, weights) = (ids.view_mut(), weights.view_mut());
/// router.run(&stream, MoeRouterArgs { logits: logits.view(), bias: None, ids, weights })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MoeRouter {
    device: Device,
    problem: MoeRouterProblem,
    /// None on the CPU.
    entry: Option<Entry>,
}

impl MoeRouter {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &MoeRouterProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: MoeRouterProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let variant = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, variant)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: MoeRouterProblem,
        variant: &'static MoeRouterVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        select::check_fits(variant, &problem)?;
        Self::new(device, problem, device.limits().map(|_| variant))
    }

    fn new(
        device: &Device,
        problem: MoeRouterProblem,
        variant: Option<&'static MoeRouterVariant>,
    ) -> Result<Self, Error> {
        let smem = smem_bytes(problem.experts as u32);
        let entry = variant.map(|variant| device.entry(OP, variant.entry, smem)).transpose()?;
        Ok(MoeRouter { device: device.clone(), problem, entry })
    }

    /// Runs once. See [`MoeRouter`].
    pub fn run(&self, stream: &Stream, mut args: MoeRouterArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let dims = self.check(&args)?;
        match &self.entry {
            None => {
                cpu::run(self.problem.dtype, &dims, &mut args);
                Ok(())
            }
            Some(entry) => {
                let MoeRouterArgs { logits, bias, ids, weights } = &args;
                let params =
                    [(*logits).into(), optional(bias.as_ref()), ids.into(), weights.into(), (&dims).into()];
                let grid = dims.tokens.div_ceil(WARPS);
                // SAFETY: `check` found every row of the logits, the bias and the outputs inside their views; the grid has
                // a warp for every token and shared memory for its keys.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &MoeRouterArgs<'_>) -> Result<MoeRouterDims, Error> {
        let MoeRouterArgs { logits, bias, ids, weights } = args;
        let MoeRouterProblem { tokens: max_tokens, experts, top_k, dtype, score, groups, scale, .. } =
            self.problem;
        let device = &self.device;
        logits.expect(OP, "logits", device, dtype, &[None, Some(experts)])?;
        logits.expect_inner_contiguous(OP, "logits")?;
        let tokens = logits.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "logits", expected, tokens.to_string()));
        }
        if let Some(bias) = bias {
            bias.expect(OP, "bias", device, DType::F32, &[Some(experts)])?;
            bias.expect_inner_contiguous(OP, "bias")?;
        }
        ids.expect(OP, "ids", device, DType::U32, &[Some(tokens), Some(top_k)])?;
        ids.expect_contiguous(OP, "ids")?;
        weights.expect(OP, "weights", device, DType::F32, &[Some(tokens), Some(top_k)])?;
        weights.expect_contiguous(OP, "weights")?;
        let mut options = 0;
        for (option, is_set) in [
            (SIGMOID, score == RouterScore::Sigmoid),
            (NORMALISED, self.problem.weights == RouterWeights::Normalised),
            (ROUND_F16, self.problem.weight_dtype == DType::F16),
            (ROUND_BF16, self.problem.weight_dtype == DType::BF16),
        ] {
            options |= if is_set { option } else { 0 };
        }
        let ExpertGroups { num_groups, top_groups } =
            groups.unwrap_or(ExpertGroups { num_groups: 1, top_groups: 1 });
        Ok(MoeRouterDims {
            tokens: check_size(OP, "logits", "tokens", tokens)?,
            experts: experts as u32,
            top_k: top_k as u32,
            logits_stride: row_stride(OP, "logits", logits.shape(), logits.strides())?,
            num_groups: num_groups as u32,
            group_size: (experts / num_groups) as u32,
            top_groups: top_groups as u32,
            options,
            scale,
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let MoeRouterProblem { tokens, experts, top_k, dtype, .. } = self.problem;
        let [tokens, experts, top_k] = [tokens, experts, top_k].map(count);
        let work = Work {
            problem: format!("[{tokens}, {experts}] {dtype}, {top_k} of them"),
            why: "the only one".into(),
            tile: "a token per warp".into(),
            threads: THREADS,
            bytes: tokens * (experts * count(dtype.bytes()) + top_k * count(8)),
            flops: tokens * experts,
        };
        OptimizationReport::new(OP, &self.device, self.entry.as_ref(), work)
    }
}

impl Kernel for MoeRouter {
    type Args<'a> = MoeRouterArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: MoeRouterArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &MoeRouterProblem) -> Result<(), Error> {
    let MoeRouterProblem { tokens, experts, top_k, dtype, groups, scale, weight_dtype, .. } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    if experts == 0 || experts > MAX_EXPERTS as usize {
        let expected = format!("1 to {MAX_EXPERTS} experts");
        return Err(Error::invalid(OP, "problem", expected, experts.to_string()));
    }
    if let Some(ExpertGroups { num_groups, top_groups }) = groups {
        let fits = (1..=MAX_GROUPS as usize).contains(&num_groups)
            && experts.is_multiple_of(num_groups)
            && experts / num_groups >= 2
            && (1..=num_groups).contains(&top_groups);
        if !fits {
            let expected =
                format!("1 to {MAX_GROUPS} groups of equal size, at least 2, and 1 to all of them kept");
            let got = format!("{top_groups} of {num_groups} groups of {experts} experts");
            return Err(Error::invalid(OP, "problem", expected, got));
        }
    }
    let eligible = groups.map_or(experts, |groups| experts / groups.num_groups * groups.top_groups);
    let most = eligible.min(MAX_TOP_K as usize);
    if !(1..=most).contains(&top_k) {
        return Err(Error::invalid(OP, "problem", format!("a top_k of 1 to {most}"), top_k.to_string()));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    if !weight_dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "weight_dtype f32, f16 or bf16", weight_dtype.name()));
    }
    if !scale.is_finite() {
        return Err(Error::invalid(OP, "problem", "a finite scale", scale.to_string()));
    }
    Ok(())
}
