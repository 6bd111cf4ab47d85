//! Tokens of a batch's sequences, each chosen by its own settings, with and without drafts.

mod trees;

use std::collections::BTreeMap;

use testkit::golden;
use warpforge::models::{
    BatchError, BatchOptions, BatchSampler, CacheType, DraftNode, DraftRequest, ModelDraft, NgramDraft,
    RequestId, RowSampling, Scheduler, TokenLogprobs,
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
    max_patches: 0,
    cache_type: CacheType::Model,
    shared_prefix: SharedPrefix::Auto,
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

/// The answer to each prompt.
type Answers = Vec<Vec<u32>>;

/// What it took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Taken {
    steps: usize,
    drafted: usize,
    accepted: usize,
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug)]
enum Drafts<'a> {
    Nothing,
    Ngrams(NgramDraft),
    /// What will be chosen, but for each third.
    Known,
    /// What will hardly be.
    Wrong,
    /// What will be chosen, and others beside it.
    Tree,
    /// Of a model, so many tokens, in a batch of these sizes.
    Model(&'a Model, usize, BatchOptions),
}

/// Answers to each prompt, and what they took. Greedy ones for `greedy`, else each by settings of its own.
fn answers_of(
    model: &Model,
    options: BatchOptions,
    drafts: Drafts<'_>,
    known: &[Vec<u32>],
    greedy: bool,
) -> Result<(Answers, Taken), Box<dyn StdError>> {
    const TOKENS: usize = 24;
    let prompts: [&[u32]; 4] = [&[5, 9, 100, 7, 3, 5, 9, 100], &[1, 2], &[40, 41, 42, 43, 40, 41], &[77]];
    let random = SamplingParams { temperature: 0.9, top_k: Some(30), top_p: 0.95, ..Default::default() };
    let settings = [
        SamplingParams::default(),
        random,
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.4, seed: 5, ..random },
        SamplingParams { typical_p: 0.8, seed: 9, ..random },
    ];
    let settings = if greedy { [SamplingParams::default(); 4] } else { settings };
    let batch = model.batch(options)?;
    let stream = batch.stream().clone();
    let mut sampler = BatchSampler::new(&batch, ALL)?;
    let mut scheduler = Scheduler::new(batch);
    let mut smaller = match drafts {
        Drafts::Model(draft, tokens, options) => {
            Some(ModelDraft::new(draft.batch(options)?, model, ALL, tokens)?)
        }
        _ => None,
    };
    let mut ids: Vec<RequestId> = Vec::new();
    for prompt in prompts {
        ids.push(scheduler.submit(prompt)?);
    }
    let mut got: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    let mut taken = Taken::default();
    loop {
        let Some(requests) = scheduler.step()?.map(|step| step.requests) else { break };
        taken.steps += 1;
        assert!(taken.steps < 500);
        let logits = scheduler.batch().logits()?;
        let mut rows = Vec::new();
        for (id, places) in &requests {
            let which = ids.iter().position(|own| own == id).expect("a request");
            let histories = scheduler.histories(*id)?;
            assert_eq!(histories.len(), places.len());
            for (row, history) in std::iter::zip(places.clone(), histories) {
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
            let kept = scheduler.accept(id, &tokens)?;
            taken.drafted += tokens.len() - 1;
            taken.accepted += kept - 1;
            let answer = got.entry(id).or_default();
            let all = scheduler.tokens(id)?;
            answer.extend(&all[all.len() - kept..]);
            assert!(all.ends_with(answer));
            if !matches!(drafts, Drafts::Tree) {
                assert!(answer.ends_with(&tokens[..kept]));
            }
            if answer.len() >= TOKENS {
                answer.truncate(TOKENS);
                scheduler.finish(id)?;
                continue;
            }
            let guess: Vec<u32> = match drafts {
                Drafts::Nothing | Drafts::Model(..) => continue,
                Drafts::Ngrams(ngrams) => ngrams.draft(scheduler.tokens(id)?).to_vec(),
                Drafts::Known => {
                    let rest = known[which][answer.len()..].iter().take(5);
                    rest.enumerate().map(|(i, &token)| if i % 3 == 2 { token ^ 1 } else { token }).collect()
                }
                Drafts::Tree => {
                    let nodes = trees::tree(known[which][answer.len()..].chunks(3).next().unwrap_or(&[]));
                    assert!(scheduler.draft_tree(id, &nodes)? <= nodes.len());
                    continue;
                }
                Drafts::Wrong => vec![answer.len() as u32 % 100; 3],
            };
            assert!(scheduler.draft(id, &guess)? <= guess.len());
        }
        if let Some(smaller) = &mut smaller {
            let request = |(which, &id): (usize, &RequestId)| {
                let own = got.get(&id).map_or(0, Vec::len);
                // Those of a whole answer are drafted as if it went on.
                let (step, prompt_len) = (own as u64, prompts[which].len() as u32);
                let params = SamplingParams { step, prompt_len, ..settings[which] };
                DraftRequest { params, ..DraftRequest::greedy(id) }
            };
            let running = |id: &RequestId| got.get(id).is_none_or(|own| own.len() < TOKENS);
            let alive: Vec<_> = ids.iter().enumerate().filter(|(_, id)| running(id)).map(request).collect();
            // Those that wait are refused.
            let requests = match alive.iter().any(|request| scheduler.tokens(request.id).is_err()) {
                true => &[][..],
                false => &alive,
            };
            smaller.draft(&mut scheduler, requests)?;
        }
    }
    let stats = scheduler.batch().stats();
    assert_eq!((stats.sequences, stats.free_pages), (0, options.pages), "{drafts:?}");
    if let Some(smaller) = &mut smaller {
        assert_eq!(smaller.draft(&mut scheduler, &[])?, 0);
        let (stats, options) = (smaller.batch().stats(), smaller.batch().options());
        assert_eq!((stats.sequences, stats.free_pages), (0, options.pages), "{drafts:?}");
    }
    Ok((ids.iter().map(|id| got[id].clone()).collect(), taken))
}

