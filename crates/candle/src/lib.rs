//! warpforge's operators for [candle](https://docs.rs/candle-core)'s tensors: each is a custom operator of candle's,
//! and a function that applies it. Candle's tensors in the host's memory are computed with by warpforge's CPU backend;
//! those whose rows lie without gaps between their elements are not copied, nor is a result.
//!
//! ```
//! use candle_core::{Device, Tensor};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! let x = Tensor::randn(0f32, 1., (2, 7, 64), &device)?;
//! let weight = Tensor::ones(64, candle_core::DType::F32, &device)?;
//! let normed = warpforge_candle::rmsnorm(&x, &weight, 1e-6)?;
//! let query = normed.reshape((2, 7, 4, 16))?.transpose(1, 2)?;
//! let key = query.narrow(1, 0, 2)?; // two heads of keys for four of queries
//! let seen = warpforge_candle::attention(&query, &key, &key, warpforge_candle::Attention::causal())?;
//! assert_eq!(seen.dims(), [2, 4, 7, 16]);
//! # Ok(())
//! # }
//! ```
//!
//! Types are f32, f16 and bf16, with sums in f32 and one rounding of the result. There are no gradients: candle says so
//! where one is asked for. Tensors on CUDA and Metal are [refused](Refused::Device).

mod attention;
mod error;
mod glu;
mod matmul;
mod operand;
mod quantised;
mod rmsnorm;
mod rope;

pub use attention::{Attention, attention};
pub use error::Refused;
pub use glu::{Glu, swiglu};
pub use host::ops::glu::Activation;
pub use host::ops::rope::RopeStyle;
pub use host::weight::Scheme;
pub use matmul::{Matmul, matmul};
pub use quantised::QuantisedMatmul;
pub use rmsnorm::{RmsNorm, rmsnorm};
pub use rope::Rope;

/// What is not on the CPU is refused, by the name of the operator.
macro_rules! on_the_cpu_alone {
    ($($arg:ident),*) => {
        fn cuda_fwd(
            &self,
            $($arg: &candle_core::CudaStorage, _: &candle_core::Layout),*
        ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
            let _ = ($($arg),*);
            Err($crate::Refused::Device { op: self.name(), device: "CUDA" }.into())
        }

        fn metal_fwd(
            &self,
            $($arg: &candle_core::MetalStorage, _: &candle_core::Layout),*
        ) -> candle_core::Result<(candle_core::MetalStorage, candle_core::Shape)> {
            let _ = ($($arg),*);
            Err($crate::Refused::Device { op: self.name(), device: "Metal" }.into())
        }
    };
}
use on_the_cpu_alone;
