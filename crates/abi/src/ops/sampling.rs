//! Sampling: parameters, entry points, and the arithmetic that host and device share.
//!
//! Probabilities are handled as integers: a token's weight is `2^40 · e^((logit − max) / temperature)`, rounded down,
//! and sums of weights are exact in 64 bits. No result therefore depends on an order of summation, and since
//! [`weight`] uses only exactly rounded f32 operations, every backend chooses the same token, bit for bit.

use crate::DType;
use crate::philox::philox4x32;

mod arithmetic;

pub use arithmetic::*;

/// Sizes of a launch, in elements: of some steps over the rows of a run, or over some of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDims {
    /// Logits of a row.
    pub vocab: u32,
    /// From one row of the logits to the next.
    pub logits_stride: u32,
    /// From one row's [`RowParams`] to the next.
    pub params_stride: u32,
    /// The first row of the launch.
    pub first_row: u32,
    /// The logits' row for the first row of the launch: `first_row`, or 0 where only the launch's rows are there.
    pub first_logits_row: u32,
    /// Blocks that share a row, at most [`MAX_SLICES`].
    pub slices: u32,
    /// Logits of each but the last: a multiple of 8.
    pub slice_len: u32,
    /// The steps that some row of the plan may take: bits of [`step`].
    pub planned: u32,
    /// Of these the steps of the launch: one, or, where a row has one block, all.
    pub launched: u32,
}

const _: () = assert!(size_of::<SamplingDims>() == 36);
impl crate::Params for SamplingDims {}

/// The steps of sampling a token, in their order. Each row takes those that its parameters need.
pub mod step {
    /// The largest logit of each slice.
    pub const LARGEST: u32 = 0;
    /// How many logits have which digit, for each of three digits: finds the key of the `top_k`th largest.
    pub const COUNT: u32 = 1;
    /// What the logits with each digit weigh: finds the key at which the weight reaches `top_p`.
    pub const WEIGH: u32 = 4;
    /// The mean depth of what is kept.
    pub const MEAN: u32 = 7;
    /// What the kept logits with each digit of their nearness weigh: finds how near to the mean the weight reaches
    /// `typical_p`.
    pub const NEAR: u32 = 8;
    /// What is kept of each slice.
    pub const SUM: u32 = 11;
    /// The token.
    pub const CHOOSE: u32 = 12;

    /// A step as a bit of a set.
    #[inline(always)]
    pub const fn bit(step: u32) -> u32 {
        1 << step
    }

    /// The steps of a search by so many digits.
    pub const fn search(first: u32, digits: u32) -> u32 {
        ((1 << digits) - 1) << first
    }

    /// The largest logit alone.
    pub const GREEDY: u32 = bit(LARGEST) | bit(CHOOSE);
    const ALL_DIGITS: u32 = 3;
    /// All steps of each of the searches.
    pub const COUNTS: u32 = search(COUNT, ALL_DIGITS);
    /// As above.
    pub const WEIGHTS: u32 = search(WEIGH, ALL_DIGITS);
    /// As above, with what comes before it.
    pub const TYPICAL: u32 = bit(MEAN) | search(NEAR, ALL_DIGITS);
}

/// What a row is sampled by, as it lies in device memory: [`RowParams::LEN`] words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowParams {
    /// The generator's key.
    pub seed: u64,
    /// The generator's counter.
    pub step: u64,
    /// log2(e) / temperature, finite; 0: the largest logit is wanted.
    pub scale: f32,
    /// Tokens that are kept at most; 0: all.
    pub top_k: u32,
    /// top_p in units of 2^-32; 0: all.
    pub top_p: u32,
    /// min_p in units of 2^-32; 0: all.
    pub min_p: u32,
    /// typical_p in units of 2^-32; 0: all.
    pub typical_p: u32,
    /// Above 0; 1 does nothing.
    pub repetition: f32,
    /// What is subtracted for a token that was generated.
    pub presence: f32,
    /// What is subtracted for each time.
    pub frequency: f32,
    /// Tokens of the history that are the prompt's: the first ones.
    pub prompt_len: u32,
    /// Tokens of the history.
    pub history_len: u32,
    /// Entries of the bias.
    pub num_bias: u32,
    /// 1: the row has a mask.
    pub is_masked: u32,
}

