//! Weighted sums of table rows: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingBagDims {
    /// The rows of out, in pieces of 16 bytes or of one element: see [`EmbeddingBagTile`].
    pub tiles: RowTiles,
    /// Table rows of a token.
    pub bag: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// From one row of the table to the next.
    pub table_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// Whether the sum is added to what out holds.
    pub adds: u32,
}

const _: () = assert!(size_of::<EmbeddingBagDims>() == 36);
impl crate::Params for EmbeddingBagDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Logarithm of a block's threads, each of which takes one piece.
pub const BLOCK_PIECES_LOG2: u32 = THREADS.ilog2();

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingBagTile {
    /// In pieces of 16 bytes.
    Pieces,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct EmbeddingBagVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of table and out.
    pub dtype: DType,
    /// How rows are read.
    pub tile: EmbeddingBagTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! embedding_bag_table {
    ($callback:path) => {
        $callback! {
            embedding_bag_f32__pieces__sm61 => f32, F32, Pieces;
            embedding_bag_f32__scalar__sm61 => f32, F32, Scalar;
            embedding_bag_f16__pieces__sm61 => f16, F16, Pieces;
            embedding_bag_f16__scalar__sm61 => f16, F16, Scalar;
            embedding_bag_bf16__pieces__sm61 => bf16, BF16, Pieces;
            embedding_bag_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[EmbeddingBagVariant] = &[$(EmbeddingBagVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: EmbeddingBagTile::$tile,
        }),*];
    };
}
embedding_bag_table!(variants);
