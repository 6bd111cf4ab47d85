//! Which form the gated delta rule takes.

use abi::ops::gated_delta::{GatedDeltaTile, GatedDeltaVariant, MMA_VARIANTS, VARIANTS};
use abi::{Arch, DType};

use super::{GatedDeltaProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// The most tokens of a sequence for which the recurrence is taken: a chunk of 64 costs about as much as these.
pub const MAX_RECURRENT_TOKENS: usize = 16;

/// How the recurrence is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Token by token.
    Recurrent,
    /// 64 tokens at a time.
    Chunked {
        /// Most chunks of a pass over the tokens, plus one for each sequence; at least 1. The workspace is 33 KiB for
        /// each of them and value head. It does not show in the result.
        pass: u32,
    },
    /// The same on tensor cores, for f16 and bf16.
    ChunkedMma {
        /// As for `Chunked`; of the workspace there are 31 KiB for each value head and 48 for each key head, 96 in f16.
        pass: u32,
    },
}

/// The pass that `select` takes: 4096 tokens fill any card.
const PASS: u32 = 64;
/// The same on tensor cores: prompts of 2048 and their remainders in one pass, by as much memory.
const MMA_PASS: u32 = 40;

impl Form {
    /// The tile of its kernel that takes the most time.
    pub(super) fn main(self) -> GatedDeltaTile {
        match self {
            Form::Recurrent => GatedDeltaTile::Recurrent,
            Form::Chunked { .. } => GatedDeltaTile::Scan,
            Form::ChunkedMma { .. } => GatedDeltaTile::ScanMma,
        }
    }
}

/// The form, by the planned length alone, so that a plan's results do not depend on how a run is packed.
/// Under [`Invariance::Batch`](crate::Invariance::Batch) always the recurrence: chunks begin where runs do.
pub fn select(limits: &DeviceLimits, problem: &GatedDeltaProblem) -> Result<Choice<Form>, Error> {
    let (form, why) = if limits.is_invariant() {
        (Form::Recurrent, "the same bits however a sequence is cut into runs")
    } else if problem.longest <= MAX_RECURRENT_TOKENS {
        (Form::Recurrent, "short sequences: the state's bytes count")
    } else if limits.floor.runs(Arch::Sm80)
        && on_tensor_cores(problem.dtype)
        && GatedDeltaTile::ScanMma.smem_bytes() <= limits.smem_per_block_bytes
    {
        (Form::ChunkedMma { pass: MMA_PASS }, "long sequences: chunks are matrix products, on tensor cores")
    } else {
        (Form::Chunked { pass: PASS }, "long sequences: chunks are matrix products")
    };
    Ok(Choice::new(form, form.main().threads(), why))
}

/// Whether there are kernels of tensor cores for a type.
pub(super) fn on_tensor_cores(dtype: DType) -> bool {
    MMA_VARIANTS.iter().any(|variant| variant.dtype == dtype)
}

/// The kernel of a type.
pub(super) fn variant(dtype: DType, tile: GatedDeltaTile) -> Result<&'static GatedDeltaVariant, Error> {
    let tables = if matches!(tile, GatedDeltaTile::ChunkMma | GatedDeltaTile::ScanMma) {
        MMA_VARIANTS
    } else {
        VARIANTS
    };
    first(OP, tables, dtype, |variant| (variant.dtype, variant.tile) == (dtype, tile))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_by_length() {
        let (pascal, ampere) = ((Arch::Sm61, 48), (Arch::Sm80, 99));
        for (longest, dtype, (floor, kib), form) in [
            (0, DType::BF16, ampere, Form::Recurrent),
            (1, DType::BF16, pascal, Form::Recurrent),
            (16, DType::BF16, ampere, Form::Recurrent),
            (17, DType::BF16, pascal, Form::Chunked { pass: PASS }),
            (17, DType::BF16, ampere, Form::ChunkedMma { pass: MMA_PASS }),
            (17, DType::F16, (Arch::Sm80, 64), Form::Chunked { pass: PASS }),
            (17, DType::F32, ampere, Form::Chunked { pass: PASS }),
        ] {
            let limits = DeviceLimits::new(floor, 20, kib << 10);
            let problem = GatedDeltaProblem {
                tokens: 64,
                sequences: 64,
                longest,
                heads_k: 1,
                heads_v: 2,
                dim_k: 128,
                dim_v: 128,
                dtype,
            };
            assert_eq!(select(&limits, &problem).unwrap().variant, form, "{longest} {dtype}");
            let limits = DeviceLimits { invariance: crate::Invariance::Batch, ..limits };
            assert_eq!(select(&limits, &problem).unwrap().variant, Form::Recurrent, "{longest}");
        }
    }

    /// Every floor's cards take the shared memory.
    #[test]
    fn shared_memory_fits() {
        for variant in VARIANTS {
            assert!(variant.tile.smem_bytes() <= 48 << 10, "{}", variant.entry);
        }
        for variant in MMA_VARIANTS {
            assert!(variant.tile.smem_bytes() <= 99 << 10, "{}", variant.entry);
        }
    }
}
