//! Which kernel attention takes.

use std::fmt;

use abi::DType;
use abi::ops::attention::{
    AttentionTile, AttentionVariant, COMBINE_VARIANTS, DECODE_LATENT_VARIANTS, DECODE_LATENT_WGMMA_VARIANTS,
    DECODE_RING_FP8_VARIANTS, DECODE_RING_VARIANTS, GATHER_VARIANTS, MAX_KEY_PARTS_LOG2,
    PREFILL_MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};

use super::{AttentionProblem, Mask, OP, scores};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Up to this many queries of a sequence the decode kernels do it.
pub const MAX_DECODE_QUERIES: usize = 4;
/// The same on tensor cores, whose decode kernels take 16 rows in the time of one.
pub const MAX_TENSOR_DECODE_QUERIES: usize = 16;

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
        limits: &DeviceLimits,
        variant: &'static AttentionVariant,
        problem: &AttentionProblem,
    ) -> Result<Self, Error> {
        let helps = matches!(
            variant.tile,
            AttentionTile::Merge {} | AttentionTile::Gather {} | AttentionTile::Combine {}
        );
        if helps || !holds(variant, problem) {
            let (head_dim, head_dim_v) = variant.tile.max_head_dims();
            let up_to = if variant.tile.is_latent() { "" } else { "up to " };
            let expected = if helps {
                "a prefill or decode kernel".into()
            } else if !has_form(variant, problem) {
                format!("one for keys in {}", if takes_pages(problem) { "pages" } else { "one piece" })
            } else if variant.dtype_kv == variant.dtype {
                format!("{} of head dims {up_to}{head_dim} and {head_dim_v}", variant.dtype)
            } else {
                let AttentionVariant { dtype, dtype_kv, .. } = variant;
                format!("{dtype} with keys in {dtype_kv} of head dims {up_to}{head_dim} and {head_dim_v}")
            };
            let AttentionProblem { dtype, head_dim, head_dim_v, .. } = problem;
            let got = format!("{} for {dtype} of head dims {head_dim} and {head_dim_v}", variant.entry);
            return Err(Error::invalid(OP, "variant", expected, got));
        }
        if !runs(limits, variant, problem) {
            let scale = if needs_positive(variant.tile) { " and a scale above 0" } else { "" };
            let expected = format!("a card of {}{scale} for {}", variant.floor, variant.entry);
            let got = format!("{} and {}", limits.floor, problem.scale());
            return Err(Error::invalid(OP, "variant", expected, got));
        }
        Ok(AttentionChoice { variant, why: "asked for".into() })
    }
}

/// The kernel that merges the decode kernels' results.
pub(super) fn merge(dtype: DType) -> Option<&'static AttentionVariant> {
    VARIANTS.iter().find(|v| v.dtype == dtype && v.tile == AttentionTile::Merge {})
}

/// The kernel that brings keys and values to where all kernels take them from.
pub(super) fn gather(problem: &AttentionProblem) -> Result<&'static AttentionVariant, Error> {
    GATHER_VARIANTS.iter().find(|v| v.dtype == problem.dtype).ok_or_else(|| unsupported_dtype(problem))
}

/// Whether a kernel takes keys and values only from there: those in fp8, of which it knows nothing.
pub(super) fn gathers(variant: &AttentionVariant, problem: &AttentionProblem) -> bool {
    variant.dtype_kv != problem.dtype_kv
}

/// The kernel that combines the results of parts of the keys.
pub(super) fn combine(problem: &AttentionProblem) -> Result<&'static AttentionVariant, Error> {
    let combine = COMBINE_VARIANTS.iter().find(|v| v.dtype == problem.dtype);
    combine.ok_or_else(|| unsupported_dtype(problem))
}

/// The kernel that does the same as another of many queries, with blocks that share keys.
pub(super) fn split(variant: &AttentionVariant) -> Option<&'static AttentionVariant> {
    let is_split = |other: &&AttentionVariant| {
        let heads = other.tile.max_head_dims() == variant.tile.max_head_dims();
        let form = is_paged(other.tile) == is_paged(variant.tile);
        other.tile.splits_keys() && heads && form && other.dtype == variant.dtype
    };
    match variant.tile {
        AttentionTile::Wgmma { masked: false, split: false, .. } => WGMMA_VARIANTS.iter().find(is_split),
        AttentionTile::PrefillMma { masked: false, split: false, .. } => {
            PREFILL_MMA_VARIANTS.iter().find(is_split)
        }
        _ => None,
    }
}

