//! Driver calls that `cust` 0.3.2 lacks, or that it has only for handles that cannot be made from raw ones.
//!
//! Left to `cust`: devices (`cust::device::Device`), contexts (`cust::context`), allocation on the device and of pinned
//! host memory (`cust::memory::{cuda_malloc, cuda_free, cuda_malloc_locked, cuda_free_locked}`) and free memory
//! (`cust::memory::mem_get_info`). Its streams always wait for the legacy default stream, its events are used up by
//! waiting for them, its modules keep no assembler log, and none of the three takes a caller's raw handle: so those are
//! here, on the raw handle types of `cust::sys`.
//!
//! # Safety of handles
//!
//! A function that takes a stream, event, function or module handle is `unsafe`, because the driver follows the handle
//! without a check. The contract is the same for all: the handle is **live**, that is, made by the driver, not yet
//! destroyed, and its context has not been destroyed either. A null stream is live; it is the legacy default stream.
//!
//! Functions that make something need a current context (`cust::context::CurrentContext::set_current`) and return
//! `CUDA_ERROR_INVALID_CONTEXT` without one. Any call can also return an error of earlier asynchronous work.

pub(crate) mod ffi;
mod function;
mod graph;
mod memory;
mod module;
mod stream;
mod tensor_map;

use std::ffi::c_int;

use cust::sys::{CUcontext, CUdevice};

pub use function::{
    FuncAttribute, LaunchAttributes, Overlap, func_attribute, launch_kernel, launch_kernel_ex,
    occupancy_max_active_blocks, occupancy_max_active_clusters, set_max_dynamic_shared,
};
pub use graph::{
    Graph, GraphExec, RelaxedCapture, stream_begin_capture, stream_end_capture, stream_is_capturing,
};
pub use memory::{
    is_known_memory, memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async, memset_d8_async,
    memset_d32_async,
};
pub use module::{ModuleError, module_get_function, module_load_data, module_unload};
pub use stream::{
    Timing, event_create, event_destroy, event_elapsed_ms, event_query, event_record, event_synchronize,
    stream_create, stream_destroy, stream_query, stream_synchronize, stream_wait_event,
};
pub use tensor_map::{
    TensorMap, TensorMapDataType, TensorMapInterleave, TensorMapL2Promotion, TensorMapOobFill,
    TensorMapParams, TensorMapSwizzle, tensor_map_encode_tiled,
};

use crate::error::{DriverError, check};

/// Device attributes that are newer than `cust::device::DeviceAttribute`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceAttribute {
    /// 1 if a grid can be launched cooperatively.
    CooperativeLaunch = 95,
    /// Bytes of shared memory that a block can have with [`set_max_dynamic_shared`].
    MaxSharedMemoryPerBlockOptin = 97,
    /// 1 if address ranges can be reserved and mapped.
    VirtualMemoryManagement = 102,
    /// Blocks that fit on one multiprocessor at most.
    MaxBlocksPerMultiprocessor = 106,
    /// Bytes of L2 that can be set aside for persisting accesses.
    MaxPersistingL2CacheSize = 108,
    /// Bytes of shared memory per block that the driver keeps for itself.
    ReservedSharedMemoryPerBlock = 111,
    /// 1 if stream-ordered allocation works.
    MemoryPools = 115,
    /// 1 if blocks can be launched as clusters.
    ClusterLaunch = 120,
    /// 1 if kernels can use tensor maps.
    TensorMapAccess = 127,
}

/// A hold on a device's primary context, which goes with the value. `cust` takes one of its own; it has no words for what a newer driver
/// answers to that, such as `CUDA_ERROR_DEVICE_UNAVAILABLE` (46) of a card that another process has for itself: so it is asked for here first.
#[derive(Debug)]
pub struct PrimaryContext {
    device: CUdevice,
}

impl PrimaryContext {
    /// Makes the context if there is none yet.
    pub fn retain(device: CUdevice) -> Result<Self, DriverError> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: `context` is writable — a local; a device is an ordinal that the driver checks, not a pointer.
        check(unsafe { ffi::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(PrimaryContext { device })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // Nobody is there to be told; a context that is held too long goes with the process.
        // SAFETY: retained once in `retain`, and released once here.
        let _ = unsafe { ffi::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Reads an attribute of a device. `CUDA_ERROR_INVALID_VALUE` from a driver that is older than the attribute.
pub fn device_attribute(device: CUdevice, attribute: DeviceAttribute) -> Result<i32, DriverError> {
    let mut value: c_int = 0;
    // SAFETY: `value` is writable — a local; a device is an ordinal that the driver checks, not a pointer.
    check(unsafe { ffi::cuDeviceGetAttribute(&mut value, attribute as c_int, device) })?;
    Ok(value)
}
