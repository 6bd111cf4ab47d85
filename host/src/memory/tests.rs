//! The pool over a device that keeps a ledger.

use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::ledger::{Ledger, pool};
use super::*;
use crate::device::Device;
use crate::tensor::Tensor;
use abi::DType;

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
    let mut num_from_device_before = 0;
    for (bytes, choice) in choices {
        if live.len() >= max_live || (!live.is_empty() && choice % 2 == 0) {
            let (block, bytes) = live.swap_remove(choice / 2 % live.len());
            drop(block);
            expected.requested_bytes -= bytes;
            expected.in_use_bytes -= size_class(bytes);
            expected.num_live -= 1;
        } else {
            let block = pool.allocate(bytes, stream).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let end = |block: &Block| block.address() + block.class as u64;
            let is_apart =
                |(other, _): &(Block, usize)| other.address() >= end(&block) || end(other) <= block.address();
            prop_assert!(live.iter().all(is_apart), "{:?} overlaps another", block);
            prop_assert!(block.class >= bytes && block.address() % 256 == 0, "{:?}", block);
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
        let num_new = ledger.num_allocated.load(Ordering::Relaxed);
        prop_assert_eq!(
            (stats.num_from_device, stats.num_reused + num_new),
            (num_new, stats.num_allocations)
        );
        let PoolStats { reserved_bytes, num_reused, num_from_device, largest_free_bytes, .. } = stats;
        prop_assert!(largest_free_bytes <= stats.free_bytes(), "{:?}", stats);
        expected.peak_reserved_bytes = expected.peak_reserved_bytes.max(reserved_bytes);
        let seen = PoolStats { reserved_bytes, num_reused, num_from_device, largest_free_bytes, ..expected };
        prop_assert_eq!(stats, seen);
        // More than the peak is held only where nothing can go back: pieces of segments that are in use.
        if num_new > num_from_device_before && stats.reserved_bytes > stats.peak_in_use_bytes {
            prop_assert_eq!(pool.trim().ok(), Some(0));
            prop_assert!(live.iter().any(|(block, _)| block.class >= 1 << 20), "{:?}", stats);
        }
        num_from_device_before = num_new;
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
pub(super) fn random(seed: u64) -> impl Fn(usize) -> usize {
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
    assert!(stats.reserved_bytes <= pool.lock().bound);
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
         the device has 4096 free of 65536, 904 too few"
    );
    // A failed allocation leaves no trace, and what is given back can be had again.
    assert_eq!((pool.stats().num_live, pool.stats().in_use_bytes), (2, 61440));
    drop((held, large));
    pool.allocate(60 << 10, &stream)?;
    Ok(())
}

/// What lies free between blocks in use cannot go back: the error says how much that is, and of what size.
#[test]
fn out_of_memory_in_pieces() -> Result<(), Error> {
    const MIB: usize = 1 << 20;
    let (_, pool, stream) = pool(40 * MIB);
    let whole = pool.allocate(32 * MIB, &stream)?;
    drop(whole);
    let mut blocks = Vec::new();
    for _ in 0..8 {
        blocks.push(pool.allocate(4 * MIB, &stream)?);
    }
    // Three pieces: one of two blocks and two of one.
    for index in [6, 4, 2, 1] {
        drop(blocks.remove(index));
    }
    let error = pool.allocate(12 * MIB, &stream).unwrap_err();
    assert_eq!(
        error.to_string(),
        "out of memory on the ledger: 12582912 bytes requested; this pool has 16777216 in use of 33554432 reserved, and \
         16777216 free between what is in use, at most 8388608 in one piece; the device has 8388608 free of 41943040, \
         4194304 too few"
    );
    assert!(matches!(error, Error::OutOfMemory { largest_free, .. } if largest_free == 8 * MIB));
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
    survive_their_neighbours(&Device::cpu())
}

#[test]
fn checked_contents_survive_their_neighbours() -> Result<(), Error> {
    let device = Device::cpu();
    device.pool().start_checks();
    survive_their_neighbours(&device)?;
    device.pool().trim()?;
    assert_eq!(device.pool().faults(), []);
    Ok(())
}

fn survive_their_neighbours(device: &Device) -> Result<(), Error> {
    let stream = device.stream()?;
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

/// The map has each byte once, and its counts are those of the statistics.
#[test]
fn a_map() -> Result<(), Error> {
    const MIB: usize = 1 << 20;
    let (_ledger, pool, queue) = pool(usize::MAX / 2);
    assert_eq!((pool.map().segments, pool.map().sizes(), pool.stats().reuse_rate()), (vec![], vec![], 0.0));
    drop(pool.allocate(8 * MIB, &queue)?);
    let held = [2 * MIB, MIB, 100, 100, 3000].map(|bytes| pool.allocate(bytes, &queue).unwrap());
    drop(pool.allocate(600, &queue)?);
    let [first, ..] = held;
    drop(first);
    let map = pool.map();
    let pieces: Vec<Vec<(usize, bool)>> = map
        .segments
        .iter()
        .map(|segment| segment.pieces.iter().map(|piece| (piece.bytes, piece.is_live)).collect())
        .collect();
    // The others of `held` live on.
    assert_eq!(
        pieces,
        [
            vec![(2 * MIB, false), (MIB, true), (5 * MIB, false)],
            vec![(512, true)],
            vec![(512, true)],
            vec![(3072, true)],
            vec![(1024, false)]
        ]
    );
    let sizes: Vec<_> = map.sizes().iter().map(|size| (size.bytes, size.num_live, size.num_free)).collect();
    let expected = [(512, 2, 0), (1024, 0, 1), (3072, 1, 0), (MIB, 1, 0), (2 * MIB, 0, 1), (5 * MIB, 0, 1)];
    assert_eq!(sizes, expected);
    let stats = map.stats;
    assert_eq!(stats, pool.stats());
    assert_eq!((stats.num_live, stats.in_use_bytes, stats.reserved_bytes), (4, MIB + 4096, 8 * MIB + 5120));
    assert_eq!((stats.num_allocations, stats.num_reused, stats.reuse_rate()), (7, 2, 2.0 / 7.0));
    assert_eq!(stats.fragmentation(), 1.0 - (5 * MIB) as f64 / (7 * MIB + 1024) as f64);
    pool.trim()?;
    assert_eq!(pool.map().segments.len(), 4);
    Ok(())
}

#[test]
fn peaks_begin_anew() -> Result<(), Error> {
    let (ledger, pool, queue) = pool(usize::MAX / 2);
    let peaks = || (pool.stats().peak_in_use_bytes, pool.stats().peak_reserved_bytes);
    drop([pool.allocate(4096, &queue)?, pool.allocate(8192, &queue)?]);
    assert_eq!(peaks(), (12288, 12288));
    pool.reset_peaks();
    assert_eq!(peaks(), (0, 12288));
    let held = pool.allocate(4096, &queue)?;
    assert_eq!(peaks(), (4096, 12288));
    // What may be held is no question of marks.
    drop(pool.allocate(8192, &queue)?);
    assert_eq!((asked(&ledger), pool.stats().reserved_bytes), ([2, 0], 12288));
    pool.trim()?;
    pool.reset_peaks();
    assert_eq!(peaks(), (4096, 4096));
    drop(pool.allocate(1024, &queue)?);
    assert_eq!(peaks(), (5120, 5120));
    drop(held);
    Ok(())
}

/// What is free goes back before the limit is exceeded, and what is needed exceeds it.
#[test]
fn a_soft_limit() -> Result<(), Error> {
    let (ledger, pool, queue) = pool(usize::MAX / 2);
    let round = || -> Result<(), Error> {
        [3072, 4096, 5120, 6144].into_iter().try_for_each(|bytes| pool.allocate(bytes, &queue).map(drop))
    };
    drop([3072, 4096, 5120, 6144].map(|bytes| pool.allocate(bytes, &queue).unwrap()));
    round()?;
    assert_eq!((asked(&ledger), pool.stats().reserved_bytes), ([4, 0], 18432));
    pool.set_soft_limit(10 << 10);
    // Nothing grows, so nothing goes.
    round()?;
    assert_eq!((asked(&ledger), pool.stats().reserved_bytes), ([4, 0], 18432));
    drop(pool.allocate(1024, &queue)?);
    let reserved = pool.stats().reserved_bytes;
    assert!((1024..=10 << 10).contains(&reserved), "{reserved}");
    round()?;
    assert!(pool.stats().reserved_bytes <= 10 << 10);
    let large = pool.allocate(20 << 10, &queue)?;
    assert_eq!(pool.stats().reserved_bytes, 20 << 10);
    let more = pool.allocate(1024, &queue)?;
    assert_eq!(pool.stats().reserved_bytes, 21 << 10);
    drop((large, more));
    pool.set_soft_limit(usize::MAX);
    drop(pool.allocate(4096, &queue)?);
    assert!(pool.stats().reserved_bytes >= 4096);
    Ok(())
}

/// Counts of what the device was asked for: allocations, and waits before giving back.
fn asked(ledger: &Ledger) -> [usize; 2] {
    [&ledger.num_allocated, &ledger.num_synchronized].map(|count| count.load(Ordering::Relaxed))
}

/// Two large sizes in turn share memory: the larger is cut for the smaller, and whole again.
#[test]
fn sizes_that_alternate() -> Result<(), Error> {
    let (ledger, pool, queue) = pool(usize::MAX / 2);
    for round in 0..1000 {
        drop(pool.allocate(if round % 2 == 0 { 100 << 20 } else { 110 << 20 }, &queue)?);
    }
    assert_eq!(asked(&ledger), [2, 1]);
    let stats = pool.stats();
    assert_eq!((stats.num_reused, stats.num_from_device), (998, 2));
    assert_eq!((stats.reserved_bytes, stats.largest_free_bytes), (110 << 20, 110 << 20));
    assert_eq!((stats.free_bytes(), stats.fragmentation()), (110 << 20, 0.0));
    Ok(())
}

/// A stream of its own kind for the pool, which never has work under way.
pub(super) fn other_queue() -> Queue {
    let script = crate::simulator::tests::Script::new((8, 0), Ok(()));
    Device::simulated(script).unwrap().stream().unwrap().queue().clone()
}

/// Free memory of a stream whose work is done becomes one piece again, whoever asks; two streams do not fragment it.
#[test]
fn done_streams_share_memory() -> Result<(), Error> {
    let (ledger, pool, queue) = pool(usize::MAX / 2);
    let other = other_queue();
    let (whole, rest) = (pool.allocate(64 << 20, &queue)?, pool.allocate(64 << 20, &queue)?);
    drop(whole);
    let parts = [&queue, &other, &queue, &other].map(|queue| pool.allocate(16 << 20, queue).unwrap());
    drop(parts);
    drop(pool.allocate(64 << 20, &other)?);
    drop(pool.allocate(64 << 20, &queue)?);
    drop(rest);
    assert_eq!(asked(&ledger), [2, 0]);
    Ok(())
}

/// What an allocation costs does not grow with the free blocks of other streams.
#[test]
fn many_free_blocks_of_another_stream() -> Result<(), Error> {
    let other = other_queue();
    for bytes in [4096, 1 << 20] {
        let (ledger, pool, queue) = pool(usize::MAX / 2);
        let blocks: Vec<Block> = (0..20_000).map(|_| pool.allocate(bytes, &other).unwrap()).collect();
        drop(blocks);
        let start = std::time::Instant::now();
        let blocks: Vec<Block> = (0..2000).map(|_| pool.allocate(bytes, &queue).unwrap()).collect();
        let each = start.elapsed() / 2000;
        assert!(each < std::time::Duration::from_micros(100), "{bytes}: {each:?}");
        drop(blocks);
        assert_eq!(asked(&ledger), [20_000, 0]);
    }
    Ok(())
}

/// A device whose memory goes back only when somebody says so, or not at all.
#[derive(Debug)]
struct Slow {
    ledger: Arc<Ledger>,
    is_waiting: std::sync::Barrier,
    may_go_on: std::sync::Barrier,
}

impl Backing for Arc<Slow> {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.ledger.allocate(bytes)
    }
    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        self.is_waiting.wait();
        self.may_go_on.wait();
        // SAFETY: the caller's promise.
        unsafe { self.ledger.release(blocks) }
    }
    fn report(&self) -> (usize, usize, String) {
        self.ledger.report()
    }
}

