//! Global memory: buffers at real addresses, wide apart, with a shadow each.

use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::{self, Layout};
use std::borrow::ToOwned;
use std::cell::Cell;
use std::string::String;
use std::vec::Vec;

use super::clock::Stamp;
use super::shadow::Shadow;

/// Bytes before and after each buffer that belong to nobody, so that an access near a buffer's ends is told as such.
/// They are never touched, so they cost address space alone.
const MARGIN: usize = 1 << 20;
const ALIGN: usize = 256;

/// The global memory of a simulated card: buffers, and what is known of each of their bytes.
///
/// Addresses are those of the host's memory, so that kernels can do pointer arithmetic on them. The functions of the
/// host (`write`, `read`, …) panic on a range that is not inside one buffer: that is a mistake of the test.
#[derive(Debug)]
pub struct Memory {
    id: u64,
    /// The memories of other cards that kernels of this one may access.
    peers: Vec<u64>,
    /// Ordered by address.
    buffers: Vec<Buffer>,
    /// Index of the buffer that was found last.
    last: Cell<usize>,
}

#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) name: String,
    /// The allocation, margins included.
    start: *mut u8,
    layout: Layout,
    pub(super) bytes: usize,
    pub(super) shadow: Shadow,
    /// No kernel may write it, and one that has not waited for the kernels ahead may read it.
    pub(super) is_constant: bool,
}

// SAFETY: a buffer owns its allocation alone; it is reached through `Memory`'s own borrows.
unsafe impl Send for Buffer {}

impl Buffer {
    /// The first byte.
    pub(super) fn data(&self) -> *mut u8 {
        self.start.wrapping_add(MARGIN)
    }

    pub(super) fn address(&self) -> usize {
        self.data().addr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `Memory::allocate`, and dropped once.
        unsafe { alloc::dealloc(self.start, self.layout) }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Memory::new()
    }
}

