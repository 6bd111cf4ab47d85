//! Norm, rotation and append of latent rows, with the rotation of queries, at the shapes of its cases; positions in
//! order.

use serde_json::json;
use warpforge::ops::latent_append::{
    CASES, LatentAppend, LatentAppendArgs, LatentAppendCase, LatentAppendProblem, reference,
};
use warpforge::ops::rope::reference::{RopeShape, rope, tables};
use warpforge::ops::rope::{RopeInput, RopeStyle, RopeTables};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row, floats};

const DTYPE: DType = DType::BF16;
const STYLE: RopeStyle = RopeStyle::Interleaved;
const EPS: f32 = 1e-5;
/// The first token's position; not 0, where nothing is rotated.
const FIRST: u32 = 5;

/// What is read, and what is written.
struct Set {
    q: Tensor,
    x: Tensor,
    q_out: Tensor,
    cache: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("latent_append", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &LatentAppendCase) -> Result<(), Failure> {
    let &LatentAppendCase { tokens, heads, latent, rope: head_dim, .. } = case;
    let row = latent + head_dim;
    let problem = LatentAppendProblem {
        style: STYLE,
        ..LatentAppendProblem::new(tokens, heads, [latent, head_dim], DTYPE, EPS)
    };
    let plan = LatentAppend::plan(&bencher.device, problem)?;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "tokens": tokens, "heads": heads, "latent": latent, "rope": head_dim, "eps": EPS }),
        bytes: problem.bytes(),
        flops: problem.flops(),
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let inv_freq: Vec<f64> =
        (0..head_dim / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let max_position = tokens + FIRST as usize;
    let rope_tables = RopeTables::new(&bencher.stream, &inv_freq, 1.0, max_position)?;
    let positions: Vec<u32> = (FIRST..).take(tokens).collect();
    let positions = Tensor::from_slice(&bencher.stream, &[tokens], &positions)?;
    // Backwards, so that the slots matter.
    let slots: Vec<u32> = (0..tokens as u32).rev().collect();
    let slots = Tensor::from_slice(&bencher.stream, &[tokens], &slots)?;
    let weight = bencher.random(&[latent], DTYPE, 1)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let heads = [tokens, heads, head_dim];
        Ok(Set {
            q: bencher.random(&heads, DTYPE, seed)?,
            x: bencher.random(&[tokens, row], DTYPE, seed ^ 2)?,
            q_out: Tensor::empty(&bencher.stream, &heads, DTYPE)?,
            cache: Tensor::empty(&bencher.stream, &[tokens, row], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, Set { q, x, q_out, cache }: &mut Set| {
        let args = LatentAppendArgs::new(
            RopeInput::From(q.view()),
            [x.view(), weight.view()],
            positions.view(),
            &rope_tables,
            slots.view(),
            q_out.view_mut(),
            cache.view_mut(),
        );
        plan.run(stream, args)
    };
    // The first token's first query head; the last token's row.
    let verify = |stream: &Stream, set: &Set| {
        let (cos, sin) = tables(&inv_freq, 1.0, max_position);
        let shape = RopeShape { heads: 1, head_dim, rotary_dim: head_dim, style: STYLE };
        let (want, _) = rope::<f64>(&first_row(&set.q, stream)?, &[FIRST], (&cos, &sin), shape, |v| v);
        expect_close(DTYPE, &first_row(&set.q_out, stream)?, &want)?;
        let x = floats(set.x.view().slice(0, tokens - 1..tokens)?, stream)?;
        let (weight, last) = (first_row(&weight, stream)?, FIRST + tokens as u32 - 1);
        let (mut want, key, _) =
            reference::latent_rows::<f64>(&x, &weight, &[last], (&cos, &sin), &problem, |v| v);
        want.extend(key);
        expect_close(DTYPE, &first_row(&set.cache, stream)?, &want)
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
