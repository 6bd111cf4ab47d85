//! Which kernel an append of latent rows takes.

use abi::ops::latent_append::{
    BLOCK_TILE_THREADS, LatentAppendTile, LatentAppendVariant, VARIANTS, WARPS_TILE_THREADS,
};

use super::{LatentAppendProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// Shared memory of the block tile: one f32 per warp.
pub(super) const SMEM_BYTES: u32 = 128;

/// Threads that an SM should have to do before one rotates more than one head.
const FULL_SM_THREADS: usize = 1024;

/// A kernel, and how many heads it takes at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAppendKernel {
    /// The kernel.
    pub variant: &'static LatentAppendVariant,
    /// Most heads that a thread rotates, the key among them: up to 4, or up to 2 if pairs are half a head apart; 1 for
    /// a block.
    pub heads_per_thread: u32,
}

impl LatentAppendKernel {
    fn threads(self) -> u32 {
        match self.variant.tile {
            LatentAppendTile::Warps { .. } => WARPS_TILE_THREADS,
            LatentAppendTile::Block => BLOCK_TILE_THREADS,
        }
    }
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    kernel: LatentAppendKernel,
    problem: &LatentAppendProblem,
) -> Result<Choice<LatentAppendKernel>, Error> {
    let LatentAppendKernel { variant, heads_per_thread } = kernel;
    let most = match variant.tile {
        LatentAppendTile::Warps { .. } => problem.most_heads_per_thread(),
        LatentAppendTile::Block => 1,
    };
    if fits(variant, problem) && (1..=most).contains(&heads_per_thread) {
        return Ok(Choice::asked_for(kernel, kernel.threads()));
    }
    let expected = match variant.tile {
        LatentAppendTile::Warps { chunks } => format!(
            "{} rows and heads of whole pieces of 16 bytes, at most {} of a latent part, and 1 to {most} heads per \
             thread",
            variant.dtype,
            32 * chunks
        ),
        LatentAppendTile::Block => format!("{} rows, one head per thread", variant.dtype),
    };
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}, {heads_per_thread} heads per thread")))
}

fn fits(variant: &LatentAppendVariant, problem: &LatentAppendProblem) -> bool {
    let per_16 = 16 / problem.dtype.bytes();
    variant.dtype == problem.dtype
        && match variant.tile {
            LatentAppendTile::Warps { chunks } => {
                problem.half().is_multiple_of(per_16)
                    && problem.latent.is_multiple_of(per_16)
                    && problem.latent / per_16 <= 32 * chunks as usize
            }
            LatentAppendTile::Block => true,
        }
}

/// A warp per row where there is one for it, by sizes and type alone; as many heads per thread as leave every SM work.
pub fn select(
    limits: &DeviceLimits,
    problem: &LatentAppendProblem,
) -> Result<Choice<LatentAppendKernel>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let choice = |heads_per_thread, why| {
        let kernel = LatentAppendKernel { variant, heads_per_thread };
        Ok(Choice::new(kernel, kernel.threads(), why))
    };
    if variant.tile == LatentAppendTile::Block {
        return choice(1, "a part of a row is not whole pieces of 16 bytes, or too large for a warp");
    }
    let of_token = problem.heads.saturating_add(1).saturating_mul(problem.places());
    let threads = problem.tokens.saturating_mul(of_token);
    let full = FULL_SM_THREADS * limits.num_sms as usize;
    let most = problem.most_heads_per_thread();
    let is_full = |heads: &u32| threads / *heads as usize >= full;
    match [4, 2].into_iter().filter(|&heads| heads <= most).find(is_full) {
        Some(heads) => choice(heads, "many tokens: several heads per thread"),
        None => choice(1, "few tokens: all threads at once"),
    }
}

/// The kernel for any size and alignment.
pub(super) fn block(problem: &LatentAppendProblem) -> Result<&'static LatentAppendVariant, Error> {
    let is_block =
        |variant: &LatentAppendVariant| variant.tile == LatentAppendTile::Block && fits(variant, problem);
    first(OP, VARIANTS, problem.dtype, is_block)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;
    use crate::ops::rope::RopeStyle;

    #[test]
    fn choice_by_row_and_tokens() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let (half, inter) = (RopeStyle::HalfSplit, RopeStyle::Interleaved);
        let table = [
            (DType::BF16, inter, [512, 64], 20, 1, "latent_append_bf16__warps2__sm61", 1),
            (DType::BF16, inter, [512, 64], 20, 200, "latent_append_bf16__warps2__sm61", 1),
            (DType::BF16, inter, [512, 64], 20, 256, "latent_append_bf16__warps2__sm61", 2),
            (DType::BF16, inter, [512, 64], 20, 2048, "latent_append_bf16__warps2__sm61", 4),
            (DType::BF16, half, [512, 64], 20, 2048, "latent_append_bf16__warps2__sm61", 2),
            (DType::F16, inter, [512, 8], 0, 1, "latent_append_f16__warps2__sm61", 1),
            (DType::F16, half, [512, 8], 3, 1, "latent_append_f16__block__sm61", 1),
            (DType::BF16, inter, [520, 64], 20, 1, "latent_append_bf16__block__sm61", 1),
            (DType::BF16, inter, [12, 64], 20, 4096, "latent_append_bf16__block__sm61", 1),
            (DType::F32, half, [512, 64], 20, 1, "latent_append_f32__warps4__sm61", 1),
            (DType::F32, half, [516, 64], 20, 1, "latent_append_f32__block__sm61", 1),
        ];
        for (dtype, style, sizes, heads, tokens, entry, per_thread) in table {
            let problem =
                LatentAppendProblem { style, ..LatentAppendProblem::new(tokens, heads, sizes, dtype, 1e-6) };
            let choice = select(&limits, &problem).unwrap().variant;
            assert_eq!((choice.variant.entry, choice.heads_per_thread), (entry, per_thread), "{problem:?}");
        }
    }

    #[test]
    fn what_is_asked_for() {
        let problem = LatentAppendProblem::new(1, 4, [512, 64], DType::BF16, 1e-6);
        let ask = |entry: &str, heads_per_thread, problem: &LatentAppendProblem| {
            let variant = VARIANTS.iter().find(|variant| variant.entry == entry).unwrap();
            forced(LatentAppendKernel { variant, heads_per_thread }, problem).is_ok()
        };
        let warps = "latent_append_bf16__warps2__sm61";
        let interleaved = LatentAppendProblem { style: RopeStyle::Interleaved, ..problem };
        assert!(ask(warps, 2, &problem) && !ask(warps, 3, &problem) && !ask(warps, 0, &problem));
        assert!(ask(warps, 4, &interleaved) && !ask(warps, 5, &interleaved));
        assert!(!ask(warps, 1, &LatentAppendProblem { latent: 516, ..problem }));
        assert!(!ask("latent_append_f16__warps2__sm61", 1, &problem));
        let block = "latent_append_bf16__block__sm61";
        assert!(ask(block, 1, &problem) && !ask(block, 2, &problem));
    }
}
