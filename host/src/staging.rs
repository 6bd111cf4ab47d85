//! Host memory that copies go through, so that the host does not wait for the device.
//!
//! A card copies from and to page-locked memory by itself, while the host goes on; any other memory of the host it
//! copies only as far as the driver has room of its own, and then waits. Locking takes much longer than most copies, so
//! what was locked is kept: buffers of powers of two, each with an event behind its last copy, are used again when that
//! has passed. All of it together is bounded by [`Staging::set_limit`]; where there is no room a copy waits as any
//! other.
//!
//! On the CPU and on simulated cards copies are done at once: nothing is staged but what is read, in ordinary memory.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda;
use crate::error::Error;
use crate::queue::Queue;

/// Bytes of the smallest buffer, a page.
const LEAST: usize = 4096;

/// What a device's staging memory holds at most, until [`Staging::set_limit`] says otherwise.
const LIMIT: usize = 64 << 20;

/// Buffers under way that are asked after before a copy does without one: a bound on the time that takes.
const MOST_ASKED: usize = 64;

/// What [`Staging`] holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Bytes of all buffers.
    pub reserved_bytes: usize,
    /// Most of that so far.
    pub peak_reserved_bytes: usize,
    /// Copies that went through a buffer.
    pub num_staged: usize,
    /// Those of them whose buffer was there already.
    pub num_reused: usize,
    /// Copies that found no room, and waited for the device.
    pub num_waited: usize,
}

/// A device's staging memory: see [`Device::staging`](crate::Device::staging). Thread-safe.
#[derive(Debug)]
pub struct Staging {
    source: Source,
    state: Mutex<State>,
}

/// Where buffers come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// The host's allocator.
    Heap,
    /// Page-locked for this card.
    Pinned(Arc<cuda::Context>),
    /// Buffers whose copies pass when the test says so.
    #[cfg(test)]
    Test(tests::Clock),
}

#[derive(Debug)]
enum Buffer {
    Heap(Box<[u64]>),
    Pinned(cuda::Pinned),
    #[cfg(test)]
    Test(tests::Timed),
}

/// The buffers of a size.
#[derive(Debug, Default)]
struct Class {
    free: Vec<Buffer>,
    /// Behind their last copies, the oldest first.
    under_way: VecDeque<Buffer>,
}

#[derive(Debug)]
struct State {
    /// Of 2^i pages each.
    classes: Vec<Class>,
    limit: usize,
    stats: StagingStats,
}

/// The place of a size's class; none if no buffer is as large.
fn class_of(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(LEAST).checked_next_power_of_two()?;
    Some((bytes / LEAST).ilog2() as usize)
}

fn class_bytes(class: usize) -> usize {
    LEAST << class
}

impl Buffer {
    fn bytes(&self) -> usize {
        match self {
            Buffer::Heap(words) => size_of_val(&**words),
            Buffer::Pinned(pinned) => pinned.bytes(),
            #[cfg(test)]
            Buffer::Test(timed) => timed.bytes,
        }
    }

    /// Gives buffers back to the system that no copy uses: all of them, and the first error.
    fn close(buffers: Vec<Buffer>) -> Result<(), Error> {
        let mut outcome = Ok(());
        for buffer in buffers {
            if let Buffer::Pinned(pinned) = buffer {
                // The others go back all the same.
                outcome = outcome.and(pinned.close());
            }
        }
        outcome
    }

    fn has_passed(&self) -> Result<bool, Error> {
        match self {
            Buffer::Heap(_) => Ok(true),
            Buffer::Pinned(pinned) => pinned.has_passed(),
            #[cfg(test)]
            Buffer::Test(timed) => Ok(timed.has_passed()),
        }
    }
}

