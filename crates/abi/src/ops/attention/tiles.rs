//! How the work is cut up, and what that takes.

/// Keys of one split of the decode kernels. Fixed, so that the order of a row's sums depends on its own length only.
pub const SPLIT_KEYS: u32 = 256;
/// Splits of a group, whose results are joined one after another: by the decode kernel, if a block does them all, or by
/// the merge.
pub const GROUP_SPLITS: u32 = 4;
/// Threads of a block of the prefill and decode kernels.
pub const THREADS: u32 = 128;
/// Parts of a sum of the merge kernels, every so many-th group each.
pub const MERGE_PARTS: u32 = 4;
/// Columns of a block of the merge kernels, a warp, for each part that a lane does.
pub const MERGE_COLUMNS: u32 = 32;
/// The largest `head_dim` and `head_dim_v` of the prefill kernels.
pub const MAX_PREFILL_DIM: u32 = 256;
/// The largest `head_dim`.
pub const MAX_HEAD_DIM: u32 = 576;
/// The largest `head_dim_v`.
pub const MAX_HEAD_DIM_V: u32 = 512;
/// Threads of a block of the combining kernels.
pub const COMBINE_THREADS: u32 = 128;
/// Most parts of a tile's keys, as a power of two.
pub const MAX_KEY_PARTS_LOG2: u32 = 5;
/// Threads of a block of the gather kernels.
pub const GATHER_THREADS: u32 = 256;
/// Keys of a block of the gather kernels: all of one page.
pub const GATHER_KEYS: u32 = 16;
/// Steps whose pages a paged `PrefillMma` tile has in shared memory, a number for every 16 keys of each.
pub const PREFILL_PAGE_STEPS: u32 = 4;
/// Rows of a thread of the prefill kernels.
pub const PREFILL_THREAD_ROWS: u32 = 4;

/// How the work is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionTile {
    /// A block does a tile of queries of one head against all of its keys.
    Prefill {
        /// Largest `head_dim` and `head_dim_v`; the rest of a shorter head is zeros.
        dim: u32,
        /// Keys of a tile.
        keys: u32,
        /// Lanes that share a row of scores.
        lanes: u32,
    },
    /// The same on the tensor cores of Ampere and later.
    PrefillMma {
        /// Largest `head_dim`; the rest of a shorter head is zeros.
        dim: u32,
        /// Largest `head_dim_v`.
        dim_v: u32,
        /// Keys of a step.
        keys: u32,
        /// Times 16 queries of a warp.
        parts: u32,
        /// Blocks that a multiprocessor is to hold, which bounds the registers.
        blocks: u32,
        /// Whether it is for an additive or a boolean mask, or for none.
        masked: bool,
        /// Whether several blocks share the keys of a tile, and leave a result each: `Combine` comes behind it.
        split: bool,
        /// Whether it is for keys and values in pages, or for those in one piece.
        paged: bool,
    },
    /// A block does rows of all the heads that share a key head, against [`SPLIT_KEYS`] keys, and leaves an unfinished
    /// result for the merge.
    Decode {
        /// Largest `head_dim`.
        dim: u32,
        /// Largest `head_dim_v`.
        dim_v: u32,
        /// Rows of a block: pairs of a query and a head.
        rows: u32,
    },
    /// The same by persistent blocks, which `cp.async` keeps supplied.
    DecodeRing {
        /// Largest `head_dim` and `head_dim_v`.
        dim: u32,
        /// Pairs of a query and a head of those that share a key head: 8 or 16.
        rows: u32,
        /// Chunks of 16 keys of a warp in shared memory.
        places: u32,
        /// Bytes of an element of k and v.
        kv_bytes: u32,
        /// Blocks that a multiprocessor is to hold, if it has the shared memory.
        blocks: u32,
    },
    /// The same for heads of 576 and 512 whose values are the first columns of the keys' rows: one step of keys in
    /// shared memory is both.
    DecodeLatent {
        /// Steps of [`DECODE_LATENT_KEYS`] keys in shared memory.
        places: u32,
    },
    /// The same on Hopper: persistent blocks, to which TMA brings steps of [`LATENT_KEYS`] keys.
    DecodeLatentWgmma {},
    /// A warp merges the splits of some columns of one row, see [`MERGE_COLUMNS`].
    Merge {},
    /// A thread combines 8 columns of the results that a row has of the parts of its keys.
    Combine {},
    /// A block takes [`GATHER_KEYS`] keys of a sequence from fp8, in one piece or in a page, to where the other kernels
    /// take them from.
    Gather {},
    /// Hopper: persistent blocks of a warpgroup that loads and `consumers` that do 64 queries of one head each.
    Wgmma {
        /// Largest `head_dim`; the rest of a shorter head is zeros.
        dim: u32,
        /// Largest `head_dim_v`.
        dim_v: u32,
        /// Keys of a step.
        keys: u32,
        /// Warpgroups that compute.
        consumers: u32,
        /// Threads of the block: theirs, and as many as a warpgroup has.
        threads: u32,
        /// As for `PrefillMma`.
        masked: bool,
        /// As for `PrefillMma`.
        split: bool,
    },
}

