//! Sampling: parameters, entry points, and the arithmetic that host and device share.
//!
//! Probabilities are handled as integers: a token's weight is `2^40 · e^((logit − max) / temperature)`, rounded down,
//! and sums of weights are exact in 64 bits. No result therefore depends on an order of summation, and since
//! [`weight`] uses only exactly rounded f32 operations, every backend chooses the same token, bit for bit.

use crate::DType;
use crate::philox::philox4x32;

/// Sizes and parameters of a launch, in elements: of one walk over the rows of a run, or of some of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDims {
    /// The generator's key.
    pub seed: u64,
    /// Part of the generator's counter, beside the row.
    pub step: u64,
    /// top_p in units of 2^-32, from 1 to 2^32.
    pub top_p_q32: u64,
    /// Logits of a row.
    pub vocab: u32,
    /// From one row of the logits to the next.
    pub logits_stride: u32,
    /// Tokens that are kept at most: from 1 to `vocab`.
    pub top_k: u32,
    /// log2(e) / temperature, finite.
    pub scale: f32,
    /// 1: the largest logit is wanted, and the rest of the above has no meaning.
    pub is_greedy: u32,
    /// The first row of the launch.
    pub first_row: u32,
    /// Blocks that share a row, at most [`MAX_SLICES`].
    pub slices: u32,
    /// Logits of each but the last: a multiple of 8.
    pub slice_len: u32,
    /// How many walks came before, from [`Task::Largest`] on.
    pub walk: u32,
    /// What the walk does: a [`Task`].
    pub task: u32,
    /// Which digit of the keys, where it looks at one.
    pub digit: u32,
    /// What the walk before did, if there was one; where it looked at a digit, at the one before, or the last.
    pub before: u32,
}

const _: () = assert!(size_of::<SamplingDims>() == 72);
impl crate::Params for SamplingDims {}

/// What a walk over a row does. Random sampling is `Largest`, where top_k bounds `Count` for each digit, where top_p does `Weigh` for each digit,
/// `Sum`, `Choose`; greedy sampling `Largest` and, if several blocks share a row, `Choose`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Task {
    /// The largest logit of each slice.
    Largest,
    /// How many logits have which digit.
    Count,
    /// What the logits with each digit weigh.
    Weigh,
    /// What is kept of each slice.
    Sum,
    /// The token.
    Choose,
}

/// Longest row: sums of weights stay below 2^63.
pub const MAX_VOCAB: u32 = 1 << 23;
/// `top_p_q32` of 1: nothing is cut off.
pub const TOP_P_ONE: u64 = 1 << 32;

/// Threads of a block.
pub const THREADS: u32 = 1024;
/// Most blocks that share a row.
pub const MAX_SLICES: u32 = 128;
/// Bins of the histogram by which thresholds are found: 11 bits of a key at a time, two bins per thread.
pub const BINS: u32 = 2048;
/// Lowest bit of one of a key's three digits, the highest first. The last two share a bit.
#[inline(always)]
pub const fn digit_shift(digit: u32) -> u32 {
    match digit {
        0 => 21,
        1 => 10,
        _ => 0,
    }
}

/// Digits of the keys of logits of so many bytes: 16-bit logits are told apart by the first two.
pub const fn digits(dtype_bytes: usize) -> u32 {
    if dtype_bytes == 2 { 2 } else { 3 }
}

/// Where things lie in the dynamic shared memory, in bytes.
pub mod smem {
    /// A u64 per warp.
    pub const PARTIALS: u32 = 0;
    /// What one thread found and all read: four u64.
    pub const FOUND: u32 = PARTIALS + 8 * 32;
    /// A u64 per bin, lower half first.
    pub const HISTOGRAM: u32 = FOUND + 32;
    /// Bytes of a kernel.
    pub const BYTES: u32 = HISTOGRAM + 8 * super::BINS;
}

/// What is kept of a row in device memory from one walk to the next, in u64s. What a walk reads and what it writes are different parts.
pub mod record {
    /// What has been found out: of walks with an even number, then of those with an odd one.
    pub const STATE: u32 = 0;
    /// Numbers of it.
    pub const STATE_LEN: u32 = 8;
    /// Two numbers of each slice, in the same way.
    pub const SLICES: u32 = 2 * STATE_LEN;
    /// Three histograms: a walk reads that of the one before, adds to its own, and clears the next one's.
    pub const HISTOGRAMS: u32 = SLICES + 2 * 2 * super::MAX_SLICES;
    /// From one row to the next where there are no histograms.
    pub const GREEDY_LEN: u32 = HISTOGRAMS;
    /// And where there are.
    pub const RANDOM_LEN: u32 = HISTOGRAMS + 3 * super::BINS;
}

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

