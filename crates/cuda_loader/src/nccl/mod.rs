//! NCCL, found when the program runs: collectives between cards.
//!
//! [`load`] looks for the library in this order, and the first that can be used is taken for the life of the
//! process:
//!
//! 1. the file that the environment variable `WARPFORGE_NCCL` names; if there is one, nothing else is tried;
//! 2. `libnccl.so.2`, then `libnccl.so`, where the system looks for shared libraries;
//! 3. `nvidia/nccl/lib/libnccl.so.2`, where PyPI's packages have it, in the folders of `PYTHONPATH`, in
//!    `lib/python3*/site-packages` of `VIRTUAL_ENV`, and in the same beside each folder of `PATH` that has a
//!    `python3`.
//!
//! # Communicators do not block
//!
//! Every [`Communicator`] is made with `blocking = 0`: no call waits for another rank, so that a rank that
//! never comes can be given up. A call that has more to do answers [`State::InProgress`]; until
//! [`Communicator::state`] says [`State::Ready`] no other call may be made, but for [`Communicator::abort`].
//! NCCL does that work in a thread that it starts for the call. When it is ready, the call's work is in the
//! stream.
//!
//! The calling thread's current context says on which device a communicator is made.

// Where NCCL cannot be loaded nothing makes the table.
#[cfg_attr(not(all(target_os = "linux", target_pointer_width = "64")), allow(dead_code))]
mod load;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

use crate::driver::sys::{CUdeviceptr, CUstream};
use load::{Functions, RawComm};
pub use load::{NcclAttempt, NcclLoadError, OLDEST, VARIABLE};

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;

/// Bytes of a [`UniqueId`].
pub const UNIQUE_ID_BYTES: usize = 128;

/// What the ranks of one communicator have in common, made by one of them.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:02x?}…)", &self.0[..8])
    }
}

/// `ncclConfig_t` as of 2.17: what comes after it in later versions is left out, and `size` and `version`
/// say so.
#[repr(C)]
#[derive(Debug)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    fn nonblocking() -> Self {
        // `NCCL_CONFIG_INITIALIZER`.
        const MAGIC: c_uint = 0xcafe_beef;
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Types of elements: of sums those of floats, and bytes of what is only moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// `ncclUint8`.
    U8 = 1,
    /// `ncclFloat16`.
    F16 = 6,
    /// `ncclFloat32`.
    F32 = 7,
    /// `ncclBfloat16`.
    BF16 = 9,
}

/// How far a communicator's last call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is done, and what it enqueues is in its stream.
    Ready,
    /// NCCL is still at it.
    InProgress,
}

/// An error of NCCL: the function, its answer, and NCCL's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {description} ({code}){}{last}", if last.is_empty() { "" } else { ": " })]
pub struct NcclError {
    /// The function of NCCL.
    pub call: &'static str,
    /// The `ncclResult_t`.
    pub code: i32,
    /// NCCL's sentence about it.
    pub description: String,
    /// What NCCL last wrote of an error, if it did.
    pub last: String,
}

/// Finds NCCL. The first call decides for the life of the process; the library is never unloaded.
pub fn load() -> Result<(), NcclLoadError> {
    load::library().map(|_| ())
}

/// The version of the library that was found, as `ncclGetVersion` has it: 23007 is 2.30.7.
pub fn version() -> Result<u32, NcclLoadError> {
    load::library().map(|library| library.code)
}

/// The name or the path by which the library was found.
pub fn file() -> Result<&'static str, NcclLoadError> {
    load::library().map(|library| library.name.as_str())
}

