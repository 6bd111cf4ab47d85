//! Modules, with the driver's assembler log.

use std::ffi::{CStr, c_int, c_uint, c_void};

use super::sys::{CUfunction, CUmodule};

use super::ffi;
use crate::error::{DriverError, check};

/// An image was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the image was refused: {source}\n{log}")]
pub struct ModuleError {
    /// The driver's error.
    pub source: DriverError,
    /// What its assembler wrote: errors first, then information. May be empty.
    pub log: String,
}

/// Room for each of the two logs; a longer one is cut by the driver.
const LOG_BYTES: usize = 16 * 1024;

/// Loads a PTX image into the current context.
///
/// Assembling takes the driver from milliseconds to seconds the first time; later it finds the result in its own cache.
/// Machine code (a cubin or fatbin) is refused, because the driver would read it by the lengths that it states.
pub fn module_load_data(ptx: &CStr) -> Result<CUmodule, ModuleError> {
    let start = &ptx.to_bytes()[..ptx.count_bytes().min(4)];
    if !start.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
        let description = format!("an image of PTX text was expected, and this one begins with {start:02x?}");
        return Err(ModuleError { source: DriverError::invalid_value(description), log: String::new() });
    }
    // CU_JIT_INFO_LOG_BUFFER and _SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER and _SIZE_BYTES.
    let mut options: [c_int; 4] = [3, 4, 5, 6];
    let mut info = vec![0u8; LOG_BYTES];
    let mut errors = vec![0u8; LOG_BYTES];
    // A number travels in the bits of the pointer.
    let size = std::ptr::without_provenance_mut::<c_void>(LOG_BYTES);
    let mut values = [info.as_mut_ptr().cast(), size, errors.as_mut_ptr().cast(), size];
    let mut module: CUmodule = std::ptr::null_mut();
    // SAFETY: the image is text up to a nul — checked above, and its type; options and values are as many as announced,
    // and each buffer has the size that is given for it — just above.
    let status = unsafe {
        ffi::cuModuleLoadDataEx(
            &mut module,
            ptx.as_ptr().cast(),
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    check(status).map_err(|source| ModuleError { source, log: log(&errors, &info) })?;
    Ok(module)
}

/// Loads machine code, a cubin as `ptxas` writes it, into the current context: nothing is assembled.
/// `CUDA_ERROR_NO_BINARY_FOR_GPU` or another error where card or driver do not take it.
///
/// # Safety
/// `cubin` is a whole one: the driver reads it by the lengths that it states.
pub unsafe fn module_load_cubin(cubin: &[u8]) -> Result<CUmodule, DriverError> {
    if !cubin.starts_with(b"\x7fELF") {
        return Err(DriverError::invalid_value("a cubin begins as an ELF file does".into()));
    }
    let mut module: CUmodule = std::ptr::null_mut();
    let (options, values) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: `module` is writable — a local; no options; the image is whole — the caller.
    check(unsafe { ffi::cuModuleLoadDataEx(&mut module, cubin.as_ptr().cast(), 0, options, values) })?;
    Ok(module)
}

fn log(errors: &[u8], info: &[u8]) -> String {
    let text = |buffer: &[u8]| {
        let written = buffer.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(written).trim().to_owned()
    };
    [text(errors), text(info)].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
}

/// Unloads a module and with it its functions.
///
/// # Safety
/// `module` is live, nothing uses it or its functions afterwards, and no kernel of it is still queued.
pub unsafe fn module_unload(module: CUmodule) -> Result<(), DriverError> {
    // SAFETY: `module` is live and used no more — the caller.
    check(unsafe { ffi::cuModuleUnload(module) })
}

/// Finds a kernel by its entry name; `CUDA_ERROR_NOT_FOUND` if the module has none of that name.
///
/// # Safety
/// `module` is live. The function is live for as long as the module is.
pub unsafe fn module_get_function(module: CUmodule, name: &CStr) -> Result<CUfunction, DriverError> {
    let mut function: CUfunction = std::ptr::null_mut();
    // SAFETY: `module` is live — the caller; `function` is writable — a local; the name ends with a nul — its type.
    check(unsafe { ffi::cuModuleGetFunction(&mut function, module, name.as_ptr()) })?;
    Ok(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_refused() {
        for image in [c"\x7fELF\x02\x01", c"\x50\xed\x55\xba\x01", c"\xb1\x43\x62\x46"] {
            let error = module_load_data(image).unwrap_err();
            assert_eq!(error.source.code, 1);
            assert!(error.source.description.starts_with("an image of PTX text was expected"), "{error}");
        }
        let error = module_load_data(c"\x7fELF").unwrap_err();
        assert!(error.source.description.ends_with("begins with [7f, 45, 4c, 46]"), "{error}");
    }

    #[test]
    fn text_is_no_cubin() {
        for text in [&b".version 8.0\n"[..], b"", b"\x7fEL"] {
            // SAFETY: refused before the driver sees it.
            let error = unsafe { module_load_cubin(text) }.unwrap_err();
            assert_eq!(error.description, "a cubin begins as an ELF file does");
        }
    }

    #[test]
    fn errors_come_before_information_and_empty_logs_leave_nothing() {
        assert_eq!(log(b"bad line 3\n\0junk", b"0 registers\0"), "bad line 3\n0 registers");
        assert_eq!(log(b"\0", b"0 registers\0"), "0 registers");
        assert_eq!(log(b"full to the end", b""), "full to the end");
        assert_eq!(log(&[0; 4], &[0; 4]), "");
    }
}
