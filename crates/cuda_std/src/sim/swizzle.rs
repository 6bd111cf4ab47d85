//! Where the elements of a tile are in shared memory: swizzle patterns, and the descriptors of `wgmma`.

use super::tensor_core::Major;
use crate::wgmma::Swizzle;

impl Swizzle {
    /// Bytes of a row of the pattern: 16 without one.
    pub const fn bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }

    /// Bytes after which the pattern repeats; tiles start at a multiple.
    pub const fn repeat(self) -> u32 {
        8 * self.bytes()
    }

    /// Where the byte is that without the pattern would be at shared address `address`.
    pub const fn apply(self, address: u32) -> u32 {
        // 16-byte pieces (bits 4..) by rows of 128 bytes (bits 7..).
        let pieces = self.bytes() / 16 - 1;
        address ^ (address >> 7 & pieces) << 4
    }
}

/// A decoded descriptor of `wgmma`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operand {
    /// Shared address of the first element, before the swizzle.
    pub start: u32,
    /// The leading byte offset.
    pub leading: u32,
    /// The stride byte offset.
    pub stride: u32,
    /// The pattern.
    pub swizzle: Swizzle,
    /// The contiguous index.
    pub major: Major,
}

/// What is wrong with a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DescriptorError {
    /// Bits that no field has.
    #[error("descriptor {0:#018x} has bits outside its fields")]
    UnknownBits(u64),
    /// A base offset: tiles start at a multiple of the swizzle's repeat.
    #[error("descriptor {0:#018x} has a base offset, which is not supported")]
    BaseOffset(u64),
}

impl Operand {
    /// Takes the 64 bits of a descriptor apart.
    pub fn decode(descriptor: u64, major: Major) -> Result<Self, DescriptorError> {
        if descriptor & !0xc00e_3fff_3fff_3fff != 0 {
            return Err(DescriptorError::UnknownBits(descriptor));
        }
        if descriptor >> 49 & 7 != 0 {
            return Err(DescriptorError::BaseOffset(descriptor));
        }
        let field = |bit: u32| ((descriptor >> bit) as u32 & 0x3fff) << 4;
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        Ok(Operand { start: field(0), leading: field(16), stride: field(32), swizzle, major })
    }

