//! The weighted sum of experts' results at the shapes of its cases.

use half::bf16;
use serde_json::json;
use warpforge::ops::moe_combine::reference::{self, Terms};
use warpforge::ops::moe_combine::{
    CASES, MoeCombine, MoeCombineArgs, MoeCombineCase, MoeCombineProblem, SharedTerm,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    y: Tensor,
    weights: Tensor,
    shared: Option<Tensor>,
    gate: Option<Tensor>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("moe_combine", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &MoeCombineCase) -> Result<(), Failure> {
    let &MoeCombineCase { tokens, top_k, cols, shared, .. } = case;
    let plan = MoeCombine::plan(&bencher.device, MoeCombineProblem::new(tokens, top_k, cols, DTYPE))?;
    let report = plan.report();
    let (has_shared, has_gate) = (shared != SharedTerm::None, shared == SharedTerm::Gated);
    let rows = usize::from(has_shared) * tokens * cols;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": tokens,
            "top_k": top_k,
            "cols": cols,
            "shared": if has_gate { "gated" } else if has_shared { "plain" } else { "none" },
        }),
        bytes: report.bytes + (rows * DTYPE.bytes()) as u64,
        flops: report.flops + 2 * rows as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let pairs = tokens * top_k;
    // Backwards, so that the positions matter.
    let positions: Vec<u32> = (0..pairs as u32).rev().collect();
    let positions = Tensor::from_slice(&bencher.stream, &[tokens, top_k], &positions)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let random = |shape: &[usize], salt: u64| bencher.random(shape, DTYPE, salt + seed);
        Ok(Set {
            y: random(&[pairs, cols], 0)?,
            weights: bencher.random(&[tokens, top_k], DType::F32, 1000 + seed)?,
            shared: has_shared.then(|| random(&[tokens, cols], 2000)).transpose()?,
            gate: has_gate.then(|| bencher.random(&[tokens, 1], DType::F32, 3000 + seed)).transpose()?,
            out: Tensor::empty(&bencher.stream, &[tokens, cols], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (shared, gate) = (set.shared.as_ref().map(Tensor::view), set.gate.as_ref().map(Tensor::view));
        let (y, weights, positions) = (set.y.view(), set.weights.view(), positions.view());
        plan.run(stream, MoeCombineArgs { y, weights, positions, shared, gate, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| {
        let exact = |values: Vec<bf16>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        // The first token's rows are the last of y.
        let y = exact(set.y.view().slice(0, pairs - top_k..pairs)?.to_vec(stream)?);
        let weights: Vec<f32> = set.weights.view().slice(0, 0..1)?.to_vec(stream)?;
        let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
        let first = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| first_row(tensor, stream));
        let (shared, gate) = (first(&set.shared).transpose()?, first(&set.gate).transpose()?);
        let positions: Vec<u32> = (0..top_k as u32).rev().collect();
        let terms = Terms {
            top_k,
            cols,
            y: &y,
            weights: &weights,
            positions: &positions,
            shared: shared.as_deref(),
            gate: gate.as_deref(),
            residual: None,
        };
        let want = reference::moe_combine::<f64>(1, &terms, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?, &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
