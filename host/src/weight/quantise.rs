//! From plain matrices to quantised ones: round to nearest, by scales from the largest or almost largest values.

use abi::ops::quantize_weight::{covered_rank, e2m1_code, e8m0_scale, integer_code, zero_point};
use abi::weight::{Codes, E6M9_MAX, Layout, ScaleType, e6m9_from_f32, e6m9_to_f32};
use half::{bf16, f16};
use rayon::prelude::*;

use super::cpu::{e2m1, number};
use super::{OP, WeightSource};
use crate::error::Error;
use crate::fp8::F8E4M3;

/// How a matrix is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scheme {
    /// What a code stands for.
    pub codes: Codes,
    /// Elements of a row that share a scale, 0 for all of them.
    pub group: u32,
    /// Rows that share a scale: 1, or for blocks 16, 32, 64, …
    pub rows: u32,
    /// How scales are stored. A value is quantised by its scale as it is stored.
    pub scale: ScaleType,
    /// Integers: whether groups have zero points, so that the range is from the smallest to the largest value (and 0),
    /// and not the same to both sides.
    pub asymmetric: bool,
    /// The share of a group's magnitudes that its range covers: 1 for all of them; with less, the largest are cut off.
    /// Not for asymmetric schemes.
    pub percentile: f32,
}

impl Scheme {
    /// 8-bit integers, a scale for each row.
    pub const INT8: Scheme = Scheme {
        codes: Codes::Int8,
        group: 0,
        rows: 1,
        scale: ScaleType::F32,
        asymmetric: false,
        percentile: 1.0,
    };
    /// 4-bit integers with a bfloat16 scale for 128 elements of a row.
    pub const INT4: Scheme = Scheme { codes: Codes::Int4, group: 128, scale: ScaleType::Bf16, ..Self::INT8 };
    /// fp8 with a scale for blocks of 128 × 128.
    pub const FP8: Scheme = Scheme { codes: Codes::E4m3, group: 128, rows: 128, ..Self::INT8 };
    /// fp8 with a scale for each row.
    pub const FP8_CHANNEL: Scheme = Scheme { codes: Codes::E4m3, ..Self::INT8 };
    /// fp4 with a power of two for 32 elements of a row (OCP Microscaling Formats 1.0).
    pub const MXFP4: Scheme = Scheme { codes: Codes::E2m1, group: 32, scale: ScaleType::E8m0, ..Self::INT8 };
    /// fp4 with an fp8 scale for 16 elements of a row, and one for all.
    pub const NVFP4: Scheme = Scheme { codes: Codes::E2m1, group: 16, scale: ScaleType::E4m3, ..Self::INT8 };

    /// 16-bit floats with 6 bits of exponent and 9 of mantissa ([`e6m9_to_f32`](abi::weight::e6m9_to_f32)), without a
    /// scale: that of a row is 1 unless its values are larger than the largest of them.
    ///
    /// For weights that are more exact than bfloat16 and are multiplied in f32: half the bytes, and a quarter of
    /// bfloat16's error, with the range that binary16 lacks. Numbers of bfloat16 from 2^-31 to 2^32 are all among them,
    /// so a checkpoint in bfloat16 gains nothing; and products in f16 and bf16 round them, since no tensor core takes
    /// them.
    pub const E6M9: Scheme = Scheme { codes: Codes::E6m9, ..Self::INT8 };

    /// The names that [`str::parse`] takes, and what they mean.
    pub const NAMED: [(&str, Scheme); 7] = [
        ("int8", Self::INT8),
        ("int4", Self::INT4),
        ("fp8", Self::FP8),
        ("fp8-channel", Self::FP8_CHANNEL),
        ("mxfp4", Self::MXFP4),
        ("nvfp4", Self::NVFP4),
        ("e6m9", Self::E6M9),
    ];

    /// The layout of what it makes.
    pub const fn layout(&self) -> Layout {
        let Scheme { codes, group, rows, scale, asymmetric, .. } = *self;
        Layout { codes, group, rows, scale, zeros: asymmetric, minimums: false, permuted: false }
    }

