//! The arithmetic that host and device share: logits as keys, weights, sums of them, and what they are made of.

use super::*;

/// The order of logits as integers: a larger logit has a larger key, equal ones (also −0 and +0) the same; NaN has 0,
/// below that of −∞.
#[inline(always)]
pub const fn key(logit: f32) -> u32 {
    let bits = logit.to_bits();
    if logit.is_nan() {
        0
    } else if bits == 1 << 31 || bits == 0 {
        1 << 31
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// The logit of a key: the inverse of [`key`]; NaN for 0.
#[inline(always)]
pub const fn logit(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// [`weight`] of the largest logit.
pub const WEIGHT_ONE: u64 = 1 << 40;

/// Coefficients of 2^x from degree 7 down to 1: ln(2)^n / n!. Error 6·10^-9 for |x| ≤ ½.
const EXP2: [f32; 7] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    0.240_226_5,
    core::f32::consts::LN_2,
];

/// `(logit − max) · scale`, the power of 2 that a token's probability is of the largest one's. 0 for `max`, infinite or
/// not.
#[inline(always)]
pub const fn exponent(logit: f32, max: f32, scale: f32) -> f32 {
    if logit == max { 0.0 } else { (logit - max) * scale }
}

/// `2^40 · 2^exponent`, relative error about 2^-22 and 2^-40 absolute: the unnormalised probability. 0 for NaN.
#[inline(always)]
pub const fn weight_at(exponent: f32) -> u64 {
    // Also for NaN. Below this the weight is under one unit.
    if !(exponent > -41.0 && exponent <= 0.0) {
        return 0;
    }
    // To the nearest integer; the fraction is exact, in [−½, ½].
    let whole = (exponent - 0.5) as i32;
    let x = exponent - whole as f32;
    let mut power = EXP2[0];
    let mut i = 1;
    while i < EXP2.len() {
        power = power * x + EXP2[i];
        i += 1;
    }
    power = power * x + 1.0;
    // The 24 bits of a value in [0.7, 1.42] as an integer, exactly.
    let mantissa = (power * (1 << 24) as f32) as u32 as u64;
    (mantissa << 16) >> (-whole) as u32
}

/// [`weight_at`] of a logit: one that equals `max` weighs [`WEIGHT_ONE`], infinite or not; NaN weighs 0.
#[inline(always)]
pub const fn weight(logit: f32, max: f32, scale: f32) -> u64 {
    weight_at(exponent(logit, max, scale))
}

/// How far below the largest a token is, in units of 2^-24 of a binary order; for those that have a weight.
#[inline(always)]
pub const fn depth(exponent: f32) -> u32 {
    (-exponent * (1 << 24) as f32) as u32
}

/// `weight · depth / 2^24`, rounded down: `d · 2^-d` is at most 0.54, so that the product stays below 2^64.
#[inline(always)]
pub const fn moment(weight: u64, depth: u32) -> u64 {
    weight.wrapping_mul(depth as u64) >> 24
}

/// The mean depth, `2^24 · moments / weights` rounded down, of sums of [`moment`] and of weights below 2^63.
#[inline(always)]
pub const fn mean(moments: u64, weights: u64) -> u32 {
    // The maximum keeps the division free of a panic path.
    let weights = if weights == 0 { 1 } else { weights };
    let mut mean = moments / weights;
    let mut rest = moments % weights;
    let mut i = 0;
    while i < 24 {
        rest <<= 1;
        mean <<= 1;
        if rest >= weights {
            rest -= weights;
            mean += 1;
        }
        i += 1;
    }
    mean as u32
}

/// How near a depth is to the mean: larger is nearer. With p the probabilities, `|depth − mean|` is `|−log2 p − H|`,
/// where H is their entropy in bits: both are of the largest probability's logarithm, which cancels out.
#[inline(always)]
pub const fn nearness(depth: u32, mean: u32) -> u32 {
    !depth.abs_diff(mean)
}

/// 64 random bits: Philox4x32-10 with the seed as key and the step as counter.
#[inline(always)]
pub const fn draw(seed: u64, step: u64) -> u64 {
    let counter = [step as u32, (step >> 32) as u32, 0, 0];
    let bits = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    bits[0] as u64 | (bits[1] as u64) << 32
}

/// The draw as a point in `0..total`: `floor(draw / 2^64 · total)`.
#[inline(always)]
pub const fn point(draw: u64, total: u64) -> u64 {
    ((draw as u128 * total as u128) >> 64) as u64
}

/// The weight that the kept tokens must reach: `ceil(p · total)`, at least 1, of p in units of 2^-32.
#[inline(always)]
pub const fn nucleus(total: u64, p_q32: u32) -> u64 {
    let weight = ((total as u128 * p_q32 as u128 + u32::MAX as u128) >> 32) as u64;
    if weight == 0 { 1 } else { weight }
}

/// How many tokens of this weight close the gap up to a target: `ceil(gap / weight)`.
#[inline(always)]
pub const fn ties(gap: u64, weight: u64) -> u64 {
    // A weight of 0 closes none; the maximum keeps the division free of a panic path.
    gap.div_ceil(if weight == 0 { 1 } else { weight })
}

/// A number from key and index of a token that ascends with the key and, of equal ones, descends with the index; 0 for
/// NaN.
#[inline(always)]
pub const fn ranked(key: u32, index: u32) -> u64 {
    if key == 0 { 0 } else { (key as u64) << 32 | !index as u64 }
}

/// The index in a number of [`ranked`]; [`NO_TOKEN`] for 0.
#[inline(always)]
pub const fn index_of(ranked: u64) -> u32 {
    !(ranked as u32)
}

/// A logit with what a row's parameters make of it, in this order: its bias is added; if the token occurs in the
/// history (`is_seen`), it is divided by the repetition penalty where it is above 0, and multiplied where not; if it
/// was generated `times` times, `frequency · times` and `presence` are subtracted. Each operation is rounded to f32.
#[inline(always)]
pub const fn edited(logit: f32, bias: f32, is_seen: bool, times: u32, params: &RowParams) -> f32 {
    let mut edited = if bias == 0.0 { logit } else { logit + bias };
    if is_seen {
        edited = if edited > 0.0 { edited / params.repetition } else { edited * params.repetition };
    }
    if times > 0 {
        edited = edited - params.frequency * times as f32 - params.presence;
    }
    edited
}

/// Of a temperature of 1.
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// The natural logarithm of a sum of [`weight`]s over [`WEIGHT_ONE`], which is at least 1: error about 10^-7, and the
/// result's rounding.
#[inline(always)]
pub const fn log_sum(total: u64) -> f32 {
    // At least 2^40; a sum of nothing is no one's, and the maximum keeps the shift in its range.
    let total = if total == 0 { 1 } else { total };
    let mut order = 63 - total.leading_zeros() as i32;
    // In [1, 2], rounded once; then around 1.
    let mut mantissa = (total << (63 - order)) as f32 / (1u64 << 63) as f32;
    if mantissa > core::f32::consts::SQRT_2 {
        mantissa *= 0.5;
        order += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 1.0 / 9.0;
    series = series * square + 1.0 / 7.0;
    series = series * square + 1.0 / 5.0;
    series = series * square + 1.0 / 3.0;
    series = series * square + 1.0;
    (order - 40) as f32 * core::f32::consts::LN_2 + 2.0 * s * series
}

/// The natural logarithm of a token's probability: `(logit − max) − log_sum`; −∞ for NaN.
#[inline(always)]
pub const fn logprob(logit: f32, max: f32, log_sum: f32) -> f32 {
    if logit == max {
        -log_sum
    } else if logit.is_nan() {
        f32::NEG_INFINITY
    } else {
        logit - max - log_sum
    }
}
