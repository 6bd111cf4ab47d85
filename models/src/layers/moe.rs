//! The mixture of experts.

use std::ops::Range;

use abi::DType;

use super::expert_low_rank::{AdaptedExperts, Pairs};
use super::low_rank::{Adapted, PartAdapters};
use super::mlp::MlpBlock;
use super::projection::ExpertsPlan;
use super::{InPlace, Linear, Mlp, Phase, Plans, ProjectionKind, ProjectionWeight, Step, planned};
use crate::config::MoeConfig;
use crate::loader::Loader;
use crate::part::Cut;
use host::Error;
use host::ops::Store;
use host::ops::fused_moe::{FusedMoe, FusedMoeArgs, FusedMoeProblem};
use host::ops::glu::{Glu, GluArgs, GluProblem};
use host::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulProblem, GroupedRows};
use host::ops::matmul::{Matmul, MatmulArgs, MatmulProblem};
use host::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem};
use host::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use host::ops::moe_router::{
    MoeRouter, MoeRouterArgs, MoeRouterProblem, OwnExperts, SORT_TOKENS, SortedPairs,
};
use host::{Constant, Kernel, OptimizationReport, Stream, Tensor, TensorView, TensorViewMut};

/// Mixture of experts: `Σ_k w_k · mlp_{e_k}(x)`, and a shared expert that every token has.
#[derive(Debug)]
pub struct Moe {
    /// A row for each expert; where the shared expert has a gate, that gate's row below them.
    pub router: Linear,
    /// `[experts]` f32: added to the scores for the choice only.
    pub correction_bias: Option<Constant>,
    /// Those of the experts that are here: all but at a rank of a group that shares them by experts.
    pub experts: Range<usize>,
    /// `[experts, 2 · intermediate, hidden]`: gate rows, then up rows, of each expert.
    pub gate_up: ProjectionWeight,
    /// `[experts, hidden, intermediate]`.
    pub down: ProjectionWeight,
    /// What every token has besides its experts.
    pub shared: Option<Mlp>,
}

impl Moe {
    pub(super) fn new(
        config: &MoeConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let &MoeConfig { num_experts, expert, correction_bias, shared, .. } = config;
        let name = |part: &str| format!("{prefix}.{part}");
        let (router, shared_gate) = (name("gate"), name("shared_expert_gate"));
        let mut rows = vec![(router.as_str(), num_experts.into())];
        if config.has_shared_gate() {
            rows.push((shared_gate.as_str(), 1.into()));
        }
        let of_expert = |expert: usize, part: &str| format!("{prefix}.experts.{expert}.{part}.weight");
        let own = Cut::range(num_experts, loader.part().experts(num_experts));
        let inner = loader.part().expert_columns(num_experts, &expert);
        let inner = Cut::range(expert.intermediate_size, inner);
        let gate_up = loader.of_experts(
            &name("experts.gate_up_proj"),
            &own,
            [&inner.repeated(2), &hidden_size.into()],
            |expert| vec![of_expert(expert, "gate_proj"), of_expert(expert, "up_proj")],
        )?;
        let down =
            loader.of_experts(&name("experts.down_proj"), &own, [&hidden_size.into(), &inner], |expert| {
                vec![of_expert(expert, "down_proj")]
            })?;
        let bias = correction_bias.then(|| {
            loader.vectors_as(DType::F32, &[(name("gate.e_score_correction_bias"), num_experts.into())])
        });
        let shared = shared.map(|shared| Mlp::new(&shared.mlp, hidden_size, loader, &name(shared.name)));
        Ok(Moe {
            router: Linear::new(loader, &rows, &hidden_size.into(), false)?,
            correction_bias: bias.transpose()?,
            experts: own.ranges.first().cloned().unwrap_or_default(),
            gate_up,
            down,
            shared: shared.transpose()?,
        })
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        let mut kinds = vec![self.gate_up.kind(), self.down.kind()];
        kinds.extend(self.shared.iter().flat_map(Mlp::kinds));
        kinds
    }
}

