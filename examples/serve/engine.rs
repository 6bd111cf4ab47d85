//! The thread that owns the batch: requests come by a channel, tokens go back by one for each request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use warpforge::models::{
    Adapter, BatchError, BatchOptions, BatchSampler, BatchStats, ChosenToken, DraftRequest, Model,
    ModelDraft, NgramDraft, Prompt, RequestId, RowSampling, Scheduler, TokenLogprobs,
};
use warpforge::ops::sampling::{NO_TOKEN, SamplingFeatures, SamplingParams};

use crate::output::{Failure, note};

/// Most tokens that a request gives a bias.
pub const MAX_BIAS: usize = 300;
/// Most probable tokens whose log-probabilities a request may ask for.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// What a client asks the model for.
#[derive(Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Which of the adapters.
    pub adapter: Option<usize>,
    /// Most tokens of the answer, at least 1; the prompt's and these fit into the batch's capacity.
    pub max_tokens: usize,
    pub sampling: SamplingParams,
    /// What is added to the logits of some tokens.
    pub bias: Vec<(u32, f32)>,
    pub logprobs: bool,
}

/// What comes back.
#[derive(Debug, PartialEq)]
pub enum Event {
    Token(u32, Option<TokenLogprobs>),
    /// The last one. A token that ends the text is not sent as one.
    End(Finish),
    /// The last one, with the reason.
    Failed(String),
    /// The last one: the server stops.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model has ended the text, with a token that counts.
    Stop,
    Length,
}

/// Where drafts come from.
#[derive(Debug)]
pub enum Drafts {
    /// What the text has repeated before.
    Ngrams(NgramDraft),
    Model(Box<ModelDraft>),
}

/// Why a request is not taken.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    Full,
    Stopped,
}

/// Counts, for metrics.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub batch: BatchStats,
    pub running: usize,
    pub waiting: usize,
    pub stopped: u64,
    pub cut: u64,
    pub cancelled: u64,
    pub failed: u64,
    pub prompt_tokens: u64,
    pub new_tokens: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    pub first_tokens: u64,
    pub first_token_seconds: f64,
    /// The last step went wrong, and so has every one that was tried since.
    pub is_failing: bool,
}

enum Message {
    Request(Active),
    /// If steps fail: to try another.
    Try,
    Stop,
}

/// A request, and the way back.
struct Active {
    request: Request,
    /// A client that reads slowly leaves here what it has not read, at most `max_tokens`; one that has gone closes it.
    events: UnboundedSender<Event>,
    /// Its place among the requests that the server has.
    place: OwnedSemaphorePermit,
    came: Instant,
    written: usize,
}

impl Active {
    /// What the token behind so many drafts is chosen by.
    fn params(&self, drafted: usize) -> SamplingParams {
        let Request { prompt, sampling, .. } = &self.request;
        let (step, prompt_len) = ((self.written + drafted) as u64, prompt.len() as u32);
        SamplingParams { step, prompt_len, ..*sampling }
    }

    /// How it is drafted for: no more than it will write before its last token.
    fn to_draft(&self, id: RequestId) -> DraftRequest<'_> {
        let most = (self.request.max_tokens - self.written).saturating_sub(1);
        DraftRequest { id, most, params: self.params(0), bias: &self.request.bias }
    }
}

/// The way to the engine. When all of them are gone it ends what it has, and stops.
#[derive(Clone, Debug)]
pub struct Engine {
    messages: UnboundedSender<Message>,
    /// What bounds the channel: one for each request that runs or waits.
    places: Arc<Semaphore>,
    counts: Arc<Mutex<Counts>>,
}

impl Engine {
    /// What requests may ask for in a batch of this capacity.
    pub fn features(capacity: usize) -> SamplingFeatures {
        SamplingFeatures {
            typical_p: true,
            history: capacity,
            bias: MAX_BIAS,
            logprobs: Some(MAX_TOP_LOGPROBS),
            ..SamplingFeatures::DRAWS
        }
    }

