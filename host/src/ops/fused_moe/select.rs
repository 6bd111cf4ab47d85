//! Which kernels the experts of few tokens take.

use abi::ops::fused_moe::{
    BLOCKS_PER_SM, FusedMoeStage, FusedMoeTile, PACKED_VARIANTS, PackedFusedMoeVariant, THREADS, VARIANTS,
    WARPS,
};

use super::{FusedMoeProblem, OP, check_limits};
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::ops::matmul::takes;
use crate::plan::{Choice, first};

/// Pieces of 16 bytes if all rows are whole numbers of them.
pub fn select(limits: &DeviceLimits, problem: &FusedMoeProblem) -> Result<Choice<FusedMoeTile>, Error> {
    check_limits(problem)?;
    for stage in [FusedMoeStage::Up, FusedMoeStage::Down] {
        packed(limits, problem, stage)?;
    }
    Ok(if fits(FusedMoeTile::Pieces, problem) {
        Choice::new(FusedMoeTile::Pieces, THREADS, "rows are whole pieces of 16 bytes")
    } else {
        Choice::new(FusedMoeTile::Elements, THREADS, "rows are not whole pieces of 16 bytes")
    })
}

fn fits(tile: FusedMoeTile, problem: &FusedMoeProblem) -> bool {
    let whole = |elements: usize| (elements * problem.dtype.bytes()).is_multiple_of(16);
    tile == FusedMoeTile::Elements || whole(problem.hidden) && whole(problem.inner)
}

/// These kernels, if they can do the problem.
pub(super) fn forced(tile: FusedMoeTile, problem: &FusedMoeProblem) -> Result<Choice<FusedMoeTile>, Error> {
    check_limits(problem)?;
    if fits(tile, problem) {
        return Ok(Choice::asked_for(tile, THREADS));
    }
    Err(Error::invalid(OP, "variant", format!("one that can do {problem:?}"), format!("{tile:?}")))
}

/// The kernel of a stage of packed weights, that of the longest groups; none if they are plain matrices.
fn packed(
    limits: &DeviceLimits,
    problem: &FusedMoeProblem,
    stage: FusedMoeStage,
) -> Result<Option<&'static PackedFusedMoeVariant>, Error> {
    let [Some(layout), shared] = problem.layouts(stage) else { return Ok(None) };
    let suits = |variant: &&PackedFusedMoeVariant| {
        let mut layouts = std::iter::once(layout).chain(shared);
        (variant.dtype, variant.stage) == (problem.dtype, stage)
            && limits.floor.runs(variant.floor)
            && layouts.all(|layout| layout.codes == variant.codes && takes(variant.group, &layout))
    };
    let variant = PACKED_VARIANTS.iter().filter(suits).max_by_key(|variant| variant.group);
    variant.map(Some).ok_or_else(|| {
        let expected =
            "packed weights that kernels of f16 or bf16 from sm_80 on read, the shared expert's by the same";
        Error::invalid(OP, "problem", expected, format!("{problem:?} on {}", limits.floor))
    })
}

/// The kernel of a stage.
pub(super) fn entry(
    device: &Device,
    problem: &FusedMoeProblem,
    stage: FusedMoeStage,
    tile: FusedMoeTile,
) -> Result<&'static str, Error> {
    if let Some(limits) = device.limits()
        && let Some(variant) = packed(&limits, problem, stage)?
    {
        return Ok(variant.entry);
    }
    let dtype = problem.dtype;
    let fits = |variant: &abi::ops::fused_moe::FusedMoeVariant| {
        (variant.dtype, variant.stage, variant.tile) == (dtype, stage, tile)
    };
    first(OP, VARIANTS, dtype, fits).map(|variant| variant.entry)
}

/// Blocks of a pair of the first kernel: as many as the card holds at once, all pairs together, and no more than give
/// each warp an element.
pub(super) fn up_blocks(num_sms: u32, pairs: u32, inner: u32) -> u32 {
    (num_sms * BLOCKS_PER_SM / pairs.max(1)).clamp(1, inner.div_ceil(WARPS).max(1))
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_size() -> Result<(), Error> {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, [2048, 768], FusedMoeTile::Pieces),
            (DType::BF16, [2048, 12], FusedMoeTile::Elements),
            (DType::F32, [12, 12], FusedMoeTile::Pieces),
            (DType::F32, [10, 12], FusedMoeTile::Elements),
        ];
        for (dtype, sizes, tile) in table {
            let problem = FusedMoeProblem::new(1, [8, 128], sizes, dtype);
            assert_eq!(select(&limits, &problem)?.variant, tile);
        }
        let wide = FusedMoeProblem::new(1, [8, 128], [2048, 4096], DType::BF16);
        let error = select(&limits, &wide).unwrap_err().to_string();
        let expected = "fused_moe: problem: expected rows of x, and of a token's experts in f32, of 48640 bytes at \
                        most on a card, got 131072";
        assert_eq!(error, expected);
        Ok(())
    }

    /// The layers of Qwen3-Coder-30B, GLM-4.7-Flash and Coder-Next on a card of 132 multiprocessors.
    #[test]
    fn blocks_that_a_card_holds_at_once() {
        for (pairs, inner, blocks) in
            [(8, 768, 49), (5, 1536, 79), (11, 512, 36), (1, 512, 64), (600, 512, 1)]
        {
            assert_eq!(up_blocks(132, pairs, inner), blocks, "{pairs} pairs of {inner}");
        }
    }
}