impl RowParams {
    /// Words of a row.
    pub const LEN: usize = 16;

    /// As words.
    pub const fn to_words(&self) -> [u32; Self::LEN] {
        [
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.step as u32,
            (self.step >> 32) as u32,
            self.scale.to_bits(),
            self.top_k,
            self.top_p,
            self.min_p,
            self.typical_p,
            self.repetition.to_bits(),
            self.presence.to_bits(),
            self.frequency.to_bits(),
            self.prompt_len,
            self.history_len,
            self.num_bias,
            self.is_masked,
        ]
    }

    /// From words, whatever they are.
    #[inline(always)]
    pub const fn of_words(words: [u32; Self::LEN]) -> Self {
        RowParams {
            seed: words[0] as u64 | (words[1] as u64) << 32,
            step: words[2] as u64 | (words[3] as u64) << 32,
            scale: f32::from_bits(words[4]),
            top_k: words[5],
            top_p: words[6],
            min_p: words[7],
            typical_p: words[8],
            repetition: f32::from_bits(words[9]),
            presence: f32::from_bits(words[10]),
            frequency: f32::from_bits(words[11]),
            prompt_len: words[12],
            history_len: words[13],
            num_bias: words[14],
            is_masked: words[15],
        }
    }

    /// Whether the row's largest logit is wanted.
    #[inline(always)]
    pub const fn is_greedy(&self) -> bool {
        self.scale == 0.0
    }

    /// Of the planned steps those that the row takes: each step that changes its result.
    #[inline(always)]
    pub const fn steps(&self, planned: u32, vocab: u32) -> u32 {
        let mut steps = step::GREEDY;
        if !self.is_greedy() {
            steps |= step::bit(step::SUM);
            if self.top_k != 0 && self.top_k < vocab {
                steps |= step::COUNTS;
            }
            if self.top_p != 0 {
                steps |= step::WEIGHTS;
            }
            if self.typical_p != 0 {
                steps |= step::TYPICAL;
            }
        }
        steps & planned
    }

    /// The least weight of a token that min_p keeps.
    #[inline(always)]
    pub const fn min_weight(&self) -> u64 {
        (self.min_p as u64) << 8
    }
}

/// What stands for a token where none may be chosen: all logits are NaN, or not allowed.
pub const NO_TOKEN: u32 = u32::MAX;

/// Longest row: sums of weights stay below 2^63.
pub const MAX_VOCAB: u32 = 1 << 23;

/// Threads of a block.
pub const THREADS: u32 = 1024;
/// Most blocks that share a row.
pub const MAX_SLICES: u32 = 128;
/// Bins of the histogram by which thresholds are found: 11 bits of a key at a time, two bins per thread.
pub const BINS: u32 = 2048;
/// Most tokens of a list, on which a block ends the search where one digit has left so few: at most a thread each.
pub const MAX_LISTED: u32 = 512;
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
    /// A u64 per bin, lower half first. Where there is no histogram, the list: an order and a weight, u64s, of each
    /// token.
    pub const HISTOGRAM: u32 = FOUND + 32;
    /// Tokens that a block has put on its list, a u32, and where its part of the row's list begins.
    pub const NUM_GATHERED: u32 = HISTOGRAM + 8 * super::BINS;
    /// These tokens, a u64 each.
    pub const GATHERED: u32 = NUM_GATHERED + 16;
    /// Bytes of a kernel.
    pub const BYTES: u32 = GATHERED + 8 * super::MAX_LISTED;
}

