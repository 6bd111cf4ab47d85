//! Streams: queues of work on a device.

use std::ffi::c_void;
use std::sync::Arc;

use crate::device::{Device, cuda};
use crate::error::Error;
use crate::simulator::Simulator;
use crate::tensor::{TensorView, TensorViewMut};

/// A queue of work on a device, which runs in order. Cheap to clone; clones are the same stream.
///
/// On the CPU and on simulated cards work is done at once, so a stream has nothing to wait for.
#[derive(Clone, Debug)]
pub struct Stream {
    device: Device,
    queue: Queue,
}

/// The stream itself, without the device that it belongs to.
#[derive(Clone, Debug)]
pub(crate) enum Queue {
    Cpu,
    Cuda(Arc<cuda::Stream>),
    Simulated(Arc<dyn Simulator>),
}

impl PartialEq for Queue {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Queue::Cpu, Queue::Cpu) => true,
            (Queue::Cuda(a), Queue::Cuda(b)) => Arc::ptr_eq(a, b),
            (Queue::Simulated(a), Queue::Simulated(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl Queue {
    /// Makes later work of this queue wait for the work that `other` has now.
    pub(crate) fn wait_for(&self, other: &Queue) -> Result<(), Error> {
        match (self, other) {
            (Queue::Cuda(a), Queue::Cuda(b)) if !Arc::ptr_eq(a, b) => a.wait_for(b),
            _ => Ok(()),
        }
    }

    /// Whether what is enqueued is being recorded.
    pub(crate) fn is_recorded(&self) -> Result<bool, Error> {
        match self {
            Queue::Cuda(stream) => stream.is_recorded(),
            Queue::Cpu | Queue::Simulated(_) => Ok(false),
        }
    }

    /// The same as [`Queue::wait_for`] for memory that both use, where the caller has not asked for a wait: by one for a queue that is
    /// recorded this one's work would be recorded as well.
    pub(crate) fn follow(&self, other: &Queue) -> Result<(), Error> {
        if self != other && other.is_recorded()? && !self.is_recorded()? {
            let expected = "one that does not use what is being recorded in another";
            return Err(Error::invalid("Stream::capture", "stream", expected, "memory of the recorded work"));
        }
        self.wait_for(other)
    }
}

impl Stream {
    pub(crate) fn new(device: Device, queue: Queue) -> Self {
        Stream { device, queue }
    }

    /// The device whose work this is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The `CUstream`, for other libraries, valid as long as the stream; none where it is no CUDA stream.
    pub fn as_raw(&self) -> Option<*mut c_void> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(_) => None,
            Queue::Cuda(stream) => Some(stream.handle()),
        }
    }

    /// Waits until all work so far is done, and reports errors of that work.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(_) => Ok(()),
            Queue::Cuda(stream) => stream.synchronize(),
        }
    }

    /// Makes later work of this stream wait for the work that `other` has now, without blocking the caller. If that is being recorded, this
    /// stream's is from here on too, until `other` has waited for it. If this one is being recorded, and `other` is not, the caller waits
    /// until that work is done.
    pub fn wait_for(&self, other: &Stream) -> Result<(), Error> {
        self.queue.wait_for(&other.queue)
    }

    /// Copies host bytes to `address`, in order; the bytes may be dropped or changed at once.
    pub(crate) fn upload(&self, address: u64, data: &[u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        match &self.queue {
            Queue::Cpu => {
                // SAFETY: a contiguous view of `data.len()` bytes there, nobody else's, checked in TensorViewMut::upload.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.upload(address, data),
            Queue::Simulated(simulator) => {
                simulator.write(address, data);
                Ok(())
            }
        }
    }

    /// Copies bytes at `address` to the host, after all work so far.
    pub(crate) fn download(&self, address: u64, data: &mut [u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        match &self.queue {
            Queue::Cpu => {
                // SAFETY: a contiguous view of `data.len()` bytes there, checked in TensorView::read_into.
                unsafe { std::ptr::copy_nonoverlapping(address as *const u8, data.as_mut_ptr(), data.len()) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.download(address, data),
            Queue::Simulated(simulator) => {
                simulator.read(address, data);
                Ok(())
            }
        }
    }

    /// Copies a contiguous tensor to another of the same size and type by the driver's own copy; strides and casts are
    /// the operator [`crate::ops::copy`]'s.
    ///
    /// **Errors**: [`Error::Invalid`] for a shape, type or place that differs, and gaps between elements;
    /// [`Error::Driver`].
    pub fn copy(&self, from: TensorView<'_>, to: TensorViewMut<'_>) -> Result<(), Error> {
        const OP: &str = "Stream::copy";
        from.expect_same(OP, "from", &self.device, from.dtype(), from.shape())?;
        to.expect_same(OP, "to", &self.device, from.dtype(), from.shape())?;
        for (argument, contiguous) in [("from", from.is_contiguous()), ("to", to.is_contiguous())] {
            if !contiguous {
                return Err(Error::invalid(OP, argument, "a contiguous view", "gaps between the elements"));
            }
        }
        let bytes = from.len() * from.dtype().bytes();
        match &self.queue {
            _ if bytes == 0 => Ok(()),
            Queue::Cpu => {
                // SAFETY: both views are contiguous and of `bytes` bytes; views made by from_raw may overlap.
                unsafe { std::ptr::copy(from.address() as *const u8, to.address() as *mut u8, bytes) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.copy(from.address(), to.address(), bytes),
            Queue::Simulated(simulator) => {
                simulator.copy(from.address(), to.address(), bytes);
                Ok(())
            }
        }
    }

    /// Sets bytes to zero, in order.
    pub(crate) fn fill_zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        match &self.queue {
            Queue::Cpu => {
                // SAFETY: Tensor allocated `bytes` bytes there and holds them alone.
                unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.fill_zero(address, bytes),
            Queue::Simulated(simulator) => {
                simulator.fill_zero(address, bytes);
                Ok(())
            }
        }
    }
}

impl Stream {
    /// A marker of this point of the stream.
    pub fn record(&self) -> Result<Event, Error> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(_) => Ok(Event(EventKind::Host(std::time::Instant::now()))),
            Queue::Cuda(stream) => Ok(Event(EventKind::Cuda(stream.record()?))),
        }
    }

    /// Records the work that `enqueue` puts into this stream, instead of running it, to be launched as a whole.
    ///
    /// The operators' `run` can be recorded; allocations cannot, nor can copies from and to the host, which are errors there. CUDA only.
    pub fn capture(&self, enqueue: impl FnOnce(&Stream) -> Result<(), Error>) -> Result<Graph, Error> {
        let Queue::Cuda(stream) = &self.queue else {
            let (device, reason) = (self.device.describe(), "only CUDA streams can be recorded".into());
            return Err(Error::Unsupported { op: "Stream::capture", device, reason });
        };
        let graph = stream.capture(|| enqueue(self))?;
        Ok(Graph { graph, _device: self.device.clone() })
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub struct Event(EventKind);

#[derive(Debug)]
enum EventKind {
    /// Where work is done at once: the host's clock.
    Host(std::time::Instant),
    Cuda(cuda::Event),
}

impl Event {
    /// Milliseconds that the device took from `earlier` to this point; waits until it is reached.
    pub fn elapsed_ms(&self, earlier: &Event) -> Result<f32, Error> {
        match (&self.0, &earlier.0) {
            (EventKind::Host(end), EventKind::Host(start)) => {
                Ok(end.duration_since(*start).as_secs_f32() * 1e3)
            }
            (EventKind::Cuda(end), EventKind::Cuda(start)) => end.elapsed_ms(start),
            _ => Err(Error::invalid(
                "Event::elapsed_ms",
                "earlier",
                "an event of the same device",
                "another's",
            )),
        }
    }
}

/// Recorded work of a CUDA stream.
#[derive(Debug)]
pub struct Graph {
    graph: cuda::Graph,
    /// Whose kernels it launches.
    _device: Device,
}

impl Graph {
    /// Enqueues the recorded work in `stream`.
    ///
    /// # Safety
    /// - The tensors that the work was recorded with are still there, and so are the plans, some of which hold memory for their runs: it
    ///   reads and writes them by address.
    /// - Nothing else uses them meanwhile: what the stream waits for is done before, and who uses them in another stream waits for this one.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        match &stream.queue {
            // SAFETY: the caller's promise.
            Queue::Cuda(queue) => unsafe { queue.launch_graph(&self.graph) },
            Queue::Cpu | Queue::Simulated(_) => {
                let got = stream.device.describe();
                Err(Error::invalid("Graph::launch", "stream", "a CUDA stream", got))
            }
        }
    }
}
