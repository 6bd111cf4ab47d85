//! Capture of a stream into a graph, and its replay.

use std::ffi::c_int;
use std::marker::PhantomData;

use super::sys::{CUgraph, CUgraphExec, CUstream};

use super::ffi;
use crate::error::{DriverError, check};

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: calls that a capture does not allow are errors in this thread alone. What
/// another thread queues on the stream is recorded like this one's, and what waits for the whole context ends the
/// capture, wherever it is called.
const THREAD_LOCAL: c_int = 1;

/// From here on, what this thread queues on the stream is recorded and not run.
///
/// End the capture also after a failed launch; until then the stream stays in it.
///
/// # Safety
/// `stream` is live. `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` for the legacy default stream.
pub unsafe fn stream_begin_capture(stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: `stream` is live — the caller.
    check(unsafe { ffi::cuStreamBeginCapture_v2(stream, THREAD_LOCAL) })
}

/// Whether what is queued on the stream is recorded: it began a capture, or waits for a stream that did.
///
/// # Safety
/// `stream` is live.
pub unsafe fn stream_is_capturing(stream: CUstream) -> Result<bool, DriverError> {
    let mut status: c_int = 0;
    // SAFETY: `stream` is live — the caller; `status` is writable — a local.
    check(unsafe { ffi::cuStreamIsCapturing(stream, &mut status) })?;
    Ok(status != 0)
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: a thread in it may also make calls that its captures forbid.
const RELAXED: c_int = 2;

/// While it lives, a capture does not keep its thread from calls that have nothing to do with it, such as a wait for a
/// stream that is not captured.
#[derive(Debug)]
pub struct RelaxedCapture {
    before: c_int,
    /// The mode is the thread's.
    _of_thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// From here on.
    pub fn begin() -> Result<Self, DriverError> {
        Ok(RelaxedCapture { before: exchange_mode(RELAXED)?, _of_thread: PhantomData })
    }

    /// Until here; where that fails the thread stays as it is.
    pub fn end(self) -> Result<(), DriverError> {
        let before = self.before;
        std::mem::forget(self);
        exchange_mode(before).map(|_| ())
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // Only where a panic comes between, which is what is told then: `end` is the way out.
        let _ = exchange_mode(self.before);
    }
}

/// Sets the thread's mode, and returns the one before.
fn exchange_mode(mut mode: c_int) -> Result<c_int, DriverError> {
    // SAFETY: `mode` is readable and writable — a local.
    check(unsafe { ffi::cuThreadExchangeStreamCaptureMode(&mut mode) })?;
    Ok(mode)
}

/// Ends a capture on the thread that began it.
///
/// # Safety
/// `stream` is live. The graph must be dropped before the stream's context is destroyed.
pub unsafe fn stream_end_capture(stream: CUstream) -> Result<Graph, DriverError> {
    let mut raw: CUgraph = std::ptr::null_mut();
    // SAFETY: `stream` is live — the caller; `raw` is writable — a local.
    check(unsafe { ffi::cuStreamEndCapture(stream, &mut raw) })?;
    Ok(Graph { raw })
}

/// A recorded sequence of work. Not usable from two threads at once, as the driver does not lock it.
#[derive(Debug)]
pub struct Graph {
    raw: CUgraph,
}

// SAFETY: a graph is bound to no thread — the driver asks only that its use be serialised, and `Graph` is not `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    /// Makes the graph ready to launch; it may then be dropped.
    ///
    /// # Safety
    /// The result must be dropped before the context of the captured stream is destroyed, and the modules whose kernels
    /// were captured stay loaded as long.
    pub unsafe fn instantiate(&self) -> Result<GraphExec, DriverError> {
        let mut raw: CUgraphExec = std::ptr::null_mut();
        // SAFETY: `self.raw` is live — owned by `self`; `raw` is writable — a local.
        check(unsafe { ffi::cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) })?;
        Ok(GraphExec { raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Nobody is there to be told, and what the driver keeps goes with the context.
        // SAFETY: `self.raw` is live and used no more — owned by `self`, its context kept by whoever ended the capture.
        let _ = unsafe { ffi::cuGraphDestroy(self.raw) };
    }
}

/// A graph that can be launched any number of times. Not usable from two threads at once.
#[derive(Debug)]
pub struct GraphExec {
    raw: CUgraphExec,
}

// SAFETY: as for `Graph`.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Queues the whole graph on a stream.
    ///
    /// # Safety `stream` is live. Every address that the captured work uses is still valid for it, until the stream has
    /// passed it.
    pub unsafe fn launch(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: `self.raw` is live — owned by `self`; `stream` and the addresses — the caller.
        check(unsafe { ffi::cuGraphLaunch(self.raw, stream) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // As for `Graph`.
        // SAFETY: `self.raw` is live and used no more — owned by `self`, its context kept by whoever instantiated it; a
        // launch in flight completes first.
        let _ = unsafe { ffi::cuGraphExecDestroy(self.raw) };
    }
}
