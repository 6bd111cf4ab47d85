//! Sequences that come and go: one forward pass for any mix of prompt chunks and decode tokens, over caches in pages.
//!
//! A sequence is a list of tokens, of which the first so many are *computed*: their keys and values are in the caches.
//! The others are *pending*. A step computes some pending tokens of some sequences, so that a prompt in chunks, a
//! decode step, several drafted tokens and a sequence that lost its pages are all the same.

mod draft;
mod error;
mod inputs;
mod model_draft;
mod options;
mod pages;
mod prompt;
mod sampler;
mod scheduler;
mod sharing;
mod step;
mod tree;
mod visual;
mod work;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use abi::DType;

use super::config::DecoderConfig;
use super::decoder::DecoderBlock;
use super::layers::{Adapters, Cache, GroupPhase, Phase, RowSorter};
use super::recording::Recording;
use super::vision::VisualInputs;
use super::{Adapter, Model};
use host::ops::rope::RopeTables;
use host::{Error, Invariance, OptimizationReport, Stream, Tensor};
use inputs::{Filled, Inputs};
use pages::{Pages, Prefix};
use sharing::Sharing;
use visual::{BatchVisual, SequenceVisual, check_cut};

pub use draft::NgramDraft;
pub use error::BatchError;
pub use model_draft::{DraftRequest, ModelDraft};
pub use options::BatchOptions;
pub use prompt::Prompt;
pub(crate) use sampler::is_penalised;
pub use sampler::{BatchSampler, ChosenToken, RowSampling, TokenLogprobs};
pub use scheduler::{RequestId, ScheduledStep, Scheduler};
pub use sharing::SharedPrefix;
pub use tree::DraftNode;
pub use visual::PromptVisual;
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
    adapter: Option<usize>,
    /// If its prompt has images.
    visual: Option<Arc<SequenceVisual>>,
}

/// Sequences that come and go, in one forward pass each step.
///
/// **A sequence's logits** are those that it has alone in a [`Session`](super::Session), within rounding: kernels are
/// chosen by numbers of rows, and what is shared may be read once, so that last bits depend on what else is in a step.
/// Nothing else of the other sequences does. Of a model on a device with [`Invariance::Batch`](host::Invariance::Batch)
/// they are the same bits, whatever is in a step, however prompts are cut, and whatever is found again, forked or
/// pre-empted; with adapters, the bits that it has alone in a batch with the same ones. A decode step takes the
/// attention of prompts then, for which Ampere copies the caches into rows in each layer; latent attention has memory
/// for each query, head and 256 keys of a step's longest prompts, and delta nets read prompts token by token.
/// **Pages** are taken by steps, as tokens need them. A fork shares all pages of its sequence; who first writes to a
/// page that others hold, which can only be the last, gets a copy of it. Full pages stay known by their tokens: a
/// sequence that begins with them takes them as they are, also after those that computed them are gone, until their
/// room is wanted (least recently used first).
/// **A shared prefix** ([`BatchOptions::shared_prefix`]): where all sequences of a step that have one token, or all
/// that have several, begin with the same pages, layers of softmax attention read these once for all of them, and what
/// each has behind them by itself ([`CascadeAttention`](host::ops::attention::CascadeAttention)). Each of the two kinds
/// is looked at alone, so that a prompt that begins otherwise leaves the decode tokens beside it what they share. A
/// page counts where every token of the step lies behind it. By [`SharedPrefix::Auto`], the default, it is done where
/// it should save time, which leaves out few sequences and short prefixes. A batch that never has such a step takes no
/// memory for it; another one has room for two results of each token and head, and where kernels gather keys for those
/// of one sequence more. Windows and latent attention are read as ever, and so is all under `Invariance::Batch`, since
/// what is shared depends on the mix.
/// **Recurrent states** (delta nets) have a slot for each sequence. There is one state, that behind all computed
/// tokens, so that beginnings are not found again: each sequence computes all of its tokens, but for forks.
/// **Pre-emption** gives up a sequence's pages and keeps its tokens, which are pending again.
/// **Steps** with one token for each sequence are recorded as graphs on CUDA, one for each power of two of sequences,
/// and padded to it; steps that read a shared prefix once are others than those that do not.
/// **Adapters** ([`Model::batch_with`]) are each sequence's own: a step computes sequences of different ones, and of
/// none, together. Steps without such sequences cost what they cost without adapters.
/// **Images** ([`BatchOptions::max_patches`], [`Prompt::visuals`]) are computed in chunks beside other sequences, those
/// of one prompt in a step.
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
    /// Steps with one token for each sequence.
    recorded: BTreeMap<Bucket, Recording>,
    adapters: Option<BatchAdapters>,
    /// If it takes images and videos.
    visual: Option<BatchVisual>,
    pages: Pages,
    /// If steps may read a prefix once for several sequences.
    sharing: Option<Sharing>,
    sequences: BTreeMap<SequenceId, Sequence>,
    free_states: Vec<usize>,
    last_id: u64,
    stats: BatchStats,
}

