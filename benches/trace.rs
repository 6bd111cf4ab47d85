//! Requests that come and go, over whole models with random weights: a stated trace through [`Scheduler`], and what
//! mixed steps, the batch itself and sampling cost. `cargo bench --bench trace -- --help`.
//!
//! The trace is made of a seed: numbers of tokens of prompts and answers are log-normal, requests arrive at once or as
//! a Poisson process, some prompts begin as others do. An answer ends at its number of tokens, whatever they are. Times
//! are the host's, from a request's arrival until its token is there. A request that waits for a place waits in its
//! time to the first token.
//!
//! The host's share of a step is the time from its start until its last launch is enqueued, the sampler's, over the
//! time until its tokens are taken account of: no work of another step is in the stream meanwhile. On the CPU work is
//! done when it is enqueued, so that the share says nothing there.

#[path = "common/named.rs"]
mod named;

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use warpforge::models::{
    Batch, BatchError, BatchOptions, BatchSampler, Model, RequestId, RowSampling, Scheduler, SequenceId,
    SessionOptions, SharedPrefix, Work,
};
use warpforge::ops::sampling::{
    PARAMS_LEN, Sampler, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem,
};
use warpforge::{DType, DeviceChoice, Error, Invariance, Tensor};

use named::Named;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Without a mode, the trace.
#[derive(Parser)]
struct Options {
    /// Names of files in assets/configs, without .json; behind a colon a scheme: qwen3-coder-next:fp8; behind an @
    /// layers, if not all.
    #[arg(long, value_delimiter = ',', default_value = "qwen3-0.6b")]
    model: Vec<String>,
    /// cuda or cpu.
    #[arg(long, default_value = "cuda")]
    device: DeviceChoice,
    /// Type of weights and activations.
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Requests of the trace.
    #[arg(long, default_value_t = 256)]
    requests: usize,
    /// Mean and standard deviation of the logarithm of a prompt's tokens.
    #[arg(long, num_args = 2, value_names = ["MU", "SIGMA"], default_values_t = [5.5, 0.8])]
    prompt: Vec<f64>,
    /// The same of an answer's.
    #[arg(long, num_args = 2, value_names = ["MU", "SIGMA"], default_values_t = [4.5, 0.6])]
    output: Vec<f64>,
    /// Requests a second, on average; 0: all are there at the beginning.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Share of the prompts that begin with one of four prefixes of --prefix tokens, before tokens of their own.
    #[arg(long, default_value_t = 0.0)]
    shared: f64,
    /// Tokens of such a prefix.
    #[arg(long, default_value_t = 256)]
    prefix: usize,
    /// Share of the requests that take the most likely token; the others draw, each by its own settings.
    #[arg(long, default_value_t = 0.5)]
    greedy: f64,
    /// Seed of the trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Sequences in the batch: of the trace most of them, of the modes those that decode.
    #[arg(long, default_value_t = 32)]
    sequences: usize,
    /// Tokens of a prompt's chunk in the modes, and of the trace's steps beside one for each sequence.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
    /// Most tokens of a request in the trace, and keys of a sequence in the modes.
    #[arg(long, default_value_t = 2048)]
    context: usize,
    /// Seconds after which the trace stops, with what there is; and of each mode's repetitions.
    #[arg(long, num_args = 2, value_names = ["TRACE", "MODE"], default_values_t = [45.0, 2.0])]
    seconds: Vec<f64>,
    /// By kernels that give a sequence the same bits alone and among others.
    #[arg(long)]
    invariant: bool,
    /// A step of a prompt's chunk and decode tokens, against the sum of one of each.
    #[arg(long)]
    mixed: bool,
    /// A decode step of a batch, against a session's.
    #[arg(long = "static")]
    fixed: bool,
    /// The choice of 128 tokens, each by its own settings, against all by the same.
    #[arg(long)]
    sampling: bool,
    /// A decode step of sequences that share a prefix, read once for each and once for all.
    #[arg(long)]
    cascade: bool,
    /// For it the sequences, and the tokens of the prefix; each has 256 of its own besides.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SEQUENCESxTOKENS",
        default_values = ["32x2048", "32x8192", "128x2048", "128x8192"]
    )]
    behind: Vec<Behind>,
    /// All modes, and the trace.
    #[arg(long)]
    all: bool,
    /// Adds a JSON line for each model and mode to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Of cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Sequences that share a prefix.
