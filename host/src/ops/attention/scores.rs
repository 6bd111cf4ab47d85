//! What changes scores besides the scale and the mask by places.

use abi::DType;
use abi::ops::attention::{ADDED, AttentionDims, AttentionTile, SEEN, ScoreDims, wgmma_knows_blocks};

use super::{AttentionProblem, OP};
use crate::error::Error;
use crate::plan::Check;
use crate::tensor::{TensorView, views};

/// What changes scores besides the scale and the mask by places.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// A soft cap, from 1e-30 to 1e30: a score s becomes `cap · tanh(s / cap)`.
    pub soft_cap: Option<f32>,
    /// What [`ScoreTensors::bias`] of the runs is.
    pub bias: ScoreBias,
    /// How many queries, and how many keys, a block of [`ScoreTensors::blocks`] has, if the runs have one: 16, 32, 64
    /// or 128.
    pub blocks: Option<usize>,
}

/// What is given for each query and key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScoreBias {
    /// Nothing.
    #[default]
    None,
    /// A number of q's type that is added to the score; −∞ hides the key.
    Additive,
    /// An i8: 0 hides the key.
    Boolean,
}

impl Scores {
    /// No soft cap and no masks.
    pub const PLAIN: Scores = Scores { soft_cap: None, bias: ScoreBias::None, blocks: None };

    pub(super) fn check(&self) -> Result<(), Error> {
        let invalid = |expected: &str, got: String| Err(Error::invalid(OP, "problem", expected, got));
        match self.soft_cap {
            Some(cap) if !(1e-30..=1e30).contains(&cap) => {
                return invalid("a soft cap from 1e-30 to 1e30", cap.to_string());
            }
            _ => {}
        }
        match self.blocks {
            Some(size) if ![16, 32, 64, 128].contains(&size) => {
                invalid("blocks of 16, 32, 64 or 128", size.to_string())
            }
            _ => Ok(()),
        }
    }
}

/// What changes the scores of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreTensors<'a> {
    /// `[heads_q]` f32, if there: a score of each head's that has no key and no value. It joins the sum that weights
    /// are divided by.
    pub sinks: Option<TensorView<'a>>,
    /// `[batch, heads_q, seq_q, seq_kv]`, each of the first three also 1, which is for all: see [`ScoreBias`].
    pub bias: Option<TensorView<'a>>,
    /// `[batch, heads_q, blocks of queries, words]` u32, if planned; batch also 1, heads_q also heads_kv or 1, which
    /// are for all. Bit i of word w says whether the block of queries sees the block of keys 32·w + i. Blocks are
    /// counted from the first query and the first key; the last ones may be in part beyond them.
    pub blocks: Option<TensorView<'a>>,
}

views!(ScoreTensors { sinks, bias, blocks });

impl ScoreTensors<'_> {
    /// Checks the tensors of a run; what the kernels are to know of the masks.
    pub(super) fn check(
        &self,
        at: &Check<'_>,
        problem: &AttentionProblem,
        [batch, seq_q, seq_kv]: [usize; 3],
    ) -> Result<ScoreDims, Error> {
        let AttentionProblem { heads_q, heads_kv, dtype, scores, .. } = *problem;
        let mut dims = ScoreDims::default();
        if let Some(sinks) = self.sinks {
            let [] = at.elements("sinks", sinks, DType::F32, &[Some(heads_q)])?;
        }
        let bias = at.given("bias", scores.bias != ScoreBias::None, self.bias, ["planned"; 2])?;
        let blocks = at.given("blocks", scores.blocks.is_some(), self.blocks, ["planned"; 2])?;
        if let Some(bias) = bias {
            let dtype = if scores.bias == ScoreBias::Boolean { DType::I8 } else { dtype };
            let sizes =
                [or_one(&bias, 0, &[batch]), or_one(&bias, 1, &[heads_q]), or_one(&bias, 2, &[seq_q])];
            let shape = [sizes[0], sizes[1], sizes[2], Some(seq_kv)];
            dims.bias = if scores.bias == ScoreBias::Boolean { SEEN } else { ADDED };
            [dims.bias_batch_stride, dims.bias_head_stride, dims.bias_query_stride] =
                at.elements("bias", bias, dtype, &shape)?;
        }
        if let (Some(blocks), Some(size)) = (blocks, scores.blocks) {
            let sizes = [or_one(&blocks, 0, &[batch]), or_one(&blocks, 1, &[heads_q, heads_kv])];
            let words = seq_kv.div_ceil(size).div_ceil(32);
            let shape = [sizes[0], sizes[1], Some(seq_q.div_ceil(size)), Some(words)];
            let strides: [u32; 3] = at.elements("blocks", blocks, DType::U32, &shape)?;
            // The kernels count its words in u32.
            let outer = std::iter::zip(blocks.shape(), strides).map(|(size, stride)| size * stride as usize);
            at.size("blocks", "extent", outer.sum::<usize>().saturating_add(words))?;
            dims.block_shift = size.ilog2();
            dims.blocks_group = (heads_q / blocks.shape()[1]) as u32;
            [dims.blocks_batch_stride, dims.blocks_head_stride, dims.blocks_query_stride] = strides;
        }
        Ok(dims)
    }
}

