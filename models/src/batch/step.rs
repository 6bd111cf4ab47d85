//! A step of a batch: what is asked for is checked, gets its pages, is written down, and runs.

use std::collections::HashSet;

use super::inputs::NOWHERE;
use super::pages::Prefix;
use super::visual::StepVisual;
use super::{
    Batch, BatchAdapters, BatchError, BatchOptions, Bucket, ONE, SEVERAL, StepOutput, Work, WorkLogits,
};
use crate::LogitRows;
use crate::decoder::LogitArgs;
use crate::layers::{Group, Keys, SharedPages, Span, Step};
use crate::recording::Recording;
use host::{Error, Invariance, Stream, nvtx};

impl Batch {
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
        if let Err(error) = result {
            self.filled.logits.clear();
            return Err(error.into());
        }
        self.stats.steps += 1;
        let is_shared = self.filled.groups.iter().any(|group| group.prefix > 0);
        self.stats.shared_prefix_steps += u64::from(is_shared);
        self.stats.computed_tokens += work.iter().map(|work| work.tokens as u64).sum::<u64>();
        if self.options.prefix_cache && !self.is_recurrent {
            self.register(work);
        }
        Ok(StepOutput { logits: self.logits()?, rows: &self.rows })
    }

    /// The logits of the last step, as its output has them: to look at sequences' tokens beside. None behind a step
    /// that the device has failed at.
    ///
    /// **Errors**: none but those of views.
    pub fn logits(&self) -> Result<LogitRows<'_>, Error> {
        let logits = self.logits.view().slice(0, 0..self.filled.logits.len())?;
        Ok(LogitRows::new(logits, &self.stream))
    }

    fn check_work(&self, work: &[Work]) -> Result<(), BatchError> {
        if work.is_empty() {
            return Err(BatchError::NoWork);
        }
        let (mut seen, mut seeing) = (HashSet::new(), None);
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
            if self.sequence(id)?.sees(tokens)
                && let Some(first) = seeing.replace(id)
            {
                return Err(BatchError::SeveralVisuals { first, second: id });
            }
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
        let seeing = work.iter().filter_map(|work| Some((self.sequences.get(&work.id)?, work.tokens)));
        let seeing = seeing.filter(|(sequence, tokens)| sequence.sees(*tokens));
        let seen = seeing.filter_map(|(sequence, _)| sequence.visual.clone()).next();
        let rows = match (&mut self.visual, self.model.tower(), &seen, &self.filled.visual) {
            (Some(own), Some(tower), Some(visual), Some(step)) => {
                Some(own.rows_of(&self.stream, tower, (visual, step))?)
            }
            _ => None,
        };
        let visual = rows.as_ref();
        let Self { model, block, ropes, caches, inputs, filled, logits, recorded, adapters, .. } = self;
        // Rows without an adapter go another way beside those that have one: always that, if bits are to be the same.
        let is_invariant = model.device().invariance() == Invariance::Batch;
        let is_adapted = is_invariant || filled.adapters.iter().any(|&adapter| adapter != NOWHERE);
        let (tokens, asked) = (filled.ids.len(), filled.logits.len());
        let mut run = |stream: &Stream| {
            let [ids, positions, slots] = inputs.tokens(tokens)?;
            let (ropes, positions) = visual.map_or((&*ropes, positions), |rows| (rows.ropes, rows.positions));
            let group = |which: usize, sequences: usize| -> Result<_, Error> {
                let [lens, states, offsets, table] = inputs.group(which, sequences)?;
                let rows = if which == ONE { 0..padded } else { padded..tokens };
                let shared = match filled.groups[which].prefix {
                    0 => None,
                    _ => {
                        let [prefix, lens, table] = inputs.shared(which, sequences)?;
                        Some(SharedPages { prefix, table, lens })
                    }
                };
                let keys = Keys::Pages { table, lens, shared };
                let spans = if which == ONE { &[][..] } else { &spans };
                Ok(Group { rows, sequences, ragged: which == SEVERAL, states, offsets, keys, spans })
            };
            let one = (padded > 0).then(|| group(ONE, padded)).transpose()?;
            let several = (severals > 0).then(|| group(SEVERAL, severals)).transpose()?;
            let groups = &[one, several];
            let adapted = match adapters {
                Some(BatchAdapters { adapters, sorter }) if is_adapted => {
                    Some(sorter.run(stream, inputs.adapters(tokens)?, adapters)?)
                }
                _ => None,
            };
            let adapted = adapted.as_ref();
            let step = Step { stream, ropes, tokens, ids, positions, slots, groups, visual, adapted };
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
        // Those with images read what is not there the next time.
        if severals > 0 || visual.is_some() {
            return run(&self.stream);
        }
        let bucket = Bucket { sequences: padded, is_adapted, is_shared: filled.groups[ONE].prefix > 0 };
        let recorded = recorded.entry(bucket).or_insert_with(|| Recording::new(model.device()));
        // SAFETY: all of it is the batch's own, or the model's, which live as long as the recording, and work of the
        // same number of sequences, with adapters or without, behind a shared prefix or not, uses the same parts of it;
        // the stream is the batch's only one.
        unsafe { recorded.run(&self.stream, run) }
    }

    /// Writes down a step: ones first, up to `padded` of them, then the others. Returns what those have.
    fn fill(&mut self, work: &[Work], padded: usize) -> Result<Vec<Span>, Error> {
        let Self { filled, rows, sequences, options, adapters, sharing, .. } = self;
        let &mut BatchOptions { page_tokens, capacity, .. } = options;
        let width = options.pages_of(capacity);
        filled.clear();
        let sees = |work: &Work| sequences.get(&work.id).is_some_and(|own| own.sees(work.tokens));
        filled.visual = work.iter().any(sees).then(StepVisual::default);
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
                filled.positions.extend(places.clone().map(|place| sequence.position(place) as u32));
                if let Some(step) = &mut filled.visual {
                    step.axes.extend(places.clone().map(|place| sequence.axes(place)));
                    if let Some(visual) = sequence.visual.as_ref().filter(|_| sequence.sees(work.tokens)) {
                        step.put(visual, places.clone(), first);
                    }
                }
                let slot = |place: usize| {
                    sequence.pages[place / page_tokens] * page_tokens as u32 + (place % page_tokens) as u32
                };
                filled.slots.extend(places.map(slot));
                if adapters.is_some() {
                    let own = sequence.adapter.map_or(NOWHERE, |adapter| adapter as u32);
                    filled.adapters.resize(filled.ids.len(), own);
                }
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
                    if let Some(step) = &mut filled.visual {
                        step.axes.push([0; 3]);
                    }
                    filled.groups[ONE].push(1, 0, NOWHERE, &[], width);
                    if adapters.is_some() {
                        filled.adapters.push(NOWHERE);
                    }
                }
                if only_ones {
                    filled.logits.extend(0..padded as u32);
                }
            }
            if let Some(sharing) = sharing {
                let group = &mut filled.groups[which];
                let is_of_it = |work: &&Work| (work.tokens > 1) == (which == SEVERAL);
                let own = work.iter().filter(is_of_it);
                let (count, tokens) =
                    own.fold((0, 0), |(count, tokens), work| (count + 1, tokens + work.tokens));
                let pages = group.common_pages(count, page_tokens, width);
                if sharing.pays(count, tokens, pages * page_tokens) {
                    group.share(pages, page_tokens, width);
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
            let full = sequence.computed.min(sequence.plain_tokens()) / page_tokens;
            for index in sequence.prefixes.len()..full {
                let before = sequence.prefixes.last().copied();
                let before = before.unwrap_or_else(|| Prefix::of_adapter(sequence.adapter));
                let tokens = &sequence.tokens[index * page_tokens..(index + 1) * page_tokens];
                sequence.prefixes.push(self.pages.register(sequence.pages[index], before, tokens));
            }
        }
    }
}
