//! Which kernel a norm and rotation of q and k takes.

use abi::ops::qk_norm_rope::{
    BLOCK_TILE_THREADS, LANES_TILE_THREADS, MAX_HEADS_PER_GROUP, QkNormRopeTile, QkNormRopeVariant, VARIANTS,
};

use super::{OP, QkNormRopeProblem, RopeStyle};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// Shared memory of the block tile: one f32 per warp.
pub(super) const SMEM_BYTES: u32 = 128;

/// Threads that an SM should have to do before a lane takes more than one head.
const FULL_SM_THREADS: usize = 1024;

/// A kernel, and how many heads it takes at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormRopeKernel {
    /// The kernel.
    pub variant: &'static QkNormRopeVariant,
    /// Most heads that a group of its lanes takes one after another; 1 for a block.
    pub heads_per_group: u32,
}

impl QkNormRopeKernel {
    fn threads(self) -> u32 {
        match self.variant.tile {
            QkNormRopeTile::Lanes { .. } => LANES_TILE_THREADS,
            QkNormRopeTile::Block => BLOCK_TILE_THREADS,
        }
    }
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    kernel: QkNormRopeKernel,
    problem: &QkNormRopeProblem,
) -> Result<Choice<QkNormRopeKernel>, Error> {
    let QkNormRopeKernel { variant, heads_per_group } = kernel;
    let most = match variant.tile {
        QkNormRopeTile::Lanes { .. } => MAX_HEADS_PER_GROUP,
        QkNormRopeTile::Block => 1,
    };
    if fits(variant, problem) && (1..=most).contains(&heads_per_group) {
        return Ok(Choice::asked_for(kernel, kernel.threads()));
    }
    let expected = match variant.tile {
        QkNormRopeTile::Lanes { lanes } => format!(
            "{} heads of whole pieces of 16 bytes, at most {lanes}, and at most {most} of them per group",
            variant.dtype
        ),
        QkNormRopeTile::Block => format!("{} heads, one per group", variant.dtype),
    };
    Err(Error::invalid(OP, "variant", expected, format!("{problem:?}, {heads_per_group} heads per group")))
}

/// Whether the parts of a head are whole pieces of 16 bytes: both halves of the rotated part if they are apart, the
/// rotated part if not, and the rest.
fn is_whole_pieces(problem: &QkNormRopeProblem) -> bool {
    let per_16 = 16 / problem.dtype.bytes();
    let part = match problem.style {
        RopeStyle::HalfSplit => problem.rotary_dim / 2,
        RopeStyle::Interleaved => problem.rotary_dim,
    };
    part.is_multiple_of(per_16) && problem.head_dim.is_multiple_of(per_16)
}

fn fits(variant: &QkNormRopeVariant, problem: &QkNormRopeProblem) -> bool {
    (variant.dtype, variant.cache_dtype) == (problem.dtype, problem.cache_dtype)
        && match variant.tile {
            QkNormRopeTile::Lanes { lanes } => {
                is_whole_pieces(problem) && problem.head_dim * problem.dtype.bytes() <= 16 * lanes as usize
            }
            QkNormRopeTile::Block => true,
        }
}

/// The fewest lanes that hold a head, by the head's size and type alone; as many heads per group as leave every SM
/// work.
pub fn select(limits: &DeviceLimits, problem: &QkNormRopeProblem) -> Result<Choice<QkNormRopeKernel>, Error> {
    let variant = first(OP, VARIANTS, problem.dtype, |variant| fits(variant, problem))?;
    let choice = |heads_per_group, why| {
        let kernel = QkNormRopeKernel { variant, heads_per_group };
        Ok(Choice::new(kernel, kernel.threads(), why))
    };
    let QkNormRopeTile::Lanes { lanes } = variant.tile else {
        let why = "heads are not whole pieces of 16 bytes, or too large for a warp";
        return choice(1, why);
    };
    let heads = problem.heads_q + 2 * problem.heads_kv;
    let threads = problem.tokens.saturating_mul(heads * lanes as usize);
    let full = FULL_SM_THREADS * limits.num_sms as usize;
    // The most heads spare instructions, not latency: for several rounds of blocks only.
    let rungs = [(MAX_HEADS_PER_GROUP, 4 * full), (4, full), (2, full)];
    let is_full = |&&(heads, wanted): &&(u32, usize)| threads / heads as usize >= wanted;
    let heads_per_group = rungs.iter().find(is_full).map_or(1, |&(heads, _)| heads);
    let why = if heads_per_group == 1 {
        "few tokens: all lanes at once"
    } else {
        "many tokens: several heads per lane"
    };
    choice(heads_per_group, why)
}

/// The kernel for any size and alignment.
pub(super) fn block(problem: &QkNormRopeProblem) -> Result<&'static QkNormRopeVariant, Error> {
    let is_block =
        |variant: &QkNormRopeVariant| variant.tile == QkNormRopeTile::Block && fits(variant, problem);
    first(OP, VARIANTS, problem.dtype, is_block)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_head_and_tokens() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let (half, inter) = (RopeStyle::HalfSplit, RopeStyle::Interleaved);
        let table = [
            (DType::BF16, half, 128, 128, 1, "qk_norm_rope_bf16__lanes16__sm61", 1),
            (DType::BF16, half, 128, 128, 214, "qk_norm_rope_bf16__lanes16__sm61", 2),
            (DType::BF16, half, 128, 128, 1024, "qk_norm_rope_bf16__lanes16__sm61", 4),
            (DType::BF16, half, 128, 128, 4096, "qk_norm_rope_bf16__lanes16__sm61", 8),
            (DType::F16, half, 256, 64, 1, "qk_norm_rope_f16__lanes32__sm61", 1),
            (DType::BF16, half, 64, 64, 1, "qk_norm_rope_bf16__lanes8__sm61", 1),
            (DType::BF16, half, 24, 24, 4096, "qk_norm_rope_bf16__block__sm61", 1),
            (DType::BF16, inter, 24, 24, 1, "qk_norm_rope_bf16__lanes8__sm61", 1),
            (DType::BF16, half, 512, 64, 1, "qk_norm_rope_bf16__block__sm61", 1),
            (DType::F32, half, 128, 128, 1, "qk_norm_rope_f32__lanes32__sm61", 1),
            (DType::F32, half, 256, 256, 1, "qk_norm_rope_f32__block__sm61", 1),
        ];
        for (dtype, style, head_dim, rotary_dim, tokens, entry, heads) in table {
            let problem = QkNormRopeProblem {
                tokens,
                heads_q: 8,
                heads_kv: 2,
                head_dim,
                rotary_dim,
                style,
                dtype,
                cache_dtype: dtype,
                norm: None,
            };
            let choice = select(&limits, &problem).unwrap().variant;
            assert_eq!((choice.variant.entry, choice.heads_per_group), (entry, heads), "{tokens} tokens");
            let fp8 = QkNormRopeProblem { cache_dtype: DType::F8E4M3, ..problem };
            let choice = select(&limits, &fp8).unwrap().variant;
            assert_eq!((choice.variant.dtype, choice.variant.cache_dtype), (dtype, DType::F8E4M3));
        }
    }
}
