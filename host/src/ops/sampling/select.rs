//! Which kernel sampling takes.

use abi::ops::sampling::{SamplingAccess, SamplingVariant, THREADS, VARIANTS};

use super::{OP, SamplingProblem};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{self, Choice};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static SamplingVariant,
    problem: &SamplingProblem,
) -> Result<Choice<&'static SamplingVariant>, Error> {
    if !fits(variant, problem) {
        let SamplingVariant { dtype, access, .. } = variant;
        let expected = format!("a problem of {dtype} that {access:?} access can read");
        return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
    }
    Ok(Choice::asked_for(variant, THREADS))
}

/// The kernel that any alignment will do for.
pub(super) fn by_element(problem: &SamplingProblem) -> Result<&'static SamplingVariant, Error> {
    first(problem, |variant| variant.access == SamplingAccess::Scalar)
}

fn fits(variant: &SamplingVariant, problem: &SamplingProblem) -> bool {
    let dtype = problem.chosen_dtype();
    let is_whole = (problem.vocab * dtype.bytes()).is_multiple_of(16);
    variant.dtype == dtype && (variant.access == SamplingAccess::Scalar || is_whole)
}

/// The first kernel of the table that fits and that `wanted` takes.
fn first(
    problem: &SamplingProblem,
    wanted: impl Fn(&SamplingVariant) -> bool,
) -> Result<&'static SamplingVariant, Error> {
    plan::first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem) && wanted(variant))
}

/// Pieces of 16 bytes if the row is whole ones, else elements.
pub fn select(
    _limits: &DeviceLimits,
    problem: &SamplingProblem,
) -> Result<Choice<&'static SamplingVariant>, Error> {
    let variant = first(problem, |_| true)?;
    let why = match variant.access {
        SamplingAccess::Vector => "the row is whole pieces of 16 bytes",
        SamplingAccess::Scalar => "the row is not whole pieces of 16 bytes",
    };
    Ok(Choice::new(variant, THREADS, why))
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::super::SamplingFeatures;
    use super::*;

    const GREEDY: SamplingFeatures = SamplingFeatures::GREEDY;
    const MASKS: SamplingFeatures = SamplingFeatures { masks: true, ..GREEDY };

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 151_936, GREEDY, "sampling_bf16__vector__sm61"),
            (DType::BF16, 50257, GREEDY, "sampling_bf16__scalar__sm61"),
            (DType::F32, 4, SamplingFeatures::DRAWS, "sampling_f32__vector__sm61"),
            (DType::F16, 4, SamplingFeatures::DRAWS, "sampling_f16__scalar__sm61"),
            // What is edited is f32.
            (DType::F16, 4, MASKS, "sampling_f32__vector__sm61"),
            (DType::BF16, 50257, MASKS, "sampling_f32__scalar__sm61"),
        ];
        for (dtype, vocab, features, entry) in table {
            let problem = SamplingProblem { rows: 3, vocab, dtype, features };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!(choice.variant.entry, entry, "{dtype} {vocab}");
            let fallback = by_element(&problem).unwrap();
            assert_eq!(fallback.access, SamplingAccess::Scalar);
        }
    }

    #[test]
    fn a_kernel_of_another_type_is_refused() {
        let problem = SamplingProblem::new(3, 8, DType::F16);
        assert_eq!(
            forced(&VARIANTS[0], &problem).unwrap_err().to_string(),
            format!(
                "sampling: variant: expected a problem of f32 that Vector access can read, got {problem:?}"
            )
        );
    }
}
