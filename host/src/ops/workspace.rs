//! Device memory that a plan holds for its runs.

use std::sync::{Mutex, MutexGuard};

use crate::device::Device;
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::Tensor;

/// Device memory of a plan, which its runs use one after the other, also from several streams.
#[derive(Debug)]
pub(crate) struct Workspace<const N: usize> {
    /// Its tensors, with undefined contents at first.
    pub(crate) tensors: [Tensor; N],
    /// The stream of the last run.
    last: Mutex<Option<Stream>>,
}

impl<const N: usize> Workspace<N> {
    /// Tensors that `make` makes in the given stream.
    pub(crate) fn new(
        device: &Device,
        make: impl FnOnce(&Stream) -> Result<[Tensor; N], Error>,
    ) -> Result<Self, Error> {
        let stream = device.stream()?;
        let tensors = make(&stream)?;
        // The memory may have had another user. Waiting here leaves the first run nothing to wait for, so it can be the
        // one that is recorded.
        stream.synchronize()?;
        Ok(Workspace { tensors, last: Mutex::new(None) })
    }

    /// Makes `stream` wait for the last run if that was in another stream. Nobody else enqueues a run until the guard
    /// is dropped. **Errors**: [`Error::Invalid`] if that other stream is being recorded, and this one not.
    pub(crate) fn enter(&self, stream: &Stream) -> Result<MutexGuard<'_, Option<Stream>>, Error> {
        // The stream is replaced as a whole: a panic elsewhere leaves it consistent.
        let mut last = self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(last) = &*last {
            stream.queue().follow(last.queue())?;
        }
        *last = Some(stream.clone());
        Ok(last)
    }
}

impl<const N: usize> Drop for Workspace<N> {
    fn drop(&mut self) {
        let last = self.last.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(last) = last {
            for tensor in &mut self.tensors {
                tensor.give_to(last);
            }
        }
    }
}
