//! Driver errors by code, name and description, also where there is no driver to ask.

use std::ffi::{CStr, c_char};

use crate::driver::ffi;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const SHARED_OBJECT_INIT_FAILED: u32 = 303;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;

/// The codes that this crate itself answers with. No other code can come up before a driver is loaded.
const OWN_CODES: [(u32, &CStr, &CStr); 4] = [
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"the CUDA driver is not loaded or not initialized"),
    (
        SHARED_OBJECT_INIT_FAILED,
        c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED",
        c"the CUDA driver library cannot be loaded",
    ),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"the installed CUDA driver lacks this function"),
];

/// A CUDA driver error: its number, its name and its description, as the driver gives them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} ({code}): {description}")]
pub struct DriverError {
    /// The `CUresult`.
    pub code: u32,
    /// For example `CUDA_ERROR_INVALID_PTX`.
    pub name: String,
    /// The driver's sentence about it.
    pub description: String,
}

impl DriverError {
    /// The error with this `CUresult`, in the words of the loaded driver or, without one, of this crate.
    ///
    /// A number that neither knows (a newer driver's code, or one of `cust`'s own from 100100) is named `CUresult <n>`.
    pub fn from_code(code: u32) -> Self {
        DriverError {
            code,
            name: text(code, Text::Name).unwrap_or_else(|| format!("CUresult {code}")),
            description: text(code, Text::Description)
                .unwrap_or_else(|| String::from("unrecognized error code")),
        }
    }

    /// `CUDA_ERROR_INVALID_VALUE` found on this side of the call, with the reason as its description.
    pub(crate) fn invalid_value(description: String) -> Self {
        DriverError { description, ..Self::from_code(INVALID_VALUE) }
    }
}

#[cfg(feature = "cust")]
impl From<cust::error::CudaError> for DriverError {
    /// `cust` folds every code that it does not know into 999, so the number can be less exact than one from
    /// [`crate::driver`].
    fn from(error: cust::error::CudaError) -> Self {
        use cust::error::CudaError;
        match error {
            CudaError::InvalidMemoryAllocation | CudaError::OptixError => DriverError {
                code: error as u32,
                name: format!("{error:?}"),
                description: String::from("refused by cust before the driver was asked"),
            },
            error => Self::from_code(error as u32),
        }
    }
}

/// Turns a `CUresult` into a `Result`.
pub(crate) fn check(code: u32) -> Result<(), DriverError> {
    if code == SUCCESS { Ok(()) } else { Err(DriverError::from_code(code)) }
}

#[derive(Clone, Copy)]
enum Text {
    Name,
    Description,
}

fn text(code: u32, which: Text) -> Option<String> {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: `text` is writable for one pointer — a local; both functions only write to it.
    let status = unsafe {
        match which {
            Text::Name => ffi::cuGetErrorName(code, &mut text),
            Text::Description => ffi::cuGetErrorString(code, &mut text),
        }
    };
    if status != SUCCESS || text.is_null() {
        return own_text(code, which).map(|text| text.to_string_lossy().into_owned());
    }
    // SAFETY: `text` is a nul-terminated string that lives as long as the program — the driver's contract after
    // success.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn own_text(code: u32, which: Text) -> Option<&'static CStr> {
    OWN_CODES.iter().find(|row| row.0 == code).map(|row| match which {
        Text::Name => row.1,
        Text::Description => row.2,
    })
}

/// Stands in for `cuGetErrorName` while no driver is loaded.
///
/// # Safety
/// As the driver's function: `text` is null or writable for one pointer.
pub(crate) unsafe extern "C" fn error_name(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: `text` is null or writable — this function's contract.
    unsafe { answer_text(code, Text::Name, text) }
}

/// Stands in for `cuGetErrorString` while no driver is loaded.
///
/// # Safety
/// As the driver's function: `text` is null or writable for one pointer.
pub(crate) unsafe extern "C" fn error_string(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: `text` is null or writable — this function's contract.
    unsafe { answer_text(code, Text::Description, text) }
}

/// # Safety
/// `text` is null or writable for one pointer.
unsafe fn answer_text(code: u32, which: Text, text: *mut *const c_char) -> u32 {
    if text.is_null() {
        return INVALID_VALUE;
    }
    let found = own_text(code, which);
    // SAFETY: `text` is writable — not null, and the contract leaves only that.
    unsafe { text.write(found.map_or(std::ptr::null(), CStr::as_ptr)) };
    if found.is_some() { SUCCESS } else { INVALID_VALUE }
}
