//! Grouped matrix product, each group of rows with a weight of its own: parameters and entry points.
//!
//! The tiles are cut as those of [`super::matmul`]. A launch has a block for each pair of a *slot*, which is a place
//! for a tile's rows, and a stretch of columns. Where the groups begin is known on the device only, so slots are
//! counted from the number of rows and experts, and some stay empty.

use super::matmul::{MMA_ROW_BYTES, MMA_STAGES, THREADS, WARPS, WGMMA_ROW_BYTES};
use crate::matmul_fp8::QuantiseVariant;
use crate::{Arch, DType};

mod packed;

pub use packed::{PACKED_MMA_VARIANTS, PACKED_VARIANTS, UNPACK_VARIANTS, packed_smem_bytes};

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedMatmulDims {
    /// Rows of out.
    pub rows: u32,
    /// Rows of x.
    pub x_rows: u32,
    /// Groups.
    pub experts: u32,
    /// Rows of a weight; columns of out, or, if the product is gated, twice as many.
    pub n: u32,
    /// Columns of x and of the weights.
    pub k: u32,
    /// Rows of out that are made of one row of x, which the order names; 0: row i of out is made of row i of x.
    pub fan_out: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// From one row of a weight to the next.
    pub w_stride: u32,
    /// From one weight to the next.
    pub w_expert_stride: u32,
    /// From one row of out to the next.
    pub out_stride: u32,
    /// What may be moved in pieces, as in `MatmulDims` with x for a and w for b.
    pub access: u32,
    /// As in `MatmulDims`.
    pub split_log2: u32,
    /// Stretches of columns: blocks of a slot.
    pub col_blocks: u32,
    /// What a slot is: [`SLOTS_ARE_ROWS`] or [`SLOTS_ARE_TILES`].
    pub slots: u32,
}

const _: () = assert!(size_of::<GroupedMatmulDims>() == 56);
impl crate::Params for GroupedMatmulDims {}

/// Which experts are unpacked: those with rows of `first .. first + experts`, to matrices `[n, k]` one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnpackDims {
    /// The first of them.
    pub first: u32,
    /// How many.
    pub experts: u32,
    /// Rows of a weight.
    pub n: u32,
    /// Columns of a weight.
    pub k: u32,
}

const _: () = assert!(size_of::<UnpackDims>() == 16);
impl crate::Params for UnpackDims {}

/// Rows of a box of x in the `Wgmma` tiles.
pub const WGMMA_X_ROWS: u32 = 32;

/// In [`GroupedMatmulDims::slots`]: slot s is sorted row s, and empty unless a tile begins there.
pub const SLOTS_ARE_ROWS: u32 = 0;
/// In [`GroupedMatmulDims::slots`]: the slots of expert e begin at `⌊offsets[e] / tile rows⌋ + e`.
///
/// The next expert's begin at least `⌈rows of e / tile rows⌉` later, so every tile has a slot.
pub const SLOTS_ARE_TILES: u32 = 1;

/// How a group's product is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedMatmulTile {
    /// A block makes `bm` rows and `bn` columns, `bk` of k at a time: as `MatmulTile::Simt`.
    Simt {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Elements of k per step.
        bk: u32,
    },
    /// For few rows: a warp, or several that share k, makes `rows` rows of `cols` columns: as `MatmulTile::Gemv`.
    Gemv {
        /// Rows of x that are held against each piece of the weight.
        rows: u32,
        /// Columns of a warp.
        cols: u32,
        /// Pieces of each row of the weight that a lane has in flight.
        unroll: u32,
    },
    /// A block makes `bm` rows and `bn` columns on the tensor cores: as `MatmulTile::Mma`.
    Mma {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Threads of the block.
        threads: u32,
        /// Blocks that a multiprocessor shall hold.
        blocks: u32,
    },
    /// For few rows on the tensor cores: a warp, or several that share k, makes `rows` rows of `cols` columns: as
    /// `MatmulTile::Stream`.
    Stream {
        /// Rows of the tile.
        rows: u32,
        /// Columns of a warp.
        cols: u32,
        /// Lanes that a row of the weight has in a load, 16 bytes each.
        lanes: u32,
        /// Steps of 64 of k that a warp has in flight.
        unroll: u32,
    },
    /// A block walks over tiles of `bm` × `bn` on Hopper's tensor cores: a warpgroup loads, two multiply.
    Wgmma {
        /// Rows of the tile.
        bm: u32,
        /// Columns of the tile.
        bn: u32,
        /// Steps of k that loads run ahead.
        stages: u32,
    },
}

