//! Products of fp8 by fp8, of rows that become fp8 before: what the operators that have them share.

use crate::weight::{Codes, Layout};
use crate::{Arch, DType};

/// Elements of k whose rows and weights share a scale, and which are summed by themselves.
pub const BLOCK_K: u32 = 128;
/// Rows of a weight that a tile has: a weight's scales are of so many, or of a multiple.
pub const TILE_COLS: u32 = 128;

/// Sizes of a launch that makes rows fp8.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantiseDims {
    /// Rows of fp8.
    pub rows: u32,
    /// Rows of x.
    pub x_rows: u32,
    /// Rows that are made of one row of x, which an order names; 0: row i is made of row i of x.
    pub fan_out: u32,
    /// Elements of a row, a multiple of 8.
    pub k: u32,
    /// From one row of x to the next, in elements.
    pub x_stride: u32,
    /// From one row of fp8 to the next, in bytes: k rounded up to a multiple of [`BLOCK_K`].
    pub q_stride: u32,
}

const _: () = assert!(size_of::<QuantiseDims>() == 24);
impl crate::Params for QuantiseDims {}

/// A kernel that makes rows fp8.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantiseVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the rows.
    pub dtype: DType,
    /// What it needs at least.
    pub floor: Arch,
}

impl QuantiseVariant {
    /// A row of a table.
    pub const fn new(entry: &'static str, dtype: DType, floor: Arch) -> Self {
        QuantiseVariant { entry, dtype, floor }
    }
}

/// Whether the dense product takes a weight of this layout: what the grouped one takes, and a scale for each row.
pub const fn dense_takes(layout: &Layout) -> bool {
    takes(layout) || matches!(layout.codes, Codes::E4m3) && layout.rows == 1 && layout.group == 0
}

/// Whether the grouped product takes a weight of this layout: fp8 with a scale for each 128 of k, or one for all of it,
/// and for blocks of a multiple of [`TILE_COLS`] rows.
pub const fn takes(layout: &Layout) -> bool {
    matches!(layout.codes, Codes::E4m3)
        && (layout.group == BLOCK_K || layout.group == 0)
        && layout.rows >= TILE_COLS
}
