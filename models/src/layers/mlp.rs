//! The gated MLP.

use abi::ops::glu::Activation;

use super::low_rank::{Adapted, AdaptedGate, LowRankBlock, PartAdapters, Which, run_adapted};
use super::{InPlace, Phase, Plans, Projection, ProjectionKind, ProjectionPlan, Step};
use crate::config::MlpConfig;
use crate::loader::Loader;
use crate::part::Cut;
use host::Error;
use host::OptimizationReport;
use host::ops::matmul::{Act, Residual};
use host::{Tensor, TensorView, TensorViewMut};

/// Gated MLP: `down(act(gate(x)) ⊙ up(x))`.
#[derive(Debug)]
pub struct Mlp {
    /// gate and up projections, above each other.
    pub gate_up: Projection,
    /// Down projection.
    pub down: Projection,
    /// The gate's activation.
    pub activation: Activation,
}

impl Mlp {
    pub(super) fn new(
        config: &MlpConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let &MlpConfig { intermediate_size, activation } = config;
        let inner = Cut::range(intermediate_size, loader.part().columns(config));
        let (gate, up, down) =
            (format!("{prefix}.gate_proj"), format!("{prefix}.up_proj"), format!("{prefix}.down_proj"));
        Ok(Mlp {
            gate_up: Projection::gate_up(loader, [&gate, &up], &inner, &hidden_size.into())?,
            down: Projection::new(loader, &[(down.as_str(), hidden_size.into())], &inner, false)?,
            activation,
        })
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        vec![self.gate_up.kind(), self.down.kind()]
    }
}

#[derive(Debug)]
pub(crate) struct MlpBlock {
    plans: Plans<MlpPlans>,
    /// `[tokens, intermediate]`
    activated: Tensor,
    /// Of gate and up, and of down, where adapters add to them.
    adapted_gate: Option<AdaptedGate>,
    low_rank: Option<LowRankBlock>,
}

#[derive(Debug)]
struct MlpPlans {
    /// With the activation.
    gate_up: ProjectionPlan,
    down: ProjectionPlan,
    /// The same on the residual itself, if that is possible.
    in_place: Option<[ProjectionPlan; 2]>,
}

impl MlpBlock {
    /// Of this part of a layer.
    pub(super) fn new(
        phase: &Phase<'_>,
        part: Adapted,
        config: &MlpConfig,
        weights: &Mlp,
    ) -> Result<Self, Error> {
        let &MlpConfig { intermediate_size: inner, activation } = config;
        let hidden_size = phase.config.hidden_size;
        let plans = phase.plans(|phase| {
            let act = Act::Gated(activation);
            let first = (&weights.gate_up, [inner, hidden_size], act);
            let first = ProjectionPlan::in_place(&phase, first, Some(phase.row_norm()))?;
            let last = (&weights.down, [hidden_size, inner], Act::None);
            let last = ProjectionPlan::in_place(&phase, last, None)?;
            Ok(MlpPlans {
                gate_up: ProjectionPlan::gated(&phase, &weights.gate_up, inner, hidden_size, activation)?,
                down: ProjectionPlan::new(&phase, &weights.down, hidden_size, inner)?,
                in_place: first.zip(last).map(|(first, last)| [first, last]),
            })
        })?;
        let (adapted_gate, low_rank) =
            AdaptedGate::of_mlp(phase, part, (&weights.gate_up, &weights.down), (inner, activation))?;
        Ok(MlpBlock { plans, adapted_gate, low_rank, activated: phase.rows(&[inner])? })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let own = |plans: &MlpPlans| match &plans.in_place {
            Some([gate_up, down]) => gate_up.reports().chain(down.reports()).collect::<Vec<_>>(),
            None => plans.gate_up.reports().chain(plans.down.reports()).collect(),
        };
        self.plans.iter().flat_map(own).collect()
    }

    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        self.plans.holding(tokens).is_ok_and(|plans| plans.in_place.is_some())
    }

    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &Mlp,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        let InPlace { residual, gain, .. } = rows;
        let Some([gate_up, down]) = &self.plans.holding(step.tokens)?.in_place else {
            return Err(Error::invalid(
                "Session",
                "layer",
                "plans for so few tokens",
                step.tokens.to_string(),
            ));
        };
        let mut activated = self.activated.view_mut().slice(0, 0..step.tokens)?;
        let x = (residual.as_view(), Some(gain));
        gate_up.run_fused(step.stream, &weights.gate_up, x, (activated.reborrow(), None))?;
        let out = (residual, Some(Residual::InPlace));
        down.run_fused(step.stream, &weights.down, (activated.as_view(), None), out)
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&Mlp, Option<&PartAdapters>),
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let plans = self.plans.holding(x.shape()[0])?;
        let mut activated = self.activated.view_mut().slice(0, 0..x.shape()[0])?;
        let is_done = match &mut self.adapted_gate {
            Some(gate) => gate.run(step, (&weights.gate_up, adapters), x, activated.reborrow())?,
            None => false,
        };
        if !is_done {
            plans.gate_up.run(step.stream, &weights.gate_up, x, activated.reborrow())?;
        }
        let (down, adapters) = ((&plans.down, &mut self.low_rank), (adapters, Which::Last));
        run_adapted(step, down, &weights.down, adapters, activated.as_view(), out)
    }
}