/// Keys that a block should have of a part, at least: combining takes a few microseconds.
const MIN_PART_KEYS: usize = 512;

/// Parts of the keys of each tile of a kernel of many queries, of which there are so many, as a power of two: as many
/// as give each multiprocessor work, if there are keys enough.
pub(super) fn key_parts_log2(num_sms: u32, tile: AttentionTile, tiles: u32, seen: usize) -> u32 {
    let places = key_places(num_sms, tile) / tiles.max(1);
    let parts = places.min((seen / MIN_PART_KEYS).min(1 << MAX_KEY_PARTS_LOG2) as u32);
    parts.max(1).ilog2()
}

/// Blocks of such a kernel that the card holds at a time.
pub(super) fn key_places(num_sms: u32, tile: AttentionTile) -> u32 {
    match tile {
        AttentionTile::PrefillMma { blocks, .. } => blocks * num_sms,
        _ => num_sms,
    }
}

/// Whether a kernel is for the types and the heads of a problem, if need be behind `gather`.
fn holds(variant: &AttentionVariant, problem: &AttentionProblem) -> bool {
    let (head_dim, head_dim_v) = variant.tile.max_head_dims();
    let (head_dim, head_dim_v) = (head_dim as usize, head_dim_v as usize);
    variant.dtype == problem.dtype
        && has_form(variant, problem)
        && (variant.dtype_kv == problem.dtype_kv || variant.dtype_kv == problem.dtype)
        && problem.head_dim <= head_dim
        && problem.head_dim_v <= head_dim_v
        && (!variant.tile.is_latent()
            || (variant.dtype_kv == problem.dtype_kv
                && (problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)))
}

/// Whether a kernel's largest score is that of the largest product.
fn needs_positive(tile: AttentionTile) -> bool {
    matches!(tile, AttentionTile::Wgmma { masked: false, .. })
}

/// Whether a kernel finds keys by a table of pages, of those that have a form for them and one for keys in one piece.
fn is_paged(tile: AttentionTile) -> Option<bool> {
    match tile {
        AttentionTile::PrefillMma { paged, .. } => Some(paged),
        _ => None,
    }
}

/// Whether such a kernel of q's type gets pages: those of fp8 are gathered.
fn takes_pages(problem: &AttentionProblem) -> bool {
    problem.page_size.is_some() && !problem.is_fp8()
}

/// Whether a kernel is for keys that are where the problem has them.
fn has_form(variant: &AttentionVariant, problem: &AttentionProblem) -> bool {
    is_paged(variant.tile).is_none_or(|paged| paged == takes_pages(problem))
}

/// Whether the card has what a kernel needs, and the kernel can do the scale.
fn runs(limits: &DeviceLimits, variant: &AttentionVariant, problem: &AttentionProblem) -> bool {
    limits.floor.runs(variant.floor)
        && variant.tile.smem_bytes() <= limits.smem_per_block_bytes
        && (!needs_positive(variant.tile) || problem.scale() >= f32::MIN_POSITIVE)
        && scores::runs(variant.tile, problem)
}

/// The smallest kernel of these, which go from small to large, that can do it.
fn smallest(
    variants: &'static [AttentionVariant],
    limits: &DeviceLimits,
    problem: &AttentionProblem,
) -> Option<&'static AttentionVariant> {
    variants.iter().find(|v| holds(v, problem) && runs(limits, v, problem))
}

/// The smallest prefill kernel without tensor cores that holds the heads; none for wide ones.
fn prefill(problem: &AttentionProblem) -> Option<&'static AttentionVariant> {
    VARIANTS.iter().find(|v| matches!(v.tile, AttentionTile::Prefill { .. }) && holds(v, problem))
}

/// The smallest of these kernels, which go from small to large, whose heads are wide enough, and which holds the rows
/// if one of them does.
fn for_rows(
    variants: &'static [AttentionVariant],
    fits: impl Fn(&AttentionVariant) -> bool,
    rows: usize,
) -> Option<&'static AttentionVariant> {
    let smallest = variants.iter().find(|v| fits(v))?.tile.max_head_dims();
    let mut fitting = variants.iter().filter(|v| fits(v) && v.tile.max_head_dims() == smallest);
    let most = fitting.clone().next_back();
    fitting.find(|v| rows <= v.tile.rows() as usize).or(most)
}

