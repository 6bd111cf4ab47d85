//! Plain matrices as quantised ones, as plain loops: the specification.
//!
//! Each step is one of f32: a scale is rounded before codes are made by it, so what is nearest depends on that.

use abi::weight::{Codes, ScaleType};
use half::{bf16, f16};

use crate::fp8::F8E4M3;
use crate::weight::Scheme;

/// A quantised matrix of `n` rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The code of each element.
    pub codes: Vec<u16>,
    /// For each row, of each group: the value that its codes are multiplied by.
    pub scales: Vec<f32>,
    /// Likewise, what they are counted from; of floats 0.
    pub zeros: Vec<u8>,
}

/// The value of a code, counted from `zero`; NaN for what is none.
pub fn value(codes: Codes, zero: u8, code: u16) -> f64 {
    let sign = if code >> 15 == 1 { -1.0 } else { 1.0 };
    match codes {
        Codes::Int4 | Codes::Int8 => f64::from(i32::from(code) - i32::from(zero)),
        Codes::E2m1 => {
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f64::from(code & 1));
            let magnitude = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1),
            };
            if code & 8 == 0 { magnitude } else { -magnitude }
        }
        Codes::E4m3 => f64::from(F8E4M3(code as u8).to_f32()),
        Codes::E6m9 => match code & 0x7fff {
            0x7fff => f64::NAN,
            0 => 0f64.copysign(sign),
            magnitude => {
                let (exponent, mantissa) = (i32::from(magnitude >> 9), f64::from(magnitude & 511));
                sign * (1.0 + mantissa / 512.0) * 2f64.powi(exponent - 31)
            }
        },
    }
}

/// The code whose value is nearest; of two that of the even integer, or the even code of floats; and of two zeros that
/// of the value's sign.
fn nearest(codes: Codes, zero: u8, wanted: f32) -> u16 {
    // Of 16 bits there are too many to look at all: those between which the value is, of either sign.
    let all = || match codes {
        Codes::E6m9 => {
            let (mut first, mut end) = (0u16, 0x7ffe);
            while first < end {
                let middle = first + (end - first) / 2;
                let is_below = value(codes, zero, middle) < f64::from(wanted).abs();
                if is_below { first = middle + 1 } else { end = middle }
            }
            let near = first.saturating_sub(2)..=(first + 1).min(0x7ffe);
            near.flat_map(|code| [code, code | 0x8000]).chain([0x7ffe, 0xfffe]).collect::<Vec<u16>>()
        }
        _ => (0..1 << codes.bits()).collect(),
    };
    let values = || all().into_iter().map(|code| value(codes, zero, code)).filter(|value| !value.is_nan());
    let (least, most) = (values().fold(0.0, f64::min), values().fold(0.0, f64::max));
    // So far beyond the last code that differences from it and from the one before are alike.
    let within = f64::from(wanted).clamp(least, most);
    let distance = |code: u16| (value(codes, zero, code) - within).abs();
    let is_odd = |code: u16| match codes {
        Codes::Int4 | Codes::Int8 => code.abs_diff(zero.into()) % 2,
        Codes::E2m1 | Codes::E4m3 | Codes::E6m9 => code % 2,
    };
    let other_sign = |code: u16| {
        let value = value(codes, zero, code);
        value == 0.0 && value.is_sign_negative() != wanted.is_sign_negative()
    };
    let there = all().into_iter().filter(|&code| !value(codes, zero, code).is_nan());
    let best = there.min_by(|&a, &b| {
        let by_distance = distance(a).total_cmp(&distance(b));
        by_distance.then(is_odd(a).cmp(&is_odd(b))).then(other_sign(a).cmp(&other_sign(b)))
    });
    best.unwrap_or(0)
}

/// A scale in the scheme's type.
fn rounded(scheme: &Scheme, scale: f32, magnitude: f32, global: f32) -> f32 {
    match scheme.scale {
        ScaleType::F16 => f16::from_f32(scale).to_f32(),
        ScaleType::Bf16 => bf16::from_f32(scale).to_f32(),
        ScaleType::E4m3 => F8E4M3::from_f32(scale / global).to_f32() * global,
        ScaleType::E8m0 => {
            // The largest power of two up to a number, from below.
            let power = |x: f64| (-200..200).take_while(|&exponent| 2f64.powi(exponent) <= x).last();
            let of_codes = power(scheme.codes.largest().into()).unwrap_or(0);
            let exponent = power(magnitude.into()).map_or(-127, |exponent| exponent - of_codes);
            2f64.powi(exponent.max(-127)) as f32
        }
        _ => scale,
    }
}

/// A matrix of rows of `k` elements.
pub fn quantize_weight(matrix: &[f32], k: usize, scheme: &Scheme, global: f32) -> Quantized {
    let group = if scheme.group == 0 { k } else { scheme.group as usize };
    let (n, groups, most) = (matrix.len() / k, k.div_ceil(group), f32::from(scheme.codes.most()));
    let mut quantized = Quantized { codes: vec![0; n * k], scales: Vec::new(), zeros: Vec::new() };
    for row in 0..n {
        for index in 0..groups {
            // All that share the scale: of each row of the block a range.
            let block = row / scheme.rows as usize * scheme.rows as usize;
            let (mut low, mut high) = (0f32, 0f32);
            for row in block..n.min(block + scheme.rows as usize) {
                let elements = &matrix[row * k + index * group..row * k + k.min((index + 1) * group)];
                let mut magnitudes: Vec<f32> = elements.iter().map(|x| x.abs()).collect();
                magnitudes.sort_by(f32::total_cmp);
                let last = magnitudes.len() - 1;
                let covered = magnitudes[((last as f32 * scheme.percentile).round() as usize).min(last)];
                let cut = if scheme.asymmetric { f32::INFINITY } else { covered };
                low = elements.iter().fold(low, |low, x| low.min(x.max(-cut)));
                high = elements.iter().fold(high, |high, x| high.max(x.min(cut)));
            }
            let magnitude = high.max(-low);
            let wanted = match scheme.codes {
                _ if scheme.asymmetric => (high - low) / most,
                // None, unless it needs one.
                Codes::E6m9 if magnitude <= scheme.codes.largest() => 1.0,
                codes => magnitude / codes.largest(),
            };
            let scale = rounded(scheme, wanted, magnitude, global);
            let zero = match scheme.asymmetric {
                true if scale > 0.0 => (-low / scale).round_ties_even().min(most) as u8,
                true => 0,
                false => scheme.codes.zero(),
            };
            for col in index * group..k.min((index + 1) * group) {
                let scaled = if scale > 0.0 { matrix[row * k + col] / scale } else { 0.0 };
                quantized.codes[row * k + col] = nearest(scheme.codes, zero, scaled);
            }
            quantized.scales.push(scale);
            quantized.zeros.push(zero);
        }
    }
    quantized
}