    /// **Errors**: [`Error::Invalid`] for a layout that kernels cannot take, or a scale type that is no scheme's.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), Error> {
        let invalid = |expected| Err(Error::invalid(op, "scheme", expected, format!("{self:?}")));
        match self.layout().problem() {
            Some(problem) => invalid(problem),
            None if self.scale.has_supers() => invalid("scales without super scales"),
            None if self.percentile.is_nan() => invalid("a percentile that is a number"),
            None => Ok(()),
        }
    }

    /// What scales of [`ScaleType::E4m3`] are multiplied by, for a matrix whose largest magnitude this is; for others
    /// 1. Matrices that are to be one weight have one: that of the larger.
    pub fn global_of(&self, largest: f32) -> f32 {
        if self.scale == ScaleType::E4m3 && largest > 0.0 {
            // Scales are divided by it.
            (largest / (F8E4M3::MAX * self.codes.largest())).max(f32::MIN_POSITIVE)
        } else {
            1.0
        }
    }

    /// The scale of a range, as bits of the scheme's type, and its zero point.
    pub(crate) fn scale_of(&self, [low, high]: [f32; 2], global: f32) -> (u32, u8) {
        let (magnitude, most) = (high.max(-low), self.codes.most());
        let wanted = match self.asymmetric {
            true => (high - low) / f32::from(most),
            false if self.codes == Codes::E6m9 && magnitude <= E6M9_MAX => 1.0,
            false => magnitude / self.codes.largest(),
        };
        let bits = match self.scale {
            ScaleType::F16 => f16::from_f32(wanted).to_bits().into(),
            ScaleType::Bf16 => bf16::from_f32(wanted).to_bits().into(),
            ScaleType::E8m0 => e8m0_scale(magnitude, self.codes.largest()).into(),
            ScaleType::E4m3 => F8E4M3::from_f32(wanted / global).0.into(),
            _ => wanted.to_bits(),
        };
        let zero = match self.asymmetric {
            true => zero_point(low, number(self.scale, &bits.to_le_bytes(), global), most),
            false => self.codes.zero(),
        };
        (bits, zero)
    }

    /// **Errors**: [`Error::Invalid`] for values up to this magnitude if no scale of its type is large enough, or what
    /// it makes of them is beyond f32.
    pub(crate) fn check_largest(
        &self,
        (op, argument): (&'static str, &'static str),
        largest: f32,
        global: f32,
    ) -> Result<(), Error> {
        let (low, reach) = match self.codes {
            _ if self.asymmetric => (-largest, self.codes.most().into()),
            Codes::Int4 | Codes::Int8 => (0.0, self.codes.zero().into()),
            codes => (0.0, codes.largest()),
        };
        let (bits, _) = self.scale_of([low, largest], global);
        if (reach * number(self.scale, &bits.to_le_bytes(), global)).is_finite() {
            return Ok(());
        }
        let expected = format!("values whose scales {:?} can hold", self.scale);
        Err(Error::invalid(op, argument, expected, format!("a magnitude of {largest:e}")))
    }

    /// The code of a value, by its group's scale and zero point.
    pub(crate) fn code_of(&self, value: f32, (scale, zero): (f32, u8)) -> u16 {
        let scaled = if scale > 0.0 { value / scale } else { 0.0 };
        match self.codes {
            Codes::Int4 | Codes::Int8 => integer_code(scaled, zero, self.codes.most()).into(),
            Codes::E2m1 => e2m1_code(scaled).into(),
            Codes::E4m3 => F8E4M3::from_f32(scaled).0.into(),
            Codes::E6m9 => e6m9_from_f32(scaled),
        }
    }
}

impl std::str::FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::NAMED.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, scheme)| scheme).ok_or_else(|| {
            let known = Self::NAMED.map(|(known, _)| known).join(", ");
            Error::invalid("Scheme", "name", format!("one of {known}"), name)
        })
    }
}

/// A matrix that is quantised as it is read: a [`WeightSource`] over rows of f32.
pub struct Quantised<R> {
    rows: R,
    size: [usize; 2],
    scheme: Scheme,
    scales: Vec<u32>,
    zeros: Vec<u8>,
    global: f32,
}

