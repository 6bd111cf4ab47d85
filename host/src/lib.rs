//! The host side of warpforge: devices, tensors, operators. The `warpforge` crate re-exports all of it, and enters
//! the device images that it is built with ([`ProgramImages`]); use that one.
//!
//! A call goes through these, each of which looks down only: [`ops`] → `kernel` → `launch` → [`weight`] → `tensor` →
//! [`device`] and `stream`, which know each other → `memory` → `queue` → `cuda` or [`simulator`].
//!
//! Nothing here is lock-free, so no test explores orders of memory: what threads share is behind a `Mutex` or a
//! `OnceLock`. Atomics are counters by themselves alone (numbers of groups and simulated cards, bytes of a simulated
//! card), and a word that kernels write and the host reads.

mod backing;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
pub mod device;
mod error;
#[cfg(feature = "async")]
mod finished;
mod fp8;
pub mod group;
mod images;
mod kernel;
mod ladder;
mod launch;
mod memory;
pub mod module;
pub mod nvtx;
pub mod ops;
mod param;
mod plan;
mod profile;
mod published;
mod queue;
mod sample;
#[cfg(feature = "async")]
mod signal;
mod simd;
pub mod simulator;
mod staging;
mod stream;
mod tensor;
mod tensor_map;
mod trace;
pub mod weight;

pub use abi::{Arch, DType, Need, UnknownArch, UnknownDType};
pub use device::Device;
pub use error::{DriverError, Error};
#[cfg(feature = "async")]
pub use finished::Finished;
pub use fp8::F8E4M3;
pub use images::{EmbeddedKernel, Image, NeededDriver, ProgramImages, Ptx, PtxModule};
pub use kernel::{Kernel, OptimizationReport};
pub use memory::{
    MemoryFault, Pool, PoolEvent, PoolEventKind, PoolMap, PoolPiece, PoolSegment, PoolStats, PoolTimeline,
    SizeCount,
};
pub use module::{Function, Module};
pub use plan::Choice;
pub use profile::{
    DeviceLimits, Fallback, HardwareProfile, Invariance, OptLevel, Place, Resources, TensorCores,
};
pub use sample::{Sample, SampleTensor};
pub use staging::{Download, Staging, StagingStats};
pub use stream::{Event, Graph, Stream};
pub use tensor::{Constant, Dims, Element, MAX_RANK, Tensor, TensorView, TensorViewMut};
