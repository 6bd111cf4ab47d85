//! Sequences that come and go: one forward pass for any mix of prompt chunks and decode tokens, over caches in pages.
//!
//! A sequence is a list of tokens, of which the first so many are *computed*: their keys and values are in the caches.
//! The others are *pending*. A step computes some pending tokens of some sequences, so that a prompt in chunks, a
//! decode step, several drafted tokens and a sequence that lost its pages are all the same.

mod draft;
mod error;
mod inputs;
mod options;
mod pages;
mod sampler;
mod scheduler;
mod work;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use abi::DType;

use super::config::DecoderConfig;
use super::decoder::{DecoderBlock, LogitArgs};
use super::layers::{Cache, Group, GroupPhase, Keys, Phase, Span, Step};
use super::recording::Recording;
use super::{LogitRows, Model};
use host::ops::rope::RopeTables;
use host::{Error, OptimizationReport, Stream, Tensor, nvtx};
use inputs::{Filled, Inputs, NOWHERE};
use pages::{Pages, Prefix};

pub use draft::NgramDraft;
pub use error::BatchError;
pub use options::BatchOptions;
pub use sampler::{BatchSampler, ChosenToken, RowSampling, TokenLogprobs};
pub use scheduler::{RequestId, ScheduledStep, Scheduler};
pub use work::{BatchStats, SequenceId, StepOutput, Work, WorkLogits};

const OP: &str = "Batch";

/// Groups of a step: sequences with one token, and those with several.
const ONE: usize = 0;
const SEVERAL: usize = 1;

/// A sequence's tokens, and where they are.
#[derive(Clone, Debug)]
struct Sequence {
    tokens: Vec<u32>,
    /// Tokens that the caches have, from the first on.
    computed: usize,
    /// Pages with room for them, and perhaps more.
    pages: Vec<u32>,
    /// The beginnings that end with its full pages.
    prefixes: Vec<Prefix>,
    /// Where the state is.
    state: usize,
}

/// Sequences that come and go, in one forward pass each step.
///
/// **A sequence's logits** are those that it has alone in a [`Session`](super::Session), within rounding: kernels are
/// chosen by numbers of rows, so that last bits depend on what else is in a step. Nothing else of the other sequences
/// does.
/// **Pages** are taken by steps, as tokens need them. A fork shares all pages of its sequence; who first writes to a
/// page that others hold, which can only be the last, gets a copy of it. Full pages stay known by their tokens: a
/// sequence that begins with them takes them as they are, also after those that computed them are gone, until their
/// room is wanted (least recently used first).
/// **Recurrent states** (delta nets) have a slot for each sequence. There is one state, that behind all computed
/// tokens, so that beginnings are not found again: each sequence computes all of its tokens, but for forks.
/// **Pre-emption** gives up a sequence's pages and keeps its tokens, which are pending again.
/// **Steps** with one token for each sequence are recorded as graphs on CUDA, one for each power of two of sequences,
/// and padded to it.
/// **Memory** is all taken when a batch is made; a step allocates nothing on the device.
///
/// ```no_run
/// # extern crate models as warpforge;
/// # use host::{Device, DType};
/// use warpforge::{Batch, BatchError, BatchOptions, Model, Work};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::load(&Device::cpu(), "Qwen3-0.6B".as_ref(), DType::F32, &mut |_| {})?;
/// let mut batch = model.batch(BatchOptions::default())?;
/// let (a, b) = (batch.add(&[9707, 11])?, batch.add(&[785, 6722, 315])?);
/// let logits = batch.step(&[Work::new(a, 2), Work::new(b, 3)])?.logits().to_host()?;
/// # let argmax = |_: &[f32]| 0;
/// batch.push(a, argmax(&logits[..logits.len() / 2]))?;
/// let c = batch.add(&[40, 1079])?;
/// batch.step(&[Work::new(a, 1), Work::new(c, 2)])?; // a decode token beside a prompt
/// batch.remove(b)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Batch {
    model: Model,
    options: BatchOptions,
    stream: Stream,
    block: DecoderBlock,
    ropes: RopeTables,
    /// Of each layer.
    caches: Vec<Cache>,
    is_recurrent: bool,
    inputs: Inputs,
    filled: Filled,
    /// `[rows, vocab]` f32.
    logits: Tensor,
    /// Rows of it that each work of the last step asked for.
    rows: Vec<Range<usize>>,
    /// Steps with one token for each sequence, by how many there are of them.
    recorded: BTreeMap<usize, Recording>,
    pages: Pages,
    sequences: BTreeMap<SequenceId, Sequence>,
    free_states: Vec<usize>,
    last_id: u64,
    stats: BatchStats,
}

