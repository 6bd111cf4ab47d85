//! GPU kernels for large language models, written in Rust: see the README.
//!
//! This crate is the front door. It builds the device code into PTX images (`build.rs`, feature `cuda`), embeds them,
//! and re-exports the host side: [`Device`] to run on, [`Tensor`]s, the operators in [`ops`], whole models in
//! [`models`].
//!
//! # Threads and streams
//!
//! Devices, streams, tensors, plans, graphs and models may be shared between threads. Work in one [`Stream`] runs in
//! order; another stream waits for it where it is told to ([`Stream::wait_for`]). A tensor belongs to the stream that
//! it was made in: when it is dropped, its memory is reused in that stream's order, so work of other streams with it
//! must be done by then, or be waited for by that stream. A plan that has memory of its own (**Streams** in its
//! documentation) orders its runs by itself.

mod device;
mod images;

pub use device::{Device, DeviceChoice};
pub use images::IMAGES;

pub use host::{
    Arch, Choice, DType, DeviceLimits, Dims, DriverError, Element, EmbeddedKernel, Error, Event, F8E4M3,
    Graph, HardwareProfile, Image, Kernel, MAX_RANK, Need, NeededDriver, OptLevel, OptimizationReport, Place,
    Pool, PoolStats, Ptx, PtxModule, Resources, Sample, SampleTensor, Stream, Tensor, TensorCores,
    TensorView, TensorViewMut, UnknownArch, UnknownDType, ops, simulator, weight,
};

#[cfg(feature = "models")]
pub use models;

const _: () = {
    const fn are_shared<T: Send + Sync>() {}
    are_shared::<Device>();
    are_shared::<(Stream, Tensor, TensorView<'_>, TensorViewMut<'_>)>();
    are_shared::<(Graph, Event, Error)>();
    are_shared::<(ops::attention::Attention, ops::matmul::Matmul, ops::moe_permute::MoePermute)>();
    #[cfg(feature = "models")]
    are_shared::<(models::Model, models::ModelError)>();
};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
