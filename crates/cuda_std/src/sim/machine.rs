//! The machine: units of threads, and the scheduler that lets one of them run at a time.

use core::cell::Cell;
use std::any::Any;
use std::borrow::ToOwned;
use std::boxed::Box;
use std::collections::{BTreeMap, HashMap};
use std::format;
use std::rc::Rc;
use std::string::String;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;

use corosensei::Coroutine;
use corosensei::stack::DefaultStack;

use super::access::Scope;
use super::clock::{Clock, Frame, Stamp};
use super::copies::{Copies, Moment, Pending, Stores};
use super::limits::{check, volume};
use super::report::Index;
use super::shadow::Shadow;
use super::sync::{Barriers, ClusterBarrier};
use super::tensor_core::Generation;
use super::unit::{Block, Failure, Line, Random, Register, State, Thread, ThreadId, Unit, Wait};
use super::warp::Warp;
use super::{Arch, Defect, Launch, Memory, Need, Report, Statistics};

mod run;

pub(super) use run::run;

/// Numbers of source lines, so that a byte of memory can remember one.
#[derive(Default)]
struct Lines {
    known: Vec<Line>,
    numbers: HashMap<usize, u16>,
    last: (usize, u16),
}

impl Lines {
    #[inline]
    fn number(&mut self, line: Line) -> u16 {
        let key = core::ptr::from_ref(line).addr();
        if self.last.0 != key {
            let known = &mut self.known;
            let number = *self.numbers.entry(key).or_insert_with(|| {
                known.push(line);
                (known.len() - 1) as u16
            });
            self.last = (key, number);
        }
        self.last.1
    }
}

/// In which order ready threads run.
#[derive(Clone, Copy)]
enum Policy {
    /// Any.
    Random,
    /// The one that became ready last: a thread runs as far ahead as it can.
    Newest,
    /// Mostly the newest.
    Mixed,
}

pub(super) struct Machine {
    /// Of each card.
    memories: Vec<*mut Memory>,
    kernel_name: String,
    pub(super) arch: Arch,
    seed: u64,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    pub(super) shared_bytes: u32,
    /// What every thread of a card calls; alive as long as the machine.
    kernels: Vec<*const dyn Fn()>,
    pub(super) random: Random,
    policy: Policy,
    units: Vec<Option<Box<Unit>>>,
    /// Units that have not started, last first.
    waiting_units: Vec<u32>,
    resident: usize,
    ready: Vec<ThreadId>,
    /// The next thread is any of them, whatever the policy: the last one gave way.
    fair: bool,
    pub(super) current: ThreadId,
    registers: [u32; 12],
    report: Option<Report>,
    lines: Lines,
    pub(super) pending: Vec<Pending>,
    pub(super) moment: Moment,
    /// What was released through each location of memory, by threads of which card, and how far.
    pub(super) released: BTreeMap<(usize, usize, Scope), Rc<Frame>>,
    /// Polls since anything changed.
    idle: u64,
    /// The cards' clock.
    nanoseconds: u64,
    /// Accesses of the running thread since it was resumed.
    steps: u64,
    pub(super) statistics: Statistics,
}

/// A thread that does this many accesses in a row without waiting for anyone runs for ever.
const MAX_STEPS: u64 = 200_000_000;
/// Polls of all threads together in which nothing has changed.
const MAX_IDLE: u64 = 200_000;
/// The same, after which another unit starts: it may be what they wait for.
const PATIENCE: u64 = 500;
/// The same, after which time flies for those who look at the clock: what they wait for does not come.
const TIME_FLIES: u64 = 20_000;
/// Stacks that are kept for the next threads; each takes two of a process's mappings, which are bounded.
const MAX_KEPT_STACKS: usize = 12 << 10;
/// A kernel's frames, unoptimised, with the simulator's on top.
const STACK_BYTES: usize = 256 << 10;
/// First address of a block's shared memory, as the newer cards have it: address 0 is nobody's.
pub(super) const SHARED_BASE: u32 = 1024;
/// Distance of the shared memories of a cluster's blocks in the cluster's window.
pub(super) const CLUSTER_WINDOW: u32 = 1 << 24;

std::thread_local! {
    static MACHINE: Cell<*mut Machine> = const { Cell::new(core::ptr::null_mut()) };
}

/// Stacks that no thread uses.
static STACKS: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

fn kept_stacks() -> MutexGuard<'static, Vec<DefaultStack>> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this host thread runs a kernel now.
#[inline]
pub(crate) fn is_running() -> bool {
    !MACHINE.get().is_null()
}

