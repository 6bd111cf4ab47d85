//! Guesses of a smaller model at what comes next.

use std::collections::BTreeMap;

use super::{
    Batch, BatchError, BatchSampler, RequestId, RowSampling, Scheduler, SequenceId, Work, WorkLogits,
};
use crate::{MixerConfig, Model, ModelConfig};
use host::ops::sampling::{NO_TOKEN, SamplingFeatures, SamplingParams};

/// A request for which tokens are drafted, and how its tokens are chosen.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest<'a> {
    /// Which one.
    pub id: RequestId,
    /// Most tokens that are drafted, if fewer than [`ModelDraft::tokens`].
    pub most: usize,
    /// As in [`RowSampling`] of the row behind the request's last token, its `step` too; each draft has one step more
    /// than the one before it.
    pub params: SamplingParams,
    /// As in [`RowSampling`].
    pub bias: &'a [(u32, f32)],
}

impl DraftRequest<'_> {
    /// Of a request whose tokens are the most likely ones.
    pub fn greedy(id: RequestId) -> Self {
        DraftRequest { id, most: usize::MAX, params: SamplingParams::default(), bias: &[] }
    }
}

/// Drafts what a smaller model of the same vocabulary would go on with. The smaller model has a batch of its own, in
/// which each request has a sequence with the same tokens.
///
/// **Choice.** Drafts are chosen from the smaller model's logits exactly as [`Scheduler::accept`] wants tokens chosen
/// from the larger one's: by the request's own parameters, seed and step. Both models then draw with the same random
/// number, so that a draft is right where the models' distributions put that number on the same token: always, where
/// they are the same distribution. Rejection sampling with the drafts' probabilities keeps `Σ min(p, q)` of the drafts,
/// which is the most that any scheme can, and this one may keep fewer. In exchange the tokens are those of the same
/// seed without drafts (rejection sampling gives others of the same distribution), penalties and biases need no
/// second formula, and no probabilities leave the device.
///
/// **Rollback.** Before it drafts, a sequence is made what its request is: cut to what the two have in common, which
/// drops the drafts that were not kept, and lengthened by what was chosen instead. So pre-emption, forks and drafts
/// that a step had no room for need nothing of their own. Sequences of requests that have ended go at the next call.
///
/// **Cost.** A call runs a step of the smaller model for each token that is drafted, and one more where all drafts of a
/// request were kept. Prompts are read in chunks, one in a call, beside the drafts of others. A request whose tokens
/// the smaller batch has no room for, in its pages, its sequences or its capacity, goes on without drafts, and so does
/// one with images, which the smaller model does not see, or with placeholders of such in its text, if the smaller
/// model knows them. What an adapter does is unknown to it too: drafts for such a request are those of the smaller
/// model alone. Nothing is drafted while the scheduler reads prompts, since its steps drop drafts then.
#[derive(Debug)]
pub struct ModelDraft {
    batch: Batch,
    sampler: BatchSampler,
    tokens: usize,
    /// The sequence of each request that has one.
    followed: BTreeMap<RequestId, SequenceId>,
}

/// A request that tokens are drafted for.
struct Open<'a> {
    request: &'a DraftRequest<'a>,
    sequence: SequenceId,
    /// Tokens of the request.
    known: usize,
    most: usize,
}

impl ModelDraft {
    /// Whether a model can draft for another, by their configurations: to be asked before they are loaded.
    ///
    /// **Errors**: [`BatchError::DraftVocabulary`] where the vocabularies are not of one size;
    /// [`BatchError::DraftRecurrent`] for a smaller model whose state cannot go back.
    pub fn check(draft: &ModelConfig, target: &ModelConfig) -> Result<(), BatchError> {
        let [own, target] = [draft, target].map(|config| config.decoder.vocab_size);
        if own != target {
            return Err(BatchError::DraftVocabulary { draft: own, target });
        }
        let mut mixers = draft.decoder.layers.iter().map(|layer| layer.mixer);
        if mixers.any(|mixer| matches!(mixer, MixerConfig::DeltaNet(_))) {
            return Err(BatchError::DraftRecurrent);
        }
        Ok(())
    }

