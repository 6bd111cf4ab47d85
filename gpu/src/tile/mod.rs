//! Parts that kernels share.

pub mod activation;
pub mod exp2;
pub mod gemv;
pub mod operand;
pub mod reduce;
pub mod scan;
pub mod simt;
