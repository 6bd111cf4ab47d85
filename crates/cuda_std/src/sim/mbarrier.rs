//! mbarriers: phases of arrivals and of bytes.

use core::panic::Location;
use std::format;
use std::rc::Rc;
use std::string::String;
use std::vec::Vec;

use super::access::Space;
use super::clock::{Frame, START, Stamp, join};
use super::machine::{Machine, attempt, pause, suspend};
use super::shadow::Kind;
use super::unit::{Failure, ThreadId, Wait};
use super::{Defect, Need};

/// Most arrivals and bytes of a phase.
const MAX_COUNT: u32 = (1 << 20) - 1;

/// An mbarrier in a block's shared memory.
pub(super) struct Mbarrier {
    count: u32,
    /// Arrivals that the current phase still expects.
    pending: u32,
    /// Bytes announced and not copied; below zero where copies were faster than their announcement.
    bytes: i64,
    /// Phases completed.
    phase: u64,
    /// Released by the arrivals and copies so far.
    released: Rc<Frame>,
    /// The part of it that completed phases have handed over.
    opened: Rc<Frame>,
    /// Stands for the copies that complete here.
    agent: u32,
    time: u32,
    /// Who initialised it, and whether the asynchronous proxy and other blocks can know.
    initialiser: Stamp,
    line: u16,
    fenced: bool,
    /// Whether `fence.mbarrier_init` has released its initialisation, and from which phase of the cluster's barrier on
    /// all threads have acquired it.
    released_init: bool,
    known_from: Option<u32>,
    waiting: Vec<(usize, u64)>,
}

/// An mbarrier of a unit: rank of the block, byte in its shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) block: usize,
    pub(super) offset: usize,
}

fn misuse<T>(text: String) -> Result<T, Failure> {
    Err(Failure(Defect::Mbarrier, text))
}

impl Machine {
    fn mbarrier(&mut self, slot: usize, place: Place) -> &mut Mbarrier {
        let block = &mut self.unit_at(slot).blocks[place.block];
        block.mbarriers.get_mut(&place.offset).expect("an mbarrier that was found before")
    }

    /// The mbarrier that an instruction of the running thread means, which must be ready for its use.
    pub(super) fn find_mbarrier(&mut self, instruction: &str, address: u32) -> Result<Place, Failure> {
        self.step()?;
        let (block, offset) = self.locate(address);
        let thread = self.current.thread;
        let unit = self.unit();
        let own = unit[thread].block;
        let Some(mbarrier) = unit.blocks.get(block).and_then(|block| block.mbarriers.get(&offset)) else {
            let offset = offset as isize;
            return misuse(format!(
                "`{instruction}` on byte {offset} of shared memory, where no mbarrier was initialised"
            ));
        };
        let (initialiser, line, fenced) = (mbarrier.initialiser, mbarrier.line, mbarrier.fenced);
        let known = mbarrier.known_from.is_some_and(|phase| unit[thread].met_clusters >= phase);
        if !known && !unit[thread].clock.is_after(initialiser) {
            let who = self.describe(initialiser, line);
            let text = format!(
                "data race: `{instruction}` on the mbarrier at byte {offset} with no barrier after its initialisation by {who}"
            );
            return Err(Failure(Defect::Race, text));
        }
        if block != own && !fenced {
            return Err(self.unfenced(instruction, Place { block, offset }));
        }
        Ok(Place { block, offset })
    }

    fn unfenced(&mut self, instruction: &str, place: Place) -> Failure {
        let slot = self.current.slot;
        let (initialiser, line) = (self.mbarrier(slot, place).initialiser, self.mbarrier(slot, place).line);
        let who = self.describe(initialiser, line);
        let text = format!(
            "missing fence.mbarrier_init: `{instruction}` uses the mbarrier at byte {} of shared memory, which {who} initialised",
            place.offset
        );
        Failure(Defect::ProxyFence, text)
    }

    /// A copy that will complete at the mbarrier: the stamp of its writes.
    pub(super) fn copy_for(&mut self, instruction: &str, place: Place) -> Result<Stamp, Failure> {
        let slot = self.current.slot;
        let unit = self.unit().id;
        let mbarrier = self.mbarrier(slot, place);
        if !mbarrier.fenced {
            return Err(self.unfenced(instruction, place));
        }
        mbarrier.time += 1;
        Ok(Stamp::new(unit, mbarrier.agent, mbarrier.time))
    }

    /// A copy has brought its bytes.
    pub(super) fn complete_bytes(
        &mut self,
        slot: usize,
        place: Place,
        bytes: u32,
        stamp: Stamp,
    ) -> Result<(), Failure> {
        let Some(mbarrier) = self.unit_at(slot).blocks[place.block].mbarriers.get_mut(&place.offset) else {
            return misuse(format!("the mbarrier at byte {} was invalidated under a copy", place.offset));
        };
        mbarrier.bytes -= i64::from(bytes);
        Rc::make_mut(&mut mbarrier.released).see_proxied(stamp.actor(), stamp.time());
        self.complete_phase(slot, place)
    }

