//! A policy over a batch: which requests a step works on.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use super::{Batch, BatchError, SequenceId, Work, WorkLogits};
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
    /// Requests none of whose tokens are pending any more, from the oldest on, each with the row of `logits` that its
    /// next token is to be chosen from.
    pub requests: Vec<(RequestId, usize)>,
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
///     for (request, row) in step.requests {
///         let token = choose(&logits[row * vocab..][..vocab]);
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
    batch: Batch,
    waiting: VecDeque<(RequestId, Vec<u32>)>,
    /// Those in the batch.
    running: BTreeMap<RequestId, Running>,
    last_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    sequence: SequenceId,
    /// Pre-empted.
    is_paused: bool,
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
        self.batch.check_prompt(prompt)?;
        let id = self.next_id();
        self.waiting.push_back((id, prompt.to_vec()));
        Ok(id)
    }

    fn next_id(&mut self) -> RequestId {
        self.last_id += 1;
        RequestId(self.last_id)
    }

    fn sequence(&self, id: RequestId) -> Result<SequenceId, BatchError> {
        self.running.get(&id).map(|running| running.sequence).ok_or(BatchError::UnknownRequest { id })
    }

    /// A request's tokens, its prompt and those that were pushed.
    pub fn tokens(&self, id: RequestId) -> Result<&[u32], BatchError> {
        match self.waiting.iter().find(|(waiting, _)| *waiting == id) {
            Some((_, prompt)) => Ok(prompt),
            None => self.batch.tokens(self.sequence(id)?),
        }
    }

    /// Appends the token that was chosen for a request.
    ///
    /// **Errors**: those of [`Batch::push`]: at [`BatchError::TooLong`] it has to be finished.
    /// [`BatchError::UnknownRequest`] also of one that waits.
    pub fn push(&mut self, id: RequestId, token: u32) -> Result<(), BatchError> {
        self.batch.push(self.sequence(id)?, token)
    }

    /// Another request that is what this one, which is in the batch, is: for several continuations of a prompt.
    ///
    /// **Errors**: those of [`Batch::fork`]; [`BatchError::UnknownRequest`] also of one that waits.
    pub fn fork(&mut self, id: RequestId) -> Result<RequestId, BatchError> {
        let own = self.running.get(&id).copied().ok_or(BatchError::UnknownRequest { id })?;
        let sequence = self.batch.fork(own.sequence)?;
        let fork = self.next_id();
        self.running.insert(fork, Running { sequence, ..own });
        Ok(fork)
    }

    /// Ends a request, also one that waits or is in the midst of its prompt.
    pub fn finish(&mut self, id: RequestId) -> Result<(), BatchError> {
        if let Some(place) = self.waiting.iter().position(|(waiting, _)| *waiting == id) {
            self.waiting.remove(place);
            return Ok(());
        }
        let sequence = self.sequence(id)?;
        self.running.remove(&id);
        self.batch.remove(sequence)
    }

    /// Works on the requests that there are. None if there is nothing to do until tokens are pushed or requests
    /// submitted.
    ///
    /// **Errors**: [`BatchError::Device`].
    pub fn step(&mut self) -> Result<Option<ScheduledStep<'_>>, BatchError> {
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
            let mut active = self.running.values_mut().filter(|running| !running.is_paused);
            match (active.next(), active.next_back()) {
                (Some(_), Some(youngest)) => {
                    youngest.is_paused = true;
                    self.batch.preempt(youngest.sequence)?;
                }
                // Alone a sequence finds its pages.
                _ => break (requests, work),
            }
        };
        let output = self.batch.step(&work)?;
        let rows = std::iter::zip(requests, output.rows());
        let mut requests: Vec<_> =
            rows.filter(|(_, rows)| !rows.is_empty()).map(|(id, rows)| (id, rows.start)).collect();
        requests.sort();
        let tokens = work.iter().map(|work| work.tokens).sum();
        Ok(Some(ScheduledStep { requests, logits: output.logits(), tokens }))
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
        while let Some((_, prompt)) = self.waiting.front() {
            let needed = self.batch.options.pages_of(prompt.len() + 1);
            let is_full = self.batch.sequences.len() >= self.batch.options.max_sequences;
            let waits = self.running.values().any(|running| running.is_paused);
            if is_full || waits || (needed > free && !self.running.is_empty()) {
                break;
            }
            let sequence = self.batch.add(prompt)?;
            free = free.saturating_sub(needed);
            if let Some((id, _)) = self.waiting.pop_front() {
                self.running.insert(id, Running { sequence, is_paused: false });
            }
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

    /// The work of a step, and whose it is.
    fn plan(&self) -> Result<(Vec<RequestId>, Vec<Work>), BatchError> {
        let options = &self.batch.options;
        let mut pending = Vec::new();
        for (&id, running) in self.running.iter().filter(|(_, running)| !running.is_paused) {
            pending.push((id, running.sequence, self.batch.pending(running.sequence)?));
        }
        let (ones, prompts): (Vec<_>, Vec<_>) =
            pending.into_iter().filter(|&(.., tokens)| tokens > 0).partition(|&(.., tokens)| tokens == 1);
        let (mut budget, mut severals) = (options.max_step_tokens, options.max_severals());
        let (mut requests, mut work) = (Vec::new(), Vec::new());
        for (id, sequence, pending) in ones.into_iter().chain(prompts) {
            let most = if severals > 0 { budget } else { budget.min(1) };
            let tokens = pending.min(most);
            // A prompt has its turn in chunks, or where there are none.
            if tokens == 0 || (tokens == 1 && pending > 1 && severals == 0 && options.max_severals() > 0) {
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
