//! Light weights beside fp8: bfloat16 has exponents that binary16, in which values are multiplied, has not.

use crate::matmul::multiplicand::Multiplicand;

/// What weights are multiplied by where they are bfloat16 and are to be binary16: 1 becomes the largest power of two
/// there.
pub(super) const LIFT: f32 = (1u32 << 15) as f32;
/// log2 of how far a band of such weights reaches: where it begins is an ordinary number of binary16, whose smallest is
/// 2^-14.
const BAND: u32 = 29;
/// Bands down to the least number of f32; what is not ordinary of the last one is below 2^-116.
pub(super) const BANDS: u32 = 4;

/// The bits of the least weight of a band, times [`LIFT`].
#[inline(always)]
pub(super) fn least_of_band(band: u32) -> u32 {
    (127 - 14 - BAND * band) << 23
}

/// What so many bands reach over.
#[inline(always)]
pub(super) fn power_of_bands(bands: u32) -> f32 {
    f32::from_bits((127 + BAND * bands) << 23)
}

/// Those of eight keys' weights in words of `T` that are of a band, as far up as those of band 0, as `M`; all of them
/// if there is one band only. Weights of the same type stay as they are.
#[inline(always)]
pub(super) fn narrow<T: Multiplicand, M: Multiplicand>(words: [u32; 2], band: u32, bands: u32) -> [u32; 2] {
    if T::INFINITIES == M::INFINITIES {
        return words;
    }
    let mut values = [0f32; 8];
    T::unpack([words[0], words[1], 0, 0], &mut values);
    if bands != 1 {
        let least = if band + 1 == bands { 0.0 } else { f32::from_bits(least_of_band(band)) };
        let end = if band == 0 { f32::INFINITY } else { f32::from_bits(least_of_band(band - 1)) };
        let mut i = 0;
        while i < 4 {
            // Not the other way round: NaN is of all bands.
            let is_other = values[i] < least || values[i] >= end;
            values[i] = if is_other { 0.0 } else { values[i] * power_of_bands(band) };
            i += 1;
        }
    }
    let [a, b, ..] = M::pack(&values);
    [a, b]
}
