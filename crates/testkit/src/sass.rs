//! Counting instructions of Hopper's machine code in what ptxas writes, without a disassembler.

use std::collections::BTreeMap;

/// The lower 12 bits of an instruction's 16 bytes: a move to a uniform register; `wgmma` of floats (HGMMA) with a in
/// shared memory, and in registers; of int8 (IGMMA) and fp8 (QGMMA), likewise.
const R2UR: u64 = 0x2ca;
const WGMMA: [u64; 6] = [0x9f0, 0xdf0, 0x9f1, 0xdf1, 0x9f3, 0xdf3];
/// `wgmma.fence` and `wgmma.wait_group`, which stand between groups of products.
const WARPGROUP: u64 = 0x9c5;

/// `bar`, without the bits that say where its operands are.
const BAR: u64 = 0x11d;

/// How often a kernel has instructions that part of a warp or a warpgroup must not execute by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Together {
    /// `wgmma.mma_async`.
    pub products: usize,
    /// `wgmma.fence` and `wgmma.wait_group`.
    pub syncs: usize,
    /// `bar.sync`, `bar.arrive` and `bar.red`, and the one behind `barrier.cluster.wait`.
    pub barriers: usize,
}

/// Those of each kernel, by name. None if this is no object file of ptxas.
pub fn together(cubin: &[u8]) -> Option<BTreeMap<String, Together>> {
    let sections = sections(cubin)?;
    let kernels = sections.into_iter().filter_map(|(name, code)| Some((name.strip_prefix(".text.")?, code)));
    let count = |code: &[u8]| {
        let mut counts = Together::default();
        for opcode in code.chunks_exact(16).filter_map(|instruction| number(instruction, 0, 2)) {
            counts.products += usize::from(WGMMA.contains(&(opcode & 0xfff)));
            counts.syncs += usize::from(opcode & 0xfff == WARPGROUP);
            counts.barriers += usize::from(opcode & 0x1ff == BAR);
        }
        counts
    };
    Some(kernels.map(|(name, code)| (name.to_owned(), count(code))).collect())
}

/// For each kernel with `wgmma`, by name, the most moves to uniform registers between one product and the next of its
/// group in the code. None if this is no object file of ptxas.
pub fn moves_between_products(cubin: &[u8]) -> Option<BTreeMap<String, usize>> {
    let sections = sections(cubin)?;
    let kernels = sections.into_iter().filter_map(|(name, code)| Some((name.strip_prefix(".text.")?, code)));
    Some(kernels.filter_map(|(name, code)| Some((name.to_owned(), most_moves(code)?))).collect())
}

fn most_moves(code: &[u8]) -> Option<usize> {
    let mut moves = None;
    let mut most = None;
    for instruction in code.chunks_exact(16) {
        match number(instruction, 0, 2)? & 0xfff {
            R2UR => moves = moves.map(|moves: usize| moves + 1),
            WARPGROUP => moves = moves.map(|_| 0),
            opcode if WGMMA.contains(&opcode) => {
                most = most.max(moves.or(Some(0)));
                moves = Some(0);
            }
            _ => {}
        }
    }
    most
}

/// The sections of a 64-bit ELF file of little-endian numbers: name and contents.
fn sections(file: &[u8]) -> Option<Vec<(&str, &[u8])>> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, count, names) = (number(file, 0x28, 8)?, number(file, 0x3c, 2)?, number(file, 0x3e, 2)?);
    let place = |index: u64| {
        let header = usize::try_from(table + 64 * index).ok()?;
        Some((number(file, header, 4)?, number(file, header + 0x18, 8)?, number(file, header + 0x20, 8)?))
    };
    let (_, names, _) = place(names)?;
    let section = |index| {
        let (name, start, len) = place(index)?;
        let name = file.get(usize::try_from(names + name).ok()?..)?.split(|&byte| byte == 0).next()?;
        let start = usize::try_from(start).ok()?;
        // What is all zeros takes no place in the file.
        let contents = file.get(start..start.checked_add(usize::try_from(len).ok()?)?).unwrap_or(&[]);
        Some((std::str::from_utf8(name).ok()?, contents))
    };
    (0..count).map(section).collect()
}

/// An unsigned number of `len` bytes.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::skip_optional;
    use crate::ptx::{assemble, find_ptxas};
    use abi::Arch;

    #[test]
    fn other_files_are_refused() {
        for file in [&b""[..], b"\x7fELF", b"\x7fELF\x02\x01 and then nothing that it could be", &[0; 100]] {
            assert_eq!(moves_between_products(file), None);
        }
    }

    /// Descriptors that the threads share are in uniform registers; those of a thread's own come from there one by one.
    #[test]
    fn descriptors_of_a_block_and_of_a_thread() {
        let Some(ptxas) = find_ptxas() else { return skip_optional("no ptxas: set WARPFORGE_PTXAS") };
        let moves = |own: &str, product: &str, options: &str| {
            let text = format!(
                ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {{
                .reg .b32 %s<5>; .reg .b64 %rd<6>; .reg .b32 %r<2>;
                ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; cvt.u64.u32 %rd2, %r1; {own}
                xor.b64 %rd4, %rd3, 1234567; xor.b64 %rd5, %rd3, 7654321;
                mov.b32 %s1, 0; mov.b32 %s2, %s1; mov.b32 %s3, %s1; mov.b32 %s4, %s1;
                wgmma.fence.sync.aligned;
                wgmma.mma_async.sync.aligned.{product} {{%s1,%s2,%s3,%s4}}, %rd3, %rd4, {options};
                wgmma.mma_async.sync.aligned.{product} {{%s1,%s2,%s3,%s4}}, %rd5, %rd4, {options};
                wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
                st.global.b32 [%rd1], %s1; ret; }}"
            );
            assemble(&ptxas, &text, Arch::Sm90a).unwrap()[0].moves_between_products
        };
        for (product, options) in [("m64n8k16.f32.bf16.bf16", "1, 1, 1, 0, 0"), ("m64n8k32.s32.s8.s8", "1")] {
            assert_eq!(moves("mov.u64 %rd3, %rd1;", product, options), Some(0), "{product}");
            let own = moves("add.u64 %rd3, %rd1, %rd2;", product, options);
            assert!(own > Some(0), "{product}: {own:?}");
        }
    }
}
