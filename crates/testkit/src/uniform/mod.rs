//! Finding, in PTX text, instructions of whole warps or warpgroups that part of them may come to by another way.
//!
//! PTX wants an `.aligned` instruction to be executed by all threads of a warp together, one of `wgmma` (and
//! `setmaxnreg`) by all four warps of a warpgroup. So a branch on which it depends must go the same way for all of
//! them. Two things break that: a branch in the source that is a warp's own, and a compiler that copies an instruction
//! to both sides of a thread's own branch, since a later branch asks the same. What then happens is undefined, and may
//! be right for years. Loops that are unrolled make copies too, to which all come alike: so copies are not counted, but
//! each is looked at.
//!
//! For every value it is asked how many threads have it in common, from what it is computed: its grain. Then for every
//! block of instructions, from the branches on which it depends whether it is executed at all. This is careful: what it
//! accepts is right, as long as the program has no races, which the simulator finds: then a value that is loaded from
//! one place is one value.

mod flow;
#[cfg(test)]
mod tests;
mod text;
mod values;

use std::collections::VecDeque;
use std::fmt;

use crate::ptx::Entry;
use flow::{controllers, deciders, find_definitions};
use text::blocks;
use values::{Exchanges, Grain, Known, Values, evaluate};

#[derive(Debug)]
enum Operand {
    Register(Definitions),
    Number(i64),
    Special(String),
    /// A name in memory.
    Name,
}

/// A register's value: what may have been written to it last. Before those are looked for, the register.
type Definitions = Vec<usize>;

#[derive(Debug)]
struct Instruction {
    guard: Option<Definitions>,
    opcode: String,
    /// Its own definitions. Before those are numbered, registers.
    written: Vec<usize>,
    read: Vec<Operand>,
    text: String,
}

#[derive(Default, Debug)]
struct Block {
    instructions: Vec<Instruction>,
    next: Vec<usize>,
    /// Whether the branch at the end has a condition: its guard.
    has_condition: bool,
}

/// An instruction that part of its threads may not come to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stray {
    /// The instruction.
    pub instruction: String,
    /// Who must come to it together: "warp" or "warpgroup".
    pub together: &'static str,
    /// Who decides for itself whether to: "thread" or "warp".
    pub decides: &'static str,
    /// The branch.
    pub branch: String,
}

impl fmt::Display for Stray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stray { instruction, together, decides, branch } = self;
        let short: String = instruction.chars().take(60).collect();
        write!(f, "`{short}` is for a whole {together}, but each {decides} decides for itself at `{branch}`")
    }
}

/// The `.aligned` instructions of a kernel to which not all threads that must come to them together do so for certain.
///
/// # Errors
/// Says what in the text is not understood.
pub fn strays(entry: &Entry) -> Result<Vec<Stray>, String> {
    let mut blocks = blocks(&entry.body)?;
    let (definitions, copies) = find_definitions(&mut blocks);
    let (controllers, ends) = controllers(&blocks);
    let deciders = deciders(&blocks, &definitions, &copies, &controllers, &ends);
    let mut values = Values { known: vec![Known::default(); copies.len()], copies };
    let mut controls = vec![Grain::BLOCK; blocks.len()];
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for (index, block) in blocks.iter().enumerate() {
            let mut exchanges = Exchanges::default();
            for instruction in &block.instructions {
                let guard = values.of_guard(instruction);
                let mut value = evaluate(instruction, &values);
                exchanges.apply(instruction, &values, &mut value);
                for &definition in &instruction.written {
                    let control = deciders[definition].as_ref().map_or(controls[index], |deciders| {
                        let of_branch =
                            |&branch: &usize| controls[branch].min(values.of_branch(&blocks[branch]));
                        deciders.iter().map(of_branch).min().unwrap_or(Grain::BLOCK)
                    });
                    has_changed |= values.set(definition, value, value.under(control.min(guard)));
                }
            }
        }
        for index in 0..blocks.len() {
            let of_branch = |&branch: &usize| controls[branch].min(values.of_branch(&blocks[branch]));
            let control = controllers[index].iter().map(of_branch).min().unwrap_or(Grain::BLOCK);
            has_changed |= control < controls[index];
            controls[index] = controls[index].min(control);
        }
    }
    let mut strays = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        for instruction in &block.instructions {
            let Some(wanted) = wanted(&instruction.opcode) else { continue };
            let found = controls[index].min(values.of_guard(instruction));
            if found < wanted {
                let branch = deciding_branch(index, found, &blocks, &controllers, &values);
                strays.push(Stray {
                    instruction: instruction.text.clone(),
                    together: wanted.name(),
                    decides: found.name(),
                    branch: branch.unwrap_or(&instruction.text).to_owned(),
                });
            }
        }
    }
    Ok(strays)
}

/// Who has to come to an instruction together, if anyone.
fn wanted(opcode: &str) -> Option<Grain> {
    let is_of_warpgroup = opcode.starts_with("wgmma.") || opcode.starts_with("setmaxnreg.");
    let is_barrier = opcode.starts_with("bar.") && !opcode.starts_with("bar.warp.");
    match opcode {
        _ if is_of_warpgroup => Some(Grain::WARPGROUP),
        _ if is_barrier || opcode.split('.').any(|part| part == "aligned") => Some(Grain::WARP),
        _ => None,
    }
}

/// The nearest branch that decides for no more than `grain` whether a block is executed.
fn deciding_branch<'a>(
    index: usize,
    grain: Grain,
    blocks: &'a [Block],
    controllers: &[Vec<usize>],
    values: &Values,
) -> Option<&'a str> {
    let (mut seen, mut rest) = (vec![false; blocks.len()], VecDeque::from([index]));
    while let Some(block) = rest.pop_front() {
        for &branch in &controllers[block] {
            if values.of_branch(&blocks[branch]) <= grain {
                return blocks[branch].instructions.last().map(|last| last.text.as_str());
            }
            if !std::mem::replace(&mut seen[branch], true) {
                rest.push_back(branch);
            }
        }
    }
    None
}
