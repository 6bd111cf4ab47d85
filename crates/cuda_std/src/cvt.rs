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
    #[cfg(all(target_arch = "nvptx64", not(lacks_packed_math)))]
    {
        let pair: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) pair, in(reg32) high, in(reg32) low,
                options(pure, nomem, nostack));
        }
        pair
    }
    #[cfg(not(all(target_arch = "nvptx64", not(lacks_packed_math))))]
    {
        u32::from(bf16_from_f32(low)) | u32::from(bf16_from_f32(high)) << 16
    }
}

/// Two binary16, `low` in the lower half: `cvt.rn.f16x2.f32 d, high, low;` from sm_80 on, one by one below.
#[inline(always)]
pub fn f16x2_from_f32(low: f32, high: f32) -> u32 {
    #[cfg(all(target_arch = "nvptx64", not(lacks_packed_math)))]
    {
        let pair: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) pair, in(reg32) high, in(reg32) low,
                options(pure, nomem, nostack));
        }
        pair
    }
    #[cfg(not(all(target_arch = "nvptx64", not(lacks_packed_math))))]
    {
        u32::from(f16_from_f32(low)) | u32::from(f16_from_f32(high)) << 16
    }
}

/// The two halves of a register of binary16.
#[inline(always)]
#[cfg_attr(all(target_arch = "nvptx64", not(lacks_packed_math)), allow(dead_code))]
fn f16x2_to_f32(pair: u32) -> [f32; 2] {
    [f16_to_f32(pair as u16), f16_to_f32((pair >> 16) as u16)]
}

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

/// An f32 rounded to the 10 bits of mantissa of tf32, ties away from zero; the lower 13 bits are zero. A NaN keeps its
/// upper bits: one whose payload is in the lower 13 becomes infinity.
///
/// `cvt.rna.tf32.f32 d, a;` from sm_80 on, integer arithmetic below.
#[inline(always)]
pub fn tf32_from_f32(value: f32) -> u32 {
    #[cfg(all(target_arch = "nvptx64", not(lacks_packed_math)))]
    {
        let bits: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rna.tf32.f32 {}, {};", out(reg32) bits, in(reg32) value, options(pure, nomem, nostack));
        }
        bits
    }
    #[cfg(not(all(target_arch = "nvptx64", not(lacks_packed_math))))]
    {
        let bits = value.to_bits();
        if value.is_finite() { (bits + 0x1000) & !0x1fff } else { bits & !0x1fff }
    }
}

/// `prmt.b32 d, a, b, selector;` Four bytes chosen from the eight of a (0 to 3) and b (4 to 7).
///
/// Nibble i of `selector` says which becomes byte i; its bit 3 asks for that byte's sign bit eight times instead.
#[inline(always)]
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    device!({
        let value: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("prmt.b32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b,
                in(reg32) selector, options(pure, nomem, nostack));
        }
        value
    } else {
        let bytes = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
        u32::from_le_bytes(core::array::from_fn(|i| {
            let nibble = selector >> (4 * i);
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }))
    })
}

/// `lop3.b32 d, a, b, c, TABLE;` Any bitwise function of three: bit `4·a + 2·b + c` of `TABLE` is its value.
///
/// For `f(a, b, c)` the table is `f(0xf0, 0xcc, 0xaa)`: `(a & b) | c` is 0xea.
#[inline(always)]
pub fn lop3<const TABLE: u8>(a: u32, b: u32, c: u32) -> u32 {
    device!({
        let value: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("lop3.b32 {}, {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                const TABLE, options(pure, nomem, nostack));
        }
        value
    } else {
        (0..8u32).filter(|row| TABLE >> row & 1 == 1).fold(0, |value, row| {
            let term = |x: u32, bit: u32| if row >> bit & 1 == 1 { x } else { !x };
            value | term(a, 2) & term(b, 1) & term(c, 0)
        })
    })
}

#[cfg(test)]
mod tests {
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
        round_trip(
            core::array::from_fn(|i| i as f32 + 0.5),
            [0, 1, 2, 3].map(|i| (i as f32 + 0.5).to_bits()),
        );
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
}