#[derive(Clone, Copy)]
struct Behind {
    sequences: usize,
    prefix: usize,
}

impl std::str::FromStr for Behind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = text.split_once('x').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (sequences, prefix) = sizes.ok_or("expected two numbers, as in 32x2048")?;
        Ok(Behind { sequences, prefix })
    }
}

/// SplitMix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, without 1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    fn log_normal(&mut self, of: &[f64]) -> usize {
        (of[0] + of[1] * self.normal()).exp().round().max(1.0) as usize
    }

    fn token(&mut self, vocab: usize) -> u32 {
        (self.next() % vocab as u64) as u32
    }
}

/// A request of the trace.
struct Arrival {
    at: f64,
    prompt: Vec<u32>,
    output: usize,
    params: SamplingParams,
}

/// The requests, in the order of their arrival.
fn trace(options: &Options, vocab: usize) -> VecDeque<Arrival> {
    let mut random = Random(options.seed);
    let prefixes: Vec<Vec<u32>> =
        (0..4).map(|_| (0..options.prefix).map(|_| random.token(vocab)).collect()).collect();
    let mut at = 0.0;
    let mut arrival = || {
        if options.rate > 0.0 {
            at -= (1.0 - random.uniform()).ln() / options.rate;
        }
        let (tokens, output) = (random.log_normal(&options.prompt), random.log_normal(&options.output));
        let output = output.min(options.context / 2);
        let mut prompt = if random.uniform() < options.shared {
            prefixes[random.next() as usize % 4].clone()
        } else {
            Vec::new()
        };
        prompt.extend((0..tokens).map(|_| random.token(vocab)));
        prompt.truncate((options.context - output).max(1));
        let is_greedy = random.uniform() < options.greedy;
        let params = settings(&mut random);
        let params = if is_greedy { SamplingParams::default() } else { params };
        Arrival { at, prompt, output, params }
    };
    (0..options.requests).map(|_| arrival()).collect()
}

/// Of a request that draws.
fn settings(random: &mut Random) -> SamplingParams {
    SamplingParams {
        temperature: (0.5 + random.uniform()) as f32,
        top_k: Some(20 + (random.next() % 80) as u32),
        top_p: (0.8 + 0.2 * random.uniform()) as f32,
        min_p: (0.05 * random.uniform()) as f32,
        seed: random.next(),
        ..SamplingParams::default()
    }
}

fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let last = samples.len().saturating_sub(1);
    samples.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Of a batch for the trace, and for the modes: room for all sequences at their longest.
fn batch_options(options: &Options) -> BatchOptions {
    // A prompt beside those that decode.
    let max_sequences = options.sequences + 1;
    let capacity = options.context + options.chunk;
    let base = BatchOptions::default();
    BatchOptions {
        max_sequences,
        max_step_tokens: options.sequences + options.chunk,
        max_logits: max_sequences,
        capacity,
        pages: max_sequences * capacity.div_ceil(base.page_tokens),
        ..base
    }
}

/// A request that is being answered.
struct Active {
    output: usize,
    params: SamplingParams,
    /// When its last token came, at first when it arrived itself, and how many there are.
    last: f64,
    tokens: usize,
}

/// What steps took, in seconds: until the last launch was enqueued, and altogether.
#[derive(Default)]
struct Steps {
    host: Vec<f64>,
    whole: Vec<f64>,
}

impl Steps {
    fn share(&self) -> f64 {
        self.host.iter().sum::<f64>() / self.whole.iter().sum::<f64>()
    }
}

/// What a trace came to.
#[derive(Default)]
struct Replay {
    seconds: f64,
    finished: usize,
    prompt_tokens: usize,
    output_tokens: usize,
    first: Vec<f64>,
    between: Vec<f64>,
    all: Steps,
    /// Those that decode alone, for all places.
    full: Steps,
    pages: usize,
}

