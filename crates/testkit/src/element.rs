use half::{bf16, f16};

/// A scalar that buffers hold, with its bit pattern and the two patterns that mark memory.
pub trait Element: Copy + std::fmt::Debug + PartialEq {
    /// Fills guard bands. For floats a NaN, so that a read past the end shows in the result.
    const GUARD: Self;
    /// Fills outputs before a run. For floats a NaN whose payload differs from [`Element::GUARD`] and from the NaN that
    /// arithmetic produces, so that an element that was never written can be told from one that was computed as NaN.
    const POISON: Self;
    /// The bit pattern, zero-extended.
    fn bits(self) -> u64;
    /// Whether this is a NaN; never for integers.
    fn is_nan(self) -> bool;
}

/// The value with its bit pattern in hexadecimal, at the full width of the type.
pub(crate) fn show<T: Element>(value: T) -> String {
    format!("{value:?} (0x{:0width$x})", value.bits(), width = 2 * size_of::<T>())
}

macro_rules! float {
    ($($ty:ty, $guard:literal, $poison:literal;)*) => {$(
        impl Element for $ty {
            const GUARD: Self = <$ty>::from_bits($guard);
            const POISON: Self = <$ty>::from_bits($poison);
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn is_nan(self) -> bool {
                self.is_nan()
            }
        }
    )*};
}

macro_rules! integer {
    ($($ty:ty as $unsigned:ty;)*) => {$(
        impl Element for $ty {
            const GUARD: Self = <$ty>::from_ne_bytes([0xa5; size_of::<$ty>()]);
            const POISON: Self = <$ty>::from_ne_bytes([0x5d; size_of::<$ty>()]);
            fn bits(self) -> u64 {
                (self as $unsigned).into()
            }
            fn is_nan(self) -> bool {
                false
            }
        }
    )*};
}

/// Marks are other codes than the NaN that is rounded to.
#[cfg(feature = "simulator")]
impl Element for host::F8E4M3 {
    const GUARD: Self = host::F8E4M3(0xff);
    const POISON: Self = host::F8E4M3(0xff);
    fn bits(self) -> u64 {
        self.0.into()
    }
    fn is_nan(self) -> bool {
        self.to_f32().is_nan()
    }
}

// Quiet NaNs throughout: a signalling one may change when it passes through a floating-point register.
float! {
    f16, 0x7fa5, 0x7ead;
    bf16, 0x7fe5, 0x7fdd;
    f32, 0x7fe5_a5a5, 0x7fdd_5d5d;
    f64, 0x7ffd_a5a5_a5a5_a5a5, 0x7ffb_5d5d_5d5d_5d5d;
}

integer! {
    i8 as u8;
    u8 as u8;
    i16 as u16;
    u16 as u16;
    i32 as u32;
    u32 as u32;
    i64 as u64;
    u64 as u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_marks_are_distinct_quiet_nans() {
        fn check<T: Element>(quiet_bit: u64, computed: u64) {
            for mark in [T::GUARD, T::POISON] {
                assert!(mark.is_nan());
                assert_ne!(mark.bits() & quiet_bit, 0, "{}", show(mark));
                assert_ne!(mark.bits(), computed);
            }
            assert_ne!(T::GUARD.bits(), T::POISON.bits());
        }
        check::<f16>(1 << 9, 0x7e00);
        check::<f16>(1 << 9, 0x7fff);
        check::<bf16>(1 << 6, 0x7fc0);
        check::<bf16>(1 << 6, 0x7fff);
        check::<f32>(1 << 22, 0x7fc0_0000);
        check::<f32>(1 << 22, 0x7fff_ffff);
        check::<f64>(1 << 51, 0x7ff8_0000_0000_0000);
    }

    #[test]
    fn bits_are_zero_extended_and_shown_at_full_width() {
        assert_eq!((-1i8).bits(), 0xff);
        assert_eq!(show(1.0f32), "1.0 (0x3f800000)");
        assert_eq!(show(f16::from_bits(1)), format!("{:?} (0x0001)", f16::from_bits(1)));
        assert_eq!(show(-2i8), "-2 (0xfe)");
    }
}
