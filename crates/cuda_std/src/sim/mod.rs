//! A GPU on the CPU: runs kernels thread by thread, in an order that a seed decides, and watches every access.
//!
//! ```
//! use cuda_std::sim::{Launch, Memory, simulate};
//! use cuda_std::{global, thread};
//!
//! /// out[i] = 2 · x[i]
//! unsafe fn double(x: *const f32, out: *mut f32, n: u32) {
//!     let i = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
//!     if i < n {
//!         // SAFETY: i < n, the length of both.
//!         unsafe { global::store(out.add(i as usize), 2.0 * global::load(x.add(i as usize))) };
//!     }
//! }
//!
//! let mut memory = Memory::new();
//! let x = memory.allocate_from("x", bytes(&[1.0f32; 100]));
//! let out = memory.allocate("out", 400);
//! let launch = Launch::new("double", [4, 1, 1], [32, 1, 1]).seed(7);
//! // SAFETY: the buffers have 100 elements each.
//! simulate(&mut memory, &launch, || unsafe { double(x as _, out as _, 100) }).unwrap();
//! // One element more than there is:
//! let report = simulate(&mut memory, &launch, || unsafe { double(x as _, out as _, 101) }).unwrap_err();
//! assert!(report.to_string().contains("byte 400 of `x`, which has 400 bytes"));
//! # fn bytes(values: &[f32]) -> &[u8] {
//! #     unsafe { core::slice::from_raw_parts(values.as_ptr().cast(), 4 * values.len()) }
//! # }
//! ```
//!
//! **Threads** are coroutines that switch where a GPU's threads wait for each other: at barriers, at operations of a
//! warp, at waits for asynchronous copies, and at atomics. Between these they run in any order; the seed decides.
//! Everything runs on the calling host thread, so a seed gives the same run again.
//!
//! **Order** is tracked by vector clocks: two accesses to a byte, one of them a write, must be ordered by a barrier, an
//! mbarrier, a cluster barrier, or a release and an acquire, whatever the order in which the simulation happened to run
//! them. So most missing barriers are found with any seed.
//!
//! **Asynchronous operations** take effect at any moment from their issue to the wait that covers them. Their accesses
//! are part of the same order: what they write is unordered with everything until that wait.
//!
//! Every defect ends the simulation with a [`Report`] that names kernel, block, thread and source line.

mod access;
mod clock;
mod copies;
pub mod fragment;
mod limits;
mod machine;
mod matrix;
mod mbarrier;
mod memory;
mod printf;
mod registry;
mod report;
mod shadow;
pub mod swizzle;
mod sync;
pub mod tensor_core;
pub mod tensor_map;
mod tensors;
#[cfg(test)]
mod tests;
mod unit;
mod visits;
mod warp;
mod warpgroup;

pub use abi::{Arch, Need};
#[doc(no_inline)]
pub use inventory;
pub use memory::Memory;
pub use registry::{Kernel, kernel};
pub use report::{Defect, Report};

pub(crate) use access::*;
pub(crate) use copies::*;
pub(crate) use machine::{is_running, register, timer};
pub(crate) use matrix::*;
pub(crate) use mbarrier::*;
pub(crate) use printf::printf;
pub(crate) use sync::*;
pub(crate) use tensors::*;
pub(crate) use unit::Register;
pub(crate) use warp::*;
pub(crate) use warpgroup::*;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel's name, for reports.
    pub kernel: &'a str,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Blocks of a cluster in x, y, z; `[1, 1, 1]` without clusters.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// The floor that is simulated: its limits, and which instructions it has.
    pub arch: Arch,
    /// Decides the order of threads and the moments of asynchronous operations.
    pub seed: u64,
}

impl<'a> Launch<'a> {
    /// A launch without clusters and shared memory, on Hopper, with seed 0.
    pub fn new(kernel: &'a str, grid: [u32; 3], block: [u32; 3]) -> Self {
        Launch { kernel, grid, block, cluster: [1; 3], shared_bytes: 0, arch: Arch::Sm90a, seed: 0 }
    }

    /// With clusters of so many blocks.
    pub fn cluster(self, cluster: [u32; 3]) -> Self {
        Launch { cluster, ..self }
    }

    /// With so many bytes of dynamic shared memory.
    pub fn shared_bytes(self, shared_bytes: u32) -> Self {
        Launch { shared_bytes, ..self }
    }

    /// On this floor.
    pub fn arch(self, arch: Arch) -> Self {
        Launch { arch, ..self }
    }

    /// With this seed.
    pub fn seed(self, seed: u64) -> Self {
        Launch { seed, ..self }
    }
}

/// What a simulation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Threads that ran.
    pub threads: u64,
    /// Times that a thread was given the processor.
    pub switches: u64,
    /// Loads, stores and atomics.
    pub accesses: u64,
}

/// Runs every thread of a grid; `kernel` is what each of them executes.
///
/// Blocks of a cluster run together; clusters run in random order, some of them side by side.
///
/// **Errors**: the first defect. Memory is then as the defect left it.
pub fn simulate(memory: &mut Memory, launch: &Launch<'_>, kernel: impl Fn()) -> Result<Statistics, Report> {
    machine::run(&mut [memory], launch, &[&kernel])
}

/// Runs the same grid on several cards at once: each with its memory and its kernel, whose parameters are its own. More
/// memories than kernels are of cards that run nothing.
///
/// A kernel may access the memory of another card if its own has [enabled](Memory::enable_peer) that. Accesses of
/// several cards are ordered as those of several blocks are, but by what releases and acquires at system scope alone.
///
/// # Panics
/// If there is no kernel, or not a memory for each.
pub fn simulate_together(
    memories: &mut [&mut Memory],
    launch: &Launch<'_>,
    kernels: &[&dyn Fn()],
) -> Result<Statistics, Report> {
    machine::run(memories, launch, kernels)
}
