//! Norms of rows whose squares do not fit f32, though the row and what becomes of it do: the row is multiplied by an
//! exact power of two, and its squares are added up once more. Ordinary rows are not, so they keep their bits.

/// What a row of values below 2^-60 is multiplied by: 2^100. The square of the smallest subnormal is then a normal
/// number.
pub const TINY: f32 = f32::from_bits((127 + 100) << 23);

/// What a row with values beyond 2^44 is multiplied by: 2^-80. A sum of 2^32 squares of the largest number is then
/// finite.
pub const HUGE: f32 = f32::from_bits((127 - 80) << 23);

/// Whether a mean of squares, with epsilon, has all its digits: it is finite, and not below the smallest normal number.
#[inline(always)]
pub fn is_normal(mean: f32) -> bool {
    (f32::MIN_POSITIVE..f32::INFINITY).contains(&mean)
}

/// What a row is multiplied by, given the mean of its squares, with epsilon: 1 if that has all its digits. A mean that
/// is infinite or not a number since the row has such an element is so again.
#[inline(always)]
pub fn factor(mean: f32) -> f32 {
    if is_normal(mean) {
        1.0
    } else if mean < 1.0 {
        TINY
    } else {
        HUGE
    }
}

/// The same for a row whose mean is subtracted first, given the sum of the squares of the differences, and their mean
/// with epsilon. Numbers from 1 on differ by no less than 2^-24, if they do, so only smaller ones need [`TINY`].
#[inline(always)]
pub fn factor_of_differences(square: f32, mean: f32, variance: f32) -> f32 {
    let fits = square < f32::INFINITY;
    if !fits {
        HUGE
    } else if variance < f32::MIN_POSITIVE && mean.abs() < 1.0 {
        TINY
    } else {
        1.0
    }
}

/// Epsilon for a row that is multiplied by `factor`. It stays above 0, since a row of equal numbers has nothing else.
#[inline(always)]
pub fn epsilon(eps: f32, factor: f32) -> f32 {
    let scaled = eps * factor * factor;
    if factor < 1.0 && eps > 0.0 && scaled < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_fit_after_the_factor() {
        for (largest, count) in [(f32::MAX, 1u64 << 32), (f32::from_bits(1), 1)] {
            let mean = largest * largest;
            assert!(!is_normal(mean));
            let scaled = largest * factor(mean);
            assert_eq!(scaled / factor(mean), largest);
            assert!(is_normal(scaled * scaled));
            assert!(is_normal(scaled * scaled * count as f32));
        }
        for mean in [f32::MIN_POSITIVE, 1e-6, 1.0, f32::MAX] {
            assert_eq!(factor(mean), 1.0);
        }
    }

    #[test]
    fn epsilon_goes_with_the_row() {
        assert_eq!(epsilon(1e-6, 1.0), 1e-6);
        assert_eq!(epsilon(0.0, HUGE), 0.0);
        assert_eq!(epsilon(1e-6, HUGE), f32::MIN_POSITIVE);
        assert_eq!(epsilon(f32::MIN_POSITIVE, TINY), 2f32.powi(74));
    }

    #[test]
    fn equal_numbers_need_no_factor() {
        assert_eq!(factor_of_differences(0.0, 1e30, 0.0), 1.0);
        assert_eq!(factor_of_differences(0.0, 1e-30, 0.0), TINY);
        assert_eq!(factor_of_differences(f32::INFINITY, 0.0, f32::INFINITY), HUGE);
        assert_eq!(factor_of_differences(f32::NAN, f32::NAN, f32::NAN), HUGE);
    }
}
