//! Which kernel attention takes.

use abi::DType;
use abi::ops::attention::{AttentionTile, AttentionVariant, VARIANTS};

use super::{AttentionProblem, OP};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Up to this many queries of a sequence the decode kernels do it.
pub const MAX_DECODE_QUERIES: usize = 4;

/// A kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionChoice {
    /// The kernel; for decode the first of two, the merge follows.
    pub variant: &'static AttentionVariant,
    /// Why this one.
    pub why: String,
}

impl AttentionChoice {
    /// This kernel, if it can do the problem.
    pub(super) fn forced(
        variant: &'static AttentionVariant,
        problem: &AttentionProblem,
    ) -> Result<Self, Error> {
        let max_head_dim = variant.tile.max_head_dim();
        let merge = matches!(variant.tile, AttentionTile::Merge {});
        if merge || variant.dtype != problem.dtype || problem.head_dim > max_head_dim as usize {
            let expected = if merge {
                "a prefill or decode kernel".into()
            } else {
                format!("{} of head_dim up to {max_head_dim}", variant.dtype)
            };
            let got = format!("{} for {} of head_dim {}", variant.entry, problem.dtype, problem.head_dim);
            return Err(Error::invalid(OP, "variant", expected, got));
        }
        Ok(AttentionChoice { variant, why: "asked for".into() })
    }
}

/// The kernel that merges the decode kernels' results.
pub(super) fn merge(dtype: DType) -> Option<&'static AttentionVariant> {
    VARIANTS.iter().find(|v| v.dtype == dtype && v.tile == AttentionTile::Merge {})
}

/// The kernel for tensors whose rows are not aligned to 16 bytes.
pub(super) fn unaligned(problem: &AttentionProblem) -> Result<&'static AttentionVariant, Error> {
    let holds = |variant: &&AttentionVariant| {
        variant.dtype == problem.dtype
            && matches!(variant.tile, AttentionTile::Prefill { dim, .. } if problem.head_dim <= dim as usize)
    };
    VARIANTS.iter().find(holds).ok_or_else(|| unsupported_dtype(problem))
}

fn unsupported_dtype(problem: &AttentionProblem) -> Error {
    Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name())
}

/// The kernel for `seq_q` queries of each sequence: decode for a few, prefill for more, the smallest that holds the head and,
/// for decode, the rows that share a key head. Does not depend on the number of sequences or keys.
pub fn select(
    _limits: &DeviceLimits,
    problem: &AttentionProblem,
    seq_q: usize,
) -> Result<AttentionChoice, Error> {
    let rows = seq_q * (problem.heads_q / problem.heads_kv.max(1));
    let decode = (1..=MAX_DECODE_QUERIES).contains(&seq_q);
    let most_rows = VARIANTS.iter().filter(|v| matches!(v.tile, AttentionTile::Decode { .. }));
    let most_rows = most_rows.map(|v| v.tile.rows() as usize).max().unwrap_or(1);
    let holds = |variant: &&AttentionVariant| {
        variant.dtype == problem.dtype
            && match variant.tile {
                AttentionTile::Prefill { dim, .. } => !decode && problem.head_dim <= dim as usize,
                AttentionTile::Decode { dim, rows: most } => {
                    decode && problem.head_dim <= dim as usize && rows.min(most_rows) <= most as usize
                }
                AttentionTile::Merge {} => false,
            }
    };
    // The table goes from small to large.
    let variant = VARIANTS.iter().find(holds).ok_or_else(|| unsupported_dtype(problem))?;
    let why = if decode {
        format!("at most {MAX_DECODE_QUERIES} queries: {rows} rows share each key")
    } else {
        format!("more than {MAX_DECODE_QUERIES} queries")
    };
    Ok(AttentionChoice { variant, why })
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::super::Mask;
    use super::*;

    fn problem(dtype: DType, heads_q: usize, heads_kv: usize, head_dim: usize) -> AttentionProblem {
        AttentionProblem {
            batch: 3,
            seq_q: 4096,
            seq_kv: 4096,
            heads_q,
            heads_kv,
            head_dim,
            dtype,
            scale: None,
            mask: Mask::Causal,
            window: None,
        }
    }

    #[test]
    fn choice_by_queries_and_head() {
        let limits = DeviceLimits { floor: Arch::Sm61, num_sms: 20, smem_per_block_bytes: 48 << 10 };
        let table = [
            (DType::BF16, (32, 8), 128, 1, "attention_bf16__decode_d128_r4__sm61"),
            (DType::BF16, (32, 8), 128, 2, "attention_bf16__decode_d128_r8__sm61"),
            (DType::BF16, (32, 8), 128, 4, "attention_bf16__decode_d128_r8__sm61"),
            (DType::BF16, (32, 8), 128, 5, "attention_bf16__prefill_d128__sm61"),
            (DType::F16, (5, 1), 80, 1, "attention_f16__decode_d128_r8__sm61"),
            (DType::F32, (7, 7), 64, 1, "attention_f32__decode_d64_r1__sm61"),
            (DType::F32, (7, 7), 32, 0, "attention_f32__prefill_d64__sm61"),
            (DType::F16, (14, 7), 136, 1, "attention_f16__decode_d256_r2__sm61"),
            (DType::BF16, (16, 2), 256, 1000, "attention_bf16__prefill_d256__sm61"),
        ];
        for (dtype, (heads_q, heads_kv), head_dim, seq_q, entry) in table {
            let choice = select(&limits, &problem(dtype, heads_q, heads_kv, head_dim), seq_q).unwrap();
            assert_eq!(choice.variant.entry, entry, "{dtype} {heads_q}/{heads_kv} {head_dim} {seq_q}");
        }
    }

    #[test]
    fn forced_kernels_must_fit() {
        let named = |entry: &str| VARIANTS.iter().find(|v| v.entry == entry).unwrap();
        let problem = problem(DType::BF16, 4, 4, 80);
        assert!(AttentionChoice::forced(named("attention_bf16__prefill_d256__sm61"), &problem).is_ok());
        let message = |entry| AttentionChoice::forced(named(entry), &problem).unwrap_err().to_string();
        assert_eq!(
            message("attention_bf16__prefill_d64__sm61"),
            "attention: variant: expected bf16 of head_dim up to 64, got attention_bf16__prefill_d64__sm61 for bf16 of \
             head_dim 80"
        );
        assert_eq!(
            message("attention_bf16__merge__sm61"),
            "attention: variant: expected a prefill or decode kernel, got attention_bf16__merge__sm61 for bf16 of \
             head_dim 80"
        );
    }
}
