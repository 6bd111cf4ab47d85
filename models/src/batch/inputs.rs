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
    /// Keys that all of them begin with and that are read once for all: whole pages; 0 if there are none.
    pub(super) prefix: u32,
    /// Behind it, if there is one, keys of each and the table of their pages.
    pub(super) own_lens: Vec<u32>,
    pub(super) own_table: Vec<u32>,
}

impl Rows {
    pub(super) fn clear(&mut self) {
        let Rows { lens, states, offsets, table, prefix, own_lens, own_table } = self;
        [lens, states, offsets, table, own_lens, own_table].into_iter().for_each(Vec::clear);
        offsets.push(0);
        *prefix = 0;
    }

    /// A sequence with so many of the step's tokens and pages in a table `width` wide.
    pub(super) fn push(&mut self, tokens: usize, keys: usize, state: u32, pages: &[u32], width: usize) {
        self.lens.push(keys as u32);
        self.states.push(state);
        self.offsets.push(self.offsets[self.offsets.len() - 1] + tokens as u32);
        self.table.extend(pages);
        self.table.resize(self.lens.len() * width, 0);
    }

    /// Pages that the first so many sequences begin with, all of them the same ones, and all in front of the step's
    /// tokens.
    pub(super) fn common_pages(&self, sequences: usize, page_tokens: usize, width: usize) -> usize {
        let mut rows = self.table.chunks_exact(width).take(sequences);
        let Some(first) = rows.next() else { return 0 };
        let computed = |(len, offsets): (&u32, &[u32])| (len - (offsets[1] - offsets[0])) as usize;
        let computed = std::iter::zip(&self.lens, self.offsets.windows(2)).take(sequences).map(computed);
        let most = computed.min().unwrap_or(0) / page_tokens;
        rows.fold(most, |most, row| {
            std::iter::zip(&first[..most], row).take_while(|(first, page)| first == page).count()
        })
    }

    /// Makes the first so many pages of all sequences a prefix that is read once.
    pub(super) fn share(&mut self, pages: usize, page_tokens: usize, width: usize) {
        let Rows { lens, table, prefix, own_lens, own_table, .. } = self;
        *prefix = (pages * page_tokens) as u32;
        // What is there to fill a bucket has no keys.
        own_lens.extend(lens.iter().map(|len| len.saturating_sub(*prefix)));
        for row in table.chunks_exact(width) {
            own_table.extend(&row[pages..]);
            own_table.resize(own_table.len() + pages, 0);
        }
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
    /// each one's table; then, where sequences may share a prefix, of each group its keys, the lens behind it and their
    /// table.
    words: Tensor,
    tokens: usize,
    /// Words for the adapters of tokens: as many, or none.
    adapters: usize,
    logits: usize,
    sequences: [usize; 2],
    /// Columns of a table.
    pages: usize,
    shares: bool,
    /// What is uploaded, as it will lie there.
    staged: Vec<u32>,
}

impl Inputs {
    /// For so many tokens, which may have adapters, rows of logits, sequences of each group, and pages of each
    /// sequence, which may share some.
    pub(super) fn new(
        stream: &Stream,
        (tokens, has_adapters): (usize, bool),
        logits: usize,
        sequences: [usize; 2],
        (pages, shares): (usize, bool),
    ) -> Result<Self, Error> {
        let mut inputs = Inputs {
            words: Tensor::zeros(stream, &[0], DType::U32)?,
            tokens,
            adapters: if has_adapters { tokens } else { 0 },
            logits,
            sequences,
            pages,
            shares,
            staged: Vec::new(),
        };
        let words = inputs.of_shared(2);
        inputs.words = Tensor::zeros(stream, &[words], DType::U32)?;
        inputs.staged = vec![0; words];
        Ok(inputs)
    }

