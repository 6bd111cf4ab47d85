//! Attention over two parts of the keys as attention over all of them, at the shapes of its cases.

use serde_json::json;
use warpforge::ops::attention_merge::{
    AttentionMerge, AttentionMergeArgs, AttentionMergeCase, AttentionMergeProblem, CASES, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    /// Each part, and its logarithms.
    parts: [(Tensor, Tensor); 2],
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("attention_merge", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &AttentionMergeCase) -> Result<(), Failure> {
    let &AttentionMergeCase { tokens, heads, dim, .. } = case;
    let plan = AttentionMerge::plan(&bencher.device, AttentionMergeProblem::new(tokens, heads, dim, DTYPE))?;
    let report = plan.report();
    let shape = json!({ "tokens": tokens, "heads": heads, "dim": dim });
    let work = Work { dtype: DTYPE.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let part = |seed: u64| -> Result<(Tensor, Tensor), Failure> {
            let rows = bencher.random(&[tokens, heads, dim], DTYPE, seed)?;
            Ok((rows, bencher.random(&[heads, tokens], DType::F32, 500 + seed)?))
        };
        let parts = [part(seed)?, part(1000 + seed)?];
        Ok(Set { parts, out: Tensor::empty(&bencher.stream, &[tokens, heads, dim], DTYPE)? })
    })?;
    let run = |stream: &Stream, Set { parts: [a, b], out }: &mut Set| {
        let parts = [(a.0.view(), a.1.view()), (b.0.view(), b.1.view())];
        plan.run(stream, AttentionMergeArgs::new(parts, out.view_mut()))
    };
    let verify = |stream: &Stream, Set { parts: [a, b], out }: &Set| {
        let row = |tensor: &Tensor| -> Result<Vec<f64>, Failure> { Ok(first_row(tensor, stream)?) };
        let first = |lse: &Tensor| -> Result<Vec<f64>, Failure> { Ok(vec![first_row(lse, stream)?[0]]) };
        let (rows, lses) = ([row(&a.0)?, row(&b.0)?], [first(&a.1)?, first(&b.1)?]);
        let parts = [&rows[0][..dim], &rows[1][..dim]];
        let (want, _) = reference::attention_merge::<f64>(parts, [&lses[0], &lses[1]], dim, |value| value);
        expect_close(DTYPE, &first_row(out, stream)?[..dim], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
