//! The card's memory.

use std::sync::{Arc, Mutex, PoisonError};

use super::recording::NoRecording;
use super::{Context, primary};
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
        primary::allocate(bytes)
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(Released::Kept) };
        self.0.enter()?;
        primary::synchronize()?;
        let mut outcome = Ok(());
        for &(address, _) in blocks {
            // SAFETY: from `allocate`, given back once — the caller; the device has just finished all its work.
            let freed = unsafe { primary::free(address) };
            // The others go back all the same.
            outcome = outcome.and(freed);
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
        // In the context that `allocate` entered. It is for the text of another error, which does without where the
        // driver does not say.
        let (free, total) = primary::memory_info().unwrap_or((0, 0));
        (free, total, self.0.profile.name.clone())
    }
}