    /// Starts it with a batch of the model; `queue` requests wait at most.
    pub fn start(
        model: &Model,
        (options, adapters): (BatchOptions, &[&Adapter]),
        queue: usize,
        drafts: Drafts,
    ) -> Result<(Self, JoinHandle<()>), Failure> {
        let batch = model.batch_with(options, adapters)?;
        let sampler = BatchSampler::new(&batch, Self::features(options.capacity))?;
        let scheduler = Scheduler::new(batch);
        let (messages, receiver) = unbounded_channel();
        let counts = Arc::new(Mutex::new(Counts { batch: scheduler.batch().stats(), ..Counts::default() }));
        let places = options.max_sequences.saturating_add(queue).min(Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(places));
        let end_tokens = model.config().eos_token_ids.clone();
        let engine = Engine { messages, places, counts: counts.clone() };
        let work = Worker { scheduler, sampler, drafts, end_tokens, active: BTreeMap::new(), counts };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || work.run(receiver))?;
        Ok((engine, thread))
    }

    /// Hands a request over. Its receiver dropped is the request cancelled.
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, Refused> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Refused::Full)?;
        let (events, receiver) = unbounded_channel();
        let active = Active { request, events, place, came: Instant::now(), written: 0 };
        self.messages.send(Message::Request(active)).map_err(|_| Refused::Stopped)?;
        Ok(receiver)
    }

    /// Ends all requests, and the engine.
    pub fn stop(&self) {
        // If it has gone there is nothing to end.
        let _ = self.messages.send(Message::Stop);
    }

    pub fn is_running(&self) -> bool {
        !self.messages.is_closed()
    }

    /// Whether steps fail. They are tried anew then, so that who asks again hears if that has passed.
    pub fn is_failing(&self) -> bool {
        let is_failing = lock(&self.counts).is_failing;
        if is_failing {
            // If it has gone there is nothing to try.
            let _ = self.messages.send(Message::Try);
        }
        is_failing
    }

    pub fn counts(&self) -> Counts {
        lock(&self.counts).clone()
    }
}

/// Counts are whole at any time, also where a thread that held them has panicked.
fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Worker {
    scheduler: Scheduler,
    sampler: BatchSampler,
    drafts: Drafts,
    end_tokens: Vec<u32>,
    active: BTreeMap<RequestId, Active>,
    counts: Arc<Mutex<Counts>>,
}

impl Worker {
    fn run(mut self, mut messages: UnboundedReceiver<Message>) {
        loop {
            let first = if self.active.is_empty() {
                match messages.blocking_recv() {
                    Some(message) => Some(message),
                    None => return,
                }
            } else {
                None
            };
            let mut next = first.or_else(|| messages.try_recv().ok());
            while let Some(message) = next {
                match message {
                    Message::Request(active) => self.take(active),
                    Message::Try => {}
                    Message::Stop => {
                        self.end_all(|| Event::Stopped);
                        // What has come behind it.
                        messages.close();
                        while let Ok(message) = messages.try_recv() {
                            if let Message::Request(active) = message {
                                let _ = active.events.send(Event::Stopped);
                            }
                        }
                        return;
                    }
                }
                next = messages.try_recv().ok();
            }
            let gone: Vec<_> =
                self.active.iter().filter(|(_, own)| own.events.is_closed()).map(|(&id, _)| id).collect();
            for id in gone {
                lock(&self.counts).cancelled += 1;
                self.finish(id, None);
            }
            self.go_on();
            self.publish();
        }
    }

    /// A step, and where it fails, or has failed and nothing came since, one of nobody's, which tells whether the next
    /// requests will be served: what failed may have gone with those that were answered so.
    fn go_on(&mut self) {
        let was_failing = lock(&self.counts).is_failing && self.active.is_empty();
        let outcome = self.step();
        if let Err(error) = &outcome {
            note(format_args!("a step failed: {error}"));
            lock(&self.counts).is_failing = true;
            self.end_all(|| Event::Failed(error.to_string()));
        }
        let is_failing = (was_failing || outcome.is_err()) && self.probe().is_err();
        lock(&self.counts).is_failing = is_failing;
    }

    /// A request of one token, of nobody's.
    fn probe(&mut self) -> Result<(), Failure> {
        let id = self.scheduler.submit(&[0])?;
        let outcome = self.scheduler.step().map(|_| ());
        self.scheduler.finish(id)?;
        Ok(outcome?)
    }

    fn take(&mut self, active: Active) {
        let Request { prompt, adapter, .. } = &active.request;
        match self.scheduler.submit_prompt(Prompt { adapter: *adapter, ..prompt[..].into() }) {
            Ok(id) => {
                lock(&self.counts).prompt_tokens += active.request.prompt.len() as u64;
                self.active.insert(id, active);
            }
            Err(error) => {
                lock(&self.counts).failed += 1;
                let _ = active.events.send(Event::Failed(error.to_string()));
            }
        }
    }

