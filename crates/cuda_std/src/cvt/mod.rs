//! Element types and their conversion to f32, in which all arithmetic is done.

mod bits;
mod fp8;

pub use bits::{lop3, prmt};
pub use fp8::*;
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

#[cfg(test)]
mod tests;