impl<R: Fn(usize, &mut [f32]) + Sync> Quantised<R> {
    /// A matrix `[n, k]` whose rows `rows` writes. Reads all of them once, for the scales.
    ///
    /// **Errors**: [`Error::Invalid`] for a layout that kernels cannot take, a scale type that is no scheme's, a value
    /// that is not finite, or one for which a scale of its type is too small.
    pub fn new(size: [usize; 2], scheme: Scheme, rows: R) -> Result<Self, Error> {
        Self::with_global(size, scheme, rows, None)
    }

    /// The same with this factor of all scales, where the scheme has one ([`ScaleType::E4m3`]): that of another matrix
    /// whose values are larger, so that both can be one weight.
    ///
    /// **Errors**: as [`Quantised::new`].
    pub fn with_global(
        size: [usize; 2],
        scheme: Scheme,
        rows: R,
        global: Option<f32>,
    ) -> Result<Self, Error> {
        scheme.check(OP)?;
        let [n, k] = size;
        let mut quantised =
            Quantised { rows, size, scheme, scales: Vec::new(), zeros: Vec::new(), global: 1.0 };
        let groups = quantised.groups();
        // The range of each group of each row.
        let (ranges, largest): (Vec<Vec<[f32; 2]>>, Vec<f32>) = (0..n)
            .into_par_iter()
            .map(|row| {
                let mut values = vec![0.0; k];
                (quantised.rows)(row, &mut values);
                let width = if scheme.group == 0 { k.max(1) } else { scheme.group as usize };
                let ranges = values.chunks(width).map(|group| range(group, &scheme)).collect();
                let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                (ranges, largest)
            })
            .unzip();
        if let Some((row, bad)) = ranges.iter().enumerate().find_map(|(row, ranges)| {
            ranges.iter().flatten().find(|end| !end.is_finite()).map(|end| (row, *end))
        }) {
            return Err(Error::invalid(OP, "source", "finite values", format!("{bad} in row {row}")));
        }
        let blocks: Vec<[f32; 2]> = ranges
            .chunks(scheme.rows as usize)
            .flat_map(|rows| {
                (0..groups).map(move |group| {
                    rows.iter()
                        .filter_map(|row| row.get(group))
                        .fold([0.0f32; 2], |[low, high], range| [low.min(range[0]), high.max(range[1])])
                })
            })
            .collect();
        let magnitude = |[low, high]: [f32; 2]| high.max(-low);
        let all = blocks.iter().copied().map(magnitude).fold(0.0, f32::max);
        quantised.global = global.unwrap_or_else(|| scheme.global_of(all));
        // Also of values that a percentile leaves out, as it is where only the largest is known.
        let largest = largest.into_iter().fold(0.0, f32::max);
        scheme.check_largest((OP, "source"), largest, quantised.global)?;
        for range in blocks {
            let (bits, zero) = scheme.scale_of(range, quantised.global);
            quantised.scales.push(bits);
            if scheme.asymmetric {
                quantised.zeros.push(zero);
            }
        }
        Ok(quantised)
    }

    fn groups(&self) -> usize {
        if self.scheme.group == 0 { 1 } else { self.size[1].div_ceil(self.scheme.group as usize) }
    }

    fn index(&self, row: usize, group: usize) -> usize {
        row / self.scheme.rows as usize * self.groups() + group
    }

    /// The value of a code.
    fn value(&self, code: u16, row: usize, group: usize) -> f32 {
        let index = self.index(row, group);
        let scale = number(self.scheme.scale, &self.scales[index].to_le_bytes(), self.global);
        scale
            * match self.scheme.codes {
                Codes::Int4 | Codes::Int8 => {
                    let zero = self.zeros.get(index).copied().unwrap_or(self.scheme.codes.zero());
                    f32::from(code as i16 - i16::from(zero))
                }
                Codes::E2m1 => e2m1(code as u8),
                Codes::E4m3 => F8E4M3(code as u8).to_f32(),
                Codes::E6m9 => e6m9_to_f32(code),
            }
    }

