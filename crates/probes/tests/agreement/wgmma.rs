use abi::Arch;
use cuda_std::cvt::E4m3;
use cuda_std::sim::fragment;
use cuda_std::sim::swizzle::Operand;
use cuda_std::sim::tensor_core::{Major, WarpA, WgmmaKind, wgmma};
use cuda_std::wgmma::{Accumulate, Swizzle};
use half::{bf16, f16};
use probe_kernels::wgmma::HEAD_WORDS;
use probes::{Case, same_bits};

use crate::agree;
use crate::random::Random;

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];

/// Kinds of operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Values {
    /// Of like size.
    Near,
    /// Of very different size.
    Far,
    /// Any bits: infinite, NaN, subnormal.
    Bits,
}

fn element(kind: WgmmaKind, values: Values, random: &mut Random) -> u32 {
    let bits = random.word();
    let value = match values {
        Values::Near => random.float(-2, 2),
        Values::Far => random.float(-13, 10),
        Values::Bits => f32::from_bits(bits),
    };
    match (kind, values) {
        (WgmmaKind::Bf16 | WgmmaKind::F16, Values::Bits) => bits & 0xffff,
        (WgmmaKind::E4m3, Values::Bits) | (WgmmaKind::S8, _) => bits & 0xff,
        (WgmmaKind::Bf16, _) => bf16::from_f32(value).to_bits().into(),
        (WgmmaKind::F16, _) => f16::from_f32(value).to_bits().into(),
        (WgmmaKind::E4m3, _) => E4m3::from_f32(value).0.into(),
        (WgmmaKind::Tf32, _) => value.to_bits(),
    }
}

/// A tile in shared memory whose rows are as wide as the swizzle: `count` rows of a or columns of b; and its end.
fn tile(
    kind: WgmmaKind,
    count: u32,
    major: Major,
    swizzle: Swizzle,
    start: u32,
    random: &mut Random,
) -> (Operand, u32) {
    let (bytes, k) = (kind.element_bytes(), kind.k());
    let width = swizzle.bytes();
    // Elsewhere than at the first k of the swizzle's width.
    let advance =
        if major == Major::K && swizzle != Swizzle::None { 32 * random.below(width / 32) } else { 0 };
    let (leading, stride, size) = match (major, swizzle) {
        (Major::K, Swizzle::None) => (128, 256, count / 8 * 256),
        (Major::K, _) => (16, 8 * width, count * width),
        (Major::Mn, Swizzle::None) => (count * bytes / 16 * 128, 128, count * bytes * k),
        (Major::Mn, _) => (k * width, 8 * width, (count * bytes).div_ceil(width) * k * width),
    };
    (Operand { start: start + advance, leading, stride, swizzle, major }, start + size)
}

/// A block's input, and what its accumulators should be.
fn block(
    kind: WgmmaKind,
    n: u32,
    [major_a, major_b]: [Major; 2],
    in_registers: bool,
    swizzle: Swizzle,
    (values, accumulate): (Values, Accumulate),
    random: &mut Random,
) -> (Vec<u32>, Vec<u32>) {
    let (bytes, k) = (kind.element_bytes() as usize, kind.k());
    let registers = n as usize / 2;
    let (a, end) = tile(kind, 64, major_a, swizzle, 0, random);
    let (b, end) = tile(kind, n, major_b, swizzle, end.next_multiple_of(1024), random);
    let mut memory: Vec<u8> =
        random.words(end as usize / 4).iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut lanes_a = [[0; 4]; 128];
    for (operand, count) in [(a, 64), (b, n)] {
        for (mn, k) in (0..count).flat_map(|mn| (0..k).map(move |k| (mn, k))) {
            let bits = element(kind, values, random);
            let address = operand.address(mn, k, bytes as u32) as usize;
            memory[address..][..bytes].copy_from_slice(&bits.to_le_bytes()[..bytes]);
            if operand == a {
                fragment::a(mn as usize, k as usize, 8 * bytes as u32).set(
                    &mut lanes_a,
                    8 * bytes as u32,
                    bits,
                );
            }
        }
    }
    let before: Vec<u32> = (0..128 * registers)
        .map(|_| match (kind, values) {
            (WgmmaKind::S8, _) | (_, Values::Bits) => random.word(),
            (_, Values::Near) => random.float(-2, 2).to_bits(),
            (_, Values::Far) => random.float(-20, 20).to_bits(),
        })
        .collect();
    let read = |address: u32| -> Result<[u8; 16], String> {
        memory
            .get(address as usize..address as usize + 16)
            .and_then(|piece| piece.try_into().ok())
            .ok_or("outside".into())
    };
    let mut after = before.clone();
    for (warp, d) in after.chunks_mut(32 * registers).enumerate() {
        let lanes = lanes_a[32 * warp..].first_chunk().expect("32 lanes");
        let operand = if in_registers { WarpA::Registers(lanes) } else { WarpA::Shared(a) };
        wgmma(kind, warp, operand, b, accumulate, read, d).expect("tiles in memory");
    }
    let descriptor = |operand: Operand| {
        [
            operand.start,
            SWIZZLES.iter().position(|s| *s == operand.swizzle).expect("one of them") as u32,
            operand.leading,
            operand.stride,
        ]
    };
    let image: Vec<u32> = memory.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let mut input = [descriptor(a), descriptor(b)].concat();
    input.extend([accumulate as u32, image.len() as u32]);
    assert_eq!(input.len(), HEAD_WORDS as usize);
    input.extend(before);
    input.extend(lanes_a.as_flattened());
    input.extend(image);
    (input, after)
}

