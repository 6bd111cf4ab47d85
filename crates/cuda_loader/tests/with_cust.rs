//! What `cust` sees on a machine without a CUDA driver. With a driver these tests say so and pass.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::ffi::CStr;

use cuda_loader::DriverError;
use cust::error::CudaError;

fn driver_is_there() -> bool {
    let there = cuda_loader::load().is_ok();
    if there {
        eprintln!("skipped: this machine has a CUDA driver");
    }
    there
}

#[test]
fn cust_gets_an_error_that_it_can_print() {
    if driver_is_there() {
        return;
    }
    let error = cust::init(cust::CudaFlags::empty()).unwrap_err();
    assert_eq!(error, CudaError::SharedObjectInitFailed);
    assert!(error.to_string().contains("the CUDA driver library cannot be loaded"), "{error}");
    assert_eq!(cust::CudaApiVersion::get().unwrap_err(), CudaError::SharedObjectInitFailed);
    assert_eq!(cust::device::Device::num_devices(), Err(CudaError::NotInitialized));
    assert!(CudaError::NotInitialized.to_string().contains("not loaded"));
    assert_eq!(cust::quick_init().unwrap_err(), CudaError::SharedObjectInitFailed);
}

#[test]
fn custs_errors_become_ours() {
    if driver_is_there() {
        return;
    }
    let missing = cuda_loader::init().unwrap_err();
    assert_eq!(DriverError::from(CudaError::SharedObjectInitFailed), missing);
    let error = DriverError::from(CudaError::InvalidMemoryAllocation);
    assert_eq!((error.code, error.name.as_str()), (100_100, "InvalidMemoryAllocation"));
}

/// The driver's contract, which callers of `cust_raw` rely on: an unknown code leaves a null text.
#[test]
fn the_raw_text_functions_follow_the_drivers_contract() {
    if driver_is_there() {
        return;
    }
    use cust::sys::{CUresult, cuGetErrorName};
    let mut text = c"untouched".as_ptr();
    // SAFETY: `text` is writable — a local.
    let status = unsafe { cuGetErrorName(CUresult::CUDA_ERROR_NOT_FOUND, &mut text) };
    assert_eq!(status, CUresult::CUDA_SUCCESS);
    // SAFETY: a nul-terminated string of the program — the call succeeded.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_NOT_FOUND");
    // SAFETY: as above; null is refused.
    unsafe {
        assert_eq!(
            cuGetErrorName(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, &mut text),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        assert!(text.is_null());
        let null = std::ptr::null_mut();
        assert_eq!(cuGetErrorName(CUresult::CUDA_ERROR_NOT_FOUND, null), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}