/// The machine, for an operation of the running thread.
///
/// # Panics
/// Outside a simulation.
#[inline]
pub(super) fn with<R>(instruction: &str, operation: impl FnOnce(&mut Machine) -> R) -> R {
    let machine = MACHINE.get();
    if machine.is_null() {
        crate::needs_gpu(instruction);
    }
    // SAFETY: `run` put it there and holds no borrow of it while a thread runs; this borrow ends before the thread can
    // switch, since `operation` cannot suspend it.
    operation(unsafe { &mut *machine })
}

/// An operation that can fail; on failure the thread goes no further.
#[inline]
pub(super) fn attempt<R>(
    instruction: &str,
    line: Line,
    operation: impl FnOnce(&mut Machine) -> Result<R, Failure>,
) -> R {
    let result = with(instruction, |machine| {
        machine.thread().line = Some(line);
        operation(machine).map_err(|failure| machine.fail(failure, Some(machine.current), Some(line)))
    });
    match result {
        Ok(value) => value,
        Err(()) => loop {
            suspend();
        },
    }
}

/// The value of a special register.
#[inline]
pub(crate) fn register(register: Register, name: &str) -> u32 {
    with(name, |machine| machine.registers[register as usize])
}

/// `%globaltimer`: nanoseconds, which pass with the accesses of all threads; fast where all of them only wait.
pub(crate) fn timer() -> u64 {
    with("%globaltimer", Machine::time)
}

/// Gives the processor away until the thread is woken.
pub(super) fn suspend() {
    let yielder = with("suspend", |machine| machine.thread().yielder.get());
    // SAFETY: the yielder of the coroutine that is running, set when it started.
    unsafe { (*yielder).suspend(()) };
}

/// Lets others run first.
pub(super) fn pause() {
    with("pause", |machine| {
        machine.ready.push(machine.current);
        machine.fair = true;
    });
    suspend();
}

impl Machine {
    #[inline]
    pub(super) fn unit(&mut self) -> &mut Unit {
        let slot = self.current.slot;
        self.unit_at(slot)
    }

    #[inline]
    pub(super) fn unit_at(&mut self, slot: usize) -> &mut Unit {
        self.units[slot].as_deref_mut().expect("a resident unit")
    }

    #[inline]
    pub(super) fn thread(&mut self) -> &mut Thread {
        let index = self.current.thread;
        &mut self.unit()[index]
    }

    /// Its card's memory, and the unit of the running thread.
    #[inline]
    pub(super) fn memory_and_unit(&mut self) -> (&mut Memory, &mut Unit) {
        let device = self.unit().device;
        self.memory_of_and_unit(device)
    }

    /// The memory of a card, and the unit of the running thread.
    #[inline]
    pub(super) fn memory_of_and_unit(&mut self, device: usize) -> (&mut Memory, &mut Unit) {
        let slot = self.current.slot;
        // SAFETY: `run` holds the memories' borrows for as long as the machine lives, and gives them to nobody else.
        let memory = unsafe { &mut *self.memories[device] };
        (memory, self.units[slot].as_deref_mut().expect("a resident unit"))
    }

    /// The card in whose memory the running thread's access falls: its own, or one whose memory it may access.
    #[inline]
    pub(super) fn holder(&mut self, address: usize, bytes: usize) -> Option<usize> {
        let own = self.unit().device;
        if self.memories.len() == 1 {
            return Some(own);
        }
        // SAFETY: as in `memory_of_and_unit`; shared borrows that end here.
        let memories = || self.memories.iter().map(|&memory| unsafe { &*memory });
        let own_memory = memories().nth(own)?;
        if own_memory.find(address, bytes).is_some() {
            return Some(own);
        }
        memories().position(|memory| own_memory.has_peer(memory) && memory.find(address, bytes).is_some())
    }

    /// The card that has an address, if it is another than the running thread's.
    pub(super) fn other_holder(&mut self, address: usize) -> Option<usize> {
        let own = self.unit().device;
        // SAFETY: as in `holder`.
        let mut memories = self.memories.iter().map(|&memory| unsafe { &*memory });
        memories.position(|memory| memory.find(address, 1).is_some()).filter(|&device| device != own)
    }

    /// The clock, which goes by the accesses of all threads.
    fn time(&mut self) -> u64 {
        const SECOND: u64 = 1_000_000_000;
        self.nanoseconds = (self.nanoseconds + 32).max(self.statistics.accesses);
        if self.idle > TIME_FLIES {
            self.nanoseconds += SECOND;
        }
        self.nanoseconds
    }