impl State {
    /// A buffer of the class that no copy uses, if there is one.
    fn reuse(&mut self, class: usize) -> Result<Option<Buffer>, Error> {
        let Some(class) = self.classes.get_mut(class) else { return Ok(None) };
        if let Some(buffer) = class.free.pop() {
            return Ok(Some(buffer));
        }
        match class.under_way.front().map(Buffer::has_passed).transpose()? {
            Some(true) => Ok(class.under_way.pop_front()),
            _ => Ok(None),
        }
    }

    /// The same of those behind the oldest too, which other streams may have passed.
    fn search(&mut self, class: usize) -> Result<Option<Buffer>, Error> {
        let Some(class) = self.classes.get_mut(class) else { return Ok(None) };
        for at in 0..class.under_way.len().min(MOST_ASKED) {
            if class.under_way[at].has_passed()? {
                return Ok(class.under_way.remove(at));
            }
        }
        Ok(None)
    }

    /// Takes buffers that no copy uses from other classes until `bytes` more are within the limit.
    fn make_room(&mut self, bytes: usize) -> Result<Vec<Buffer>, Error> {
        let mut gone = Vec::new();
        for class in (0..self.classes.len()).rev() {
            while self.stats.reserved_bytes + bytes > self.limit
                && let Some(buffer) = self.reuse(class)?
            {
                self.stats.reserved_bytes -= class_bytes(class);
                gone.push(buffer);
            }
        }
        Ok(gone)
    }
}

impl Staging {
    pub(crate) fn new(source: Source) -> Arc<Self> {
        let state = State { classes: Vec::new(), limit: LIMIT, stats: StagingStats::default() };
        Arc::new(Staging { source, state: Mutex::new(state) })
    }

    /// What it holds now, and did.
    pub fn stats(&self) -> StagingStats {
        self.lock().stats
    }

    /// From here on no buffer is made that would have all of them exceed so many bytes, 64 MiB until this is called.
    /// What is there stays until room is needed or [`Staging::trim`] is called. With 0 every copy waits.
    pub fn set_limit(&self, bytes: usize) {
        self.lock().limit = bytes;
    }

    /// Gives the buffers back to the system that no copy uses, and returns their bytes.
    ///
    /// **Errors**: [`Error::Driver`], also for work of the device that failed: the buffers that were asked after before
    /// it are gone then.
    pub fn trim(&self) -> Result<usize, Error> {
        let mut gone = Vec::new();
        let mut state = self.lock();
        for class in 0..state.classes.len() {
            while let Some(buffer) = state.reuse(class)? {
                state.stats.reserved_bytes -= class_bytes(class);
                gone.push(buffer);
            }
        }
        drop(state);
        let bytes = gone.iter().map(Buffer::bytes).sum();
        Buffer::close(gone).map(|()| bytes)
    }

    /// A buffer of at least so many bytes that no copy uses; none if there is no room.
    fn take(&self, bytes: usize) -> Result<Option<Buffer>, Error> {
        let mut state = self.lock();
        let Some(class) = class_of(bytes) else { return Ok(None) };
        let size = class_bytes(class);
        let mut found = state.reuse(class)?;
        if found.is_none() && size <= state.limit {
            let gone = if state.stats.reserved_bytes + size > state.limit {
                found = state.search(class)?;
                if found.is_none() { state.make_room(size)? } else { Vec::new() }
            } else {
                Vec::new()
            };
            if found.is_none() && state.stats.reserved_bytes + size <= state.limit {
                // Before it is there, so that others keep to the limit too; locking it takes its time.
                state.stats.reserved_bytes += size;
                drop(state);
                let made = Buffer::close(gone).and_then(|()| self.make(size));
                state = self.lock();
                match made {
                    Ok(Some(buffer)) => {
                        let stats = &mut state.stats;
                        stats.peak_reserved_bytes = stats.peak_reserved_bytes.max(stats.reserved_bytes);
                        stats.num_staged += 1;
                        return Ok(Some(buffer));
                    }
                    Ok(None) => state.stats.reserved_bytes -= size,
                    Err(error) => {
                        state.stats.reserved_bytes -= size;
                        return Err(error);
                    }
                }
            }
        }
        match found {
            Some(_) => {
                state.stats.num_staged += 1;
                state.stats.num_reused += 1;
            }
            None => state.stats.num_waited += 1,
        }
        Ok(found)
    }

