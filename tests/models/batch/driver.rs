//! What a caller does with a batch, in any order, and what is to hold of it: pages are counted, a step that fails has
//! changed nothing, and logits are those of sessions.

use std::collections::BTreeMap;

use proptest::prelude::*;
use warpforge::models::{
    Batch, BatchError, BatchOptions, BatchStats, CacheType, SequenceId, Work, WorkLogits,
};

use super::super::*;

/// One thing that a caller does; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
pub enum Act {
    /// A prompt that begins as another sequence did, dead or alive, and goes on with so many tokens of its own.
    Add {
        like: usize,
        shared: usize,
        own: usize,
    },
    /// A step on these sequences, of so many tokens each, one where it is a decode step.
    Step(Vec<(usize, usize, WorkLogits)>),
    /// A token for each sequence that has none pending, and a step on all of them.
    Decode,
    Fork(usize),
    Remove(usize),
    Preempt(usize, bool),
    Truncate(usize, usize),
}

pub fn acts(most: usize) -> impl Strategy<Value = Vec<Act>> {
    let logits = prop_oneof![Just(WorkLogits::Last), Just(WorkLogits::All), Just(WorkLogits::Nothing)];
    let work = proptest::collection::vec((0..8usize, 1..24usize, logits), 1..5);
    let act = prop_oneof![
        4 => (0..8usize, 0..48usize, 1..24usize).prop_map(|(like, shared, own)| Act::Add { like, shared, own }),
        6 => work.prop_map(Act::Step),
        6 => Just(Act::Decode),
        2 => (0..8usize).prop_map(Act::Fork),
        2 => (0..8usize).prop_map(Act::Remove),
        1 => (0..8usize, any::<bool>()).prop_map(|(which, reuse)| Act::Preempt(which, reuse)),
        1 => (0..8usize, 1..40usize).prop_map(|(which, len)| Act::Truncate(which, len)),
    ];
    proptest::collection::vec(act, 1..most)
}

/// Up to so many rows products on the CPU are sums of one kind, so that bits do not depend on how many there are.
pub const FEW_ROWS: usize = 8;

/// Logits that a batch gave, by the tokens up to the one that they are of.
pub type Seen = BTreeMap<Vec<u32>, Vec<Vec<f32>>>;

struct Driver {
    batch: Batch,
    /// Of all sequences so far, also of those that are gone.
    prompts: Vec<Vec<u32>>,
    alive: Vec<SequenceId>,
    seen: Seen,
    next: u32,
}

impl Driver {
    /// A token: others than before, but few of them.
    fn token(&mut self) -> u32 {
        let vocab = self.batch.model().config().decoder.vocab_size as u32;
        self.next = (self.next * 37 + 11) % vocab.min(301);
        self.next
    }

    fn of(&self, which: usize) -> Option<SequenceId> {
        self.alive.get(which % self.alive.len().max(1)).copied()
    }

