//! A policy over a batch: which requests a step works on.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;

use super::tree::Path;
use super::{Batch, BatchError, Prompt, SequenceId, Work, WorkLogits};
use crate::LogitRows;

/// A request of a scheduler. Numbers are not used again, and later requests have larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What a step of a scheduler gives.
#[derive(Clone, Debug)]
pub struct ScheduledStep<'a> {
    /// Requests none of whose tokens are pending any more, from the oldest on, each with the rows of `logits` that its
    /// next tokens are to be chosen from: one, and one more for each token that was drafted; of a tree's paths each.
    pub requests: Vec<(RequestId, Range<usize>)>,
    /// `[rows, vocab]` f32 on the device, until the next step.
    pub logits: LogitRows<'a>,
    /// Tokens that were computed, of all requests.
    pub tokens: usize,
}

/// Requests of any number over a [`Batch`]: continuous batching.
///
/// **A step** takes one token of each request that has one pending, then chunks of prompts, the oldest first, until the
/// budget ([`BatchOptions::max_step_tokens`](super::BatchOptions::max_step_tokens)) is spent. A request waits until the
/// batch has a place for it and pages for its prompt. Where pages run out the youngest requests are pre-empted, and go
/// on, before any that wait, once there are pages for all that they had. The oldest request always goes on.
///
/// **Speculation**: what may come behind a request's last token can be [drafted](Self::draft), from its own text by
/// [`NgramDraft`](super::NgramDraft) or with a smaller model by [`ModelDraft`](super::ModelDraft), also as a
/// [tree](Self::draft_tree). A step computes drafts too, and [`Self::accept`] keeps those that were chosen anyway.
/// Tokens chosen by the same parameters are the same with drafts and without, as far as the logits are.
///
/// ```no_run
/// # extern crate models as warpforge;
/// # use host::{Device, DType};
/// use warpforge::{BatchOptions, Model, Scheduler};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::load(&Device::cpu(), "Qwen3-0.6B".as_ref(), DType::F32, &mut |_| {})?;
/// let mut scheduler = Scheduler::new(model.batch(BatchOptions::default())?);
/// for prompt in [&[9707, 11][..], &[785, 6722, 315]] {
///     scheduler.submit(prompt)?;
/// }
/// # let choose = |_: &[f32]| 0;
/// while let Some(step) = scheduler.step()? {
///     let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
///     for (request, rows) in step.requests {
///         let token = choose(&logits[rows.start * vocab..][..vocab]);
///         if scheduler.tokens(request)?.len() < 32 {
///             scheduler.push(request, token)?;
///         } else {
///             scheduler.finish(request)?;
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Scheduler {
    pub(super) batch: Batch,
    waiting: VecDeque<(RequestId, Prompt)>,
    /// Those in the batch.
    pub(super) running: BTreeMap<RequestId, Running>,
    last_id: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) sequence: SequenceId,
    /// Pre-empted.
    pub(super) is_paused: bool,
    /// How many of its last tokens are drafts.
    pub(super) drafted: usize,
    /// The paths of a tree of drafts but the first.
    pub(super) paths: Vec<Path>,
    /// If it was pre-empted while its tokens were to be chosen from rows that a step gave: the drafts of these rows, by
    /// path, which it has not any more. Until they are chosen, or it has new rows.
    pub(super) awaited: Option<Vec<Vec<u32>>>,
}

/// Tokens of a request that a step may compute.
#[derive(Clone, Copy, Debug)]
struct Pending {
    id: RequestId,
    sequence: SequenceId,
    /// Without the drafts.
    tokens: usize,
    drafted: usize,
}

impl Scheduler {
    /// Over a batch, of whose sequences it knows none.
    pub fn new(batch: Batch) -> Self {
        Scheduler { batch, waiting: VecDeque::new(), running: BTreeMap::new(), last_id: 0 }
    }

    /// The batch.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Requests that have no place in the batch yet.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests in the batch.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// A new request, with its prompt.
    ///
    /// **Errors**: those of [`Batch::add`] but for [`BatchError::OutOfSequences`]: it waits then.
    pub fn submit(&mut self, prompt: &[u32]) -> Result<RequestId, BatchError> {
        self.submit_prompt(prompt.into())
    }

    /// The same of a prompt with an adapter, or with images. A step reads images of one request, the oldest first.
    ///
    /// **Errors**: those of [`Batch::add_prompt`] but for [`BatchError::OutOfSequences`].
    pub fn submit_prompt(&mut self, prompt: Prompt) -> Result<RequestId, BatchError> {
        self.batch.check_prompt(&prompt)?;
        let id = self.next_id();
        self.waiting.push_back((id, prompt));
        Ok(id)
    }

