//! What the references of all operators share.
//!
//! A reference is written once, generic over its arithmetic: in f64 it is the specification; in f32, with every stored
//! value rounded to the storage type, it is the naive computation that the error bound of a kernel is measured by.

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