#[derive(Debug)]
pub(crate) struct MoeBlock {
    config: MoeConfig,
    plans: Plans<MoePlans>,
    shared: Option<MlpBlock>,
    /// `[tokens, experts]` f32, and a column more for the shared expert's gate.
    logits: Tensor,
    /// `[tokens, top_k]`: experts, weights, and rows of the sorted pairs.
    ids: Tensor,
    weights: Tensor,
    positions: Tensor,
    /// `[experts + 1]` and `[pairs]`: where each expert's pairs begin, and the sorted pairs.
    offsets: Tensor,
    order: Tensor,
    /// A row for each sorted pair: gate and up; their product; the experts' results.
    gate_up: Tensor,
    activated: Tensor,
    projected: Tensor,
    /// `[tokens, hidden]`: the shared expert's result.
    shared_out: Option<Tensor>,
    /// Of routed experts, where adapters add to them.
    adapted: Option<AdaptedExperts>,
}

#[derive(Debug)]
struct MoePlans {
    logits: Matmul,
    router: MoeRouter,
    /// None for few tokens, whose pairs the router sorts.
    permute: Option<MoePermute>,
    /// Of the experts; none at a rank that has none of their columns.
    experts: Option<ExpertPlans>,
    combine: MoeCombine,
    /// Of few tokens: all of these but the router's product in two launches, if that is possible.
    few: Option<FusedMoe>,
    /// On the residual itself, if that is possible: in fewer launches, or else with a sum that is added to it.
    in_place: Option<MoeInPlace>,
    added: Option<MoeCombine>,
}

/// Most tokens whose pairs read their experts' weights each for itself, if there are twice as many experts as pairs, so
/// that few have the same.
const FEW_TOKENS: usize = 4;
/// The same of packed weights.
const FEW_TOKENS_PACKED: usize = 2;

/// The mixture of a single token, added to the residual.
#[derive(Debug)]
struct MoeInPlace {
    /// Of normed rows.
    few: FusedMoe,
    /// The router's product and the experts, of the residual behind its norm; where there are kernels for both.
    normed: Option<(Matmul, FusedMoe)>,
}

#[derive(Debug)]
struct ExpertPlans {
    gate_up: ExpertsPlan,
    /// None where the product is gated itself.
    glu: Option<Glu>,
    down: ExpertsPlan,
}

