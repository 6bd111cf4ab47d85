//! The card's memory.

use std::sync::{Arc, Mutex, PoisonError};

use cust::context::CurrentContext;
use cust::error::CudaError;

use super::stream::NoRecording;
use super::{Context, cust_failed};
use crate::error::Error;
use crate::memory::Backing;

/// The card's memory behind the pool.
#[derive(Debug)]
pub(crate) struct DeviceMemory(pub(crate) Arc<Context>);

/// Memory of pools that ended while a graph was recorded, with its context.
static LEFT: Mutex<Vec<(Arc<Context>, u64)>> = Mutex::new(Vec::new());

impl DeviceMemory {
    /// Frees what pools have left, unless a graph is being recorded.
    pub(super) fn free_left() {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        if left.is_empty() {
            return;
        }
        let Some(_no_recording) = NoRecording::begin() else { return };
        for (context, address) in left.drain(..) {
            if context.enter().is_ok() && CurrentContext::synchronize().is_ok() {
                // SAFETY: from `allocate`; a pool that has ended gave it back; the device has just finished all its work.
                let _ =
                    unsafe { cust::memory::cuda_free(cust::memory::DevicePointer::<u8>::from_raw(address)) };
            }
        }
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

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<bool, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(false) };
        self.0.enter()?;
        CurrentContext::synchronize().map_err(cust_failed("cuCtxSynchronize"))?;
        for &(address, _) in blocks {
            // SAFETY: from `allocate`, given back once — the caller; the device has just finished all its work.
            let _ = unsafe { cust::memory::cuda_free(cust::memory::DevicePointer::<u8>::from_raw(address)) };
        }
        Ok(true)
    }

    unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.extend(blocks.iter().map(|&(address, _)| (self.0.clone(), address)));
    }

    fn report(&self) -> (usize, usize, String) {
        let entered = self.0.enter().is_ok();
        let (free, total) = if entered { cust::memory::mem_get_info().unwrap_or((0, 0)) } else { (0, 0) };
        (free, total, self.0.profile.name.clone())
    }
}
