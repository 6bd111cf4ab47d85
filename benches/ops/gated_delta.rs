//! The gated delta rule at the shapes of its cases.

use serde_json::json;
use warpforge::ops::gated_delta::{
    CASES, GatedDelta, GatedDeltaArgs, GatedDeltaCase, GatedDeltaProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    state: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("gated_delta", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &GatedDeltaCase) -> Result<(), Failure> {
    let &GatedDeltaCase { tokens: len, sequences, heads_k, heads_v, dim_k, dim_v, .. } = case;
    let tokens = len * sequences;
    let problem =
        GatedDeltaProblem { tokens, sequences, longest: len, heads_k, heads_v, dim_k, dim_v, dtype: DTYPE };
    let plan = GatedDelta::plan(&bencher.device, problem)?;
    let report = plan.report();
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": len, "sequences": sequences, "heads_k": heads_k, "heads_v": heads_v, "dim_k": dim_k,
            "dim_v": dim_v,
        }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // As they are initialised, within what a random tensor gives.
    let a_log = bencher.random(&[heads_v], DType::F32, 1)?;
    let dt_bias = bencher.random(&[heads_v], DType::F32, 2)?;
    let offsets: Vec<u32> = (0..=sequences).map(|sequence| (sequence * len) as u32).collect();
    let offsets = Tensor::from_slice(&bencher.stream, &[sequences + 1], &offsets)?;
    let slots: Vec<u32> = (0..sequences as u32).collect();
    let slots = Tensor::from_slice(&bencher.stream, &[sequences], &slots)?;
    let mut sets = bencher.sets(|bencher, seed| {
        Ok(Set {
            q: bencher.random(&[tokens, heads_k, dim_k], DTYPE, seed)?,
            k: bencher.random(&[tokens, heads_k, dim_k], DTYPE, 1000 + seed)?,
            v: bencher.random(&[tokens, heads_v, dim_v], DTYPE, 2000 + seed)?,
            b: bencher.random(&[tokens, heads_v], DTYPE, 3000 + seed)?,
            a: bencher.random(&[tokens, heads_v], DTYPE, 4000 + seed)?,
            state: bencher.random(&[sequences, heads_v, dim_k, dim_v], DType::F32, 5000 + seed)?,
            out: Tensor::empty(&bencher.stream, &[tokens, heads_v, dim_v], DTYPE)?,
        })
    })?;
    // The first value head's first token of the first sequence, before a run changes the state.
    let head = |tensor: &Tensor, len: usize| -> Result<Vec<f64>, Failure> {
        Ok(first_row(tensor, &bencher.stream)?.into_iter().take(len).collect())
    };
    let set = &sets[0];
    let (q, k, v) = (head(&set.q, dim_k)?, head(&set.k, dim_k)?, head(&set.v, dim_v)?);
    let (b, a) = (head(&set.b, 1)?, head(&set.a, 1)?);
    let state = set.state.view().reshape(&[set.state.len()])?.slice(0, 0..dim_k * dim_v)?;
    let state: Vec<f64> = state.to_vec::<f32>(&bencher.stream)?.into_iter().map(f64::from).collect();
    let input = reference::Head {
        q: &q,
        k: &k,
        v: &v,
        b: &b,
        a: &a,
        a_log: head(&a_log, 1)?[0],
        dt_bias: head(&dt_bias, 1)?[0],
        state: &state,
    };
    let want = reference::gated_delta::<f64>(input, dim_k, |v| v).out;
    let run = |stream: &Stream, set: &mut Set| {
        let args = GatedDeltaArgs {
            q: set.q.view(),
            k: set.k.view(),
            v: set.v.view(),
            b: set.b.view(),
            a: set.a.view(),
            a_log: a_log.view(),
            dt_bias: dt_bias.view(),
            offsets: offsets.view(),
            slots: slots.view(),
            state: set.state.view_mut(),
            out: set.out.view_mut(),
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| {
        let out = first_row(&set.out, stream)?;
        expect_close(DTYPE, &out[..dim_v], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
