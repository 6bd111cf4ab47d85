//! The driver's functions as this crate calls them: each through its slot in [`crate::symbols`].
//!
//! Declared here and not taken from `cust_raw`, because that returns its `CUresult` as a Rust enum of CUDA 11.4's
//! codes: a newer code (such as 912, `CUDA_ERROR_INVALID_CLUSTER_SIZE`) would be an invalid value of it.
#![allow(non_snake_case, reason = "the driver's names")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};

use super::function::LaunchConfig;
use super::stream::StreamCallback;
use super::tensor_map::TensorMap;
use super::virtual_memory::{AccessDesc, AllocationProp};

/// Defines each function as a call through its slot.
macro_rules! through_slots {
    ($($visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> u32;)*) => {$(
        /// # Safety
        /// As the driver's function of this name.
        #[allow(clippy::too_many_arguments, reason = "the driver's function has as many")]
        #[inline]
        $visibility unsafe fn $name($($argument: $type),*) -> u32 {
            let address = crate::symbols::slot::$name.load(std::sync::atomic::Ordering::Acquire);
            // SAFETY: the slot holds a function's address, never null: the driver's of this name, whose signature this
            // is, or a stand-in that takes these arguments or none, which in C's calling convention is the same to it —
            // `symbols`.
            let function = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(address)
            };
            // SAFETY: the caller's promise.
            unsafe { function($($argument),*) }
        }
    )*};
}

through_slots! {
    pub(crate) fn cuInit(flags: c_uint) -> u32;
    pub(crate) fn cuDriverGetVersion(version: *mut c_int) -> u32;
    pub(crate) fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32;
    pub(crate) fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32;
    pub(crate) fn cuDeviceGetCount(count: *mut c_int) -> u32;
    pub(super) fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> u32;
    pub(super) fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> u32;
    pub(super) fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> u32;
    pub(super) fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> u32;
    pub(super) fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> u32;
    pub(super) fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> u32;
    pub(super) fn cuCtxSetCurrent(context: CUcontext) -> u32;
    pub(super) fn cuCtxSynchronize() -> u32;
    pub(super) fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) -> u32;
    pub(super) fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> u32;

    pub(super) fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> u32;
    pub(super) fn cuMemFree_v2(address: CUdeviceptr) -> u32;
    pub(super) fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> u32;
    pub(super) fn cuMemFreeHost(address: *mut c_void) -> u32;
    pub(super) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;

    pub(super) fn cuMemGetAllocationGranularity(
        bytes: *mut usize,
        prop: *const AllocationProp,
        option: c_int,
    ) -> u32;
    pub(super) fn cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: u64,
    ) -> u32;
    pub(super) fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) -> u32;
    pub(super) fn cuMemCreate(
        handle: *mut u64,
        bytes: usize,
        prop: *const AllocationProp,
        flags: u64,
    ) -> u32;
    pub(super) fn cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: u64,
        flags: u64,
    ) -> u32;
    pub(super) fn cuMemRelease(handle: u64) -> u32;
    pub(super) fn cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        descriptions: *const AccessDesc,
        count: usize,
    ) -> u32;
    pub(super) fn cuMemUnmap(address: CUdeviceptr, bytes: usize) -> u32;

    pub(super) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        num_options: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
    ) -> u32;
    pub(super) fn cuModuleUnload(module: CUmodule) -> u32;
    pub(super) fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> u32;

    pub(super) fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction) -> u32;
    pub(super) fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> u32;
    pub(super) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        block_size: c_int,
        dynamic_smem_bytes: usize,
    ) -> u32;
    pub(super) fn cuOccupancyMaxActiveClusters(
        clusters: *mut c_int,
        function: CUfunction,
        config: *const LaunchConfig,
    ) -> u32;
    pub(super) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        smem_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32;
    pub(super) fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32;

    pub(super) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> u32;
    pub(super) fn cuStreamDestroy_v2(stream: CUstream) -> u32;
    pub(super) fn cuStreamSynchronize(stream: CUstream) -> u32;
    pub(super) fn cuStreamQuery(stream: CUstream) -> u32;
    pub(super) fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> u32;
    pub(super) fn cuStreamAddCallback(
        stream: CUstream,
        callback: StreamCallback,
        data: *mut c_void,
        flags: c_uint,
    ) -> u32;
    pub(super) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> u32;
    pub(super) fn cuEventDestroy_v2(event: CUevent) -> u32;
    pub(super) fn cuEventRecord(event: CUevent, stream: CUstream) -> u32;
    pub(super) fn cuEventSynchronize(event: CUevent) -> u32;
    pub(super) fn cuEventQuery(event: CUevent) -> u32;
    pub(super) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> u32;

    pub(super) fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut c_int,
        data: *mut *mut c_void,
        pointer: CUdeviceptr,
    ) -> u32;

    pub(super) fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> u32;
    pub(super) fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) -> u32;
    pub(super) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) -> u32;
    pub(super) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> u32;
    pub(super) fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) -> u32;
    pub(super) fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> u32;
    pub(super) fn cuGraphExecDestroy(exec: CUgraphExec) -> u32;
    pub(super) fn cuGraphDestroy(graph: CUgraph) -> u32;

    pub(super) fn cuMemcpyHtoDAsync_v2(
        target: CUdeviceptr,
        source: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> u32;
    pub(super) fn cuMemcpyDtoHAsync_v2(
        target: *mut c_void,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> u32;
    pub(super) fn cuMemcpyDtoDAsync_v2(
        target: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> u32;
    pub(super) fn cuMemsetD8Async(target: CUdeviceptr, value: u8, count: usize, stream: CUstream) -> u32;
    pub(super) fn cuMemsetD32Async(target: CUdeviceptr, value: u32, count: usize, stream: CUstream) -> u32;

    pub(super) fn cuTensorMapEncodeTiled(
        map: *mut TensorMap,
        data_type: c_int,
        rank: u32,
        address: CUdeviceptr,
        dims: *const u64,
        strides_bytes: *const u64,
        box_dims: *const u32,
        element_strides: *const u32,
        interleave: c_int,
        swizzle: c_int,
        l2_promotion: c_int,
        oob_fill: c_int,
    ) -> u32;
}
