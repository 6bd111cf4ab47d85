//! The host side of warpforge: devices, tensors, operators, models. The `warpforge` crate re-exports all of it, with a type
//! around [`Device`] that has the device images; use that one.
//!
//! A call goes through these, each of which looks down only: [`models`] → [`ops`] → `launch` → [`device`].

pub mod device;
mod error;
mod fp8;
mod images;
mod kernel;
mod launch;
mod memory;
pub mod models;
mod nvtx;
pub mod ops;
pub mod simulator;
mod stream;
mod tensor;
mod tensor_map;

pub use abi::{Arch, DType, UnknownArch};
pub use device::{Device, DeviceLimits, HardwareProfile, OptLevel, Place, TensorCores};
pub use error::{DriverError, Error};
pub use fp8::F8E4M3;
pub use images::{Image, NeededDriver, Ptx, PtxModule};
pub use kernel::{Kernel, OptimizationReport};
pub use launch::Resources;
pub use memory::{Pool, PoolStats};
pub use stream::{Event, Graph, Stream};
pub use tensor::{Dims, Element, MAX_RANK, Tensor, TensorView, TensorViewMut};
