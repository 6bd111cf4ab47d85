//! Sequences that come and go: whatever is in a step with it, a sequence has the logits that it has alone.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use testkit::golden;
use warpforge::models::{
    Batch, BatchError, BatchOptions, BatchStats, CacheType, RequestId, Scheduler, SequenceId, Work,
    WorkLogits,
};

use super::*;

/// One thing that a caller does; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
pub(super) enum Act {
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

pub(super) fn acts(most: usize) -> impl Strategy<Value = Vec<Act>> {
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
const FEW_ROWS: usize = 8;

/// Logits that a batch gave, by the tokens up to the one that they are of.
pub(super) type Seen = BTreeMap<Vec<u32>, Vec<Vec<f32>>>;

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
pub(super) fn small() -> BatchOptions {
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
pub(super) fn run(
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
pub(super) fn drive(
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

/// Random schedules of each architecture.
fn schedules(name: &str, cases: u32) -> Outcome {
    schedules_on(&Device::cpu(), DType::F32, name, (40, cases))
}

/// So many, of so many acts at most.
fn schedules_on(device: &Device, dtype: DType, name: &str, (most, cases): (usize, u32)) -> Outcome {
    let model = Model::load(device, &golden::folder(name), dtype, &mut |_| {})?;
    let mut runner = TestRunner::new_with_rng(
        Config { cases, failure_persistence: None, ..Config::default() },
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    runner.run(&acts(most), |acts| {
        for max_step_tokens in [40, FEW_ROWS] {
            let options = BatchOptions { max_step_tokens, ..small() };
            run(&model, options, &acts, name).map_err(|error| TestCaseError::fail(error.to_string()))?;
        }
        Ok(())
    })?;
    Ok(())
}

/// One schedule in which everything happens that can: prompts in chunks beside decode steps, a fork and its copy, a
/// removal, a pre-emption, and a beginning that is found again.
fn everything() -> Vec<Act> {
    let all = |parts: &[(usize, usize)]| {
        Act::Step(parts.iter().map(|&(which, tokens)| (which, tokens, WorkLogits::All)).collect())
    };
    vec![
        Act::Add { like: 0, shared: 0, own: 20 },
        all(&[(0, 17)]),
        Act::Add { like: 0, shared: 0, own: 3 },
        all(&[(0, 3), (1, 2)]),
        all(&[(1, 1)]),
        Act::Decode,
        Act::Fork(0),
        Act::Decode,
        Act::Add { like: 0, shared: 18, own: 2 },
        all(&[(3, 4), (0, 1), (1, 1)]),
        Act::Remove(0),
        Act::Preempt(1, true),
        Act::Decode,
        all(&[(1, 24), (0, 1)]),
    ]
}

mod schedules_on_the_cpu {
    use super::*;

    macro_rules! models {
        ($($name:ident,)*) => {$(
            #[test]
            fn $name() -> Outcome {
                schedules(stringify!($name), 24)
            }
        )*};
    }

    models! { qwen3, qwen3_sliding, qwen3_moe, qwen3_next, glm4_moe_lite, qwen3_vl, }
}

#[test]
fn one_schedule_on_the_cpu() -> Outcome {
    for name in GOLDEN {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let stats = run(&model, small(), &everything(), name)?;
        let recurrent = name == "qwen3_next";
        assert_eq!((stats.copied_pages, stats.preemptions), (1, 1), "{name}");
        assert_eq!(stats.reused_tokens, if recurrent { 0 } else { 32 }, "{name}");
    }
    Ok(())
}

mod one_schedule_in_the_simulator {
    use super::*;

    macro_rules! models {
        ($($name:ident on $arch:ident,)*) => {$(
            #[test]
            fn $name() -> Outcome {
                let device = Device::simulated(Arc::new(Card::new(Arch::$arch)))?;
                let name = stringify!($name);
                let model = Model::load(&device, &golden::folder(name), DType::F32, &mut |_| {})?;
                run(&model, small(), &everything(), name)?;
                Ok(())
            }
        )*};
    }

    models! {
        qwen3 on Sm90a,
        qwen3_sliding on Sm61,
        qwen3_moe on Sm80,
        qwen3_next on Sm90a,
        glm4_moe_lite on Sm80,
        qwen3_vl on Sm61,
    }
}

/// Under `Invariance::Batch` a sequence has the bits that it has alone, whatever the schedule.
mod the_same_bits {
    use super::*;

    macro_rules! models {
        ($($name:ident on $($test:ident: $arch:ident),*;)*) => {$(
            mod $name {
                use super::*;

                const NAME: &str = stringify!($name);

                #[test]
                fn on_the_cpu() -> Outcome {
                    let device = Device::cpu().with_invariance(Invariance::Batch);
                    for dtype in [DType::F32, DType::BF16] {
                        schedules_on(&device, dtype, NAME, (40, 12))?;
                    }
                    Ok(())
                }

                $(
                    #[test]
                    fn $test() -> Outcome {
                        in_the_simulator(Arch::$arch, NAME)
                    }
                )*
            }
        )*};
    }

    // Each part of a model on Hopper's floor and an older one; both older ones see a dense model and mixtures.
    models! {
        qwen3 on sm61: Sm61, sm80: Sm80, sm90a: Sm90a;
        qwen3_sliding on sm90a: Sm90a;
        qwen3_moe on sm80: Sm80, sm90a: Sm90a;
        qwen3_next on sm61: Sm61, sm90a: Sm90a;
        glm4_moe_lite on sm61: Sm61, sm80: Sm80, sm90a: Sm90a;
        qwen3_vl on sm80: Sm80, sm90a: Sm90a;
    }

    /// In the type that the floor has tensor cores for, if it has some.
    fn in_the_simulator(arch: Arch, name: &str) -> Outcome {
        let device = Device::simulated(Arc::new(Card::new(arch)))?.with_invariance(Invariance::Batch);
        let dtype = if arch == Arch::Sm61 { DType::F32 } else { DType::BF16 };
        let model = Model::load(&device, &golden::folder(name), dtype, &mut |_| {})?;
        run(&model, small(), &everything(), name)?;
        schedules_on(&device, dtype, name, (8, 1))
    }
}

/// Nor do the kernels of quantised weights, tables and rows let bits depend on the mix; caches in fp8 do not either.
#[test]
fn the_same_bits_of_quantised_models() -> Outcome {
    let card = Device::simulated(Arc::new(Card::new(Arch::Sm80)))?;
    for name in ["ct_w8a8_int8", "gguf_q4_k_m", "fp8_block_moe"] {
        let folder = workspace_root().join("tests/golden-quant").join(name);
        let path = if name.starts_with("gguf") { folder.join("model.gguf") } else { folder };
        for (device, cache_type) in [(&Device::cpu(), CacheType::Fp8), (&card, CacheType::Model)] {
            let device = device.with_invariance(Invariance::Batch);
            let model = Model::load(&device, &path, DType::BF16, &mut |_| {})?;
            run(&model, BatchOptions { cache_type, ..small() }, &everything(), name)?;
        }
    }
    Ok(())
}

#[test]
fn schedules_on_the_card() -> Outcome {
    for device in cards() {
        for name in GOLDEN {
            let model = Model::load(&device, &golden::folder(name), DType::F32, &mut |_| {})?;
            run(&model, small(), &everything(), name)?;
            // Long enough that steps of ones are recorded and launched again.
            let decode = vec![vec![Act::Decode, Act::Decode, Act::Decode, Act::Fork(0)]; 6].concat();
            let acts = [
                vec![Act::Add { like: 0, shared: 0, own: 5 }, Act::Step(vec![(0, 5, WorkLogits::Last)])],
                decode,
            ];
            run(&model, BatchOptions { pages: 16, ..small() }, &acts.concat(), name)?;
            for dtype in [DType::F32, DType::BF16] {
                let device = device.with_invariance(Invariance::Batch);
                let model = Model::load(&device, &golden::folder(name), dtype, &mut |_| {})?;
                run(&model, small(), &everything(), name)?;
                run(&model, BatchOptions { pages: 16, ..small() }, &acts.concat(), name)?;
            }
        }
    }
    Ok(())
}

/// What a finished sequence leaves is found again, and given up for others when room is wanted.
#[test]
fn prefixes_are_found_again() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(BatchOptions { pages: 4, max_step_tokens: 64, ..small() })?;
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 300).collect();
    let first = batch.add(&prompt)?;
    let want = batch.step(&[Work::new(first, 40)])?.logits().to_host()?;
    // Two full pages of three.
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (1, 0));
    let second = batch.add(&prompt)?;
    assert_eq!((batch.pending(second)?, batch.pages(second)?), (8, 2));
    let got = batch.step(&[Work::new(second, 8)])?.logits().to_host()?;
    assert!(relative_l2(&got, &want) <= 1e-4);
    assert_eq!(batch.free_pages(), 0);
    batch.remove(first)?;
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (1, 0), "the second has the others");
    batch.remove(second)?;
    assert_eq!((batch.stats().free_pages, batch.stats().cached_pages), (4, 2));
    // A prompt of exactly the known tokens computes the last page anew: somebody wants its logits.
    let third = batch.add(&prompt[..32])?;
    assert_eq!((batch.pending(third)?, batch.stats().cached_pages), (16, 1));
    batch.remove(third)?;
    // Others take the end of what is known before its beginning.
    let other = batch.add(&[5; 33])?;
    batch.step(&[Work::new(other, 33)])?;
    assert_eq!((batch.stats().evicted_pages, batch.stats().cached_pages), (1, 1));
    assert_eq!(batch.add(&prompt).and_then(|id| batch.pending(id))?, 24);
    let without = model.batch(BatchOptions { prefix_cache: false, ..small() });
    let mut without = without?;
    let id = without.add(&prompt)?;
    without.step(&[Work::new(id, 40)])?;
    assert_eq!(without.add(&prompt).and_then(|id| without.pending(id))?, 40);
    Ok(())
}

/// Forks share their pages, and only the one that both write to is copied.
#[test]
fn forks_share_pages() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(small())?;
    let a = batch.add(&[9; 20])?;
    batch.step(&[Work::new(a, 20)])?;
    let (b, c) = (batch.fork(a)?, batch.fork(a)?);
    assert_eq!(batch.free_pages(), 8);
    for (id, token) in [(a, 1), (b, 2), (c, 3)] {
        batch.push(id, token)?;
    }
    assert_eq!(batch.pages_for(&[Work::new(a, 1)])?, 1);
    assert!(batch.pages_for(&[Work::new(a, usize::MAX), Work::new(a, usize::MAX)])? > usize::MAX / 32);
    // Two of three copy, the last one keeps what nobody else has.
    let work = [a, b, c].map(|id| Work::new(id, 1));
    assert_eq!(batch.pages_for(&work)?, 2);
    batch.step(&work)?;
    assert_eq!((batch.free_pages(), batch.stats().copied_pages), (6, 2));
    Ok(())
}

/// More requests than there is room for: each is answered as if it were alone, and all comes back.
#[test]
fn a_scheduler_answers_all() -> Outcome {
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        let prompts: Vec<Vec<u32>> =
            (0..9u32).map(|i| (0..3 + 5 * i % 31).map(|j| (i / 2 * 17 + j * 5) % 300).collect()).collect();
        let mut alone = model.session(SessionOptions { capacity: 64, ..SessionOptions::default() })?;
        let want: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| greedy(&mut alone, prompt, 20)).collect::<Result<_, _>>()?;
        let mut scheduler = Scheduler::new(model.batch(BatchOptions { pages: 6, ..small() })?);
        let ids: Vec<RequestId> =
            prompts.iter().map(|prompt| scheduler.submit(prompt)).collect::<Result<_, _>>()?;
        let cancelled = scheduler.submit(&[1, 2, 3])?;
        let mut got: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
        let mut steps = 0;
        while let Some(step) = scheduler.step()? {
            let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
            assert!(step.tokens <= 40);
            for (request, rows) in step.requests {
                let row = &logits[rows.start * vocab..][..vocab];
                let best =
                    (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token") as u32;
                let answer = got.entry(request).or_default();
                answer.push(best);
                if answer.len() == 20 {
                    scheduler.finish(request)?;
                } else {
                    scheduler.push(request, best)?;
                }
            }
            steps += 1;
            if steps == 2 {
                scheduler.finish(cancelled)?;
            }
            assert!(steps < 1000);
        }
        assert_eq!(ids.iter().map(|id| got[id].clone()).collect::<Vec<_>>(), want, "{name}");
        let stats = scheduler.batch().stats();
        assert_eq!((stats.sequences, stats.free_pages), (0, 6), "{name}");
        assert!(stats.preemptions > 0, "{name}: {stats:?}");
        assert!(matches!(scheduler.finish(cancelled), Err(BatchError::UnknownRequest { .. })));
    }
    Ok(())
}

