//! Where a pool's memory comes from, and the host's own.

use std::alloc::Layout;
use std::fmt;

use crate::error::Error;

/// Where a pool's memory comes from: the host's allocator, a card or a simulator.
pub(crate) trait Backing: Send + Sync + fmt::Debug {
    /// `bytes` of memory, aligned to 256 bytes; none if there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error>;

    /// From how many bytes on a pool may cut blocks from larger ones.
    fn divided_from(&self) -> usize {
        1 << 20
    }

    /// Waits for all work of the device, then gives blocks back: address and size each. An error has done nothing.
    ///
    /// # Safety
    /// Each block came from `allocate` with the same size, is given back once unless it was kept, and nobody uses it any more.
    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error>;

    /// Takes over the free blocks of a pool that ends while a graph is being recorded.
    ///
    /// # Safety
    /// As for [`Backing::release`].
    unsafe fn take_over(&self, _blocks: &[(u64, usize)]) {}

    /// Says that a block of this size has a new user, who has asked for its first `usable` bytes only; none if it has no
    /// user any more.
    fn assign(&self, _address: u64, _block_bytes: usize, _usable: usize) {}

    /// Free and total bytes, both 0 where they are not known, and the device's name; asked where `allocate` has just given nothing.
    fn report(&self) -> (usize, usize, String);
}

/// What became of blocks that were to go back.
#[derive(Debug)]
pub(crate) enum Released {
    /// Nothing was done: a graph is being recorded, and the device cannot be waited for.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "nothing else is recorded"))]
    Kept,
    /// Nobody may use them any more; with the device's error if it did not take one of them.
    Gone(Result<(), Error>),
}

/// The host's allocator behind the pool.
#[derive(Debug)]
pub(crate) struct HostMemory;

impl HostMemory {
    /// Cache lines and vector registers divide it; the same as the pool promises on a card.
    const ALIGN: usize = 256;

    /// What is asked of the system for a block: at its alignment, since only there it hands out fresh zeroed pages without
    /// touching them, and with room to align the block and to remember where the allocation starts.
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.checked_add(Self::ALIGN + size_of::<usize>())?, align_of::<usize>())
            .ok()
    }
}

impl Backing for HostMemory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        let Some(layout) = Self::layout(bytes) else { return Ok(None) };
        // Zeroed, since a slice of uninitialised memory would be undefined behaviour; the system's fresh pages are zero
        // anyway.
        // SAFETY: the pool asks for at least one byte.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            return Ok(None);
        }
        let block = (start as usize + size_of::<usize>()).next_multiple_of(Self::ALIGN);
        // SAFETY: in front of the block there is room for one usize, aligned as ALIGN is a multiple of its size.
        unsafe { (block as *mut usize).sub(1).write(start as usize) };
        Ok(Some(block as u64))
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        for &(address, bytes) in blocks {
            if let Some(layout) = Self::layout(bytes) {
                // SAFETY: `allocate` wrote the start in front of the block, and allocated it with this layout; the caller
                // gives it back once.
                unsafe { std::alloc::dealloc((address as *const usize).sub(1).read() as *mut u8, layout) };
            }
        }
        Ok(Released::Gone(Ok(())))
    }

    fn report(&self) -> (usize, usize, String) {
        (0, 0, "the CPU".into())
    }
}
