//! Serde for types that a text names.

use core::fmt;
use core::marker::PhantomData;
use core::str::FromStr;

use serde::de::{Error, Visitor};

/// Takes a text that `T` is parsed from.
pub struct ByName<T>(PhantomData<T>);

impl<T> ByName<T> {
    /// One.
    #[expect(clippy::new_without_default, reason = "for `serde_by_name!` alone")]
    pub fn new() -> Self {
        ByName(PhantomData)
    }
}

impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for ByName<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// Writes a type by its `Display`, and reads it by its `FromStr`.
#[macro_export]
#[doc(hidden)]
macro_rules! serde_by_name {
    ($($type:ty),*) => {$(
        impl $crate::serde::Serialize for $type {
            fn serialize<S: $crate::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $type {
            fn deserialize<D: $crate::serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_str($crate::by_name::ByName::new())
            }
        }
    )*};
}

serde_by_name!(crate::Arch, crate::DType);
