//! The block types of ggml, as GGUF files hold them.

use half::f16;

use super::levels::e8m0;
use host::weight::ScaleType;

use super::{CodeType, Origin, Origins};

/// The values of the 4-bit float's codes.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A type of ggml's tensors that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "ggml's names")]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

impl GgmlType {
    /// Of the number that a file has for it.
    pub(crate) fn of(id: u32) -> Option<Self> {
        Some(match id {
            0 => GgmlType::F32,
            1 => GgmlType::F16,
            2 => GgmlType::Q4_0,
            3 => GgmlType::Q4_1,
            6 => GgmlType::Q5_0,
            7 => GgmlType::Q5_1,
            8 => GgmlType::Q8_0,
            12 => GgmlType::Q4K,
            13 => GgmlType::Q5K,
            14 => GgmlType::Q6K,
            30 => GgmlType::Bf16,
            39 => GgmlType::Mxfp4,
            _ => return None,
        })
    }

    /// The name that ggml has for a number, read or not.
    pub(crate) fn name_of(id: u32) -> String {
        const NAMES: [(u32, &str); 37] = [
            (0, "F32"),
            (1, "F16"),
            (2, "Q4_0"),
            (3, "Q4_1"),
            (6, "Q5_0"),
            (7, "Q5_1"),
            (8, "Q8_0"),
            (9, "Q8_1"),
            (10, "Q2_K"),
            (11, "Q3_K"),
            (12, "Q4_K"),
            (13, "Q5_K"),
            (14, "Q6_K"),
            (15, "Q8_K"),
            (16, "IQ2_XXS"),
            (17, "IQ2_XS"),
            (18, "IQ3_XXS"),
            (19, "IQ1_S"),
            (20, "IQ4_NL"),
            (21, "IQ3_S"),
            (22, "IQ2_S"),
            (23, "IQ4_XS"),
            (24, "I8"),
            (25, "I16"),
            (26, "I32"),
            (27, "I64"),
            (28, "F64"),
            (29, "IQ1_M"),
            (30, "BF16"),
            (31, "Q4_0_4_4"),
            (32, "Q4_0_4_8"),
            (33, "Q4_0_8_8"),
            (34, "TQ1_0"),
            (35, "TQ2_0"),
            (38, "IQ4_NL_8_8"),
            (39, "MXFP4"),
            (40, "NVFP4"),
        ];
        let known = NAMES.iter().find(|(known, _)| *known == id);
        known.map_or_else(|| format!("ggml type {id}"), |(_, name)| (*name).to_owned())
    }

    /// Those that are read, for messages.
    pub(crate) const READABLE: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4";

