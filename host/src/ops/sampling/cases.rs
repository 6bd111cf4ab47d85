//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{
    Logprobs, OP, PARAMS_LEN, Sampler, SamplingArgs, SamplingBias, SamplingFeatures, SamplingParams,
    SamplingProblem,
};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{GLM_4_7_FLASH, QWEN3_4B};
use crate::sample::{Sample, tensor};

/// How the rows of a case are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SamplingRows {
    /// All by the same parameters, but for their seeds.
    Same(SamplingParams),
    /// Each by parameters of its own: every temperature, and with and without each bound.
    Mixed,
    /// With penalties for a history of so many tokens.
    Penalised(u32),
    /// The largest logits, and the log-probabilities of so many.
    Logprobs(usize),
}

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct SamplingCase {
    /// Model, method and phase.
    pub name: &'static str,
    /// Sequences.
    pub rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// How a token is chosen.
    pub method: SamplingRows,
}

const GREEDY: SamplingParams = SamplingParams {
    temperature: 0.0,
    top_k: None,
    top_p: 1.0,
    min_p: 0.0,
    typical_p: 1.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    prompt_len: 0,
    history_len: 0,
    num_bias: 0,
    is_masked: false,
    seed: 0,
    step: 0,
};
/// The parameters that Qwen3's model cards recommend for thinking.
const QWEN3: SamplingParams = SamplingParams { temperature: 0.6, top_k: Some(20), top_p: 0.95, ..GREEDY };
const TEMPERATURE: SamplingParams = SamplingParams { temperature: 1.0, ..GREEDY };
const TOP_P: SamplingParams = SamplingParams { temperature: 1.0, top_p: 0.9, ..GREEDY };

impl SamplingCase {
    /// The parameters of its rows.
    pub fn params(&self) -> Vec<SamplingParams> {
        let of = |row: usize| match self.method {
            SamplingRows::Same(params) => params,
            SamplingRows::Mixed => SamplingParams {
                temperature: 0.5 + row as f32 / self.rows as f32,
                top_k: (row % 4 != 3).then_some(10 + row as u32),
                top_p: if row % 4 == 2 { 1.0 } else { 0.8 + 0.15 * row as f32 / self.rows as f32 },
                ..GREEDY
            },
            SamplingRows::Penalised(history_len) => SamplingParams {
                repetition_penalty: 1.1,
                presence_penalty: 0.5,
                frequency_penalty: 0.25,
                prompt_len: history_len / 2,
                history_len,
                ..QWEN3
            },
            SamplingRows::Logprobs(_) => GREEDY,
        };
        (0..self.rows).map(|row| SamplingParams { seed: row as u64, step: 7, ..of(row) }).collect()
    }

    /// What a plan for it must have.
    pub fn problem(&self, dtype: DType) -> SamplingProblem {
        let logprobs = match self.method {
            SamplingRows::Logprobs(top) => Some(top),
            _ => None,
        };
        let features = SamplingFeatures { logprobs, ..SamplingFeatures::of(&self.params()) };
        SamplingProblem { rows: self.rows, vocab: self.vocab, dtype, features }
    }
}

const fn case(name: &'static str, phase: Phase, vocab: usize, method: SamplingRows) -> SamplingCase {
    SamplingCase { name, rows: phase.tokens(), vocab, method }
}

const fn one(name: &'static str, rows: usize, method: SamplingRows) -> SamplingCase {
    SamplingCase { name, rows, vocab: QWEN3_4B.vocab, method }
}

/// The shapes.
pub const CASES: &[SamplingCase] = cases! {
    case;
    one: [
        one("qwen3 temperature decode 1", 1, SamplingRows::Same(TEMPERATURE)),
        one("qwen3 temperature decode 128", 128, SamplingRows::Same(TEMPERATURE)),
        one("qwen3 top_p decode 1", 1, SamplingRows::Same(TOP_P)),
        one("qwen3 top_p decode 128", 128, SamplingRows::Same(TOP_P)),
        one("qwen3 mixed decode 32", 32, SamplingRows::Mixed),
        one("qwen3 mixed decode 128", 128, SamplingRows::Mixed),
        one("qwen3 penalties decode 32", 32, SamplingRows::Penalised(2048)),
        one("qwen3 penalties decode 128", 128, SamplingRows::Penalised(2048)),
        one("qwen3 logprobs decode 1", 1, SamplingRows::Logprobs(5)),
        one("qwen3 logprobs decode 32", 32, SamplingRows::Logprobs(5)),
    ];
    phases: [];
    decode: [
        "qwen3 greedy" => (QWEN3_4B.vocab, SamplingRows::Same(GREEDY)),
        "qwen3 top_k top_p" => (QWEN3_4B.vocab, SamplingRows::Same(QWEN3)),
        "glm-4.7-flash greedy" => (GLM_4_7_FLASH.vocab, SamplingRows::Same(GREEDY)),
    ];
    prefill: [];
};

/// Runs of so many rows, for what tries every operator: without parameters, with them, and with all there is.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let vocab = 64;
    let plan = |features| Sampler::plan(device, SamplingProblem { rows, vocab, dtype, features });
    let (logits, ids) = (tensor("logits", &[rows, vocab], dtype), tensor("ids", &[rows], DType::U32));
    let params = tensor("params", &[rows, PARAMS_LEN], DType::U32);
    let greedy = plan(SamplingFeatures::GREEDY)?;
    let random = plan(SamplingFeatures::DRAWS)?;
    let all = plan(SamplingFeatures {
        typical_p: true,
        history: 6,
        bias: 3,
        masks: true,
        logprobs: Some(2),
        ..SamplingFeatures::DRAWS
    })?;
    let of_all = [
        logits.clone(),
        params.clone(),
        tensor("history", &[rows, 6], DType::U32),
        tensor("bias.ids", &[rows, 3], DType::U32),
        tensor("bias.values", &[rows, 3], DType::F32),
        tensor("masks", &[rows, 2], DType::U32),
        ids.clone(),
        tensor("logprobs.chosen", &[rows], DType::F32),
        tensor("logprobs.top_ids", &[rows, 2], DType::U32),
        tensor("logprobs.top", &[rows, 2], DType::F32),
    ];
    Ok(vec![
        Sample::new(OP, [logits.clone(), ids.clone()], move |stream, [logits, ids]| {
            greedy.run(stream, SamplingArgs::new(logits.as_view(), ids.reborrow()))
        }),
        Sample::new(OP, [logits, params, ids], move |stream, [logits, params, ids]| {
            let args = SamplingArgs::new(logits.as_view(), ids.reborrow());
            random.run(stream, SamplingArgs { params: Some(params.as_view()), ..args })
        }),
        Sample::new(OP, of_all, move |stream, tensors| {
            let [logits, params, history, bias_ids, bias, masks, ids, chosen, top_ids, top] = tensors;
            let args = SamplingArgs {
                logits: logits.as_view(),
                params: Some(params.as_view()),
                history: Some(history.as_view()),
                bias: Some(SamplingBias { ids: bias_ids.as_view(), values: bias.as_view() }),
                masks: Some(masks.as_view()),
                ids: ids.reborrow(),
                logprobs: Some(Logprobs {
                    chosen: chosen.reborrow(),
                    top_ids: top_ids.reborrow(),
                    top: top.reborrow(),
                }),
            };
            all.run(stream, args)
        }),
    ])
}
