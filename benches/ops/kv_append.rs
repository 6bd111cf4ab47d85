//! The cache append at the shapes of its cases.

use serde_json::json;
use testkit::compare::check_bits_eq;
use warpforge::ops::kv_append::{CASES, KvAppend, KvAppendArgs, KvAppendCase, KvAppendProblem};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

const DTYPE: DType = DType::BF16;

struct Set {
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("kv_append", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &KvAppendCase) -> Result<(), Failure> {
    let &KvAppendCase { tokens, heads, head_dim, .. } = case;
    let plan = KvAppend::plan(&bencher.device, KvAppendProblem { tokens, heads, head_dim, dtype: DTYPE })?;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "tokens": tokens, "heads": heads, "head_dim": head_dim }),
        bytes: (4 * tokens * heads * head_dim * DTYPE.bytes()) as u64,
        flops: 0,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // Backwards, so that the slots matter.
    let slots: Vec<u32> = (0..tokens as u32).rev().collect();
    let slots = Tensor::from_slice(&bencher.stream, &[tokens], &slots)?;
    let shape = [tokens, heads, head_dim];
    let mut sets = bencher.sets(|bencher, seed| {
        let cache = || Tensor::zeros(&bencher.stream, &shape, DTYPE);
        let random = |seed| bencher.random(&shape, DTYPE, seed);
        Ok(Set { k: random(seed)?, v: random(1000 + seed)?, k_cache: cache()?, v_cache: cache()? })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (k, v, slots) = (set.k.view(), Some(set.v.view()), slots.view());
        let (k_cache, v_cache) = (set.k_cache.view_mut(), Some(set.v_cache.view_mut()));
        plan.run(stream, KvAppendArgs { k, v, slots, k_cache, v_cache })
    };
    let verify = |stream: &Stream, set: &Set| {
        for (from, to) in [(&set.k, &set.k_cache), (&set.v, &set.v_cache)] {
            let from: Vec<half::bf16> = from.to_vec(stream)?;
            let reversed: Vec<half::bf16> =
                from.chunks_exact(heads * head_dim).rev().flatten().copied().collect();
            check_bits_eq(&to.to_vec::<half::bf16>(stream)?, &reversed)?;
        }
        Ok(())
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
