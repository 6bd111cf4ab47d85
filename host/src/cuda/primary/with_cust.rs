use cuda_loader::cust;
use cuda_loader::cust::context::CurrentContext;
use cuda_loader::cust::device::Device as CustDevice;
use cuda_loader::cust::error::CudaError;
use cuda_loader::cust::memory::{DevicePointer, cuda_free, cuda_malloc, mem_get_info};
use cuda_loader::driver;
use cuda_loader::driver::sys::CUdevice;

use crate::cuda::failed;
use crate::error::Error;

/// [`failed`] for an error of `cust`.
fn cust_failed(call: &'static str) -> impl Fn(CudaError) -> Error {
    move |error| Error::Driver { call, source: cuda_loader::DriverError::from_code(error as u32).into() }
}

/// A device of the driver.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Device(CustDevice);

impl Device {
    /// That of this ordinal.
    pub(in crate::cuda) fn get(ordinal: u32) -> Result<Self, Error> {
        CustDevice::get_device(ordinal).map(Device).map_err(cust_failed("cuDeviceGet"))
    }

    pub(in crate::cuda) fn raw(self) -> CUdevice {
        self.0.as_raw()
    }

    pub(in crate::cuda) fn name(self) -> Result<String, Error> {
        self.0.name().map_err(cust_failed("cuDeviceGetName"))
    }

    pub(in crate::cuda) fn total_memory(self) -> Result<usize, Error> {
        self.0.total_memory().map_err(cust_failed("cuDeviceTotalMem"))
    }
}

/// A hold on a device's primary context.
#[derive(Debug)]
pub(in crate::cuda) struct Primary(cust::context::Context);

impl Primary {
    pub(in crate::cuda) fn retain(device: Device) -> Result<Self, Error> {
        // Held until `cust` holds it too.
        let _held =
            driver::PrimaryContext::retain(device.raw()).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        cust::context::Context::new(device.0).map(Primary).map_err(cust_failed("cuDevicePrimaryCtxRetain"))
    }

    /// Makes it the calling thread's current context.
    pub(in crate::cuda) fn enter(&self) -> Result<(), Error> {
        CurrentContext::set_current(&self.0).map_err(cust_failed("cuCtxSetCurrent"))
    }
}

/// Waits for all work of the current context.
pub(in crate::cuda) fn synchronize() -> Result<(), Error> {
    CurrentContext::synchronize().map_err(cust_failed("cuCtxSynchronize"))
}

/// Memory in the current context; `None` where there is not as much.
pub(in crate::cuda) fn allocate(bytes: usize) -> Result<Option<u64>, Error> {
    // SAFETY: who gets the address gives it to `free`; contents are the tensors' business.
    match unsafe { cuda_malloc::<u8>(bytes) } {
        Ok(pointer) => Ok(Some(pointer.as_raw())),
        Err(CudaError::OutOfMemory) => Ok(None),
        Err(error) => Err(cust_failed("cuMemAlloc")(error)),
    }
}

/// Gives memory back.
///
/// # Safety
/// The address is [`allocate`]'s, and is used no more, nor by work that is queued.
pub(in crate::cuda) unsafe fn free(address: u64) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    unsafe { cuda_free(DevicePointer::<u8>::from_raw(address)) }.map_err(cust_failed("cuMemFree"))
}

/// Bytes of the current context's device, free and all, where the driver says so.
pub(in crate::cuda) fn memory_info() -> Option<(usize, usize)> {
    mem_get_info().ok()
}
