//! Grouped products with packed weights ([`crate::weight`]): entry points.

use crate::ops::matmul::{PackedTile, PackedVariant, UnpackVariant, WARPS};
use crate::weight::{Codes, TILE_ROWS};
use crate::{Arch, DType};

/// Dynamic shared memory in bytes: the warps' sums.
pub const fn packed_smem_bytes(tile: PackedTile) -> u32 {
    WARPS * tile.rows() * TILE_ROWS * 4
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! grouped_matmul_packed_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f32_int4__packed2__sm61 => f32, F32, Int4, Sm61, Simt { rows: 2 };
            grouped_matmul_f32_int8__packed2__sm61 => f32, F32, Int8, Sm61, Simt { rows: 2 };
            grouped_matmul_f32_e2m1__packed2__sm61 => f32, F32, E2m1, Sm61, Simt { rows: 2 };
            grouped_matmul_f32_e4m3__packed2__sm61 => f32, F32, E4m3, Sm61, Simt { rows: 2 };
            grouped_matmul_f32_e6m9__packed2__sm61 => f32, F32, E6m9, Sm61, Simt { rows: 2 };
            grouped_matmul_f16_int4__packed2__sm61 => f16, F16, Int4, Sm61, Simt { rows: 2 };
            grouped_matmul_f16_int8__packed2__sm61 => f16, F16, Int8, Sm61, Simt { rows: 2 };
            grouped_matmul_f16_e2m1__packed2__sm61 => f16, F16, E2m1, Sm61, Simt { rows: 2 };
            grouped_matmul_f16_e4m3__packed2__sm61 => f16, F16, E4m3, Sm61, Simt { rows: 2 };
            grouped_matmul_f16_e6m9__packed2__sm61 => f16, F16, E6m9, Sm61, Simt { rows: 2 };
            grouped_matmul_bf16_int4__packed2__sm61 => bf16, BF16, Int4, Sm61, Simt { rows: 2 };
            grouped_matmul_bf16_int8__packed2__sm61 => bf16, BF16, Int8, Sm61, Simt { rows: 2 };
            grouped_matmul_bf16_e2m1__packed2__sm61 => bf16, BF16, E2m1, Sm61, Simt { rows: 2 };
            grouped_matmul_bf16_e4m3__packed2__sm61 => bf16, BF16, E4m3, Sm61, Simt { rows: 2 };
            grouped_matmul_bf16_e6m9__packed2__sm61 => bf16, BF16, E6m9, Sm61, Simt { rows: 2 };
        }
    };
}