/// Either of two ends: there is no NCCL, or it says no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UniqueIdError {
    /// There is no NCCL.
    #[error(transparent)]
    Load(#[from] NcclLoadError),
    /// It says no.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}

/// A new id, for one communicator. The process that made it has to stay until all ranks are there.
pub fn unique_id() -> Result<UniqueId, UniqueIdError> {
    let functions = &load::library()?.functions;
    let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
    // SAFETY: `id` is writable, a local of the size that NCCL wants.
    let status = unsafe { (functions.get_unique_id)(&mut id) };
    functions.done("ncclGetUniqueId", status, std::ptr::null_mut())?;
    Ok(id)
}

impl Functions {
    fn state(&self, call: &'static str, status: c_int, comm: RawComm) -> Result<State, NcclError> {
        match status {
            SUCCESS => Ok(State::Ready),
            IN_PROGRESS => Ok(State::InProgress),
            code => Err(self.error(call, code, comm)),
        }
    }

    /// The same for a call that answers nothing but success.
    fn done(&self, call: &'static str, status: c_int, comm: RawComm) -> Result<(), NcclError> {
        if status == SUCCESS { Ok(()) } else { Err(self.error(call, status, comm)) }
    }

    fn error(&self, call: &'static str, code: c_int, comm: RawComm) -> NcclError {
        // SAFETY: takes any number, and returns a text of the library's or null.
        let description = unsafe { words((self.get_error_string)(code)) };
        // SAFETY: NCCL looks at no communicator here, since it has one text for all; null is allowed.
        let last = unsafe { words((self.get_last_error)(comm)) };
        NcclError { call, code, description, last }
    }
}

/// # Safety
/// `text` is null or a string that ends with a nul, and nobody writes it meanwhile.
unsafe fn words(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the rest is the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// A rank's communicator. Dropped, it is [aborted](Communicator::abort), which is right only for one that
/// failed: [`Communicator::finalize`] and [`Communicator::destroy`] are the way out of the others.
///
/// Not usable from two threads at once: NCCL does not lock it.
#[derive(Debug)]
pub struct Communicator {
    raw: RawComm,
    functions: &'static Functions,
}

// SAFETY: NCCL binds a communicator to no thread; it asks only that its use be serialised, and it is not
// `Sync`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Begins to make rank `rank` of `size`, on the device of the calling thread's context. It can be used
    /// once [`Communicator::state`] is [`State::Ready`], which takes all ranks.
    ///
    /// An error may leave a communicator behind that NCCL wants to be aborted; that is done here.
    pub fn init(id: &UniqueId, rank: u32, size: u32) -> Result<Self, UniqueIdError> {
        const CALL: &str = "ncclCommInitRankConfig";
        let functions = &load::library()?.functions;
        let number = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        let mut raw: RawComm = std::ptr::null_mut();
        let mut config = Config::nonblocking();
        // SAFETY: `raw` and `config` are writable, locals; `config` is of the size that it says and NCCL
        // reads no further.
        let status = unsafe {
            (functions.comm_init_rank_config)(&mut raw, number(size), *id, number(rank), &mut config)
        };
        let begun = functions.state(CALL, status, raw);
        if raw.is_null() {
            begun?;
            // It must have made one.
            return Err(functions.error(CALL, status, raw).into());
        }
        let communicator = Communicator { raw, functions };
        // On an error it is dropped, and so aborted.
        begun?;
        Ok(communicator)
    }

    /// How far its last call is, or what has gone wrong since: also in work that is in a stream already, as
    /// far as NCCL sees it. Waits for nothing, makes no call of the driver, and so ends no recording.
    pub fn state(&self) -> Result<State, NcclError> {
        const CALL: &str = "ncclCommGetAsyncError";
        let mut status: c_int = SUCCESS;
        // SAFETY: `raw` is live, owned by `self`; `status` is writable, a local.
        let answer = unsafe { (self.functions.comm_get_async_error)(self.raw, &mut status) };
        self.functions.done(CALL, answer, self.raw)?;
        self.functions.state(CALL, status, self.raw)
    }

    /// Sums `count` elements at `from` over all ranks into `to`, which may be the same.
    ///
    /// # Safety `stream` is live and of the communicator's device, and so is the memory of `count` elements
    /// at both addresses until the stream has passed this; the last call is ready.
    pub unsafe fn all_reduce(
        &self,
        from: CUdeviceptr,
        to: CUdeviceptr,
        count: usize,
        data_type: DataType,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        let (from, to) = (pointer(from), pointer(to));
        // SAFETY: `raw` is live, owned by `self`; addresses and stream are the caller's promise.
        let status = unsafe {
            (self.functions.all_reduce)(from, to, count, data_type as c_int, SUM, self.raw, stream)
        };
        self.functions.state("ncclAllReduce", status, self.raw)
    }

    /// Lays the ranks' `count` elements at `from` one after another at `to`.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`], with `count` elements for each rank at `to`.
    pub unsafe fn all_gather(
        &self,
        from: CUdeviceptr,
        to: CUdeviceptr,
        count: usize,
        data_type: DataType,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        let (from, to) = (pointer(from), pointer(to));
        // SAFETY: as in `all_reduce`.
        let status =
            unsafe { (self.functions.all_gather)(from, to, count, data_type as c_int, self.raw, stream) };
        self.functions.state("ncclAllGather", status, self.raw)
    }

    /// Sums what the ranks have at `from`, and gives each rank its `count` elements of the sum at `to`.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`], with `count` elements for each rank at `from`.
    pub unsafe fn reduce_scatter(
        &self,
        from: CUdeviceptr,
        to: CUdeviceptr,
        count: usize,
        data_type: DataType,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        let (from, to) = (pointer(from), pointer(to));
        // SAFETY: as in `all_reduce`.
        let status = unsafe {
            (self.functions.reduce_scatter)(from, to, count, data_type as c_int, SUM, self.raw, stream)
        };
        self.functions.state("ncclReduceScatter", status, self.raw)
    }

    /// Makes `count` elements at `at` what they are at rank `root`.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn broadcast(
        &self,
        at: CUdeviceptr,
        count: usize,
        data_type: DataType,
        root: u32,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        let (at, root) = (pointer(at), root as c_int);
        // SAFETY: as in `all_reduce`.
        let status =
            unsafe { (self.functions.broadcast)(at, at, count, data_type as c_int, root, self.raw, stream) };
        self.functions.state("ncclBroadcast", status, self.raw)
    }

    /// Sends `count` elements at `from` to another rank. In the stream it ends when that rank receives.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn send(
        &self,
        from: CUdeviceptr,
        count: usize,
        data_type: DataType,
        to: u32,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        // SAFETY: as in `all_reduce`.
        let status = unsafe {
            (self.functions.send)(pointer(from), count, data_type as c_int, to as c_int, self.raw, stream)
        };
        self.functions.state("ncclSend", status, self.raw)
    }

    /// Takes `count` elements that another rank sends.
    ///
    /// # Safety
    /// As [`Communicator::all_reduce`].
    pub unsafe fn recv(
        &self,
        to: CUdeviceptr,
        count: usize,
        data_type: DataType,
        from: u32,
        stream: CUstream,
    ) -> Result<State, NcclError> {
        // SAFETY: as in `all_reduce`.
        let status = unsafe {
            (self.functions.recv)(pointer(to), count, data_type as c_int, from as c_int, self.raw, stream)
        };
        self.functions.state("ncclRecv", status, self.raw)
    }

    /// Makes the calls of `calls` one: none of them waits for another of them.
    pub fn grouped(&self, calls: impl FnOnce(&Self) -> Result<(), NcclError>) -> Result<State, NcclError> {
        // SAFETY: of no parameters.
        let started = unsafe { (self.functions.group_start)() };
        self.functions.done("ncclGroupStart", started, self.raw)?;
        /// Ends the group also where `calls` panics: what this thread calls later would be part of it.
        struct End(&'static Functions);
        impl Drop for End {
            fn drop(&mut self) {
                // The panic is what is told.
                // SAFETY: of no parameters, and a group was started.
                let _ = unsafe { (self.0.group_end)() };
            }
        }
        let end = End(self.functions);
        let called = calls(self);
        std::mem::forget(end);
        // SAFETY: of no parameters, and a group was started.
        let status = unsafe { (self.functions.group_end)() };
        // What failed first is told.
        called?;
        self.functions.state("ncclGroupEnd", status, self.raw)
    }

    /// Begins to end it: lets what is enqueued end. When [`Communicator::state`] is ready again it can be
    /// destroyed.
    pub fn finalize(&self) -> Result<State, NcclError> {
        // SAFETY: `raw` is live, owned by `self`.
        let status = unsafe { (self.functions.comm_finalize)(self.raw) };
        self.functions.state("ncclCommFinalize", status, self.raw)
    }

    /// Frees it, after [`Communicator::finalize`]. May wait until the other ranks of this machine do the
    /// same, and until the graphs are gone in which its calls were recorded.
    pub fn destroy(self) -> Result<State, NcclError> {
        let (raw, functions) = (self.raw, self.functions);
        std::mem::forget(self);
        // SAFETY: `raw` is live, and used no more: `self` has ended.
        let status = unsafe { (functions.comm_destroy)(raw) };
        functions.state("ncclCommDestroy", status, std::ptr::null_mut())
    }

    /// Ends what runs, with results that mean nothing, and frees it. It waits for no other rank, but those
    /// of other ranks go on until they are aborted too.
    pub fn abort(self) -> Result<State, NcclError> {
        let (raw, functions) = (self.raw, self.functions);
        std::mem::forget(self);
        // SAFETY: `raw` is live, and used no more: `self` has ended.
        let status = unsafe { (functions.comm_abort)(raw) };
        functions.state("ncclCommAbort", status, std::ptr::null_mut())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Nobody is there to be told.
        // SAFETY: `raw` is live, and used no more.
        let _ = unsafe { (self.functions.comm_abort)(self.raw) };
    }
}

fn pointer(address: CUdeviceptr) -> *mut c_void {
    address as usize as *mut c_void
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_has_the_layout_of_c() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(
            [
                std::mem::offset_of!(Config, magic),
                std::mem::offset_of!(Config, version),
                std::mem::offset_of!(Config, blocking),
                std::mem::offset_of!(Config, max_ctas),
                std::mem::offset_of!(Config, net_name),
                std::mem::offset_of!(Config, split_share),
            ],
            [8, 12, 16, 28, 32, 40]
        );
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
