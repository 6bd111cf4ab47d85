//! The card's memory.

use std::sync::{Arc, Mutex, PoisonError};

use cust::context::CurrentContext;
use cust::error::CudaError;

use super::recording::NoRecording;
use super::{Context, cust_failed};
use crate::backing::{Backing, Released};
use crate::error::Error;

/// The card's memory behind the pool.
#[derive(Debug)]
pub(crate) struct DeviceMemory(pub(crate) Arc<Context>);

/// What a pool leaves that ends while a graph is recorded: its memory, and the blocks' addresses and sizes.
type Left = (DeviceMemory, Vec<(u64, usize)>);

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

impl DeviceMemory {
    /// Gives back what pools have left, unless a graph is being recorded.
    pub(super) fn free_left() {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: from `allocate`, and of pools that have ended: nobody has their addresses.
        // Where that fails the device does not answer any more, and its memory is gone with its context.
        left.retain(|(memory, blocks)| matches!(unsafe { memory.release(blocks) }, Ok(Released::Kept)));
    }
}

impl Backing for DeviceMemory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.0.enter()?;
        // SAFETY: freed in `release`; contents are the tensors' business.
        match unsafe { cust::memory::cuda_malloc::<u8>(bytes) } {
            Ok(pointer) => Ok(Some(pointer.as_raw())),
            Err(CudaError::OutOfMemory) => Ok(None),
            Err(error) => Err(cust_failed("cuMemAlloc")(error)),
        }
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(Released::Kept) };
        self.0.enter()?;
        CurrentContext::synchronize().map_err(cust_failed("cuCtxSynchronize"))?;
        let mut outcome = Ok(());
        for &(address, _) in blocks {
            // SAFETY: from `allocate`, given back once — the caller; the device has just finished all its work.
            let freed =
                unsafe { cust::memory::cuda_free(cust::memory::DevicePointer::<u8>::from_raw(address)) };
            // The others go back all the same.
            outcome = outcome.and(freed.map_err(cust_failed("cuMemFree")));
        }
        Ok(Released::Gone(outcome))
    }

    unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
        if !blocks.is_empty() {
            let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
            left.push((DeviceMemory(self.0.clone()), blocks.to_vec()));
        }
    }

    fn report(&self) -> (usize, usize, String) {
        // In the context that `allocate` entered. It is for the text of another error, which does without where the driver does not say.
        let (free, total) = cust::memory::mem_get_info().unwrap_or((0, 0));
        (free, total, self.0.profile.name.clone())
    }
}
