//! The memory pool: where every tensor's memory comes from.
//!
//! A block is cut to a size class and kept for reuse when it is given back. Reuse is *stream-ordered*: a block that was
//! used on a stream goes to the next user of that stream at once, without waiting, since the stream itself runs the two
//! in order; another stream first waits for an event of the old one.
//!
//! The pool never holds more than was in use at its peak, rounded up to size classes: before it would grow beyond that,
//! the free blocks that lay unused longest go back to the device, which waits for the device's work. A workload that
//! repeats its sizes comes to that at its start only. All free blocks go back when the device has no more to give, or on
//! [`Pool::trim`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::backing::Backing;
use crate::error::Error;
use crate::queue::Queue;

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
    /// Live tensors, without those of no bytes.
    pub num_live: usize,
    /// Allocations so far, without those of no bytes.
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
    /// Blocks given back so far: the clock of `FreeBlock::freed_at`.
    num_freed: u64,
    stats: PoolStats,
}

#[derive(Debug)]
struct FreeBlock {
    address: u64,
    /// The stream in whose order the memory was used last.
    queue: Queue,
    freed_at: u64,
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

    /// The memory goes back in this queue's order. Whoever used it before has been waited for by that queue.
    pub(crate) fn give_to(&mut self, queue: &Queue) {
        self.queue = queue.clone();
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.class == 0 {
            return;
        }
        self.pool.backing.assign(self.address, self.class, 0);
        let mut state = self.pool.lock();
        state.stats.requested_bytes -= self.requested;
        state.stats.in_use_bytes -= self.class;
        state.stats.num_live -= 1;
        state.num_freed += 1;
        let block = FreeBlock { address: self.address, queue: self.queue.clone(), freed_at: state.num_freed };
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

    /// Memory for use in `queue`'s order.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize, queue: &Queue) -> Result<Block, Error> {
        let class = size_class(bytes);
        let block =
            |address| Block { address, requested: bytes, class, queue: queue.clone(), pool: self.clone() };
        if class == 0 {
            return Ok(block(0));
        }
        let mut state = self.lock();
        let address = match state.take(class, queue) {
            Some(free) => {
                if let Err(error) = queue.follow(&free.queue) {
                    state.free.entry(class).or_default().push(free);
                    return Err(error);
                }
                state.stats.num_reused += 1;
                free.address
            }
            None => {
                self.make_room(&mut state, class)?;
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
        self.backing.assign(address, class, bytes);
        let stats = &mut state.stats;
        stats.num_allocations += 1;
        stats.num_live += 1;
        stats.requested_bytes += bytes;
        stats.in_use_bytes += class;
        stats.peak_in_use_bytes = stats.peak_in_use_bytes.max(stats.in_use_bytes);
        Ok(block(address))
    }

    /// Gives free blocks back, those that were freed first, until `class` more bytes do not exceed the peak.
    fn make_room(&self, state: &mut State, class: usize) -> Result<(), Error> {
        let PoolStats { in_use_bytes, peak_in_use_bytes, reserved_bytes, .. } = state.stats;
        let limit = peak_in_use_bytes.max(in_use_bytes + class);
        let surplus = (reserved_bytes + class).saturating_sub(limit);
        let (mut oldest, mut bytes) = (Vec::new(), 0);
        while bytes < surplus
            && let Some((class, block)) = state.take_oldest()
        {
            bytes += class;
            oldest.push((class, block));
        }
        self.release(state, oldest).map(|_| ())
    }

    /// Gives all free blocks back to the device, after waiting for its work. Returns how many bytes that were: none while
    /// a graph is being recorded.
    pub fn trim(&self) -> Result<usize, Error> {
        self.trim_locked(&mut self.lock())
    }

    fn trim_locked(&self, state: &mut State) -> Result<usize, Error> {
        let free = state
            .free
            .drain()
            .flat_map(|(class, blocks)| blocks.into_iter().map(move |block| (class, block)));
        let free = free.collect();
        self.release(state, free)
    }

    /// Gives these free blocks back; they stay free if that fails.
    fn release(&self, state: &mut State, blocks: Vec<(usize, FreeBlock)>) -> Result<usize, Error> {
        if blocks.is_empty() {
            return Ok(0);
        }
        let places: Vec<(u64, usize)> = blocks.iter().map(|(class, block)| (block.address, *class)).collect();
        // SAFETY: free blocks of this pool, taken off its lists: nobody has their addresses.
        let released = unsafe { self.backing.release(&places) };
        if let Ok(true) = released {
            let bytes = places.iter().map(|(_, class)| class).sum();
            state.stats.reserved_bytes -= bytes;
            return Ok(bytes);
        }
        for (class, block) in blocks {
            state.free.entry(class).or_default().push(block);
        }
        released.map(|_| 0)
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
    /// A free block of the class: one of this stream if there is one, else the one that was given back first, of those whose stream is
    /// not being recorded: who waited for that would be recorded too.
    fn take(&mut self, class: usize, queue: &Queue) -> Option<FreeBlock> {
        let blocks = self.free.get_mut(&class)?;
        let own = blocks.iter().rposition(|block| block.queue == *queue);
        let index =
            own.or_else(|| blocks.iter().position(|block| matches!(block.queue.is_recorded(), Ok(false))))?;
        Some(blocks.remove(index))
    }

    /// The free block that was given back first, with its size class.
    fn take_oldest(&mut self) -> Option<(usize, FreeBlock)> {
        // The lists are in the order of freeing, but for a block that came back after a failed wait.
        let oldest = self.free.iter().filter_map(|(&class, blocks)| Some((class, blocks.first()?.freed_at)));
        let (class, _) = oldest.min_by_key(|&(_, freed_at)| freed_at)?;
        Some((class, self.free.get_mut(&class)?.remove(0)))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut state = std::mem::take(state);
        // Where the device does not answer any more, its memory is gone with its context.
        if self.trim_locked(&mut state).is_ok() {
            let left = state
                .free
                .iter()
                .flat_map(|(&class, blocks)| blocks.iter().map(move |block| (block.address, class)));
            // SAFETY: free blocks of this pool, which ends here.
            unsafe { self.backing.take_over(&left.collect::<Vec<_>>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use abi::DType;

    /// A device of so many bytes that hands out addresses which nobody touches, and checks what comes back.
    #[derive(Debug)]
    struct Ledger {
        held: Mutex<HashMap<u64, usize>>,
        capacity: usize,
        next: AtomicUsize,
        num_allocated: AtomicUsize,
        num_refused: AtomicUsize,
        num_synchronized: AtomicUsize,
        is_recording: AtomicBool,
        left: Mutex<Vec<(u64, usize)>>,
    }

    impl Ledger {
        fn new(capacity: usize) -> Arc<Self> {
            Arc::new(Ledger {
                held: Mutex::default(),
                capacity,
                next: AtomicUsize::new(256),
                num_allocated: AtomicUsize::new(0),
                num_refused: AtomicUsize::new(0),
                num_synchronized: AtomicUsize::new(0),
                is_recording: AtomicBool::new(false),
                left: Mutex::default(),
            })
        }

        fn held_bytes(&self) -> usize {
            self.held.lock().unwrap().values().sum()
        }
    }

    impl Backing for Arc<Ledger> {
        fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
            if self.held_bytes() + bytes > self.capacity {
                self.num_refused.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
            self.num_allocated.fetch_add(1, Ordering::Relaxed);
            let address = self.next.fetch_add(bytes.next_multiple_of(256), Ordering::Relaxed) as u64;
            self.held.lock().unwrap().insert(address, bytes);
            Ok(Some(address))
        }

        unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<bool, Error> {
            if self.is_recording.load(Ordering::Relaxed) {
                return Ok(false);
            }
            self.num_synchronized.fetch_add(1, Ordering::Relaxed);
            for &(address, bytes) in blocks {
                assert_eq!(self.held.lock().unwrap().remove(&address), Some(bytes), "release of {address}");
            }
            Ok(true)
        }

        unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
            self.left.lock().unwrap().extend(blocks);
        }

        fn report(&self) -> (usize, usize, String) {
            (self.capacity - self.held_bytes(), self.capacity, "the ledger".into())
        }
    }

    fn pool(capacity: usize) -> (Arc<Ledger>, Arc<Pool>, Queue) {
        let ledger = Ledger::new(capacity);
        let pool = Pool::new(Box::new(ledger.clone()));
        (ledger, pool, Queue::Cpu)
    }

    #[test]
    fn classes_waste_at_most_an_eighth() {
        let near = |size: usize| [size - 1, size, size + 1];
        let powers = (12..40).flat_map(|bits| near(1 << bits).into_iter().chain(near(3 << (bits - 1))));
        for bytes in (4096..200_000).chain(powers).filter(|&bytes| bytes >= 4096) {
            let class = size_class(bytes);
            assert!(class >= bytes && class - bytes <= bytes / 8, "{bytes} in {class}");
            assert_eq!(size_class(class), class, "{bytes}");
        }
        assert_eq!([0, 1, 512, 513, 4097].map(size_class), [0, 512, 512, 1024, 4608]);
        let mut classes: Vec<usize> = (1..1 << 20).map(size_class).collect();
        assert!(classes.is_sorted());
        classes.dedup();
        assert!(classes.len() < 100, "{} classes up to 1 MiB", classes.len());
    }

    #[test]
    fn a_dropped_block_is_reused() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(1 << 30);
        let first = pool.allocate(5000, &stream)?;
        let (address, kept) = (first.address(), pool.allocate(5000, &stream)?);
        drop(first);
        // Another size of the same class; another class is another block.
        let second = pool.allocate(4900, &stream)?;
        assert_eq!(second.address(), address);
        assert_ne!(pool.allocate(6000, &stream)?.address(), address);
        drop((second, kept));
        let stats = pool.stats();
        assert_eq!((stats.num_reused, stats.num_allocations, stats.num_live), (1, 4, 0));
        assert_eq!(ledger.num_allocated.load(Ordering::Relaxed), 3);
        Ok(())
    }

    /// While a graph is recorded nothing goes back to the device: what is free stays so, and outlives its pool.
    #[test]
    fn a_recording_keeps_all_memory() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(1 << 30);
        let blocks = [pool.allocate(5000, &stream)?, pool.allocate(100, &stream)?];
        let mut held: Vec<(u64, usize)> = blocks.iter().map(|block| (block.address(), block.class)).collect();
        drop(blocks);
        ledger.is_recording.store(true, Ordering::Relaxed);
        assert_eq!(pool.trim()?, 0);
        assert_eq!(pool.stats().reserved_bytes, ledger.held_bytes());
        drop(pool);
        let mut left = std::mem::take(&mut *ledger.left.lock().unwrap());
        left.sort();
        held.sort();
        assert_eq!(left, held);
        Ok(())
    }

    #[test]
    fn blocks_of_no_bytes_hold_nothing() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(0);
        let block = pool.allocate(0, &stream)?;
        assert_eq!((pool.stats(), ledger.held_bytes()), (PoolStats::default(), 0));
        drop(block);
        assert_eq!(pool.stats(), PoolStats::default());

        let device = Device::cpu();
        let stream = device.stream()?;
        let tensor = Tensor::from_slice::<f32>(&stream, &[3, 0], &[])?;
        assert!(tensor.to_vec::<f32>(&stream)?.is_empty());
        assert_eq!(device.pool().stats(), PoolStats::default());
        Ok(())
    }

    /// Takes and drops blocks as `choices` say, with the statistics kept by hand beside it.
    fn run_sequence(
        choices: impl Iterator<Item = (usize, usize)>,
        max_live: usize,
        (ledger, pool, stream): (&Ledger, &Arc<Pool>, &Queue),
    ) -> Result<(), TestCaseError> {
        let mut live: Vec<(Block, usize)> = Vec::new();
        let mut expected = PoolStats::default();
        for (bytes, choice) in choices {
            if live.len() >= max_live || (!live.is_empty() && choice % 2 == 0) {
                let (block, bytes) = live.swap_remove(choice / 2 % live.len());
                drop(block);
                expected.requested_bytes -= bytes;
                expected.in_use_bytes -= size_class(bytes);
                expected.num_live -= 1;
            } else {
                let block = pool.allocate(bytes, stream).map_err(|e| TestCaseError::fail(e.to_string()))?;
                let unique = live.iter().all(|(other, _)| other.address() != block.address());
                prop_assert!(unique, "address {} twice", block.address());
                live.push((block, bytes));
                expected.requested_bytes += bytes;
                expected.in_use_bytes += size_class(bytes);
                expected.peak_in_use_bytes = expected.peak_in_use_bytes.max(expected.in_use_bytes);
                expected.num_live += 1;
                expected.num_allocations += 1;
            }
            let stats = pool.stats();
            prop_assert_eq!(stats.reserved_bytes, ledger.held_bytes());
            prop_assert!(stats.in_use_bytes <= stats.reserved_bytes, "{:?}", stats);
            prop_assert!(stats.reserved_bytes <= stats.peak_in_use_bytes, "{:?}", stats);
            let num_new = ledger.num_allocated.load(Ordering::Relaxed);
            prop_assert_eq!(stats.num_reused + num_new, stats.num_allocations);
            let PoolStats { reserved_bytes, num_reused, .. } = stats;
            prop_assert_eq!(stats, PoolStats { reserved_bytes, num_reused, ..expected });
        }
        drop(live);
        let stats = pool.stats();
        prop_assert_eq!((stats.requested_bytes, stats.in_use_bytes, stats.num_live), (0, 0, 0));
        prop_assert_eq!(pool.trim().ok(), Some(stats.reserved_bytes));
        prop_assert_eq!((pool.stats().reserved_bytes, ledger.held_bytes()), (0, 0));
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

        #[test]
        fn statistics_are_exact(seed: u64, max_live in 1usize..60, num_sizes in 1usize..40) {
            let (ledger, pool, stream) = pool(usize::MAX / 2);
            let random = random(seed);
            let sizes: Vec<usize> = (0..num_sizes).map(|_| 1 + random(1 << (4 + random(20)))).collect();
            let choices = (0..10_000).map(|_| (sizes[random(num_sizes)], random(1 << 20)));
            run_sequence(choices, max_live, (&ledger, &pool, &stream))?;
        }
    }

    /// Numbers below a bound, the same for the same seed (Marsaglia, *Xorshift RNGs*, 2003).
    fn random(seed: u64) -> impl Fn(usize) -> usize {
        let state = std::cell::Cell::new(seed | 1);
        move |bound| {
            let mut x = state.get();
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            state.set(x);
            (x >> 11) as usize % bound
        }
    }

    /// As many sizes as there are prompts, and never more than 16 blocks live: what is reserved stays at the peak.
    #[test]
    fn no_growth() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(usize::MAX / 2);
        let random = random(42);
        let mut live = Vec::new();
        for _ in 0..100_000 {
            if live.len() == 16 {
                live.swap_remove(random(16));
            }
            live.push(pool.allocate(1 + random(1 << 20), &stream)?);
        }
        assert!(ledger.held_bytes() <= pool.stats().peak_in_use_bytes);
        assert!(pool.stats().peak_in_use_bytes <= 16 * size_class(1 << 20));
        Ok(())
    }

    /// A workload that repeats its sizes takes nothing from the device, and waits for nothing, after its first round.
    #[test]
    fn repeated_sizes_need_no_device() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(usize::MAX / 2);
        let round = || -> Result<(), Error> {
            let held = pool.allocate(100_000, &stream)?;
            for bytes in [3000, 50_000, 700_000] {
                let (a, b) = (pool.allocate(bytes, &stream)?, pool.allocate(2 * bytes, &stream)?);
                drop((a, b));
            }
            drop(held);
            Ok(())
        };
        // All live at once first, so that the peak has room for every size.
        let sizes = [100_000, 3000, 6000, 50_000, 100_000, 700_000, 1_400_000];
        let all: Result<Vec<Block>, Error> =
            sizes.into_iter().map(|bytes| pool.allocate(bytes, &stream)).collect();
        drop(all?);
        let counts = || [&ledger.num_allocated, &ledger.num_synchronized].map(|n| n.load(Ordering::Relaxed));
        let before = counts();
        for _ in 0..100 {
            round()?;
        }
        assert_eq!(counts(), before);
        Ok(())
    }

    /// The blocks that lay unused longest make room for a new size.
    #[test]
    fn the_oldest_blocks_make_room() -> Result<(), Error> {
        let (_ledger, pool, stream) = pool(usize::MAX / 2);
        let blocks = [1024, 2048, 4096].map(|bytes| pool.allocate(bytes, &stream).unwrap());
        let [a, b, c] = blocks;
        let address = c.address();
        drop(b);
        drop(a);
        drop(c);
        assert_eq!(pool.stats().reserved_bytes, 7168);
        let _new = pool.allocate(3072, &stream)?;
        // The 2048 went first, then the 1024; the 4096 is still there.
        assert_eq!(pool.stats().reserved_bytes, 7168);
        assert_eq!(pool.allocate(4096, &stream)?.address(), address);
        Ok(())
    }

    #[test]
    fn threads() {
        let (ledger, pool, stream) = pool(usize::MAX / 2);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (pool, stream) = (&pool, &stream);
                scope.spawn(move || {
                    let random = random(thread + 1);
                    let mut live = Vec::new();
                    for _ in 0..5000 {
                        if live.len() > random(10) {
                            live.swap_remove(random(live.len()));
                        } else {
                            live.push(pool.allocate(1 + random(100_000), stream).unwrap());
                        }
                    }
                });
            }
        });
        let stats = pool.stats();
        assert_eq!((stats.num_live, stats.in_use_bytes, stats.requested_bytes), (0, 0, 0));
        assert!(stats.reserved_bytes <= stats.peak_in_use_bytes);
        assert_eq!(stats.reserved_bytes, ledger.held_bytes());
        assert_eq!(pool.trim().unwrap(), stats.reserved_bytes);
        assert_eq!(ledger.held_bytes(), 0);
        drop((stream, pool));
    }

    #[test]
    fn out_of_memory() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(64 << 10);
        let held = pool.allocate(20_000, &stream)?;
        let freed = [pool.allocate(16 << 10, &stream)?, pool.allocate(16 << 10, &stream)?];
        drop(freed);
        // Fits the peak but not what the device has left in one piece beside the free blocks: these go back first.
        let large = pool.allocate(40 << 10, &stream)?;
        assert_eq!(ledger.held_bytes(), (20 << 10) + (40 << 10));
        let refused = ledger.num_refused.load(Ordering::Relaxed);
        let error = pool.allocate(5000, &stream).unwrap_err();
        assert_eq!(ledger.num_refused.load(Ordering::Relaxed), refused + 2, "one retry");
        assert_eq!(
            error.to_string(),
            "out of memory on the ledger: 5000 bytes requested; this pool has 61440 in use of 61440 reserved; \
             the device has 4096 free of 65536"
        );
        // A failed allocation leaves no trace, and what is given back can be had again.
        assert_eq!((pool.stats().num_live, pool.stats().in_use_bytes), (2, 61440));
        drop((held, large));
        pool.allocate(60 << 10, &stream)?;
        Ok(())
    }

    /// Within the peak, but another program has taken the room meanwhile: the device is asked again after a trim.
    #[test]
    fn trim_before_giving_up() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(10 << 10);
        drop(pool.allocate(8192, &stream)?);
        assert_eq!(pool.trim()?, 8192);
        ledger.held.lock().unwrap().insert(1, 6144);
        let (_kept, freed) = (pool.allocate(2048, &stream)?, pool.allocate(2048, &stream)?);
        drop(freed);
        let block = pool.allocate(1024, &stream)?;
        assert_eq!(ledger.num_refused.load(Ordering::Relaxed), 1);
        assert_eq!(pool.stats().reserved_bytes, 2048 + 1024);
        drop(block);
        assert_eq!(pool.trim()?, 1024);
        assert_eq!(pool.trim()?, 0);
        Ok(())
    }

    #[test]
    fn a_dropped_pool_gives_everything_back() -> Result<(), Error> {
        let (ledger, pool, stream) = pool(1 << 20);
        let (first, second) = (pool.allocate(1000, &stream)?, pool.allocate(2000, &stream)?);
        drop(first);
        drop(pool);
        assert!(ledger.held_bytes() > 0, "a live block keeps its pool");
        drop(second);
        assert_eq!(ledger.held_bytes(), 0);
        Ok(())
    }

    #[test]
    fn contents_survive_their_neighbours() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let random = random(7);
        let mut live: Vec<(Tensor, Vec<u32>)> = Vec::new();
        for round in 0..2000 {
            if live.len() == 20 {
                let (tensor, data) = live.swap_remove(random(20));
                assert_eq!(tensor.to_vec::<u32>(&stream)?, data, "round {round}");
            }
            let data: Vec<u32> = (0..random(3000)).map(|_| random(1 << 32) as u32).collect();
            live.push((Tensor::from_slice(&stream, &[data.len()], &data)?, data));
            // Written over its whole length, right after its neighbour.
            let scratch = Tensor::zeros(&stream, &[1 + random(3000)], DType::U32)?;
            assert!(scratch.to_vec::<u32>(&stream)?.iter().all(|&value| value == 0), "round {round}");
        }
        for (tensor, data) in live {
            assert_eq!(tensor.to_vec::<u32>(&stream)?, data);
        }
        Ok(())
    }
}
