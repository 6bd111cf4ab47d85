//! Which kernel an embedding takes.

use abi::ops::embedding::{EmbeddingVariant, MAX_THREADS, PACKED_VARIANTS, UNITS_PER_THREAD, VARIANTS};
use abi::weight::TILE_K;

use super::{EmbeddingProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;
use crate::plan::{Choice, first};

/// This kernel, if it can do the problem.
pub(super) fn forced(
    variant: &'static EmbeddingVariant,
    problem: &EmbeddingProblem,
) -> Result<Choice<&'static EmbeddingVariant>, Error> {
    if !fits(variant, problem) {
        let expected = match variant.packed {
            None => format!("one element or rows of whole units of {} bytes", variant.unit_bytes),
            Some((dtype, codes)) => format!("a packed table of {} to {dtype}", codes.name()),
        };
        return Err(Error::invalid(OP, "variant", expected, format!("{problem:?}")));
    }
    if variant.packed.is_some() {
        return Ok(Choice::asked_for(variant, packed_threads(problem.cols as u32)));
    }
    let units = (problem.cols * problem.dtype.bytes() / variant.unit_bytes) as u32;
    Ok(Choice::asked_for(variant, threads(units)))
}

/// The kernel that any alignment will do for.
pub(super) fn by_element(problem: &EmbeddingProblem) -> Result<&'static EmbeddingVariant, Error> {
    let fits_any =
        |variant: &EmbeddingVariant| variant.unit_bytes == problem.dtype.bytes() && fits(variant, problem);
    first(OP, table(problem), problem.dtype, fits_any)
}

/// The kernels for a kind of table.
fn table(problem: &EmbeddingProblem) -> &'static [EmbeddingVariant] {
    if problem.weight.is_some() { PACKED_VARIANTS } else { VARIANTS }
}

/// Threads of a block that decodes a row: four for each tile.
fn packed_threads(cols: u32) -> u32 {
    (cols.div_ceil(TILE_K) * 4).next_multiple_of(32).clamp(32, MAX_THREADS)
}

/// Threads of a block that moves a row of so many units.
pub(super) fn threads(units: u32) -> u32 {
    units.div_ceil(UNITS_PER_THREAD).next_multiple_of(32).clamp(32, MAX_THREADS)
}

/// A unit is one element, or 16 bytes of which the row is a multiple; a packed table has a kernel for its codes.
fn fits(variant: &EmbeddingVariant, problem: &EmbeddingProblem) -> bool {
    if variant.packed.is_some() || problem.weight.is_some() {
        return variant.packed == problem.weight.map(|layout| (problem.dtype, layout.codes));
    }
    let element_bytes = problem.dtype.bytes();
    variant.unit_bytes == element_bytes
        || variant.unit_bytes == 16 && (problem.cols * element_bytes).is_multiple_of(16)
}

/// Units of 16 bytes if the row is whole ones, else elements.
pub fn select(
    _limits: &DeviceLimits,
    problem: &EmbeddingProblem,
) -> Result<Choice<&'static EmbeddingVariant>, Error> {
    let variant = first(OP, table(problem), problem.dtype, |variant| fits(variant, problem))?;
    if let Some((_, codes)) = variant.packed {
        let why = format!("the table's codes are {}", codes.name()).into();
        return Ok(Choice { why, ..forced(variant, problem)? });
    }
    let is_whole = if variant.unit_bytes == 16 { "is" } else { "is not" };
    let why = format!("the row {is_whole} whole pieces of 16 bytes").into();
    Ok(Choice { why, ..forced(variant, problem)? })
}

#[cfg(test)]
mod tests {
    use abi::weight::{Codes, Layout, ScaleType};
    use abi::{Arch, DType};

    use super::*;

    #[test]
    fn choice_by_row_length() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            (DType::BF16, 8, "embedding_b128__row__sm61", 32),
            (DType::BF16, 1024, "embedding_b128__row__sm61", 32),
            (DType::BF16, 2560, "embedding_b128__row__sm61", 96),
            (DType::F32, 4096, "embedding_b128__row__sm61", 256),
            (DType::F32, 16384, "embedding_b128__row__sm61", 256),
            (DType::F32, 5, "embedding_b32__row__sm61", 32),
            (DType::F16, 1001, "embedding_b16__row__sm61", 256),
            (DType::BF16, 0, "embedding_b128__row__sm61", 32),
        ];
        for (dtype, cols, entry, threads) in table {
            let problem = EmbeddingProblem::new(3, 100, cols, dtype);
            let choice = select(&limits, &problem).unwrap();
            assert_eq!((choice.variant.entry, choice.threads), (entry, threads), "{dtype} {cols}");
        }
    }

    #[test]
    fn a_kernel_of_another_width_is_refused() {
        let problem = EmbeddingProblem::new(3, 100, 9, DType::F16);
        let refused = |index: usize| forced(&VARIANTS[index], &problem).unwrap_err().to_string();
        assert_eq!(
            refused(0),
            format!(
                "embedding: variant: expected one element or rows of whole units of 16 bytes, got {problem:?}"
            )
        );
        assert!(refused(1).contains("units of 4 bytes"));
        assert!(forced(&VARIANTS[2], &problem).is_ok());
    }

    #[test]
    fn packed_tables_by_their_codes() {
        let limits = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        let layout = |codes| Layout {
            codes,
            group: 32,
            rows: 1,
            scale: ScaleType::F16,
            zeros: false,
            minimums: false,
            permuted: false,
        };
        for (dtype, codes, cols, entry, threads) in [
            (DType::BF16, Codes::Int8, 1024, "embedding_bf16_int8__packed__sm61", 64),
            (DType::F16, Codes::Int4, 2, "embedding_f16_int4__packed__sm61", 32),
            (DType::F32, Codes::E4m3, 8192, "embedding_f32_e4m3__packed__sm61", 256),
        ] {
            let weight = Some(layout(codes));
            let problem = EmbeddingProblem { weight, ..EmbeddingProblem::new(3, 100, cols, dtype) };
            let choice = select(&limits, &problem).unwrap();
            assert_eq!((choice.variant.entry, choice.threads), (entry, threads));
            assert_eq!(by_element(&problem).unwrap().entry, entry);
            let refused = forced(&VARIANTS[2], &problem).unwrap_err().to_string();
            assert!(refused.contains("rows of whole units of 2 bytes"), "{refused}");
            let plain = EmbeddingProblem { weight: None, ..problem };
            let refused = forced(choice.variant, &plain).unwrap_err().to_string();
            assert!(refused.contains("expected a packed table of "), "{refused}");
        }
    }
}
