//! The thread that owns the batch: requests come by a channel, tokens go back by one for each request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use warpforge::models::{BatchError, BatchOptions, BatchStats, Model, RequestId, Scheduler};
use warpforge::ops::sampling::{
    NO_TOKEN, PARAMS_LEN, Sampler, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem,
};
use warpforge::{DType, Error, Stream, Tensor, TensorView};

use crate::output::{Failure, note};

/// What a client asks the model for.
#[derive(Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Most tokens of the answer, at least 1; the prompt's and these fit into the batch's capacity.
    pub max_tokens: usize,
    pub sampling: SamplingParams,
}

/// What comes back.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Token(u32),
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
    pub first_tokens: u64,
    pub first_token_seconds: f64,
    /// The last step went wrong.
    pub is_failing: bool,
}

enum Message {
    Request(Active),
    Stop,
}

/// A request, and the way back.
struct Active {
    request: Request,
    /// A client that reads slowly leaves here what it has not read, at most `max_tokens`; one that has gone closes it.
    events: UnboundedSender<Event>,
    /// Its place among the requests that the server has.
    _place: OwnedSemaphorePermit,
    came: Instant,
    written: usize,
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
    /// Starts it with a batch of the model; `queue` requests wait at most.
    pub fn start(
        model: &Model,
        options: BatchOptions,
        queue: usize,
    ) -> Result<(Self, JoinHandle<()>), Failure> {
        let scheduler = Scheduler::new(model.batch(options)?);
        let chooser = Chooser::new(&scheduler)?;
        let (messages, receiver) = unbounded_channel();
        let counts = Arc::new(Mutex::new(Counts { batch: scheduler.batch().stats(), ..Counts::default() }));
        let places = Arc::new(Semaphore::new(options.max_sequences.saturating_add(queue)));
        let end_tokens = model.config().eos_token_ids.clone();
        let engine = Engine { messages, places, counts: counts.clone() };
        let work = Worker { scheduler, chooser, end_tokens, active: BTreeMap::new(), counts };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || work.run(receiver))?;
        Ok((engine, thread))
    }

    /// Hands a request over. Its receiver dropped is the request cancelled.
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, Refused> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Refused::Full)?;
        let (events, receiver) = unbounded_channel();
        let active = Active { request, events, _place: place, came: Instant::now(), written: 0 };
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
    chooser: Chooser,
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
            let outcome = self.step();
            lock(&self.counts).is_failing = outcome.is_err();
            if let Err(error) = outcome {
                note(format_args!("a step failed: {error}"));
                self.end_all(|| Event::Failed(error.to_string()));
            }
            self.publish();
        }
    }

    fn take(&mut self, active: Active) {
        match self.scheduler.submit(&active.request.prompt) {
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
        let Some(step) = self.scheduler.step()? else {
            return Err("requests that the scheduler has nothing to do for".into());
        };
        let requests = step.requests;
        let rows = requests.iter().filter_map(|(id, row)| {
            let own = self.active.get(id)?;
            Some((*row, SamplingParams { step: own.written as u64, ..own.request.sampling }))
        });
        let ids = self.chooser.choose(&stream, step.logits.view(), rows)?;
        for (request, row) in requests {
            self.write(request, ids[row]);
        }
        Ok(())
    }

    /// The next token of a request.
    fn write(&mut self, id: RequestId, token: u32) {
        let Some(own) = self.active.get_mut(&id) else { return };
        if token == NO_TOKEN {
            self.finish(id, Some(Event::Failed("no logit is a number".into())));
            return;
        }
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
            return;
        }
        // One that has gone is found before the next step.
        let _ = own.events.send(Event::Token(token));
        if is_last {
            self.finish(id, Some(Event::End(Finish::Length)));
        } else if let Err(error) = self.scheduler.push(id, token) {
            self.finish(id, Some(Event::Failed(error.to_string())));
        }
    }

    /// Ends a request; its pages are free before its client hears of it.
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
                Some(Event::Token(_)) | None => {}
            }
        }
        self.publish();
        if let Some(event) = event {
            let _ = own.events.send(event);
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

/// Chooses a token for each row of logits, by the row's own settings.
struct Chooser {
    problem: SamplingProblem,
    plan: Sampler,
    params: Tensor,
    ids: Tensor,
    rows: Vec<SamplingParams>,
    words: Vec<u32>,
}

impl Chooser {
    fn new(scheduler: &Scheduler) -> Result<Self, Error> {
        let (batch, model) = (scheduler.batch(), scheduler.batch().model());
        let rows = batch.options().max_logits.max(batch.options().max_sequences);
        let problem = SamplingProblem {
            features: SamplingFeatures::DRAWS,
            ..SamplingProblem::new(rows, model.config().decoder.vocab_size, DType::F32)
        };
        let plan = Sampler::plan(model.device(), problem)?;
        let params = Tensor::empty(batch.stream(), &[rows, PARAMS_LEN], DType::U32)?;
        let ids = Tensor::empty(batch.stream(), &[rows], DType::U32)?;
        Ok(Chooser { problem, plan, params, ids, rows: Vec::new(), words: Vec::new() })
    }

    /// The tokens of all rows; those that nobody asks for are of no account.
    fn choose(
        &mut self,
        stream: &Stream,
        logits: TensorView<'_>,
        asked: impl Iterator<Item = (usize, SamplingParams)>,
    ) -> Result<Vec<u32>, Error> {
        let rows = logits.shape()[0];
        self.rows.clear();
        self.rows.resize(rows, SamplingParams::default());
        asked.for_each(|(row, params)| self.rows[row] = params);
        self.words.resize(rows * PARAMS_LEN, 0);
        self.problem.write_params(&self.rows, &mut self.words)?;
        let mut params = self.params.view_mut().slice(0, 0..rows)?;
        params.write(stream, &self.words)?;
        let ids = self.ids.view_mut().slice(0, 0..rows)?;
        let args = SamplingArgs { params: Some(params.as_view()), ..SamplingArgs::new(logits, ids) };
        self.plan.run(stream, args)?;
        self.ids.view().slice(0, 0..rows)?.to_vec(stream)
    }
}
