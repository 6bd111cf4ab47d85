//! Which kernel a router takes.

use abi::ops::moe_router::{MoeRouterVariant, VARIANTS};

use super::{MoeRouterProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// The kernel for the logits' type.
pub fn select(
    _limits: &DeviceLimits,
    problem: &MoeRouterProblem,
) -> Result<&'static MoeRouterVariant, Error> {
    let fitting = VARIANTS.iter().find(|variant| check_fits(variant, problem).is_ok());
    fitting.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()))
}

/// An error if the kernel cannot do the problem.
pub(super) fn check_fits(variant: &MoeRouterVariant, problem: &MoeRouterProblem) -> Result<(), Error> {
    if variant.dtype == problem.dtype {
        Ok(())
    } else {
        Err(Error::invalid(OP, "variant", format!("one for {}", problem.dtype), variant.entry))
    }
}
