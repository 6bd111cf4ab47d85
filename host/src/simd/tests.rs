//! Every instruction set against the same numbers.

use super::*;
use crate::fp8::F8E4M3;
use half::{bf16, f16};

/// What a vector's lanes are.
fn lanes<V: Lanes>(vector: V) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    vector.store(&mut lanes);
    lanes
}

fn same(got: f32, want: f32) -> bool {
    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
}

/// Every code of 8 and 16 bits becomes its value, by all instructions.
struct Widened;

impl Work for Widened {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for first in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let of_bf16 = lanes(V::load_bf16(&bits));
            let of_f16 = lanes(V::load_f16(&bits));
            let of_e6m9 = lanes(V::load_e6m9(&bits));
            for i in 0..LANES {
                assert!(same(of_e6m9[i], e6m9_to_f32(bits[i])), "{:?} {:x}", V::LEVEL, bits[i]);
                assert!(same(of_bf16[i], bf16::from_bits(bits[i]).to_f32()), "{:?} {:x}", V::LEVEL, bits[i]);
                assert!(same(of_f16[i], f16::from_bits(bits[i]).to_f32()), "{:?} {:x}", V::LEVEL, bits[i]);
            }
        }
        for first in (0..=u8::MAX).step_by(LANES) {
            let codes: [u8; LANES] = std::array::from_fn(|i| first + i as u8);
            let (bytes, floats) = (lanes(V::load_bytes(&codes)), lanes(V::load_e4m3(&codes)));
            for i in 0..LANES {
                assert_eq!(bytes[i], f32::from(codes[i]));
                assert!(same(floats[i], F8E4M3(codes[i]).to_f32()), "{:?} {}", V::LEVEL, codes[i]);
            }
        }
    }
}

/// Every field of a word finds every place of a table.
struct Fields;

impl Work for Fields {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let table: [f32; LANES] = std::array::from_fn(|i| i as f32 * 1.5 - 7.0);
        let bytes: [u8; 4 * LANES] = std::array::from_fn(|i| (i * 167 % 256) as u8);
        for field in 0..8 {
            let got = lanes(V::look_up(V::words(&bytes), field, V::load(&table)));
            for i in 0..LANES {
                let byte = bytes[4 * i + field as usize / 2];
                assert_eq!(got[i], table[usize::from(byte >> (4 * (field % 2)) & 15)], "{:?}", V::LEVEL);
            }
        }
    }
}

/// Arithmetic lane by lane, and the sum of the lanes.
struct Arithmetic;

impl Work for Arithmetic {
    type Out = f32;

    #[inline(always)]
    fn with<V: Lanes>(self) -> f32 {
        let of = |seed: usize| -> [f32; LANES] {
            std::array::from_fn(|i| ((i + seed) * 7919 % 2003) as f32 / 1001.5 - 1.0)
        };
        let (a, b, c) = (of(1), of(2), of(3));
        let [x, y, z] = [&a, &b, &c].map(V::load);
        for i in 0..LANES {
            assert_eq!(lanes(x.add(y))[i], a[i] + b[i]);
            assert_eq!(lanes(x.sub(y))[i], a[i] - b[i]);
            assert_eq!(lanes(x.mul(y))[i], a[i] * b[i]);
            assert_eq!(lanes(V::splat(c[i]))[i], c[i]);
            let fused = lanes(x.mul_add(y, z))[i];
            let want = if V::LEVEL == Level::Portable && !FUSED {
                a[i] * b[i] + c[i]
            } else {
                a[i].mul_add(b[i], c[i])
            };
            assert_eq!(fused, want);
        }
        x.sum()
    }
}

/// Products of pairs in the order of their halves, with one rounding each; by one instruction where nothing is
/// subnormal.
struct Pairs;

