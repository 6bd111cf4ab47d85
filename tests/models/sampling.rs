//! Tokens of a batch's sequences, each chosen by its own settings, with and without drafts.

use std::collections::BTreeMap;

use testkit::golden;
use warpforge::models::{
    BatchError, BatchOptions, BatchSampler, NgramDraft, RequestId, RowSampling, Scheduler, TokenLogprobs,
};
use warpforge::ops::sampling::{NO_TOKEN, SamplingFeatures};
use warpforge::{Error, Stream, Tensor, TensorView};

use super::*;

const OPTIONS: BatchOptions = BatchOptions {
    max_sequences: 4,
    max_step_tokens: 40,
    max_prompts: 4,
    max_logits: 40,
    capacity: 64,
    page_tokens: 16,
    pages: 16,
    prefix_cache: true,
};

const ALL: SamplingFeatures = SamplingFeatures {
    draws: true,
    top_k: true,
    top_p: true,
    typical_p: true,
    history: 64,
    bias: 3,
    masks: true,
    logprobs: Some(4),
};

fn model(name: &str) -> Result<Model, Error> {
    Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})
}

/// The answer to each prompt, and how many steps they took.
type Answers = (Vec<Vec<u32>>, usize);

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drafts {
    Nothing,
    Ngrams(NgramDraft),
    /// What will be chosen, but for each third.
    Known,
    /// What will hardly be.
    Wrong,
}

/// Answers of `tokens` tokens to each prompt, and how many steps they took.
fn answers(
    model: &Model,
    options: BatchOptions,
    drafts: Drafts,
    known: &[Vec<u32>],
) -> Result<Answers, Box<dyn StdError>> {
    const TOKENS: usize = 24;
    let prompts: [&[u32]; 4] = [&[5, 9, 100, 7, 3, 5, 9, 100], &[1, 2], &[40, 41, 42, 43, 40, 41], &[77]];
    let random = SamplingParams { temperature: 0.9, top_k: Some(30), top_p: 0.95, ..Default::default() };
    let settings = [
        SamplingParams::default(),
        random,
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.4, seed: 5, ..random },
        SamplingParams { typical_p: 0.8, seed: 9, ..random },
    ];
    let batch = model.batch(options)?;
    let stream = batch.stream().clone();
    let mut sampler = BatchSampler::new(&batch, ALL)?;
    let mut scheduler = Scheduler::new(batch);
    let mut ids: Vec<RequestId> = Vec::new();
    for prompt in prompts {
        ids.push(scheduler.submit(prompt)?);
    }
    let mut got: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    let mut steps = 0;
    loop {
        let Some(requests) = scheduler.step()?.map(|step| step.requests) else { break };
        steps += 1;
        assert!(steps < 500);
        let logits = scheduler.batch().logits()?;
        let mut rows = Vec::new();
        for (id, places) in &requests {
            let which = ids.iter().position(|own| own == id).expect("a request");
            let tokens = scheduler.tokens(*id)?;
            for (draft, row) in places.clone().enumerate() {
                let history = &tokens[..tokens.len() + 1 + draft - places.len()];
                let prompt_len = prompts[which].len();
                let params = SamplingParams {
                    step: (history.len() - prompt_len) as u64,
                    prompt_len: prompt_len as u32,
                    ..settings[which]
                };
                rows.push(RowSampling { row, params, history, ..Default::default() });
            }
        }
        let chosen = sampler.choose(&stream, logits.view(), &rows)?;
        let mut chosen = chosen.iter().map(|choice| choice.token);
        for (id, places) in requests {
            let which = ids.iter().position(|own| *own == id).expect("a request");
            let tokens: Vec<u32> = chosen.by_ref().take(places.len()).collect();
            let taken = scheduler.accept(id, &tokens)?;
            let answer = got.entry(id).or_default();
            answer.extend(&tokens[..taken]);
            assert!(scheduler.tokens(id)?.ends_with(answer));
            if answer.len() >= TOKENS {
                answer.truncate(TOKENS);
                scheduler.finish(id)?;
                continue;
            }
            let guess: Vec<u32> = match drafts {
                Drafts::Nothing => continue,
                Drafts::Ngrams(ngrams) => ngrams.draft(scheduler.tokens(id)?).to_vec(),
                Drafts::Known => {
                    let rest = known[which][answer.len()..].iter().take(5);
                    rest.enumerate().map(|(i, &token)| if i % 3 == 2 { token ^ 1 } else { token }).collect()
                }
                Drafts::Wrong => vec![answer.len() as u32 % 100; 3],
            };
            let taken = scheduler.draft(id, &guess)?;
            assert!(taken <= guess.len());
        }
    }
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, stats.free_pages), (0, options.pages), "{drafts:?}");
    Ok((ids.iter().map(|id| got[id].clone()).collect(), steps))
}

