//! Tensor maps: how Hopper's TMA unit addresses a matrix.

use abi::DType;

/// An encoded tensor map, as a kernel takes it by value.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

impl abi::Params for TensorMap {}

/// A matrix with dense rows, and the box of it that one copy moves. Shared memory is in the 128-byte swizzle; reads outside
/// the matrix give zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiled {
    /// Type of an element.
    pub dtype: DType,
    /// Device address of the first element, a multiple of 16.
    pub address: u64,
    /// Rows, at least 1.
    pub rows: u64,
    /// Elements of a row, at least 1.
    pub cols: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride_bytes: u64,
    /// Rows of the box, 1 to 256.
    pub box_rows: u32,
    /// Elements of a row of the box, at most 128 bytes.
    pub box_cols: u32,
}
