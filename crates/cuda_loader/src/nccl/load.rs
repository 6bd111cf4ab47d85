//! Finding NCCL, and the table of its functions.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use super::{Config, UniqueId};
use crate::driver::sys::CUstream;
use crate::load::tried;

/// The oldest NCCL that is taken: from here on all calls of a nonblocking communicator return at once.
pub const OLDEST: (u32, u32) = (2, 18);

/// Names the library's file, and nothing else is tried then.
pub const VARIABLE: &str = "WARPFORGE_NCCL";

/// Why there is no NCCL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclLoadError {
    /// None of the files is there, or none can be used.
    #[error(
        "NCCL cannot be loaded; tried {}; install it (`pip install nvidia-nccl-cu13` or the system's package), \
         or name its file in {VARIABLE}",
        tried(attempts.iter().map(|attempt| (attempt.name.as_str(), attempt.message.as_str())))
    )]
    NotFound {
        /// What was tried, in this order.
        attempts: Vec<NcclAttempt>,
    },
    /// NCCL is for Linux.
    #[error("NCCL can only be loaded on 64-bit Linux, and this program was built for {target}")]
    UnsupportedPlatform {
        /// Operating system and architecture of this build.
        target: String,
    },
}

/// One file that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclAttempt {
    /// A name that the system's loader looks for, such as `libnccl.so.2`, or a path.
    pub name: String,
    /// What the system's loader answered, or why the library is of no use.
    pub message: String,
}

/// A communicator, of which only NCCL knows more.
pub(super) type RawComm = *mut c_void;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions: each the library's own of that name.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// `Err` is the name that the library lacks.
            ///
            /// # Safety `address` returns only NCCL's function of that name, and the library stays loaded
            /// for the life of the process.
            unsafe fn find(
                address: impl Fn(&std::ffi::CStr) -> Option<*mut c_void>,
            ) -> Result<Self, &'static str> {
                Ok(Functions { $($field: {
                    const NAME: &std::ffi::CStr =
                        match std::ffi::CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("a symbol name has exactly one nul, at its end"),
                        };
                    let found = address(NAME).ok_or($name)?;
                    // SAFETY: not null, and NCCL's function of this name (the caller), whose signature in
                    // `nccl.h` this is.
                    unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found)
                    }
                },)* })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    comm_init_rank_config = "ncclCommInitRankConfig":
        fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_finalize = "ncclCommFinalize": fn(RawComm) -> c_int;
    comm_destroy = "ncclCommDestroy": fn(RawComm) -> c_int;
    comm_abort = "ncclCommAbort": fn(RawComm) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError": fn(RawComm, *mut c_int) -> c_int;
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(RawComm) -> *const c_char;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, CUstream) -> c_int;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, RawComm, CUstream) -> c_int;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, CUstream) -> c_int;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, CUstream) -> c_int;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, CUstream) -> c_int;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, CUstream) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
}

/// A library that was found: its functions, where it was found, and what it is.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) functions: Functions,
    pub(super) name: String,
    /// As `ncclGetVersion` has it.
    pub(super) code: u32,
}

/// The first call decides for the life of the process, as [`crate::load`].
pub(super) fn library() -> Result<&'static Library, NcclLoadError> {
    static LOADED: OnceLock<Result<Library, NcclLoadError>> = OnceLock::new();
    LOADED.get_or_init(platform::open).as_ref().map_err(Clone::clone)
}

