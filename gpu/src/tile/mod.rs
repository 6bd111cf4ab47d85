//! Parts that kernels share.

pub mod activation;
pub mod gemv;
pub mod operand;
pub mod packed;
pub mod reduce;
pub mod scan;
pub mod sequences;
pub mod simt;
pub mod softmax;