/// What the size of an axis is to be: one of these or 1, and the first if it is none of them.
fn or_one(view: &TensorView<'_>, axis: usize, sizes: &[usize]) -> Option<usize> {
    let got = view.shape().get(axis).copied();
    got.filter(|size| *size == 1 || sizes.contains(size)).or(sizes.first().copied())
}

/// Whether the kernels of a tile can do the scores.
pub(super) fn runs(tile: AttentionTile, problem: &AttentionProblem) -> bool {
    let Scores { soft_cap, bias, blocks } = problem.scores;
    let has_masks = match tile {
        AttentionTile::Wgmma { consumers, dim_v, masked, .. } => {
            masked == (bias != ScoreBias::None) && (blocks.is_none() || wgmma_knows_blocks(consumers, dim_v))
        }
        AttentionTile::Prefill { .. } | AttentionTile::Decode { .. } => true,
        AttentionTile::PrefillMma { masked, .. } => masked == (bias != ScoreBias::None) && blocks.is_none(),
        _ => bias == ScoreBias::None && blocks.is_none(),
    };
    // Latent attention's has none: no model's has.
    let has_cap = !tile.is_latent();
    let [cap_in, cap_out] = cap(problem, Some(tile));
    has_masks && (soft_cap.is_none() || (has_cap && cap_in.is_normal() && cap_out.is_normal()))
}

/// What the kernels of a tile, none on the CPU, multiply by before and after the tanh of the soft cap; zeros if there
/// is none.
pub(super) fn cap(problem: &AttentionProblem, tile: Option<AttentionTile>) -> [f32; 2] {
    let Some(cap) = problem.scores.soft_cap else {
        return [0.0; 2];
    };
    match tile {
        Some(AttentionTile::Wgmma { .. } | AttentionTile::PrefillMma { .. }) => {
            [problem.scale() / cap, cap / problem.scale()]
        }
        Some(_) if problem.dtype != DType::F32 => {
            let cap = cap * std::f32::consts::LOG2_E;
            [1.0 / cap, cap]
        }
        _ => [1.0 / cap, cap],
    }
}

/// Whether a query sees the block of a key; the same as the kernels' `Blocks`.
pub(super) fn in_block(
    dims: &AttentionDims,
    blocks: &[u32],
    [batch, head, query]: [usize; 3],
    key: usize,
) -> bool {
    let ScoreDims {
        block_shift,
        blocks_group,
        blocks_batch_stride,
        blocks_head_stride,
        blocks_query_stride,
        ..
    } = dims.scores;
    let block = key >> block_shift;
    let at = batch * blocks_batch_stride as usize
        + head / blocks_group as usize * blocks_head_stride as usize
        + (query >> block_shift) * blocks_query_stride as usize
        + block / 32;
    blocks[at] >> (block % 32) & 1 != 0
}
