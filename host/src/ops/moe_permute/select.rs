//! Which kernels a sort takes.

use abi::ops::moe_permute::{CHUNK_PAIRS, MoePermuteStage, MoePermuteVariant, VARIANTS};

use super::OP;
use crate::error::Error;

/// How pairs are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoePermutePath {
    /// By one block.
    Block,
    /// In chunks, a block each, that are counted first.
    Chunks,
}

/// One block for as many pairs as a chunk has: three launches would take longer.
pub fn select(pairs: usize) -> MoePermutePath {
    if pairs <= CHUNK_PAIRS as usize { MoePermutePath::Block } else { MoePermutePath::Chunks }
}

/// The kernel of a stage.
pub(super) fn variant(stage: MoePermuteStage) -> Result<&'static MoePermuteVariant, Error> {
    let found = VARIANTS.iter().find(|variant| variant.stage == stage);
    found.ok_or_else(|| Error::invalid(OP, "variant", "a kernel of the table", format!("{stage:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_by_pairs() {
        let table = [
            (0, MoePermutePath::Block),
            (4096, MoePermutePath::Block),
            (4097, MoePermutePath::Chunks),
            (655_360, MoePermutePath::Chunks),
        ];
        for (pairs, path) in table {
            assert_eq!(select(pairs), path, "{pairs}");
        }
    }
}
