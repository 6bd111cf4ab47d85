//! Attention at the shapes of its cases.

use serde_json::json;
use warpforge::ops::attention::reference::{self, Options, Sequence};
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionCase, AttentionProblem, CASES, DECODE_RING_VARIANTS, KvScales, Mask,
    Offsets, PREFILL_MMA_VARIANTS, ScoreBias, ScoreTensors, VARIANTS, WGMMA_VARIANTS,
};
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, floats};

const DTYPE: DType = DType::BF16;
/// What keys and values in fp8 are multiplied by.
const KV_SCALE: f32 = 0.5;

/// Of so many blocks of a block mask one is seen.
const KEPT: usize = 10;

struct Set {
    q: Tensor,
    k: Tensor,
    /// None if it is a part of k.
    v: Option<Tensor>,
    out: Tensor,
    /// The table of pages and the sequences' lengths.
    pages: Option<[Tensor; 2]>,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("attention", case.name, |bencher| time(bencher, case));
    }
}

pub fn time(bencher: &mut Bencher, case: &AttentionCase) -> Result<(), Failure> {
    let &AttentionCase {
        batch,
        seq_q,
        seq_kv,
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        is_latent,
        mask,
        scores,
        has_sinks,
        page_size,
        is_fp8,
        ..
    } = case;
    let dtype_kv = if is_fp8 { DType::F8E4M3 } else { DTYPE };
    let problem = AttentionProblem {
        batch,
        seq_q,
        seq_kv,
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        dtype: DTYPE,
        dtype_kv,
        scale: None,
        mask,
        window: None,
        scores,
        page_size,
    };
    let device = bencher.device.clone();
    let variants = || {
        let by_tensor_cores = WGMMA_VARIANTS.iter().chain(DECODE_RING_VARIANTS).chain(PREFILL_MMA_VARIANTS);
        by_tensor_cores.chain(VARIANTS.iter().filter(|variant| variant.tile.is_decode()))
    };
    let planned = |entry: &str| match variants().find(|variant| variant.entry == entry) {
        Some(variant) => Attention::plan_with(&device, problem, variant),
        None => Attention::plan(&device, problem),
    };
    let plan = planned(bencher.kernel.as_deref().unwrap_or_default())?;
    let report = plan.report();
    let mask_name = match mask {
        Mask::None => "none",
        Mask::Causal => "causal",
    };
    let shape = json!({
        "batch": batch, "seq_q": seq_q, "seq_kv": seq_kv, "heads_q": heads_q, "heads_kv": heads_kv,
        "head_dim": head_dim, "head_dim_v": head_dim_v, "is_latent": is_latent, "mask": mask_name,
        "soft_cap": scores.soft_cap, "has_sinks": has_sinks, "block_size": scores.blocks,
        "is_biased": scores.bias != ScoreBias::None,
        "page_size": page_size, "is_fp8": is_fp8,
    });
    // What is both key and value is read once.
    let shared = if is_latent { batch * seq_kv * heads_kv * head_dim_v * DTYPE.bytes() } else { 0 };
    let seen = if scores.blocks.is_some() { KEPT } else { 1 };
    let (bytes, flops) = (report.bytes - shared as u64, report.flops / seen as u64);
    if !bencher.starts(Work { dtype: DTYPE.name(), shape, bytes, flops })? {
        return Ok(());
    }
    let q_shape = |width| [batch, seq_q, heads_q, width];
    // The sequences got their pages in turns: page p of sequence s is number p · batch + s.
    let pages_of = |page_size: usize| seq_kv / page_size;
    let kv_shape = |width| match page_size {
        None => [batch, seq_kv, heads_kv, width],
        Some(page_size) => [batch * pages_of(page_size), page_size, heads_kv, width],
    };
    let table = |bencher: &Bencher, page_size: usize| -> Result<[Tensor; 2], Error> {
        let max_pages = pages_of(page_size);
        let numbers: Vec<u32> =
            (0..batch).flat_map(|s| (0..max_pages).map(move |p| (p * batch + s) as u32)).collect();
        let table = Tensor::from_slice(&bencher.stream, &[batch, max_pages], &numbers)?;
        Ok([table, Tensor::from_slice(&bencher.stream, &[batch], &vec![seq_kv as u32; batch])?])
    };
    let logits: Vec<f32> = (0..heads_q).map(|head| head as f32 / 8.0).collect();
    let sinks = Tensor::from_slice(&bencher.stream, &[heads_q], &logits)?;
    // Of the block mask, that of a row of blocks.
    let kept = |head: usize, query_block: usize, key_block: usize| {
        (head + query_block + 3 * key_block).is_multiple_of(KEPT)
    };
    let blocks = scores.blocks.map(|size| -> Result<Tensor, Error> {
        let [rows, cols] = [seq_q.div_ceil(size), seq_kv.div_ceil(size)];
        let words = cols.div_ceil(32);
        let mut bits = vec![0u32; heads_q * rows * words];
        for (at, word) in bits.iter_mut().enumerate() {
            let (head, row, first) = (at / words / rows, at / words % rows, at % words * 32);
            *word = (0..32).filter(|bit| kept(head, row, first + bit)).map(|bit| 1 << bit).sum();
        }
        Tensor::from_slice(&bencher.stream, &[1, heads_q, rows, words], &bits)
    });
    let blocks = blocks.transpose()?;
    // For all heads of all sequences.
    let bias = scores.bias != ScoreBias::None;
    let bias = bias.then(|| bencher.random(&[1, 1, seq_q, seq_kv], DTYPE, 3000)).transpose()?;
    let scales = Tensor::from_slice(&bencher.stream, &[heads_kv], &vec![KV_SCALE; heads_kv])?;
    let mut sets = bencher.sets(|bencher, seed| {
        Ok(Set {
            q: bencher.random(&q_shape(head_dim), DTYPE, seed)?,
            k: bencher.random(&kv_shape(head_dim), dtype_kv, 1000 + seed)?,
            v: if is_latent {
                None
            } else {
                Some(bencher.random(&kv_shape(head_dim_v), dtype_kv, 2000 + seed)?)
            },
            out: Tensor::empty(&bencher.stream, &q_shape(head_dim_v), DTYPE)?,
            pages: page_size.map(|page_size| table(bencher, page_size)).transpose()?,
        })
    })?;
    let run = |plan: &Attention, stream: &Stream, set: &mut Set| {
        let (q, k) = (set.q.view(), set.k.view());
        let v = set.v.as_ref().map_or_else(|| k.slice(3, 0..head_dim_v), |v| Ok(v.view()))?;
        let [page_table, kv_lens] = [0, 1].map(|i| set.pages.as_ref().map(|pages| pages[i].view()));
        let scores = ScoreTensors {
            sinks: has_sinks.then(|| sinks.view()),
            bias: bias.as_ref().map(Tensor::view),
            blocks: blocks.as_ref().map(Tensor::view),
        };
        let out = set.out.view_mut();
        let (offsets, scale) = (Offsets::default(), is_fp8.then(|| scales.view()));
        let kv_scales = KvScales { k: scale, v: scale };
        let args = AttentionArgs { q, k, v, kv_lens, kv_scales, offsets, out, lse: None, scores, page_table };
        plan.run(stream, args)
    };
    // The first head of the first sequence's last query, which sees every key of its blocks.
    let verify = |stream: &Stream, set: &Set| {
        let row = |tensor: &Tensor| {
            let row = tensor.view().slice(0, 0..1)?.slice(1, seq_q - 1..seq_q)?.slice(2, 0..1)?;
            floats(row, stream)
        };
        let column = |tensor: &Tensor, width: usize| -> Result<Vec<f64>, Error> {
            let pieces = match page_size {
                None => 0..1,
                Some(page_size) => 0..pages_of(page_size),
            };
            let mut all = Vec::new();
            for piece in pieces {
                all.extend(floats(tensor.view().slice(0, piece * batch..piece * batch + 1)?, stream)?);
            }
            let row = heads_kv * tensor.shape()[3];
            let scale = if is_fp8 { f64::from(KV_SCALE) } else { 1.0 };
            Ok(all.chunks(row).flat_map(|row| &row[..width]).map(|value| value * scale).collect())
        };
        let last_row = scores.blocks.map(|size| -> Vec<bool> {
            (0..seq_kv.div_ceil(size)).map(|block| kept(0, (seq_q - 1) / size, block)).collect()
        });
        let bias_row = bias.as_ref().map(|bias| floats(bias.view().slice(2, seq_q - 1..seq_q)?, stream));
        let bias_row = bias_row.transpose()?;
        let sequence = Sequence {
            seq_q: 1,
            len: seq_kv,
            heads_q: 1,
            heads_kv: 1,
            head_dim,
            head_dim_v,
            scale: f64::from(problem.scale()),
            mask: Mask::None,
            window: None,
            options: Options {
                soft_cap: scores.soft_cap.map(f64::from),
                sinks: has_sinks.then_some(&[0.0][..]),
                bias: bias_row.as_deref(),
                blocks: scores.blocks.zip(last_row.as_deref()),
            },
        };
        let (q, k) = (row(&set.q)?, column(&set.k, head_dim)?);
        let v = column(set.v.as_ref().unwrap_or(&set.k), head_dim_v)?;
        let (want, _) = reference::attention::<f64>(&sequence, &q, &k, &v, |value| value);
        expect_close(DTYPE, &row(&set.out)?, &want)
    };
    let kernels = variants().map(|variant| variant.entry);
    bencher.time_among(&report, &mut sets, (kernels, planned), &plan, run, verify)
}
