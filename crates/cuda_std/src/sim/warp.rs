//! Operations of the lanes of a warp among themselves.

use core::panic::Location;
use std::boxed::Box;
use std::format;
use std::string::String;
use std::vec::Vec;

use super::clock::meet;
use super::machine::{Machine, attempt, suspend};
use super::unit::{Failure, Unit, Wait};
use super::warpgroup::{Executed, Multiplications};
use super::{Defect, Need};

/// Words that a lane brings to an operation, and that it takes away.
pub(super) type Inputs = [[u32; 12]; 32];
pub(super) type Outputs = [[u32; 8]; 32];

/// How the lanes of an operation must execute it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Together {
    /// `.sync`: all lanes of the mask, from whatever line.
    Sync,
    /// `.sync.aligned`: all lanes of the warp, at the same line.
    Aligned,
}

/// An operation that waits for its lanes.
struct Gathering {
    instruction: &'static str,
    line: &'static Location<'static>,
    mask: u32,
    arrived: u32,
    immediate: u64,
    /// In a box, for they are moved more often than read.
    inputs: Box<Inputs>,
}

/// A warp of a block.
pub(super) struct Warp {
    /// Lanes that exist.
    pub(super) lanes: u32,
    /// Lanes that have returned.
    pub(super) returned: u32,
    /// Operations that part of their lanes have come to.
    gatherings: Vec<Gathering>,
    pub(super) multiplications: Multiplications,
}

impl Warp {
    pub(super) fn new(lanes: u32) -> Self {
        let lanes = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        Warp { lanes, returned: 0, gatherings: Vec::new(), multiplications: Multiplications::default() }
    }
}

/// Lane numbers of a mask, in words.
pub(super) fn lanes(mask: u32) -> String {
    let mut ranges = Vec::new();
    let mut lane = 0;
    while lane < 32 {
        let rest = mask >> lane;
        if rest & 1 == 0 {
            lane += 1;
            continue;
        }
        let run = rest.trailing_ones();
        ranges.push(match run {
            1 => format!("{lane}"),
            _ => format!("{lane} to {}", lane + run - 1),
        });
        lane += run;
    }
    let noun = if mask.count_ones() == 1 { "lane" } else { "lanes" };
    format!("{noun} {}", ranges.join(", "))
}

fn place(line: &Location<'_>) -> String {
    format!("{}:{}", line.file(), line.line())
}

/// What an operation is, beside its operands.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    pub(super) instruction: &'static str,
    pub(super) together: Together,
    pub(super) need: Option<Need>,
}

/// Brings a lane's words to an operation of its warp, waits for the other lanes of the mask, and returns what `compute`
/// has left for the lane. The last lane to come computes for all; lanes outside the mask have zeros.
pub(super) fn collective(
    operation: Operation,
    mask: u32,
    immediate: u64,
    input: [u32; 12],
    line: &'static Location<'static>,
    compute: impl FnOnce(&mut WarpAccess<'_>, &Inputs) -> Result<Outputs, Failure>,
) -> [u32; 8] {
    let Operation { instruction, .. } = operation;
    let arrived = attempt(instruction, line, |machine| {
        let Some(inputs) = machine.arrive_at_warp(operation, mask, immediate, input, line)? else {
            machine.wait(Wait::Warp { instruction, mask });
            return Ok(false);
        };
        let outputs = compute(&mut WarpAccess { machine }, &inputs)?;
        machine.progress();
        let slot = machine.current.slot;
        let (current, first) = machine.warp_threads();
        for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
            let index = first + lane;
            machine.unit()[index].received = outputs[lane];
            if index != current {
                machine.wake(slot, index);
            }
        }
        Ok(true)
    });
    if !arrived {
        suspend();
    }
    super::machine::with(instruction, |machine| machine.thread().received)
}

/// The machine, for the computation of a warp's operation: memory accesses are those of the lane that asks.
pub(super) struct WarpAccess<'a> {
    pub(super) machine: &'a mut Machine,
}

