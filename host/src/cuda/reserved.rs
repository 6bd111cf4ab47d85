//! Ranges of a card's addresses, in which memory is mapped and unmapped again: memory of the card that grows.
//!
//! A range is reserved once, as long as the card has memory, and costs nothing but addresses. What a pool asks for is
//! mapped in it, behind what the pool has free at an end of its memory, or in the first gap that holds it. So blocks
//! may lie across what came in several calls, and each of those goes back by itself. Memory that cannot be mapped, or
//! be given to a card's peers, is not there: a call that fails is undone, and where that fails too its addresses are
//! not used again.
//!
//! Peer access of the driver is for memory of `cuMemAlloc` alone. What is mapped is given to each peer that has asked
//! for access to this card, now and in all that is mapped later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cuda_loader::driver::sys::CUdevice;
use cuda_loader::driver::{self, DeviceAttribute};

use super::{Context, failed, find};
use crate::backing::Grant;
use crate::error::Error;
use crate::profile::Place;

/// Codes of a driver or a card that cannot: `CUDA_ERROR_INVALID_VALUE` (of an attribute that is not known),
/// `CUDA_ERROR_NOT_FOUND`, `CUDA_ERROR_NOT_PERMITTED` and `CUDA_ERROR_NOT_SUPPORTED`.
const CANNOT: [u32; 4] = [1, 500, 800, 801];

/// A range that is reserved: where it begins, its bytes, and what is mapped in it, which does not overlap.
#[derive(Debug)]
struct Range {
    address: u64,
    bytes: usize,
    /// By address, with bytes; also what could not be unmapped.
    mapped: BTreeMap<u64, usize>,
}

impl Range {
    fn end(&self) -> u64 {
        self.address + self.bytes as u64
    }

    /// Whether nothing is mapped in so many bytes from an address on, which are all of the range.
    fn has_room(&self, address: u64, bytes: usize) -> bool {
        let Some(end) = address.checked_add(bytes as u64) else { return false };
        let before = self.mapped.range(..end).next_back();
        self.address <= address
            && end <= self.end()
            && before.is_none_or(|(&start, &bytes)| start + bytes as u64 <= address)
    }

