//! Experts of few tokens, from the router's choice to their weighted sum: parameters and entry points.

use super::matmul::Curve;
use super::moe_router::MoeRouterDims;
use crate::weight::Codes;
use crate::{Arch, DType};

/// Sizes and strides of both launches, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedMoeDims {
    /// Experts of a token, without the shared one.
    pub top_k: u32,
    /// Experts of a token, with the shared one; at least 1.
    pub slots: u32,
    /// Experts that there are: a number beyond them is left out.
    pub experts: u32,
    /// Elements of a row of x and of out.
    pub hidden: u32,
    /// Elements between the two products.
    pub inner: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// From one expert's gate and up to the next one's.
    pub gate_up_expert_stride: u32,
    /// From one row of an expert's gate and up to the next.
    pub gate_up_stride: u32,
    /// From one expert's down to the next one's.
    pub down_expert_stride: u32,
    /// From one row of an expert's down to the next.
    pub down_stride: u32,
    /// From one row of the shared expert's gate and up to the next.
    pub shared_gate_up_stride: u32,
    /// From one row of the shared expert's down to the next.
    pub shared_down_stride: u32,
    /// From one token's gate of the shared expert to the next.
    pub gate_stride: u32,
    /// From one row between the products to the next.
    pub activated_stride: u32,
    /// From one row of out to the next.
    pub out_stride: u32,
    /// 1 if the sum is added to what out holds.
    pub adds: u32,
    /// 1 if rows of x and the gains may be read in pieces of 16 bytes; of packed weights.
    pub in_pieces: u32,
    /// The activation of the gate.
    pub curve: Curve,
    /// How experts are chosen, where the first kernel does it.
    pub router: MoeRouterDims,
}

const _: () = assert!(size_of::<FusedMoeDims>() == 68 + size_of::<Curve>() + size_of::<MoeRouterDims>());
impl crate::Params for FusedMoeDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Warps of a block, each with columns of its own.
pub const WARPS: u32 = THREADS / 32;
/// Blocks that a multiprocessor shall hold.
pub const BLOCKS_PER_SM: u32 = 3;
/// Bytes of shared memory in front of the rows: sums of the warps, or the slots; and [`CHOSEN_AT`].
pub const HEAD_BYTES: u32 = 512;
/// Where a block keeps the expert that it has chosen: in the last slot, behind the sums.
pub const CHOSEN_AT: u32 = HEAD_BYTES - SLOT_BYTES;
/// Most experts of a token, with the shared one: [`SLOT_BYTES`] each in the head.
pub const MAX_SLOTS: u32 = HEAD_BYTES / SLOT_BYTES;
/// Bytes of a slot in the head: its expert, and what its result is multiplied by.
pub const SLOT_BYTES: u32 = 8;
/// Pieces of 16 bytes that a warp takes of a row of down at a time: as many as it has lanes.
pub const DOWN_PIECES: u32 = 32;
/// Most bytes of the rows that a block holds: one of x, or those between the products of a token, in f32 and filled up
/// to whole [`DOWN_PIECES`].
pub const MAX_ROW_BYTES: u32 = (48 << 10) - HEAD_BYTES;

/// Bytes of the warps' sums, of packed weights.
pub const PACKED_SUMS_BYTES: u32 = THREADS / 32 * 64;

/// What a kernel makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedMoeStage {
    /// The norm of x, and each expert's activated gate times up.
    Up,
    /// Each expert's down, and their weighted sum.
    Down,
}

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedMoeTile {
    /// In pieces of 16 bytes.
    Pieces,
    /// Element by element: any size and alignment.
    Elements,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct FusedMoeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all matrices.
    pub dtype: DType,
    /// What it makes.
    pub stage: FusedMoeStage,
    /// How rows are read.
    pub tile: FusedMoeTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! fused_moe_table {
    ($callback:path) => {
        $callback! {
            fused_moe_f32__up__sm61 => f32, F32, Up, Pieces;
            fused_moe_f32__down__sm61 => f32, F32, Down, Pieces;
            fused_moe_f32__upelements__sm61 => f32, F32, Up, Elements;
            fused_moe_f32__downelements__sm61 => f32, F32, Down, Elements;
            fused_moe_f16__up__sm61 => f16, F16, Up, Pieces;
            fused_moe_f16__down__sm61 => f16, F16, Down, Pieces;
            fused_moe_f16__upelements__sm61 => f16, F16, Up, Elements;
            fused_moe_f16__downelements__sm61 => f16, F16, Down, Elements;
            fused_moe_bf16__up__sm61 => bf16, BF16, Up, Pieces;
            fused_moe_bf16__down__sm61 => bf16, BF16, Down, Pieces;
            fused_moe_bf16__upelements__sm61 => bf16, BF16, Up, Elements;
            fused_moe_bf16__downelements__sm61 => bf16, BF16, Down, Elements;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $stage:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[FusedMoeVariant] = &[$(FusedMoeVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            stage: FusedMoeStage::$stage,
            tile: FusedMoeTile::$tile,
        }),*];
    };
}
fused_moe_table!(variants);

/// One kernel by packed weights.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct PackedFusedMoeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of rows.
    pub dtype: DType,
    /// Codes of the weights.
    pub codes: Codes,
    /// The floor from which on there is the kernel.
    pub floor: Arch,
    /// What it makes.
    pub stage: FusedMoeStage,
    /// Elements of k that share a scale, as `PackedTile::Mma` has them.
    pub group: u32,
}

