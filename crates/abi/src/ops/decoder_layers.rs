//! All layers of a dense decoder for one token, in one launch: parameters and entry points.

use core::mem::offset_of;

use crate::DType;

/// Most layers of a launch: their addresses are parameters.
pub const MAX_LAYERS: usize = 40;
/// Elements of a head.
pub const HEAD_DIM: u32 = 128;
/// Warps of a block that multiply.
pub const CONSUMERS: u32 = 8;
/// Warps that bring weights.
pub const PRODUCERS: u32 = 4;
/// Threads of a block.
pub const THREADS: u32 = 32 * (CONSUMERS + PRODUCERS);
/// Rows of a weight that are multiplied at a time, of which a gate's are half.
pub const TILE_ROWS: u32 = 16;
/// Columns of a weight that a block multiplies at a time.
pub const TILE_COLS: u32 = 512;
/// Those of them that are a warp's.
pub const WARP_COLS: u32 = TILE_COLS / CONSUMERS;
/// Columns of weights are multiples of this: what two products of a warp are of.
pub const COLS_UNIT: u32 = 32;
/// Most columns of a weight.
pub const MAX_COLS: u32 = 24 * TILE_COLS;
/// Most rows of a weight that a block has.
pub const MAX_ROWS: u32 = 160;
/// Most query heads of a key head: the columns of a product.
pub const MAX_GROUP: u32 = 8;
/// Blocks that share a key head at most: so many partial results are merged for each of its heads.
pub const MAX_SPLITS: u32 = 128;

/// Tiles of weights that are on their way or in use.
pub const STAGES: u32 = 6;
/// Bytes from a row of a tile to the next: two rows have no bank in common for what eight lanes read.
pub const ROW_PITCH: u32 = 2 * TILE_COLS + 64;
/// Bytes of a tile.
pub const STAGE_BYTES: u32 = TILE_ROWS * ROW_PITCH;
/// Keys, or values, of a tile.
pub const TILE_KEYS: u32 = 64;
const _: () = assert!(TILE_KEYS * 2 * HEAD_DIM <= STAGE_BYTES);

/// Shared memory, in bytes.
pub mod smem {
    use super::{CONSUMERS, HEAD_DIM, MAX_COLS, MAX_GROUP, MAX_ROWS, MAX_SPLITS, STAGE_BYTES, STAGES};

    /// Each warp's columns of what is multiplied, two to a word.
    pub const WORDS: u32 = STAGES * STAGE_BYTES;
    /// Bytes of a warp's.
    pub const WARP_WORDS: u32 = 2 * MAX_COLS / CONSUMERS;
    /// Each warp's sums of each row, twice in turn.
    pub const SUMS: u32 = WORDS + CONSUMERS * WARP_WORDS;
    /// Bytes of one of the two.
    pub const SUMS_BYTES: u32 = 4 * CONSUMERS * MAX_ROWS;
    /// Each warp's sum of squares.
    pub const SQUARES: u32 = SUMS + 2 * SUMS_BYTES;
    /// Query heads of the block's key head, two elements to a word.
    pub const QUERIES: u32 = SQUARES + 4 * CONSUMERS;
    /// The token's own key and value, f32.
    pub const OWN: u32 = QUERIES + 2 * MAX_GROUP * HEAD_DIM;
    /// Each warp's weighted sum of values, and behind them the token's own value.
    pub const VALUES: u32 = OWN + 4 * 2 * HEAD_DIM;
    /// Each warp's largest score and sum of weights, and the token's own.
    pub const WEIGHTS: u32 = VALUES + 4 * (CONSUMERS + 1) * MAX_GROUP * HEAD_DIM;
    /// Of the block's share of the values: every split's largest score and sum of weights.
    pub const SHARE: u32 = WEIGHTS + 8 * (CONSUMERS + 1) * MAX_GROUP;
    /// Every split's weighted sum.
    pub const SHARE_SUMS: u32 = SHARE + 8 * (MAX_GROUP * HEAD_DIM + MAX_SPLITS);
    /// Where the layers' tensors are.
    pub const LAYERS: u32 = SHARE_SUMS + 4 * (MAX_GROUP * HEAD_DIM + MAX_SPLITS);
    /// The block's rows of each of the four weights: the first, how many, columns, and what is between the rows of a
    /// pair.
    pub const ROWS: u32 = LAYERS + super::LAYER_BYTES * super::MAX_LAYERS as u32;
    /// Of each product the words that it is of, and those that its results go to.
    pub const PLACES: u32 = ROWS + 16 * 4;
    /// Barriers: a tile is there, a tile is done with.
    pub const FULL: u32 = PLACES + 8 * 4;
    /// The second ones.
    pub const EMPTY: u32 = FULL + 8 * STAGES;
    /// All of it.
    pub const BYTES: u32 = EMPTY + 8 * STAGES;
}
const _: () = assert!(smem::BYTES <= 227 << 10);

/// Bytes of a layer's addresses.
pub const LAYER_BYTES: u32 = size_of::<LayerAddresses>() as u32;

