//! How many threads have a value in common, from what it is computed.

use std::collections::HashMap;

use super::{Block, Instruction, Operand};

/// How many threads have a value in common: those whose index, without its `.0` lowest bits, is the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Grain(pub(super) u8);

impl Grain {
    pub(super) const THREAD: Grain = Grain(0);
    pub(super) const WARP: Grain = Grain(5);
    pub(super) const WARPGROUP: Grain = Grain(7);
    pub(super) const BLOCK: Grain = Grain(10);

    pub(super) fn name(self) -> &'static str {
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
pub(super) struct Value {
    pub(super) grain: Grain,
    /// Bits of the thread's index.
    pub(super) bits: Option<Bits>,
    /// Bits of the lane that make no difference to it: what a butterfly of shuffles has added up.
    pub(super) alike: u8,
}

/// For each i up to `limit`, the value without its i lowest bits is the same for threads whose index is, without its
/// `shift + i` or `most` lowest ones, whichever are fewer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bits {
    pub(super) shift: i32,
    pub(super) limit: i32,
    pub(super) most: u8,
}

impl Value {
    pub(super) fn of(grain: Grain) -> Self {
        Value { grain, bits: None, alike: 0 }
    }

    pub(super) const TOP: Value = Value { grain: Grain::BLOCK, bits: None, alike: ALL_ALIKE };

    pub(super) fn meet(self, other: Value) -> Value {
        let bits = match (self.bits, other.bits) {
            (Some(one), Some(two)) if one.shift == two.shift => {
                Some(Bits { limit: one.limit.min(two.limit), most: one.most.min(two.most), ..one })
            }
            _ => None,
        };
        Value { grain: self.grain.min(other.grain), bits, alike: self.alike() & other.alike() }
    }

    pub(super) fn alike(self) -> u8 {
        if self.grain >= Grain::WARP { ALL_ALIKE } else { self.alike }
    }

    /// The same under a branch that decides for so many threads.
    pub(super) fn under(self, control: Grain) -> Value {
        let bits = self.bits.map(|bits| Bits { most: bits.most.min(control.0), ..bits });
        let alike = if control >= Grain::WARP { self.alike } else { 0 };
        Value { grain: self.grain.min(control), bits, alike }
    }

    /// The grain of what follows from the value without its `low` lowest bits.
    pub(super) fn without_low_bits(self, low: i32) -> Grain {
        match self.bits {
            Some(Bits { shift, limit, most }) => {
                self.grain.max(Grain((shift + low.min(limit)).clamp(0, most.into()) as u8))
            }
            None => self.grain,
        }
    }
}

/// All five bits of a lane.
pub(super) const ALL_ALIKE: u8 = 31;

/// What is known of a definition: by itself, and with what decides whether it is executed.
#[derive(Clone, Copy, Default)]
pub(super) struct Known {
    pub(super) alone: Option<Value>,
    pub(super) value: Option<Value>,
}

pub(super) struct Values {
    pub(super) known: Vec<Known>,
    /// For each definition the first that computes the same from the same.
    pub(super) copies: Vec<usize>,
}

impl Values {
    /// Of a register. What a definition has not been found yet makes no difference.
    pub(super) fn get(&self, definitions: &[usize]) -> Value {
        let is_one = definitions.windows(2).all(|pair| self.copies[pair[0]] == self.copies[pair[1]]);
        let of = |&definition: &usize| {
            let Known { alone, value } = self.known[definition];
            // Whichever way it came here it is the same.
            if is_one && definitions.len() > 1 { alone } else { value }
        };
        definitions.iter().filter_map(of).reduce(Value::meet).unwrap_or(Value::TOP)
    }

    pub(super) fn of_guard(&self, instruction: &Instruction) -> Grain {
        instruction.guard.as_ref().map_or(Grain::BLOCK, |guard| self.get(guard).grain)
    }

    pub(super) fn of_branch(&self, block: &Block) -> Grain {
        match block.instructions.last() {
            Some(branch) if block.has_condition => self.of_guard(branch),
            _ => Grain::BLOCK,
        }
    }

    /// Returns whether that is less than was known before.
    pub(super) fn set(&mut self, definition: usize, alone: Value, value: Value) -> bool {
        let old = self.known[definition];
        let lower = |old: Option<Value>, new: Value| Some(old.map_or(new, |old| old.meet(new)));
        let new = Known { alone: lower(old.alone, alone), value: lower(old.value, value) };
        self.known[definition] = new;
        (new.alone, new.value) != (old.alone, old.value)
    }
}

/// What is known of an instruction's results.
pub(super) fn evaluate(instruction: &Instruction, values: &Values) -> Value {
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
pub(super) struct Exchanges<'a> {
    /// Of a shuffle's result, what was shuffled and by which bits of the lane.
    pub(super) shuffled: HashMap<usize, (&'a [usize], u8)>,
    /// Of a word, which value it was taken from, and whether it is the high one.
    pub(super) taken: HashMap<usize, (&'a [usize], bool)>,
    /// Of 64 bits, the word in them, and whether it is the high one.
    pub(super) widened: HashMap<usize, (&'a [usize], bool)>,
    /// Of 64 bits, the low word and the high one.
    pub(super) joined: HashMap<usize, [&'a [usize]; 2]>,
}

impl<'a> Exchanges<'a> {
    /// By which bits of the lane `result` has been exchanged for `value`, if it has.
    pub(super) fn bits(&self, result: &[usize], value: &[usize]) -> Option<u8> {
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

    pub(super) fn apply(&mut self, instruction: &'a Instruction, values: &Values, value: &mut Value) {
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
pub(super) fn one(definitions: &[usize]) -> Option<&usize> {
    match definitions {
        [definition] => Some(definition),
        _ => None,
    }
}