    /// An arrival, of a thread or on behalf of its copies, that announces bytes.
    pub(super) fn arrive(
        &mut self,
        instruction: &str,
        slot: usize,
        place: Place,
        released: &Rc<Frame>,
        bytes: u32,
    ) -> Result<(), Failure> {
        let mbarrier = self.mbarrier(slot, place);
        if mbarrier.pending == 0 {
            let (count, offset) = (mbarrier.count, place.offset);
            return misuse(format!(
                "`{instruction}`: more than the {count} arrivals that a phase of the mbarrier at byte {offset} expects"
            ));
        }
        mbarrier.bytes += i64::from(bytes);
        if mbarrier.bytes > i64::from(MAX_COUNT) {
            return misuse(format!(
                "`{instruction}`: {} bytes in a phase, at most {MAX_COUNT}",
                mbarrier.bytes
            ));
        }
        mbarrier.pending -= 1;
        join(&mut mbarrier.released, released);
        self.complete_phase(slot, place)
    }

    fn complete_phase(&mut self, slot: usize, place: Place) -> Result<(), Failure> {
        let mbarrier = self.mbarrier(slot, place);
        if mbarrier.pending > 0 || mbarrier.bytes != 0 {
            return Ok(());
        }
        mbarrier.phase += 1;
        mbarrier.pending = mbarrier.count;
        mbarrier.opened = mbarrier.released.clone();
        let (phase, opened) = (mbarrier.phase, mbarrier.opened.clone());
        let woken: Vec<usize> =
            mbarrier.waiting.extract_if(.., |(_, until)| *until <= phase).map(|(thread, _)| thread).collect();
        for thread in woken {
            self.unit_at(slot)[thread].clock.acquire(&opened);
            self.wake(slot, thread);
        }
        self.progress();
        Ok(())
    }

    fn own_mbarriers(&mut self) -> impl Iterator<Item = &mut Mbarrier> {
        let thread = self.current.thread as u32;
        let blocks = self.unit().blocks.iter_mut();
        blocks
            .flat_map(|block| block.mbarriers.values_mut())
            .filter(move |mbarrier| mbarrier.initialiser.actor() == thread)
    }

    /// Every mbarrier that the running thread initialised is known to the asynchronous proxy and to other blocks.
    pub(super) fn fence_mbarriers(&mut self) {
        self.own_mbarriers().for_each(|mbarrier| mbarrier.fenced = true);
    }

    /// The running thread comes to this phase of the cluster's barrier without a release: those behind it know of the
    /// mbarriers that it initialised before a `fence.mbarrier_init`.
    pub(super) fn announce_mbarriers(&mut self, phase: u32) {
        for mbarrier in self.own_mbarriers().filter(|mbarrier| mbarrier.released_init) {
            mbarrier.known_from.get_or_insert(phase);
        }
    }
}

/// `mbarrier.init`.
#[track_caller]
pub(crate) fn mbarrier_init(address: u32, count: u32) {
    const INSTRUCTION: &str = "mbarrier.init";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| {
        machine.needs(Need::Mbarrier, INSTRUCTION)?;
        if count == 0 || count > MAX_COUNT {
            return misuse(format!("`{INSTRUCTION}` with a count of {count}: expected 1 to {MAX_COUNT}"));
        }
        let (block, offset) = machine.locate(address);
        let own = machine.thread().block;
        if block != own || machine.unit().blocks[own].mbarriers.contains_key(&offset) {
            return misuse(format!(
                "`{INSTRUCTION}` at byte {offset}, which holds an mbarrier already or is another block's"
            ));
        }
        machine.access(Space::Shared(address), 8, 8, Kind::Write, None, line)?;
        let line = machine.line_number(line);
        let name = format!("a copy that completes at the mbarrier at byte {offset}");
        let unit = machine.unit();
        let agent = unit.new_agent(name);
        let mbarrier = Mbarrier {
            count,
            pending: count,
            bytes: 0,
            phase: 0,
            released: Rc::new(Frame::default()),
            opened: Rc::new(Frame::default()),
            agent,
            time: START,
            initialiser: machine.thread().clock.stamp(),
            line,
            fenced: false,
            released_init: false,
            known_from: None,
            waiting: Vec::new(),
        };
        let block = &mut machine.unit().blocks[own];
        block.shadow.mark(offset, 8, Stamp::MBARRIER);
        block.mbarriers.insert(offset, mbarrier);
        Ok(())
    });
}

/// `mbarrier.inval`.
#[track_caller]
pub(crate) fn mbarrier_invalidate(address: u32) {
    const INSTRUCTION: &str = "mbarrier.inval";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::Mbarrier, INSTRUCTION)?;
        let Place { block, offset } = machine.find_mbarrier(INSTRUCTION, address)?;
        let block = &mut machine.unit().blocks[block];
        let mbarrier = block.mbarriers.remove(&offset).expect("the mbarrier that was found");
        if !mbarrier.waiting.is_empty() || mbarrier.bytes != 0 || mbarrier.pending != mbarrier.count {
            return misuse(format!(
                "`{INSTRUCTION}` of the mbarrier at byte {offset} in the middle of a phase"
            ));
        }
        block.shadow.mark(offset, 8, Stamp::NEVER);
        Ok(())
    });
}

