//! Weighted sum of experts' results: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeCombineDims {
    /// Rows of out, and pieces of a row: of 16 bytes, or elements for the scalar tile.
    pub tiles: RowTiles,
    /// Experts of a token.
    pub top_k: u32,
    /// Rows of the experts' results: a position beyond them is left out.
    pub y_rows: u32,
    /// From one row of the experts' results to the next.
    pub y_stride: u32,
    /// From one row of the shared expert's result to the next.
    pub shared_stride: u32,
    /// From one token's gate to the next.
    pub gate_stride: u32,
    /// From one row of out to the next.
    pub out_stride: u32,
    /// 1 if the sum is added to what out holds.
    pub adds: u32,
}

const _: () = assert!(size_of::<MoeCombineDims>() == 44);
impl crate::Params for MoeCombineDims {}

/// Threads of a block.
pub const THREADS: u32 = 128;
/// Binary logarithm of the pieces of a block: one per thread.
pub const BLOCK_PIECES_LOG2: u32 = THREADS.ilog2();

/// How a row is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoeCombineTile {
    /// Pieces of 16 bytes.
    Pieces,
    /// Element by element: any alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct MoeCombineVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of results and out.
    pub dtype: DType,
    /// How a row is cut up.
    pub tile: MoeCombineTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! moe_combine_table {
    ($callback:path) => {
        $callback! {
            moe_combine_f32__pieces__sm61 => f32, F32, Pieces;
            moe_combine_f32__scalar__sm61 => f32, F32, Scalar;
            moe_combine_f16__pieces__sm61 => f16, F16, Pieces;
            moe_combine_f16__scalar__sm61 => f16, F16, Scalar;
            moe_combine_bf16__pieces__sm61 => bf16, BF16, Pieces;
            moe_combine_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[MoeCombineVariant] = &[$(MoeCombineVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: MoeCombineTile::$tile,
        }),*];
    };
}
moe_combine_table!(variants);
