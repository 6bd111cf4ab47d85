//! Which kernel an append takes.

use abi::DType;
use abi::ops::kv_append::{KvAppendTile, KvAppendVariant, THREADS, VARIANTS};

use super::{KvAppendProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// Pieces of 16 bytes if a head is a whole number of them.
pub fn select(
    _limits: &DeviceLimits,
    problem: &KvAppendProblem,
) -> Result<Choice<&'static KvAppendVariant>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let why = match variant.tile {
        KvAppendTile::Scalar => "heads are not whole pieces of 16 bytes",
        _ => "heads are whole pieces of 16 bytes",
    };
    Ok(Choice::new(variant, THREADS, why))
}

fn fits(variant: &KvAppendVariant, problem: &KvAppendProblem) -> bool {
    let whole = (problem.head_dim * problem.dtype.bytes()).is_multiple_of(16);
    variant.dtype == problem.dtype && (whole || variant.tile == KvAppendTile::Scalar)
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static KvAppendVariant,
    problem: &KvAppendProblem,
) -> Result<Choice<&'static KvAppendVariant>, Error> {
    if fits(variant, problem) {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static KvAppendVariant, Error> {
    let fits = |variant: &KvAppendVariant| variant.dtype == dtype && variant.tile == KvAppendTile::Scalar;
    first(OP, VARIANTS, dtype, fits)
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_head_size() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 128, "kv_append_bf16__vector__sm61"),
            (DType::BF16, 12, "kv_append_bf16__scalar__sm61"),
            (DType::F32, 12, "kv_append_f32__vector__sm61"),
        ];
        for (dtype, head_dim, entry) in table {
            let problem = KvAppendProblem { tokens: 1, heads: 2, head_dim, dtype };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
    }
}