/// The decode kernel without tensor cores for so many rows.
fn decode(problem: &AttentionProblem, rows: usize) -> Option<&'static AttentionVariant> {
    for_rows(VARIANTS, |v| matches!(v.tile, AttentionTile::Decode { .. }) && holds(v, problem), rows)
}

/// The kernel for tensors whose rows are not aligned to 16 bytes, and for wide heads whose values are not in the keys'
/// rows.
pub(super) fn unaligned(problem: &AttentionProblem) -> Result<&'static AttentionVariant, Error> {
    prefill(problem).or_else(|| decode(problem, usize::MAX)).ok_or_else(|| unsupported_dtype(problem))
}

fn unsupported_dtype(problem: &AttentionProblem) -> Error {
    Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name())
}

/// The kernel for `seq_q` queries of each sequence: decode for a few and for wide heads, else prefill, on tensor cores
/// if there are any; the smallest that holds the head and, for decode, the rows that share a key head. Does not depend
/// on the number of sequences or keys, nor under [`Invariance::Batch`](crate::Invariance::Batch) on that of queries:
/// then the kernel of many takes few, too, and its blocks share no keys. Wide heads are taken to be latent attention's,
/// with values in the keys' rows.
pub fn select(
    limits: &DeviceLimits,
    problem: &AttentionProblem,
    seq_q: usize,
) -> Result<AttentionChoice, Error> {
    let (variant, reason) = choose(limits, problem, seq_q)?;
    Ok(AttentionChoice { variant, why: reason.to_string() })
}

/// Why a kernel is chosen.
pub(super) enum Reason {
    Many { most: usize },
    Few { most: usize, rows: usize },
    Wide { rows: usize },
    Any,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Many { most } => write!(f, "more than {most} queries"),
            Reason::Few { most, rows } => write!(f, "at most {most} queries: {rows} rows share each key"),
            Reason::Wide { rows } => write!(f, "wide heads: {rows} rows share each key"),
            Reason::Any => f.write_str("one kernel for any number of queries"),
        }
    }
}

/// What [`select`] chooses; without a word of text, as each run asks.
pub(super) fn choose(
    limits: &DeviceLimits,
    problem: &AttentionProblem,
    seq_q: usize,
) -> Result<(&'static AttentionVariant, Reason), Error> {
    let group = problem.heads_q / problem.heads_kv.max(1);
    let is_invariant = limits.is_invariant();
    let rows = if is_invariant { usize::MAX } else { seq_q * group };
    let rings = if problem.is_fp8() { DECODE_RING_FP8_VARIANTS } else { DECODE_RING_VARIANTS };
    // Of 256 columns two tiles of 8 rows take less time than one of 16 (`benches/record/h200/2026-11-28-choice.md`).
    let is_wide = problem.head_dim.max(problem.head_dim_v) > 128 && !problem.is_fp8();
    let tile_rows = if is_wide && rows <= 16 { rows.min(8) } else { rows };
    let tensor_decode = for_rows(rings, |v| holds(v, problem) && runs(limits, v, problem), tile_rows);
    let most = if tensor_decode.is_some() { MAX_TENSOR_DECODE_QUERIES } else { MAX_DECODE_QUERIES };
    let few = !is_invariant && (1..=most).contains(&seq_q);
    let (variant, reason) = match prefill(problem) {
        Some(variant) if !few => {
            let on_tensor_cores = smallest(WGMMA_VARIANTS, limits, problem)
                .or_else(|| smallest(PREFILL_MMA_VARIANTS, limits, problem));
            let reason = if is_invariant { Reason::Any } else { Reason::Many { most } };
            (Some(on_tensor_cores.unwrap_or(variant)), reason)
        }
        Some(_) => (tensor_decode.or_else(|| decode(problem, rows)), Reason::Few { most, rows }),
        None => {
            let latent = smallest(DECODE_LATENT_WGMMA_VARIANTS, limits, problem)
                .or_else(|| smallest(DECODE_LATENT_VARIANTS, limits, problem));
            let reason = if is_invariant { Reason::Any } else { Reason::Wide { rows } };
            (latent.or_else(|| decode(problem, rows)), reason)
        }
    };
    Ok((variant.ok_or_else(|| unsupported_dtype(problem))?, reason))
}

