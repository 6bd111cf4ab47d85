//! Quantised matrices as checkpoints hold them: one description of every format, read from the memory map row by row.
//!
//! [`QuantMatrix`] is what packers into device layouts take, and [`QuantMatrix::dequantise_row`] is the specification
//! of what a format's values are.

mod codes;
mod formats;
mod ggml;
mod in_place;
mod levels;
mod pack;
mod save;

use std::sync::{Arc, LazyLock};

pub use ggml::GgmlType;
pub use pack::WEIGHT_FORMATS;
pub use save::{QuantReport, QuantisedTensor};

pub(super) use codes::Codes;
pub(super) use formats::{Module, RawTensor, mxfp4_blocks};
pub(super) use ggml::E2M1;
pub(super) use levels::{Factor, Scales, Zeros};
pub(crate) use pack::Packable;

use host::weight::{ScaleType, WeightSource};
use host::{Error, F8E4M3};

/// Says of what tensor an error is that has come of its values.
pub(crate) fn of_tensor(name: &str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Invalid { op, argument, expected, got } => {
            Error::Invalid { op, argument, expected, got: format!("{got} of {name}") }
        }
        error => error,
    }
}

/// What a code stands for before it is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// The code itself, without sign, less the group's zero point or beside its minimum. Signed integers have their
    /// sign bit inverted and a zero point of `2^(bits - 1)`.
    Int {
        /// 2 to 8.
        bits: u32,
    },
    /// A 4-bit float: sign, two bits of exponent, one of mantissa.
    E2m1,
    /// An 8-bit float: sign, four bits of exponent, three of mantissa; no infinity.
    E4m3,
}

impl CodeType {
    /// Bits of a code.
    pub fn bits(self) -> u32 {
        match self {
            CodeType::Int { bits } => bits,
            CodeType::E2m1 => 4,
            CodeType::E4m3 => 8,
        }
    }

    /// The value of a float's code.
    fn float(self, code: u8) -> f32 {
        static E4M3: LazyLock<[f32; 256]> =
            LazyLock::new(|| std::array::from_fn(|code| F8E4M3(code as u8).to_f32()));
        match self {
            CodeType::E4m3 => E4M3[usize::from(code)],
            _ => E2M1[usize::from(code & 15)],
        }
    }
}

/// What integers of a group are counted from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Origin {
    /// `scale · (code - zero)`.
    Zero(i32),
    /// `scale · code + minimum`.
    Minimum(f32),
}

/// How a matrix's origins differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origins {
    /// One zero point for all groups.
    Constant(i32),
    /// A zero point for each group.
    ZeroPoints,
    /// A minimum for each group.
    Minimums,
}

/// A quantised matrix `[n, k]` as it lies in a file: codes, and for each group of a row a scale and perhaps a zero
/// point or a minimum. Cheap to clone; the bytes stay where they are.
#[derive(Clone, Debug)]
pub struct QuantMatrix<'a> {
    n: usize,
    k: usize,
    code_type: CodeType,
    layout: Layout<'a>,
    /// The group of each k, where it is not `k / group_k`.
    group_of: Option<Arc<[u32]>>,
    /// Where each row lies in the file, where that is not its number.
    rows: Option<Arc<[u32]>>,
}