    /// The units of a card's grid.
    fn units_per_device(&self) -> u32 {
        volume(self.grid) / volume(self.cluster)
    }

    #[inline]
    pub(super) fn line_number(&mut self, line: Line) -> u16 {
        self.lines.number(line)
    }

    /// A generator that depends on the seed and on `what` alone.
    pub(super) fn fixed_random(&self, what: u64) -> Random {
        Random(self.seed ^ what.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Whose tensor cores are simulated.
    pub(super) fn generation(&self) -> Generation {
        match self.arch {
            Arch::Sm61 | Arch::Sm80 => Generation::Ampere,
            // Nobody has looked at Blackwell's sums: taken to be Hopper's.
            Arch::Sm90a | Arch::Sm100 => Generation::Hopper,
        }
    }

    /// Blocks of the grid and of a cluster.
    pub(super) fn extent(&self) -> [[u32; 3]; 2] {
        [self.grid, self.cluster]
    }

    /// Counts an access of the running thread.
    #[inline]
    pub(super) fn step(&mut self) -> Result<(), Failure> {
        self.statistics.accesses += 1;
        self.steps += 1;
        if self.steps > MAX_STEPS {
            let text =
                format!("the thread made {MAX_STEPS} accesses without waiting for anyone: an endless loop");
            return Err(Failure(Defect::Deadlock, text));
        }
        Ok(())
    }

    /// Something happened that a poll could be waiting for.
    #[inline]
    pub(super) fn progress(&mut self) {
        self.idle = 0;
    }

    /// Counts a look at a location that has not changed.
    pub(super) fn poll(&mut self, line: Line) -> Result<(), Failure> {
        self.idle += 1;
        if self.idle.is_multiple_of(64) {
            // However late, what is under way completes while threads look on.
            self.advance_any();
        }
        if self.idle.is_multiple_of(PATIENCE) && self.admit() {
            self.idle = 0;
            return Ok(());
        }
        if self.idle > MAX_IDLE {
            let text = format!(
                "{MAX_IDLE} looks at memory by the threads that can run, and nothing changes any more: a wait that \
                 cannot end (the last at {}:{}){}",
                line.file(),
                line.line(),
                self.waiting()
            );
            return Err(Failure(Defect::Deadlock, text));
        }
        Ok(())
    }

    /// Ends the simulation.
    pub(super) fn fail(&mut self, failure: Failure, thread: Option<ThreadId>, line: Option<Line>) {
        if self.report.is_some() {
            return;
        }
        let several = self.memories.len() > 1;
        let device = thread.filter(|_| several).map(|ThreadId { slot, .. }| self.unit_at(slot).device);
        let thread = thread.map(|ThreadId { slot, thread }| {
            let unit = self.unit_at(slot);
            let thread = &unit.threads[thread];
            (unit.blocks[thread.block].index, thread.index)
        });
        self.report = Some(Report {
            defect: failure.0,
            kernel: self.kernel_name.clone(),
            device,
            arch: self.arch,
            seed: self.seed,
            thread,
            location: line,
            text: failure.1,
        });
    }

    /// Lets a waiting thread of the running unit go on.
    pub(super) fn wake(&mut self, slot: usize, thread: usize) {
        self.unit_at(slot).threads[thread].state = State::Ready;
        self.ready.push(ThreadId { slot, thread });
        self.idle = 0;
    }

    /// The running thread waits from now on. It must then `suspend`.
    pub(super) fn wait(&mut self, wait: Wait) {
        self.thread().state = State::Waiting(wait);
    }

    /// Needs what only some floors have.
    pub(super) fn needs(&self, need: impl Into<Option<Need>>, instruction: &str) -> Result<(), Failure> {
        match need.into() {
            Some(need) if !self.arch.has(need) => {
                let text = format!("`{instruction}` needs {}, and this is {}", need.since(), self.arch);
                Err(Failure(Defect::Unsupported, text))
            }
            _ => Ok(()),
        }
    }

    /// The running thread, in words.
    pub(super) fn thread_name(&mut self) -> String {
        let thread = self.current.thread;
        let unit = self.unit();
        let block = unit.blocks[unit[thread].block].index;
        format!("block {}, thread {}", Index(block), Index(unit[thread].index))
    }

    /// Who made an earlier access, and where, in words.
    pub(super) fn describe(&mut self, stamp: Stamp, line: u16) -> String {
        let place = match self.lines.known.get(usize::from(line)) {
            Some(line) => format!(", {}:{}", line.file(), line.line()),
            None => String::new(),
        };
        let [block, cluster] = [self.grid, self.cluster];
        let (device, index) =
            (stamp.unit() / self.units_per_device(), stamp.unit() % self.units_per_device());
        let place = if self.memories.len() > 1 { format!(" of card {device}{place}") } else { place };
        let resident = self.units.iter().flatten().find(|unit| unit.id == stamp.unit());
        let Some(unit) = resident else {
            let first = first_block(index, block, cluster);
            let what = if cluster == [1; 3] { "block" } else { "the cluster of block" };
            return format!("{what} {}{place}", Index(first));
        };
        match unit.threads.get(stamp.actor() as usize) {
            Some(thread) => {
                let block = unit.blocks[thread.block].index;
                format!("block {}, thread {}{place}", Index(block), Index(thread.index))
            }
            None => format!("{}{place}", unit.agents[stamp.actor() as usize - unit.threads.len()]),
        }
    }

    /// What the threads that cannot run wait for, one line each reason.
    fn waiting(&self) -> String {
        let mut reasons: BTreeMap<String, (u32, String)> = BTreeMap::new();
        for unit in self.units.iter().flatten() {
            for thread in &unit.threads {
                if let State::Waiting(reason) = thread.state {
                    let place = thread
                        .line
                        .map_or(String::new(), |line| format!(", {}:{}", line.file(), line.line()));
                    let block = unit.blocks[thread.block].index;
                    let first = || (0, format!("block {}, thread {}", Index(block), Index(thread.index)));
                    reasons.entry(format!("{reason}{place}")).or_insert_with(first).0 += 1;
                }
            }
        }
        let line = |(reason, (count, first)): (&String, &(u32, String))| match count {
            1 => format!("\n  {first} waits for {reason}"),
            _ => format!("\n  {count} threads, the first {first}, wait for {reason}"),
        };
        reasons.iter().map(line).collect()
    }

    /// No thread can run any more: says why.
    fn stuck(&mut self) {
        let waiting = self.waiting();
        let units = self.units.iter().enumerate().filter_map(|(slot, unit)| Some((slot, unit.as_deref()?)));
        let mut incomplete = units.filter_map(|(slot, unit)| {
            Machine::incomplete(unit).map(|(thread, line, text)| (slot, thread, line, text))
        });
        match incomplete.next() {
            Some((slot, thread, line, text)) => {
                let failure = Failure(Defect::Divergence, format!("{text}:{waiting}"));
                drop(incomplete);
                self.fail(failure, Some(ThreadId { slot, thread }), Some(line));
            }
            None => {
                drop(incomplete);
                self.fail(
                    Failure(Defect::Deadlock, format!("no thread can run any more:{waiting}")),
                    None,
                    None,
                );
            }
        }
    }

    /// Starts another unit, if one is left.
    fn admit(&mut self) -> bool {
        let Some(id) = self.waiting_units.pop() else { return false };
        let slot = match self.units.iter().position(Option::is_none) {
            Some(slot) => slot,
            None => {
                self.units.push(None);
                self.units.len() - 1
            }
        };
        let unit = self.new_unit(id);
        for thread in 0..unit.threads.len() {
            self.ready.push(ThreadId { slot, thread });
        }
        self.statistics.threads += unit.threads.len() as u64;
        self.resident += 1;
        self.units[slot] = Some(Box::new(unit));
        true
    }

    fn new_unit(&self, id: u32) -> Unit {
        let (device, index) = (id / self.units_per_device(), id % self.units_per_device());
        let [first_x, first_y, first_z] = first_block(index, self.grid, self.cluster);
        let frame = Rc::new(Frame::default());
        let threads_of_block = volume(self.block) as usize;
        let mut blocks = Vec::new();
        let mut threads = Vec::new();
        for rank in 0..volume(self.cluster) {
            let [x, y, z] = unravel(rank, self.cluster);
            let range = threads.len()..threads.len() + threads_of_block;
            for linear in 0..threads_of_block as u32 {
                let actor = threads.len() as u32;
                threads.push(Thread {
                    coroutine: Some(self.coroutine(device as usize)),
                    yielder: Cell::new(core::ptr::null()),
                    block: rank as usize,
                    index: unravel(linear, self.block),
                    warp: linear as usize / 32,
                    lane: linear % 32,
                    state: State::Ready,
                    clock: Clock::new(id, actor, frame.clone()),
                    line: None,
                    has_touched: false,
                    is_ahead: false,
                    received: [0; 8],
                    copies: Copies::default(),
                    stores: Stores::default(),
                    met_clusters: 0,
                    held: Vec::new(),
                    wgmma_wait: None,
                    fenced: None,
                    observed: None,
                });
            }
            let mut shared = Vec::new();
            // What lies in shared memory before the kernel is anything.
            shared.resize(self.shared_bytes as usize, (self.seed as u8) | 0x81);
            blocks.push(Block {
                index: [first_x + x, first_y + y, first_z + z],
                shared,
                shadow: Shadow::new(self.shared_bytes as usize),
                warps: (0..threads_of_block.div_ceil(32))
                    .map(|warp| Warp::new((threads_of_block - 32 * warp).min(32) as u32))
                    .collect(),
                barriers: Barriers::default(),
                mbarriers: BTreeMap::new(),
                warpgroups: BTreeMap::new(),
                visits: BTreeMap::new(),
                threads: range,
                returned: 0,
            });
        }
        let live = threads.len();
        let cluster_barrier = ClusterBarrier::default();
        Unit { id, device: device as usize, blocks, threads, agents: Vec::new(), cluster_barrier, live }
    }

    fn coroutine(&self, device: usize) -> Coroutine<(), (), (), DefaultStack> {
        let pooled = kept_stacks().pop();
        let stack =
            pooled.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a thread's stack"));
        let kernel = self.kernels[device];
        Coroutine::with_stack(stack, move |yielder, ()| {
            with("start", |machine| machine.thread().yielder.set(yielder));
            // SAFETY: `run` keeps the kernel until every coroutine has ended or was unwound.
            unsafe { (*kernel)() }
        })
    }

    /// A thread that can run, taken off the list.
    fn choose(&mut self) -> Option<ThreadId> {
        if self.ready.is_empty() {
            return None;
        }
        let newest = match self.policy {
            _ if std::mem::take(&mut self.fair) => false,
            Policy::Random => false,
            Policy::Newest => true,
            Policy::Mixed => !self.random.one_in(8),
        };
        let index = if newest { self.ready.len() - 1 } else { self.random.below(self.ready.len()) };
        Some(self.ready.swap_remove(index))
    }

    /// Gives the processor to a thread and returns its coroutine to be resumed.
    fn enter(&mut self, id: ThreadId) -> Coroutine<(), (), (), DefaultStack> {
        self.current = id;
        self.steps = 0;
        self.statistics.switches += 1;
        let [block_dim, grid_dim] = [self.block, self.grid];
        let unit = self.unit_at(id.slot);
        let thread = &mut unit.threads[id.thread];
        let block = unit.blocks[thread.block].index;
        let coroutine = thread.coroutine.take().expect("a thread that has not returned");
        let index = thread.index;
        for (registers, values) in self.registers.chunks_exact_mut(3).zip([index, block, block_dim, grid_dim])
        {
            registers.copy_from_slice(&values);
        }
        coroutine
    }

    /// The running thread has returned from the kernel.
    fn leave(&mut self) -> Result<(), Failure> {
        self.idle = 0;
        self.check_stores_of_thread()?;
        self.check_wgmma_of_thread()?;
        let ThreadId { slot, thread } = self.current;
        let unit = self.unit();
        unit.threads[thread].state = State::Returned;
        unit.live -= 1;
        let live = unit.live;
        let block = unit.threads[thread].block;
        unit.blocks[block].returned += 1;
        self.check_visits()?;
        self.warp_after_return()?;
        self.barriers_after_return()?;
        if live == 0 {
            self.check_copies_of_unit(slot)?;
            // Its shared memory's addresses will be another's.
            let shared = self.unit_at(slot).blocks.iter().map(|block| block.shared.as_ptr_range());
            let shared: Vec<_> = shared.map(|range| range.start.addr()..range.end.addr()).collect();
            self.released.retain(|(location, ..), _| !shared.iter().any(|range| range.contains(location)));
            self.units[slot] = None;
            self.resident -= 1;
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Unwinds the threads of an ended simulation while they can still ask for the machine.
        self.units.clear();
        MACHINE.set(core::ptr::null_mut());
    }
}

fn unravel(linear: u32, size: [u32; 3]) -> [u32; 3] {
    [linear % size[0], linear / size[0] % size[1], linear / size[0] / size[1]]
}

/// The first block of a unit.
fn first_block(unit: u32, grid: [u32; 3], cluster: [u32; 3]) -> [u32; 3] {
    let clusters = [0, 1, 2].map(|i| grid[i] / cluster[i]);
    let index = unravel(unit, clusters);
    [0, 1, 2].map(|i| index[i] * cluster[i])
}
