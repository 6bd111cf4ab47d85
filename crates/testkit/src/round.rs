//! Rounding f64 values to a storage type, its ulps, and its bytes.
//!
//! The reference works in f64; what a kernel reads and writes is f32, f16, bf16 or an integer. Every value of those
//! types is exact in f64, so tests keep all values as f64 and round with [`round_to`] where a kernel would store.

use abi::DType;
use half::{bf16, f16};

/// A binary floating-point format.
#[derive(Clone, Copy)]
struct Format {
    /// Significant bits, the implicit one included.
    precision: i32,
    /// Exponent of the smallest normal number.
    min_exp: i32,
    /// Exponent of the largest finite number.
    max_exp: i32,
    /// The largest finite number's distance from the next power of two, in its last places.
    unused: i32,
}

impl Format {
    const fn of(dtype: DType) -> Option<Format> {
        let (precision, min_exp, max_exp, unused) = match dtype {
            DType::F32 => (24, -126, 127, 1),
            DType::F16 => (11, -14, 15, 1),
            DType::BF16 => (8, -126, 127, 1),
            // The code beyond is NaN.
            DType::F8E4M3 => (4, -6, 8, 2),
            DType::I8 | DType::I32 | DType::U32 => return None,
        };
        Some(Format { precision, min_exp, max_exp, unused })
    }

    /// The distance between neighbours at an exponent; constant below the smallest normal number.
    fn spacing(self, exponent: i32) -> f64 {
        power_of_two(exponent.max(self.min_exp) - (self.precision - 1))
    }
}

/// 2^exponent, for exponents of normal f64 numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// ⌊log₂|value|⌋; −1023 for zero and f64 subnormals, 1024 for infinities and NaN.
pub(crate) fn exponent_of(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

fn integer_range(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::U32 => (0.0, u32::MAX.into()),
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => {
            unreachable!("{dtype} is not an integer type")
        }
    }
}

/// The value of `dtype` nearest to `value`, ties to even.
///
/// Floats: subnormals are kept, what rounds past the largest finite number becomes an infinity, or that number where
/// there is none (fp8), NaN stays NaN. Integers: saturates, and NaN becomes 0, as the device's saturating conversions
/// do.
pub fn round_to(dtype: DType, value: f64) -> f64 {
    let Some(format) = Format::of(dtype) else {
        let (low, high) = integer_range(dtype);
        return if value.is_nan() { 0.0 } else { value.round_ties_even().clamp(low, high) };
    };
    let largest = max_finite(dtype);
    let overflow = if dtype == DType::F8E4M3 { largest } else { f64::INFINITY };
    if !value.is_finite() {
        return if value.is_nan() { value } else { overflow.copysign(value) };
    }
    // Scaling by a power of two is exact, so this rounds once, unlike a conversion by way of f32.
    let spacing = format.spacing(exponent_of(value));
    let rounded = (value / spacing).round_ties_even() * spacing;
    if rounded.abs() > largest { overflow.copysign(value) } else { rounded }
}

/// [`round_to`] of each value.
pub fn round_all(dtype: DType, values: &[f64]) -> Vec<f64> {
    values.iter().map(|&value| round_to(dtype, value)).collect()
}

/// Distance between neighbouring values of `dtype` in the binade of `value`; 1 for integers.
///
/// Below the smallest normal number this is the smallest subnormal; beyond the largest finite one, the distance there.
pub fn ulp(dtype: DType, value: f64) -> f64 {
    match Format::of(dtype) {
        Some(format) => format.spacing(exponent_of(value).min(format.max_exp)),
        None => 1.0,
    }
}

/// Smallest positive normal number of `dtype`; 1 for integers.
pub fn min_normal(dtype: DType) -> f64 {
    Format::of(dtype).map_or(1.0, |format| power_of_two(format.min_exp))
}

/// Largest finite number of `dtype`.
pub fn max_finite(dtype: DType) -> f64 {
    match Format::of(dtype) {
        Some(format) => {
            power_of_two(format.max_exp)
                * (2.0 - f64::from(format.unused) * power_of_two(1 - format.precision))
        }
        None => integer_range(dtype).1,
    }
}

