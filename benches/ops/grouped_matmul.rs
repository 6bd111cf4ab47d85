//! The grouped product at the shapes of its cases.

use abi::ops::grouped_matmul::{MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS};
use half::bf16;
use serde_json::json;
use warpforge::ops::grouped_matmul::{
    CASES, GroupedMatmul, GroupedMatmulArgs, GroupedMatmulCase, GroupedMatmulProblem, GroupedRows,
};
use warpforge::ops::matmul::reference;
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;
/// Columns of the first row that are checked.
const CHECKED: usize = 64;

struct Set {
    x: Tensor,
    offsets: Tensor,
    /// The expert of the first row.
    first_expert: usize,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("grouped_matmul", case.name, |bencher| time(bencher, case));
    }
}

/// Rows spread evenly over as many experts as there are rows for; other experts for another seed.
fn offsets(rows: usize, experts: usize, seed: u64) -> Vec<u32> {
    let used = rows.min(experts).max(1);
    let step = experts / used;
    let first = seed as usize % step;
    let owner = |expert: usize| expert % step == first && expert / step < used;
    let mut rank = 0;
    let mut offsets = vec![0];
    for expert in 0..experts {
        rank += usize::from(owner(expert));
        offsets.push((rows * rank / used) as u32);
    }
    offsets
}

fn time(bencher: &mut Bencher, case: &GroupedMatmulCase) -> Result<(), Failure> {
    let &GroupedMatmulCase { rows, experts, n, k, from, .. } = case;
    let problem = GroupedMatmulProblem { rows, experts, n, k, dtype: DTYPE, from };
    let named = bencher.kernel.as_deref();
    let plan = match VARIANTS
        .iter()
        .chain(MMA_VARIANTS)
        .chain(WGMMA_VARIANTS)
        .find(|variant| Some(variant.entry) == named)
    {
        Some(variant) => GroupedMatmul::plan_with(&bencher.device, problem, variant)?,
        None => GroupedMatmul::plan(&bencher.device, problem)?,
    };
    let report = plan.report();
    let fan_out = match from {
        GroupedRows::Sorted => 0,
        GroupedRows::Gathered { fan_out } => fan_out,
    };
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "experts": experts, "m": rows, "n": n, "k": k, "fan_out": fan_out }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // One set of weights, larger than the L2 cache; a set of buffers uses others of them, if it does not use all.
    let w = bencher.random(&[experts, n, k], DTYPE, 1000)?;
    // Backwards, so that the order matters.
    let order: Vec<u32> = (0..rows as u32).rev().collect();
    let order = Tensor::from_slice(&bencher.stream, &[rows], &order)?;
    let x_rows = rows / fan_out.max(1);
    let mut sets = bencher.sets(|bencher, seed| {
        let offsets = offsets(rows, experts, seed);
        Ok(Set {
            x: bencher.random(&[x_rows, k], DTYPE, seed)?,
            first_expert: offsets[1..].iter().filter(|&&end| end == 0).count(),
            offsets: Tensor::from_slice(&bencher.stream, &[experts + 1], &offsets)?,
            out: Tensor::empty(&bencher.stream, &[rows, n], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (x, w, offsets) = (set.x.view(), w.view(), set.offsets.view());
        let order = (fan_out > 0).then(|| order.view());
        plan.run(stream, GroupedMatmulArgs { x, w, offsets, order, out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| {
        let exact = |values: Vec<bf16>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        let row = if fan_out > 0 { x_rows - 1 } else { 0 };
        let x = exact(set.x.view().slice(0, row..row + 1)?.to_vec(stream)?);
        let expert = set.first_expert;
        let w = w.view().slice(0, expert..expert + 1)?.slice(1, 0..CHECKED.min(n))?;
        let want =
            reference::matmul::<f64>(&x, &exact(w.to_vec(stream)?), None, [1, CHECKED.min(n), k], |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?[..want.len()], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
