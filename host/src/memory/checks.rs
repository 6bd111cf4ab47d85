//! A pool's checks: guard bands, poison, and who allocated and dropped what.
//!
//! A checked block lies between two guard bands, all filled with [`POISON`] when it is given out. When it is dropped
//! the bands must be as they were, and its own bytes become poison too, which must still be so when the memory is given
//! out again or goes back to the device. Contents are looked at and written in the order of the block's queue, whose
//! work is waited for.

#[cfg(test)]
mod tests;

use std::backtrace::Backtrace;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::queue::Queue;

/// Bytes of a guard band: blocks stay aligned to as many.
pub(super) const GUARD_BYTES: usize = 256;

/// Fills what nobody may write: a large number in every float type or not a number, and an index out of all bounds.
const POISON: u8 = 0xfe;

/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// What the checks of a [`Pool`](crate::Pool) found wrong. Offsets are from a tensor's first byte.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryFault {
    /// Bytes in front of a tensor or behind it were written; found when it was dropped.
    #[error(
        "{changed} byte(s) from offset {offset} of a tensor of {bytes} bytes were written, which are not its own; \
         allocated at {allocated}, dropped in {dropped}"
    )]
    OutOfBounds {
        /// Bytes of the tensor.
        bytes: usize,
        /// The first that is not as it was.
        offset: i64,
        /// How many are not.
        changed: usize,
        /// The call that made the tensor.
        allocated: &'static Location<'static>,
        /// The function that dropped it, as far as the program's symbols tell.
        dropped: String,
    },
    /// A tensor's memory was written after it was dropped; found when the memory was to be given out again, or back to
    /// the device.
    #[error(
        "{changed} byte(s) from offset {offset} of a tensor of {bytes} bytes were written after it was dropped; \
         allocated at {allocated}, dropped in {dropped}"
    )]
    UseAfterFree {
        /// Bytes of the tensor.
        bytes: usize,
        /// The first that is not as it was left.
        offset: i64,
        /// How many are not.
        changed: usize,
        /// The call that made the tensor.
        allocated: &'static Location<'static>,
        /// The function that dropped it, as far as the program's symbols tell.
        dropped: String,
    },
    /// A tensor was dropped twice, which takes unsafe code: it has been copied bit by bit. The second drop was ignored.
    #[error("a tensor of {bytes} bytes was dropped in {again}, after it was dropped in {dropped}")]
    DoubleFree {
        /// Bytes of the tensor.
        bytes: usize,
        /// The function that dropped it first, as far as is known.
        dropped: String,
        /// The function that dropped it again, as far as the program's symbols tell.
        again: String,
    },
    /// A tensor was still there when its device was dropped, with all of its clones and streams.
    #[error("a tensor of {bytes} bytes is still there after its device; allocated at {allocated}")]
    Leak {
        /// Bytes of the tensor.
        bytes: usize,
        /// The call that made the tensor.
        allocated: &'static Location<'static>,
    },
}

/// A block between its guard bands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guarded {
    /// Where the first band begins.
    pub(super) start: u64,
    /// With both bands.
    pub(super) block_bytes: usize,
    /// The tensor's.
    pub(super) bytes: usize,
}

impl Guarded {
    fn range(&self) -> Range<u64> {
        self.start..self.start + self.block_bytes as u64
    }

    /// The tensor's own bytes.
    fn own(&self) -> Range<u64> {
        let first = self.start + GUARD_BYTES as u64;
        first..first + self.bytes as u64
    }

    /// Where an address is from the tensor's first byte.
    fn offset(&self, address: u64) -> i64 {
        address.wrapping_sub(self.own().start) as i64
    }
}

/// Memory that is poison until it is given out again.
#[derive(Clone, Debug)]
struct Freed {
    end: u64,
    /// Whose it was.
    block: Guarded,
    allocated: &'static Location<'static>,
    dropped: Arc<Backtrace>,
    /// The last that worked with it.
    queue: Queue,
}