    /// Shared address of the element at `mn` (a row of a, a column of b) and `k`.
    pub fn address(&self, mn: u32, k: u32, element_bytes: u32) -> u32 {
        let Operand { start, leading, stride, swizzle, major } = *self;
        let width = swizzle.bytes();
        let offset = match (major, swizzle) {
            (Major::K, Swizzle::None) => {
                let byte = k * element_bytes;
                mn % 8 * 16 + mn / 8 * stride + byte % 16 + byte / 16 * leading
            }
            (Major::K, _) => mn % 8 * width + mn / 8 * stride + k * element_bytes,
            (Major::Mn, Swizzle::None) => {
                let byte = mn * element_bytes;
                byte % 16 + byte / 16 * stride + k % 8 * 16 + k / 8 * leading
            }
            (Major::Mn, _) => {
                let byte = mn * element_bytes;
                byte % width + byte / width * leading + k % 8 * width + k / 8 * stride
            }
        };
        swizzle.apply(start + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wgmma::{Descriptor, KMajor, MnMajor};
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::string::ToString;

    const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];

    #[test]
    fn pieces_are_exchanged_within_the_width() {
        for swizzle in SWIZZLES {
            let moved: HashSet<u32> = (0..swizzle.repeat()).map(|byte| swizzle.apply(byte)).collect();
            assert_eq!(moved.len(), swizzle.repeat() as usize);
            assert!(moved.iter().all(|&byte| byte < swizzle.repeat()));
            for byte in 0..4096 {
                assert_eq!(swizzle.apply(byte) / swizzle.bytes(), byte / swizzle.bytes());
                assert_eq!(swizzle.apply(byte) % 16, byte % 16);
                assert_eq!(swizzle.apply(swizzle.apply(byte)), byte);
                assert_eq!(swizzle.apply(byte + swizzle.repeat()), swizzle.apply(byte) + swizzle.repeat());
            }
        }
        // Piece c of row r of 128 bytes is at c ^ (r % 8).
        for (row, piece) in [(0, 5), (3, 0), (7, 7), (12, 1)] {
            assert_eq!(Swizzle::Bytes128.apply(row * 128 + piece * 16), row * 128 + (piece ^ (row % 8)) * 16);
        }
        assert_eq!(Swizzle::Bytes64.apply(64 * 2 + 16), 64 * 2);
        assert_eq!(Swizzle::Bytes32.apply(32 * 4), 32 * 4 + 16);
        assert_eq!(Swizzle::Bytes32.apply(32 * 3), 32 * 3);
    }

    #[test]
    fn descriptors_come_back() {
        for swizzle in SWIZZLES {
            let bits = Descriptor::<KMajor>::new(0x2_3450, swizzle, 0x1230, 0x3_fff0).bits();
            let operand = Operand::decode(bits, Major::K).expect("a descriptor");
            let expected =
                Operand { start: 0x2_3450, leading: 0x1230, stride: 0x3_fff0, swizzle, major: Major::K };
            assert_eq!(operand, expected);
            let next = Descriptor::<KMajor>::new(0x2_3450, swizzle, 0x1230, 0x3_fff0).advance(32).bits();
            assert_eq!(Operand::decode(next, Major::K).map(|operand| operand.start), Ok(0x2_3470));
        }
        // The example of a 128-byte swizzle, bit by bit.
        let bits = Descriptor::<MnMajor>::new(0x400, Swizzle::Bytes128, 16, 1024).bits();
        assert_eq!(bits, 0x40 | 1 << 16 | 64 << 32 | 1 << 62);
        let text = |bits| Operand::decode(bits, Major::K).unwrap_err().to_string();
        assert_eq!(text(1 << 14), "descriptor 0x0000000000004000 has bits outside its fields");
        assert_eq!(text(1 << 50), "descriptor 0x0004000000000000 has a base offset, which is not supported");
    }

    /// The tiles of every layout, as they are described: elements do not collide, and 16 bytes stay together.
    #[test]
    fn elements_have_places_of_their_own() {
        for swizzle in SWIZZLES {
            let width = swizzle.bytes();
            for bytes in [1u32, 2, 4] {
                let (n, k) = (64, 32 / bytes);
                let operands = [
                    match swizzle {
                        Swizzle::None => (128, 256, Major::K),
                        _ => (0, 8 * width, Major::K),
                    },
                    match swizzle {
                        Swizzle::None => (n * bytes / 16 * 128, 128, Major::Mn),
                        _ => (k.div_ceil(8) * 8 * width, 8 * width, Major::Mn),
                    },
                ];
                for (leading, stride, major) in operands {
                    let operand = Operand { start: 1024, leading, stride, swizzle, major };
                    let addresses: HashSet<u32> =
                        (0..n * k).map(|i| operand.address(i % n, i / n, bytes)).collect();
                    assert_eq!(addresses.len(), (n * k) as usize, "{operand:?} {bytes}");
                    assert!(addresses.iter().all(|address| *address >= 1024 && address % bytes == 0));
                }
            }
        }
    }

    proptest! {
        /// A row-major tile with rows of the swizzle's width, as TMA leaves it, read as either operand.
        #[test]
        fn rows_of_the_swizzles_width(row in 0u32..64, byte in 0u32..128, element_bytes in prop::sample::select(&[1u32, 2, 4][..])) {
            for swizzle in &SWIZZLES[1..] {
                let width = swizzle.bytes();
                let (byte, leading) = (byte % width / element_bytes * element_bytes, 64 * width);
                let start = 3 * 1024;
                let expected = swizzle.apply(start + row * width + byte);
                let column = byte / element_bytes;
                let k_major = Operand { start, leading: 16, stride: 8 * width, swizzle: *swizzle, major: Major::K };
                // The instruction's k spans 32 bytes; descriptors advance to the others.
                let step = byte / 32 * 32;
                let advanced = Operand { start: start + step, ..k_major };
                prop_assert_eq!(advanced.address(row, (byte - step) / element_bytes, element_bytes), expected);
                let mn_major = Operand { leading, major: Major::Mn, ..k_major };
                prop_assert_eq!(mn_major.address(column, row, element_bytes), expected);
                let next_chunk = mn_major.address(column + width / element_bytes, row, element_bytes);
                prop_assert_eq!(next_chunk, swizzle.apply(start + leading + row * width + byte));
            }
        }
    }
}
