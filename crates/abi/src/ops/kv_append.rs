//! Append to a key/value cache: parameters and entry points.

use crate::DType;

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppendDims {
    /// Rows to append: tokens × heads.
    pub rows: u32,
    /// Key/value heads.
    pub heads: u32,
    /// Pieces of a row: of 16 bytes each, or elements for the scalar tile.
    pub pieces: u32,
    /// Slots of the cache: a slot number beyond them is skipped.
    pub num_slots: u32,
    /// From one token to the next, in k.
    pub k_token_stride: u32,
    /// From one head to the next, in k.
    pub k_head_stride: u32,
    /// From one token to the next, in v.
    pub v_token_stride: u32,
    /// From one head to the next, in v.
    pub v_head_stride: u32,
    /// From one slot to the next, in both caches.
    pub slot_stride: u32,
    /// From one head to the next, in both caches.
    pub cache_head_stride: u32,
}

const _: () = assert!(size_of::<KvAppendDims>() == 40);
impl crate::Params for KvAppendDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;

/// How a row is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvAppendTile {
    /// Pieces of 16 bytes.
    Vector,
    /// Element by element: any alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct KvAppendVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of all tensors but the slots.
    pub dtype: DType,
    /// How a row is copied.
    pub tile: KvAppendTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! kv_append_table {
    ($callback:path) => {
        $callback! {
            kv_append_f32__vector__sm61 => f32, F32, Vector;
            kv_append_f32__scalar__sm61 => f32, F32, Scalar;
            kv_append_f16__vector__sm61 => f16, F16, Vector;
            kv_append_f16__scalar__sm61 => f16, F16, Scalar;
            kv_append_bf16__vector__sm61 => bf16, BF16, Vector;
            kv_append_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[KvAppendVariant] = &[$(KvAppendVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: KvAppendTile::$tile,
        }),*];
    };
}
kv_append_table!(variants);
