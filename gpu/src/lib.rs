//! warpforge's device code: every kernel, in Rust.
//!
//! One module per operator under [`ops`], and per collective under [`collectives`], each behind the feature of its
//! name, since each becomes an image of its own; matrix products are under [`matmul`], the other parts that they share
//! under [`tile`]. The same source compiles for the host.
#![no_std]
// `asm_experimental_arch` is for the launch bounds that `#[kernel]` leaves in the PTX.
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod collectives;
pub mod matmul;
pub mod ops;
pub mod pages;
pub mod tile;

/// Where this source is: for the build script of `warpforge`, whose feature `build-images` compiles it.
#[cfg(not(target_arch = "nvptx64"))]
pub const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::debug::trap()
}