impl MoePlans {
    fn new(phase: &Phase<'_>, config: &MoeConfig, moe: &Moe) -> Result<Self, Error> {
        let &MoeConfig { num_experts: experts, top_k, expert, score, groups, weights, scale, .. } = config;
        let &Phase { stream, dtype, tokens, .. } = phase;
        let (device, hidden_size) = (stream.device(), phase.config.hidden_size);
        let (rows, inner) = (tokens * top_k, expert.intermediate_size);
        // In f32: rounded logits would let near experts change places.
        let logits = MatmulProblem {
            out_dtype: DType::F32,
            ..MatmulProblem::new(tokens, config.router_rows(), hidden_size, dtype)
        };
        let weight_dtype = if config.round_weights { dtype } else { DType::F32 };
        let choice = MoeRouterProblem {
            tokens,
            experts,
            top_k,
            dtype: DType::F32,
            score,
            groups,
            weights,
            scale,
            weight_dtype,
            sort: None,
        };
        let own = OwnExperts { first_expert: moe.experts.start, experts: moe.experts.len() };
        let sorting = MoeRouterProblem { sort: Some(own), ..choice };
        let sorts = tokens <= SORT_TOKENS as usize && MoeRouter::supports(device, &sorting).is_ok();
        let product = |weights: &ProjectionWeight, n, k, from, gate| {
            let problem = GroupedMatmulProblem::new(rows, moe.experts.len(), n, k, dtype);
            ExpertsPlan::new(phase, weights, GroupedMatmulProblem { from, gate, ..problem })
        };
        let glu = GluProblem { rows, cols: inner, dtype, activation: expert.activation };
        let combine = MoeCombineProblem::new(tokens, top_k, hidden_size, dtype);
        let from = GroupedRows::Gathered { fan_out: top_k };
        let OwnExperts { first_expert, experts: own } = own;
        let own = MoePermuteProblem { first_expert, ..MoePermuteProblem::new(tokens, top_k, own) };
        let plans = || -> Result<_, Error> {
            let gate = Some(expert.activation);
            let gated = GroupedMatmulProblem::new(rows, moe.experts.len(), inner, hidden_size, dtype);
            let gated = GroupedMatmulProblem { from, gate, ..gated };
            let is_plain = moe.gate_up.kind().is_empty() && !AdaptedExperts::are_adapted(phase);
            let is_gated = is_plain && GroupedMatmul::supports(device, &gated).is_ok();
            let (n, gate) = if is_gated { (inner, gate) } else { (2 * inner, None) };
            Ok(ExpertPlans {
                gate_up: product(&moe.gate_up, n, hidden_size, from, gate)?,
                glu: (!is_gated).then(|| Glu::plan(device, glu)).transpose()?,
                down: product(&moe.down, hidden_size, inner, GroupedRows::Sorted, None)?,
            })
        };
        let in_place = MoeInPlace::new(phase, config, moe, (logits, choice))?;
        let is_packed = moe.gate_up.layout().or(moe.down.layout()).is_some();
        let most = if is_packed { FEW_TOKENS_PACKED } else { FEW_TOKENS };
        let is_few = (2..=most).contains(&tokens)
            && 2 * rows <= experts
            && phase.rank.is_none()
            && phase.adapters.is_none()
            && !phase.is_invariant()
            && device.limits().is_some();
        let few = is_few.then(|| fused(phase, (config, moe), choice, Store::Replace)).flatten();
        let few = few.map(|experts| FusedMoe::plan(device, experts)).transpose()?;
        let adds = phase.may_work_in_place() && in_place.is_none() && few.is_none();
        let added = MoeCombineProblem { store: Store::Add, ..combine };
        Ok(MoePlans {
            few,
            in_place,
            added: adds.then(|| MoeCombine::plan(device, added)).transpose()?,
            logits: Matmul::plan(device, logits)?,
            router: MoeRouter::plan(device, if sorts { sorting } else { choice })?,
            permute: (!sorts).then(|| MoePermute::plan(device, own)).transpose()?,
            experts: (inner > 0).then(plans).transpose()?,
            combine: MoeCombine::plan(device, combine)?,
        })
    }

    fn reports(&self) -> Vec<OptimizationReport> {
        let few = self.in_place.as_ref().map(|in_place| &in_place.few).or(self.few.as_ref());
        if let Some(experts) = few {
            let normed = self.in_place.as_ref().and_then(|in_place| in_place.normed.as_ref());
            let (logits, experts) =
                normed.map_or((&self.logits, experts), |(logits, experts)| (logits, experts));
            return vec![logits.optimization_report(), experts.optimization_report()];
        }
        let mut reports = vec![self.logits.optimization_report(), self.router.optimization_report()];
        reports.extend(self.permute.iter().map(Kernel::optimization_report));
        if let Some(ExpertPlans { gate_up, glu, down }) = &self.experts {
            reports.extend(gate_up.reports());
            reports.extend(glu.iter().map(Kernel::optimization_report));
            reports.extend(down.reports());
        }
        reports.push(self.combine.optimization_report());
        reports
    }
}

