//! The CUDA driver, found when the program runs.
//!
//! `cust` and `cust_raw` link against `libcuda`, so a program that uses them needs a CUDA installation to be built and a
//! driver to be started. This crate removes both needs: it defines every symbol that `cust_raw` declares, as a jump
//! through a table that [`load`] fills from `libcuda.so.1`. One binary then runs with and without a driver.
//!
//! | when | what a driver function answers |
//! |---|---|
//! | before [`load`] | `CUDA_ERROR_NOT_INITIALIZED` (3), as the driver itself does before `cuInit` |
//! | `cuInit`, `cuDriverGetVersion` before [`load`] | they call [`load`] first |
//! | no driver on the machine | those two `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED` (303), the others 3 |
//! | a symbol that the driver lacks | `CUDA_ERROR_NOT_FOUND` (500) |
//!
//! `cuGetErrorName` and `cuGetErrorString` know these codes without a driver, because `cust`'s error type calls them when
//! it is printed. A crate that names `cuda_loader` nowhere must still link it: `extern crate cuda_loader as _;`.
//!
//! [`driver`] wraps the driver calls that `cust` lacks. Linux on x86_64 and aarch64 only: elsewhere everything links,
//! [`load`] returns [`LoadError::UnsupportedPlatform`], and every driver function answers 3.

pub mod driver;
mod error;
mod load;
// Where no driver can be loaded nothing fills the table.
#[cfg_attr(
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))),
    allow(dead_code)
)]
mod symbols;

pub use error::DriverError;
pub use load::{LoadAttempt, LoadError, device_count, driver_version, init, load};
