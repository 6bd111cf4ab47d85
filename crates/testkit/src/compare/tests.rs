use super::*;
use crate::round::round_all;
use crate::strategies::Rng;
use half::{bf16, f16};

/// Sums of products of normal values: reference, naive, and Σ|a·b|.
struct Dots {
    reference: Vec<f64>,
    naive: Vec<f64>,
    terms: Vec<f64>,
    /// Another order of summation, as a kernel has.
    blocked: Vec<f64>,
}

fn dots(dtype: DType, count: usize, len: usize, seed: u64) -> Dots {
    let mut rng = Rng::new(seed);
    let mut out = Dots { reference: vec![], naive: vec![], terms: vec![], blocked: vec![] };
    for _ in 0..count {
        let mut draw = || (0..len).map(|_| round_to(dtype, rng.normal())).collect::<Vec<f64>>();
        let (a, b) = (draw(), draw());
        let products = || a.iter().zip(&b).map(|(a, b)| a * b);
        out.reference.push(products().sum());
        out.terms.push(products().map(f64::abs).sum());
        let naive = products().fold(0f32, |sum, product| sum + product as f32);
        out.naive.push(round_to(dtype, naive.into()));
        let mut lanes = [0f32; 8];
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            lanes[i % 8] = (*a as f32).mul_add(*b as f32, lanes[i % 8]);
        }
        out.blocked.push(round_to(dtype, lanes.iter().sum::<f32>().into()));
    }
    out
}

fn scales<'a>(dots: &'a Dots) -> [Scale<'a>; 2] {
    [Scale::Rows(dots.reference.len()), Scale::Given(&dots.terms)]
}

/// `naive` with its error, or that of a rounding where there is none, made `times` as large.
fn worsened(dtype: DType, reference: &[f64], naive: &[f64], times: f64) -> Vec<f64> {
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        let (count, sum) = values.fold((0, 0.0), |(count, sum), value| (count + 1, sum + value * value));
        (sum / f64::from(count)).sqrt()
    };
    let relative =
        rms(&mut reference.iter().zip(naive).map(|(r, n)| n - r)) / rms(&mut reference.iter().copied());
    let mut rng = Rng::new(99);
    reference
        .iter()
        .map(|r| round_to(dtype, r + times * relative * r.abs().max(0.1) * rng.normal()))
        .collect()
}

/// Two terms cancel whose sum overflows in another order; and a sum that is divided in the end.
#[test]
fn sums_that_overflow_on_the_way() {
    let check = |got: f64, terms: f64, on_the_way: Option<&[f64]>| {
        let (terms, reference) = ([terms], [1e38]);
        let mut tolerance = Tolerance::new(DType::F32, Scale::Given(&terms), 3);
        tolerance.on_the_way = on_the_way.or(tolerance.on_the_way);
        check_within_naive(&[got], &reference, &reference, &tolerance).is_ok()
    };
    for (got, passes) in [(1e38, true), (f64::NAN, true), (f64::NEG_INFINITY, true), (-1e38, false)] {
        assert_eq!(check(got, 5e38, None), passes, "{got}");
    }
    assert!(!check(f64::INFINITY, 3e38, None));
    assert!(check(f64::INFINITY, 1e38, Some(&[4e40])));
    assert!(!check(f64::INFINITY, 1e38, Some(&[2e38])));
    let scale = Tolerance::new(DType::F32, Scale::Element, 3);
    assert!(check_within_naive(&[f64::NAN], &[1e38], &[1e38], &scale).is_err());
    // Behind an activation, what it makes of an infinity and what is added.
    for (got, added, passes) in [(0.0, 0.0, true), (5e15, 5e15, true), (5e15, 0.0, false), (0.0, 5e15, false)]
    {
        let sums = Tolerance { on_the_way: Some(&[4e38]), activated: Some(&[added]), ..scale };
        assert_eq!(check_within_naive(&[got], &[1e38], &[1e38], &sums).is_ok(), passes, "{got} {added}");
    }
    let short = Tolerance { on_the_way: Some(&[]), ..scale };
    assert!(matches!(check_within_naive(&[1.0], &[1.0], &[1.0], &short), Err(Mismatch::Length { .. })));
}

