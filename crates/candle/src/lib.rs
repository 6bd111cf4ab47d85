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
//! where one is asked for. Tensors on Metal are [refused](Refused::Device).
//!
//! # On a card
//! With the feature `cuda`, which is candle's own and wants `nvcc` for candle's kernels when it is built, tensors on
//! CUDA are computed with by warpforge's kernels, in candle's stream, and nothing is copied but as above. Two things
//! are for the program: to have kernels, that is to depend on `warpforge` with the features `cuda` and a floor's
//! (`sm80`, …); and to make its device by `Device::new_cuda_with_stream`, since that of `Device::new_cuda` is CUDA's
//! per-thread default stream, which is another one in each thread and refused. `examples/beside_candle` of the
//! repository does both.
//!
//! Plans are kept from call to call, for the next power of two of rows, tokens and keys.

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod glu;
mod matmul;
mod operand;
mod plans;
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

/// A custom operator's ways by where the tensors lie: `forward` on the CPU, and with the feature `cuda` on a card;
/// elsewhere an error, by the name of the operator.
macro_rules! forward {
    ($($storage:ident $layout:ident),*) => {
        fn cpu_fwd(
            &self,
            $($storage: &candle_core::CpuStorage, $layout: &candle_core::Layout),*
        ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
            self.forward([$(($storage, $layout)),*])
        }

        fn cuda_fwd(
            &self,
            $($storage: &candle_core::CudaStorage, $layout: &candle_core::Layout),*
        ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
            #[cfg(feature = "cuda")]
            return self.forward([$(($storage, $layout)),*]);
            #[cfg(not(feature = "cuda"))]
            {
                let _ = [$(($storage, $layout)),*];
                Err($crate::Refused::Device { op: self.name(), device: "CUDA" }.into())
            }
        }

        fn metal_fwd(
            &self,
            $($storage: &candle_core::MetalStorage, $layout: &candle_core::Layout),*
        ) -> candle_core::Result<(candle_core::MetalStorage, candle_core::Shape)> {
            let _ = [$(($storage, $layout)),*];
            Err($crate::Refused::Device { op: self.name(), device: "Metal" }.into())
        }
    };
}
use forward;
