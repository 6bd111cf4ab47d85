//! Conversions against their definitions.

use super::*;
use abi::DType;
use proptest::prelude::*;
use std::{format, vec::Vec};
use testkit::round::{max_finite, min_normal, round_to, ulp};

/// A 16-bit type and the bits of its infinity.
const TYPES: [(DType, u16); 2] = [(DType::BF16, 0x7f80), (DType::F16, 0x7c00)];

fn widen(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::BF16 => Element::to_f32(bf16::from_bits(bits)),
        _ => Element::to_f32(f16::from_bits(bits)),
    }
}

fn narrow(dtype: DType, value: f32) -> u16 {
    match dtype {
        DType::BF16 => <bf16 as Element>::from_f32(value).to_bits(),
        _ => <f16 as Element>::from_f32(value).to_bits(),
    }
}

/// Against f64 arithmetic, which knows nothing of bits, and against the crate `half`.
fn check(dtype: DType, infinity: u16, value: f32) {
    let bits = narrow(dtype, value);
    if value.is_nan() {
        let quiet = 1 << (infinity.trailing_zeros() - 1);
        assert!(bits & 0x7fff > infinity && bits & quiet != 0, "{dtype}: {value} gives {bits:#x}");
        assert_eq!(bits >> 15, (value.to_bits() >> 31) as u16, "{dtype}: the sign of {value}");
        return;
    }
    let exact = round_to(dtype, f64::from(value));
    assert_eq!(
        f64::from(widen(dtype, bits)).to_bits(),
        exact.to_bits(),
        "{dtype}: {value:e} gives {bits:#x}"
    );
    let half = match dtype {
        DType::BF16 => bf16::from_f32(value).to_bits(),
        _ => f16::from_f32(value).to_bits(),
    };
    assert_eq!(bits, half, "{dtype}: {value:e}");
}

#[test]
fn every_pattern_widens_exactly_and_comes_back() {
    for (dtype, infinity) in TYPES {
        for bits in 0..=u16::MAX {
            let value = widen(dtype, bits);
            let half = match dtype {
                DType::BF16 => bf16::from_bits(bits).to_f32(),
                _ => f16::from_bits(bits).to_f32(),
            };
            if bits & 0x7fff > infinity {
                assert!(value.is_nan() && half.is_nan(), "{dtype} {bits:#x}");
            } else {
                assert_eq!(value.to_bits(), half.to_bits(), "{dtype} {bits:#x}");
                assert_eq!(narrow(dtype, value), bits, "{dtype} {bits:#x}");
            }
            check(dtype, infinity, value);
        }
    }
}

/// Values between two neighbours: the lower, the upper, and at the middle the even one.
#[test]
fn every_midpoint_goes_to_the_even_neighbour() {
    for (dtype, infinity) in TYPES {
        for low in 0..infinity - 1 {
            let (below, above) = (widen(dtype, low), widen(dtype, low + 1));
            let middle = below + (above - below) / 2.0;
            assert!(below < middle && middle < above);
            for sign in [0u16, 0x8000] {
                let signed = |value: f32| if sign == 0 { value } else { -value };
                assert_eq!(narrow(dtype, signed(middle)), sign | (low + (low & 1)), "{dtype} {low:#x}");
                assert_eq!(narrow(dtype, signed(middle.next_down())), sign | low, "{dtype} {low:#x}");
                assert_eq!(narrow(dtype, signed(middle.next_up())), sign | (low + 1), "{dtype} {low:#x}");
            }
        }
    }
}

#[test]
fn overflow_subnormals_zeros_and_nan() {
    for (dtype, infinity) in TYPES {
        let max = max_finite(dtype);
        let limit = (max + ulp(dtype, max) / 2.0) as f32;
        assert_eq!(narrow(dtype, limit.next_down()), infinity - 1);
        assert_eq!(narrow(dtype, limit), infinity);
        assert_eq!(narrow(dtype, -limit), infinity | 0x8000);
        assert_eq!(narrow(dtype, f32::MAX), infinity);
        assert_eq!(narrow(dtype, f32::INFINITY), infinity);
        assert_eq!(narrow(dtype, f32::NEG_INFINITY), infinity | 0x8000);
        assert_eq!(narrow(dtype, 0.0), 0);
        assert_eq!(narrow(dtype, -0.0), 0x8000);
        assert_eq!(narrow(dtype, f32::from_bits(1)), 0);
        assert_eq!(narrow(dtype, -f32::from_bits(1)), 0x8000);
        let (least, normal) = (ulp(dtype, 0.0) as f32, min_normal(dtype) as f32);
        assert_eq!(narrow(dtype, least), 1);
        assert_eq!(narrow(dtype, least / 2.0), 0);
        assert_eq!(narrow(dtype, (least / 2.0).next_up()), 1);
        assert_eq!(narrow(dtype, normal - least), narrow(dtype, normal) - 1);
        // The mantissas that rounding would carry into infinity, and a signalling one that truncation would lose.
        for mantissa in [1, 0x7fff, 0x8000, 0xffff, 0x40_0000, 0x3f_ffff, 0x7f_ffff] {
            for sign in [0, 1 << 31] {
                check(dtype, infinity, f32::from_bits(sign | 0x7f80_0000 | mantissa));
            }
        }
    }
}

