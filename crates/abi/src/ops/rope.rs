//! Rotary position embedding: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeDims {
    /// Rows are tokens; the pieces of a token are `groups` × `units`, units innermost.
    pub tiles: RowTiles,
    /// Heads of a token.
    pub heads: u32,
    /// Groups that the heads are dealt to: group g has heads g, g + groups, g + 2·groups, ….
    pub groups: u32,
    /// Places of a head that a thread treats at a time: `rotated_units`, and those that are only copied.
    pub units: u32,
    /// Units that are rotated: they come first.
    pub rotated_units: u32,
    /// Elements of a head that are rotated: the first ones.
    pub rotary_dim: u32,
    /// Rows of the tables; at least 1.
    pub max_position: u32,
    /// From one token to the next, in x.
    pub x_token_stride: u32,
    /// From one head to the next, in x.
    pub x_head_stride: u32,
    /// The same for out.
    pub out_token_stride: u32,
    /// The same for out.
    pub out_head_stride: u32,
    /// From one token's position to the next one's.
    pub position_stride: u32,
}

const _: () = assert!(size_of::<RopeDims>() == 60);
impl crate::Params for RopeDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Logarithm of a block's threads, each of which takes one piece.
pub const BLOCK_PIECES_LOG2: u32 = THREADS.ilog2();
/// Heads of a group in the `Pieces` tile; one in the `Scalar` tile.
pub const HEADS_PER_THREAD: u32 = 4;

/// Which elements form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Elements i and i + rotary_dim/2 (GPT-NeoX, Llama and Qwen in their published layout).
    HalfSplit,
    /// Elements 2i and 2i + 1, rotated in place (GPT-J, GLM).
    Interleaved,
}

impl RopeStyle {
    /// Both styles.
    pub const ALL: [RopeStyle; 2] = [RopeStyle::HalfSplit, RopeStyle::Interleaved];

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            RopeStyle::HalfSplit => "half_split",
            RopeStyle::Interleaved => "interleaved",
        }
    }
}

/// What a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeTile {
    /// A piece of 16 bytes, or the two that hold the pairs of a half-split head.
    Pieces,
    /// A pair, or an element that is only copied: any size, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of x and out.
    pub dtype: DType,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// What a unit is.
    pub tile: RopeTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! rope_table {
    ($callback:path) => {
        $callback! {
            rope_f32_half_split__pieces__sm61 => f32, F32, HalfSplit, Pieces;
            rope_f32_half_split__scalar__sm61 => f32, F32, HalfSplit, Scalar;
            rope_f32_interleaved__pieces__sm61 => f32, F32, Interleaved, Pieces;
            rope_f32_interleaved__scalar__sm61 => f32, F32, Interleaved, Scalar;
            rope_f16_half_split__pieces__sm61 => f16, F16, HalfSplit, Pieces;
            rope_f16_half_split__scalar__sm61 => f16, F16, HalfSplit, Scalar;
            rope_f16_interleaved__pieces__sm61 => f16, F16, Interleaved, Pieces;
            rope_f16_interleaved__scalar__sm61 => f16, F16, Interleaved, Scalar;
            rope_bf16_half_split__pieces__sm61 => bf16, BF16, HalfSplit, Pieces;
            rope_bf16_half_split__scalar__sm61 => bf16, BF16, HalfSplit, Scalar;
            rope_bf16_interleaved__pieces__sm61 => bf16, BF16, Interleaved, Pieces;
            rope_bf16_interleaved__scalar__sm61 => bf16, BF16, Interleaved, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $style:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[RopeVariant] = &[$(RopeVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            style: RopeStyle::$style,
            tile: RopeTile::$tile,
        }),*];
    };
}
rope_table!(variants);
