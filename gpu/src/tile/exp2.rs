//! Powers of two as exact as the storage type deserves.

use cuda_std::cvt::Element;
use cuda_std::math;

/// 2^x for x ≤ 0 (or NaN): for f32 within 1.5 ulp, for the 16-bit types by the hardware's approximation within 2 ulp of f32.
///
/// The approximation alone is several times the rounding error of an f32 softmax. Here it only makes the integer powers,
/// which it has exactly; the fraction, in [−½, ½], is a Taylor polynomial whose remainder is below 2^-27.
#[inline(always)]
pub fn exp2<T: Element>(x: f32) -> f32 {
    // Only f32 has four elements in 16 bytes.
    if T::PER_16_BYTES != 4 {
        return math::ex2(x);
    }
    // Adding and taking away 1.5 · 2^23 rounds to an integer. Below −150 the result is zero whatever the fraction is.
    const ROUND: f32 = 12_582_912.0;
    let (whole, fraction) = if x < -150.0 {
        (x, 0.0)
    } else {
        let whole = (x + ROUND) - ROUND;
        (whole, x - whole)
    };
    // ln(2)^k / k!
    let mut sum = 1.525_273_4e-5;
    sum = math::fma(sum, fraction, 1.540_353e-4);
    sum = math::fma(sum, fraction, 1.333_355_8e-3);
    sum = math::fma(sum, fraction, 9.618_129e-3);
    sum = math::fma(sum, fraction, 5.550_411e-2);
    sum = math::fma(sum, fraction, 0.240_226_5);
    sum = math::fma(sum, fraction, core::f32::consts::LN_2);
    sum = math::fma(sum, fraction, 1.0);
    sum * math::ex2(whole)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use cuda_std::cvt::bf16;

    use super::exp2;

    #[test]
    fn f32_is_within_one_and_a_half_ulp() {
        for i in 0..200_000u32 {
            let x = -(i as f32) * 5e-4;
            let want = f64::from(x).exp2();
            let error = (f64::from(exp2::<f32>(x)) - want).abs() / want;
            assert!(error <= 1.5 * 2f64.powi(-23), "2^{x}: relative error {error:e}");
        }
    }

    #[test]
    fn ends() {
        assert_eq!(exp2::<f32>(0.0), 1.0);
        assert_eq!(exp2::<f32>(-1.0), 0.5);
        assert_eq!(exp2::<f32>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2::<f32>(-1e30), 0.0);
        assert!(exp2::<f32>(f32::NAN).is_nan());
        assert_eq!(exp2::<bf16>(-3.0), 0.125);
    }
}
