//! The gated MLP.

use abi::ops::glu::Activation;

use super::{Linear, Phase, Step};
use crate::config::MlpConfig;
use crate::loader::Loader;
use host::Error;
use host::ops::matmul::Matmul;
use host::{Kernel, OptimizationReport};
use host::{Tensor, TensorView, TensorViewMut};

/// Gated MLP: `down(act(gate(x)) ⊙ up(x))`.
#[derive(Debug)]
pub struct Mlp {
    /// gate and up projections, above each other.
    pub gate_up: Linear,
    /// Down projection.
    pub down: Linear,
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
        let (gate, up, down) =
            (format!("{prefix}.gate_proj"), format!("{prefix}.up_proj"), format!("{prefix}.down_proj"));
        let rows = [(gate.as_str(), intermediate_size), (up.as_str(), intermediate_size)];
        Ok(Mlp {
            gate_up: Linear::new(loader, &rows, hidden_size, false)?,
            down: Linear::new(loader, &[(down.as_str(), hidden_size)], intermediate_size, false)?,
            activation,
        })
    }
}

#[derive(Debug)]
pub(crate) struct MlpBlock {
    /// With the activation.
    gate_up_plan: Matmul,
    down_plan: Matmul,
    /// `[tokens, intermediate]`
    activated: Tensor,
}

impl MlpBlock {
    pub(super) fn new(phase: &Phase<'_>, config: &MlpConfig) -> Result<Self, Error> {
        let &MlpConfig { intermediate_size, activation } = config;
        let hidden_size = phase.config.hidden_size;
        Ok(MlpBlock {
            gate_up_plan: phase.gated(intermediate_size, hidden_size, activation)?,
            down_plan: phase.matmul(hidden_size, intermediate_size, false)?,
            activated: phase.rows(&[intermediate_size])?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        vec![self.gate_up_plan.optimization_report(), self.down_plan.optimization_report()]
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        weights: &Mlp,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let mut activated = self.activated.view_mut().slice(0, 0..x.shape()[0])?;
        weights.gate_up.run(step.stream, &self.gate_up_plan, x, activated.reborrow())?;
        weights.down.run(step.stream, &self.down_plan, activated.as_view(), out)
    }
}