/// What is kept of a row in device memory from one step to the next, in u64s. What a step reads and what it writes are
/// different parts.
pub mod record {
    /// What has been found out: of a row's steps with an even number, then of those with an odd one.
    pub const STATE: u32 = 0;
    /// Numbers of it.
    pub const STATE_LEN: u32 = 8;
    /// Two numbers of each slice, in the same way.
    pub const SLICES: u32 = 2 * STATE_LEN;
    /// Tokens of the list, a u32.
    pub const NUM_LISTED: u32 = SLICES + 2 * 2 * super::MAX_SLICES;
    /// From one row to the next where there are no histograms.
    pub const GREEDY_LEN: u32 = NUM_LISTED + 2;
    /// The list: key and inverted index of each token, in any order.
    pub const LIST: u32 = GREEDY_LEN;
    /// Three histograms: a step reads that of the one before, adds to its own, and clears the next one's.
    pub const HISTOGRAMS: u32 = LIST + super::MAX_LISTED;
    /// And where there are.
    pub const RANDOM_LEN: u32 = HISTOGRAMS + 3 * super::BINS;
}

/// Sizes of a launch that makes the logits of [`edited`] and masked tokens, NaN, in f32.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingEditDims {
    /// Logits of a row.
    pub vocab: u32,
    /// From one row of the logits to the next.
    pub logits_stride: u32,
    /// From one row of the result to the next. Its first row is the launch's.
    pub edited_stride: u32,
    /// From one row's [`RowParams`] to the next.
    pub params_stride: u32,
    /// The first row of the launch.
    pub first_row: u32,
    /// Most tokens of a row's history, …
    pub history: u32,
    /// … and from one row of it to the next.
    pub history_stride: u32,
    /// Most entries of a row's bias, …
    pub bias: u32,
    /// … and from one row to the next, of tokens and of values.
    pub bias_strides: [u32; 2],
    /// From one row of masks to the next; there are masks if `has_masks`.
    pub mask_stride: u32,
    /// 1: there are masks.
    pub has_masks: u32,
}

const _: () = assert!(size_of::<SamplingEditDims>() == 48);
impl crate::Params for SamplingEditDims {}

/// Of the kernels that edit logits.
pub mod edit {
    /// Threads of a block.
    pub const THREADS: u32 = 512;
    /// Logits of a block.
    pub const SLICE: u32 = 4096;

    /// Where things lie in the dynamic shared memory, in bytes.
    pub mod smem {
        /// How often each token of the slice was generated, a u32; the highest bit says that the prompt has it.
        pub const COUNTS: u32 = 0;
        /// What is added to each, an f32.
        pub const BIAS: u32 = COUNTS + 4 * super::SLICE;
        /// Bytes of a kernel.
        pub const BYTES: u32 = BIAS + 4 * super::SLICE;
    }
}

/// Sizes of a launch that makes log-probabilities.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingLogprobsDims {
    /// Logits of a row.
    pub vocab: u32,
    /// From one row of the logits to the next.
    pub logits_stride: u32,
    /// The first row of the launch.
    pub first_row: u32,
    /// Blocks that share a row, at most [`logprobs::MAX_SLICES`].
    pub slices: u32,
    /// Logits of each but the last.
    pub slice_len: u32,
    /// The most probable tokens that are wanted.
    pub top: u32,
    /// From one row of these to the next, of tokens and of their log-probabilities.
    pub top_strides: [u32; 2],
    /// What the launch does: a [`logprobs::Task`].
    pub task: u32,
}

const _: () = assert!(size_of::<SamplingLogprobsDims>() == 36);
impl crate::Params for SamplingLogprobsDims {}

