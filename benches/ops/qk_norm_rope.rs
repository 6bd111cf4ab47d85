//! Norm, rotation and append of q, k and v at the shapes of its cases, from a joint projection; positions in order.

use serde_json::json;
use warpforge::ops::qk_norm_rope::{
    CASES, QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeCase, QkNormRopeProblem, QkNormWeights, reference,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::ops::rope::reference::{RopeShape, tables};
use warpforge::ops::rope::{RopeInput, RopeStyle, RopeTables};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;
const STYLE: RopeStyle = RopeStyle::HalfSplit;
const EPS: f32 = 1e-6;
/// The first token's position; not 0, where nothing is rotated.
const FIRST: u32 = 5;

/// The joint projection, and what is written.
struct Set {
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("qk_norm_rope", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &QkNormRopeCase) -> Result<(), Failure> {
    let &QkNormRopeCase { tokens, heads_q, heads_kv, head_dim, rotary_dim, weight: kind, .. } = case;
    let norm = QkNorm { eps: EPS, weight: kind };
    let (style, dtype) = (STYLE, DTYPE);
    let problem = QkNormRopeProblem {
        tokens,
        heads_q,
        heads_kv,
        head_dim,
        rotary_dim,
        style,
        dtype,
        cache_dtype: dtype,
        norm: Some(norm),
    };
    let plan = QkNormRope::plan(&bencher.device, problem)?;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": tokens, "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim,
            "rotary_dim": rotary_dim, "eps": EPS, "zero_centred": kind == NormWeight::ZeroCentred,
        }),
        bytes: problem.bytes(),
        flops: problem.flops(),
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let inv_freq: Vec<f64> =
        (0..rotary_dim / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
    let max_position = tokens + FIRST as usize;
    let rope_tables = RopeTables::new(&bencher.stream, &inv_freq, 1.0, max_position)?;
    let positions: Vec<u32> = (FIRST..).take(tokens).collect();
    let positions = Tensor::from_slice(&bencher.stream, &[tokens], &positions)?;
    // Backwards, so that the slots matter.
    let slots: Vec<u32> = (0..tokens as u32).rev().collect();
    let slots = Tensor::from_slice(&bencher.stream, &[tokens], &slots)?;
    let weight = bencher.random(&[head_dim], DTYPE, 1)?;
    let heads = heads_q + 2 * heads_kv;
    let mut sets = bencher.sets(|bencher, seed| {
        let empty = |heads| Tensor::empty(&bencher.stream, &[tokens, heads, head_dim], DTYPE);
        let qkv = bencher.random(&[tokens, heads, head_dim], DTYPE, seed)?;
        Ok(Set { qkv, q_out: empty(heads_q)?, k_cache: empty(heads_kv)?, v_cache: empty(heads_kv)? })
    })?;
    let run = |stream: &Stream, Set { qkv, q_out, k_cache, v_cache }: &mut Set| {
        let part = |start: usize, heads: usize| qkv.view().slice(1, start..start + heads);
        let args = QkNormRopeArgs {
            q: RopeInput::From(part(0, heads_q)?),
            k: part(heads_q, heads_kv)?,
            v: part(heads_q + heads_kv, heads_kv)?,
            weights: Some(QkNormWeights { q: weight.view(), k: weight.view() }),
            positions: positions.view(),
            tables: &rope_tables,
            slots: slots.view(),
            q_out: q_out.view_mut(),
            k_cache: k_cache.view_mut(),
            v_cache: v_cache.view_mut(),
            k_scale: None,
            v_scale: None,
        };
        plan.run(stream, args)
    };
    // Of the first token, the first query head; of the last, the first key head.
    let verify = |stream: &Stream, set: &Set| {
        let (cos, sin) = tables(&inv_freq, 1.0, max_position);
        let shape = RopeShape { heads: 1, head_dim, rotary_dim, style };
        let weight = first_row(&weight, stream)?;
        let all: Vec<half::bf16> = set.qkv.to_vec(stream)?;
        let head = |index: usize| -> Vec<f64> {
            all[index * head_dim..][..head_dim].iter().copied().map(f64::from).collect()
        };
        let want = |x: &[f64], position: u32| {
            let norm = Some((norm, &weight[..]));
            reference::qk_norm_rope::<f64>(x, norm, &[position], (&cos, &sin), shape, |v| v).0
        };
        expect_close(DTYPE, &first_row(&set.q_out, stream)?, &want(&head(0), FIRST))?;
        let last = head((tokens - 1) * heads + heads_q);
        expect_close(DTYPE, &first_row(&set.k_cache, stream)?, &want(&last, FIRST + tokens as u32 - 1))?;
        expect_close(
            DTYPE,
            &first_row(&set.v_cache, stream)?,
            &head((tokens - 1) * heads + heads_q + heads_kv),
        )
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