    /// Writes a row as it is after quantisation: what fake quantisation computes with, whose gradient is taken as that
    /// of the row itself (straight through).
    pub fn dequantise(&self, row: usize, values: &mut [f32]) {
        let bytes = self.scheme.codes.bytes();
        let mut codes = vec![0; self.size[1] * bytes];
        self.codes(row, &mut codes);
        let width = if self.scheme.group == 0 { usize::MAX } else { self.scheme.group as usize };
        for (col, (value, code)) in std::iter::zip(values, codes.chunks(bytes)).enumerate() {
            let code = code.iter().rev().fold(0, |code, &byte| code << 8 | u16::from(byte));
            *value = self.value(code, row, col / width);
        }
    }

    /// How far the values are from what they were.
    pub fn errors(&self) -> QuantErrors {
        let [n, k] = self.size;
        let of_row = |row| {
            let (mut values, mut after) = (vec![0.0; k], vec![0.0; k]);
            (self.rows)(row, &mut values);
            self.dequantise(row, &mut after);
            let mut sums = Errors::default();
            for (&value, after) in std::iter::zip(&values, after) {
                let (error, value) = (f64::from(value - after).abs(), f64::from(value).abs());
                sums.squares = [sums.squares[0] + error * error, sums.squares[1] + value * value];
                sums.largest = [sums.largest[0].max(error), sums.largest[1].max(value)];
            }
            sums
        };
        let Errors { squares, largest } =
            (0..n).into_par_iter().map(of_row).reduce(Errors::default, |a, b| Errors {
                squares: [a.squares[0] + b.squares[0], a.squares[1] + b.squares[1]],
                largest: [a.largest[0].max(b.largest[0]), a.largest[1].max(b.largest[1])],
            });
        let share = |[error, all]: [f64; 2]| if all > 0.0 { error / all } else { 0.0 };
        QuantErrors { relative: share(squares).sqrt(), largest: share(largest) }
    }
}

/// How far quantised values are from what they were; 0 for no values, and where all are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QuantErrors {
    /// The root of the sum of the squares of all values' errors, over that of the values'.
    pub relative: f64,
    /// The largest error of a value, over the largest magnitude of a value.
    pub largest: f64,
}

/// Of errors and of values.
#[derive(Default)]
struct Errors {
    squares: [f64; 2],
    largest: [f64; 2],
}

/// From the smallest to the largest value of a group, 0 included; NaN if there is one.
fn range(group: &[f32], scheme: &Scheme) -> [f32; 2] {
    if let Some(bad) = group.iter().find(|value| !value.is_finite()) {
        return [*bad; 2];
    }
    if scheme.percentile < 1.0 && !scheme.asymmetric {
        let mut magnitudes: Vec<f32> = group.iter().map(|value| value.abs()).collect();
        let at = covered_rank(magnitudes.len().max(1) as u32, scheme.percentile) as usize;
        let (_, covered, _) = magnitudes.select_nth_unstable_by(at, f32::total_cmp);
        return [-*covered, *covered];
    }
    group.iter().fold([0.0, 0.0], |[low, high], &value| [low.min(value), high.max(value)])
}

impl<R: Fn(usize, &mut [f32]) + Sync> WeightSource for Quantised<R> {
    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn layout(&self) -> Layout {
        self.scheme.layout()
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        let bytes = self.scheme.codes.bytes();
        let mut values = vec![0.0; self.size[1]];
        (self.rows)(row, &mut values);
        let width = if self.scheme.group == 0 { usize::MAX } else { self.scheme.group as usize };
        for (col, (code, value)) in std::iter::zip(codes.chunks_mut(bytes), values).enumerate() {
            let index = self.index(row, col / width);
            let scale = number(self.scheme.scale, &self.scales[index].to_le_bytes(), self.global);
            let zero = self.zeros.get(index).copied().unwrap_or(self.scheme.codes.zero());
            code.copy_from_slice(&self.scheme.code_of(value, (scale, zero)).to_le_bytes()[..bytes]);
        }
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        self.scales[self.index(row, group)]
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros.get(self.index(row, group)).copied().unwrap_or(self.scheme.codes.zero())
    }