/// Tokens are those that there are without drafts, whatever is drafted; drafts that are right save steps.
#[test]
fn drafts_change_no_token() -> Outcome {
    for name in ["qwen3", "qwen3_sliding", "qwen3_moe", "glm4_moe_lite"] {
        let model = model(name)?;
        let (want, plain) = answers(&model, OPTIONS, Drafts::Nothing, &[])?;
        for (drafts, options) in [
            (Drafts::Known, OPTIONS),
            (Drafts::Wrong, OPTIONS),
            (Drafts::Ngrams(NgramDraft { shortest: 1, ..NgramDraft::default() }), OPTIONS),
            // No rows for drafts, few pages, a small budget.
            (Drafts::Known, BatchOptions { max_logits: 4, ..OPTIONS }),
            (Drafts::Known, BatchOptions { pages: 5, ..OPTIONS }),
            (Drafts::Known, BatchOptions { max_step_tokens: 6, max_prompts: 1, ..OPTIONS }),
        ] {
            let (got, steps) = answers(&model, options, drafts, &want)?;
            assert_eq!(got, want, "{name} {drafts:?} {options:?}");
            if drafts == Drafts::Known && options == OPTIONS {
                assert!(2 * steps < plain, "{name}: {steps} steps, {plain} without drafts");
            }
        }
    }
    Ok(())
}

/// A recurrent state cannot go back: nothing is drafted there.
#[test]
fn recurrent_states_take_no_drafts() -> Outcome {
    let model = model("qwen3_next")?;
    let mut scheduler = Scheduler::new(model.batch(OPTIONS)?);
    let id = scheduler.submit(&[1, 2, 3])?;
    assert!(matches!(scheduler.draft(id, &[4]), Err(BatchError::UnknownRequest { .. })));
    scheduler.step()?;
    scheduler.push(id, 4)?;
    assert_eq!(scheduler.draft(id, &[5, 6])?, 0);
    assert_eq!(scheduler.tokens(id)?, [1, 2, 3, 4]);
    Ok(())
}

#[test]
fn drafts_that_do_not_fit() -> Outcome {
    let model = model("qwen3")?;
    let mut scheduler = Scheduler::new(model.batch(OPTIONS)?);
    let id = scheduler.submit(&[1; 60])?;
    let late = scheduler.submit(&[2])?;
    // A prompt that is not computed has no last token.
    while scheduler.num_running() < 2 {
        scheduler.step()?;
    }
    scheduler.step()?;
    scheduler.push(id, 3)?;
    // Beside the one that follows there is room for two.
    assert_eq!(scheduler.draft(id, &[4; 9])?, 2);
    assert_eq!(scheduler.tokens(id)?.len(), 63);
    // Another draft takes its place, and what the model has not is none.
    assert_eq!(scheduler.draft(id, &[7])?, 1);
    assert!(scheduler.draft(id, &[1 << 30]).is_err());
    assert_eq!(scheduler.tokens(id)?.last(), Some(&7));
    assert!(matches!(scheduler.accept(id, &[1, 2]), Err(BatchError::Drafts { tokens: 2, drafted: 1, .. })));
    let step = scheduler.step()?.expect("work");
    assert!(step.requests.iter().any(|(own, rows)| *own == id && rows.len() == 2));
    assert!(matches!(scheduler.accept(id, &[1]), Err(BatchError::Drafts { tokens: 1, drafted: 1, .. })));
    // A token that is pushed is behind no draft.
    scheduler.push(id, 8)?;
    assert_eq!(scheduler.tokens(id)?[60..], [3, 8]);
    let fork = scheduler.fork(id)?;
    assert_eq!(scheduler.tokens(fork)?, scheduler.tokens(id)?);
    [id, fork, late].into_iter().try_for_each(|id| scheduler.finish(id))?;
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, stats.free_pages), (0, OPTIONS.pages));
    Ok(())
}

fn logits(stream: &Stream, rows: usize, vocab: usize) -> Result<(Vec<f32>, Tensor), Error> {
    let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 150.0;
    let values: Vec<f32> = (0..rows * vocab).map(value).collect();
    let tensor = Tensor::from_slice(stream, &[rows, vocab], &values)?;
    Ok((values, tensor))
}

