//! Equalities and error bounds, with messages that say where and by how much.
//!
//! # The bound
//!
//! The specification of an operator is its formula in f64 ([`check_within_naive`]'s `reference`). The yardstick is the
//! same formula as plain loops with every stored value rounded to the storage type and f32 accumulation (`naive`). A
//! result passes if it errs at most twice as much as the yardstick, plus 2 ulps of the storage type.
//!
//! One element's naive error is no measure: in a sum it may be zero by luck. So errors are compared among elements of
//! like magnitude. With `m[i]` the magnitude that [`Scale`] gives element `i`, never below the smallest normal number:
//!
//! ```text
//! e[i]     = |naive[i] − reference[i]| / m[i]
//! E[i]     = m[i] · max( e[j] for all j whose m[j] is in the binade of m[i] or a neighbouring one )
//! bound[i] = 2 · E[i] + 2 · ulp(reference[i])
//! ```
//!
//! Where fewer than [`SAMPLE`] elements of like magnitude err at all, their largest error may be small by luck still:
//! zero even, where inputs are so coarse that the naive formula's sums are exact and those of another order are not. So
//! the maximum then includes `2⁻²⁴ · √roundings`, the error to be expected of that many f32 roundings with random signs
//! (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019). In f16 and bf16 it is far below
//! an ulp. The same where results are many, but their errors come from few roundings that they share
//! ([`Tolerance::independent`]). Where the terms of a sum are rounded to the storage type themselves, as attention's
//! weights are for tensor cores, the naive formula does not do so; the maximum then includes half of the most that
//! comes of it, `½ · 2⁻ᵖ` with p bits of precision.
//!
//! From [`RMS_FROM`] elements on whose errors are independent, the root mean square over all elements is bounded too,
//! which catches a result that is a little wrong everywhere:
//!
//! ```text
//! rms(|got − reference| / m) ≤ 2 · rms(e) + ½ · rms(ulp(reference) / m)
//! ```
//!
//! Relative to `m` every element has the same weight, so one huge value does not hide the others.
//!
//! Special values:
//! - Where the reference is NaN or infinite the result must be NaN or that infinity.
//! - Where the reference is finite, an infinity of its sign passes if `|reference| + bound` rounds to infinity in the
//!   storage type, and a NaN or infinity passes if the naive result overflowed to just that on the way.
//! - Where the sizes of a sum's terms add up to more than f32 holds ([`Tolerance::on_the_way`]), the order of the terms
//!   decides whether partial sums overflow, and to what: any infinity and NaN passes, and behind an activation
//!   the zero that it makes of one, with what is added to it ([`Tolerance::activated`]). Another finite
//!   result is held to the bound as ever.
//! - In f32 and bf16 a zero passes for a subnormal (`|reference| − bound` below the smallest normal number), since
//!   kernels may be built to flush. f16 subnormals are normal numbers in f32 arithmetic and are never flushed.

use crate::element::{Element, show};
use crate::round::{encode, exponent_of, min_normal, round_to, ulp};
use abi::DType;
use std::collections::BTreeSet;
use std::fmt;

/// Number of elements of like magnitude whose naive results err from which the largest of these errors is taken as it
/// is. The same result for the same reference again is no second one.
pub const SAMPLE: usize = 64;

/// Number of elements from which the root mean square is checked: below, one element decides it.
pub const RMS_FROM: usize = 256;

/// The magnitude relative to which the error of an element is measured.
#[derive(Clone, Copy, Debug)]
pub enum Scale<'a> {
    /// The reference value itself: operators without cancellation, mostly elementwise ones. Not for sums, whose error
    /// does not shrink with the result.
    Element,
    /// The larger of the reference value and the root mean square of its row of this length: sums over inputs of about
    /// equal size, where a small result is the difference of large terms. A row of a few elements may be small as a
    /// whole by cancellation and then fails now and then in f32: where rows can be that short, use [`Scale::Given`].
    Rows(usize),
    /// The formula with all terms taken absolute, as Σ|a·b| for Σa·b: the sharpest choice for sums. Never less than the
    /// reference value; a non-finite entry counts as 0.
    Given(&'a [f64]),
}