impl Work for Pairs {
    type Out = ();
    const OF_PAIRS: bool = true;

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let mut seed = 1u32;
        // Of magnitudes from 2^−48 to 2^16, or any bits.
        let mut half = |any: bool| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let bits = seed >> 16;
            if any { bits } else { bits & 0x9fff | 0x2800 }
        };
        for round in 0..20_000 {
            let any = round % 2 == 1;
            let [a, b, sums]: [[u32; LANES]; 3] =
                std::array::from_fn(|_| std::array::from_fn(|_| half(any) << 16 | half(any)));
            let [x, y, z] = [a, b, sums].map(|bits| V::load(&bits.map(f32::from_bits)));
            let [upper, lower] = x.halves().map(lanes);
            let [apart, together] = [x.add_products_of_halves(y, z), x.add_pairs(y, z)].map(lanes);
            for i in 0..LANES {
                let halves = |bits: u32| [bits >> 16, bits & 0xffff].map(|half| f32::from_bits(half << 16));
                let ([a, a_lower], [b, b_lower]) = (halves(a[i]), halves(b[i]));
                assert!(same(upper[i], a) && same(lower[i], a_lower), "{:?}", V::LEVEL);
                let add = |x: f32, y: f32, sum: f32| {
                    if V::LEVEL == Level::Portable && !FUSED { x * y + sum } else { x.mul_add(y, sum) }
                };
                let want = add(a_lower, b_lower, add(a, b, f32::from_bits(sums[i])));
                assert!(same(apart[i], want), "{:?} {a} {b}: {} {want}", V::LEVEL, apart[i]);
                if !any {
                    assert!(same(together[i], want), "{:?} {a} {b}: {} {want}", V::LEVEL, together[i]);
                }
            }
        }
    }
}

/// Numbers of every exponent, with few bits of mantissa and with many.
fn numbers() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).flat_map(|bits| {
        [0, 1, 0x7fff, 0x8000, 0x8001].map(|low| f32::from_bits(u32::from(bits) << 16 | low))
    })
}

/// Every number is rounded as `half` does, by all instructions.
struct Rounded;

impl Work for Rounded {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let all: Vec<f32> = numbers().collect();
        for values in all.as_chunks().0 {
            let (mut bf16s, mut f16s) = ([0; LANES], [0; LANES]);
            V::load(values).store_bf16(&mut bf16s);
            V::load(values).store_f16(&mut f16s);
            for i in 0..LANES {
                let (b, h) = (bf16::from_bits(bf16s[i]).to_f32(), f16::from_bits(f16s[i]).to_f32());
                assert!(same(b, bf16::from_f32(values[i]).to_f32()), "{:?} {}", V::LEVEL, values[i]);
                assert!(same(h, f16::from_f32(values[i]).to_f32()), "{:?} {}", V::LEVEL, values[i]);
            }
        }
    }
}

/// Powers of e within 2 ulps, also subnormal ones, NaN and −inf; and what chooses.
struct Powers;

impl Work for Powers {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let negative = (0..200_000).map(|i| -(i as f32) * 5.3e-4).chain([-0.0, f32::NEG_INFINITY, f32::NAN]);
        let all: Vec<f32> = negative.chain(numbers().filter(|x| *x < 0.0)).collect();
        for values in all.as_chunks().0 {
            let got = lanes(exp(V::load(values)));
            for (&x, got) in std::iter::zip(values, got) {
                let want = f64::from(x).exp();
                if x.is_nan() {
                    assert!(got.is_nan());
                } else {
                    let error = (f64::from(got) - want).abs();
                    let ulp = f64::from(f32::EPSILON) * want.max(f32::MIN_POSITIVE.into());
                    assert!(error <= 2.0 * ulp, "{:?} {x}: {got} {error}", V::LEVEL);
                }
            }
        }
        let mut x = [0.0; LANES];
        x[..6].copy_from_slice(&[1.0, -1.0, -0.0, f32::NAN, f32::NEG_INFINITY, 3.0]);
        let v = V::load(&x);
        assert_eq!(lanes(v.neg_abs())[..3], [-1.0, -1.0, 0.0]);
        assert_eq!(lanes(V::splat(0.5).max(v))[..3], [1.0, 0.5, 0.5]);
        assert!(lanes(V::splat(0.5).max(v))[3].is_nan());
        assert_eq!(lanes(v.where_negative(V::splat(7.0), V::splat(8.0)))[..3], [8.0, 7.0, 7.0]);
        assert_eq!(lanes(v.div(V::splat(2.0)))[5], 1.5);
    }
}

#[test]
fn all_instructions_agree() {
    let mut sums = Vec::new();
    for &level in Level::available() {
        by(level, Widened);
        by(level, Fields);
        by(level, Rounded);
        by(level, Powers);
        by(level, Pairs);
        sums.push(by(level, Arithmetic).to_bits());
    }
    assert!(sums.iter().all(|&sum| sum == sums[0]), "{sums:?}");
}
