//! [DLPack](https://dmlc.github.io/dlpack/latest/) both ways: warpforge's tensors for PyTorch, NumPy, CuPy, JAX and
//! others, and theirs for warpforge's operators. Nothing is copied.
//!
//! The C structs, in the layout of DLPack 1.x and in the one before it that has no version, are those of the crate
//! [`dlpark`], whose features hand them to Python, `ndarray`, candle and cudarc.
//!
//! ```
//! # extern crate host as warpforge;
//! use warpforge::{Device, Tensor};
//! use warpforge_dlpack::{from_dlpack, to_dlpack};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let stream = Device::cpu().stream()?;
//! let tensor = Tensor::from_slice(&stream, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let managed = to_dlpack(tensor)?; // `managed.into_raw()` is what a C function takes
//! assert_eq!(managed.validate()?.shape(), [2, 3]);
//! // SAFETY: the tensor above, which nobody else has.
//! let back = unsafe { from_dlpack(&stream, managed) }?;
//! assert_eq!(back.view().swap_axes(0, 1)?.shape(), [3, 2]);
//! assert_eq!(back.view().to_vec::<f32>(&stream)?[5], 6.0);
//! # Ok(())
//! # }
//! ```
//!
//! # Streams
//! DLPack's structs name no stream. Whoever gives a tensor away sees to it that its work is done, or that the taker's
//! stream waits for it: `taker.wait_for(&giver)` with [`Stream::wait_for`](host::Stream::wait_for), for a stream of
//! another library by [`Device::stream_from_raw`](host::Device::stream_from_raw). The same holds when the tensor goes
//! back, by its deleter: an exported tensor's memory is used again in the order of the stream that it was made in,
//! so by then the taker's work is done, or that stream has waited for it. What is imported belongs to a stream, which
//! is waited for before the deleter is called.

mod error;
mod export;
mod import;

pub use dlpark;
pub use error::DlpackError;
pub use export::{LegacyTensor, ManagedTensor, share, to_dlpack, to_legacy_dlpack};
pub use import::{DlpackTensor, from_dlpack};
