//! Launches of several cards that wait for each other: they meet here, and run in one simulation, whose order of
//! threads and whose clocks span the cards.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use abi::Arch;
use cuda_std::sim::{self, Kernel, Memory};
use host::simulator::{Param, Together};

use super::{State, lock};

/// A card's launch.
pub(super) struct Request {
    kernel: &'static Kernel,
    shape: Shape,
    seed: u64,
    /// The parameters' bytes, each aligned as the largest is.
    params: Vec<Vec<u64>>,
    /// The number of the card's memory.
    card: u64,
}

/// What all launches of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shape {
    entry: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared_bytes: u32,
    arch: Arch,
}

/// Where the launches of a group meet.
#[derive(Default)]
struct Room {
    /// By rank.
    waiting: BTreeMap<usize, Request>,
    /// Of launches that have run, until their callers take them.
    results: BTreeMap<usize, Result<(), String>>,
}

/// The cards of this process that have asked for peers or been asked for, by the numbers of their memories.
static CARDS: Mutex<BTreeMap<u64, Weak<Mutex<State>>>> = Mutex::new(BTreeMap::new());

/// Enters a card, and gives the number of its memory.
pub(super) fn enter(state: &Arc<Mutex<State>>) -> u64 {
    let id = lock(state).memory.id();
    let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
    cards.retain(|_, card| card.strong_count() > 0);
    cards.insert(id, Arc::downgrade(state));
    id
}

static ROOMS: Mutex<BTreeMap<u64, Room>> = Mutex::new(BTreeMap::new());
static CHANGED: Condvar = Condvar::new();

impl Request {
    pub(super) fn new(
        kernel: &'static Kernel,
        launch: &sim::Launch<'_>,
        params: &[Param<'_>],
        state: &Arc<Mutex<State>>,
    ) -> Self {
        let bytes_of = |param: &Param<'_>| {
            let mut words = vec![0u64; param.bytes().div_ceil(8)];
            // SAFETY: a parameter has that many bytes, without padding — `abi::Params`; the words have room for them.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    param.address().cast::<u8>(),
                    words.as_mut_ptr().cast(),
                    param.bytes(),
                );
            }
            words
        };
        let sim::Launch { grid, block, cluster, shared_bytes, arch, seed, .. } = *launch;
        let shape = Shape { entry: kernel.name, grid, block, cluster, shared_bytes, arch };
        Request { kernel, shape, seed, params: params.iter().map(bytes_of).collect(), card: enter(state) }
    }

    /// Waits for the other ranks' launches and runs all together, in one of their threads. After the timeout those run
    /// that have come.
    ///
    /// # Safety
    /// - The parameters are of the types that the kernel declares.
    pub(super) unsafe fn run(self, together: Together) -> Result<(), String> {
        let Together { group, rank, size, timeout } = together;
        let end = Instant::now() + timeout;
        let mut rooms = ROOMS.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.entry(group).or_default().waiting.insert(rank, self);
        loop {
            let room = rooms.entry(group).or_default();
            if let Some(result) = room.results.remove(&rank) {
                return result;
            }
            let left = end.saturating_duration_since(Instant::now());
            let is_there = room.waiting.contains_key(&rank);
            if is_there && (room.waiting.len() == size || left.is_zero()) {
                let requests = std::mem::take(&mut room.waiting);
                drop(rooms);
                // SAFETY: the promise of each that has come.
                let result = unsafe { run_all(&requests) };
                rooms = ROOMS.lock().unwrap_or_else(PoisonError::into_inner);
                let room = rooms.entry(group).or_default();
                room.results.extend(requests.keys().map(|&rank| (rank, result.clone())));
                CHANGED.notify_all();
                continue;
            }
            rooms = if is_there {
                CHANGED.wait_timeout(rooms, left).unwrap_or_else(PoisonError::into_inner).0
            } else {
                // Another thread runs it.
                CHANGED.wait(rooms).unwrap_or_else(PoisonError::into_inner)
            };
        }
    }
}

/// # Safety
/// - The parameters of each are of the types that its kernel declares.
unsafe fn run_all(requests: &BTreeMap<usize, Request>) -> Result<(), String> {
    let Some(first) = requests.values().next() else { return Ok(()) };
    if let Some((rank, other)) = requests.iter().find(|(_, request)| request.shape != first.shape) {
        return Err(format!("rank {rank} launches {:?}, and another one {:?}", other.shape, first.shape));
    }
    let Shape { grid, block, cluster, shared_bytes, arch, .. } = first.shape;
    let launch =
        sim::Launch { kernel: first.kernel.name, grid, block, cluster, shared_bytes, arch, seed: first.seed };
    let cards: Vec<u64> = requests.values().map(|request| request.card).collect();
    let states = with_peers(&cards);
    // By their numbers, so that no two threads wait for each other.
    let mut locked: BTreeMap<u64, MutexGuard<'_, State>> =
        states.iter().map(|(&id, state)| (id, lock(state))).collect();
    let kernels: Vec<_> = requests
        .values()
        .map(|request| {
            let addresses: Vec<*const c_void> =
                request.params.iter().map(|words| words.as_ptr().cast()).collect();
            // SAFETY: as many parameters as the kernel declares, of its sizes — `Card::launch`; their types — the
            // caller.
            move || unsafe { (request.kernel.launch)(&addresses) }
        })
        .collect();
    let kernels: Vec<&dyn Fn()> = kernels.iter().map(|kernel| kernel as &dyn Fn()).collect();
    let place = |id: u64| cards.iter().position(|&card| card == id).unwrap_or(cards.len());
    let mut memories: Vec<(usize, &mut Memory)> =
        locked.iter_mut().map(|(&id, state)| (place(id), &mut state.memory)).collect();
    // Those that launch, by their ranks, then those that only have memory.
    memories.sort_by_key(|(place, _)| *place);
    let mut memories: Vec<&mut Memory> = memories.into_iter().map(|(_, memory)| memory).collect();
    if memories.len() < kernels.len() {
        return Err("two ranks launch on one card".into());
    }
    sim::simulate_together(&mut memories, &launch, &kernels).map_err(|report| report.to_string())?;
    for card in cards {
        locked.get_mut(&card).expect("a locked card").launched.insert(first.kernel.name);
    }
    Ok(())
}

/// These cards, and those whose memory they may access.
fn with_peers(cards: &[u64]) -> BTreeMap<u64, Arc<Mutex<State>>> {
    let known = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
    let find = |id: u64| known.get(&id).and_then(Weak::upgrade).map(|state| (id, state));
    let mut found: BTreeMap<_, _> = cards.iter().filter_map(|&id| find(id)).collect();
    let peers: Vec<u64> = found.values().flat_map(|state| lock(state).memory.peers().to_vec()).collect();
    found.extend(peers.into_iter().filter_map(find));
    found
}