impl Batch {
    pub(super) fn new(model: Model, options: BatchOptions) -> Result<Self, BatchError> {
        options.check()?;
        let BatchOptions { max_sequences, max_step_tokens: tokens, capacity, page_tokens, pages, .. } =
            options;
        let config = model.own_decoder();
        let &DecoderConfig { vocab_size, .. } = config;
        let (stream, dtype, logit_rows) = (model.device().stream()?, model.dtype(), options.logit_rows());
        let (ones, severals) = (options.max_ones(), options.max_severals());
        let one = GroupPhase {
            sequences: ones,
            seq: 1,
            tokens: ones,
            ragged: false,
            capacity,
            page_tokens: Some(page_tokens),
            pages,
        };
        let several = GroupPhase { sequences: severals, seq: tokens, tokens, ragged: true, ..one };
        let groups = if severals > 0 { vec![one, several] } else { vec![one] };
        let sizes: Vec<usize> = powers_of_two(tokens).collect();
        let phase = Phase {
            stream: &stream,
            config,
            dtype,
            tokens,
            sizes: &sizes,
            groups: &groups,
            logit_rows,
            chooses: true,
            rank: model.rank(),
        };
        let block = DecoderBlock::new(&phase, model.decoder())?;
        let cache = |mixer| Cache::new(mixer, &stream, dtype, [pages, page_tokens], max_sequences);
        let caches: Vec<Cache> =
            config.layers.iter().map(|layer| cache(&layer.mixer)).collect::<Result<_, _>>()?;
        let rope = &config.rope;
        let ropes = RopeTables::new(&stream, &rope.inv_freq()?, rope.attention_factor(), capacity)?;
        let inputs = Inputs::new(&stream, tokens, logit_rows, [ones, severals], options.pages_of(capacity))?;
        let logits = Tensor::empty(&stream, &[logit_rows, vocab_size], DType::F32)?;
        Ok(Batch {
            is_recurrent: !caches.iter().all(Cache::can_be_cropped),
            model,
            options,
            stream,
            block,
            ropes,
            caches,
            inputs,
            filled: Filled::default(),
            logits,
            rows: Vec::new(),
            recorded: BTreeMap::new(),
            pages: Pages::new(pages),
            sequences: BTreeMap::new(),
            free_states: (0..max_sequences).rev().collect(),
            last_id: 0,
            stats: BatchStats::default(),
        })
    }

    /// Its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The stream that all work of the batch runs on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its sizes.
    pub fn options(&self) -> BatchOptions {
        self.options
    }

    /// Its numbers.
    pub fn stats(&self) -> BatchStats {
        BatchStats {
            sequences: self.sequences.len(),
            pages: self.pages.len(),
            free_pages: self.pages.available(),
            cached_pages: self.pages.idle(),
            evicted_pages: self.pages.evictions(),
            ..self.stats
        }
    }

    /// Pages that no sequence holds.
    pub fn free_pages(&self) -> usize {
        self.pages.available()
    }