/// What the keys and values of the heads that are worked on at a time may take of L2. An H200's has 50 MiB, of which
/// what both halves read is in each (`gpu/NOTES/attention.md`).
const SECTION_BYTES: usize = 16 << 20;
/// What all keys and values may take for one section of all heads.
const WHOLE_BYTES: usize = 48 << 20;

/// Query heads of a section. Where all tiles have as much to do, those of a single key head: blocks that read the same
/// keys at about the same time share them on the way from L2. Under a causal mask tiles go from long ones to short ones
/// in each section, and there must be enough short ones in the end: sections are as large as L2 allows and as alike as
/// can be, and where there is little to do all is one.
pub(super) fn section(problem: &AttentionProblem, seq_kv: usize, key_heads: usize) -> u32 {
    let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, dtype, mask, .. } = *problem;
    let bytes = seq_kv * (head_dim + head_dim_v) * dtype.bytes();
    let most = match mask {
        Mask::None => 1,
        Mask::Causal if key_heads.saturating_mul(bytes) <= WHOLE_BYTES => key_heads.max(1),
        Mask::Causal => (SECTION_BYTES / bytes).max(1),
    };
    let alike = key_heads.div_ceil(key_heads.div_ceil(most).max(1));
    (alike * (heads_q / heads_kv)) as u32
}

#[cfg(test)]
mod tests {
    use abi::Arch;

    use super::super::{ScoreBias, Scores};
    use super::*;

    fn problem(dtype: DType, heads_q: usize, heads_kv: usize, head_dim: usize) -> AttentionProblem {
        AttentionProblem {
            batch: 3,
            seq_q: 4096,
            seq_kv: 4096,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            dtype_kv: dtype,
            scale: None,
            mask: Mask::Causal,
            window: None,
            scores: Scores::default(),
            page_size: None,
        }
    }

    #[test]
    fn choice_by_queries_and_head() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
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
    fn tensor_cores() {
        let hopper = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        let ampere = DeviceLimits { floor: Arch::Sm80, ..hopper };
        let small = DeviceLimits::new(Arch::Sm80, 84, 99 << 10);
        let table = [
            (hopper, DType::BF16, (128, 128), 17, None, "attention_bf16__prefill_d128__sm90a"),
            (hopper, DType::BF16, (128, 128), 16, Some(-1.0), "attention_bf16__decode_ring_d128_r16__sm80"),
            (hopper, DType::F16, (64, 40), 1, None, "attention_f16__decode_ring_d64_r8__sm80"),
            (hopper, DType::BF16, (128, 128), 2, None, "attention_bf16__decode_ring_d128_r8__sm80"),
            (hopper, DType::BF16, (128, 128), 3, None, "attention_bf16__decode_ring_d128_r16__sm80"),
            (hopper, DType::BF16, (256, 256), 4, None, "attention_bf16__decode_ring_d256_r8__sm80"),
            (hopper, DType::BF16, (256, 256), 5, None, "attention_bf16__decode_ring_d256_r16__sm80"),
            (hopper, DType::F32, (64, 40), 5, None, "attention_f32__prefill_d64__sm61"),
            (hopper, DType::F16, (40, 64), 4096, None, "attention_f16__prefill_d64__sm90a"),
            (hopper, DType::F16, (40, 72), 4096, None, "attention_f16__prefill_d128__sm90a"),
            (hopper, DType::BF16, (192, 128), 100, None, "attention_bf16__prefill_d192v128__sm90a"),
            (hopper, DType::BF16, (192, 136), 100, None, "attention_bf16__prefill_d256__sm90a"),
            (hopper, DType::BF16, (128, 128), 100, Some(-0.5), "attention_bf16__prefill_d128__sm80"),
            (hopper, DType::BF16, (128, 128), 100, Some(0.0), "attention_bf16__prefill_d128__sm80"),
            (hopper, DType::F32, (128, 128), 100, None, "attention_f32__prefill_d128__sm61"),
            (hopper, DType::BF16, (576, 512), 100, None, "attention_bf16__decode_latent__sm90a"),
            (ampere, DType::BF16, (576, 512), 100, None, "attention_bf16__decode_latent_p4__sm80"),
            (small, DType::F16, (576, 512), 1, None, "attention_f16__decode_latent_p2__sm80"),
            (hopper, DType::BF16, (576, 504), 1, None, "attention_bf16__decode_d576v512_r4__sm61"),
            (hopper, DType::F32, (576, 512), 1, None, "attention_f32__decode_d576v512_r4__sm61"),
            (ampere, DType::BF16, (128, 128), 100, None, "attention_bf16__prefill_d128__sm80"),
        ];
        for (limits, dtype, (head_dim, head_dim_v), seq_q, scale, entry) in table {
            let problem = AttentionProblem { head_dim_v, scale, ..problem(dtype, 32, 8, head_dim) };
            assert_eq!(select(&limits, &problem, seq_q).unwrap().variant.entry, entry);
        }
    }

