//! Which kernel an append takes.

use abi::DType;
use abi::ops::kv_append::{KvAppendTile, KvAppendVariant, VARIANTS};

use super::{KvAppendProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Pieces of 16 bytes if a head is a whole number of them.
pub fn select(_limits: &DeviceLimits, problem: &KvAppendProblem) -> Result<&'static KvAppendVariant, Error> {
    let fitting = VARIANTS.iter().find(|variant| check_fits(variant, problem).is_ok());
    fitting.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()))
}

/// An error if the kernel cannot do the problem.
pub(super) fn check_fits(variant: &KvAppendVariant, problem: &KvAppendProblem) -> Result<(), Error> {
    let whole = (problem.head_dim * problem.dtype.bytes()).is_multiple_of(16);
    if variant.dtype == problem.dtype && (whole || variant.tile == KvAppendTile::Scalar) {
        Ok(())
    } else {
        Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), variant.entry))
    }
}

/// The kernel for any alignment.
pub(super) fn scalar(dtype: DType) -> Result<&'static KvAppendVariant, Error> {
    let found =
        VARIANTS.iter().find(|variant| variant.dtype == dtype && variant.tile == KvAppendTile::Scalar);
    found.ok_or_else(|| Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()))
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;

    #[test]
    fn choice_by_head_size() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
        let table = [
            (DType::BF16, 128, "kv_append_bf16__vector__sm61"),
            (DType::BF16, 12, "kv_append_bf16__scalar__sm61"),
            (DType::F32, 12, "kv_append_f32__vector__sm61"),
        ];
        for (dtype, head_dim, entry) in table {
            let problem = KvAppendProblem { tokens: 1, heads: 2, head_dim, dtype };
            assert_eq!(select(&limits, &problem).unwrap().entry, entry);
        }
    }
}