    /// Bytes of the caches.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(Cache::bytes).sum()
    }

    /// What the operators chose, for each number of rows that has plans of its own.
    pub fn optimization_reports(&self) -> Vec<OptimizationReport> {
        self.block.reports()
    }

    /// The sequences, from the oldest on.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.keys().copied()
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence, BatchError> {
        self.sequences.get(&id).ok_or(BatchError::Unknown { id })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, BatchError> {
        self.sequences.get_mut(&id).ok_or(BatchError::Unknown { id })
    }

    /// A sequence's tokens, computed and pending.
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32], BatchError> {
        Ok(&self.sequence(id)?.tokens)
    }

    /// How many of them are pending.
    pub fn pending(&self, id: SequenceId) -> Result<usize, BatchError> {
        let sequence = self.sequence(id)?;
        Ok(sequence.tokens.len() - sequence.computed)
    }

    /// Pages that a sequence holds, alone or with others.
    pub fn pages(&self, id: SequenceId) -> Result<usize, BatchError> {
        Ok(self.sequence(id)?.pages.len())
    }

    /// Pages that a step of this work would take.
    ///
    /// **Errors**: [`BatchError::Unknown`].
    pub fn pages_for(&self, work: &[Work]) -> Result<usize, BatchError> {
        let mut needed = 0;
        let mut writers = HashMap::new();
        for &Work { id, tokens, .. } in work {
            let sequence = self.sequence(id)?;
            needed += self.new_pages(sequence, tokens);
            if let Some(page) = self.written(sequence) {
                *writers.entry(page).or_insert(0) += 1;
            }
        }
        // The last one of its holders may keep it.
        let copies = writers.iter().map(|(&page, &writers)| writers.min(self.pages.holders(page) - 1));
        Ok(needed + copies.sum::<usize>())
    }

    /// Pages behind those that a sequence holds.
    fn new_pages(&self, sequence: &Sequence, tokens: usize) -> usize {
        self.options.pages_of(sequence.computed + tokens).saturating_sub(sequence.pages.len())
    }

    /// The page with some of a sequence's computed tokens that its next token goes to.
    fn written(&self, sequence: &Sequence) -> Option<u32> {
        let page_tokens = self.options.page_tokens;
        let index = sequence.computed / page_tokens;
        if sequence.computed.is_multiple_of(page_tokens) { None } else { sequence.pages.get(index).copied() }
    }

    /// A new sequence of these tokens, which are pending but for those that the prefix cache has: never all.
    ///
    /// **Errors**: [`BatchError::Empty`], [`BatchError::TooLong`], [`BatchError::OutOfSequences`], and
    /// [`Error::Invalid`] for a token that the model has not, or that stands for an image.
    pub fn add(&mut self, tokens: &[u32]) -> Result<SequenceId, BatchError> {
        self.check_prompt(tokens)?;
        let (state, tokens) = (self.take_state()?, tokens.to_vec());
        let sequence = Sequence { tokens, computed: 0, pages: Vec::new(), prefixes: Vec::new(), state };
        let id = self.insert(sequence);
        self.reuse(id)?;
        self.check_accounts();
        Ok(id)
    }

    fn check_prompt(&self, tokens: &[u32]) -> Result<(), BatchError> {
        if tokens.is_empty() {
            return Err(BatchError::Empty { what: "the prompt".into() });
        }
        self.model.config().decoder.check_ids(tokens)?;
        if let Some(vision) = &self.model.config().vision
            && let Some(place) =
                tokens.iter().position(|&id| id == vision.image_token || id == vision.video_token)
        {
            let got = format!("a placeholder of an image at {place}");
            return Err(Error::invalid(OP, "tokens", "text", got).into());
        }
        self.check_len(tokens.len())
    }

    fn check_len(&self, tokens: usize) -> Result<(), BatchError> {
        let capacity = self.options.capacity;
        if tokens <= capacity { Ok(()) } else { Err(BatchError::TooLong { tokens, capacity }) }
    }

    fn take_state(&mut self) -> Result<usize, BatchError> {
        self.free_states.pop().ok_or(BatchError::OutOfSequences { most: self.options.max_sequences })
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        self.last_id += 1;
        let id = SequenceId(self.last_id);
        self.sequences.insert(id, sequence);
        id
    }

    /// Takes what the prefix cache has of a sequence of which nothing is computed: whole pages from the first token on,
    /// never all tokens. Returns how many tokens that are. [`Self::add`] does it; it is for sequences that were
    /// pre-empted.
    pub fn reuse(&mut self, id: SequenceId) -> Result<usize, BatchError> {
        let Self { sequences, pages, options, .. } = self;
        let sequence = sequences.get_mut(&id).ok_or(BatchError::Unknown { id })?;
        if sequence.computed > 0 || self.is_recurrent || !options.prefix_cache {
            return Ok(0);
        }
        // Of a step that failed.
        sequence.pages.drain(..).rev().for_each(|page| pages.release(page));
        let mut before = Prefix::EMPTY;
        let most = sequence.tokens.len().saturating_sub(1) / options.page_tokens;
        for block in sequence.tokens.chunks_exact(options.page_tokens).take(most) {
            let Some((page, prefix)) = pages.find(before, block) else { break };
            pages.hold(page);
            sequence.pages.push(page);
            sequence.prefixes.push(prefix);
            before = prefix;
        }
        sequence.computed = sequence.pages.len() * options.page_tokens;
        self.stats.reused_tokens += sequence.computed as u64;
        Ok(sequence.computed)
    }

    /// Appends a token to a sequence: it is pending.
    ///
    /// **Errors**: [`BatchError::TooLong`], and [`Error::Invalid`] for a token that the model has not.
    pub fn push(&mut self, id: SequenceId, token: u32) -> Result<(), BatchError> {
        self.model.config().decoder.check_ids(&[token])?;
        self.check_len(self.sequence(id)?.tokens.len() + 1)?;
        self.sequence_mut(id)?.tokens.push(token);
        Ok(())
    }

    /// Another sequence that is what this one is; both go on from there.
    ///
    /// **Errors**: [`BatchError::OutOfSequences`]; [`BatchError::Device`] where a recurrent state cannot be copied.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, BatchError> {
        let mut sequence = self.sequence(id)?.clone();
        let state = self.take_state()?;
        // Not those that a step took which then failed.
        sequence.pages.truncate(self.options.pages_of(sequence.computed));
        if sequence.computed > 0 {
            for cache in &mut self.caches {
                if let Err(error) = cache.copy_state(&self.stream, (sequence.state, state)) {
                    self.free_states.push(state);
                    return Err(error.into());
                }
            }
        }
        sequence.pages.iter().for_each(|&page| self.pages.hold(page));
        let fork = self.insert(Sequence { state, ..sequence });
        self.check_accounts();
        Ok(fork)
    }

    /// Ends a sequence. Its full pages stay in the prefix cache.
    pub fn remove(&mut self, id: SequenceId) -> Result<(), BatchError> {
        let sequence = self.sequences.remove(&id).ok_or(BatchError::Unknown { id })?;
        self.free_states.push(sequence.state);
        // From the end, so that the beginning, without which nothing is found, is given up last.
        sequence.pages.iter().rev().for_each(|&page| self.pages.release(page));
        self.check_accounts();
        Ok(())
    }

    /// Gives up a sequence's pages and state: its tokens are all pending again. What of them is still in the prefix
    /// cache when it goes on, [`Self::reuse`] takes back.
    pub fn preempt(&mut self, id: SequenceId) -> Result<(), BatchError> {
        let sequence = self.sequences.get_mut(&id).ok_or(BatchError::Unknown { id })?;
        if sequence.computed > 0 {
            self.stats.preemptions += 1;
        }
        sequence.forget(&mut self.pages);
        self.check_accounts();
        Ok(())
    }

    /// Forgets a sequence's tokens from `len` on, as those that were drafted and not taken; a length beyond its own
    /// changes nothing.
    ///
    /// **Errors**: [`BatchError::Recurrent`] where a state would have to go back; [`BatchError::Empty`] for a length of
    /// 0.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<(), BatchError> {
        let is_recurrent = self.is_recurrent;
        let (page_tokens, pages) = (self.options.page_tokens, self.options.pages_of(len));
        let sequence = self.sequences.get_mut(&id).ok_or(BatchError::Unknown { id })?;
        let computed = sequence.computed;
        if len == 0 {
            return Err(BatchError::Empty { what: format!("{id}, cut to 0") });
        }
        if len < computed && is_recurrent {
            return Err(BatchError::Recurrent { id, tokens: len, computed });
        }
        sequence.tokens.truncate(len);
        sequence.computed = computed.min(len);
        sequence.prefixes.truncate(len / page_tokens);
        let rest = pages.min(sequence.pages.len());
        sequence.pages.drain(rest..).rev().for_each(|page| self.pages.release(page));
        self.check_accounts();
        Ok(())
    }

    /// Makes all pages of the prefix cache free that no sequence holds.
    pub fn clear_prefix_cache(&mut self) {
        self.pages.forget_idle();
    }

    /// One forward pass: the next so many pending tokens of each sequence that takes part, in any mix. They are
    /// computed then.
    ///
    /// Work of one token is cheapest; that of several, up to [`BatchOptions::max_prompts`] of them, shares what it can.
    /// The logits stay until the next step.
    ///
    /// **Errors**: see [`BatchError`]. One that is not of the device leaves all as it was: [`BatchError::OutOfPages`]
    /// says how many pages are wanted and how many there are, so that a caller can take work out of the step, or
    /// [`Self::preempt`] a sequence, and call again.
    pub fn step(&mut self, work: &[Work]) -> Result<StepOutput<'_>, BatchError> {
        let _range = nvtx::range("step");
        self.check_work(work)?;
        self.take_pages(work)?;
        let result = self.run(work);
        for work in work {
            let Some(sequence) = self.sequences.get_mut(&work.id) else { continue };
            match result {
                Ok(()) => sequence.computed += work.tokens,
                // Keys and values beyond what is computed are not read, but a state is what it is.
                Err(_) if self.is_recurrent => sequence.forget(&mut self.pages),
                Err(_) => {}
            }
        }
        self.check_accounts();
        result?;
        self.stats.steps += 1;
        self.stats.computed_tokens += work.iter().map(|work| work.tokens as u64).sum::<u64>();
        if self.options.prefix_cache && !self.is_recurrent {
            self.register(work);
        }
        Ok(StepOutput { logits: self.logits()?, rows: &self.rows })
    }

    /// The logits of the last step, as its output has them: to look at sequences' tokens beside.
    ///
    /// **Errors**: none but those of views.
    pub fn logits(&self) -> Result<LogitRows<'_>, Error> {
        let logits = self.logits.view().slice(0, 0..self.filled.logits.len())?;
        Ok(LogitRows::new(logits, &self.stream))
    }

    /// In a debug build: that all pages are accounted for.
    fn check_accounts(&self) {
        #[cfg(debug_assertions)]
        if let Err(what) = self.pages.check(self.sequences.values().flat_map(|sequence| &sequence.pages)) {
            panic!("{what}");
        }
    }

    fn check_work(&self, work: &[Work]) -> Result<(), BatchError> {
        if work.is_empty() {
            return Err(BatchError::NoWork);
        }
        let mut seen = HashSet::new();
        let (mut all, mut prompts, mut rows) = (0usize, 0, 0usize);
        for &Work { id, tokens, logits } in work {
            let pending = self.pending(id)?;
            if !seen.insert(id) {
                return Err(BatchError::Twice { id });
            }
            if tokens == 0 {
                return Err(BatchError::Empty { what: format!("the work on {id}") });
            }
            if tokens > pending {
                return Err(BatchError::NotPending { id, tokens, pending });
            }
            all = all.saturating_add(tokens);
            prompts += usize::from(tokens > 1);
            rows = rows.saturating_add(match logits {
                WorkLogits::Nothing => 0,
                WorkLogits::Last => 1,
                WorkLogits::All => tokens,
            });
        }
        let budget = self.options.max_step_tokens;
        if all > budget {
            return Err(BatchError::OverBudget { tokens: all, budget });
        }
        let most = self.options.max_severals();
        if prompts > most {
            return Err(BatchError::TooManyPrompts { prompts, most });
        }
        let most = self.options.logit_rows();
        if rows > most {
            return Err(BatchError::TooManyLogits { rows, most });
        }
        Ok(())
    }

    /// Gives all work the pages that it needs, each written by one sequence alone, or none.
    fn take_pages(&mut self, work: &[Work]) -> Result<(), BatchError> {
        let needed = self.pages_for(work)?;
        let available = self.pages.available();
        let out_of_pages = BatchError::OutOfPages { needed, available, pages: self.pages.len() };
        if needed > available {
            return Err(out_of_pages);
        }
        for &Work { id, tokens, .. } in work {
            let sequence = self.sequence(id)?;
            let (new, written, index) = (
                self.new_pages(sequence, tokens),
                self.written(sequence),
                sequence.computed / self.options.page_tokens,
            );
            let used = sequence.computed % self.options.page_tokens;
            if let Some(page) = written.filter(|&page| self.pages.holders(page) > 1) {
                let Some(copy) = self.pages.take() else { return Err(out_of_pages) };
                let (from, to) = (page as usize, copy as usize);
                for cache in &mut self.caches {
                    if let Err(error) = cache.copy_page(&self.stream, (from, to), used) {
                        self.pages.release(copy);
                        return Err(error.into());
                    }
                }
                self.pages.release(page);
                self.sequence_mut(id)?.pages[index] = copy;
                self.stats.copied_pages += 1;
            } else if let Some(page) = written {
                // Of a sequence that was cut within a page that others could have found.
                self.pages.forget(page);
            }
            for _ in 0..new {
                let Some(page) = self.pages.take() else { return Err(out_of_pages) };
                self.sequence_mut(id)?.pages.push(page);
            }
        }
        Ok(())
    }

    /// Uploads what differs from step to step, and runs the forward pass.
    fn run(&mut self, work: &[Work]) -> Result<(), Error> {
        let ones = work.iter().filter(|work| work.tokens == 1).count();
        let severals = work.len() - ones;
        // Steps of ones alone may be recorded: as many sequences as there are recordings for.
        let padded = if severals == 0 { ones.next_power_of_two().min(self.options.max_ones()) } else { ones };
        let spans = self.fill(work, padded)?;
        for work in work {
            let Some(sequence) = self.sequences.get(&work.id).filter(|sequence| sequence.computed == 0)
            else {
                continue;
            };
            for cache in &mut self.caches {
                cache.clear(&self.stream, sequence.state)?;
            }
        }
        self.inputs.set(&self.stream, &self.filled)?;
        let Self { model, block, ropes, caches, inputs, filled, logits, recorded, .. } = self;
        let (tokens, asked) = (filled.ids.len(), filled.logits.len());
        let mut run = |stream: &Stream| {
            let [ids, positions, slots] = inputs.tokens(tokens)?;
            let group = |which: usize, sequences: usize| -> Result<_, Error> {
                let [lens, states, offsets, table] = inputs.group(which, sequences)?;
                let rows = if which == ONE { 0..padded } else { padded..tokens };
                let keys = Keys::Pages { table, lens };
                let spans = if which == ONE { &[][..] } else { &spans };
                Ok(Group { rows, sequences, ragged: which == SEVERAL, states, offsets, keys, spans })
            };
            let one = (padded > 0).then(|| group(ONE, padded)).transpose()?;
            let several = (severals > 0).then(|| group(SEVERAL, severals)).transpose()?;
            let groups = &[one, several];
            let step = Step { stream, ropes, tokens, ids, positions, slots, groups, visual: None };
            let logits = match asked {
                0 => None,
                rows => {
                    let out = logits.view_mut().slice(0, 0..rows)?;
                    // Of ones alone all.
                    let tokens = if severals == 0 { None } else { Some(inputs.logits(rows)?) };
                    Some(LogitArgs { tokens, out })
                }
            };
            block.run(&step, model.decoder(), caches, logits, None)
        };
        if severals > 0 {
            return run(&self.stream);
        }
        let recorded = recorded.entry(padded).or_insert_with(|| Recording::new(model.device()));
        // SAFETY: all of it is the batch's own, or the model's, which live as long as the recording, and work of the
        // same number of sequences uses the same parts of it; the stream is the batch's only one.
        unsafe { recorded.run(&self.stream, run) }
    }

    /// Writes down a step: ones first, up to `padded` of them, then the others. Returns what those have.
    fn fill(&mut self, work: &[Work], padded: usize) -> Result<Vec<Span>, Error> {
        let Self { filled, rows, sequences, options, .. } = self;
        let &mut BatchOptions { page_tokens, capacity, .. } = options;
        let width = options.pages_of(capacity);
        filled.clear();
        rows.clear();
        rows.resize(work.len(), 0..0);
        let mut spans = Vec::new();
        let only_ones = work.iter().all(|work| work.tokens == 1);
        for which in [ONE, SEVERAL] {
            for (index, work) in work.iter().enumerate() {
                let sequence = match sequences.get(&work.id) {
                    Some(sequence) if (work.tokens > 1) == (which == SEVERAL) => sequence,
                    _ => continue,
                };
                let first = filled.ids.len();
                let places = sequence.computed..sequence.computed + work.tokens;
                let keys = places.end;
                filled.ids.extend(&sequence.tokens[places.clone()]);
                filled.positions.extend(places.clone().map(|place| place as u32));
                let slot = |place: usize| {
                    sequence.pages[place / page_tokens] * page_tokens as u32 + (place % page_tokens) as u32
                };
                filled.slots.extend(places.map(slot));
                let group = &mut filled.groups[which];
                if which == SEVERAL {
                    let start = group.offsets[group.offsets.len() - 1] as usize;
                    spans.push(Span { rows: start..start + work.tokens, keys });
                }
                let held = &sequence.pages[..keys.div_ceil(page_tokens)];
                group.push(work.tokens, keys, sequence.state as u32, held, width);
                let asked = match work.logits {
                    WorkLogits::Nothing => work.tokens..work.tokens,
                    WorkLogits::Last => work.tokens - 1..work.tokens,
                    WorkLogits::All => 0..work.tokens,
                };
                rows[index] = match only_ones {
                    true => first..first + asked.len(),
                    false => {
                        let start = filled.logits.len();
                        filled.logits.extend(asked.map(|token| (first + token) as u32));
                        start..filled.logits.len()
                    }
                };
            }
            if which == ONE {
                while filled.ids.len() < padded {
                    filled.ids.push(0);
                    filled.positions.push(0);
                    filled.slots.push(NOWHERE);
                    filled.groups[ONE].push(1, 0, NOWHERE, &[], width);
                }
                if only_ones {
                    filled.logits.extend(0..padded as u32);
                }
            }
        }
        Ok(spans)
    }

    /// Makes pages that are full since the step known by their tokens.
    fn register(&mut self, work: &[Work]) {
        let page_tokens = self.options.page_tokens;
        for work in work {
            let Some(sequence) = self.sequences.get_mut(&work.id) else { continue };
            for index in sequence.prefixes.len()..sequence.computed / page_tokens {
                let before = sequence.prefixes.last().copied().unwrap_or(Prefix::EMPTY);
                let tokens = &sequence.tokens[index * page_tokens..(index + 1) * page_tokens];
                sequence.prefixes.push(self.pages.register(sequence.pages[index], before, tokens));
            }
        }
    }
}

impl Sequence {
    /// Gives up the pages: nothing is computed.
    fn forget(&mut self, pages: &mut Pages) {
        self.pages.drain(..).rev().for_each(|page| pages.release(page));
        self.prefixes.clear();
        self.computed = 0;
    }
}

/// Those below `most`.
fn powers_of_two(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |size| size.checked_mul(2)).take_while(move |&size| size < most)
}