/// While one thread waits for the device, the others reuse what is free.
#[test]
fn waiting_for_the_device_stops_nobody() -> Result<(), Error> {
    let barrier = || std::sync::Barrier::new(2);
    let ledger = Ledger::new(usize::MAX / 2);
    let slow = Arc::new(Slow { ledger: ledger.clone(), is_waiting: barrier(), may_go_on: barrier() });
    let (pool, queue) = (Pool::new(Box::new(slow.clone())), Queue::Cpu);
    let (small, large) = (pool.allocate(4096, &queue)?, pool.allocate(64 << 20, &queue)?);
    drop(large);
    std::thread::scope(|scope| {
        let grows = scope.spawn(|| pool.allocate(80 << 20, &queue).map(|block| block.address()));
        slow.is_waiting.wait();
        // The 64 MiB are on their way back: neither held any more nor to be had.
        drop(small);
        let again = pool.allocate(4096, &queue)?;
        assert_eq!(pool.stats().num_reused, 1);
        assert_eq!(pool.stats().largest_free_bytes, 0);
        slow.may_go_on.wait();
        grows.join().unwrap()?;
        drop(again);
        assert_eq!(asked(&ledger), [3, 1]);
        let trims = scope.spawn(|| pool.trim());
        slow.is_waiting.wait();
        slow.may_go_on.wait();
        assert_eq!(trims.join().unwrap()?, (80 << 20) + 4096);
        Ok(())
    })
}

