//! What a thread, a block and a unit are.

use core::cell::Cell;
use core::fmt;
use core::panic::Location;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::string::String;
use std::vec::Vec;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, Yielder};

use super::Defect;
use super::clock::{Clock, Frame};
use super::copies::{Copies, Stores};
use super::mbarrier::Mbarrier;
use super::shadow::Shadow;
use super::sync::{Barriers, ClusterBarrier};
use super::visits::Visit;
use super::warp::{Warp, lanes};
use super::warpgroup::{Held, Warpgroup};

/// A defect and its text; the machine adds who and where.
pub(super) struct Failure(pub(super) Defect, pub(super) String);

impl Failure {
    pub(super) fn new(defect: Defect, text: impl Into<String>) -> Self {
        Failure(defect, text.into())
    }
}

pub(super) type Line = &'static Location<'static>;

/// The generator behind the seed: SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// True once in `n` times.
    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The registers that tell a thread where it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Register {
    ThreadX,
    ThreadY,
    ThreadZ,
    BlockX,
    BlockY,
    BlockZ,
    BlockDimX,
    BlockDimY,
    BlockDimZ,
    GridDimX,
    GridDimY,
    GridDimZ,
}

/// A thread of a resident unit: slot of the unit, index of the thread in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThreadId {
    pub(super) slot: usize,
    pub(super) thread: usize,
}

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    Waiting(Wait),
    Returned,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Warp { instruction: &'static str, mask: u32 },
    Barrier { id: u32, count: Option<u32> },
    Cluster,
    Mbarrier { offset: usize, parity: u32 },
    Warpgroup,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Wait::Warp { instruction, mask } => write!(f, "`{instruction}` of {}", lanes(mask)),
            Wait::Barrier { id, count: None } => write!(f, "barrier {id} of all threads of the block"),
            Wait::Barrier { id, count: Some(count) } => write!(f, "barrier {id} of {count} threads"),
            Wait::Cluster => f.write_str("the barrier of the cluster"),
            Wait::Warpgroup => f.write_str("a `wgmma` that not all warps of the group have issued"),
            Wait::Mbarrier { offset, parity } => {
                write!(f, "the phase of parity {parity} of the mbarrier at byte {offset}")
            }
        }
    }
}

pub(super) struct Thread {
    pub(super) coroutine: Option<Coroutine<(), (), (), DefaultStack>>,
    pub(super) yielder: Cell<*const Yielder<(), ()>>,
    /// Rank of its block in the unit.
    pub(super) block: usize,
    pub(super) index: [u32; 3],
    /// In its block.
    pub(super) warp: usize,
    pub(super) lane: u32,
    pub(super) state: State,
    pub(super) clock: Clock,
    /// Where it executes its current instruction.
    pub(super) line: Option<Line>,
    /// Whether it has touched global memory that is not constant.
    pub(super) has_touched: bool,
    /// Whether it does what a kernel may do before it has waited for those ahead.
    pub(super) is_ahead: bool,
    /// What an operation of its warp has left for it.
    pub(super) received: [u32; 8],
    pub(super) copies: Copies,
    pub(super) stores: Stores,
    /// Phases of its cluster's barrier that it has passed: behind the first one all of the cluster's blocks have
    /// started.
    pub(super) met_clusters: u32,
    /// Results of `wgmma` that its registers do not have yet.
    pub(super) held: Vec<Held>,
    /// The group of `wgmma` that it waits for.
    pub(super) wgmma_wait: Option<u32>,
    /// What a fence has released, for the relaxed atomics after it.
    pub(super) fenced: Option<Rc<Frame>>,
    /// What relaxed atomics have read, for the next fence.
    pub(super) observed: Option<Rc<Frame>>,
}

pub(super) struct Block {
    pub(super) index: [u32; 3],
    pub(super) shared: Vec<u8>,
    pub(super) shadow: Shadow,
    pub(super) warps: Vec<Warp>,
    pub(super) barriers: Barriers,
    /// By their byte in shared memory.
    pub(super) mbarriers: BTreeMap<usize, Mbarrier>,
    pub(super) warpgroups: BTreeMap<usize, Warpgroup>,
    /// Accesses of other blocks to its shared memory, by actor.
    pub(super) visits: BTreeMap<u32, Visit>,
    /// Its threads in the unit.
    pub(super) threads: core::ops::Range<usize>,
    pub(super) returned: usize,
}

/// What can synchronise within itself: a cluster, or a block.
pub(super) struct Unit {
    pub(super) id: u32,
    /// The card that it runs on.
    pub(super) device: usize,
    pub(super) blocks: Vec<Block>,
    pub(super) threads: Vec<Thread>,
    /// Names of the actors beyond the threads.
    pub(super) agents: Vec<String>,
    pub(super) cluster_barrier: ClusterBarrier,
    /// Threads that have not returned.
    pub(super) live: usize,
}

impl Unit {
    /// An actor that stands for asynchronous work, described for reports.
    pub(super) fn new_agent(&mut self, name: String) -> u32 {
        self.agents.push(name);
        (self.threads.len() + self.agents.len() - 1) as u32
    }
}

impl core::ops::Index<usize> for Unit {
    type Output = Thread;
    fn index(&self, thread: usize) -> &Thread {
        &self.threads[thread]
    }
}

impl core::ops::IndexMut<usize> for Unit {
    fn index_mut(&mut self, thread: usize) -> &mut Thread {
        &mut self.threads[thread]
    }
}
