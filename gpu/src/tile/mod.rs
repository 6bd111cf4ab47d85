//! Parts that kernels share.

pub mod reduce;