fn answers(
    model: &Model,
    options: BatchOptions,
    drafts: Drafts<'_>,
    known: &[Vec<u32>],
) -> Result<(Answers, usize), Box<dyn StdError>> {
    let (answers, taken) = answers_of(model, options, drafts, known, false)?;
    Ok((answers, taken.steps))
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
            if matches!(drafts, Drafts::Known) && options == OPTIONS {
                assert!(2 * steps < plain, "{name}: {steps} steps, {plain} without drafts");
            }
        }
    }
    Ok(())
}

/// A model that drafts for itself is always right, also where tokens are drawn: every step has all drafts that there
/// is room for, and keeps them. Others with its vocabulary are right sometimes. Tokens are the same with all of them.
#[test]
fn models_draft_for_others() -> Outcome {
    for (name, draft) in [("qwen3", "qwen3_sliding"), ("glm4_moe_lite", "qwen3_moe")] {
        let (model, other) = (model(name)?, self::model(draft)?);
        let weights = Model::random(&Device::cpu(), other.config().clone(), DType::F32, 3)?;
        for greedy in [true, false] {
            let (want, plain) = answers_of(&model, OPTIONS, Drafts::Nothing, &[], greedy)?;
            let run = |draft, tokens, options, own| {
                answers_of(&model, options, Drafts::Model(draft, tokens, own), &[], greedy)
            };
            for (draft, tokens, options, own) in [
                (&model, 4, OPTIONS, OPTIONS),
                (&model, 1, OPTIONS, OPTIONS),
                (&other, 4, OPTIONS, OPTIONS),
                (&weights, 3, OPTIONS, OPTIONS),
                // Here and there few pages, few places, a small budget, no chunks, little capacity.
                (&model, 4, BatchOptions { pages: 5, ..OPTIONS }, OPTIONS),
                (&model, 4, OPTIONS, BatchOptions { pages: 4, prefix_cache: false, ..OPTIONS }),
                (&model, 4, OPTIONS, BatchOptions { max_sequences: 2, ..OPTIONS }),
                (&model, 4, OPTIONS, BatchOptions { max_step_tokens: 3, max_prompts: 1, ..OPTIONS }),
                (&model, 4, OPTIONS, BatchOptions { max_step_tokens: 1, ..OPTIONS }),
                (&model, 4, BatchOptions { max_step_tokens: 6, max_prompts: 1, ..OPTIONS }, OPTIONS),
                (&model, 4, OPTIONS, BatchOptions { capacity: 20, ..OPTIONS }),
            ] {
                let (got, taken) = run(draft, tokens, options, own)?;
                let what = format!(
                    "{name} by {tokens} of {:?}, {options:?}, {own:?}: {taken:?}",
                    draft.config().architecture
                );
                assert_eq!(got, want, "{what}");
                assert!(taken.drafted > 0, "{what}");
                if std::ptr::eq(draft, &model) {
                    assert_eq!(taken.accepted, taken.drafted, "{what}");
                    assert!(taken.steps < plain.steps, "{what}");
                } else {
                    assert!(taken.accepted < taken.drafted / 2, "{what}");
                }
                if std::ptr::eq(draft, &model) && (options, own) == (OPTIONS, OPTIONS) {
                    // Each step but the last of an answer gives a token and all its drafts.
                    let least = 23usize.div_ceil(1 + tokens) + 1;
                    assert!((least..=least + 1).contains(&taken.steps), "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn draft_models_that_do_not_fit() -> Outcome {
    let qwen3 = model("qwen3")?;
    let new = |draft: &Model| ModelDraft::new(draft.batch(OPTIONS)?, &qwen3, SamplingFeatures::GREEDY, 4);
    let mut config = qwen3.config().clone();
    config.decoder.vocab_size = 320;
    let smaller = Model::random(&Device::cpu(), config, DType::F32, 1)?;
    let error = new(&smaller).unwrap_err();
    assert!(matches!(error, BatchError::DraftVocabulary { draft: 320, target: 384 }));
    assert_eq!(
        error.to_string(),
        "a draft model of 320 tokens for a model of 384: expected the same vocabulary"
    );
    assert!(matches!(new(&model("qwen3_next")?), Err(BatchError::DraftRecurrent)));
    let mut draft = new(&qwen3)?;
    let mut scheduler = Scheduler::new(qwen3.batch(OPTIONS)?);
    let id = scheduler.submit(&[1, 2, 3])?;
    let asked = [DraftRequest::greedy(id)];
    assert!(matches!(draft.draft(&mut scheduler, &asked), Err(BatchError::UnknownRequest { .. })));
    scheduler.step()?;
    assert_eq!(draft.draft(&mut scheduler, &asked)?, 0, "nothing is pending");
    scheduler.push(id, 4)?;
    assert_eq!(draft.draft(&mut scheduler, &[asked[0], asked[0]])?, 4);
    // What the sampler refuses leaves no drafts; another call begins anew.
    let random = SamplingParams { temperature: 1.0, ..Default::default() };
    let error = draft.draft(&mut scheduler, &[DraftRequest { params: random, ..asked[0] }]).unwrap_err();
    assert!(error.to_string().contains("temperature"), "{error}");
    assert_eq!(draft.draft(&mut scheduler, &[DraftRequest { most: 2, ..asked[0] }])?, 2);
    assert_eq!(scheduler.tokens(id)?.len(), 6);
    // A recurrent target takes none, and the smaller model computes nothing for it.
    let next = model("qwen3_next")?;
    let mut draft = ModelDraft::new(qwen3.batch(OPTIONS)?, &next, SamplingFeatures::GREEDY, 4)?;
    let mut scheduler = Scheduler::new(next.batch(OPTIONS)?);
    let id = scheduler.submit(&[1, 2, 3])?;
    scheduler.step()?;
    scheduler.push(id, 4)?;
    assert_eq!(draft.draft(&mut scheduler, &[DraftRequest::greedy(id)])?, 0);
    assert_eq!(draft.batch().stats().steps, 0);
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
    assert!(scheduler.push(id, 1 << 30).is_err());
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

/// What is refused leaves a request's drafts as they are.
#[test]
fn a_fork_that_is_refused() -> Outcome {
    let model = model("qwen3")?;
    let mut scheduler = Scheduler::new(model.batch(BatchOptions { max_sequences: 2, ..OPTIONS })?);
    let id = scheduler.submit(&[1, 2])?;
    scheduler.step()?;
    scheduler.push(id, 3)?;
    assert_eq!(scheduler.draft(id, &[4, 5])?, 2);
    let fork = scheduler.fork(id)?;
    // Both go on without.
    for id in [id, fork] {
        assert_eq!(scheduler.tokens(id)?, [1, 2, 3]);
    }
    assert_eq!(scheduler.draft(id, &[4, 5])?, 2);
    assert!(matches!(scheduler.fork(id), Err(BatchError::OutOfSequences { .. })));
    assert_eq!(scheduler.tokens(id)?, [1, 2, 3, 4, 5]);
    Ok(())
}

/// A request that is pre-empted before its tokens are chosen has no drafts when it comes back.
#[test]
fn computed_drafts_of_a_preempted_request() -> Outcome {
    let model = model("qwen3")?;
    // Two pages: the older one needs both.
    let options = BatchOptions { pages: 2, page_tokens: 16, capacity: 32, ..OPTIONS };
    let mut scheduler = Scheduler::new(model.batch(options)?);
    let (old, young) = (scheduler.submit(&[1; 15])?, scheduler.submit(&[2; 3])?);
    scheduler.step()?;
    scheduler.push(old, 4)?;
    scheduler.push(young, 5)?;
    assert_eq!(scheduler.draft(young, &[6, 7])?, 2);
    scheduler.step()?;
    // The young one's tokens are not chosen yet.
    scheduler.accept(old, &[8])?;
    scheduler.step()?;
    assert_eq!(
        (scheduler.tokens(young)?.to_vec(), scheduler.batch().stats().preemptions),
        (vec![2, 2, 2, 5], 1)
    );
    scheduler.push(young, 9)?;
    scheduler.finish(old)?;
    while let Some(step) = scheduler.step()? {
        if !step.requests.is_empty() {
            break;
        }
    }
    assert_eq!(scheduler.tokens(young)?, [2, 2, 2, 5, 9]);
    scheduler.accept(young, &[10])?;
    Ok(())
}

/// What was chosen from a request's rows is accepted though it has been pre-empted since, until it has new rows.
#[test]
fn tokens_of_a_preempted_request() -> Outcome {
    let model = model("qwen3")?;
    // Two pages: the older one needs both. The younger one's tokens take two steps.
    let options = BatchOptions { pages: 2, capacity: 32, max_step_tokens: 12, ..OPTIONS };
    for (chosen, taken) in [([6, 7, 9], 3), ([6, 9, 1], 2), ([8, 9, 1], 1)] {
        for steps in 0..3 {
            let mut scheduler = Scheduler::new(model.batch(options)?);
            let (old, young) = (scheduler.submit(&[1; 15])?, scheduler.submit(&[2; 12])?);
            for _ in 0..3 {
                scheduler.step()?;
            }
            scheduler.push(old, 4)?;
            scheduler.push(young, 5)?;
            assert_eq!(scheduler.draft(young, &[6, 7])?, 2);
            scheduler.step()?;
            scheduler.accept(old, &[8])?;
            scheduler.step()?;
            assert_eq!(scheduler.batch().stats().preemptions, 1);
            if steps > 0 {
                scheduler.finish(old)?;
            }
            for step in 1..=steps {
                assert_eq!(scheduler.step()?.ok_or("work")?.requests.len(), usize::from(step == 2));
            }
            let (before, refused) = (scheduler.tokens(young)?.to_vec(), scheduler.accept(young, &[6, 7]));
            assert!(matches!(refused, Err(BatchError::Drafts { tokens: 2, .. })));
            assert!(scheduler.accept(young, &[6, 7, NO_TOKEN]).is_err());
            assert_eq!((scheduler.tokens(young)?, before.len()), (&before[..], 13));
            if steps == 2 {
                // One row again, behind the token that was pushed.
                let refused = scheduler.accept(young, &chosen);
                assert!(matches!(refused, Err(BatchError::Drafts { tokens: 3, drafted: 0, .. })));
                assert_eq!(scheduler.accept(young, &chosen[..1])?, 1);
                assert_eq!(scheduler.tokens(young)?[13..], chosen[..1]);
                continue;
            }
            assert_eq!(scheduler.accept(young, &chosen)?, taken);
            assert_eq!(scheduler.tokens(young)?[13..], chosen[..taken]);
            assert!(scheduler.accept(young, &[1]).is_err(), "chosen before");
            if steps == 0 {
                scheduler.finish(old)?;
            }
            while scheduler.step()?.ok_or("work")?.requests.is_empty() {}
            assert_eq!(scheduler.accept(young, &[10])?, 1);
        }
    }
    Ok(())
}

/// A request whose tokens are not chosen yet keeps its drafts, while others go on.
#[test]
fn drafts_wait_for_their_tokens() -> Outcome {
    let model = model("qwen3")?;
    let mut scheduler = Scheduler::new(model.batch(OPTIONS)?);
    let (slow, fast) = (scheduler.submit(&[1, 2, 3])?, scheduler.submit(&[4, 5])?);
    scheduler.step()?;
    scheduler.push(slow, 6)?;
    scheduler.push(fast, 7)?;
    assert_eq!(scheduler.draft(slow, &[8, 9])?, 2);
    assert_eq!(scheduler.step()?.ok_or("work")?.requests, [(slow, 1..4), (fast, 0..1)]);
    let mut smaller = ModelDraft::new(model.batch(OPTIONS)?, &model, SamplingFeatures::GREEDY, 4)?;
    for token in 10..14 {
        assert_eq!(scheduler.accept(fast, &[token])?, 1);
        assert_eq!(
            smaller.draft(&mut scheduler, &[DraftRequest { most: 1, ..DraftRequest::greedy(fast) }])?,
            1
        );
        assert_eq!(scheduler.draft(fast, &[])?, 0);
        assert_eq!(scheduler.step()?.ok_or("work")?.requests, [(fast, 0..1)]);
    }
    assert_eq!(scheduler.accept(slow, &[8, 1, 2])?, 2);
    assert_eq!(scheduler.tokens(slow)?, [1, 2, 3, 6, 8, 1]);
    Ok(())
}

/// Nothing is drafted behind a prompt of a single token that no step has computed: what its pages begin with may be
/// found again yet.
#[test]
fn a_token_that_is_not_computed_has_no_drafts() -> Outcome {
    let model = model("qwen3")?;
    let mut scheduler = Scheduler::new(model.batch(BatchOptions { max_step_tokens: 1, ..OPTIONS })?);
    let (first, second) = (scheduler.submit(&[1])?, scheduler.submit(&[2])?);
    assert_eq!(scheduler.step()?.ok_or("work")?.requests, [(first, 0..1)]);
    assert_eq!(scheduler.draft(second, &[3, 4])?, 0);
    assert_eq!(scheduler.tokens(second)?, [2]);
    Ok(())
}

/// A model that sees takes no placeholder as text: a text that has written one goes on without its drafts.
#[test]
fn nothing_is_drafted_behind_placeholders() -> Outcome {
    let model = model("qwen3_vl")?;
    let image = model.config().vision.as_ref().ok_or("a tower")?.image_token;
    let mut scheduler = Scheduler::new(model.batch(OPTIONS)?);
    let mut smaller = ModelDraft::new(model.batch(OPTIONS)?, &model, SamplingFeatures::GREEDY, 2)?;
    let (odd, plain) = (scheduler.submit(&[1, 2, 3])?, scheduler.submit(&[4, 5])?);
    scheduler.step()?;
    scheduler.push(odd, image)?;
    scheduler.push(plain, 6)?;
    let asked = [odd, plain].map(DraftRequest::greedy);
    assert_eq!(smaller.draft(&mut scheduler, &asked)?, 2);
    assert_eq!((scheduler.tokens(odd)?.len(), scheduler.tokens(plain)?.len()), (4, 5));
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
    // In two halves the rows are those of the first.
    sampler.enqueue(&stream, tensor.view(), &[RowSampling { row: 1, ..plain }])?;
    assert_eq!(sampler.read(&stream, &[RowSampling { row: 1, ..plain }])?, got);
    for (row, want) in [
        (RowSampling { row: 2, ..plain }, "expected one of 2 rows, got 2"),
        (RowSampling { logprobs: true, ..plain }, "expected none, as none were asked for, got some"),
    ] {
        let error = sampler.read(&stream, &[row]).expect_err(want).to_string();
        assert!(error.ends_with(want), "{error}: {want}");
    }
    Ok(())
}
