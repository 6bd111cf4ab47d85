//! Streams and events.

use std::ffi::{c_uint, c_void};

use super::sys::{CUevent, CUstream};

use super::ffi;
use crate::error::{DriverError, NOT_READY, SUCCESS, check};

const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

/// Makes a stream of the current context that does not wait for the legacy default stream.
pub fn stream_create() -> Result<CUstream, DriverError> {
    let mut stream: CUstream = std::ptr::null_mut();
    // SAFETY: `stream` is writable — a local.
    check(unsafe { ffi::cuStreamCreate(&mut stream, NON_BLOCKING) })?;
    Ok(stream)
}

/// Destroys a stream; what is queued on it still completes.
///
/// # Safety
/// `stream` is live, not null, and not used afterwards.
pub unsafe fn stream_destroy(stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: `stream` is live and used no more — the caller.
    check(unsafe { ffi::cuStreamDestroy_v2(stream) })
}

/// Waits until everything queued on the stream is done.
///
/// # Safety
/// `stream` is live.
pub unsafe fn stream_synchronize(stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: `stream` is live — the caller.
    check(unsafe { ffi::cuStreamSynchronize(stream) })
}

/// Whether everything queued on the stream is done.
///
/// # Safety
/// `stream` is live.
pub unsafe fn stream_query(stream: CUstream) -> Result<bool, DriverError> {
    // SAFETY: `stream` is live — the caller.
    is_done(unsafe { ffi::cuStreamQuery(stream) })
}

/// Lets what is queued on the stream from here on wait for the event's last record; the event stays usable.
///
/// # Safety
/// `stream` and `event` are live.
pub unsafe fn stream_wait_event(stream: CUstream, event: CUevent) -> Result<(), DriverError> {
    // SAFETY: both are live — the caller.
    check(unsafe { ffi::cuStreamWaitEvent(stream, event, 0) })
}

/// What [`stream_add_callback`] calls: the stream, what became of it as a `CUresult`, and the caller's data.
pub type StreamCallback = unsafe extern "C" fn(CUstream, u32, *mut c_void);

/// Calls `callback` once, in a thread of the driver's, when the stream has passed this point, and also when it never
/// will, since its context has failed: the second argument says which. Later work of the stream waits for the callback.
///
/// `cuLaunchHostFunc` is newer, and never calls where the context has failed (seen with driver 580: an illegal address
/// before it in the stream). A stream that is recorded refuses a callback, and its recording ends with an error.
///
/// # Safety
/// `stream` is live. The callback may be called with `data`, once, by any thread and at any time from here on; it calls
/// no function of the driver, and does not unwind. After an error it is not called.
pub unsafe fn stream_add_callback(
    stream: CUstream,
    callback: StreamCallback,
    data: *mut c_void,
) -> Result<(), DriverError> {
    // SAFETY: this function's contract is the driver's; zero is the only flag value that the driver takes.
    check(unsafe { ffi::cuStreamAddCallback(stream, callback, data, 0) })
}

/// Whether an event keeps the time of its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// It does: for [`event_elapsed_ms`].
    Enabled,
    /// It does not: cheaper to record and wait for.
    Disabled,
}

/// Makes an event of the current context.
pub fn event_create(timing: Timing) -> Result<CUevent, DriverError> {
    let flags = match timing {
        Timing::Enabled => 0,
        Timing::Disabled => DISABLE_TIMING,
    };
    let mut event: CUevent = std::ptr::null_mut();
    // SAFETY: `event` is writable — a local.
    check(unsafe { ffi::cuEventCreate(&mut event, flags) })?;
    Ok(event)
}

/// Destroys an event; who waits for it already is not disturbed.
///
/// # Safety
/// `event` is live and not used afterwards.
pub unsafe fn event_destroy(event: CUevent) -> Result<(), DriverError> {
    // SAFETY: `event` is live and used no more — the caller.
    check(unsafe { ffi::cuEventDestroy_v2(event) })
}

/// Marks this point of the stream.
///
/// # Safety
/// `event` and `stream` are live and of the same context.
pub unsafe fn event_record(event: CUevent, stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: both are live — the caller.
    check(unsafe { ffi::cuEventRecord(event, stream) })
}

/// Waits until the stream has passed the event's last record.
///
/// # Safety
/// `event` is live.
pub unsafe fn event_synchronize(event: CUevent) -> Result<(), DriverError> {
    // SAFETY: `event` is live — the caller.
    check(unsafe { ffi::cuEventSynchronize(event) })
}

/// Whether the stream has passed the event's last record; also true if it was never recorded.
///
/// # Safety
/// `event` is live.
pub unsafe fn event_query(event: CUevent) -> Result<bool, DriverError> {
    // SAFETY: `event` is live — the caller.
    is_done(unsafe { ffi::cuEventQuery(event) })
}

/// Milliseconds from one passed event to another, to about half a microsecond.
///
/// `CUDA_ERROR_NOT_READY` if one is not passed yet, `CUDA_ERROR_INVALID_HANDLE` if one was never recorded or has
/// [`Timing::Disabled`].
///
/// # Safety
/// `start` and `end` are live.
pub unsafe fn event_elapsed_ms(start: CUevent, end: CUevent) -> Result<f32, DriverError> {
    let mut milliseconds = 0.0;
    // SAFETY: both are live — the caller; `milliseconds` is writable — a local.
    check(unsafe { ffi::cuEventElapsedTime(&mut milliseconds, start, end) })?;
    Ok(milliseconds)
}

fn is_done(status: u32) -> Result<bool, DriverError> {
    match status {
        SUCCESS => Ok(true),
        NOT_READY => Ok(false),
        code => Err(DriverError::from_code(code)),
    }
}
