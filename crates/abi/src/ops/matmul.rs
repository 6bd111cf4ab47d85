//! Matrix product with a transposed right operand: parameters and entry points.

use crate::{Arch, DType};

mod packed;
mod permute;
mod timing;

pub use packed::{
    PACKED_AHEAD_VARIANTS, PACKED_MMA_VARIANTS, PACKED_VARIANTS, PACKED_WGMMA_VARIANTS, PackedTile,
    PackedVariant, UNPACK_VARIANTS, UnpackVariant, WGMMA_PACKED_STAGES, WGMMA_PACKED_STAGES_OF_A,
};
pub use permute::{
    PERMUTE_BLOCK_PIECES_LOG2, PERMUTE_PIECE, PERMUTE_THREADS, PERMUTE_VARIANTS, PermuteColumnsDims,
    PermuteColumnsVariant,
};
pub use timing::{TIME_TERMS, TileKind, TimedTile};

/// Sizes and strides of one launch, in elements. The int8 product takes the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulDims {
    /// Rows of a and out.
    pub m: u32,
    /// Rows of b, columns of out; if the product is gated, of gate and up together.
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
    /// Binary logarithm of the number of warps that share a column's k in the `Gemv`, `Ahead` and `Stream` tiles, at
    /// most 3.
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

/// In [`MatmulDims::access`]: address and strides of the residual are multiples of 4 elements.
pub const RESIDUAL_IN_QUADS: u32 = 32;

/// In [`MatmulDims::access`]: the tensor map of a is there, and its rows are sorted: of a grouped product.
pub const A_BY_TMA: u32 = 64;

/// In [`MatmulDims::access`]: the next launch may start early, as blocks of this one end.
pub const NEXT_MAY_START: u32 = 128;

/// In [`MatmulDims::access`]: no kernel writes b, which may be read before the kernel ahead has ended.
pub const B_IS_CONSTANT: u32 = 256;

/// What becomes of the sums of a launch: `act(scale · sum + bias) + residual`, or if it is gated
/// `act(scale · gate + bias) · (scale · up + bias) + residual`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulEpilogue {
    /// [`ACTIVATED`], [`GATED`] and [`OUT_IN_F32`].
    pub options: u32,
    /// Factor of the sums.
    pub scale: f32,
    /// From one row of the residual to the next, in elements.
    pub residual_stride: u32,
    /// From one product's residual to the next.
    pub residual_batch_stride: u32,
    /// The activation: `x / (1 + 2^(x · P(x²)))`, P's coefficients from that of the constant on.
    pub curve: Curve,
}

const _: () = assert!(size_of::<MatmulEpilogue>() == 48);
impl crate::Params for MatmulEpilogue {}

/// In [`MatmulEpilogue::options`]: the curve is the activation of the sums, or of the gate.
pub const ACTIVATED: u32 = 1;
/// In [`MatmulEpilogue::options`], of kernels that read packed weights: out is f32, and nothing but the scale is asked
/// for.
pub const OUT_IN_F32: u32 = 4;
/// In [`MatmulEpilogue::options`]: even columns of b are those of the gate, odd ones those of up, of half as many
/// columns of out.
pub const GATED: u32 = 2;

/// What becomes of a row of a before it is multiplied: `a · rsqrt(mean(a²) + eps) · (gain + offset)`, rounded to its
/// type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulNorm {
    /// Added to the mean of the squares.
    pub eps: f32,
    /// 1 / k.
    pub inv_cols: f32,
    /// Added to each gain.
    pub offset: f32,
}

const _: () = assert!(size_of::<MatmulNorm>() == 12);
impl crate::Params for MatmulNorm {}

/// Longest row that an `Ahead` tile takes.
pub const AHEAD_MAX_K: u32 = 12288;

/// Longest row that it norms; the gains lie behind it in shared memory.
pub const AHEAD_MAX_NORMED: u32 = AHEAD_MAX_K / 2;

/// Bytes of shared memory of an `Ahead` tile before the row: its sums, of packed weights 16 for each warp, and the
/// norm's.
pub const AHEAD_SUMS_BYTES: u32 = WARPS * 64;

