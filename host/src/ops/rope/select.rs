//! Which kernel a rotary embedding takes.

use abi::ops::rope::{RopeStyle, RopeTile, RopeVariant, THREADS, VARIANTS};

use super::{OP, RopeProblem};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static RopeVariant,
    problem: &RopeProblem,
) -> Result<Choice<&'static RopeVariant>, Error> {
    let whole = variant.tile == RopeTile::Scalar || is_whole_pieces(problem);
    if variant.dtype == problem.dtype && variant.style == problem.style && whole {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let pieces = if variant.tile == RopeTile::Pieces { ", heads of whole pieces of 16 bytes" } else { "" };
    let expected = format!("{} {}{pieces}", variant.dtype, variant.style.name());
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")))
}

/// Whether the parts of a head are whole pieces of 16 bytes: both halves of the rotated part if they are apart, the
/// rotated part if not, and the rest.
fn is_whole_pieces(problem: &RopeProblem) -> bool {
    let per_16 = 16 / problem.dtype.bytes();
    let part = match problem.style {
        RopeStyle::HalfSplit => problem.rotary_dim / 2,
        RopeStyle::Interleaved => problem.rotary_dim,
    };
    part.is_multiple_of(per_16) && problem.head_dim.is_multiple_of(per_16)
}

/// The kernel for a problem: by pieces of 16 bytes if a head is made of whole ones.
pub fn select(_limits: &DeviceLimits, problem: &RopeProblem) -> Result<Choice<&'static RopeVariant>, Error> {
    let (tile, why) = if is_whole_pieces(problem) {
        (RopeTile::Pieces, "heads are whole pieces of 16 bytes")
    } else {
        (RopeTile::Scalar, "heads are not whole pieces of 16 bytes")
    };
    Ok(Choice::new(variant(problem, tile)?, THREADS, why))
}

/// The kernel of a tile.
pub(super) fn variant(problem: &RopeProblem, tile: RopeTile) -> Result<&'static RopeVariant, Error> {
    let fits = |variant: &RopeVariant| {
        (variant.dtype, variant.style, variant.tile) == (problem.dtype, problem.style, tile)
    };
    first(OP, VARIANTS, problem.dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_head() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let (half, inter) = (RopeStyle::HalfSplit, RopeStyle::Interleaved);
        let table = [
            (DType::BF16, half, 128, 128, "rope_bf16_half_split__pieces__sm61"),
            (DType::BF16, half, 256, 64, "rope_bf16_half_split__pieces__sm61"),
            (DType::BF16, half, 24, 24, "rope_bf16_half_split__scalar__sm61"),
            (DType::BF16, inter, 24, 24, "rope_bf16_interleaved__pieces__sm61"),
            (DType::F32, half, 24, 24, "rope_f32_half_split__pieces__sm61"),
            (DType::F16, inter, 65, 64, "rope_f16_interleaved__scalar__sm61"),
            (DType::F16, inter, 64, 2, "rope_f16_interleaved__scalar__sm61"),
        ];
        for (dtype, style, head_dim, rotary_dim, entry) in table {
            let problem = RopeProblem { tokens: 3, heads: 5, head_dim, rotary_dim, style, dtype };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
