//! What the splits of decode leave for the merge.

use std::sync::{Mutex, MutexGuard};

use abi::DType;

use crate::device::Device;
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::Tensor;

/// Device memory of a plan, which its runs use one after the other, also from several streams.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Unfinished results, `[sequence, head, query, split, head_dim]`.
    pub(super) partial: Tensor,
    /// Maximum and sum of the weights, `[sequence, head, query, split, 2]`.
    pub(super) stats: Tensor,
    /// The stream that the tensors belong to.
    owner: Stream,
    /// The stream of the last run.
    last: Mutex<Option<Stream>>,
}

impl Workspace {
    /// Room for this many sequences, heads, queries and splits.
    pub(super) fn new(device: &Device, sizes: [usize; 4], head_dim: usize) -> Result<Self, Error> {
        let owner = device.stream()?;
        let [batch, heads, seq_q, splits] = sizes;
        let partial = Tensor::empty(&owner, &[batch, heads, seq_q, splits, head_dim], DType::F32)?;
        let stats = Tensor::empty(&owner, &[batch, heads, seq_q, splits, 2], DType::F32)?;
        // The memory may have had another user. Waiting here leaves the first run nothing to wait for, so it can be the
        // one that is recorded.
        owner.synchronize()?;
        Ok(Workspace { partial, stats, owner, last: Mutex::new(None) })
    }

    /// Makes `stream` wait for the last run if that was in another stream. Nobody else enqueues a run until the guard is
    /// dropped.
    pub(super) fn enter(&self, stream: &Stream) -> Result<MutexGuard<'_, Option<Stream>>, Error> {
        // The stream is replaced as a whole: a panic elsewhere leaves it consistent.
        let mut last = self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(last) = &*last {
            stream.wait_for(last)?;
        }
        *last = Some(stream.clone());
        Ok(last)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let last = self.last.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(last) = last {
            // The memory goes back in the owner's order. Where the device does not answer any more there is no work to
            // wait for.
            let _ = self.owner.wait_for(last);
        }
    }
}