/// The experts of tokens that are planned as one operator with the router, which sorts nothing, if they can be.
fn fused(
    phase: &Phase<'_>,
    (config, moe): (&MoeConfig, &Moe),
    router: MoeRouterProblem,
    store: Store,
) -> Option<FusedMoeProblem> {
    let &MoeConfig { num_experts, top_k, expert, shared, .. } = config;
    let of_shared = |of: fn(&Mlp) -> &ProjectionWeight| moe.shared.as_ref().map(of);
    let weights = [
        Some(&moe.gate_up),
        Some(&moe.down),
        of_shared(|mlp| &mlp.gate_up.weight),
        of_shared(|mlp| &mlp.down.weight),
    ];
    // One weight each, which no rows of int8 multiply.
    let is_whole = weights.iter().flatten().all(|weight| weight.is_operand());
    // The shared expert is one of the others' size, or there is none.
    let is_alike = shared.is_none_or(|shared| shared.mlp == expert);
    if !is_whole || !is_alike {
        return None;
    }
    let [gate_up, down, shared_gate_up, shared_down] =
        weights.map(|weight| weight.and_then(ProjectionWeight::layout));
    let sizes = [phase.config.hidden_size, expert.intermediate_size];
    let problem = FusedMoeProblem {
        activation: expert.activation,
        shared: shared.is_some(),
        router: Some(router),
        store,
        gate_up,
        down,
        shared_gate_up,
        shared_down,
        ..FusedMoeProblem::new(phase.tokens, [top_k, num_experts], sizes, phase.dtype)
    };
    FusedMoe::supports(phase.stream.device(), &problem).is_ok().then_some(problem)
}

impl MoeInPlace {
    /// With the problems of the router's product and of the router, which sorts nothing.
    fn new(
        phase: &Phase<'_>,
        config: &MoeConfig,
        moe: &Moe,
        (logits, choice): (MatmulProblem, MoeRouterProblem),
    ) -> Result<Option<Self>, Error> {
        let device = phase.stream.device();
        if phase.tokens > 1 || !phase.may_work_in_place() {
            return Ok(None);
        }
        let Some(experts) = fused(phase, (config, moe), choice, Store::Add) else { return Ok(None) };
        let few = FusedMoe::plan(device, experts)?;
        let norm = Some(phase.row_norm());
        let normed = MatmulProblem { norm, ..logits };
        let normed = Matmul::supports(device, &normed).is_ok().then(|| {
            let experts = FusedMoe::plan(device, FusedMoeProblem { norm, ..experts })?;
            Ok::<_, Error>((Matmul::plan(device, normed)?, experts))
        });
        Ok(Some(MoeInPlace { few, normed: normed.transpose()? }))
    }
}

/// A mixture of few tokens: the router's product and the experts. x is none where out holds the rows, and
/// the gain that of the norm that they have before.
fn run_few(
    (stream, config, weights): (&Stream, &MoeConfig, &Moe),
    (product, experts): (&Matmul, &FusedMoe),
    logits: &mut Tensor,
    (x, gain): (Option<TensorView<'_>>, Option<TensorView<'_>>),
    out: TensorViewMut<'_>,
) -> Result<(), Error> {
    let (tokens, num_experts) = (0..out.shape()[0], config.num_experts);
    let mut logits = logits.view_mut().slice(0, tokens)?;
    let rows = x.unwrap_or(out.as_view());
    let args = MatmulArgs { gain, ..MatmulArgs::new(rows, weights.router.weight.view(), logits.reborrow()) };
    product.run(stream, args)?;
    let shared = weights.shared.as_ref();
    let has_gate = config.has_shared_gate() && shared.is_some();
    let args = FusedMoeArgs {
        x,
        gain,
        shared_gate_up: shared.map(|mlp| mlp.gate_up.weight.operand()),
        shared_down: shared.map(|mlp| mlp.down.weight.operand()),
        gate: has_gate.then(|| logits.as_view().slice(1, num_experts..num_experts + 1)).transpose()?,
        bias: weights.correction_bias.as_ref().map(Constant::view),
        ..FusedMoeArgs::routed(
            logits.as_view().slice(1, 0..num_experts)?,
            [weights.gate_up.operand(), weights.down.operand()],
            out,
        )
    };
    experts.run(stream, args)
}

