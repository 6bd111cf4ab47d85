//! What adapters add to routed experts: products of a low rank, of each pair of a token and an expert with the matrices
//! that the token's adapter has for that expert.
//!
//! Pairs are sorted twice: by expert, for the experts themselves, and by adapter and expert. In between both sums meet
//! in a row for each pair, in the order of tokens, from which the products behind it gather theirs.

use abi::DType;

use super::low_rank::{Adapted, LowRank, PartAdapters, Which};
use super::projection::ExpertsPlan;
use super::{Moe, Phase, Plans, Step};
use crate::config::MoeConfig;
use host::ops::glu::{Glu, GluArgs};
use host::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use host::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem};
use host::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use host::{Error, Stream, Tensor, TensorView, TensorViewMut};

/// Routed experts that adapters may add to, planned for one phase.
#[derive(Debug)]
pub(super) struct AdaptedExperts {
    plans: Plans<AdaptedPlans>,
    /// `[adapters · experts + 1]`: where the pairs of each begin; `[pairs]` and `[tokens, top_k]`: the pairs sorted so,
    /// and where each is among them.
    offsets: Tensor,
    order: Tensor,
    positions: Tensor,
    /// `[pairs, 1]` f32.
    ones: Tensor,
    /// `[pairs, rank]` and `[pairs, columns]`: both products of a low rank, of the sorted pairs.
    low: Tensor,
    added: Tensor,
    /// `[pairs, 2 · intermediate]`: what is added to gates and ups, and their sums, of each pair.
    spread: Tensor,
    both: Tensor,
    /// `[tokens, hidden]`: what is added to the experts' results.
    sum: Tensor,
}

#[derive(Debug)]
struct AdaptedPlans {
    permute: MoePermute,
    first: Option<LowRankPlans>,
    /// Rows of sorted pairs as rows of pairs.
    put: MoeCombine,
    /// The experts' last products, of rows of pairs.
    down: ExpertsPlan,
    last: Option<LowRankPlans>,
}

/// Both products of a low rank.
#[derive(Debug)]
struct LowRankPlans {
    down: GroupedMatmul,
    up: GroupedMatmul,
}

/// A mixture's pairs in a step.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    /// `[tokens, top_k]`: their experts, and where they are among those sorted by expert.
    pub(super) ids: TensorView<'a>,
    pub(super) positions: TensorView<'a>,
    /// Where each expert's begin, and the pairs sorted so.
    pub(super) offsets: TensorView<'a>,
    pub(super) order: TensorView<'a>,
}

/// What adapters add to the experts of a layer in a step.
#[derive(Clone, Copy)]
pub(super) struct Added<'a> {
    /// Of the step's rows, their adapters.
    kinds: TensorView<'a>,
    first: Option<&'a LowRank>,
    last: Option<&'a LowRank>,
}

impl AdaptedExperts {
    /// Whether adapters add to the experts of some layer.
    pub(super) fn are_adapted(phase: &Phase<'_>) -> bool {
        let rank = |which| phase.adapters.map_or(0, |sizes| sizes.rank(Adapted::Mixture, which));
        rank(Which::ExpertsFirst).max(rank(Which::ExpertsLast)) > 0
    }

