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

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;

use crate::ptx::Entry;

/// How many threads have a value in common: those whose index, without its `.0` lowest bits, is the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Grain(u8);

impl Grain {
    const THREAD: Grain = Grain(0);
    const WARP: Grain = Grain(5);
    const WARPGROUP: Grain = Grain(7);
    const BLOCK: Grain = Grain(10);

    fn name(self) -> &'static str {
        match self {
            _ if self >= Grain::BLOCK => "block",
            _ if self >= Grain::WARPGROUP => "warpgroup",
            _ if self >= Grain::WARP => "warp",
            _ => "thread",
        }
    }
}

/// What is known of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    grain: Grain,
    /// Bits of the thread's index.
    bits: Option<Bits>,
    /// Bits of the lane that make no difference to it: what a butterfly of shuffles has added up.
    alike: u8,
}

/// For each i up to `limit`, the value without its i lowest bits is the same for threads whose index is, without its
/// `shift + i` or `most` lowest ones, whichever are fewer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bits {
    shift: i32,
    limit: i32,
    most: u8,
}

impl Value {
    fn of(grain: Grain) -> Self {
        Value { grain, bits: None, alike: 0 }
    }

    const TOP: Value = Value { grain: Grain::BLOCK, bits: None, alike: ALL_ALIKE };

    fn meet(self, other: Value) -> Value {
        let bits = match (self.bits, other.bits) {
            (Some(one), Some(two)) if one.shift == two.shift => {
                Some(Bits { limit: one.limit.min(two.limit), most: one.most.min(two.most), ..one })
            }
            _ => None,
        };
        Value { grain: self.grain.min(other.grain), bits, alike: self.alike() & other.alike() }
    }

    fn alike(self) -> u8 {
        if self.grain >= Grain::WARP { ALL_ALIKE } else { self.alike }
    }

    /// The same under a branch that decides for so many threads.
    fn under(self, control: Grain) -> Value {
        let bits = self.bits.map(|bits| Bits { most: bits.most.min(control.0), ..bits });
        let alike = if control >= Grain::WARP { self.alike } else { 0 };
        Value { grain: self.grain.min(control), bits, alike }
    }

    /// The grain of what follows from the value without its `low` lowest bits.
    fn without_low_bits(self, low: i32) -> Grain {
        match self.bits {
            Some(Bits { shift, limit, most }) => {
                self.grain.max(Grain((shift + low.min(limit)).clamp(0, most.into()) as u8))
            }
            None => self.grain,
        }
    }
}

/// All five bits of a lane.
const ALL_ALIKE: u8 = 31;

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

/// The definitions of each register, and their blocks.
type ByRegister = HashMap<usize, Vec<(usize, usize)>>;

/// What is known of a definition: by itself, and with what decides whether it is executed.
#[derive(Clone, Copy, Default)]
struct Known {
    alone: Option<Value>,
    value: Option<Value>,
}

struct Values {
    known: Vec<Known>,
    /// For each definition the first that computes the same from the same.
    copies: Vec<usize>,
}

impl Values {
    /// Of a register. What a definition has not been found yet makes no difference.
    fn get(&self, definitions: &[usize]) -> Value {
        let is_one = definitions.windows(2).all(|pair| self.copies[pair[0]] == self.copies[pair[1]]);
        let of = |&definition: &usize| {
            let Known { alone, value } = self.known[definition];
            // Whichever way it came here it is the same.
            if is_one && definitions.len() > 1 { alone } else { value }
        };
        definitions.iter().filter_map(of).reduce(Value::meet).unwrap_or(Value::TOP)
    }

    fn of_guard(&self, instruction: &Instruction) -> Grain {
        instruction.guard.as_ref().map_or(Grain::BLOCK, |guard| self.get(guard).grain)
    }

    fn of_branch(&self, block: &Block) -> Grain {
        match block.instructions.last() {
            Some(branch) if block.has_condition => self.of_guard(branch),
            _ => Grain::BLOCK,
        }
    }

    /// Returns whether that is less than was known before.
    fn set(&mut self, definition: usize, alone: Value, value: Value) -> bool {
        let old = self.known[definition];
        let lower = |old: Option<Value>, new: Value| Some(old.map_or(new, |old| old.meet(new)));
        let new = Known { alone: lower(old.alone, alone), value: lower(old.value, value) };
        self.known[definition] = new;
        (new.alone, new.value) != (old.alone, old.value)
    }
}

