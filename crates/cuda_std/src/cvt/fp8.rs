//! The 8-bit formats, and their conversion.

use super::*;

/// 8 bits: sign, 4 of exponent (bias 7), 3 of mantissa. No infinity, one NaN of each sign, at most 448.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// 8 bits: sign, 5 of exponent, 2 of mantissa: the upper half of a binary16. At most 57344, then infinity and NaN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct E5m2(pub u8);

macro_rules! fp8 {
    ($type:ident, $pair_from_f32:ident, $pair_from_f16x2:ident, $pair_to_f16x2:ident, $narrow:ident, $widen_pair:ident,
        $format:literal) => {
        impl $type {
            /// The nearest, ties to even; beyond the largest finite value, that (also for infinity); NaN stays NaN.
            #[inline(always)]
            pub fn from_f32(value: f32) -> Self {
                $type($pair_from_f32(value, 0.0) as u8)
            }

            /// The value, exactly.
            #[inline(always)]
            pub fn to_f32(self) -> f32 {
                f16_to_f32($pair_to_f16x2(u16::from(self.0)) as u16)
            }
        }

        #[doc = concat!("Two ", stringify!($type), ", `low` in the lower byte, rounded as [`", stringify!($type), "::from_f32`].")]
        #[doc = concat!("`cvt.rn.satfinite.", $format, ".f32 d, high, low;` on sm_90a, integer arithmetic below.")]
        #[inline(always)]
        pub fn $pair_from_f32(low: f32, high: f32) -> u16 {
            #[cfg(all(target_arch = "nvptx64", not(lacks_fp8)))]
            {
                let pair: u16;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!("cvt.rn.satfinite.", $format, ".f32 {}, {}, {};"), out(reg16) pair,
                        in(reg32) high, in(reg32) low, options(pure, nomem, nostack));
                }
                pair
            }
            #[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
            {
                u16::from($narrow(low)) | u16::from($narrow(high)) << 8
            }
        }

        #[doc = concat!("The same of two binary16. `cvt.rn.satfinite.", $format, ".f16x2 d, pair;` on sm_90a.")]
        #[inline(always)]
        pub fn $pair_from_f16x2(pair: u32) -> u16 {
            #[cfg(all(target_arch = "nvptx64", not(lacks_fp8)))]
            {
                let narrow: u16;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!("cvt.rn.satfinite.", $format, ".f16x2 {}, {};"), out(reg16) narrow,
                        in(reg32) pair, options(pure, nomem, nostack));
                }
                narrow
            }
            #[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
            {
                let [low, high] = f16x2_to_f32(pair);
                $pair_from_f32(low, high)
            }
        }

        #[doc = concat!("Two ", stringify!($type), " as two binary16, exactly. `cvt.rn.f16x2.", $format, " d, pair;` on sm_90a.")]
        #[inline(always)]
        pub fn $pair_to_f16x2(pair: u16) -> u32 {
            #[cfg(all(target_arch = "nvptx64", not(lacks_fp8)))]
            {
                let wide: u32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!("cvt.rn.f16x2.", $format, " {}, {};"), out(reg32) wide, in(reg16) pair,
                        options(pure, nomem, nostack));
                }
                wide
            }
            #[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
            {
                $widen_pair(pair)
            }
        }
    };
}

/// Bytes `LOW` and `HIGH` of a word, of which each is an e4m3, as two binary16, exactly.
#[inline(always)]
pub fn f16x2_from_e4m3<const LOW: u32, const HIGH: u32>(word: u32) -> u32 {
    #[cfg(all(lacks_fp8, not(lacks_packed_math)))]
    {
        f16x2_from_high_e4m3(prmt(word, 0, 0x0404 | LOW << 4 | HIGH << 12))
    }
    #[cfg(not(all(lacks_fp8, not(lacks_packed_math))))]
    {
        f16x2_from_e4m3x2(match (LOW, HIGH) {
            (0, 1) => word,
            (2, 3) => word >> 16,
            _ => prmt(word, 0, 0x4400 | LOW | HIGH << 4),
        } as u16)
    }
}

