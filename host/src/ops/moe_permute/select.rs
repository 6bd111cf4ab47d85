//! Which kernels a sort takes.

use abi::ops::moe_permute::{COUNTED_PAIRS, MoePermuteStage, MoePermuteVariant, THREADS, VARIANTS};

use super::{MoePermuteProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::Choice;

/// How pairs are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoePermutePath {
    /// By one kernel, of which each block counts all pairs.
    Block,
    /// In chunks, a block each, that are counted first.
    Chunks,
    /// By one kernel if a run has not too many, else in chunks.
    ByPairs,
}

/// One kernel up to [`COUNTED_PAIRS`].
pub fn select(_limits: &DeviceLimits, problem: &MoePermuteProblem) -> Result<Choice<MoePermutePath>, Error> {
    let pairs = problem.tokens.saturating_mul(problem.top_k);
    Ok(if pairs <= COUNTED_PAIRS as usize {
        Choice::new(MoePermutePath::Block, THREADS, "not too many pairs for each block to count")
    } else {
        let why = format!("more than {COUNTED_PAIRS} pairs: counted and scanned before");
        Choice::new(MoePermutePath::ByPairs, THREADS, why)
    })
}

/// The kernel of a stage.
pub(super) fn variant(stage: MoePermuteStage) -> Result<&'static MoePermuteVariant, Error> {
    let found = VARIANTS.iter().find(|variant| variant.stage == stage);
    found.ok_or_else(|| Error::invalid(OP, "variant", "a kernel of the table", format!("{stage:?}")))
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_pairs() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (0, MoePermutePath::Block),
            (8192, MoePermutePath::Block),
            (8193, MoePermutePath::ByPairs),
            (81_920, MoePermutePath::ByPairs),
        ];
        for (tokens, path) in table {
            let problem = MoePermuteProblem::new(tokens, 8, 128);
            assert_eq!(select(&limits, &problem).unwrap().variant, path, "{tokens}");
        }
    }
}
