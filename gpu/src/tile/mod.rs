//! Parts that kernels share: small pieces of a block's work. Matrix products are in [`crate::matmul`].

pub mod activation;
pub mod experts;
pub mod packed;
pub mod reduce;
pub mod rotation;
pub mod row_norm;
pub mod scan;
pub mod sequences;
pub mod softmax;