    fn make(&self, bytes: usize) -> Result<Option<Buffer>, Error> {
        match &self.source {
            Source::Heap => Ok(Some(Buffer::Heap(vec![0; bytes / size_of::<u64>()].into()))),
            Source::Pinned(context) => Ok(cuda::Pinned::new(context.clone(), bytes)?.map(Buffer::Pinned)),
            #[cfg(test)]
            Source::Test(clock) => Ok(Some(Buffer::Test(clock.buffer(bytes)))),
        }
    }

    /// A buffer with which a copy may be under way, or which is free.
    fn give(&self, buffer: Buffer, is_free: bool) {
        let Some(class) = class_of(buffer.bytes()) else { return };
        let mut state = self.lock();
        if state.classes.len() <= class {
            state.classes.resize_with(class + 1, Class::default);
        }
        let lists = &mut state.classes[class];
        match is_free {
            true => lists.free.push(buffer),
            false => lists.under_way.push_back(buffer),
        }
    }

    /// A buffer is gone, with an error or for another reason.
    fn lose(&self, bytes: usize) {
        self.lock().stats.reserved_bytes -= bytes;
    }

    /// Copies host bytes to `address`, in the queue's order; without waiting for the device where there is room.
    pub(crate) fn upload(&self, queue: &Queue, address: u64, data: &[u8]) -> Result<(), Error> {
        let Queue::Cuda(stream) = queue else { return queue.upload(address, data) };
        if data.is_empty() {
            return Ok(());
        }
        let buffer = match self.take(data.len())? {
            Some(Buffer::Pinned(pinned)) => pinned,
            Some(other) => {
                self.give(other, true);
                return queue.upload(address, data);
            }
            None => return queue.upload(address, data),
        };
        let bytes = buffer.bytes();
        match buffer.upload(stream, address, data) {
            Ok(buffer) => {
                self.give(Buffer::Pinned(buffer), false);
                Ok(())
            }
            Err(error) => {
                self.lose(bytes);
                Err(error)
            }
        }
    }

