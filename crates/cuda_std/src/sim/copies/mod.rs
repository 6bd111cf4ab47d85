//! Asynchronous copies: `cp.async`, and the bulk copies of TMA.
//!
//! A copy's accesses are checked and remembered when it is issued, stamped by an agent that nobody has seen yet; the
//! bytes move at a moment of the seed's choosing, at the latest when a wait covers them or nothing else can happen.

mod bulk;
mod cp_async;

pub(crate) use bulk::*;
pub(crate) use cp_async::*;

use core::panic::Location;
use std::collections::VecDeque;
use std::format;
use std::rc::Rc;
use std::vec;
use std::vec::Vec;

use half::{bf16, f16};

use super::access::Space;
use super::clock::{Frame, START, Stamp};
use super::machine::{Machine, attempt};
use super::mbarrier::Place;
use super::shadow::Kind;
use super::unit::{Failure, ThreadId};
use super::{Defect, Need};

/// Where the bytes of a move come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Memory(*const u8),
    /// A repeated pattern: what a load reads outside a tensor.
    Fill([u8; 16]),
}

/// Contiguous bytes on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    from: Source,
    to: *mut u8,
    bytes: usize,
}

impl Move {
    fn run(&self) {
        match self.from {
            // SAFETY: both places were checked when the copy was issued; buffers outlive the simulation, and shared
            // memory its unit, which cannot end before its copies.
            Source::Memory(from) => unsafe { core::ptr::copy(from, self.to, self.bytes) },
            Source::Fill(pattern) => {
                for i in 0..self.bytes {
                    // SAFETY: as above.
                    unsafe { *self.to.add(i) = pattern[i % 16] };
                }
            }
        }
    }
}

/// What a store does with the bytes at its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Combine {
    Replace,
    AddF32,
    AddF16,
    AddBf16,
    AddU32,
    AddU64,
}

impl Combine {
    /// Combines `new` into the bytes at `to`.
    ///
    /// # Safety
    /// `to` is good for `new.len()` bytes.
    unsafe fn run(self, new: &[u8], to: *mut u8) {
        fn add<const N: usize>(new: &[u8], old: &mut [u8], sum: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
            for (new, old) in new.as_chunks().0.iter().zip(old.as_chunks_mut().0) {
                *old = sum(*old, *new);
            }
        }
        // SAFETY: the caller's promise; nobody else holds a reference to a simulated memory.
        let old = unsafe { core::slice::from_raw_parts_mut(to, new.len()) };
        match self {
            Combine::Replace => old.copy_from_slice(new),
            Combine::AddF32 => {
                add(new, old, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes())
            }
            Combine::AddF16 => add(new, old, |a, b| {
                f16::from_f32(f16::from_le_bytes(a).to_f32() + f16::from_le_bytes(b).to_f32()).to_le_bytes()
            }),
            Combine::AddBf16 => add(new, old, |a, b| {
                bf16::from_f32(bf16::from_le_bytes(a).to_f32() + bf16::from_le_bytes(b).to_f32())
                    .to_le_bytes()
            }),
            Combine::AddU32 => {
                add(new, old, |a, b| u32::from_le_bytes(a).wrapping_add(u32::from_le_bytes(b)).to_le_bytes())
            }
            Combine::AddU64 => {
                add(new, old, |a, b| u64::from_le_bytes(a).wrapping_add(u64::from_le_bytes(b)).to_le_bytes())
            }
        }
    }
}

/// An operation that completes by itself.
pub(super) enum Pending {
    /// A load of TMA, whose bytes complete at an mbarrier.
    Load {
        slot: usize,
        moves: Vec<Move>,
        place: Place,
        bytes: u32,
        stamp: Stamp,
        line: &'static Location<'static>,
    },
    /// A bulk store: first it reads, then it writes.
    Store { slot: usize, thread: usize, time: u32, moves: Vec<Move>, combine: Combine, read: Option<Vec<u8>> },
    /// An arrival that waits for a thread's `cp.async`.
    Arrival { slot: usize, thread: usize, time: u32, place: Place, line: &'static Location<'static> },
}

/// When pending operations complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// At once.
    Soon,
    /// When there is no other way.
    Late,
    Any,
}

/// The `cp.async` of a thread.
#[derive(Default)]
pub(super) struct Copies {
    /// The agent and its time.
    agent: Option<(u32, u32)>,
    under_way: VecDeque<(u32, Move)>,
    /// The time of each group that was committed and not waited for.
    groups: Vec<u32>,
}

/// The bulk stores of a thread.
#[derive(Default)]
pub(super) struct Stores {
    /// The agents that read and write, and their time.
    agents: Option<(u32, u32, u32)>,
    uncommitted: bool,
    /// The time of each group that was committed: not waited for with its reads, and at all.
    unread: Vec<u32>,
    unwritten: Vec<u32>,
}

