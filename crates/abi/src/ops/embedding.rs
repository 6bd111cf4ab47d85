//! Embedding: parameters and entry points.
//!
//! Rows of a plain table are copied bit by bit, so the kernels know no element types, only the size of a *unit*: 16
//! bytes, or one element where rows are not aligned to that. Those of a packed table are made from its codes; their
//! unit is an element.

use crate::DType;
use crate::weight::Codes;

/// Sizes and strides of one launch, in units.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingDims {
    /// Units of a row.
    pub cols: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// From one row of the table to the next; not of a packed one.
    pub table_stride: u32,
    /// The same for out.
    pub out_stride: u32,
    /// Of a packed table: 1 if address and stride of out are multiples of 4 elements.
    pub in_quads: u32,
}

const _: () = assert!(size_of::<EmbeddingDims>() == 20);
impl crate::Params for EmbeddingDims {}

/// Units that a thread has in flight.
pub const UNITS_PER_THREAD: u32 = 4;
/// Most threads of a block.
pub const MAX_THREADS: u32 = 256;

/// What every byte of an output row is for an id that the table does not have: a NaN in every float type.
pub const INVALID_ROW_BYTE: u8 = 0xff;

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct EmbeddingVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Bytes of a unit, to which all rows are aligned.
    pub unit_bytes: usize,
    /// Of a packed table: the type of out, and what the codes are.
    pub packed: Option<(DType, Codes)>,
}

/// Hands every row of the table of plain tables' kernels to the macro `$callback`.
#[macro_export]
macro_rules! embedding_table {
    ($callback:path) => {
        $callback! {
            embedding_b128__row__sm61 => [u32; 4], 16;
            embedding_b32__row__sm61 => u32, 4;
            embedding_b16__row__sm61 => u16, 2;
        }
    };
}

/// The same for the kernels of packed tables.
#[macro_export]
macro_rules! embedding_packed_table {
    ($callback:path) => {
        $callback! {
            embedding_f32_int4__packed__sm61 => f32, F32, Int4;
            embedding_f32_int8__packed__sm61 => f32, F32, Int8;
            embedding_f32_e2m1__packed__sm61 => f32, F32, E2m1;
            embedding_f32_e4m3__packed__sm61 => f32, F32, E4m3;
            embedding_f32_e6m9__packed__sm61 => f32, F32, E6m9;
            embedding_f16_int4__packed__sm61 => f16, F16, Int4;
            embedding_f16_int8__packed__sm61 => f16, F16, Int8;
            embedding_f16_e2m1__packed__sm61 => f16, F16, E2m1;
            embedding_f16_e4m3__packed__sm61 => f16, F16, E4m3;
            embedding_f16_e6m9__packed__sm61 => f16, F16, E6m9;
            embedding_bf16_int4__packed__sm61 => bf16, BF16, Int4;
            embedding_bf16_int8__packed__sm61 => bf16, BF16, Int8;
            embedding_bf16_e2m1__packed__sm61 => bf16, BF16, E2m1;
            embedding_bf16_e4m3__packed__sm61 => bf16, BF16, E4m3;
            embedding_bf16_e6m9__packed__sm61 => bf16, BF16, E6m9;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ty, $bytes:literal;)*) => {
        /// The kernels of plain tables, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[EmbeddingVariant] =
            &[$(EmbeddingVariant { entry: stringify!($entry), unit_bytes: $bytes, packed: None }),*];
    };
}
embedding_table!(variants);

macro_rules! packed_variants {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident;)*) => {
        /// The kernels of packed tables.
        pub const PACKED_VARIANTS: &[EmbeddingVariant] = &[$(EmbeddingVariant {
            entry: stringify!($entry),
            unit_bytes: DType::$dtype.bytes(),
            packed: Some((DType::$dtype, Codes::$codes)),
        }),*];
    };
}
embedding_packed_table!(packed_variants);
