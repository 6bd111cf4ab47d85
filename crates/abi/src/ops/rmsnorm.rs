//! RMSNorm: parameters and entry points.

use crate::DType;

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormDims {
    /// Rows altogether: tokens × heads.
    pub rows: u32,
    /// Elements of a row, over which the mean is taken.
    pub cols: u32,
    /// Rows of one token (1 unless the norm is per head).
    pub heads: u32,
    /// From one token's first row to the next one's, in x.
    pub x_token_stride: u32,
    /// From one head's row to the next, in x.
    pub x_head_stride: u32,
    /// The same for out.
    pub out_token_stride: u32,
    /// The same for out.
    pub out_head_stride: u32,
    /// The same for the residual.
    pub residual_token_stride: u32,
    /// The same for the residual.
    pub residual_head_stride: u32,
    /// The same for the gate.
    pub gate_token_stride: u32,
    /// The same for the gate.
    pub gate_head_stride: u32,
    /// 1/cols.
    pub inv_cols: f32,
    /// Added to the mean square, inside the root.
    pub eps: f32,
    /// Added to each weight: 1 for zero-centred weights, else 0.
    pub weight_offset: f32,
}

const _: () = assert!(size_of::<RmsNormDims>() == 56);
impl crate::Params for RmsNormDims {}

/// How a row is spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RmsNormTile {
    /// `lanes` neighbouring lanes hold a row, `chunks` pieces of 16 bytes each; a block of [`WARP_TILE_THREADS`]
    /// threads holds as many rows as fit.
    Lanes {
        /// A power of two up to 32.
        lanes: u32,
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

/// Threads of a block of the `Lanes` tiles.
pub const WARP_TILE_THREADS: u32 = 256;
/// Threads of a block of the `Scalar` tile.
pub const SCALAR_TILE_THREADS: u32 = 256;

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct RmsNormVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all tensors.
    pub dtype: DType,
    /// Most threads of a block, by the registers that they need.
    pub max_threads: u32,
    /// How a row is spread over threads.
    pub tile: RmsNormTile,
}

impl RmsNormVariant {
    /// The longest row, in pieces of 16 bytes; none if any length will do.
    pub const fn max_chunks(&self) -> Option<u32> {
        match self.tile {
            RmsNormTile::Lanes { lanes, chunks } => Some(lanes * chunks),
            RmsNormTile::Block { chunks } => Some(self.max_threads * chunks),
            RmsNormTile::Scalar => None,
        }
    }
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! rmsnorm_table {
    ($callback:path) => {
        $callback! {
            rmsnorm_f32__lanes8__sm61 => f32, F32, 256, Lanes { lanes: 8, chunks: 1 };
            rmsnorm_f32__lanes16__sm61 => f32, F32, 256, Lanes { lanes: 16, chunks: 1 };
            rmsnorm_f32__lanes32__sm61 => f32, F32, 256, Lanes { lanes: 32, chunks: 1 };
            rmsnorm_f32__lanes32x4__sm61 => f32, F32, 256, Lanes { lanes: 32, chunks: 4 };
            rmsnorm_f32__block1__sm61 => f32, F32, 512, Block { chunks: 1 };
            rmsnorm_f32__block2__sm61 => f32, F32, 1024, Block { chunks: 2 };
            rmsnorm_f32__block8__sm61 => f32, F32, 1024, Block { chunks: 8 };
            rmsnorm_f32__scalar__sm61 => f32, F32, 256, Scalar {};
            rmsnorm_f16__lanes8__sm61 => f16, F16, 256, Lanes { lanes: 8, chunks: 1 };
            rmsnorm_f16__lanes16__sm61 => f16, F16, 256, Lanes { lanes: 16, chunks: 1 };
            rmsnorm_f16__lanes32__sm61 => f16, F16, 256, Lanes { lanes: 32, chunks: 1 };
            rmsnorm_f16__lanes32x2__sm61 => f16, F16, 256, Lanes { lanes: 32, chunks: 2 };
            rmsnorm_f16__block1__sm61 => f16, F16, 512, Block { chunks: 1 };
            rmsnorm_f16__block2__sm61 => f16, F16, 1024, Block { chunks: 2 };
            rmsnorm_f16__block8__sm61 => f16, F16, 512, Block { chunks: 8 };
            rmsnorm_f16__scalar__sm61 => f16, F16, 256, Scalar {};
            rmsnorm_bf16__lanes8__sm61 => bf16, BF16, 256, Lanes { lanes: 8, chunks: 1 };
            rmsnorm_bf16__lanes16__sm61 => bf16, BF16, 256, Lanes { lanes: 16, chunks: 1 };
            rmsnorm_bf16__lanes32__sm61 => bf16, BF16, 256, Lanes { lanes: 32, chunks: 1 };
            rmsnorm_bf16__lanes32x2__sm61 => bf16, BF16, 256, Lanes { lanes: 32, chunks: 2 };
            rmsnorm_bf16__block1__sm61 => bf16, BF16, 512, Block { chunks: 1 };
            rmsnorm_bf16__block2__sm61 => bf16, BF16, 1024, Block { chunks: 2 };
            rmsnorm_bf16__block8__sm61 => bf16, BF16, 512, Block { chunks: 8 };
            rmsnorm_bf16__scalar__sm61 => bf16, BF16, 256, Scalar {};
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $threads:literal, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[RmsNormVariant] = &[$(RmsNormVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            max_threads: $threads,
            tile: RmsNormTile::$tile { $($field: $value),* },
        }),*];
    };
}
rmsnorm_table!(variants);
