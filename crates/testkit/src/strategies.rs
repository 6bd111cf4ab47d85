//! What proptest draws: dimensions near tile edges, strides, and kinds of values; and the seeded generator behind them.

use crate::round::{max_finite, min_normal, round_to, ulp};
use abi::DType;
use proptest::prelude::*;
use proptest::sample::select;
use std::collections::BTreeSet;

/// A dimension from 0 to `max`, biased to 0, 1, and the neighbourhood of multiples of the tile sizes in `edges`.
pub fn dims(edges: &[usize], max: usize) -> impl Strategy<Value = usize> + use<> {
    dims_from(0, edges, max)
}

/// [`dims`] of at least `min`, for operators that do not take empty dimensions.
///
/// # Panics
/// When `min > max`.
pub fn dims_from(min: usize, edges: &[usize], max: usize) -> impl Strategy<Value = usize> + use<> {
    assert!(min <= max, "no dimension from {min} to {max}");
    let range = min..=max;
    let mut near = BTreeSet::from([min, max]);
    near.extend([0, 1, 2, 3].into_iter().filter(|dim| range.contains(dim)));
    for &edge in edges {
        for whole in [edge, 2 * edge, 3 * edge] {
            let around = [whole.saturating_sub(1), whole, whole + 1, whole + edge / 2 + 1];
            near.extend(around.into_iter().filter(|dim| range.contains(dim)));
        }
    }
    // `select` shrinks to the front, so to small dimensions.
    let near: Vec<usize> = near.into_iter().collect();
    prop_oneof![3 => select(near), 1 => range]
}

/// Elements by which a stride exceeds the row length: often 0, else odd (no vector access fits) or a multiple of 8 (it
/// still does).
pub fn stride_padding() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0), 1 => (0usize..16).prop_map(|k| 2 * k + 1), 1 => (1usize..5).prop_map(|k| 8 * k)]
}

/// What kind of values fills an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Standard normal.
    Normal,
    /// Large magnitudes: from 2^40, in f16 from 2^10. Half of the seeds end where products still have room in f32, at
    /// 2^60, in f16 at 2^13; the others at the largest number of the type.
    Huge,
    /// Small normal numbers: up to 2^−40, in f16 from 2^−14 to 2^−10. Half of the seeds begin where products are still
    /// normal numbers of f32, at 2^−60; the others at the smallest normal number of the type.
    Tiny,
    /// Subnormal numbers of the type.
    Subnormal,
    /// +0 and −0.
    Zeros,
    /// Each element of one of the kinds above.
    Mixed,
    /// Normal, with at least one infinity and about one in 16.
    WithInf,
    /// Normal, with at least one NaN and about one in 16.
    WithNan,
}

impl Values {
    /// The kinds without infinities and NaN.
    pub const FINITE: [Values; 6] =
        [Values::Normal, Values::Huge, Values::Tiny, Values::Subnormal, Values::Zeros, Values::Mixed];

    /// All kinds.
    pub const ALL: [Values; 8] = [
        Values::Normal,
        Values::Huge,
        Values::Tiny,
        Values::Subnormal,
        Values::Zeros,
        Values::Mixed,
        Values::WithInf,
        Values::WithNan,
    ];
}

/// One of [`Values::FINITE`], half the time [`Values::Normal`], to which it shrinks.
pub fn finite_values() -> impl Strategy<Value = Values> {
    prop_oneof![1 => Just(Values::Normal), 1 => select(&Values::FINITE)]
}

/// One of [`Values::ALL`], half the time [`Values::Normal`], to which it shrinks.
pub fn any_values() -> impl Strategy<Value = Values> {
    prop_oneof![1 => Just(Values::Normal), 1 => select(&Values::ALL)]
}

/// A small deterministic generator (splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014). The same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; seeds need not look random.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// From 0 up to and without `n`; 0 for `n` = 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, variance 1, within ±6: the sum of twelve uniform numbers, which needs no library function whose last bit
    /// differs between machines.
    pub fn normal(&mut self) -> f64 {
        let draws = [self.next_u64(), self.next_u64(), self.next_u64()];
        let sum: u64 = draws.iter().flat_map(|bits| (0..4).map(move |i| (bits >> (16 * i)) & 0xffff)).sum();
        (sum as f64 - 12.0 * 32767.5) / 65536.0
    }

    /// +1 or −1.
    fn sign(&mut self) -> f64 {
        if self.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }
    }
}

