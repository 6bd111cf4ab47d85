//! `wgmma`: what is under way, and whose registers it holds.
//!
//! A warp computes its 16 rows when its lanes have come; the result is kept back until the wait that covers it. An
//! instruction is one for its four warps: a wait ends when all of them have issued what it covers. Meanwhile
//! the accumulators hold NaN that name what they wait for, so a kernel that reads them too early computes with NaN, and
//! one that stores them is told so.

use core::mem::MaybeUninit;
use core::panic::Location;
use std::collections::VecDeque;
use std::format;
use std::rc::Rc;
use std::vec::Vec;

use super::access::Space;
use super::clock::{START, Stamp};
use super::machine::{Machine, attempt, suspend};
use super::shadow::Kind;
use super::swizzle::Operand;
use super::tensor_core::{self, Major, WarpA, WgmmaA, WgmmaKind};
use super::unit::{Failure, Wait};
use super::warp::{Operation, Together, collective};
use super::{Defect, Need};
use crate::wgmma::Accumulate;

/// The `wgmma` of a warp.
#[derive(Default)]
pub(super) struct Multiplications {
    /// Groups committed: the time of the warpgroup's agent in this warp.
    committed: u32,
    /// The time of each group that was committed and not waited for.
    groups: Vec<u32>,
    uncommitted: bool,
    /// A fence has come since the registers could be touched last.
    fenced: bool,
    /// Instructions of the warpgroup so far.
    count: usize,
}

/// The `wgmma` of four warps.
#[derive(Default)]
pub(super) struct Warpgroup {
    /// The agent that reads shared memory.
    agent: Option<u32>,
    /// What some warps have executed and others have not yet.
    log: VecDeque<Executed>,
    /// Instructions that all four have executed.
    done: usize,
    /// Threads that wait until all warps have committed a group, by its time.
    waiting: Vec<(usize, u32)>,
}

/// An instruction of a warpgroup: the same in all of its warps, so from one place in the program, where branches that
/// lead there are taken by all of them or by none.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Executed {
    pub(super) instruction: &'static str,
    pub(super) line: &'static Location<'static>,
    /// Descriptors, or what else is part of the instruction.
    pub(super) operands: [u64; 2],
}

/// What a thread's accumulators will hold.
pub(super) struct Held {
    tag: u32,
    time: u32,
    is_done: bool,
    values: Vec<u32>,
}

const QUIET: u32 = 0x7fc0_0000;
const MAX_TAG: u32 = 0x3ffe;

/// The NaN that stands for register `index` of a result under way.
fn placeholder(tag: u32, index: usize) -> u32 {
    QUIET | tag << 8 | index as u32
}

/// The tag and index of a placeholder.
fn parse(word: u32) -> Option<(u32, usize)> {
    let (tag, index) = (word >> 8 & 0x3fff, (word & 0xff) as usize);
    (word & 0xffc0_0000 == QUIET && tag > 0 && tag <= MAX_TAG).then_some((tag, index))
}

const fn aligned(instruction: &'static str) -> Operation {
    Operation { instruction, together: Together::Aligned, need: Some(Need::Wgmma) }
}

/// The lanes of a warp come together for an instruction that has no operands.
fn together(
    instruction: &'static str,
    operand: u64,
    line: &'static Location<'static>,
    act: impl FnOnce(&mut Machine) -> Result<(), Failure>,
) {
    collective(aligned(instruction), u32::MAX, operand, [0; 12], line, |access, _| {
        access.machine.check_warpgroup(Executed { instruction, line, operands: [operand, 0] })?;
        act(access.machine)?;
        Ok([[0; 8]; 32])
    });
}

