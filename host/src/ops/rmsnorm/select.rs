//! Which kernel an RMSNorm takes.

use abi::ops::rmsnorm::{RmsNormTile, RmsNormVariant, SCALAR_TILE_THREADS, VARIANTS, WARP_TILE_THREADS};

use super::{OP, RmsNormProblem};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{self, Choice};

/// Shared memory of the block tiles: one f32 per warp.
pub(super) const SMEM_BYTES: u32 = 128;

/// Whether a kernel holds the problem's rows.
fn holds(variant: &RmsNormVariant, problem: &RmsNormProblem) -> bool {
    let fits = |most| chunks(problem).is_some_and(|chunks| chunks <= most);
    variant.dtype == problem.dtype && variant.max_chunks().is_none_or(fits)
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static RmsNormVariant,
    problem: &RmsNormProblem,
) -> Result<Choice<&'static RmsNormVariant>, Error> {
    if !holds(variant, problem) {
        let expected = format!("{} of at most {:?} pieces of 16 bytes", variant.dtype, variant.max_chunks());
        return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
    }
    let threads = match (variant.tile, chunks(problem)) {
        (RmsNormTile::Lanes { .. }, _) => WARP_TILE_THREADS,
        (RmsNormTile::Block { chunks: each }, Some(chunks)) => chunks.div_ceil(each).next_multiple_of(32),
        (RmsNormTile::Block { .. }, None) | (RmsNormTile::Scalar, _) => SCALAR_TILE_THREADS,
    };
    Ok(Choice::asked_for(variant, threads))
}

/// Blocks for this many rows.
pub(super) fn blocks(choice: &Choice<&'static RmsNormVariant>, rows: u32) -> u32 {
    match choice.variant.tile {
        RmsNormTile::Lanes { lanes, .. } => rows.div_ceil(choice.threads / lanes),
        RmsNormTile::Block { .. } | RmsNormTile::Scalar => rows,
    }
}

/// The row's length in pieces of 16 bytes, if it is whole pieces.
fn chunks(problem: &RmsNormProblem) -> Option<u32> {
    let bytes = problem.cols * problem.dtype.bytes();
    bytes.is_multiple_of(16).then_some((bytes / 16) as u32)
}

/// The first kernel of the table that holds the row and is wanted.
pub(super) fn first(
    problem: &RmsNormProblem,
    wanted: impl Fn(&RmsNormVariant) -> bool,
) -> Result<&'static RmsNormVariant, Error> {
    plan::first(OP, VARIANTS, problem.dtype, |variant| holds(variant, problem) && wanted(variant))
}

/// The first kernel of the table that holds the row. Depends on the row's length and type only, so that a row's result
/// does not depend on how many rows there are.
pub fn select(
    _limits: &DeviceLimits,
    problem: &RmsNormProblem,
) -> Result<Choice<&'static RmsNormVariant>, Error> {
    let variant = first(problem, |_| true)?;
    let why = match (variant.tile, chunks(problem)) {
        (RmsNormTile::Scalar, None) => "the row is not whole pieces of 16 bytes".into(),
        (RmsNormTile::Scalar, Some(_)) => "the row is longer than a block's registers".into(),
        (_, chunks) => {
            format!("the smallest tile that holds {} pieces of 16 bytes", chunks.unwrap_or(0)).into()
        }
    };
    Ok(Choice { why, ..forced(variant, problem)? })
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::super::NormWeight;
    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 64, "rmsnorm_bf16__lanes8__sm61", 256),
            (DType::BF16, 128, "rmsnorm_bf16__lanes16__sm61", 256),
            (DType::BF16, 129, "rmsnorm_bf16__scalar__sm61", 256),
            (DType::F32, 128, "rmsnorm_f32__lanes32__sm61", 256),
            (DType::BF16, 512, "rmsnorm_bf16__lanes32x2__sm61", 256),
            (DType::F32, 512, "rmsnorm_f32__lanes32x4__sm61", 256),
            (DType::BF16, 520, "rmsnorm_bf16__block1__sm61", 96),
            (DType::BF16, 1024, "rmsnorm_bf16__block1__sm61", 128),
            (DType::BF16, 2560, "rmsnorm_bf16__block1__sm61", 320),
            (DType::F16, 4096, "rmsnorm_f16__block1__sm61", 512),
            (DType::BF16, 32768, "rmsnorm_bf16__block8__sm61", 512),
            (DType::BF16, 32776, "rmsnorm_bf16__scalar__sm61", 256),
            (DType::F32, 32768, "rmsnorm_f32__block8__sm61", 1024),
            (DType::F32, 32772, "rmsnorm_f32__scalar__sm61", 256),
        ];
        for (dtype, cols, entry, threads) in table {
            let problem = RmsNormProblem { rows: 7, cols, dtype, eps: 1e-6, weight: NormWeight::Plain };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!((choice.variant.entry, choice.threads), (entry, threads), "{dtype} {cols}");
        }
    }
}