    /// None if nothing is ever added.
    pub(super) fn new(phase: &Phase<'_>, config: &MoeConfig, moe: &Moe) -> Result<Option<Self>, Error> {
        let &MoeConfig { num_experts, top_k, expert, .. } = config;
        let Some(sizes) = phase.adapters else { return Ok(None) };
        let [first, last] =
            [Which::ExpertsFirst, Which::ExpertsLast].map(|which| sizes.rank(Adapted::Mixture, which));
        if first.max(last) == 0 {
            return Ok(None);
        }
        let &Phase { stream, dtype, tokens, .. } = phase;
        let (device, hidden_size, inner) =
            (stream.device(), phase.config.hidden_size, expert.intermediate_size);
        let (kinds, groups) = (sizes.len(), sizes.len() * num_experts);
        let plans = phase.plans(|phase| {
            let rows = phase.tokens * top_k;
            let product = |n, k, from| {
                let problem = GroupedMatmulProblem::new(rows, groups, n, k, dtype);
                GroupedMatmul::plan(device, GroupedMatmulProblem { from, ..problem })
            };
            let low_rank = |rank: usize, n, k, fan_out| {
                let plans = || {
                    let down = product(rank, k, GroupedRows::Gathered { fan_out })?;
                    Ok::<_, Error>(LowRankPlans { down, up: product(n, rank, GroupedRows::Sorted)? })
                };
                (rank > 0).then(plans).transpose()
            };
            let of_kinds = MoePermuteProblem::new(phase.tokens, top_k, num_experts);
            let down = GroupedMatmulProblem::new(rows, num_experts, hidden_size, inner, dtype);
            let from = GroupedRows::Gathered { fan_out: 1 };
            Ok(AdaptedPlans {
                permute: MoePermute::plan(device, MoePermuteProblem { kinds: Some(kinds), ..of_kinds })?,
                first: low_rank(first, 2 * inner, hidden_size, top_k)?,
                put: MoeCombine::plan(device, MoeCombineProblem::new(rows, 1, 2 * inner, dtype))?,
                down: ExpertsPlan::new(&phase, &moe.down, GroupedMatmulProblem { from, ..down })?,
                last: low_rank(last, hidden_size, inner, 1)?,
            })
        })?;
        let rows = tokens * top_k;
        let empty = |shape: &[usize], dtype| Tensor::empty(stream, shape, dtype);
        // Rows begin at multiples of 16 bytes.
        let cols = hidden_size.max(2 * inner).next_multiple_of(16 / dtype.bytes());
        Ok(Some(AdaptedExperts {
            plans,
            offsets: empty(&[groups + 1], DType::U32)?,
            order: empty(&[rows], DType::U32)?,
            positions: empty(&[tokens, top_k], DType::U32)?,
            ones: Tensor::from_slice(stream, &[rows, 1], &vec![1.0f32; rows])?,
            // Hopper's kernel loads rows beside those that have an adapter, which nobody writes.
            low: Tensor::zeros(stream, &[rows, first.max(last)], dtype)?,
            added: empty(&[rows, cols], dtype)?,
            spread: empty(&[rows, 2 * inner], dtype)?,
            both: empty(&[rows, 2 * inner], dtype)?,
            sum: phase.rows(&[hidden_size])?,
        }))
    }