/// Rows of a `DecodeRing` tile, the most.
pub const DECODE_RING_ROWS: u32 = 16;
/// Columns of results in shared memory at a time, at most.
pub const DECODE_RING_COLUMNS: u32 = 128;
/// Floats between the rows of those.
pub const DECODE_RING_PADDING: u32 = 4;

/// Shared memory of a `DecodeRing` tile for q, which all warps have there beside fp8 keys: operands, a factor per row,
/// a mark per warp. Wider heads have no room for it.
pub const fn decode_ring_q_bytes(dim: u32, rows: u32, kv_bytes: u32) -> u32 {
    if kv_bytes == 1 && dim <= 128 { rows * (dim * 2 + 4) + THREADS / 32 * 4 } else { 0 }
}

/// Whether a `DecodeRing` tile can join the splits of a group: wider heads have no registers for it.
pub const fn decode_ring_joins(dim: u32) -> bool {
    dim <= 128
}

/// Shared memory of a `DecodeRing` tile besides, where it joins the splits of a group: their largest scores, twice, and
/// sums, then their results, of so many rows.
pub const fn decode_ring_group_bytes(dim: u32, rows: u32) -> u32 {
    DECODE_RING_GROUP_NUMBERS_BYTES + rows * dim * 4
}

/// See [`decode_ring_group_bytes`].
pub const DECODE_RING_GROUP_NUMBERS_BYTES: u32 = 3 * DECODE_RING_ROWS * 4;

/// Rows of a `DecodeLatent` tile, and of a `DecodeLatentWgmma` tile.
pub const DECODE_LATENT_ROWS: u32 = 32;
/// Keys of a step of a `DecodeLatent` tile.
pub const DECODE_LATENT_KEYS: u32 = 32;
/// Groups of warps that share the columns of q and k of one.
pub const DECODE_LATENT_PARTS: u32 = 4;
/// Threads of a block of one.
pub const DECODE_LATENT_THREADS: u32 = 256;

/// Keys of a step of a `DecodeLatentWgmma` tile.
pub const LATENT_KEYS: u32 = 64;
/// Steps of keys in its shared memory, and tiles of q, and steps' weights.
pub const LATENT_STAGES: u32 = 2;
/// What its warps tell each other of a step: a word, and four numbers of each row.
pub const LATENT_NOTE_BYTES: u32 = 16 + 4 * DECODE_LATENT_ROWS * 4;
/// Its shared memory behind all that: the rows' largest scores of four warps, twice, their sums, what those are
/// relative to, four words, twice, then barriers.
pub const LATENT_NUMBERS_BYTES: u32 =
    (3 * 4 + 1) * DECODE_LATENT_ROWS * 4 + 2 * 4 * 4 + 5 * LATENT_STAGES * 8;

