//! Weighted sums of table rows at the shapes of their cases.

use serde_json::json;
use testkit::strategies::Rng;
use warpforge::ops::Store;
use warpforge::ops::embedding_bag::{
    CASES, EmbeddingBag, EmbeddingBagArgs, EmbeddingBagCase, EmbeddingBagProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    /// The first row of out before it was added to.
    before: Vec<f64>,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("embedding_bag", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &EmbeddingBagCase) -> Result<(), Failure> {
    let &EmbeddingBagCase { tokens, bag, vocab, cols, .. } = case;
    let problem = EmbeddingBagProblem { tokens, bag, vocab, cols, dtype: DTYPE, store: Store::Add };
    let plan = EmbeddingBag::plan(&bencher.device, problem)?;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "tokens": tokens, "bag": bag, "vocab": vocab, "cols": cols }),
        bytes: (((bag * tokens).min(vocab) + 2 * tokens) * cols * DTYPE.bytes() + 8 * tokens * bag) as u64,
        flops: (2 * tokens * bag * cols) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let table = bencher.random(&[vocab, cols], DTYPE, 1)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let mut rng = Rng::new(seed);
        let ids: Vec<u32> = (0..tokens * bag).map(|_| rng.below(vocab) as u32).collect();
        let weights: Vec<f32> = (0..tokens * bag).map(|_| rng.uniform() as f32).collect();
        let out = bencher.random(&[tokens, cols], DTYPE, 1000 + seed)?;
        Ok(Set {
            ids: Tensor::from_slice(&bencher.stream, &[tokens, bag], &ids)?,
            weights: Tensor::from_slice(&bencher.stream, &[tokens, bag], &weights)?,
            before: first_row(&out, &bencher.stream)?,
            out,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (ids, weights) = (set.ids.view(), set.weights.view());
        plan.run(stream, EmbeddingBagArgs { table: table.view(), ids, weights, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| {
        let bag = (set.ids.to_vec::<u32>(stream)?, set.weights.to_vec::<f32>(stream)?);
        let first = (bag.0[..case.bag].to_vec(), bag.1[..case.bag].to_vec());
        let all: Vec<f64> = table.to_f32_vec(stream)?.into_iter().map(f64::from).collect();
        let mut want = set.before.clone();
        reference::embedding_bag::<f64>(&all, &[first], &mut want, cols, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?, &want)
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
