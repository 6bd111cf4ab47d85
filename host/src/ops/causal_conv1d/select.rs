//! Which kernel a convolution takes.

use abi::DType;
use abi::ops::causal_conv1d::{CausalConv1dTile, CausalConv1dVariant, THREADS, VARIANTS};

use super::{CausalConv1dProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// Pieces of 16 bytes if the channels are a whole number of them.
pub fn select(
    _limits: &DeviceLimits,
    problem: &CausalConv1dProblem,
) -> Result<Choice<&'static CausalConv1dVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let why = match variant.tile {
        CausalConv1dTile::Scalar {} => "channels are not whole pieces of 16 bytes",
        _ => "channels are whole pieces of 16 bytes",
    };
    Ok(Choice::new(variant, THREADS, why))
}

fn fits(variant: &CausalConv1dVariant, problem: &CausalConv1dProblem) -> bool {
    let whole = (problem.channels * problem.dtype.bytes()).is_multiple_of(16);
    let tile_fits = match variant.tile {
        CausalConv1dTile::Pieces { width } => whole && width as usize == problem.width,
        CausalConv1dTile::Scalar {} => true,
    };
    variant.dtype == problem.dtype && tile_fits
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static CausalConv1dVariant,
    problem: &CausalConv1dProblem,
) -> Result<Choice<&'static CausalConv1dVariant>, Error> {
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static CausalConv1dVariant, Error> {
    let fits =
        |variant: &CausalConv1dVariant| variant.dtype == dtype && variant.tile == CausalConv1dTile::Scalar {};
    first(OP, VARIANTS, dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_taps_and_channels() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 8192, 4, "causal_conv1d_bf16__pieces4__sm61"),
            (DType::BF16, 12, 4, "causal_conv1d_bf16__scalar__sm61"),
            (DType::F32, 12, 2, "causal_conv1d_f32__pieces2__sm61"),
            (DType::F16, 64, 3, "causal_conv1d_f16__pieces3__sm61"),
        ];
        for (dtype, channels, width, entry) in table {
            let problem = CausalConv1dProblem { tokens: 1, sequences: 1, channels, width, dtype };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