    /// Elements and bytes of a block.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            GgmlType::F32 => (1, 4),
            GgmlType::F16 | GgmlType::Bf16 => (1, 2),
            GgmlType::Q4_0 => (32, 18),
            GgmlType::Q4_1 => (32, 20),
            GgmlType::Q5_0 => (32, 22),
            GgmlType::Q5_1 => (32, 24),
            GgmlType::Q8_0 => (32, 34),
            GgmlType::Q4K => (256, 144),
            GgmlType::Q5K => (256, 176),
            GgmlType::Q6K => (256, 210),
            GgmlType::Mxfp4 => (32, 17),
        }
    }

    /// Bytes of a row of `k` elements; none if they are no whole blocks, or too many.
    pub(crate) fn row_bytes(self, k: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        k.is_multiple_of(elements).then_some(())?;
        (k / elements).checked_mul(bytes)
    }

    /// None of floats that are not quantised.
    pub(super) fn code_type(self) -> Option<CodeType> {
        Some(match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => return None,
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4K => CodeType::Int { bits: 4 },
            GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5K => CodeType::Int { bits: 5 },
            GgmlType::Q6K => CodeType::Int { bits: 6 },
            GgmlType::Q8_0 => CodeType::Int { bits: 8 },
            GgmlType::Mxfp4 => CodeType::E2m1,
        })
    }

    /// Elements of a group.
    pub(super) fn group(self) -> usize {
        if self == GgmlType::Q6K { 16 } else { 32 }
    }

    pub(super) fn scale_type(self) -> ScaleType {
        match self {
            GgmlType::Q4K | GgmlType::Q5K => ScaleType::U8Super,
            GgmlType::Q6K => ScaleType::I8Super,
            GgmlType::Mxfp4 => ScaleType::E8m0,
            _ => ScaleType::F16,
        }
    }

    pub(super) fn origins(self) -> Origins {
        match self {
            GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => Origins::Minimums,
            GgmlType::Q4_0 => Origins::Constant(8),
            GgmlType::Q5_0 => Origins::Constant(16),
            GgmlType::Q6K => Origins::Constant(32),
            GgmlType::Q8_0 => Origins::Constant(128),
            _ => Origins::Constant(0),
        }
    }

    /// The block of a group, and the group's number in it.
    fn block_of(self, row: &[u8], group: usize) -> (&[u8], usize) {
        let (elements, bytes) = self.block();
        let per_block = elements / self.group();
        (&row[group / per_block * bytes..][..bytes], group % per_block)
    }

    /// The bytes of a group's scale and minimum, of those that have super scales.
    pub(super) fn integer_scales(self, row: &[u8], group: usize) -> [u8; 2] {
        let (block, group) = self.block_of(row, group);
        match self {
            GgmlType::Q4K | GgmlType::Q5K => six_bits(&block[4..16], group).into(),
            GgmlType::Q6K => [block[192 + group], 0],
            _ => [0; 2],
        }
    }

    /// The super scales of a block, of the scales and of the minimums.
    pub(super) fn super_scales(self, row: &[u8], block: usize) -> [u16; 2] {
        let (_, bytes) = self.block();
        let half = |at: usize| u16::from_le_bytes([row[block * bytes + at], row[block * bytes + at + 1]]);
        match self {
            GgmlType::Q4K | GgmlType::Q5K => [half(0), half(2)],
            GgmlType::Q6K => [half(208), 0],
            _ => [0; 2],
        }
    }

    pub(super) fn scale(self, row: &[u8], group: usize) -> f32 {
        let (block, group) = self.block_of(row, group);
        match self {
            GgmlType::Mxfp4 => e8m0(block[0]),
            GgmlType::Q4K | GgmlType::Q5K => half(block, 0) * f32::from(six_bits(&block[4..16], group).0),
            GgmlType::Q6K => half(block, 208) * f32::from(block[192 + group] as i8),
            _ => half(block, 0),
        }
    }

    pub(super) fn origin(self, row: &[u8], group: usize) -> Origin {
        match self.origins() {
            Origins::Constant(zero) => Origin::Zero(zero),
            _ => {
                let (block, group) = self.block_of(row, group);
                Origin::Minimum(match self {
                    GgmlType::Q4K | GgmlType::Q5K => {
                        -(half(block, 2) * f32::from(six_bits(&block[4..16], group).1))
                    }
                    _ => half(block, 2),
                })
            }
        }
    }

    /// The codes of a row.
    pub(super) fn codes(self, row: &[u8], out: &mut [u8]) {
        let (elements, bytes) = self.block();
        for (out, block) in out.chunks_exact_mut(elements).zip(row.chunks_exact(bytes)) {
            match self {
                GgmlType::Q8_0 => {
                    for (out, byte) in out.iter_mut().zip(&block[2..]) {
                        *out = byte ^ 0x80;
                    }
                }
                GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Mxfp4 | GgmlType::Q5_0 | GgmlType::Q5_1 => {
                    let (low, high) = out.split_at_mut(16);
                    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[bytes - 16..]) {
                        (*low, *high) = (byte & 15, byte >> 4);
                    }
                    if matches!(self, GgmlType::Q5_0 | GgmlType::Q5_1) {
                        for (index, out) in out.iter_mut().enumerate() {
                            let byte = block[bytes - 20 + index / 8];
                            *out |= (byte >> (index % 8) & 1) << 4;
                        }
                    }
                }
                GgmlType::Q4K | GgmlType::Q5K => {
                    for (pair, bytes) in out.chunks_exact_mut(64).zip(block[bytes - 128..].chunks_exact(32)) {
                        let (low, high) = pair.split_at_mut(32);
                        for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
                            (*low, *high) = (byte & 15, byte >> 4);
                        }
                    }
                    if self == GgmlType::Q5K {
                        for (run, out) in out.chunks_exact_mut(32).enumerate() {
                            for (out, byte) in out.iter_mut().zip(&block[16..48]) {
                                *out |= (byte >> run & 1) << 4;
                            }
                        }
                    }
                }
                GgmlType::Q6K => {
                    for (half, out) in out.chunks_exact_mut(128).enumerate() {
                        let (low, high) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
                        for (index, out) in out.iter_mut().enumerate() {
                            let (run, place) = (index / 32, index % 32);
                            let four = low[place + 32 * (run % 2)] >> (4 * (run / 2)) & 15;
                            *out = four | (high[place] >> (2 * run) & 3) << 4;
                        }
                    }
                }
                GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => {}
            }
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The scale and the minimum of one of eight groups.
fn six_bits(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let both = packed[group + 4];
    (both & 15 | packed[group - 4] >> 6 << 4, both >> 4 | packed[group] >> 6 << 4)
}