    #[test]
    fn masks_of_ones_own() {
        let limits = |floor| DeviceLimits::new(floor, 100, 227 << 10);
        let table = [
            (
                Arch::Sm80,
                DType::BF16,
                ScoreBias::Additive,
                None,
                17,
                "attention_bf16__prefill_masked_d128__sm80",
            ),
            (
                Arch::Sm90a,
                DType::F16,
                ScoreBias::Boolean,
                None,
                17,
                "attention_f16__prefill_masked_d128__sm90a",
            ),
            (
                Arch::Sm90a,
                DType::F16,
                ScoreBias::Boolean,
                Some(64),
                17,
                "attention_f16__prefill_masked_d128__sm90a",
            ),
            (Arch::Sm80, DType::F16, ScoreBias::Boolean, Some(64), 17, "attention_f16__prefill_d128__sm61"),
            (Arch::Sm80, DType::F16, ScoreBias::None, Some(64), 17, "attention_f16__prefill_d128__sm61"),
            (Arch::Sm80, DType::F32, ScoreBias::Additive, None, 17, "attention_f32__prefill_d128__sm61"),
            (Arch::Sm80, DType::BF16, ScoreBias::Additive, None, 1, "attention_bf16__decode_d128_r4__sm61"),
        ];
        for (floor, dtype, bias, blocks, seq_q, entry) in table {
            let scores = Scores { bias, blocks, ..Scores::PLAIN };
            let problem = AttentionProblem { scores, ..problem(dtype, 32, 8, 128) };
            assert_eq!(select(&limits(floor), &problem, seq_q).unwrap().variant.entry, entry);
        }
    }

    #[test]
    fn invariant_choices_know_no_queries() {
        use crate::Invariance;
        for (floor, head_dim, dtype, entry) in [
            (Arch::Sm61, 128, DType::BF16, "attention_bf16__prefill_d128__sm61"),
            (Arch::Sm80, 128, DType::BF16, "attention_bf16__prefill_d128__sm80"),
            (Arch::Sm90a, 64, DType::F16, "attention_f16__prefill_d64__sm90a"),
            (Arch::Sm90a, 128, DType::F32, "attention_f32__prefill_d128__sm61"),
            (Arch::Sm80, 576, DType::BF16, "attention_bf16__decode_latent_p4__sm80"),
            (Arch::Sm61, 576, DType::BF16, "attention_bf16__decode_d576v512_r4__sm61"),
        ] {
            let limits =
                DeviceLimits { invariance: Invariance::Batch, ..DeviceLimits::new(floor, 132, 227 << 10) };
            for (seq_q, batch) in
                [0, 1, 2, 4, 5, 16, 17, 512, 4096].into_iter().flat_map(|q| [(q, 1), (q, 32)])
            {
                let head_dim_v = head_dim.min(512);
                let problem =
                    AttentionProblem { batch, seq_q, head_dim_v, ..problem(dtype, 32, 8, head_dim) };
                assert_eq!(select(&limits, &problem, seq_q).unwrap().variant.entry, entry, "{seq_q} {batch}");
            }
        }
    }

