//! The values of codes, scales and minimums.

use std::sync::LazyLock;

use abi::weight::ScaleType;
use half::f16;

use crate::fp8::F8E4M3;
use crate::simd::{LANES, Lanes};

/// The value of an fp4.
pub(crate) fn e2m1(code: u8) -> f32 {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = VALUES[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

/// The value of an fp8.
fn e4m3(code: u8) -> f32 {
    static VALUES: LazyLock<[f32; 256]> =
        LazyLock::new(|| std::array::from_fn(|code| F8E4M3(code as u8).to_f32()));
    VALUES[usize::from(code)]
}

/// The power of two of an exponent, 2⁻¹²⁷ among them; the last one is NaN.
#[inline(always)]
fn e8m0(exponent: u8) -> f32 {
    let is_special = exponent == 0 || exponent == 0xff;
    f32::from_bits(u32::from(exponent) << 23 | if is_special { 0x0040_0000 } else { 0 })
}

/// The value of a scale's bits; `factor` is its super or global scale.
pub(crate) fn number(kind: ScaleType, bytes: &[u8], factor: f32) -> f32 {
    match kind {
        ScaleType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleType::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16),
        ScaleType::E8m0 => e8m0(bytes[0]),
        ScaleType::E4m3 => e4m3(bytes[0]) * factor,
        ScaleType::U8Super => f32::from(bytes[0]) * factor,
        ScaleType::I8Super => f32::from(bytes[0] as i8) * factor,
    }
}

/// The first sixteen numbers of 16 bits of these bytes.
#[inline(always)]
pub(super) fn words_of(bytes: &[u8]) -> [u16; LANES] {
    std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))
}

/// Sixteen scales without their factors.
#[inline(always)]
pub(super) fn read_numbers<V: Lanes>(kind: ScaleType, bytes: &[u8], numbers: &mut [f32; LANES]) {
    let of_bytes = |bytes: &[u8]| -> [u8; LANES] { std::array::from_fn(|i| bytes[i]) };
    match kind {
        ScaleType::F32 => {
            for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks().0) {
                *number = f32::from_le_bytes(*bytes);
            }
        }
        ScaleType::F16 => V::load_f16(&words_of(bytes)).store(numbers),
        ScaleType::Bf16 => V::load_bf16(&words_of(bytes)).store(numbers),
        ScaleType::E4m3 => V::load_e4m3(&of_bytes(bytes)).store(numbers),
        ScaleType::U8Super => V::load_bytes(&of_bytes(bytes)).store(numbers),
        ScaleType::E8m0 => {
            for (number, byte) in numbers.iter_mut().zip(bytes) {
                *number = e8m0(*byte);
            }
        }
        ScaleType::I8Super => {
            for (number, byte) in numbers.iter_mut().zip(bytes) {
                *number = f32::from(*byte as i8);
            }
        }
    }
}
