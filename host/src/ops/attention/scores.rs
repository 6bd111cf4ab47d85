//! What changes scores besides the scale and the mask by places.

use abi::DType;
use abi::ops::attention::{AttentionTile, ScoreDims};

use super::{AttentionProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::launch::Param;
use crate::tensor::TensorView;

/// What changes scores besides the scale and the mask by places.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// A soft cap, from 1e-30 to 1e30: a score s becomes `cap · tanh(s / cap)`.
    pub soft_cap: Option<f32>,
}

impl Scores {
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.soft_cap {
            Some(cap) if !(1e-30..=1e30).contains(&cap) => {
                Err(Error::invalid(OP, "problem", "a soft cap from 1e-30 to 1e30", cap.to_string()))
            }
            _ => Ok(()),
        }
    }
}

/// What changes the scores of a run.
#[derive(Debug, Default)]
pub struct ScoreTensors<'a> {
    /// `[heads_q]` f32, if there: a score of each head's that has no key and no value. It joins the sum that weights are divided by.
    pub sinks: Option<TensorView<'a>>,
}

impl ScoreTensors<'_> {
    pub(super) fn check(&self, problem: &AttentionProblem, device: &Device) -> Result<(), Error> {
        if let Some(sinks) = &self.sinks {
            sinks.expect(OP, "sinks", device, DType::F32, &[Some(problem.heads_q)])?;
            sinks.expect_inner_contiguous(OP, "sinks")?;
        }
        Ok(())
    }

    pub(super) fn sinks_param(&self) -> Param<'_> {
        self.sinks.map_or(Param::Address(0), Param::from)
    }
}

/// Whether the kernels of a tile can do the scores.
pub(super) fn runs(tile: AttentionTile, problem: &AttentionProblem) -> bool {
    let ScoreDims { cap_in, cap_out } = dims(problem, Some(tile));
    problem.scores.soft_cap.is_none() || (cap_in.is_normal() && cap_out.is_normal())
}

/// For the kernels of a tile; none on the CPU.
pub(super) fn dims(problem: &AttentionProblem, tile: Option<AttentionTile>) -> ScoreDims {
    let Some(cap) = problem.scores.soft_cap else {
        return ScoreDims::default();
    };
    let (cap_in, cap_out) = match tile {
        Some(AttentionTile::Wgmma { .. } | AttentionTile::PrefillMma { .. }) => {
            (problem.scale() / cap, cap / problem.scale())
        }
        Some(_) if problem.dtype != DType::F32 => {
            let cap = cap * std::f32::consts::LOG2_E;
            (1.0 / cap, cap)
        }
        _ => (1.0 / cap, cap),
    };
    ScoreDims { cap_in, cap_out }
}