impl Machine {
    /// The running warp's group is whole, and its warps execute the same instructions with the same operands in shared
    /// memory.
    pub(super) fn check_warpgroup(&mut self, executed: Executed) -> Result<(), Failure> {
        let thread = self.current.thread;
        let Executed { instruction, .. } = executed;
        let unit = self.unit();
        let (block, warp) = (unit[thread].block, unit[thread].warp);
        let first = warp / 4 * 4;
        if unit.blocks[block].warps.len() < first + 4 {
            let text = format!("`{instruction}` by warp {warp}, whose warpgroup has less than four warps");
            return Err(Failure(Defect::Divergence, text));
        }
        let count = self.warp().multiplications.count;
        self.warp().multiplications.count += 1;
        let group = self.warpgroup();
        match group.log.get(count - group.done) {
            None => group.log.push_back(executed),
            Some(other) if *other == executed => {}
            Some(Executed { instruction: other, line, .. }) => {
                let text = format!(
                    "`{instruction}`: warp {warp} executes another instruction, or other operands, than the other warps of its group: \
                     `{other}` at {}:{}",
                    line.file(),
                    line.line()
                );
                return Err(Failure(Defect::Divergence, text));
            }
        }
        let warps = &self.unit().blocks[block].warps[first..first + 4];
        let by_all = warps.iter().map(|warp| warp.multiplications.count).min().unwrap_or(0);
        let group = self.warpgroup();
        group.log.drain(..by_all - group.done);
        group.done = by_all;
        Ok(())
    }

    fn warpgroup(&mut self) -> &mut Warpgroup {
        let thread = self.current.thread;
        let unit = self.unit();
        let (block, warp) = (unit[thread].block, unit[thread].warp);
        unit.blocks[block].warpgroups.entry(warp / 4).or_default()
    }

    /// Agent and time of the reads of the warp's instructions.
    fn wgmma_agent(&mut self) -> (u32, u32) {
        let time = START + self.warp().multiplications.committed;
        if let Some(agent) = self.warpgroup().agent {
            return (agent, time);
        }
        let warpgroup = self.thread().warp / 4;
        let name = self.thread_name();
        let agent = self.unit().new_agent(format!("a wgmma of warpgroup {warpgroup} (of {name})"));
        self.warpgroup().agent = Some(agent);
        (agent, time)
    }

    /// The time up to which all warps of the group have committed their groups.
    fn wgmma_committed(&mut self) -> u32 {
        let thread = self.current.thread;
        let unit = self.unit();
        let (block, first) = (unit[thread].block, unit[thread].warp / 4 * 4);
        let warps = &unit.blocks[block].warps[first..first + 4];
        START + warps.iter().map(|warp| warp.multiplications.committed).min().unwrap_or(0)
    }

    /// A thread is about to return: its warp must have waited, and executed what the others of its group did.
    pub(super) fn check_wgmma_of_thread(&mut self) -> Result<(), Failure> {
        let thread = self.current.thread;
        let multiplications = &self.warp().multiplications;
        if multiplications.uncommitted || !multiplications.groups.is_empty() {
            let text =
                "the thread returns while a `wgmma` of its warp is under way: `wgmma.wait_group` is missing";
            return Err(Failure::new(Defect::Asynchronous, text));
        }
        let count = multiplications.count;
        let unit = self.unit();
        let (block, warp) = (unit[thread].block, unit[thread].warp);
        let executed =
            unit.blocks[block].warpgroups.get(&(warp / 4)).map_or(0, |group| group.done + group.log.len());
        if executed != count {
            let text = format!(
                "warp {warp} returns after {count} instructions of its warpgroup, while another warp of its group executed {executed}"
            );
            return Err(Failure(Defect::Divergence, text));
        }
        Ok(())
    }

    /// The registers that a store writes are not those of an instruction under way.
    pub(super) fn check_registers(&mut self, bytes: &[MaybeUninit<u8>]) -> Result<(), Failure> {
        let held = &self.thread().held;
        if held.is_empty() {
            return Ok(());
        }
        let word = |bytes: &[MaybeUninit<u8>; 4]| {
            // SAFETY: elements of tensors have no padding.
            u32::from_ne_bytes(bytes.map(|byte| unsafe { byte.assume_init() }))
        };
        let early = bytes.as_chunks().0.iter().map(word).find_map(parse);
        if early.is_some_and(|(tag, _)| held.iter().any(|held| held.tag == tag)) {
            let text = "stores an accumulator of a `wgmma` that no `wgmma.wait_group` has given back";
            return Err(Failure::new(Defect::Asynchronous, text));
        }
        Ok(())
    }
}

