//! Rows into places that are named by number: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScatterRowsDims {
    /// The rows of x, in pieces of 16 bytes or of one element: see [`ScatterRowsTile`].
    pub tiles: RowTiles,
    /// Rows of out: a number beyond them is skipped.
    pub num_rows: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// Whether a row is added to what out holds.
    pub adds: u32,
}

const _: () = assert!(size_of::<ScatterRowsDims>() == 32);
impl crate::Params for ScatterRowsDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Logarithm of a block's threads, each of which takes one piece.
pub const BLOCK_PIECES_LOG2: u32 = THREADS.ilog2();

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterRowsTile {
    /// In pieces of 16 bytes.
    Pieces,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct ScatterRowsVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of x and out.
    pub dtype: DType,
    /// How rows are read.
    pub tile: ScatterRowsTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! scatter_rows_table {
    ($callback:path) => {
        $callback! {
            scatter_rows_f32__pieces__sm61 => f32, F32, Pieces;
            scatter_rows_f32__scalar__sm61 => f32, F32, Scalar;
            scatter_rows_f16__pieces__sm61 => f16, F16, Pieces;
            scatter_rows_f16__scalar__sm61 => f16, F16, Scalar;
            scatter_rows_bf16__pieces__sm61 => bf16, BF16, Pieces;
            scatter_rows_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[ScatterRowsVariant] = &[$(ScatterRowsVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: ScatterRowsTile::$tile,
        }),*];
    };
}
scatter_rows_table!(variants);