    /// What adapters add in a step: none if no row has one, or none adds to the experts of this layer.
    pub(super) fn added<'a>(step: &'a Step<'_>, adapters: Option<&'a PartAdapters>) -> Option<Added<'a>> {
        let (rows, adapters) = (step.adapted?, adapters?);
        let [first, last] = [Which::ExpertsFirst, Which::ExpertsLast].map(|which| adapters.of(which));
        (first.is_some() || last.is_some()).then_some(Added { kinds: rows.ids, first, last })
    }

    /// `act(gate) ⊙ up` of each pair, from its expert's gate and up, which are sorted by expert, and from `x`.
    pub(super) fn first(
        &mut self,
        stream: &Stream,
        added: Added<'_>,
        pairs: Pairs<'_>,
        (x, gate_up, glu): (TensorView<'_>, TensorView<'_>, &Glu),
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let [tokens, top_k] = [pairs.ids.shape()[0], pairs.ids.shape()[1]];
        let (rows, inner) = (tokens * top_k, out.shape()[1]);
        let AdaptedPlans { permute, first, put, .. } = self.plans.holding(tokens)?;
        let order = self.order.view_mut().slice(0, 0..rows)?;
        let positions = self.positions.view_mut().slice(0, 0..tokens)?;
        let args = MoePermuteArgs::new(pairs.ids, self.offsets.view_mut(), order, positions);
        permute.run(stream, MoePermuteArgs { kinds: Some(added.kinds), ..args })?;
        let ones = self.ones.view().slice(0, 0..rows)?;
        let mut spread = self.spread.view_mut().slice(0, 0..rows)?;
        let products = first.as_ref().zip(added.first);
        if let Some((plans, low_rank)) = products {
            let sorted = (self.offsets.view(), self.order.view().slice(0, 0..rows)?);
            let mut sums = self.added.view_mut().slice(0, 0..rows)?.slice(1, 0..2 * inner)?;
            let low = self.low.view_mut().slice(0, 0..rows)?;
            plans.run(stream, low_rank, sorted, (x, low), sums.reborrow())?;
            let places = self.positions.view().slice(0, 0..tokens)?.reshape(&[rows, 1])?;
            put.run(stream, MoeCombineArgs::new(sums.as_view(), ones, places, spread.reborrow()))?;
        }
        let mut both = self.both.view_mut().slice(0, 0..rows)?;
        let args = MoeCombineArgs::new(gate_up, ones, pairs.positions.reshape(&[rows, 1])?, both.reborrow());
        let shared = products.map(|_| spread.as_view());
        put.run(stream, MoeCombineArgs { shared, ..args })?;
        let (gate, up) = (both.as_view().slice(1, 0..inner)?, both.as_view().slice(1, inner..2 * inner)?);
        glu.run(stream, GluArgs { gate, up: Some(up), out })
    }

    /// The experts' results behind [`Self::first`], sorted by expert, into `out`; and of each token, by `combine` and
    /// `weights`, what adapters add to their sum, with the shared expert's result: that alone if they add nothing.
    pub(super) fn last<'a>(
        &'a mut self,
        stream: &Stream,
        added: Added<'_>,
        (pairs, activated): (Pairs<'_>, TensorView<'_>),
        (moe, combine, weights): (&Moe, &MoeCombine, TensorView<'_>),
        (shared, gate): (Option<TensorView<'a>>, Option<TensorView<'a>>),
        out: TensorViewMut<'_>,
    ) -> Result<(Option<TensorView<'a>>, Option<TensorView<'a>>), Error> {
        let [tokens, top_k] = [pairs.ids.shape()[0], pairs.ids.shape()[1]];
        let (rows, hidden_size) = (tokens * top_k, out.shape()[1]);
        let AdaptedPlans { down, last, .. } = self.plans.holding(tokens)?;
        down.run(stream, &moe.down, (activated, pairs.offsets, Some(pairs.order)), out)?;
        let Some((plans, low_rank)) = last.as_ref().zip(added.last) else { return Ok((shared, gate)) };
        let sorted = (self.offsets.view(), self.order.view().slice(0, 0..rows)?);
        let mut sums = self.added.view_mut().slice(0, 0..rows)?.slice(1, 0..hidden_size)?;
        let low = self.low.view_mut().slice(0, 0..rows)?;
        plans.run(stream, low_rank, sorted, (activated, low), sums.reborrow())?;
        let places = self.positions.view().slice(0, 0..tokens)?;
        let sum = self.sum.view_mut().slice(0, 0..tokens)?;
        let args = MoeCombineArgs::new(sums.as_view(), weights, places, sum);
        combine.run(stream, MoeCombineArgs { shared, gate, ..args })?;
        Ok((Some(self.sum.view().slice(0, 0..tokens)?), None))
    }
}

impl LowRankPlans {
    /// Of sorted pairs: of rows of `x` that they name.
    fn run(
        &self,
        stream: &Stream,
        low_rank: &LowRank,
        (offsets, order): (TensorView<'_>, TensorView<'_>),
        (x, low): (TensorView<'_>, TensorViewMut<'_>),
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let rank = low_rank.down.view().shape()[1];
        let mut low = low.slice(1, 0..rank)?;
        let args = GroupedMatmulArgs::new(x, low_rank.down.view(), offsets, low.reborrow());
        self.down.run(stream, GroupedMatmulArgs { order: Some(order), ..args })?;
        self.up.run(stream, GroupedMatmulArgs::new(low.as_view(), low_rank.up.view(), offsets, out))
    }
}
