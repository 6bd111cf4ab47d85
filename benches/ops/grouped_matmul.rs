//! The grouped product at the shapes of its cases.

use abi::ops::grouped_matmul::{FP8_VARIANTS, MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS};
use half::bf16;
use serde_json::json;
use warpforge::ops::grouped_matmul::{
    CASES, GroupedMatmul, GroupedMatmulArgs, GroupedMatmulCase, GroupedMatmulProblem, GroupedRows,
};
use warpforge::ops::matmul::{Activations, reference};
use warpforge::weight::{Quantised, Scheme, Weight};
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};
use crate::matmul::as_fp8;

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
    for (name, scheme) in Scheme::NAMED {
        for case in PACKED_CASES {
            let label = format!("packed {name} {}", case.name);
            let given = Activations::AsGiven;
            bencher.case("grouped_matmul", &label, |bencher| time_packed(bencher, (scheme, given), &case));
            if name == "fp8" {
                let (label, fp8) = (format!("packed fp8 by fp8 {}", case.name), Activations::Fp8);
                bencher.case("grouped_matmul", &label, |bencher| time_packed(bencher, (scheme, fp8), &case));
            }
        }
    }
}

/// Projections of Qwen3-Coder-30B: the pairs of 8 and of 2048 tokens.
const PACKED_CASES: [GroupedMatmulCase; 4] = {
    let gate_up = GroupedMatmulCase {
        name: "gate up decode 8",
        rows: 64,
        experts: 128,
        n: 1536,
        k: 2048,
        from: GroupedRows::Gathered { fan_out: 8 },
    };
    let down =
        GroupedMatmulCase { name: "down decode 8", n: 2048, k: 768, from: GroupedRows::Sorted, ..gate_up };
    [
        gate_up,
        down,
        GroupedMatmulCase { name: "gate up prefill 2048", rows: 16384, ..gate_up },
        GroupedMatmulCase { name: "down prefill 2048", rows: 16384, ..down },
    ]
};

