//! Each token's experts and their weights: [`MoeRouter`].

mod cases;
pub(crate) mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::moe_router::{
    MAX_EXPERTS, MAX_GROUPS, MAX_SORT_EXPERTS, MAX_TOP_K, MoeRouterDims, NORMALISED, ROUND_BF16, ROUND_F16,
    SIGMOID,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::{Entry, Param};
use crate::ops::check_size;
use crate::plan::{Check, Choice, Operator, Plan, Run, no_float, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::moe_router::{MoeRouterStage, MoeRouterVariant, SORT_TOKENS, VARIANTS};
pub use cases::{CASES, MoeRouterCase, samples};
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

/// Experts by which pairs are sorted: those that are here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnExperts {
    /// The id of the first.
    pub first_expert: usize,
    /// How many there are.
    pub experts: usize,
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
    /// Pairs of tokens and experts are sorted too, as [`super::moe_permute`] does, in the same launch: of at most
    /// [`SORT_TOKENS`] tokens and 1024 experts. None: they are not.
    pub sort: Option<OwnExperts>,
}

impl MoeRouterProblem {
    /// With what it must have, and otherwise as Mixtral: `score: RouterScore::Softmax`, `groups: None`, `weights:
    /// RouterWeights::Scores`, `scale: 1.0`, `weight_dtype: DType::F32`, `sort: None`.
    pub fn new(tokens: usize, experts: usize, top_k: usize, dtype: DType) -> Self {
        MoeRouterProblem {
            tokens,
            experts,
            top_k,
            dtype,
            score: RouterScore::Softmax,
            groups: None,
            weights: RouterWeights::Scores,
            scale: 1.0,
            weight_dtype: DType::F32,
            sort: None,
        }
    }

    /// Sizes and options for kernels.
    pub(crate) fn dims(&self, tokens: u32, logits_stride: u32) -> MoeRouterDims {
        let MoeRouterProblem { experts, top_k, score, groups, scale, .. } = *self;
        let own = self.sort.unwrap_or(OwnExperts { first_expert: 0, experts: 0 });
        let mut options = 0;
        for (option, is_set) in [
            (SIGMOID, score == RouterScore::Sigmoid),
            (NORMALISED, self.weights == RouterWeights::Normalised),
            (ROUND_F16, self.weight_dtype == DType::F16),
            (ROUND_BF16, self.weight_dtype == DType::BF16),
        ] {
            options |= if is_set { option } else { 0 };
        }
        let ExpertGroups { num_groups, top_groups } =
            groups.unwrap_or(ExpertGroups { num_groups: 1, top_groups: 1 });
        MoeRouterDims {
            tokens,
            experts: experts as u32,
            top_k: top_k as u32,
            logits_stride,
            num_groups: num_groups as u32,
            group_size: (experts / num_groups) as u32,
            top_groups: top_groups as u32,
            options,
            scale,
            first_expert: own.first_expert as u32,
            own_experts: own.experts as u32,
        }
    }
}

/// Where sorted pairs go: all contiguous and u32, as [`MoePermuteArgs`](super::moe_permute::MoePermuteArgs) has them.
#[derive(Debug)]
pub struct SortedPairs<'a> {
    /// `[own experts + 1]`: where each expert's pairs begin in the order; the last, where those of no expert do.
    pub offsets: TensorViewMut<'a>,
    /// `[tokens · top_k]`: the pairs, `token · top_k + j`, sorted by expert, then as they were.
    pub order: TensorViewMut<'a>,
    /// `[tokens, top_k]`: where each pair is in the order; [`NO_POSITION`](super::moe_permute::NO_POSITION) for a pair
    /// of no expert.
    pub positions: TensorViewMut<'a>,
}

crate::tensor::views!(SortedPairs { offsets, order, positions });

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
    /// There if the problem says that pairs are sorted.
    pub sorted: Option<SortedPairs<'a>>,
}

impl<'a> MoeRouterArgs<'a> {
    /// With what it must have. The other fields do nothing: `bias: None`, `sorted: None`.
    pub fn new(logits: TensorView<'a>, ids: TensorViewMut<'a>, weights: TensorViewMut<'a>) -> Self {
        MoeRouterArgs { logits, bias: None, ids, weights, sorted: None }
    }
}

