//! Matrix products with a packed weight ([`crate::weight`]): entry points.

use crate::weight::Codes;
use crate::{Arch, DType};

/// How the product is cut up: blocks of eight warps, each of which makes `rows` rows of 16 columns, or shares the k of
/// them with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedTile {
    /// By ordinary arithmetic, in f32.
    Simt {
        /// Rows of a.
        rows: u32,
    },
    /// On tensor cores.
    Mma {
        /// Rows of a: a multiple of 8.
        rows: u32,
        /// Tiles of 64 of k that are multiplied while as many are on their way: 1, 2 or 4.
        tiles: u32,
        /// Groups along k: 64 takes those of 64 and more without minimums, 32 those of 32, 16 all but those with
        /// minimums.
        group: u32,
    },
    /// On Hopper, for one row: as `Mma`, with the first tiles loaded before the wait for the kernel ahead, and perhaps
    /// a norm of the row.
    Ahead {
        /// Tiles of 64 of k that a warp has on their way or in registers.
        tiles: u32,
        /// Groups along k, as of `Mma`.
        group: u32,
    },
    /// On Hopper's tensor cores, groups of 64 of k and more: 128 columns, of which each warp has 16 by itself.
    Wgmma {
        /// Rows of a: a multiple of 8.
        rows: u32,
    },
}

/// Stages of the codes by `wgmma`: 64 of k each.
pub const WGMMA_PACKED_STAGES: u32 = 8;
/// Stages of a's rows by `wgmma`: 64 of k each.
pub const WGMMA_PACKED_STAGES_OF_A: u32 = 8;

impl PackedTile {
    /// Rows of a.
    pub const fn rows(self) -> u32 {
        match self {
            PackedTile::Simt { rows } | PackedTile::Mma { rows, .. } | PackedTile::Wgmma { rows } => rows,
            PackedTile::Ahead { .. } => 1,
        }
    }

    /// Threads of a block: by `Wgmma` four warps more load a.
    pub const fn threads(self) -> u32 {
        match self {
            PackedTile::Simt { .. } | PackedTile::Mma { .. } | PackedTile::Ahead { .. } => super::THREADS,
            PackedTile::Wgmma { .. } => super::THREADS + 128,
        }
    }

    /// Dynamic shared memory in bytes: the warps' sums, and before them tiles of a for each part of k, of which there
    /// are as many as warps at most.
    pub const fn smem_bytes(self) -> u32 {
        let sums = super::WARPS * self.rows() * crate::weight::TILE_ROWS * 4;
        match self {
            PackedTile::Simt { .. } => sums,
            PackedTile::Mma { rows, tiles, .. } => {
                let staged = 2 * super::WARPS * tiles * rows * crate::weight::TILE_K * 2;
                if staged > sums { staged } else { sums }
            }
            PackedTile::Ahead { .. } => super::AHEAD_SUMS_BYTES + super::AHEAD_MAX_K * 2,
            // Rows of a, with two barriers for each stage, and codes of 8 bits.
            PackedTile::Wgmma { rows } => {
                WGMMA_PACKED_STAGES_OF_A * (rows * super::WGMMA_ROW_BYTES + 16)
                    + WGMMA_PACKED_STAGES * super::WARPS * 1024
            }
        }
    }
}