/// Answers requests as they arrive, until there are none, or for so many seconds.
fn replay(
    scheduler: &mut Scheduler,
    sampler: &mut BatchSampler,
    mut arrivals: VecDeque<Arrival>,
    (places, seconds): (usize, f64),
) -> Result<Replay, Failure> {
    let stream = scheduler.batch().stream().clone();
    let mut active: BTreeMap<RequestId, Active> = BTreeMap::new();
    let mut own = Replay::default();
    let start = Instant::now();
    while own.seconds < seconds && !(arrivals.is_empty() && active.is_empty()) {
        let began = Instant::now();
        let now = start.elapsed().as_secs_f64();
        while let Some(next) = arrivals.pop_front_if(|next| next.at <= now) {
            let Arrival { at, prompt, output, params } = next;
            let id = scheduler.submit(&prompt)?;
            own.prompt_tokens += prompt.len();
            active.insert(id, Active { output, params, last: at, tokens: 0 });
        }
        let Some(step) = scheduler.step()? else {
            own.seconds = start.elapsed().as_secs_f64();
            let Some(next) = arrivals.front() else { continue };
            std::thread::sleep(Duration::from_secs_f64((next.at - own.seconds).clamp(0.0, 0.01)));
            continue;
        };
        let params = |id: &RequestId| {
            let of = active.get(id).ok_or("a request that nobody made")?;
            Ok::<_, Failure>(SamplingParams { step: of.tokens as u64, ..of.params })
        };
        let rows = step.requests.iter().map(|(id, rows)| {
            let (row, params) = (rows.start, params(id)?);
            Ok::<_, Failure>(RowSampling { row, params, ..RowSampling::default() })
        });
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let (requests, tokens) = (step.requests, step.tokens);
        let chosen = if rows.is_empty() {
            own.all.host.push(began.elapsed().as_secs_f64());
            stream.synchronize()?;
            Vec::new()
        } else {
            sampler.enqueue(&stream, step.logits.view(), &rows)?;
            own.all.host.push(began.elapsed().as_secs_f64());
            sampler.read(&stream, &rows)?
        };
        let now = start.elapsed().as_secs_f64();
        let stats = scheduler.batch().stats();
        own.pages = own.pages.max(stats.pages - stats.free_pages);
        let is_full = requests.len() == places && tokens == places;
        for ((id, _), chosen) in std::iter::zip(requests, chosen) {
            let Some(of) = active.get_mut(&id) else { continue };
            let times = if of.tokens == 0 { &mut own.first } else { &mut own.between };
            times.push(now - of.last);
            (of.last, of.tokens) = (now, of.tokens + 1);
            own.output_tokens += 1;
            if of.tokens < of.output {
                scheduler.push(id, chosen.token)?;
            } else {
                scheduler.finish(id)?;
                active.remove(&id);
                own.finished += 1;
            }
        }
        own.all.whole.push(began.elapsed().as_secs_f64());
        if is_full {
            own.full.host.extend(own.all.host.last());
            own.full.whole.extend(own.all.whole.last());
        }
        own.seconds = start.elapsed().as_secs_f64();
    }
    // What the time was too short for.
    active.into_keys().try_for_each(|id| scheduler.finish(id))?;
    Ok(own)
}

