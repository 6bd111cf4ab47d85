//! Streams: queues of work on a device.

use std::ffi::c_void;
use std::mem::discriminant;

use crate::cuda;
use crate::device::Device;
use crate::error::Error;
use crate::profile::Place;
use crate::queue::Queue;

/// A queue of work on a device, which runs in order. Cheap to clone; clones are the same stream.
///
/// On the CPU and on simulated cards work is done at once, so a stream has nothing to wait for.
#[derive(Clone, Debug)]
pub struct Stream {
    device: Device,
    queue: Queue,
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

    /// Checks that it is a stream of the device at `place`, for which the operator `op` was planned.
    pub(crate) fn expect_place(&self, op: &'static str, place: Place) -> Result<(), Error> {
        if self.queue.place() == place { Ok(()) } else { Err(self.of_another(op, place)) }
    }

    /// The error of a stream that is not of the device at `place`.
    pub(crate) fn of_another(&self, op: &'static str, place: Place) -> Error {
        let of = |place| format!("a stream of {place}");
        Error::invalid(op, "stream", of(place), of(self.queue.place()))
    }

    /// The `CUstream`, for other libraries, valid as long as the stream; none where it is no CUDA stream.
    pub fn as_raw(&self) -> Option<*mut c_void> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(..) => None,
            Queue::Cuda(stream) => Some(stream.handle()),
        }
    }

    /// Waits until all work so far is done, and reports errors of that work.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(..) => Ok(()),
            Queue::Cuda(stream) => stream.synchronize(),
        }
    }

    /// Makes later work of this stream wait for the work that `other` has now, without blocking the caller. If that is
    /// being recorded, this stream's is from here on too, until `other` has waited for it. If this one is being
    /// recorded, and `other` is not, the caller waits until that work is done.
    ///
    /// **Errors**: [`Error::Invalid`] for a stream of another kind of device: neither the CPU nor a simulated card can
    /// wait for a CUDA card without blocking the caller ([`Stream::synchronize`]); [`Error::Driver`].
    pub fn wait_for(&self, other: &Stream) -> Result<(), Error> {
        let (own, others) = (self.queue.place(), other.queue.place());
        if discriminant(&own) != discriminant(&others) {
            let expected = format!("a stream of the same kind of device as {own}");
            return Err(Error::invalid("Stream::wait_for", "other", expected, format!("one of {others}")));
        }
        self.queue.wait_for(&other.queue)
    }

    /// A marker of this point of the stream.
    pub fn record(&self) -> Result<Event, Error> {
        match &self.queue {
            Queue::Cpu | Queue::Simulated(..) => Ok(Event(EventKind::Host(std::time::Instant::now()))),
            Queue::Cuda(stream) => Ok(Event(EventKind::Cuda(stream.record()?))),
        }
    }

    /// Records the work that `enqueue` puts into this stream, instead of running it, to be launched as a whole.
    ///
    /// The operators' `run` can be recorded; allocations cannot, nor can copies from and to the host, which are errors
    /// there. CUDA only.
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
    /// Whether this point is reached, as far as can be told without waiting: while anything is being recorded
    /// ([`Stream::capture`]) it is said not to be, since the question would end the recording.
    ///
    /// **Errors**: [`Error::Driver`], also for work before this point that failed.
    pub fn query(&self) -> Result<bool, Error> {
        match &self.0 {
            EventKind::Host(_) => Ok(true),
            EventKind::Cuda(event) => event.query(),
        }
    }

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
    /// - The tensors that the work was recorded with are still there, and so are the plans, some of which hold memory
    ///   for their runs: it reads and writes them by address.
    /// - Nothing else uses them meanwhile: what the stream waits for is done before, and who uses them in another
    ///   stream waits for this one.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        match &stream.queue {
            // SAFETY: the caller's promise.
            Queue::Cuda(queue) => unsafe { queue.launch_graph(&self.graph) },
            Queue::Cpu | Queue::Simulated(..) => {
                let got = stream.device.describe();
                Err(Error::invalid("Graph::launch", "stream", "a CUDA stream", got))
            }
        }
    }
}
