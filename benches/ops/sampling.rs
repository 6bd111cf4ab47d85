//! Sampling at the shapes of its cases.

use warpforge::ops::sampling::{CASES, Sampler, SamplingArgs, SamplingProblem};
use warpforge::{DType, Device, Stream, Tensor};

use crate::harness::{Bencher, Case};

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    for (case, dtype) in CASES.iter().flat_map(|case| [(case, DType::F32), (case, DType::BF16)]) {
        let name = format!("sampling {} {dtype}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (rows, vocab, method) = (case.rows, case.vocab, case.method);
        let problem = SamplingProblem { rows, vocab, dtype, method };
        let plan = Sampler::plan(&bencher.device, problem)?;
        let bytes = (rows * vocab * dtype.bytes() + rows * DType::U32.bytes()) as u64;
        let mut sets = bencher.sets(bytes, |seed| {
            let ids = Tensor::empty(&bencher.stream, &[rows], DType::U32)?;
            Ok((bencher.random(&[rows, vocab], dtype, seed)?, ids))
        })?;
        let run = |stream: &Stream, (logits, ids): &mut (Tensor, Tensor)| {
            plan.run(stream, SamplingArgs { logits: logits.view(), ids: ids.view_mut(), step: 7 })
        };
        // The CPU backend chooses the same tokens.
        let verify =
            |stream: &Stream, (logits, ids): &(Tensor, Tensor)| -> Result<(), Box<dyn std::error::Error>> {
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
        let flops = (rows * vocab) as u64;
        bencher.bench(Case { name, report: plan.report(), bytes, flops }, &mut sets, run, verify)?;
    }
    Ok(())
}
