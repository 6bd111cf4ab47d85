//! The sort by expert at the shapes of its cases.

use serde_json::json;
use testkit::compare::check_bits_eq;
use testkit::strategies::Rng;
use warpforge::ops::moe_permute::{
    CASES, MoePermute, MoePermuteArgs, MoePermuteCase, MoePermuteProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

struct Set {
    ids: Tensor,
    offsets: Tensor,
    order: Tensor,
    positions: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("moe_permute", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &MoePermuteCase) -> Result<(), Failure> {
    let &MoePermuteCase { tokens, top_k, experts, .. } = case;
    let plan = MoePermute::plan(&bencher.device, MoePermuteProblem::new(tokens, top_k, experts))?;
    let report = plan.report();
    let shape = json!({ "tokens": tokens, "top_k": top_k, "experts": experts });
    let work = Work { dtype: DType::U32.name(), shape, bytes: report.bytes, flops: 0 };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let mut rng = Rng::new(seed);
        let ids: Vec<u32> = (0..tokens * top_k).map(|_| rng.below(experts) as u32).collect();
        let empty = |shape: &[usize]| Tensor::empty(&bencher.stream, shape, DType::U32);
        Ok(Set {
            ids: Tensor::from_slice(&bencher.stream, &[tokens, top_k], &ids)?,
            offsets: empty(&[experts + 1])?,
            order: empty(&[tokens * top_k])?,
            positions: empty(&[tokens, top_k])?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (offsets, order) = (set.offsets.view_mut(), set.order.view_mut());
        let positions = set.positions.view_mut();
        plan.run(stream, MoePermuteArgs::new(set.ids.view(), offsets, order, positions))
    };
    let verify = |stream: &Stream, set: &Set| {
        let alike = vec![0; tokens];
        let (offsets, order, positions) =
            reference::moe_permute(&set.ids.to_vec(stream)?, 0..experts, (1, &alike[..]));
        check_bits_eq(&set.offsets.to_vec::<u32>(stream)?, &offsets)?;
        check_bits_eq(&set.order.to_vec::<u32>(stream)?, &order)?;
        check_bits_eq(&set.positions.to_vec::<u32>(stream)?, &positions)?;
        Ok(())
    };
    bencher.time(&report, &mut sets, run, verify)
}
