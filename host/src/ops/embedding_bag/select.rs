//! Which kernel a weighted sum of table rows takes.

use abi::ops::embedding_bag::{EmbeddingBagTile, EmbeddingBagVariant, THREADS, VARIANTS};

use super::{EmbeddingBagProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static EmbeddingBagVariant,
    problem: &EmbeddingBagProblem,
) -> Result<Choice<&'static EmbeddingBagVariant>, Error> {
    let whole = variant.tile == EmbeddingBagTile::Scalar || is_whole_pieces(problem);
    if variant.dtype == problem.dtype && whole {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    let pieces = if whole { "" } else { ", rows of whole pieces of 16 bytes" };
    let expected = format!("{}{pieces}", variant.dtype);
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")))
}

fn is_whole_pieces(problem: &EmbeddingBagProblem) -> bool {
    (problem.cols * problem.dtype.bytes()).is_multiple_of(16)
}

/// The kernel for a problem: by pieces of 16 bytes if rows are whole ones.
pub fn select(
    _limits: &DeviceLimits,
    problem: &EmbeddingBagProblem,
) -> Result<Choice<&'static EmbeddingBagVariant>, Error> {
    let (tile, why) = if is_whole_pieces(problem) {
        (EmbeddingBagTile::Pieces, "rows are whole pieces of 16 bytes")
    } else {
        (EmbeddingBagTile::Scalar, "rows are not whole pieces of 16 bytes")
    };
    Ok(Choice::new(variant(problem, tile)?, THREADS, why))
}

/// The kernel of a tile.
pub(super) fn variant(
    problem: &EmbeddingBagProblem,
    tile: EmbeddingBagTile,
) -> Result<&'static EmbeddingBagVariant, Error> {
    let fits = |variant: &EmbeddingBagVariant| (variant.dtype, variant.tile) == (problem.dtype, tile);
    first(OP, VARIANTS, problem.dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;
    use crate::ops::Store;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 2048, "embedding_bag_bf16__pieces__sm61"),
            (DType::BF16, 12, "embedding_bag_bf16__scalar__sm61"),
            (DType::F32, 12, "embedding_bag_f32__pieces__sm61"),
            (DType::F16, 0, "embedding_bag_f16__pieces__sm61"),
        ];
        for (dtype, cols, entry) in table {
            let problem =
                EmbeddingBagProblem { tokens: 7, bag: 4, vocab: 100, cols, dtype, store: Store::Add };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