/// Exact f64 values of stored elements.
pub fn widen<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// The values rounded to `dtype`, as the bytes that a device buffer holds.
pub fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.bytes());
    for &value in values {
        let value = round_to(dtype, value);
        match dtype {
            DType::F32 => bytes.extend((value as f32).to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(value).to_ne_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(value).to_ne_bytes()),
            DType::F8E4M3 => bytes.push(e4m3_code(value)),
            DType::I8 => bytes.extend((value as i8).to_ne_bytes()),
            DType::I32 => bytes.extend((value as i32).to_ne_bytes()),
            DType::U32 => bytes.extend((value as u32).to_ne_bytes()),
        }
    }
    bytes
}

/// Exact f64 values of the elements in `bytes`; a last incomplete element is ignored.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => chunks(bytes).map(|raw| f32::from_ne_bytes(raw).into()).collect(),
        DType::F16 => chunks(bytes).map(|raw| f16::from_ne_bytes(raw).into()).collect(),
        DType::BF16 => chunks(bytes).map(|raw| bf16::from_ne_bytes(raw).into()).collect(),
        DType::F8E4M3 => bytes.iter().map(|&code| e4m3_value(code)).collect(),
        DType::I8 => chunks(bytes).map(|raw| i8::from_ne_bytes(raw).into()).collect(),
        DType::I32 => chunks(bytes).map(|raw| i32::from_ne_bytes(raw).into()).collect(),
        DType::U32 => chunks(bytes).map(|raw| u32::from_ne_bytes(raw).into()).collect(),
    }
}

/// The value of a code of fp8, by its definition.
fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from((code >> 3) & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * power_of_two(-9),
        _ => (8.0 + mantissa) * power_of_two(exponent - 10),
    };
    if code >> 7 == 1 { -magnitude } else { magnitude }
}

