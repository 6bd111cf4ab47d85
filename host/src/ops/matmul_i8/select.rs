//! Which kernels an int8 product takes: the tiles of the float product, by the same rules.

use abi::DType;
use abi::ops::matmul::MatmulTile;
use abi::ops::matmul_i8::{MMA_VARIANTS, MatmulI8Variant, VARIANTS, WGMMA_VARIANTS};

use super::{MatmulI8Problem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::ops::matmul::select::{GEMV_MAX_ROWS, Rung, check_blocks, ladder, split_log2, tensor_clocks};

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
        if variant.out_dtype != out_dtype || !limits.floor.runs(variant.floor) {
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
            variant.out_dtype == out_dtype && limits.floor.runs(variant.floor) && tile.is(variant.tile)
        };
        let Some(variant) = VARIANTS.iter().find(fits) else {
            return Err(Error::invalid(OP, "problem", "out_dtype f32, f16 or bf16", out_dtype.name()));
        };
        let largest = MatmulI8Problem { m: m.min(max_rows), ..*problem };
        choices.push(MatmulI8Choice { max_rows, why, ..MatmulI8Choice::forced(limits, variant, &largest)? });
    }
    Ok(choices)
}

/// Fewest rows for the tensor cores: few have no kernels there.
pub(super) const TENSOR_MIN_ROWS: usize = GEMV_MAX_ROWS + 1;

/// The tensor cores' kernels for a problem: Hopper's where it has them, else Ampere's; none for other cards.
pub(super) fn tensor(limits: &DeviceLimits, problem: &MatmulI8Problem) -> Vec<&'static MatmulI8Variant> {
    let fits = |variant: &&MatmulI8Variant| {
        variant.out_dtype == problem.out_dtype
            && limits.floor.runs(variant.floor)
            && variant.tile.smem_bytes(DType::I8) <= limits.smem_per_block_bytes
    };
    let hopper: Vec<_> = WGMMA_VARIANTS.iter().filter(fits).collect();
    if hopper.is_empty() { MMA_VARIANTS.iter().filter(fits).collect() } else { hopper }
}

/// About how many clocks a launch of a tile of the tensor cores takes, of which a row takes as long as one of half as
/// many elements of 16 bits.
pub(super) fn clocks(tile: MatmulTile, [m, n, k]: [u32; 3], num_sms: u32) -> (u64, u32) {
    tensor_clocks(tile, 1, m, n, k / 2, num_sms)
}

/// Whether a launch takes this tile because it is one whose blocks share k: the card holds a cluster for each tile at
/// once, and k is long enough to be shared. Where both widths fit, 64 columns are better than 128
/// (`gpu/NOTES/matmul_i8.md`).
pub(super) fn shares_k(tile: MatmulTile, [m, n, k]: [u32; 3], num_sms: u32) -> bool {
    let is_held = || 8 * tile.blocks(m, n, 0) <= 3 * u64::from(num_sms);
    matches!(tile, MatmulTile::Split { .. }) && k >= 2048 && m <= 128 && is_held()
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::*;
    use crate::ops::matmul::Bias;

    #[test]
    fn tensor_cores_by_card() {
        let limits = |floor, smem| DeviceLimits::new(floor, 132, smem);
        let problem = MatmulI8Problem { m: 8192, n: 8192, k: 8192, out_dtype: DType::BF16, bias: Bias::None };
        for (limits, m, entry) in [
            (limits(Arch::Sm61, 48 << 10), 8192, None),
            (limits(Arch::Sm80, 163 << 10), 8192, Some("matmul_i8_bf16__m128n256__sm80")),
            (limits(Arch::Sm80, 163 << 10), 256, Some("matmul_i8_bf16__m128n128__sm80")),
            (limits(Arch::Sm80, 163 << 10), 32, Some("matmul_i8_bf16__m64n64__sm80")),
            (limits(Arch::Sm90a, 227 << 10), 8192, Some("matmul_i8_bf16__n256c2__sm90a")),
            (limits(Arch::Sm90a, 227 << 10), 128, Some("matmul_i8_bf16__n64__sm90a")),
        ] {
            let kernels = tensor(&limits, &problem);
            let clocks = |variant: &&MatmulI8Variant| clocks(variant.tile, [m, 8192, 8192], limits.num_sms);
            assert_eq!(kernels.into_iter().min_by_key(clocks).map(|variant| variant.entry), entry, "{m}");
        }
    }

    #[test]
    fn tiles_that_share_k() {
        for (sizes, columns) in [
            ([32, 2560, 9728], Some(64)),
            ([64, 3136, 2048], Some(64)),
            ([64, 3137, 2048], Some(128)),
            ([32, 6144, 2560], Some(128)),
            ([32, 6144, 1024], None),
            ([32, 19456, 2560], None),
            ([128, 1024, 3072], Some(64)),
            ([65, 2560, 4096], Some(128)),
            ([129, 1024, 3072], None),
        ] {
            let first = WGMMA_VARIANTS.iter().find(|variant| shares_k(variant.tile, sizes, 132));
            let got = first.map(|variant| match variant.tile {
                MatmulTile::Split { bn, .. } => bn,
                _ => 0,
            });
            assert_eq!(got, columns, "{sizes:?}");
        }
    }

    #[test]
    fn choice_by_rows() {
        let limits = DeviceLimits::new(Arch::Sm61, 132, 48 << 10);
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