/// A device that fails: at the wait, after which everything is still there, or at giving back, after which nothing is.
#[derive(Debug)]
struct Failing {
    ledger: Arc<Ledger>,
    after: AtomicBool,
}

impl Backing for Arc<Failing> {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.ledger.allocate(bytes)
    }
    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        let error = Error::invalid("device", "call", "an answer", "none");
        if !self.after.load(Ordering::Relaxed) {
            return Err(error);
        }
        // SAFETY: the caller's promise.
        unsafe { self.ledger.release(blocks)? };
        Ok(Released::Gone(Err(error)))
    }
    fn report(&self) -> (usize, usize, String) {
        self.ledger.report()
    }
}

#[test]
fn a_device_that_fails_to_take_back() -> Result<(), Error> {
    let ledger = Ledger::new(64 << 20);
    let failing = Arc::new(Failing { ledger: ledger.clone(), after: AtomicBool::new(false) });
    let pool = Pool::new(Box::new(failing.clone()));
    let address = {
        let block = pool.allocate(40 << 20, &Queue::Cpu)?;
        block.address()
    };
    assert_eq!(pool.trim().unwrap_err().to_string(), "device: call: expected an answer, got none");
    assert_eq!(pool.stats().reserved_bytes, 40 << 20);
    assert_eq!(pool.allocate(40 << 20, &Queue::Cpu)?.address(), address, "still free");
    failing.after.store(true, Ordering::Relaxed);
    // Room for a larger block is made, and the device's error is said.
    assert!(pool.allocate(60 << 20, &Queue::Cpu).is_err());
    assert_eq!((pool.stats().reserved_bytes, ledger.held_bytes()), (0, 0));
    // What is gone is not given out again.
    assert_ne!(pool.allocate(40 << 20, &Queue::Cpu)?.address(), address);
    Ok(())
}
