//! Element types and their conversion to f32, in which all arithmetic is done.

pub use half::{bf16, f16};

/// A type in which tensors are stored: read as f32, written by rounding an f32 to nearest even.
pub trait Element: Copy + 'static {
    /// Elements in 16 bytes.
    const PER_16_BYTES: usize;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest element, ties to even; beyond the largest finite value, infinity; NaN stays NaN.
    fn from_f32(value: f32) -> Self;

    /// 16 bytes as elements `0..PER_16_BYTES` of `out`; the rest of `out` stays as it is.
    fn unpack(bytes: [u32; 4], out: &mut [f32; 8]);

    /// Elements `0..PER_16_BYTES` as 16 bytes.
    fn pack(values: &[f32; 8]) -> [u32; 4];
}

impl Element for f32 {
    const PER_16_BYTES: usize = 4;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn unpack(bytes: [u32; 4], out: &mut [f32; 8]) {
        out[0] = f32::from_bits(bytes[0]);
        out[1] = f32::from_bits(bytes[1]);
        out[2] = f32::from_bits(bytes[2]);
        out[3] = f32::from_bits(bytes[3]);
    }

    #[inline(always)]
    fn pack(values: &[f32; 8]) -> [u32; 4] {
        [values[0].to_bits(), values[1].to_bits(), values[2].to_bits(), values[3].to_bits()]
    }
}

macro_rules! half_element {
    ($type:ident, $to_f32:ident, $from_f32:ident, $pair_from_f32:ident) => {
        impl Element for $type {
            const PER_16_BYTES: usize = 8;

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to_f32(self.to_bits())
            }

            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                Self::from_bits($from_f32(value))
            }

            #[inline(always)]
            fn unpack(bytes: [u32; 4], out: &mut [f32; 8]) {
                let mut i = 0;
                while i < 4 {
                    out[2 * i] = $to_f32(bytes[i] as u16);
                    out[2 * i + 1] = $to_f32((bytes[i] >> 16) as u16);
                    i += 1;
                }
            }

            #[inline(always)]
            fn pack(values: &[f32; 8]) -> [u32; 4] {
                let pair = |i: usize| $pair_from_f32(values[i], values[i + 1]);
                [pair(0), pair(2), pair(4), pair(6)]
            }
        }
    };
}

half_element!(bf16, bf16_to_f32, bf16_from_f32, bf16x2_from_f32);
half_element!(f16, f16_to_f32, f16_from_f32, f16x2_from_f32);

/// bfloat16 is the upper half of an f32.
#[inline(always)]
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Round to nearest even in integer arithmetic, which every floor has; [`bf16x2_from_f32`] is faster where it exists.
#[inline(always)]
fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half of the last place that stays, less one, plus that place's own bit: ties go to even, the carry rounds up.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN keeps its sign and is quiet; rounding could turn it into infinity.
    (if value.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

/// `cvt.f32.f16 d, a;`
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    device!({
        let value: f32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.f32.f16 {}, {};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack));
        }
        value
    } else {
        f16::from_bits(bits).to_f32()
    })
}

/// `cvt.rn.f16.f32 d, a;`
#[inline(always)]
fn f16_from_f32(value: f32) -> u16 {
    device!({
        let bits: u16;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rn.f16.f32 {}, {};", out(reg16) bits, in(reg32) value, options(pure, nomem, nostack));
        }
        bits
    } else {
        f16::from_f32(value).to_bits()
    })
}

/// Two bfloat16, `low` in the lower half: `cvt.rn.bf16x2.f32 d, high, low;` from sm_80 on, integer arithmetic below.
#[inline(always)]
pub fn bf16x2_from_f32(low: f32, high: f32) -> u32 {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_80"))]
    {
        let pair: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) pair, in(reg32) high, in(reg32) low,
                options(pure, nomem, nostack));
        }
        pair
    }
    #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_80")))]
    {
        u32::from(bf16_from_f32(low)) | u32::from(bf16_from_f32(high)) << 16
    }
}

/// Two binary16, `low` in the lower half.
#[inline(always)]
pub fn f16x2_from_f32(low: f32, high: f32) -> u32 {
    u32::from(f16_from_f32(low)) | u32::from(f16_from_f32(high)) << 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use abi::DType;
    use proptest::prelude::*;
    use std::format;
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
        round_trip(
            core::array::from_fn(|i| i as f32 + 0.5),
            [0, 1, 2, 3].map(|i| (i as f32 + 0.5).to_bits()),
        );
        assert_eq!(bf16x2_from_f32(1.0, -2.0), 0xc000_3f80);
        assert_eq!(f16x2_from_f32(1.0, -2.0), 0xc000_3c00);
        assert_eq!(<f32 as Element>::from_f32(1.5).to_f32(), 1.5);
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
}