/// Whose mbarriers an instruction may arrive at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Block,
    Cluster,
}

fn arrival(
    instruction: &'static str,
    need: Need,
    reach: Reach,
    address: u32,
    bytes: u32,
    line: &'static Location<'static>,
) {
    attempt(instruction, line, |machine| {
        machine.needs(need, instruction)?;
        let place = machine.find_mbarrier(instruction, address)?;
        if reach == Reach::Block && place.block != machine.thread().block {
            return misuse(format!("`{instruction}` on another block's mbarrier"));
        }
        let stamp = machine.thread().clock.stamp();
        machine.visit(place.block, stamp, "arrival at an mbarrier", line)?;
        let released = machine.thread().clock.release();
        let slot = machine.current.slot;
        machine.arrive(instruction, slot, place, &released, bytes)
    });
}

/// `mbarrier.arrive`.
#[track_caller]
pub(crate) fn mbarrier_arrive(address: u32) {
    arrival("mbarrier.arrive", Need::Mbarrier, Reach::Block, address, 0, Location::caller());
}

/// `mbarrier.arrive.expect_tx`.
#[track_caller]
pub(crate) fn mbarrier_arrive_expect_tx(address: u32, bytes: u32) {
    arrival("mbarrier.arrive.expect_tx", Need::Tma, Reach::Block, address, bytes, Location::caller());
}

/// `mbarrier.arrive.shared::cluster`.
#[track_caller]
pub(crate) fn mbarrier_arrive_remote(address: u32) {
    arrival(
        "mbarrier.arrive.shared::cluster",
        Need::Clusters,
        Reach::Cluster,
        address,
        0,
        Location::caller(),
    );
}

/// `mbarrier.expect_tx`.
#[track_caller]
pub(crate) fn mbarrier_expect_tx(address: u32, bytes: u32) {
    const INSTRUCTION: &str = "mbarrier.expect_tx";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::Tma, INSTRUCTION)?;
        let place = machine.find_mbarrier(INSTRUCTION, address)?;
        if place.block != machine.thread().block {
            return misuse(format!("`{INSTRUCTION}` on another block's mbarrier"));
        }
        let slot = machine.current.slot;
        let mbarrier = machine.mbarrier(slot, place);
        mbarrier.bytes += i64::from(bytes);
        if mbarrier.bytes > i64::from(MAX_COUNT) {
            return misuse(format!(
                "`{INSTRUCTION}`: {} bytes in a phase, at most {MAX_COUNT}",
                mbarrier.bytes
            ));
        }
        Ok(())
    });
}

/// What a look at a phase has found.
enum Look {
    Completed,
    NotYet,
    Waits,
}

/// Looks at a phase and acquires what it released, if it has completed.
fn look(
    instruction: &'static str,
    line: &'static Location<'static>,
    need: Need,
    address: u32,
    parity: u32,
    waits: bool,
) -> Look {
    attempt(instruction, line, |machine| {
        machine.needs(need, instruction)?;
        let place = machine.find_mbarrier(instruction, address)?;
        let ThreadId { slot, thread } = machine.current;
        if machine.thread().block != place.block {
            return misuse(format!("`{instruction}` on another block's mbarrier"));
        }
        if parity > 1 {
            return misuse(format!("`{instruction}` with parity {parity}"));
        }
        let impatient = !waits || machine.random.one_in(8);
        let mbarrier = machine.mbarrier(slot, place);
        if mbarrier.phase & 1 != u64::from(parity) {
            let opened = mbarrier.opened.clone();
            machine.thread().clock.acquire(&opened);
            return Ok(Look::Completed);
        }
        if impatient {
            machine.poll(line)?;
            return Ok(Look::NotYet);
        }
        let until = mbarrier.phase + 1;
        mbarrier.waiting.push((thread, until));
        machine.wait(Wait::Mbarrier { offset: place.offset, parity });
        Ok(Look::Waits)
    })
}

/// `mbarrier.test_wait.parity`.
#[track_caller]
pub(crate) fn mbarrier_test_wait_parity(address: u32, parity: u32) -> bool {
    let done = look("mbarrier.test_wait", Location::caller(), Need::Mbarrier, address, parity, false);
    pause();
    matches!(done, Look::Completed)
}

/// `mbarrier.try_wait.parity`: gives up early now and then, as hardware may.
#[track_caller]
pub(crate) fn mbarrier_try_wait_parity(address: u32, parity: u32) -> bool {
    match look("mbarrier.try_wait", Location::caller(), Need::Tma, address, parity, true) {
        Look::Completed => true,
        Look::NotYet => {
            pause();
            false
        }
        Look::Waits => {
            suspend();
            true
        }
    }
}

/// `fence.mbarrier_init`.
#[track_caller]
pub(crate) fn fence_mbarrier_init() {
    const INSTRUCTION: &str = "fence.mbarrier_init";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::Tma, INSTRUCTION)?;
        machine.fence_mbarriers();
        machine.own_mbarriers().for_each(|mbarrier| mbarrier.released_init = true);
        Ok(())
    });
}
