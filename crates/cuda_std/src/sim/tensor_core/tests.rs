//! Products against exact ones.

use super::super::swizzle::Operand;
use super::*;
use crate::wgmma::Swizzle;
use half::{bf16, f16};
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

const GENERATIONS: [Generation; 2] = [Generation::Ampere, Generation::Hopper];
const FLOATS: [MmaKind; 4] = [MmaKind::Bf16, MmaKind::F16, MmaKind::F16ToF16, MmaKind::Tf32];

fn encode(kind: MmaKind, value: f32) -> u32 {
    match kind {
        MmaKind::Bf16 => bf16::from_f32(value).to_bits().into(),
        MmaKind::F16 | MmaKind::F16ToF16 => f16::from_f32(value).to_bits().into(),
        MmaKind::Tf32 => value.to_bits(),
        MmaKind::S8 => u32::from(value as i8 as u8),
    }
}

/// c + Σ a·b with one sum.
fn dot(kind: MmaKind, generation: Generation, a: &[f32], b: &[f32], c: u32) -> u32 {
    let dot = kind.dot(generation).expect("a floating-point type");
    let vector = |values: &[f32]| {
        let bits = values.iter().map(|&value| encode(kind, value)).collect();
        Elements { k: values.len().max(1), bits }.vectors(dot.element).pop()
    };
    let empty = || Vector::new(dot.element, [].into_iter());
    dot.sum(&vector(a).unwrap_or_else(empty), &vector(b).unwrap_or_else(empty), c)
}

fn power(exponent: i32) -> f32 {
    f64::from(exponent).exp2() as f32
}

#[test]
fn terms_are_cut_off_below_the_largest() {
    use Generation::{Ampere, Hopper};
    let one = 1f32.to_bits();
    let small = |exponent: i32| [power(exponent - exponent / 2); 16];
    let sums = |generation, exponent: i32| {
        f32::from_bits(dot(MmaKind::Bf16, generation, &small(exponent), &[power(exponent / 2); 16], one))
    };
    assert_eq!(sums(Hopper, -24), 1.0 + power(-20));
    assert_eq!(sums(Hopper, -25), 1.0 + power(-21));
    assert_eq!(sums(Hopper, -26), 1.0);
    assert_eq!(sums(Ampere, -24), 1.0 + power(-20));
    assert_eq!(sums(Ampere, -25), 1.0);
    // Two blocks of eight, each rounded: 8 · 2^-27 vanishes twice, or would be 2^-23 at once.
    let with = |generation, products: usize| {
        let mut a = [0.0; 16];
        a[..products].fill(power(-24));
        f32::from_bits(dot(MmaKind::Bf16, generation, &a, &[1.0; 16], one))
    };
    assert_eq!(with(Hopper, 2), 1.0 + power(-23));
    assert_eq!(with(Hopper, 3), 1.0 + power(-23));
    let mut a = [0.0; 16];
    (a[0], a[8]) = (power(-24), power(-24));
    assert_eq!(f32::from_bits(dot(MmaKind::Bf16, Hopper, &a, &[1.0; 16], one)), 1.0 + power(-23));
    assert_eq!(f32::from_bits(dot(MmaKind::Bf16, Ampere, &a, &[1.0; 16], one)), 1.0);
    // Towards zero, from either side.
    let minus = |value: f32| f32::from_bits(dot(MmaKind::Bf16, Hopper, &[value], &[1.0], one));
    assert_eq!(minus(-power(-25)), 1.0 - power(-24));
    assert_eq!(minus(-power(-26)), 1.0);
    assert_eq!(
        f32::from_bits(dot(MmaKind::Bf16, Hopper, &[power(-25)], &[1.0], (-1f32).to_bits())),
        power(-24) - 1.0
    );
}

/// 1.5 · 1.5 has the exponent of 1 · 1, unnormalised.
#[test]
fn products_are_not_normalised() {
    let c = power(-25).to_bits();
    let sum = |a: f32| f32::from_bits(dot(MmaKind::F16, Generation::Hopper, &[a, -a], &[a, a], c));
    assert_eq!((sum(1.0), sum(1.5)), (power(-25), power(-25)));
    assert_eq!(sum(2.0), 0.0);
}

