/// The element type of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// fp8: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, at most 448. In caches only.
    F8E4M3,
    /// Signed 8-bit integer.
    I8,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer: token ids and positions.
    U32,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 7] =
        [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8, DType::I32, DType::U32];

    /// The floating-point types in which weights and activations are stored.
    pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F8E4M3 | DType::I8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
        }
    }

    /// The name in kernel entry points, tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::I8 => "i8",
            DType::I32 => "i32",
            DType::U32 => "u32",
        }
    }

    /// Whether this is one of [`DType::FLOATS`].
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl core::fmt::Display for DType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

impl core::str::FromStr for DType {
    type Err = UnknownDType;
    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or(UnknownDType)
    }
}

/// A text that is no element type's [name](DType::name).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownDType;

impl core::fmt::Display for UnknownDType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("unknown element type: expected ")?;
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{dtype}")?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownDType {}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{DType, UnknownDType};
    use std::string::ToString;

    #[test]
    fn types_by_name() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!("f64".parse::<DType>(), Err(UnknownDType));
        let expected = "unknown element type: expected f32, f16, bf16, f8e4m3, i8, i32, u32";
        assert_eq!(UnknownDType.to_string(), expected);
    }
}
