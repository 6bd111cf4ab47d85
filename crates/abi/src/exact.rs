//! Functions of exactly rounded f32 operations only: the same bits on every device and on the CPU, so that what is
//! decided by them (which experts a token goes to) is decided alike everywhere.

/// ln(2) = LN_2_HIGH + LN_2_LOW; a product of the first with an integer below 2^15 is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// (e^r − 1 − r) / r² from the highest power down, for |r| ≤ ln(2)/2.
///
/// Source: Moshier, *Methods and Programs for Mathematical Functions* (1989), `expf` of the Cephes library.
const EXP: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x for x ≤ 0, error 1 ulp, subnormal results kept; NaN for NaN.
#[inline(always)]
pub const fn exp_neg(x: f32) -> f32 {
    // Half of the smallest subnormal number is e^−103.97.
    if x < -104.0 {
        return 0.0;
    }
    // To the nearest integer.
    let whole = (x * core::f32::consts::LOG2_E - 0.5) as i32;
    let r = x - whole as f32 * LN_2_HIGH - whole as f32 * LN_2_LOW;
    let mut sum = EXP[0];
    let mut i = 1;
    while i < EXP.len() {
        sum = sum * r + EXP[i];
        i += 1;
    }
    let value = sum * (r * r) + r + 1.0;
    // 2^whole in two factors where it is subnormal; only the last multiplication rounds.
    let (whole, last) =
        if whole < -64 { (whole + 64, f32::from_bits((127 - 64) << 23)) } else { (whole, 1.0) };
    value * f32::from_bits(((127 + whole) as u32) << 23) * last
}

/// 1 / (1 + e^−x), relative error 2^−22 also where it is small; NaN for NaN.
#[inline(always)]
pub const fn sigmoid(x: f32) -> f32 {
    let power = exp_neg(f32::from_bits(x.to_bits() | 1 << 31));
    (if x < 0.0 { power } else { 1.0 }) / (1.0 + power)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{exp_neg, sigmoid};

    fn relative(got: f32, want: f64) -> f64 {
        // Relative to the smallest normal number below it.
        (f64::from(got) - want).abs() / want.max(f64::from(f32::MIN_POSITIVE))
    }

    #[test]
    fn errors_are_small() {
        let mut x = -110.0f32;
        while x <= 0.0 {
            let want = f64::from(x).exp();
            assert!(relative(exp_neg(x), want) < 1.2e-7, "e^{x}");
            for x in [x, -x] {
                let want = 1.0 / (1.0 + (-f64::from(x)).exp());
                assert!(relative(sigmoid(x), want) < 2.4e-7, "sigmoid({x})");
            }
            x += 1.0 / 1024.0;
        }
    }

    #[test]
    fn special_values() {
        assert_eq!((exp_neg(0.0), exp_neg(-0.0)), (1.0, 1.0));
        assert_eq!((exp_neg(f32::NEG_INFINITY), exp_neg(f32::MIN)), (0.0, 0.0));
        assert!(exp_neg(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && sigmoid(-f32::NAN).is_nan());
        assert_eq!((sigmoid(0.0), sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)), (0.5, 1.0, 0.0));
        assert_eq!(exp_neg(-103.0), 1.4e-45);
    }
}