/// Chooses the experts of each token, and their weights.
///
/// With `s = softmax(logits)` over all experts, or `sigmoid(logits)`:
/// 1. Experts are ordered by descending `s + bias`; without a bias by the logit, which is the same order. Equal ones
///    are ordered by ascending index.
/// 2. Where there are groups: a group's score is the sum of its two largest `s + bias`; the `top_groups` best are kept,
///    the lowest index among equals.
/// 3. `ids` are the first `top_k` experts (of the kept groups), in that order.
/// 4. `weights = s[ids]`, without the bias; divided by their sum ([`RouterWeights`]), multiplied by `scale`, rounded to
///    `weight_dtype`.
/// 5. Of few tokens pairs may be sorted by expert in the same launch ([`MoeRouterProblem::sort`]), with the results of
///    [`MoePermute`](super::moe_permute::MoePermute).
///
/// **Arithmetic**: f32, of exactly rounded operations in a fixed order; the relative error of a score is about 2^-21.
/// Logits of any finite size; a sum with the bias, or of a group's two, that is more than 3.4e38 is infinite, and such
/// sums are equal. **NaN**: a NaN logit (or sum with the bias) comes after −∞, so ids are always different and in
/// range. The softmax of a row with a NaN or +∞ is NaN, and so are all its weights; a sigmoid is NaN where its logit
/// is. **Determinism**: the same ids and weights, bit for bit, on every backend and floor, whatever the other tokens
/// are. **Errors**: [`Error::Invalid`] for a parameter, shape, stride, type or place that does not fit; never after
/// work was enqueued. **Architectures**: the same kernels on all floors. **Source**: Shazeer et al., *Outrageously
/// Large Neural Networks* (2017), section 2.1; for sigmoid scores, bias and groups DeepSeek-AI, *DeepSeek-V3 Technical
/// Report* (2024), section 2.1.2.
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
///     sort: None,
/// };
/// let router = MoeRouter::plan(&device, problem)?;
/// let logits = Tensor::zeros(&stream, &[4, 128], DType::BF16)?;
/// let mut ids = Tensor::empty(&stream, &[4, 8], DType::U32)?;
/// let mut weights = Tensor::empty(&stream, &[4, 8], DType::F32)?;
/// let (ids, weights) = (ids.view_mut(), weights.view_mut());
/// router.run(&stream, MoeRouterArgs::new(logits.view(), ids, weights))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MoeRouter(Plan<Self>);

planned!(
    MoeRouter,
    MoeRouterProblem,
    MoeRouterArgs { logits, bias, ids, weights, sorted },
    &'static MoeRouterVariant
);

impl Operator for MoeRouter {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "tokens";
    type Problem = MoeRouterProblem;
    type Args<'a> = MoeRouterArgs<'a>;
    type Dims = MoeRouterDims;
    type Variant = &'static MoeRouterVariant;
    type Kernels = Entry;

