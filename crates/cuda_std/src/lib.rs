//! What device code imports, with the names of Rust-CUDA's `cuda_std`, for rustc's own `nvptx64-nvidia-cuda` target.
//!
//! | module | purpose | floor |
//! |---|---|---|
//! | [`thread`] | indices of threads and blocks, block barrier | sm_61 |
//! | [`warp`] | shuffles, votes, reductions over a warp | sm_61 |
//! | [`shared`] | the block's dynamic shared memory | sm_61 |
//! | [`global`] | loads and stores of global memory, with cache hints | sm_61 |
//! | [`atomic`] | atomics with scope and order | sm_61 |
//! | [`barrier`] | named barriers of part of a block | sm_61 |
//! | [`lanes`] | active lanes, equal lanes, integer reductions, shuffles in part of a warp | sm_61, sm_80 |
//! | [`math`] | fused and approximate arithmetic, integer dot products | sm_61 |
//! | [`cvt`] | element types and their conversion to f32 | sm_61 |
//! | [`debug`] | `printf` and `trap` | sm_61 |
//! | [`mma`], [`matrix`] | tensor cores by the warp, and their operands in shared memory | sm_80 |
//! | [`cp_async`] | copies to shared memory that do not wait | sm_80 |
//! | [`mbarrier`] | barriers that count arrivals and bytes | sm_80, sm_90a |
//! | [`fence`] | order between threads and between ways of access | sm_80, sm_90a |
//! | [`tma`] | copies of whole tiles | sm_90a |
//! | [`wgmma`], [`registers`] | tensor cores by the warpgroup, and its share of registers | sm_90a |
//! | [`cluster`], [`grid`] | blocks that share memory, kernels that overlap | sm_90a |
//!
//! All of the project's `asm!` is in this crate: one function per PTX instruction form. Each has a host
//! implementation too, so that device code runs on the host as it stands: on targets other than nvptx64, `sim` is a
//! simulator of the GPU. Device code therefore never dereferences a raw pointer itself: it loads and stores through
//! [`global`] and [`shared`], where the simulator watches.
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

/// The operands of a vector in an `asm!` template: `{a}, {b}`.
#[cfg(target_arch = "nvptx64")]
macro_rules! vector_operands {
    ($first:ident $($rest:ident)*) => {
        concat!("{", stringify!($first), "}", $(", {", stringify!($rest), "}"),*)
    };
}

pub mod atomic;
pub mod barrier;
#[cfg(not(lacks_clusters))]
pub mod cluster;
#[cfg(not(lacks_cp_async))]
pub mod cp_async;
pub mod cvt;
pub mod debug;
#[cfg(not(lacks_memory_model))]
pub mod fence;
pub mod global;
pub mod grid;
pub mod lanes;
pub mod math;
#[cfg(not(lacks_mma_sync))]
pub mod matrix;
#[cfg(not(lacks_mbarrier))]
pub mod mbarrier;
#[cfg(not(lacks_mma_sync))]
pub mod mma;
#[cfg(not(lacks_wgmma))]
pub mod registers;
pub mod shared;
#[cfg(not(target_arch = "nvptx64"))]
pub mod sim;
pub mod thread;
#[cfg(not(lacks_tma))]
pub mod tma;
pub mod warp;
#[cfg(not(lacks_wgmma))]
pub mod wgmma;

pub use cuda_std_macros::kernel;

/// The address of a `#[grid_constant]` parameter: what `#[kernel]` expands to.
#[doc(hidden)]
#[macro_export]
macro_rules! grid_constant {
    ($kernel:ident, $index:literal, $name:ident) => {{
        #[cfg(target_arch = "nvptx64")]
        {
            let address: u64;
            // SAFETY: takes the address of a parameter of this kernel, by the name that rustc gives it.
            unsafe {
                ::core::arch::asm!(
                    ::core::concat!("{{ .reg .b64 t; mov.b64 t, ", ::core::stringify!($kernel), "_param_", $index,
                        "; cvta.param.u64 {}, t; }}"),
                    out(reg64) address, options(pure, nomem, nostack));
            }
            let _ = $name;
            address as *const _
        }
        #[cfg(not(target_arch = "nvptx64"))]
        { &raw const $name }
    }};
}

/// An instruction that only a thread of a block can execute, outside a simulation.
#[cfg(not(target_arch = "nvptx64"))]
#[cold]
fn needs_gpu(instruction: &str) -> ! {
    panic!("cuda_std: `{instruction}` needs a block of threads: call the kernel in `cuda_std::sim::simulate`")
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
        ];
        for (instruction, call) in calls {
            let panic = catch_unwind(call).expect_err(instruction);
            let message = panic.downcast_ref::<String>().expect("a message");
            let expected = std::format!(
                "cuda_std: `{instruction}` needs a block of threads: call the kernel in `cuda_std::sim::simulate`"
            );
            assert_eq!(*message, expected);
        }
        let panic = catch_unwind(|| debug::trap()).expect_err("trap");
        assert_eq!(panic.downcast_ref(), Some(&"cuda_std: trap"));
        assert_eq!(thread::opaque(7), 7);
    }
}
