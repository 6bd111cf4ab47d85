//! Memory of the device; copies and fills in stream order, on raw addresses. Pageable host memory works, but the call
//! then waits for the copy.

use std::ffi::{c_int, c_uint, c_void};

use super::sys::{CUdeviceptr, CUstream};

use super::ffi;
use crate::error::{DriverError, OUT_OF_MEMORY, check};

/// Memory of the current context's device, to be given back by [`mem_free`]. `None` where there is not as much.
pub fn mem_alloc(bytes: usize) -> Result<Option<CUdeviceptr>, DriverError> {
    let mut address: CUdeviceptr = 0;
    // SAFETY: `address` is writable — a local.
    match unsafe { ffi::cuMemAlloc_v2(&mut address, bytes) } {
        OUT_OF_MEMORY => Ok(None),
        code => check(code).map(|()| Some(address)),
    }
}

/// Gives memory back.
///
/// # Safety
/// The address is [`mem_alloc`]'s, and neither used nor given back afterwards; no work that uses it is queued.
pub unsafe fn mem_free(address: CUdeviceptr) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemFree_v2(address) })
}

/// Memory of the host that kernels of all devices access, at the same address; to be given back by [`mem_free_host`].
pub fn mem_host_alloc(bytes: usize) -> Result<*mut c_void, DriverError> {
    /// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`.
    const FLAGS: c_uint = 1 | 2;
    let mut address: *mut c_void = std::ptr::null_mut();
    // SAFETY: `address` is writable — a local.
    check(unsafe { ffi::cuMemHostAlloc(&mut address, bytes, FLAGS) })?;
    Ok(address)
}

/// Gives memory of the host back.
///
/// # Safety
/// The address is [`mem_host_alloc`]'s, and neither used nor given back afterwards; no work that uses it is queued.
pub unsafe fn mem_free_host(address: *mut c_void) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemFreeHost(address) })
}

/// Bytes of the current context's device: free, and all.
pub fn mem_get_info() -> Result<(usize, usize), DriverError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are writable — locals.
    check(unsafe { ffi::cuMemGetInfo_v2(&mut free, &mut total) })?;
    Ok((free, total))
}

/// Copies from the host to the device.
///
/// # Safety
/// `stream` is live. Until the stream has passed the copy, `source` is readable and not written, and `target` is
/// writable and not used by other work, both for `bytes`.
pub unsafe fn memcpy_htod_async(
    target: CUdeviceptr,
    source: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemcpyHtoDAsync_v2(target, source, bytes, stream) })
}

/// Copies from the device to the host.
///
/// # Safety
/// `stream` is live. Until the stream has passed the copy, `source` is readable and not written by other work, and
/// `target` is writable and neither read nor written, both for `bytes`.
pub unsafe fn memcpy_dtoh_async(
    target: *mut c_void,
    source: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemcpyDtoHAsync_v2(target, source, bytes, stream) })
}

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const MEMORY_TYPE: c_int = 2;

/// Whether the driver has pinned, or manages, the memory at an address. Copies to and from such memory are still under
/// way when their call returns; of all other memory of the host the driver knows nothing.
pub fn is_known_memory(address: *const c_void) -> Result<bool, DriverError> {
    let (mut memory_type, mut attribute): (c_uint, c_int) = (0, MEMORY_TYPE);
    let mut data: *mut c_void = (&raw mut memory_type).cast();
    // The call for several attributes leaves 0 where the address is unknown; that for one fails, which the sanitizer
    // reports. SAFETY: one attribute, and one place for it, which is writable and as large — locals; the driver looks
    // the address up and does not follow it.
    check(unsafe { ffi::cuPointerGetAttributes(1, &mut attribute, &mut data, address as CUdeviceptr) })?;
    Ok(memory_type != 0)
}

/// Copies on the device.
///
/// # Safety `stream` is live. Until the stream has passed the copy, `source` is readable, `target` is writable, neither
/// is written by other work, and they do not overlap, for `bytes`.
pub unsafe fn memcpy_dtod_async(
    target: CUdeviceptr,
    source: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemcpyDtoDAsync_v2(target, source, bytes, stream) })
}

/// Sets `count` bytes on the device.
///
/// # Safety
/// `stream` is live. Until the stream has passed the fill, `target` is writable and not used by other work.
pub unsafe fn memset_d8_async(
    target: CUdeviceptr,
    value: u8,
    count: usize,
    stream: CUstream,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemsetD8Async(target, value, count, stream) })
}

/// Sets `count` 32-bit words on the device; `target` must be a multiple of 4, else `CUDA_ERROR_INVALID_VALUE`.
///
/// # Safety
/// `stream` is live. Until the stream has passed the fill, `target` is writable for `4 * count` bytes and not used by
/// other work.
pub unsafe fn memset_d32_async(
    target: CUdeviceptr,
    value: u32,
    count: usize,
    stream: CUstream,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemsetD32Async(target, value, count, stream) })
}