#[test]
fn e4m3_keeps_thirteen_bits() {
    let dot = WgmmaKind::E4m3.dot().expect("a floating-point type");
    assert_eq!(dot.summation, Summation { block: 32, fraction_bits: 13, result_bits: 13 });
    let sum = |a: &[u8], c: f32| {
        let numbers = Vector::new(E4M3, a.iter().map(|&code| code.into()));
        let ones = Vector::new(E4M3, a.iter().map(|_| 0x38));
        f32::from_bits(dot.sum(&numbers, &ones, c.to_bits()))
    };
    assert_eq!(sum(&[0; 32], 1.0 + power(-13)), 1.0 + power(-13));
    assert_eq!(sum(&[0; 32], 1.0 + power(-14)), 1.0);
    assert_eq!(sum(&[0; 32], -(1.0 + 3.0 * power(-14))), -(1.0 + power(-13)));
    assert_eq!(sum(&[0x38; 32], 0.0), 32.0);
    assert_eq!(sum(&[0x01; 32], 0.0), 32.0 * power(-9));
    // 16 and 2^-9 are 13 places apart.
    assert_eq!(sum(&[0x58, 0x01], 0.0), 16.0 + power(-9));
    assert_eq!(sum(&[0x60, 0x01], 0.0), 32.0);
    assert!(sum(&[0x7f], 0.0).is_nan());
    assert_eq!(sum(&[0x7e; 32], 0.0), 448.0 * 32.0);
}

#[test]
fn infinities_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for kind in FLOATS {
        let (infinity, not_a_number, negative) = match kind {
            MmaKind::F16ToF16 => (0x7c00, 0x7fff, 0xfc00),
            _ => (0x7f80_0000, 0x7fff_ffff, 0xff80_0000),
        };
        for generation in GENERATIONS {
            let sum = |a: &[f32], b: &[f32], c| dot(kind, generation, a, b, c);
            assert_eq!(sum(&[inf, 1.0], &[2.0, 1.0], 0), infinity);
            assert_eq!(sum(&[inf, 1.0], &[-2.0, 1.0], 0), negative);
            assert_eq!(sum(&[inf], &[-inf], 0), negative);
            assert_eq!(sum(&[1.0], &[1.0], negative), negative);
            assert_eq!(sum(&[inf], &[1.0], negative), not_a_number);
            assert_eq!(sum(&[inf, inf], &[1.0, -1.0], 0), not_a_number);
            assert_eq!(sum(&[inf], &[0.0], 0), not_a_number);
            assert_eq!(sum(&[nan], &[0.0], 0), not_a_number);
            assert_eq!(sum(&[-nan], &[1.0], 0), not_a_number);
            assert_eq!(sum(&[1.0], &[1.0], not_a_number | negative), not_a_number);
            assert_eq!(sum(&[-0.0], &[1.0], negative & !infinity), 0);
            assert_eq!(sum(&[], &[], 0), 0);
        }
    }
}

#[test]
fn the_ends_of_the_ranges() {
    let hopper = |kind, a: &[f32], b: &[f32], c| dot(kind, Generation::Hopper, a, b, c);
    // Subnormal factors, sums, and accumulators count.
    let least = f32::from_bits(1);
    assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[1.0], 0), power(-133).to_bits());
    assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[power(-16)], 0), least.to_bits());
    assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[power(-17)], 0), 0);
    assert_eq!(hopper(MmaKind::Bf16, &[0.0], &[1.0], 5), 5);
    assert_eq!(hopper(MmaKind::F16, &[power(-24)], &[power(-24)], 0), power(-48).to_bits());
    assert_eq!(hopper(MmaKind::F16ToF16, &[power(-24)], &[1.0], 1), 2);
    // Beyond the largest.
    let large = f32::from_bits(0x7f7f_0000);
    assert_eq!(hopper(MmaKind::Bf16, &[large, large], &[1.0, 1.0], 0), 0x7f80_0000);
    assert_eq!(hopper(MmaKind::Bf16, &[-large], &[large], 0), 0xff80_0000);
    // Sums of more than the largest may come back.
    assert_eq!(hopper(MmaKind::Bf16, &[large, large, -large], &[2.0, 1.0, 2.0], 0), large.to_bits());
    // Towards zero stays finite; to nearest may not.
    let largest = f32::MAX.to_bits();
    assert_eq!(hopper(MmaKind::Bf16, &[power(102)], &[1.0], largest), largest);
    let sum = |value: f32| hopper(MmaKind::F16ToF16, &[value], &[1.0], 0x7bff);
    assert_eq!((sum(8.0), sum(15.0), sum(16.0)), (0x7bff, 0x7bff, 0x7c00));
    // Ties to even.
    let one = |value: f32| hopper(MmaKind::F16ToF16, &[value], &[1.0], 0x3c00);
    assert_eq!((one(power(-11)), one(3.0 * power(-11))), (0x3c00, 0x3c02));
    assert_eq!(one(power(-11) * 1.0625), 0x3c01);
    assert_eq!(hopper(MmaKind::Tf32, &[f32::from_bits(0x3f80_1fff)], &[1.0], 0), 1f32.to_bits());
}