    fn check_problem(problem: &MoeRouterProblem) -> Result<(), Error> {
        let MoeRouterProblem { tokens, experts, top_k, dtype, groups, scale, weight_dtype, sort, .. } =
            *problem;
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
            return Err(no_float(OP, dtype));
        }
        if !weight_dtype.is_float() {
            return Err(Error::invalid(OP, "problem", "weight_dtype f32, f16 or bf16", weight_dtype.name()));
        }
        if !scale.is_finite() {
            return Err(Error::invalid(OP, "problem", "a finite scale", scale.to_string()));
        }
        if let Some(OwnExperts { first_expert, experts: own }) = sort {
            if tokens > SORT_TOKENS as usize || experts > MAX_SORT_EXPERTS as usize {
                let expected = format!("at most {SORT_TOKENS} tokens and {MAX_SORT_EXPERTS} experts to sort");
                let got = format!("{tokens} tokens and {experts} experts");
                return Err(Error::invalid(OP, "problem", expected, got));
            }
            if first_expert.checked_add(own).is_none_or(|end| own == 0 || end > experts) {
                let expected = format!("to sort by some of the {experts} experts");
                let got = format!("{own} from {first_expert} on");
                return Err(Error::invalid(OP, "problem", expected, got));
            }
        }
        Ok(())
    }

    fn select(limits: &DeviceLimits, problem: &MoeRouterProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &MoeRouterProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &MoeRouterProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Entry, Error> {
        device.entry(OP, choice.variant.entry, choice.variant.stage.smem_bytes(problem.experts as u32))
    }

    fn check(
        at: &Check<'_>,
        problem: &MoeRouterProblem,
        args: &MoeRouterArgs<'_>,
    ) -> Result<MoeRouterDims, Error> {
        let MoeRouterArgs { logits, bias, ids, weights, sorted } = args;
        let MoeRouterProblem { tokens: most, experts, top_k, dtype, .. } = *problem;
        let [logits_stride] = at.elements("logits", *logits, dtype, &[None, Some(experts)])?;
        let len = logits.shape()[0];
        let tokens = at.planned("logits", "tokens", len, most)?;
        if let Some(bias) = bias {
            let [] = at.elements("bias", *bias, DType::F32, &[Some(experts)])?;
        }
        at.contiguous("ids", ids.as_view(), DType::U32, &[len, top_k].map(Some))?;
        at.contiguous("weights", weights.as_view(), DType::F32, &[len, top_k].map(Some))?;
        match (problem.sort, sorted) {
            (Some(own), Some(SortedPairs { offsets, order, positions })) => {
                at.contiguous("offsets", offsets.as_view(), DType::U32, &[Some(own.experts + 1)])?;
                at.contiguous("order", order.as_view(), DType::U32, &[Some(len * top_k)])?;
                at.contiguous("positions", positions.as_view(), DType::U32, &[len, top_k].map(Some))?;
            }
            (None, None) => {}
            (Some(_), None) => return at.refuse("sorted", "tensors, as planned", "none"),
            (None, Some(_)) => return at.refuse("sorted", "none, as planned", "some"),
        }
        Ok(problem.dims(tokens, logits_stride))
    }

    fn cpu(problem: &MoeRouterProblem, dims: &MoeRouterDims, args: &mut MoeRouterArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: MoeRouterDims, args: &MoeRouterArgs<'_>) -> Result<(), Error> {
        let MoeRouterArgs { logits, bias, ids, weights, sorted } = args;
        let launch = |stage: MoeRouterStage, grid: u32, params: &[Param<'_>]| {
            // SAFETY: `check` found every row of the logits, the bias and the outputs inside their views; the grid has
            // a warp for every token and shared memory for its keys, and one block where pairs are sorted.
            unsafe { run.kernels.launch(run.stream, [grid, 1, 1], [32 * stage.warps(), 1, 1], params) }
        };
        let [logits, bias, ids, weights] = [(*logits).into(), (*bias).into(), ids.into(), weights.into()];
        match sorted {
            None => {
                let stage = MoeRouterStage::Route;
                let grid = dims.tokens.div_ceil(stage.warps());
                launch(stage, grid, &[logits, bias, ids, weights, (&dims).into()])
            }
            Some(SortedPairs { offsets, order, positions }) => {
                let [offsets, order, positions] = [offsets.into(), order.into(), positions.into()];
                let params = [logits, bias, ids, weights, offsets, order, positions, (&dims).into()];
                // Also without tokens: there are offsets.
                launch(MoeRouterStage::Sort, 1, &params)
            }
        }
    }

    fn work(problem: &MoeRouterProblem) -> Work {
        let MoeRouterProblem { tokens, experts, top_k, dtype, .. } = *problem;
        let [tokens, experts, top_k] = [tokens, experts, top_k].map(count);
        Work {
            problem: format!("[{tokens}, {experts}] {dtype}, {top_k} of them"),
            bytes: tokens * (experts * count(dtype.bytes()) + top_k * count(8)),
            flops: tokens * experts,
        }
    }

    fn tile(_: &Device, _: &MoeRouterProblem, _: &Choice<Self::Variant>) -> String {
        "a token per warp".into()
    }
}