    /// Uploads a step: up to the end of the first group's table in one piece, and the other's, if there is one; what
    /// there is of a shared prefix in another for each group.
    pub(super) fn set(&mut self, stream: &Stream, filled: &Filled) -> Result<(), Error> {
        let Filled { ids, positions, slots, adapters, logits, groups, .. } = filled;
        let [first, second, third] = [0, 1, 2].map(|part| part * self.tokens);
        let places = [first, second, third, self.of_adapters(), self.of_logits()];
        let tables = [0, 1].map(|group| self.of_table(group));
        let of_groups = [0, 1].map(|group| {
            let [lens, states, offsets] = self.of_group(group);
            [lens, states, offsets, tables[group]]
        });
        let of_shared = [0, 1].map(|group| {
            let first = self.of_shared(group);
            [first, first + 1, first + 1 + self.sequences[group]]
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
        let mut shared = [0..0, 0..0];
        for (group, rows) in groups.iter().enumerate().filter(|(_, rows)| rows.prefix > 0) {
            let [prefix, lens, table] = of_shared[group];
            put(prefix, &[rows.prefix]);
            put(lens, &rows.own_lens);
            put(table, &rows.own_table);
            shared[group] = prefix..table + rows.own_table.len();
        }
        let [shared_first, shared_second] = shared;
        for range in [0..first, tables[1]..second, shared_first, shared_second] {
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

    /// Where begins what there is of a group's shared prefix; the end, for the group behind the last.
    fn of_shared(&self, group: usize) -> usize {
        let words = self.sequences[..group].iter().map(|sequences| 1 + sequences * (1 + self.pages));
        self.of_table(2) + if self.shares { words.sum::<usize>() } else { 0 }
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

    /// Of so many sequences of a group the keys of the prefix that they share, and the lens behind it and their table.
    pub(super) fn shared(&self, group: usize, len: usize) -> Result<[TensorView<'_>; 3], Error> {
        let first = self.of_shared(group);
        let table = self.part(first + 1 + self.sequences[group], len * self.pages)?;
        Ok([self.part(first, 1)?, self.part(first + 1, len)?, table.reshape(&[len, self.pages])?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of sequences with so many tokens of a step, so many keys and these pages of four tokens.
    fn rows(sequences: &[(usize, usize, &[u32])]) -> Rows {
        let mut rows = Rows::default();
        rows.clear();
        for &(tokens, keys, pages) in sequences {
            rows.push(tokens, keys, 0, pages, 4);
        }
        rows
    }

    #[test]
    fn common_pages_are_whole_and_of_all() {
        for (sequences, want) in [
            (&[(1, 13, &[7, 3, 5, 1][..]), (1, 14, &[7, 3, 5, 2])][..], 3),
            (&[(1, 13, &[7, 3, 5, 1]), (1, 14, &[7, 3, 4, 2])], 2),
            // Page by page, whatever is behind one that differs.
            (&[(1, 13, &[7, 3, 5, 1]), (1, 14, &[7, 2, 5, 1])], 1),
            (&[(1, 13, &[7, 3, 5, 1]), (1, 14, &[6, 3, 5, 1])], 0),
            // A page is shared with those alone that have computed all of it before.
            (&[(1, 13, &[7, 3, 5, 1]), (1, 12, &[7, 3, 5])], 2),
            (&[(1, 12, &[7, 3, 5]), (1, 13, &[7, 3, 5, 1])], 2),
            (&[(5, 13, &[7, 3, 5, 1]), (6, 13, &[7, 3, 5, 2])], 1),
            (&[(1, 13, &[7, 3, 5, 1]), (1, 13, &[7, 3, 5, 2]), (1, 9, &[7, 3, 8])], 2),
            (&[(1, 1, &[0]), (1, 13, &[0, 3, 5, 1])], 0),
            (&[], 0),
        ] {
            assert_eq!(rows(sequences).common_pages(sequences.len(), 4, 4), want, "{sequences:?}");
        }
    }

    #[test]
    fn what_is_behind_a_prefix() {
        let mut rows = rows(&[(1, 13, &[7, 3, 5, 1]), (1, 9, &[7, 3, 4]), (1, 0, &[])]);
        assert_eq!(rows.common_pages(2, 4, 4), 2, "but for what fills the bucket");
        rows.share(2, 4, 4);
        assert_eq!((rows.prefix, &rows.own_lens[..]), (8, &[5, 1, 0][..]));
        assert_eq!(rows.own_table, [[5, 1, 0, 0], [4, 0, 0, 0], [0; 4]].concat());
        assert_eq!((&rows.lens[..], &rows.table[..4]), (&[13, 9, 0][..], &[7, 3, 5, 1][..]));
        rows.clear();
        assert!(rows.prefix == 0 && rows.own_lens.is_empty() && rows.own_table.is_empty());
    }
}
