//! The memory pool: where every tensor's memory comes from.
//!
//! Memory that is given back is kept for reuse: blocks below 1 MiB by size class, each as the device gave it; larger
//! ones are cut from what the device gave, the smallest free piece that holds them first, and become one piece with
//! their free neighbours again (`book`). Sizes that alternate therefore share memory.
//!
//! Reuse is *stream-ordered*: a block that was used on a stream goes to the next user of that stream at once, without
//! waiting, since the stream itself runs the two in order. Another stream takes it at once where the old one's work is
//! done, and else waits for an event of the old one, on the device.
//!
//! Before the pool would hold more than was in use at its peak (rounded up to size classes), or more than its
//! [soft limit](Pool::set_soft_limit), what lay unused longest goes back to the device, which waits for the device's
//! work; so it does when the device has no more to give, and on [`Pool::trim`]. A CUDA card gives large memory as
//! ranges of addresses that grow: blocks are cut across what it gave in several calls, and each of those goes back by
//! itself (`cuda::reserved`). Only what the device gave in one call can go back, and only when nothing of it is in use,
//! so the pool can hold more than its peak by the free parts between blocks in use. A workload that repeats its sizes
//! comes to all of this at its start only. While the device is waited for, others reuse what is free: no lock is held
//! but that of those who also need more from the device.

mod book;
mod checks;
#[cfg(test)]
mod growth;
#[cfg(test)]
mod ledger;
mod map;
#[cfg(test)]
mod proof;
#[cfg(test)]
mod tests;
mod timeline;

use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::backing::{Backing, Grant, Released};
use crate::error::Error;
use crate::queue::Queue;
use book::{Book, PieceId, SegmentId, Tail};
pub use checks::MemoryFault;
use checks::{Checks, GUARD_BYTES, Guarded};
pub use map::{PoolMap, PoolPiece, PoolSegment, SizeCount};
use timeline::Ring;
pub use timeline::{PoolEvent, PoolEventKind, PoolTimeline};

/// What a pool holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes that live tensors asked for.
    pub requested_bytes: usize,
    /// Bytes of the blocks that live tensors hold: requests rounded up to size classes.
    pub in_use_bytes: usize,
    /// Bytes that the pool has taken from the device and not given back.
    pub reserved_bytes: usize,
    /// Most of `in_use_bytes` so far, or since [`Pool::reset_peaks`].
    pub peak_in_use_bytes: usize,
    /// Most of `reserved_bytes`, likewise.
    pub peak_reserved_bytes: usize,
    /// Live tensors, without those of no bytes.
    pub num_live: usize,
    /// Allocations so far, without those of no bytes.
    pub num_allocations: usize,
    /// Allocations that reused memory.
    pub num_reused: usize,
    /// Allocations for which the device was asked.
    pub num_from_device: usize,
    /// Bytes of the largest free piece.
    pub largest_free_bytes: usize,
}

impl PoolStats {
    /// Bytes that the pool holds and nobody uses.
    pub fn free_bytes(&self) -> usize {
        self.reserved_bytes - self.in_use_bytes
    }

    /// The share of allocations that the device was not asked for; 0 before the first.
    pub fn reuse_rate(&self) -> f64 {
        self.num_reused as f64 / self.num_allocations.max(1) as f64
    }

    /// How far the free bytes are from one piece: 0 where they are one, towards 1 where they are many.
    pub fn fragmentation(&self) -> f64 {
        match self.free_bytes() {
            0 => 0.0,
            free => 1.0 - self.largest_free_bytes as f64 / free as f64,
        }
    }
}

/// A device's memory pool. Thread-safe.
#[derive(Debug)]
pub struct Pool {
    backing: Box<dyn Backing>,
    /// Held by who takes memory from the device or gives it back, also while the device is waited for; before `state`.
    growth: Mutex<()>,
    /// Never held while the device is waited for.
    state: Mutex<State>,
    /// None until they are started.
    checks: OnceLock<Checks>,
}

