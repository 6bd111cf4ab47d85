//! What device code imports, with the names of Rust-CUDA's `cuda_std`, for rustc's own `nvptx64-nvidia-cuda` target.
//!
//! | module | purpose | floor |
//! |---|---|---|
//! | [`thread`] | indices of threads and blocks, block barrier | sm_61 |
//! | [`warp`] | shuffles, votes, reductions over a warp | sm_61 |
//! | [`shared`] | the block's dynamic shared memory | sm_61 |
//! | [`global`] | loads and stores of global memory, with cache hints | sm_61 |
//! | [`atomic`] | atomics with scope and order | sm_61 |
//! | [`math`] | fused and approximate arithmetic, integer dot products | sm_61 |
//! | [`cvt`] | element types and their conversion to f32 | sm_61 |
//! | [`debug`] | `printf` and `trap` | sm_61 |
//!
//! All of the project's `asm!` is in this crate: one function per PTX instruction form. Each has a host
//! implementation, so that device code compiles for the host as it stands; where one thread alone cannot give the
//! answer (a shuffle needs its warp), the host side says so and stops. Device code therefore never dereferences a raw
//! pointer itself: it loads and stores through [`global`] and [`shared`], where a simulator can watch.
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

/// The device's half of a function and the host's.
macro_rules! device {
    ({ $($device:tt)* } else { $($host:tt)* }) => {{
        #[cfg(target_arch = "nvptx64")]
        { $($device)* }
        #[cfg(not(target_arch = "nvptx64"))]
        { $($host)* }
    }};
}

pub mod atomic;
pub mod cvt;
pub mod debug;
pub mod global;
pub mod math;
pub mod shared;
pub mod thread;
pub mod warp;

pub use cuda_std_macros::kernel;

/// The host side of an instruction that only a whole warp or block can execute.
#[cfg(not(target_arch = "nvptx64"))]
#[cold]
fn needs_gpu(instruction: &str) -> ! {
    panic!("cuda_std: `{instruction}` needs the other threads of its warp or block, and this host has none")
}
