//! The experts of few tokens at the shapes of its cases.

use half::bf16;
use serde_json::json;
use warpforge::ops::fused_moe::reference::{self, Terms};
use warpforge::ops::fused_moe::{CASES, FusedMoe, FusedMoeArgs, FusedMoeCase, FusedMoeProblem};
use warpforge::ops::glu::Activation;
use warpforge::weight::{GateUp, Layout, Scheme, Weight};
use warpforge::{DType, Stream, Tensor};

use crate::grouped_matmul::numbered;
use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: Option<[Tensor; 2]>,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("fused_moe", case.name, |bencher| time(bencher, case));
    }
    for (name, scheme) in Scheme::NAMED.iter().filter(|(name, _)| PACKED.contains(name)) {
        for case in CASES.iter().filter(|case| case.tokens == 1) {
            let label = format!("packed {name} {}", case.name);
            bencher.case("fused_moe", &label, |bencher| time_packed(bencher, *scheme, case));
        }
    }
}

/// Schemes of packed weights.
const PACKED: [&str; 3] = ["int4", "int8", "fp8"];
/// Most experts of a packed case, whose weights are made on the host: more than three times as many bytes as L2 holds.
const PACKED_EXPERTS: usize = 64;

struct PackedSet {
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    first_ids: Vec<usize>,
    out: Tensor,
}