/// Of the kernels that make log-probabilities.
pub mod logprobs {
    /// Threads of a block.
    pub const THREADS: u32 = 1024;
    /// Fewest logits of a block, but for a row's last.
    pub const MIN_SLICE: u32 = 8192;
    /// Most blocks that share a row.
    pub const MAX_SLICES: u32 = 64;
    /// Most tokens of a row that are told with the chosen one.
    pub const MAX_TOP: u32 = 64;
    /// Bytes of shared memory.
    pub const SMEM_BYTES: u32 = 8 * 32;

    /// What a launch does; each needs the one before.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u32)]
    pub enum Task {
        /// The largest logits of each slice, in their order: one at least.
        Top,
        /// What each slice weighs.
        Sum,
        /// The row's largest, and logarithms.
        Merge,
    }

    /// Numbers of a row's record, u64s: the largest of each slice, then what each weighs.
    pub const fn record_len(top: u32) -> u32 {
        MAX_SLICES * (per_slice(top) + 1)
    }

    /// The largest that a slice tells.
    #[inline(always)]
    pub const fn per_slice(top: u32) -> u32 {
        if top == 0 { 1 } else { top }
    }
}

/// How a row is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingAccess {
    /// In pieces of 16 bytes.
    Vector,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// A kernel that samples.
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

/// A kernel that edits logits, or tells log-probabilities: there is one for each type.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct SamplingHelper {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the logits.
    pub dtype: DType,
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

/// As [`sampling_table!`](crate::sampling_table), of the kernels that edit logits.
#[macro_export]
macro_rules! sampling_edit_table {
    ($callback:path) => {
        $callback! {
            sampling_edit_f32__slices__sm61 => f32, F32;
            sampling_edit_f16__slices__sm61 => f16, F16;
            sampling_edit_bf16__slices__sm61 => bf16, BF16;
        }
    };
}

/// As [`sampling_table!`](crate::sampling_table), of the kernels that tell log-probabilities.
#[macro_export]
macro_rules! sampling_logprobs_table {
    ($callback:path) => {
        $callback! {
            sampling_logprobs_f32__slices__sm61 => f32, F32;
            sampling_logprobs_f16__slices__sm61 => f16, F16;
            sampling_logprobs_bf16__slices__sm61 => bf16, BF16;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $access:ident;)*) => {
        /// Every kernel that samples, in order of preference: `select` takes the first that fits.
        pub const VARIANTS: &[SamplingVariant] = &[$(SamplingVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            access: SamplingAccess::$access,
        }),*];
    };
}
sampling_table!(variants);

macro_rules! edit_variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel that edits logits.
        pub const EDIT_VARIANTS: &[SamplingHelper] =
            &[$(SamplingHelper { entry: stringify!($entry), dtype: DType::$dtype }),*];
    };
}
sampling_edit_table!(edit_variants);