    #[test]
    fn fp8_and_pages() {
        let limits = |floor| DeviceLimits::new(floor, 100, 99 << 10);
        let fp8 = DType::F8E4M3;
        let table = [
            (Arch::Sm80, fp8, None, 1, "attention_bf16_f8e4m3__decode_ring_d128_r8__sm80", false),
            (Arch::Sm80, fp8, Some(16), 16, "attention_bf16_f8e4m3__decode_ring_d128_r16__sm80", false),
            (Arch::Sm80, fp8, None, 17, "attention_bf16__prefill_d128__sm80", true),
            (Arch::Sm80, fp8, Some(16), 17, "attention_bf16__prefill_d128__sm80", true),
            (Arch::Sm80, DType::BF16, Some(16), 17, "attention_bf16__prefill_paged_d128__sm80", false),
            (Arch::Sm80, DType::BF16, Some(16), 1, "attention_bf16__decode_ring_d128_r8__sm80", false),
            (Arch::Sm61, fp8, None, 1, "attention_bf16__decode_d128_r4__sm61", true),
            (Arch::Sm61, DType::BF16, Some(16), 17, "attention_bf16__prefill_d128__sm61", false),
        ];
        for (floor, dtype_kv, page_size, seq_q, entry, is_gathered) in table {
            let problem = AttentionProblem { dtype_kv, page_size, ..problem(DType::BF16, 32, 8, 128) };
            let variant = select(&limits(floor), &problem, seq_q).unwrap().variant;
            assert_eq!((variant.entry, gathers(variant, &problem)), (entry, is_gathered));
        }
        let masked = Scores { bias: ScoreBias::Additive, ..Scores::PLAIN };
        for (scores, entry) in [
            (Scores::PLAIN, "attention_f16__prefill_paged_d64__sm80"),
            (masked, "attention_f16__prefill_masked_paged_d64__sm80"),
        ] {
            let paged = AttentionProblem { page_size: Some(16), scores, ..problem(DType::F16, 32, 8, 64) };
            let variant = select(&limits(Arch::Sm80), &paged, 17).unwrap().variant;
            assert_eq!(variant.entry, entry);
            let split = split(variant).map(|split| split.entry);
            assert_eq!(
                split,
                (scores == Scores::PLAIN).then_some("attention_f16__prefill_split_paged_d64__sm80")
            );
            let apart = AttentionProblem { page_size: None, ..paged };
            let error =
                AttentionChoice::forced(&limits(Arch::Sm80), variant, &apart).unwrap_err().to_string();
            assert!(error.contains("expected one for keys in one piece, got"), "{error}");
            let plain = select(&limits(Arch::Sm80), &apart, 17).unwrap().variant;
            let error = AttentionChoice::forced(&limits(Arch::Sm80), plain, &paged).unwrap_err().to_string();
            assert!(error.contains("expected one for keys in pages, got"), "{error}");
        }
        let ring = &DECODE_RING_FP8_VARIANTS[0];
        assert_eq!(
            AttentionChoice::forced(&limits(Arch::Sm80), ring, &problem(DType::F16, 4, 4, 64))
                .unwrap_err()
                .to_string(),
            "attention: variant: expected f16 with keys in f8e4m3 of head dims up to 64 and 64, got \
             attention_f16_f8e4m3__decode_ring_d64_r8__sm80 for f16 of head dims 64 and 64"
        );
    }

    #[test]
    fn choice_by_both_head_dims() {
        let limits = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let table = [
            ((64, 128), 1, "attention_bf16__decode_d128_r4__sm61"),
            ((192, 128), 1, "attention_bf16__decode_d256_r4__sm61"),
            ((192, 128), 9, "attention_bf16__prefill_d256__sm61"),
            ((576, 512), 1, "attention_bf16__decode_d576v512_r4__sm61"),
            ((576, 512), 100, "attention_bf16__decode_d576v512_r4__sm61"),
            ((64, 264), 100, "attention_bf16__decode_d576v512_r4__sm61"),
        ];
        for ((head_dim, head_dim_v), seq_q, entry) in table {
            let problem = AttentionProblem { head_dim_v, ..problem(DType::BF16, 4, 1, head_dim) };
            assert_eq!(select(&limits, &problem, seq_q).unwrap().variant.entry, entry);
        }
        let wide = AttentionProblem { head_dim_v: 512, ..problem(DType::F32, 40, 2, 576) };
        assert_eq!(unaligned(&wide).unwrap().entry, "attention_f32__decode_d576v512_r4__sm61");
    }