/// `2^40 · 2^((logit − max) · scale)`, relative error about 2^-22 and 2^-40 absolute: the unnormalised probability.
///
/// A logit that equals `max` weighs [`WEIGHT_ONE`], infinite or not; NaN weighs 0.
#[inline(always)]
pub const fn weight(logit: f32, max: f32, scale: f32) -> u64 {
    let exponent = if logit == max { 0.0 } else { (logit - max) * scale };
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

/// 64 random bits: Philox4x32-10 with the seed as key and (step, row) as counter.
#[inline(always)]
pub const fn draw(seed: u64, step: u64, row: u32) -> u64 {
    let counter = [step as u32, (step >> 32) as u32, row, 0];
    let bits = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    bits[0] as u64 | (bits[1] as u64) << 32
}

/// The draw as a point in `0..total`: `floor(draw / 2^64 · total)`.
#[inline(always)]
pub const fn point(draw: u64, total: u64) -> u64 {
    ((draw as u128 * total as u128) >> 64) as u64
}

/// The weight that the kept tokens must reach: `ceil(top_p · total)`, at least 1.
#[inline(always)]
pub const fn nucleus(total: u64, top_p_q32: u64) -> u64 {
    let weight = ((total as u128 * top_p_q32 as u128 + (TOP_P_ONE - 1) as u128) >> 32) as u64;
    if weight == 0 { 1 } else { weight }
}

/// How many tokens of this weight close the gap up to a target: `ceil(gap / weight)`.
#[inline(always)]
pub const fn ties(gap: u64, weight: u64) -> u64 {
    // A weight of 0 closes none; the maximum keeps the division free of a panic path.
    gap.div_ceil(if weight == 0 { 1 } else { weight })
}

/// How a row is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingAccess {
    /// In pieces of 16 bytes.
    Vector,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct SamplingVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the logits.
    pub dtype: DType,
    /// How a row is read.
    pub access: SamplingAccess,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! sampling_table {
    ($callback:path) => {
        $callback! {
            sampling_f32__vector__sm61 => f32, F32, Vector;
            sampling_f32__scalar__sm61 => f32, F32, Scalar;
            sampling_f16__vector__sm61 => f16, F16, Vector;
            sampling_f16__scalar__sm61 => f16, F16, Scalar;
            sampling_bf16__vector__sm61 => bf16, BF16, Vector;
            sampling_bf16__scalar__sm61 => bf16, BF16, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $access:ident;)*) => {
        /// Every kernel of the operator, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[SamplingVariant] = &[$(SamplingVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            access: SamplingAccess::$access,
        }),*];
    };
}
sampling_table!(variants);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_logits() {
        let ascending =
            [f32::NEG_INFINITY, f32::MIN, -1.5, -1.0, -1e-45, 0.0, 1e-45, 1.0, 1.5, f32::MAX, f32::INFINITY];
        for pair in ascending.windows(2) {
            assert!(key(pair[0]) < key(pair[1]), "{pair:?}");
        }
        for value in ascending {
            assert_eq!(logit(key(value)), value);
        }
        assert_eq!(key(-0.0), key(0.0));
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
            assert_eq!(key(nan), 0);
        }
        assert!(logit(0).is_nan());
    }

    #[test]
    fn weights_are_near_the_exponential() {
        assert_eq!(weight(3.0, 3.0, 1e38), WEIGHT_ONE);
        assert_eq!(weight(f32::INFINITY, f32::INFINITY, 1.0), WEIGHT_ONE);
        assert_eq!(weight(3.0, f32::INFINITY, 1.0), 0);
        assert_eq!(weight(f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0), WEIGHT_ONE);
        assert_eq!(weight(f32::NAN, 3.0, 1.0), 0);
        assert_eq!(weight(-f32::MAX, f32::MAX, f32::MAX), 0);
        // Their difference is beyond f32.
        assert_eq!(weight(-f32::MAX, f32::MAX, 1e-38), 0);
        assert_eq!(weight(-1.0, 0.0, 1.0), WEIGHT_ONE / 2);
        assert_eq!(weight(-40.0, 0.0, 1.0), 1);
        // 2^(−i/16) in steps whose sixteenth power is exactly ½: no library function is needed to check them.
        let mut exponent = 0.0f32;
        while exponent > -20.0 {
            let (whole, part) = (weight(exponent, 0.0, 1.0), weight(exponent - 0.0625, 0.0, 1.0));
            // 2^(−1/16), from the root of the root of the root of the root of a half.
            let ratio = part as f64 / whole as f64;
            assert!(
                (ratio - 0.957_603_280_698_573_6).abs() < 1e-6 + 4.0 / whole as f64,
                "{exponent}: {ratio}"
            );
            exponent -= 0.0625;
        }
    }

    #[test]
    fn points_and_targets() {
        assert_eq!(point(0, 10), 0);
        assert_eq!(point(u64::MAX, 10), 9);
        assert_eq!(point(1 << 63, 1 << 62), 1 << 61);
        assert_eq!(nucleus(1 << 62, TOP_P_ONE), 1 << 62);
        assert_eq!(nucleus(10, TOP_P_ONE / 4), 3);
        assert_eq!(nucleus(10, 1), 1);
        assert_eq!(ties(7, 3), 3);
        assert_eq!(ties(6, 3), 2);
        assert_eq!(ties(0, 0), 0);
        let draws = [draw(1, 2, 3), draw(1, 2, 4), draw(1, 3, 3), draw(2, 2, 3), draw(1, 2 + (1 << 32), 3)];
        for (i, a) in draws.iter().enumerate() {
            assert!(!draws[..i].contains(a), "draw {i}");
        }
    }
}