#[test]
fn element_order_in_16_bytes() {
    fn round_trip<T: Element>(values: [T; 8], bytes: [u32; 4]) {
        let mut wide = [-7.0; 8];
        T::unpack(bytes, &mut wide);
        for i in 0..8 {
            let expected = if i < T::PER_16_BYTES { values[i].to_f32() } else { -7.0 };
            assert_eq!(wide[i], expected, "element {i}");
        }
        assert_eq!(T::pack(&wide), bytes);
    }
    let bits = |i: u16| 0x3c00 + 0x11 * i;
    let words = [0, 2, 4, 6].map(|i| u32::from(bits(i)) | u32::from(bits(i + 1)) << 16);
    round_trip(core::array::from_fn(|i| bf16::from_bits(bits(i as u16))), words);
    round_trip(core::array::from_fn(|i| f16::from_bits(bits(i as u16))), words);
    round_trip(core::array::from_fn(|i| i as f32 + 0.5), [0, 1, 2, 3].map(|i| (i as f32 + 0.5).to_bits()));
    assert_eq!(bf16x2_from_f32(1.0, -2.0), 0xc000_3f80);
    assert_eq!(f16x2_from_f32(1.0, -2.0), 0xc000_3c00);
    assert_eq!(<f32 as Element>::from_f32(1.5).to_f32(), 1.5);
}

/// An 8-bit format from its definition: value and code of each finite number that is not negative, in order.
fn fp8_values(mantissa: i32, bias: i32, largest: u8) -> Vec<(f64, u8)> {
    let value = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> mantissa), f64::from(code & ((1 << mantissa) - 1)));
        let fraction = fraction / f64::from(1 << mantissa);
        if exponent == 0 {
            fraction * f64::from(1 - bias).exp2()
        } else {
            (1.0 + fraction) * f64::from(exponent - bias).exp2()
        }
    };
    (0..=largest).map(|code| (value(code), code)).collect()
}

#[test]
fn fp8_rounds_to_the_nearest_and_saturates() {
    type Narrow = fn(f32) -> u8;
    let formats: [(i32, i32, u8, f64, Narrow); 2] = [
        (3, 7, 0x7e, 448.0, |value| E4m3::from_f32(value).0),
        (2, 15, 0x7b, 57344.0, |value| E5m2::from_f32(value).0),
    ];
    for (mantissa, bias, largest, largest_value, narrow) in formats {
        let values = fp8_values(mantissa, bias, largest);
        assert_eq!(values.last().map(|v| v.0), Some(largest_value));
        let expected = |magnitude: f64| {
            let above = values.partition_point(|v| v.0 < magnitude);
            if above == values.len() {
                return largest;
            }
            let (below, above) = (values[above.saturating_sub(1)], values[above]);
            match (magnitude - below.0).total_cmp(&(above.0 - magnitude)) {
                core::cmp::Ordering::Less => below.1,
                core::cmp::Ordering::Greater => above.1,
                core::cmp::Ordering::Equal => below.1.max(above.1) & !1,
            }
        };
        let midpoints = values.windows(2).map(|pair| ((pair[0].0 + pair[1].0) / 2.0) as f32);
        let around = midpoints.flat_map(|middle| [middle.next_down(), middle, middle.next_up()]);
        let sweep = (0..0x7f80_0000u32).step_by(4099).map(f32::from_bits);
        for magnitude in around.chain(sweep).chain([f32::MAX, f32::INFINITY, 0.0]) {
            let code = expected(f64::from(magnitude));
            assert_eq!((narrow(magnitude), narrow(-magnitude)), (code, code | 0x80), "{magnitude:e}");
        }
        assert_eq!(narrow(f32::NAN), 0x7f);
    }
}