    fn global(&self) -> f32 {
        self.global
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::simd::Level;
    use crate::tensor::Tensor;
    use crate::weight::Weight;
    use crate::weight::cpu::Packed;
    use crate::weight::cpu::tests::{products, values};

    fn value(row: usize, col: usize) -> f32 {
        let noise = ((row * 7919 + col * 104_729) % 1009) as f32 / 504.5 - 1.0;
        noise * 0.05 * (1.0 + row as f32 / 7.0) + 0.01
    }

    fn rows(row: usize, values: &mut [f32]) {
        for (col, out) in values.iter_mut().enumerate() {
            *out = value(row, col);
        }
    }

    /// Errors are those of the schemes' steps, and what is packed is what was quantised.
    #[test]
    fn schemes() -> Result<(), Error> {
        let (n, k) = (50, 300);
        let a: Vec<Vec<f32>> = (0..5).map(|row| (0..k).map(|i| value(row + 90, i) * 8.0).collect()).collect();
        let stream = Device::cpu().stream()?;
        let asymmetric = Scheme { asymmetric: true, scale: ScaleType::F16, ..Scheme::INT4 };
        let named = Scheme::NAMED.map(|(_, scheme)| scheme);
        let bounds = [0.006, 0.12, 0.04, 0.04, 0.2, 0.14, 0.001];
        for (scheme, bound) in std::iter::zip(named, bounds).chain([(asymmetric, 0.12)]) {
            let quantised = Quantised::new([n, k], scheme, rows)?;
            let QuantErrors { relative: error, largest } = quantised.errors();
            assert!(error > bound / 20.0 && error < bound, "{scheme:?}: {error}");
            assert!(largest > 0.0 && largest < 2.0 * bound, "{scheme:?}: {largest}");
            let weight = Weight::pack(&stream, &quantised)?;
            let packed = Packed::new(&weight);
            let stride = packed.columns();
            for (block, &level) in
                (0..n.div_ceil(16)).flat_map(|block| Level::available().iter().map(move |l| (block, l)))
            {
                let values = values(level, &packed, block);
                let sums = products(level, &packed, block, &a);
                for row in block * 16..n.min(block * 16 + 16) {
                    let mut expected = vec![0.0; k];
                    quantised.dequantise(row, &mut expected);
                    assert_eq!(
                        &values[row % 16 * stride..][..k],
                        &expected[..],
                        "{scheme:?} row {row} {level:?}"
                    );
                    for (a, sums) in std::iter::zip(&a, &sums) {
                        let terms = std::iter::zip(a, &expected).map(|(a, w)| f64::from(a * w));
                        let (sum, size) =
                            terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                        let error = f64::from(sums[row % 16]) - sum;
                        assert!(
                            error.abs() <= 1e-6 * size,
                            "{scheme:?} row {row} {level:?}: {error} of {size}"
                        );
                    }
                }
                // A row alone, and where products are added with one rounding by any instructions.
                let alone = products(level, &packed, block, &a[4..]);
                assert_eq!(alone[0], sums[4], "{scheme:?} {level:?}");
                if level == Level::Avx512 {
                    assert_eq!(sums, products(Level::Avx2, &packed, block, &a), "{scheme:?}");
                }
            }
        }
        Ok(())
    }

    /// The factor of all scales is a normal number, so that it can be divided by: of matrices that are next to nothing
    /// groups of zeros stay zeros.
    #[test]
    fn next_to_nothing() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        for largest in [f32::from_bits(1), 1e-42, 1e-39, 1e-36] {
            let read = |row: usize, values: &mut [f32]| values.fill(if row == 0 { largest } else { 0.0 });
            let quantised = Quantised::new([2, 32], Scheme::NVFP4, read)?;
            let mut after = [1.0; 32];
            quantised.dequantise(1, &mut after);
            assert_eq!(after, [0.0; 32], "{largest:e}");
            assert!(quantised.global().is_normal() && (1.0 / quantised.global()).is_normal(), "{largest:e}");
            quantised.dequantise(0, &mut after);
            assert!(after.iter().all(|x| (0.0..=2.0 * largest).contains(x)), "{largest:e}: {:e}", after[0]);
            let matrix = Tensor::from_slice(&stream, &[2, 32], &[[largest; 32], [0.0; 32]].concat())?;
            Weight::quantize(&stream, matrix.view(), Scheme::NVFP4)?;
        }
        Ok(())
    }

