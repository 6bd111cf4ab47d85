//! Embedding: parameters and entry points.
//!
//! Rows are copied bit by bit, so the kernels know no element types, only the size of a *unit*: 16 bytes, or one
//! element where rows are not aligned to that.

/// Sizes and strides of one launch, in units.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingDims {
    /// Units of a row.
    pub cols: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// From one row of the table to the next.
    pub table_stride: u32,
    /// The same for out.
    pub out_stride: u32,
}

const _: () = assert!(size_of::<EmbeddingDims>() == 16);
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
}

/// Hands every row of the table to the macro `$callback`.
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

macro_rules! variants {
    ($($entry:ident => $type:ty, $bytes:literal;)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[EmbeddingVariant] =
            &[$(EmbeddingVariant { entry: stringify!($entry), unit_bytes: $bytes }),*];
    };
}
embedding_table!(variants);