impl MoeBlock {
    pub(super) fn new(phase: &Phase<'_>, config: &MoeConfig, moe: &Moe) -> Result<Self, Error> {
        let &MoeConfig { num_experts, top_k, expert, .. } = config;
        let &Phase { stream, dtype, tokens, .. } = phase;
        let (hidden_size, rows, inner) = (phase.config.hidden_size, tokens * top_k, expert.intermediate_size);
        let shared = config.shared.filter(|shared| shared.mlp.intermediate_size > 0);
        let shared = shared.zip(moe.shared.as_ref());
        let shared =
            shared.map(|(shared, weights)| MlpBlock::new(phase, Adapted::Mixture, &shared.mlp, weights));
        let empty = |shape: &[usize], dtype| Tensor::empty(stream, shape, dtype);
        // Zeros stay where there is nothing of the experts, and in rows of pairs whose expert is elsewhere, which the
        // gate reads.
        let is_whole = moe.experts.len() == num_experts;
        let of_pairs = |cols, is_written| match is_written {
            true => Tensor::empty(stream, &[rows, cols], dtype),
            false => Tensor::zeros(stream, &[rows, cols], dtype),
        };
        Ok(MoeBlock {
            config: *config,
            plans: phase.plans(|phase| MoePlans::new(&phase, config, moe))?,
            shared_out: shared.is_some().then(|| phase.rows(&[hidden_size])).transpose()?,
            shared: shared.transpose()?,
            logits: empty(&[tokens, config.router_rows()], DType::F32)?,
            ids: empty(&[tokens, top_k], DType::U32)?,
            weights: empty(&[tokens, top_k], DType::F32)?,
            positions: empty(&[tokens, top_k], DType::U32)?,
            offsets: empty(&[moe.experts.len() + 1], DType::U32)?,
            order: empty(&[rows], DType::U32)?,
            gate_up: of_pairs(2 * inner, is_whole)?,
            activated: of_pairs(inner, true)?,
            projected: of_pairs(hidden_size, inner > 0)?,
            adapted: AdaptedExperts::new(phase, config, moe)?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports: Vec<_> = self.plans.iter().flat_map(MoePlans::reports).collect();
        reports.extend(self.shared.iter().flat_map(MlpBlock::reports));
        reports
    }

    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        let normed = |plans: &MoePlans| plans.in_place.as_ref().is_some_and(|plans| plans.normed.is_some());
        self.plans.holding(tokens).is_ok_and(normed)
    }

    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        self.plans.holding(tokens).is_ok_and(|plans| plans.in_place.is_some() || plans.added.is_some())
    }

    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &Moe,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        let plans = self.plans.holding(step.tokens)?;
        let Some(MoeInPlace { few, normed }) = &plans.in_place else {
            let normed = *planned(rows.normed.as_ref())?;
            return self.add_up(step, (weights, None), normed, (rows.residual, Store::Add));
        };
        let (_, gain) = rows.input();
        let (product, experts) = match gain {
            Some(_) => planned(normed.as_ref()).map(|(product, experts)| (product, experts))?,
            None => (&plans.logits, few),
        };
        run_few(
            (step.stream, &self.config, weights),
            (product, experts),
            &mut self.logits,
            (rows.normed, gain),
            rows.residual,
        )
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&Moe, Option<&PartAdapters>),
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        self.add_up(step, (weights, adapters), x, (out, Store::Replace))
    }

    fn add_up(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&Moe, Option<&PartAdapters>),
        x: TensorView<'_>,
        (out, store): (TensorViewMut<'_>, Store),
    ) -> Result<(), Error> {
        let MoeConfig { num_experts, top_k, expert, .. } = self.config;
        let (stream, tokens) = (step.stream, x.shape()[0]);
        let plans = self.plans.holding(tokens)?;
        if let (Some(experts), Store::Replace) = (&plans.few, store) {
            return run_few(
                (stream, &self.config, weights),
                (&plans.logits, experts),
                &mut self.logits,
                (Some(x), None),
                out,
            );
        }
        let combine = match store {
            Store::Replace => &plans.combine,
            Store::Add => planned(plans.added.as_ref())?,
        };
        let (rows, pairs) = (0..tokens, 0..tokens * top_k);
        let inner = expert.intermediate_size;

        let mut logits = self.logits.view_mut().slice(0, rows.clone())?;
        let mut ids = self.ids.view_mut().slice(0, rows.clone())?;
        let mut pair_weights = self.weights.view_mut().slice(0, rows.clone())?;
        weights.router.run(stream, &plans.logits, x, logits.reborrow())?;
        let mut order = self.order.view_mut().slice(0, pairs.clone())?;
        let mut positions = self.positions.view_mut().slice(0, rows.clone())?;
        let sorted = plans.permute.is_none().then(|| SortedPairs {
            offsets: self.offsets.view_mut(),
            order: order.reborrow(),
            positions: positions.reborrow(),
        });
        let args = MoeRouterArgs {
            logits: logits.as_view().slice(1, 0..num_experts)?,
            bias: weights.correction_bias.as_ref().map(Constant::view),
            ids: ids.reborrow(),
            weights: pair_weights.reborrow(),
            sorted,
        };
        plans.router.run(stream, args)?;
        if let Some(permute) = &plans.permute {
            let offsets = self.offsets.view_mut();
            let args = MoePermuteArgs::new(ids.as_view(), offsets, order.reborrow(), positions.reborrow());
            permute.run(stream, args)?;
        }

        let pairs_of = Pairs {
            ids: ids.as_view(),
            positions: positions.as_view(),
            offsets: self.offsets.view(),
            order: order.as_view(),
        };
        let adapted = self.adapted.as_mut().zip(AdaptedExperts::added(step, adapters));
        let mut gate_up = self.gate_up.view_mut().slice(0, pairs.clone())?;
        let mut activated = self.activated.view_mut().slice(0, pairs.clone())?;
        let mut projected = self.projected.view_mut().slice(0, pairs)?;
        if let Some(experts) = &plans.experts {
            let sorted = (x, pairs_of.offsets, Some(pairs_of.order));
            let to = if experts.glu.is_some() { &mut gate_up } else { &mut activated };
            experts.gate_up.run(stream, &weights.gate_up, sorted, to.reborrow())?;
        }

        let mut shared_out = self.shared_out.as_mut().map(Tensor::view_mut);
        if let (Some(block), Some(mlp), Some(shared_out)) =
            (&mut self.shared, &weights.shared, &mut shared_out)
        {
            block.run(step, (mlp, adapters), x, shared_out.reborrow().slice(0, rows.clone())?)?;
        }
        let has_gate = self.config.has_shared_gate() && shared_out.is_some();
        let gate = has_gate.then(|| logits.as_view().slice(1, num_experts..num_experts + 1)).transpose()?;
        let shared = shared_out.as_ref().map(|shared| shared.as_view().slice(0, rows)).transpose()?;
        let (shared, gate) = match (&plans.experts, adapted) {
            (None, _) => (shared, gate),
            (Some(ExpertPlans { glu: Some(glu), .. }), Some((block, added))) => {
                let from = (x, gate_up.as_view(), glu);
                block.first(stream, added, pairs_of, from, activated.reborrow())?;
                let by = (weights, combine, pair_weights.as_view());
                let from = (pairs_of, activated.as_view());
                block.last(stream, added, from, by, (shared, gate), projected.reborrow())?
            }
            (Some(experts), _) => {
                if let Some(glu) = &experts.glu {
                    let gate = gate_up.as_view().slice(1, 0..inner)?;
                    let up = gate_up.as_view().slice(1, inner..2 * inner)?;
                    glu.run(stream, GluArgs { gate, up: Some(up), out: activated.reborrow() })?;
                }
                let sorted = (activated.as_view(), pairs_of.offsets, None);
                experts.down.run(stream, &weights.down, sorted, projected.reborrow())?;
                (shared, gate)
            }
        };
        let args = MoeCombineArgs {
            y: projected.as_view(),
            weights: pair_weights.as_view(),
            positions: positions.as_view(),
            shared,
            gate,
            out,
        };
        combine.run(stream, args)
    }
}
