//! Which kernel a convolution takes.

use abi::DType;
use abi::ops::causal_conv1d::{CausalConv1dTile, CausalConv1dVariant, VARIANTS};

use super::{CausalConv1dProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Pieces of 16 bytes if the channels are a whole number of them.
pub fn select(
    _limits: &DeviceLimits,
    problem: &CausalConv1dProblem,
) -> Result<&'static CausalConv1dVariant, Error> {
    let fitting = VARIANTS.iter().find(|variant| check_fits(variant, problem).is_ok());
    fitting.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()))
}

/// An error if the kernel cannot do the problem.
pub(super) fn check_fits(variant: &CausalConv1dVariant, problem: &CausalConv1dProblem) -> Result<(), Error> {
    let whole = (problem.channels * problem.dtype.bytes()).is_multiple_of(16);
    let fits = match variant.tile {
        CausalConv1dTile::Pieces { width } => whole && width as usize == problem.width,
        CausalConv1dTile::Scalar {} => true,
    };
    if variant.dtype == problem.dtype && fits {
        Ok(())
    } else {
        Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
    }
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static CausalConv1dVariant, Error> {
    let found =
        VARIANTS.iter().find(|variant| variant.dtype == dtype && variant.tile == CausalConv1dTile::Scalar {});
    found.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()))
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_taps_and_channels() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
        let table = [
            (DType::BF16, 8192, 4, "causal_conv1d_bf16__pieces4__sm61"),
            (DType::BF16, 12, 4, "causal_conv1d_bf16__scalar__sm61"),
            (DType::F32, 12, 2, "causal_conv1d_f32__pieces2__sm61"),
            (DType::F16, 64, 3, "causal_conv1d_f16__pieces3__sm61"),
        ];
        for (dtype, channels, width, entry) in table {
            let problem = CausalConv1dProblem { tokens: 1, sequences: 1, channels, width, dtype };
            assert_eq!(select(&limits, &problem).unwrap().entry, entry);
        }
    }
}