/// How far a result may be from the reference; the module's text has the formula.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance<'a> {
    /// The type in which the result is stored.
    pub dtype: DType,
    /// What errors are relative to.
    pub scale: Scale<'a>,
    /// f32 roundings in the longest chain of the formula: terms of a sum, steps of an elementwise expression.
    pub roundings: usize,
    /// How many of the errors are independent of each other, where results share some of theirs; by default all.
    pub independent: usize,
    /// The type, if it is not f32, that a factor of a sum's terms is rounded to on the way.
    pub terms: Option<DType>,
    /// If the formula has sums in f32: for each element the largest that the sizes of one's terms add up to. By default
    /// those of [`Scale::Given`].
    pub on_the_way: Option<&'a [f64]>,
    /// If an activation comes behind the sums, what is added to its results (zeros for nothing): it makes a zero of an
    /// infinity, so the sum of that zero and this passes where a sum may overflow.
    pub activated: Option<&'a [f64]>,
    /// Multiple of the naive error. Other than 2 is an exception to be explained where it stands.
    pub factor: f64,
    /// Multiple of the ulp. Other than 2 is an exception to be explained where it stands.
    pub ulps: f64,
}

impl<'a> Tolerance<'a> {
    /// The project's bound: twice the naive error and 2 ulps.
    pub fn new(dtype: DType, scale: Scale<'a>, roundings: usize) -> Self {
        let on_the_way = if let Scale::Given(terms) = scale { Some(terms) } else { None };
        Tolerance {
            dtype,
            scale,
            roundings,
            independent: usize::MAX,
            terms: None,
            on_the_way,
            activated: None,
            factor: 2.0,
            ulps: 2.0,
        }
    }
}

/// How close a passing result came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Largest error as a fraction of its bound; 0 when there are no elements.
    pub worst_ratio: f64,
    /// The element with that error.
    pub worst_index: usize,
    /// Root mean square of the scaled errors as a fraction of its bound; 0 below [`RMS_FROM`] elements.
    pub rms_ratio: f64,
}

/// One element that failed.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// Its index.
    pub index: usize,
    /// The result.
    pub got: f64,
    /// The reference.
    pub expected: f64,
    /// The naive result.
    pub naive: f64,
    /// |got − expected|.
    pub error: f64,
    /// The bound.
    pub allowed: f64,
    dtype: DType,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = |value: f64| -> String {
            let bytes = encode(self.dtype, &[value]);
            let digits = |byte: &u8| format!("{byte:02x}");
            if cfg!(target_endian = "little") {
                bytes.iter().rev().map(digits).collect()
            } else {
                bytes.iter().map(digits).collect()
            }
        };
        write!(
            f,
            "[{}]: got {:e} (0x{}), expected {:e} (0x{}), naive {:e}, error {:.3e}, allowed {:.3e}",
            self.index,
            self.got,
            bits(self.got),
            self.expected,
            bits(self.expected),
            self.naive,
            self.error,
            self.allowed
        )
    }
}

/// Why two arrays do not agree.
#[derive(Debug, thiserror::Error)]
pub enum Mismatch {
    /// The arrays have different lengths, or do not fit the scale.
    #[error("{what}: {got} elements, expected {expected}")]
    Length {
        /// Which array.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length that fits.
        expected: usize,
    },
    /// Elements differ in their bits.
    #[error("{count} of {total} elements differ; first at [{index}]: got {got}, expected {expected}")]
    Bits {
        /// How many differ.
        count: usize,
        /// How many there are.
        total: usize,
        /// The first that differs.
        index: usize,
        /// Its value and bits.
        got: String,
        /// The expected value and bits.
        expected: String,
    },
    /// Elements are out of bound.
    #[error("{count} of {total} elements out of bound; worst {worst}; first {first}")]
    OutOfBound {
        /// How many are.
        count: usize,
        /// How many there are.
        total: usize,
        /// The one with the largest ratio of error to bound.
        worst: Box<Failure>,
        /// The one with the smallest index.
        first: Box<Failure>,
    },
    /// Every element is in bound but all together err too much.
    #[error("root mean square of the scaled error is {got:.3e}, allowed {allowed:.3e} (naive {naive:.3e})")]
    Rms {
        /// Of the result.
        got: f64,
        /// The bound.
        allowed: f64,
        /// Of the naive result.
        naive: f64,
    },
}

/// Checks that two arrays have the same bits; any NaN equals any NaN.
pub fn check_bits_eq<T: Element>(got: &[T], want: &[T]) -> Result<(), Mismatch> {
    same_length("got", got.len(), want.len())?;
    let differs = |i: &usize| got[*i].bits() != want[*i].bits() && !(got[*i].is_nan() && want[*i].is_nan());
    let mut differing = (0..want.len()).filter(differs);
    match differing.next() {
        None => Ok(()),
        Some(index) => Err(Mismatch::Bits {
            count: 1 + differing.count(),
            total: want.len(),
            index,
            got: show(got[index]),
            expected: show(want[index]),
        }),
    }
}