impl WarpAccess<'_> {
    /// Does something on behalf of a lane of the warp.
    pub(super) fn of_lane<R>(
        &mut self,
        lane: usize,
        act: impl FnOnce(&mut Machine) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let (current, first) = self.machine.warp_threads();
        self.machine.current.thread = first + lane;
        let result = act(self.machine);
        // On a failure the lane stays: it is to blame.
        if result.is_ok() {
            self.machine.current.thread = current;
        }
        result
    }
}

impl Machine {
    /// Index of the running thread in its unit, and of its warp's first.
    pub(super) fn warp_threads(&mut self) -> (usize, usize) {
        let current = self.current.thread;
        let lane = self.unit()[current].lane as usize;
        (current, current - lane)
    }

    pub(super) fn warp(&mut self) -> &mut Warp {
        let thread = self.current.thread;
        let unit = self.unit();
        let (block, warp) = (unit[thread].block, unit[thread].warp);
        &mut unit.blocks[block].warps[warp]
    }

    /// Adds the running lane to an operation; all lanes' words when it was the last.
    pub(super) fn arrive_at_warp(
        &mut self,
        operation: Operation,
        mask: u32,
        immediate: u64,
        input: [u32; 12],
        line: &'static Location<'static>,
    ) -> Result<Option<Box<Inputs>>, Failure> {
        let Operation { instruction, together, need } = operation;
        self.needs(need, instruction)?;
        let lane = self.thread().lane;
        // Before Volta the lanes of a warp execute every instruction together.
        let one_line = together == Together::Aligned || !self.arch.has(Need::MemoryModel);
        let warp = self.warp();
        let refuse = |text: String| Err(Failure(Defect::Divergence, format!("`{instruction}` {text}")));
        if mask >> lane & 1 == 0 {
            return refuse(format!("by lane {lane}, which is not in its mask {mask:#x}"));
        }
        if mask & !warp.lanes != 0 {
            return refuse(format!("of {}, which the warp does not have", lanes(mask & !warp.lanes)));
        }
        if together == Together::Aligned && mask != warp.lanes {
            return refuse(format!("is for whole warps, and this has {}", lanes(mask)));
        }
        if mask & warp.returned != 0 {
            return refuse(format!(
                "waits for {}, which returned from the kernel",
                lanes(mask & warp.returned)
            ));
        }
        let alike = |other: &Gathering| {
            (other.instruction, other.mask, other.immediate) == (instruction, mask, immediate)
                && (!one_line || other.line == line)
        };
        let index = warp.gatherings.iter().position(alike).unwrap_or_else(|| {
            let inputs = Box::new([[0; 12]; 32]);
            let gathering = Gathering { instruction, line, mask, arrived: 0, immediate, inputs };
            warp.gatherings.push(gathering);
            warp.gatherings.len() - 1
        });
        let gathering = &mut warp.gatherings[index];
        gathering.arrived |= 1 << lane;
        gathering.inputs[lane as usize] = input;
        if gathering.arrived != mask {
            return Ok(None);
        }
        Ok(Some(warp.gatherings.swap_remove(index).inputs))
    }

    /// A lane has returned: nobody may be waiting for it.
    pub(super) fn warp_after_return(&mut self) -> Result<(), Failure> {
        let lane = self.thread().lane;
        let warp = self.warp();
        warp.returned |= 1 << lane;
        let Some(waiting) = warp.gatherings.iter().find(|gathering| gathering.mask >> lane & 1 == 1) else {
            return Ok(());
        };
        let Gathering { instruction, line, arrived, .. } = waiting;
        let text = format!(
            "lane {lane} returns from the kernel, but {} of its warp came to `{instruction}` at {}",
            lanes(*arrived),
            place(line)
        );
        Err(Failure(Defect::Divergence, text))
    }

