//! For debugging: `printf` from a kernel, and a trap.

/// Stops the kernel with an error, which the host sees at its next synchronisation.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn trap() -> ! {
    device!({
        // SAFETY: it only ends the kernel.
        unsafe { core::arch::nvptx::trap() }
    } else {
        crate::sim::trap()
    })
}

/// `vprintf(format, arguments)`: the driver prints it at the next synchronisation. `format` ends in NUL; `arguments`
/// is a `#[repr(C)]` struct of its values, floats as f64.
///
/// Puts its arguments into local memory and calls a function: never leave it in a kernel.
///
/// # Safety
/// - The fields of `arguments` are what `format` says.
#[inline(always)]
pub unsafe fn printf<A>(format: &core::ffi::CStr, arguments: &A) {
    device!({
        // SAFETY: both pointers are valid for the call; their agreement is the caller's promise.
        unsafe {
            core::arch::nvptx::vprintf(format.as_ptr().cast(), (arguments as *const A).cast());
        }
    } else {
        // SAFETY: the caller's promise.
        unsafe { crate::sim::printf(format, arguments) }
    })
}
