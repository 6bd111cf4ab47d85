//! Activation functions, in f32, for elementwise kernels and matmul epilogues.
//!
//! Each is x times something between 0 and 1 that is computed without cancellation, so small results keep their
//! relative accuracy. All give x for +inf, −0 (the limit) for −inf, and NaN for NaN. Errors below are relative, for
//! results that are normal numbers. `T` is what a result is rounded to in the end.

use abi::ops::matmul::{CURVE_END, Curve};
use cuda_std::cvt::Element;
use cuda_std::math;

/// log2(e) = LOG2_E + LOG2_E_LOW.
const LOG2_E_LOW: f32 = 1.925_963e-8;

/// e^−x for x ≥ 0 as a product of two: error 2^−22, whatever the size of x. A NaN gives 0.
///
/// The second factor is 1, or 2^−64 where e^−x may be subnormal: multiplied last, it leaves a subnormal result its
/// bits. The product with log2(e) is kept in two parts: rounded to one, its error would grow with x.
#[inline(always)]
fn exp_neg(x: f32) -> (f32, f32) {
    // e^−150 is 0 already; an infinity would make a NaN below.
    let x = math::min(x, 150.0);
    let whole = -x * math::LOG2_E;
    let rest = math::fma(-x, math::LOG2_E, -whole);
    let rest = math::fma(-x, LOG2_E_LOW, rest);
    // Exact, since the sum is smaller than `whole` and a multiple of its last place.
    let (shifted, unit) = if whole < -64.0 { (whole + 64.0, f32::from_bits(63 << 23)) } else { (whole, 1.0) };
    let power = math::ex2_subnormal(shifted);
    // 2^rest = 1 + rest · ln 2, since rest is below 2^−16.
    (math::fma(power, rest * core::f32::consts::LN_2, power), unit)
}

/// x · sigmoid(z), for z of the sign of x, as exact as `T` needs it that the result is rounded to.
#[inline(always)]
fn times_sigmoid<T: Element>(x: f32, z: f32) -> f32 {
    if size_of::<T>() == 2 {
        return times_sigmoid_short(x, z);
    }
    let (power, unit) = exp_neg(math::abs(z));
    // sigmoid(z) is 1 / (1 + e^−|z|) for z ≥ 0, and e^−|z| times that below.
    let (numerator, last) = if z < 0.0 { (x * power, unit) } else { (x, 1.0) };
    limit(x, numerator * math::rcp(math::fma(power, unit, 1.0)) * last)
}

/// The same with an error of 2^−16, in half as many instructions: the product with log2(e) is rounded to one, and a
/// subnormal power has few bits, of which no result of 16 bits shows more.
#[inline(always)]
fn times_sigmoid_short(x: f32, z: f32) -> f32 {
    let power = math::ex2_subnormal(-math::abs(z) * math::LOG2_E);
    // −inf would give inf · 0.
    let numerator = if z < 0.0 { math::max(x, f32::MIN) * power } else { x };
    numerator * math::rcp(1.0 + power)
}

/// The value at −inf, where the formula says inf · 0.
#[inline(always)]
fn limit(x: f32, value: f32) -> f32 {
    if x == f32::NEG_INFINITY { -0.0 } else { value }
}

/// SiLU: x · sigmoid(x), error 2^−21, or 2^−16 for a `T` of 16 bits.
#[inline(always)]
pub fn silu<T: Element>(x: f32) -> f32 {
    times_sigmoid::<T>(x, x)
}

/// 1 / (1 + e^−x), error 2^−21, or 2^−16 for a `T` of 16 bits; NaN for NaN.
#[inline(always)]
pub fn sigmoid<T: Element>(x: f32) -> f32 {
    // `exp_neg` takes a NaN for a number.
    if x.is_nan() { x } else { times_sigmoid::<T>(1.0, x) }
}

/// e^x, within 1 ulp whatever the size of x; infinite from 88 on, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp_by(x, math::ex2_subnormal)
}

/// The same with another 2^x, which is asked for whole x only.
#[inline(always)]
pub fn exp_by(x: f32, ex2: impl Fn(f32) -> f32) -> f32 {
    // x = whole · ln(2) + rest with |rest| ≤ ln(2)/2; ln(2) in two parts, the first with so few bits that its product
    // with `whole` is exact. Adding and taking away 1.5 · 2^23 rounds to an integer. Beyond −104 and 88 there is
    // nothing to round.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_145_75;
    const LN_2_LOW: f32 = 1.428_606_8e-6;
    // The Taylor polynomial of e^rest, whose remainder is below 2^-27, times a power of two that `ex2` has exactly.
    const TAYLOR: [f32; 8] = [1.0, 1.0, 0.5, 1.0 / 6.0, 1.0 / 24.0, 1.0 / 120.0, 1.0 / 720.0, 1.0 / 5040.0];
    let scaled = x * math::LOG2_E;
    let (whole, rest) = if x < -104.0 {
        (scaled, 0.0)
    } else if x > 88.0 {
        (f32::INFINITY, 0.0)
    } else {
        let whole = (scaled + ROUND) - ROUND;
        (whole, math::fma(whole, -LN_2_LOW, math::fma(whole, -LN_2_HIGH, x)))
    };
    polynomial(&TAYLOR, rest) * ex2(whole)
}

