//! The contract between host and device: both sides compile this crate, so neither can disagree with the other.
//!
//! It holds the architecture floors, the element types, and for each operator and collective its parameter struct
//! (`#[repr(C)]`, passed to the kernel by value) and the table of its kernel entry points. No dependencies but, under
//! the feature `serde`, that crate; no unsafe code, no allocation.
#![no_std]
#![forbid(unsafe_code)]

mod arch;
#[cfg(feature = "serde")]
#[doc(hidden)]
pub mod by_name;
pub mod collectives;
mod dtype;
pub mod exact;
pub mod matmul_fp8;
pub mod ops;
pub mod philox;
pub mod range;
mod row_tiles;
pub mod weight;

pub use arch::{Arch, Need, UnknownArch};
pub use dtype::{DType, UnknownDType};
pub use row_tiles::RowTiles;
#[cfg(feature = "serde")]
#[doc(hidden)]
pub use serde;

/// Every family of kernels: the operators, then the collectives. Each has an image of its own per floor.
pub fn families() -> impl Iterator<Item = &'static str> {
    ops::FAMILIES.iter().chain(collectives::FAMILIES).copied()
}

/// The names of a family's kernels; none for an unknown family.
pub fn entries(family: &str) -> impl Iterator<Item = &'static str> {
    ops::entries(family).chain(collectives::entries(family))
}

/// A kernel's parameter struct: `#[repr(C)]`, without padding or pointers, passed by value.
///
/// Only the structs of [`ops`] and [`collectives`] are meant to implement it; their sizes are asserted beside them.
pub trait Params: core::fmt::Debug + Send + Sync + 'static {}
