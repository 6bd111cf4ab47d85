//! Which kernels quantise a matrix: those of its type.

use abi::ops::quantize_weight::{QuantizeWeightVariant, THREADS, VARIANTS};

use super::{OP, QuantizeWeightProblem};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static QuantizeWeightVariant,
    problem: &QuantizeWeightProblem,
) -> Result<Choice<&'static QuantizeWeightVariant>, Error> {
    if variant.dtype == problem.dtype {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", variant.dtype.to_string(), format!("{problem:?}")))
}

/// The kernel for a problem.
pub fn select(
    _limits: &DeviceLimits,
    problem: &QuantizeWeightProblem,
) -> Result<Choice<&'static QuantizeWeightVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| variant.dtype == problem.dtype)?;
    Ok(Choice::new(variant, THREADS, "the only one for the type"))
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;
    use crate::weight::Scheme;

    #[test]
    fn choice_by_type() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        for (dtype, entry) in [
            (DType::F32, "quantize_weight_f32__codes__sm61"),
            (DType::BF16, "quantize_weight_bf16__codes__sm61"),
        ] {
            let problem = QuantizeWeightProblem::new(7, 3, dtype, Scheme::INT8);
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
