//! Attention: parameters and entry points.

use crate::{Arch, DType};

/// Sizes and strides of one launch; strides in elements.
///
/// A new field goes behind the others: in between it moved what kernels read two fields at a time, and the loader of
/// Hopper's prompts of 64 columns, which has 32 registers, spilled.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDims {
    /// Sequences; for the kernels of many queries 1 if those are packed.
    pub batch: u32,
    /// Queries of a sequence, the most if they are packed.
    pub seq_q: u32,
    /// Keys of a sequence that there is room for; `kv_lens` may give fewer.
    pub seq_kv: u32,
    /// Sequences, also where queries are packed.
    pub sequences: u32,
    /// Queries of all sequences, if they are packed.
    pub tokens_q: u32,
    /// Keys of all sequences, if they are packed, and 0 if they are not: then `kv_lens` are offsets.
    pub tokens_kv: u32,
    /// Query heads.
    pub heads_q: u32,
    /// Key and value heads.
    pub heads_kv: u32,
    /// Query heads of one key head.
    pub group: u32,
    /// Elements of a head of q and k: a multiple of 8.
    pub head_dim: u32,
    /// Elements of a head of v and out: a multiple of 8.
    pub head_dim_v: u32,
    /// 1 if a query sees no keys after its own place, else 0.
    pub causal: u32,
    /// A query sees this many keys up to its own place; at most `seq_kv`, which is no bound at all.
    pub window: u32,
    /// 1 if all rows of q, k, v and out can be accessed in pieces of 16 bytes, else 0.
    pub vector: u32,
    /// Tiles of query rows: of one head (prefill), if queries are packed places of them for all sequences, see
    /// `sequences` of the kernels' tiles; or of the heads that share a key head (decode).
    pub tiles: u32,
    /// Splits of [`SPLIT_KEYS`] keys that `seq_kv` has; a multiple of those of a result.
    pub splits: u32,
    /// Query heads, counted through all sequences, whose tiles the `Wgmma` kernels finish before they take up the next:
    /// a multiple of `group`, whose keys and values fit into L2.
    pub section: u32,
    /// From one sequence to the next, in q.
    pub q_batch_stride: u32,
    /// From one query to the next.
    pub q_token_stride: u32,
    /// From one head to the next.
    pub q_head_stride: u32,
    /// The same for k, where from one page to the next.
    pub k_batch_stride: u32,
    /// The same for k.
    pub k_token_stride: u32,
    /// The same for k.
    pub k_head_stride: u32,
    /// The same for v.
    pub v_batch_stride: u32,
    /// The same for v.
    pub v_token_stride: u32,
    /// The same for v.
    pub v_head_stride: u32,
    /// The same for out.
    pub out_batch_stride: u32,
    /// The same for out.
    pub out_token_stride: u32,
    /// The same for out.
    pub out_head_stride: u32,
    /// The same for the log-sum-exp.
    pub lse_batch_stride: u32,
    /// The same for the log-sum-exp, whose queries are next to each other.
    pub lse_head_stride: u32,
    /// What products of q and k are multiplied by: the softmax scale, for the 16-bit types times log2(e), so that their
    /// kernels' exponentials are powers of two.
    pub scale: f32,
    /// What changes scores besides.
    pub scores: ScoreDims,
    /// Keys of a page, as a power of two. Without a table a sequence is one page, whose number is the sequence's.
    pub page_log2: u32,
    /// Pages of the pools of k and v, at least 1.
    pub num_pages: u32,
    /// Pages of a sequence in the table: from one sequence to the next.
    pub table_stride: u32,
    /// Keys of a box of the `Wgmma` kernels' maps: a divisor of the keys of a page and of those of a step.
    pub box_keys: u32,
    /// log2 of the splits of a result that a decode kernel leaves for the merge: of one, or of all [`GROUP_SPLITS`] of
    /// a group.
    pub result_shift: u32,
    /// Parts of a sum that a lane of the merge does: all [`MERGE_PARTS`], or one, whose lanes have as much less
    /// columns.
    pub merge_parts: u32,
    /// Blocks of a `Wgmma` launch: a parameter is read where it is needed, `%nctaid` keeps a register, which their
    /// loader does not have.
    pub grid: u32,
}

