//! Which kernel a copy takes.

use abi::ops::copy::{CopyKind, CopyTile, CopyVariant, THREADS, VARIANTS};

use super::{CopyProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::Choice;

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static CopyVariant,
    problem: &CopyProblem,
) -> Result<Choice<&'static CopyVariant>, Error> {
    if variant.kind == kind(problem)? {
        return Ok(Choice::asked_for(variant, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("{:?}", kind(problem)?), format!("{:?}", variant.kind)))
}

/// What the copy is; an error for a cast that there is not.
pub(super) fn kind(problem: &CopyProblem) -> Result<CopyKind, Error> {
    let CopyProblem { src, dst, .. } = *problem;
    let expected = "equal types, or two of f32, f16 and bf16";
    CopyKind::of(src, dst).ok_or_else(|| Error::invalid(OP, "problem", expected, format!("{src} to {dst}")))
}

/// The kernel for a problem: by pieces; a run whose tensors have other strides or alignments takes the scalar one.
pub fn select(_limits: &DeviceLimits, problem: &CopyProblem) -> Result<Choice<&'static CopyVariant>, Error> {
    let variant = variant(kind(problem)?, CopyTile::Pieces)?;
    Ok(Choice::new(variant, THREADS, "for whatever can be so copied"))
}

/// The kernel of a tile.
pub(super) fn variant(kind: CopyKind, tile: CopyTile) -> Result<&'static CopyVariant, Error> {
    let missing = || Error::invalid(OP, "problem", "a kind of copy in the table", format!("{kind:?}"));
    VARIANTS.iter().find(|variant| (variant.kind, variant.tile) == (kind, tile)).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_types() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, DType::BF16, "copy_b16__pieces__sm61"),
            (DType::F16, DType::F16, "copy_b16__pieces__sm61"),
            (DType::U32, DType::U32, "copy_b32__pieces__sm61"),
            (DType::I8, DType::I8, "copy_b8__pieces__sm61"),
            (DType::F16, DType::BF16, "copy_f16_bf16__pieces__sm61"),
            (DType::F32, DType::F16, "copy_f32_f16__pieces__sm61"),
        ];
        for (src, dst, entry) in table {
            let problem = CopyProblem { elements: 1, src, dst };
            assert_eq!(select(&limits, &problem).unwrap().variant.entry, entry);
        }
        let problem = CopyProblem { elements: 1, src: DType::F32, dst: DType::I8 };
        assert!(select(&limits, &problem).is_err());
    }
}