impl GroupedMatmulTile {
    /// Rows of a tile.
    pub const fn rows(self) -> u32 {
        match self {
            GroupedMatmulTile::Simt { bm, .. }
            | GroupedMatmulTile::Mma { bm, .. }
            | GroupedMatmulTile::Wgmma { bm, .. } => bm,
            GroupedMatmulTile::Gemv { rows, .. } | GroupedMatmulTile::Stream { rows, .. } => rows,
        }
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        match self {
            GroupedMatmulTile::Mma { threads, .. } => threads,
            GroupedMatmulTile::Wgmma { .. } => 384,
            _ => THREADS,
        }
    }

    /// Dynamic shared memory in bytes. A `Simt` tile holds two steps of both operands in f32.
    pub const fn smem_bytes(self) -> u32 {
        match self {
            GroupedMatmulTile::Simt { bm, bn, bk } => 2 * (bm + bn) * bk * 4,
            GroupedMatmulTile::Gemv { rows, cols, .. } | GroupedMatmulTile::Stream { rows, cols, .. } => {
                WARPS * rows * cols * 4
            }
            GroupedMatmulTile::Mma { bm, bn, .. } => MMA_STAGES * (bm + bn) * MMA_ROW_BYTES,
            // Stages, two boxes of 64 × 64 elements for each warpgroup that multiplies, a tile and two barriers a
            // stage.
            GroupedMatmulTile::Wgmma { bm, bn, stages } => {
                stages * (bm + bn) * WGMMA_ROW_BYTES + bm / 64 * 2 * 64 * 128 + 32 * stages
            }
        }
    }

    /// Stretches of columns.
    pub const fn col_blocks(self, n: u32, split_log2: u32) -> u32 {
        let cols = match self {
            GroupedMatmulTile::Simt { bn, .. }
            | GroupedMatmulTile::Mma { bn, .. }
            | GroupedMatmulTile::Wgmma { bn, .. } => bn,
            GroupedMatmulTile::Gemv { cols, .. } | GroupedMatmulTile::Stream { cols, .. } => {
                cols * (WARPS >> split_log2)
            }
        };
        n.div_ceil(cols)
    }

    /// What slots are, and how many there are: the fewer of the two kinds.
    pub const fn slots(self, rows: u32, experts: u32) -> (u32, u64) {
        let tiles = (rows / self.rows()) as u64 + experts as u64;
        if (rows as u64) < tiles { (SLOTS_ARE_ROWS, rows as u64) } else { (SLOTS_ARE_TILES, tiles) }
    }
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct GroupedMatmulVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all matrices.
    pub dtype: DType,
    /// How a group's product is cut up.
    pub tile: GroupedMatmulTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! grouped_matmul_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f32__gemv1__sm61 => f32, F32, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            grouped_matmul_f32__gemv2__sm61 => f32, F32, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            grouped_matmul_f32__gemv4__sm61 => f32, F32, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            grouped_matmul_f32__gemv8__sm61 => f32, F32, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            grouped_matmul_f32__m64n64k16__sm61 => f32, F32, Sm61, Simt { bm: 64, bn: 64, bk: 16 };
            grouped_matmul_f32__m128n128k8__sm61 => f32, F32, Sm61, Simt { bm: 128, bn: 128, bk: 8 };
            grouped_matmul_f16__gemv1__sm61 => f16, F16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            grouped_matmul_f16__gemv2__sm61 => f16, F16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            grouped_matmul_f16__gemv4__sm61 => f16, F16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            grouped_matmul_f16__gemv8__sm61 => f16, F16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            grouped_matmul_f16__m64n64k32__sm61 => f16, F16, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            grouped_matmul_f16__m128n128k16__sm61 => f16, F16, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
            grouped_matmul_bf16__gemv1__sm61 => bf16, BF16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            grouped_matmul_bf16__gemv2__sm61 => bf16, BF16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            grouped_matmul_bf16__gemv4__sm61 => bf16, BF16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            grouped_matmul_bf16__gemv8__sm61 => bf16, BF16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            grouped_matmul_bf16__m64n64k32__sm61 => bf16, BF16, Sm61, Simt { bm: 64, bn: 64, bk: 32 };
            grouped_matmul_bf16__m128n128k16__sm61 => bf16, BF16, Sm61, Simt { bm: 128, bn: 128, bk: 16 };
        }
    };
}

