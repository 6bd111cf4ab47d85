//! From a file's quantised matrix to the layout that kernels read.

use half::{bf16, f16};
use host::F8E4M3;
use host::weight::{Codes, Layout, ScaleType, Scheme, WeightSource};

use super::{CodeType, Origin, Origins, QuantMatrix};

/// What checkpoints' quantised weights are on a device: formats by their names, and a layout of each. Other types of
/// scales and sizes of groups are the same kernels'.
pub const WEIGHT_FORMATS: &[(&str, Layout)] = {
    const INT4: Layout = Layout {
        codes: Codes::Int4,
        group: 128,
        rows: 1,
        scale: ScaleType::F16,
        zeros: false,
        minimums: false,
        permuted: false,
    };
    const GGUF4: Layout = Layout { group: 32, ..INT4 };
    const GGUF8: Layout = Layout { codes: Codes::Int8, ..GGUF4 };
    &[
        ("fp8, blocks of 128 x 128", Scheme::FP8.layout()),
        ("fp8, channels or tensors", Scheme::FP8_CHANNEL.layout()),
        ("int8, channels", Scheme::INT8.layout()),
        ("int8, groups (GPTQ, compressed-tensors)", Layout { codes: Codes::Int8, ..INT4 }),
        ("int8, groups with zero points (GPTQ)", Layout { codes: Codes::Int8, zeros: true, ..INT4 }),
        ("int4, groups (GPTQ, compressed-tensors)", INT4),
        ("int4, groups with zero points (GPTQ, AWQ)", Layout { zeros: true, ..INT4 }),
        ("MXFP4", Scheme::MXFP4.layout()),
        ("NVFP4", Scheme::NVFP4.layout()),
        ("GGUF Q4_0", GGUF4),
        ("GGUF Q4_1", Layout { minimums: true, ..GGUF4 }),
        ("GGUF Q5_0, Q8_0", GGUF8),
        ("GGUF Q4_K", Layout { scale: ScaleType::U8Super, minimums: true, ..GGUF4 }),
        ("GGUF Q5_1", Layout { minimums: true, ..GGUF8 }),
        ("GGUF Q5_K", Layout { scale: ScaleType::U8Super, minimums: true, ..GGUF8 }),
        ("GGUF Q6_K", Layout { scale: ScaleType::I8Super, group: 16, ..GGUF8 }),
    ]
};

/// A matrix of a file as the source of a packed weight.
pub(crate) struct Packable<'a> {
    matrix: QuantMatrix<'a>,
    layout: Layout,
    /// What is added to codes, so that they count from the layout's zero point.
    shift: i32,
    /// The column at each place, where groups are not of neighbours: those of the first group, of the second, …
    order: Option<Vec<u32>>,
}

impl<'a> Packable<'a> {
    /// None for what the kernels have no layout for: groups of unequal sizes or such that are no power of two, or
    /// scales that cannot be kept as they are.
    pub(crate) fn new(matrix: QuantMatrix<'a>) -> Option<Self> {
        let order = match matrix.group_of() {
            None => None,
            Some(groups) => Some(order_of(groups, matrix.group_k())?),
        };
        let codes = match matrix.code_type() {
            CodeType::Int { bits: ..=4 } => Codes::Int4,
            CodeType::Int { .. } => Codes::Int8,
            CodeType::E2m1 => Codes::E2m1,
            CodeType::E4m3 => Codes::E4m3,
        };
        let group = if matrix.group_k() >= matrix.k() { 0 } else { u32::try_from(matrix.group_k()).ok()? };
        let scale = match (matrix.scale_type(), matrix.global_scale()) {
            (ScaleType::E4m3, _) => ScaleType::E4m3,
            (scale, None) => scale,
            _ => return None,
        };
        let (zeros, minimums) = match matrix.origins() {
            Origins::Constant(_) => (false, false),
            Origins::ZeroPoints => (true, false),
            Origins::Minimums => (false, true),
        };
        let permuted = order.is_some();
        let mut layout = Layout { codes, group, rows: 1, scale, zeros, minimums, permuted };
        let blocks = Layout { rows: u32::try_from(matrix.block_n()).ok()?, ..layout };
        // A block as high as the matrix, or an odd one, is a scale for each of its rows.
        if blocks.problem().is_none() && matrix.block_n() < matrix.n() {
            layout = blocks;
        }
        layout.problem().is_none().then_some(())?;
        let shift = match matrix.origins() {
            Origins::Constant(zero) if matches!(codes, Codes::Int4 | Codes::Int8) => {
                let (least, most) = (0, (1 << matrix.code_type().bits()) - 1);
                let shift = i32::from(layout.zero()) - zero;
                let fits = least + shift >= 0 && most + shift < 1 << codes.bits();
                fits.then_some(shift)?
            }
            _ => 0,
        };
        Some(Packable { matrix, layout, shift, order })
    }