/// What changes scores besides the scale and the mask by places.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreDims {
    /// Scores become `cap_out · tanh(cap_in · s)`, of a score s as the kernel has it: for the `Wgmma` and `PrefillMma`
    /// kernels the product, which they multiply by the scale later, for the others that times the scale. 0 if they do
    /// not.
    pub cap_in: f32,
    /// See `cap_in`.
    pub cap_out: f32,
    /// What is given for each query and key: [`NO_BIAS`], [`ADDED`] or [`SEEN`].
    pub bias: u32,
    /// From one sequence to the next, in the bias; 0 if there is one for all.
    pub bias_batch_stride: u32,
    /// The same for heads.
    pub bias_head_stride: u32,
    /// The same for queries.
    pub bias_query_stride: u32,
    /// log2 of the queries, and of the keys, of a block of the block mask; 0 if there is none.
    pub block_shift: u32,
    /// Query heads of one head of the block mask.
    pub blocks_group: u32,
    /// In words: from one sequence to the next, in the block mask; 0 if there is one for all.
    pub blocks_batch_stride: u32,
    /// The same for the block mask's heads.
    pub blocks_head_stride: u32,
    /// From one block of queries to the next.
    pub blocks_query_stride: u32,
}

/// [`ScoreDims::bias`]: nothing.
pub const NO_BIAS: u32 = 0;
/// [`ScoreDims::bias`]: numbers of the type of q, which are added to the scores.
pub const ADDED: u32 = 1;
/// [`ScoreDims::bias`]: bytes, 0 where the query does not see the key.
pub const SEEN: u32 = 2;