    fn next_id(&mut self) -> RequestId {
        self.last_id += 1;
        RequestId(self.last_id)
    }

    pub(super) fn sequence(&self, id: RequestId) -> Result<SequenceId, BatchError> {
        self.running.get(&id).map(|running| running.sequence).ok_or(BatchError::UnknownRequest { id })
    }

    /// A request's tokens: its prompt, those that were pushed, and drafts.
    pub fn tokens(&self, id: RequestId) -> Result<&[u32], BatchError> {
        match self.waiting.iter().find(|(waiting, _)| *waiting == id) {
            Some((_, prompt)) => Ok(&prompt.tokens),
            None => self.batch.tokens(self.sequence(id)?),
        }
    }

    /// Appends the token that was chosen for a request. Drafts are forgotten.
    ///
    /// **Errors**: those of [`Batch::push`]: at [`BatchError::TooLong`] it has to be finished.
    /// [`BatchError::UnknownRequest`] also of one that waits.
    pub fn push(&mut self, id: RequestId, token: u32) -> Result<(), BatchError> {
        let sequence = self.sequence(id)?;
        // Drafts stay where it is refused.
        self.batch.check_push(self.batch.tokens(sequence)?.len() - self.drafted(id), token)?;
        self.forget_drafts(id)?;
        if let Some(running) = self.running.get_mut(&id) {
            running.awaited = None;
        }
        self.batch.push(sequence, token)
    }

    /// Appends what may come behind the token that was pushed last: the next step computes it along, for logits behind
    /// each. Returns how many tokens were taken: as many as the capacity has room for beside one more, none where a
    /// recurrent state could not go back, nor behind a prompt that is not computed yet. A step forgets drafts that its
    /// budget, its pages or its rows of logits have no room for.
    ///
    /// **Errors**: [`BatchError::UnknownRequest`], also of one that waits; [`Error::Invalid`](host::Error::Invalid) for
    /// a token that the model has not.
    pub fn draft(&mut self, id: RequestId, tokens: &[u32]) -> Result<usize, BatchError> {
        let sequence = self.sequence(id)?;
        self.batch.model().config().decoder.check_ids(tokens)?;
        self.forget_drafts(id)?;
        let taken = tokens.len().min(self.room_for_drafts(id)?);
        for &token in &tokens[..taken] {
            self.batch.push(sequence, token)?;
        }
        if let Some(running) = self.running.get_mut(&id) {
            running.drafted = taken;
        }
        Ok(taken)
    }

    /// How many drafts a request can have at its length.
    pub(super) fn room_for_drafts(&self, id: RequestId) -> Result<usize, BatchError> {
        let sequence = self.sequence(id)?;
        let drafted = self.drafted(id);
        let own = self.batch.tokens(sequence)?.len() - drafted;
        let pending = self.batch.pending(sequence)?;
        let is_awaited = self.running.get(&id).is_some_and(|running| running.awaited.is_some());
        // Drafts of a sequence of which nothing is computed could be found in the prefix cache, as its prompt.
        if self.batch.is_recurrent || pending != 1 + drafted || own == 1 || is_awaited {
            return Ok(0);
        }
        Ok((self.batch.options.capacity - 1).saturating_sub(own))
    }

    /// How many of a request's last tokens are drafts.
    pub(super) fn drafted(&self, id: RequestId) -> usize {
        self.running.get(&id).map_or(0, |running| running.drafted)
    }

    /// Whether a request is in the batch.
    pub(super) fn is_running(&self, id: RequestId) -> bool {
        self.running.contains_key(&id)
    }

    /// How many drafts the next step has room for, and of how many requests, as far as it is known now: requests that
    /// wait may have their prompts in it.
    pub(super) fn spare_for_drafts(&self) -> Result<(usize, usize), BatchError> {
        let (ones, prompts) = self.pending()?;
        Ok((self.spare(ones.len(), prompts.len()), self.batch.options.max_severals()))
    }

    /// Drafts that a step has room for beside so many requests with one token: none where it reads prompts.
    fn spare(&self, ones: usize, prompts: usize) -> usize {
        let options = &self.batch.options;
        let most = options.max_step_tokens.min(options.logit_rows());
        if prompts > 0 { 0 } else { most.saturating_sub(ones) }
    }

