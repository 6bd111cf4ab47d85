//! Matrix product with a transposed right operand: parameters and entry points.

use crate::{Arch, DType};

/// Sizes and strides of one launch, in elements. The int8 product takes the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulDims {
    /// Rows of a and out.
    pub m: u32,
    /// Rows of b, columns of out.
    pub n: u32,
    /// Columns of a and b.
    pub k: u32,
    /// From one row of a to the next.
    pub a_stride: u32,
    /// From one row of b to the next.
    pub b_stride: u32,
    /// From one row of out to the next.
    pub out_stride: u32,
    /// From one product's a to the next; the grid's z counts products.
    pub a_batch_stride: u32,
    /// From one product's b to the next.
    pub b_batch_stride: u32,
    /// From one product's out to the next.
    pub out_batch_stride: u32,
    /// What may be moved in pieces: [`A_IN_PIECES`], [`B_IN_PIECES`], [`OUT_IN_QUADS`].
    pub access: u32,
    /// Binary logarithm of the number of warps that share a column's k in the `Gemv` tiles, at most 3.
    pub split_log2: u32,
}

const _: () = assert!(size_of::<MatmulDims>() == 44);
impl crate::Params for MatmulDims {}

/// In [`MatmulDims::access`]: address and strides of a are multiples of 16 bytes.
pub const A_IN_PIECES: u32 = 1;
/// In [`MatmulDims::access`]: address and strides of b are multiples of 16 bytes.
pub const B_IN_PIECES: u32 = 2;
/// In [`MatmulDims::access`]: address and strides of out are multiples of 4 elements.
pub const OUT_IN_QUADS: u32 = 4;

/// In [`MatmulDims::access`]: address and stride of out are multiples of 16 bytes.
pub const OUT_IN_PIECES: u32 = 8;
/// In [`MatmulDims::access`]: the tensor map of out is there, and its tail fills 16 bytes.
pub const OUT_BY_TMA: u32 = 16;

/// How the product is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulTile {
    /// A block of [`THREADS`] threads makes a tile of `bm` rows and columns, `bk` of k at a time. Each thread moves one
    /// piece of 16 bytes of either operand per step, which ties the three: `bm = bn`, and `bk` elements are
    /// `THREADS / bm` pieces.
    Simt {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Elements of k per step.
        bk: u32,
    },
    /// For few rows: a warp, or several that share k, makes `rows` rows of `cols` columns.
    Gemv {
        /// Rows of a that are held against each piece of b.
        rows: u32,
        /// Columns of a warp.
        cols: u32,
        /// Pieces of each row of b that a lane has in flight.
        unroll: u32,
    },
    /// Ampere: a block of `threads` threads makes a tile of `bm` rows and `bn` columns, [`MMA_BK`] of k at a time; each of
    /// its warps makes an equal square part.
    Mma {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Threads of the block: 64 × 64 to a warp of 256 or of 128 × 128, else 32 × 32.
        threads: u32,
        /// Blocks that a multiprocessor is to hold, which bounds the registers.
        blocks: u32,
        /// Steps of k in shared memory.
        stages: u32,
    },
    /// Ampere and later, for up to `rows` rows: a block of [`THREADS`] threads makes [`SKINNY_COLS`] columns of all of them,
    /// its warps share k, and with `clustered` the blocks of a cluster do too.
    Skinny {
        /// Most rows.
        rows: u32,
        /// Blocks that a multiprocessor is to hold, which bounds the registers.
        blocks: u32,
        /// Whether blocks come in clusters.
        clustered: bool,
    },
    /// Hopper: persistent blocks of [`WGMMA_THREADS`] threads, whose two warpgroups make tiles of [`WGMMA_BM`] rows and
    /// `bn` columns, [`WGMMA_BK`] of k at a time.
    Wgmma {
        /// Columns of the tile.
        bn: u32,
        /// Steps of k that loads run ahead.
        stages: u32,
        /// Blocks that share b.
        cluster: u32,
    },
}

