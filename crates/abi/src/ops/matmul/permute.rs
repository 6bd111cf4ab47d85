//! Columns in another order: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PermuteColumnsDims {
    /// The rows of out, in pieces of [`PERMUTE_PIECE`] columns, of which the last may be shorter.
    pub tiles: RowTiles,
    /// Elements of a row.
    pub cols: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// Whether every row of out begins at a multiple of 16 bytes, and the order does.
    pub is_aligned: u32,
}

const _: () = assert!(size_of::<PermuteColumnsDims>() == 32);
impl crate::Params for PermuteColumnsDims {}

/// Columns that a thread brings into order.
pub const PERMUTE_PIECE: u32 = 8;
/// Threads of a block.
pub const PERMUTE_THREADS: u32 = 256;
/// Logarithm of a block's threads, each of which takes one piece.
pub const PERMUTE_BLOCK_PIECES_LOG2: u32 = PERMUTE_THREADS.ilog2();

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct PermuteColumnsVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of x and out.
    pub dtype: DType,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! permute_columns_table {
    ($callback:path) => {
        $callback! {
            permute_columns_f32__pieces__sm61 => f32, F32;
            permute_columns_f16__pieces__sm61 => f16, F16;
            permute_columns_bf16__pieces__sm61 => bf16, BF16;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel of the operator.
        pub const PERMUTE_VARIANTS: &[PermuteColumnsVariant] =
            &[$(PermuteColumnsVariant { entry: stringify!($entry), dtype: DType::$dtype }),*];
    };
}
permute_columns_table!(variants);