/// Small numbers for a weight's rows, by the weight's own number.
pub fn numbered(
    [n, k]: [usize; 2],
    scheme: Scheme,
    number: usize,
) -> Result<Quantised<impl Fn(usize, &mut [f32])>, Error> {
    let rows = move |row: usize, values: &mut [f32]| {
        let mut state = ((number * n + row) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for value in values {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *value = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.03;
        }
    };
    Quantised::new([n, k], scheme, rows)
}

/// A product with packed weights: the rows are made, and not stored, before they are quantised.
fn time_packed(
    bencher: &mut Bencher,
    (scheme, activations): (Scheme, Activations),
    case: &GroupedMatmulCase,
) -> Result<(), Failure> {
    let &GroupedMatmulCase { rows, experts, n, k, from, .. } = case;
    let weight = Some(scheme.layout());
    let problem = GroupedMatmulProblem {
        from,
        weight,
        activations,
        ..GroupedMatmulProblem::new(rows, experts, n, k, DTYPE)
    };
    let plan = GroupedMatmul::plan(&bencher.device, problem)?;
    let report = plan.report();
    let is_fp8 = FP8_VARIANTS.iter().any(|variant| variant.entry == report.variant);
    let fan_out = fan_out(from);
    let shape = json!({ "experts": experts, "m": rows, "n": n, "k": k, "fan_out": fan_out, "weight": format!("{:?}", scheme.layout()) });
    let work = Work { dtype: DTYPE.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let source = |expert: usize| numbered([n, k], scheme, expert);
    // One set of weights, larger than the L2 cache; a set of buffers uses others of them, if it does not use all.
    let weight = Weight::pack_experts(&bencher.stream, experts, source)?;
    let (order, x_rows) = (backwards(bencher, rows)?, rows / fan_out.max(1));
    let mut sets = bencher.sets(|bencher, seed| set(bencher, case, seed))?;
    let run = |stream: &Stream, set: &mut Set| {
        let order = (fan_out > 0).then(|| order.view());
        let args = GroupedMatmulArgs::new(set.x.view(), &weight, set.offsets.view(), set.out.view_mut());
        plan.run(stream, GroupedMatmulArgs { order, ..args })
    };
    let verify = |stream: &Stream, set: &Set| {
        let x = x_of_first_row(stream, set, if fan_out > 0 { x_rows - 1 } else { 0 })?;
        let x = if is_fp8 { x.chunks(128).flat_map(as_fp8).collect() } else { x };
        let (source, mut row) = (source(set.first_expert)?, vec![0.0; k]);
        let mut w = Vec::new();
        for index in 0..CHECKED {
            source.dequantise(index, &mut row);
            w.extend(row.iter().map(|&value| f64::from(value)));
        }
        let want = reference::matmul::<f64>(&x, &w, None, [1, CHECKED, k], |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?[..want.len()], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}

fn fan_out(from: GroupedRows) -> usize {
    match from {
        GroupedRows::Sorted => 0,
        GroupedRows::Gathered { fan_out } => fan_out,
    }
}

/// Backwards, so that the order matters.
fn backwards(bencher: &Bencher, rows: usize) -> Result<Tensor, Failure> {
    let order: Vec<u32> = (0..rows as u32).rev().collect();
    Ok(Tensor::from_slice(&bencher.stream, &[rows], &order)?)
}

fn set(bencher: &Bencher, case: &GroupedMatmulCase, seed: u64) -> Result<Set, Failure> {
    let &GroupedMatmulCase { rows, experts, n, k, from, .. } = case;
    let offsets = offsets(rows, experts, seed);
    Ok(Set {
        x: bencher.random(&[rows / fan_out(from).max(1), k], DTYPE, seed)?,
        first_expert: offsets[1..].iter().filter(|&&end| end == 0).count(),
        offsets: Tensor::from_slice(&bencher.stream, &[experts + 1], &offsets)?,
        out: Tensor::empty(&bencher.stream, &[rows, n], DTYPE)?,
    })
}

fn exact(values: Vec<bf16>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

fn x_of_first_row(stream: &Stream, set: &Set, row: usize) -> Result<Vec<f64>, Failure> {
    Ok(exact(set.x.view().slice(0, row..row + 1)?.to_vec(stream)?))
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

pub fn time(bencher: &mut Bencher, case: &GroupedMatmulCase) -> Result<(), Failure> {
    let &GroupedMatmulCase { rows, experts, n, k, from, .. } = case;
    let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, experts, n, k, DTYPE) };
    let device = bencher.device.clone();
    let variants = || WGMMA_VARIANTS.iter().chain(MMA_VARIANTS).chain(VARIANTS);
    let planned = |entry: &str| match variants().find(|variant| variant.entry == entry) {
        Some(variant) => GroupedMatmul::plan_with(&device, problem, variant),
        None => GroupedMatmul::plan(&device, problem),
    };
    let plan = planned(bencher.kernel.as_deref().unwrap_or_default())?;
    let report = plan.report();
    let fan_out = fan_out(from);
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
    let (order, x_rows) = (backwards(bencher, rows)?, rows / fan_out.max(1));
    let mut sets = bencher.sets(|bencher, seed| set(bencher, case, seed))?;
    let run = |plan: &GroupedMatmul, stream: &Stream, set: &mut Set| {
        let order = (fan_out > 0).then(|| order.view());
        let args = GroupedMatmulArgs::new(set.x.view(), w.view(), set.offsets.view(), set.out.view_mut());
        plan.run(stream, GroupedMatmulArgs { order, ..args })
    };
    let verify = |stream: &Stream, set: &Set| {
        let x = x_of_first_row(stream, set, if fan_out > 0 { x_rows - 1 } else { 0 })?;
        let expert = set.first_expert;
        let w = w.view().slice(0, expert..expert + 1)?.slice(1, 0..CHECKED.min(n))?;
        let want =
            reference::matmul::<f64>(&x, &exact(w.to_vec(stream)?), None, [1, CHECKED.min(n), k], |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?[..want.len()], &want)
    };
    let kernels = variants().map(|variant| variant.entry);
    bencher.time_among(&report, &mut sets, (kernels, planned), &plan, run, verify)
}
