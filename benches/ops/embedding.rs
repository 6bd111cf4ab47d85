//! The embedding at the shapes of its cases.

use serde_json::json;
use testkit::compare::check_bits_eq;
use testkit::strategies::Rng;
use warpforge::ops::embedding::{CASES, Embedding, EmbeddingArgs, EmbeddingCase, EmbeddingProblem};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

const DTYPE: DType = DType::BF16;

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("embedding", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &EmbeddingCase) -> Result<(), Failure> {
    let &EmbeddingCase { tokens, vocab, cols, .. } = case;
    let problem = EmbeddingProblem::new(tokens, vocab, cols, DTYPE);
    let plan = Embedding::plan(&bencher.device, problem)?;
    let shape = json!({ "tokens": tokens, "vocab": vocab, "cols": cols });
    let bytes = (2 * tokens * cols * DTYPE.bytes() + tokens * DType::U32.bytes()) as u64;
    if !bencher.starts(Work { dtype: DTYPE.name(), shape, bytes, flops: 0 })? {
        return Ok(());
    }
    // One table, larger than the L2 cache; other rows of it and another output in every set.
    let table = bencher.random(&[vocab, cols], DTYPE, 1)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let mut rng = Rng::new(seed);
        let ids: Vec<u32> = (0..tokens).map(|_| rng.below(vocab) as u32).collect();
        let out = Tensor::empty(&bencher.stream, &[tokens, cols], DTYPE)?;
        Ok((Tensor::from_slice(&bencher.stream, &[tokens], &ids)?, out))
    })?;
    let run = |stream: &Stream, (ids, out): &mut (Tensor, Tensor)| {
        plan.run(stream, EmbeddingArgs::new(table.view(), ids.view(), out.view_mut()))
    };
    let verify = |stream: &Stream, (ids, out): &(Tensor, Tensor)| {
        let ids: Vec<u32> = ids.to_vec(stream)?;
        for (token, &id) in ids.iter().enumerate().take(16) {
            let row = |tensor: &Tensor, row: usize| {
                tensor.view().slice(0, row..row + 1)?.to_vec::<half::bf16>(stream)
            };
            check_bits_eq(&row(out, token)?, &row(&table, id as usize)?)?;
        }
        Ok(())
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
