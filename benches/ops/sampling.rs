//! Sampling at the shapes of its cases.

use serde_json::json;
use warpforge::ops::sampling::{CASES, Sampler, Sampling, SamplingArgs, SamplingCase, SamplingProblem};
use warpforge::{DType, Device, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

pub fn bench(bencher: &mut Bencher) {
    for (case, dtype) in CASES.iter().flat_map(|case| [(case, DType::F32), (case, DType::BF16)]) {
        let label = format!("{} {dtype}", case.name);
        bencher.case("sampling", &label, |bencher| time(bencher, case, dtype));
    }
}

fn time(bencher: &mut Bencher, case: &SamplingCase, dtype: DType) -> Result<(), Failure> {
    let &SamplingCase { rows, vocab, method, .. } = case;
    let problem = SamplingProblem { rows, vocab, dtype, method };
    let plan = Sampler::plan(&bencher.device, problem)?;
    let (temperature, top_k, top_p) = match method {
        Sampling::Greedy => (0.0, None, 1.0),
        Sampling::Random { temperature, top_k, top_p, .. } => (temperature, top_k, top_p),
    };
    let work = Work {
        dtype: dtype.name(),
        // Greedy is temperature 0.
        shape: json!({
            "rows": rows, "vocab": vocab, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        }),
        bytes: (rows * vocab * dtype.bytes() + rows * DType::U32.bytes()) as u64,
        flops: (rows * vocab) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let ids = Tensor::empty(&bencher.stream, &[rows], DType::U32)?;
        Ok((bencher.random(&[rows, vocab], dtype, seed)?, ids))
    })?;
    let run = |stream: &Stream, (logits, ids): &mut (Tensor, Tensor)| {
        plan.run(stream, SamplingArgs { logits: logits.view(), ids: ids.view_mut(), step: 7 })
    };
    // The CPU backend chooses the same tokens.
    let verify = |stream: &Stream, (logits, ids): &(Tensor, Tensor)| {
        let cpu = Device::cpu();
        let host = cpu.stream()?;
        let data = match dtype {
            DType::F32 => bytemuck::pod_collect_to_vec(&logits.to_vec::<f32>(stream)?),
            _ => bytemuck::pod_collect_to_vec(&logits.to_vec::<half::bf16>(stream)?),
        };
        let logits = Tensor::from_bytes(&host, &[rows, vocab], dtype, &data)?;
        let mut want = Tensor::zeros(&host, &[rows], DType::U32)?;
        let args = SamplingArgs { logits: logits.view(), ids: want.view_mut(), step: 7 };
        Sampler::plan(&cpu, problem)?.run(&host, args)?;
        let (got, want): (Vec<u32>, Vec<u32>) = (ids.to_vec(stream)?, want.to_vec(&host)?);
        if got == want { Ok(()) } else { Err(format!("tokens {got:?}, on the CPU {want:?}").into()) }
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