#[derive(Debug, Default)]
struct Ledger {
    /// Blocks by where they start.
    live: HashMap<u64, (Guarded, &'static Location<'static>)>,
    /// Ranges that do not overlap, by where they start.
    freed: BTreeMap<u64, Freed>,
    faults: Vec<MemoryFault>,
}

impl Ledger {
    fn say(&mut self, fault: MemoryFault) {
        // Nobody is to stop because nobody reads it.
        let _ = writeln!(std::io::stderr(), "warpforge: {fault}");
        self.faults.push(fault);
    }

    /// Takes what was freed of a range from the ledger.
    fn take_freed(&mut self, range: &Range<u64>) -> Vec<(Range<u64>, Freed)> {
        let mut taken = Vec::new();
        while let Some((&start, _)) = self.freed.range(..range.end).next_back()
            && let Some(freed) = self.freed.remove(&start)
        {
            if freed.end <= range.start {
                self.freed.insert(start, freed);
                break;
            }
            if start < range.start {
                self.freed.insert(start, Freed { end: range.start, ..freed.clone() });
            }
            if freed.end > range.end {
                self.freed.insert(range.end, freed.clone());
            }
            taken.push((start.max(range.start)..freed.end.min(range.end), freed));
        }
        taken
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Checks(Mutex<Ledger>);

impl Checks {
    /// Enters a block that is to be given out, and fills it. What was freed there must be poison; so says the list of
    /// faults.
    pub(super) fn begin(
        &self,
        block: Guarded,
        queue: &Queue,
        allocated: &'static Location<'static>,
    ) -> Result<(), Error> {
        let freed = self.lock().take_freed(&block.range());
        for (range, freed) in freed {
            self.expect_poison(range, &freed, queue)?;
        }
        fill(block.range(), queue)?;
        self.lock().live.insert(block.start, (block, allocated));
        Ok(())
    }

    /// Memory that is given out without checks.
    pub(super) fn forget(&self, range: &Range<u64>) {
        self.lock().take_freed(range);
    }

    /// A block that [`Checks::begin`] has entered is dropped. Whether it was live: else its memory is another's.
    pub(super) fn end(&self, block: Guarded, queue: &Queue) -> bool {
        let dropped = Arc::new(Backtrace::force_capture());
        let mut ledger = self.lock();
        let Some((_, allocated)) = ledger.live.remove(&block.start) else {
            let before = ledger.freed.get(&block.start).filter(|freed| freed.block.bytes == block.bytes);
            let before =
                before.map_or("a place that is not known any more".into(), |freed| site(&freed.dropped));
            ledger.say(MemoryFault::DoubleFree {
                bytes: block.bytes,
                dropped: before,
                again: site(&dropped),
            });
            return false;
        };
        drop(ledger);
        // Where the device does not answer, whoever uses it next is told.
        if self.end_live(block, queue, allocated, dropped).is_err() {
            self.forget(&block.range());
        }
        true
    }

    fn end_live(
        &self,
        block: Guarded,
        queue: &Queue,
        allocated: &'static Location<'static>,
        dropped: Arc<Backtrace>,
    ) -> Result<(), Error> {
        if !queue.can_be_waited_for()? {
            return Ok(());
        }
        let (whole, own) = (block.range(), block.own());
        for band in [whole.start..own.start, own.end..whole.end] {
            if let Some((first, changed)) = changed(band, queue)? {
                let (bytes, offset) = (block.bytes, block.offset(first));
                let dropped = site(&dropped);
                self.lock().say(MemoryFault::OutOfBounds { bytes, offset, changed, allocated, dropped });
            }
        }
        fill(whole.clone(), queue)?;
        let freed = Freed { end: whole.end, block, allocated, dropped, queue: queue.clone() };
        self.lock().freed.insert(whole.start, freed);
        Ok(())
    }

    /// Memory that is to go back to the device: what was freed of it must be poison. It stays in the ledger.
    pub(super) fn before_release(&self, places: &[(u64, usize)]) -> Result<(), Error> {
        for &(address, bytes) in places {
            let taken = self.lock().take_freed(&(address..address + bytes as u64));
            for (range, freed) in taken {
                if freed.queue.can_be_waited_for()?
                    && self.expect_poison(range.clone(), &freed, &freed.queue)?
                {
                    self.lock().freed.insert(range.start, Freed { end: range.end, ..freed });
                }
            }
        }
        Ok(())
    }

    /// The blocks that are there outlive their device.
    pub(super) fn say_leaks(&self) {
        let mut ledger = self.lock();
        let mut live: Vec<_> = ledger.live.values().copied().collect();
        live.sort_by_key(|(block, _)| block.start);
        for (block, allocated) in live {
            ledger.say(MemoryFault::Leak { bytes: block.bytes, allocated });
        }
    }

    pub(super) fn faults(&self) -> Vec<MemoryFault> {
        self.lock().faults.clone()
    }

    /// Whether freed memory is as it was left; a fault if not.
    fn expect_poison(&self, range: Range<u64>, freed: &Freed, queue: &Queue) -> Result<bool, Error> {
        let Some((first, changed)) = changed(range, queue)? else { return Ok(true) };
        let &Freed { block, allocated, ref dropped, .. } = freed;
        let (bytes, offset, dropped) = (block.bytes, block.offset(first), site(dropped));
        self.lock().say(MemoryFault::UseAfterFree { bytes, offset, changed, allocated, dropped });
        Ok(false)
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // Each change is one call of a collection.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parts of a range that are copied at a time.
fn chunks(range: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = range.end;
    range.step_by(CHUNK_BYTES).map(move |address| (address, (end - address).min(CHUNK_BYTES as u64) as usize))
}

/// Fills a range with poison, in the queue's order.
fn fill(range: Range<u64>, queue: &Queue) -> Result<(), Error> {
    let poison = vec![POISON; CHUNK_BYTES.min((range.end - range.start) as usize)];
    chunks(range).try_for_each(|(address, bytes)| queue.upload(address, &poison[..bytes]))
}

/// The first byte of a range that is not poison, and how many are not; none if all are.
fn changed(range: Range<u64>, queue: &Queue) -> Result<Option<(u64, usize)>, Error> {
    let mut data = vec![0; CHUNK_BYTES.min((range.end - range.start) as usize)];
    let mut found = None;
    for (address, bytes) in chunks(range) {
        queue.download(address, &mut data[..bytes])?;
        let mut changed = (address..).zip(&data[..bytes]).filter(|&(_, &byte)| byte != POISON);
        if let Some((first, _)) = changed.next() {
            let (_, count) = found.get_or_insert((first, 0));
            *count += 1 + changed.count();
        }
    }
    Ok(found)
}

/// The function that dropped a tensor: the first in the backtrace that is neither of the pool nor of the language.
fn site(backtrace: &Backtrace) -> String {
    let text = backtrace.to_string();
    let mut lines = text.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some((_, name)) = line.split_once(": ").filter(|(number, _)| number.parse::<u32>().is_ok())
        else {
            continue;
        };
        // Where the program has no line numbers, names are all there is.
        let place = lines.next_if(|line| line.starts_with("at ")).unwrap_or_default();
        let path = name.trim_start_matches(['<', '&', '[', '(']);
        let is_inner =
            ["std::", "core::", "alloc::", "__rust", "host::memory::checks::", "host::memory::Block"]
                .iter()
                .any(|start| path.starts_with(start))
                || ["/library/core/src/", "/library/alloc/src/", "/library/std/src/"]
                    .iter()
                    .chain(&["src/memory/checks.rs:", "src/memory/mod.rs:"])
                    .any(|part| place.contains(part));
        if !is_inner {
            return format!("{name} {place}").trim_end().into();
        }
    }
    "a function without a name".into()
}
