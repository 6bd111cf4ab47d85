//! Parts that kernels share.

pub mod activation;
pub mod early;
pub mod epilogue;
pub mod gemv;
#[cfg(not(lacks_mma_sync))]
pub mod mma;
#[cfg(not(lacks_mma_sync))]
pub mod multiplicand;
pub mod operand;
pub mod packed;
#[cfg(not(lacks_wgmma))]
pub mod persistent;
pub mod reduce;
pub mod scan;
pub mod sequences;
pub mod simt;
pub mod softmax;
#[cfg(not(lacks_wgmma))]
pub mod split;
#[cfg(not(lacks_mma_sync))]
pub mod stream;
pub mod weight;
#[cfg(not(lacks_wgmma))]
pub mod wgmma;
