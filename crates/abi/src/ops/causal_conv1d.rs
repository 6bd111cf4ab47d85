//! Causal depthwise convolution over time: parameters and entry points.

use crate::DType;

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CausalConv1dDims {
    /// Tokens of all sequences: none of the offsets is taken to be more.
    pub tokens: u32,
    /// Sequences.
    pub sequences: u32,
    /// Slots of the state: a sequence with a slot number beyond them is skipped.
    pub num_slots: u32,
    /// Channels.
    pub channels: u32,
    /// Taps of a channel.
    pub width: u32,
    /// Blocks side by side that cover the channels.
    pub channel_blocks: u32,
    /// From one token to the next, in x.
    pub x_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// From one slot to the next.
    pub slot_stride: u32,
}

const _: () = assert!(size_of::<CausalConv1dDims>() == 36);
impl crate::Params for CausalConv1dDims {}

/// Threads of a block.
pub const THREADS: u32 = 128;
/// Most tokens of a block.
pub const TOKENS: u32 = 32;
/// Most taps of a channel.
pub const MAX_WIDTH: u32 = 4;

/// How channels are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CausalConv1dTile {
    /// In pieces of 16 bytes, for this many taps.
    Pieces {
        /// Taps of a channel.
        width: u32,
    },
    /// One by one: any number of taps up to [`MAX_WIDTH`], any alignment.
    Scalar {},
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct CausalConv1dVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all tensors but offsets and slots.
    pub dtype: DType,
    /// How channels are read.
    pub tile: CausalConv1dTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! causal_conv1d_table {
    ($callback:path) => {
        $callback! {
            causal_conv1d_f32__pieces2__sm61 => f32, F32, Pieces { width: 2 };
            causal_conv1d_f32__pieces3__sm61 => f32, F32, Pieces { width: 3 };
            causal_conv1d_f32__pieces4__sm61 => f32, F32, Pieces { width: 4 };
            causal_conv1d_f32__scalar__sm61 => f32, F32, Scalar {};
            causal_conv1d_f16__pieces2__sm61 => f16, F16, Pieces { width: 2 };
            causal_conv1d_f16__pieces3__sm61 => f16, F16, Pieces { width: 3 };
            causal_conv1d_f16__pieces4__sm61 => f16, F16, Pieces { width: 4 };
            causal_conv1d_f16__scalar__sm61 => f16, F16, Scalar {};
            causal_conv1d_bf16__pieces2__sm61 => bf16, BF16, Pieces { width: 2 };
            causal_conv1d_bf16__pieces3__sm61 => bf16, BF16, Pieces { width: 3 };
            causal_conv1d_bf16__pieces4__sm61 => bf16, BF16, Pieces { width: 4 };
            causal_conv1d_bf16__scalar__sm61 => bf16, BF16, Scalar {};
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal)? };)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[CausalConv1dVariant] = &[$(CausalConv1dVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: CausalConv1dTile::$tile { $($field: $value)? },
        }),*];
    };
}
causal_conv1d_table!(variants);