/// All swizzles, kinds of values, and both ways to accumulate, one block each.
fn case(kernel: &'static str, kind: WgmmaKind, n: u32, majors: [Major; 2], in_registers: bool) -> Case {
    let mut random =
        Random::new(kernel.bytes().fold(0u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte)));
    let mut blocks = Vec::new();
    for swizzle in SWIZZLES {
        for setting in [
            (Values::Near, Accumulate::Overwrite),
            (Values::Near, Accumulate::Add),
            (Values::Far, Accumulate::Add),
            (Values::Bits, Accumulate::Add),
        ] {
            blocks.push(block(kind, n, majors, in_registers, swizzle, setting, &mut random));
        }
    }
    let words = blocks.iter().map(|(input, _)| input.len()).max().expect("a block");
    let grid = blocks.len() as u32;
    let (mut input, mut expected) = (Vec::new(), Vec::new());
    for (mut part, after) in blocks {
        part.resize(words, 0);
        input.extend(part);
        expected.push(after);
    }
    let image_words = words as u32 - HEAD_WORDS - 64 * n - 512;
    let case = Case {
        image: "wgmma",
        grid,
        block: 128,
        shared_bytes: 4 * image_words,
        input,
        output: vec![0; expected.concat().len()],
        parameter: words as u32,
        ..Case::new(format!("{kind:?} n{n} {majors:?} registers: {in_registers}"), kernel, Arch::Sm90a)
    };
    case.check(move |_, got| {
        for (block, (expected, got)) in expected.iter().zip(got.chunks(64 * n as usize)).enumerate() {
            same_bits(expected, got).map_err(|text| format!("block {block}: {text}"))?;
        }
        Ok(())
    })
}

macro_rules! cases {
    ($kind:ident: $($kernel:literal $n:literal $majors:tt $in_registers:literal;)*) => {
        agree(&[$(case($kernel, WgmmaKind::$kind, $n, cases!(@majors $majors), $in_registers)),*])
    };
    (@majors [$a:ident $b:ident]) => { [Major::$a, Major::$b] };
}

#[test]
fn bf16() {
    cases! { Bf16:
        "wgmma_bf16_ss_k_k_n8" 8 [K K] false;
        "wgmma_bf16_ss_k_mn_n8" 8 [K Mn] false;
        "wgmma_bf16_ss_mn_k_n8" 8 [Mn K] false;
        "wgmma_bf16_ss_mn_mn_n8" 8 [Mn Mn] false;
        "wgmma_bf16_rs_k_n8" 8 [K K] true;
        "wgmma_bf16_rs_mn_n8" 8 [K Mn] true;
        "wgmma_bf16_ss_k_k_n64" 64 [K K] false;
        "wgmma_bf16_ss_k_mn_n64" 64 [K Mn] false;
        "wgmma_bf16_ss_mn_k_n64" 64 [Mn K] false;
        "wgmma_bf16_ss_mn_mn_n64" 64 [Mn Mn] false;
        "wgmma_bf16_rs_k_n64" 64 [K K] true;
        "wgmma_bf16_rs_mn_n64" 64 [K Mn] true;
        "wgmma_bf16_ss_k_k_n128" 128 [K K] false;
        "wgmma_bf16_ss_k_mn_n128" 128 [K Mn] false;
        "wgmma_bf16_ss_mn_k_n128" 128 [Mn K] false;
        "wgmma_bf16_ss_mn_mn_n128" 128 [Mn Mn] false;
        "wgmma_bf16_rs_k_n128" 128 [K K] true;
        "wgmma_bf16_rs_mn_n128" 128 [K Mn] true;
        "wgmma_bf16_ss_k_k_n256" 256 [K K] false;
        "wgmma_bf16_ss_k_mn_n256" 256 [K Mn] false;
        "wgmma_bf16_ss_mn_k_n256" 256 [Mn K] false;
        "wgmma_bf16_ss_mn_mn_n256" 256 [Mn Mn] false;
        "wgmma_bf16_rs_k_n256" 256 [K K] true;
        "wgmma_bf16_rs_mn_n256" 256 [K Mn] true;
    }
}