    /// Appends the tokens that were chosen from a request's rows of the last step, as many as it had rows: up to the
    /// first that differs from its draft, and that one too. Returns how many tokens the request has got, at least one.
    /// Of a [tree](Self::draft_tree) it is the longest path whose tokens were chosen, and the token behind it: they are
    /// the last ones of [`Self::tokens`] then.
    ///
    /// A request whose tokens are not chosen before the next step may be pre-empted by that: its tokens are accepted
    /// all the same, until it has been computed anew, and has one row again.
    ///
    /// Where each token is chosen by a step of the random numbers of its own, as [`Self::push`] would have it, the
    /// tokens are distributed exactly as without drafts: a row is chosen from only behind drafts that were chosen.
    ///
    /// **Errors**: those of [`Self::push`]; [`BatchError::Drafts`] for another number of tokens.
    pub fn accept(&mut self, id: RequestId, chosen: &[u32]) -> Result<usize, BatchError> {
        let running = self.running.get(&id).ok_or(BatchError::UnknownRequest { id })?;
        let known = self.batch.tokens(running.sequence)?.len() - running.drafted;
        let (paths, has_rows) = match &running.awaited {
            Some(paths) => (paths.clone(), true),
            None => (self.drafts(running)?, self.batch.pending(running.sequence)? == 0),
        };
        let drafted = paths.iter().map(|drafts| drafts.len() + 1).sum::<usize>() - 1;
        if !has_rows || chosen.len() != drafted + 1 {
            return Err(BatchError::Drafts { id, tokens: chosen.len(), drafted });
        }
        let (mut taken, mut first) = ((0, 0, chosen[0]), 0);
        for (path, drafts) in paths.iter().enumerate() {
            let own = &chosen[first..=first + drafts.len()];
            let kept = std::iter::zip(drafts, own).take_while(|(draft, token)| draft == token).count();
            if path == 0 || kept > taken.1 {
                taken = (path, kept, own[kept]);
            }
            first += own.len();
        }
        let (path, kept, next) = taken;
        self.batch.check_push(known + kept, next)?;
        if running.awaited.is_some() {
            let sequence = running.sequence;
            paths[path][..kept].iter().try_for_each(|&token| self.batch.push(sequence, token))?;
        } else {
            self.take_path(id, path)?;
            self.keep_drafts(id, kept)?;
        }
        if let Some(running) = self.running.get_mut(&id) {
            (running.drafted, running.awaited) = (0, None);
        }
        self.batch.push(self.sequence(id)?, next)?;
        Ok(kept + 1)
    }

    /// A request's drafts, by path.
    fn drafts(&self, running: &Running) -> Result<Vec<Vec<u32>>, BatchError> {
        let of_path = |Path { sequence, drafted }| {
            let tokens = self.batch.tokens(sequence)?;
            Ok(tokens[tokens.len() - drafted..].to_vec())
        };
        running.all_paths().map(of_path).collect()
    }

    /// Forgets all of a request's drafts, also those whose rows a pre-emption has not taken.
    pub(super) fn forget_drafts(&mut self, id: RequestId) -> Result<(), BatchError> {
        if let Some(Running { awaited: Some(awaited), .. }) = self.running.get_mut(&id) {
            *awaited = vec![Vec::new()];
        }
        self.drop_drafts(id)
    }

    /// Forgets all that a request's sequences have.
    fn drop_drafts(&mut self, id: RequestId) -> Result<(), BatchError> {
        self.keep_paths(id, 0)?;
        self.keep_drafts(id, 0)
    }

    /// Forgets a request's drafts but for the first so many.
    fn keep_drafts(&mut self, id: RequestId, kept: usize) -> Result<(), BatchError> {
        let Some(running) = self.running.get_mut(&id).filter(|running| running.drafted > kept) else {
            return Ok(());
        };
        let len = self.batch.tokens(running.sequence)?.len() - running.drafted + kept;
        running.drafted = kept;
        self.batch.truncate(running.sequence, len)
    }

    /// Another request that is what this one, which is in the batch, is: for several continuations of a prompt.
    ///
    /// Drafts are forgotten.
    ///
    /// **Errors**: those of [`Batch::fork`]; [`BatchError::UnknownRequest`] also of one that waits.
    pub fn fork(&mut self, id: RequestId) -> Result<RequestId, BatchError> {
        let own = self.running.get(&id).cloned().ok_or(BatchError::UnknownRequest { id })?;
        let sequence = self.batch.fork(own.sequence)?;
        let fork = self.next_id();
        self.running.insert(fork, Running { sequence, paths: Vec::new(), ..own });
        [id, fork].into_iter().try_for_each(|id| self.forget_drafts(id))?;
        Ok(fork)
    }

