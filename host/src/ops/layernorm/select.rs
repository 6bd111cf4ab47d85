//! Which kernel a LayerNorm takes.

use abi::ops::layernorm::{
    LayerNormTile, LayerNormVariant, SCALAR_TILE_THREADS, VARIANTS, WARP_TILE_THREADS,
};

use super::{LayerNormProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{self, Choice};

/// Shared memory of the sums over a block: one f32 per warp.
pub(super) const SMEM_BYTES: u32 = 128;

/// Whether a kernel holds the problem's rows.
fn holds(variant: &LayerNormVariant, problem: &LayerNormProblem) -> bool {
    let fits = |most| chunks(problem).is_some_and(|chunks| chunks <= most);
    variant.dtype == problem.dtype && variant.tile.max_chunks().is_none_or(fits)
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static LayerNormVariant,
    problem: &LayerNormProblem,
) -> Result<Choice<&'static LayerNormVariant>, Error> {
    if !holds(variant, problem) {
        let expected =
            format!("{} of at most {:?} pieces of 16 bytes", variant.dtype, variant.tile.max_chunks());
        return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
    }
    let threads = match (variant.tile, chunks(problem)) {
        (LayerNormTile::Warp { .. }, _) => WARP_TILE_THREADS,
        (LayerNormTile::Block { chunks: each }, Some(chunks)) => chunks.div_ceil(each).next_multiple_of(32),
        (LayerNormTile::Block { .. }, None) | (LayerNormTile::Scalar, _) => SCALAR_TILE_THREADS,
    };
    Ok(Choice::asked_for(variant, threads))
}

/// Blocks for this many rows.
pub(super) fn blocks(choice: &Choice<&'static LayerNormVariant>, rows: u32) -> u32 {
    match choice.variant.tile {
        LayerNormTile::Warp { .. } => rows.div_ceil(choice.threads / 32),
        LayerNormTile::Block { .. } | LayerNormTile::Scalar => rows,
    }
}

/// The row's length in pieces of 16 bytes, if it is whole pieces.
fn chunks(problem: &LayerNormProblem) -> Option<u32> {
    let bytes = problem.cols * problem.dtype.bytes();
    bytes.is_multiple_of(16).then_some((bytes / 16) as u32)
}

/// The first kernel of the table that holds the row and is wanted.
pub(super) fn first(
    problem: &LayerNormProblem,
    wanted: impl Fn(&LayerNormVariant) -> bool,
) -> Result<&'static LayerNormVariant, Error> {
    plan::first(OP, VARIANTS, problem.dtype, |variant| holds(variant, problem) && wanted(variant))
}

/// The first kernel of the table that holds the row. Depends on the row's length and type only, so that a row's result
/// does not depend on how many rows there are.
pub fn select(
    _limits: &DeviceLimits,
    problem: &LayerNormProblem,
) -> Result<Choice<&'static LayerNormVariant>, Error> {
    let variant = first(problem, |_| true)?;
    let why = match (variant.tile, chunks(problem)) {
        (LayerNormTile::Scalar, None) => "the row is not whole pieces of 16 bytes".into(),
        (LayerNormTile::Scalar, Some(_)) => "the row is longer than a block's registers".into(),
        (_, chunks) => {
            format!("the smallest tile that holds {} pieces of 16 bytes", chunks.unwrap_or(0)).into()
        }
    };
    Ok(Choice { why, ..forced(variant, problem)? })
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 64, "layernorm_bf16__warp4__sm61", 256),
            (DType::BF16, 1024, "layernorm_bf16__warp4__sm61", 256),
            (DType::BF16, 129, "layernorm_bf16__scalar__sm61", 256),
            (DType::F32, 48, "layernorm_f32__warp4__sm61", 256),
            (DType::F32, 1024, "layernorm_f32__block2__sm61", 128),
            (DType::BF16, 1152, "layernorm_bf16__block2__sm61", 96),
            (DType::F16, 4096, "layernorm_f16__block2__sm61", 256),
            (DType::BF16, 16384, "layernorm_bf16__block2__sm61", 1024),
            (DType::BF16, 16392, "layernorm_bf16__scalar__sm61", 256),
        ];
        for (dtype, cols, entry, threads) in table {
            let problem = LayerNormProblem { rows: 7, cols, dtype, eps: 1e-6 };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!((choice.variant.entry, choice.threads), (entry, threads), "{dtype} {cols}");
        }
    }
}
