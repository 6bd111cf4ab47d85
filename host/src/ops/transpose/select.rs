//! Which kernel a transposition takes.

use abi::ops::transpose::{THREADS, TransposeAccess, TransposeVariant, VARIANTS};

use super::{OP, TransposeProblem};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::Choice;

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static TransposeVariant,
    problem: &TransposeProblem,
) -> Result<Choice<&'static TransposeVariant>, Error> {
    if variant.element_bytes == problem.dtype.bytes() {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let expected = format!("elements of {} bytes", problem.dtype.bytes());
    Err(Error::invalid(OP, "variant", expected, variant.element_bytes.to_string()))
}

/// The kernel for a problem: by words; a run whose tensors have other strides or alignments takes the scalar one.
pub fn select(
    _limits: &DeviceLimits,
    problem: &TransposeProblem,
) -> Result<Choice<&'static TransposeVariant>, Error> {
    let variant = variant(problem.dtype.bytes(), TransposeAccess::Words)?;
    Ok(Choice::new(variant, THREADS, "for whatever can be so read and written"))
}

/// The kernel of an access.
pub(super) fn variant(
    element_bytes: usize,
    access: TransposeAccess,
) -> Result<&'static TransposeVariant, Error> {
    let fits =
        |variant: &&TransposeVariant| (variant.element_bytes, variant.access) == (element_bytes, access);
    let missing = || Error::invalid(OP, "problem", "elements of 1, 2 or 4 bytes", element_bytes.to_string());
    VARIANTS.iter().find(fits).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_element_size() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::I8, "transpose_b8__m128n128__sm61"),
            (DType::F16, "transpose_b16__m64n64__sm61"),
            (DType::BF16, "transpose_b16__m64n64__sm61"),
            (DType::F32, "transpose_b32__m64n32__sm61"),
        ];
        for (dtype, entry) in table {
            let problem = TransposeProblem { batch: 1, rows: 2, cols: 3, dtype };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
