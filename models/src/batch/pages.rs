//! The pages of a batch's caches: which are free, how many sequences hold each, and which hold a known beginning of a
//! sequence.
//!
//! A page whose tokens are known stays findable when its last holder lets go of it, until its room is wanted: pages are
//! taken from the free ones first, then from those of the known that nobody has held for the longest time.

use std::collections::{BTreeMap, HashMap};

/// The beginning of a sequence, in whole pages: a number for it, the same for the same tokens as long as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Prefix(u64);

impl Prefix {
    /// Of no tokens, of sequences without an adapter.
    pub(super) const EMPTY: Prefix = Prefix(0);

    /// Of no tokens, of sequences with this adapter: what they compute is their own.
    pub(super) fn of_adapter(adapter: Option<usize>) -> Self {
        adapter.map_or(Self::EMPTY, |adapter| Prefix(adapter as u64 + 1))
    }
}

/// What a full page holds: its tokens, and those before them. The key itself, not a hash of it, so that nothing else is
/// ever found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Block {
    before: Prefix,
    tokens: Box<[u32]>,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// Sequences that have it.
    holders: usize,
    /// If it is known by its tokens: by which.
    block: Option<Block>,
    /// When its last holder let go of it, if it is known and has none.
    idle_since: u64,
}

/// The pages of all caches; they have the same numbers in each layer's.
#[derive(Debug)]
pub(super) struct Pages {
    pages: Vec<Page>,
    /// Neither held nor known.
    free: Vec<u32>,
    /// Known pages that nobody holds, by the time since when.
    idle: BTreeMap<u64, u32>,
    known: HashMap<Block, (u32, Prefix)>,
    time: u64,
    last_prefix: u64,
    evictions: u64,
}