    /// The first scale that is no number.
    pub(crate) fn unsound(&self) -> Option<String> {
        use rayon::prelude::*;
        (0..self.matrix.n())
            .into_par_iter()
            .find_map_first(|row| self.matrix.unsound_scale(row))
            .map(|(row, group, scale)| format!("{scale} in row {row}, group {group}"))
    }

    fn bits(&self, scale: f32) -> u32 {
        match self.layout.scale {
            ScaleType::F16 => f16::from_f32(scale).to_bits().into(),
            ScaleType::Bf16 => bf16::from_f32(scale).to_bits().into(),
            // Of a power of two: its exponent, which is 0 for the subnormal one.
            ScaleType::E8m0 => scale.to_bits() >> 23,
            ScaleType::E4m3 => F8E4M3::from_f32(scale).0.into(),
            _ => scale.to_bits(),
        }
    }
}

/// Columns by their groups, those of one as they are; none unless each group but the last has `size` of them.
fn order_of(groups: &[u32], size: usize) -> Option<Vec<u32>> {
    let mut order: Vec<u32> = (0..u32::try_from(groups.len()).ok()?).collect();
    order.sort_by_key(|&column| groups[column as usize]);
    let are_whole = order.iter().enumerate().all(|(place, &column)| {
        place.checked_div(size).is_some_and(|group| group == groups[column as usize] as usize)
    });
    are_whole.then_some(order)
}

impl WeightSource for Packable<'_> {
    fn size(&self) -> [usize; 2] {
        [self.matrix.n(), self.matrix.k()]
    }

    fn layout(&self) -> Layout {
        self.layout
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        match &self.order {
            None => self.matrix.row_codes(row, codes),
            Some(order) => {
                let mut stored = vec![0; codes.len()];
                self.matrix.row_codes(row, &mut stored);
                for (code, &column) in std::iter::zip(&mut *codes, order) {
                    *code = stored[column as usize];
                }
            }
        }
        if self.shift != 0 {
            codes.iter_mut().for_each(|code| *code = (i32::from(*code) + self.shift) as u8);
        }
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        if self.layout.scale.has_supers() {
            return self.matrix.integer_scales(row, group)[0].into();
        }
        self.bits(self.matrix.local_scale(row, group))
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        match self.matrix.origin(row, group) {
            Origin::Zero(zero) => zero as u8,
            Origin::Minimum(_) => 0,
        }
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        if self.layout.scale.has_supers() {
            return self.matrix.integer_scales(row, group)[1].into();
        }
        match self.matrix.origin(row, group) {
            // It is subtracted there, and added here.
            Origin::Minimum(minimum) => self.bits(-minimum),
            Origin::Zero(_) => 0,
        }
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        self.matrix.super_scales(row, stretch)
    }

    fn global(&self) -> f32 {
        self.matrix.global_scale().unwrap_or(1.0)
    }

    fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::order_of;

    #[test]
    fn columns_by_their_groups() {
        assert_eq!(order_of(&[1, 0, 2, 0, 1, 1, 0], 3), Some(vec![1, 3, 6, 0, 4, 5, 2]));
        assert_eq!(order_of(&[0, 0, 1], 2), Some(vec![0, 1, 2]));
        assert_eq!(order_of(&[], 2), Some(Vec::new()));
        // Groups of unequal sizes, one that nobody is of, and one beyond the last.
        for groups in [&[0, 0, 0, 1][..], &[0, 1, 1, 1], &[1, 1, 2, 2], &[0, 0, 0, 0], &[0, 0, 7, 7]] {
            assert_eq!(order_of(groups, 2), None, "{groups:?}");
        }
    }
}