/// Bytes 0 and 2 of a word, and bytes 1 and 3, of which each is an e4m3, as two binary16, exactly.
#[inline(always)]
pub fn f16x2s_from_e4m3(word: u32) -> [u32; 2] {
    #[cfg(all(lacks_fp8, not(lacks_packed_math)))]
    {
        [f16x2_from_e4m3::<0, 2>(word), f16x2_from_e4m3::<1, 3>(word)]
    }
    #[cfg(not(all(lacks_fp8, not(lacks_packed_math))))]
    {
        // The conversion takes either half of a register.
        let word = prmt(word, 0, 0x3120);
        [f16x2_from_e4m3::<0, 1>(word), f16x2_from_e4m3::<2, 3>(word)]
    }
}

/// a·b + c in f32, rounded to odd: an inexact result's last bit is 1, so that rounding it once more is as rounding
/// once. The product is exact in f64.
#[cfg(not(target_arch = "nvptx64"))]
fn fma_to_odd(a: f64, b: f64, c: f64) -> f32 {
    let (product, sum) = (a * b, a * b + c);
    let nearest = sum as f32;
    if !nearest.is_finite() {
        return nearest;
    }
    // What the two roundings have lost.
    let high = sum - product;
    let rest = (sum - f64::from(nearest)) + ((product - (sum - high)) + (c - high));
    if rest == 0.0 || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    let bits = nearest.to_bits();
    if nearest == 0.0 {
        f32::from_bits(1).copysign(rest as f32)
    } else if (rest > 0.0) == (nearest > 0.0) {
        f32::from_bits(bits + 1)
    } else {
        f32::from_bits(bits - 1)
    }
}

macro_rules! fma_pair {
    ($name:ident, $type:ident, $format:literal) => {
        #[doc = concat!("`fma.rn.", $format, " d, a, b, c;`")]
        /// a·b + c of either half, rounded once; subnormals are kept, NaNs become the canonical one. Floor sm_80.
        #[cfg(not(lacks_packed_math))]
        #[inline(always)]
        pub fn $name(a: u32, b: u32, c: u32) -> u32 {
            device!({
                let value: u32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!("fma.rn.", $format, " {}, {}, {}, {};"), out(reg32) value, in(reg32) a,
                        in(reg32) b, in(reg32) c, options(pure, nomem, nostack));
                }
                value
            } else {
                let half = |shift: u32| {
                    let [a, b, c] = [a, b, c].map(|pair| f64::from($type::from_bits((pair >> shift) as u16)));
                    let value = $type::from_f32(fma_to_odd(a, b, c));
                    u32::from(if value.is_nan() { 0x7fff } else { value.to_bits() }) << shift
                };
                half(0) | half(16)
            })
        }
    };
}
fma_pair!(bf16x2_fma, bf16, "bf16x2");
fma_pair!(f16x2_fma, f16, "f16x2");

/// Bytes `LOW` and `HIGH` of a word as two bfloat16, exactly.
#[inline(always)]
pub fn bf16x2_from_e4m3<const LOW: u32, const HIGH: u32>(word: u32) -> u32 {
    #[cfg(all(lacks_fp8, not(lacks_packed_math)))]
    {
        bf16x2_from_high_e4m3(prmt(word, 0, 0x0404 | LOW << 4 | HIGH << 12))
    }
    #[cfg(not(all(lacks_fp8, not(lacks_packed_math))))]
    {
        let [low, high] = f16x2_to_f32(f16x2_from_e4m3::<LOW, HIGH>(word));
        bf16x2_from_f32(low, high)
    }
}

fp8!(E4m3, e4m3x2_from_f32, e4m3x2_from_f16x2, f16x2_from_e4m3x2, e4m3_from_f32, e4m3x2_to_f16x2, "e4m3x2");
fp8!(E5m2, e5m2x2_from_f32, e5m2x2_from_f16x2, f16x2_from_e5m2x2, e5m2_from_f32, e5m2x2_to_f16x2, "e5m2x2");

/// The NaN that conversions to binary16 give.
#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
const F16_NAN: u16 = 0x7fff;

#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
#[inline(always)]
fn e4m3_from_f32(value: f32) -> u8 {
    fp8_from_f32::<3, 7, 0x7e>(value)
}

#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
#[inline(always)]
fn e5m2_from_f32(value: f32) -> u8 {
    fp8_from_f32::<2, 15, 0x7b>(value)
}

