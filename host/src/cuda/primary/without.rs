use cuda_loader::driver;
use cuda_loader::driver::sys::CUdevice;

use crate::cuda::failed;
use crate::error::Error;

/// A device of the driver.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Device(CUdevice);

impl Device {
    /// That of this ordinal.
    pub(in crate::cuda) fn get(ordinal: u32) -> Result<Self, Error> {
        driver::device_get(ordinal).map(Device).map_err(failed("cuDeviceGet"))
    }

    pub(in crate::cuda) fn raw(self) -> CUdevice {
        self.0
    }

    pub(in crate::cuda) fn name(self) -> Result<String, Error> {
        driver::device_name(self.0).map_err(failed("cuDeviceGetName"))
    }

    pub(in crate::cuda) fn total_memory(self) -> Result<usize, Error> {
        driver::device_total_memory(self.0).map_err(failed("cuDeviceTotalMem"))
    }
}

/// A hold on a device's primary context.
#[derive(Debug)]
pub(in crate::cuda) struct Primary(driver::PrimaryContext);

impl Primary {
    pub(in crate::cuda) fn retain(device: Device) -> Result<Self, Error> {
        driver::PrimaryContext::retain(device.0).map(Primary).map_err(failed("cuDevicePrimaryCtxRetain"))
    }

    /// Makes it the calling thread's current context.
    pub(in crate::cuda) fn enter(&self) -> Result<(), Error> {
        self.0.set_current().map_err(failed("cuCtxSetCurrent"))
    }
}

/// Waits for all work of the current context.
pub(in crate::cuda) fn synchronize() -> Result<(), Error> {
    driver::synchronize_context().map_err(failed("cuCtxSynchronize"))
}

/// Memory in the current context; `None` where there is not as much.
pub(in crate::cuda) fn allocate(bytes: usize) -> Result<Option<u64>, Error> {
    driver::mem_alloc(bytes).map_err(failed("cuMemAlloc"))
}

/// Gives memory back.
///
/// # Safety
/// The address is [`allocate`]'s, and is used no more, nor by work that is queued.
pub(in crate::cuda) unsafe fn free(address: u64) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    unsafe { driver::mem_free(address) }.map_err(failed("cuMemFree"))
}

/// Bytes of the current context's device, free and all, where the driver says so.
pub(in crate::cuda) fn memory_info() -> Option<(usize, usize)> {
    driver::mem_get_info().ok()
}