/// Each row's token is that which it has alone, with what its row asks for; log-probabilities are those of the logits.
#[test]
fn rows_have_their_own_settings() -> Outcome {
    let model = model("qwen3")?;
    let batch = model.batch(OPTIONS)?;
    let stream = batch.stream().clone();
    let vocab = model.config().decoder.vocab_size;
    let (values, logits) = logits(&stream, 6, vocab)?;
    let random = SamplingParams { temperature: 1.5, seed: 3, ..Default::default() };
    let penalised =
        SamplingParams { repetition_penalty: 2.0, presence_penalty: 1.0, prompt_len: 2, ..random };
    let best = |row: usize| {
        let row = &values[row * vocab..][..vocab];
        (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token") as u32
    };
    let mut allowed = vec![0u32; vocab.div_ceil(32)];
    allowed[1] = 1 << 3;
    let history = [best(2), 5, best(2), 9];
    let bias = [(11, 100.0f32), (12, -5.0)];
    let rows = [
        RowSampling { row: 0, ..Default::default() },
        RowSampling { row: 1, params: random, logprobs: true, ..Default::default() },
        RowSampling { row: 2, params: penalised, history: &history, ..Default::default() },
        RowSampling { row: 3, bias: &bias, logprobs: true, ..Default::default() },
        RowSampling { row: 4, allowed: Some(&allowed), ..Default::default() },
        RowSampling { row: 5, params: SamplingParams { typical_p: 0.5, ..random }, ..Default::default() },
    ];
    let mut sampler = BatchSampler::new(&batch, ALL)?;
    let together = sampler.choose(&stream, logits.view(), &rows)?;
    assert_eq!((together[0].token, together[3].token, together[4].token), (best(0), 11, 35));
    for (row, together) in std::iter::zip(&rows, &together) {
        let alone = sampler.choose(&stream, logits.view(), &[*row])?;
        assert_eq!(alone[0], *together);
        // And by a sampler that has seen nothing else.
        let fresh = BatchSampler::new(&batch, ALL)?.choose(&stream, logits.view(), &[*row])?;
        assert_eq!(fresh[0], *together);
    }
    for row in [1, 3] {
        let Some(TokenLogprobs { chosen, top }) = &together[row].logprobs else { panic!("row {row}") };
        let own = &values[row * vocab..][..vocab];
        let sum: f64 = own.iter().map(|&x| f64::from(x).exp()).sum();
        let want = |token: u32| (f64::from(own[token as usize]) - sum.ln()) as f32;
        assert!((chosen - want(together[row].token)).abs() < 1e-4);
        assert_eq!((top.len(), top[0].0), (4, best(row)));
        assert!(top.iter().all(|&(token, logprob)| (logprob - want(token)).abs() < 1e-4), "{top:?}");
    }
    assert_eq!(together[0].logprobs, None);
    // Histories that grow, shrink and change, as a sampler that has seen nothing takes them.
    let greedy = SamplingParams { repetition_penalty: 1e6, ..Default::default() };
    let mut history: Vec<u32> = Vec::new();
    for round in 0..12 {
        let row = |history| RowSampling { row: 2, params: greedy, history, ..Default::default() };
        let got = sampler.choose(&stream, logits.view(), &[row(&history)])?;
        let fresh = BatchSampler::new(&batch, ALL)?.choose(&stream, logits.view(), &[row(&history)])?;
        assert_eq!(got, fresh, "round {round}");
        assert!(!history.contains(&got[0].token));
        match round {
            5 => history.truncate(1),
            8 => history[0] = 0,
            _ => history.push(got[0].token),
        }
    }
    Ok(())
}

#[test]
fn rows_that_are_refused() -> Outcome {
    let model = model("qwen3")?;
    let batch = model.batch(OPTIONS)?;
    let stream = batch.stream().clone();
    let vocab = model.config().decoder.vocab_size;
    let (_, tensor) = logits(&stream, 2, vocab)?;
    let mut sampler = BatchSampler::new(&batch, SamplingFeatures { bias: 1, ..SamplingFeatures::DRAWS })?;
    let plain = RowSampling::default();
    let history = [1; 65];
    let mut refused = |logits: TensorView<'_>, rows: &[RowSampling<'_>], want: &str| {
        let error = sampler.choose(&stream, logits, rows).expect_err(want).to_string();
        assert!(error.contains(want), "{error}: {want}");
    };
    let with = |params| RowSampling { params, ..plain };
    let penalty = SamplingParams { presence_penalty: 1.0, ..Default::default() };
    refused(tensor.view(), &[RowSampling { row: 2, ..plain }], "row");
    refused(tensor.view(), &[plain, plain], "at most once");
    refused(tensor.view(), &[with(penalty)], "presence_penalty");
    refused(tensor.view(), &[RowSampling { history: &history, ..with(penalty) }], "presence_penalty");
    refused(tensor.view(), &[RowSampling { bias: &[(1, 0.0), (2, 0.0)], ..plain }], "num_bias");
    refused(tensor.view(), &[RowSampling { allowed: Some(&[0]), ..plain }], "allowed");
    refused(tensor.view(), &[RowSampling { logprobs: true, ..plain }], "logprobs");
    refused(tensor.view(), &[with(SamplingParams { top_p: 0.0, ..Default::default() })], "top_p");
    let (_, many) = logits(&stream, 41, vocab)?;
    refused(many.view(), &[plain], "at most 40 rows");
    // And none of it has left a trace.
    let got = sampler.choose(&stream, tensor.view(), &[RowSampling { row: 1, ..plain }])?;
    assert_ne!(got[0].token, NO_TOKEN);
    assert_eq!(sampler.choose(&stream, tensor.view(), &[])?, []);
    Ok(())
}