    /// Over a batch of the smaller model, of whose sequences it knows none, for requests of a `target` model. Up to
    /// `tokens` are drafted for a request in a call. `features` are what requests may ask for, as in
    /// [`BatchSampler::new`]; log-probabilities are not needed.
    ///
    /// The target's batch needs [`BatchOptions::max_logits`](super::BatchOptions::max_logits) for drafts, and verifies
    /// those of [`BatchOptions::max_prompts`](super::BatchOptions::max_prompts) requests in a step.
    ///
    /// **Errors**: those of [`ModelDraft::check`] and of [`BatchSampler::new`].
    pub fn new(
        batch: Batch,
        target: &Model,
        features: SamplingFeatures,
        tokens: usize,
    ) -> Result<Self, BatchError> {
        Self::check(batch.model().config(), target.config())?;
        let sampler = BatchSampler::new(&batch, SamplingFeatures { logprobs: None, ..features })?;
        Ok(ModelDraft { batch, sampler, tokens, followed: BTreeMap::new() })
    }

    /// The smaller model's batch.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Most tokens that are drafted for a request in a call.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Drafts for those of these requests that have one token pending: to be called when the tokens of a step are
    /// [accepted](Scheduler::accept). What it finds goes to [`Scheduler::draft`]. Returns how many tokens that are.
    ///
    /// **Errors**: [`BatchError::UnknownRequest`], also of a request that waits; [`BatchError::Device`], also for what
    /// the sampler refuses. The requests are as before then.
    pub fn draft(
        &mut self,
        scheduler: &mut Scheduler,
        requests: &[DraftRequest<'_>],
    ) -> Result<usize, BatchError> {
        let gone: Vec<_> = self.followed.keys().copied().filter(|&id| !scheduler.is_running(id)).collect();
        gone.into_iter().try_for_each(|id| self.forget(id))?;
        let mut open = self.open(scheduler, requests)?;
        for round in 0..=self.tokens {
            let (whose, work) = loop {
                let (whose, work) = self.plan(&open, round == 0)?;
                if self.batch.pages_for(&work)? <= self.batch.free_pages() {
                    break (whose, work);
                }
                // Alone a sequence finds its pages.
                let Some((&youngest, &sequence)) = self.followed.last_key_value() else {
                    break (whose, work);
                };
                open.retain(|own| own.sequence != sequence);
                self.forget(youngest)?;
            };
            if work.is_empty() {
                break;
            }
            self.step(&mut open, &whose, &work)?;
        }
        let mut drafted = 0;
        for Open { request, sequence, known, .. } in open {
            let drafts = &self.batch.tokens(sequence)?[known..];
            drafted += scheduler.draft(request.id, drafts)?;
        }
        Ok(drafted)
    }

    fn forget(&mut self, id: RequestId) -> Result<(), BatchError> {
        self.followed.remove(&id).map_or(Ok(()), |sequence| self.batch.remove(sequence))
    }

    /// The requests that the scheduler's next step has room for drafts of, as far as there is room for them here, each
    /// with a sequence that is what the request is.
    fn open<'a>(
        &mut self,
        scheduler: &Scheduler,
        requests: &'a [DraftRequest<'a>],
    ) -> Result<Vec<Open<'a>>, BatchError> {
        let (mut spare, mut places) = scheduler.spare_for_drafts()?;
        let mut claimed = 0;
        let mut open: Vec<Open<'a>> = Vec::new();
        for request in requests {
            let room = scheduler.room_for_drafts(request.id)?;
            let most = room.min(request.most).min(self.tokens).min(spare);
            let is_known = open.iter().any(|own| own.request.id == request.id);
            if most == 0 || places == 0 || is_known || scheduler.has_images(request.id)? {
                continue;
            }
            let tokens = scheduler.tokens(request.id)?;
            // Those of an earlier call go.
            let known = tokens.len() - scheduler.drafted(request.id);
            let Some(sequence) = self.follow(request.id, &tokens[..known], &mut claimed)? else { continue };
            (spare, places) = (spare - most, places - 1);
            open.push(Open { request, sequence, known, most });
        }
        Ok(open)
    }

    /// The sequence of a request with these tokens, the last of which at least is pending; none where there is no room
    /// for it and its drafts beside `claimed` pages, or where a new one would begin with placeholders of images.
    fn follow(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        claimed: &mut usize,
    ) -> Result<Option<SequenceId>, BatchError> {
        let options = self.batch.options;
        let longest = tokens.len().saturating_add(self.tokens);
        if longest > options.capacity {
            self.forget(id)?;
            return Ok(None);
        }
        let needed = options.pages_of(longest);
        if let Some(&sequence) = self.followed.get(&id) {
            let pairs = std::iter::zip(self.batch.tokens(sequence)?, tokens);
            let same = pairs.take_while(|(own, token)| own == token).count().min(tokens.len() - 1);
            if same > 0 {
                self.batch.truncate(sequence, same)?;
                tokens[same..].iter().try_for_each(|&token| self.batch.push(sequence, token))?;
                *claimed += needed.saturating_sub(self.batch.pages(sequence)?);
                return Ok(Some(sequence));
            }
            self.forget(id)?;
        }
        let is_full = self.batch.sequences.len() >= options.max_sequences
            || *claimed + needed > self.batch.free_pages();
        if is_full || self.batch.placeholder(tokens).is_some() {
            return Ok(None);
        }
        *claimed += needed;
        let sequence = self.batch.add(tokens)?;
        // What it has found again is not free any more.
        *claimed -= self.batch.pages(sequence)?;
        self.followed.insert(id, sequence);
        Ok(Some(sequence))
    }

    /// The work of a step, and whose it is: a token of each sequence that has one pending, then what others lack. More
    /// than one round of drafts leaves is read in the first step alone, so that no prompt holds up the others for long.
    fn plan(&self, open: &[Open<'_>], is_first: bool) -> Result<(Vec<usize>, Vec<Work>), BatchError> {
        let options = self.batch.options;
        let (mut budget, mut severals) = (options.max_step_tokens, options.max_severals());
        let (mut ones, mut others) = (Vec::new(), Vec::new());
        for (index, own) in open.iter().enumerate() {
            if self.batch.tokens(own.sequence)?.len() < own.known + own.most {
                let pending = self.batch.pending(own.sequence)?;
                if pending == 1 { &mut ones } else { &mut others }.push((index, own.sequence, pending));
            }
        }
        let (mut whose, mut work) = (Vec::new(), Vec::new());
        for (index, id, pending) in ones.into_iter().chain(others) {
            let tokens = match pending {
                0 => 0,
                1 => budget.min(1),
                2 if severals == 0 => budget.min(1),
                _ if options.max_severals() == 0 => budget.min(1),
                _ if severals == 0 || (pending > 2 && !is_first) => 0,
                _ => pending.min(budget),
            };
            if tokens == 0 {
                continue;
            }
            budget -= tokens;
            severals -= usize::from(tokens > 1);
            let logits = if tokens == pending { WorkLogits::Last } else { WorkLogits::Nothing };
            whose.push(index);
            work.push(Work { id, tokens, logits });
        }
        Ok((whose, work))
    }

    /// Runs a step, and appends what is chosen from its logits.
    fn step(&mut self, open: &mut [Open<'_>], whose: &[usize], work: &[Work]) -> Result<(), BatchError> {
        let Self { batch, sampler, .. } = self;
        let places = batch.step(work)?.rows().to_vec();
        let (mut rows, mut asked) = (Vec::new(), Vec::new());
        for (&index, places) in std::iter::zip(whose, places) {
            let own = &open[index];
            let history = batch.tokens(own.sequence)?;
            let drafted = (history.len() - own.known) as u64;
            let SamplingParams { step, .. } = own.request.params;
            let params = SamplingParams { step: step.wrapping_add(drafted), ..own.request.params };
            for row in places {
                asked.push(index);
                rows.push(RowSampling { row, params, history, bias: own.request.bias, ..Default::default() });
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let chosen = sampler.choose(batch.stream(), batch.logits()?.view(), &rows)?;
        drop(rows);
        for (index, chosen) in std::iter::zip(asked, chosen) {
            let own = &mut open[index];
            match chosen.token {
                // No logit is a number: nothing more is drafted.
                NO_TOKEN => own.most = batch.tokens(own.sequence)?.len() - own.known,
                token => batch.push(own.sequence, token)?,
            }
        }
        Ok(())
    }
}