impl Memory {
    /// No buffers.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Memory { id, peers: Vec::new(), buffers: Vec::new(), last: Cell::new(0) }
    }

    /// The number of this memory, which no other has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Kernels of this card may access the memory of this number from here on, where both cards run them together
    /// ([`simulate_together`](super::simulate_together)).
    pub fn enable_peer(&mut self, id: u64) {
        if !self.peers.contains(&id) {
            self.peers.push(id);
        }
    }

    /// The numbers of the memories that kernels of this card may access beside its own.
    pub fn peers(&self) -> &[u64] {
        &self.peers
    }

    /// Whether kernels of this card may access another's memory.
    pub(super) fn has_peer(&self, other: &Memory) -> bool {
        self.peers.contains(&other.id)
    }

    /// A buffer of uninitialised bytes at an address that is a multiple of 256. `name` is for reports.
    pub fn allocate(&mut self, name: &str, bytes: usize) -> u64 {
        let layout = Layout::from_size_align(bytes + 2 * MARGIN, ALIGN).expect("a buffer's size");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        if start.is_null() {
            alloc::handle_alloc_error(layout);
        }
        let (name, shadow) = (name.to_owned(), Shadow::new(bytes));
        let buffer = Buffer { name, start, layout, bytes, shadow, is_constant: false };
        let address = buffer.address() as u64;
        let index = self.buffers.partition_point(|other| other.start < start);
        self.buffers.insert(index, buffer);
        address
    }

    /// A buffer that holds these bytes.
    pub fn allocate_from(&mut self, name: &str, data: &[u8]) -> u64 {
        let address = self.allocate(name, data.len());
        self.write(address, data);
        address
    }

    /// Gives a buffer back.
    pub fn free(&mut self, address: u64) {
        let (index, offset) = self.range(address, 0);
        assert_eq!(offset, 0, "free of {address:#x}, which is inside a buffer");
        self.buffers.remove(index);
    }

    /// Writes as the host does: the bytes are initialised after it.
    pub fn write(&mut self, address: u64, data: &[u8]) {
        let (index, offset) = self.range(address, data.len());
        let buffer = &mut self.buffers[index];
        // SAFETY: `range` found the bytes inside the buffer, which this borrow holds alone.
        unsafe { core::ptr::copy_nonoverlapping(data.as_ptr(), buffer.data().add(offset), data.len()) };
        buffer.shadow.mark(offset, data.len(), Stamp::HOST);
    }

    /// Reads as the host does, uninitialised bytes too.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        let (index, offset) = self.range(address, data.len());
        // SAFETY: `range` found the bytes inside the buffer; they hold zeros or what was written.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.buffers[index].data().add(offset),
                data.as_mut_ptr(),
                data.len(),
            );
        }
    }

    /// Makes bytes uninitialised again: their next read by a kernel is reported.
    pub fn uninitialise(&mut self, address: u64, bytes: usize) {
        let (index, offset) = self.range(address, bytes);
        self.buffers[index].shadow.mark(offset, bytes, Stamp::NEVER);
    }

    /// Makes bytes out of bounds for kernels (guard bands), until the host writes or `uninitialise`s them.
    pub fn forbid(&mut self, address: u64, bytes: usize) {
        let (index, offset) = self.range(address, bytes);
        self.buffers[index].shadow.mark(offset, bytes, Stamp::FORBIDDEN);
    }

    /// Says whether the buffer that an address is in is constant: then no kernel may write it, and kernels may read it
    /// before they have waited for those ahead.
    pub fn set_constant(&mut self, address: u64, is_constant: bool) {
        let (index, _) = self.range(address, 0);
        self.buffers[index].is_constant = is_constant;
    }

    /// The buffer around a range of the host's, and the range's offset in it.
    fn range(&self, address: u64, bytes: usize) -> (usize, usize) {
        let address = address as usize;
        let found = self.buffers.partition_point(|buffer| buffer.address() <= address).checked_sub(1);
        if let Some(index) = found {
            let offset = address - self.buffers[index].address();
            if offset + bytes <= self.buffers[index].bytes {
                return (index, offset);
            }
        }
        panic!("{bytes} bytes at {address:#x} are not inside one buffer");
    }

    /// The buffer that an access of a kernel falls into, and its offset from the buffer's start; none if it reaches
    /// beyond the buffer.
    #[inline]
    pub(super) fn find(&self, address: usize, bytes: usize) -> Option<(usize, usize)> {
        let inside = |index: usize| {
            let buffer = self.buffers.get(index)?;
            let offset = address.wrapping_sub(buffer.address());
            (offset <= buffer.bytes && bytes <= buffer.bytes - offset).then_some((index, offset))
        };
        inside(self.last.get()).or_else(|| {
            let index = self.buffers.partition_point(|buffer| buffer.address() <= address).checked_sub(1)?;
            self.last.set(index);
            inside(index)
        })
    }

    pub(super) fn buffer(&mut self, index: usize) -> &mut Buffer {
        &mut self.buffers[index]
    }

    /// Where an address lies that `find` has refused, in words.
    pub(super) fn describe(&self, address: usize) -> String {
        use std::format;
        let near = |buffer: &&Buffer| {
            let end = buffer.start.addr() + buffer.layout.size();
            (buffer.start.addr()..end).contains(&address)
        };
        match self.buffers.iter().find(near) {
            None if address == 0 => "the null pointer".to_owned(),
            None => format!("address {address:#x}, which is no buffer's"),
            Some(buffer) => {
                let offset = address.wrapping_sub(buffer.address()) as isize;
                format!("byte {offset} of `{}`, which has {} bytes", buffer.name, buffer.bytes)
            }
        }
    }

    /// A kernel has ended.
    pub(super) fn settle(&mut self) {
        self.buffers.iter_mut().for_each(|buffer| buffer.shadow.settle());
    }
}
