//! The CUDA driver, found when the program runs.
//!
//! [`load`] finds `libcuda.so.1` (on Windows `nvcuda.dll`) and fills a table of its functions, through which [`driver`]
//! calls. One binary runs with and without a driver, is built without a CUDA installation, and defines none of the
//! driver's names: another crate of the program may link `libcuda`, or load it too.
//!
//! | when | what a driver function answers |
//! |---|---|
//! | before [`load`] | `CUDA_ERROR_NOT_INITIALIZED` (3), as the driver itself does before `cuInit` |
//! | `cuInit`, `cuDriverGetVersion` before [`load`] | they call [`load`] first |
//! | no driver on the machine | those two `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED` (303), the others 3 |
//! | a symbol that the driver lacks | `CUDA_ERROR_NOT_FOUND` (500) |
//!
//! `cuGetErrorName` and `cuGetErrorString` know these codes without a driver.
//!
//! # Feature `cust`
//!
//! `cust` and `cust_raw` link against `libcuda`, so a program that uses them needs a CUDA installation to be built and
//! a driver to be started. With this feature the crate defines every symbol that `cust_raw` declares, as a jump through
//! the same table, and so removes both needs, but for the folder that the build script of `cust_raw` looks for
//! (docs/BUILDING.md). Linux on x86_64 and aarch64. A crate that names `cuda_loader` nowhere must still link it:
//! `extern crate cuda_loader as _;`.
//!
//! Elsewhere than on 64-bit Linux and Windows [`load`] returns [`LoadError::UnsupportedPlatform`], and every driver
//! function answers 3.
//!
//! # NCCL
//!
//! [`nccl`] finds NCCL in the same way, where collectives between cards are wanted.

pub mod driver;
mod error;
mod load;
pub mod nccl;
// Where no driver can be loaded nothing fills the table.
#[cfg_attr(not(all(any(target_os = "linux", windows), target_pointer_width = "64")), allow(dead_code))]
mod symbols;

#[cfg(feature = "cust")]
pub use cust;
pub use error::DriverError;
pub use load::{LoadAttempt, LoadError, device_count, driver_version, init, load};
