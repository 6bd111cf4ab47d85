//! From a checkpoint's tensors to [`QuantMatrix`]: a function for each way to store a matrix, which checks types and
//! shapes.

use host::weight::ScaleType;
use safetensors::Dtype;

use super::{CodeType, Codes, Factor, QuantMatrix, Scales, Zeros};
use crate::TensorProblem;

/// A tensor of a safetensors file, of whatever type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// As long as type and shape say.
    pub(crate) bytes: &'a [u8],
}

impl<'a> RawTensor<'a> {
    fn problem(&self, expected: impl Into<String>, got: impl Into<String>) -> TensorProblem {
        TensorProblem::Unfit { name: self.name.into(), expected: expected.into(), got: got.into() }
    }

    fn typed(&self, types: &[Dtype]) -> Result<Self, TensorProblem> {
        if types.contains(&self.dtype) {
            return Ok(*self);
        }
        let names: Vec<String> = types.iter().map(Dtype::to_string).collect();
        Err(self.problem(format!("type {}", names.join(" or ")), self.dtype.to_string()))
    }

    fn shaped(&self, shape: &[usize]) -> Result<Self, TensorProblem> {
        if self.shape == shape {
            return Ok(*self);
        }
        Err(self.problem(format!("shape {shape:?}"), format!("{:?}", self.shape)))
    }

    fn matrix(&self) -> Result<[usize; 2], TensorProblem> {
        <[usize; 2]>::try_from(self.shape).map_err(|_| self.problem("a matrix", format!("{:?}", self.shape)))
    }

    fn scale_type(&self) -> Result<ScaleType, TensorProblem> {
        match self.dtype {
            Dtype::F32 => Ok(ScaleType::F32),
            Dtype::F16 => Ok(ScaleType::F16),
            Dtype::BF16 => Ok(ScaleType::Bf16),
            Dtype::F8_E8M0 => Ok(ScaleType::E8m0),
            other => Err(self.problem("scales of type F32, F16, BF16 or F8_E8M0", other.to_string())),
        }
    }

    /// The one number of a tensor that has one.
    fn number(&self) -> Result<f32, TensorProblem> {
        self.typed(&[Dtype::F32])?;
        match self.bytes.try_into().map(f32::from_le_bytes) {
            Ok(number) if number.is_finite() => Ok(number),
            // A scale divided by infinity would be a sound one, of weights that are all 0.
            Ok(number) => Err(self.problem("a finite number", number.to_string())),
            Err(_) => Err(self.problem("one number", format!("shape {:?}", self.shape))),
        }
    }
}

/// Tensors of a module, `prefix` and `.` before their names.
pub(crate) struct Module<'a, 'm> {
    pub(crate) find: &'m dyn Fn(&str) -> Option<RawTensor<'a>>,
    pub(crate) prefix: &'m str,
}