#[derive(Clone, Debug)]
enum Layout<'a> {
    /// Codes, scales and zero points in tensors of their own.
    Parts { codes: Codes<'a>, scales: Scales<'a>, zeros: Zeros<'a> },
    /// Rows of ggml's blocks, which hold all of it.
    Blocks { kind: GgmlType, data: &'a [u8] },
}

impl<'a> QuantMatrix<'a> {
    /// Of tensors that have been checked to be as long as `[n, k]` and its groups need.
    pub(super) fn of_parts(
        [n, k]: [usize; 2],
        code_type: CodeType,
        codes: Codes<'a>,
        scales: Scales<'a>,
        zeros: Zeros<'a>,
    ) -> Self {
        let layout = Layout::Parts { codes, scales, zeros };
        QuantMatrix { n, k, code_type, layout, group_of: None, rows: None }
    }

    /// Of ggml's blocks, row after row; none if `kind` is not quantised, or `data` has another length than `[n, k]` of
    /// them.
    pub fn of_blocks([n, k]: [usize; 2], kind: GgmlType, data: &'a [u8]) -> Option<Self> {
        let code_type = kind.code_type()?;
        if n.checked_mul(kind.row_bytes(k)?)? != data.len() {
            return None;
        }
        Some(QuantMatrix {
            n,
            k,
            code_type,
            layout: Layout::Blocks { kind, data },
            group_of: None,
            rows: None,
        })
    }

    /// With the group of each k stated: `k` numbers, all of groups that there are.
    pub(super) fn with_groups(self, group_of: Vec<u32>) -> Self {
        debug_assert!(
            group_of.len() == self.k && group_of.iter().all(|&group| (group as usize) < self.groups())
        );
        let regular = group_of.iter().enumerate().all(|(k, &group)| k / self.group_k() == group as usize);
        QuantMatrix { group_of: (!regular).then(|| group_of.into()), ..self }
    }

    /// Some rows of this matrix, in this order.
    pub(super) fn with_rows(self, rows: Vec<u32>) -> Self {
        let n = rows.len();
        let rows = match &self.rows {
            Some(known) => rows.into_iter().map(|row| known[row as usize]).collect(),
            None => rows.into(),
        };
        QuantMatrix { n, rows: Some(rows), ..self }
    }

    /// What a [`Weight`](host::weight::Weight) is packed from; none for what the kernels have no layout for: groups of
    /// unequal sizes or such that are no power of two, or scales that cannot be kept as they are.
    pub fn weight_source(self) -> Option<impl WeightSource + use<'a>> {
        Packable::new(self)
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns: what a product sums over.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What a code stands for.
    pub fn code_type(&self) -> CodeType {
        self.code_type
    }

    /// Columns of a group, but for those of the last, which may be fewer.
    pub fn group_k(&self) -> usize {
        match &self.layout {
            Layout::Parts { scales, .. } => scales.group_k,
            Layout::Blocks { kind, .. } => kind.group(),
        }
    }

    /// Rows that share their scales: those of a block, of which the last may be fewer.
    pub fn block_n(&self) -> usize {
        match &self.layout {
            Layout::Parts { scales, .. } => scales.block_n,
            Layout::Blocks { .. } => 1,
        }
    }

    /// How many neighbouring columns and rows may not be parted from each other: those of a group, of a block, of a
    /// super block.
    pub(crate) fn unit(&self) -> usize {
        let columns = match self.scale_type() {
            ScaleType::U8Super | ScaleType::I8Super => 256,
            _ if self.group_k() >= self.k => 1,
            _ => self.group_k(),
        };
        columns.max(if self.block_n() >= self.n { 1 } else { self.block_n() })
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.k.div_ceil(self.group_k())
    }

    /// The group of each k, where that is not `k / group_k`: the columns were quantised in another order (`g_idx`).
    pub fn group_of(&self) -> Option<&[u32]> {
        self.group_of.as_deref()
    }

    /// The type in which the file has the scales.
    pub fn scale_type(&self) -> ScaleType {
        match &self.layout {
            Layout::Parts { scales, .. } => scales.kind,
            Layout::Blocks { kind, .. } => kind.scale_type(),
        }
    }

    /// What each scale is multiplied by, where the format has such a number for the whole matrix: as the file states
    /// it, or one over what it states.
    pub fn global_scale(&self) -> Option<f32> {
        match &self.layout {
            Layout::Parts { scales, .. } => match scales.factor {
                Factor::None => None,
                Factor::Times(factor) => Some(factor),
                Factor::Over(divisor) => Some(1.0 / divisor),
            },
            Layout::Blocks { .. } => None,
        }
    }

    /// How the matrix's origins differ; of floats `Constant(0)`.
    pub fn origins(&self) -> Origins {
        match &self.layout {
            Layout::Parts { zeros: Zeros::Constant(zero), .. } => Origins::Constant(*zero),
            Layout::Parts { .. } => Origins::ZeroPoints,
            Layout::Blocks { kind, .. } => kind.origins(),
        }
    }

    /// The scale of a group of a row: all that its elements are multiplied by.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let row = self.stored(row);
        match &self.layout {
            Layout::Parts { scales, .. } => scales.get(row, group),
            Layout::Blocks { kind, data } => kind.scale(self.row_of_blocks(*kind, data, row), group),
        }
    }

    /// The same without the matrix's [`QuantMatrix::global_scale`]: what [`ScaleType`] holds exactly.
    pub fn local_scale(&self, row: usize, group: usize) -> f32 {
        match &self.layout {
            Layout::Parts { scales, .. } => scales.local(self.stored(row), group),
            Layout::Blocks { .. } => self.scale(row, group),
        }
    }

    /// What the integers of a group of a row are counted from; of floats `Zero(0)`.
    pub fn origin(&self, row: usize, group: usize) -> Origin {
        let row = self.stored(row);
        match &self.layout {
            Layout::Parts { zeros, .. } => Origin::Zero(zeros.get(row, group)),
            Layout::Blocks { kind, data } => kind.origin(self.row_of_blocks(*kind, data, row), group),
        }
    }

    /// The bytes of a group's scale and minimum that ggml's super scales are multiplied by; 0 in other formats.
    pub(crate) fn integer_scales(&self, row: usize, group: usize) -> [u8; 2] {
        match &self.layout {
            Layout::Blocks { kind, data } => {
                kind.integer_scales(self.row_of_blocks(*kind, data, self.stored(row)), group)
            }
            Layout::Parts { .. } => [0; 2],
        }
    }

    /// The bits of a block's super scales, of the scales and of the minimums, as binary16; 0 in other formats.
    pub(crate) fn super_scales(&self, row: usize, block: usize) -> [u16; 2] {
        match &self.layout {
            Layout::Blocks { kind, data } => {
                kind.super_scales(self.row_of_blocks(*kind, data, self.stored(row)), block)
            }
            Layout::Parts { .. } => [0; 2],
        }
    }

    /// The codes of a row, `k` of them.
    pub fn row_codes(&self, row: usize, codes: &mut [u8]) {
        assert!(row < self.n && codes.len() == self.k, "row {row} of {} codes of {self:?}", codes.len());
        let row = self.stored(row);
        match &self.layout {
            Layout::Parts { codes: stored, .. } => stored.row(row, codes),
            Layout::Blocks { kind, data } => kind.codes(self.row_of_blocks(*kind, data, row), codes),
        }
    }

    /// The values of a row, `k` of them. All steps are f32's: of a float `value · scale`, of an integer
    /// `(code - zero) · scale`, where the difference is exact, or `code · scale + minimum` with the product rounded.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        let mut codes = vec![0; self.k];
        self.row_codes(row, &mut codes);
        let levels: Vec<(f32, Origin)> =
            (0..self.groups()).map(|group| (self.scale(row, group), self.origin(row, group))).collect();
        let value = |code: u8, (scale, origin): (f32, Origin)| match (self.code_type, origin) {
            (CodeType::Int { .. }, Origin::Zero(zero)) => (i32::from(code) - zero) as f32 * scale,
            (CodeType::Int { .. }, Origin::Minimum(minimum)) => f32::from(code) * scale + minimum,
            (float, _) => float.float(code) * scale,
        };
        match &self.group_of {
            Some(group_of) => {
                for ((out, &code), &group) in out.iter_mut().zip(&codes).zip(group_of.iter()) {
                    *out = value(code, levels[group as usize]);
                }
            }
            None => {
                let group_k = self.group_k();
                for ((out, codes), &level) in out.chunks_mut(group_k).zip(codes.chunks(group_k)).zip(&levels)
                {
                    for (out, &code) in out.iter_mut().zip(codes) {
                        *out = value(code, level);
                    }
                }
            }
        }
    }

    /// The first scale or minimum of a row that is NaN or infinite, if there is one: row, group and number.
    pub fn unsound_scale(&self, row: usize) -> Option<(usize, usize, f32)> {
        (0..self.groups()).find_map(|group| {
            let minimum = match self.origin(row, group) {
                Origin::Minimum(minimum) => minimum,
                Origin::Zero(_) => 0.0,
            };
            let unsound = [self.scale(row, group), minimum].into_iter().find(|number| !number.is_finite());
            unsound.map(|number| (row, group, number))
        })
    }

    fn stored(&self, row: usize) -> usize {
        self.rows.as_ref().map_or(row, |rows| rows[row] as usize)
    }

    fn row_of_blocks(&self, kind: GgmlType, data: &'a [u8], row: usize) -> &'a [u8] {
        let bytes = kind.row_bytes(self.k).unwrap_or(0);
        &data[row * bytes..(row + 1) * bytes]
    }
}
