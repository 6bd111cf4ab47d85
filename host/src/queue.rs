//! Queues: what a stream is, without the device that it belongs to.

use std::sync::Arc;

use crate::cuda;
use crate::error::Error;
use crate::profile::Place;
use crate::simulator::Simulator;

/// The stream itself, without the device that it belongs to.
#[derive(Clone, Debug)]
pub(crate) enum Queue {
    Cpu,
    Cuda(Arc<cuda::Stream>),
    /// The simulator, and the card that it plays.
    Simulated(Arc<dyn Simulator>, Place),
}

impl PartialEq for Queue {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Queue::Cpu, Queue::Cpu) => true,
            (Queue::Cuda(a), Queue::Cuda(b)) => Arc::ptr_eq(a, b),
            (Queue::Simulated(_, a), Queue::Simulated(_, b)) => a == b,
            _ => false,
        }
    }
}

impl Queue {
    /// Whose queue it is.
    pub(crate) fn place(&self) -> Place {
        match self {
            Queue::Cpu => Place::Cpu,
            Queue::Cuda(stream) => stream.place(),
            Queue::Simulated(_, place) => *place,
        }
    }

    /// A number that tells queues apart.
    pub(crate) fn number(&self) -> u64 {
        match self {
            Queue::Cpu => 0,
            Queue::Cuda(stream) => stream.handle() as u64,
            Queue::Simulated(_, Place::Simulated(number)) => u64::from(*number),
            Queue::Simulated(..) => 0,
        }
    }

    /// Makes later work of this queue wait for the work that `other` has now.
    pub(crate) fn wait_for(&self, other: &Queue) -> Result<(), Error> {
        match (self, other) {
            (Queue::Cuda(a), Queue::Cuda(b)) if !Arc::ptr_eq(a, b) => a.wait_for(b),
            _ => Ok(()),
        }
    }

    /// Whether all work so far is done, as far as can be told without waiting.
    pub(crate) fn is_done(&self) -> Result<bool, Error> {
        match self {
            Queue::Cuda(stream) => stream.is_done(),
            Queue::Cpu | Queue::Simulated(..) => Ok(true),
        }
    }

    /// The same, and none where it cannot be told.
    #[cfg(feature = "cuda")]
    pub(crate) fn progress(&self) -> Result<Option<bool>, Error> {
        match self {
            Queue::Cuda(stream) => stream.progress(),
            Queue::Cpu | Queue::Simulated(..) => Ok(Some(true)),
        }
    }

    /// Whether what is enqueued is being recorded.
    pub(crate) fn is_recorded(&self) -> Result<bool, Error> {
        match self {
            Queue::Cuda(stream) => stream.is_recorded(),
            Queue::Cpu | Queue::Simulated(..) => Ok(false),
        }
    }

    /// Whether the caller may wait for it, which would end a recording.
    pub(crate) fn can_be_waited_for(&self) -> Result<bool, Error> {
        match self {
            Queue::Cuda(stream) => stream.can_be_waited_for(),
            Queue::Cpu | Queue::Simulated(..) => Ok(true),
        }
    }

    /// The same as [`Queue::wait_for`] for memory that both use, where the caller has not asked for a wait: by one for
    /// a queue that is recorded this one's work would be recorded as well.
    pub(crate) fn follow(&self, other: &Queue) -> Result<(), Error> {
        if self != other && other.is_recorded()? && !self.is_recorded()? {
            let expected = "one that does not use what is being recorded in another";
            return Err(Error::invalid("Stream::capture", "stream", expected, "memory of the recorded work"));
        }
        self.wait_for(other)
    }

    /// Copies host bytes to `address`, in order; the bytes may be dropped or changed at once.
    pub(crate) fn upload(&self, address: u64, data: &[u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        match self {
            Queue::Cpu => {
                // SAFETY: a contiguous view of `data.len()` bytes there, nobody else's, checked in
                // TensorViewMut::upload.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.upload(address, data),
            Queue::Simulated(simulator, _) => {
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
        match self {
            Queue::Cpu => {
                // SAFETY: a contiguous view of `data.len()` bytes there, checked in TensorView::read_into.
                unsafe { std::ptr::copy_nonoverlapping(address as *const u8, data.as_mut_ptr(), data.len()) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.download(address, data),
            Queue::Simulated(simulator, _) => {
                simulator.read(address, data);
                Ok(())
            }
        }
    }

    /// Copies `bytes` bytes at `from` to `to`, both memory of this queue's device, in order.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        match self {
            _ if bytes == 0 => Ok(()),
            Queue::Cpu => {
                // SAFETY: contiguous views of `bytes` bytes, checked in Stream::copy; those made by from_raw may
                // overlap.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.copy(from, to, bytes),
            Queue::Simulated(simulator, _) => {
                simulator.copy(from, to, bytes);
                Ok(())
            }
        }
    }

    /// Sets bytes to zero, in order.
    pub(crate) fn fill_zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        match self {
            Queue::Cpu => {
                // SAFETY: a contiguous view of `bytes` bytes there, nobody else's, checked in TensorViewMut::fill_zero.
                unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
                Ok(())
            }
            Queue::Cuda(stream) => stream.fill_zero(address, bytes),
            Queue::Simulated(simulator, _) => {
                simulator.fill_zero(address, bytes);
                Ok(())
            }
        }
    }
}