/// The same for the kernels by packed weights: tiles that a warp holds, and elements of k that share a scale.
#[macro_export]
macro_rules! fused_moe_packed_table {
    ($callback:ident) => {
        $callback! {
            fused_moe_f16_int4__packedup__sm80 => f16, F16, Int4, Sm80, Up { tiles: 4, group: 64 };
            fused_moe_f16_int4__packeddown__sm80 => f16, F16, Int4, Sm80, Down { tiles: 4, group: 64 };
            fused_moe_f16_int4__packedupg32__sm80 => f16, F16, Int4, Sm80, Up { tiles: 2, group: 32 };
            fused_moe_f16_int4__packeddowng32__sm80 => f16, F16, Int4, Sm80, Down { tiles: 2, group: 32 };
            fused_moe_f16_int8__packedup__sm80 => f16, F16, Int8, Sm80, Up { tiles: 2, group: 64 };
            fused_moe_f16_int8__packeddown__sm80 => f16, F16, Int8, Sm80, Down { tiles: 2, group: 64 };
            fused_moe_f16_int8__packedupg32__sm80 => f16, F16, Int8, Sm80, Up { tiles: 1, group: 32 };
            fused_moe_f16_int8__packeddowng32__sm80 => f16, F16, Int8, Sm80, Down { tiles: 1, group: 32 };
            fused_moe_f16_int8__packedupg16__sm80 => f16, F16, Int8, Sm80, Up { tiles: 2, group: 16 };
            fused_moe_f16_int8__packeddowng16__sm80 => f16, F16, Int8, Sm80, Down { tiles: 2, group: 16 };
            fused_moe_f16_e2m1__packedupg16__sm80 => f16, F16, E2m1, Sm80, Up { tiles: 3, group: 16 };
            fused_moe_f16_e2m1__packeddowng16__sm80 => f16, F16, E2m1, Sm80, Down { tiles: 3, group: 16 };
            fused_moe_f16_e4m3__packedup__sm80 => f16, F16, E4m3, Sm80, Up { tiles: 2, group: 64 };
            fused_moe_f16_e4m3__packeddown__sm80 => f16, F16, E4m3, Sm80, Down { tiles: 2, group: 64 };
            fused_moe_bf16_int4__packedup__sm80 => bf16, BF16, Int4, Sm80, Up { tiles: 4, group: 64 };
            fused_moe_bf16_int4__packeddown__sm80 => bf16, BF16, Int4, Sm80, Down { tiles: 4, group: 64 };
            fused_moe_bf16_int4__packedupg32__sm80 => bf16, BF16, Int4, Sm80, Up { tiles: 2, group: 32 };
            fused_moe_bf16_int4__packeddowng32__sm80 => bf16, BF16, Int4, Sm80, Down { tiles: 2, group: 32 };
            fused_moe_bf16_int8__packedup__sm80 => bf16, BF16, Int8, Sm80, Up { tiles: 2, group: 64 };
            fused_moe_bf16_int8__packeddown__sm80 => bf16, BF16, Int8, Sm80, Down { tiles: 2, group: 64 };
            fused_moe_bf16_int8__packedupg32__sm80 => bf16, BF16, Int8, Sm80, Up { tiles: 1, group: 32 };
            fused_moe_bf16_int8__packeddowng32__sm80 => bf16, BF16, Int8, Sm80, Down { tiles: 1, group: 32 };
            fused_moe_bf16_int8__packedupg16__sm80 => bf16, BF16, Int8, Sm80, Up { tiles: 2, group: 16 };
            fused_moe_bf16_int8__packeddowng16__sm80 => bf16, BF16, Int8, Sm80, Down { tiles: 2, group: 16 };
            fused_moe_bf16_e2m1__packedupg16__sm80 => bf16, BF16, E2m1, Sm80, Up { tiles: 3, group: 16 };
            fused_moe_bf16_e2m1__packeddowng16__sm80 => bf16, BF16, E2m1, Sm80, Down { tiles: 3, group: 16 };
            fused_moe_bf16_e4m3__packedup__sm80 => bf16, BF16, E4m3, Sm80, Up { tiles: 2, group: 64 };
            fused_moe_bf16_e4m3__packeddown__sm80 => bf16, BF16, E4m3, Sm80, Down { tiles: 2, group: 64 };
        }
    };
}

macro_rules! packed_variants {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       $stage:ident { tiles: $tiles:literal, group: $group:literal };)*) => {
        /// Every kernel by packed weights.
        pub const PACKED_VARIANTS: &[PackedFusedMoeVariant] = &[$(PackedFusedMoeVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            codes: Codes::$codes,
            floor: Arch::$floor,
            stage: FusedMoeStage::$stage,
            group: $group,
        }),*];
    };
}
fused_moe_packed_table!(packed_variants);
