//! Norm and rotary embedding of a latent row, and its append to a cache: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentAppendDims {
    /// Of what is rotated. Rows are tokens; the pieces of a token are `groups` × `units`, units innermost.
    pub tiles: RowTiles,
    /// Blocks that normalise; those behind them rotate.
    pub norm_blocks: u32,
    /// Query heads of a token. What is rotated of a token is its key, number 0, and the heads behind it.
    pub heads: u32,
    /// Groups that key and heads are dealt to: group g has numbers g, g + groups, g + 2·groups, ….
    pub groups: u32,
    /// Places of a rotated part that a thread treats at a time.
    pub units: u32,
    /// Elements of a row that are normalised: the first ones.
    pub latent: u32,
    /// Elements of a row that are rotated, behind them, and of a query head.
    pub rope: u32,
    /// 1 if pairs are neighbours, 0 if they are half the rotated part apart.
    pub is_interleaved: u32,
    /// Rows of the tables; at least 1.
    pub max_position: u32,
    /// Slots of the cache: a slot number beyond them is skipped.
    pub num_slots: u32,
    /// From one token to the next, in x.
    pub x_stride: u32,
    /// The same for q.
    pub q_token_stride: u32,
    /// From one head to the next, in q.
    pub q_head_stride: u32,
    /// The same for q_out.
    pub q_out_token_stride: u32,
    /// The same for q_out.
    pub q_out_head_stride: u32,
    /// From one slot to the next.
    pub slot_stride: u32,
    /// From one token's position to the next one's.
    pub position_stride: u32,
    /// 1/latent.
    pub inv_latent: f32,
    /// Added to the mean square, inside the root.
    pub eps: f32,
    /// Added to each weight: 1 for zero-centred weights, else 0.
    pub weight_offset: f32,
}

const _: () = assert!(size_of::<LatentAppendDims>() == 92);
impl crate::Params for LatentAppendDims {}

/// Threads of a block of the `Warps` tile.
pub const WARPS_TILE_THREADS: u32 = 128;
/// Threads of a block of the `Block` tile: as many as RMSNorm's kernel for any size has, which makes their sums equal.
pub const BLOCK_TILE_THREADS: u32 = crate::ops::rmsnorm::SCALAR_TILE_THREADS;
/// Pieces of 16 bytes that a thread of the `Warps` tile rotates at most: of as many heads, or of half as many if pairs
/// are half of a head apart.
pub const PIECES_PER_THREAD: u32 = 4;

/// How a token is spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatentAppendTile {
    /// A warp normalises a row, `chunks` pieces of 16 bytes per lane; threads of other blocks rotate pieces.
    Warps {
        /// Pieces of 16 bytes per lane.
        chunks: u32,
    },
    /// A block normalises a row element by element, threads of other blocks rotate pairs: any size, stride and
    /// alignment.
    Block,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct LatentAppendVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of rows, heads, weight and cache.
    pub dtype: DType,
    /// How a token is spread over threads.
    pub tile: LatentAppendTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! latent_append_table {
    ($callback:path) => {
        $callback! {
            latent_append_f32__warps4__sm61 => f32, F32, Warps { chunks: 4 };
            latent_append_f32__block__sm61 => f32, F32, Block {};
            latent_append_f16__warps2__sm61 => f16, F16, Warps { chunks: 2 };
            latent_append_f16__block__sm61 => f16, F16, Block {};
            latent_append_bf16__warps2__sm61 => bf16, BF16, Warps { chunks: 2 };
            latent_append_bf16__block__sm61 => bf16, BF16, Block {};
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[LatentAppendVariant] = &[$(LatentAppendVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: LatentAppendTile::$tile { $($field: $value),* },
        }),*];
    };
}
latent_append_table!(variants);