/// Small integers: every sum is exact.
fn integers(seed: u64) -> impl FnMut() -> i32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 59) as i32 - 16
    }
}

#[test]
fn every_mma_multiplies_matrices() {
    for kind in [MmaKind::Bf16, MmaKind::F16, MmaKind::F16ToF16, MmaKind::Tf32, MmaKind::S8] {
        let bits = kind.element_bits();
        let k = 256 / bits as usize;
        let mut next = integers(7);
        let [a, b, c] = [16 * k, k * 8, 16 * 8].map(|n| (0..n).map(|_| next()).collect::<Vec<i32>>());
        let (mut lanes_a, mut lanes_b, mut lanes_c) = ([[0; 4]; 32], [[0; 2]; 32], [[0; 4]; 32]);
        let result = |value: i32| match kind {
            MmaKind::F16ToF16 => u32::from(f16::from_f32(value as f32).to_bits()),
            MmaKind::S8 => value as u32,
            _ => (value as f32).to_bits(),
        };
        let result_bits = if kind == MmaKind::F16ToF16 { 16 } else { 32 };
        for (i, &value) in a.iter().enumerate() {
            fragment::a(i / k, i % k, bits).set(&mut lanes_a, bits, encode(kind, value as f32));
        }
        for (i, &value) in b.iter().enumerate() {
            fragment::b(i / 8, i % 8, bits).set(&mut lanes_b, bits, encode(kind, value as f32));
        }
        for (i, &value) in c.iter().enumerate() {
            fragment::d(i / 8, i % 8, result_bits).set(&mut lanes_c, result_bits, result(value));
        }
        for generation in GENERATIONS {
            let d = mma(kind, generation, &lanes_a, &lanes_b, &lanes_c);
            for (i, &c) in c.iter().enumerate() {
                let exact = c + (0..k).map(|k_idx| a[i / 8 * k + k_idx] * b[k_idx * 8 + i % 8]).sum::<i32>();
                let got = fragment::d(i / 8, i % 8, result_bits).get(&d, result_bits);
                assert_eq!(got, result(exact), "{kind:?} {generation:?} {i}");
            }
        }
    }
}

#[test]
fn s8_sums_wrap() {
    assert_eq!(dot_s8(&[0x80; 32], &[0x80; 32], 0), 32 * 16384);
    assert_eq!(dot_s8(&[0x80], &[0x80], i32::MAX as u32), i32::MAX.wrapping_add(16384) as u32);
    assert_eq!(dot_s8(&[0xff], &[0x7f], 0) as i32, -127);
}

