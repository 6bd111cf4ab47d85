//! What a step reads that differs from step to step, in device memory.

use abi::DType;

use super::visual::StepVisual;
use host::{Error, Stream, Tensor, TensorView};

/// For a token or a sequence that is only there to fill a bucket: beyond all slots and states, so that it leaves
/// nothing.
pub(super) const NOWHERE: u32 = u32::MAX;

/// A group's sequences.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    /// Keys of each.
    pub(super) lens: Vec<u32>,
    /// Where each one's state is.
    pub(super) states: Vec<u32>,
    /// Where each one's tokens begin, counted from the group's first, and their end.
    pub(super) offsets: Vec<u32>,
    /// Pages of each, a row of the planned width each.
    pub(super) table: Vec<u32>,
}

impl Rows {
    pub(super) fn clear(&mut self) {
        let Rows { lens, states, offsets, table } = self;
        [lens, states, offsets, table].into_iter().for_each(Vec::clear);
        offsets.push(0);
    }

    /// A sequence with so many of the step's tokens and pages in a table `width` wide.
    pub(super) fn push(&mut self, tokens: usize, keys: usize, state: u32, pages: &[u32], width: usize) {
        self.lens.push(keys as u32);
        self.states.push(state);
        self.offsets.push(self.offsets[self.offsets.len() - 1] + tokens as u32);
        self.table.extend(pages);
        self.table.resize(self.lens.len() * width, 0);
    }
}

/// What is uploaded for a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Filled {
    pub(super) ids: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) slots: Vec<u32>,
    /// The adapter of each token, where the batch has adapters.
    pub(super) adapters: Vec<u32>,
    /// Images, in a step that has some; nothing is uploaded of it here.
    pub(super) visual: Option<StepVisual>,
    /// Tokens whose logits are asked for.
    pub(super) logits: Vec<u32>,
    /// Sequences with one token, and those with several.
    pub(super) groups: [Rows; 2],
}

impl Filled {
    pub(super) fn clear(&mut self) {
        let Filled { ids, positions, slots, adapters, visual, logits, groups } = self;
        *visual = None;
        [ids, positions, slots, adapters, logits].into_iter().for_each(Vec::clear);
        groups.iter_mut().for_each(Rows::clear);
    }
}

/// Its place on the device.
#[derive(Debug)]
pub(super) struct Inputs {
    /// u32: ids, positions and slots of the tokens; tokens with logits; of each group lens, states and offsets; then
    /// each one's table.
    words: Tensor,
    tokens: usize,
    /// Words for the adapters of tokens: as many, or none.
    adapters: usize,
    logits: usize,
    sequences: [usize; 2],
    /// Columns of a table.
    pages: usize,
    /// What is uploaded, as it will lie there.
    staged: Vec<u32>,
}

impl Inputs {
    /// For so many tokens, which may have adapters, rows of logits, sequences of each group, and pages of each
    /// sequence.
    pub(super) fn new(
        stream: &Stream,
        (tokens, has_adapters): (usize, bool),
        logits: usize,
        sequences: [usize; 2],
        pages: usize,
    ) -> Result<Self, Error> {
        let mut inputs = Inputs {
            words: Tensor::zeros(stream, &[0], DType::U32)?,
            tokens,
            adapters: if has_adapters { tokens } else { 0 },
            logits,
            sequences,
            pages,
            staged: Vec::new(),
        };
        let words = inputs.of_table(1) + sequences[1] * pages;
        inputs.words = Tensor::zeros(stream, &[words], DType::U32)?;
        inputs.staged = vec![0; words];
        Ok(inputs)
    }

    /// Uploads a step: up to the end of the first group's table in one piece, and the other's, if there is one.
    pub(super) fn set(&mut self, stream: &Stream, filled: &Filled) -> Result<(), Error> {
        let Filled { ids, positions, slots, adapters, logits, groups, .. } = filled;
        let [first, second, third] = [0, 1, 2].map(|part| part * self.tokens);
        let places = [first, second, third, self.of_adapters(), self.of_logits()];
        let tables = [0, 1].map(|group| self.of_table(group));
        let of_groups = [0, 1].map(|group| {
            let [lens, states, offsets] = self.of_group(group);
            [lens, states, offsets, tables[group]]
        });
        let mut put = |place: usize, values: &[u32]| {
            self.staged[place..place + values.len()].copy_from_slice(values);
        };
        for (place, values) in std::iter::zip(places, [ids, positions, slots, adapters, logits]) {
            put(place, values);
        }
        for (of_group, rows) in std::iter::zip(of_groups, groups) {
            let parts = [&rows.lens, &rows.states, &rows.offsets, &rows.table];
            std::iter::zip(of_group, parts).for_each(|(place, values)| put(place, values));
        }
        let [first, second] = [0, 1].map(|group: usize| tables[group] + groups[group].table.len());
        for range in [0..first, tables[1]..second] {
            if !range.is_empty() {
                self.words.view_mut().slice(0, range.clone())?.write(stream, &self.staged[range])?;
            }
        }
        Ok(())
    }

    /// Where the tokens' adapters begin.
    fn of_adapters(&self) -> usize {
        3 * self.tokens
    }

    /// Where the tokens whose logits are asked for begin.
    fn of_logits(&self) -> usize {
        self.of_adapters() + self.adapters
    }

    /// Where the first so many groups end, but for their tables.
    fn behind(&self, groups: usize) -> usize {
        let words = self.sequences[..groups].iter().map(|sequences| 3 * sequences + 1);
        self.of_logits() + self.logits + words.sum::<usize>()
    }

    /// Where a group's lens, states and offsets begin.
    fn of_group(&self, group: usize) -> [usize; 3] {
        [0, 1, 2].map(|part| self.behind(group) + part * self.sequences[group])
    }

    /// Where a group's table begins.
    fn of_table(&self, group: usize) -> usize {
        self.behind(2) + self.sequences[..group].iter().map(|sequences| sequences * self.pages).sum::<usize>()
    }

    fn part(&self, first: usize, len: usize) -> Result<TensorView<'_>, Error> {
        self.words.view().slice(0, first..first + len)
    }

    /// Ids, positions and slots of so many tokens.
    pub(super) fn tokens(&self, len: usize) -> Result<[TensorView<'_>; 3], Error> {
        Ok([self.part(0, len)?, self.part(self.tokens, len)?, self.part(2 * self.tokens, len)?])
    }

    /// The adapters of so many tokens.
    pub(super) fn adapters(&self, len: usize) -> Result<TensorView<'_>, Error> {
        self.part(self.of_adapters(), len)
    }

    /// So many tokens whose logits are asked for.
    pub(super) fn logits(&self, len: usize) -> Result<TensorView<'_>, Error> {
        self.part(self.of_logits(), len)
    }

    /// Lens, states and offsets of so many sequences of a group, and their table.
    pub(super) fn group(&self, group: usize, len: usize) -> Result<[TensorView<'_>; 4], Error> {
        let [lens, states, offsets] = self.of_group(group);
        let table = self.part(self.of_table(group), len * self.pages)?.reshape(&[len, self.pages])?;
        Ok([self.part(lens, len)?, self.part(states, len)?, self.part(offsets, len + 1)?, table])
    }
}
