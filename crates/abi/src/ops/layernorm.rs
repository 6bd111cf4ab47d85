//! LayerNorm: parameters and entry points.

use crate::DType;

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNormDims {
    /// Rows.
    pub rows: u32,
    /// Elements of a row, over which mean and variance are taken.
    pub cols: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// The same for the residual.
    pub residual_stride: u32,
    /// 1/cols.
    pub inv_cols: f32,
    /// Added to the variance, inside the root.
    pub eps: f32,
}

const _: () = assert!(size_of::<LayerNormDims>() == 28);
impl crate::Params for LayerNormDims {}

/// How a row is spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerNormTile {
    /// A warp holds a row, `chunks` pieces of 16 bytes per lane; a block of [`WARP_TILE_THREADS`] threads holds a row
    /// for each of its warps.
    Warp {
        /// Pieces of 16 bytes per lane.
        chunks: u32,
    },
    /// A block holds a row, `chunks` pieces of 16 bytes per thread.
    Block {
        /// Pieces of 16 bytes per thread.
        chunks: u32,
    },
    /// A block walks over a row element by element: any length, stride and alignment.
    Scalar,
}

/// Threads of a block of the `Warp` tile.
pub const WARP_TILE_THREADS: u32 = 256;
/// Threads of a block of the `Scalar` tile.
pub const SCALAR_TILE_THREADS: u32 = 256;
/// Most threads of a block of the `Block` tile.
pub const BLOCK_TILE_MAX_THREADS: u32 = 1024;

impl LayerNormTile {
    /// The longest row, in pieces of 16 bytes; none if any length will do.
    pub const fn max_chunks(self) -> Option<u32> {
        match self {
            LayerNormTile::Warp { chunks } => Some(32 * chunks),
            LayerNormTile::Block { chunks } => Some(BLOCK_TILE_MAX_THREADS * chunks),
            LayerNormTile::Scalar => None,
        }
    }
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerNormVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all tensors.
    pub dtype: DType,
    /// How a row is spread over threads.
    pub tile: LayerNormTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! layernorm_table {
    ($callback:path) => {
        $callback! {
            layernorm_f32__warp4__sm61 => f32, F32, Warp { chunks: 4 };
            layernorm_f32__block2__sm61 => f32, F32, Block { chunks: 2 };
            layernorm_f32__scalar__sm61 => f32, F32, Scalar {};
            layernorm_f16__warp4__sm61 => f16, F16, Warp { chunks: 4 };
            layernorm_f16__block2__sm61 => f16, F16, Block { chunks: 2 };
            layernorm_f16__scalar__sm61 => f16, F16, Scalar {};
            layernorm_bf16__warp4__sm61 => bf16, BF16, Warp { chunks: 4 };
            layernorm_bf16__block2__sm61 => bf16, BF16, Block { chunks: 2 };
            layernorm_bf16__scalar__sm61 => bf16, BF16, Scalar {};
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[LayerNormVariant] = &[$(LayerNormVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: LayerNormTile::$tile { $($field: $value),* },
        }),*];
    };
}
layernorm_table!(variants);
