//! Parts that kernels share.

pub mod gemv;
pub mod operand;
pub mod reduce;
pub mod simt;