    /// Copies bytes at `address` to a buffer, in the queue's order; without waiting for the device where there is room.
    pub(crate) fn download(
        self: &Arc<Self>,
        queue: &Queue,
        address: u64,
        bytes: usize,
    ) -> Result<Arrival, Error> {
        let arrival = |buffer, has_passed, is_kept| Arrival {
            buffer: Some(buffer),
            bytes,
            has_passed,
            is_kept,
            staging: self.clone(),
        };
        let taken = if bytes == 0 { None } else { self.take(bytes)? };
        match (taken, queue) {
            (Some(Buffer::Pinned(pinned)), Queue::Cuda(stream)) => {
                let size = pinned.bytes();
                match pinned.download(stream, address, bytes) {
                    Ok(pinned) => Ok(arrival(Buffer::Pinned(pinned), false, true)),
                    Err(error) => {
                        self.lose(size);
                        Err(error)
                    }
                }
            }
            (Some(Buffer::Heap(words)), _) => {
                let mut arrival = arrival(Buffer::Heap(words), true, true);
                queue.download(address, arrival.heap())?;
                Ok(arrival)
            }
            (other, _) => {
                if let Some(other) = other {
                    self.give(other, true);
                }
                let words = vec![0; bytes.div_ceil(size_of::<u64>())].into();
                let mut arrival = arrival(Buffer::Heap(words), true, false);
                queue.download(address, arrival.heap())?;
                Ok(arrival)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The lists hold whole buffers at any time, and a count that is off by one harms nobody.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes on their way to the host.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// None once it is dropped.
    buffer: Option<Buffer>,
    bytes: usize,
    has_passed: bool,
    /// Whether the buffer goes back to the staging memory.
    is_kept: bool,
    staging: Arc<Staging>,
}

impl Arrival {
    /// Whether the bytes are there, as far as can be told without waiting.
    pub(crate) fn query(&mut self) -> Result<bool, Error> {
        if !self.has_passed {
            self.has_passed = self.buffer.as_ref().map_or(Ok(true), Buffer::has_passed)?;
        }
        Ok(self.has_passed)
    }

    /// The bytes, for which it waits.
    pub(crate) fn read(&mut self) -> Result<&[u8], Error> {
        if !self.has_passed {
            if let Some(Buffer::Pinned(pinned)) = &self.buffer {
                pinned.wait()?;
            }
            self.has_passed = true;
        }
        Ok(match &self.buffer {
            Some(Buffer::Heap(words)) => &bytemuck::cast_slice(words)[..self.bytes],
            // SAFETY: the only copy with this buffer since it was taken is `Staging::download`'s, which has passed:
            // above.
            Some(Buffer::Pinned(pinned)) => unsafe { pinned.read(self.bytes) },
            _ => &[],
        })
    }

    /// The bytes of ordinary memory, to be written.
    fn heap(&mut self) -> &mut [u8] {
        match &mut self.buffer {
            Some(Buffer::Heap(words)) => &mut bytemuck::cast_slice_mut(words)[..self.bytes],
            _ => &mut [],
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && self.is_kept
        {
            self.staging.give(buffer, self.has_passed);
        }
    }
}

/// A tensor's elements on their way to the host: [`TensorView::enqueue_read`](crate::TensorView::enqueue_read).
///
/// It may be dropped before they are there, and outlive the tensor, the stream and the device.
#[derive(Debug)]
pub struct Download<T> {
    arrival: Arrival,
    elements: PhantomData<T>,
}

impl<T: bytemuck::Pod> Download<T> {
    pub(crate) fn new(arrival: Arrival) -> Self {
        Download { arrival, elements: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.arrival.bytes / size_of::<T>().max(1)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the elements are there, as far as can be told without waiting: while anything is being recorded
    /// ([`Stream::capture`](crate::Stream::capture)) they are said not to be.
    ///
    /// **Errors**: [`Error::Driver`], also for work before the copy that failed.
    pub fn query(&mut self) -> Result<bool, Error> {
        self.arrival.query()
    }

    /// The elements, in order; waits until they are there, and for no later work of the stream.
    ///
    /// **Errors**: [`Error::Driver`], also for work before the copy that failed.
    pub fn read(&mut self) -> Result<&[T], Error> {
        self.arrival.read().map(bytemuck::cast_slice)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;

    /// Copies pass in the order of their numbers.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Clock(Arc<AtomicUsize>, Arc<AtomicUsize>);

    #[derive(Debug)]
    pub(super) struct Timed {
        pub(super) bytes: usize,
        copy: usize,
        clock: Clock,
    }

    impl Clock {
        pub(super) fn buffer(&self, bytes: usize) -> Timed {
            self.1.fetch_add(bytes, Ordering::Relaxed);
            Timed { bytes, copy: 0, clock: self.clone() }
        }

        fn held(&self) -> usize {
            self.1.load(Ordering::Relaxed)
        }
    }

    impl Timed {
        pub(super) fn has_passed(&self) -> bool {
            self.copy <= self.clock.0.load(Ordering::Relaxed)
        }
    }

    impl Drop for Timed {
        fn drop(&mut self) {
            assert!(self.has_passed(), "copy {} is under way", self.copy);
            self.clock.1.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }

    fn staging() -> (Clock, Arc<Staging>) {
        let clock = Clock::default();
        (clock.clone(), Staging::new(Source::Test(clock)))
    }

    /// A copy of this number through a buffer of the size; whether there was room.
    fn copy(staging: &Staging, bytes: usize, number: usize) -> bool {
        match staging.take(bytes).unwrap() {
            Some(Buffer::Test(mut timed)) => {
                assert!(timed.has_passed() && timed.bytes >= bytes);
                timed.copy = number;
                staging.give(Buffer::Test(timed), false);
                true
            }
            Some(other) => panic!("{other:?}"),
            None => false,
        }
    }

    #[test]
    fn classes_are_powers_of_two() {
        for (bytes, class) in
            [(1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20), ((1 << 20) + 1, 2 << 20)]
        {
            assert_eq!(class_bytes(class_of(bytes).unwrap()), class);
        }
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn buffers_are_used_again_when_their_copies_have_passed() {
        let (clock, staging) = staging();
        assert!(copy(&staging, 5000, 1));
        // The first is under way.
        assert!(copy(&staging, 6000, 2));
        assert_eq!((staging.stats().reserved_bytes, staging.stats().num_reused), (16384, 0));
        clock.0.store(1, Ordering::Relaxed);
        assert!(copy(&staging, 8192, 3));
        assert_eq!((staging.stats().reserved_bytes, staging.stats().num_reused), (16384, 1));
        clock.0.store(2, Ordering::Relaxed);
        assert_eq!(staging.trim().unwrap(), 8192);
        clock.0.store(3, Ordering::Relaxed);
        assert_eq!((staging.trim().unwrap(), clock.held()), (8192, 0));
    }

    #[test]
    fn a_copy_without_room_does_without_a_buffer() {
        let (clock, staging) = staging();
        staging.set_limit(3 * 4096);
        assert!(copy(&staging, 4096, 1) && copy(&staging, 4096, 2) && copy(&staging, 4096, 3));
        assert!(!copy(&staging, 4096, 4), "three are under way");
        assert!(!copy(&staging, 8193, 4), "never");
        assert_eq!((staging.stats().num_waited, clock.held()), (2, 3 * 4096));
        // What is free of one size makes room for another.
        clock.0.store(2, Ordering::Relaxed);
        assert!(copy(&staging, 8192, 5));
        assert_eq!((staging.stats().reserved_bytes, clock.held()), (3 * 4096, 3 * 4096));
        staging.set_limit(0);
        clock.0.store(9, Ordering::Relaxed);
        // What is there is used; nothing more comes to it.
        assert!(copy(&staging, 8192, 6) && !copy(&staging, 1 << 20, 7));
    }

    /// A stream that stands still does not keep buffers of others from being used again.
    #[test]
    fn others_are_asked_after_before_a_copy_waits() {
        let (clock, staging) = staging();
        staging.set_limit(3 * 4096);
        assert!(copy(&staging, 1, 100) && copy(&staging, 1, 1) && copy(&staging, 1, 2));
        clock.0.store(1, Ordering::Relaxed);
        assert!(copy(&staging, 1, 3) && !copy(&staging, 1, 4));
        clock.0.store(100, Ordering::Relaxed);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

        /// Never a buffer that a copy is under way with, never more than the largest limit, and the count is right.
        #[test]
        fn against_a_clock(steps in prop::collection::vec((0usize..6, 1usize..100_000, 0usize..400_000), 1..200)) {
            let (clock, staging) = staging();
            let (mut number, mut most) = (0, LIMIT);
            for (step, bytes, limit) in steps {
                match step {
                    0 => {
                        staging.set_limit(limit);
                        // What was more before stays.
                        most = limit.max(clock.held());
                    }
                    1 => drop(clock.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| Some((now + 3).min(number)))),
                    2 => drop(staging.trim().unwrap()),
                    _ => {
                        number += 1;
                        if !copy(&staging, bytes, number) {
                            number -= 1;
                        }
                    }
                }
                prop_assert!(clock.held() <= most);
                prop_assert_eq!(staging.stats().reserved_bytes, clock.held());
            }
            clock.0.store(number, Ordering::Relaxed);
            staging.trim().unwrap();
            prop_assert_eq!((clock.held(), staging.stats().reserved_bytes), (0, 0));
        }
    }
}