#[derive(Debug)]
struct State {
    book: Book,
    stats: PoolStats,
    /// Most that was in use so far, or would have been with what room was made for: what the pool may hold.
    bound: usize,
    /// See [`Pool::set_soft_limit`].
    soft_limit: usize,
    /// None until it is started.
    timeline: Option<Ring>,
}

/// What somebody asks the pool for.
#[derive(Clone, Copy)]
struct Request<'a> {
    class: usize,
    bytes: usize,
    queue: &'a Queue,
    caller: &'static Location<'static>,
}

impl State {
    /// Enters into the timeline, if there is one, what happened to memory: address, bytes asked for, and of the block.
    fn log(
        &mut self,
        kind: PoolEventKind,
        memory: (u64, usize, usize),
        queue: Option<&Queue>,
        caller: Option<&'static Location<'static>>,
    ) {
        if let Some(timeline) = &mut self.timeline {
            timeline.add(kind, memory, queue.map(Queue::number), caller, &self.stats);
        }
    }

    fn stats_now(&self) -> PoolStats {
        PoolStats { largest_free_bytes: self.book.largest_free(), ..self.stats }
    }
}

/// Memory from a pool; goes back to it when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    /// Where the piece begins.
    start: u64,
    /// Bytes of the guard band before the block, and of the least behind it; 0 without checks.
    guard: usize,
    requested: usize,
    class: usize,
    /// None of no bytes.
    piece: Option<PieceId>,
    queue: Queue,
    pool: Arc<Pool>,
}

impl Block {
    /// Address on the device; aligned to 256 bytes. Not to be read if the block has no bytes.
    pub(crate) fn address(&self) -> u64 {
        self.start + self.guard as u64
    }

    /// Says whether the block holds what no kernel writes from here on.
    pub(crate) fn set_constant(&self, is_constant: bool) {
        if self.piece.is_some() {
            self.pool.backing.set_constant(self.address(), is_constant);
        }
    }

    fn guarded(&self) -> Guarded {
        Guarded { start: self.start, block_bytes: self.class, bytes: self.requested }
    }

    /// In whose order the memory goes back.
    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The memory goes back in this queue's order. Whoever used it before has been waited for by that queue.
    pub(crate) fn give_to(&mut self, queue: &Queue) {
        self.queue = queue.clone();
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(piece) = self.piece else { return };
        if self.guard > 0
            && let Some(checks) = self.pool.checks.get()
            && !checks.end(self.guarded(), &self.queue)
        {
            return;
        }
        self.pool.backing.assign(self.start, self.class, 0);
        let mut state = self.pool.lock();
        state.stats.requested_bytes -= self.requested;
        state.stats.in_use_bytes -= self.class;
        state.stats.num_live -= 1;
        let block = (self.start, self.requested, self.class);
        state.log(PoolEventKind::Free, block, Some(&self.queue), None);
        state.book.free(piece, self.queue.clone());
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
        let book = Book::new(backing.divided_from());
        let state =
            State { book, stats: PoolStats::default(), bound: 0, soft_limit: usize::MAX, timeline: None };
        let state = Mutex::new(state);
        Arc::new(Pool { backing, growth: Mutex::default(), state, checks: OnceLock::new() })
    }

    /// From here on tensors have guard bands, which are looked at when they are dropped, and what they leave is filled
    /// with a pattern, which must be there when the memory is given out again or back to the device. What is found is
    /// written to standard error and listed by [`Pool::faults`]; so are tensors that outlive their device, each with
    /// the call that made it.
    ///
    /// This is for finding mistakes of unsafe code and of kernels, and takes its time: every allocation and every drop
    /// wait for the stream's work and copy all of the block. While a graph is recorded nothing is checked. Tensors that
    /// are there already are not checked.
    pub fn start_checks(&self) {
        self.checks.get_or_init(Checks::default);
    }

    /// What the checks have found so far; nothing if [`Pool::start_checks`] was not called.
    pub fn faults(&self) -> Vec<MemoryFault> {
        self.checks.get().map(Checks::faults).unwrap_or_default()
    }