    /// The first gap that holds so many bytes.
    fn gap(&self, bytes: usize) -> Option<u64> {
        let ends = self.mapped.iter().map(|(&start, &bytes)| start + bytes as u64);
        std::iter::once(self.address).chain(ends).find(|&start| self.has_room(start, bytes))
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Reserved {
    context: Arc<Context>,
    device: CUdevice,
    granularity: usize,
    ranges: Mutex<Vec<Range>>,
}

/// Who has access to a card's memory, and all that is mapped of it in this process.
#[derive(Debug, Default)]
struct Shared {
    peers: BTreeSet<CUdevice>,
    reserved: Vec<Weak<Reserved>>,
}

/// By the number of the card. Locked after `Reserved::ranges` where both are.
static SHARED: Mutex<BTreeMap<CUdevice, Shared>> = Mutex::new(BTreeMap::new());

fn shared() -> MutexGuard<'static, BTreeMap<CUdevice, Shared>> {
    // A peer is in a set or not, and what has ended is no longer upgraded.
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reserved {
    /// None where the driver or the card cannot.
    pub(super) fn new(context: Arc<Context>) -> Result<Option<Arc<Self>>, Error> {
        let Place::Cuda(ordinal) = context.profile.place else { return Ok(None) };
        let device = find(ordinal as usize)?.raw();
        let can = match driver::device_attribute(device, DeviceAttribute::VirtualMemoryManagement) {
            Ok(can) => can != 0,
            Err(error) if CANNOT.contains(&error.code) => false,
            Err(error) => return Err(failed("cuDeviceGetAttribute")(error)),
        };
        if !can {
            return Ok(None);
        }
        let granularity = match driver::mem_granularity(device) {
            Ok(granularity) => granularity,
            Err(error) if CANNOT.contains(&error.code) => return Ok(None),
            Err(error) => return Err(failed("cuMemGetAllocationGranularity")(error)),
        };
        let reserved = Arc::new(Reserved { context, device, granularity, ranges: Mutex::default() });
        let mut all = shared();
        let of_card = &mut all.entry(device).or_default().reserved;
        of_card.retain(|reserved| reserved.strong_count() > 0);
        of_card.push(Arc::downgrade(&reserved));
        drop(all);
        Ok(Some(reserved))
    }

    /// Memory of at least `bytes` bytes, as `Backing::grow` says; none where the card has not as much. `Err(None)`
    /// where the card gives memory in the other way alone.
    pub(super) fn grow(
        &self,
        bytes: usize,
        tail: Option<(u64, usize)>,
    ) -> Result<Option<Grant>, Option<Error>> {
        self.context.enter()?;
        let rounded = |bytes: usize| bytes.checked_next_multiple_of(self.granularity);
        let mut ranges = self.lock();
        if let Some((end, free)) = tail
            && let Some(bytes) = bytes.checked_sub(free).and_then(rounded)
            && let Some(range) = ranges.iter_mut().find(|range| range.has_room(end, bytes))
            // Not the beginning of another range.
            && range.address < end
        {
            return self.map(range, end, bytes);
        }
        let Some(bytes) = rounded(bytes) else { return Ok(None) };
        let found = ranges.iter().enumerate().find_map(|(at, range)| Some((at, range.gap(bytes)?)));
        let (at, address) = match found {
            Some(found) => found,
            None => {
                let all = rounded(self.context.profile.memory_bytes).unwrap_or(bytes).max(bytes);
                // Where there are no addresses for all, for this.
                let mut reserved = (reserve(all)?, all);
                if reserved.0.is_none() && all > bytes {
                    reserved = (reserve(bytes)?, bytes);
                }
                let (Some(address), bytes) = reserved else { return Err(None) };
                ranges.push(Range { address, bytes, mapped: BTreeMap::new() });
                (ranges.len() - 1, address)
            }
        };
        let mapped = self.map(&mut ranges[at], address, bytes);
        match mapped {
            Ok(Some(_)) => mapped,
            // The first error is told.
            _ => {
                let released = release_empty(&mut ranges);
                mapped.and_then(|none| Ok(released.map(|()| none)?))
            }
        }
    }

    /// Maps new memory, which this card and its peers can access.
    fn map(&self, range: &mut Range, address: u64, bytes: usize) -> Result<Option<Grant>, Option<Error>> {
        let call = |name: &'static str| {
            move |error: cuda_loader::DriverError| match CANNOT[1..].contains(&error.code) {
                true => None,
                false => Some(failed(name)(error)),
            }
        };
        let Some(handle) = driver::mem_create(self.device, bytes).map_err(call("cuMemCreate"))? else {
            return Ok(None);
        };
        // SAFETY: `range` is reserved and has room here, which the caller has asked; the memory has as many bytes.
        if let Err(error) = unsafe { driver::mem_map(address, bytes, &handle) } {
            // What cannot be given back goes with the context; the first error is told.
            let _ = driver::mem_release(handle);
            return Err(call("cuMemMap")(error));
        }
        let mut devices = vec![self.device];
        devices.extend(shared().get(&self.device).iter().flat_map(|shared| &shared.peers));
        // The mapping holds the memory from here on.
        let made = driver::mem_release(handle).map_err(call("cuMemRelease"));
        let made = made.and_then(|()| {
            // SAFETY: all of a mapping, just made.
            unsafe { driver::mem_set_access(address, bytes, &devices) }.map_err(call("cuMemSetAccess"))
        });
        if let Err(error) = made {
            // SAFETY: all of a mapping, which nobody knows of.
            if unsafe { driver::mem_unmap(address, bytes) }.is_err() {
                range.mapped.insert(address, bytes);
            }
            return Err(error);
        }
        range.mapped.insert(address, bytes);
        Ok(Some(Grant { address, bytes, joins: true }))
    }

    /// Gives back what [`Reserved::grow`] gave; false if it is no such memory.
    ///
    /// # Safety
    /// Nobody uses it any more, and all of the card's work is done.
    pub(super) unsafe fn release(&self, address: u64) -> Result<bool, Error> {
        let mut ranges = self.lock();
        let found = ranges.iter_mut().find_map(|range| {
            let bytes = *range.mapped.get(&address)?;
            Some((range, bytes))
        });
        let Some((range, bytes)) = found else { return Ok(false) };
        // SAFETY: all of a mapping of `map`'s; nobody uses it, by the caller.
        unsafe { driver::mem_unmap(address, bytes) }.map_err(failed("cuMemUnmap"))?;
        range.mapped.remove(&address);
        release_empty(&mut ranges)?;
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Range>> {
        // What is mapped is entered after the call that has done it.
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reserve(bytes: usize) -> Result<Option<u64>, Error> {
    driver::mem_address_reserve(bytes).map_err(failed("cuMemAddressReserve"))
}

/// Gives the addresses of ranges back in which nothing is mapped; a range for which that fails stays.
fn release_empty(ranges: &mut Vec<Range>) -> Result<(), Error> {
    let mut outcome = Ok(());
    ranges.retain(|range| {
        if !range.mapped.is_empty() {
            return true;
        }
        // SAFETY: all of a range of `reserve`'s, in which nothing is mapped.
        let freed = unsafe { driver::mem_address_free(range.address, range.bytes) };
        let freed = freed.map_err(failed("cuMemAddressFree"));
        let is_kept = freed.is_err();
        if outcome.is_ok() {
            outcome = freed;
        }
        is_kept
    });
    outcome
}

/// Lets kernels of `peer` access all that is mapped of `owner`'s memory in this process, now and later.
pub(super) fn share(owner: CUdevice, peer: CUdevice) -> Result<(), Error> {
    let mut all = shared();
    let of_card = all.entry(owner).or_default();
    of_card.peers.insert(peer);
    let reserved: Vec<Arc<Reserved>> = of_card.reserved.iter().filter_map(Weak::upgrade).collect();
    drop(all);
    // What is mapped from here on has the peer already.
    for reserved in reserved {
        reserved.context.enter()?;
        for (&address, &bytes) in reserved.lock().iter().flat_map(|range| &range.mapped) {
            // SAFETY: all of a mapping.
            unsafe { driver::mem_set_access(address, bytes, &[peer]) }.map_err(failed("cuMemSetAccess"))?;
        }
    }
    Ok(())
}