/// Every type, layout and a few N, with a from either place.
#[test]
fn every_wgmma_multiplies_matrices() {
    for kind in [WgmmaKind::Bf16, WgmmaKind::F16, WgmmaKind::Tf32, WgmmaKind::E4m3, WgmmaKind::S8] {
        let (bytes, k) = (kind.element_bytes(), kind.k() as usize);
        let majors: &[Major] = if bytes == 2 { &[Major::K, Major::Mn] } else { &[Major::K] };
        let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
        for (case, (&major, swizzle)) in
            majors.iter().flat_map(|major| swizzles.map(|swizzle| (major, swizzle))).enumerate()
        {
            let n = [8, 64, 136][case % 3];
            let encode = |value: i32| match kind {
                WgmmaKind::Bf16 => encode(MmaKind::Bf16, value as f32),
                WgmmaKind::F16 => encode(MmaKind::F16, value as f32),
                WgmmaKind::Tf32 => (value as f32).to_bits(),
                WgmmaKind::E4m3 => u32::from(crate::cvt::E4m3::from_f32(value as f32).0),
                WgmmaKind::S8 => u32::from(value as u8),
            };
            let result =
                |value: i32| if kind == WgmmaKind::S8 { value as u32 } else { (value as f32).to_bits() };
            let mut next = integers(case as u64);
            let [a, b, c] = [64 * k, k * n, 64 * n].map(|n| (0..n).map(|_| next()).collect::<Vec<i32>>());
            let layout = |start: u32, mn: usize| {
                let (leading, stride) = match (major, swizzle) {
                    (Major::K, Swizzle::None) => (128, 256),
                    (Major::K, _) => (0, swizzle.repeat()),
                    (Major::Mn, Swizzle::None) => (mn as u32 * bytes / 16 * 128, 128),
                    (Major::Mn, _) => (2 * swizzle.repeat(), swizzle.repeat()),
                };
                Operand { start, leading, stride, swizzle, major }
            };
            let (in_a, in_b) = (layout(0, 64), layout(0x1_0000, n));
            let mut memory = vec![0u8; 0x3_0000];
            let mut lanes_a = [[0; 4]; 128];
            let mut write = |address: u32, bits: u32| {
                memory[address as usize..][..bytes as usize]
                    .copy_from_slice(&bits.to_le_bytes()[..bytes as usize]);
            };
            for (i, &value) in a.iter().enumerate() {
                write(in_a.address((i / k) as u32, (i % k) as u32, bytes), encode(value));
                fragment::a(i / k, i % k, 8 * bytes).set(&mut lanes_a, 8 * bytes, encode(value));
            }
            for (i, &value) in b.iter().enumerate() {
                write(in_b.address((i % n) as u32, (i / n) as u32, bytes), encode(value));
            }
            let read = |address: u32| {
                Ok::<[u8; 16], ()>(memory[address as usize..][..16].try_into().expect("16 bytes"))
            };
            for in_registers in [false, true] {
                for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                    let mut d = vec![0; 128 * n / 2];
                    let at = |i: usize| {
                        let place = fragment::d(i / n, i % n, 32);
                        place.lane * n / 2 + place.register
                    };
                    c.iter().enumerate().for_each(|(i, &value)| d[at(i)] = result(value));
                    for (warp, d) in d.chunks_mut(32 * n / 2).enumerate() {
                        let lanes = lanes_a[32 * warp..].first_chunk().expect("32 lanes");
                        let a = if in_registers { WarpA::Registers(lanes) } else { WarpA::Shared(in_a) };
                        assert_eq!(wgmma(kind, warp, a, in_b, accumulate, read, d), Ok(()));
                    }
                    for (i, &c) in c.iter().enumerate() {
                        let c = if accumulate == Accumulate::Add { c } else { 0 };
                        let exact = c + (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum::<i32>();
                        assert_eq!(d[at(i)], result(exact), "{kind:?} {major:?} {swizzle:?} n{n} {i}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(2000))]

    /// Within what is cut off of each term, and the rounding of each block's sum.
    #[test]
    fn sums_are_near(values in prop::collection::vec((-8f32..8.0, -20i32..3, -8f32..8.0), 16), c in -100f32..100.0) {
        for kind in FLOATS {
            for generation in GENERATIONS {
                let (round, c) = match kind {
                    MmaKind::F16ToF16 => (power(-10), f16::from_f32(c).to_f32()),
                    _ => (power(-22), c),
                };
                let exactly = |value: f32| match kind {
                    MmaKind::Bf16 => bf16::from_f32(value).to_f32(),
                    MmaKind::Tf32 => f32::from_bits(value.to_bits() & !0x1fff),
                    _ => f16::from_f32(value).to_f32(),
                };
                let k = if kind == MmaKind::Tf32 { 8 } else { 16 };
                let a: Vec<f32> = values[..k].iter().map(|v| exactly(v.0 * power(v.1))).collect();
                let b: Vec<f32> = values[..k].iter().map(|v| exactly(v.2)).collect();
                let products = || a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b));
                let exact = f64::from(c) + products().sum::<f64>();
                let scale = f64::from(c).abs() + products().map(f64::abs).sum::<f64>();
                let bits = dot(kind, generation, &a, &b, if round > power(-20) { f16::from_f32(c).to_bits().into() } else { c.to_bits() });
                let got = if kind == MmaKind::F16ToF16 { f16::from_bits(bits as u16).to_f32() } else { f32::from_bits(bits) };
                let bound = scale * (17.0 * f64::from(power(-24)) + 2.0 * f64::from(round));
                prop_assert!((f64::from(got) - exact).abs() <= bound, "{:?} {:?}: {} for {}", kind, generation, got, exact);
            }
        }
    }

    /// Decoding and rounding are inverses.
    #[test]
    fn numbers_come_back(bits in any::<u32>()) {
        for (result, bits) in [(Result::F32(23), bits), (Result::F16, bits & 0xffff)] {
            match result.format().decode(bits) {
                Number::Finite { significand: 0, .. } => prop_assert_eq!(bits & bits.wrapping_sub(1), 0),
                Number::Finite { significand, exponent } => prop_assert_eq!(result.round(significand, exponent), bits),
                Number::Infinity { negative } => prop_assert_eq!(result.infinity(negative), bits),
                Number::Nan => prop_assert!(bits & result.nan() > result.infinity(false)),
            }
        }
    }
}