/// The most steps of keys, and of values, in shared memory of a `Wgmma` tile.
pub const WGMMA_MAX_STAGES: u32 = 4;
/// Shared memory of a `Wgmma` tile behind its tensors: barriers, marks and what the loader tells, then the barriers of
/// a second place of q.
pub const WGMMA_BARRIER_BYTES: u32 = 496;

/// Whether the `Wgmma` kernels of so many consumers, and such values, know block masks: others have no registers for
/// it.
pub const fn wgmma_knows_blocks(consumers: u32, dim_v: u32) -> bool {
    consumers == 2 && dim_v <= 128
}

/// Steps of keys, and of values, in shared memory of a `Wgmma` tile, as a power of two: what there is room for.
pub const fn wgmma_stages_log2(dim: u32) -> u32 {
    if dim == 64 { 2 } else { 1 }
}

/// Whether the result of a `Wgmma` tile takes q's place in shared memory.
pub const fn wgmma_out_in_q(dim: u32) -> bool {
    dim > 128
}

/// Tiles whose q a `Wgmma` tile has room for.
pub const fn wgmma_q_places(dim: u32) -> u32 {
    if wgmma_out_in_q(dim) { 1 } else { 2 }
}

impl AttentionTile {
    /// The largest `head_dim` and `head_dim_v`.
    pub const fn max_head_dims(self) -> (u32, u32) {
        match self {
            AttentionTile::Prefill { dim, .. } | AttentionTile::DecodeRing { dim, .. } => (dim, dim),
            AttentionTile::Decode { dim, dim_v, .. } => (dim, dim_v),
            AttentionTile::DecodeLatent { .. }
            | AttentionTile::DecodeLatentWgmma {}
            | AttentionTile::Merge {}
            | AttentionTile::Combine {}
            | AttentionTile::Gather {} => (MAX_HEAD_DIM, MAX_HEAD_DIM_V),
            AttentionTile::PrefillMma { dim, dim_v, .. } | AttentionTile::Wgmma { dim, dim_v, .. } => {
                (dim, dim_v)
            }
        }
    }

    /// Rows of a block: queries of a head (prefill), pairs of query and head (decode).
    pub const fn rows(self) -> u32 {
        match self {
            AttentionTile::Prefill { lanes, .. } => THREADS / lanes * PREFILL_THREAD_ROWS,
            AttentionTile::PrefillMma { parts, .. } => THREADS / 32 * 16 * parts,
            AttentionTile::Decode { rows, .. } => rows,
            AttentionTile::DecodeRing { rows, .. } => rows,
            AttentionTile::DecodeLatent { .. } | AttentionTile::DecodeLatentWgmma {} => DECODE_LATENT_ROWS,
            AttentionTile::Merge {} | AttentionTile::Combine {} | AttentionTile::Gather {} => 1,
            AttentionTile::Wgmma { consumers, .. } => 64 * consumers,
        }
    }

    /// Threads of a block, the most.
    pub const fn threads(self) -> u32 {
        match self {
            AttentionTile::Prefill { .. }
            | AttentionTile::PrefillMma { .. }
            | AttentionTile::Decode { .. }
            | AttentionTile::DecodeRing { .. } => THREADS,
            AttentionTile::DecodeLatent { .. } => DECODE_LATENT_THREADS,
            AttentionTile::DecodeLatentWgmma {} => 4 * 128,
            AttentionTile::Merge {} => 32,
            AttentionTile::Combine {} => COMBINE_THREADS,
            AttentionTile::Gather {} => GATHER_THREADS,
            AttentionTile::Wgmma { threads, .. } => threads,
        }
    }

    /// Whether the merge comes after it.
    pub const fn is_decode(self) -> bool {
        matches!(
            self,
            AttentionTile::Decode { .. }
                | AttentionTile::DecodeRing { .. }
                | AttentionTile::DecodeLatent { .. }
                | AttentionTile::DecodeLatentWgmma {}
        )
    }

