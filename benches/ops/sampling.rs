//! Sampling at the shapes of its cases.

use serde_json::json;
use warpforge::ops::sampling::{
    CASES, Logprobs, PARAMS_LEN, Sampler, SamplingArgs, SamplingCase, SamplingRows,
};
use warpforge::{DType, Device, Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

pub fn bench(bencher: &mut Bencher) {
    for (case, dtype) in CASES.iter().flat_map(|case| [(case, DType::F32), (case, DType::BF16)]) {
        let label = format!("{} {dtype}", case.name);
        bencher.case("sampling", &label, |bencher| time(bencher, case, dtype));
    }
}

/// The tensors of a run.
struct Set {
    logits: Tensor,
    params: Tensor,
    history: Tensor,
    ids: Tensor,
    chosen: Tensor,
    top_ids: Tensor,
    top: Tensor,
}

impl Set {
    fn new(stream: &Stream, case: &SamplingCase, logits: Tensor) -> Result<Self, Error> {
        let rows = case.rows;
        let problem = case.problem(logits.dtype());
        let mut words = vec![0; rows * PARAMS_LEN];
        problem.write_params(&case.params(), &mut words)?;
        let (history, top) = (problem.features.history, problem.features.logprobs.unwrap_or(0));
        let tokens: Vec<u32> = (0..rows * history).map(|i| (i * 2_654_435_761 % case.vocab) as u32).collect();
        Ok(Set {
            logits,
            params: Tensor::from_slice(stream, &[rows, PARAMS_LEN], &words)?,
            history: Tensor::from_slice(stream, &[rows, history], &tokens)?,
            ids: Tensor::empty(stream, &[rows], DType::U32)?,
            chosen: Tensor::empty(stream, &[rows], DType::F32)?,
            top_ids: Tensor::empty(stream, &[rows, top], DType::U32)?,
            top: Tensor::empty(stream, &[rows, top], DType::F32)?,
        })
    }

    fn run(&mut self, plan: &Sampler, stream: &Stream, case: &SamplingCase) -> Result<(), Error> {
        let features = case.problem(self.logits.dtype()).features;
        let has_params = features.draws || features.history > 0;
        let args = SamplingArgs::new(self.logits.view(), self.ids.view_mut());
        let logprobs = Logprobs {
            chosen: self.chosen.view_mut(),
            top_ids: self.top_ids.view_mut(),
            top: self.top.view_mut(),
        };
        plan.run(
            stream,
            SamplingArgs {
                params: has_params.then(|| self.params.view()),
                history: (features.history > 0).then(|| self.history.view()),
                logprobs: features.logprobs.map(|_| logprobs),
                ..args
            },
        )
    }
}

fn time(bencher: &mut Bencher, case: &SamplingCase, dtype: DType) -> Result<(), Failure> {
    let &SamplingCase { rows, vocab, method, .. } = case;
    let problem = case.problem(dtype);
    let plan = Sampler::plan(&bencher.device, problem)?;
    let params = case.params();
    let shape = match method {
        // Greedy is temperature 0.
        SamplingRows::Same(params) => json!({
            "rows": rows, "vocab": vocab,
            "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p,
        }),
        SamplingRows::Mixed => json!({
            "rows": rows, "vocab": vocab, "temperature": 1.0, "top_k": null, "top_p": 1.0,
            "each": params.iter().map(|row| (row.temperature, row.top_k, row.top_p)).collect::<Vec<_>>(),
        }),
        SamplingRows::Penalised(history) => json!({
            "rows": rows, "vocab": vocab, "temperature": params[0].temperature, "top_k": params[0].top_k,
            "top_p": params[0].top_p, "history": history, "repetition": params[0].repetition_penalty,
            "presence": params[0].presence_penalty, "frequency": params[0].frequency_penalty,
        }),
        SamplingRows::Logprobs(top) => json!({
            "rows": rows, "vocab": vocab, "temperature": 0.0, "top_k": null, "top_p": 1.0, "logprobs": top,
        }),
    };
    let work = Work {
        dtype: dtype.name(),
        shape,
        bytes: (rows * vocab * dtype.bytes() + rows * DType::U32.bytes()) as u64,
        flops: (rows * vocab) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let logits = bencher.random(&[rows, vocab], dtype, seed)?;
        Ok(Set::new(&bencher.stream, case, logits)?)
    })?;
    let run = |stream: &Stream, set: &mut Set| set.run(&plan, stream, case);
    // The CPU backend chooses the same tokens.
    let verify = |stream: &Stream, set: &Set| {
        let cpu = Device::cpu();
        let host = cpu.stream()?;
        let data = match dtype {
            DType::F32 => bytemuck::pod_collect_to_vec(&set.logits.to_vec::<f32>(stream)?),
            _ => bytemuck::pod_collect_to_vec(&set.logits.to_vec::<half::bf16>(stream)?),
        };
        let logits = Tensor::from_bytes(&host, &[rows, vocab], dtype, &data)?;
        let mut want = Set::new(&host, case, logits)?;
        want.run(&Sampler::plan(&cpu, problem)?, &host, case)?;
        let tokens = |set: &Set, stream| -> Result<[Vec<u32>; 2], Error> {
            Ok([set.ids.to_vec(stream)?, set.top_ids.to_vec(stream)?])
        };
        let (got, want) = (tokens(set, stream)?, tokens(&want, &host)?);
        if got == want { Ok(()) } else { Err(format!("tokens {got:?}, on the CPU {want:?}").into()) }
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
