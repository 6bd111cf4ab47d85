//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{Attention, AttentionArgs, AttentionProblem, KvScales, Mask, OP, ScoreBias, Scores};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    Decoder, GLM_4_7_FLASH, GLM_4_7_FLASH_LATENT, Latent, QWEN3_0_6B, QWEN3_4B, QWEN3_CODER_30B,
    QWEN3_CODER_NEXT, QWEN3_VL_2B_VISION,
};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    /// Model and phase.
    pub name: &'static str,
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub seq_q: usize,
    /// Keys of a sequence.
    pub seq_kv: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a head of q and k.
    pub head_dim: usize,
    /// Elements of a head of v and out.
    pub head_dim_v: usize,
    /// Whether v is the first columns of k's rows, as in latent attention.
    pub is_latent: bool,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What changes scores besides.
    pub scores: Scores,
    /// Whether heads have sinks.
    pub has_sinks: bool,
    /// Keys of a page, if k and v are in pages.
    pub page_size: Option<usize>,
    /// Whether k and v are fp8.
    pub is_fp8: bool,
}

const fn prefill(
    name: &'static str,
    batch: usize,
    heads: (usize, usize),
    seq: usize,
    head_dim: usize,
    mask: Mask,
) -> AttentionCase {
    AttentionCase {
        name,
        batch,
        seq_q: seq,
        seq_kv: seq,
        heads_q: heads.0,
        heads_kv: heads.1,
        head_dim,
        head_dim_v: head_dim,
        is_latent: false,
        mask,
        scores: Scores::PLAIN,
        has_sinks: false,
        page_size: None,
        is_fp8: false,
    }
}

const fn decode(
    name: &'static str,
    batch: usize,
    heads: (usize, usize),
    seq_kv: usize,
    head_dim: usize,
) -> AttentionCase {
    let (heads_q, heads_kv) = heads;
    AttentionCase {
        name,
        batch,
        seq_q: 1,
        seq_kv,
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v: head_dim,
        is_latent: false,
        mask: Mask::Causal,
        scores: Scores::PLAIN,
        has_sinks: false,
        page_size: None,
        is_fp8: false,
    }
}

/// The same with keys in pages.
const fn paged(case: AttentionCase, page_size: usize, name: &'static str) -> AttentionCase {
    AttentionCase { name, page_size: Some(page_size), ..case }
}

/// The same with keys and values in fp8.
const fn fp8(case: AttentionCase, name: &'static str) -> AttentionCase {
    AttentionCase { name, is_fp8: true, ..case }
}

/// Gemma 2's, whose every other layer sees all keys.
const fn capped(case: AttentionCase) -> AttentionCase {
    AttentionCase { scores: Scores { soft_cap: Some(50.0), ..Scores::PLAIN }, ..case }
}

/// A prompt of which every block of 128 queries sees a tenth of the blocks of 128 keys.
const fn sparse(case: AttentionCase) -> AttentionCase {
    AttentionCase { scores: Scores { blocks: Some(128), ..Scores::PLAIN }, ..case }
}

/// A number for each query and key that is added to the scores, the same for all heads.
const fn biased(case: AttentionCase) -> AttentionCase {
    AttentionCase { scores: Scores { bias: ScoreBias::Additive, ..Scores::PLAIN }, ..case }
}

/// Latent attention in its absorbed form: the heads share rows of 576, of which v is the first 512.
const fn latent(name: &'static str, batch: usize) -> AttentionCase {
    let Latent { heads, kv_rank, rope, .. } = GLM_4_7_FLASH_LATENT;
    let case = decode(name, batch, (heads, 1), CONTEXT, kv_rank + rope);
    AttentionCase { head_dim_v: kv_rank, is_latent: true, ..case }
}

/// Keys of a sequence that is decoded.
const CONTEXT: usize = 4096;

const VISION_HEADS: (usize, usize) = (QWEN3_VL_2B_VISION.heads, QWEN3_VL_2B_VISION.heads);

const fn case(name: &'static str, phase: Phase, model: Decoder) -> AttentionCase {
    let Decoder { heads, head_dim, .. } = model;
    match phase {
        Phase::Prefill(seq) => prefill(name, 1, heads, seq, head_dim, Mask::Causal),
        Phase::Decode(batch) => decode(name, batch, heads, CONTEXT, head_dim),
    }
}