    /// Ends a request, also one that waits or is in the midst of its prompt.
    pub fn finish(&mut self, id: RequestId) -> Result<(), BatchError> {
        if let Some(place) = self.waiting.iter().position(|(waiting, _)| *waiting == id) {
            self.waiting.remove(place);
            return Ok(());
        }
        let sequence = self.sequence(id)?;
        self.keep_paths(id, 0)?;
        self.running.remove(&id);
        self.batch.remove(sequence)
    }

    /// Works on the requests that there are. None if there is nothing to do until tokens are pushed or requests
    /// submitted.
    ///
    /// **Errors**: [`BatchError::Device`].
    pub fn step(&mut self) -> Result<Option<ScheduledStep<'_>>, BatchError> {
        if !self.waiting.is_empty() || self.running.values().any(|running| running.is_paused) {
            // What other paths have is theirs.
            self.not_computed().into_iter().try_for_each(|id| self.keep_paths(id, 0))?;
        }
        self.resume()?;
        self.admit()?;
        let (requests, work) = loop {
            let (requests, work) = self.plan()?;
            if work.is_empty() {
                return Ok(None);
            }
            if self.batch.pages_for(&work)? <= self.batch.free_pages() {
                break (requests, work);
            }
            let drafted = self.not_computed();
            if !drafted.is_empty() {
                drafted.into_iter().try_for_each(|id| self.drop_drafts(id))?;
                continue;
            }
            let mut active = self.running.iter().filter(|(_, running)| !running.is_paused).map(|(&id, _)| id);
            match (active.next(), active.next_back()) {
                (Some(_), Some(youngest)) => {
                    let Some(running) = self.running.get(&youngest) else { continue };
                    let sequence = running.sequence;
                    let has_rows = self.batch.pending(sequence)? == 0;
                    let drafts = if has_rows { Some(self.drafts(running)?) } else { None };
                    if let Some(running) = self.running.get_mut(&youngest) {
                        (running.is_paused, running.awaited) = (true, drafts.or(running.awaited.take()));
                    }
                    // Those that are computed too: a sequence that comes back has none.
                    self.drop_drafts(youngest)?;
                    self.batch.preempt(sequence)?;
                }
                // Alone a sequence finds its pages.
                _ => break (requests, work),
            }
        };
        let output = self.batch.step(&work)?;
        let given = std::iter::zip(requests, output.rows()).filter(|(_, rows)| !rows.is_empty());
        let mut requests: Vec<(RequestId, Range<usize>)> = Vec::new();
        for (id, rows) in given {
            match requests.last_mut() {
                // The paths of a tree are beside each other.
                Some((last, all)) if *last == id => all.end = rows.end,
                _ => requests.push((id, rows.clone())),
            }
        }
        requests.sort_by_key(|&(id, _)| id);
        for (id, _) in &requests {
            if let Some(running) = self.running.get_mut(id) {
                running.awaited = None;
            }
        }
        let tokens = work.iter().map(|work| work.tokens).sum();
        Ok(Some(ScheduledStep { requests, logits: output.logits(), tokens }))
    }

    /// Requests with drafts whose logits are not there yet.
    fn not_computed(&self) -> Vec<RequestId> {
        let is_pending = |running: &&Running| {
            running.drafted > 0 && self.batch.pending(running.sequence).is_ok_and(|pending| pending > 0)
        };
        self.running.iter().filter(|(_, running)| is_pending(running)).map(|(&id, _)| id).collect()
    }

    /// Lets requests go on that were pre-empted, the oldest first, as far as there are pages for their tokens.
    fn resume(&mut self) -> Result<(), BatchError> {
        let mut free = self.unclaimed()?;
        let mut is_idle = self.running.values().all(|running| running.is_paused);
        for running in self.running.values_mut().filter(|running| running.is_paused) {
            let tokens = self.batch.tokens(running.sequence)?.len();
            let needed = self.batch.options.pages_of(tokens + 1);
            if !is_idle && needed > free {
                break;
            }
            self.batch.reuse(running.sequence)?;
            free = free.saturating_sub(needed);
            (running.is_paused, is_idle) = (false, false);
        }
        Ok(())
    }

    /// Takes requests into the batch, the oldest first, as far as there are places, and pages for their prompts.
    fn admit(&mut self) -> Result<(), BatchError> {
        let mut free = self.unclaimed()?;
        while let Some((id, prompt)) = self.waiting.front() {
            let needed = self.batch.options.pages_of(prompt.tokens.len() + 1);
            let is_full = self.batch.sequences.len() >= self.batch.options.max_sequences;
            let waits = self.running.values().any(|running| running.is_paused);
            if is_full || waits || (needed > free && !self.running.is_empty()) {
                break;
            }
            let sequence = self.batch.add_prompt(prompt.clone())?;
            free = free.saturating_sub(needed);
            self.running.insert(*id, Running::new(sequence));
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Free pages that no pending token of the requests that go on will take.
    fn unclaimed(&self) -> Result<usize, BatchError> {
        let mut free = self.batch.free_pages();
        for running in self.running.values().filter(|running| !running.is_paused) {
            let tokens = self.batch.tokens(running.sequence)?.len();
            let held = self.batch.pages(running.sequence)?;
            free = free.saturating_sub(self.batch.options.pages_of(tokens).saturating_sub(held));
        }
        Ok(free)
    }

    /// Requests that have one token pending, and those that have several, drafts aside.
    fn pending(&self) -> Result<(Vec<Pending>, Vec<Pending>), BatchError> {
        let mut pending = Vec::new();
        for (&id, running) in self.running.iter().filter(|(_, running)| !running.is_paused) {
            let &Running { sequence, drafted, .. } = running;
            // Of one whose tokens are still to be chosen the drafts are computed too.
            let tokens = self.batch.pending(sequence)?.saturating_sub(drafted);
            pending.push(Pending { id, sequence, tokens, drafted });
        }
        Ok(pending.into_iter().filter(|own| own.tokens > 0).partition(|own| own.tokens == 1))
    }

    /// Whether a step may compute the next so many tokens of a request: the images in them, if there are any, are the
    /// step's first, and become those of `seeing`.
    fn may_see(
        &self,
        seeing: &mut Option<RequestId>,
        id: RequestId,
        tokens: usize,
    ) -> Result<bool, BatchError> {
        let sees = self.batch.sequence(self.sequence(id)?)?.sees(tokens);
        let is_free = !sees || seeing.is_none();
        if sees && is_free {
            *seeing = Some(id);
        }
        Ok(is_free)
    }

    /// Whether the prompt of a request in the batch has images.
    pub(super) fn has_images(&self, id: RequestId) -> Result<bool, BatchError> {
        Ok(self.batch.sequence(self.sequence(id)?)?.visual.is_some())
    }

    /// The work of a step, and whose it is. Drafts that it has no room for are forgotten: beside prompts all of them.
    fn plan(&mut self) -> Result<(Vec<RequestId>, Vec<Work>), BatchError> {
        let options = self.batch.options;
        let (ones, prompts) = self.pending()?;
        let (mut budget, mut severals) = (options.max_step_tokens, options.max_severals());
        let mut spare = self.spare(ones.len(), prompts.len());
        let (mut requests, mut work) = (Vec::new(), Vec::new());
        let mut seeing: Option<RequestId> = None;
        for Pending { id, sequence, drafted, .. } in ones {
            let wanted = drafted;
            let drafted = if severals > 0 { drafted.min(spare) } else { 0 };
            self.keep_drafts(id, drafted)?;
            if budget == 0 || !self.may_see(&mut seeing, id, 1)? {
                self.keep_paths(id, 0)?;
                continue;
            }
            spare -= drafted;
            budget -= 1 + drafted;
            severals -= usize::from(drafted > 0);
            requests.push(id);
            work.push(Work { id: sequence, tokens: 1 + drafted, logits: WorkLogits::All });
            let paths = self.running.get(&id).map_or(&[][..], |running| &running.paths);
            let (mut kept, is_whole) = (0, drafted == wanted);
            for &Path { sequence, drafted } in paths {
                let tokens = 1 + drafted;
                if !is_whole || severals == 0 || tokens > spare.min(budget) {
                    break;
                }
                (spare, budget, severals, kept) = (spare - tokens, budget - tokens, severals - 1, kept + 1);
                requests.push(id);
                work.push(Work { id: sequence, tokens, logits: WorkLogits::All });
            }
            self.keep_paths(id, kept)?;
        }
        for Pending { id, sequence, tokens: pending, .. } in prompts {
            let most = if severals > 0 { budget } else { budget.min(1) };
            let tokens = pending.min(most);
            // A prompt has its turn in chunks, or where there are none.
            if tokens == 0 || (tokens == 1 && severals == 0 && options.max_severals() > 0) {
                continue;
            }
            if !self.may_see(&mut seeing, id, tokens)? {
                continue;
            }
            budget -= tokens;
            severals -= usize::from(tokens > 1);
            // Of a chunk that is not the last nobody needs any.
            let logits = if tokens == pending { WorkLogits::Last } else { WorkLogits::Nothing };
            requests.push(id);
            work.push(Work { id: sequence, tokens, logits });
        }
        Ok((requests, work))
    }
}
