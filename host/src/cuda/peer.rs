//! What cards of one process have in common: access to each other's memory, and words in the host's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_loader::driver;

use super::{Context, failed, find, reserved};
use crate::error::Error;
use crate::profile::Place;

impl Context {
    /// Lets kernels of this card access the memory of another one: whether they can.
    pub(crate) fn enable_peer(&self, other: &Context) -> Result<bool, Error> {
        let device = |context: &Context| match context.profile.place {
            Place::Cuda(ordinal) => find(ordinal as usize).map(|device| device.raw()),
            place => Err(Error::invalid("peer access", "device", "a CUDA card", place.to_string())),
        };
        let (own, peer) = (device(self)?, device(other)?);
        if own == peer {
            return Ok(true);
        }
        if !driver::can_access_peer(own, peer).map_err(failed("cuDeviceCanAccessPeer"))? {
            return Ok(false);
        }
        self.enter()?;
        driver::enable_peer_access(peer).map_err(failed("cuCtxEnablePeerAccess"))?;
        reserved::share(peer, own)?;
        Ok(true)
    }

    /// Lets all cards that can access this one's memory do so: NCCL lets ranks of a process copy from and to each
    /// other's tensors.
    pub(crate) fn share(&self) -> Result<(), Error> {
        let Place::Cuda(ordinal) = self.profile.place else { return Ok(()) };
        let own = find(ordinal as usize)?.raw();
        for other in 0..super::device_count()? {
            let peer = find(other)?.raw();
            if peer != own && driver::can_access_peer(peer, own).map_err(failed("cuDeviceCanAccessPeer"))? {
                reserved::share(own, peer)?;
            }
        }
        Ok(())
    }
}

/// A word of the host's memory that kernels write and the host reads at any time; 0 at first.
#[derive(Debug)]
pub(crate) struct HostWord {
    address: *mut u32,
    context: Arc<Context>,
}

// SAFETY: the word is accessed by atomics alone, which any thread may do.
unsafe impl Send for HostWord {}
// SAFETY: as above.
unsafe impl Sync for HostWord {}

impl HostWord {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        context.enter()?;
        let address = driver::mem_host_alloc(size_of::<u32>()).map_err(failed("cuMemHostAlloc"))?;
        let word = HostWord { address: address.cast(), context };
        word.cell().store(0, Ordering::SeqCst);
        Ok(word)
    }

    /// Its address for kernels, which is the host's: all memory has one address space.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }

    pub(crate) fn read(&self) -> u32 {
        self.cell().load(Ordering::Acquire)
    }

    fn cell(&self) -> &AtomicU32 {
        // SAFETY: an aligned word from `new`, live as long as `self`, accessed by atomics alone.
        unsafe { AtomicU32::from_ptr(self.address) }
    }
}

impl Drop for HostWord {
    fn drop(&mut self) {
        // Where the driver fails nobody is there to be told, and the word goes with the process.
        if self.context.enter().is_ok() {
            // SAFETY: from `new`, given back once; its owner has waited for the kernels that have its address.
            let _ = unsafe { driver::mem_free_host(self.address.cast()) };
        }
    }
}