impl<'a> Module<'a, '_> {
    fn find(&self, part: &str) -> Option<RawTensor<'a>> {
        (self.find)(&format!("{}.{part}", self.prefix))
    }

    fn require(&self, part: &str) -> Result<RawTensor<'a>, TensorProblem> {
        let missing = || TensorProblem::Missing { name: format!("{}.{part}", self.prefix), expected: None };
        self.find(part).ok_or_else(missing)
    }

    /// `k` where it is whole groups.
    fn whole_groups(&self, k: usize, group: usize) -> Result<usize, TensorProblem> {
        if group > 0 && k.is_multiple_of(group) {
            return Ok(k / group);
        }
        Err(TensorProblem::Unfit {
            name: format!("{}.weight", self.prefix),
            expected: format!("columns in whole groups of {group}"),
            got: format!("{k} columns"),
        })
    }

    /// GPTQ: integers packed along k; `group` of `None` is one group. Version 1 stores zero points less 1, by one
    /// subtraction from each word.
    pub(crate) fn gptq(
        &self,
        bits: u32,
        group: Option<usize>,
        is_v1: bool,
    ) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let Some(codes) = self.find("qweight") else { return Ok(None) };
        let per_word = (32 / bits) as usize;
        let [words, n] = codes.typed(&[Dtype::I32, Dtype::U32])?.matrix()?;
        let Some(k) = words.checked_mul(per_word) else {
            return Err(codes.problem("a size that can be counted", format!("{:?}", codes.shape)));
        };
        if !n.is_multiple_of(per_word) {
            return Err(codes.problem(format!("columns in a multiple of {per_word}"), n.to_string()));
        }
        let group_k = group.unwrap_or(k).clamp(1, k.max(1));
        let groups = k.div_ceil(group_k);
        let zeros = self.require("qzeros")?.typed(&[Dtype::I32, Dtype::U32])?;
        let zeros = zeros.shaped(&[groups, n / per_word])?;
        let scales = self.require("scales")?.shaped(&[groups, n])?;
        // In each field a 1.
        let ones = u32::MAX / ((1u32 << bits) - 1);
        let matrix = QuantMatrix::of_parts(
            [n, k],
            CodeType::Int { bits },
            Codes::WordsAlongK { data: codes.bytes, bits, n },
            Scales {
                data: scales.bytes,
                kind: scales.scale_type()?,
                group_k,
                block_n: 1,
                row_stride: 1,
                group_stride: n,
                factor: Factor::None,
            },
            Zeros::AlongN { data: zeros.bytes, bits, n, add: if is_v1 { ones } else { 0 } },
        );
        self.with_g_idx("g_idx", matrix, groups).map(Some)
    }

    /// With the group of each column that a tensor states, if it is there.
    fn with_g_idx(
        &self,
        part: &str,
        matrix: QuantMatrix<'a>,
        groups: usize,
    ) -> Result<QuantMatrix<'a>, TensorProblem> {
        let Some(stated) = self.find(part) else { return Ok(matrix) };
        let stated = stated.typed(&[Dtype::I32, Dtype::U32])?.shaped(&[matrix.k()])?;
        let words = stated.bytes.chunks_exact(4);
        let group_of: Vec<u32> =
            words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        match group_of.iter().find(|&&group| group as usize >= groups) {
            Some(&group) => Err(stated.problem(format!("groups below {groups}"), (group as i32).to_string())),
            None => Ok(matrix.with_groups(group_of)),
        }
    }

    /// AWQ of version gemm: 4-bit integers packed along n.
    pub(crate) fn awq(&self, group: Option<usize>) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let Some(codes) = self.find("qweight") else { return Ok(None) };
        let [k, words] = codes.typed(&[Dtype::I32, Dtype::U32])?.matrix()?;
        let Some(n) = words.checked_mul(8) else {
            return Err(codes.problem("a size that can be counted", format!("{:?}", codes.shape)));
        };
        let group_k = group.unwrap_or(k).max(1);
        let groups = self.whole_groups(k, group_k)?;
        let zeros = self.require("qzeros")?.typed(&[Dtype::I32, Dtype::U32])?.shaped(&[groups, words])?;
        let scales = self.require("scales")?.shaped(&[groups, n])?;
        Ok(Some(QuantMatrix::of_parts(
            [n, k],
            CodeType::Int { bits: 4 },
            Codes::AwqWords { data: codes.bytes, n },
            Scales {
                data: scales.bytes,
                kind: scales.scale_type()?,
                group_k,
                block_n: 1,
                row_stride: 1,
                group_stride: n,
                factor: Factor::None,
            },
            Zeros::Awq { data: zeros.bytes, n },
        )))
    }

    /// A byte for each element, fp8 or signed integers, with scales named `scale`: one, one for each row, or one for
    /// each block of `block`, of which the last of a row or column may be cut.
    pub(crate) fn bytes(
        &self,
        scale: &str,
        block: Option<[usize; 2]>,
    ) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let (Some(codes), Some(scales)) = (self.find("weight"), self.find(scale)) else { return Ok(None) };
        let [n, k] = codes.typed(&[Dtype::F8_E4M3, Dtype::I8])?.matrix()?;
        let (code_type, flip, zero) = match codes.dtype {
            Dtype::I8 => (CodeType::Int { bits: 8 }, 0x80, 128),
            _ => (CodeType::E4m3, 0, 0),
        };
        let whole = [n.max(1), k.max(1)];
        let [block_n, group_k] = match (block, scales.shape) {
            (Some(block), _) => block.map(|side| side.max(1)),
            (None, [] | [1] | [1, 1]) => whole,
            (None, _) => [1, whole[1]],
        };
        let (blocks_n, groups) = (n.div_ceil(block_n), k.div_ceil(group_k));
        if block.is_some() || !matches!(scales.shape, [] | [1] | [1, 1]) {
            let is_flat = groups <= 1 && scales.shape == [blocks_n];
            if !is_flat {
                scales.shaped(&[blocks_n, groups])?;
            }
        }
        let zeros = match self.find("weight_zero_point") {
            None => Zeros::Constant(zero),
            Some(zeros) => {
                let zeros = zeros.typed(&[Dtype::I8])?;
                if code_type == CodeType::E4m3 || block_n != 1 {
                    let expected = "zero points only of integers with a scale for each row";
                    return Err(zeros.problem(expected, format!("{code_type:?}")));
                }
                Zeros::Signed { data: zeros.shaped(&[n, groups])?.bytes, groups }
            }
        };
        Ok(Some(QuantMatrix::of_parts(
            [n, k],
            code_type,
            Codes::Bytes { data: codes.bytes, flip },
            Scales {
                data: scales.bytes,
                kind: scales.scale_type()?,
                group_k,
                block_n,
                row_stride: groups,
                group_stride: 1,
                factor: Factor::None,
            },
            zeros,
        )))
    }

    /// compressed-tensors' packed integers of 4 or 8 bits, stored with their sign bits inverted; `group` of `None` is
    /// one group.
    pub(crate) fn packed(
        &self,
        bits: u32,
        group: Option<usize>,
        is_symmetric: bool,
    ) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let Some(codes) = self.find("weight_packed") else { return Ok(None) };
        let [n, words] = codes.typed(&[Dtype::I32])?.matrix()?;
        let shape = self.require("weight_shape")?.typed(&[Dtype::I64, Dtype::I32])?.shaped(&[2])?;
        let side = |bytes: &[u8]| {
            let wide = bytes.iter().rev().fold(0u64, |wide, &byte| wide << 8 | u64::from(byte));
            usize::try_from(wide).unwrap_or(usize::MAX)
        };
        let (rows, k) = shape.bytes.split_at(shape.bytes.len() / 2);
        let (rows, k) = (side(rows), side(k));
        let per_word = (32 / bits) as usize;
        if rows != n || k.div_ceil(per_word) != words {
            return Err(codes.problem(format!("words of {rows} × {k} codes"), format!("{:?}", codes.shape)));
        }
        let group_k = group.unwrap_or(k).max(1);
        let groups = self.whole_groups(k, group_k)?;
        let scales = self.require("weight_scale")?;
        let scales = if groups == 1 && scales.shape == [n] { scales } else { scales.shaped(&[n, groups])? };
        let zeros = match self.find("weight_zero_point") {
            Some(zeros) if !is_symmetric => {
                let zeros = zeros.typed(&[Dtype::I32])?.shaped(&[n.div_ceil(per_word), groups])?;
                Zeros::AcrossRows { data: zeros.bytes, bits, groups }
            }
            None if !is_symmetric => {
                return Err(self
                    .require("weight_zero_point")
                    .err()
                    .unwrap_or_else(|| codes.problem("zero points", "none")));
            }
            _ => Zeros::Constant(1 << (bits - 1)),
        };
        let matrix = QuantMatrix::of_parts(
            [n, k],
            CodeType::Int { bits },
            Codes::Stream { data: codes.bytes, bits, stride: 4 * words },
            Scales {
                data: scales.bytes,
                kind: scales.scale_type()?,
                group_k,
                block_n: 1,
                row_stride: groups,
                group_stride: 1,
                factor: Factor::None,
            },
            zeros,
        );
        self.with_g_idx("weight_g_idx", matrix, groups).map(Some)
    }

    /// Pairs of 4-bit floats in bytes, the even one low, with a scale of `scale_type` for each `group`.
    fn pairs(
        &self,
        codes: RawTensor<'a>,
        scale_dtypes: &[Dtype],
        kind: ScaleType,
        group_k: usize,
        factor: Factor,
    ) -> Result<QuantMatrix<'a>, TensorProblem> {
        let [n, bytes] = codes.typed(&[Dtype::U8])?.matrix()?;
        let Some(k) = bytes.checked_mul(2) else {
            return Err(codes.problem("a size that can be counted", format!("{:?}", codes.shape)));
        };
        let groups = self.whole_groups(k, group_k)?;
        let scales = self.require("weight_scale")?.typed(scale_dtypes)?.shaped(&[n, groups])?;
        Ok(QuantMatrix::of_parts(
            [n, k],
            CodeType::E2m1,
            Codes::Stream { data: codes.bytes, bits: 4, stride: bytes },
            Scales {
                data: scales.bytes,
                kind,
                group_k,
                block_n: 1,
                row_stride: groups,
                group_stride: 1,
                factor,
            },
            Zeros::Constant(0),
        ))
    }

    /// NVFP4 of compressed-tensors, whose scales are divided by a number.
    pub(crate) fn nvfp4_packed(&self) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let Some(codes) = self.find("weight_packed") else { return Ok(None) };
        let divisor = self.require("weight_global_scale")?;
        let factor = match divisor.number()? {
            number if number.recip().is_finite() => Factor::Over(number),
            number => return Err(divisor.problem("a number with a finite reciprocal", number.to_string())),
        };
        self.pairs(codes, &[Dtype::F8_E4M3], ScaleType::E4m3, 16, factor).map(Some)
    }

    /// NVFP4 of modelopt, whose scales are multiplied by a number.
    pub(crate) fn nvfp4_modelopt(&self) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let (Some(codes), Some(factor)) = (self.find("weight"), self.find("weight_scale_2")) else {
            return Ok(None);
        };
        let factor = Factor::Times(factor.number()?);
        self.pairs(codes, &[Dtype::F8_E4M3], ScaleType::E4m3, 16, factor).map(Some)
    }

    /// MXFP4 of compressed-tensors.
    pub(crate) fn mxfp4_packed(&self) -> Result<Option<QuantMatrix<'a>>, TensorProblem> {
        let Some(codes) = self.find("weight_packed") else { return Ok(None) };
        self.pairs(codes, &[Dtype::U8, Dtype::F8_E8M0], ScaleType::E8m0, 32, Factor::None).map(Some)
    }
}