/// Mistakes of a caller: each has a type of its own, and changes nothing.
#[test]
fn bad_work() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3"), DType::F32, &mut |_| {})?;
    let mut batch = model.batch(BatchOptions { max_logits: 0, ..small() })?;
    let (a, b, c, d) = (batch.add(&[1; 5])?, batch.add(&[2; 50])?, batch.add(&[3; 5])?, batch.add(&[4; 5])?);
    let before = batch.stats();
    let mut message =
        |work: &[Work]| batch.step(work).err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(message(&[]), "a step without work");
    assert_eq!(message(&[Work::new(a, 0)]), "the work on sequence 1 has no tokens");
    assert_eq!(message(&[Work::new(a, 6)]), "work on 6 tokens of sequence 1, of which 5 are pending");
    assert_eq!(message(&[Work::new(a, 1), Work::new(a, 1)]), "sequence 1 is in the step twice");
    assert_eq!(message(&[Work::new(b, 41)]), "a step of 41 tokens is above the budget of 40");
    assert_eq!(
        message(&[Work::new(a, 2), Work::new(c, 2), Work::new(d, 2)]),
        "a step with several tokens of 3 sequences, which is for 2"
    );
    assert_eq!(
        message(&[Work { id: a, tokens: 5, logits: WorkLogits::All }]),
        "a step that asks for 5 rows of logits, which has room for 4"
    );
    assert_eq!(batch.stats(), before);
    let message = |error: BatchError| error.to_string();
    assert_eq!(message(batch.add(&[]).unwrap_err()), "the prompt has no tokens");
    assert_eq!(message(batch.add(&[1; 65]).unwrap_err()), "a sequence of 65 tokens is longer than 64");
    assert_eq!(message(batch.add(&[1]).unwrap_err()), "the batch has 4 sequences, as many as it is for");
    assert!(matches!(batch.fork(a), Err(BatchError::OutOfSequences { most: 4 })));
    assert!(batch.add(&[384]).unwrap_err().to_string().contains("token ids below 384"));
    assert!(batch.push(a, 384).unwrap_err().to_string().contains("token ids below 384"));
    batch.remove(c)?;
    assert_eq!(message(batch.push(c, 1).unwrap_err()), "sequence 3 is not in the batch");
    assert!(matches!(batch.step(&[Work::new(c, 1)]), Err(BatchError::Unknown { id }) if id == c));
    let full = batch.add(&[1; 64])?;
    assert!(matches!(batch.push(full, 1), Err(BatchError::TooLong { tokens: 65, capacity: 64 })));
    assert!(matches!(batch.truncate(full, 0), Err(BatchError::Empty { .. })));
    let error: warpforge::Error = BatchError::NoWork.into();
    assert_eq!(error.to_string(), "a step without work");
    for (options, want) in [
        (BatchOptions { page_tokens: 48, ..small() }, "page_tokens: expected 16, 32, 64, 128 or 256, got 48"),
        (
            BatchOptions { pages: 3, ..small() },
            "pages: expected at least 4 for a sequence of 64 tokens, and below 2^31 tokens, got 3",
        ),
        (
            BatchOptions { max_sequences: 0, ..small() },
            "max_sequences: expected at least 1 and below 2^31, got 0",
        ),
    ] {
        assert_eq!(options.check().unwrap_err().to_string(), format!("Batch: {want}"));
    }
    Ok(())
}