/// Coefficients of P in `x / (1 + 2^(x · P(min(x², `[`CURVE_END`]`))))`, one form for all activations: a kernel has a
/// hundred sums in a thread's registers, and so as many copies of the formula.
pub type Curve = [f32; 8];
/// From here on P stays the same: the function is within 2^-24 of 0 or x, relative to x.
pub const CURVE_END: f32 = 28.09;
/// SiLU: P = −log2(e).
pub const SILU: Curve = [-core::f32::consts::LOG2_E, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
/// GELU by tanh: −log2(e) · 2 √(2/π) · (1 + 0.044715 x²).
pub const GELU_TANH: Curve = [-2.302_208_2, -0.102_943_24, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
/// GELU: Φ(x) = 1 / (1 + 2^(x · P(x²))) for P(x²) = log2(Φ(−x) / Φ(x)) / x, the polynomial whose largest error is the
/// smallest for
/// |x| ≤ 5.3: Φ errs by 2^-24.2, and relatively by 2^-12.5 from −4.5 on.
pub const GELU_ERF: Curve = [
    -2.302_209_6,
    -0.104_832_75,
    9.075_781e-5,
    1.613_446e-4,
    -1.186_598_1e-5,
    4.299_619e-7,
    -7.503_879e-9,
    4.270_757e-11,
];

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
    /// Hopper, for one row and constant b: as `Gemv`, with the first loads of b before the wait for the kernel ahead,
    /// and perhaps a norm of the row.
    Ahead {
        /// Columns of a warp.
        cols: u32,
        /// Pieces of each row of b that a lane has in flight.
        unroll: u32,
    },
    /// Ampere: a block of `threads` threads makes a tile of `bm` rows and `bn` columns, [`MMA_ROW_BYTES`] of k at a
    /// time; each of its warps makes an equal square part.
    Mma {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Threads of the block: a warp for each 64 × 64, or in a tile of 64 × 64 for each 32 × 32.
        threads: u32,
        /// Blocks that a multiprocessor is to hold, which bounds the registers.
        blocks: u32,
    },
    /// Ampere and later, for few rows: a warp, or several that share k, makes `rows` rows of `cols` columns on tensor
    /// cores.
    Stream {
        /// Rows of a that are held against each piece of b.
        rows: u32,
        /// Columns of a warp.
        cols: u32,
        /// Lanes that a row of b has in a load, 16 bytes each: 8, or 4 where that leaves too few registers.
        lanes: u32,
        /// Steps of 64 of k that a warp has in flight.
        unroll: u32,
    },
    /// The same for rows that are normed, with eight lanes to a row of b.
    StreamNormed {
        /// Rows of a that are held against each piece of b.
        rows: u32,
        /// Columns of a warp.
        cols: u32,
        /// Steps of 64 of k that a warp has in flight.
        unroll: u32,
    },
    /// Hopper: persistent blocks of a warpgroup that loads and one for each 64 rows make tiles of `bm` rows and `bn`
    /// columns, [`WGMMA_ROW_BYTES`] of k at a time.
    Wgmma {
        /// Rows of the tile: 64 or 128.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Threads of the block: 128, and 128 for each 64 rows.
        threads: u32,
        /// Steps of k that loads run ahead.
        stages: u32,
        /// Blocks that share an operand.
        cluster: u32,
        /// Whether they lie side by side and share a, instead of one above the other and sharing b.
        shares_a: bool,
    },
    /// Hopper, for few rows and columns: the blocks of a cluster share the k of a tile of 64 rows.
    Split {
        /// Columns of the tile.
        bn: u32,
        /// Threads of the block: a warpgroup that loads and one that multiplies.
        threads: u32,
        /// Steps of k that loads run ahead.
        stages: u32,
        /// Blocks that share k.
        cluster: u32,
    },
    /// Hopper, for some dozens to some hundreds of rows: tiles whose rows are b's, and whose columns a's. The blocks of
    /// a cluster share the k of one.
    Swapped {
        /// Rows of the tile, b's: a multiple of 64.
        bm: u32,
        /// Columns of the tile, a's rows: a multiple of 16.
        bn: u32,
        /// Threads of the block: 128 for each 64 rows, and a warp that loads.
        threads: u32,
        /// Steps of k that loads run ahead.
        stages: u32,
        /// Blocks that share k: 1, 2 or 4.
        cluster: u32,
    },
}

/// Tiles that a's rows are shared out to by a `Swapped` tile of so many columns, and rows of each: multiples of 8, all
/// the same, and no more than there are columns.
pub const fn swapped_rows(m: u32, bn: u32) -> (u32, u32) {
    let tiles = m.div_ceil(bn);
    let tiles = if tiles == 0 { 1 } else { tiles };
    (tiles, m.div_ceil(tiles).next_multiple_of(8))
}

/// Columns that a `Swapped` tile of so many multiplies where it has so many of a's rows: 16 fewer if these are enough.
pub const fn swapped_columns(a_rows: u32, bn: u32) -> u32 {
    if a_rows <= bn - 16 { bn - 16 } else { bn }
}

/// Bytes of a row per step of an `Mma` tile.
pub const MMA_ROW_BYTES: u32 = 64;
/// Steps of an `Mma` tile in shared memory.
pub const MMA_STAGES: u32 = 4;

/// Elements of k that a warp of a `Stream` tile takes before it is the next one's turn: 256 bytes.
pub const STREAM_BK: u32 = 128;

/// Bytes of a row per step of a `Wgmma` tile.
pub const WGMMA_ROW_BYTES: u32 = 128;
/// Rows of a box of out of a `Wgmma` tile: a warp's.
pub const WGMMA_OUT_ROWS: u32 = 16;

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
            MatmulTile::Gemv { rows, cols, .. } | MatmulTile::Stream { rows, cols, .. } => {
                WARPS * rows * cols * 4
            }
            MatmulTile::Ahead { .. } => AHEAD_SUMS_BYTES + AHEAD_MAX_K * dtype.bytes() as u32,
            // Sums, and a number for each warp.
            MatmulTile::StreamNormed { rows, cols, .. } => WARPS * (rows * cols + 1) * 4,
            MatmulTile::Mma { bm, bn, .. } => MMA_STAGES * (bm + bn) * MMA_ROW_BYTES,
            // Stages, two boxes of 64 × 64 elements for each warpgroup that stores, two barriers a stage.
            MatmulTile::Wgmma { bm, bn, stages, .. } => {
                let boxes = if bn.is_multiple_of(64) { bm / 64 * 2 } else { 0 };
                stages * (bm + bn) * WGMMA_ROW_BYTES + boxes * 64 * 128 + 16 * stages
            }
            // Stages, two barriers for each and two more.
            MatmulTile::Split { bn, stages, .. } => stages * ((64 + bn) * WGMMA_ROW_BYTES + 16) + 16,
            MatmulTile::Swapped { bm, bn, stages, .. } => stages * ((bm + bn) * WGMMA_ROW_BYTES + 16) + 16,
        }
    }

    /// Whether its kernels take the norm of rows.
    pub const fn norms(self) -> bool {
        matches!(self, MatmulTile::Ahead { .. } | MatmulTile::StreamNormed { .. })
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        match self {
            MatmulTile::Simt { .. }
            | MatmulTile::Gemv { .. }
            | MatmulTile::Ahead { .. }
            | MatmulTile::StreamNormed { .. }
            | MatmulTile::Stream { .. } => THREADS,
            MatmulTile::Mma { threads, .. }
            | MatmulTile::Wgmma { threads, .. }
            | MatmulTile::Split { threads, .. }
            | MatmulTile::Swapped { threads, .. } => threads,
        }
    }

    /// Blocks of one product, or clusters where there are such; `split_log2` counts for tiles of few rows only.
    pub const fn blocks(self, m: u32, n: u32, split_log2: u32) -> u64 {
        let (rows, cols) = match self {
            MatmulTile::Simt { bm, bn, .. } => (bm, bn),
            MatmulTile::Gemv { rows, cols, .. }
            | MatmulTile::Stream { rows, cols, .. }
            | MatmulTile::StreamNormed { rows, cols, .. } => (rows, cols * (WARPS >> split_log2)),
            MatmulTile::Ahead { cols, .. } => (1, cols * (WARPS >> split_log2)),
            MatmulTile::Mma { bm, bn, .. } => (bm, bn),
            MatmulTile::Wgmma { bm, bn, cluster, shares_a: true, .. } => (bm, bn * cluster),
            MatmulTile::Wgmma { bm, bn, cluster, .. } => (bm * cluster, bn),
            MatmulTile::Split { bn, .. } => (64, bn),
            MatmulTile::Swapped { bm, bn, .. } => (bn, bm),
        };
        m.div_ceil(rows) as u64 * n.div_ceil(cols) as u64
    }
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
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

