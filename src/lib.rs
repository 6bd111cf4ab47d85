//! GPU kernels for large language models, written in Rust: see the README.
//!
//! This crate is the front door. It builds the device code into PTX images (`build.rs`, feature `cuda`), embeds them, and
//! re-exports the host side: [`Device`] to run on, [`Tensor`]s, the operators in [`ops`], whole models in [`models`].

mod device;
mod images;

pub use device::{Device, DeviceChoice};
pub use images::IMAGES;

pub use host::{
    Arch, DType, Dims, DriverError, Element, Error, Event, F8E4M3, Graph, HardwareProfile, Image, Kernel,
    MAX_RANK, NeededDriver, OptLevel, OptimizationReport, Place, Pool, PoolStats, Ptx, PtxModule, Resources,
    Stream, Tensor, TensorView, TensorViewMut, models, ops, simulator,
};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