#[test]
fn naive_and_other_orders_pass_and_eight_times_the_error_does_not() {
    for dtype in DType::FLOATS {
        for (count, len) in [(1, 1), (1, 4096), (3, 257), (512, 1), (512, 64), (512, 2048)] {
            for seed in 0..8 {
                let dots = dots(dtype, count, len, seed);
                for scale in scales(&dots) {
                    let tolerance = Tolerance::new(dtype, scale, len);
                    for good in [&dots.naive, &dots.blocked, &round_all(dtype, &dots.reference)] {
                        let result = check_within_naive(good, &dots.reference, &dots.naive, &tolerance);
                        assert!(result.is_ok(), "{dtype} {count}x{len} {scale:?}: {}", result.unwrap_err());
                    }
                    if count >= RMS_FROM {
                        let bad = worsened(dtype, &dots.reference, &dots.naive, 8.0);
                        let result = check_within_naive(&bad, &dots.reference, &dots.naive, &tolerance);
                        assert!(result.is_err(), "{dtype} {count}x{len} seed {seed}: {result:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn one_wrong_element_is_caught_and_located() {
    for dtype in DType::FLOATS {
        let dots = dots(dtype, 300, 100, 5);
        for scale in scales(&dots) {
            let mut got = dots.blocked.clone();
            got[123] += 0.5;
            let tolerance = Tolerance::new(dtype, scale, 100);
            match check_within_naive(&got, &dots.reference, &dots.naive, &tolerance) {
                Err(Mismatch::OutOfBound { count: 1, total: 300, worst, first }) => {
                    assert_eq!((worst.index, first.index), (123, 123));
                    assert!(worst.error > worst.allowed);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// x · sigmoid(x), which loses all relative accuracy in its tail when done naively.
fn silu(values: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let reference = values.iter().map(|x| x / (1.0 + (-x).exp())).collect();
    let naive = values.iter().map(|&x| f64::from(x as f32 / (1.0 + (-x as f32).exp()))).collect();
    (reference, naive)
}

#[test]
fn a_bad_tail_loosens_only_the_tail() {
    let mut rng = Rng::new(1);
    for dtype in DType::FLOATS {
        let mut inputs: Vec<f64> = (0..1000).map(|_| round_to(dtype, rng.normal())).collect();
        inputs.extend([-87.5, -88.5, -89.0, -90.0, -100.0].map(|x| round_to(dtype, x)));
        let (reference, naive) = silu(&inputs);
        let naive = round_all(dtype, &naive);
        let tolerance = Tolerance::new(dtype, Scale::Element, 4);
        assert_within_naive(&naive, &reference, &naive, &tolerance);
        for i in 0..1000 {
            let mut got = naive.clone();
            got[i] = reference[i] + 8.0 * ulp(dtype, reference[i]);
            assert!(check_within_naive(&got, &reference, &naive, &tolerance).is_err(), "{dtype} [{i}]");
        }
    }
}

#[test]
fn an_error_of_few_ulps_everywhere_is_caught_by_the_mean() {
    for dtype in DType::FLOATS {
        let mut rng = Rng::new(2);
        let reference: Vec<f64> = (0..1000).map(|_| 1.0 + rng.uniform()).collect();
        let naive = round_all(dtype, &reference);
        let got: Vec<f64> = reference.iter().map(|value| value + 1.9 * ulp(dtype, *value)).collect();
        let tolerance = Tolerance::new(dtype, Scale::Element, 1);
        let mismatch = check_within_naive(&got, &reference, &naive, &tolerance).unwrap_err();
        assert!(matches!(mismatch, Mismatch::Rms { .. }), "{mismatch}");
        assert!(mismatch.to_string().starts_with("root mean square of the scaled error is "), "{mismatch}");
        let few = RMS_FROM - 1;
        assert!(check_within_naive(&got[..few], &reference[..few], &naive[..few], &tolerance).is_ok());
    }
}

#[test]
fn special_values() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let max = f64::from(f32::MAX);
    let least = f64::from(f32::MIN_POSITIVE);
    // dtype, got, reference, naive, passes
    let cases = [
        (DType::F32, nan, nan, nan, true),
        (DType::F32, 0.0, nan, nan, false),
        (DType::F32, inf, inf, inf, true),
        (DType::F32, -inf, inf, inf, false),
        (DType::F32, max, inf, inf, false),
        (DType::F32, nan, inf, inf, false),
        (DType::F32, nan, 1.0, 1.0, false),
        (DType::F32, inf, 1.0, 1.0, false),
        // Beyond the largest finite number, and around it.
        (DType::F32, inf, 1e39, inf, true),
        (DType::F32, -inf, 1e39, inf, false),
        (DType::F32, max, 1e39, inf, false),
        (DType::F32, inf, max, max, true),
        (DType::F32, inf, max * 0.99, max * 0.99, false),
        (DType::F16, inf, 65504.0, 65504.0, true),
        (DType::F16, inf, 60000.0, 60000.0, false),
        // The naive formula overflowed on the way.
        (DType::F32, nan, 1e20, nan, true),
        (DType::F32, 1e20, 1e20, nan, true),
        (DType::F32, 2e20, 1e20, nan, false),
        // Flushed subnormals.
        (DType::F32, 0.0, least / 2.0, least / 2.0, true),
        (DType::F32, least / 2.0, least / 2.0, least / 2.0, true),
        (DType::F32, -0.0, -least / 2.0, -least / 2.0, true),
        (DType::F32, 0.0, least * 4.0, least * 4.0, false),
        (DType::F32, least, least / 2.0, least / 2.0, false),
        (DType::BF16, 0.0, least / 2.0, least / 2.0, true),
        (DType::F16, 0.0, 1e-5, round_to(DType::F16, 1e-5), false),
        // Signs of zero are equal.
        (DType::F32, -0.0, 0.0, 0.0, true),
        (DType::F32, least, 0.0, 0.0, false),
    ];
    for (dtype, got, reference, naive, passes) in cases {
        let tolerance = Tolerance::new(dtype, Scale::Element, 1);
        let result = check_within_naive(&[got], &[reference], &[naive], &tolerance);
        assert_eq!(result.is_ok(), passes, "{dtype} {got:e} for {reference:e}: {result:?}");
    }
}

/// The naive results of a few elements are exact by luck, or those of many as their inputs are coarse: no sample, and
/// written down often no larger one.
#[test]
fn exact_results_are_no_sample() {
    let (reference, got) = ([1.0, 1.5], [1.0 + 3.5 * 2f64.powi(-23), 1.5]);
    let tolerance = Tolerance::new(DType::F32, Scale::Element, 100);
    for copies in [1, 100] {
        let all = |values: &[f64]| values.repeat(copies);
        assert_within_naive(&all(&got), &all(&reference), &all(&reference), &tolerance);
    }
    let naive: Vec<f64> = (0..64).map(|i| 1.0 + f64::from(i) * 2f64.powi(-7)).collect();
    let plus = |error: f64| naive.iter().map(|value| value + error).collect::<Vec<f64>>();
    let got = plus(3.5 * 2f64.powi(-23));
    assert_within_naive(&got, &naive, &naive, &tolerance);
    assert!(check_within_naive(&got, &plus(2f64.powi(-30)), &naive, &tolerance).is_err());
}

/// Terms that were rounded to bf16 may be half a bf16 ulp off; where there are enough elements the naive error says
/// how much.
#[test]
fn rounded_terms_count_among_few() {
    let tolerance = Tolerance::new(DType::BF16, Scale::Given(&[1.0; 64]), 100);
    let tolerance = Tolerance { ulps: 0.0, on_the_way: None, ..tolerance };
    let rounded = Tolerance { terms: Some(DType::BF16), ..tolerance };
    let reference: Vec<f64> = (0..64).map(|i| f64::from(i) * 2f64.powi(-7)).collect();
    let got = |error: f64| reference.iter().map(|value| value + error).collect::<Vec<_>>();
    let passes = |count: usize, error: f64, tolerance: Tolerance<'_>| {
        let tolerance = Tolerance { scale: Scale::Given(&[1.0; 64][..count]), ..tolerance };
        let (got, reference) = (&got(error)[..count], &reference[..count]);
        let naive: Vec<f64> = reference.iter().map(|value| value + 1e-9).collect();
        check_within_naive(got, reference, &naive, &tolerance).is_ok()
    };
    let half = 2f64.powi(-8);
    assert!(passes(63, half, rounded) && !passes(63, half * 1.01, rounded));
    assert!(!passes(63, half, tolerance) && !passes(64, half, rounded));
}

#[test]
fn infinite_values_leave_the_others_bounded() {
    let reference = [1.0, f64::INFINITY, f64::NAN, 1.0];
    let tolerance = Tolerance::new(DType::F32, Scale::Rows(4), 1);
    assert_within_naive(&reference, &reference, &reference, &tolerance);
    let got = [1.0, f64::INFINITY, f64::NAN, 1.01];
    let mismatch = check_within_naive(&got, &reference, &reference, &tolerance).unwrap_err();
    assert!(matches!(mismatch, Mismatch::OutOfBound { count: 1, .. }), "{mismatch}");
}

#[test]
fn messages() {
    let tolerance = Tolerance::new(DType::BF16, Scale::Element, 1);
    let mismatch = check_within_naive(&[1.0, 3.0], &[1.0, 2.0], &[1.0, 2.0], &tolerance).unwrap_err();
    let element = "[1]: got 3e0 (0x4040), expected 2e0 (0x4000), naive 2e0, error 1.000e0, allowed 3.125e-2";
    assert_eq!(
        mismatch.to_string(),
        format!("1 of 2 elements out of bound; worst {element}; first {element}")
    );
    let short = check_within_naive(&[1.0], &[1.0, 2.0], &[1.0, 2.0], &tolerance).unwrap_err();
    assert_eq!(short.to_string(), "got: 1 elements, expected 2");
    let naive = check_within_naive(&[1.0], &[1.0], &[], &tolerance).unwrap_err();
    assert_eq!(naive.to_string(), "naive: 0 elements, expected 1");
    let rows = Tolerance::new(DType::F32, Scale::Rows(2), 1);
    let rows = check_within_naive(&[1.0; 3], &[1.0; 3], &[1.0; 3], &rows).unwrap_err();
    assert_eq!(rows.to_string(), "reference in whole rows: 3 elements, expected 4");
    let given = Tolerance::new(DType::F32, Scale::Given(&[]), 1);
    let given = check_within_naive(&[1.0], &[1.0], &[1.0], &given).unwrap_err();
    assert_eq!(given.to_string(), "scale: 0 elements, expected 1");
}

#[test]
#[should_panic(expected = "f32 with 2 × naive error + 2 ulps, scale rows of 1, 1 roundings: 1 of 1 elements")]
fn assertion_names_the_rule() {
    assert_within_naive(&[1.5], &[1.0], &[1.0], &Tolerance::new(DType::F32, Scale::Rows(1), 1));
}

#[test]
fn empty_arrays_agree() {
    for scale in [Scale::Element, Scale::Rows(7), Scale::Given(&[])] {
        assert_within_naive(&[], &[], &[], &Tolerance::new(DType::F16, scale, 1));
    }
}

#[test]
fn bits() {
    assert_bits_eq(&[f32::NAN, 0.0], &[f32::from_bits(0xffc0_0001), 0.0]);
    assert_bits_eq(&[f16::NAN], &[f16::from_bits(0x7e01)]);
    assert_bits_eq::<u32>(&[], &[]);
    let mismatch = check_bits_eq(&[1.0f32, 0.0, 2.0], &[1.0, -0.0, 3.0]).unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "2 of 3 elements differ; first at [1]: got 0.0 (0x00000000), expected -0.0 (0x80000000)"
    );
    assert!(check_bits_eq(&[bf16::NAN], &[bf16::ONE]).is_err());
    assert_eq!(check_bits_eq(&[1i8], &[]).unwrap_err().to_string(), "got: 1 elements, expected 0");
}

#[test]
#[should_panic(expected = "1 of 1 elements differ")]
fn bits_assertion() {
    assert_bits_eq(&[1u8], &[2]);
}

#[test]
fn relative_l2_never_accepts_a_nan() {
    assert_eq!(relative_l2(&[3.0f32, 4.0], &[3.0f64, 4.0]), 0.0);
    assert_eq!(relative_l2(&[0.0f32, 5.0], &[0.0f32, 4.0]), 0.25);
    assert_eq!(relative_l2(&[0.0f32], &[0.0f32]), 0.0);
    assert_eq!(relative_l2::<f32, f32>(&[], &[]), 0.0);
    let inf = f32::INFINITY;
    assert_eq!(relative_l2(&[inf, 1.0], &[inf, 1.0]), 0.0);
    assert_eq!(relative_l2(&[1.0f32], &[0.0f32]), f64::INFINITY);
    for (got, want) in [
        (vec![f32::NAN, 1.0], vec![1.0, 1.0]),
        (vec![1.0, 1.0], vec![f32::NAN, 1.0]),
        (vec![f32::NAN], vec![f32::NAN]),
        (vec![1.0, inf], vec![1.0, 2.0]),
        (vec![1.0, 2.0], vec![1.0, inf]),
        (vec![-inf], vec![inf]),
        (vec![1.0], vec![]),
    ] {
        assert_eq!(relative_l2(&got, &want), f64::INFINITY, "{got:?} {want:?}");
    }
}
