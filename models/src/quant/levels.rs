//! Scales and zero points in tensors of their own.

use half::{bf16, f16};

use super::codes::{awq_field, word};
use host::F8E4M3;
use host::weight::ScaleType;

/// A scale in a tensor of its own, where none has a super scale.
fn read(kind: ScaleType, data: &[u8], index: usize) -> f32 {
    let two = || [data[2 * index], data[2 * index + 1]];
    match kind {
        ScaleType::F32 => f32::from_bits(word(data, index)),
        ScaleType::F16 => f16::from_le_bytes(two()).to_f32(),
        ScaleType::Bf16 => bf16::from_le_bytes(two()).to_f32(),
        ScaleType::E8m0 => e8m0(data[index]),
        _ => F8E4M3(data[index]).to_f32(),
    }
}

/// A power of two by its biased exponent.
pub(super) fn e8m0(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// A number for all scales of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Factor {
    None,
    Times(f32),
    /// Scales are divided by it.
    Over(f32),
}

/// A scale for each group of `group_k` columns in each block of `block_n` rows: number
/// `row / block_n · row_stride + group · group_stride` of `data`.
#[derive(Clone, Debug)]
pub(crate) struct Scales<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) kind: ScaleType,
    pub(crate) group_k: usize,
    pub(crate) block_n: usize,
    pub(crate) row_stride: usize,
    pub(crate) group_stride: usize,
    pub(crate) factor: Factor,
}

impl Scales<'_> {
    pub(super) fn local(&self, row: usize, group: usize) -> f32 {
        let index = row / self.block_n * self.row_stride + group * self.group_stride;
        read(self.kind, self.data, index)
    }

    pub(super) fn get(&self, row: usize, group: usize) -> f32 {
        let scale = self.local(row, group);
        match self.factor {
            Factor::None => scale,
            Factor::Times(factor) => scale * factor,
            Factor::Over(divisor) => scale / divisor,
        }
    }
}

/// Zero points, of the codes as numbers without sign.
#[derive(Clone, Debug)]
pub(crate) enum Zeros<'a> {
    /// One for all.
    Constant(i32),
    /// GPTQ's: words along n, `[groups, n · bits / 32]`, to which `add` is added as a whole.
    AlongN { data: &'a [u8], bits: u32, n: usize, add: u32 },
    /// AWQ's: `[groups, n / 8]`.
    Awq { data: &'a [u8], n: usize },
    /// Those of compressed-tensors: words along n, `[n · bits / 32, groups]`, the last of which may be filled up.
    AcrossRows { data: &'a [u8], bits: u32, groups: usize },
    /// Signed bytes, `[n, groups]`, of signed codes.
    Signed { data: &'a [u8], groups: usize },
}

impl Zeros<'_> {
    pub(super) fn get(&self, row: usize, group: usize) -> i32 {
        let field = |word: u32, bits: u32| {
            (word >> (row % (32 / bits) as usize * bits as usize) & ((1 << bits) - 1)) as i32
        };
        match *self {
            Zeros::Constant(zero) => zero,
            Zeros::AlongN { data, bits, n, add } => {
                let per_word = (32 / bits) as usize;
                let stored = word(data, group * (n / per_word) + row / per_word);
                field(stored.wrapping_add(add), bits)
            }
            Zeros::Awq { data, n } => i32::from(awq_field(data, group * (n / 8), row)),
            Zeros::AcrossRows { data, bits, groups } => {
                let per_word = (32 / bits) as usize;
                field(word(data, row / per_word * groups + group), bits)
            }
            Zeros::Signed { data, groups } => i32::from(data[row * groups + group] as i8) + 128,
        }
    }
}
