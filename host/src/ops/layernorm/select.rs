//! Which kernel a LayerNorm takes.

use abi::ops::layernorm::{
    LayerNormTile, LayerNormVariant, SCALAR_TILE_THREADS, VARIANTS, WARP_TILE_THREADS,
};

use super::{LayerNormProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Shared memory of the sums over a block: one f32 per warp.
pub(super) const SMEM_BYTES: u32 = 128;

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormChoice {
    /// The kernel.
    pub variant: &'static LayerNormVariant,
    /// Threads of a block.
    pub threads: u32,
    /// Why this one.
    pub why: String,
}

impl LayerNormChoice {
    /// This kernel, if it can do the problem.
    pub(super) fn forced(
        variant: &'static LayerNormVariant,
        problem: &LayerNormProblem,
    ) -> Result<Self, Error> {
        let chunks = chunks(problem);
        let fits = variant.dtype == problem.dtype
            && match (variant.tile.max_chunks(), chunks) {
                (None, _) => true,
                (Some(max), Some(chunks)) => chunks <= max,
                (Some(_), None) => false,
            };
        if !fits {
            let expected =
                format!("{} of at most {:?} pieces of 16 bytes", variant.dtype, variant.tile.max_chunks());
            return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
        }
        let threads = match (variant.tile, chunks) {
            (LayerNormTile::Warp { .. }, _) => WARP_TILE_THREADS,
            (LayerNormTile::Block { chunks: each }, Some(chunks)) => {
                chunks.div_ceil(each).next_multiple_of(32)
            }
            (LayerNormTile::Block { .. }, None) | (LayerNormTile::Scalar, _) => SCALAR_TILE_THREADS,
        };
        Ok(LayerNormChoice { variant, threads, why: "asked for".into() })
    }

    /// Blocks for this many rows.
    pub(super) fn blocks(&self, rows: u32) -> u32 {
        match self.variant.tile {
            LayerNormTile::Warp { .. } => rows.div_ceil(self.threads / 32),
            LayerNormTile::Block { .. } | LayerNormTile::Scalar => rows,
        }
    }
}

/// The row's length in pieces of 16 bytes, if it is whole pieces.
fn chunks(problem: &LayerNormProblem) -> Option<u32> {
    let bytes = problem.cols * problem.dtype.bytes();
    bytes.is_multiple_of(16).then_some((bytes / 16) as u32)
}

/// The first kernel of the table that holds the row. Depends on the row's length and type only, so that a row's result
/// does not depend on how many rows there are.
pub fn select(_limits: &DeviceLimits, problem: &LayerNormProblem) -> Result<LayerNormChoice, Error> {
    let chunks = chunks(problem);
    let holds = |variant: &&LayerNormVariant| {
        variant.dtype == problem.dtype
            && match (variant.tile.max_chunks(), chunks) {
                (None, _) => true,
                (Some(max), Some(chunks)) => chunks <= max,
                (Some(_), None) => false,
            }
    };
    let Some(variant) = VARIANTS.iter().find(holds) else {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    };
    let why = match (variant.tile, chunks) {
        (LayerNormTile::Scalar, None) => "the row is not whole pieces of 16 bytes".into(),
        (LayerNormTile::Scalar, Some(_)) => "the row is longer than a block's registers".into(),
        (_, chunks) => format!("the smallest tile that holds {} pieces of 16 bytes", chunks.unwrap_or(0)),
    };
    Ok(LayerNormChoice { why, ..LayerNormChoice::forced(variant, problem)? })
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
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