#[test]
fn f16() {
    cases! { F16:
        "wgmma_f16_ss_k_k_n8" 8 [K K] false;
        "wgmma_f16_ss_k_mn_n8" 8 [K Mn] false;
        "wgmma_f16_ss_mn_k_n8" 8 [Mn K] false;
        "wgmma_f16_ss_mn_mn_n8" 8 [Mn Mn] false;
        "wgmma_f16_rs_k_n8" 8 [K K] true;
        "wgmma_f16_rs_mn_n8" 8 [K Mn] true;
        "wgmma_f16_ss_k_k_n64" 64 [K K] false;
        "wgmma_f16_ss_k_mn_n64" 64 [K Mn] false;
        "wgmma_f16_ss_mn_k_n64" 64 [Mn K] false;
        "wgmma_f16_ss_mn_mn_n64" 64 [Mn Mn] false;
        "wgmma_f16_rs_k_n64" 64 [K K] true;
        "wgmma_f16_rs_mn_n64" 64 [K Mn] true;
        "wgmma_f16_ss_k_k_n128" 128 [K K] false;
        "wgmma_f16_ss_k_mn_n128" 128 [K Mn] false;
        "wgmma_f16_ss_mn_k_n128" 128 [Mn K] false;
        "wgmma_f16_ss_mn_mn_n128" 128 [Mn Mn] false;
        "wgmma_f16_rs_k_n128" 128 [K K] true;
        "wgmma_f16_rs_mn_n128" 128 [K Mn] true;
        "wgmma_f16_ss_k_k_n256" 256 [K K] false;
        "wgmma_f16_ss_k_mn_n256" 256 [K Mn] false;
        "wgmma_f16_ss_mn_k_n256" 256 [Mn K] false;
        "wgmma_f16_ss_mn_mn_n256" 256 [Mn Mn] false;
        "wgmma_f16_rs_k_n256" 256 [K K] true;
        "wgmma_f16_rs_mn_n256" 256 [K Mn] true;
    }
}

#[test]
fn tf32() {
    cases! { Tf32:
        "wgmma_tf32_ss_k_k_n8" 8 [K K] false;
        "wgmma_tf32_rs_k_n8" 8 [K K] true;
        "wgmma_tf32_ss_k_k_n64" 64 [K K] false;
        "wgmma_tf32_rs_k_n64" 64 [K K] true;
        "wgmma_tf32_ss_k_k_n128" 128 [K K] false;
        "wgmma_tf32_rs_k_n128" 128 [K K] true;
        "wgmma_tf32_ss_k_k_n256" 256 [K K] false;
        "wgmma_tf32_rs_k_n256" 256 [K K] true;
    }
}

#[test]
fn e4m3() {
    cases! { E4m3:
        "wgmma_e4m3_ss_k_k_n8" 8 [K K] false;
        "wgmma_e4m3_rs_k_n8" 8 [K K] true;
        "wgmma_e4m3_ss_k_k_n64" 64 [K K] false;
        "wgmma_e4m3_rs_k_n64" 64 [K K] true;
        "wgmma_e4m3_ss_k_k_n128" 128 [K K] false;
        "wgmma_e4m3_rs_k_n128" 128 [K K] true;
        "wgmma_e4m3_ss_k_k_n256" 256 [K K] false;
        "wgmma_e4m3_rs_k_n256" 256 [K K] true;
    }
}

#[test]
fn s8() {
    cases! { S8:
        "wgmma_s8_ss_k_k_n8" 8 [K K] false;
        "wgmma_s8_rs_k_n8" 8 [K K] true;
        "wgmma_s8_ss_k_k_n64" 64 [K K] false;
        "wgmma_s8_rs_k_n64" 64 [K K] true;
        "wgmma_s8_ss_k_k_n128" 128 [K K] false;
        "wgmma_s8_rs_k_n128" 128 [K K] true;
        "wgmma_s8_ss_k_k_n256" 256 [K K] false;
        "wgmma_s8_rs_k_n256" 256 [K K] true;
    }
}