impl MatmulVariant {
    /// Whether it multiplies f32 as tf32, which is all that the tensor cores have for it.
    pub const fn is_tf32(&self) -> bool {
        let on_tensor_cores = !matches!(
            self.tile,
            MatmulTile::Simt { .. } | MatmulTile::Gemv { .. } | MatmulTile::Ahead { .. }
        );
        matches!(self.dtype, DType::F32) && on_tensor_cores
    }
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

/// The same for the kernels of one row that read constant weights ahead.
#[macro_export]
macro_rules! matmul_ahead_table {
    ($callback:ident) => {
        $callback! {
            matmul_f16__ahead__sm90a => f16, f16, F16, F16, Sm90a, Ahead { cols: 2, unroll: 4 };
            matmul_f16_f32__ahead__sm90a => f16, f32, F16, F32, Sm90a, Ahead { cols: 2, unroll: 4 };
            matmul_bf16__ahead__sm90a => bf16, bf16, BF16, BF16, Sm90a, Ahead { cols: 2, unroll: 4 };
            matmul_bf16_f32__ahead__sm90a => bf16, f32, BF16, F32, Sm90a, Ahead { cols: 2, unroll: 4 };
        }
    };
}

/// The same for the kernels of few rows that are normed. In f16 `a · gain` may be beyond the largest number, so these
/// are of bf16.
#[macro_export]
macro_rules! matmul_stream_normed_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__streamnormed__sm80 => bf16, bf16, BF16, BF16, Sm80, StreamNormed { rows: 8, cols: 16, unroll: 2 };
        }
    };
}