/// Elements of k per step of an `Mma` tile: 64 bytes.
pub const MMA_BK: u32 = 32;

/// Columns of a `Skinny` tile.
pub const SKINNY_COLS: u32 = 64;
/// Elements of k per step of a `Skinny` tile: 256 bytes.
pub const SKINNY_BK: u32 = 128;
/// Steps of k in shared memory of a `Skinny` tile.
pub const SKINNY_STAGES: u32 = 4;

/// Rows of a `Wgmma` tile.
pub const WGMMA_BM: u32 = 128;
/// Elements of k per step of a `Wgmma` tile: 128 bytes.
pub const WGMMA_BK: u32 = 64;
/// Threads of a block of a `Wgmma` tile: one warpgroup loads, two multiply.
pub const WGMMA_THREADS: u32 = 384;

/// Threads of every block.
pub const THREADS: u32 = 256;
/// Warps of every block.
pub const WARPS: u32 = THREADS / 32;

impl MatmulTile {
    /// Dynamic shared memory in bytes. A `Simt` tile holds 32-bit words: an f32 for a float, four int8.
    pub const fn smem_bytes(self, dtype: DType) -> u32 {
        match self {
            MatmulTile::Simt { bm, bn, bk } => {
                let words = if matches!(dtype, DType::I8) { bk / 4 } else { bk };
                2 * (bm + bn) * words * 4
            }
            MatmulTile::Gemv { rows, cols, .. } => WARPS * rows * cols * 4,
            MatmulTile::Mma { bm, bn, stages, .. } => stages * (bm + bn) * MMA_BK * 2,
            MatmulTile::Skinny { rows, .. } => {
                let stages = SKINNY_STAGES * (rows + SKINNY_COLS) * SKINNY_BK * 2;
                let sums = WARPS * rows * SKINNY_COLS * 4;
                if stages > sums { stages } else { sums }
            }
            // Stages, two boxes of 64 × 64 elements for each of the two warpgroups that store, two barriers a stage.
            MatmulTile::Wgmma { bn, stages, .. } => {
                stages * (WGMMA_BM + bn) * 128 + 4 * 64 * 128 + 16 * stages
            }
        }
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        match self {
            MatmulTile::Simt { .. } | MatmulTile::Gemv { .. } | MatmulTile::Skinny { .. } => THREADS,
            MatmulTile::Mma { threads, .. } => threads,
            MatmulTile::Wgmma { .. } => WGMMA_THREADS,
        }
    }

    /// Blocks of one product; `split_log2` counts for the `Gemv` tiles only.
    pub const fn blocks(self, m: u32, n: u32, split_log2: u32) -> u64 {
        let (rows, cols) = match self {
            MatmulTile::Simt { bm, bn, .. } => (bm, bn),
            MatmulTile::Gemv { rows, cols, .. } => (rows, cols * (WARPS >> split_log2)),
            MatmulTile::Mma { bm, bn, .. } => (bm, bn),
            MatmulTile::Skinny { rows, .. } => (rows, SKINNY_COLS),
            MatmulTile::Wgmma { bn, cluster, .. } => (WGMMA_BM * cluster, bn),
        };
        m.div_ceil(rows) as u64 * n.div_ceil(cols) as u64
    }
}

