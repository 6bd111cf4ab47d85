//! Which kernels an int8 product takes: the tiles of the float product, by the same rules.

use abi::DType;
use abi::ops::matmul_i8::{MatmulI8Variant, VARIANTS};

use super::{MatmulI8Problem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::ops::matmul::select::{Rung, check_blocks, ladder, split_log2};

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulI8Choice {
    /// The kernel.
    pub variant: &'static MatmulI8Variant,
    /// For up to so many rows.
    pub max_rows: usize,
    /// Binary logarithm of the warps that share a column's k.
    pub split_log2: u32,
    /// Why this one.
    pub why: String,
}

impl MatmulI8Choice {
    /// This kernel for any number of rows, if it can do the problem.
    pub(super) fn forced(
        limits: &DeviceLimits,
        variant: &'static MatmulI8Variant,
        problem: &MatmulI8Problem,
    ) -> Result<Self, Error> {
        let MatmulI8Problem { m, n, k, out_dtype, .. } = *problem;
        if variant.out_dtype != out_dtype || variant.floor > limits.floor {
            let expected = format!("{} on {}", variant.out_dtype, variant.floor);
            return Err(Error::invalid(OP, "variant", expected, format!("{out_dtype} on {}", limits.floor)));
        }
        let split_log2 = split_log2(limits, n, k, DType::I8);
        check_blocks(OP, variant.tile, split_log2, m, n)?;
        Ok(MatmulI8Choice { variant, max_rows: usize::MAX, split_log2, why: "asked for".into() })
    }
}

/// The kernels for every number of rows up to the problem's, fewest rows first: a run takes the first that is for its
/// rows.
pub fn select(limits: &DeviceLimits, problem: &MatmulI8Problem) -> Result<Vec<MatmulI8Choice>, Error> {
    let MatmulI8Problem { m, n, out_dtype, .. } = *problem;
    let mut choices = Vec::new();
    for Rung { max_rows, tile, why } in ladder(limits, m, n) {
        let fits = |variant: &&MatmulI8Variant| {
            variant.out_dtype == out_dtype && variant.floor <= limits.floor && tile.is(variant.tile)
        };
        let Some(variant) = VARIANTS.iter().find(fits) else {
            return Err(Error::invalid(OP, "problem", "out_dtype f32, f16 or bf16", out_dtype.name()));
        };
        let largest = MatmulI8Problem { m: m.min(max_rows), ..*problem };
        choices.push(MatmulI8Choice { max_rows, why, ..MatmulI8Choice::forced(limits, variant, &largest)? });
    }
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;
    use crate::ops::matmul::Bias;

    #[test]
    fn choice_by_rows() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 132, smem_per_block_bytes: 48 << 10 };
        let table = [
            (1, 4096, DType::BF16, "matmul_i8_bf16__gemv1__sm61"),
            (4, 4096, DType::F32, "matmul_i8_f32__gemv4__sm61"),
            (16, 4096, DType::F16, "matmul_i8_f16__gemv8__sm61"),
            (17, 4096, DType::F16, "matmul_i8_f16__m64n64k64__sm61"),
            (4096, 4096, DType::BF16, "matmul_i8_bf16__m128n128k32__sm61"),
        ];
        for (m, n, out_dtype, entry) in table {
            let problem = MatmulI8Problem { m, n, k: 1024, out_dtype, bias: Bias::None };
            let choices = select(&limits, &problem).unwrap();
            assert_eq!(choices.last().unwrap().variant.entry, entry, "{m} × {n} {out_dtype}");
        }
    }
}