/// Numbers what is written, and finds for all that is read where it may have been written. Returns for each number the
/// first of those that compute the same from the same; and for each register its numbers, with their blocks.
fn find_definitions(blocks: &mut [Block]) -> (ByRegister, Vec<usize>) {
    let mut before = vec![Vec::new(); blocks.len()];
    for (index, block) in blocks.iter().enumerate() {
        block.next.iter().for_each(|&next| before[next].push(index));
    }
    // The last definition of each register in each block.
    let mut last = vec![HashMap::new(); blocks.len()];
    let mut count = 0;
    for (block, last) in blocks.iter().zip(&mut last) {
        for register in block.instructions.iter().flat_map(|instruction| &instruction.written) {
            last.insert(*register, count);
            count += 1;
        }
    }
    let mut at_begin: HashMap<(usize, usize), Definitions> = HashMap::new();
    let mut find = |block: usize, register: usize| {
        at_begin
            .entry((block, register))
            .or_insert_with(|| {
                let (mut found, mut seen, mut rest) = (Vec::new(), vec![false; before.len()], vec![block]);
                while let Some(block) = rest.pop() {
                    for &other in before[block].iter() {
                        match last[other].get(&register) {
                            Some(&definition) => found.push(definition),
                            None if !std::mem::replace(&mut seen[other], true) => rest.push(other),
                            None => {}
                        }
                    }
                }
                found.sort_unstable();
                found.dedup();
                found
            })
            .clone()
    };
    let mut copies = Vec::with_capacity(count);
    let mut definitions: ByRegister = HashMap::new();
    let mut expressions: HashMap<String, usize> = HashMap::new();
    for (index, block) in blocks.iter_mut().enumerate() {
        let mut current: HashMap<usize, usize> = HashMap::new();
        for instruction in &mut block.instructions {
            let mut resolve = |definitions: &mut Definitions| {
                if let [register] = definitions[..] {
                    *definitions =
                        current.get(&register).map_or_else(|| find(index, register), |&one| vec![one]);
                }
            };
            instruction.guard.iter_mut().for_each(&mut resolve);
            for operand in &mut instruction.read {
                if let Operand::Register(definitions) = operand {
                    resolve(definitions);
                }
            }
            let is_pure = instruction.guard.is_none() && is_pure(&instruction.opcode);
            for (place, register) in instruction.written.iter_mut().enumerate() {
                let number = copies.len();
                current.insert(*register, number);
                definitions.entry(*register).or_default().push((number, index));
                *register = number;
                let expression = format!("{place} {} {:?}", instruction.opcode, instruction.read);
                copies.push(if is_pure { *expressions.entry(expression).or_insert(number) } else { number });
            }
        }
    }
    (definitions, copies)
}

/// Which branches decide whether a register has a value of those that several definitions write alike: where all ways
/// from a branch to where they meet again write the same, it makes no difference. None for the other definitions.
fn deciders(
    blocks: &[Block],
    definitions: &ByRegister,
    copies: &[usize],
    controllers: &[Vec<usize>],
    ends: &[usize],
) -> Vec<Option<Vec<usize>>> {
    let mut deciders = vec![None; copies.len()];
    let mut before = vec![Vec::new(); blocks.len()];
    for (index, block) in blocks.iter().enumerate() {
        block.next.iter().for_each(|&next| before[next].push(index));
    }
    for of_register in definitions.values() {
        // The last of each block.
        let last: HashMap<usize, usize> =
            of_register.iter().map(|&(number, block)| (block, copies[number])).collect();
        for &(number, block) in of_register {
            let written = copies[number];
            let has_copies = of_register.iter().filter(|(other, _)| copies[*other] == written).count() > 1;
            if !has_copies || last[&block] != written {
                continue;
            }
            let (mut found, mut seen, mut rest) = (Vec::new(), HashSet::new(), vec![block]);
            while let Some(block) = rest.pop() {
                for &branch in controllers[block].iter().filter(|&&branch| seen.insert(branch)) {
                    if is_same_behind(branch, written, blocks, &before, &last, ends) {
                        rest.push(branch);
                    } else {
                        found.push(branch);
                    }
                }
            }
            deciders[number] = Some(found);
        }
    }
    deciders
}

/// Whether a register holds `written` where the ways from a branch meet, whichever was taken. `last` is what each block
/// leaves in it.
fn is_same_behind(
    branch: usize,
    written: usize,
    blocks: &[Block],
    before: &[Vec<usize>],
    last: &HashMap<usize, usize>,
    ends: &[usize],
) -> bool {
    let end = ends[branch];
    if end >= blocks.len() {
        return false;
    }
    let mut between = HashSet::new();
    let mut rest = blocks[branch].next.clone();
    while let Some(block) = rest.pop() {
        if block != end && between.insert(block) {
            rest.extend(&blocks[block].next);
        }
    }
    let (mut seen, mut rest) = (HashSet::new(), vec![end]);
    while let Some(block) = rest.pop() {
        for &other in &before[block] {
            match last.get(&other) {
                // By a way that has nothing to do with the branch.
                _ if other != branch && !between.contains(&other) => {}
                Some(&found) if found == written => {}
                None if other != branch => rest.extend(seen.insert(other).then_some(other)),
                _ => return false,
            }
        }
    }
    true
}

