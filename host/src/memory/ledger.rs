//! A device for the pool's tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// A device of so many bytes that hands out addresses which nobody touches, and checks what comes back.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) held: Mutex<HashMap<u64, usize>>,
    pub(super) capacity: usize,
    /// Where it is more than 1, large memory joins and is given by multiples of it.
    pub(super) granularity: usize,
    pub(super) next: AtomicUsize,
    pub(super) num_allocated: AtomicUsize,
    pub(super) num_refused: AtomicUsize,
    pub(super) num_synchronized: AtomicUsize,
    pub(super) is_recording: AtomicBool,
    pub(super) left: Mutex<Vec<(u64, usize)>>,
}

impl Ledger {
    pub(super) fn new(capacity: usize) -> Arc<Self> {
        Self::of(capacity, 1)
    }

    pub(super) fn of(capacity: usize, granularity: usize) -> Arc<Self> {
        Arc::new(Ledger {
            held: Mutex::default(),
            capacity,
            granularity,
            next: AtomicUsize::new(256),
            num_allocated: AtomicUsize::new(0),
            num_refused: AtomicUsize::new(0),
            num_synchronized: AtomicUsize::new(0),
            is_recording: AtomicBool::new(false),
            left: Mutex::default(),
        })
    }

    pub(super) fn held_bytes(&self) -> usize {
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

    fn grow(&self, bytes: usize, tail: Option<(u64, usize)>) -> Result<Option<Grant>, Error> {
        if self.granularity == 1 {
            return Ok(self.allocate(bytes)?.map(|address| Grant { address, bytes, joins: false }));
        }
        let mut held = self.held.lock().unwrap();
        let mut joined: Vec<(u64, usize)> =
            held.iter().map(|(&at, &bytes)| (at, bytes)).filter(|&(at, _)| at >= JOINED_FROM).collect();
        joined.sort();
        // The first gap that holds them, or the end.
        let gap = |from: u64, bytes: usize| {
            joined
                .iter()
                .filter(|&&(at, _)| at >= from)
                .map(|&(at, _)| at - from >= bytes as u64)
                .next()
                .unwrap_or(true)
        };
        let place = tail.map(|(end, free)| (end, (bytes - free).next_multiple_of(self.granularity)));
        let bytes = bytes.next_multiple_of(self.granularity);
        let starts = std::iter::once(JOINED_FROM).chain(joined.iter().map(|&(at, bytes)| at + bytes as u64));
        let (address, bytes) = place
            .filter(|&(end, bytes)| gap(end, bytes))
            .or_else(|| starts.map(|at| (at, bytes)).find(|&(at, bytes)| gap(at, bytes)))
            .expect("the end has room");
        if held.values().sum::<usize>() + bytes > self.capacity {
            self.num_refused.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        self.num_allocated.fetch_add(1, Ordering::Relaxed);
        assert_eq!(held.insert(address, bytes), None);
        Ok(Some(Grant { address, bytes, joins: true }))
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        if self.is_recording.load(Ordering::Relaxed) {
            return Ok(Released::Kept);
        }
        self.num_synchronized.fetch_add(1, Ordering::Relaxed);
        for &(address, bytes) in blocks {
            assert_eq!(self.held.lock().unwrap().remove(&address), Some(bytes), "release of {address}");
        }
        Ok(Released::Gone(Ok(())))
    }

    unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
        self.left.lock().unwrap().extend(blocks);
    }

    fn report(&self) -> (usize, usize, String) {
        (self.capacity - self.held_bytes(), self.capacity, "the ledger".into())
    }
}

/// Where the ledger's memory that joins begins.
const JOINED_FROM: u64 = 1 << 40;

/// The same of a device whose large memory joins.
pub(super) fn joining_pool(capacity: usize, granularity: usize) -> (Arc<Ledger>, Arc<Pool>, Queue) {
    let ledger = Ledger::of(capacity, granularity);
    (ledger.clone(), Pool::new(Box::new(ledger)), Queue::Cpu)
}

pub(super) fn pool(capacity: usize) -> (Arc<Ledger>, Arc<Pool>, Queue) {
    let ledger = Ledger::new(capacity);
    let pool = Pool::new(Box::new(ledger.clone()));
    (ledger, pool, Queue::Cpu)
}
