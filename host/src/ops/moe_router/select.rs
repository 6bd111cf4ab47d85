//! Which kernel a router takes.

use abi::ops::moe_router::{MoeRouterVariant, THREADS, VARIANTS};

use super::{MoeRouterProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// The kernel for the logits' type.
pub fn select(
    _limits: &DeviceLimits,
    problem: &MoeRouterProblem,
) -> Result<Choice<&'static MoeRouterVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let why = "the only one of its type";
    Ok(Choice::new(variant, THREADS, why))
}

fn fits(variant: &MoeRouterVariant, problem: &MoeRouterProblem) -> bool {
    variant.dtype == problem.dtype
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static MoeRouterVariant,
    problem: &MoeRouterProblem,
) -> Result<Choice<&'static MoeRouterVariant>, Error> {
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("one for {}", problem.dtype), variant.entry))
}