    /// The first operation in a unit that part of its lanes never come to: its index of block and first thread, and
    /// the operation in words.
    pub(super) fn incomplete(unit: &Unit) -> Option<(usize, &'static Location<'static>, String)> {
        for (rank, block) in unit.blocks.iter().enumerate() {
            for (index, warp) in block.warps.iter().enumerate() {
                let Some(Gathering { instruction, line, mask, arrived, .. }) = warp.gatherings.first() else {
                    continue;
                };
                let first = block.threads.start + 32 * index + arrived.trailing_zeros() as usize;
                let missing = lanes(mask & !arrived);
                let text =
                    format!("`{instruction}` waits for {missing} of its warp, which came to something else");
                debug_assert_eq!(unit.threads[first].block, rank);
                return Some((first, line, text));
            }
        }
        None
    }

    /// All lanes of `mask` see each other's work.
    fn meet_lanes(&mut self, mask: u32) {
        let (_, first) = self.warp_threads();
        let threads = &mut self.unit().threads[first..];
        let lanes = threads.iter_mut().take(32).enumerate().filter(|(lane, _)| mask >> lane & 1 == 1);
        meet(lanes.map(|(_, thread)| &mut thread.clock), None);
    }
}

const fn sync(instruction: &'static str) -> Operation {
    Operation { instruction, together: Together::Sync, need: None }
}

fn one(value: u32) -> [u32; 12] {
    let mut words = [0; 12];
    words[0] = value;
    words
}

fn two(value: u32, argument: u32) -> [u32; 12] {
    let mut words = one(value);
    words[1] = argument;
    words
}

/// For each lane of the mask one word.
fn each(mask: u32, word: impl Fn(usize) -> u32) -> Outputs {
    let mut outputs = [[0; 8]; 32];
    for (lane, output) in outputs.iter_mut().enumerate().filter(|(lane, _)| mask >> lane & 1 == 1) {
        output[0] = word(lane);
    }
    outputs
}

/// The forms of `shfl.sync`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shuffle {
    Xor,
    Index,
    Up,
    Down,
}

impl Shuffle {
    fn instruction(self) -> &'static str {
        match self {
            Shuffle::Xor => "shfl.sync.bfly",
            Shuffle::Index => "shfl.sync.idx",
            Shuffle::Up => "shfl.sync.up",
            Shuffle::Down => "shfl.sync.down",
        }
    }

    /// The lane that `lane` reads, as the PTX manual's pseudocode has it.
    fn source(self, lane: u32, argument: u32, clamp: u32) -> u32 {
        let (segment, bound) = (clamp >> 8 & 31, clamp & 31);
        let (lowest, highest) = (lane & segment, (lane & segment) | (bound & !segment));
        let argument = argument & 31;
        let (source, is_inside) = match self {
            Shuffle::Up => (lane.wrapping_sub(argument), lane as i32 - argument as i32 >= highest as i32),
            Shuffle::Down => (lane + argument, lane + argument <= highest),
            Shuffle::Xor => (lane ^ argument, lane ^ argument <= highest),
            Shuffle::Index => {
                let source = lowest | (argument & !segment);
                (source, source <= highest)
            }
        };
        if is_inside { source } else { lane }
    }
}

/// A shuffle. Reading a lane that is not in the mask is reported: its value is undefined.
#[track_caller]
pub(crate) fn shuffle(form: Shuffle, mask: u32, value: u32, argument: u32, clamp: u32) -> u32 {
    let line = Location::caller();
    let instruction = form.instruction();
    let received =
        collective(sync(instruction), mask, clamp.into(), two(value, argument), line, |_, inputs| {
            let from = |lane: usize| form.source(lane as u32, inputs[lane][1], clamp) as usize;
            let stray = (0..32usize).find(|&lane| mask >> lane & 1 == 1 && mask >> from(lane) & 1 == 0);
            if let Some(lane) = stray {
                let from = from(lane);
                let text = format!(
                    "`{instruction}`: lane {lane} reads lane {from}, which is not in the mask {mask:#x}"
                );
                return Err(Failure(Defect::Divergence, text));
            }
            Ok(each(mask, |lane| inputs[from(lane)][0]))
        });
    received[0]
}

/// `activemask`: hardware may find any lanes together; here every lane is alone.
#[track_caller]
pub(crate) fn activemask() -> u32 {
    attempt("activemask", Location::caller(), |machine| Ok(1 << machine.thread().lane))
}

