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

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;
    use std::string::String;

    /// What only a warp or a block can do stops here, and says which instruction it was.
    #[test]
    fn without_a_warp_the_host_says_so() {
        macro_rules! calls {
            ($($instruction:literal: $call:expr,)*) => {
                // SAFETY: on the host they end before they do anything.
                [$(($instruction, (|| { let _ = unsafe { $call }; }) as fn())),*]
            };
        }
        #[allow(unused_unsafe)]
        let calls = calls![
            "%tid.x": thread::thread_idx_x(),
            "%nctaid.z": thread::grid_dim_z(),
            "bar.sync": thread::sync_threads(),
            "shfl.sync.bfly": warp::sum_f32::<32>(1.0),
            "shfl.sync.idx": warp::shuffle_idx(warp::FULL_MASK, 0, 0),
            "shfl.sync.up": warp::shuffle_up_f32(warp::FULL_MASK, 0.0, 1),
            "shfl.sync.down": warp::shuffle_down(warp::FULL_MASK, 0, 1),
            "vote.sync.ballot": warp::ballot(warp::FULL_MASK, true),
            "vote.sync.any": warp::any(warp::FULL_MASK, true),
            "vote.sync.all": warp::all(warp::FULL_MASK, true),
            "bar.warp.sync": warp::sync_warp(warp::FULL_MASK),
            "mov.u32 %r, dyn_smem": shared::base(),
            "ld.shared.f32": shared::load_f32(0),
            "st.shared.v4.b32": shared::store_u32x4(0, [0; 4]),
            "atom.shared.add.u32": shared::add_u32(0, 1),
            "vprintf": debug::printf(c"", &()),
        ];
        for (instruction, call) in calls {
            let panic = catch_unwind(call).expect_err(instruction);
            let message = panic.downcast_ref::<String>().expect("a message");
            let expected = std::format!(
                "cuda_std: `{instruction}` needs the other threads of its warp or block, and this host has none"
            );
            assert_eq!(*message, expected);
        }
        let panic = catch_unwind(|| debug::trap()).expect_err("trap");
        assert_eq!(panic.downcast_ref(), Some(&"cuda_std: trap"));
        assert_eq!(thread::opaque(7), 7);
    }
}