impl Machine {
    /// Adds an operation that completes by itself.
    fn start(&mut self, pending: Pending) -> Result<(), Failure> {
        self.pending.push(pending);
        if self.moment == Moment::Soon {
            let last = self.pending.len() - 1;
            while self.pending.len() > last {
                self.advance(last)?;
            }
        }
        Ok(())
    }

    /// Lets a pending operation take its next step.
    pub(super) fn advance(&mut self, index: usize) -> Result<(), Failure> {
        self.progress();
        match &mut self.pending[index] {
            Pending::Store { moves, read: read @ None, .. } => {
                let mut bytes = vec![0; moves.iter().map(|part| part.bytes).sum()];
                let mut rest = &mut bytes[..];
                for part in moves {
                    let (here, after) = rest.split_at_mut(part.bytes);
                    Move { to: here.as_mut_ptr(), ..*part }.run();
                    rest = after;
                }
                *read = Some(bytes);
                Ok(())
            }
            _ => match self.pending.swap_remove(index) {
                Pending::Store { moves, combine, read, .. } => {
                    let mut rest = &read.expect("read before")[..];
                    for part in &moves {
                        let (here, after) = rest.split_at(part.bytes);
                        // SAFETY: checked when the store was issued.
                        unsafe { combine.run(here, part.to) };
                        rest = after;
                    }
                    Ok(())
                }
                Pending::Load { slot, moves, place, bytes, stamp, .. } => {
                    moves.iter().for_each(Move::run);
                    self.complete_bytes(slot, place, bytes, stamp)
                }
                Pending::Arrival { slot, thread, time, place, .. } => {
                    let copies = &mut self.unit_at(slot)[thread].copies;
                    let (agent, _) = copies.agent.unwrap_or((0, 0));
                    copies.finish(time);
                    let mut frame = Frame::default();
                    if time > 0 {
                        frame.see(agent, time);
                    }
                    self.arrive("cp.async.mbarrier.arrive.noinc", slot, place, &Rc::new(frame), 0)
                }
            },
        }
    }

    /// Lets any pending operation take its next step; false if there is none.
    pub(super) fn advance_any(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let index = self.random.below(self.pending.len());
        let line = match &self.pending[index] {
            Pending::Load { line, .. } | Pending::Arrival { line, .. } => Some(*line),
            Pending::Store { .. } => None,
        };
        if let Err(failure) = self.advance(index) {
            self.fail(failure, None, line);
        }
        true
    }

    /// A unit is about to end.
    pub(super) fn check_copies_of_unit(&mut self, slot: usize) -> Result<(), Failure> {
        let load = self.pending.iter().find_map(|pending| match pending {
            Pending::Load { slot: of, place, line, .. } if *of == slot => Some((*place, *line)),
            _ => None,
        });
        if let Some((place, line)) = load {
            let text = format!(
                "the block ends while the copy of {}:{} to its shared memory is under way (mbarrier at byte {})",
                line.file(),
                line.line(),
                place.offset
            );
            return Err(Failure(Defect::Asynchronous, text));
        }
        // Stores finish whatever becomes of the block; an arrival that nobody waits for does not matter.
        while let Some(index) = self.pending.iter().position(|pending| match pending {
            Pending::Load { slot: of, .. }
            | Pending::Store { slot: of, .. }
            | Pending::Arrival { slot: of, .. } => *of == slot,
        }) {
            match self.pending[index] {
                Pending::Store { .. } => self.advance(index)?,
                _ => drop(self.pending.swap_remove(index)),
            }
        }
        Ok(())
    }

    /// A thread is about to return: its stores may not read shared memory any more.
    pub(super) fn check_stores_of_thread(&mut self) -> Result<(), Failure> {
        let stores = &self.thread().stores;
        if stores.uncommitted || !stores.unread.is_empty() {
            let text = "the thread returns without `cp.async.bulk.wait_group.read` for its stores, which may still read \
                        the block's shared memory";
            return Err(Failure::new(Defect::Asynchronous, text));
        }
        Ok(())
    }

    /// Agent and time of the thread's `cp.async`.
    fn cp_async_agent(&mut self) -> (u32, u32) {
        if let Some(agent) = self.thread().copies.agent {
            return agent;
        }
        let name = self.thread_name();
        let agent = self.unit().new_agent(format!("a cp.async of {name}"));
        self.thread().copies.agent = Some((agent, START));
        (agent, START)
    }

    /// The thread's copies up to a time are done, and it has seen them.
    fn finish_copies(&mut self, time: u32) {
        let thread = self.thread();
        let Some((agent, _)) = thread.copies.agent else { return };
        thread.copies.finish(time);
        Rc::make_mut(&mut thread.clock.frame).see(agent, time);
    }

