//! The card's memory.

use std::sync::{Arc, Mutex, PoisonError};

use super::recording::NoRecording;
use super::reserved::Reserved;
use super::{Context, primary};
use crate::backing::{Backing, Grant, Released};
use crate::error::Error;

/// The card's memory behind the pool.
#[derive(Clone, Debug)]
pub(crate) struct DeviceMemory {
    context: Arc<Context>,
    /// Where blocks are cut from; none where the driver or the card lacks it, and memory comes as it is asked for.
    reserved: Option<Arc<Reserved>>,
}

/// What a pool leaves that ends while a graph is recorded: its memory, and the blocks' addresses and sizes.
type Left = (DeviceMemory, Vec<(u64, usize)>);

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

impl DeviceMemory {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        let reserved = Reserved::new(context.clone())?;
        Ok(DeviceMemory { context, reserved })
    }

    /// Gives memory of one call back.
    ///
    /// # Safety
    /// From `allocate` or `grow`, given back once; all of the card's work is done.
    unsafe fn free(&self, address: u64) -> Result<(), Error> {
        if let Some(reserved) = &self.reserved {
            // SAFETY: the caller's promise.
            if unsafe { reserved.release(address)? } {
                return Ok(());
            }
        }
        // SAFETY: not of `grow`, so of `allocate`; the rest is the caller's promise.
        unsafe { primary::free(address) }
    }

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
        self.context.enter()?;
        primary::allocate(bytes)
    }

    fn grow(&self, bytes: usize, tail: Option<(u64, usize)>) -> Result<Option<Grant>, Error> {
        let grown = self.reserved.as_ref().map_or(Err(None), |reserved| reserved.grow(bytes, tail));
        match grown {
            Ok(grant) => Ok(grant),
            Err(Some(error)) => Err(error),
            Err(None) => {
                let address = self.allocate(bytes)?;
                Ok(address.map(|address| Grant { address, bytes, joins: false }))
            }
        }
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(Released::Kept) };
        self.context.enter()?;
        primary::synchronize()?;
        let mut outcome = Ok(());
        for &(address, _) in blocks {
            // SAFETY: given back once — the caller; the device has just finished all its work.
            let freed = unsafe { self.free(address) };
            // The others go back all the same.
            outcome = outcome.and(freed);
        }
        Ok(Released::Gone(outcome))
    }

    unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
        if !blocks.is_empty() {
            let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
            left.push((self.clone(), blocks.to_vec()));
        }
    }

    fn report(&self) -> (usize, usize, String) {
        // In the context that `allocate` entered. It is for the text of another error, which does without where the
        // driver does not say.
        let (free, total) = primary::memory_info().unwrap_or((0, 0));
        (free, total, self.context.profile.name.clone())
    }
}