/// ln(1 + e^x), within 2 ulp, from 20 on x itself; NaN for NaN.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    // ln(1 + y) = 2 artanh(z) with z = y / (2 + y), at most 1/3: the series 2 Σ z^(2i+1) / (2i + 1), to 5e-9 relative.
    const REST: [f32; 7] = [2.0 / 3.0, 2.0 / 5.0, 2.0 / 7.0, 2.0 / 9.0, 2.0 / 11.0, 2.0 / 13.0, 2.0 / 15.0];
    let y = exp(-math::abs(x));
    let divisor = 2.0 + y;
    let z = math::div(y, divisor);
    // What rounding took from the sum and the quotient: the first term is all but a few per cent of the result.
    let lost = (math::fma(-z, divisor, y) - z * (y - (divisor - 2.0))) * 2.0 * math::rcp(divisor);
    let square = z * z;
    let rest = math::fma(z * square, polynomial(&REST, square), lost);
    let log = math::fma(2.0, z, rest);
    let positive = if x > 0.0 { x } else { 0.0 };
    if x > 20.0 { x } else { positive + log }
}

/// (tanh(x) / x − 1) / x² for |x| < 1, by x²: error 2.4e-8. Interpolated at Chebyshev nodes.
#[inline(always)]
pub fn tanh_rest(square: f32) -> f32 {
    const NEAR: [f32; 7] = [
        -0.333_333_3,
        0.133_331_28,
        -0.053_934_79,
        0.021_660_116,
        -0.008_218_922,
        0.002_510_459_4,
        -0.000_420_695_5,
    ];
    polynomial(&NEAR, square)
}

/// tanh(x), within 2 ulp whatever the size of x; NaN for NaN.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let size = math::abs(x);
    let square = x * x;
    let near = math::fma(x * square, tanh_rest(square), x);
    // 1 − 2 / (e^2x + 1): what the approximations err is a quarter of the result at most.
    let far = math::fma(-2.0, math::rcp(math::ex2(size * (2.0 * math::LOG2_E)) + 1.0), 1.0);
    if size < 1.0 { near } else { far.copysign(x) }
}

/// GELU by its approximation x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), error (1 + |z|) · 2^−21 with z twice the
/// argument of tanh, and 2^−16 besides for a `T` of 16 bits.
///
/// (1 + tanh(z/2)) / 2 is sigmoid(z): no tanh, and nothing cancels.
#[inline(always)]
pub fn gelu_tanh<T: Element>(x: f32) -> f32 {
    const LINEAR: f32 = 1.595_769; // 2 √(2/π)
    const CUBIC: f32 = 0.071_354_814; // 0.044715 · 2 √(2/π)
    times_sigmoid::<T>(x, x * math::fma(CUBIC, x * x, LINEAR))
}

/// GELU: x · Φ(x), Φ the normal distribution function x/2 · (1 + erf(x/√2)); error 2^−20.5.
#[inline(always)]
pub fn gelu_erf(x: f32) -> f32 {
    // (Φ(x) − 1/2) / x in x² for |x| < 1.25, error 2.5e-10; interpolated at Chebyshev nodes.
    const NEAR: [f32; 7] = [
        0.398_942_3,
        -0.066_490_375,
        0.009_973_502,
        -0.001_187_115_4,
        0.000_115_039_315,
        -9.062_472e-6,
        4.769_279e-7,
    ];
    // e^(a²) · erfc(a) · (a + K)/K in y = (a − K)/(a + K) for 0 ≤ a ≤ 14.5, error 8.3e-9; interpolated likewise. The
    // map is that of Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x²) erfc x" (1981).
    const K: f32 = 3.6;
    const FAR: [f32; 10] = [
        0.302_530_6,
        -0.262_943_12,
        0.197_690_77,
        -0.127_202_72,
        0.068_661_81,
        -0.029_939_909,
        0.009_718_27,
        -0.001_777_196,
        -0.000_231_694_21,
        0.000_232_713_8,
    ];
    // Beyond, Φ is 0 or 1.
    let size = math::min(math::abs(x), 20.0);
    let square = size * size;
    let near = math::fma(x, polynomial(&NEAR, square), 0.5);
    // e^−(x²/2), with what rounding took from the square.
    let (power, unit) = exp_neg(0.5 * square);
    let power = math::fma(power, -0.5 * math::fma(size, size, -square), power);
    let inverse = math::rcp(math::fma(size, core::f32::consts::FRAC_1_SQRT_2, K));
    let scaled = polynomial(&FAR, math::fma(-2.0 * K, inverse, 1.0));
    // erfc(a) / 2, which is Φ(−|x|).
    let tail = scaled * power * inverse * (0.5 * K);
    let far = if x < 0.0 { tail } else { 1.0 - tail * unit };
    let last = if x < 0.0 && size >= 1.25 { unit } else { 1.0 };
    limit(x, x * if size < 1.25 { near } else { far } * last)
}

/// The activation that a curve describes, where a thread has many of them to compute: 14 instructions. The error is
/// 2^-22 of x, as that of a sum which x is, and not of the result; results below 2^-126 may be 0.
#[inline(always)]
pub fn curve(x: f32, curve: &Curve) -> f32 {
    bent(x, exponent(x, curve))
}

/// x · P(x²): the first half of a curve, which is sums and products alone.
#[inline(always)]
pub fn exponent(x: f32, curve: &Curve) -> f32 {
    x * polynomial(curve, math::min(x * x, CURVE_END))
}

/// x / (1 + 2^exponent): the second half, for which there is another unit.
#[inline(always)]
pub fn bent(x: f32, exponent: f32) -> f32 {
    // −inf would give inf · 0.
    math::max(x, f32::MIN) * math::rcp(1.0 + math::ex2(exponent))
}

/// Horner's rule; the coefficient of x^i is at i.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut value = coefficients[N - 1];
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        value = math::fma(value, x, coefficients[i]);
    }
    value
}
