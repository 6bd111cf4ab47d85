//! The parameters of a launch: what `check` has found of a run, and what each kind of kernel adds to it.

use std::ops::Deref;

use abi::ops::attention::{
    AttentionDims, AttentionTile, GROUP_SPLITS, LATENT_KEYS, MERGE_COLUMNS, MERGE_PARTS, ScoreDims,
};

use super::launch::{Loaded, blocks};
use crate::error::Error;

/// What `check` has found. Only `for_…` make the parameters of a launch of it: each fills all that depends on the
/// kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checked(AttentionDims);

/// A launch of a kernel for few queries, and of the merge behind it.
pub(super) struct Decode {
    pub(super) dims: AttentionDims,
    pub(super) grid: u32,
    pub(super) merge_grid: [u32; 3],
}

impl Deref for Checked {
    type Target = AttentionDims;

    fn deref(&self) -> &AttentionDims {
        &self.0
    }
}

impl Checked {
    /// Of what is the same for all kernels: `tiles`, `box_keys`, `result_shift`, `merge_parts` and `grid` are not
    /// looked at.
    pub(super) fn new(dims: AttentionDims) -> Self {
        Checked(dims)
    }

    /// With a soft cap as the kernel has it.
    pub(super) fn capped(self, [cap_in, cap_out]: [f32; 2]) -> Self {
        Checked(AttentionDims { scores: ScoreDims { cap_in, cap_out, ..self.scores }, ..self.0 })
    }

    /// Of so many sequences.
    pub(super) fn of_sequences(self, sequences: u32) -> Self {
        Checked(AttentionDims { batch: sequences, sequences, ..self.0 })
    }

    /// With keys and values in one piece for each sequence, of these strides of sequences, tokens and heads.
    pub(super) fn gathered(self, k: [u32; 3], v: [u32; 3]) -> Self {
        let (
            [k_batch_stride, k_token_stride, k_head_stride],
            [v_batch_stride, v_token_stride, v_head_stride],
        ) = (k, v);
        Checked(AttentionDims {
            k_batch_stride,
            k_token_stride,
            k_head_stride,
            v_batch_stride,
            v_token_stride,
            v_head_stride,
            page_log2: 31,
            num_pages: 1,
            table_stride: 0,
            ..self.0
        })
    }

    /// Of the kernel that gathers keys, which has no tiles of queries.
    pub(super) fn for_gather(&self) -> &AttentionDims {
        &self.0
    }

    /// Of a kernel with tiles of queries and without tensor maps.
    pub(super) fn for_prefill(self, tile: AttentionTile) -> AttentionDims {
        let mut dims = self.0;
        if dims.tokens_q == 0 {
            dims.tiles = dims.seq_q.div_ceil(tile.rows());
        } else {
            // The places of `tile::sequences`, for all sequences together.
            (dims.tiles, dims.batch) = (dims.tokens_q / tile.rows() + dims.sequences, 1);
            dims.section = dims.section.min(dims.heads_q);
        }
        dims
    }

    /// Tiles of all heads and sequences.
    pub(super) fn prefill_tiles(self, tile: AttentionTile) -> Result<u32, Error> {
        let dims = self.for_prefill(tile);
        blocks(&[dims.tiles, dims.batch, dims.heads_q])
    }

    /// Rows of q and out, of all sequences.
    pub(super) fn rows(&self) -> u32 {
        if self.tokens_q == 0 { self.batch * self.seq_q } else { self.tokens_q }
    }

    /// Of a kernel whose blocks share keys, with results for each part: `[parts · batch, seq_q, heads_q, head_dim_v]`
    /// and `[heads_q, parts · rows]`; packed `[1, parts · tokens, heads_q, head_dim_v]`.
    pub(super) fn in_parts(self, key_parts_log2: u32) -> Self {
        let dims = self.0;
        let own_rows = |stride: u32| if dims.tokens_q == 0 { stride } else { 0 };
        let out_token_stride = dims.heads_q * dims.head_dim_v;
        Checked(AttentionDims {
            out_batch_stride: own_rows(dims.seq_q * out_token_stride),
            out_token_stride,
            out_head_stride: dims.head_dim_v,
            lse_batch_stride: own_rows(dims.seq_q),
            lse_head_stride: self.rows() << key_parts_log2,
            key_parts_log2,
            ..dims
        })
    }

    /// Of the kernel that combines the results of the parts.
    pub(super) fn for_combine(self, key_parts_log2: u32) -> AttentionDims {
        AttentionDims { key_parts_log2, ..self.0 }
    }

    /// Of one with tensor maps, by as many blocks as there are multiprocessors at most.
    pub(super) fn for_wgmma(
        self,
        tile: AttentionTile,
        keys: u32,
        page_size: Option<usize>,
        num_sms: u32,
    ) -> Result<AttentionDims, Error> {
        let dims = self.for_prefill(tile);
        let items = blocks(&[dims.tiles, dims.batch, dims.heads_q, 1 << dims.key_parts_log2])?;
        let (box_keys, grid) = (box_keys(page_size, keys), items.min(num_sms.max(1)));
        Ok(AttentionDims { box_keys, grid, ..dims })
    }

    /// Of a kernel for few queries. From `many_pieces` on of [`MERGE_PARTS`] times [`MERGE_COLUMNS`] columns a warp of
    /// the merge does each.
    pub(super) fn for_decode(
        self,
        kernel: &Loaded,
        page_size: Option<usize>,
        many_pieces: u32,
    ) -> Result<Decode, Error> {
        let dims = self.0;
        let tiles = (dims.seq_q * dims.group).div_ceil(kernel.variant.tile.rows());
        // A block joins the splits of a group where no block does more of them then than it else would, but for a
        // sixteenth.
        let results = |splits: u32| blocks(&[dims.splits.div_ceil(splits), tiles, dims.heads_kv, dims.batch]);
        let each = |results: u32| results.div_ceil(kernel.places).max(1);
        let (alone, joined) = (results(1)?, results(GROUP_SPLITS)?);
        let joins =
            kernel.joins && each(joined).saturating_mul(GROUP_SPLITS) <= each(alone) + each(alone) / 16;
        let (items, splits, result_shift) = if joins {
            (joined, dims.splits.next_multiple_of(GROUP_SPLITS), GROUP_SPLITS.ilog2())
        } else {
            (alone, dims.splits, 0)
        };
        let merge_rows = blocks(&[dims.batch, dims.seq_q])?;
        let merge_grid =
            |parts: u32| [merge_rows, dims.heads_q, dims.head_dim_v.div_ceil(MERGE_COLUMNS * parts)];
        let is_many = blocks(&merge_grid(MERGE_PARTS))? >= many_pieces;
        let merge_parts = if is_many { MERGE_PARTS } else { 1 };
        let box_keys = box_keys(page_size, LATENT_KEYS);
        Ok(Decode {
            dims: AttentionDims { tiles, splits, box_keys, result_shift, merge_parts, ..dims },
            // No more blocks than do as many results each as the one with most: 8192 are 32 for each of 256, not 31 for
            // 256 of 264.
            grid: items.div_ceil(each(items)),
            merge_grid: merge_grid(merge_parts),
        })
    }
}

/// Keys of a box of the tensor maps of k and v: all boxes of a step lie in one page each.
fn box_keys(page_size: Option<usize>, step_keys: u32) -> u32 {
    // Page sizes are powers of two: the largest that divides the step is that of its lowest bit.
    let divisor = 1 << step_keys.trailing_zeros();
    page_size.map_or(step_keys, |page_size| divisor.min(page_size as u32))
}
