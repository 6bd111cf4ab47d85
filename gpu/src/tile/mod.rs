//! Parts that kernels share.

pub mod reduce;
pub mod scan;