/// `wgmma.fence`.
#[track_caller]
pub(crate) fn wgmma_fence() {
    together("wgmma.fence", 0, Location::caller(), |machine| {
        machine.warp().multiplications.fenced = true;
        Ok(())
    });
}

/// `wgmma.commit_group`.
#[track_caller]
pub(crate) fn wgmma_commit_group() {
    together("wgmma.commit_group", 0, Location::caller(), |machine| {
        let (_, time) = machine.wgmma_agent();
        let multiplications = &mut machine.warp().multiplications;
        multiplications.groups.push(time);
        multiplications.committed += 1;
        multiplications.uncommitted = false;
        let committed = machine.wgmma_committed();
        let slot = machine.current.slot;
        let woken: Vec<usize> = machine
            .warpgroup()
            .waiting
            .extract_if(.., |(_, time)| *time < committed)
            .map(|(thread, _)| thread)
            .collect();
        woken.into_iter().for_each(|thread| machine.wake(slot, thread));
        Ok(())
    });
}

/// `wgmma.wait_group`.
#[track_caller]
pub(crate) fn wgmma_wait_group(newest: u32) {
    const INSTRUCTION: &str = "wgmma.wait_group";
    let line = Location::caller();
    together(INSTRUCTION, newest.into(), line, |machine| {
        let multiplications = &mut machine.warp().multiplications;
        multiplications.fenced = false;
        let groups = &mut multiplications.groups;
        let Some(done) = groups.len().checked_sub(newest as usize).filter(|&done| done > 0) else {
            return Ok(());
        };
        let time = groups[done - 1];
        groups.drain(..done);
        let (_, first) = machine.warp_threads();
        machine.unit().threads[first..first + 32]
            .iter_mut()
            .for_each(|thread| thread.wgmma_wait = Some(time));
        Ok(())
    });
    let waits = attempt(INSTRUCTION, line, |machine| {
        let Some(time) = machine.thread().wgmma_wait else { return Ok(false) };
        let waits = machine.wgmma_committed() <= time;
        if waits {
            let thread = machine.current.thread;
            machine.warpgroup().waiting.push((thread, time));
            machine.wait(Wait::Warpgroup);
        }
        Ok(waits)
    });
    if waits {
        suspend();
    }
    attempt(INSTRUCTION, line, |machine| {
        let Some(time) = machine.thread().wgmma_wait.take() else { return Ok(()) };
        let (agent, _) = machine.wgmma_agent();
        let thread = machine.thread();
        Rc::make_mut(&mut thread.clock.frame).see_proxied(agent, time);
        thread.held.iter_mut().filter(|held| held.time <= time).for_each(|held| held.is_done = true);
        Ok(())
    });
}

/// Gives registers back after a wait: those whose instructions are done.
#[track_caller]
pub(crate) fn wgmma_give_back(registers: &mut [u32]) {
    attempt("wgmma.wait_group", Location::caller(), |machine| {
        let held = &mut machine.thread().held;
        if held.is_empty() {
            return Ok(());
        }
        let mut given_back = Vec::new();
        for register in registers {
            let Some((tag, index)) = parse(*register) else { continue };
            if let Some(held) = held.iter().find(|held| held.tag == tag && held.is_done) {
                *register = held.values[index];
                given_back.push(tag);
            }
        }
        held.retain(|held| !given_back.contains(&held.tag));
        Ok(())
    });
}

