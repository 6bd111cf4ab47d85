//! Streams, events and recorded graphs.

use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, RwLockReadGuard};

use cuda_loader::driver::sys::{CUevent, CUstream};
use cuda_loader::driver::{self, LaunchAttributes, Overlap};

use super::memory::DeviceMemory;
use super::module::EntryHandle;
use super::recording::NoRecording;
use super::{Context, failed, recording};
use crate::error::{DriverError, Error};
use crate::param::LaunchShape;
use crate::profile::Place;
#[cfg(feature = "async")]
use crate::signal::Signal;

/// A CUDA stream, and the event by which other streams wait for it.
#[derive(Debug)]
pub(crate) struct Stream {
    stream: CUstream,
    owner: Owner,
    event: CUevent,
    context: Arc<Context>,
    /// While a graph is recorded by [`Stream::capture`]: what it needs as long as it is there.
    held: Mutex<Option<Held>>,
}

/// What recorded work needs beside memory.
type Held = Vec<Arc<dyn Any + Send + Sync>>;

/// Who destroys a stream.
#[derive(Debug)]
enum Owner {
    Library,
    /// Whoever made it; by this value where there is one, which is kept as long as the stream is used here.
    Caller(#[expect(dead_code, reason = "it is there to be kept")] Option<Arc<dyn Any + Send + Sync>>),
}

// SAFETY: stream and event handles may be used from any thread whose current context is theirs — the driver's own rule;
// every method enters the context first.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises calls on one stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        context.enter()?;
        let stream = driver::stream_create().map_err(failed("cuStreamCreate"))?;
        match driver::event_create(driver::Timing::Disabled) {
            Ok(event) => Ok(Stream { stream, owner: Owner::Library, event, context, held: Mutex::default() }),
            Err(error) => {
                // The first error is told.
                // SAFETY: just made, and not used.
                let _ = unsafe { driver::stream_destroy(stream) };
                Err(failed("cuEventCreate")(error))
            }
        }
    }

    /// A stream of the caller's, and what is kept with it.
    ///
    /// # Safety
    /// The handle is live as long as the value, and of this context.
    pub(crate) unsafe fn of_caller(
        context: Arc<Context>,
        handle: *mut c_void,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, Error> {
        context.enter()?;
        let event = driver::event_create(driver::Timing::Disabled).map_err(failed("cuEventCreate"))?;
        let owner = Owner::Caller(owner);
        Ok(Stream { stream: handle.cast(), owner, event, context, held: Mutex::default() })
    }

    /// Whose stream it is. Devices of an ordinal share its primary context.
    pub(crate) fn place(&self) -> Place {
        self.context.profile.place
    }

    pub(super) fn raw(&self) -> CUstream {
        self.stream
    }

    pub(crate) fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }

    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::stream_synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }

    pub(crate) fn wait_for(&self, other: &Stream) -> Result<(), Error> {
        if self.is_recorded()? && !other.is_recorded()? {
            // What is recorded runs later than what is enqueued now, and a wait for what is not recorded would end the
            // recording.
            let exchanged = failed("cuThreadExchangeStreamCaptureMode");
            let relaxed = driver::RelaxedCapture::begin().map_err(&exchanged)?;
            let waited = other.synchronize();
            return waited.and(relaxed.end().map_err(&exchanged));
        }
        // Recording anew replaces what the event stood for; waits that are already enqueued keep their meaning.
        // SAFETY: all three are live while `self` and `other` are.
        unsafe {
            driver::event_record(other.event, other.stream).map_err(failed("cuEventRecord"))?;
            driver::stream_wait_event(self.stream, other.event).map_err(failed("cuStreamWaitEvent"))
        }
    }

    /// Whether all work so far is done; not known, and so said not to be, while anything is recorded, since the
    /// question would end a recording.
    pub(crate) fn is_done(&self) -> Result<bool, Error> {
        self.progress().map(|done| done == Some(true))
    }

    /// The same, and none where it is not known.
    pub(crate) fn progress(&self) -> Result<Option<bool>, Error> {
        let Some(_no_recording) = NoRecording::try_begin() else { return Ok(None) };
        // Also by another library, of a stream that is its own.
        if self.is_recorded()? {
            return Ok(None);
        }
        // SAFETY: live while `self` is.
        unsafe { driver::stream_query(self.stream) }.map(Some).map_err(failed("cuStreamQuery"))
    }

    /// Ends `signal` when the stream has passed this point, or never will, since its context has failed.
    #[cfg(feature = "async")]
    pub(crate) fn end_when_passed(&self, signal: Arc<Signal>) -> Result<(), Error> {
        extern "C" fn passed(_stream: CUstream, status: u32, data: *mut c_void) {
            // SAFETY: the reference that was given to the driver below, which calls once.
            let signal = unsafe { Arc::from_raw(data.cast_const().cast::<Signal>()) };
            signal.end(status);
        }
        // The driver would refuse it too, and end the recording.
        if self.is_recorded()? {
            let expected = "work of the device alone";
            return Err(Error::invalid("Stream::capture", "enqueue", expected, "Stream::finished"));
        }
        let data = Arc::into_raw(signal);
        // SAFETY: the stream is live; `passed` takes over the reference that `data` is, may run in any thread since a
        // signal is `Sync`, and calls nothing but `Signal::end`, which neither unwinds nor calls the driver itself.
        let added =
            unsafe { driver::stream_add_callback(self.stream, passed, data.cast_mut().cast::<c_void>()) };
        if added.is_err() {
            // SAFETY: the reference from above, which the driver has not taken over.
            drop(unsafe { Arc::from_raw(data) });
        }
        added.map_err(failed("cuStreamAddCallback"))
    }

    /// The error of this stream's work that a callback was told of; none for 0.
    #[cfg(feature = "async")]
    pub(crate) fn outcome(&self, status: u32) -> Result<(), Error> {
        match status {
            0 => Ok(()),
            // With the words of the driver, which the callback itself may not ask.
            code => Err(failed("cuStreamAddCallback")(cuda_loader::DriverError::from_code(code))),
        }
    }

    /// Keeps something as long as the graph that is being recorded of this stream, if there is one.
    pub(crate) fn hold(&self, what: &Arc<impl Any + Send + Sync>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = &mut *held
            && !held.iter().any(|other| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(what)))
        {
            held.push(what.clone());
        }
    }

    fn take_held(&self) -> Held {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }

    /// Whether the caller may wait for it: not while anything is recorded, also by another library in this stream.
    pub(crate) fn can_be_waited_for(&self) -> Result<bool, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(false) };
        self.is_recorded().map(|is_recorded| !is_recorded)
    }

    /// Whether what is enqueued is recorded: a stream that waits for this one would be recorded too.
    pub(crate) fn is_recorded(&self) -> Result<bool, Error> {
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::stream_is_capturing(self.stream) }.map_err(failed("cuStreamIsCapturing"))
    }

    /// Copies from and to the host cannot be recorded: the graph would have the address of memory that its launch knows
    /// nothing of.
    pub(super) fn expect_not_recorded(&self, got: &str) -> Result<(), Error> {
        if self.is_recorded()? {
            return Err(Error::invalid("Stream::capture", "enqueue", "work of the device alone", got));
        }
        Ok(())
    }

    pub(crate) fn upload(&self, address: u64, data: &[u8]) -> Result<(), Error> {
        self.expect_not_recorded("a copy from the host")?;
        // Asked first: once the copy is under way it has to be waited for, or the memory could go before it.
        let is_known =
            driver::is_known_memory(data.as_ptr().cast()).map_err(failed("cuPointerGetAttributes"))?;
        // SAFETY: the stream is live; a contiguous view has `data.len()` bytes at `address`; `data` may go when this
        // returns, since from pageable memory the driver copies before it returns, and for other memory it is waited
        // below.
        unsafe { driver::memcpy_htod_async(address, data.as_ptr().cast(), data.len(), self.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        if is_known { self.synchronize() } else { Ok(()) }
    }

    pub(crate) fn download(&self, address: u64, data: &mut [u8]) -> Result<(), Error> {
        self.expect_not_recorded("a copy to the host")?;
        // SAFETY: the stream is live; the view spans `data.len()` bytes at `address`; the copy is waited for below.
        unsafe { driver::memcpy_dtoh_async(data.as_mut_ptr().cast(), address, data.len(), self.stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; Stream::copy found both views to span `bytes` bytes on this device.
        unsafe { driver::memcpy_dtod_async(to, from, bytes, self.stream) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }

    pub(crate) fn fill_zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; a contiguous view has `bytes` bytes at `address`, checked in
        // TensorViewMut::fill_zero.
        unsafe { driver::memset_d8_async(address, 0, bytes, self.stream) }.map_err(failed("cuMemsetD8Async"))
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The kernel behind `entry` takes these parameters and is sound with their values.
    pub(crate) unsafe fn launch(
        &self,
        entry: &EntryHandle,
        shape: LaunchShape,
        params: &mut [*mut c_void],
    ) -> Result<(), LaunchFailure> {
        self.context.enter().map_err(LaunchFailure::Other)?;
        let LaunchShape { grid, block, cluster, smem_bytes, all_at_once: cooperative } = shape;
        let overlap = if entry.overlaps() { Overlap::Programmatic } else { Overlap::None };
        let launched = if cluster == 1 && overlap == Overlap::None && !cooperative {
            // SAFETY: function and stream are live, since their owners are; parameters — the caller.
            unsafe { driver::launch_kernel(entry.function, grid, block, smem_bytes, self.stream, params) }
        } else {
            let cluster = (cluster != 1).then_some([cluster, 1, 1]);
            let attributes = LaunchAttributes { cluster, overlap, cooperative };
            // SAFETY: as above; every kernel of a module that overlaps waits before it touches memory —
            // `Modules::module`, `#[kernel]`.
            unsafe {
                driver::launch_kernel_ex(
                    entry.function,
                    grid,
                    block,
                    smem_bytes,
                    self.stream,
                    &attributes,
                    params,
                )
            }
        };
        launched.map_err(|error| LaunchFailure::Launch(error.into()))
    }

    /// Records what `enqueue` enqueues instead of running it.
    pub(crate) fn capture(&self, enqueue: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        // Ended after the recording.
        let _pools = FreesLeft;
        let recording = Recording::begin(self)?;
        enqueue()?;
        // In this order: the graph is dropped before what it needs.
        let (held, graph) = recording.end()?;
        // SAFETY: the recorded work's addresses are the caller's contract, at the launch.
        let exec = unsafe { graph.instantiate() }.map_err(failed("cuGraphInstantiate"))?;
        Ok(Graph { exec: Mutex::new(exec), context: self.context.clone(), _held: held })
    }

    /// A marker in the stream with a time.
    pub(crate) fn record(&self) -> Result<Event, Error> {
        self.context.enter()?;
        let event = driver::event_create(driver::Timing::Enabled).map_err(failed("cuEventCreate"))?;
        let event = Event { event, context: self.context.clone() };
        // SAFETY: both are live.
        unsafe { driver::event_record(event.event, self.stream) }.map_err(failed("cuEventRecord"))?;
        Ok(event)
    }

    /// Enqueues a recorded graph.
    ///
    /// # Safety
    /// The memory that the recorded work uses is still allocated for it.
    pub(crate) unsafe fn launch_graph(&self, graph: &Graph) -> Result<(), Error> {
        self.context.enter()?;
        let exec = graph.exec.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: live while `graph` and `self` are; memory — the caller.
        unsafe { exec.launch(self.stream) }.map_err(failed("cuGraphLaunch"))
    }
}

/// Gives back what pools have left in the meantime, also where the recording fails or panics.
struct FreesLeft;

impl Drop for FreesLeft {
    fn drop(&mut self) {
        DeviceMemory::free_left();
    }
}

/// A recording under way, which ends also where it fails or panics: else its stream could not be used any more.
struct Recording<'a> {
    stream: &'a Stream,
    has_ended: bool,
    _recording: RwLockReadGuard<'static, ()>,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, Error> {
        let recording = recording::begin();
        stream.context.enter()?;
        // SAFETY: live while `stream` is.
        unsafe { driver::stream_begin_capture(stream.stream) }.map_err(failed("cuStreamBeginCapture"))?;
        *stream.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(Held::new());
        Ok(Recording { stream, has_ended: false, _recording: recording })
    }

    fn end(mut self) -> Result<(Held, driver::Graph), Error> {
        self.stream.context.enter()?;
        self.has_ended = true;
        // SAFETY: live while the stream is.
        let graph = unsafe { driver::stream_end_capture(self.stream.stream) };
        let graph = graph.map_err(failed("cuStreamEndCapture"))?;
        Ok((self.stream.take_held(), graph))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // What made the recording end early is told.
        if !self.has_ended && self.stream.context.enter().is_ok() {
            // SAFETY: live while the stream is.
            let _ = unsafe { driver::stream_end_capture(self.stream.stream) };
        }
        // Nothing of a recording that failed is there any more.
        drop(self.stream.take_held());
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Work that is still enqueued runs on: the driver destroys the stream after it. Nobody is there to be told of a
        // failure; an error of the work itself stays with the context, and whoever uses that next is told.
        if self.context.enter().is_ok() {
            // SAFETY: made in `new` or `of_caller`, and ends here.
            let _ = unsafe { driver::event_destroy(self.event) };
            if matches!(self.owner, Owner::Library) {
                // SAFETY: made in `new`, and ends here.
                let _ = unsafe { driver::stream_destroy(self.stream) };
            }
        }
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub(crate) struct Event {
    event: CUevent,
    context: Arc<Context>,
}

// SAFETY: as for Stream.
unsafe impl Send for Event {}
// SAFETY: as for Stream.
unsafe impl Sync for Event {}

impl Event {
    /// Whether it is reached; not known, and so said not to be, while anything is recorded: the driver counts the
    /// question among the calls that may not be made then.
    pub(crate) fn query(&self) -> Result<bool, Error> {
        let Some(_no_recording) = NoRecording::try_begin() else { return Ok(false) };
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::event_query(self.event) }.map_err(failed("cuEventQuery"))
    }

    /// Milliseconds from `earlier` to this one, after waiting for this one.
    pub(crate) fn elapsed_ms(&self, earlier: &Event) -> Result<f32, Error> {
        self.context.enter()?;
        // SAFETY: both are live.
        unsafe {
            driver::event_synchronize(self.event).map_err(failed("cuEventSynchronize"))?;
            driver::event_elapsed_ms(earlier.event, self.event).map_err(failed("cuEventElapsedTime"))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // As for Stream.
        if self.context.enter().is_ok() {
            // SAFETY: made in `record`, and ends here.
            let _ = unsafe { driver::event_destroy(self.event) };
        }
    }
}

/// Recorded work, ready to be launched again and again.
#[derive(Debug)]
pub(crate) struct Graph {
    exec: Mutex<driver::GraphExec>,
    context: Arc<Context>,
    /// Goes after the graph.
    _held: Held,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The executable graph is destroyed with the field, in this context. Where that cannot be entered it is
        // destroyed with it.
        let _ = self.context.enter();
    }
}

/// Why a launch did not happen.
pub(crate) enum LaunchFailure {
    Launch(DriverError),
    Other(Error),
}