    /// The stores of the running thread up to a time take their steps: to the end, or only until they have read.
    fn finish_stores(&mut self, time: u32, until: Until) -> Result<(), Failure> {
        let current = self.current;
        while let Some(index) = self.pending.iter().position(|pending| {
            matches!(pending, Pending::Store { slot, thread, time: started, read, .. }
                if (*slot, *thread) == (current.slot, current.thread) && *started <= time
                    && (until == Until::Written || read.is_none()))
        }) {
            self.advance(index)?;
        }
        Ok(())
    }

    /// Checks a load of TMA and lets it go. `pieces` are the same for every block that it goes to.
    pub(super) fn load_pieces(
        &mut self,
        instruction: &str,
        pieces: &[Piece],
        shared: u32,
        barrier: u32,
        bytes: u32,
        line: &'static Location<'static>,
    ) -> Result<(), Failure> {
        let place = self.find_mbarrier(instruction, barrier)?;
        let (target, _) = self.locate(shared);
        if target != place.block {
            let text =
                format!("`{instruction}`: the destination and the mbarrier belong to different blocks");
            return Err(Failure(Defect::Mbarrier, text));
        }
        let stamp = self.copy_for(instruction, place)?;
        let mut moves = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let from = match piece.global {
                From::Global(address) => Source::Memory(self.access(
                    Space::Global(address),
                    piece.bytes,
                    1,
                    Kind::AsyncRead,
                    Some(stamp),
                    line,
                )?),
                From::Shared(address) => Source::Memory(self.access(
                    Space::Shared(address),
                    piece.bytes,
                    1,
                    Kind::AsyncRead,
                    Some(stamp),
                    line,
                )?),
                From::Fill(pattern) => Source::Fill(pattern),
            };
            let to = Space::Shared(shared + piece.shared as u32);
            let to = self.access(to, piece.bytes, 1, Kind::AsyncWrite, Some(stamp), line)?;
            moves.push(Move { from, to, bytes: piece.bytes });
        }
        let slot = self.current.slot;
        self.start(Pending::Load { slot, moves, place, bytes, stamp, line })
    }

    /// Checks a bulk store and lets it go.
    pub(super) fn store_pieces(
        &mut self,
        pieces: &[Piece],
        shared: u32,
        combine: Combine,
        line: &'static Location<'static>,
    ) -> Result<(), Failure> {
        let (reader, writer, time) = match self.thread().stores.agents {
            Some(agents) => agents,
            None => {
                let name = format!("a bulk store of {}", self.thread_name());
                let reader = self.unit().new_agent(name.clone());
                let writer = self.unit().new_agent(name);
                (reader, writer, START)
            }
        };
        let unit = self.unit().id;
        let stores = &mut self.thread().stores;
        stores.agents = Some((reader, writer, time));
        stores.uncommitted = true;
        let mut moves = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let From::Global(address) = piece.global else { continue };
            let from = Space::Shared(shared + piece.shared as u32);
            let from = self.access(
                from,
                piece.bytes,
                1,
                Kind::AsyncRead,
                Some(Stamp::new(unit, reader, time)),
                line,
            )?;
            let kind = match combine {
                Combine::Replace => Kind::AsyncWrite,
                // Adds by several stores are atomic.
                _ => Kind::AtomicWrite,
            };
            let stamp = Stamp::new(unit, writer, time);
            if combine != Combine::Replace {
                self.access(Space::Global(address), piece.bytes, 1, Kind::AtomicRead, Some(stamp), line)?;
            }
            let to = self.access(Space::Global(address), piece.bytes, 1, kind, Some(stamp), line)?;
            moves.push(Move { from: Source::Memory(from), to, bytes: piece.bytes });
        }
        let ThreadId { slot, thread } = self.current;
        self.start(Pending::Store { slot, thread, time, moves, combine, read: None })
    }
}

/// How far stores are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Read,
    Written,
}

/// Bytes of a box that are contiguous on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Offset in the box's shared memory.
    pub(super) shared: usize,
    pub(super) global: From,
    pub(super) bytes: usize,
}

/// The other side of a piece.
#[derive(Clone, Copy, Debug)]
pub(super) enum From {
    Global(usize),
    /// This block's shared memory, for a copy to another block's.
    Shared(u32),
    /// Outside the tensor.
    Fill([u8; 16]),
}

impl Copies {
    /// Moves what was issued up to a time.
    fn finish(&mut self, time: u32) {
        while self.under_way.front().is_some_and(|(issued, _)| *issued <= time) {
            let (_, copy) = self.under_way.pop_front().expect("the front");
            copy.run();
        }
    }
}