/// The same for the kernels of Ampere's tensor cores.
#[macro_export]
macro_rules! matmul_mma_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__m128n256__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_bf16__m128n128__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_bf16__m64n64__sm80 => bf16, bf16, BF16, BF16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_bf16_f32__m64n64__sm80 => bf16, f32, BF16, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_f16__m128n256__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_f16__m128n128__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_f16__m64n64__sm80 => f16, f16, F16, F16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_f16_f32__m64n64__sm80 => f16, f32, F16, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_tf32__m128n256__sm80 => f32, f32, F32, F32, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_tf32__m128n128__sm80 => f32, f32, F32, F32, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_tf32__m64n64__sm80 => f32, f32, F32, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
        }
    };
}

/// The same for the kernels of few rows on the tensor cores.
#[macro_export]
macro_rules! matmul_stream_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__stream8__sm80 => bf16, bf16, BF16, BF16, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            matmul_bf16__stream16__sm80 => bf16, bf16, BF16, BF16, Sm80, Stream { rows: 16, cols: 16, lanes: 8, unroll: 2 };
            matmul_bf16__stream32__sm80 => bf16, bf16, BF16, BF16, Sm80, Stream { rows: 32, cols: 16, lanes: 4, unroll: 1 };
            matmul_bf16_f32__stream8__sm80 => bf16, f32, BF16, F32, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            matmul_bf16_f32__stream16__sm80 => bf16, f32, BF16, F32, Sm80, Stream { rows: 16, cols: 16, lanes: 4, unroll: 2 };
            matmul_bf16_f32__stream32__sm80 => bf16, f32, BF16, F32, Sm80, Stream { rows: 32, cols: 16, lanes: 4, unroll: 1 };
            matmul_f16__stream8__sm80 => f16, f16, F16, F16, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            matmul_f16__stream16__sm80 => f16, f16, F16, F16, Sm80, Stream { rows: 16, cols: 16, lanes: 8, unroll: 2 };
            matmul_f16__stream32__sm80 => f16, f16, F16, F16, Sm80, Stream { rows: 32, cols: 16, lanes: 4, unroll: 1 };
            matmul_f16_f32__stream8__sm80 => f16, f32, F16, F32, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            matmul_f16_f32__stream16__sm80 => f16, f32, F16, F32, Sm80, Stream { rows: 16, cols: 16, lanes: 4, unroll: 2 };
            matmul_f16_f32__stream32__sm80 => f16, f32, F16, F32, Sm80, Stream { rows: 32, cols: 16, lanes: 4, unroll: 1 };
        }
    };
}