/// To nearest even, at most `LARGEST`.
#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
#[inline(always)]
fn fp8_from_f32<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32>(value: f32) -> u8 {
    let sign = value.to_bits() >> 31 << 7;
    let bits = value.to_bits() & 0x7fff_ffff;
    let magnitude = f32::from_bits(bits);
    let dropped = 23 - MANTISSA;
    let code = if magnitude.is_nan() {
        return 0x7f;
    } else if bits < (128 - BIAS) << 23 {
        // Below the normal range: adding 2^23 of its last places leaves their number in the sum's mantissa, rounded.
        let shift = f32::from_bits((128 - BIAS + dropped) << 23);
        (magnitude + shift).to_bits() - shift.to_bits()
    } else {
        // Half of the last place that stays, less one, plus that place's own bit: ties go to even, the carry rounds up.
        let rounded = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1);
        ((rounded >> dropped) - ((127 - BIAS) << MANTISSA)).min(LARGEST)
    };
    (sign | code) as u8
}

#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
#[inline(always)]
fn e4m3x2_to_f16x2(pair: u16) -> u32 {
    #[cfg(all(target_arch = "nvptx64", not(lacks_packed_math)))]
    {
        f16x2_from_high_e4m3(prmt(pair.into(), 0, 0x1404))
    }
    #[cfg(not(all(target_arch = "nvptx64", not(lacks_packed_math))))]
    {
        u32::from(e4m3_to_f16(pair as u8)) | u32::from(e4m3_to_f16((pair >> 8) as u8)) << 16
    }
}

/// e4m3 in the upper bytes of both halves of a word, shifted to the place of the same bits in a wider format: values
/// that are too small by a power of two, the scale. Times the limit NaN, which is 480 by its bits, is infinity and 448
/// is not: times 0 that becomes NaN, the others nothing.
#[cfg(all(lacks_fp8, not(lacks_packed_math)))]
macro_rules! from_high_e4m3 {
    ($name:ident, $format:literal, $shift:literal, $mask:literal, $scale:literal, $limit:literal) => {
        #[inline(always)]
        fn $name(word: u32) -> u32 {
            let value: u32;
            // SAFETY: register arithmetic.
            unsafe {
                core::arch::asm!(
                    "{{",
                    ".reg .b32 scaled, large;",
                    concat!("fma.rn.", $format, " scaled, {small}, {scale}, {minus_zero};"),
                    concat!("fma.rn.", $format, " large, scaled, {limit}, {minus_zero};"),
                    concat!("fma.rn.", $format, " {value}, large, {zero}, scaled;"),
                    "}}",
                    value = out(reg32) value,
                    small = in(reg32) word >> $shift & $mask | word & 0x8000_8000,
                    scale = in(reg32) $scale,
                    limit = in(reg32) $limit,
                    zero = in(reg32) 0,
                    minus_zero = in(reg32) 0x8000_8000u32,
                    options(pure, nomem, nostack),
                );
            }
            value
        }
    };
}
#[cfg(all(lacks_fp8, not(lacks_packed_math)))]
from_high_e4m3!(f16x2_from_high_e4m3, "f16x2", 1, 0x3f80_3f80, 0x5c00_5c00, 0x5880_5880);
#[cfg(all(lacks_fp8, not(lacks_packed_math)))]
from_high_e4m3!(bf16x2_from_high_e4m3, "bf16x2", 4, 0x07f0_07f0, 0x7b80_7b80, 0x7b10_7b10);

#[cfg(not(all(target_arch = "nvptx64", not(lacks_packed_math))))]
#[inline(always)]
fn e4m3_to_f16(bits: u8) -> u16 {
    let magnitude = u32::from(bits & 0x7f);
    // The bits read as an f32 with bias 127, subnormals included, are 2^120 too small.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((120 + 127) << 23);
    let wide = f16_from_f32(value) | u16::from(bits & 0x80) << 8;
    if magnitude == 0x7f { F16_NAN } else { wide }
}

#[cfg(not(all(target_arch = "nvptx64", not(lacks_fp8))))]
#[inline(always)]
fn e5m2x2_to_f16x2(pair: u16) -> u32 {
    let wide = |bits: u16| if bits & 0x7f > 0x7c { F16_NAN } else { bits << 8 };
    u32::from(wide(pair & 0xff)) | u32::from(wide(pair >> 8)) << 16
}
