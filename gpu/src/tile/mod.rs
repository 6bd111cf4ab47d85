//! Parts that kernels share.

pub mod activation;
pub mod early;
pub mod epilogue;
pub mod gemv;
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
pub mod mma;
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
pub mod multiplicand;
pub mod operand;
pub mod packed;
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
pub mod persistent;
pub mod reduce;
pub mod scan;
pub mod sequences;
pub mod simt;
pub mod softmax;
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
pub mod split;
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
pub mod stream;
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
pub mod wgmma;
