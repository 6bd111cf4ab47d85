//! Which kernel a sum takes.

use abi::DType;
use abi::ops::moe_combine::{MoeCombineTile, MoeCombineVariant, THREADS, VARIANTS};

use super::{MoeCombineProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// Pieces of 16 bytes if a row is a whole number of them.
pub fn select(
    _limits: &DeviceLimits,
    problem: &MoeCombineProblem,
) -> Result<Choice<&'static MoeCombineVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let why = match variant.tile {
        MoeCombineTile::Scalar => "rows are not whole pieces of 16 bytes",
        _ => "rows are whole pieces of 16 bytes",
    };
    Ok(Choice::new(variant, THREADS, why))
}

fn fits(variant: &MoeCombineVariant, problem: &MoeCombineProblem) -> bool {
    let whole = (problem.cols * problem.dtype.bytes()).is_multiple_of(16);
    variant.dtype == problem.dtype && (whole || variant.tile == MoeCombineTile::Scalar)
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static MoeCombineVariant,
    problem: &MoeCombineProblem,
) -> Result<Choice<&'static MoeCombineVariant>, Error> {
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static MoeCombineVariant, Error> {
    let fits = |variant: &MoeCombineVariant| variant.dtype == dtype && variant.tile == MoeCombineTile::Scalar;
    first(OP, VARIANTS, dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_row_size() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 2048, "moe_combine_bf16__pieces__sm61"),
            (DType::BF16, 12, "moe_combine_bf16__scalar__sm61"),
            (DType::F32, 12, "moe_combine_f32__pieces__sm61"),
        ];
        for (dtype, cols, entry) in table {
            let problem = MoeCombineProblem::new(1, 2, cols, dtype);
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
