//! Which kernels quantise a matrix: those of its type and of the codes.

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
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let expected = format!("{} to {}", variant.dtype, variant.codes.name());
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")))
}

fn fits(variant: &QuantizeWeightVariant, problem: &QuantizeWeightProblem) -> bool {
    (variant.dtype, variant.codes) == (problem.dtype, problem.scheme.codes)
}

/// The kernel for a problem.
pub fn select(
    _limits: &DeviceLimits,
    problem: &QuantizeWeightProblem,
) -> Result<Choice<&'static QuantizeWeightVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    Ok(Choice::new(variant, THREADS, "the only one for type and codes"))
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;
    use crate::weight::Scheme;

    #[test]
    fn choice_by_type_and_codes() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        for (dtype, scheme, entry) in [
            (DType::F32, Scheme::INT8, "quantize_weight_f32_int8__codes__sm61"),
            (DType::BF16, Scheme::INT8, "quantize_weight_bf16_int8__codes__sm61"),
            (DType::BF16, Scheme::NVFP4, "quantize_weight_bf16_e2m1__codes__sm61"),
        ] {
            let problem = QuantizeWeightProblem::new(7, 3, dtype, scheme);
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