/// One kernel of the operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of a, b and bias.
    pub dtype: DType,
    /// Type of out.
    pub out_dtype: DType,
    /// How the product is cut up.
    pub tile: MatmulTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! matmul_table {
    ($callback:ident) => {
        $callback! {
            matmul_f32__gemv1__sm61 => f32, f32, F32, F32, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_f32__gemv2__sm61 => f32, f32, F32, F32, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_f32__gemv4__sm61 => f32, f32, F32, F32, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_f32__gemv8__sm61 => f32, f32, F32, F32, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_f32__m64n64k16__sm61 => f32, f32, F32, F32, Sm61, Simt { bm: 64, bn: 64, bk: 16 };
            matmul_f32__m128n128k8__sm61 => f32, f32, F32, F32, Sm61, Simt { bm: 128, bn: 128, bk: 8 };
            matmul_f16__gemv1__sm61 => f16, f16, F16, F16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_f16__gemv2__sm61 => f16, f16, F16, F16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_f16__gemv4__sm61 => f16, f16, F16, F16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_f16__gemv8__sm61 => f16, f16, F16, F16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_f16__m64n64k32__sm61 => f16, f16, F16, F16, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            matmul_f16__m128n128k16__sm61 => f16, f16, F16, F16, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
            matmul_f16_f32__gemv1__sm61 => f16, f32, F16, F32, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_f16_f32__gemv2__sm61 => f16, f32, F16, F32, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_f16_f32__gemv4__sm61 => f16, f32, F16, F32, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_f16_f32__gemv8__sm61 => f16, f32, F16, F32, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_f16_f32__m64n64k32__sm61 => f16, f32, F16, F32, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            matmul_f16_f32__m128n128k16__sm61 => f16, f32, F16, F32, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
            matmul_bf16__gemv1__sm61 => bf16, bf16, BF16, BF16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_bf16__gemv2__sm61 => bf16, bf16, BF16, BF16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_bf16__gemv4__sm61 => bf16, bf16, BF16, BF16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_bf16__gemv8__sm61 => bf16, bf16, BF16, BF16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_bf16__m64n64k32__sm61 => bf16, bf16, BF16, BF16, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            matmul_bf16__m128n128k16__sm61 => bf16, bf16, BF16, BF16, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
            matmul_bf16_f32__gemv1__sm61 => bf16, f32, BF16, F32, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_bf16_f32__gemv2__sm61 => bf16, f32, BF16, F32, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_bf16_f32__gemv4__sm61 => bf16, f32, BF16, F32, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_bf16_f32__gemv8__sm61 => bf16, f32, BF16, F32, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_bf16_f32__m64n64k32__sm61 => bf16, f32, BF16, F32, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            matmul_bf16_f32__m128n128k16__sm61 => bf16, f32, BF16, F32, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
        }
    };
}

/// The same for the kernels of Ampere's tensor cores.
#[macro_export]
macro_rules! matmul_mma_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__m128n256__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1, stages: 4 };
            matmul_bf16__m128n128__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2, stages: 4 };
            matmul_bf16__m64n64__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4, stages: 4 };
            matmul_bf16_f32__m64n64__sm80 => bf16, f32, BF16, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4, stages: 4 };
            matmul_f16__m128n256__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1, stages: 4 };
            matmul_f16__m128n128__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2, stages: 4 };
            matmul_f16__m64n64__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4, stages: 4 };
            matmul_f16_f32__m64n64__sm80 => f16, f32, F16, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4, stages: 4 };
        }
    };
}