/// The tensors of a layer, in the order of their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerTensor {
    /// Projection of q, k and v.
    Qkv = 0,
    /// Attention's output.
    Output,
    /// Gate and up.
    GateUp,
    /// The MLP's second product.
    Down,
    /// Gain before attention.
    InputNorm,
    /// Gain before the MLP.
    PostAttentionNorm,
    /// Gain of query heads.
    QueryNorm,
    /// Gain of key heads.
    KeyNorm,
    /// Keys.
    KeyCache,
    /// Values.
    ValueCache,
}
const _: () = assert!(offset_of!(LayerAddresses, v_cache) == 8 * LayerTensor::ValueCache as usize);

/// Where a layer's tensors are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerAddresses {
    /// `[(heads_q + 2 heads_kv) · 128, hidden]`.
    pub qkv: u64,
    /// `[hidden, heads_q · 128]`.
    pub o: u64,
    /// `[2 · intermediate, hidden]`: the gate's rows, then up's.
    pub gate_up: u64,
    /// `[hidden, intermediate]`.
    pub down: u64,
    /// `[hidden]`.
    pub input_norm: u64,
    /// `[hidden]`.
    pub post_attention_norm: u64,
    /// `[128]`, or 0.
    pub q_norm: u64,
    /// `[128]`, or 0.
    pub k_norm: u64,
    /// `[slots, heads_kv, 128]`.
    pub k_cache: u64,
    /// The same.
    pub v_cache: u64,
}

/// Where the tensors of all layers are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerTable {
    /// Those that there are first.
    pub layers: [LayerAddresses; MAX_LAYERS],
}
impl crate::Params for LayerTable {}

/// Sizes of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderLayersDims {
    /// Layers, at least 1.
    pub num_layers: u32,
    /// Columns of the residual.
    pub hidden: u32,
    /// Columns between the two products of the MLP.
    pub intermediate: u32,
    /// Query heads.
    pub heads_q: u32,
    /// Key heads, which divide them.
    pub heads_kv: u32,
    /// Blocks of a key head.
    pub splits: u32,
    /// Slots of the caches: a slot number beyond them is skipped.
    pub num_slots: u32,
    /// Elements from a slot to the next.
    pub slot_stride: u32,
    /// Rows of the tables; at least 1.
    pub max_position: u32,
    /// Most keys.
    pub max_keys: u32,
    /// Tokens of a page, or 0 if key t is in slot t.
    pub page_tokens: u32,
    /// 1/hidden.
    pub inv_hidden: f32,
    /// Added to the mean square, inside the root.
    pub eps: f32,
    /// Added to each gain: 1 for zero-centred ones, else 0.
    pub weight_offset: f32,
    /// What scores are multiplied by, times log2(e).
    pub scale_log2: f32,
}

const _: () = assert!(size_of::<DecoderLayersDims>() == 60);
// With nine addresses: what a kernel's parameters may take.
const _: () = assert!(size_of::<DecoderLayersDims>() + size_of::<LayerTable>() + 72 <= 4096);
impl crate::Params for DecoderLayersDims {}

impl DecoderLayersDims {
    /// Rows of the projection of q, k and v.
    pub const fn qkv_rows(&self) -> u32 {
        (self.heads_q + 2 * self.heads_kv) * HEAD_DIM
    }

    /// Query heads of a key head.
    pub const fn group(&self) -> u32 {
        self.heads_q / if self.heads_kv > 0 { self.heads_kv } else { 1 }
    }
}

/// The words that blocks tell each other values by, 8 bytes each: a value's bits, and above them the number of the
/// layer that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Rows of q, k and v.
    pub qkv: u32,
    /// Each split's weighted sums of a key head's query heads, with their largest scores and sums of weights.
    pub splits: u32,
    /// Attention's output.
    pub attended: u32,
    /// The residual behind attention.
    pub middle: u32,
    /// What the MLP's second product is of.
    pub activated: u32,
    /// The residual behind the layer.
    pub residual: u32,
    /// All words.
    pub words: u32,
}

impl Exchange {
    /// The first one: the number of layers that all launches so far have gone through.
    pub const COUNT: u32 = 0;

    /// Where the words of such a launch are.
    pub const fn of(dims: &DecoderLayersDims) -> Self {
        let qkv = 2;
        let splits = qkv + dims.qkv_rows();
        let attended = splits + dims.heads_kv * dims.splits * Self::split_words(dims.group());
        let middle = attended + dims.heads_q * HEAD_DIM;
        let activated = middle + dims.hidden;
        let residual = activated + dims.intermediate;
        Exchange { qkv, splits, attended, middle, activated, residual, words: residual + dims.hidden }
    }

    /// Words of a split of so many query heads.
    pub const fn split_words(group: u32) -> u32 {
        group * (HEAD_DIM + 2)
    }
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct DecoderLayersVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of rows, weights and caches.
    pub dtype: DType,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! decoder_layers_table {
    ($callback:path) => {
        $callback! {
            decoder_layers_bf16__persistent__sm90a => bf16, BF16;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[DecoderLayersVariant] = &[$(DecoderLayersVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
        }),*];
    };
}
decoder_layers_table!(variants);
