//! Fused and approximate f32 arithmetic, and integer dot products.
//!
//! rustc contracts nothing and rounds `/` and `sqrt` exactly (slow): what a kernel wants faster, it asks for here. The
//! host side computes the exactly rounded result, which lies within the stated error, and flushes subnormals to zeros
//! of their sign where the instruction does (`.ftz`).

#[cfg(not(target_arch = "nvptx64"))]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

macro_rules! unary {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, |$x:ident| $host:expr) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, a;`")]
        #[inline(always)]
        pub fn $name($x: f32) -> f32 {
            device!({
                let value: f32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {}, {};"), out(reg32) value, in(reg32) $x,
                        options(pure, nomem, nostack));
                }
                value
            } else {
                $host
            })
        }
    };
}

unary!(
    /// 2^x, error 2 ulp, subnormal results flushed to zero.
    ex2, "ex2.approx.ftz.f32", |x| flush((x as f64).exp2() as f32));
unary!(
    /// 2^x, error 2 ulp, subnormal results kept.
    ex2_subnormal, "ex2.approx.f32", |x| (x as f64).exp2() as f32);
unary!(
    /// log2(x), absolute error 2^-22 for x in (0.5, 2), relative 2^-22 elsewhere; of a subnormal as of zero, -inf.
    lg2, "lg2.approx.ftz.f32", |x| (flush(x) as f64).log2() as f32);
unary!(
    /// 1/x, error 1 ulp, subnormal arguments and results flushed to zero.
    rcp, "rcp.approx.ftz.f32", |x| flush((1.0 / flush(x) as f64) as f32));
unary!(
    /// 1/sqrt(x), relative error 2^-22.9.
    rsqrt, "rsqrt.approx.f32", |x| (1.0 / (x as f64).sqrt()) as f32);
unary!(
    /// sin(x), x in radians, absolute error 2^-20.5 for |x| up to 2π; beyond it grows (2^-14.7 up to 100π).
    sin, "sin.approx.f32", |x| (x as f64).sin() as f32);
unary!(
    /// cos(x), with the same errors.
    cos, "cos.approx.f32", |x| (x as f64).cos() as f32);
unary!(
    /// tanh(x), relative error 2^-11. Floor sm_80 (sm_75).
    #[cfg(not(lacks_packed_math))]
    tanh, "tanh.approx.f32", |x| (x as f64).tanh() as f32);
unary!(
    /// The nearest integer, ties to even.
    round, "cvt.rni.f32.f32", |x| x.round_ties_even());
unary!(
    /// sqrt(x), exactly rounded.
    sqrt, "sqrt.rn.f32", |x| x.sqrt());
unary!(
    /// |x|.
    abs, "abs.f32", |x| x.abs());

/// a·b + c, rounded once. `fma.rn.f32 d, a, b, c;`
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    device!({
        let value: f32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("fma.rn.f32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack));
        }
        value
    } else {
        a.mul_add(b, c)
    })
}

macro_rules! binary {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, |$a:ident, $b:ident| $host:expr) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, a, b;`")]
        #[inline(always)]
        pub fn $name($a: f32, $b: f32) -> f32 {
            device!({
                let value: f32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {}, {}, {};"), out(reg32) value, in(reg32) $a, in(reg32) $b,
                        options(pure, nomem, nostack));
                }
                value
            } else {
                $host
            })
        }
    };
}

binary!(
    /// The larger; of a number and a NaN, the number; of two zeros, the positive one.
    max, "max.f32", |a, b| if a.is_nan() || a < b || (a == b && a.is_sign_negative()) { b } else { a });
binary!(
    /// The larger; a NaN if one of the two is. From sm_80 on.
    max_or_nan, "max.NaN.f32", |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { max(a, b) });
binary!(
    /// The smaller; of a number and a NaN, the number; of two zeros, the negative one.
    min, "min.f32", |a, b| if a.is_nan() || a > b || (a == b && b.is_sign_negative()) { b } else { a });
binary!(
    /// a/b, exactly rounded.
    div, "div.rn.f32", |a, b| a / b);

/// log2(e): `exp(x) = ex2(x · LOG2_E)`.
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// e^x through [`ex2`], 0 for results below the normal range. The relative error grows with |x|, since log2(e) and its
/// product with x are rounded: 2 ulp + |x|·2^-23.6.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    ex2(x * LOG2_E)
}

