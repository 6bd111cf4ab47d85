//! Attention: parameters and entry points.

mod tables;
mod tiles;

pub use tables::*;
pub use tiles::*;

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
    /// Of the kernels of many queries whose blocks share keys: log2 of the parts that a tile's steps are cut into, each
    /// with a result of its own behind the others' of all sequences; else 0.
    pub key_parts_log2: u32,
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

const _: () = assert!(size_of::<AttentionDims>() == 204);
impl crate::Params for AttentionDims {}