/// MXFP4 of gpt-oss: the tensor `name` as blocks `[.., n, groups, 16]` and scales `[.., n, groups]`; with its shape.
pub(crate) fn mxfp4_blocks<'a>(
    find: &dyn Fn(&str) -> Option<RawTensor<'a>>,
    name: &str,
) -> Result<Option<(Vec<usize>, QuantMatrix<'a>)>, TensorProblem> {
    let Some(blocks) = find(&format!("{name}_blocks")) else { return Ok(None) };
    let [outer @ .., groups, 16] = blocks.typed(&[Dtype::U8])?.shape else {
        return Err(blocks.problem("blocks of 16 bytes", format!("{:?}", blocks.shape)));
    };
    let scale_name = format!("{name}_scales");
    let missing = || TensorProblem::Missing { name: scale_name.clone(), expected: None };
    let scales = find(&scale_name).ok_or_else(missing)?.typed(&[Dtype::U8, Dtype::F8_E8M0])?;
    let scales = scales.shaped(&blocks.shape[..blocks.shape.len() - 1])?;
    let sizes = (outer.iter().try_fold(1usize, |n, &side| n.checked_mul(side)), groups.checked_mul(32));
    let (Some(n), Some(k)) = sizes else {
        return Err(blocks.problem("a size that can be counted", format!("{:?}", blocks.shape)));
    };
    let matrix = QuantMatrix::of_parts(
        [n, k],
        CodeType::E2m1,
        Codes::Stream { data: blocks.bytes, bits: 4, stride: 16 * groups },
        Scales {
            data: scales.bytes,
            kind: ScaleType::E8m0,
            group_k: 32,
            block_n: 1,
            row_stride: *groups,
            group_stride: 1,
            factor: Factor::None,
        },
        Zeros::Constant(0),
    );
    Ok(Some(([outer, &[k]].concat(), matrix)))
}