/// The shapes. The text decoder of Qwen3-VL-2B has those of Qwen3-0.6B.
pub const CASES: &[AttentionCase] = cases! {
    case;
    one: [
        prefill("anchor B16 H32 S512 D64", 16, (32, 32), 512, 64, Mask::None),
        prefill("anchor B4 H32 S4096 D128", 4, (32, 32), 4096, 128, Mask::None),
        prefill("anchor B4 H32 S4096 D128 causal", 4, (32, 32), 4096, 128, Mask::Causal),
        prefill("anchor B1 H32/8 S16384 D128 causal", 1, (32, 8), 16384, 128, Mask::Causal),
        prefill("anchor B2 H32 S4096 D64 causal", 2, (32, 32), 4096, 64, Mask::Causal),
        prefill("anchor B2 H16 S8192 D256 causal", 2, (16, 16), 8192, 256, Mask::Causal),
        prefill("anchor B16 H16 S1024 D128 causal", 16, (16, 16), 1024, 128, Mask::Causal),
        prefill("anchor B1 H32/8 S2048 D128 causal", 1, (32, 8), 2048, 128, Mask::Causal),
        decode("anchor decode B64 H32/8 kv4096 D128", 64, (32, 8), 4096, 128),
        paged(decode("", 64, (32, 8), 4096, 128), 16, "decode B64 H32/8 kv4096 D128 pages 16"),
        paged(decode("", 64, (32, 8), 4096, 128), 64, "decode B64 H32/8 kv4096 D128 pages 64"),
        fp8(decode("", 64, (32, 8), 4096, 128), "decode B64 H32/8 kv4096 D128 fp8"),
        fp8(decode("", 256, (32, 8), 2048, 128), "decode B256 H32/8 kv2048 D128 fp8"),
        fp8(decode("", 1, (32, 8), 32768, 128), "decode B1 H32/8 kv32768 D128 fp8"),
        fp8(prefill("", 1, (32, 8), 4096, 128, Mask::Causal), "B1 H32/8 S4096 D128 causal fp8"),
        decode("anchor decode B1 H32/8 kv32768 D128", 1, (32, 8), 32768, 128),
        decode("anchor decode B256 H32/8 kv2048 D128", 256, (32, 8), 2048, 128),
        decode("anchor decode B8 H32/4 kv8192 D128", 8, (32, 4), 8192, 128),
        latent("glm-4.7-flash latent decode 1", 1),
        latent("glm-4.7-flash latent decode 8", 8),
        latent("glm-4.7-flash latent decode 32", 32),
        latent("glm-4.7-flash latent decode 128", 128),
        prefill("B1 H32/8 S16384 D128", 1, (32, 8), 16384, 128, Mask::None),
        sparse(prefill("B1 H32/8 S16384 D128 blocks 10 %", 1, (32, 8), 16384, 128, Mask::None)),
        biased(prefill("B1 H32/8 S4096 D128 additive mask", 1, (32, 8), 4096, 128, Mask::None)),
        capped(prefill("gemma-2-27b prefill 4096 soft cap", 1, (32, 16), 4096, 128, Mask::Causal)),
        capped(decode("gemma-2-27b decode 8 soft cap", 8, (32, 16), CONTEXT, 128)),
        AttentionCase { has_sinks: true, ..prefill("gpt-oss-120b prefill 4096 sinks", 1, (64, 8), 4096, 64, Mask::Causal) },
        // One frame of 4096 patches.
        prefill("qwen3-vl-2b vision prefill 4096", 1, VISION_HEADS, 4096, QWEN3_VL_2B_VISION.head_dim(), Mask::None),
    ];
    phases: [
        "qwen3-0.6b" => (QWEN3_0_6B),
        "qwen3-4b" => (QWEN3_4B),
        "qwen3-coder-30b" => (QWEN3_CODER_30B),
        "qwen3-coder-next" => (QWEN3_CODER_NEXT),
    ];
    decode: [];
    prefill: [
        "glm-4.7-flash" => (GLM_4_7_FLASH),
    ];
};

/// Runs of so many queries of a sequence, for what tries every operator: of a cache in one piece, and, where the type
/// has them, of pages in fp8.
pub fn samples(device: &Device, seq_q: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let ([heads_q, heads_kv], head_dim, seq_kv, page_size) = ([4, 2], 64, 128, 16);
    let problem = AttentionProblem {
        mask: Mask::Causal,
        ..AttentionProblem::new(1, [seq_q, seq_kv], [heads_q, heads_kv], head_dim, dtype)
    };
    let queries = [1, seq_q, heads_q, head_dim];
    let keys = [1, seq_kv, heads_kv, head_dim];
    let plan = Attention::plan(device, problem)?;
    let tensors = [
        tensor("q", &queries, dtype),
        tensor("k", &keys, dtype),
        tensor("v", &keys, dtype),
        tensor("kv_lens", &[1], DType::U32),
        tensor("out", &queries, dtype),
        tensor("lse", &[1, heads_q, seq_q], DType::F32),
    ];
    let whole = Sample::new(OP, tensors, move |stream, [q, k, v, kv_lens, out, lse]| {
        let args = AttentionArgs {
            kv_lens: Some(kv_lens.as_view()),
            lse: Some(lse.reborrow()),
            ..AttentionArgs::new(q.as_view(), k.as_view(), v.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    if dtype == DType::F32 {
        return Ok(vec![whole]);
    }
    let problem = AttentionProblem { dtype_kv: DType::F8E4M3, page_size: Some(page_size), ..problem };
    let plan = Attention::plan(device, problem)?;
    let pages = seq_kv / page_size;
    let pool = [pages, page_size, heads_kv, head_dim];
    let tensors = [
        tensor("q", &queries, dtype),
        tensor("k", &pool, DType::F8E4M3),
        tensor("v", &pool, DType::F8E4M3),
        tensor("kv_lens", &[1], DType::U32),
        tensor("k_scale", &[heads_kv], DType::F32),
        tensor("v_scale", &[heads_kv], DType::F32),
        tensor("page_table", &[1, pages], DType::U32),
        tensor("out", &queries, dtype),
    ];
    let paged =
        Sample::new(OP, tensors, move |stream, [q, k, v, kv_lens, k_scale, v_scale, page_table, out]| {
            let args = AttentionArgs {
                kv_lens: Some(kv_lens.as_view()),
                kv_scales: KvScales { k: Some(k_scale.as_view()), v: Some(v_scale.as_view()) },
                page_table: Some(page_table.as_view()),
                ..AttentionArgs::new(q.as_view(), k.as_view(), v.as_view(), out.reborrow())
            };
            plan.run(stream, args)
        });
    Ok(vec![whole, paged])
}