/// Whether the result follows from what is read alone.
fn is_pure(opcode: &str) -> bool {
    let name = opcode.split('.').next().unwrap_or_default();
    [
        "add", "and", "bfe", "cvt", "cvta", "mad", "max", "min", "mov", "mul", "neg", "not", "or", "selp",
        "setp", "shl", "shr", "sub", "xor",
    ]
    .contains(&name)
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

/// What is known of an instruction's results.
fn evaluate(instruction: &Instruction, values: &Values) -> Value {
    let opcode = instruction.opcode.as_str();
    let value = |operand: &Operand| match operand {
        Operand::Register(definitions) => values.get(definitions),
        Operand::Number(_) | Operand::Name => Value::TOP,
        Operand::Special(name) => match name.as_str() {
            "%tid.x" => {
                Value { bits: Some(Bits { shift: 0, limit: 31, most: 10 }), ..Value::of(Grain::THREAD) }
            }
            name if [
                "%ctaid",
                "%nctaid",
                "%ntid",
                "%cluster",
                "%nclusterid",
                "%is_explicit",
                "%dynamic",
                "%total",
            ]
            .iter()
            .any(|of_block| name.starts_with(of_block)) =>
            {
                Value::TOP
            }
            _ => Value::of(Grain::THREAD),
        },
    };
    let number = |at: usize| match instruction.read.get(at) {
        Some(Operand::Number(number)) => Some(*number),
        _ => None,
    };
    let all = instruction.read.iter().map(value).map(|value| value.grain).min().unwrap_or(Grain::BLOCK);
    let alike = instruction.read.iter().map(value).map(Value::alike).fold(ALL_ALIKE, |all, one| all & one);
    let plain = Value { grain: all, bits: None, alike };
    let first = instruction.read.first().map_or(Value::TOP, value);
    let mut parts = opcode.split('.');
    let name = parts.next().unwrap_or_default();
    let has = |part: &str| opcode.split('.').any(|other| other == part);
    let trailing = |number: i64| number.trailing_zeros().min(31) as i32;
    // With what more threads have in common than those bits say.
    let bitwise = || match instruction.read[..] {
        [ref one, ref other] => {
            let (one, other) = (value(one), value(other));
            let (of, with) = if one.bits.is_some() { (one, other) } else { (other, one) };
            let bits = of.bits.map(|bits| Bits { most: bits.most.min(with.grain.0), ..bits });
            Value { bits, ..plain }
        }
        _ => plain,
    };
    match name {
        "mov" | "cvt" | "cvta" if instruction.read.len() == 1 && instruction.written.len() == 1 => first,
        "shr" => match (first.bits, number(1)) {
            (Some(Bits { shift, limit, most }), Some(by)) => {
                let by = by as i32;
                let bits = (by <= limit).then_some(Bits { shift: shift + by, limit: limit - by, most });
                Value { grain: first.without_low_bits(by), bits, ..plain }
            }
            _ => plain,
        },
        "bfe" => match number(1) {
            Some(from) => Value { grain: first.without_low_bits(from as i32), ..plain },
            None => plain,
        },
        "shl" => match (first.bits, number(1)) {
            (Some(Bits { shift, limit, most }), Some(by)) => {
                let by = by as i32;
                Value { bits: Some(Bits { shift: shift - by, limit: limit + by, most }), ..plain }
            }
            _ => plain,
        },
        "and" => match (first.bits, number(1)) {
            (Some(_), Some(mask)) => {
                Value { grain: first.without_low_bits(trailing(mask)), bits: first.bits, ..plain }
            }
            _ => bitwise(),
        },
        "or" | "xor" => bitwise(),
        "add" => match (first.bits, number(1)) {
            (Some(bits), Some(offset)) => {
                Value { bits: Some(Bits { limit: bits.limit.min(trailing(offset)), ..bits }), ..plain }
            }
            _ => plain,
        },
        "setp" => match (first.bits, number(1)) {
            (Some(_), Some(bound)) if has("lt") || has("ge") => {
                Value { grain: first.without_low_bits(trailing(bound)), ..plain }
            }
            (Some(_), Some(bound)) if has("le") || has("gt") => {
                Value { grain: first.without_low_bits(trailing(bound + 1)), ..plain }
            }
            _ => plain,
        },
        // From one lane, if that is the same for all of them, and the whole warp is one segment.
        "shfl" if has("idx") => {
            let lane = instruction.read.get(1).map_or(Value::TOP, value).grain;
            let is_whole = number(2).is_some_and(|clamp| clamp >> 8 & 31 == 0);
            Value::of(if is_whole { first.grain.max(lane.min(Grain::WARP)) } else { first.grain })
        }
        "shfl" if has("bfly") => Value {
            grain: if first.grain >= Grain::WARP { first.grain } else { Grain::THREAD },
            bits: None,
            alike: first.alike(),
        },
        "shfl" => Value::of(if first.grain >= Grain::WARP { first.grain } else { Grain::THREAD }),
        "vote" | "redux" => Value::of(first.grain.max(Grain::WARP)),
        "activemask" | "match" | "elect" | "atom" | "clock" => Value::of(Grain::THREAD),
        // Each thread asks at a time of its own.
        "mbarrier" => Value::of(Grain::THREAD),
        "ld" if has("volatile") || has("relaxed") || has("acquire") => Value::of(Grain::THREAD),
        // Of matrices every lane gets its own part.
        "ldmatrix" | "mma" | "wgmma" => Value::of(Grain::THREAD),
        _ => plain,
    }
}

/// Lanes of a block of instructions that exchange a value: what both make of both is alike for the two of them. Values
/// of 64 bits are exchanged word by word.
#[derive(Default)]
struct Exchanges<'a> {
    /// Of a shuffle's result, what was shuffled and by which bits of the lane.
    shuffled: HashMap<usize, (&'a [usize], u8)>,
    /// Of a word, which value it was taken from, and whether it is the high one.
    taken: HashMap<usize, (&'a [usize], bool)>,
    /// Of 64 bits, the word in them, and whether it is the high one.
    widened: HashMap<usize, (&'a [usize], bool)>,
    /// Of 64 bits, the low word and the high one.
    joined: HashMap<usize, [&'a [usize]; 2]>,
}

impl<'a> Exchanges<'a> {
    /// By which bits of the lane `result` has been exchanged for `value`, if it has.
    fn bits(&self, result: &[usize], value: &[usize]) -> Option<u8> {
        let shuffled = |result: &[usize]| self.shuffled.get(one(result)?).copied();
        if let Some((from, bits)) = shuffled(result) {
            return (from == value).then_some(bits);
        }
        let [low, high] = self.joined.get(one(result)?)?;
        let (low, high) = (shuffled(low)?, shuffled(high)?);
        let taken = |word: &[usize]| self.taken.get(one(word)?).copied();
        let joined = one(value).and_then(|value| self.joined.get(value));
        let is_value = taken(low.0) == Some((value, false)) && taken(high.0) == Some((value, true));
        (low.1 == high.1 && (is_value || joined == Some(&[low.0, high.0]))).then_some(low.1)
    }

    fn apply(&mut self, instruction: &'a Instruction, values: &Values, value: &mut Value) {
        use Operand::{Number, Register};
        let symmetric = ["add", "max", "min", "or", "and", "xor", "mul"];
        let opcode = instruction.opcode.as_str();
        if let [Register(one), Register(other)] = &instruction.read[..]
            && symmetric.contains(&opcode.split('.').next().unwrap_or_default())
            && let Some(bits) = self.bits(one, other).or_else(|| self.bits(other, one))
        {
            value.alike = (values.get(one).alike() & values.get(other).alike()) | bits;
            if value.alike == ALL_ALIKE {
                value.grain = value.grain.max(Grain::WARP);
            }
        }
        match (opcode, &instruction.written[..], &instruction.read[..]) {
            ("shfl.sync.bfly.b32", &[result], [Register(from), Number(by), Number(31), ..])
                if [1, 2, 4, 8, 16].contains(by) =>
            {
                self.shuffled.insert(result, (from, *by as u8));
            }
            ("cvt.u32.u64", &[low], [Register(from)]) => {
                self.taken.insert(low, (from, false));
            }
            ("mov.b64", &[low, high], [Register(from)]) => {
                self.taken.extend([(low, (&from[..], false)), (high, (&from[..], true))]);
            }
            ("cvt.u64.u32", &[result], [Register(word)]) => {
                self.widened.insert(result, (word, false));
            }
            ("shl.b64", &[result], [Register(from), Number(32)]) => {
                if let Some((word, false)) = one(from).and_then(|from| self.widened.get(from)).copied() {
                    self.widened.insert(result, (word, true));
                }
            }
            ("or.b64", &[result], [Register(a), Register(b)]) => {
                let widened = |part: &[usize]| self.widened.get(one(part)?).copied();
                if let (Some((low, false)), Some((high, true))) | (Some((high, true)), Some((low, false))) =
                    (widened(a), widened(b))
                {
                    self.joined.insert(result, [low, high]);
                }
            }
            _ => {}
        }
    }
}

/// The only one.
fn one(definitions: &[usize]) -> Option<&usize> {
    match definitions {
        [definition] => Some(definition),
        _ => None,
    }
}

/// For each block those whose branch decides whether it is executed: which have one way that leads to it for certain,
/// and another. And for each block where all ways from it meet first.
fn controllers(blocks: &[Block]) -> (Vec<Vec<usize>>, Vec<usize>) {
    let end = blocks.len();
    // Blocks that come for certain behind each one: those of all its next ones. An endless loop's are all.
    let order = backwards(blocks);
    let mut place = vec![usize::MAX; end + 1];
    for (at, &block) in order.iter().enumerate() {
        place[block] = at;
    }
    let mut parent: Vec<Option<usize>> = vec![None; end + 1];
    parent[end] = Some(end);
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for &block in order.iter().filter(|&&block| block != end) {
            let mut joined: Option<usize> = None;
            for next in next(blocks, block) {
                if parent[next].is_none() {
                    continue;
                }
                joined = Some(match joined {
                    None => next,
                    Some(mut one) => {
                        let mut other = next;
                        while one != other {
                            while place[one] > place[other] {
                                one = parent[one].unwrap_or(end);
                            }
                            while place[other] > place[one] {
                                other = parent[other].unwrap_or(end);
                            }
                        }
                        one
                    }
                });
            }
            if joined.is_some() && parent[block] != joined {
                parent[block] = joined;
                has_changed = true;
            }
        }
    }
    let mut controllers = vec![Vec::new(); end];
    for (block, of) in blocks.iter().enumerate().filter(|(_, of)| of.next.len() > 1) {
        for &next in &of.next {
            let (mut at, stop) = (next, parent[block].unwrap_or(end));
            while at != stop && at != end {
                if !controllers[at].contains(&block) {
                    controllers[at].push(block);
                }
                at = parent[at].unwrap_or(end);
            }
        }
    }
    let ends = parent[..end].iter().map(|parent| parent.unwrap_or(end)).collect();
    (controllers, ends)
}

/// The blocks behind one; the number of blocks stands for the kernel's end.
fn next(blocks: &[Block], block: usize) -> impl Iterator<Item = usize> {
    let of = &blocks[block].next;
    of.iter().copied().chain(of.is_empty().then_some(blocks.len()))
}

/// All blocks from which the end is reached, the end first, each after one of its next ones: in reverse postorder of
/// the way back.
fn backwards(blocks: &[Block]) -> Vec<usize> {
    let mut before = vec![Vec::new(); blocks.len() + 1];
    for block in 0..blocks.len() {
        next(blocks, block).for_each(|next| before[next].push(block));
    }
    let (mut seen, mut order) = (vec![false; blocks.len() + 1], Vec::new());
    let mut stack = vec![(blocks.len(), 0)];
    seen[blocks.len()] = true;
    while let Some((block, tried)) = stack.pop() {
        match before[block].get(tried) {
            Some(&other) => {
                stack.push((block, tried + 1));
                if !std::mem::replace(&mut seen[other], true) {
                    stack.push((other, 0));
                }
            }
            None => order.push(block),
        }
    }
    order.reverse();
    order
}

/// Names of registers, which braces of inline assembly may give anew.
#[derive(Default)]
struct Registers {
    numbers: HashMap<String, usize>,
    scopes: Vec<HashMap<String, usize>>,
    count: usize,
}

impl Registers {
    fn new_one(&mut self) -> usize {
        self.count += 1;
        self.count - 1
    }

    fn get(&mut self, name: &str) -> Option<usize> {
        if let Some(&number) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Some(number);
        }
        if let Some(&number) = self.numbers.get(name) {
            return Some(number);
        }
        // Declared by their number: `.reg .b32 %r<100>`.
        let is_numbered =
            name.starts_with('%') && !name.contains('.') && name.ends_with(|c: char| c.is_ascii_digit());
        is_numbered.then(|| {
            let number = self.new_one();
            self.numbers.insert(name.to_owned(), number);
            number
        })
    }
}

/// The blocks of a body: instructions between labels and branches.
fn blocks(body: &str) -> Result<Vec<Block>, String> {
    let mut registers = Registers::default();
    let mut blocks = vec![Block::default()];
    let mut labels = HashMap::new();
    // Of each block that does not just go on: the label, and whether it goes on too.
    let mut jumps: Vec<(usize, Option<String>, bool)> = Vec::new();
    for statement in statements(body) {
        let statement = match statement {
            Statement::Open => {
                registers.scopes.push(HashMap::new());
                continue;
            }
            Statement::Close => {
                registers.scopes.pop();
                continue;
            }
            Statement::Label(label) => {
                blocks.push(Block::default());
                labels.insert(label, blocks.len() - 1);
                continue;
            }
            Statement::Text(text) => text,
        };
        if let Some(declaration) = statement.strip_prefix('.') {
            let names = declaration.split_once(char::is_whitespace).map_or("", |(_, rest)| rest);
            if declaration.starts_with("reg") && !names.contains('<') {
                let names = names.split_once(char::is_whitespace).map_or("", |(_, names)| names);
                for name in names.split(',') {
                    let number = registers.new_one();
                    let scope = registers.scopes.last_mut().ok_or("a named register outside of braces")?;
                    scope.insert(name.trim().to_owned(), number);
                }
            }
            continue;
        }
        let instruction = instruction(&statement, &mut registers)?;
        let last = blocks.len() - 1;
        let opcode = instruction.opcode.clone();
        let has_guard = instruction.guard.is_some();
        let target = statement.split_whitespace().last().map(str::to_owned);
        blocks[last].instructions.push(instruction);
        let name = opcode.split('.').next().unwrap_or_default();
        match name {
            "bra" => jumps.push((last, target, has_guard)),
            "ret" | "exit" | "trap" => jumps.push((last, None, has_guard)),
            "brx" | "call" => return Err(format!("`{opcode}` is not understood")),
            _ => continue,
        }
        blocks[last].has_condition = has_guard;
        blocks.push(Block::default());
    }
    let ends: Vec<usize> = jumps.iter().map(|(block, ..)| *block).collect();
    for index in 0..blocks.len() - 1 {
        if !ends.contains(&index) {
            blocks[index].next.push(index + 1);
        }
    }
    for (block, target, goes_on) in jumps {
        if let Some(target) = target {
            let to = *labels.get(&target).ok_or_else(|| format!("no label {target}"))?;
            blocks[block].next.push(to);
        } else if goes_on {
            return Err("a conditional end of a kernel is not understood".into());
        }
        if goes_on && !blocks[block].next.contains(&(block + 1)) {
            blocks[block].next.push(block + 1);
        }
    }
    Ok(blocks)
}

enum Statement {
    Open,
    Close,
    Label(String),
    Text(String),
}

/// Braces at the beginning of a statement are a scope's, others a list's.
fn statements(body: &str) -> Vec<Statement> {
    let mut statements = Vec::new();
    let (mut text, mut depth) = (String::new(), 0);
    for c in body.chars() {
        match c {
            '{' if text.trim().is_empty() => statements.push(Statement::Open),
            '}' if depth == 0 => statements.push(Statement::Close),
            ';' => statements.push(Statement::Text(std::mem::take(&mut text).trim().to_owned())),
            ':' if !text.trim().contains(char::is_whitespace) && text.trim().starts_with('$') => {
                statements.push(Statement::Label(std::mem::take(&mut text).trim().to_owned()));
            }
            _ => {
                depth += i32::from(c == '{') - i32::from(c == '}');
                text.push(c);
            }
        }
    }
    statements
}

/// Reads an instruction. The registers of its first operand are those that it writes, unless it writes none.
fn instruction(text: &str, registers: &mut Registers) -> Result<Instruction, String> {
    let unknown = |what: &str| format!("{what} in `{text}`");
    let (guard, rest) = match text.strip_prefix('@') {
        Some(rest) => {
            let (name, rest) = rest.split_once(char::is_whitespace).ok_or_else(|| unknown("no opcode"))?;
            let name = name.trim_start_matches('!');
            (
                Some(vec![registers.get(name).ok_or_else(|| unknown("an unknown predicate"))?]),
                rest.trim_start(),
            )
        }
        None => (None, text),
    };
    let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let mut instruction = Instruction {
        guard,
        opcode: opcode.to_owned(),
        written: Vec::new(),
        read: Vec::new(),
        text: text.to_owned(),
    };
    if opcode == "bra" || opcode == "bra.uni" {
        return Ok(instruction);
    }
    let writes = writes(opcode);
    let both = opcode.starts_with("wgmma.mma_async");
    for (index, operand) in split_operands(operands).into_iter().enumerate() {
        let is_written = index == 0 && writes && !operand.starts_with('[');
        let words = operand.split(|c: char| "{}[],|+!".contains(c) || c.is_whitespace());
        for word in words.filter(|word| !word.is_empty()) {
            if word == "_" {
                instruction.written.push(registers.new_one());
                continue;
            }
            let number = word.strip_prefix('-').unwrap_or(word);
            let operand = if let Some(register) = registers.get(word) {
                Operand::Register(vec![register])
            } else if number.starts_with(|c: char| c.is_ascii_digit()) {
                Operand::Number(parse(word).unwrap_or(1))
            } else if word.starts_with('%') {
                Operand::Special(word.to_owned())
            } else {
                Operand::Name
            };
            match operand {
                Operand::Register(register) if is_written => {
                    instruction.written.extend(&register);
                    if both {
                        instruction.read.push(Operand::Register(register));
                    }
                }
                _ if is_written => return Err(unknown("a result that is no register")),
                operand => instruction.read.push(operand),
            }
        }
    }
    Ok(instruction)
}

/// Whether an instruction has a result in registers.
fn writes(opcode: &str) -> bool {
    let is = |prefix: &str| {
        opcode == prefix || opcode.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.'))
    };
    let without = [
        "st",
        "red",
        "bar",
        "barrier",
        "fence",
        "membar",
        "prefetch",
        "prefetchu",
        "griddepcontrol",
        "setmaxnreg",
        "stmatrix",
        "nanosleep",
        "cp",
        "discard",
        "ret",
        "exit",
        "trap",
        "wgmma.fence",
        "wgmma.commit_group",
        "wgmma.wait_group",
        "mbarrier.init",
        "mbarrier.inval",
        "mbarrier.expect_tx",
        "brkpt",
    ];
    !without.iter().any(|prefix| is(prefix))
}

fn split_operands(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// An integer; None of a float's bits, which begin with `0f` or `0d`.
fn parse(word: &str) -> Option<i64> {
    let (sign, digits) = word.strip_prefix('-').map_or((1, word), |digits| (-1, digits));
    let value = match digits.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(sign * value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::entries;

    fn of(body: &str) -> Vec<(String, &'static str, &'static str)> {
        let text = format!(
            ".visible .entry k(.param .u64 p) {{ .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
            mov.u32 %r1, %tid.x; mov.u32 %r2, dyn; {body} ret; }}"
        );
        let strays = strays(&entries(&text).unwrap()[0]).unwrap();
        let words = |stray: Stray| {
            let opcode = stray
                .instruction
                .split_whitespace()
                .find(|word| !word.starts_with('@'))
                .unwrap_or_default()
                .to_owned();
            (opcode, stray.together, stray.decides)
        };
        strays.into_iter().map(words).collect()
    }

    fn stray(
        opcode: &str,
        together: &'static str,
        decides: &'static str,
    ) -> Vec<(String, &'static str, &'static str)> {
        vec![(opcode.into(), together, decides)]
    }

    /// `if member == 0 { wait } sync(); if member == 0 { store }`, as it stands and with the barrier copied to both
    /// sides.
    #[test]
    fn a_barrier_on_both_sides_of_a_branch() {
        let wait = "setp.ne.b32 %p1, %r1, 0; @%p1 bra $other; cp.async.bulk.wait_group.read 0;";
        let whole = format!("{wait} $other: bar.sync 0; @%p1 bra $end; st.shared.b32 [%r2], %r1; $end:");
        assert_eq!(of(&whole), []);
        let copied =
            format!("{wait} bar.sync 0; st.shared.b32 [%r2], %r1; bra.uni $end; $other: bar.sync 0; $end:");
        assert_eq!(
            of(&copied),
            [stray("bar.sync", "warp", "thread"), stray("bar.sync", "warp", "thread")].concat()
        );
    }

    /// What a warp decides for itself is for a barrier, not for a `wgmma`.
    #[test]
    fn a_decision_of_a_warp() {
        let under_vote = |instruction: &str| {
            format!(
                "ld.shared.b32 %r3, [%r1]; setp.eq.b32 %p1, %r3, 0; vote.sync.any.pred %p2, %p1, -1;
                @%p2 bra $end; {instruction}; $end:"
            )
        };
        let wait = "wgmma.wait_group.sync.aligned";
        assert_eq!(of(&under_vote(&format!("{wait} 0"))), stray(wait, "warpgroup", "warp"));
        assert_eq!(of(&under_vote("bar.sync 1, 128")), []);
        assert_eq!(of(&under_vote("mma.sync.aligned.m8n8k4 {%r4}, {%r5}, {%r6}, {%r7}")), []);
        assert_eq!(
            of(&format!("setp.eq.b32 %p1, %r1, 3; @%p1 {wait} 0;")),
            stray(wait, "warpgroup", "thread")
        );
    }

    /// A role of whole warps, or of whole warpgroups, however it is asked for.
    #[test]
    fn roles() {
        let wait = "wgmma.fence.sync.aligned";
        let role = |ask: &str| of(&format!("{ask}; @%p1 bra $end; {wait}; $end:"));
        for of_warpgroup in [
            "shr.u32 %r3, %r1, 7; setp.ne.b32 %p1, %r3, 1",
            "setp.lt.u32 %p1, %r1, 128",
            "setp.gt.u32 %p1, %r1, 255",
            "and.b32 %r3, %r1, 896; setp.ne.b32 %p1, %r3, 0",
            "bfe.u32 %r3, %r1, 7, 3; setp.ne.b32 %p1, %r3, 0",
            "add.s32 %r3, %r1, -128; setp.lt.u32 %p1, %r3, 256",
            "mov.u32 %r9, %ctaid.x; xor.b32 %r3, %r1, %r9; shr.u32 %r4, %r3, 7; setp.eq.b32 %p1, %r4, 0",
            "shr.u32 %r3, %r1, 7; shl.b32 %r4, %r3, 2; add.s32 %r5, %r4, %r2; ld.shared.b32 %r6, [%r5]; setp.ne.b32 %p1, %r6, 0",
        ] {
            assert_eq!(role(of_warpgroup), [], "{of_warpgroup}");
        }
        for (ask, decides) in [
            ("setp.lt.u32 %p1, %r1, 96", "warp"),
            ("shr.u32 %r3, %r1, 5; setp.ne.b32 %p1, %r3, 1", "warp"),
            ("shfl.sync.idx.b32 %r3, %r1, 0, 31, -1; setp.ne.b32 %p1, %r3, 1", "warp"),
            ("and.b32 %r3, %r1, 992; setp.ne.b32 %p1, %r3, 0", "warp"),
            ("setp.lt.u32 %p1, %r1, 127", "thread"),
            ("add.s32 %r3, %r1, 1; shr.u32 %r4, %r3, 7; setp.eq.b32 %p1, %r4, 0", "thread"),
            ("atom.global.add.u32 %r3, [%rd1], 1; setp.eq.b32 %p1, %r3, 0", "thread"),
            ("shfl.sync.idx.b32 %r3, %r1, 0, 7199, -1; setp.ne.b32 %p1, %r3, 1", "thread"),
        ] {
            assert_eq!(role(ask), stray(wait, "warpgroup", decides), "{ask}");
        }
    }

    /// A sum over lanes by a butterfly is one for the warp, of 64 bits too, unless a step is missing.
    #[test]
    fn butterflies() {
        let steps = |steps: &[u32]| {
            let step = |(i, by): (usize, &u32)| {
                let (from, other, to) = (10 + 2 * i, 11 + 2 * i, 12 + 2 * i);
                format!(
                    "shfl.sync.bfly.b32 %r{other}, %r{from}, {by}, 31, -1; add.s32 %r{to}, %r{from}, %r{other}; "
                )
            };
            let sum: String = steps.iter().enumerate().map(step).collect();
            let last = 10 + 2 * steps.len();
            of(&format!(
                "ld.shared.b32 %r10, [%r1]; {sum} setp.eq.b32 %p1, %r{last}, 0; @%p1 bra $end; bar.sync 0; $end:"
            ))
        };
        assert_eq!(steps(&[16, 8, 4, 2, 1]), []);
        assert_eq!(steps(&[16, 8, 2, 1]), stray("bar.sync", "warp", "thread"));
        let wide = |high: u32| {
            let step = |by: u32| {
                let high = if by == 4 { high } else { by };
                format!(
                    "cvt.u32.u64 %r3, %rd1; mov.b64 {{_, %r4}}, %rd1; shfl.sync.bfly.b32 %r5, %r3, {by}, 31, -1;
                    shfl.sync.bfly.b32 %r6, %r4, {high}, 31, -1; cvt.u64.u32 %rd2, %r5; cvt.u64.u32 %rd3, %r6;
                    shl.b64 %rd4, %rd3, 32; or.b64 %rd5, %rd4, %rd2; max.u64 %rd1, %rd5, %rd1;"
                )
            };
            let steps: String = [16, 8, 4, 2, 1].map(step).concat();
            of(&format!(
                "ld.shared.b64 %rd1, [%r1]; {steps} setp.eq.b64 %p1, %rd1, 0; @%p1 bra $end; bar.sync 0; $end:"
            ))
        };
        assert_eq!(wide(4), []);
        assert_eq!(wide(2), stray("bar.sync", "warp", "thread"));
    }

    /// A loop that all go round alike, unrolled or not; one that each thread leaves when it has enough, and what it
    /// leaves behind.
    #[test]
    fn loops() {
        let wait = "wgmma.wait_group.sync.aligned";
        let whole = "mov.b32 %r3, 0; $again: bar.sync 0; add.s32 %r3, %r3, 1; bar.sync 0; setp.lt.u32 %p1, %r3, 9; @%p1 bra $again;";
        assert_eq!(of(whole), []);
        let own = "mov.b32 %r3, %r1; $again: bar.sync 0; add.s32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 9; @%p1 bra $again;";
        assert_eq!(of(own), stray("bar.sync", "warp", "thread"));
        let spin = "mov.b32 %r3, 0; $again: add.s32 %r3, %r3, 1; mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra $again;";
        assert_eq!(of(&format!("{spin} {wait} 0;")), []);
        assert_eq!(
            of(&format!("{spin} setp.eq.b32 %p2, %r3, 1; @%p2 bra $end; {wait} 0; $end:")),
            stray(wait, "warpgroup", "thread")
        );
    }

    /// A register that both ways write alike does not depend on the branch; one that they write differently does.
    #[test]
    fn what_both_ways_write() {
        let by = |[first, second]: [&str; 2]| {
            of(&format!(
                "setp.eq.b32 %p1, %r1, 0; @%p1 bra $other; st.shared.b32 [%r2], %r1; mov.b32 %r3, {first}; bra.uni $join;
                $other: mov.b32 %r3, {second}; $join: setp.eq.b32 %p2, %r3, 0; @%p2 bra $end; bar.sync 0; $end:"
            ))
        };
        assert_eq!(by(["7", "7"]), []);
        assert_eq!(by(["7", "0"]), stray("bar.sync", "warp", "thread"));
    }

    #[test]
    fn what_is_not_understood() {
        for body in ["bra.uni $nowhere;", "call foo;", "mov.b32 sum, 0;"] {
            let text = format!(".visible .entry k() {{ {body} ret; }}");
            assert!(strays(&entries(&text).unwrap()[0]).is_err(), "{body}");
        }
    }
}
