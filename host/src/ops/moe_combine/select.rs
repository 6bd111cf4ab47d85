//! Which kernel a sum takes.

use abi::DType;
use abi::ops::moe_combine::{MoeCombineTile, MoeCombineVariant, VARIANTS};

use super::{MoeCombineProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Pieces of 16 bytes if a row is a whole number of them.
pub fn select(
    _limits: &DeviceLimits,
    problem: &MoeCombineProblem,
) -> Result<&'static MoeCombineVariant, Error> {
    let fitting = VARIANTS.iter().find(|variant| check_fits(variant, problem).is_ok());
    fitting.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()))
}

/// An error if the kernel cannot do the problem.
pub(super) fn check_fits(variant: &MoeCombineVariant, problem: &MoeCombineProblem) -> Result<(), Error> {
    let whole = (problem.cols * problem.dtype.bytes()).is_multiple_of(16);
    if variant.dtype == problem.dtype && (whole || variant.tile == MoeCombineTile::Scalar) {
        Ok(())
    } else {
        Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
    }
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static MoeCombineVariant, Error> {
    let found =
        VARIANTS.iter().find(|variant| variant.dtype == dtype && variant.tile == MoeCombineTile::Scalar);
    found.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()))
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_row_size() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
        let table = [
            (DType::BF16, 2048, "moe_combine_bf16__pieces__sm61"),
            (DType::BF16, 12, "moe_combine_bf16__scalar__sm61"),
            (DType::F32, 12, "moe_combine_f32__pieces__sm61"),
        ];
        for (dtype, cols, entry) in table {
            let problem = MoeCombineProblem { tokens: 1, top_k: 2, cols, dtype };
            assert_eq!(select(&limits, &problem).unwrap().entry, entry);
        }
    }
}