/// An engine's thread owns them.
#[test]
fn batches_go_to_other_threads() {
    fn is_send<T: Send>() {}
    is_send::<Batch>();
    is_send::<Scheduler>();
    is_send::<BatchError>();
}

/// Placeholders of images are no text.
#[test]
fn images_are_refused() -> Outcome {
    let model = Model::load(&Device::cpu(), &golden::folder("qwen3_vl"), DType::F32, &mut |_| {})?;
    let image = model.config().vision.as_ref().expect("a tower").image_token;
    let error = model.batch(small())?.add(&[1, image]).unwrap_err().to_string();
    assert_eq!(error, "Batch: tokens: expected text, got a placeholder of an image at 1");
    Ok(())
}

/// Budgets at their smallest: a token a step, a page a sequence.
#[test]
fn smallest_batches() -> Outcome {
    for name in ["qwen3", "qwen3_next", "glm4_moe_lite"] {
        let model = Model::load(&Device::cpu(), &golden::folder(name), DType::F32, &mut |_| {})?;
        for (max_step_tokens, max_prompts) in [(1, 1), (2, 1), (3, 2), (4, 4)] {
            let options = BatchOptions { max_step_tokens, max_prompts, ..small() };
            let parts = [(0, max_step_tokens, WorkLogits::Last)];
            let acts = [
                vec![Act::Add { like: 0, shared: 0, own: 5 }],
                vec![Act::Step(parts.to_vec()); 5],
                vec![Act::Decode],
            ];
            run(&model, options, &acts.concat(), name)?;
        }
    }
    Ok(())
}