const _: () = assert!(size_of::<AttentionDims>() == 200);
impl crate::Params for AttentionDims {}

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
/// Threads of a block of the gather kernels.
pub const GATHER_THREADS: u32 = 256;
/// Keys of a block of the gather kernels: all of one page.
pub const GATHER_KEYS: u32 = 16;
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
    /// A block takes [`GATHER_KEYS`] keys of a sequence from their page, or from fp8, to where the other kernels take
    /// them from.
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
            AttentionTile::Merge {} | AttentionTile::Gather {} => 1,
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

    /// Whether it is for heads of [`MAX_HEAD_DIM`] alone, whose first columns are the values.
    pub const fn is_latent(self) -> bool {
        matches!(self, AttentionTile::DecodeLatent { .. } | AttentionTile::DecodeLatentWgmma {})
    }

    /// Shared memory of a block in bytes.
    ///
    /// Prefill: the tile of q, then one of k or v, as f32. PrefillMma: the tile of q, two steps of k, one of v, a mark
    /// per warp. Decode: the weights of the split, which the four warps' partial results take the place of, then two
    /// f32 per warp and row. DecodeRing: the ring, the warps' results, then the same and a mark per warp, q if need be.
    /// DecodeLatent: the ring, the parts of a step's scores, the weights, an f32 per row. DecodeLatentWgmma: steps of
    /// keys, tiles of q, steps' weights and notes, then numbers and barriers. Wgmma: the places of q, the result unless
    /// it takes q's place, the stages of k and v.
    pub const fn smem_bytes(self) -> u32 {
        match self {
            AttentionTile::Prefill { dim, keys, .. } => (self.rows() + keys) * dim * 4,
            AttentionTile::PrefillMma { dim, dim_v, keys, .. } => {
                ((self.rows() + 2 * keys) * dim + keys * dim_v) * 2 + THREADS / 32 * 4
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
            AttentionTile::Merge {} | AttentionTile::Gather {} => 0,
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

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of q and out.
    pub dtype: DType,
    /// Type of k and v.
    pub dtype_kv: DType,
    /// How the work is cut up.
    pub tile: AttentionTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! attention_table {
    ($callback:ident) => {
        $callback! {
            attention_f32__prefill_d64__sm61 => f32, F32, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_f32__prefill_d128__sm61 => f32, F32, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_f32__prefill_d256__sm61 => f32, F32, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_f32__decode_d64_r1__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_f32__decode_d64_r2__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_f32__decode_d64_r4__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_f32__decode_d64_r8__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_f32__decode_d128_r1__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_f32__decode_d128_r2__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_f32__decode_d128_r4__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_f32__decode_d128_r8__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_f32__decode_d256_r1__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_f32__decode_d256_r2__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_f32__decode_d256_r4__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_f32__decode_d256_r8__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_f32__decode_d576v512_r4__sm61 => f32, F32, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_f32__merge__sm61 => f32, F32, Merge {};
            attention_f16__prefill_d64__sm61 => f16, F16, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_f16__prefill_d128__sm61 => f16, F16, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_f16__prefill_d256__sm61 => f16, F16, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_f16__decode_d64_r1__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_f16__decode_d64_r2__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_f16__decode_d64_r4__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_f16__decode_d64_r8__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_f16__decode_d128_r1__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_f16__decode_d128_r2__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_f16__decode_d128_r4__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_f16__decode_d128_r8__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_f16__decode_d256_r1__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_f16__decode_d256_r2__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_f16__decode_d256_r4__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_f16__decode_d256_r8__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_f16__decode_d576v512_r4__sm61 => f16, F16, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_f16__merge__sm61 => f16, F16, Merge {};
            attention_bf16__prefill_d64__sm61 => bf16, BF16, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_bf16__prefill_d128__sm61 => bf16, BF16, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_bf16__prefill_d256__sm61 => bf16, BF16, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_bf16__decode_d64_r1__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_bf16__decode_d64_r2__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_bf16__decode_d64_r4__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_bf16__decode_d64_r8__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_bf16__decode_d128_r1__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_bf16__decode_d128_r2__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_bf16__decode_d128_r4__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_bf16__decode_d128_r8__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_bf16__decode_d256_r1__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_bf16__decode_d256_r2__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_bf16__decode_d256_r4__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_bf16__decode_d256_r8__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_bf16__decode_d576v512_r4__sm61 => bf16, BF16, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_bf16__merge__sm61 => bf16, BF16, Merge {};
        }
    };
}

/// The same for the kernels of few queries on tensor cores.
#[macro_export]
macro_rules! attention_decode_ring_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_ring_d64_r8__sm80 => f16, F16, DecodeRing { dim: 64, rows: 8, places: 4, kv_bytes: 2, blocks: 4 };
            attention_f16__decode_ring_d64_r16__sm80 => f16, F16, DecodeRing { dim: 64, rows: 16, places: 4, kv_bytes: 2, blocks: 4 };
            attention_f16__decode_ring_d128_r8__sm80 => f16, F16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d128_r16__sm80 => f16, F16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d256_r8__sm80 => f16, F16, DecodeRing { dim: 256, rows: 8, places: 2, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d256_r16__sm80 => f16, F16, DecodeRing { dim: 256, rows: 16, places: 2, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d64_r8__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 8, places: 4, kv_bytes: 2, blocks: 4 };
            attention_bf16__decode_ring_d64_r16__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 16, places: 4, kv_bytes: 2, blocks: 4 };
            attention_bf16__decode_ring_d128_r8__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d128_r16__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d256_r8__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 8, places: 2, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d256_r16__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 16, places: 2, kv_bytes: 2, blocks: 2 };
        }
    };
}