/// `wgmma.mma_async`.
#[track_caller]
pub(crate) fn wgmma(
    kind: WgmmaKind,
    d: &mut [u32],
    a: WgmmaA,
    b: u64,
    b_major: Major,
    accumulate: Accumulate,
) {
    const INSTRUCTION: &str = "wgmma.mma_async";
    let line = Location::caller();
    let place = d.as_mut_ptr().addr() as u64;
    let mut input = [0; 12];
    let descriptor = match a {
        WgmmaA::Registers(registers) => {
            input[..4].copy_from_slice(&registers);
            0
        }
        WgmmaA::Shared { descriptor, .. } => descriptor,
    };
    input[4] = place as u32;
    input[5] = (place >> 32) as u32;
    let (num_registers, adds) = (d.len(), accumulate == Accumulate::Add);
    let immediate = b ^ descriptor.rotate_left(7) ^ u64::from(adds) << 40;
    collective(aligned(INSTRUCTION), u32::MAX, immediate, input, line, |access, inputs| {
        let machine = &mut *access.machine;
        machine.check_warpgroup(Executed { instruction: INSTRUCTION, line, operands: [descriptor, b] })?;
        if !machine.warp().multiplications.fenced {
            let text =
                format!("`{INSTRUCTION}` without `wgmma.fence` after the registers could be touched last");
            return Err(Failure(Defect::Asynchronous, text));
        }
        let (agent, time) = machine.wgmma_agent();
        machine.warp().multiplications.uncommitted = true;
        let stamp = Some(Stamp::new(machine.unit().id, agent, time));
        let decode = |descriptor, major| {
            let operand = Operand::decode(descriptor, major);
            operand.map_err(|error| Failure(Defect::Unsupported, format!("`{INSTRUCTION}`: {error}")))
        };
        let b = decode(b, b_major)?;
        let warp = machine.thread().warp % 4;
        let fragments = inputs.map(|input| [input[0], input[1], input[2], input[3]]);
        let a = match a {
            WgmmaA::Registers(_) => WarpA::Registers(&fragments),
            WgmmaA::Shared { descriptor, major } => WarpA::Shared(decode(descriptor, major)?),
        };
        let (_, first) = machine.warp_threads();
        let mut d = Vec::with_capacity(32 * num_registers);
        for (lane, input) in inputs.iter().enumerate() {
            let place = (u64::from(input[4]) | u64::from(input[5]) << 32) as usize as *const u32;
            // SAFETY: the registers that the lane borrowed for this call, in which it waits.
            let registers = unsafe { core::slice::from_raw_parts(place, num_registers) };
            let thread = &mut machine.unit()[first + lane];
            let chained = match accumulate {
                Accumulate::Add => registers.first().and_then(|&word| parse(word)),
                Accumulate::Overwrite => None,
            };
            let held = chained.and_then(|(tag, _)| thread.held.iter().find(|held| held.tag == tag));
            d.extend_from_slice(held.map_or(registers, |held| &held.values));
        }
        let read = |address| {
            let place = machine.access(Space::Shared(address), 16, 16, Kind::AsyncRead, stamp, line)?;
            // SAFETY: `access` found 16 bytes of shared memory there.
            Ok(unsafe { place.cast::<[u8; 16]>().read_unaligned() })
        };
        tensor_core::wgmma(kind, warp, a, b, accumulate, read, &mut d)?;
        for (lane, (input, values)) in inputs.iter().zip(d.chunks_exact(num_registers)).enumerate() {
            let place = (u64::from(input[4]) | u64::from(input[5]) << 32) as usize as *mut u32;
            // SAFETY: as above; the lanes wait, so nobody else has these registers.
            let registers = unsafe { core::slice::from_raw_parts_mut(place, num_registers) };
            let held = &mut machine.unit()[first + lane].held;
            // What the registers waited for before is done with: it is part of this result, or overwritten.
            let before = parse(registers[0]).map(|(tag, _)| tag);
            held.retain(|held| Some(held.tag) != before);
            let tag =
                (1..=MAX_TAG).find(|tag| held.iter().all(|held| held.tag != *tag)).expect("few are held");
            held.push(Held { tag, time, is_done: false, values: values.to_vec() });
            for (index, register) in registers.iter_mut().enumerate() {
                *register = placeholder(tag, index);
            }
        }
        Ok([[0; 8]; 32])
    });
}