/// `n` values of a kind, each exactly representable in `dtype`; the same for the same seed.
///
/// Integer types have their own reading, within what f32 holds exactly (±2^24): normal values are uniform in ±127, huge
/// ones in the upper half of the range, tiny ones −1, 0 or 1; zeros are 0, mixed is any of these, and the other kinds
/// are as normal. Unsigned types take absolute values.
pub fn fill(values: Values, dtype: DType, n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let range = Range::of(dtype, seed);
    let mut draw = |kind| {
        if has_fractions(dtype) {
            float(kind, dtype, range, &mut rng)
        } else {
            integer(kind, dtype, &mut rng)
        }
    };
    let mut out: Vec<f32> = (0..n).map(|_| draw(values)).collect();
    // At least one, wherever it may be.
    let special = match values {
        Values::WithInf => f32::INFINITY,
        Values::WithNan => f32::NAN,
        _ => return out,
    };
    if has_fractions(dtype) && n > 0 && !out.iter().any(|value| !value.is_finite()) {
        out[rng.below(n)] = round_to(dtype, f64::from(special)) as f32;
    }
    out
}

fn has_fractions(dtype: DType) -> bool {
    dtype.is_float() || dtype == DType::F8E4M3
}

/// Powers of two between which the magnitudes of a tensor's huge and tiny values lie.
#[derive(Clone, Copy)]
struct Range {
    huge: [i32; 2],
    tiny: [i32; 2],
}

impl Range {
    fn of(dtype: DType, seed: u64) -> Self {
        // Of its own, or a tensor's other kinds would be others too.
        let is_whole = Rng::new(seed ^ 0x0072_616e_6765).next_u64() & 1 == 1;
        let (huge, tiny, whole) = match dtype {
            DType::F8E4M3 => ([5, 8], [-6, -4], ([5, 9], [-6, -4])),
            DType::F16 => ([10, 13], [-14, -10], ([10, 16], [-14, -10])),
            _ => ([40, 60], [-60, -40], ([40, 128], [-126, -40])),
        };
        if is_whole { Range { huge: whole.0, tiny: whole.1 } } else { Range { huge, tiny } }
    }
}

fn float(kind: Values, dtype: DType, range: Range, rng: &mut Rng) -> f32 {
    let magnitude = |rng: &mut Rng, [low, high]: [i32; 2]| {
        let exponent = low + rng.below((high - low) as usize) as i32;
        let sign = rng.sign();
        sign * (2f64.powi(exponent) * (1.0 + rng.uniform())).min(max_finite(dtype))
    };
    let value = match kind {
        Values::Normal => rng.normal(),
        Values::Huge => magnitude(rng, range.huge),
        Values::Tiny => magnitude(rng, range.tiny),
        Values::Subnormal => {
            let least = ulp(dtype, 0.0);
            let count = (min_normal(dtype) / least) as usize;
            rng.sign() * least * (1 + rng.below(count - 1)) as f64
        }
        Values::Zeros => 0.0 * rng.sign(),
        Values::Mixed => {
            return float(Values::FINITE[rng.below(Values::FINITE.len() - 1)], dtype, range, rng);
        }
        Values::WithInf if rng.below(16) == 0 => rng.sign() * f64::INFINITY,
        Values::WithNan if rng.below(16) == 0 => f64::NAN,
        Values::WithInf | Values::WithNan => rng.normal(),
    };
    round_to(dtype, value) as f32
}