/// The same with k and v in fp8.
#[macro_export]
macro_rules! attention_decode_ring_fp8_table {
    ($callback:ident) => {
        $callback! {
            attention_f16_f8e4m3__decode_ring_d64_r8__sm80 => f16, F16, DecodeRing { dim: 64, rows: 8, places: 8, kv_bytes: 1, blocks: 4 };
            attention_f16_f8e4m3__decode_ring_d64_r16__sm80 => f16, F16, DecodeRing { dim: 64, rows: 16, places: 8, kv_bytes: 1, blocks: 3 };
            attention_f16_f8e4m3__decode_ring_d128_r8__sm80 => f16, F16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 1, blocks: 4 };
            attention_f16_f8e4m3__decode_ring_d128_r16__sm80 => f16, F16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 1, blocks: 3 };
            attention_f16_f8e4m3__decode_ring_d256_r8__sm80 => f16, F16, DecodeRing { dim: 256, rows: 8, places: 4, kv_bytes: 1, blocks: 2 };
            attention_f16_f8e4m3__decode_ring_d256_r16__sm80 => f16, F16, DecodeRing { dim: 256, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d64_r8__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 8, places: 8, kv_bytes: 1, blocks: 4 };
            attention_bf16_f8e4m3__decode_ring_d64_r16__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 16, places: 8, kv_bytes: 1, blocks: 3 };
            attention_bf16_f8e4m3__decode_ring_d128_r8__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 1, blocks: 4 };
            attention_bf16_f8e4m3__decode_ring_d128_r16__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d256_r8__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 8, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d256_r16__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
        }
    };
}

/// The same for the kernels that take k and v from fp8, or from pages of it, to the type of q.
#[macro_export]
macro_rules! attention_gather_table {
    ($callback:ident) => {
        $callback! {
            attention_f16_f8e4m3__gather__sm61 => f16, F16, Gather {};
            attention_bf16_f8e4m3__gather__sm61 => bf16, BF16, Gather {};
        }
    };
}

/// The same for those that take them from pages.
#[macro_export]
macro_rules! attention_gather_pages_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__gather__sm80 => f16, F16, Gather {};
            attention_bf16__gather__sm80 => bf16, BF16, Gather {};
        }
    };
}

/// The same for latent attention's. The second of a type is for cards with less shared memory.
#[macro_export]
macro_rules! attention_decode_latent_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_latent_p4__sm80 => f16, F16, DecodeLatent { places: 4 };
            attention_f16__decode_latent_p2__sm80 => f16, F16, DecodeLatent { places: 2 };
            attention_bf16__decode_latent_p4__sm80 => bf16, BF16, DecodeLatent { places: 4 };
            attention_bf16__decode_latent_p2__sm80 => bf16, BF16, DecodeLatent { places: 2 };
        }
    };
}

/// The same for those of Hopper.
#[macro_export]
macro_rules! attention_decode_latent_wgmma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_latent__sm90a => f16, F16, DecodeLatentWgmma {};
            attention_bf16__decode_latent__sm90a => bf16, BF16, DecodeLatentWgmma {};
        }
    };
}

/// The same for the kernels of many queries.
#[macro_export]
macro_rules! attention_prefill_mma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__prefill_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false };
            attention_f16__prefill_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false };
            attention_f16__prefill_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false };
            attention_bf16__prefill_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false };
            attention_bf16__prefill_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false };
            attention_bf16__prefill_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false };
            attention_f16__prefill_masked_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true };
            attention_f16__prefill_masked_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true };
            attention_f16__prefill_masked_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true };
            attention_bf16__prefill_masked_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true };
            attention_bf16__prefill_masked_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true };
            attention_bf16__prefill_masked_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true };
        }
    };
}

/// The same for the kernels that take tensor maps.
#[macro_export]
macro_rules! attention_wgmma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__prefill_d64__sm90a => f16, F16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 3, threads: 512 };
            attention_f16__prefill_d128__sm90a => f16, F16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384 };
            attention_f16__prefill_d192v128__sm90a => f16, F16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384 };
            attention_f16__prefill_d256__sm90a => f16, F16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384 };
            attention_bf16__prefill_d64__sm90a => bf16, BF16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 3, threads: 512 };
            attention_bf16__prefill_d128__sm90a => bf16, BF16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384 };
            attention_bf16__prefill_d192v128__sm90a => bf16, BF16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384 };
            attention_bf16__prefill_d256__sm90a => bf16, BF16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384 };
        }
    };
}

