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
    let is_whole = (problem.vocab * problem.dtype.bytes()).is_multiple_of(16);
    variant.dtype == problem.dtype && (variant.access == SamplingAccess::Scalar || is_whole)
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

    use super::super::Sampling;
    use super::*;

    const RANDOM: Sampling = Sampling::Random { temperature: 1.0, top_k: None, top_p: 1.0, seed: 0 };

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
        let table = [
            (DType::BF16, 151_936, Sampling::Greedy, "sampling_bf16__vector__sm61"),
            (DType::BF16, 50257, Sampling::Greedy, "sampling_bf16__scalar__sm61"),
            (DType::F32, 4, RANDOM, "sampling_f32__vector__sm61"),
            (DType::F16, 4, RANDOM, "sampling_f16__scalar__sm61"),
        ];
        for (dtype, vocab, method, entry) in table {
            let problem = SamplingProblem { rows: 3, vocab, dtype, method };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!(choice.variant.entry, entry, "{dtype} {vocab}");
            let fallback = by_element(&problem).unwrap();
            assert_eq!(fallback.access, SamplingAccess::Scalar);
        }
    }

    #[test]
    fn a_kernel_of_another_type_is_refused() {
        let problem = SamplingProblem { rows: 3, vocab: 8, dtype: DType::F16, method: RANDOM };
        assert_eq!(
            forced(&VARIANTS[0], &problem).unwrap_err().to_string(),
            format!(
                "sampling: variant: expected a problem of f32 that Vector access can read, got {problem:?}"
            )
        );
    }
}