    /// From here on the pool remembers what it does: the last `capacity` events, of some hundred bytes each, taken at
    /// once. A timeline that was started before is begun anew. Until this is called nothing is remembered, and it costs
    /// a comparison.
    pub fn start_timeline(&self, capacity: usize) {
        let ring = Ring::new(capacity);
        self.lock().timeline = Some(ring);
    }

    /// What the pool did since [`Pool::start_timeline`], which goes on; none without. Nobody allocates while it is
    /// copied.
    pub fn timeline(&self) -> Option<PoolTimeline> {
        self.lock().timeline.as_ref().map(Ring::timeline)
    }

    /// The device ends.
    pub(crate) fn say_leaks(&self) {
        if let Some(checks) = self.checks.get() {
            checks.say_leaks();
        }
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        self.lock().stats_now()
    }

    /// What the pool holds now, piece by piece. For people and tools: it takes as long as there are pieces, and nobody
    /// allocates meanwhile.
    pub fn map(&self) -> PoolMap {
        let state = self.lock();
        let mut segments = state.book.segments();
        segments.sort_by_key(|segment| segment.address);
        PoolMap { stats: state.stats_now(), segments }
    }

    /// The peaks of the statistics begin anew, at what there is now. What the pool may hold stays bounded by its peak
    /// since its beginning.
    pub fn reset_peaks(&self) {
        let State { stats, .. } = &mut *self.lock();
        stats.peak_in_use_bytes = stats.in_use_bytes;
        stats.peak_reserved_bytes = stats.reserved_bytes;
    }

    /// Before the pool would hold more than so many bytes, what is free goes back to the device, though the pool held
    /// more at its peak. What tensors need can exceed it. There is none at first, as with `usize::MAX`; nothing goes
    /// back before the pool grows next.
    pub fn set_soft_limit(&self, bytes: usize) {
        self.lock().soft_limit = bytes;
    }