/// The same for the kernels that take tensor maps.
#[macro_export]
macro_rules! matmul_wgmma_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16__n256c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 256, stages: 4, cluster: 2, shares_a: false };
            matmul_bf16__n192c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 2, shares_a: false };
            matmul_bf16__n192__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 1, shares_a: false };
            matmul_bf16__n128c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 2, shares_a: false };
            matmul_bf16__n128__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_bf16__n64__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 64, stages: 7, cluster: 1, shares_a: false };
            matmul_bf16__m64n64c4__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 256, bm: 64, bn: 64, stages: 12, cluster: 4, shares_a: true };
            matmul_bf16__m64n64k4__sm90a => bf16, bf16, BF16, BF16, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_bf16__m64n64k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Split { threads: 256, bn: 64, stages: 12, cluster: 2 };
            matmul_bf16__m64n128k4__sm90a => bf16, bf16, BF16, BF16, Sm90a, Split { threads: 256, bn: 128, stages: 4, cluster: 4 };
            matmul_bf16__swap128n96k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 1 };
            matmul_bf16__swap128n96k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 2 };
            matmul_bf16__swap128n96k4__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 4 };
            matmul_bf16__swap128n128k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 128, stages: 7, cluster: 1 };
            matmul_bf16__swap128n128k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 128, stages: 7, cluster: 2 };
            matmul_bf16__swap128n160k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 160, stages: 6, cluster: 1 };
            matmul_bf16__swap128n160k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 160, stages: 6, cluster: 2 };
            matmul_bf16__swap128n192k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 1 };
            matmul_bf16__swap128n192k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 2 };
            matmul_bf16__swap128n192k4__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 4 };
            matmul_bf16__swap128n224k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 224, stages: 5, cluster: 1 };
            matmul_bf16__swap128n256k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 288, bm: 128, bn: 256, stages: 4, cluster: 1 };
            matmul_bf16__swap192n160k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 416, bm: 192, bn: 160, stages: 5, cluster: 1 };
            matmul_bf16__swap192n192k1__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 416, bm: 192, bn: 192, stages: 4, cluster: 1 };
            matmul_bf16__swap64n96k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 160, bm: 64, bn: 96, stages: 8, cluster: 2 };
            matmul_bf16__swap64n128k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 160, bm: 64, bn: 128, stages: 8, cluster: 2 };
            matmul_bf16__swap64n160k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 160, bm: 64, bn: 160, stages: 8, cluster: 2 };
            matmul_bf16__swap64n192k2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Swapped { threads: 160, bm: 64, bn: 192, stages: 7, cluster: 2 };
            matmul_bf16_f32__n128__sm90a => bf16, f32, BF16, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_bf16_f32__m64n64c4__sm90a => bf16, f32, BF16, F32, Sm90a, Wgmma { threads: 256, bm: 64, bn: 64, stages: 12, cluster: 4, shares_a: true };
            matmul_bf16_f32__m64n64k4__sm90a => bf16, f32, BF16, F32, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_bf16_f32__m64n64k2__sm90a => bf16, f32, BF16, F32, Sm90a, Split { threads: 256, bn: 64, stages: 12, cluster: 2 };
            matmul_f16__n256c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 256, stages: 4, cluster: 2, shares_a: false };
            matmul_f16__n192c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 2, shares_a: false };
            matmul_f16__n192__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 1, shares_a: false };
            matmul_f16__n128c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 2, shares_a: false };
            matmul_f16__n128__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_f16__n64__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 64, stages: 7, cluster: 1, shares_a: false };
            matmul_f16__m64n64c4__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 256, bm: 64, bn: 64, stages: 12, cluster: 4, shares_a: true };
            matmul_f16__m64n64k4__sm90a => f16, f16, F16, F16, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_f16__m64n64k2__sm90a => f16, f16, F16, F16, Sm90a, Split { threads: 256, bn: 64, stages: 12, cluster: 2 };
            matmul_f16__m64n128k4__sm90a => f16, f16, F16, F16, Sm90a, Split { threads: 256, bn: 128, stages: 4, cluster: 4 };
            matmul_f16__swap128n96k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 1 };
            matmul_f16__swap128n96k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 2 };
            matmul_f16__swap128n96k4__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 96, stages: 8, cluster: 4 };
            matmul_f16__swap128n128k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 128, stages: 7, cluster: 1 };
            matmul_f16__swap128n128k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 128, stages: 7, cluster: 2 };
            matmul_f16__swap128n160k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 160, stages: 6, cluster: 1 };
            matmul_f16__swap128n160k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 160, stages: 6, cluster: 2 };
            matmul_f16__swap128n192k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 1 };
            matmul_f16__swap128n192k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 2 };
            matmul_f16__swap128n192k4__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 192, stages: 5, cluster: 4 };
            matmul_f16__swap128n224k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 224, stages: 5, cluster: 1 };
            matmul_f16__swap128n256k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 288, bm: 128, bn: 256, stages: 4, cluster: 1 };
            matmul_f16__swap192n160k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 416, bm: 192, bn: 160, stages: 5, cluster: 1 };
            matmul_f16__swap192n192k1__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 416, bm: 192, bn: 192, stages: 4, cluster: 1 };
            matmul_f16__swap64n96k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 160, bm: 64, bn: 96, stages: 8, cluster: 2 };
            matmul_f16__swap64n128k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 160, bm: 64, bn: 128, stages: 8, cluster: 2 };
            matmul_f16__swap64n160k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 160, bm: 64, bn: 160, stages: 8, cluster: 2 };
            matmul_f16__swap64n192k2__sm90a => f16, f16, F16, F16, Sm90a, Swapped { threads: 160, bm: 64, bn: 192, stages: 7, cluster: 2 };
            matmul_f16_f32__n128__sm90a => f16, f32, F16, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_f16_f32__m64n64c4__sm90a => f16, f32, F16, F32, Sm90a, Wgmma { threads: 256, bm: 64, bn: 64, stages: 12, cluster: 4, shares_a: true };
            matmul_f16_f32__m64n64k4__sm90a => f16, f32, F16, F32, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_f16_f32__m64n64k2__sm90a => f16, f32, F16, F32, Sm90a, Split { threads: 256, bn: 64, stages: 12, cluster: 2 };
            matmul_tf32__n256c2__sm90a => f32, f32, F32, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 256, stages: 4, cluster: 2, shares_a: false };
            matmul_tf32__n128__sm90a => f32, f32, F32, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
        }
    };
}

