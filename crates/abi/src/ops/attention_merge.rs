//! Attention over two parts of the keys as attention over all of them: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements, of a token and of a head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionMergeDims {
    /// Rows, of which each head of a token has one, in pieces of 16 bytes or of one element: see
    /// [`AttentionMergeTile`].
    pub tiles: RowTiles,
    /// Heads of a token.
    pub heads: u32,
    /// Of the first part.
    pub a_strides: [u32; 2],
    /// Of the second.
    pub b_strides: [u32; 2],
    /// Of the result.
    pub out_strides: [u32; 2],
    /// From one head's logarithms to the next's: of the first part, the second, and the result.
    pub lse_strides: [u32; 3],
}

const _: () = assert!(size_of::<AttentionMergeDims>() == 56);
impl crate::Params for AttentionMergeDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Logarithm of a block's threads, each of which takes one piece.
pub const BLOCK_PIECES_LOG2: u32 = THREADS.ilog2();

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionMergeTile {
    /// In pieces of 16 bytes.
    Pieces,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionMergeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the parts and the result.
    pub dtype: DType,
    /// How rows are read.
    pub tile: AttentionMergeTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! attention_merge_table {
    ($callback:path) => {
        $callback! {
            attention_merge_f32__pieces__sm61 => f32, F32, Pieces;
            attention_merge_f32__scalar__sm61 => f32, F32, Scalar;
            attention_merge_f16__pieces__sm61 => f16, F16, Pieces;
            attention_merge_f16__scalar__sm61 => f16, F16, Scalar;
            attention_merge_bf16__pieces__sm61 => bf16, BF16, Pieces;
            attention_merge_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[AttentionMergeVariant] = &[$(AttentionMergeVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: AttentionMergeTile::$tile,
        }),*];
    };
}
attention_merge_table!(variants);
