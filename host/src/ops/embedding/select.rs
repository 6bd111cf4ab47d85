//! Which kernel an embedding takes.

use abi::ops::embedding::{EmbeddingVariant, MAX_THREADS, UNITS_PER_THREAD, VARIANTS};

use super::{EmbeddingProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static EmbeddingVariant,
    problem: &EmbeddingProblem,
) -> Result<Choice<&'static EmbeddingVariant>, Error> {
    if !fits(variant, problem) {
        let expected = format!("one element or rows of whole units of {} bytes", variant.unit_bytes);
        return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
    }
    let units = (problem.cols * problem.dtype.bytes() / variant.unit_bytes) as u32;
    Ok(Choice::asked_for(variant, threads(units)))
}

/// The kernel that any alignment will do for.
pub(super) fn by_element(problem: &EmbeddingProblem) -> Result<&'static EmbeddingVariant, Error> {
    let fits = |variant: &EmbeddingVariant| variant.unit_bytes == problem.dtype.bytes();
    first(OP, VARIANTS, problem.dtype, fits)
}

/// Threads of a block that moves a row of so many units.
pub(super) fn threads(units: u32) -> u32 {
    units.div_ceil(UNITS_PER_THREAD).next_multiple_of(32).clamp(32, MAX_THREADS)
}

/// A unit is one element, or 16 bytes of which the row is a multiple.
fn fits(variant: &EmbeddingVariant, problem: &EmbeddingProblem) -> bool {
    let element_bytes = problem.dtype.bytes();
    variant.unit_bytes == element_bytes
        || variant.unit_bytes == 16 && (problem.cols * element_bytes).is_multiple_of(16)
}

/// Units of 16 bytes if the row is whole ones, else elements.
pub fn select(
    _limits: &DeviceLimits,
    problem: &EmbeddingProblem,
) -> Result<Choice<&'static EmbeddingVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let is_whole = if variant.unit_bytes == 16 { "is" } else { "is not" };
    let why = format!("the row {is_whole} whole pieces of 16 bytes").into();
    Ok(Choice { why, ..forced(variant, problem)? })
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 8, "embedding_b128__row__sm61", 32),
            (DType::BF16, 1024, "embedding_b128__row__sm61", 32),
            (DType::BF16, 2560, "embedding_b128__row__sm61", 96),
            (DType::F32, 4096, "embedding_b128__row__sm61", 256),
            (DType::F32, 16384, "embedding_b128__row__sm61", 256),
            (DType::F32, 5, "embedding_b32__row__sm61", 32),
            (DType::F16, 1001, "embedding_b16__row__sm61", 256),
            (DType::BF16, 0, "embedding_b128__row__sm61", 32),
        ];
        for (dtype, cols, entry, threads) in table {
            let problem = EmbeddingProblem { tokens: 3, vocab: 100, cols, dtype };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!((choice.variant.entry, choice.threads), (entry, threads), "{dtype} {cols}");
        }
    }

    #[test]
    fn a_kernel_of_another_width_is_refused() {
        let problem = EmbeddingProblem { tokens: 3, vocab: 100, cols: 9, dtype: DType::F16 };
        let refused = |index: usize| forced(&VARIANTS[index], &problem).unwrap_err().to_string();
        assert_eq!(
            refused(0),
            format!(
                "embedding: variant: expected one element or rows of whole units of 16 bytes, got {problem:?}"
            )
        );
        assert!(refused(1).contains("units of 4 bytes"));
        assert!(forced(&VARIANTS[2], &problem).is_ok());
    }
}
