//! The router at the shapes of its cases.

use half::bf16;
use serde_json::json;
use warpforge::ops::moe_router::{
    CASES, MoeRouter, MoeRouterArgs, MoeRouterCase, MoeRouterProblem, RouterScore, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close};

const DTYPE: DType = DType::BF16;

struct Set {
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("moe_router", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &MoeRouterCase) -> Result<(), Failure> {
    let &MoeRouterCase { tokens, experts, top_k, score, weights, scale, .. } = case;
    let weight_dtype = DType::F32;
    let (dtype, groups) = (DTYPE, None);
    let problem = MoeRouterProblem {
        score,
        groups,
        weights,
        scale,
        weight_dtype,
        ..MoeRouterProblem::new(tokens, experts, top_k, dtype)
    };
    let plan = MoeRouter::plan(&bencher.device, problem)?;
    let report = plan.report();
    let is_sigmoid = score == RouterScore::Sigmoid;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": tokens,
            "experts": experts,
            "top_k": top_k,
            "score": if is_sigmoid { "sigmoid" } else { "softmax" },
            "scale": scale,
        }),
        bytes: report.bytes,
        flops: 0,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let bias = bencher.random(&[experts], DType::F32, 1000)?;
    let bias = || is_sigmoid.then(|| bias.view());
    let mut sets = bencher.sets(|bencher, seed| {
        let empty = |dtype| Tensor::empty(&bencher.stream, &[tokens, top_k], dtype);
        let logits = bencher.random(&[tokens, experts], DTYPE, seed)?;
        Ok(Set { logits, ids: empty(DType::U32)?, weights: empty(DType::F32)? })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (ids, weights) = (set.ids.view_mut(), set.weights.view_mut());
        plan.run(
            stream,
            MoeRouterArgs { bias: bias(), ..MoeRouterArgs::new(set.logits.view(), ids, weights) },
        )
    };
    let verify = |stream: &Stream, set: &Set| {
        let logits: Vec<bf16> = set.logits.view().slice(0, 0..1)?.to_vec(stream)?;
        let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
        let ids: Vec<u32> = set.ids.view().slice(0, 0..1)?.to_vec(stream)?;
        let weights: Vec<f32> = set.weights.view().slice(0, 0..1)?.to_vec(stream)?;
        let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
        let bias = bias().map(|bias| bias.to_vec::<f32>(stream)).transpose()?;
        let bias: Option<Vec<f64>> = bias.map(|bias| bias.into_iter().map(f64::from).collect());
        let choice = reference::choose(&logits, bias.as_deref(), &problem);
        if choice.margin > 1e-6 && choice.ids != ids {
            return Err(format!("experts {ids:?}, expected {:?}", choice.ids).into());
        }
        expect_close(DType::F32, &weights, &reference::weights::<f64>(&logits, &ids, &problem, |v| v))
    };
    bencher.time(&report, &mut sets, run, verify)
}
