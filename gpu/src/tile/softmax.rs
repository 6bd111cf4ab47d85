//! The exponential of a softmax, as exact as the storage type deserves.
//!
//! For the 16-bit types scores come multiplied by log2(e) and the exponential is the hardware's 2^x. That is not enough for
//! f32: the rounded factor shifts all weights the same way, and the approximation alone is several times an f32
//! softmax's rounding error. There scores are natural and e^x is computed to the last bit or so.

use cuda_std::cvt::Element;
use cuda_std::math;

use super::activation::exp_by;

/// Only f32 has four elements in 16 bytes.
const fn is_f32<T: Element>() -> bool {
    T::PER_16_BYTES == 4
}

/// The weight of a score that is `x` ≤ 0 (or NaN) away from the largest: e^x for f32, within 1.5 ulp; 2^x otherwise, within
/// 2 ulp of f32.
#[inline(always)]
pub fn weight<T: Element>(x: f32) -> f32 {
    if !is_f32::<T>() {
        return math::ex2(x);
    }
    exp_by(x, math::ex2)
}

/// A natural score in the unit of those that [`weight`] takes.
#[inline(always)]
pub fn in_unit<T: Element>(natural: f32) -> f32 {
    if is_f32::<T>() { natural } else { natural * math::LOG2_E }
}

/// One more score, which has no value, among those of which m is the largest and `sum` the sum of the weights; returns what the
/// weights so far are to be multiplied by: 1 if it is −∞.
#[inline(always)]
pub fn join<T: Element>(m: &mut f32, sum: &mut f32, score: f32) -> f32 {
    let largest = math::max(*m, score);
    let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    let decay = weight::<T>(*m - base);
    *m = largest;
    *sum = math::fma(*sum, decay, weight::<T>(score - base));
    decay
}

/// ln Σexp of natural scores, from the largest score and the sum of the weights; −∞ of no scores.
#[inline(always)]
pub fn log_sum_exp<T: Element>(largest: f32, sum: f32) -> f32 {
    if sum == 0.0 {
        f32::NEG_INFINITY
    } else if is_f32::<T>() {
        math::fma(math::lg2(sum), core::f32::consts::LN_2, largest)
    } else {
        (largest + math::lg2(sum)) * core::f32::consts::LN_2
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use cuda_std::cvt::bf16;

    use super::{join, log_sum_exp, weight};

    #[test]
    fn f32_is_within_one_and_a_half_ulp() {
        for i in 0..200_000u32 {
            let x = -(i as f32) * 4e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(weight::<f32>(x)) - want).abs() / want;
            assert!(error <= 1.5 * 2f64.powi(-23), "e^{x}: relative error {error:e}");
        }
    }

    #[test]
    fn one_more_score() {
        let none = f32::NEG_INFINITY;
        for (m, sum, score, want) in [
            (3.0, 1.5, none, (1.0, 3.0, 1.5)),
            (3.0, 1.5, 1.0, (1.0, 3.0, 1.75)),
            (3.0, 1.5, 5.0, (0.25, 5.0, 1.375)),
            (none, 0.0, -2.0, (0.0, -2.0, 1.0)),
            (none, 0.0, none, (0.0, none, 0.0)),
            (3.0, 1.5, 1e30, (0.0, 1e30, 1.0)),
        ] {
            let (mut m, mut sum) = (m, sum);
            assert_eq!((join::<bf16>(&mut m, &mut sum, score), m, sum), want);
        }
    }

    #[test]
    fn ends() {
        assert_eq!(weight::<f32>(0.0), 1.0);
        assert_eq!(weight::<f32>(f32::NEG_INFINITY), 0.0);
        assert_eq!(weight::<f32>(-1e30), 0.0);
        assert!(weight::<f32>(f32::NAN).is_nan());
        assert_eq!(weight::<bf16>(-3.0), 0.125);
        assert_eq!(log_sum_exp::<f32>(3.0, 0.0), f32::NEG_INFINITY);
        assert!((log_sum_exp::<f32>(3.0, 2.0) - (3.0 + 2f32.ln())).abs() < 1e-6);
        assert!((log_sum_exp::<bf16>(3.0, 2.0) - 4.0 * 2f32.ln()).abs() < 1e-6);
    }
}
