//! Blocks of instructions, from PTX text.

use std::collections::HashMap;

use super::{Block, Instruction, Operand};

/// Names of registers, which braces of inline assembly may give anew.
#[derive(Default)]
pub(super) struct Registers {
    pub(super) numbers: HashMap<String, usize>,
    pub(super) scopes: Vec<HashMap<String, usize>>,
    pub(super) count: usize,
}

impl Registers {
    pub(super) fn new_one(&mut self) -> usize {
        self.count += 1;
        self.count - 1
    }

    pub(super) fn get(&mut self, name: &str) -> Option<usize> {
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
pub(super) fn blocks(body: &str) -> Result<Vec<Block>, String> {
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

pub(super) enum Statement {
    Open,
    Close,
    Label(String),
    Text(String),
}

/// Braces at the beginning of a statement are a scope's, others a list's.
pub(super) fn statements(body: &str) -> Vec<Statement> {
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
pub(super) fn instruction(text: &str, registers: &mut Registers) -> Result<Instruction, String> {
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
pub(super) fn writes(opcode: &str) -> bool {
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

pub(super) fn split_operands(text: &str) -> Vec<&str> {
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
pub(super) fn parse(word: &str) -> Option<i64> {
    let (sign, digits) = word.strip_prefix('-').map_or((1, word), |digits| (-1, digits));
    let value = match digits.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(sign * value)
}
