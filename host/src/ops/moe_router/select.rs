//! Which kernel a router takes.

use abi::ops::moe_router::{MoeRouterStage, MoeRouterVariant, VARIANTS};

use super::{MoeRouterProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// The kernel for the logits' type, which sorts if that is wanted.
pub fn select(
    _limits: &DeviceLimits,
    problem: &MoeRouterProblem,
) -> Result<Choice<&'static MoeRouterVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let why = "the only one of its type";
    Ok(Choice::new(variant, 32 * variant.stage.warps(), why))
}

fn fits(variant: &MoeRouterVariant, problem: &MoeRouterProblem) -> bool {
    variant.dtype == problem.dtype && variant.stage == stage(problem)
}

/// What is to be done.
fn stage(problem: &MoeRouterProblem) -> MoeRouterStage {
    if problem.sort.is_some() { MoeRouterStage::Sort } else { MoeRouterStage::Route }
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static MoeRouterVariant,
    problem: &MoeRouterProblem,
) -> Result<Choice<&'static MoeRouterVariant>, Error> {
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, 32 * variant.stage.warps()));
    }
    let expected = format!("one for {} ({:?})", problem.dtype, stage(problem));
    Err(Error::invalid(OP, "variant", expected, variant.entry))
}
