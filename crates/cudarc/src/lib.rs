//! warpforge beside [`cudarc`]: operators on its memory ([`CudaSlice`](cudarc::driver::CudaSlice)), in its streams
//! ([`CudaStream`](cudarc::driver::CudaStream)), and warpforge's tensors as its memory. Nothing is copied.
//!
//! ```no_run
//! # extern crate host as warpforge;
//! use cudarc::driver::CudaContext;
//! use warpforge::Device;
//! use warpforge_cudarc::{CudarcError, SharedStream};
//!
//! # fn main() -> Result<(), CudarcError> {
//! let device = Device::cuda(0)?;
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let x = stream.clone_htod(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let mut out = stream.alloc_zeros::<f32>(3)?;
//!
//! let shared = SharedStream::new(&device, &stream)?;
//! shared.scope(|scope| {
//!     let (x, out) = (scope.input(&x, &[2, 3])?, scope.output(&mut out, &[3])?);
//!     let last = x.slice(0, 1..2)?.reshape(&[3])?;
//!     Ok(scope.stream().copy(last, out)?) // or an operator's `run`
//! })?;
//! assert_eq!(stream.clone_dtoh(&out)?, [4.0, 5.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/beside_cudarc` of the repository runs an operator. The version of CUDA that cudarc is built for is a
//! feature of its own, of which it takes one: the default of this crate is `cuda-12000`. A program that wants another
//! turns the default features off, takes `driver`, and gives cudarc the other. Neither library links to the driver:
//! both find it when the program runs.
//!
//! # One context
//! Both libraries use the device's primary context, so addresses and streams of one are those of the other. A context
//! of cudarc's that is not the primary one is refused.
//!
//! # Order
//! A [`SharedStream`] is one queue of the driver's: what either library enqueues in it runs in the order of the calls.
//! Work of cudarc in *other* streams is ordered by cudarc's own events, where it manages them
//! ([`is_managing_stream_synchronization`](cudarc::driver::CudaContext::is_managing_stream_synchronization)): a
//! [`Scope`] makes the shared stream wait for what has used the memory before, and at its end marks the memory as used
//! up to there. Work of warpforge in other streams is ordered by [`Stream::wait_for`](host::Stream::wait_for), as ever:
//! the views of a scope are for the scope's stream, or for one that has waited for it and that it waits for before the
//! scope ends.
//!
//! Events can be neither waited for nor marked while the stream is recorded
//! ([`Stream::capture`](host::Stream::capture)): make the scope around the recording.
//!
//! # Who owns what
//! cudarc's memory stays cudarc's, and a scope borrows it. The stream is destroyed when both libraries have done with
//! it, of which warpforge's pool is the last, for it remembers in whose order memory was used. A tensor that is lent to
//! cudarc ([`SharedStream::lend`]) stays one of warpforge's pool, to which it goes back in the shared stream's order.

#![cfg(feature = "driver")]

mod error;
mod lent;
mod scope;
mod stream;

pub use cudarc;
pub use error::CudarcError;
pub use lent::LentTensor;
pub use scope::{Memory, MemoryMut, Scope};
pub use stream::SharedStream;
