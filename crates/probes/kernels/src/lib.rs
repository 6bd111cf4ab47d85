//! Kernels that try one instruction family each, with inputs and results in buffers, so that a card and the simulator
//! can be compared.
//!
//! All have the parameters of [`Kernel`]: a buffer of inputs, one of results, tensor maps, and a number that says which
//! form is tried. A block has the part of the input that its index says. Every kernel has one contract: **Safety** the
//! buffers are as long and laid out as the kernel's documentation says, and the launch is the one it asks for.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![allow(clippy::missing_safety_doc)]

use cuda_std::{global, thread};
// Its panic handler is every image's.
#[cfg(not(feature = "base"))]
use gpu as _;

#[cfg(feature = "base")]
pub mod convert;
#[cfg(all(feature = "base", not(lacks_cp_async)))]
pub mod copies;
#[cfg(all(feature = "base", not(lacks_clusters)))]
pub mod hopper;
#[cfg(feature = "base")]
pub mod pages;
#[cfg(all(feature = "base", not(lacks_mma_sync)))]
pub mod tensor;
#[cfg(feature = "base")]
pub mod warp;
#[cfg(all(feature = "wgmma", not(lacks_wgmma)))]
pub mod wgmma;

/// The parameters of every kernel.
///
/// Maps are 128 bytes each.
pub type Kernel = unsafe fn(*const u32, *mut u32, *const u64, u32);

/// Word `index` of the block's part of the input, which has `words` words.
///
/// # Safety
/// The input has that part.
#[inline(always)]
unsafe fn load(input: *const u32, words: u32, index: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { global::load(input.add((thread::block_idx_x() * words + index) as usize)) }
}

/// Writes word `index` of the block's part of the results, which has `words` words.
///
/// # Safety
/// The output has that part.
#[inline(always)]
unsafe fn store(output: *mut u32, words: u32, index: u32, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { global::store(output.add((thread::block_idx_x() * words + index) as usize), value) }
}
