//! Which kernel a merge of attention takes.

use abi::ops::attention_merge::{AttentionMergeTile, AttentionMergeVariant, THREADS, VARIANTS};

use super::{AttentionMergeProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static AttentionMergeVariant,
    problem: &AttentionMergeProblem,
) -> Result<Choice<&'static AttentionMergeVariant>, Error> {
    let whole = variant.tile == AttentionMergeTile::Scalar || is_whole_pieces(problem);
    if variant.dtype == problem.dtype && whole {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let pieces = if whole { "" } else { ", rows of whole pieces of 16 bytes" };
    let expected = format!("{}{pieces}", variant.dtype);
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")))
}

fn is_whole_pieces(problem: &AttentionMergeProblem) -> bool {
    (problem.dim * problem.dtype.bytes()).is_multiple_of(16)
}

/// The kernel for a problem: by pieces of 16 bytes if rows are whole ones.
pub fn select(
    _limits: &DeviceLimits,
    problem: &AttentionMergeProblem,
) -> Result<Choice<&'static AttentionMergeVariant>, Error> {
    let (tile, why) = if is_whole_pieces(problem) {
        (AttentionMergeTile::Pieces, "rows are whole pieces of 16 bytes")
    } else {
        (AttentionMergeTile::Scalar, "rows are not whole pieces of 16 bytes")
    };
    Ok(Choice::new(variant(problem, tile)?, THREADS, why))
}

/// The kernel of a tile.
pub(super) fn variant(
    problem: &AttentionMergeProblem,
    tile: AttentionMergeTile,
) -> Result<&'static AttentionMergeVariant, Error> {
    let fits = |variant: &AttentionMergeVariant| (variant.dtype, variant.tile) == (problem.dtype, tile);
    first(OP, VARIANTS, problem.dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 2048, "attention_merge_bf16__pieces__sm61"),
            (DType::BF16, 12, "attention_merge_bf16__scalar__sm61"),
            (DType::F32, 12, "attention_merge_f32__pieces__sm61"),
            (DType::F16, 8, "attention_merge_f16__pieces__sm61"),
        ];
        for (dtype, dim, entry) in table {
            let problem = AttentionMergeProblem::new(7, 3, dim, dtype);
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
