//! RMSNorm per head and rotary embedding of q and k, with the append to a key/value cache: parameters and entry points.

use crate::DType;

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormRopeDims {
    /// Tokens.
    pub tokens: u32,
    /// Query heads of a token.
    pub heads_q: u32,
    /// Key heads of a token, and value heads.
    pub heads_kv: u32,
    /// Groups that the query heads are dealt to, up to [`MAX_HEADS_PER_GROUP`] each: group g has heads g, g + q_groups,
    /// g + 2·q_groups, ….
    pub q_groups: u32,
    /// The same for the key heads, and for the value heads.
    pub kv_groups: u32,
    /// Binary logarithm of the warps next to each other that have the same group of neighbouring tokens.
    pub warps_log2: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Elements of a head that are rotated: the first ones.
    pub rotary_dim: u32,
    /// 1 if pairs are neighbours, 0 if they are half the rotated part apart.
    pub is_interleaved: u32,
    /// Rows of the tables; at least 1.
    pub max_position: u32,
    /// Slots of the cache: a slot number beyond them is skipped.
    pub num_slots: u32,
    /// From one token to the next, in q.
    pub q_token_stride: u32,
    /// From one head to the next, in q.
    pub q_head_stride: u32,
    /// The same for k.
    pub k_token_stride: u32,
    /// The same for k.
    pub k_head_stride: u32,
    /// The same for v.
    pub v_token_stride: u32,
    /// The same for v.
    pub v_head_stride: u32,
    /// The same for q_out.
    pub q_out_token_stride: u32,
    /// The same for q_out.
    pub q_out_head_stride: u32,
    /// From one slot to the next, in both caches.
    pub slot_stride: u32,
    /// From one head to the next, in both caches.
    pub cache_head_stride: u32,
    /// From one token's position to the next one's.
    pub position_stride: u32,
    /// 1/head_dim.
    pub inv_head_dim: f32,
    /// Added to the mean square, inside the root.
    pub eps: f32,
    /// Added to each weight: 1 for zero-centred weights, else 0.
    pub weight_offset: f32,
}

const _: () = assert!(size_of::<QkNormRopeDims>() == 100);
impl crate::Params for QkNormRopeDims {}

/// Threads of a block of the `Lanes` tiles.
pub const LANES_TILE_THREADS: u32 = 128;
/// Threads of a block of the `Block` tile: as many as RMSNorm's kernel for any size has, which makes their sums equal.
pub const BLOCK_TILE_THREADS: u32 = crate::ops::rmsnorm::SCALAR_TILE_THREADS;
/// Most heads that a lane takes one after another; one in the `Block` tile.
pub const MAX_HEADS_PER_GROUP: u32 = 8;

/// How a head is spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormRopeTile {
    /// `lanes` neighbouring lanes hold a head, a piece of 16 bytes each.
    Lanes {
        /// A power of two up to 32.
        lanes: u32,
    },
    /// A block walks over a head element by element: any size, stride and alignment.
    Block,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct QkNormRopeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of heads and weights.
    pub dtype: DType,
    /// Type of the caches: the same, or fp8.
    pub cache_dtype: DType,
    /// How a head is spread over threads.
    pub tile: QkNormRopeTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! qk_norm_rope_table {
    ($callback:path) => {
        $callback! {
            qk_norm_rope_f32__lanes32__sm61 => f32, F32, f32, F32, Lanes { lanes: 32 };
            qk_norm_rope_f32__block__sm61 => f32, F32, f32, F32, Block {};
            qk_norm_rope_f32_f8e4m3__block__sm61 => f32, F32, E4m3, F8E4M3, Block {};
            qk_norm_rope_f16__lanes8__sm61 => f16, F16, f16, F16, Lanes { lanes: 8 };
            qk_norm_rope_f16__lanes16__sm61 => f16, F16, f16, F16, Lanes { lanes: 16 };
            qk_norm_rope_f16__lanes32__sm61 => f16, F16, f16, F16, Lanes { lanes: 32 };
            qk_norm_rope_f16__block__sm61 => f16, F16, f16, F16, Block {};
            qk_norm_rope_f16_f8e4m3__lanes16__sm61 => f16, F16, E4m3, F8E4M3, Lanes { lanes: 16 };
            qk_norm_rope_f16_f8e4m3__lanes32__sm61 => f16, F16, E4m3, F8E4M3, Lanes { lanes: 32 };
            qk_norm_rope_f16_f8e4m3__block__sm61 => f16, F16, E4m3, F8E4M3, Block {};
            qk_norm_rope_bf16__lanes8__sm61 => bf16, BF16, bf16, BF16, Lanes { lanes: 8 };
            qk_norm_rope_bf16__lanes16__sm61 => bf16, BF16, bf16, BF16, Lanes { lanes: 16 };
            qk_norm_rope_bf16__lanes32__sm61 => bf16, BF16, bf16, BF16, Lanes { lanes: 32 };
            qk_norm_rope_bf16__block__sm61 => bf16, BF16, bf16, BF16, Block {};
            qk_norm_rope_bf16_f8e4m3__lanes16__sm61 => bf16, BF16, E4m3, F8E4M3, Lanes { lanes: 16 };
            qk_norm_rope_bf16_f8e4m3__lanes32__sm61 => bf16, BF16, E4m3, F8E4M3, Lanes { lanes: 32 };
            qk_norm_rope_bf16_f8e4m3__block__sm61 => bf16, BF16, E4m3, F8E4M3, Block {};
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $cache_type:ident, $cache_dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[QkNormRopeVariant] = &[$(QkNormRopeVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            cache_dtype: DType::$cache_dtype,
            tile: QkNormRopeTile::$tile { $($field: $value),* },
        }),*];
    };
}
qk_norm_rope_table!(variants);