/// [`check_bits_eq`] as an assertion: for copies, gathers and integer results.
#[track_caller]
pub fn assert_bits_eq<T: Element>(got: &[T], want: &[T]) {
    if let Err(mismatch) = check_bits_eq(got, want) {
        panic!("{mismatch}");
    }
}

fn same_length(what: &'static str, got: usize, expected: usize) -> Result<(), Mismatch> {
    if got == expected { Ok(()) } else { Err(Mismatch::Length { what, got, expected }) }
}

/// The magnitudes `m` of the module's text.
fn magnitudes(reference: &[f64], tolerance: &Tolerance) -> Result<Vec<f64>, Mismatch> {
    let least = min_normal(tolerance.dtype);
    let finite = |value: f64| if value.is_finite() { value.abs() } else { 0.0 };
    let own = |value: &f64| finite(*value).max(least);
    Ok(match tolerance.scale {
        Scale::Element => reference.iter().map(own).collect(),
        Scale::Given(terms) => {
            same_length("scale", terms.len(), reference.len())?;
            reference.iter().zip(terms).map(|(value, &term)| own(value).max(finite(term))).collect()
        }
        Scale::Rows(len) => {
            if len == 0 || !reference.len().is_multiple_of(len) {
                let expected = reference.len().next_multiple_of(len.max(1));
                return Err(Mismatch::Length {
                    what: "reference in whole rows",
                    got: reference.len(),
                    expected,
                });
            }
            let row_scale = |row: &[f64]| {
                let squares: f64 = row.iter().map(|&value| finite(value).powi(2)).sum();
                (squares / len as f64).sqrt()
            };
            reference
                .chunks(len)
                .flat_map(|row| {
                    let scale = row_scale(row);
                    row.iter().map(move |value| own(value).max(scale))
                })
                .collect()
        }
    })
}

/// Checks a result against the f64 reference, with the error of the naive formula as yardstick.
///
/// All values are exact f64 copies of what is stored: see the module's text for what is compared.
///
/// # Errors
/// [`Mismatch::Length`] when the arrays do not fit each other, [`Mismatch::OutOfBound`] or [`Mismatch::Rms`] when the
/// result is worse than allowed.
pub fn check_within_naive(
    got: &[f64],
    reference: &[f64],
    naive: &[f64],
    tolerance: &Tolerance,
) -> Result<Agreement, Mismatch> {
    same_length("got", got.len(), reference.len())?;
    same_length("naive", naive.len(), reference.len())?;
    let &Tolerance { dtype, roundings, independent, terms, on_the_way, activated, factor, ulps, .. } =
        tolerance;
    let magnitude = magnitudes(reference, tolerance)?;
    if let Some(sums) = on_the_way {
        same_length("on_the_way", sums.len(), reference.len())?;
    }
    if let Some(added) = activated {
        same_length("activated", added.len(), reference.len())?;
    }
    let of_terms = terms.map_or(0.0, |terms| ulp(terms, 1.0) / 4.0);
    let chance = (2f64.powi(-24) * (roundings as f64).sqrt()).max(of_terms);

    // Largest scaled naive error per binade; exponents of finite f64 run from −1023 to 1023, one spare on either side.
    let bin = |m: f64| (exponent_of(m) + 1024) as usize;
    let mut largest = vec![(BTreeSet::new(), 0f64); 2049];
    for ((&reference, &naive), &m) in reference.iter().zip(naive).zip(&magnitude) {
        if reference.is_finite() && naive.is_finite() {
            let (sample, error) = &mut largest[bin(m)];
            if naive != reference && sample.len() < SAMPLE {
                sample.insert((reference.to_bits(), naive.to_bits()));
            }
            *error = error.max((naive - reference).abs() / m);
        }
    }

    let mut agreement = Agreement { worst_ratio: 0.0, worst_index: 0, rms_ratio: 0.0 };
    let mut failures = 0;
    let mut first = None;
    let mut worst: Option<(f64, Failure)> = None;
    let (mut count, mut sum_got, mut sum_naive, mut sum_ulp) = (0, 0.0, 0.0, 0.0);
    for (index, &m) in magnitude.iter().enumerate() {
        let (got, expected, naive) = (got[index], reference[index], naive[index]);
        let alike = &largest[bin(m) - 1..=bin(m) + 1];
        let sample: usize = alike.iter().map(|(sample, _)| sample.len()).sum();
        let least = if sample.min(independent) < SAMPLE { chance } else { 0.0 };
        let naive_error = alike.iter().fold(least, |most, (_, error)| most.max(*error));
        let allowed = factor * naive_error * m + ulps * ulp(dtype, expected);
        let error = if same_kind(got, expected) { 0.0 } else { (got - expected).abs() };
        let adds_too_much = on_the_way.is_some_and(|sums| sums[index] > f64::from(f32::MAX));
        let is_added = |added: &[f64]| (got - added[index]).abs() <= ulps * ulp(dtype, added[index]);
        let passes = if adds_too_much && (!got.is_finite() || activated.is_some_and(is_added)) {
            true
        } else if !expected.is_finite() {
            same_kind(got, expected)
        } else if !got.is_finite() {
            let overflows = got.is_infinite()
                && got.is_sign_positive() == expected.is_sign_positive()
                && round_to(dtype, expected.abs() + allowed).is_infinite();
            overflows || same_kind(got, naive)
        } else if may_flush(dtype) && got == 0.0 && expected.abs() - allowed < min_normal(dtype) {
            true
        } else {
            let ratio = error / allowed;
            if ratio > agreement.worst_ratio {
                agreement.worst_ratio = ratio;
                agreement.worst_index = index;
            }
            if naive.is_finite() {
                count += 1;
                sum_got += (error / m).powi(2);
                sum_naive += ((naive - expected).abs() / m).powi(2);
                sum_ulp += (ulp(dtype, expected) / m).powi(2);
            }
            error <= allowed
        };
        if !passes {
            let failure = Failure { index, got, expected, naive, error, allowed, dtype };
            // Of the wrong kind: worse than any finite error.
            let ratio = if got.is_finite() && expected.is_finite() { error / allowed } else { f64::INFINITY };
            failures += 1;
            first.get_or_insert(failure);
            if worst.as_ref().is_none_or(|(most, _)| ratio > *most) {
                worst = Some((ratio, failure));
            }
        }
    }
    if let (Some(first), Some((_, worst))) = (first, worst) {
        let (worst, first) = (Box::new(worst), Box::new(first));
        return Err(Mismatch::OutOfBound { count: failures, total: reference.len(), worst, first });
    }
    if independent.min(count) >= RMS_FROM {
        let rms = |sum: f64| (sum / count as f64).sqrt();
        let allowed = factor * rms(sum_naive) + ulps / 4.0 * rms(sum_ulp);
        if rms(sum_got) > allowed {
            return Err(Mismatch::Rms { got: rms(sum_got), allowed, naive: rms(sum_naive) });
        }
        agreement.rms_ratio = rms(sum_got) / allowed;
    }
    Ok(agreement)
}

