//! Where a pool's memory comes from, and the host's own.

use std::alloc::Layout;
use std::fmt;

use crate::error::Error;

/// Where a pool's memory comes from: the host's allocator, a card or a simulator.
pub(crate) trait Backing: Send + Sync + fmt::Debug {
    /// `bytes` of memory, aligned to 256 bytes; none if there is not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error>;

    /// Memory that a pool cuts blocks from: at least `bytes`, aligned to 256; none if there is not enough. Where it
    /// joins with what lies side by side with it, and there is a `tail`, an address with so many free bytes before it,
    /// it may be that both together are at least `bytes`: then it begins at that address.
    fn grow(&self, bytes: usize, _tail: Option<(u64, usize)>) -> Result<Option<Grant>, Error> {
        Ok(self.allocate(bytes)?.map(|address| Grant { address, bytes, joins: false }))
    }

    /// From how many bytes on a pool may cut blocks from larger ones.
    fn divided_from(&self) -> usize {
        1 << 20
    }

    /// Waits for all work of the device, then gives blocks back: address and size each. An error has done nothing.
    ///
    /// # Safety
    /// Each block came from `allocate` or `grow` with the same size, is given back once unless it was kept, and nobody
    /// uses it any more.
    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error>;

    /// Takes over the free blocks of a pool that ends while a graph is being recorded.
    ///
    /// # Safety
    /// As for [`Backing::release`].
    unsafe fn take_over(&self, _blocks: &[(u64, usize)]) {}

    /// Says that a block of this size has a new user, who has asked for its first `usable` bytes only; none if it has
    /// no user any more.
    fn assign(&self, _address: u64, _block_bytes: usize, _usable: usize) {}

    /// Says whether a block holds what no kernel writes from here on.
    fn set_constant(&self, _address: u64, _is_constant: bool) {}

    /// Free and total bytes, both 0 where they are not known, and the device's name; asked where `allocate` has just
    /// given nothing.
    fn report(&self) -> (usize, usize, String);
}

/// Memory that a pool cuts blocks from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) address: u64,
    /// All of it, which goes back as a whole.
    pub(crate) bytes: usize,
    /// Whether a block may lie in this and in what lies side by side with it, and joins too.
    pub(crate) joins: bool,
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

    /// What is asked of the system for a block: at its alignment, since only there it hands out fresh zeroed pages
    /// without touching them, and with room to align the block and to remember where the allocation starts.
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
                // SAFETY: `allocate` wrote the start in front of the block, and allocated it with this layout; the
                // caller gives it back once.
                unsafe { std::alloc::dealloc((address as *const usize).sub(1).read() as *mut u8, layout) };
            }
        }
        Ok(Released::Gone(Ok(())))
    }

    fn report(&self) -> (usize, usize, String) {
        let (free, total) =
            std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text)).unwrap_or((0, 0));
        (free, total, "the CPU".into())
    }
}

/// Available and total bytes of Linux's `/proc/meminfo`.
fn meminfo(text: &str) -> Option<(usize, usize)> {
    let bytes = |name: &str| -> Option<usize> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
    };
    Some((bytes("MemAvailable")?, bytes("MemTotal")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Tensor};

    /// What there is on the host is said, or nothing of it; not that there are 0 bytes of 0.
    #[test]
    fn out_of_memory_on_the_cpu() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let message = Tensor::empty(&stream, &[1 << 60], DType::I8).unwrap_err().to_string();
        let start = "out of memory on the CPU: 1152921504606846976 bytes requested; this pool has 0 in use of 0 reserved";
        let rest = message.strip_prefix(start).expect(&message);
        assert!(
            !rest.contains(" 0 free of 0") && (rest.is_empty() || rest.starts_with("; the device has ")),
            "{rest}"
        );
        assert_eq!(rest.is_empty(), !std::path::Path::new("/proc/meminfo").exists());
        let text = "MemTotal:       24000 kB\nMemFree:         1 kB\nMemAvailable:   20 kB\n";
        assert_eq!(meminfo(text), Some((20 << 10, 24000 << 10)));
        assert_eq!(meminfo("MemTotal: 24000 kB\n"), None);
        Ok(())
    }
}