    /// Where few values are far away, a percentile serves the others better.
    #[test]
    fn percentile() -> Result<(), Error> {
        let outlier = |row: usize, values: &mut [f32]| {
            rows(row, values);
            values[17] = 3.0;
        };
        let median = |scheme: Scheme| -> Result<f32, Error> {
            let quantised = Quantised::new([4, 256], scheme, outlier)?;
            let mut after = vec![0.0; 256];
            quantised.dequantise(1, &mut after);
            let mut errors: Vec<f32> = (0..256).map(|col| (after[col] - value(1, col)).abs()).collect();
            errors.sort_by(f32::total_cmp);
            Ok(errors[128])
        };
        let all = median(Scheme { group: 0, ..Scheme::INT4 })?;
        let most = median(Scheme { group: 0, percentile: 0.99, ..Scheme::INT4 })?;
        assert!(most < all / 5.0, "{most} {all}");
        Ok(())
    }

    /// Normal values of many sizes in three formats of 16 bits, by the root of the squares of their errors over theirs:
    /// prints the table that the record of the format has.
    #[test]
    fn e6m9_beside_others_of_16_bits() -> Result<(), Error> {
        let normal: Vec<f32> = {
            let mut state = 1u64;
            let mut uniform = move || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1u64 << 24) as f32
            };
            (0..4096).map(|_| (0..12).map(|_| uniform() - 0.5).sum()).collect()
        };
        for size in [-40, -32, -28, -24, -20, -16, -12, -6, 0, 6, 12, 16, 24, 30] {
            let values: Vec<f32> = normal.iter().map(|x| x * 2f32.powi(size)).collect();
            let error = |after: &dyn Fn(f32) -> f32| {
                let squares = values.iter().map(|&x| (f64::from(after(x) - x), f64::from(x)));
                let [errors, all] =
                    squares.fold([0.0, 0.0], |[e, a], (error, x)| [e + error * error, a + x * x]);
                (errors / all).sqrt()
            };
            let in_f16 = error(&|x| f16::from_f32(x).to_f32());
            let in_bf16 = error(&|x| bf16::from_f32(x).to_f32());
            let read = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * 64..][..64]);
            let in_e6m9 = Quantised::new([64, 64], Scheme::E6M9, read)?.errors().relative;
            println!("| 2^{size} | {in_f16:.1e} | {in_bf16:.1e} | {in_e6m9:.1e} |");
            // The errors of formats whose last places are 2, 4 and 1 apart.
            assert!(in_bf16 > 1e-3 && in_bf16 < 2e-3, "{size}: {in_bf16}");
            if (-24..=30).contains(&size) {
                assert!((in_bf16 / in_e6m9 - 4.0).abs() < 0.4, "{size}: {in_e6m9}");
            }
            match size {
                -12..=12 => assert!((in_e6m9 / in_f16 - 2.0).abs() < 0.3, "{size}: {in_f16}"),
                -28..=-20 | 16.. => assert!(in_f16 > 2.0 * in_e6m9, "{size}: {in_f16}"),
                _ => {}
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_refused() {
        let refused = |scheme: Scheme, rows: fn(usize, &mut [f32]), expected: &str| {
            let error = Quantised::new([3, 40], scheme, rows).err().map(|error| error.to_string());
            assert!(error.as_deref().is_some_and(|error| error.contains(expected)), "{error:?}");
        };
        refused(Scheme { group: 20, ..Scheme::INT4 }, rows, "a group of 16");
        refused(
            Scheme { scale: ScaleType::U8Super, group: 32, ..Scheme::INT4 },
            rows,
            "without super scales",
        );
        refused(Scheme::INT4, |_, values| values[3] = f32::NAN, "finite values");
        let unknown = "int3".parse::<Scheme>().err().map(|error| error.to_string());
        assert!(unknown.is_some_and(|error| error.contains("int4")));
    }
}