/// `match.any.sync`.
#[track_caller]
pub(crate) fn match_any(mask: u32, value: u32) -> u32 {
    let operation =
        Operation { instruction: "match.any.sync", together: Together::Sync, need: Some(Need::Redux) };
    let received = collective(operation, mask, 0, one(value), Location::caller(), |_, inputs| {
        let alike = |lane: usize| {
            let same = |other: &usize| mask >> other & 1 == 1 && inputs[*other][0] == inputs[lane][0];
            (0..32).filter(same).fold(0, |bits, other| bits | 1 << other)
        };
        Ok(each(mask, alike))
    });
    received[0]
}

/// The operations of `redux.sync`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Redux {
    Add,
    Min,
    Max,
    MinSigned,
    MaxSigned,
    And,
    Or,
    Xor,
}

/// `redux.sync`.
#[track_caller]
pub(crate) fn redux(form: Redux, mask: u32, value: u32) -> u32 {
    let operation =
        Operation { instruction: "redux.sync", together: Together::Sync, need: Some(Need::Redux) };
    let received = collective(operation, mask, form as u64, one(value), Location::caller(), |_, inputs| {
        let values = (0..32).filter(|lane| mask >> lane & 1 == 1).map(|lane| inputs[lane][0]);
        let reduced = values.reduce(|a, b| match form {
            Redux::Add => a.wrapping_add(b),
            Redux::Min => a.min(b),
            Redux::Max => a.max(b),
            Redux::MinSigned => (a as i32).min(b as i32) as u32,
            Redux::MaxSigned => (a as i32).max(b as i32) as u32,
            Redux::And => a & b,
            Redux::Or => a | b,
            Redux::Xor => a ^ b,
        });
        let reduced = reduced.expect("the lane that asks is in its mask");
        Ok(each(mask, |_| reduced))
    });
    received[0]
}

/// `elect.sync`: for each mask always the same lane, and not always the first.
#[track_caller]
pub(crate) fn elect(mask: u32) -> bool {
    let operation = Operation { instruction: "elect.sync", together: Together::Sync, need: Some(Need::Tma) };
    let received = collective(operation, mask, 0, [0; 12], Location::caller(), |access, _| {
        let mut choice = access.machine.fixed_random(mask.into());
        let nth = choice.below(mask.count_ones() as usize);
        let elected = (0..32usize).filter(|lane| mask >> lane & 1 == 1).nth(nth);
        Ok(each(mask, |lane| u32::from(Some(lane) == elected)))
    });
    received[0] != 0
}

/// `setmaxnreg`: all warps of a warpgroup together.
#[track_caller]
pub(crate) fn set_max_registers(instruction: &'static str, registers: u32) {
    let line = Location::caller();
    let operation = Operation { instruction, together: Together::Aligned, need: Some(Need::Wgmma) };
    collective(operation, u32::MAX, registers.into(), [0; 12], line, |access, _| {
        access.machine.check_warpgroup(Executed { instruction, line, operands: [registers.into(), 0] })?;
        Ok([[0; 8]; 32])
    });
}

/// A vote: `decide` sees bit i of lane i's predicate, and the mask.
#[track_caller]
pub(crate) fn vote(
    instruction: &'static str,
    mask: u32,
    predicate: bool,
    decide: fn(u32, u32) -> u32,
) -> u32 {
    let line = Location::caller();
    let received = collective(sync(instruction), mask, 0, one(predicate.into()), line, |_, inputs| {
        let ballot = (0..32).fold(0, |bits, lane| bits | inputs[lane][0] << lane);
        Ok(each(mask, |_| decide(ballot, mask)))
    });
    received[0]
}

/// `bar.warp.sync`: the lanes see each other's writes after it.
#[track_caller]
pub(crate) fn sync_warp(instruction: &'static str, mask: u32) {
    let line = Location::caller();
    collective(sync(instruction), mask, 0, [0; 12], line, |access, _| {
        access.machine.meet_lanes(mask);
        Ok([[0; 8]; 32])
    });
}