impl Pages {
    /// So many pages, for sequences without an adapter and with any of so many.
    pub(super) fn new(count: usize, adapters: usize) -> Self {
        Pages {
            pages: vec![Page::default(); count],
            // The first ones first.
            free: (0..count as u32).rev().collect(),
            idle: BTreeMap::new(),
            known: HashMap::new(),
            time: 0,
            last_prefix: adapters as u64,
            evictions: 0,
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// How many can be taken: those that nobody holds.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// How many of them are known by their tokens.
    pub(super) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Known pages that were taken for something else.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// How many sequences have a page.
    pub(super) fn holders(&self, page: u32) -> usize {
        self.pages[page as usize].holders
    }

    /// A page for one holder; none if all are held.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.idle.pop_first()?;
                self.forget(page);
                self.evictions += 1;
                page
            }
        };
        self.pages[page as usize].holders = 1;
        Some(page)
    }

    /// One holder more of a page that has some, or is known.
    pub(super) fn hold(&mut self, page: u32) {
        let own = &mut self.pages[page as usize];
        if own.holders == 0 {
            self.idle.remove(&own.idle_since);
        }
        own.holders += 1;
    }

    /// One holder less.
    pub(super) fn release(&mut self, page: u32) {
        let own = &mut self.pages[page as usize];
        own.holders -= 1;
        if own.holders == 0 {
            if own.block.is_some() {
                self.time += 1;
                own.idle_since = self.time;
                self.idle.insert(self.time, page);
            } else {
                self.free.push(page);
            }
        }
    }

    /// The page with these tokens behind that beginning, and the beginning that ends with it.
    pub(super) fn find(&self, before: Prefix, tokens: &[u32]) -> Option<(u32, Prefix)> {
        self.known.get(&Block { before, tokens: tokens.into() }).copied()
    }

    /// Makes a held page known by its tokens, unless another is; the beginning that ends with them.
    pub(super) fn register(&mut self, page: u32, before: Prefix, tokens: &[u32]) -> Prefix {
        let block = Block { before, tokens: tokens.into() };
        if let Some(&(_, prefix)) = self.known.get(&block) {
            return prefix;
        }
        self.forget(page);
        self.last_prefix += 1;
        let prefix = Prefix(self.last_prefix);
        self.known.insert(block.clone(), (page, prefix));
        self.pages[page as usize].block = Some(block);
        prefix
    }

    /// Makes a page unknown, as its tokens will be others. One that is idle has been taken from there before.
    pub(super) fn forget(&mut self, page: u32) {
        if let Some(block) = self.pages[page as usize].block.take() {
            self.known.remove(&block);
        }
    }

    /// Makes all pages unknown that nobody holds.
    pub(super) fn forget_idle(&mut self) {
        while let Some((_, page)) = self.idle.pop_first() {
            self.forget(page);
            self.free.push(page);
        }
    }

    /// What must hold at any time, for the pages of all sequences, one after the other: a sentence for what does not.
    #[cfg(debug_assertions)]
    pub(super) fn check<'a>(&self, held: impl Iterator<Item = &'a u32>) -> Result<(), String> {
        let count = |pages: &mut dyn Iterator<Item = &u32>| {
            let mut counts = vec![0; self.pages.len()];
            pages.for_each(|&page| counts[page as usize] += 1);
            counts
        };
        let (holders, free, idle) =
            (count(&mut { held }), count(&mut self.free.iter()), count(&mut self.idle.values()));
        for (index, page) in self.pages.iter().enumerate() {
            let found =
                page.block.as_ref().map(|block| self.known.get(block).map(|&(page, _)| page as usize));
            let is_sound = page.holders == holders[index]
                && free[index] == usize::from(page.holders == 0 && page.block.is_none())
                && idle[index] == usize::from(page.holders == 0 && page.block.is_some())
                && found.is_none_or(|found| found == Some(index));
            if !is_sound {
                let of = [holders[index], free[index], idle[index]];
                return Err(format!("page {index} is {page:?}, held, free and idle {of:?} times"));
            }
        }
        let known = self.pages.iter().filter(|page| page.block.is_some()).count();
        if known == self.known.len() {
            Ok(())
        } else {
            Err(format!("{known} known pages of {}", self.known.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_pages_are_found_until_their_room_is_wanted() {
        let mut pages = Pages::new(3, 1);
        let [a, b] = [(); 2].map(|()| pages.take().expect("free"));
        let first = pages.register(a, Prefix::EMPTY, &[1, 2]);
        let second = pages.register(b, first, &[3, 4]);
        assert_eq!(pages.register(a, Prefix::EMPTY, &[1, 2]), first, "again");
        // The later part of a sequence is given up before what comes before it.
        pages.release(b);
        pages.release(a);
        assert_eq!((pages.available(), pages.idle()), (3, 2));
        assert_eq!(pages.find(Prefix::EMPTY, &[1, 2]), Some((a, first)));
        assert_eq!(pages.find(first, &[3, 4]), Some((b, second)));
        assert_eq!(pages.find(Prefix::EMPTY, &[3, 4]), None, "behind other tokens");
        assert_eq!(pages.find(Prefix::of_adapter(Some(0)), &[1, 2]), None, "of another adapter");
        let c = pages.take().expect("the third");
        assert_ne!(c, b);
        assert_eq!((pages.take(), pages.evictions()), (Some(b), 1));
        assert_eq!(
            (pages.find(Prefix::EMPTY, &[1, 2]), pages.find(first, &[3, 4])),
            (Some((a, first)), None)
        );
        pages.hold(a);
        assert_eq!((pages.take(), pages.available()), (None, 0));
        pages.check([a, b, c].iter()).expect("sound");
    }

    #[derive(Clone, Debug)]
    enum Act {
        Take,
        Hold(usize),
        Release(usize),
        Register(usize, u32),
        Find(u32),
        Forget,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => Just(Act::Take),
            2 => any::<usize>().prop_map(Act::Hold),
            3 => any::<usize>().prop_map(Act::Release),
            3 => (any::<usize>(), 0..6u32).prop_map(|(page, token)| Act::Register(page, token)),
            3 => (0..6u32).prop_map(Act::Find),
            1 => Just(Act::Forget),
        ]
    }

    proptest! {
        /// No page is lost or given twice, and what is found has the tokens that are asked for.
        #[test]
        fn accounts_are_exact(count in 0..6usize, acts in proptest::collection::vec(act(), 0..60)) {
            let mut pages = Pages::new(count, 0);
            let mut held: Vec<u32> = Vec::new();
            let mut content: HashMap<u32, u32> = HashMap::new();
            for act in acts {
                match act {
                    Act::Take => {
                        let available = pages.available();
                        let page = pages.take();
                        prop_assert_eq!(page.is_some(), available > 0);
                        if let Some(page) = page {
                            prop_assert!(!held.contains(&page));
                            content.remove(&page);
                            held.push(page);
                        }
                    }
                    Act::Hold(index) if !held.is_empty() => {
                        let page = held[index % held.len()];
                        pages.hold(page);
                        held.push(page);
                    }
                    Act::Release(index) if !held.is_empty() => pages.release(held.swap_remove(index % held.len())),
                    Act::Register(index, token) if !held.is_empty() => {
                        let page = held[index % held.len()];
                        let had = pages.find(Prefix::EMPTY, &[token]);
                        pages.register(page, Prefix::EMPTY, &[token]);
                        if had.is_none() {
                            content.insert(page, token);
                        }
                    }
                    Act::Find(token) => {
                        if let Some((page, _)) = pages.find(Prefix::EMPTY, &[token]) {
                            prop_assert_eq!(content.get(&page), Some(&token));
                            pages.hold(page);
                            held.push(page);
                        }
                    }
                    Act::Forget => pages.forget_idle(),
                    _ => {}
                }
                prop_assert_eq!(pages.check(held.iter()), Ok(()));
            }
            held.drain(..).for_each(|page| pages.release(page));
            prop_assert_eq!(pages.available(), count);
        }
    }
}