/// The same for the kernels of fp8 by fp8, whose rows become fp8 before.
#[macro_export]
macro_rules! matmul_fp8_table {
    ($callback:ident) => {
        $callback! {
            matmul_bf16_fp8__n128c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 2, shares_a: false };
            matmul_bf16_fp8__n128__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_bf16_fp8__m192n128c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 512, bm: 192, bn: 128, stages: 4, cluster: 2, shares_a: false };
            matmul_bf16_fp8__n192c2__sm90a => bf16, bf16, BF16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 2, shares_a: false };
            matmul_f16_fp8__n128c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 2, shares_a: false };
            matmul_f16_fp8__n128__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_f16_fp8__m192n128c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 512, bm: 192, bn: 128, stages: 4, cluster: 2, shares_a: false };
            matmul_f16_fp8__n192c2__sm90a => f16, f16, F16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 192, stages: 4, cluster: 2, shares_a: false };
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
/// The same for the kernels of one row that read constant weights ahead.
pub const AHEAD_VARIANTS: &[MatmulVariant] = matmul_ahead_table!(rows);
/// The kernels of few rows that are normed.
pub const STREAM_NORMED_VARIANTS: &[MatmulVariant] = matmul_stream_normed_table!(rows);
/// The kernels of Ampere's tensor cores.
pub const MMA_VARIANTS: &[MatmulVariant] = matmul_mma_table!(rows);
/// The kernels of few rows on the tensor cores.
pub const STREAM_VARIANTS: &[MatmulVariant] = matmul_stream_table!(rows);
/// The kernels of Hopper's tensor cores, which take tensor maps.
pub const WGMMA_VARIANTS: &[MatmulVariant] = matmul_wgmma_table!(rows);
/// The same of fp8 by fp8.
pub const FP8_VARIANTS: &[MatmulVariant] = matmul_fp8_table!(rows);

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
        if let MatmulTile::Wgmma { bm, threads, .. } = tile {
            assert!(threads == 128 + 2 * bm);
        }
        i += 1;
    }
};