/// Major, minor and patch of a version's number: 2.8.4 is 2804, from 2.9.0 on it is 20900.
pub(super) fn parts(code: u32) -> (u32, u32, u32) {
    if code < 10_000 {
        (code / 1000, code % 1000 / 100, code % 100)
    } else {
        (code / 10_000, code % 10_000 / 100, code % 100)
    }
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod platform {
    use std::error::Error;
    use std::ffi::{CStr, OsStr, OsString, c_int, c_void};
    use std::path::{Path, PathBuf};

    use libloading::os::unix::{Library as File, RTLD_LOCAL, RTLD_NOW};

    use super::{Functions, Library, NcclAttempt, NcclLoadError, OLDEST, VARIABLE, parts};

    /// The system's package brings the first; the second comes with the headers.
    const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
    /// Where PyPI's packages have it, in a folder of Python's packages.
    const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

    pub(super) fn open() -> Result<Library, NcclLoadError> {
        let mut attempts = Vec::new();
        let mut try_one = |name: &OsStr| match library(name) {
            Ok(library) => Some(library),
            Err(message) => {
                attempts.push(NcclAttempt { name: name.to_string_lossy().into_owned(), message });
                None
            }
        };
        let found = match std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
            Some(named) => try_one(&named),
            None => {
                let of_loader = NAMES.iter().find_map(|name| try_one(OsStr::new(name)));
                of_loader.or_else(|| of_packages().find_map(|path| try_one(path.as_os_str())))
            }
        };
        found.ok_or(NcclLoadError::NotFound { attempts })
    }

    /// Those files of Python's packages that are there, in the order in which Python would look.
    fn of_packages() -> impl Iterator<Item = PathBuf> {
        let listed = |variable| {
            let paths = std::env::var_os(variable).unwrap_or_default();
            std::env::split_paths(&paths).filter(|path| path.is_absolute()).collect::<Vec<_>>()
        };
        let mut folders = listed("PYTHONPATH");
        if let Some(environment) = std::env::var_os("VIRTUAL_ENV").filter(|path| !path.is_empty()) {
            folders.extend(packages_below(Path::new(&environment)));
        }
        for folder in listed("PATH") {
            if folder.join("python3").is_file()
                && let Some(prefix) = folder.parent()
            {
                folders.extend(packages_below(prefix));
            }
        }
        folders.into_iter().map(|folder| folder.join(IN_PACKAGES)).filter(|path| path.is_file())
    }

    /// `lib/python3*/site-packages`, the newest first.
    fn packages_below(prefix: &Path) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else { return Vec::new() };
        let minor =
            |name: OsString| name.to_str()?.strip_prefix("python3")?.trim_start_matches('.').parse().ok();
        let mut versions: Vec<(u32, PathBuf)> = entries
            .flatten()
            .filter_map(|entry| Some((minor(entry.file_name())?, entry.path().join("site-packages"))))
            .collect();
        versions.sort();
        versions.into_iter().rev().map(|(_, path)| path).collect()
    }

    /// A library that can be used, or why it cannot.
    fn library(name: &OsStr) -> Result<Library, String> {
        // SAFETY: runs the library's initializers: NCCL's, made to be loaded by programs.
        let file = unsafe { File::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))?;
        // SAFETY: each address comes from this library under the symbol's own name; the library is forgotten
        // below and so never unloaded, or the table goes with it.
        let functions = unsafe { Functions::find(|symbol| address(&file, symbol)) }
            .map_err(|symbol| format!("it has no function {symbol}"))?;
        let mut code: c_int = 0;
        // SAFETY: `code` is writable, a local.
        let status = unsafe { (functions.get_version)(&mut code) };
        if status != 0 {
            return Err(format!("it does not say its version: error {status}"));
        }
        let code = code.unsigned_abs();
        let (major, minor, patch) = parts(code);
        if (major, minor) < OLDEST || major > 2 {
            let (oldest, least) = OLDEST;
            return Err(format!(
                "it is NCCL {major}.{minor}.{patch}, and {oldest}.{least} or a later 2.x is needed"
            ));
        }
        std::mem::forget(file);
        Ok(Library { functions, name: name.to_string_lossy().into_owned(), code })
    }

    fn address(file: &File, symbol: &CStr) -> Option<*mut c_void> {
        // SAFETY: the symbol's address is only read as an address here; `Functions::find` states what is
        // called.
        let found = unsafe { file.get::<*mut c_void>(symbol.to_bytes_with_nul()) };
        found.ok().map(|symbol| *symbol).filter(|address| !address.is_null())
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod platform {
    use super::{Library, NcclLoadError};

    pub(super) fn open() -> Result<Library, NcclLoadError> {
        let target = format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH);
        Err(NcclLoadError::UnsupportedPlatform { target })
    }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn versions_of_both_forms() {
        assert_eq!(parts(2804), (2, 8, 4));
        assert_eq!(parts(21_805), (2, 18, 5));
        assert_eq!(parts(23_007), (2, 30, 7));
    }
}
