//! Parts that kernels share.

pub mod activation;
pub mod reduce;
pub mod scan;