/// The trace, behind short requests of every number at a time, which load the kernels and record the steps.
fn run_trace(model: &Model, options: &Options) -> Result<Value, Failure> {
    let batch = model.batch(BatchOptions { max_sequences: options.sequences, ..batch_options(options) })?;
    let mut sampler = BatchSampler::new(&batch, SamplingFeatures::DRAWS)?;
    let mut scheduler = Scheduler::new(batch);
    let vocab = model.config().decoder.vocab_size;
    let mut random = Random(0);
    let warm = (0..2 * options.sequences).map(|index| Arrival {
        at: 0.0,
        prompt: (0..1 + 8 * index).map(|_| random.token(vocab)).take(options.context / 2).collect(),
        output: 4 + 2 * (index % options.sequences),
        params: settings(&mut random),
    });
    replay(&mut scheduler, &mut sampler, warm.collect(), (options.sequences, options.seconds[0]))?;
    let pool = model.device().pool();
    pool.reset_peaks();
    let before = scheduler.batch().stats();
    let arrivals = trace(options, vocab);
    let mut own = replay(&mut scheduler, &mut sampler, arrivals, (options.sequences, options.seconds[0]))?;
    let (after, memory) = (scheduler.batch().stats(), pool.stats());
    let rate = |tokens: usize| tokens as f64 / own.seconds;
    let (output, total) = (rate(own.output_tokens), rate(own.output_tokens + own.prompt_tokens));
    let of = |samples: &mut Vec<f64>| [0.5, 0.99].map(|share| 1e3 * quantile(samples, share));
    let (first, between) = (of(&mut own.first), of(&mut own.between));
    let full = own.full.whole.len();
    Ok(json!({
        "requests": options.requests, "finished": own.finished, "seconds": own.seconds,
        "prompt": options.prompt, "output": options.output, "rate": options.rate, "shared": options.shared,
        "greedy": options.greedy, "seed": options.seed, "sequences": options.sequences,
        "prompt_tokens": own.prompt_tokens, "output_tokens": own.output_tokens,
        "output_per_s": output, "total_per_s": total,
        "first_ms_p50": first[0], "first_ms_p99": first[1],
        "between_ms_p50": between[0], "between_ms_p99": between[1],
        "steps": after.steps - before.steps, "step_ms_p50": 1e3 * quantile(&mut own.all.whole.clone(), 0.5),
        "host_share": own.all.share(),
        "full_steps": full, "full_step_ms_p50": 1e3 * quantile(&mut own.full.whole.clone(), 0.5),
        "full_host_share": own.full.share(),
        "reused_tokens": after.reused_tokens - before.reused_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "peak_pages": own.pages, "pages": after.pages, "page_tokens": scheduler.batch().options().page_tokens,
        "peak_reserved_bytes": memory.peak_reserved_bytes, "peak_live_bytes": memory.peak_in_use_bytes,
        "reserved_over_live": memory.peak_reserved_bytes as f64 / memory.peak_in_use_bytes as f64,
    }))
}

/// A sequence of so many tokens, all computed.
fn read(batch: &mut Batch, prompt: &[u32]) -> Result<SequenceId, BatchError> {
    let id = batch.add(prompt)?;
    let most = batch.options().max_step_tokens;
    while batch.pending(id)? > 0 {
        let tokens = batch.pending(id)?.min(most);
        batch.step(&[Work::new(id, tokens)])?;
    }
    Ok(id)
}

/// The text of a sequence, another for each.
fn text(sequence: usize, tokens: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random(sequence as u64);
    (0..tokens).map(|_| random.token(vocab)).collect()
}

/// Most rounds of [`by_turns`]: recurrent states go on with each, and have room for so many at the default sizes.
const MAX_ROUNDS: usize = 100;

/// Each case's median in milliseconds, of calls by turns for so many seconds in all; the first two of each, which warm
/// up and record, are left out. A call returns what it took.
fn by_turns<const N: usize>(
    seconds: f64,
    mut call: impl FnMut(usize) -> Result<Duration, Failure>,
) -> Result<[f64; N], Failure> {
    let mut samples: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    let mut start = Instant::now();
    for round in 0..MAX_ROUNDS + 2 {
        if round == 2 {
            start = Instant::now();
        } else if round > 2 && start.elapsed().as_secs_f64() >= seconds {
            break;
        }
        for (which, samples) in samples.iter_mut().enumerate() {
            let time = call(which)?;
            if round >= 2 {
                samples.push(time.as_secs_f64() * 1e3);
            }
        }
    }
    Ok(samples.map(|mut samples| quantile(&mut samples, 0.5)))
}

/// Sequences of the full context, and the time of a step with a token of each: they are back at their lengths then.
struct Decoding {
    batch: Batch,
    ids: Vec<SequenceId>,
    prompt: Vec<u32>,
}

impl Decoding {
    fn new(model: &Model, options: &Options) -> Result<Self, Failure> {
        let vocab = model.config().decoder.vocab_size;
        // What is computed again is to be computed.
        let mut batch = model.batch(BatchOptions { prefix_cache: false, ..batch_options(options) })?;
        let texts = (0..options.sequences).map(|sequence| text(sequence, options.context, vocab));
        let ids = texts.map(|text| read(&mut batch, &text)).collect::<Result<_, _>>()?;
        Ok(Decoding { batch, ids, prompt: text(options.sequences, options.chunk, vocab) })
    }