/// [`check_within_naive`] as an assertion.
#[track_caller]
pub fn assert_within_naive(
    got: &[f64],
    reference: &[f64],
    naive: &[f64],
    tolerance: &Tolerance,
) -> Agreement {
    match check_within_naive(got, reference, naive, tolerance) {
        Ok(agreement) => agreement,
        Err(mismatch) => panic!("{} with {:?}: {mismatch}", tolerance.dtype, Rule(tolerance)),
    }
}

/// A tolerance without the array of its scale.
struct Rule<'a>(&'a Tolerance<'a>);

impl fmt::Debug for Rule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tolerance { scale, roundings, factor, ulps, .. } = self.0;
        let scale = match scale {
            Scale::Element => "element".to_owned(),
            Scale::Rows(len) => format!("rows of {len}"),
            Scale::Given(_) => "given".to_owned(),
        };
        write!(f, "{factor} × naive error + {ulps} ulps, scale {scale}, {roundings} roundings")
    }
}

/// Equal values, or both NaN.
fn same_kind(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn may_flush(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// ‖got − want‖₂ / ‖want‖₂.
///
/// Equal infinities count as equal and are left out of the norm. The result is infinite, so that no limit accepts it,
/// for arrays of different lengths, for a NaN anywhere, for an infinity on one side only, and where `want` is all zero
/// and `got` is not.
pub fn relative_l2<T: Copy + Into<f64>, U: Copy + Into<f64>>(got: &[T], want: &[U]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want) {
        let (got, want): (f64, f64) = (got.into(), want.into());
        if got == want && want.is_infinite() {
            continue;
        }
        difference += (got - want).powi(2);
        norm += want.powi(2);
    }
    if difference == 0.0 {
        return 0.0;
    }
    let ratio = (difference / norm).sqrt();
    if ratio.is_nan() || norm.is_infinite() { f64::INFINITY } else { ratio }
}

#[cfg(test)]
mod tests;
