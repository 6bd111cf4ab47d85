//! Finding the driver, and the three calls that work before there is a context.

use std::ffi::c_int;
use std::sync::OnceLock;

use crate::driver::ffi;
use crate::error::{DriverError, SHARED_OBJECT_INIT_FAILED, check};

/// Why there is no driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The system found none of the names, or could not open what it found.
    #[error(
        "the CUDA driver library cannot be loaded; tried {}",
        tried(attempts.iter().map(|attempt| (attempt.name, attempt.message.as_str())))
    )]
    NotFound {
        /// What was tried, in this order.
        attempts: Vec<LoadAttempt>,
    },
    /// The loader knows Linux and Windows of 64 bits only.
    #[error(
        "the CUDA driver can only be loaded on 64-bit Linux and Windows, and this program was built for {target}"
    )]
    UnsupportedPlatform {
        /// Operating system and architecture of this build.
        target: String,
    },
}

/// One library name that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadAttempt {
    /// For example `libcuda.so.1`.
    pub name: &'static str,
    /// What the system's loader answered.
    pub message: String,
}

/// Names that were tried, each with what the system said.
pub(crate) fn tried<'a>(attempts: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let attempts = attempts.into_iter().map(|(name, message)| format!("{name} ({message})"));
    attempts.collect::<Vec<_>>().join(", ")
}

/// Finds the driver and points every driver function at it.
///
/// The first call decides for the life of the process, from whichever thread it comes; others wait for it and get the
/// same answer. The library is never unloaded. The names are looked up where the system looks for shared libraries.
pub fn load() -> Result<(), LoadError> {
    static LOADED: OnceLock<Result<platform::Driver, LoadError>> = OnceLock::new();
    match LOADED.get_or_init(platform::open) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.clone()),
    }
}

/// The newest CUDA version that the driver supports, as (major, minor). Needs no [`init`].
pub fn driver_version() -> Result<(u32, u32), DriverError> {
    let mut version: c_int = 0;
    // SAFETY: `version` is writable — a local.
    check(unsafe { ffi::cuDriverGetVersion(&mut version) })?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Loads and initializes the driver; required once before anything but [`driver_version`]. Repeating it is harmless.
pub fn init() -> Result<(), DriverError> {
    // SAFETY: no pointers; zero is the only flag value that the driver takes.
    check(unsafe { ffi::cuInit(0) })
}

/// How many devices the driver shows. Needs [`init`].
pub fn device_count() -> Result<u32, DriverError> {
    let mut count: c_int = 0;
    // SAFETY: `count` is writable — a local.
    check(unsafe { ffi::cuDeviceGetCount(&mut count) })?;
    Ok(count.unsigned_abs())
}

/// What `cuInit` does until the table is filled.
pub(crate) extern "C" fn first_init(flags: u32) -> u32 {
    match load() {
        // SAFETY: no pointers; this reaches the driver, whose address `load` has put in place of this function.
        Ok(()) => unsafe { ffi::cuInit(flags) },
        Err(_) => SHARED_OBJECT_INIT_FAILED,
    }
}

/// What `cuDriverGetVersion` does until the table is filled.
///
/// # Safety
/// As the driver's function: `version` is null or writable.
pub(crate) unsafe extern "C" fn first_version(version: *mut c_int) -> u32 {
    match load() {
        // SAFETY: `version` is null or writable — this function's contract; `load` has put the driver in its place.
        Ok(()) => unsafe { ffi::cuDriverGetVersion(version) },
        Err(_) => SHARED_OBJECT_INIT_FAILED,
    }
}

#[cfg(all(any(target_os = "linux", windows), target_pointer_width = "64"))]
mod platform {
    use std::error::Error;
    use std::ffi::{CStr, c_void};

    #[cfg(not(windows))]
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    #[cfg(windows)]
    use libloading::os::windows::{LOAD_LIBRARY_SEARCH_SYSTEM32, Library};

    use super::{LoadAttempt, LoadError};
    use crate::symbols;

    /// Drivers install the first; the second is what some containers mount alone.
    #[cfg(not(windows))]
    const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];
    #[cfg(windows)]
    const NAMES: &[&str] = &["nvcuda.dll"];

    /// Keeps the library open: the table points into it.
    pub(super) struct Driver(#[expect(dead_code, reason = "held, never read")] Library);

    pub(super) fn open() -> Result<Driver, LoadError> {
        let mut attempts = Vec::new();
        for &name in NAMES {
            match library(name) {
                Ok(library) => {
                    // SAFETY: each address comes from this library under the symbol's own name, and the library stays
                    // open for the life of the process — `Driver` lives in a static.
                    unsafe { symbols::fill(|symbol| address(&library, symbol)) };
                    return Ok(Driver(library));
                }
                Err(error) => attempts.push(LoadAttempt { name, message: words(&error) }),
            }
        }
        Err(LoadError::NotFound { attempts })
    }

    #[cfg(not(windows))]
    fn library(name: &str) -> Result<Library, libloading::Error> {
        // SAFETY: runs the library's initializers — the installed driver's, made to be loaded this way.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
    }

    /// From where drivers install it, and from nowhere else.
    #[cfg(windows)]
    fn library(name: &str) -> Result<Library, libloading::Error> {
        // SAFETY: runs the library's initializers — the installed driver's, made to be loaded this way.
        unsafe { Library::load_with_flags(name, LOAD_LIBRARY_SEARCH_SYSTEM32) }
    }

    /// The system's own sentence, which libloading keeps as the source of its error.
    fn words(error: &libloading::Error) -> String {
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    }

    fn address(library: &Library, symbol: &CStr) -> Option<*mut c_void> {
        // SAFETY: the symbol's address is only read as an address here; `symbols::fill` states what is jumped to.
        let found = unsafe { library.get::<*mut c_void>(symbol.to_bytes_with_nul()) };
        found.ok().map(|symbol| *symbol).filter(|address| !address.is_null())
    }
}

#[cfg(not(all(any(target_os = "linux", windows), target_pointer_width = "64")))]
mod platform {
    use super::LoadError;

    /// There is none.
    pub(super) enum Driver {}

    pub(super) fn open() -> Result<Driver, LoadError> {
        let target = format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH);
        Err(LoadError::UnsupportedPlatform { target })
    }
}