    /// Sequences that share their first tokens, with pages for these once.
    fn behind(model: &Model, behind: Behind, shared_prefix: SharedPrefix) -> Result<Self, Failure> {
        let vocab = model.config().decoder.vocab_size;
        let Behind { sequences, prefix } = behind;
        let base = BatchOptions::default();
        // A token more than there are, in a page of its own.
        let capacity = prefix + OWN_TOKENS + 1;
        let [shared, own] = [prefix, OWN_TOKENS + 1].map(|tokens| tokens.div_ceil(base.page_tokens));
        let mut batch = model.batch(BatchOptions {
            max_sequences: sequences,
            max_step_tokens: base.max_step_tokens.max(sequences),
            max_logits: sequences,
            capacity,
            pages: shared + sequences * (own + 1),
            shared_prefix,
            ..base
        })?;
        let texts = (0..sequences)
            .map(|sequence| [text(sequences, prefix, vocab), text(sequence, OWN_TOKENS, vocab)].concat());
        let ids = texts.map(|text| read(&mut batch, &text)).collect::<Result<_, _>>()?;
        Ok(Decoding { batch, ids, prompt: Vec::new() })
    }

    /// A step with a prompt's chunk, if so, and a token of each sequence, if so.
    fn step(&mut self, has_prompt: bool, decodes: bool) -> Result<Duration, Failure> {
        let Self { batch, ids, prompt } = self;
        let mut work = Vec::new();
        if decodes {
            for &id in &*ids {
                batch.push(id, 1)?;
                work.push(Work::new(id, 1));
            }
        }
        let new = has_prompt.then(|| batch.add(prompt)).transpose()?;
        work.extend(new.map(|id| Work::new(id, prompt.len())));
        batch.stream().synchronize()?;
        let start = Instant::now();
        batch.step(&work)?;
        batch.stream().synchronize()?;
        let time = start.elapsed();
        new.map(|id| batch.remove(id)).transpose()?;
        if decodes {
            // A recurrent state goes on instead, while there is room.
            for &id in &*ids {
                match batch.truncate(id, batch.tokens(id)?.len() - 1) {
                    Ok(()) | Err(BatchError::Recurrent { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(time)
    }
}

fn run_mixed(model: &Model, options: &Options) -> Result<Value, Failure> {
    let mut decoding = Decoding::new(model, options)?;
    let call = |which| decoding.step(which != 1, which != 0);
    let [prompt, decode, mixed] = by_turns(options.seconds[1], call)?;
    Ok(json!({
        "chunk": options.chunk, "sequences": options.sequences, "keys": options.context,
        "prompt_ms": prompt, "decode_ms": decode, "mixed_ms": mixed, "mixed_over_sum": mixed / (prompt + decode),
    }))
}

fn run_static(model: &Model, options: &Options) -> Result<Value, Failure> {
    let mut decoding = Decoding::new(model, options)?;
    let vocab = model.config().decoder.vocab_size;
    let batch = options.sequences;
    let capacity = options.context + options.chunk;
    let mut session = model.session(SessionOptions { batch, capacity, ..SessionOptions::default() })?;
    for sequence in 0..batch {
        session.prefill(sequence, &text(sequence, options.context, vocab))?;
    }
    let ids = vec![1; batch];
    let mut fixed = || -> Result<Duration, Failure> {
        session.stream().synchronize()?;
        let start = Instant::now();
        session.decode(&ids)?;
        session.stream().synchronize()?;
        let time = start.elapsed();
        for sequence in 0..batch {
            if session.truncate(sequence, options.context).is_err() {
                break;
            }
        }
        Ok(time)
    };
    let call = |which| if which == 0 { fixed() } else { decoding.step(false, true) };
    let [fixed, of_batch] = by_turns(options.seconds[1], call)?;
    Ok(json!({
        "sequences": batch, "keys": options.context,
        "session_ms": fixed, "batch_ms": of_batch, "batch_over_session": of_batch / fixed,
    }))
}

/// Tokens that sequences have behind a prefix that they share.
const OWN_TOKENS: usize = 256;

fn run_cascade(model: &Model, options: &Options) -> Result<Value, Failure> {
    let mut line = json!({ "own_tokens": OWN_TOKENS });
    for &behind in &options.behind {
        let [mut each, mut once] = [
            Decoding::behind(model, behind, SharedPrefix::Off)?,
            Decoding::behind(model, behind, SharedPrefix::Always)?,
        ];
        let shared = |decoding: &Decoding| decoding.batch.stats().shared_prefix_steps;
        let before = shared(&once);
        let call = |which| if which == 0 { each.step(false, true) } else { once.step(false, true) };
        let [of_each, of_once] = by_turns(options.seconds[1], call)?;
        if shared(&each) != 0 || shared(&once) == before {
            return Err("a prefix that was not read as it was to be".into());
        }
        let name = format!("{}x{}", behind.sequences, behind.prefix);
        line[format!("{name}_off_ms")] = of_each.into();
        line[format!("{name}_on_ms")] = of_once.into();
        line[format!("{name}_on_over_off")] = (of_once / of_each).into();
    }
    Ok(line)
}

/// Rows of the comparison of settings.
const ROWS: usize = 128;
/// Runs that are timed at a time.
const RUNS: usize = 16;

fn run_sampling(model: &Model, options: &Options) -> Result<Value, Failure> {
    let (device, vocab) = (model.device(), model.config().decoder.vocab_size);
    let stream = device.stream()?;
    let mut random = Random(options.seed);
    let logits: Vec<f32> = (0..ROWS * vocab).map(|_| 4.0 * random.normal() as f32).collect();
    let logits = Tensor::from_slice(&stream, &[ROWS, vocab], &logits)?;
    let mut ids = Tensor::empty(&stream, &[ROWS], DType::U32)?;
    let features = SamplingFeatures::DRAWS;
    let problem = SamplingProblem { rows: ROWS, vocab, dtype: DType::F32, features };
    let plan = Sampler::plan(device, problem)?;
    let of_all = settings(&mut random);
    let same = (0..ROWS).map(|_| SamplingParams { seed: random.next(), ..of_all }).collect();
    let different = (0..ROWS).map(|_| settings(&mut random)).collect();
    let tables = [same, different].map(|rows: Vec<SamplingParams>| {
        let mut words = vec![0; ROWS * PARAMS_LEN];
        problem.write_params(&rows, &mut words)?;
        Tensor::from_slice(&stream, &[ROWS, PARAMS_LEN], &words)
    });
    let tables = tables.into_iter().collect::<Result<Vec<_>, Error>>()?;
    let call = |which: usize| -> Result<Duration, Failure> {
        stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..RUNS {
            let args = SamplingArgs::new(logits.view(), ids.view_mut());
            plan.run(&stream, SamplingArgs { params: Some(tables[which].view()), ..args })?;
        }
        stream.synchronize()?;
        Ok(start.elapsed() / RUNS as u32)
    };
    let [same, different] = by_turns(options.seconds[1], call)?;
    Ok(json!({
        "rows": ROWS, "vocab": vocab, "same_ms": same, "different_ms": different,
        "different_over_same": different / same,
    }))
}

fn main() -> Result<(), Failure> {
    let options = Options::parse();
    let invariance = if options.invariant { Invariance::Batch } else { Invariance::None };
    let device = options.device.open()?.with_invariance(invariance);
    let any = options.mixed || options.fixed || options.sampling || options.cascade;
    type Mode = fn(&Model, &Options) -> Result<Value, Failure>;
    let modes: [(&str, bool, Mode); 5] = [
        ("trace", !any, run_trace),
        ("mixed", options.mixed, run_mixed),
        ("static", options.fixed, run_static),
        ("sampling", options.sampling, run_sampling),
        ("cascade", options.cascade, run_cascade),
    ];
    for name in &options.model {
        let Named { config, quantise } = Named::new(name)?;
        let model = Model::random_quantised(&device, config, options.dtype, quantise, 1)?;
        for (mode, is_wanted, run) in modes {
            if !is_wanted && !options.all {
                continue;
            }
            let mut line = run(&model, &options)?;
            let bits = if options.invariant { ", the same bits" } else { "" };
            println!("{name} {mode}, {} {}{bits}", device.describe(), options.dtype);
            for (key, value) in line.as_object().into_iter().flatten() {
                let value = value.as_f64().filter(|_| value.is_f64()).map(|value| format!("{value:.4}"));
                println!("  {key:<24} {}", value.unwrap_or_else(|| line[key].to_string()));
            }
            let Some(path) = &options.json else { continue };
            line["model"] = name.as_str().into();
            line["mode"] = mode.into();
            line["device"] = device.describe().into();
            line["invariant"] = options.invariant.into();
            line["dtype"] = options.dtype.name().into();
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
            writeln!(file, "{line}")?;
        }
    }
    Ok(())
}