#[test]
fn fp8_widens_exactly_and_in_pairs() {
    for (value, code) in fp8_values(3, 7, 0x7e) {
        assert_eq!(f64::from(E4m3(code).to_f32()).to_bits(), value.to_bits());
        assert_eq!(f64::from(E4m3(code | 0x80).to_f32()).to_bits(), (-value).to_bits());
    }
    for (value, code) in fp8_values(2, 15, 0x7b) {
        assert_eq!(f64::from(E5m2(code).to_f32()).to_bits(), value.to_bits());
        assert_eq!(f64::from(E5m2(code | 0x80).to_f32()).to_bits(), (-value).to_bits());
    }
    assert!([0x7f, 0xff].iter().all(|&code| E4m3(code).to_f32().is_nan()));
    assert!([0x7d, 0x7e, 0x7f, 0xfd].iter().all(|&code| E5m2(code).to_f32().is_nan()));
    assert_eq!((E5m2(0x7c).to_f32(), E5m2(0xfc).to_f32()), (f32::INFINITY, f32::NEG_INFINITY));
    assert_eq!(e4m3x2_from_f32(1.0, -2.0), 0xc038);
    assert_eq!(f16x2_from_e4m3x2(0xc038), 0xc000_3c00);
    assert_eq!(f16x2_from_e4m3::<0, 1>(0x7ec0_b838), 0xbc00_3c00);
    assert_eq!(f16x2_from_e4m3::<2, 3>(0x7ec0_b838), 0x5f00_c000);
    assert_eq!(f16x2_from_e4m3::<1, 3>(0x7ec0_b838), 0x5f00_bc00);
    assert_eq!(f16x2s_from_e4m3(0x7ec0_b838), [0xc000_3c00, 0x5f00_bc00]);
    assert_eq!(bf16x2_from_e4m3::<1, 3>(0x7ec0_b838), 0x43e0_bf80);
    assert_eq!(e4m3x2_from_f16x2(0xc000_3c00), 0xc038);
    assert_eq!(e5m2x2_from_f32(1.0, -2.0), 0xc03c);
    assert_eq!(f16x2_from_e5m2x2(0xc03c), 0xc000_3c00);
    assert_eq!(e5m2x2_from_f16x2(0xc000_3c00), 0xc03c);
}

#[test]
fn tf32_keeps_ten_bits() {
    for (value, expected) in [
        (1.0f32, 1.0f32),
        (1.0 + 2f32.powi(-11), 1.0 + 2f32.powi(-10)),
        ((1.0 + 2f32.powi(-11)).next_down(), 1.0),
        (-1.0 - 2f32.powi(-11), -1.0 - 2f32.powi(-10)),
        (f32::MAX, f32::INFINITY),
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        (f32::from_bits(0x1000), f32::from_bits(0x2000)),
        (f32::from_bits(0xfff), 0.0),
        (-0.0, -0.0),
    ] {
        assert_eq!(tf32_from_f32(value), expected.to_bits(), "{value:e}");
    }
    assert!(f32::from_bits(tf32_from_f32(f32::NAN)).is_nan());
}

#[test]
fn bytes_and_bits_are_permuted() {
    let (a, b) = (0x8040_2010, 0xf1e2_d3c4);
    assert_eq!(prmt(a, b, 0x3210), a);
    assert_eq!(prmt(a, b, 0x7654), b);
    assert_eq!(prmt(a, b, 0x5410), 0xd3c4_2010);
    assert_eq!(prmt(a, b, 0xfa8b), 0xff00_00ff);
    assert_eq!(prmt(a, b, 0xffff_0123), 0x1020_4080);
    let c = 0x0ff0_aa55;
    assert_eq!(lop3::<0xea>(a, b, c), a & b | c);
    assert_eq!(lop3::<0x96>(a, b, c), a ^ b ^ c);
    assert_eq!(lop3::<{ 0xf0 & !0xcc }>(a, b, c), a & !b);
    assert_eq!(lop3::<0>(a, b, c), 0);
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(20_000))]

    #[test]
    fn random_bits_round_to_nearest_even(bits in any::<u32>(), f16_range in -70000f32..70000.0, tiny in -1e-4f32..1e-4) {
        for (dtype, infinity) in TYPES {
            for value in [f32::from_bits(bits), f16_range, tiny] {
                check(dtype, infinity, value);
            }
        }
    }

    #[test]
    fn pack_is_from_f32_of_each(bits in any::<[u32; 8]>()) {
        fn agrees<T: Element>(values: &[f32; 8], to_bits: impl Fn(T) -> u16) -> Result<(), TestCaseError> {
            for (i, word) in T::pack(values).into_iter().enumerate() {
                let pair = [values[2 * i], values[2 * i + 1]].map(|value| to_bits(T::from_f32(value)));
                prop_assert_eq!(word, u32::from(pair[0]) | u32::from(pair[1]) << 16, "{}", format!("word {i}"));
            }
            Ok(())
        }
        let values = bits.map(f32::from_bits);
        agrees(&values, bf16::to_bits)?;
        agrees(&values, f16::to_bits)?;
    }
}
