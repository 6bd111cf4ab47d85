//! Tensor maps: how Hopper's TMA unit addresses a matrix.

use abi::DType;

/// An encoded tensor map, as a kernel takes it by value.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

impl abi::Params for TensorMap {}

/// A matrix with dense rows, or a stack of stacks of such, and the box that one copy moves. Reads outside the matrix
/// give zeros.
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
    /// The two dimensions of a stack of stacks of matrices: a map of four dimensions. None: of two.
    pub outer: Option<[Axis; 2]>,
    /// Rows of the box, 1 to 256.
    pub box_rows: u32,
    /// Elements of a row of the box, at most as many bytes as the swizzle has.
    pub box_cols: u32,
    /// Matrices of the box, which follow one another in the inner of the two outer dimensions.
    pub box_matrices: u32,
    /// How shared memory is permuted.
    pub swizzle: Swizzle,
}

/// How rows of a box are permuted in shared memory: as `cuda_std`'s swizzle of the same width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

/// A dimension of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Elements, at least 1.
    pub size: u64,
    /// Bytes from one to the next, a multiple of 16.
    pub stride_bytes: u64,
}

impl Tiled {
    /// The map's dimensions, innermost first: sizes, strides of all but the first, the box, and how many there are.
    pub fn dims(&self) -> ([u64; 4], [u64; 3], [u32; 4], usize) {
        let rank = if self.outer.is_some() { 4 } else { 2 };
        let [inner, outer] = self.outer.unwrap_or([Axis { size: 1, stride_bytes: 16 }; 2]);
        (
            [self.cols, self.rows, inner.size, outer.size],
            [self.stride_bytes, inner.stride_bytes, outer.stride_bytes],
            [self.box_cols, self.box_rows, self.box_matrices, 1],
            rank,
        )
    }
}