macro_rules! logprobs_variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel that tells log-probabilities.
        pub const LOGPROBS_VARIANTS: &[SamplingHelper] =
            &[$(SamplingHelper { entry: stringify!($entry), dtype: DType::$dtype }),*];
    };
}
sampling_logprobs_table!(logprobs_variants);

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
        assert_eq!(nucleus(1 << 62, 1 << 31), 1 << 61);
        assert_eq!(nucleus(10, 1 << 30), 3);
        assert_eq!(nucleus(10, 1), 1);
        assert_eq!(ties(7, 3), 3);
        assert_eq!(ties(6, 3), 2);
        assert_eq!(ties(0, 0), 0);
        let draws = [draw(1, 3), draw(1, 4), draw(2, 3), draw(1, 3 + (1 << 32)), draw(1 + (1 << 32), 3)];
        for (i, a) in draws.iter().enumerate() {
            assert!(!draws[..i].contains(a), "draw {i}");
        }
    }

    #[test]
    fn params_are_words() {
        let mut words = [0; RowParams::LEN];
        let mut i = 0;
        while i < words.len() {
            words[i] = 0x3f80_0000 + i as u32;
            i += 1;
        }
        assert_eq!(RowParams::of_words(words).to_words(), words);
    }

    #[test]
    fn steps_are_those_that_matter() {
        use step::{COUNTS, GREEDY, SUM, TYPICAL, WEIGHTS, bit};
        let none = RowParams::of_words([0; RowParams::LEN]);
        let all = u32::MAX;
        assert_eq!(none.steps(all, 8), GREEDY);
        let random = RowParams { scale: 1.0, ..none };
        assert_eq!(random.steps(all, 8), GREEDY | bit(SUM));
        assert_eq!(RowParams { top_k: 8, ..random }.steps(all, 8), GREEDY | bit(SUM));
        assert_eq!(RowParams { top_k: 7, ..random }.steps(all, 8), GREEDY | bit(SUM) | COUNTS);
        assert_eq!(RowParams { top_p: 1, ..random }.steps(all, 8), GREEDY | bit(SUM) | WEIGHTS);
        let typical = RowParams { typical_p: 1, ..random };
        assert_eq!(typical.steps(all, 8), GREEDY | bit(SUM) | TYPICAL);
        assert_eq!(typical.steps(GREEDY | bit(SUM), 8), GREEDY | bit(SUM));
        assert_eq!(RowParams { top_k: 7, ..none }.steps(all, 8), GREEDY);
    }

    #[test]
    fn depths_and_means() {
        assert_eq!(depth(-0.0), 0);
        assert_eq!(depth(-40.5), 81 << 23);
        assert_eq!(moment(WEIGHT_ONE / 2, 1 << 24), WEIGHT_ONE / 2);
        // The largest product there is: of a depth of log2(e).
        let worst = depth(-core::f32::consts::LOG2_E);
        assert!(weight_at(-core::f32::consts::LOG2_E).checked_mul(u64::from(worst)).is_some());
        assert_eq!(mean(0, 0), 0);
        assert_eq!(mean(3 << 40, 2 << 40), 3 << 23);
        assert_eq!(mean((1 << 62) - 1, 1 << 62), (1 << 24) - 1);
        assert!(nearness(5, 7) == nearness(9, 7) && nearness(5, 7) < nearness(6, 7));
    }

    #[test]
    fn logarithms_of_sums() {
        assert_eq!(log_sum(WEIGHT_ONE), 0.0);
        // e^(ln 2 · n) and e^1.
        for (total, want) in
            [(1u64 << 41, core::f32::consts::LN_2), (1 << 62, 15.249_238), (2_988_782_477_963, 1.0)]
        {
            assert!((log_sum(total) - want).abs() < 2e-7 * (1.0 + want), "{total}: {}", log_sum(total));
        }
        // Both halves of the mantissa, and no step between them.
        let mut last = 0.0;
        let mut total = WEIGHT_ONE;
        while total < 1 << 43 {
            let log = log_sum(total);
            assert!(log >= last, "{total}");
            (last, total) = (log, total + (1 << 34));
        }
        assert_eq!(logprob(f32::INFINITY, f32::INFINITY, 0.5), -0.5);
        assert_eq!(logprob(1.0, f32::INFINITY, 0.5), f32::NEG_INFINITY);
        assert_eq!(logprob(f32::NAN, 3.0, 0.5), f32::NEG_INFINITY);
        assert_eq!(logprob(1.0, 3.0, 0.5), -2.5);
    }

    #[test]
    fn edits_in_their_order() {
        let params = RowParams {
            repetition: 2.0,
            presence: 0.25,
            frequency: 0.5,
            ..RowParams::of_words([0; RowParams::LEN])
        };
        assert_eq!(edited(3.0, 0.0, false, 0, &params), 3.0);
        assert_eq!(edited(3.0, 1.0, true, 0, &params), 2.0);
        assert_eq!(edited(3.0, -4.0, true, 0, &params), -2.0);
        assert_eq!(edited(3.0, 1.0, true, 3, &params), 0.25);
        assert!(edited(f32::NAN, 1.0, true, 3, &params).is_nan());
    }
}