    fn step(&mut self, work: &[Work]) -> Outcome {
        if work.is_empty() {
            return Ok(());
        }
        let before: Vec<_> = self.alive.iter().map(|&id| self.batch.pending(id)).collect::<Result<_, _>>()?;
        let free = self.batch.free_pages();
        let needed = self.batch.pages_for(work)?;
        let first: Vec<usize> = work
            .iter()
            .map(|work| Ok(self.batch.tokens(work.id)?.len() - self.batch.pending(work.id)?))
            .collect::<Result<_, BatchError>>()?;
        match self.batch.step(work) {
            Err(BatchError::OutOfPages { needed: asked, available, pages }) => {
                assert_eq!((asked, available, pages), (needed, free, self.batch.options().pages));
                assert!(asked > available);
                let after: Vec<_> =
                    self.alive.iter().map(|&id| self.batch.pending(id)).collect::<Result<_, _>>()?;
                assert_eq!((before, free), (after, self.batch.free_pages()), "nothing has changed");
                // As a caller would: the youngest gives up its pages.
                let youngest = self.alive[self.alive.len() - 1];
                self.batch.preempt(youngest)?;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
            Ok(output) => {
                let vocab = output.logits().shape()[1];
                let rows = output.rows().to_vec();
                let logits = output.logits().to_host()?;
                assert_eq!(self.batch.free_pages(), free - needed);
                for ((work, rows), first) in work.iter().zip(rows).zip(first) {
                    let tokens = self.batch.tokens(work.id)?;
                    let asked = match work.logits {
                        WorkLogits::Nothing => 0,
                        WorkLogits::Last => 1,
                        WorkLogits::All => work.tokens,
                    };
                    assert_eq!(rows.len(), asked);
                    let end = first + work.tokens;
                    for (row, len) in rows.zip(end - asked + 1..=end) {
                        let row = logits[row * vocab..(row + 1) * vocab].to_vec();
                        self.seen.entry(tokens[..len].to_vec()).or_default().push(row);
                    }
                }
            }
        }
        Ok(())
    }

    fn act(&mut self, act: &Act) -> Outcome {
        let options = self.batch.options();
        match act {
            &Act::Add { like, shared, own } => {
                let mut prompt = match self.prompts.get(like % self.prompts.len().max(1)) {
                    Some(like) => like[..shared.min(like.len())].to_vec(),
                    None => Vec::new(),
                };
                prompt.extend((0..own).map(|_| self.token()));
                prompt.truncate(options.capacity);
                match self.batch.add(&prompt) {
                    Ok(id) => self.alive.push(id),
                    Err(BatchError::OutOfSequences { most }) => assert_eq!(most, self.alive.len()),
                    Err(error) => return Err(error.into()),
                }
                self.prompts.push(prompt);
            }
            Act::Step(parts) => {
                let (mut work, mut budget, mut rows) =
                    (Vec::new(), options.max_step_tokens, options.max_logits);
                let mut severals = options.max_prompts;
                for &(which, tokens, logits) in parts {
                    let Some(id) = self.of(which) else { continue };
                    let tokens = tokens.min(self.batch.pending(id)?).min(budget);
                    let tokens = if severals == 0 { tokens.min(1) } else { tokens };
                    if tokens == 0 || work.iter().any(|work: &Work| work.id == id) {
                        continue;
                    }
                    let logits =
                        if logits == WorkLogits::All && tokens > rows { WorkLogits::Last } else { logits };
                    let asked = if logits == WorkLogits::All { tokens } else { 1 };
                    if asked > rows {
                        continue;
                    }
                    (budget, rows, severals) =
                        (budget - tokens, rows - asked, severals - usize::from(tokens > 1));
                    work.push(Work { id, tokens, logits });
                }
                self.step(&work)?;
            }
            Act::Decode => {
                let mut work = Vec::new();
                for id in self.alive.clone() {
                    let token = self.token();
                    if self.batch.pending(id)? == 0 && self.batch.tokens(id)?.len() < options.capacity {
                        self.batch.push(id, token)?;
                    }
                    if self.batch.pending(id)? == 1 && work.len() < options.max_step_tokens {
                        work.push(Work::new(id, 1));
                    }
                }
                self.step(&work)?;
            }
            &Act::Fork(which) => {
                let Some(id) = self.of(which) else { return Ok(()) };
                let free = self.batch.free_pages();
                match self.batch.fork(id) {
                    Ok(fork) => {
                        assert_eq!(self.batch.tokens(fork)?, self.batch.tokens(id)?);
                        assert_eq!(self.batch.pending(fork)?, self.batch.pending(id)?);
                        self.alive.push(fork);
                    }
                    Err(BatchError::OutOfSequences { most }) => assert_eq!(most, self.alive.len()),
                    Err(error) => return Err(error.into()),
                }
                assert_eq!(self.batch.free_pages(), free, "a fork takes none");
            }
            &Act::Remove(which) => {
                let Some(id) = self.of(which) else { return Ok(()) };
                self.batch.remove(id)?;
                self.alive.retain(|&other| other != id);
                assert!(matches!(self.batch.pending(id), Err(BatchError::Unknown { .. })));
            }
            &Act::Preempt(which, reuse) => {
                let Some(id) = self.of(which) else { return Ok(()) };
                self.batch.preempt(id)?;
                let len = self.batch.tokens(id)?.len();
                assert_eq!((self.batch.pending(id)?, self.batch.pages(id)?), (len, 0));
                if reuse {
                    let reused = self.batch.reuse(id)?;
                    assert_eq!(self.batch.pending(id)?, len - reused);
                    assert!(reused < len);
                }
            }
            &Act::Truncate(which, len) => {
                let Some(id) = self.of(which) else { return Ok(()) };
                let had = self.batch.tokens(id)?.len();
                match self.batch.truncate(id, len) {
                    Ok(()) => assert_eq!(self.batch.tokens(id)?.len(), had.min(len)),
                    Err(BatchError::Recurrent { tokens, computed, .. }) => {
                        assert!(tokens == len && len < computed)
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}

/// A small batch, which runs out of pages and sequences.
pub fn small() -> BatchOptions {
    BatchOptions {
        max_sequences: 4,
        max_step_tokens: 40,
        max_prompts: 2,
        max_logits: 40,
        capacity: 64,
        page_tokens: 16,
        pages: 10,
        prefix_cache: true,
        max_patches: 0,
        cache_type: CacheType::Model,
        shared_prefix: SharedPrefix::Auto,
    }
}

/// What each sequence gives alone: under `Invariance::Batch` the same bits.
fn check_against_sessions(model: &Model, seen: &Seen, options: BatchOptions, name: &str) -> Outcome {
    let BatchOptions { max_step_tokens: budget, cache_type, shared_prefix, .. } = options;
    let is_invariant = model.device().invariance() == Invariance::Batch;
    let chunk = if budget <= FEW_ROWS { FEW_ROWS } else { 64 };
    let options =
        SessionOptions { capacity: 64, chunk, logits: Logits::All, cache_type, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    let stream = session.stream().clone();
    let vocab = model.config().decoder.vocab_size;
    // The longest first: each is computed once with all that it begins with.
    let mut alone: BTreeMap<&[u32], Vec<f32>> = BTreeMap::new();
    for (tokens, rows) in seen.iter().rev() {
        let longer = alone.range(&tokens[..]..).next().filter(|(longer, _)| longer.starts_with(tokens));
        let longer = longer.map(|(&longer, _)| longer);
        let key = longer.unwrap_or(tokens);
        if longer.is_none() {
            session.truncate(0, 0)?;
            let mut logits = Vec::new();
            session.prefill_with(0, tokens, &mut |_, _| Ok(()), &mut |_, rows| {
                logits.extend(rows.to_vec::<f32>(&stream)?);
                Ok(())
            })?;
            alone.insert(tokens, logits);
        }
        let want = &alone[key][(tokens.len() - 1) * vocab..tokens.len() * vocab];
        // Latent attention has another form for a single token.
        let is_exact = is_invariant
            || (chunk == FEW_ROWS
                && model.device().place() == Place::Cpu
                && shared_prefix != SharedPrefix::Always
                && name != "glm4_moe_lite");
        for got in rows {
            let (error, len) = (relative_l2(got, want), tokens.len());
            assert!(error <= 1e-4, "{name}: token {len}: {error:.2e}");
            assert!(!is_exact || got == want, "{name}: token {len}: bits differ, by {error:.2e}");
        }
    }
    Ok(())
}

/// Does it all, removes what is left, and checks the logits.
pub fn run(
    model: &Model,
    options: BatchOptions,
    acts: &[Act],
    name: &str,
) -> Result<BatchStats, Box<dyn StdError>> {
    let (stats, seen) = drive(model, options, acts, name)?;
    check_against_sessions(model, &seen, options, name)?;
    Ok(stats)
}

/// Does it all, and removes what is left: the numbers before that, and the logits.
pub fn drive(
    model: &Model,
    options: BatchOptions,
    acts: &[Act],
    name: &str,
) -> Result<(BatchStats, Seen), Box<dyn StdError>> {
    let batch = model.batch(options)?;
    let mut driver =
        Driver { batch, prompts: Vec::new(), alive: Vec::new(), seen: Seen::new(), next: acts.len() as u32 };
    for act in acts {
        driver.act(act)?;
    }
    let stats = driver.batch.stats();
    for id in driver.alive {
        driver.batch.remove(id)?;
    }
    let end = driver.batch.stats();
    assert_eq!((end.sequences, end.free_pages), (0, options.pages), "{name}: all pages are back");
    driver.batch.clear_prefix_cache();
    assert_eq!(driver.batch.stats().cached_pages, 0);
    Ok((stats, driver.seen))
}