/// One kernel.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct PackedVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of a, bias, residual and out.
    pub dtype: DType,
    /// What the weight's codes are.
    pub codes: Codes,
    /// How the product is cut up.
    pub tile: PackedTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// A kernel that makes a packed weight's rows a plain matrix.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct UnpackVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the matrix.
    pub dtype: DType,
    /// What the weight's codes are.
    pub codes: Codes,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! matmul_packed_table {
    ($callback:ident) => {
        $callback! {
            matmul_f32_int4__packed1__sm61 => f32, F32, Int4, Sm61, Simt { rows: 1 };
            matmul_f32_int4__packed2__sm61 => f32, F32, Int4, Sm61, Simt { rows: 2 };
            matmul_f32_int8__packed1__sm61 => f32, F32, Int8, Sm61, Simt { rows: 1 };
            matmul_f32_int8__packed2__sm61 => f32, F32, Int8, Sm61, Simt { rows: 2 };
            matmul_f32_e2m1__packed1__sm61 => f32, F32, E2m1, Sm61, Simt { rows: 1 };
            matmul_f32_e2m1__packed2__sm61 => f32, F32, E2m1, Sm61, Simt { rows: 2 };
            matmul_f32_e4m3__packed1__sm61 => f32, F32, E4m3, Sm61, Simt { rows: 1 };
            matmul_f32_e4m3__packed2__sm61 => f32, F32, E4m3, Sm61, Simt { rows: 2 };
            matmul_f32_e6m9__packed1__sm61 => f32, F32, E6m9, Sm61, Simt { rows: 1 };
            matmul_f32_e6m9__packed2__sm61 => f32, F32, E6m9, Sm61, Simt { rows: 2 };
            matmul_f16_int4__packed1__sm61 => f16, F16, Int4, Sm61, Simt { rows: 1 };
            matmul_f16_int4__packed2__sm61 => f16, F16, Int4, Sm61, Simt { rows: 2 };
            matmul_f16_int8__packed1__sm61 => f16, F16, Int8, Sm61, Simt { rows: 1 };
            matmul_f16_int8__packed2__sm61 => f16, F16, Int8, Sm61, Simt { rows: 2 };
            matmul_f16_e2m1__packed1__sm61 => f16, F16, E2m1, Sm61, Simt { rows: 1 };
            matmul_f16_e2m1__packed2__sm61 => f16, F16, E2m1, Sm61, Simt { rows: 2 };
            matmul_f16_e4m3__packed1__sm61 => f16, F16, E4m3, Sm61, Simt { rows: 1 };
            matmul_f16_e4m3__packed2__sm61 => f16, F16, E4m3, Sm61, Simt { rows: 2 };
            matmul_f16_e6m9__packed1__sm61 => f16, F16, E6m9, Sm61, Simt { rows: 1 };
            matmul_f16_e6m9__packed2__sm61 => f16, F16, E6m9, Sm61, Simt { rows: 2 };
            matmul_bf16_int4__packed1__sm61 => bf16, BF16, Int4, Sm61, Simt { rows: 1 };
            matmul_bf16_int4__packed2__sm61 => bf16, BF16, Int4, Sm61, Simt { rows: 2 };
            matmul_bf16_int8__packed1__sm61 => bf16, BF16, Int8, Sm61, Simt { rows: 1 };
            matmul_bf16_int8__packed2__sm61 => bf16, BF16, Int8, Sm61, Simt { rows: 2 };
            matmul_bf16_e2m1__packed1__sm61 => bf16, BF16, E2m1, Sm61, Simt { rows: 1 };
            matmul_bf16_e2m1__packed2__sm61 => bf16, BF16, E2m1, Sm61, Simt { rows: 2 };
            matmul_bf16_e4m3__packed1__sm61 => bf16, BF16, E4m3, Sm61, Simt { rows: 1 };
            matmul_bf16_e4m3__packed2__sm61 => bf16, BF16, E4m3, Sm61, Simt { rows: 2 };
            matmul_bf16_e6m9__packed1__sm61 => bf16, BF16, E6m9, Sm61, Simt { rows: 1 };
            matmul_bf16_e6m9__packed2__sm61 => bf16, BF16, E6m9, Sm61, Simt { rows: 2 };
        }
    };
}