    /// Memory for use in `queue`'s order.
    #[track_caller]
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize, queue: &Queue) -> Result<Block, Error> {
        let (caller, checks) = (Location::caller(), self.checks.get());
        let guard = match checks {
            Some(_) if bytes > 0 && queue.can_be_waited_for()? => GUARD_BYTES,
            _ => 0,
        };
        let class = size_class(bytes + 2 * guard);
        let (piece, start) = match class {
            0 => (None, 0),
            _ => {
                let (piece, start) = self.allocate_class(Request { class, bytes, queue, caller })?;
                (Some(piece), start)
            }
        };
        let mut block = Block {
            start,
            guard: 0,
            requested: bytes,
            class,
            piece,
            queue: queue.clone(),
            pool: self.clone(),
        };
        if let Some(checks) = checks {
            match guard {
                0 => checks.forget(&(start..start + class as u64)),
                // Where that fails the block is dropped as one that is not checked.
                _ => checks.begin(block.guarded(), queue, caller)?,
            }
            block.guard = guard;
        }
        if guard > 0 {
            self.backing.assign(start, guard, 0);
        }
        if class > 0 {
            self.backing.assign(block.address(), class - guard, bytes);
        }
        Ok(block)
    }

    fn allocate_class(&self, request: Request<'_>) -> Result<(PieceId, u64), Error> {
        if let Some(reused) = self.reuse(request)? {
            return Ok(reused);
        }
        let _growth = self.lock_growth();
        // Others may have given memory back meanwhile.
        if let Some(reused) = self.reuse(request)? {
            return Ok(reused);
        }
        let bound = self.make_room(request)?;
        let grown = match self.grow(request)? {
            None => {
                self.give_back(|_| true)?;
                match self.grow(request)? {
                    // What other streams work with can be had, if this one waits for them.
                    None => self.merge_streams(request)?,
                    grown => grown,
                }
            }
            grown => grown,
        };
        // The room was made for this block as one in use, whatever has been given back since.
        let mut state = self.lock();
        state.bound = state.bound.max(bound);
        drop(state);
        grown.ok_or_else(|| self.out_of_memory(request.bytes))
    }

    /// A block of memory that the device gives now; none if it has not as much. The caller holds `growth`.
    fn grow(&self, request: Request<'_>) -> Result<Option<(PieceId, u64)>, Error> {
        let Request { class, queue, .. } = request;
        let mut state = self.lock();
        let divides = state.book.divides(class);
        let tail = if divides { state.book.take_tail(queue) } else { None };
        drop(state);
        let granted = match divides {
            true => {
                let tail = tail.as_ref().filter(|tail| tail.bytes < class);
                self.backing.grow(class, tail.map(|tail| (tail.end(), tail.bytes)))
            }
            false => self
                .backing
                .allocate(class)
                .map(|address| address.map(|address| Grant { address, bytes: class, joins: false })),
        };
        let mut state = self.lock();
        let grant = granted.as_ref().ok().and_then(Option::as_ref);
        let extends = |tail: &Tail| grant.is_some_and(|grant| grant.joins && grant.address == tail.end());
        let extended = match tail {
            Some(tail) if tail.bytes < class && extends(&tail) => Some(tail.id),
            Some(tail) => {
                state.book.put_back_tail(tail);
                None
            }
            None => None,
        };
        let Some(grant) = granted? else { return Ok(None) };
        let piece = state.book.add(grant, extended, class);
        let stats = &mut state.stats;
        stats.reserved_bytes += grant.bytes;
        stats.peak_reserved_bytes = stats.peak_reserved_bytes.max(stats.reserved_bytes);
        stats.num_from_device += 1;
        state.log(PoolEventKind::Reserve, (grant.address, grant.bytes, grant.bytes), Some(queue), None);
        Ok(Some(Self::begin_use(&mut state, piece, request)))
    }

    /// A block of what other streams have freed, in pieces that only together are large enough: this stream waits for
    /// all of those that it can wait for. The caller holds `growth`.
    fn merge_streams(&self, request: Request<'_>) -> Result<Option<(PieceId, u64)>, Error> {
        let Request { class, queue, .. } = request;
        let mut state = self.lock();
        if !state.book.divides(class) {
            return Ok(None);
        }
        for owner in state.book.owners(queue) {
            if owner.is_recorded()? {
                continue;
            }
            // Nobody takes them meanwhile, or frees more of them that are not waited for.
            let pieces = state.book.set_aside(&owner);
            drop(state);
            let followed = queue.follow(&owner);
            state = self.lock();
            state.book.bring_back(&pieces, followed.as_ref().ok().map(|()| queue));
            followed?;
        }
        let found = state.book.take(class, queue);
        Ok(found.map(|piece| {
            state.stats.num_reused += 1;
            Self::begin_use(&mut state, piece, request)
        }))
    }

    /// A free block; none if the device has to be asked for more.
    fn reuse(&self, request: Request<'_>) -> Result<Option<(PieceId, u64)>, Error> {
        let Request { class, queue, .. } = request;
        let mut state = self.lock();
        let mut piece = state.book.take(class, queue);
        if piece.is_none() && state.book.divides(class) {
            state.book.gather(queue, Queue::is_done)?;
            piece = state.book.take(class, queue);
        }
        if piece.is_none() {
            // Who waited for a stream that is being recorded would be recorded too.
            let found = state.book.take_of_others(class, queue, Queue::is_recorded)?;
            let Some((found, other)) = found else {
                return Ok(None);
            };
            // Where `queue` is being recorded this waits for the device.
            drop(state);
            let followed = queue.follow(&other);
            state = self.lock();
            if let Err(error) = followed {
                state.book.free(found, other);
                return Err(error);
            }
            piece = Some(found);
        }
        Ok(piece.map(|piece| {
            state.stats.num_reused += 1;
            Self::begin_use(&mut state, piece, request)
        }))
    }

    /// Enters a block into the statistics.
    fn begin_use(state: &mut State, piece: PieceId, request: Request<'_>) -> (PieceId, u64) {
        let Request { class, bytes, queue, caller } = request;
        let address = state.book.address(piece);
        let stats = &mut state.stats;
        stats.num_allocations += 1;
        stats.num_live += 1;
        stats.requested_bytes += bytes;
        stats.in_use_bytes += class;
        stats.peak_in_use_bytes = stats.peak_in_use_bytes.max(stats.in_use_bytes);
        state.bound = state.bound.max(stats.in_use_bytes);
        state.log(PoolEventKind::Allocate, (address, bytes, class), Some(queue), Some(caller));
        (piece, address)
    }

    /// Gives what lay free longest back, until `class` more bytes exceed neither the peak, which is returned as it is
    /// with them, nor the soft limit.
    fn make_room(&self, request: Request<'_>) -> Result<usize, Error> {
        let Request { class, queue, .. } = request;
        let state = self.lock();
        let PoolStats { in_use_bytes, reserved_bytes, .. } = state.stats;
        let needed = in_use_bytes + class;
        let bound = state.bound.max(needed);
        let tail = if state.book.divides(class) { state.book.tail_bytes(queue).min(class) } else { 0 };
        let surplus = (reserved_bytes + class - tail).saturating_sub(bound.min(state.soft_limit.max(needed)));
        drop(state);
        self.give_back(|bytes| bytes < surplus)?;
        Ok(bound)
    }

    /// Gives everything that is free back to the device, after waiting for its work. Returns how many bytes that were:
    /// none while a graph is being recorded.
    pub fn trim(&self) -> Result<usize, Error> {
        let _growth = self.lock_growth();
        self.give_back(|_| true)
    }

    /// Gives back what the device gave in one call and is free, oldest first, as long as `wants_more` says so of the
    /// bytes so far; what cannot go back stays free. Returns how many bytes went. The caller holds `growth`.
    fn give_back(&self, wants_more: impl Fn(usize) -> bool) -> Result<usize, Error> {
        let (mut ids, mut places, mut bytes) = (Vec::<SegmentId>::new(), Vec::new(), 0);
        let mut state = self.lock();
        while wants_more(bytes)
            && let Some(id) = state.book.withdraw_oldest()
        {
            let place = state.book.place_of(id);
            bytes += place.1;
            ids.push(id);
            places.push(place);
        }
        drop(state);
        if ids.is_empty() {
            return Ok(0);
        }
        let checked = self.checks.get().map_or(Ok(()), |checks| checks.before_release(&places));
        // SAFETY: free memory of this pool, withdrawn from its book: nobody has the addresses, or gets them.
        let released = checked.and_then(|()| unsafe { self.backing.release(&places) });
        let mut state = self.lock();
        let put_back = |state: &mut State| {
            for &id in &ids {
                state.book.put_back(id);
            }
        };
        match released {
            Ok(Released::Gone(outcome)) => {
                for (&id, &(address, bytes)) in ids.iter().zip(&places) {
                    state.book.remove(id);
                    if let Some(checks) = self.checks.get() {
                        checks.forget(&(address..address + bytes as u64));
                    }
                }
                for &(address, bytes) in &places {
                    state.stats.reserved_bytes -= bytes;
                    state.log(PoolEventKind::Trim, (address, bytes, bytes), None, None);
                }
                outcome.map(|()| bytes)
            }
            Ok(Released::Kept) => {
                put_back(&mut state);
                Ok(0)
            }
            Err(error) => {
                put_back(&mut state);
                Err(error)
            }
        }
    }

    fn out_of_memory(&self, requested: usize) -> Error {
        let (free, total, device) = self.backing.report();
        let stats = self.stats();
        let PoolStats {
            in_use_bytes: in_use,
            reserved_bytes: reserved,
            largest_free_bytes: largest_free,
            ..
        } = stats;
        Error::OutOfMemory { device, requested, in_use, reserved, largest_free, free, total }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every point where a thread could panic while holding the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_growth(&self) -> MutexGuard<'_, ()> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Where the device does not answer any more, its memory is gone with its context.
        if self.give_back(|_| true).is_ok() {
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            let mut left = Vec::new();
            while let Some(id) = state.book.withdraw_oldest() {
                left.push(state.book.place_of(id));
            }
            // SAFETY: free memory of this pool, which ends here.
            unsafe { self.backing.take_over(&left) };
        }
    }
}