macro_rules! sm61 {
    ($($rows:tt)*) => { variants!(Sm61, None, $($rows)*) };
}
macro_rules! sm61_fp8 {
    ($($rows:tt)*) => { variants!(Sm61, Some(DType::F8E4M3), $($rows)*) };
}
macro_rules! sm80 {
    ($($rows:tt)*) => { variants!(Sm80, None, $($rows)*) };
}
macro_rules! sm80_fp8 {
    ($($rows:tt)*) => { variants!(Sm80, Some(DType::F8E4M3), $($rows)*) };
}
macro_rules! sm90a {
    ($($rows:tt)*) => { variants!(Sm90a, None, $($rows)*) };
}
macro_rules! variants {
    ($floor:ident, $dtype_kv:expr, $($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(AttentionVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            dtype_kv: match $dtype_kv {
                Some(dtype_kv) => dtype_kv,
                None => DType::$dtype,
            },
            tile: AttentionTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const VARIANTS: &[AttentionVariant] = attention_table!(sm61);
/// The kernels of few queries on tensor cores.
pub const DECODE_RING_VARIANTS: &[AttentionVariant] = attention_decode_ring_table!(sm80);
/// The kernels of latent attention on tensor cores.
pub const DECODE_LATENT_VARIANTS: &[AttentionVariant] = attention_decode_latent_table!(sm80);
/// The same on Hopper.
pub const DECODE_LATENT_WGMMA_VARIANTS: &[AttentionVariant] = attention_decode_latent_wgmma_table!(sm90a);
/// The same with k and v in fp8.
pub const DECODE_RING_FP8_VARIANTS: &[AttentionVariant] = attention_decode_ring_fp8_table!(sm80_fp8);
/// The kernels that take k and v from fp8 to the type of q.
pub const GATHER_VARIANTS: &[AttentionVariant] = attention_gather_table!(sm61_fp8);
/// The kernels that take k and v from pages.
pub const GATHER_PAGES_VARIANTS: &[AttentionVariant] = attention_gather_pages_table!(sm80);
/// The kernels of many queries on tensor cores.
pub const PREFILL_MMA_VARIANTS: &[AttentionVariant] = attention_prefill_mma_table!(sm80);
/// The kernels of Hopper's tensor cores, which take tensor maps.
pub const WGMMA_VARIANTS: &[AttentionVariant] = attention_wgmma_table!(sm90a);

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        assert!(VARIANTS[i].tile.smem_bytes() <= 48 << 10, "the floor has 48 KiB of shared memory");
        i += 1;
    }
    let mut i = 0;
    while i < DECODE_RING_VARIANTS.len() {
        assert!(DECODE_RING_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        assert!(DECODE_RING_FP8_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < DECODE_LATENT_VARIANTS.len() {
        let is_small = matches!(DECODE_LATENT_VARIANTS[i].tile, AttentionTile::DecodeLatent { places: 2 });
        assert!(DECODE_LATENT_VARIANTS[i].tile.smem_bytes() <= if is_small { 99 << 10 } else { 163 << 10 });
        i += 1;
    }
    assert!(AttentionTile::DecodeLatentWgmma {}.smem_bytes() <= 227 << 10);
    let mut i = 0;
    while i < PREFILL_MMA_VARIANTS.len() {
        assert!(PREFILL_MMA_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < WGMMA_VARIANTS.len() {
        let tile = WGMMA_VARIANTS[i].tile;
        assert!(tile.smem_bytes() <= 227 << 10 && tile.threads() == tile.rows() * 2 + 128);
        i += 1;
    }
};
