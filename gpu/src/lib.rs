//! warpforge's device code: every kernel, in Rust.
//!
//! One module per operator under [`ops`], each behind the feature of its name, since each becomes an image of its own;
//! their common parts are under [`tile`]. The same source compiles for the host.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod ops;
pub mod tile;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::debug::trap()
}