fn time_packed(bencher: &mut Bencher, scheme: Scheme, case: &FusedMoeCase) -> Result<(), Failure> {
    let &FusedMoeCase { tokens, experts: [top_k, experts], sizes: [hidden, inner], shared, .. } = case;
    let experts = experts.min(PACKED_EXPERTS);
    let layout = Some(scheme.layout());
    let of_shared = |layout: Layout| shared.then_some(layout);
    let problem = FusedMoeProblem {
        shared,
        gate_up: layout,
        down: layout,
        shared_gate_up: of_shared(GateUp::layout_of(scheme.layout())),
        shared_down: of_shared(scheme.layout()),
        ..FusedMoeProblem::new(tokens, [top_k, experts], [hidden, inner], DTYPE)
    };
    let plan = FusedMoe::plan(&bencher.device, problem)?;
    let report = plan.report();
    let shape = json!({
        "tokens": tokens, "top_k": top_k, "experts": experts, "hidden": hidden, "inner": inner, "shared": shared,
        "weight": format!("{:?}", scheme.layout()),
    });
    let work = Work { dtype: DTYPE.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let stream = bencher.stream.clone();
    let [up_size, down_size] = [[2 * inner, hidden], [hidden, inner]];
    let half = [inner, hidden];
    // The last numbers are the shared expert's.
    let gate_up = Weight::pack_experts(&stream, experts, |expert| numbered(up_size, scheme, expert))?;
    let down = Weight::pack_experts(&stream, experts, |expert| numbered(down_size, scheme, 1000 + expert))?;
    let [gate, up] = [2000, 2001].map(|salt| numbered(half, scheme, salt));
    let (gate, up, last) = (gate?, up?, numbered(down_size, scheme, 2002)?);
    let shared_gate_up = Weight::pack(&stream, &GateUp(&gate, &up))?;
    let shared_down = Weight::pack(&stream, &last)?;
    let mut sets = bencher.sets(|bencher, seed| {
        // Each set has experts of its own, while there are some.
        let first_ids: Vec<usize> =
            (0..tokens * top_k).map(|pair| (pair + seed as usize * top_k) % experts).collect();
        let ids: Vec<u32> = first_ids.iter().map(|&id| id as u32).collect();
        Ok(PackedSet {
            x: bencher.random(&[tokens, hidden], DTYPE, seed)?,
            weights: bencher.random(&[tokens, top_k], DType::F32, 1000 + seed)?,
            ids: Tensor::from_slice(&bencher.stream, &[tokens, top_k], &ids)?,
            first_ids,
            out: Tensor::empty(&bencher.stream, &[tokens, hidden], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut PackedSet| {
        let args = FusedMoeArgs {
            x: Some(set.x.view()),
            shared_gate_up: shared.then_some((&shared_gate_up).into()),
            shared_down: shared.then_some((&shared_down).into()),
            ..FusedMoeArgs::new(
                [set.ids.view(), set.weights.view()],
                [(&gate_up).into(), (&down).into()],
                set.out.view_mut(),
            )
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &PackedSet| {
        let values = |[n, k]: [usize; 2], salt: usize| {
            let (source, mut row) = (numbered([n, k], scheme, salt)?, vec![0.0; k]);
            let mut values = Vec::new();
            for index in 0..n {
                source.dequantise(index, &mut row);
                values.extend(row.iter().map(|&value| f64::from(value)));
            }
            Ok::<_, Failure>(values)
        };
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for &expert in &set.first_ids[..top_k] {
            gate_up.extend(values(up_size, expert)?);
            down.extend(values(down_size, 1000 + expert)?);
        }
        let of_shared = [[values(half, 2000)?, values(half, 2001)?].concat(), values(down_size, 2002)?];
        let weights: Vec<f32> = set.weights.view().slice(0, 0..1)?.to_vec(stream)?;
        let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
        let numbers: Vec<u32> = (0..top_k as u32).collect();
        let x = first_row(&set.x, stream)?;
        let terms = Terms {
            top_k,
            hidden,
            inner,
            activation: Some(Activation::Silu),
            x: &x,
            ids: &numbers,
            weights: &weights,
            gate_up: &gate_up,
            down: &down,
            shared: shared.then_some([&of_shared[0], &of_shared[1]]),
            gate: None,
            residual: None,
        };
        let want = reference::fused_moe::<f64>(1, &terms, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?, &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}

fn time(bencher: &mut Bencher, case: &FusedMoeCase) -> Result<(), Failure> {
    let &FusedMoeCase { tokens, experts: [top_k, experts], sizes: [hidden, inner], shared, .. } = case;
    let problem = FusedMoeProblem::new(tokens, [top_k, experts], [hidden, inner], DTYPE);
    let plan = FusedMoe::plan(&bencher.device, FusedMoeProblem { shared, ..problem })?;
    let report = plan.report();
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": tokens,
            "top_k": top_k,
            "experts": experts,
            "hidden": hidden,
            "inner": inner,
            "shared": shared,
        }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // No expert twice while there are others, and each set has experts of its own.
    let ids: Vec<u32> = (0..tokens * top_k).map(|pair| (pair * 37 % experts) as u32).collect();
    let ids = Tensor::from_slice(&bencher.stream, &[tokens, top_k], &ids)?;
    let mut sets = bencher.sets(|bencher, seed| {
        let random = |shape: &[usize], salt: u64| bencher.random(shape, DTYPE, salt + seed);
        let shared_weights =
            || Ok::<_, Failure>([random(&[2 * inner, hidden], 5)?, random(&[hidden, inner], 6)?]);
        Ok(Set {
            x: random(&[tokens, hidden], 0)?,
            weights: bencher.random(&[tokens, top_k], DType::F32, 1000 + seed)?,
            gate_up: random(&[experts, 2 * inner, hidden], 2000)?,
            down: random(&[experts, hidden, inner], 3000)?,
            shared: shared.then(shared_weights).transpose()?,
            out: Tensor::empty(&bencher.stream, &[tokens, hidden], DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let shared = set.shared.as_ref();
        let args = FusedMoeArgs {
            x: Some(set.x.view()),
            shared_gate_up: shared.map(|[gate_up, _]| gate_up.view().into()),
            shared_down: shared.map(|[_, down]| down.view().into()),
            ..FusedMoeArgs::new(
                [ids.view(), set.weights.view()],
                [set.gate_up.view().into(), set.down.view().into()],
                set.out.view_mut(),
            )
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| {
        let exact = |values: Vec<bf16>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        // The first token's experts alone.
        let of = |tensor: &Tensor| {
            let one = |pair: usize| {
                let expert = pair * 37 % experts;
                Ok::<_, Failure>(exact(tensor.view().slice(0, expert..expert + 1)?.to_vec(stream)?))
            };
            Ok::<_, Failure>((0..top_k).map(one).collect::<Result<Vec<_>, _>>()?.concat())
        };
        let (gate_up, down) = (of(&set.gate_up)?, of(&set.down)?);
        let all = |tensor: &Tensor| Ok::<_, Failure>(exact(tensor.to_vec(stream)?));
        let shared = match &set.shared {
            Some([gate_up, down]) => Some([all(gate_up)?, all(down)?]),
            None => None,
        };
        let weights: Vec<f32> = set.weights.view().slice(0, 0..1)?.to_vec(stream)?;
        let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
        let numbers: Vec<u32> = (0..top_k as u32).collect();
        let x = first_row(&set.x, stream)?;
        let terms = Terms {
            top_k,
            hidden,
            inner,
            activation: Some(Activation::Silu),
            x: &x,
            ids: &numbers,
            weights: &weights,
            gate_up: &gate_up,
            down: &down,
            shared: shared.as_ref().map(|[gate_up, down]| [&gate_up[..], &down[..]]),
            gate: None,
            residual: None,
        };
        let want = reference::fused_moe::<f64>(1, &terms, |v| v);
        expect_close(DTYPE, &first_row(&set.out, stream)?, &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}