    /// One step for all, a token for each that has none pending.
    fn step(&mut self) -> Result<(), Failure> {
        if self.active.is_empty() {
            return Ok(());
        }
        let stream = self.scheduler.batch().stream().clone();
        let Some(requests) = self.scheduler.step()?.map(|step| step.requests) else {
            return Err("requests that the scheduler has nothing to do for".into());
        };
        let logits = self.scheduler.batch().logits()?;
        let mut rows = Vec::new();
        for (id, places) in &requests {
            let Some(own) = self.active.get(id) else { continue };
            let Request { bias, logprobs, .. } = &own.request;
            let tokens = self.scheduler.tokens(*id)?;
            // Without the drafts, which are known behind each of their rows.
            let known = tokens.len() + 1 - places.len();
            for (drafted, row) in places.clone().enumerate() {
                let params = own.params(drafted);
                let history = &tokens[..known + drafted];
                rows.push(RowSampling { row, params, history, bias, allowed: None, logprobs: *logprobs });
            }
        }
        let mut chosen = self.sampler.choose(&stream, logits.view(), &rows)?.into_iter();
        drop(rows);
        for (id, places) in requests {
            if self.active.contains_key(&id) {
                let chosen: Vec<ChosenToken> = chosen.by_ref().take(places.len()).collect();
                self.write(id, chosen);
            }
        }
        if let Drafts::Model(draft) = &mut self.drafts {
            let running = self.active.iter().filter(|(_, own)| own.written > 0);
            let requests: Vec<_> = running.map(|(&id, own)| own.to_draft(id)).collect();
            draft.draft(&mut self.scheduler, &requests)?;
        }
        Ok(())
    }

    /// What was chosen for a request: behind its last token, and behind each draft.
    fn write(&mut self, id: RequestId, chosen: Vec<ChosenToken>) {
        let tokens: Vec<u32> = chosen.iter().map(|choice| choice.token).collect();
        let taken = match self.scheduler.accept(id, &tokens) {
            Ok(taken) => taken,
            Err(error) => {
                let is_nan = tokens.contains(&NO_TOKEN);
                let reason = if is_nan { "no logit is a number".into() } else { error.to_string() };
                self.finish(id, Some(Event::Failed(reason)));
                return;
            }
        };
        {
            let mut counts = lock(&self.counts);
            counts.drafted_tokens += tokens.len() as u64 - 1;
            counts.accepted_tokens += taken as u64 - 1;
        }
        for ChosenToken { token, logprobs } in chosen.into_iter().take(taken) {
            if !self.write_token(id, token, logprobs) {
                return;
            }
        }
        let (Some(own), Drafts::Ngrams(draft)) = (self.active.get(&id), &self.drafts) else { return };
        let most = draft.tokens.min(own.to_draft(id).most);
        if most > 0
            && let Ok(tokens) = self.scheduler.tokens(id)
        {
            let drafts = NgramDraft { tokens: most, ..*draft }.draft(tokens).to_vec();
            // One that cannot be drafted is chosen as any other.
            let _ = self.scheduler.draft(id, &drafts);
        }
    }

    /// The next token of a request, whose last one it may be. Whether it goes on.
    fn write_token(&mut self, id: RequestId, token: u32, logprobs: Option<TokenLogprobs>) -> bool {
        let Some(own) = self.active.get_mut(&id) else { return false };
        own.written += 1;
        let is_last = own.written == own.request.max_tokens;
        {
            let mut counts = lock(&self.counts);
            counts.new_tokens += 1;
            if own.written == 1 {
                counts.first_tokens += 1;
                counts.first_token_seconds += own.came.elapsed().as_secs_f64();
            }
        }
        if self.end_tokens.contains(&token) {
            self.finish(id, Some(Event::End(Finish::Stop)));
            return false;
        }
        // One that has gone is found before the next step.
        let _ = own.events.send(Event::Token(token, logprobs));
        if is_last {
            self.finish(id, Some(Event::End(Finish::Length)));
        }
        !is_last
    }

    /// Ends a request; its pages and its place are free before its client hears of it.
    fn finish(&mut self, id: RequestId, event: Option<Event>) {
        let Some(own) = self.active.remove(&id) else { return };
        let outcome: Result<(), BatchError> = self.scheduler.finish(id);
        if let Err(error) = outcome {
            note(format_args!("{id} cannot be ended: {error}"));
        }
        {
            let mut counts = lock(&self.counts);
            match event {
                Some(Event::End(Finish::Stop)) => counts.stopped += 1,
                Some(Event::End(Finish::Length)) => counts.cut += 1,
                Some(Event::Failed(_)) => counts.failed += 1,
                Some(Event::Stopped) => counts.cancelled += 1,
                Some(Event::Token(..)) | None => {}
            }
        }
        self.publish();
        let Active { events, place, .. } = own;
        drop(place);
        if let Some(event) = event {
            let _ = events.send(event);
        }
    }

    fn end_all(&mut self, event: impl Fn() -> Event) {
        while let Some(&id) = self.active.keys().next() {
            self.finish(id, Some(event()));
        }
    }

    fn publish(&self) {
        let mut counts = lock(&self.counts);
        counts.batch = self.scheduler.batch().stats();
        counts.running = self.scheduler.num_running();
        counts.waiting = self.scheduler.num_waiting();
    }
}
