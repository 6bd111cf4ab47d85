//! Which kernels a grouped product takes.

use abi::Need;
use abi::ops::grouped_matmul::{
    GroupedMatmulTile, GroupedMatmulVariant, MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};

use super::{GroupedMatmulProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::ops::matmul::select::{INVARIANT, split_log2, stream_split_log2};

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedMatmulChoice {
    /// The kernel.
    pub variant: &'static GroupedMatmulVariant,
    /// For up to so many rows.
    pub max_rows: usize,
    /// Binary logarithm of the warps that share a column's k.
    pub split_log2: u32,
    /// Why this one.
    pub why: String,
}

/// Rows of a tile by the number of rows, which is all that the host knows: rows of an expert on average decide, in
/// halves.
///
/// A tile of few rows may need a second reading of the weight, from L2; one of many computes rows that are not there.
/// Up to 16 rows the kernels for few are meant to win, as they do in the matrix product.
const RUNGS: [(usize, u32); 6] = [(1, 1), (2, 2), (4, 4), (2 * 16, 8), (2 * 256, 64), (usize::MAX, 128)];

/// The same on tensor cores. Rows of experts differ: where half a row of each is the average, few experts have more
/// than 8, whose weights tiles of 8 rows read twice. A tile of 128 rows takes a multiprocessor of Ampere as long as
/// three and a half of 64 × 64, so it pays when most experts fill more than half of it.
const TENSOR_RUNGS: [(usize, u32); 4] = [(1, 8), (2 * 16, 16), (2 * 64, 64), (usize::MAX, 128)];

/// The same of gated products, which kernels of 16 rows have no registers for.
const GATED_RUNGS: [(usize, u32); 1] = [(2 * 16, 8)];

/// The only one under [`Invariance::Batch`](crate::Invariance::Batch); Hopper's own kernel has one size.
const INVARIANT_RUNG: [(usize, u32); 1] = [(usize::MAX, 64)];

/// On Hopper, most rows, of all experts together, for the kernels of few. Its own kernel for many needs weights for its
/// multiprocessors rather than rows (`gpu/NOTES/grouped_matmul.md`).
const HOPPER_FEW_ROWS: usize = 31;

impl GroupedMatmulChoice {
    /// This kernel for any number of rows, if it can do the problem.
    pub(super) fn forced(
        limits: &DeviceLimits,
        variant: &'static GroupedMatmulVariant,
        problem: &GroupedMatmulProblem,
    ) -> Result<Self, Error> {
        let GroupedMatmulProblem { rows, experts, k, dtype, .. } = *problem;
        if variant.dtype != dtype || !limits.floor.runs(variant.floor) {
            let expected = format!("{} on {}", variant.dtype, variant.floor);
            return Err(Error::invalid(OP, "variant", expected, format!("{dtype} on {}", limits.floor)));
        }
        if !gates(variant.tile, problem) {
            let expected = "a kernel for few rows of a gated product";
            return Err(Error::invalid(OP, "variant", expected, variant.entry));
        }
        let n = problem.w_rows();
        let split_log2 = match variant.tile {
            // Half of the experts at least have rows.
            GroupedMatmulTile::Stream { .. } => {
                stream_split_log2(limits.num_sms, n.saturating_mul(experts.div_ceil(2)), k)
            }
            // A block has the gate's column and up's.
            GroupedMatmulTile::Gemv { .. } if problem.gate.is_some() => {
                split_log2(limits, n, k, dtype).min(2)
            }
            _ => split_log2(limits, n, k, dtype),
        };
        let (_, slots) = variant.tile.slots(rows as u32, experts as u32);
        let blocks = slots * u64::from(variant.tile.col_blocks(n as u32, split_log2));
        if blocks > i32::MAX as u64 {
            let got = format!("{rows} rows of {n} in {blocks} blocks");
            return Err(Error::invalid(OP, "problem", "at most 2^31 - 1 blocks", got));
        }
        Ok(GroupedMatmulChoice { variant, max_rows: usize::MAX, split_log2, why: "asked for".into() })
    }
}

/// Whether a kernel can do what becomes of the sums.
fn gates(tile: GroupedMatmulTile, problem: &GroupedMatmulProblem) -> bool {
    let few = matches!(tile, GroupedMatmulTile::Gemv { .. } | GroupedMatmulTile::Stream { rows: 8, .. });
    few || problem.gate.is_none()
}

/// The kernels by ordinary arithmetic for every number of rows up to the problem's, fewest rows first: a run takes the
/// first that is for its rows.
pub fn select(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
) -> Result<Vec<GroupedMatmulChoice>, Error> {
    let rungs = if limits.is_invariant() { INVARIANT_RUNG.to_vec() } else { by_average(&RUNGS, problem) };
    let choices = ladder(limits, problem, &rungs, &[VARIANTS])?;
    if choices.is_empty() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    Ok(choices)
}

/// The same on tensor cores; none for other cards and types.
pub(super) fn tensor(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
) -> Result<Vec<GroupedMatmulChoice>, Error> {
    let is_invariant = limits.is_invariant();
    if is_invariant && limits.floor.has(Need::Wgmma) {
        ladder(limits, problem, &[(usize::MAX, 128)], &[WGMMA_VARIANTS, MMA_VARIANTS])
    } else if is_invariant {
        ladder(limits, problem, &INVARIANT_RUNG, &[MMA_VARIANTS])
    } else if limits.floor.has(Need::Wgmma) {
        ladder(limits, problem, &[(HOPPER_FEW_ROWS, 8), (usize::MAX, 128)], &[WGMMA_VARIANTS, MMA_VARIANTS])
    } else {
        let rungs = if problem.gate.is_some() { &GATED_RUNGS[..] } else { &TENSOR_RUNGS };
        ladder(limits, problem, &by_average(rungs, problem), &[MMA_VARIANTS])
    }
}

/// Rungs by the rows of all experts together, from such by halves of the average.
fn by_average(rungs: &[(usize, u32)], problem: &GroupedMatmulProblem) -> Vec<(usize, u32)> {
    let max_rows = |halves| match halves {
        usize::MAX => usize::MAX,
        _ => problem.experts.saturating_mul(halves) / 2,
    };
    rungs.iter().map(|&(halves, tile_rows)| (max_rows(halves), tile_rows)).collect()
}

/// A choice for each of the rungs that the problem's rows need; a rung is the most rows and those of its tile.
fn ladder(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    rungs: &[(usize, u32)],
    variants: &[&'static [GroupedMatmulVariant]],
) -> Result<Vec<GroupedMatmulChoice>, Error> {
    let GroupedMatmulProblem { rows, experts, dtype, .. } = *problem;
    let mut choices = Vec::new();
    for &(max_rows, tile_rows) in rungs {
        let fits = |variant: &&GroupedMatmulVariant| {
            variant.dtype == dtype
                && limits.floor.runs(variant.floor)
                && variant.tile.rows() == tile_rows
                && gates(variant.tile, problem)
        };
        let Some(variant) = variants.iter().copied().flatten().find(fits) else { continue };
        let largest = GroupedMatmulProblem { rows: rows.min(max_rows), ..*problem };
        let choice = GroupedMatmulChoice::forced(limits, variant, &largest)?;
        let why = match max_rows {
            _ if limits.is_invariant() => INVARIANT.into(),
            usize::MAX => format!("more rows of {experts} experts"),
            _ => format!("up to {max_rows} rows of {experts} experts"),
        };
        choices.push(GroupedMatmulChoice { max_rows, why, ..choice });
        if rows <= max_rows {
            break;
        }
    }
    let has_tile =
        |variant: &&GroupedMatmulVariant| variant.dtype == dtype && limits.floor.runs(variant.floor);
    if problem.gate.is_some() && variants.iter().copied().flatten().any(|variant| has_tile(&variant)) {
        let most = choices.last().map_or(0, |choice| choice.max_rows);
        if rows > most {
            let expected =
                format!("at most {most} rows of a gated product of {experts} experts on {}", limits.floor);
            return Err(Error::invalid(OP, "problem", expected, rows.to_string()));
        }
    }
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use abi::{Arch, DType};

    use super::super::GroupedRows;
    use super::*;
    use crate::Invariance;

    const LIMITS: DeviceLimits = DeviceLimits::new(Arch::Sm61, 132, 48 << 10);

    #[test]
    fn choice_by_rows() {
        let table = [
            (0, 128, DType::BF16, "grouped_matmul_bf16__gemv1__sm61"),
            (8, 128, DType::BF16, "grouped_matmul_bf16__gemv1__sm61"),
            (65, 128, DType::F16, "grouped_matmul_f16__gemv2__sm61"),
            (256, 128, DType::F32, "grouped_matmul_f32__gemv4__sm61"),
            (257, 128, DType::BF16, "grouped_matmul_bf16__gemv8__sm61"),
            (2048, 128, DType::BF16, "grouped_matmul_bf16__gemv8__sm61"),
            (2049, 128, DType::BF16, "grouped_matmul_bf16__m64n64k32__sm61"),
            (32768, 128, DType::F32, "grouped_matmul_f32__m64n64k16__sm61"),
            (32769, 128, DType::BF16, "grouped_matmul_bf16__m128n128k16__sm61"),
            (1, 1, DType::BF16, "grouped_matmul_bf16__gemv2__sm61"),
        ];
        for (rows, experts, dtype, entry) in table {
            let from = GroupedRows::Sorted;
            let problem =
                GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, experts, 1536, 2048, dtype) };
            let choices = select(&LIMITS, &problem).unwrap();
            assert_eq!(choices.last().unwrap().variant.entry, entry, "{rows} of {experts}");
            assert!(choices.is_sorted_by(|a, b| a.max_rows <= b.max_rows));
            assert!(choices.last().unwrap().max_rows >= rows);
        }
    }

    #[test]
    fn tensor_choice_by_rows() {
        let ampere = DeviceLimits { floor: Arch::Sm80, smem_per_block_bytes: 99 << 10, ..LIMITS };
        let table = [
            (8, 128, DType::F16, "grouped_matmul_f16__stream8__sm80"),
            (64, 128, DType::F16, "grouped_matmul_f16__stream8__sm80"),
            (65, 128, DType::BF16, "grouped_matmul_bf16__stream16__sm80"),
            (2049, 128, DType::BF16, "grouped_matmul_bf16__m64n64__sm80"),
            (8193, 128, DType::BF16, "grouped_matmul_bf16__m128n128__sm80"),
        ];
        for (rows, experts, dtype, entry) in table {
            let from = GroupedRows::Sorted;
            let problem =
                GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, experts, 1536, 2048, dtype) };
            let choices = tensor(&ampere, &problem).unwrap();
            assert_eq!(choices.last().unwrap().variant.entry, entry, "{rows} of {experts}");
            assert!(choices.is_sorted_by(|a, b| a.max_rows <= b.max_rows));
            assert!(choices.last().unwrap().max_rows >= rows);
            assert_eq!(choices[0].split_log2, 0);
            assert!(tensor(&LIMITS, &problem).unwrap().is_empty());
            let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..LIMITS };
            let on_hopper = tensor(&hopper, &problem).unwrap().last().unwrap().variant;
            assert_eq!(on_hopper.floor == Arch::Sm90a, rows > 31, "{rows} of {experts}");
        }
    }

    #[test]
    fn invariant_choices_know_no_rows() {
        for (floor, entries) in [
            (Arch::Sm61, ["grouped_matmul_bf16__m64n64k32__sm61", ""]),
            (Arch::Sm80, ["grouped_matmul_bf16__m64n64k32__sm61", "grouped_matmul_bf16__m64n64__sm80"]),
            (Arch::Sm90a, ["grouped_matmul_bf16__m64n64k32__sm61", "sm90a"]),
        ] {
            let limits = DeviceLimits {
                floor,
                smem_per_block_bytes: 227 << 10,
                invariance: Invariance::Batch,
                ..LIMITS
            };
            let of = |rows| {
                let problem = GroupedMatmulProblem::new(rows, 128, 1536, 2048, DType::BF16);
                [select(&limits, &problem).unwrap(), tensor(&limits, &problem).unwrap()]
            };
            let first = of(1);
            for (choices, entry) in std::iter::zip(&first, entries) {
                assert_eq!(choices.len(), usize::from(!entry.is_empty()), "{floor}");
                assert!(choices.iter().all(|choice| choice.variant.entry.ends_with(entry)), "{choices:?}");
            }
            for rows in [0, 8, 31, 32, 257, 2049, 8193, 32_769, 1 << 20] {
                assert_eq!(of(rows), first, "{rows} on {floor}");
            }
        }
    }

    #[test]
    fn gated_products_have_few_rows() {
        let of = |floor, invariance, rows| {
            let limits = DeviceLimits { floor, smem_per_block_bytes: 227 << 10, invariance, ..LIMITS };
            let gate = Some(abi::ops::glu::Activation::Silu);
            let problem =
                GroupedMatmulProblem { gate, ..GroupedMatmulProblem::new(rows, 128, 768, 2048, DType::BF16) };
            let few =
                |tile| matches!(tile, GroupedMatmulTile::Gemv { .. } | GroupedMatmulTile::Stream { .. });
            let choices = [select(&limits, &problem)?, tensor(&limits, &problem)?];
            assert!(choices.iter().flatten().all(|choice| few(choice.variant.tile)), "{choices:?}");
            Ok::<_, Error>(())
        };
        for (floor, most) in [(Arch::Sm61, 2048), (Arch::Sm80, 2048), (Arch::Sm90a, 31)] {
            assert!(of(floor, Invariance::default(), most).is_ok(), "{floor}");
            let message = of(floor, Invariance::default(), most + 1).unwrap_err().to_string();
            let expected = format!(
                "grouped_matmul: problem: expected at most {most} rows of a gated product of 128 experts on {floor}, got {}",
                most + 1
            );
            assert_eq!(message, expected);
            assert!(of(floor, Invariance::Batch, 1).is_err(), "{floor}");
        }
    }

    #[test]
    fn more_blocks_than_a_grid_has() {
        let (rows, n) = (1 << 30, 1 << 30);
        let (dtype, from) = (DType::F32, GroupedRows::Sorted);
        let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, 2, n, 1, dtype) };
        let message = select(&LIMITS, &problem).unwrap_err().to_string();
        assert!(
            message.starts_with("grouped_matmul: problem: expected at most 2^31 - 1 blocks"),
            "{message}"
        );
    }
}
