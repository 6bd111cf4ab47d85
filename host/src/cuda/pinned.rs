//! Page-locked memory of the host, which copies read and write while the host goes on.

use std::ffi::c_void;
use std::sync::Arc;

use cuda_loader::driver;
use cuda_loader::driver::sys::CUevent;

use super::recording::NoRecording;
use super::stream::Stream;
use super::{Context, failed};
use crate::error::Error;

/// Page-locked memory, and the event that says when the last copy from or to it has passed.
#[derive(Debug)]
pub(crate) struct Pinned {
    address: *mut c_void,
    bytes: usize,
    event: CUevent,
    context: Arc<Context>,
}

// SAFETY: memory and event may be used by any thread whose current context is theirs; every method enters it first.
unsafe impl Send for Pinned {}
// SAFETY: as above; through a shared reference the event is asked, and memory only read that no copy writes any more.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes, more than none. None where the host has not as much to lock, and while anything is recorded,
    /// which the driver's allocation could end.
    pub(crate) fn new(context: Arc<Context>, bytes: usize) -> Result<Option<Self>, Error> {
        let Some(_no_recording) = NoRecording::try_begin() else { return Ok(None) };
        context.enter()?;
        let event = driver::event_create(driver::Timing::Disabled).map_err(failed("cuEventCreate"))?;
        let address = match driver::mem_host_alloc(bytes) {
            Ok(address) => address,
            Err(error) => {
                // The first error is told.
                // SAFETY: just made, and not used.
                let _ = unsafe { driver::event_destroy(event) };
                return if error.code == OUT_OF_MEMORY {
                    Ok(None)
                } else {
                    Err(failed("cuMemHostAlloc")(error))
                };
            }
        };
        Ok(Some(Pinned { address, bytes, event, context }))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `data` here, and from here to `address` in the stream's order. The memory is busy until
    /// [`Pinned::has_passed`].
    pub(crate) fn upload(self, stream: &Stream, address: u64, data: &[u8]) -> Result<Self, Error> {
        let bytes = data.len().min(self.bytes);
        // SAFETY: `bytes` bytes of this memory, which no copy uses: whoever has the value by itself has asked.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.address.cast::<u8>(), bytes) };
        stream.expect_not_recorded("a copy from the host")?;
        // SAFETY: the stream is live; a contiguous view has `data.len()` bytes at `address`, checked in
        // `TensorViewMut::enqueue_write`; this memory is kept until the event, and not written before.
        unsafe { driver::memcpy_htod_async(address, self.address, bytes, stream.raw()) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        self.marked(stream)
    }

    /// Copies `bytes` bytes at `address` here in the stream's order. They are there when [`Pinned::has_passed`].
    pub(crate) fn download(self, stream: &Stream, address: u64, bytes: usize) -> Result<Self, Error> {
        let bytes = bytes.min(self.bytes);
        stream.expect_not_recorded("a copy to the host")?;
        // SAFETY: the stream is live; a contiguous view has so many bytes at `address`, checked in
        // `TensorView::enqueue_read`; this memory is kept until the event, and not touched before.
        unsafe { driver::memcpy_dtoh_async(self.address, address, bytes, stream.raw()) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.marked(stream)
    }

    /// Records the event behind a copy. Without it nothing says when the memory can be used again, unless the stream
    /// can be waited for: then the memory stays locked as long as the process.
    fn marked(self, stream: &Stream) -> Result<Self, Error> {
        // SAFETY: both are live, and of one context: `Staging` is a device's.
        match unsafe { driver::event_record(self.event, stream.raw()) } {
            Ok(()) => Ok(self),
            Err(error) => {
                if stream.synchronize().is_err() {
                    std::mem::forget(self);
                }
                Err(failed("cuEventRecord")(error))
            }
        }
    }

    /// Whether no copy is under way with the memory; not known, and so said not to be, while anything is recorded.
    pub(crate) fn has_passed(&self) -> Result<bool, Error> {
        let Some(_no_recording) = NoRecording::try_begin() else { return Ok(false) };
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::event_query(self.event) }.map_err(failed("cuEventQuery"))
    }

    /// Waits until no copy is under way with the memory.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        self.context.enter()?;
        let exchanged = failed("cuThreadExchangeStreamCaptureMode");
        // The event is of a stream that was not recorded, and has nothing to do with what this thread records.
        let relaxed = driver::RelaxedCapture::begin().map_err(&exchanged)?;
        // SAFETY: live while `self` is.
        let waited = unsafe { driver::event_synchronize(self.event) }.map_err(failed("cuEventSynchronize"));
        waited.and(relaxed.end().map_err(&exchanged))
    }

    /// Gives the memory back, with which no copy is under way: [`Pinned::has_passed`].
    pub(crate) fn close(mut self) -> Result<(), Error> {
        self.free()
    }

    fn free(&mut self) -> Result<(), Error> {
        self.context.enter()?;
        let address = std::mem::replace(&mut self.address, std::ptr::null_mut());
        let freed = match address.is_null() {
            true => Ok(()),
            // SAFETY: from `new`, given back once; no copy is under way, by the caller.
            false => unsafe { driver::mem_free_host(address) }.map_err(failed("cuMemFreeHost")),
        };
        // SAFETY: made in `new`, and ends here: a value is freed once, by `close` or by its drop.
        let destroyed = unsafe { driver::event_destroy(self.event) }.map_err(failed("cuEventDestroy"));
        freed.and(destroyed)
    }

    /// The first bytes.
    ///
    /// # Safety
    /// A copy to them has passed, and none is under way.
    pub(crate) unsafe fn read(&self, bytes: usize) -> &[u8] {
        // SAFETY: memory of `self.bytes` bytes, of which the copy has written these; no copy is under way, by the
        // caller, and none begins while the memory is borrowed, since `upload` and `download` take the value.
        unsafe { std::slice::from_raw_parts(self.address.cast::<u8>(), bytes.min(self.bytes)) }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.address.is_null() {
            return;
        }
        // Where the driver fails nobody is there to be told. Memory that a copy may still use is not given back: it
        // goes with the process.
        if self.wait().is_err() {
            self.address = std::ptr::null_mut();
        }
        let _ = self.free();
    }
}