    #[test]
    fn forced_kernels_must_fit() {
        let limits = DeviceLimits::new(Arch::Sm80, 20, 163 << 10);
        let named = |entry: &str| VARIANTS.iter().chain(WGMMA_VARIANTS).find(|v| v.entry == entry).unwrap();
        let problem = problem(DType::BF16, 4, 4, 80);
        assert!(
            AttentionChoice::forced(&limits, named("attention_bf16__prefill_d256__sm61"), &problem).is_ok()
        );
        let message =
            |entry| AttentionChoice::forced(&limits, named(entry), &problem).unwrap_err().to_string();
        assert_eq!(
            message("attention_bf16__prefill_d64__sm61"),
            "attention: variant: expected bf16 of head dims up to 64 and 64, got attention_bf16__prefill_d64__sm61 for bf16 \
             of head dims 80 and 80"
        );
        assert_eq!(
            message("attention_bf16__merge__sm61"),
            "attention: variant: expected a prefill or decode kernel, got attention_bf16__merge__sm61 for bf16 of \
             head dims 80 and 80"
        );
        assert_eq!(
            message("attention_bf16__prefill_d128__sm90a"),
            "attention: variant: expected a card of sm_90a and a scale above 0 for attention_bf16__prefill_d128__sm90a, got \
             sm_80 and 0.1118034"
        );
    }

    #[test]
    fn blocks_share_keys() {
        let hopper = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        let ampere = DeviceLimits { floor: Arch::Sm80, num_sms: 108, ..hopper };
        let of = |limits: &DeviceLimits, head_dim, tiles, keys| {
            let wanted = problem(DType::BF16, 32, 8, head_dim);
            let variant = select(limits, &wanted, 100).unwrap().variant;
            let split = split(variant).expect("every kernel of many queries has one");
            assert_eq!(split.entry, variant.entry.replace("prefill", "prefill_split"));
            1 << key_parts_log2(limits.num_sms, split.tile, tiles, keys)
        };
        for (tiles, keys, on_hopper, on_ampere) in [
            (32, 16384, 4, 4),
            (8, 16384, 16, 16),
            (1, 1 << 20, 32, 32),
            (32, 1024, 2, 2),
            (32, 1023, 1, 1),
            (67, 16384, 1, 2),
            (0, 0, 1, 1),
        ] {
            for head_dim in [64, 128, 256] {
                assert_eq!(of(&hopper, head_dim, tiles, keys), on_hopper, "{tiles} {keys}");
                assert_eq!(of(&ampere, head_dim, tiles, keys), on_ampere, "{tiles} {keys}");
            }
        }
        let masked = PREFILL_MMA_VARIANTS.iter().find(|v| v.entry.contains("masked")).unwrap();
        assert_eq!(split(masked), None);
    }

    #[test]
    fn sections_of_what_l2_holds() {
        let of = |(heads_q, heads_kv), head_dim, mask, seq_kv, batch| {
            let problem = AttentionProblem { mask, ..problem(DType::BF16, heads_q, heads_kv, head_dim) };
            section(&problem, seq_kv, batch * heads_kv)
        };
        assert_eq!(of((32, 32), 128, Mask::None, 4096, 4), 1);
        assert_eq!(of((32, 8), 128, Mask::None, 4096, 4), 4, "the query heads of a key head");
        assert_eq!(of((32, 32), 128, Mask::Causal, 4096, 4), 8, "of 128, 2 MiB each");
        assert_eq!(of((32, 8), 128, Mask::Causal, 16384, 1), 8, "two key heads of 8 MiB");
        assert_eq!(of((20, 20), 256, Mask::Causal, 2048, 1), 20, "all of 40 MiB");
        assert_eq!(of((25, 25), 128, Mask::Causal, 4096, 1), 7, "three of 8 would leave one");
        assert_eq!(of((2, 2), 128, Mask::Causal, 1 << 20, 1), 1, "larger than L2");
        assert_eq!(of((4, 2), 128, Mask::Causal, 0, 1), 4, "without keys");
        assert_eq!(of((4, 2), 128, Mask::Causal, 4096, 0), 0, "without sequences");
    }
}