fn integer(kind: Values, dtype: DType, rng: &mut Rng) -> f32 {
    let limit = max_finite(dtype).min(f64::from(1 << 24)) as usize;
    let magnitude = match kind {
        Values::Huge => limit / 2 + rng.below(limit - limit / 2 + 1),
        Values::Tiny => rng.below(2),
        Values::Zeros => 0,
        Values::Mixed => {
            let kinds = [Values::Normal, Values::Huge, Values::Tiny, Values::Zeros];
            return integer(kinds[rng.below(kinds.len())], dtype, rng);
        }
        Values::Normal | Values::Subnormal | Values::WithInf | Values::WithNan => rng.below(128),
    };
    if dtype == DType::U32 || magnitude == 0 {
        magnitude as f32
    } else {
        (magnitude as f64 * rng.sign()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    const DTYPES: [DType; 7] =
        [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8, DType::I32, DType::U32];

    #[test]
    fn values_are_representable_and_of_their_kind() {
        for dtype in DTYPES {
            for kind in Values::ALL {
                let values = fill(kind, dtype, 1000, 7);
                assert_eq!(values.len(), 1000);
                for &value in &values {
                    let wide = f64::from(value);
                    assert!(wide.is_nan() || round_to(dtype, wide) == wide, "{dtype} {kind:?} {value:e}");
                    let limits = match (kind, dtype) {
                        (Values::Zeros, _) => (0.0, 0.0),
                        (Values::Huge, DType::F16) => (1024.0, max_finite(dtype)),
                        (Values::Huge, DType::F32 | DType::BF16) => (2f64.powi(40), max_finite(dtype)),
                        (Values::Tiny, DType::F16) => (min_normal(dtype), 2f64.powi(-10)),
                        (Values::Tiny, DType::F32 | DType::BF16) => (min_normal(dtype), 2f64.powi(-40)),
                        (Values::Subnormal, _) if dtype.is_float() => {
                            (ulp(dtype, 0.0), min_normal(dtype).next_down())
                        }
                        (Values::Huge, DType::F8E4M3) => (32.0, max_finite(dtype)),
                        (Values::Tiny, DType::F8E4M3) => (min_normal(dtype), 0.0625),
                        (Values::Huge, DType::I8) => (63.0, 127.0),
                        _ => continue,
                    };
                    assert!((limits.0..=limits.1).contains(&wide.abs()), "{dtype} {kind:?} {value:e}");
                }
            }
        }
    }

    /// Some seeds leave room for products, others go to the ends of the type.
    #[test]
    fn huge_and_tiny_reach_the_ends() {
        for (dtype, room, small_room) in
            [(DType::F32, 60, -60), (DType::BF16, 60, -60), (DType::F16, 13, -14), (DType::F8E4M3, 8, -6)]
        {
            let ends = |kind, least: bool| -> Vec<f64> {
                let end = |values: Vec<f32>| {
                    let sizes = values.iter().map(|value| f64::from(value.abs()));
                    if least { sizes.fold(f64::INFINITY, f64::min) } else { sizes.fold(0.0, f64::max) }
                };
                (0..40).map(|seed| end(fill(kind, dtype, 500, seed))).collect()
            };
            let (most, least) = (ends(Values::Huge, false), ends(Values::Tiny, true));
            assert!(most.iter().any(|&size| size <= 2f64.powi(room)), "{dtype}");
            assert!(most.iter().any(|&size| size > 0.5 * max_finite(dtype)), "{dtype}");
            assert!(least.iter().any(|&size| size >= 2f64.powi(small_room)), "{dtype}");
            assert!(least.iter().any(|&size| size < 4.0 * min_normal(dtype)), "{dtype}");
        }
    }

    #[test]
    fn special_values_are_always_there() {
        for dtype in DType::FLOATS {
            for seed in 0..50 {
                assert!(fill(Values::WithInf, dtype, 1, seed)[0].is_infinite());
                assert!(fill(Values::WithNan, dtype, 3, seed).iter().any(|value| value.is_nan()));
                assert!(fill(Values::Mixed, dtype, 100, seed).iter().all(|value| value.is_finite()));
            }
            let zeros = fill(Values::Zeros, dtype, 100, 0);
            assert!(zeros.iter().any(|zero| zero.is_sign_negative()));
            assert!(zeros.iter().any(|zero| zero.is_sign_positive()));
            assert!(fill(Values::WithInf, dtype, 0, 0).is_empty());
        }
        assert!(fill(Values::Huge, DType::U32, 100, 0).iter().all(|&value| value >= 8e6));
    }

    #[test]
    fn seeds_decide() {
        let draw = |seed| fill(Values::Normal, DType::F32, 64, seed);
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        // Published first outputs for seed 0.
        let mut rng = Rng::new(0);
        assert_eq!(rng.next_u64(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(rng.next_u64(), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn normal_has_its_moments() {
        let mut rng = Rng::new(1);
        let draws: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
        let moment = |power| draws.iter().map(|x| x.powi(power)).sum::<f64>() / draws.len() as f64;
        assert!(moment(1).abs() < 0.01, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.02, "{}", moment(2));
        assert!(moment(3).abs() < 0.05, "{}", moment(3));
        let uniform: Vec<f64> = (0..1000).map(|_| rng.uniform()).collect();
        assert!(uniform.iter().all(|x| (0.0..1.0).contains(x)));
        assert!((0..1000).all(|_| rng.below(3) < 3));
        assert_eq!(rng.below(0), 0);
    }

    fn samples<S: Strategy>(strategy: S, count: usize) -> Vec<S::Value> {
        let mut runner = TestRunner::deterministic();
        (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
    }

    #[test]
    fn dims_reach_every_edge_and_stay_in_range() {
        let drawn = samples(dims(&[16, 64], 200), 4000);
        for edge in [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 161, 200] {
            assert!(drawn.contains(&edge), "{edge}");
        }
        assert!(drawn.iter().all(|&dim| dim <= 200));
        let odd_tails = drawn.iter().filter(|&&dim| dim > 64 && dim % 2 == 1).count();
        assert!(odd_tails > 200, "{odd_tails}");
        assert!(samples(dims_from(1, &[], 5), 200).iter().all(|dim| (1..=5).contains(dim)));
        assert_eq!(samples(dims(&[32], 0), 3), [0, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "no dimension from 3 to 2")]
    fn empty_range_of_dims() {
        let _ = dims_from(3, &[], 2);
    }

    #[test]
    fn paddings_and_kinds() {
        let paddings = samples(stride_padding(), 500);
        assert!(paddings.contains(&0) && paddings.contains(&1) && paddings.contains(&8));
        let kinds = samples(any_values(), 500);
        assert!(Values::ALL.iter().all(|kind| kinds.contains(kind)));
        let finite = samples(finite_values(), 500);
        assert!(!finite.contains(&Values::WithInf) && !finite.contains(&Values::WithNan));
    }
}