/// The code of a value of fp8.
fn e4m3_code(value: f64) -> u8 {
    let sign = u8::from(value.is_sign_negative()) << 7;
    // Magnitudes go up with their codes; NaN is the last.
    let code = (0..0x7f).find(|&code| e4m3_value(code) == value.abs());
    code.map_or(0x7f, |code| sign | code)
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All finite non-negative values of a 16-bit float type, ascending.
    fn finite(dtype: DType) -> Vec<f64> {
        (0..=0x7fffu16).flat_map(|raw| decode(dtype, &raw.to_ne_bytes())).filter(|v| v.is_finite()).collect()
    }

    #[test]
    fn every_16_bit_value_and_every_midpoint() {
        for dtype in [DType::F16, DType::BF16] {
            let values = finite(dtype);
            assert_eq!(*values.last().unwrap(), max_finite(dtype));
            for (i, pair) in values.windows(2).enumerate() {
                let (low, high) = (pair[0], pair[1]);
                let middle = low + (high - low) / 2.0;
                let even = if i % 2 == 0 { low } else { high };
                for sign in [1.0, -1.0] {
                    assert_eq!(round_to(dtype, sign * low), sign * low, "{dtype} {i}");
                    assert_eq!(round_to(dtype, sign * middle), sign * even, "{dtype} {i}");
                    assert_eq!(round_to(dtype, sign * middle.next_down()), sign * low, "{dtype} {i}");
                    assert_eq!(round_to(dtype, sign * middle.next_up()), sign * high, "{dtype} {i}");
                }
                assert_eq!(ulp(dtype, low), high - low, "{dtype} {i}");
            }
        }
    }

    #[test]
    fn fp8_saturates_and_keeps_every_code() {
        let codes: Vec<u8> = (0..=255).collect();
        let values = decode(DType::F8E4M3, &codes);
        assert_eq!((values[0x7e], values[0x38], values[1]), (448.0, 1.0, 2f64.powi(-9)));
        for (&code, &value) in codes.iter().zip(&values) {
            let expected = if code & 0x7f == 0x7f { 0x7f } else { code };
            assert_eq!(encode(DType::F8E4M3, &[value]), [expected]);
        }
        for (low, pair) in values[..0x7f].windows(2).enumerate() {
            let middle = (pair[0] + pair[1]) / 2.0;
            let even = pair[low % 2];
            assert_eq!(round_to(DType::F8E4M3, middle), even);
            assert_eq!(round_to(DType::F8E4M3, -middle.next_up()), -pair[1]);
            assert_eq!(round_to(DType::F8E4M3, middle.next_down()), pair[0]);
        }
        assert_eq!([1e9, f64::INFINITY].map(|value| round_to(DType::F8E4M3, -value)), [-448.0; 2]);
        assert_eq!(max_finite(DType::F8E4M3), 448.0);
    }

    #[test]
    fn overflow_subnormals_and_signs() {
        for dtype in DType::FLOATS {
            let max = max_finite(dtype);
            let half_ulp = ulp(dtype, max) / 2.0;
            assert_eq!(round_to(dtype, (max + half_ulp).next_down()), max);
            assert_eq!(round_to(dtype, max + half_ulp), f64::INFINITY);
            assert_eq!(round_to(dtype, -max - half_ulp), f64::NEG_INFINITY);
            assert_eq!(round_to(dtype, f64::MAX), f64::INFINITY);
            let least = ulp(dtype, 0.0);
            assert_eq!(round_to(dtype, least * 0.5), 0.0);
            assert_eq!(round_to(dtype, least * 0.51), least);
            assert_eq!(round_to(dtype, f64::from_bits(1)), 0.0);
            assert_eq!(round_to(dtype, min_normal(dtype) - least), min_normal(dtype) - least);
            assert!(round_to(dtype, -0.0).is_sign_negative());
            assert!(round_to(dtype, f64::NAN).is_nan());
            assert_eq!(ulp(dtype, f64::INFINITY), ulp(dtype, max));
        }
        assert_eq!(min_normal(DType::F32), f64::from(f32::MIN_POSITIVE));
        assert_eq!(max_finite(DType::F32), f64::from(f32::MAX));
        assert_eq!(ulp(DType::F32, 1.0), f64::from(f32::EPSILON));
        assert_eq!(ulp(DType::F16, 1.0), f64::from(f16::EPSILON));
    }

    #[test]
    fn integers_saturate_and_tie_to_even() {
        let cases = [(0.5, 0.0), (1.5, 2.0), (-2.5, -2.0), (127.6, 127.0), (-1e9, -128.0), (f64::NAN, 0.0)];
        for (value, expected) in cases {
            assert_eq!(round_to(DType::I8, value), expected, "{value}");
        }
        assert_eq!(round_to(DType::U32, -1.0), 0.0);
        assert_eq!(round_to(DType::I32, f64::INFINITY), f64::from(i32::MAX));
        assert_eq!(ulp(DType::I8, 100.0), 1.0);
    }

    #[test]
    fn bytes_round_trip() {
        let values = [0.0, -1.0, 1.0, 3.0, 100.0];
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::I8, DType::I32] {
            let bytes = encode(dtype, &values);
            assert_eq!(bytes.len(), values.len() * dtype.bytes());
            assert_eq!(decode(dtype, &bytes), values, "{dtype}");
        }
        assert_eq!(decode(DType::U32, &encode(DType::U32, &[4e9])), [4e9]);
        assert_eq!(encode(DType::BF16, &[1.0]), 0x3f80u16.to_ne_bytes());
        assert_eq!(widen(&[f16::from_f32(0.5)]), [0.5]);
        assert_eq!(round_all(DType::BF16, &[1.001, 2.0]), [1.0, 2.0]);
    }

    proptest! {
        #![proptest_config(crate::gpu::proptest_config(2000))]

        #[test]
        fn f32_agrees_with_the_language(bits in any::<u64>(), float in any::<f32>(), nudge in -3i64..=3) {
            // Also near f32 values and the midpoints between them, which are 2^28 f64 ulps away.
            let near = f64::from_bits(f64::from(float).to_bits().wrapping_add_signed(nudge << 27));
            for value in [f64::from_bits(bits), near] {
                let (ours, theirs) = (round_to(DType::F32, value), f64::from(value as f32));
                prop_assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{value:e}");
            }
        }
    }
}
