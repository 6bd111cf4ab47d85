//! Devices and their primary contexts.

use std::ffi::{CStr, c_char, c_int};

use super::ffi;
use super::sys::{CUcontext, CUdevice};
use crate::error::{DriverError, check};

/// What can be asked of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceAttribute {
    /// Multiprocessors.
    MultiprocessorCount = 16,
    /// Number of its bus.
    PciBusId = 33,
    /// Its number on that bus.
    PciDeviceId = 34,
    /// Peak clock of its memory in kHz.
    MemoryClockRate = 36,
    /// Bits of its memory's bus.
    GlobalMemoryBusWidth = 37,
    /// Bytes of L2.
    L2CacheSize = 38,
    /// Threads that a multiprocessor holds at a time.
    MaxThreadsPerMultiprocessor = 39,
    /// Number of its bus's domain.
    PciDomainId = 50,
    /// Compute capability, before the point.
    ComputeCapabilityMajor = 75,
    /// Compute capability, behind the point.
    ComputeCapabilityMinor = 76,
    /// Bytes of shared memory of a multiprocessor.
    MaxSharedMemoryPerMultiprocessor = 81,
    /// 32-bit registers of a multiprocessor.
    MaxRegistersPerMultiprocessor = 82,
    /// 1 if a grid can be launched cooperatively.
    CooperativeLaunch = 95,
    /// Bytes of shared memory that a block can have with [`super::set_max_dynamic_shared`].
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

/// The device of this ordinal.
pub fn device_get(ordinal: u32) -> Result<CUdevice, DriverError> {
    let ordinal = c_int::try_from(ordinal)
        .map_err(|_| DriverError::invalid_value(format!("there is no device of ordinal {ordinal}")))?;
    let mut device: CUdevice = 0;
    // SAFETY: `device` is writable — a local.
    check(unsafe { ffi::cuDeviceGet(&mut device, ordinal) })?;
    Ok(device)
}

/// Its name, such as `NVIDIA H200`.
pub fn device_name(device: CUdevice) -> Result<String, DriverError> {
    let mut name = [0u8; 256];
    // SAFETY: `name` is writable for the length that is given — a local; a device is an ordinal that the driver checks,
    // not a pointer.
    check(unsafe { ffi::cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, device) })?;
    let name = CStr::from_bytes_until_nul(&name)
        .map_err(|_| DriverError::invalid_value("a device's name has no end".into()))?;
    Ok(name.to_string_lossy().into_owned())
}

/// Bytes of its memory.
pub fn device_total_memory(device: CUdevice) -> Result<usize, DriverError> {
    let mut bytes = 0;
    // SAFETY: `bytes` is writable — a local; a device is an ordinal that the driver checks, not a pointer.
    check(unsafe { ffi::cuDeviceTotalMem_v2(&mut bytes, device) })?;
    Ok(bytes)
}

/// A hold on a device's primary context, which goes with the value. `cust` takes one of its own; it has no words for
/// what a newer driver answers to that, such as `CUDA_ERROR_DEVICE_UNAVAILABLE` (46) of a card that another process has
/// for itself: so it is asked for here first.
#[derive(Debug)]
pub struct PrimaryContext {
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: contexts may be made current in any thread — the driver's own rule.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Makes the context if there is none yet.
    pub fn retain(device: CUdevice) -> Result<Self, DriverError> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: `context` is writable — a local; a device is an ordinal that the driver checks, not a pointer.
        check(unsafe { ffi::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(PrimaryContext { device, context })
    }

    /// Makes it the calling thread's current context.
    pub fn set_current(&self) -> Result<(), DriverError> {
        // SAFETY: live while `self` holds it.
        check(unsafe { ffi::cuCtxSetCurrent(self.context) })
    }
}

/// Whether kernels of a device can access the memory of another one.
pub fn can_access_peer(device: CUdevice, peer: CUdevice) -> Result<bool, DriverError> {
    let mut can: c_int = 0;
    // SAFETY: `can` is writable — a local; devices are ordinals that the driver checks, not pointers.
    check(unsafe { ffi::cuDeviceCanAccessPeer(&mut can, device, peer) })?;
    Ok(can != 0)
}

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;

/// Lets kernels of the calling thread's current context access all memory that another device's primary context has
/// and will have. That they may already is no error.
pub fn enable_peer_access(peer: CUdevice) -> Result<(), DriverError> {
    let peer = PrimaryContext::retain(peer)?;
    // SAFETY: the peer's context is live while it is held.
    match unsafe { ffi::cuCtxEnablePeerAccess(peer.context, 0) } {
        PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        code => check(code),
    }
}

/// Waits for all work of the calling thread's current context.
pub fn synchronize_context() -> Result<(), DriverError> {
    // SAFETY: of no parameters.
    check(unsafe { ffi::cuCtxSynchronize() })
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

#[cfg(all(test, feature = "cust"))]
mod tests {
    use super::DeviceAttribute as Ours;
    use cust::device::DeviceAttribute as Theirs;

    #[test]
    fn attributes_have_the_numbers_of_custs() {
        for (ours, theirs) in [
            (Ours::MultiprocessorCount, Theirs::MultiprocessorCount),
            (Ours::PciBusId, Theirs::PciBusId),
            (Ours::PciDeviceId, Theirs::PciDeviceId),
            (Ours::MemoryClockRate, Theirs::MemoryClockRate),
            (Ours::GlobalMemoryBusWidth, Theirs::GlobalMemoryBusWidth),
            (Ours::L2CacheSize, Theirs::L2CacheSize),
            (Ours::MaxThreadsPerMultiprocessor, Theirs::MaxThreadsPerMultiprocessor),
            (Ours::PciDomainId, Theirs::PciDomainId),
            (Ours::ComputeCapabilityMajor, Theirs::ComputeCapabilityMajor),
            (Ours::ComputeCapabilityMinor, Theirs::ComputeCapabilityMinor),
            (Ours::MaxSharedMemoryPerMultiprocessor, Theirs::MaxSharedMemoryPerMultiprocessor),
            (Ours::MaxRegistersPerMultiprocessor, Theirs::MaxRegistersPerMultiprocessor),
        ] {
            assert_eq!(ours as u32, theirs as u32, "{ours:?}");
        }
    }
}