/// The same for the kernels of few rows on the tensor cores.
#[macro_export]
macro_rules! matmul_skinny_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__skinny16__sm80 => bf16, bf16, BF16, BF16, Sm80, Skinny { rows: 16, blocks: 2, clustered: false };
            matmul_bf16__skinny64__sm80 => bf16, bf16, BF16, BF16, Sm80, Skinny { rows: 64, blocks: 1, clustered: false };
            matmul_bf16__skinny16__sm90a => bf16, bf16, BF16, BF16, Sm90a, Skinny { rows: 16, blocks: 2, clustered: true };
            matmul_bf16__skinny64__sm90a => bf16, bf16, BF16, BF16, Sm90a, Skinny { rows: 64, blocks: 1, clustered: true };
            matmul_bf16_f32__skinny16__sm80 => bf16, f32, BF16, F32, Sm80, Skinny { rows: 16, blocks: 2, clustered: false };
            matmul_bf16_f32__skinny64__sm80 => bf16, f32, BF16, F32, Sm80, Skinny { rows: 64, blocks: 1, clustered: false };
            matmul_bf16_f32__skinny16__sm90a => bf16, f32, BF16, F32, Sm90a, Skinny { rows: 16, blocks: 2, clustered: true };
            matmul_bf16_f32__skinny64__sm90a => bf16, f32, BF16, F32, Sm90a, Skinny { rows: 64, blocks: 1, clustered: true };
            matmul_f16__skinny16__sm80 => f16, f16, F16, F16, Sm80, Skinny { rows: 16, blocks: 2, clustered: false };
            matmul_f16__skinny64__sm80 => f16, f16, F16, F16, Sm80, Skinny { rows: 64, blocks: 1, clustered: false };
            matmul_f16__skinny16__sm90a => f16, f16, F16, F16, Sm90a, Skinny { rows: 16, blocks: 2, clustered: true };
            matmul_f16__skinny64__sm90a => f16, f16, F16, F16, Sm90a, Skinny { rows: 64, blocks: 1, clustered: true };
            matmul_f16_f32__skinny16__sm80 => f16, f32, F16, F32, Sm80, Skinny { rows: 16, blocks: 2, clustered: false };
            matmul_f16_f32__skinny64__sm80 => f16, f32, F16, F32, Sm80, Skinny { rows: 64, blocks: 1, clustered: false };
            matmul_f16_f32__skinny16__sm90a => f16, f32, F16, F32, Sm90a, Skinny { rows: 16, blocks: 2, clustered: true };
            matmul_f16_f32__skinny64__sm90a => f16, f32, F16, F32, Sm90a, Skinny { rows: 64, blocks: 1, clustered: true };
        }
    };
}

/// The same for the kernels that take tensor maps.
#[macro_export]
macro_rules! matmul_wgmma_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__n256c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { bn: 256, stages: 4, cluster: 2 };
            matmul_bf16__n192c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { bn: 192, stages: 4, cluster: 2 };
            matmul_bf16__n128c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 2 };
            matmul_bf16__n128__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 1 };
            matmul_bf16__n64__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { bn: 64, stages: 7, cluster: 1 };
            matmul_bf16_f32__n128__sm90a => bf16, f32, BF16, F32, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 1 };
            matmul_f16__n256c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { bn: 256, stages: 4, cluster: 2 };
            matmul_f16__n192c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { bn: 192, stages: 4, cluster: 2 };
            matmul_f16__n128c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 2 };
            matmul_f16__n128__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 1 };
            matmul_f16__n64__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { bn: 64, stages: 7, cluster: 1 };
            matmul_f16_f32__n128__sm90a => f16, f32, F16, F32, Sm90a, Wgmma { bn: 128, stages: 6, cluster: 1 };
        }
    };
}

macro_rules! rows {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(MatmulVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            out_dtype: DType::$out_dtype,
            tile: MatmulTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const VARIANTS: &[MatmulVariant] = matmul_table!(rows);
/// The kernels of Ampere's tensor cores.
pub const MMA_VARIANTS: &[MatmulVariant] = matmul_mma_table!(rows);
/// The kernels of few rows on the tensor cores.
pub const SKINNY_VARIANTS: &[MatmulVariant] = matmul_skinny_table!(rows);
/// The kernels of Hopper's tensor cores, which take tensor maps.
pub const WGMMA_VARIANTS: &[MatmulVariant] = matmul_wgmma_table!(rows);

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let MatmulVariant { dtype, tile, .. } = VARIANTS[i];
        assert!(tile.smem_bytes(dtype) <= 48 << 10);
        if let MatmulTile::Simt { bm, bn, bk } = tile {
            assert!(bm == bn && bk * dtype.bytes() as u32 == THREADS / bm * 16);
        }
        i += 1;
    }
    let mut i = 0;
    while i < MMA_VARIANTS.len() {
        // What an RTX 3090 gives a block; an A100 gives 163 KiB.
        assert!(MMA_VARIANTS[i].tile.smem_bytes(MMA_VARIANTS[i].dtype) <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < WGMMA_VARIANTS.len() {
        let MatmulVariant { dtype, tile, .. } = WGMMA_VARIANTS[i];
        assert!(tile.smem_bytes(dtype) <= 227 << 10);
        i += 1;
    }
};
