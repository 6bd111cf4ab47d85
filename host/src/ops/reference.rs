//! What the references of all operators share.
//!
//! A reference is written once, generic over its arithmetic: in f64 it is the specification; in f32, with every stored
//! value rounded to the storage type, it is the naive computation that the error bound of a kernel is measured by.

use abi::range;

/// The arithmetic of a reference.
pub trait Real: num_traits::Float + std::iter::Sum + std::fmt::Debug {
    /// The nearest value.
    fn real(value: f64) -> Self;

    /// The value, exactly.
    fn to_real(self) -> f64;
}

impl Real for f64 {
    #[inline]
    fn real(value: f64) -> Self {
        value
    }

    #[inline]
    fn to_real(self) -> f64 {
        self
    }
}

impl Real for f32 {
    #[inline]
    fn real(value: f64) -> Self {
        value as f32
    }

    #[inline]
    fn to_real(self) -> f64 {
        f64::from(self)
    }
}

/// What a row is multiplied by whose squares have this mean, with epsilon: `abi::range::factor` in any arithmetic, so
/// that the error of the naive computation is that of its roundings. In f64 no row of what tensors hold needs one.
pub fn factor<A: Real>(mean: A) -> A {
    if mean >= A::min_positive_value() && mean.is_finite() {
        A::one()
    } else if mean < A::one() {
        A::real(f64::from(range::TINY))
    } else {
        A::real(f64::from(range::HUGE))
    }
}

/// Epsilon for a row that is multiplied by `factor`: `abi::range::epsilon` in any arithmetic.
pub fn epsilon<A: Real>(eps: A, factor: A) -> A {
    let scaled = eps * factor * factor;
    if factor < A::one() && eps > A::zero() { scaled.max(A::min_positive_value()) } else { scaled }
}