/// The same for the kernels of the tensor cores.
#[macro_export]
macro_rules! grouped_matmul_packed_mma_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f16_int4__packed8__sm80 => f16, F16, Int4, Sm80, Mma { rows: 8, tiles: 4, group: 64 };
            grouped_matmul_f16_int4__packed16__sm80 => f16, F16, Int4, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_f16_int4__packed64__sm80 => f16, F16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            grouped_matmul_f16_int4__packed8g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            grouped_matmul_f16_int4__packed16g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            grouped_matmul_f16_int4__packed64g32__sm80 => f16, F16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            grouped_matmul_f16_int8__packed8__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            grouped_matmul_f16_int8__packed16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_f16_int8__packed64__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            grouped_matmul_f16_int8__packed8g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            grouped_matmul_f16_int8__packed16g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            grouped_matmul_f16_int8__packed64g32__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            grouped_matmul_f16_int8__packed8g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 16 };
            grouped_matmul_f16_int8__packed16g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            grouped_matmul_f16_int8__packed64g16__sm80 => f16, F16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            grouped_matmul_f16_e2m1__packed8g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 8, tiles: 4, group: 16 };
            grouped_matmul_f16_e2m1__packed16g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            grouped_matmul_f16_e2m1__packed64g16__sm80 => f16, F16, E2m1, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            grouped_matmul_f16_e4m3__packed8__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            grouped_matmul_f16_e4m3__packed16__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_f16_e4m3__packed64__sm80 => f16, F16, E4m3, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            grouped_matmul_bf16_int4__packed8__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 8, tiles: 4, group: 64 };
            grouped_matmul_bf16_int4__packed16__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_bf16_int4__packed64__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            grouped_matmul_bf16_int4__packed8g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            grouped_matmul_bf16_int4__packed16g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            grouped_matmul_bf16_int4__packed64g32__sm80 => bf16, BF16, Int4, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            grouped_matmul_bf16_int8__packed8__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            grouped_matmul_bf16_int8__packed16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_bf16_int8__packed64__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
            grouped_matmul_bf16_int8__packed8g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 32 };
            grouped_matmul_bf16_int8__packed16g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 32 };
            grouped_matmul_bf16_int8__packed64g32__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 32 };
            grouped_matmul_bf16_int8__packed8g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 8, tiles: 2, group: 16 };
            grouped_matmul_bf16_int8__packed16g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            grouped_matmul_bf16_int8__packed64g16__sm80 => bf16, BF16, Int8, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            grouped_matmul_bf16_e2m1__packed8g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 8, tiles: 4, group: 16 };
            grouped_matmul_bf16_e2m1__packed16g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 16, tiles: 1, group: 16 };
            grouped_matmul_bf16_e2m1__packed64g16__sm80 => bf16, BF16, E2m1, Sm80, Mma { rows: 64, tiles: 1, group: 16 };
            grouped_matmul_bf16_e4m3__packed8__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 8, tiles: 2, group: 64 };
            grouped_matmul_bf16_e4m3__packed16__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 16, tiles: 2, group: 64 };
            grouped_matmul_bf16_e4m3__packed64__sm80 => bf16, BF16, E4m3, Sm80, Mma { rows: 64, tiles: 1, group: 64 };
        }
    };
}

/// The same for the kernels that unpack experts.
#[macro_export]
macro_rules! grouped_matmul_unpack_table {
    ($callback:ident) => {
        $callback! {
            grouped_matmul_f32_int4__unpack__sm61 => f32, F32, Int4, Sm61;
            grouped_matmul_f32_int8__unpack__sm61 => f32, F32, Int8, Sm61;
            grouped_matmul_f32_e2m1__unpack__sm61 => f32, F32, E2m1, Sm61;
            grouped_matmul_f32_e4m3__unpack__sm61 => f32, F32, E4m3, Sm61;
            grouped_matmul_f32_e6m9__unpack__sm61 => f32, F32, E6m9, Sm61;
            grouped_matmul_f16_int4__unpack__sm61 => f16, F16, Int4, Sm61;
            grouped_matmul_f16_int8__unpack__sm61 => f16, F16, Int8, Sm61;
            grouped_matmul_f16_e2m1__unpack__sm61 => f16, F16, E2m1, Sm61;
            grouped_matmul_f16_e4m3__unpack__sm61 => f16, F16, E4m3, Sm61;
            grouped_matmul_f16_e6m9__unpack__sm61 => f16, F16, E6m9, Sm61;
            grouped_matmul_bf16_int4__unpack__sm61 => bf16, BF16, Int4, Sm61;
            grouped_matmul_bf16_int8__unpack__sm61 => bf16, BF16, Int8, Sm61;
            grouped_matmul_bf16_e2m1__unpack__sm61 => bf16, BF16, E2m1, Sm61;
            grouped_matmul_bf16_e4m3__unpack__sm61 => bf16, BF16, E4m3, Sm61;
            grouped_matmul_bf16_e6m9__unpack__sm61 => bf16, BF16, E6m9, Sm61;
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
pub const PACKED_VARIANTS: &[PackedVariant] = grouped_matmul_packed_table!(rows);
/// The kernels of the tensor cores.
pub const PACKED_MMA_VARIANTS: &[PackedVariant] = grouped_matmul_packed_mma_table!(rows);
/// The kernels that unpack experts.
pub const UNPACK_VARIANTS: &[UnpackVariant] = grouped_matmul_unpack_table!(unpack_rows);
