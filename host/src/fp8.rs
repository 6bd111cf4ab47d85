//! The 8-bit float of caches.

/// fp8 with 4 bits of exponent (bias 7) and 3 of mantissa: no infinity, one NaN of each sign, at most 448.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

impl F8E4M3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// The nearest, ties to even; beyond the largest finite value, that (also for infinity); NaN stays NaN.
    pub fn from_f32(value: f32) -> Self {
        if value.is_nan() {
            return F8E4M3(0x7f);
        }
        let magnitude = value.abs().min(Self::MAX);
        // Of the last place, and of its number: 2^-9 below the smallest normal number, else the exponent's less 3.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
        let places = (magnitude * power_of_two(3 - exponent)).round_ties_even() as u8;
        // Codes count the last places from 0 on; a carry goes into the exponent.
        let code = ((exponent + 6) as u8) * 8 + places;
        F8E4M3(code | u8::from(value.is_sign_negative()) << 7)
    }

    /// The value, exactly.
    pub fn to_f32(self) -> f32 {
        let (exponent, mantissa) = (i32::from((self.0 >> 3) & 15), self.0 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => f32::from(mantissa) * power_of_two(-9),
            _ => f32::from(8 + mantissa) * power_of_two(exponent - 10),
        };
        if self.0 >> 7 == 1 { -magnitude } else { magnitude }
    }
}

/// 2^exponent, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_code_comes_back() {
        for code in 0..=255u8 {
            let value = F8E4M3(code).to_f32();
            let expected = if code & 0x7f == 0x7f { 0x7f } else { code };
            assert_eq!(F8E4M3::from_f32(value), F8E4M3(expected), "{value}");
        }
        assert_eq!(
            [0x38, 0xc0, 0x7e, 0x01].map(|code| F8E4M3(code).to_f32()),
            [1.0, -2.0, 448.0, 2f32.powi(-9)]
        );
    }

    #[test]
    fn between_two_codes_the_nearer() {
        for low in 0..0x7eu8 {
            let (below, above) = (F8E4M3(low).to_f32(), F8E4M3(low + 1).to_f32());
            let middle = (below + above) / 2.0;
            let codes = [middle.next_down(), middle, middle.next_up()].map(|value| F8E4M3::from_f32(value).0);
            assert_eq!(codes, [low, low + low % 2, low + 1], "{below} to {above}");
            assert_eq!(F8E4M3::from_f32(-middle).0, (low + low % 2) | 0x80);
        }
        for large in [449.0, 464.0, 465.0, 1e9, f32::INFINITY] {
            assert_eq!([large, -large].map(F8E4M3::from_f32), [F8E4M3(0x7e), F8E4M3(0xfe)]);
        }
        assert_eq!([0.0, -0.0].map(F8E4M3::from_f32), [F8E4M3(0), F8E4M3(0x80)]);
    }

    proptest! {
        #[test]
        fn no_code_is_nearer(value in -500f32..500.0) {
            let distance = |code: u8| (f64::from(F8E4M3(code).to_f32()) - f64::from(value)).abs();
            let found = distance(F8E4M3::from_f32(value).0);
            prop_assert!((0..=255u8).all(|code| code & 0x7f == 0x7f || distance(code) >= found));
        }
    }
}
