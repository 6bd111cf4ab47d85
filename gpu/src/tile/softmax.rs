//! The exponential of a softmax, as exact as the storage type deserves.
//!
//! For the 16-bit types scores come multiplied by log2(e) and the exponential is the hardware's 2^x. That is not enough
//! for f32: the rounded factor shifts all weights the same way, and the approximation alone is several times an f32
//! softmax's rounding error. There scores are natural and e^x is computed to the last bit or so.

use cuda_std::cvt::Element;
use cuda_std::math;

use super::activation::exp_by;

/// Only f32 has four elements in 16 bytes.
const fn is_f32<T: Element>() -> bool {
    T::PER_16_BYTES == 4
}

/// The weight of a score that is `x` ≤ 0 (or NaN) away from the largest: e^x for f32, within 1.5 ulp; 2^x otherwise,
/// within 2 ulp of f32.
#[inline(always)]
pub fn weight<T: Element>(x: f32) -> f32 {
    if !is_f32::<T>() {
        return math::ex2(x);
    }
    exp_by(x, math::ex2)
}

/// What differences of scores are to, the largest being m: −∞ would spoil them.
#[inline(always)]
pub fn base(m: f32) -> f32 {
    if m == f32::NEG_INFINITY { 0.0 } else { m }
}

/// A natural score in the unit of those that [`weight`] takes.
#[inline(always)]
pub fn in_unit<T: Element>(natural: f32) -> f32 {
    if is_f32::<T>() { natural } else { natural * math::LOG2_E }
}

/// One more score, which has no value, among those of which m is the largest and `sum` the sum of the weights; returns
/// what the weights so far are to be multiplied by: 1 if it is −∞.
#[inline(always)]
pub fn join<T: Element>(m: &mut f32, sum: &mut f32, score: f32) -> f32 {
    let largest = math::max(*m, score);
    let base = base(largest);
    let decay = weight::<T>(*m - base);
    *m = largest;
    *sum = math::fma(*sum, decay, weight::<T>(score - base));
    decay
}

/// Two parts of a sum, of which `m` and `other` are the largest scores: what each is multiplied by; `m` becomes the
/// larger.
#[inline(always)]
pub fn meet<T: Element>(m: &mut f32, other: f32) -> [f32; 2] {
    let largest = math::max(*m, other);
    let base = base(largest);
    let factors = [weight::<T>(*m - base), weight::<T>(other - base)];
    *m = largest;
    factors
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