/// The same for the kernels of the tensor cores.
#[macro_export]
macro_rules! matmul_packed_mma_table {
    ($callback:ident) => {
        $callback! {
            matmul_f16_int4__packed8__sm80 => f16, F16, Int4, Sm80, Mma { rows: 8, tiles: 4, group: 64 };
            matmul_f16_int4__packed16__sm80 => f16, F16, Int4, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            matmul_f16_int4__packed32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_f16_int4__packed64__sm80 => f16, F16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            matmul_f16_int4__packed8g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            matmul_f16_int4__packed16g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            matmul_f16_int4__packed64g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            matmul_f16_int8__packed8__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            matmul_f16_int8__packed16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            matmul_f16_int8__packed32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_f16_int8__packed64__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            matmul_f16_int8__packed8g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            matmul_f16_int8__packed8g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 16 };
            matmul_f16_int8__packed16g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            matmul_f16_int8__packed16g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            matmul_f16_int8__packed64g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            matmul_f16_int8__packed64g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            matmul_f16_e2m1__packed8g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 8, tiles: 4, group: 16 };
            matmul_f16_e2m1__packed16g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            matmul_f16_e2m1__packed64g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            matmul_f16_e4m3__packed8__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            matmul_f16_e4m3__packed16__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 16, tiles: 1, group: 64 };
            matmul_f16_e4m3__packed32__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_f16_e4m3__packed64__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            matmul_bf16_int4__packed8__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 8, tiles: 4, group: 64 };
            matmul_bf16_int4__packed16__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            matmul_bf16_int4__packed32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_bf16_int4__packed64__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            matmul_bf16_int4__packed8g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            matmul_bf16_int4__packed16g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            matmul_bf16_int4__packed64g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            matmul_bf16_int8__packed8__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            matmul_bf16_int8__packed16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            matmul_bf16_int8__packed32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_bf16_int8__packed64__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            matmul_bf16_int8__packed8g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            matmul_bf16_int8__packed8g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 16 };
            matmul_bf16_int8__packed16g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            matmul_bf16_int8__packed16g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            matmul_bf16_int8__packed64g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            matmul_bf16_int8__packed64g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            matmul_bf16_e2m1__packed8g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 8, tiles: 4, group: 16 };
            matmul_bf16_e2m1__packed16g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            matmul_bf16_e2m1__packed64g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            matmul_bf16_e4m3__packed8__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            matmul_bf16_e4m3__packed16__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            matmul_bf16_e4m3__packed32__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 32, tiles: 1, group: 64 };
            matmul_bf16_e4m3__packed64__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
        }
    };
}

/// The same for the kernels of one row that read the weight ahead.
#[macro_export]
macro_rules! matmul_packed_ahead_table {
    ($callback:ident) => {
        $callback! {
            matmul_f16_int4__packedahead__sm90a => f16, F16, Int4, Sm90a, Ahead { tiles: 4, group: 64 };
            matmul_f16_int4__packedaheadg32__sm90a => f16, F16, Int4, Sm90a, Ahead { tiles: 2, group: 32 };
            matmul_f16_int8__packedahead__sm90a => f16, F16, Int8, Sm90a, Ahead { tiles: 2, group: 64 };
            matmul_f16_int8__packedaheadg32__sm90a => f16, F16, Int8, Sm90a, Ahead { tiles: 1, group: 32 };
            matmul_f16_int8__packedaheadg16__sm90a => f16, F16, Int8, Sm90a, Ahead { tiles: 2, group: 16 };
            matmul_f16_e2m1__packedaheadg16__sm90a => f16, F16, E2m1, Sm90a, Ahead { tiles: 3, group: 16 };
            matmul_f16_e4m3__packedahead__sm90a => f16, F16, E4m3, Sm90a, Ahead { tiles: 2, group: 64 };
            matmul_bf16_int4__packedahead__sm90a => bf16, BF16, Int4, Sm90a, Ahead { tiles: 4, group: 64 };
            matmul_bf16_int4__packedaheadg32__sm90a => bf16, BF16, Int4, Sm90a, Ahead { tiles: 2, group: 32 };
            matmul_bf16_int8__packedahead__sm90a => bf16, BF16, Int8, Sm90a, Ahead { tiles: 2, group: 64 };
            matmul_bf16_int8__packedaheadg32__sm90a => bf16, BF16, Int8, Sm90a, Ahead { tiles: 1, group: 32 };
            matmul_bf16_int8__packedaheadg16__sm90a => bf16, BF16, Int8, Sm90a, Ahead { tiles: 2, group: 16 };
            matmul_bf16_e2m1__packedaheadg16__sm90a => bf16, BF16, E2m1, Sm90a, Ahead { tiles: 3, group: 16 };
            matmul_bf16_e4m3__packedahead__sm90a => bf16, BF16, E4m3, Sm90a, Ahead { tiles: 2, group: 64 };
        }
    };
}

