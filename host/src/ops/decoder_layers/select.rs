//! Which kernel a decoder's layers take, and how many blocks.

use abi::ops::decoder_layers::{
    DecoderLayersVariant, HEAD_DIM, MAX_GROUP, MAX_ROWS, MAX_SPLITS, THREADS, TILE_ROWS, VARIANTS, smem,
};

use super::{DecoderLayersProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// A kernel, and the blocks that share the rows of all weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderLayersKernel {
    /// The kernel.
    pub variant: &'static DecoderLayersVariant,
    /// Blocks: all of them must fit on the device at once, one to a multiprocessor.
    pub blocks: u32,
}

impl DecoderLayersKernel {
    /// Blocks of a key head.
    pub(super) fn splits(self, problem: &DecoderLayersProblem) -> u32 {
        (self.blocks / problem.heads_kv.max(1) as u32).min(MAX_SPLITS)
    }

    /// What it lacks for a problem, if it does.
    fn lack(self, problem: &DecoderLayersProblem) -> Option<String> {
        let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, .. } = *problem;
        let (group, blocks) = (heads_q / heads_kv.max(1), self.blocks as usize);
        if group > MAX_GROUP as usize {
            return Some(format!("at most {MAX_GROUP} query heads of a key head"));
        }
        if blocks < heads_kv {
            return Some(format!("a block for each of {heads_kv} key heads"));
        }
        // Rows of a block, in whole tiles; of a gate and up a tile has half as many of both.
        let tiles = |rows: usize, per_tile: usize| rows.div_ceil(blocks).div_ceil(per_tile);
        let tile = TILE_ROWS as usize;
        let most = [
            tiles((heads_q + 2 * heads_kv) * HEAD_DIM as usize, tile),
            tiles(hidden, tile),
            tiles(intermediate, tile / 2),
        ];
        let fits = most.into_iter().all(|tiles| tiles * tile <= MAX_ROWS as usize);
        (!fits).then(|| format!("at most {MAX_ROWS} rows of a weight for each of {blocks} blocks"))
    }
}

/// This kernel, if it can do the problem.
pub(super) fn forced(
    kernel: DecoderLayersKernel,
    problem: &DecoderLayersProblem,
) -> Result<Choice<DecoderLayersKernel>, Error> {
    match kernel.lack(problem) {
        None => Ok(Choice::asked_for(kernel, THREADS)),
        Some(lack) => Err(Error::invalid(OP, "variant", lack, format!("{kernel:?}, {problem:?}"))),
    }
}

/// A block to each multiprocessor, of Hopper's.
pub fn select(
    limits: &DeviceLimits,
    problem: &DecoderLayersProblem,
) -> Result<Choice<DecoderLayersKernel>, Error> {
    let refused =
        |reason: String| Error::Unsupported { op: OP, device: format!("{:?}", limits.floor), reason };
    if !limits.floor.runs(abi::Arch::Sm90a) || limits.smem_per_block_bytes < smem::BYTES {
        return Err(refused("it needs a card of Hopper or later".into()));
    }
    let variant = first(OP, VARIANTS, problem.dtype, |variant| variant.dtype == problem.dtype)?;
    let kernel = DecoderLayersKernel { variant, blocks: limits.num_sms };
    match kernel.lack(problem) {
        None => Ok(Choice::new(kernel, THREADS, "a block to each multiprocessor")),
        Some(lack) => Err(refused(format!("it needs {lack}"))),
    }
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn a_block_to_each_multiprocessor() {
        let limits = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        let table = [
            (28, [1024, 3072], [16, 8], true),
            (36, [2560, 9728], [32, 8], true),
            (28, [2048, 6144], [16, 8], true),
            (36, [4096, 12288], [32, 8], false),
            (36, [2048, 6144], [40, 4], false),
        ];
        for (layers, [hidden, intermediate], heads, fits) in table {
            let problem =
                DecoderLayersProblem::new(layers, [hidden, intermediate], heads, 2048, DType::BF16, 1e-6);
            let choice = select(&limits, &problem).ok().map(|choice| choice.variant);
            assert_eq!(choice.is_some(), fits, "{problem:?}");
            assert!(choice.is_none_or(|kernel| kernel.blocks == 132 && kernel.splits(&problem) == 16));
        }
        let problem = DecoderLayersProblem::new(2, [1024, 3072], [16, 8], 2048, DType::BF16, 1e-6);
        let message =
            select(&DeviceLimits::new(Arch::Sm80, 108, 163 << 10), &problem).unwrap_err().to_string();
        assert!(message.contains("it needs a card of Hopper or later"), "{message}");
    }
}