    /// Whether blocks share the keys of a tile of many queries: `Combine` comes after it.
    pub const fn splits_keys(self) -> bool {
        matches!(
            self,
            AttentionTile::PrefillMma { split: true, .. } | AttentionTile::Wgmma { split: true, .. }
        )
    }

    /// Whether it is for heads of [`MAX_HEAD_DIM`] alone, whose first columns are the values.
    pub const fn is_latent(self) -> bool {
        matches!(self, AttentionTile::DecodeLatent { .. } | AttentionTile::DecodeLatentWgmma {})
    }

    /// Shared memory of a block in bytes.
    ///
    /// Prefill: the tile of q, then one of k or v, as f32. PrefillMma: the tile of q, two steps of k, one of v, a mark
    /// per warp, pages. Decode: the weights of the split, which the four warps' partial results take the place of, then
    /// two f32 per warp and row. DecodeRing: the ring, the warps' results, then the same and a mark per warp, q if need
    /// be. DecodeLatent: the ring, the parts of a step's scores, the weights, an f32 per row. DecodeLatentWgmma: steps
    /// of keys, tiles of q, steps' weights and notes, then numbers and barriers. Wgmma: the places of q, the result
    /// unless it takes q's place, the stages of k and v.
    pub const fn smem_bytes(self) -> u32 {
        match self {
            AttentionTile::Prefill { dim, keys, .. } => (self.rows() + keys) * dim * 4,
            AttentionTile::PrefillMma { dim, dim_v, keys, paged, .. } => {
                let pages = if paged { PREFILL_PAGE_STEPS * keys / 16 * 4 } else { 0 };
                ((self.rows() + 2 * keys) * dim + keys * dim_v) * 2 + THREADS / 32 * 4 + pages
            }
            AttentionTile::Decode { dim_v, rows, .. } => {
                decode_results_bytes(dim_v, rows) + 2 * (THREADS / 32) * rows * 4
            }
            AttentionTile::DecodeRing { dim, rows, places, kv_bytes, .. } => {
                let columns = if dim < DECODE_RING_COLUMNS { dim } else { DECODE_RING_COLUMNS };
                let results = (rows * (columns + DECODE_RING_PADDING + 2) + 1) * 4;
                THREADS / 32 * (places * 16 * dim * kv_bytes + results)
                    + decode_ring_q_bytes(dim, rows, kv_bytes)
            }
            AttentionTile::DecodeLatent { places } => {
                let scores = DECODE_LATENT_ROWS * DECODE_LATENT_KEYS;
                places * DECODE_LATENT_KEYS * MAX_HEAD_DIM * 2
                    + scores * (DECODE_LATENT_PARTS * 4 + 2)
                    + DECODE_LATENT_ROWS * 4
            }
            AttentionTile::DecodeLatentWgmma {} => {
                let rows = LATENT_KEYS + DECODE_LATENT_ROWS;
                let stage =
                    rows * MAX_HEAD_DIM * 2 + LATENT_KEYS * DECODE_LATENT_ROWS * 2 + LATENT_NOTE_BYTES;
                LATENT_STAGES * stage + LATENT_NUMBERS_BYTES
            }
            AttentionTile::Merge {} | AttentionTile::Combine {} | AttentionTile::Gather {} => 0,
            AttentionTile::Wgmma { dim, dim_v, keys, .. } => {
                let q = wgmma_q_places(dim) * self.rows() * dim;
                let out = if wgmma_out_in_q(dim) { 0 } else { self.rows() * dim_v };
                let stages = (keys * (dim + dim_v)) << wgmma_stages_log2(dim);
                (q + out + stages) * 2 + WGMMA_BARRIER_BYTES
            }
        }
    }
}

/// Shared memory of the decode kernels before the two f32 per warp and row.
pub const fn decode_results_bytes(dim_v: u32, rows: u32) -> u32 {
    let (weights, results) = (SPLIT_KEYS * rows * 4, THREADS / 32 * rows * dim_v * 4);
    if weights > results { weights } else { results }
}