/// The same for the kernels by `wgmma`.
#[macro_export]
macro_rules! matmul_packed_wgmma_table {
    ($callback:ident) => {
        $callback! {
            matmul_f16_int4__packedw32__sm90a => f16, F16, Int4, Sm90a, Wgmma { rows: 32 };
            matmul_f16_int4__packedw64__sm90a => f16, F16, Int4, Sm90a, Wgmma { rows: 64 };
            matmul_f16_int8__packedw32__sm90a => f16, F16, Int8, Sm90a, Wgmma { rows: 32 };
            matmul_f16_int8__packedw64__sm90a => f16, F16, Int8, Sm90a, Wgmma { rows: 64 };
            matmul_f16_e4m3__packedw32__sm90a => f16, F16, E4m3, Sm90a, Wgmma { rows: 32 };
            matmul_f16_e4m3__packedw64__sm90a => f16, F16, E4m3, Sm90a, Wgmma { rows: 64 };
            matmul_bf16_int4__packedw32__sm90a => bf16, BF16, Int4, Sm90a, Wgmma { rows: 32 };
            matmul_bf16_int4__packedw64__sm90a => bf16, BF16, Int4, Sm90a, Wgmma { rows: 64 };
            matmul_bf16_int8__packedw32__sm90a => bf16, BF16, Int8, Sm90a, Wgmma { rows: 32 };
            matmul_bf16_int8__packedw64__sm90a => bf16, BF16, Int8, Sm90a, Wgmma { rows: 64 };
            matmul_bf16_e4m3__packedw32__sm90a => bf16, BF16, E4m3, Sm90a, Wgmma { rows: 32 };
            matmul_bf16_e4m3__packedw64__sm90a => bf16, BF16, E4m3, Sm90a, Wgmma { rows: 64 };
        }
    };
}

/// The same for the kernels that unpack.
#[macro_export]
macro_rules! matmul_unpack_table {
    ($callback:ident) => {
        $callback! {
            matmul_f32_int4__unpack__sm61 => f32, F32, Int4, Sm61;
            matmul_f32_int8__unpack__sm61 => f32, F32, Int8, Sm61;
            matmul_f32_e2m1__unpack__sm61 => f32, F32, E2m1, Sm61;
            matmul_f32_e4m3__unpack__sm61 => f32, F32, E4m3, Sm61;
            matmul_f32_e6m9__unpack__sm61 => f32, F32, E6m9, Sm61;
            matmul_f16_int4__unpack__sm61 => f16, F16, Int4, Sm61;
            matmul_f16_int8__unpack__sm61 => f16, F16, Int8, Sm61;
            matmul_f16_e2m1__unpack__sm61 => f16, F16, E2m1, Sm61;
            matmul_f16_e4m3__unpack__sm61 => f16, F16, E4m3, Sm61;
            matmul_f16_e6m9__unpack__sm61 => f16, F16, E6m9, Sm61;
            matmul_bf16_int4__unpack__sm61 => bf16, BF16, Int4, Sm61;
            matmul_bf16_int8__unpack__sm61 => bf16, BF16, Int8, Sm61;
            matmul_bf16_e2m1__unpack__sm61 => bf16, BF16, E2m1, Sm61;
            matmul_bf16_e4m3__unpack__sm61 => bf16, BF16, E4m3, Sm61;
            matmul_bf16_e6m9__unpack__sm61 => bf16, BF16, E6m9, Sm61;
        }
    };
}

macro_rules! rows {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(PackedVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            codes: Codes::$codes,
            tile: PackedTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}

macro_rules! unpack_rows {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident;)*) => {
        &[$(UnpackVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            codes: Codes::$codes,
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const PACKED_VARIANTS: &[PackedVariant] = matmul_packed_table!(rows);
/// The kernels of the tensor cores.
pub const PACKED_MMA_VARIANTS: &[PackedVariant] = matmul_packed_mma_table!(rows);
/// The kernels of one row that read the weight ahead.
pub const PACKED_AHEAD_VARIANTS: &[PackedVariant] = matmul_packed_ahead_table!(rows);
/// The kernels by `wgmma`.
pub const PACKED_WGMMA_VARIANTS: &[PackedVariant] = matmul_packed_wgmma_table!(rows);
/// The kernels that unpack.
pub const UNPACK_VARIANTS: &[UnpackVariant] = matmul_unpack_table!(unpack_rows);
