//! GPU kernels for large language models, written in Rust: devices, tensors, the operators below, and whole models.
//!
//! This crate is the front door. It builds the device code into PTX images (`build.rs`, feature `cuda`), embeds them,
//! and re-exports the host side: [`Device`] to run on, [`Stream`] for its work, [`Tensor`]s, the operators in [`ops`],
//! quantised matrices in [`weight`], whole models in `models` (a feature).
//!
//! ```
//! use warpforge::ops::rmsnorm::{RmsNorm, RmsNormArgs, RmsNormProblem};
//! use warpforge::{DType, Device, Error, Tensor};
//!
//! fn main() -> Result<(), Error> {
//!     let device = Device::best(); // a GPU if there is one that can be had, else the CPU
//!     let stream = device.stream()?;
//!     let problem = RmsNormProblem::new(4, 8, DType::F32, 1e-6); // 4 rows of 8
//!     let rmsnorm = RmsNorm::plan(&device, problem)?; // checks, chooses a kernel, loads it
//!     let x = Tensor::from_slice(&stream, &[4, 8], &[2.0f32; 32])?;
//!     let weight = Tensor::from_slice(&stream, &[8], &[1.0f32; 8])?;
//!     let mut out = Tensor::empty(&stream, &[4, 8], DType::F32)?;
//!     let args = RmsNormArgs::new(x.view(), weight.view(), out.view_mut());
//!     rmsnorm.run(&stream, args)?; // checks the tensors, enqueues; allocates nothing
//!     assert!(out.to_vec::<f32>(&stream)?.iter().all(|value| (value - 1.0).abs() < 1e-4));
//!     println!("{}", rmsnorm.report()); // which kernel, why, registers, occupancy, bytes, least time
//!     Ok(())
//! }
//! ```
//!
//! Every operator has this form: `supports` says whether a [`&Device`](Device) can do it and why not, `plan` chooses
//! a kernel, `run` runs it in a [`&Stream`](Stream). Fields that `new` leaves out are set beside `..Problem::new(…)`
//! ([why so](ops#problems-and-arguments-grow)). What a device may do where it refuses a plan is its
//! [`Fallback`].
//!
//! # Operators
//!
//! | operator | what |
//! |---|---|
//! | [`attention`](ops::attention) | prompts, decode, GQA, MLA, windows, masks, paged and fp8 caches |
//! | [`attention_merge`](ops::attention_merge) | shared prefixes |
//! | [`causal_conv1d`](ops::causal_conv1d) | convolution over time |
//! | [`copy`](ops::copy) | strided copy and cast |
//! | [`decoder_layers`](ops::decoder_layers) | a token's layers at once |
//! | [`embedding`](ops::embedding) | rows of a table |
//! | [`embedding_bag`](ops::embedding_bag) | weighted sums of rows |
//! | [`fused_moe`](ops::fused_moe) | experts of few tokens |
//! | [`gated_delta`](ops::gated_delta) | gated delta rule |
//! | [`glu`](ops::glu) | SwiGLU, GEGLU, activations |
//! | [`grouped_matmul`](ops::grouped_matmul) | rows times experts' weights |
//! | [`kv_append`](ops::kv_append) | rows to a cache |
//! | [`latent_append`](ops::latent_append) | norm, rope, append of MLA |
//! | [`layernorm`](ops::layernorm) | layer norm, residual |
//! | [`matmul`](ops::matmul) | `act(scale · a · bᵀ + bias) + residual`; b also int4, int8, fp8, fp4 |
//! | [`matmul_i8`](ops::matmul_i8) | int8 times int8 |
//! | [`moe_combine`](ops::moe_combine) | weighted sums of experts |
//! | [`moe_permute`](ops::moe_permute) | pairs by expert |
//! | [`moe_router`](ops::moe_router) | experts of a token |
//! | [`qk_norm_rope`](ops::qk_norm_rope) | norms, rope, append |
//! | [`quantize_weight`](ops::quantize_weight) | weights to int4, fp8, … |
//! | [`rmsnorm`](ops::rmsnorm) | RMS norm, residual, gate |
//! | [`rope`](ops::rope) | rotary embedding |
//! | [`sampling`](ops::sampling) | greedy, top-k, top-p, min-p, penalties, masks, logprobs |
//! | [`scatter_rows`](ops::scatter_rows) | rows to places |
//! | [`transpose`](ops::transpose) | transpose |
//!
//! # Threads and streams
//!
//! Devices, streams, tensors, plans, graphs and models may be shared between threads. Work in one [`Stream`] runs in
//! order; another stream waits for it where it is told to ([`Stream::wait_for`]). A tensor belongs to the stream that
//! it was made in: when it is dropped, its memory is reused in that stream's order, so work of other streams with it
//! must be done by then, or be waited for by that stream. A plan that has memory of its own (**Streams** in its
//! documentation) orders its runs by itself.

#[cfg(all(doctest, feature = "models"))]
mod book;
mod device;
mod images;

pub use device::DeviceChoice;
pub use images::IMAGES;

pub use host::{
    Arch, Choice, Constant, DType, Device, DeviceLimits, Dims, Download, DriverError, Element,
    EmbeddedKernel, Error, Event, F8E4M3, Fallback, Function, Graph, HardwareProfile, Image, Invariance,
    Kernel, MAX_RANK, MemoryFault, Module, Need, NeededDriver, OptLevel, OptimizationReport, Place, Pool,
    PoolEvent, PoolEventKind, PoolMap, PoolPiece, PoolSegment, PoolStats, PoolTimeline, ProgramImages, Ptx,
    PtxModule, Resources, Sample, SampleTensor, SizeCount, Staging, StagingStats, Stream, Tensor,
    TensorCores, TensorView, TensorViewMut, UnknownArch, UnknownDType, group, module, ops, simulator, weight,
};

#[cfg(feature = "async")]
pub use host::Finished;
#[cfg(feature = "models")]
pub use models;

const _: () = {
    const fn are_shared<T: Send + Sync>() {}
    are_shared::<Device>();
    are_shared::<(Stream, Tensor, TensorView<'_>, TensorViewMut<'_>)>();
    are_shared::<(Graph, Event, Error)>();
    are_shared::<(Staging, Download<f32>)>();
    #[cfg(feature = "async")]
    are_shared::<Finished>();
    are_shared::<(Module, Function<(module::In<f32>,)>)>();
    are_shared::<(ops::attention::Attention, ops::matmul::Matmul, ops::moe_permute::MoePermute)>();
    #[cfg(feature = "models")]
    are_shared::<(models::Model, models::ModelError)>();
};