/// x·sigmoid(x), finite for every finite x, and 0 for -inf. The relative error is 4 ulp, for negative x with
/// |x|·2^-23.6 more; below -87 the result is 0 or within 2^-119 of it, its limit.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    // sigmoid is flushed to 0 below -87.3 while x stays finite: the product is then 0.
    let sigmoid = rcp(1.0 + exp(-x));
    if x == f32::NEG_INFINITY { 0.0 } else { x * sigmoid }
}

/// `dp4a.s32.s32 d, a, b, c;` c plus the dot product of four signed bytes of a and b, wrapping.
#[inline(always)]
pub fn dp4a(a: u32, b: u32, c: i32) -> i32 {
    device!({
        let value: i32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("dp4a.s32.s32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack));
        }
        value
    } else {
        let products = core::iter::zip(a.to_le_bytes(), b.to_le_bytes());
        products.fold(c, |sum, (x, y)| sum.wrapping_add(i32::from(x as i8) * i32::from(y as i8)))
    })
}

/// The upper 32 bits of the 64-bit product. `mul.hi.u32 d, a, b;`
#[inline(always)]
pub fn mul_hi(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

/// Float to integer, to nearest even, saturating at the ends of i8; NaN gives 0. `cvt.rni.sat.s8.f32`.
#[inline(always)]
pub fn round_i8(x: f32) -> i8 {
    device!({
        let value: i32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rni.sat.s8.f32 {}, {};", out(reg32) value, in(reg32) x,
                options(pure, nomem, nostack));
        }
        value as i8
    } else {
        x.round_ties_even() as i8
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every exponent and both signs, with mantissas at the ends of the binade and between.
    fn sweep() -> impl Iterator<Item = f32> {
        let mantissas = [0u32, 1, 0x1234, 0x35_04f3, 0x40_0000, 0x7f_fffe, 0x7f_ffff];
        (0u32..=0x1ff).flat_map(move |top| mantissas.map(|m| f32::from_bits(top << 23 | m)))
    }

    /// `value` within `relative` of `exact`; where the instruction flushes, zero for what lies below the normal range.
    fn assert_near(value: f32, exact: f64, relative: f64, what: &str) {
        if exact.is_nan() || exact.is_infinite() {
            assert!(value.is_nan() == exact.is_nan(), "{what}: {value:e}, exactly {exact:e}");
            assert!(value.is_nan() || f64::from(value) == exact, "{what}: {value:e}, exactly {exact:e}");
        } else if exact.abs() > f64::from(f32::MAX) * (1.0 - relative) {
            assert!(
                value.abs() >= f32::MAX * 0.999 && (value < 0.0) == (exact < 0.0),
                "{what}: {value:e}, {exact:e}"
            );
        } else if exact.abs() >= f64::from(f32::MIN_POSITIVE) * (1.0 + relative) {
            let error = (f64::from(value) - exact).abs() / exact.abs();
            assert!(error <= relative, "{what}: {value:e}, exactly {exact:e}, error {error:e}");
        } else {
            assert!(
                f64::from(value.abs()) <= f64::from(f32::MIN_POSITIVE) * (1.0 + 2.0 * relative)
                    && !value.is_subnormal(),
                "{what}: {value:e}, exactly {exact:e}"
            );
        }
    }

    fn power(exponent: f64) -> f64 {
        exponent.exp2()
    }

    const ULP: f64 = f32::EPSILON as f64;

    #[test]
    fn unary_functions_are_within_their_errors() {
        for x in sweep() {
            let wide = f64::from(x);
            let normal = if x.is_subnormal() { 0.0f64.copysign(wide) } else { wide };
            assert_near(ex2(x), wide.exp2(), 2.0 * ULP, &std::format!("ex2({x:e})"));
            assert_near(rcp(x), 1.0 / normal, ULP, &std::format!("rcp({x:e})"));
            assert_near(
                exp(x),
                wide.exp(),
                2.0 * ULP + wide.abs().min(150.0) * power(-23.6),
                &std::format!("exp({x:e})"),
            );
            assert_near(rsqrt(x), 1.0 / wide.sqrt(), power(-22.9), &std::format!("rsqrt({x:e})"));
            let log = normal.log2();
            if wide > 0.5 && wide < 2.0 {
                assert!((f64::from(lg2(x)) - log).abs() <= power(-22.0), "lg2({x:e})");
            } else {
                assert_near(lg2(x), log, power(-22.0), &std::format!("lg2({x:e})"));
            }
            if x.is_nan() {
                assert!(tanh(x).is_nan());
            } else {
                let error = (f64::from(tanh(x)) - wide.tanh()).abs();
                assert!(error <= wide.tanh().abs() * power(-11.0), "tanh({x:e})");
            }
            if wide.abs() <= core::f64::consts::TAU {
                assert!((f64::from(sin(x)) - wide.sin()).abs() <= power(-20.5), "sin({x:e})");
                assert!((f64::from(cos(x)) - wide.cos()).abs() <= power(-20.5), "cos({x:e})");
            }
            assert_eq!(round(x).to_bits() & !(1 << 31), x.round_ties_even().to_bits() & !(1 << 31), "{x:e}");
            assert_eq!(sqrt(x).to_bits() & !(1 << 31), x.sqrt().to_bits() & !(1 << 31), "sqrt({x:e})");
            assert_eq!(abs(x).to_bits(), x.to_bits() & !(1 << 31), "abs({x:e})");
        }
    }

    #[test]
    fn flushing_of_subnormals_follows_ftz() {
        let subnormal = f32::from_bits(0x7f_ffff);
        assert_eq!(ex2(-126.0), f32::MIN_POSITIVE);
        assert_eq!(ex2(-126.5).to_bits(), 0);
        assert_eq!(ex2_subnormal(-126.5), (-126.5f64).exp2() as f32);
        assert_eq!(ex2_subnormal(-149.0).to_bits(), 1);
        assert_eq!(ex2_subnormal(-151.0).to_bits(), 0);
        assert_eq!(lg2(subnormal), f32::NEG_INFINITY);
        assert_eq!(lg2(-subnormal), f32::NEG_INFINITY);
        assert_eq!(lg2(f32::MIN_POSITIVE), -126.0);
        assert_eq!(rcp(subnormal), f32::INFINITY);
        assert_eq!(rcp(-subnormal), f32::NEG_INFINITY);
        assert_eq!(rcp(f32::MAX).to_bits(), 0);
        assert_eq!(rcp(f32::MIN).to_bits(), 1 << 31);
        assert_eq!(rcp(f32::MIN_POSITIVE), 126f32.exp2());
        assert_eq!(rsqrt(f32::from_bits(1)), 74.5f64.exp2() as f32);
        assert_eq!(rsqrt(-0.0), f32::NEG_INFINITY);
        assert!(rsqrt(-1.0).is_nan() && lg2(-1.0).is_nan() && sqrt(-1.0).is_nan());
        assert_eq!(sqrt(-0.0).to_bits(), 1 << 31);
    }

    #[test]
    fn exp_and_silu_at_the_ends() {
        assert_eq!((exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (0.0, f32::INFINITY));
        assert_eq!((exp(0.0), exp(-0.0), exp(100.0), exp(-100.0)), (1.0, 1.0, f32::INFINITY, 0.0));
        assert!(exp(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
        assert_eq!((silu(f32::INFINITY), silu(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        for large in [f32::MAX, 1e30, 200.0, 30.0] {
            assert_eq!(silu(large), large);
        }
        for large in [f32::MIN, -1e30, -200.0, -100.0, -89.0] {
            assert_eq!(silu(large), 0.0);
        }
        assert_eq!((silu(0.0).to_bits(), silu(-0.0).to_bits()), (0, 1 << 31));
    }

    #[test]
    fn of_a_number_and_nan_the_number_and_zeros_are_ordered() {
        let quiet = f32::NAN;
        let signalling = f32::from_bits(0x7f80_0001);
        for nan in [quiet, -quiet, signalling, -signalling] {
            for x in [0.0, -0.0, 1.5, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1)] {
                for value in [max(x, nan), max(nan, x), min(x, nan), min(nan, x)] {
                    assert_eq!(value.to_bits(), x.to_bits());
                }
            }
            assert!(max(nan, quiet).is_nan() && min(quiet, nan).is_nan());
        }
        for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
            assert_eq!((max(a, b).to_bits(), min(a, b).to_bits()), (0, 1 << 31));
        }
        assert_eq!((max(-0.0, -0.0).to_bits(), min(0.0, 0.0).to_bits()), (1 << 31, 0));
        assert_eq!(
            (max(-1.0, f32::INFINITY), min(-1.0, f32::NEG_INFINITY)),
            (f32::INFINITY, f32::NEG_INFINITY)
        );
    }

    #[test]
    fn round_i8_ties_saturates_and_drops_nan() {
        for tenth in -1400i32..=1400 {
            let x = tenth as f32 / 10.0;
            assert_eq!(f32::from(round_i8(x)), x.round_ties_even().clamp(-128.0, 127.0), "{x}");
        }
        for (x, expected) in [
            (0.5, 0),
            (1.5, 2),
            (2.5, 2),
            (-0.5, 0),
            (-1.5, -2),
            (-2.5, -2),
            (126.5, 126),
            (127.49, 127),
            (127.5, 127),
            (128.0, 127),
            (-128.5, -128),
            (-129.0, -128),
            (f32::MAX, 127),
            (f32::MIN, -128),
            (f32::INFINITY, 127),
            (f32::NEG_INFINITY, -128),
            (f32::NAN, 0),
            (-f32::NAN, 0),
            (f32::from_bits(1), 0),
        ] {
            assert_eq!(round_i8(x), expected, "{x}");
        }
    }

    #[test]
    fn dp4a_signs_and_wrapping() {
        let bytes = |values: [i8; 4]| u32::from_le_bytes(values.map(|v| v as u8));
        assert_eq!(dp4a(bytes([1, 2, 3, 4]), bytes([5, 6, 7, 8]), 9), 5 + 12 + 21 + 32 + 9);
        assert_eq!(dp4a(bytes([-128; 4]), bytes([-128; 4]), 0), 4 * 16384);
        assert_eq!(dp4a(bytes([-128, 127, -1, 0]), bytes([127, 127, -1, -128]), -1), -16256 + 16129 + 1 - 1);
        assert_eq!(dp4a(bytes([127; 4]), bytes([127; 4]), i32::MAX), i32::MAX.wrapping_add(4 * 16129));
        assert_eq!(dp4a(bytes([-128; 4]), bytes([127; 4]), i32::MIN), i32::MIN.wrapping_sub(4 * 16256));
    }

    proptest! {
        #![proptest_config(testkit::gpu::proptest_config(4000))]

        #[test]
        fn integers_agree_with_wide_arithmetic(a in any::<u32>(), b in any::<u32>(), c in any::<i32>()) {
            let byte = |word: u32, i: u32| i64::from((word >> (8 * i)) as u8 as i8);
            let exact = i64::from(c) + (0..4).map(|i| byte(a, i) * byte(b, i)).sum::<i64>();
            prop_assert_eq!(dp4a(a, b, c), exact as i32);
            prop_assert_eq!(u64::from(mul_hi(a, b)), u64::from(a) * u64::from(b) / (1 << 32));
        }

        #[test]
        fn fma_rounds_once_and_div_exactly(a in -1e4f32..1e4, b in -1e4f32..1e4, c in any::<f32>()) {
            // The product of two f32 is exact in f64.
            let product = f64::from(a) * f64::from(b);
            prop_assert_eq!(fma(a, b, -(product as f32)), (product - f64::from(product as f32)) as f32);
            prop_assert_eq!(fma(a, 1.0, c).to_bits(), (a + c).to_bits());
            prop_assert_eq!(div(a, b).to_bits(), (a / b).to_bits());
        }

        #[test]
        fn exp_and_silu_within_their_errors(x in -87.0f32..88.0) {
            let wide = f64::from(x);
            let growth = wide.abs() * power(-23.6);
            assert_near(exp(x), wide.exp(), 2.0 * ULP + growth, "exp");
            let relative = 4.0 * ULP + if x < 0.0 { growth } else { 0.0 };
            let (value, exact) = (f64::from(silu(x)), wide / (1.0 + (-wide).exp()));
            prop_assert!((value - exact).abs() <= relative * exact.abs(), "silu({}) = {:e}, {:e}", x, value, exact);
        }

        #[test]
        fn silu_dies_out(x in -1e5f32..-87.0) {
            prop_assert!(silu(x).abs() <= power(-119.0) as f32);
        }
    }
}
