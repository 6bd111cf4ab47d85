//! Strided copy and cast: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements. A row is the innermost dimension; the rows are
/// `[.., outer[0], outer[1]]`, counted from the last.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyDims {
    /// Strides of src, outermost first; the last is that inside a row (1 in the `Pieces` tile).
    pub src_strides: [u64; 4],
    /// The same for dst.
    pub dst_strides: [u64; 4],
    /// The rows, in units: see [`CopyTile`].
    pub tiles: RowTiles,
    /// Sizes of the two dimensions around a row; the outermost follows from the number of rows.
    pub outer: [u32; 2],
    /// Units of a row that are pieces; the others are its last elements. 0 in the `Scalar` tile.
    pub whole_pieces: u32,
    /// Fills the struct to a multiple of its alignment.
    pub padding: u32,
}

const _: () = assert!(size_of::<CopyDims>() == 96);
impl crate::Params for CopyDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Pieces of a thread, all loaded before the first is stored.
pub const PIECES_PER_THREAD: u32 = 4;
/// Logarithm of a block's pieces.
pub const BLOCK_PIECES_LOG2: u32 = (THREADS * PIECES_PER_THREAD).ilog2();

/// What is done to an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// Moved as it is; size in bytes.
    Move(usize),
    /// Rounded to another float type.
    Cast(DType, DType),
}

impl CopyKind {
    /// What a copy from one type to another is; none if there is none.
    pub fn of(src: DType, dst: DType) -> Option<Self> {
        match (src, dst) {
            _ if src == dst => Some(CopyKind::Move(src.bytes())),
            _ if src.is_float() && dst.is_float() => Some(CopyKind::Cast(src, dst)),
            _ => None,
        }
    }

    /// Elements of a piece: 16 bytes of what is moved, 8 elements of what is cast.
    pub const fn per_piece(self) -> usize {
        match self {
            CopyKind::Move(bytes) => 16 / bytes,
            CopyKind::Cast(..) => 8,
        }
    }
}

/// How rows are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyTile {
    /// In pieces, by accesses of 16 bytes; what is left of a row element by element.
    Pieces,
    /// Element by element: any stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct CopyVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// What is done to an element.
    pub kind: CopyKind,
    /// How rows are read and written.
    pub tile: CopyTile,
}

/// Hands every row of the table to the macro `$callback`: the types that the device code sees, what is done, the tile.
#[macro_export]
macro_rules! copy_table {
    ($callback:path) => {
        $callback! {
            copy_b8__pieces__sm61 => u8, u8, Move(1), Pieces;
            copy_b8__scalar__sm61 => u8, u8, Move(1), Scalar;
            copy_b16__pieces__sm61 => u16, u16, Move(2), Pieces;
            copy_b16__scalar__sm61 => u16, u16, Move(2), Scalar;
            copy_b32__pieces__sm61 => u32, u32, Move(4), Pieces;
            copy_b32__scalar__sm61 => u32, u32, Move(4), Scalar;
            copy_f32_f16__pieces__sm61 => f32, f16, Cast(F32, F16), Pieces;
            copy_f32_f16__scalar__sm61 => f32, f16, Cast(F32, F16), Scalar;
            copy_f32_bf16__pieces__sm61 => f32, bf16, Cast(F32, BF16), Pieces;
            copy_f32_bf16__scalar__sm61 => f32, bf16, Cast(F32, BF16), Scalar;
            copy_f16_f32__pieces__sm61 => f16, f32, Cast(F16, F32), Pieces;
            copy_f16_f32__scalar__sm61 => f16, f32, Cast(F16, F32), Scalar;
            copy_f16_bf16__pieces__sm61 => f16, bf16, Cast(F16, BF16), Pieces;
            copy_f16_bf16__scalar__sm61 => f16, bf16, Cast(F16, BF16), Scalar;
            copy_bf16_f32__pieces__sm61 => bf16, f32, Cast(BF16, F32), Pieces;
            copy_bf16_f32__scalar__sm61 => bf16, f32, Cast(BF16, F32), Scalar;
            copy_bf16_f16__pieces__sm61 => bf16, f16, Cast(BF16, F16), Pieces;
            copy_bf16_f16__scalar__sm61 => bf16, f16, Cast(BF16, F16), Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $src:ident, $dst:ident, $kind:ident($($of:tt),*), $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[CopyVariant] = &[$(CopyVariant {
            entry: stringify!($entry),
            kind: kind!($kind, $($of),*),
            tile: CopyTile::$tile,
        }),*];
    };
}
macro_rules! kind {
    (Move, $bytes:literal) => {
        CopyKind::Move($bytes)
    };
    (Cast, $src:ident, $dst:ident) => {
        CopyKind::Cast(DType::$src, DType::$dst)
    };
}
copy_table!(variants);