/// The same for the kernels of Ampere's tensor cores, which take operands in pieces of 16 bytes.
#[macro_export]
macro_rules! grouped_matmul_mma_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f16__stream8__sm80 => f16, F16, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            grouped_matmul_f16__stream16__sm80 => f16, F16, Sm80, Stream { rows: 16, cols: 16, lanes: 8, unroll: 2 };
            grouped_matmul_f16__m64n64__sm80 => f16, F16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            grouped_matmul_f16__m128n128__sm80 => f16, F16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            grouped_matmul_bf16__stream8__sm80 => bf16, BF16, Sm80, Stream { rows: 8, cols: 16, lanes: 8, unroll: 2 };
            grouped_matmul_bf16__stream16__sm80 => bf16, BF16, Sm80, Stream { rows: 16, cols: 16, lanes: 8, unroll: 2 };
            grouped_matmul_bf16__m64n64__sm80 => bf16, BF16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            grouped_matmul_bf16__m128n128__sm80 => bf16, BF16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
        }
    };
}

/// The same for the kernels of Hopper's tensor cores, which take a tensor map of the weights.
#[macro_export]
macro_rules! grouped_matmul_wgmma_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f16__m128n256__sm90a => f16, F16, Sm90a, Wgmma { bm: 128, bn: 256, stages: 4 };
            grouped_matmul_bf16__m128n256__sm90a => bf16, BF16, Sm90a, Wgmma { bm: 128, bn: 256, stages: 4 };
        }
    };
}

/// The same of fp8 by fp8, with packed weights: the type is out's.
#[macro_export]
macro_rules! grouped_matmul_fp8_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f16_fp8__m128n128__sm90a => f16, F16, Sm90a, Wgmma { bm: 128, bn: 128, stages: 4 };
            grouped_matmul_bf16_fp8__m128n128__sm90a => bf16, BF16, Sm90a, Wgmma { bm: 128, bn: 128, stages: 4 };
        }
    };
}

/// The kernels that make rows of x fp8.
#[macro_export]
macro_rules! grouped_matmul_quantise_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f16__quantise__sm90a => f16, F16, Sm90a;
            grouped_matmul_bf16__quantise__sm90a => bf16, BF16, Sm90a;
        }
    };
}

macro_rules! quantise_rows {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident;)*) => {
        &[$(QuantiseVariant::new(stringify!($entry), DType::$dtype, Arch::$floor)),*]
    };
}

macro_rules! rows {
    ($($entry:ident => $type:ident, $dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(GroupedMatmulVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: GroupedMatmulTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const VARIANTS: &[GroupedMatmulVariant] = grouped_matmul_table!(rows);
/// The kernels of Ampere's tensor cores.
pub const MMA_VARIANTS: &[GroupedMatmulVariant] = grouped_matmul_mma_table!(rows);
/// The kernels of Hopper's tensor cores.
pub const WGMMA_VARIANTS: &[GroupedMatmulVariant] = grouped_matmul_wgmma_table!(rows);
/// Those of fp8 by fp8.
pub const FP8_VARIANTS: &[GroupedMatmulVariant] = grouped_matmul_fp8_table!(rows);
/// Those that make rows of x fp8.
pub const QUANTISE_VARIANTS: &[QuantiseVariant] = grouped_matmul_quantise_table!(quantise_rows);

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let GroupedMatmulVariant { dtype, tile, .. } = VARIANTS[i];
        assert!(tile.smem_bytes() <= 48 << 10);
        if let GroupedMatmulTile::Simt { bm, bn, bk } = tile {
            assert!(bm == bn && bk * dtype.bytes() as u32 == THREADS / bm * 16);
        }
        i += 1;
    }
    let mut i = 0;
    while i < MMA_VARIANTS.len() {
        // What an RTX 3090 gives a block.
        assert!(MMA_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < WGMMA_VARIANTS.len() {
        assert!(WGMMA_VARIANTS[i].tile.smem_bytes() <= 227 << 10);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tile has a slot, and no two the same: what the kernels count on.
    #[test]
    fn slots_of_tiles() {
        for variant in VARIANTS.iter().chain(MMA_VARIANTS).filter(|variant| variant.dtype != DType::F16) {
            let tile_rows = variant.tile.rows();
            for sizes in [&[0, 5, 0, 0, 64, 1, 63, 200][..], &[1, 1, 1], &[0], &[129], &[0, 0, 128, 0]] {
                let (mut start, mut next) = (0, 0);
                for (expert, &size) in sizes.iter().enumerate() {
                    let first = start / tile_rows + expert as u32;
                    assert!(first >= next);
                    start += size;
                    next = first + size.div_ceil(tile_rows);
                }
                assert!(u64::from(next) <= (start / tile_rows) as u64 + sizes.len() as u64);
            }
        }
    }
}
