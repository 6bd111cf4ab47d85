//! Which kernel a gated linear unit takes.

use abi::ops::glu::{GluTile, GluVariant, THREADS, VARIANTS};

use super::{GluProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static GluVariant,
    problem: &GluProblem,
) -> Result<Choice<&'static GluVariant>, Error> {
    let whole = variant.tile == GluTile::Scalar || is_whole_pieces(problem);
    if variant.dtype == problem.dtype && variant.activation == problem.activation && whole {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let pieces = if variant.tile == GluTile::Pieces { ", rows of whole pieces of 16 bytes" } else { "" };
    let expected = format!("{} {}{pieces}", variant.dtype, variant.activation.name());
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")))
}

fn is_whole_pieces(problem: &GluProblem) -> bool {
    (problem.cols * problem.dtype.bytes()).is_multiple_of(16)
}

/// The kernel for a problem: by pieces of 16 bytes if rows are whole ones.
pub fn select(_limits: &DeviceLimits, problem: &GluProblem) -> Result<Choice<&'static GluVariant>, Error> {
    let (tile, why) = if is_whole_pieces(problem) {
        (GluTile::Pieces, "rows are whole pieces of 16 bytes")
    } else {
        (GluTile::Scalar, "rows are not whole pieces of 16 bytes")
    };
    Ok(Choice::new(variant(problem, tile)?, THREADS, why))
}

/// The kernel of a tile.
pub(super) fn variant(problem: &GluProblem, tile: GluTile) -> Result<&'static GluVariant, Error> {
    let fits = |variant: &GluVariant| {
        (variant.dtype, variant.activation, variant.tile) == (problem.dtype, problem.activation, tile)
    };
    first(OP, VARIANTS, problem.dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::super::Activation;
    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 9728, Activation::Silu, "glu_bf16_silu__pieces__sm61"),
            (DType::BF16, 9729, Activation::Silu, "glu_bf16_silu__scalar__sm61"),
            (DType::BF16, 4, Activation::GeluErf, "glu_bf16_gelu_erf__scalar__sm61"),
            (DType::F32, 4, Activation::GeluErf, "glu_f32_gelu_erf__pieces__sm61"),
            (DType::F16, 64, Activation::GeluTanh, "glu_f16_gelu_tanh__pieces__sm61"),
        ];
        for (dtype, cols, activation, entry) in table {
            let problem = GluProblem { rows: 7, cols, dtype, activation };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
