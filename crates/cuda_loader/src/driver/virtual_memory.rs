//! Addresses and memory of their own: a range of addresses is reserved, memory is made, and mapped where it is wanted.
//!
//! A driver that is older than 10.2 answers `CUDA_ERROR_NOT_FOUND`; whether a device can is its attribute
//! `VirtualMemoryManagement`.

use std::ffi::{c_int, c_void};

use super::ffi;
use super::sys::{CUdevice, CUdeviceptr};
use crate::error::{DriverError, OUT_OF_MEMORY, check};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only type.
const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: c_int = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    kind: c_int,
    device: CUdevice,
}

/// `CUmemAllocationProp`: memory of a device that no other process gets.
#[repr(C)]
#[derive(Debug)]
pub(super) struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32_meta_data: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AccessDesc {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12);

fn of_device(device: CUdevice) -> AllocationProp {
    let location = Location { kind: DEVICE, device };
    AllocationProp {
        kind: PINNED,
        handle_types: 0,
        location,
        win32_meta_data: std::ptr::null(),
        flags: [0; 8],
    }
}

/// Memory of a device that [`mem_create`] made; it is the device's again when it is neither held nor mapped.
#[derive(Debug, PartialEq, Eq)]
pub struct MemoryHandle(u64);

/// Sizes of memory and of what is mapped are multiples of this; more than 0, a power of two.
pub fn mem_granularity(device: CUdevice) -> Result<usize, DriverError> {
    let mut bytes = 0;
    // SAFETY: `bytes` is writable and the properties are readable — locals.
    check(unsafe { ffi::cuMemGetAllocationGranularity(&mut bytes, &of_device(device), RECOMMENDED) })?;
    match bytes.is_power_of_two() {
        true => Ok(bytes),
        false => Err(DriverError::invalid_value(format!("memory is given by {bytes} bytes"))),
    }
}

/// A range of addresses that nothing lies at, aligned to [`mem_granularity`]. `None` where there is none as long.
pub fn mem_address_reserve(bytes: usize) -> Result<Option<CUdeviceptr>, DriverError> {
    let mut address: CUdeviceptr = 0;
    // SAFETY: `address` is writable — a local.
    match unsafe { ffi::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) } {
        OUT_OF_MEMORY => Ok(None),
        code => check(code).map(|()| Some(address)),
    }
}

/// Gives a range of addresses back.
///
/// # Safety
/// The range is all of what [`mem_address_reserve`] gave, nothing is mapped in it, and it is not used afterwards.
pub unsafe fn mem_address_free(address: CUdeviceptr, bytes: usize) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemAddressFree(address, bytes) })
}

/// Memory of a device, a multiple of [`mem_granularity`]. `None` where there is not as much.
pub fn mem_create(device: CUdevice, bytes: usize) -> Result<Option<MemoryHandle>, DriverError> {
    let mut handle = 0;
    // SAFETY: `handle` is writable and the properties are readable — locals.
    match unsafe { ffi::cuMemCreate(&mut handle, bytes, &of_device(device), 0) } {
        OUT_OF_MEMORY => Ok(None),
        code => check(code).map(|()| Some(MemoryHandle(handle))),
    }
}

/// Maps all of some memory, which nobody can access yet.
///
/// # Safety
/// The range is within what [`mem_address_reserve`] gave, nothing is mapped in it, and the memory has so many bytes.
pub unsafe fn mem_map(address: CUdeviceptr, bytes: usize, handle: &MemoryHandle) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemMap(address, bytes, 0, handle.0, 0) })
}

/// Holds memory no longer: where it is mapped it stays until that ends.
pub fn mem_release(handle: MemoryHandle) -> Result<(), DriverError> {
    // SAFETY: from `mem_create`, and released once, since the value is taken.
    check(unsafe { ffi::cuMemRelease(handle.0) })
}

/// Lets kernels of devices read and write what is mapped in a range; other devices are as they were.
///
/// # Safety
/// The range is some mappings, each as a whole.
pub unsafe fn mem_set_access(
    address: CUdeviceptr,
    bytes: usize,
    devices: &[CUdevice],
) -> Result<(), DriverError> {
    let access = |&device| AccessDesc { location: Location { kind: DEVICE, device }, flags: READ_WRITE };
    let descriptions: Vec<AccessDesc> = devices.iter().map(access).collect();
    // SAFETY: the descriptions are readable, as many as are said; the rest is this function's contract.
    check(unsafe { ffi::cuMemSetAccess(address, bytes, descriptions.as_ptr(), descriptions.len()) })
}

/// Ends mappings.
///
/// # Safety
/// The range is some mappings, each as a whole; no work that uses it is queued, and none is afterwards.
pub unsafe fn mem_unmap(address: CUdeviceptr, bytes: usize) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's.
    check(unsafe { ffi::cuMemUnmap(address, bytes) })
}
