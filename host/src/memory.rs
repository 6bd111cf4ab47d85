//! The memory pool: where every tensor's memory comes from.
//!
//! A block is cut to a size class and kept for reuse when it is given back. Reuse is *stream-ordered*: a block that was
//! used on a stream goes to the next user of that stream at once, without waiting, since the stream itself runs the two
//! in order; another stream first waits for an event of the old one. Blocks go back to the device when it has no more
//! to give ([`Pool::trim`]), so the pool holds at most what was in use at its peak, rounded up to size classes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::Error;
use crate::stream::{Queue, Stream};

/// Where a pool's memory comes from: the host's allocator or a card.
pub(crate) trait Backing: Send + Sync + fmt::Debug {
    /// `bytes` of memory, aligned to 256 bytes; none if there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error>;

    /// Gives memory back.
    ///
    /// # Safety
    /// `address` came from `allocate` with the same size, is given back once, and nothing uses it any more: also no work
    /// that is still enqueued.
    unsafe fn release(&self, address: u64, bytes: usize);

    /// Waits for all work of the device.
    fn synchronize(&self) -> Result<(), Error>;

    /// Free and total bytes, and the device's name.
    fn report(&self) -> (usize, usize, String);
}

/// What a pool holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes that live tensors asked for.
    pub requested_bytes: usize,
    /// Bytes of the blocks that live tensors hold: requests rounded up to size classes.
    pub in_use_bytes: usize,
    /// Bytes that the pool has taken from the device and not given back.
    pub reserved_bytes: usize,
    /// Most of `in_use_bytes` so far.
    pub peak_in_use_bytes: usize,
    /// Live tensors.
    pub num_live: usize,
    /// Allocations so far.
    pub num_allocations: usize,
    /// Allocations that reused a block.
    pub num_reused: usize,
}

/// A device's memory pool. Thread-safe.
#[derive(Debug)]
pub struct Pool {
    backing: Box<dyn Backing>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Free blocks by size class, last given back last.
    free: HashMap<usize, Vec<FreeBlock>>,
    stats: PoolStats,
}

#[derive(Debug)]
struct FreeBlock {
    address: u64,
    /// The stream in whose order the memory was used last.
    queue: Queue,
}

/// Memory from a pool; goes back to it when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    address: u64,
    requested: usize,
    class: usize,
    queue: Queue,
    pool: Arc<Pool>,
}

impl Block {
    /// Address on the device; aligned to 256 bytes. Not to be read if the block has no bytes.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.class == 0 {
            return;
        }
        let mut state = self.pool.lock();
        state.stats.requested_bytes -= self.requested;
        state.stats.in_use_bytes -= self.class;
        state.stats.num_live -= 1;
        let block = FreeBlock { address: self.address, queue: self.queue.clone() };
        state.free.entry(self.class).or_default().push(block);
    }
}

/// The size that a request is rounded up to: multiples of 512 bytes, eight classes per power of two (at most an eighth
/// is wasted), and from 32 MiB on multiples of 2 MiB, the size of a device page.
fn size_class(bytes: usize) -> usize {
    const LARGE: usize = 32 << 20;
    const PAGE: usize = 2 << 20;
    if bytes == 0 {
        0
    } else if bytes >= LARGE {
        bytes.next_multiple_of(PAGE)
    } else {
        let step = (bytes.next_power_of_two() / 16).max(512);
        bytes.next_multiple_of(step)
    }
}

impl Pool {
    pub(crate) fn new(backing: Box<dyn Backing>) -> Arc<Self> {
        Arc::new(Pool { backing, state: Mutex::default() })
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        self.lock().stats
    }

    /// Memory for use in `stream`'s order.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize, stream: &Stream) -> Result<Block, Error> {
        let class = size_class(bytes);
        let block = |address| Block {
            address,
            requested: bytes,
            class,
            queue: stream.queue().clone(),
            pool: self.clone(),
        };
        if class == 0 {
            return Ok(block(0));
        }
        let mut state = self.lock();
        let address = match state.take(class, stream) {
            Some(free) => {
                if free.queue != *stream.queue() {
                    stream.queue().wait_for(&free.queue)?;
                }
                state.stats.num_reused += 1;
                free.address
            }
            None => {
                let address = match self.backing.allocate(class)? {
                    Some(address) => address,
                    None => {
                        self.trim_locked(&mut state)?;
                        self.backing.allocate(class)?.ok_or_else(|| self.out_of_memory(&state, bytes))?
                    }
                };
                state.stats.reserved_bytes += class;
                address
            }
        };
        let stats = &mut state.stats;
        stats.num_allocations += 1;
        stats.num_live += 1;
        stats.requested_bytes += bytes;
        stats.in_use_bytes += class;
        stats.peak_in_use_bytes = stats.peak_in_use_bytes.max(stats.in_use_bytes);
        Ok(block(address))
    }

    /// Gives all free blocks back to the device, after waiting for its work. Returns how many bytes that were.
    pub fn trim(&self) -> Result<usize, Error> {
        self.trim_locked(&mut self.lock())
    }

    fn trim_locked(&self, state: &mut State) -> Result<usize, Error> {
        self.backing.synchronize()?;
        let mut released = 0;
        for (class, blocks) in state.free.drain() {
            for block in blocks {
                // SAFETY: a free block has no user, and the device has just finished all its work.
                unsafe { self.backing.release(block.address, class) };
                released += class;
            }
        }
        state.stats.reserved_bytes -= released;
        Ok(released)
    }

    fn out_of_memory(&self, state: &State, requested: usize) -> Error {
        let (free, total, device) = self.backing.report();
        let PoolStats { in_use_bytes: in_use, reserved_bytes: reserved, .. } = state.stats;
        Error::OutOfMemory { device, requested, in_use, reserved, free, total }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every point where a thread could panic while holding the lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// A free block of the class: one of this stream if there is one, else the one that was given back first.
    fn take(&mut self, class: usize, stream: &Stream) -> Option<FreeBlock> {
        let blocks = self.free.get_mut(&class)?;
        let index = blocks.iter().rposition(|block| block.queue == *stream.queue()).unwrap_or(0);
        (index < blocks.len()).then(|| blocks.remove(index))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut state = std::mem::take(state);
        // Where the device does not answer any more, its memory is gone with its context.
        let _ = self.trim_locked(&mut state);
    }
}
