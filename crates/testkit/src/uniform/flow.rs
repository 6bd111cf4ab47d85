//! Which branches decide whether a block is executed, and which definition of a register is read.

use std::collections::{HashMap, HashSet};

use super::{Block, Definitions, Operand};

/// The definitions of each register, and their blocks.
pub(super) type ByRegister = HashMap<usize, Vec<(usize, usize)>>;

/// Numbers what is written, and finds for all that is read where it may have been written. Returns for each number the
/// first of those that compute the same from the same; and for each register its numbers, with their blocks.
pub(super) fn find_definitions(blocks: &mut [Block]) -> (ByRegister, Vec<usize>) {
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
pub(super) fn deciders(
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
pub(super) fn is_same_behind(
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
pub(super) fn is_pure(opcode: &str) -> bool {
    let name = opcode.split('.').next().unwrap_or_default();
    [
        "add", "and", "bfe", "cvt", "cvta", "mad", "max", "min", "mov", "mul", "neg", "not", "or", "selp",
        "setp", "shl", "shr", "sub", "xor",
    ]
    .contains(&name)
}

/// For each block those whose branch decides whether it is executed: which have one way that leads to it for certain,
/// and another. And for each block where all ways from it meet first.
pub(super) fn controllers(blocks: &[Block]) -> (Vec<Vec<usize>>, Vec<usize>) {
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
pub(super) fn next(blocks: &[Block], block: usize) -> impl Iterator<Item = usize> {
    let of = &blocks[block].next;
    of.iter().copied().chain(of.is_empty().then_some(blocks.len()))
}

/// All blocks from which the end is reached, the end first, each after one of its next ones: in reverse postorder of
/// the way back.
pub(super) fn backwards(blocks: &[Block]) -> Vec<usize> {
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