/// Steps that are recorded as one: they differ in what they read from device memory alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bucket {
    sequences: usize,
    /// Whether some have adapters.
    is_adapted: bool,
    /// Whether all begin with a prefix that is read once.
    is_shared: bool,
}

/// Adapters of a batch, and what sorts a step's rows by them.
#[derive(Debug)]
struct BatchAdapters {
    adapters: Adapters,
    sorter: RowSorter,
}

impl Batch {
    pub(super) fn new(
        model: Model,
        options: BatchOptions,
        adapters: &[&Adapter],
    ) -> Result<Self, BatchError> {
        options.check()?;
        let BatchOptions {
            max_sequences,
            max_step_tokens: tokens,
            capacity,
            page_tokens,
            pages,
            cache_type,
            ..
        } = options;
        let config = model.own_decoder();
        cache_type.check(OP, config, model.dtype())?;
        let &DecoderConfig { vocab_size, .. } = config;
        let (stream, dtype, logit_rows) = (model.device().stream()?, model.dtype(), options.logit_rows());
        let (ones, severals) = (options.max_ones(), options.max_severals());
        let adapters = if adapters.is_empty() { None } else { Some(model.adapters(&stream, adapters)?) };
        // How many sequences share a prefix depends on the mix.
        let is_invariant = model.device().invariance() == Invariance::Batch;
        let sharing = Sharing::new(&options, config, dtype).filter(|_| !is_invariant);
        let one = GroupPhase {
            sequences: ones,
            seq: 1,
            tokens: ones,
            ragged: false,
            capacity,
            page_tokens: Some(page_tokens),
            pages,
            shares: sharing.is_some() && ones > 1,
        };
        let shares = sharing.is_some() && severals > 1;
        let several = GroupPhase { sequences: severals, seq: tokens, tokens, ragged: true, shares, ..one };
        let groups = if severals > 0 { vec![one, several] } else { vec![one] };
        let sizes: Vec<usize> = powers_of_two(tokens).collect();
        let phase = Phase {
            stream: &stream,
            config,
            dtype,
            cache_type,
            activations: model.activations(),
            tokens,
            sizes: &sizes,
            groups: &groups,
            logit_rows,
            chooses: true,
            rank: model.rank(),
            adapters: adapters.as_ref().map(Adapters::sizes),
        };
        let block = DecoderBlock::new(&phase, model.decoder())?;
        let cache =
            |mixer| Cache::new(mixer, &stream, (dtype, cache_type), [pages, page_tokens], max_sequences);
        let caches: Vec<Cache> =
            config.layers.iter().map(|layer| cache(&layer.mixer)).collect::<Result<_, _>>()?;
        let rope = &config.rope;
        let ropes = RopeTables::new(&stream, &rope.inv_freq()?, rope.attention_factor(), capacity)?;
        let of_tokens = (tokens, adapters.is_some());
        let of_pages = (options.pages_of(capacity), sharing.is_some());
        let inputs = Inputs::new(&stream, of_tokens, logit_rows, [ones, severals], of_pages)?;
        let count = adapters.as_ref().map_or(0, Adapters::len);
        let adapters = adapters.map(|adapters| {
            let sorter = RowSorter::new(&phase, adapters.len())?;
            Ok::<_, Error>(BatchAdapters { adapters, sorter })
        });
        let adapters = adapters.transpose()?;
        let most = options.max_patches;
        let visual = match &model.config().vision {
            _ if most == 0 => None,
            Some(vision) => Some(VisualInputs::new(&stream, (vision, config), dtype, most, tokens)?),
            None => {
                let expected = "0 for a model without a vision tower";
                return Err(Error::invalid(OP, "max_patches", expected, most.to_string()).into());
            }
        };
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
            adapters,
            visual: visual.map(BatchVisual::new),
            pages: Pages::new(pages, count),
            sharing,
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

    /// How many adapters sequences may have.
    pub fn num_adapters(&self) -> usize {
        self.adapters.as_ref().map_or(0, |own| own.adapters.len())
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
        let mut needed = 0usize;
        let mut writers = HashMap::new();
        for &Work { id, tokens, .. } in work {
            let sequence = self.sequence(id)?;
            needed = self.new_pages(sequence, tokens).saturating_add(needed);
            if let Some(page) = self.written(sequence) {
                *writers.entry(page).or_insert(0) += 1;
            }
        }
        // The last one of its holders may keep it.
        let copies = writers.iter().map(|(&page, &writers)| writers.min(self.pages.holders(page) - 1));
        Ok(needed.saturating_add(copies.sum()))
    }

    /// Pages behind those that a sequence holds.
    fn new_pages(&self, sequence: &Sequence, tokens: usize) -> usize {
        self.options.pages_of(sequence.computed.saturating_add(tokens)).saturating_sub(sequence.pages.len())
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
        self.add_prompt(tokens.into())
    }

    /// The same of a prompt with an adapter, or with images. Sequences share pages with those of the same adapter
    /// alone, and none from the first image on.
    ///
    /// The tower runs in the first step that computes a token of an image, over all images of the prompt; it has the
    /// features of one sequence at a time, and runs again for one that comes back to its images.
    ///
    /// **Errors**: as [`Batch::add`], and [`Error::Invalid`] for an adapter that the batch has not, and for images that
    /// do not fit their placeholders or are more than [`BatchOptions::max_patches`].
    pub fn add_prompt(&mut self, prompt: Prompt) -> Result<SequenceId, BatchError> {
        self.check_prompt(&prompt)?;
        let Prompt { tokens, adapter, visuals } = prompt;
        let visual = match &self.visual {
            Some(own) if !visuals.is_empty() => Some(own.of_prompt(&tokens, visuals)?),
            _ => None,
        };
        let state = self.take_state()?;
        let (pages, prefixes) = (Vec::new(), Vec::new());
        let sequence = Sequence { tokens, computed: 0, pages, prefixes, state, adapter, visual };
        let id = self.insert(sequence);
        self.reuse(id)?;
        self.check_accounts();
        Ok(id)
    }

    fn check_prompt(&self, prompt: &Prompt) -> Result<(), BatchError> {
        let &Prompt { ref tokens, adapter, ref visuals } = prompt;
        let count = self.num_adapters();
        if let Some(adapter) = adapter.filter(|&adapter| adapter >= count) {
            let expected = format!("one of the batch's {count} adapters, counted from 0");
            return Err(Error::invalid(OP, "adapter", expected, adapter.to_string()).into());
        }
        if tokens.is_empty() {
            return Err(BatchError::Empty { what: "the prompt".into() });
        }
        self.model.config().decoder.check_ids(tokens)?;
        self.check_len(tokens.len())?;
        if !visuals.is_empty() {
            let Some(visual) = &self.visual else {
                let expected = "none in a batch without max_patches";
                return Err(Error::invalid(OP, "visuals", expected, visuals.len().to_string()).into());
            };
            return Ok(visual.place(tokens, visuals).map(|_| ())?);
        }
        if let Some(place) = self.placeholder(tokens) {
            let got = format!("a placeholder of an image at {place}");
            return Err(Error::invalid(OP, "tokens", "text", got).into());
        }
        Ok(())
    }

    /// Where the first token is that stands for an image or a video.
    fn placeholder(&self, tokens: &[u32]) -> Option<usize> {
        let vision = self.model.config().vision.as_ref()?;
        tokens.iter().position(|&id| id == vision.image_token || id == vision.video_token)
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
        let mut before = Prefix::of_adapter(sequence.adapter);
        let most = sequence.tokens.len().saturating_sub(1).min(sequence.plain_tokens()) / options.page_tokens;
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
        self.check_push(self.sequence(id)?.tokens.len(), token)?;
        self.sequence_mut(id)?.tokens.push(token);
        Ok(())
    }

    /// That a token may come behind so many.
    fn check_push(&self, len: usize, token: u32) -> Result<(), BatchError> {
        self.model.config().decoder.check_ids(&[token])?;
        self.check_len(len + 1)
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
    /// **Errors**: [`BatchError::Recurrent`] where a state would have to go back; [`BatchError::Images`] for a length
    /// that cuts the images of its prompt; [`BatchError::Empty`] for a length of 0.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<(), BatchError> {
        let is_recurrent = self.is_recurrent;
        let (page_tokens, pages) = (self.options.page_tokens, self.options.pages_of(len));
        let sequence = self.sequences.get_mut(&id).ok_or(BatchError::Unknown { id })?;
        let computed = sequence.computed;
        if len == 0 {
            return Err(BatchError::Empty { what: format!("{id}, cut to 0") });
        }
        check_cut(id, sequence.visual.as_ref(), len)?;
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

    /// In a debug build: that all pages are accounted for.
    fn check_accounts(&self) {
        #[cfg(debug_assertions)]
        if let Err(what) = self.pages.check(self.sequences.values().flat_map(|sequence| &sequence.pages)) {
            panic!("{what}");
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
