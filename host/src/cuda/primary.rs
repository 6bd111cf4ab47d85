//! Devices, their primary contexts and the allocation of memory: by `cust`, or where the feature `cust` is off by
//! `cuda_loader`.
//!
//! Both sides have the same items. `cust` is the launch layer of this repository; its build script stops where there is
//! no CUDA folder, which a dependency cannot be told by the crate that wants it, so that users get the other.

#[cfg(feature = "cust")]
mod with_cust;
#[cfg(not(feature = "cust"))]
mod without;

#[cfg(feature = "cust")]
pub(super) use with_cust::*;
#[cfg(not(feature = "cust"))]
pub(super) use without::*;
