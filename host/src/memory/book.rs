//! The pool's book: which parts of the device's memory are free, and in whose order they were used last. No call goes
//! to the device here.
//!
//! What the device gave in one call is a *segment*; a segment is cut into *pieces*, which lie side by side, each either
//! live or free. A segment of fewer bytes than the book divides is one piece for ever, and is given out for its own
//! size only: small blocks are kept by size class. Larger segments are divided: a request takes the smallest free piece
//! that holds it (*best fit*), what is left of the piece stays free, and free neighbours become one piece again.
//!
//! A free piece belongs to the queue that used it last, whose later work needs no wait, or to nobody, where all work
//! with it is known to be done. Only pieces of one owner become one piece, but for those of nobody, which join a
//! neighbour of the queue that frees or asks.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{PoolPiece, PoolSegment};
use crate::error::Error;
use crate::queue::Queue;

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PieceId(u32);

/// Memory that the device gave in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentId(u32);

#[derive(Debug)]
struct Piece {
    segment: SegmentId,
    address: u64,
    bytes: usize,
    before: Option<PieceId>,
    after: Option<PieceId>,
    state: PieceState,
}

#[derive(Debug)]
enum PieceState {
    Live,
    Free(Free),
    /// Of no segment: joined with a neighbour, or its segment went back to the device.
    Gone,
}

#[derive(Clone, Debug)]
struct Free {
    /// Whose work may still be under way; none where all is done.
    owner: Option<Queue>,
    /// The book's clock when it was freed.
    freed_at: u64,
}

#[derive(Debug)]
struct Segment {
    address: u64,
    bytes: usize,
    first: PieceId,
    num_live: usize,
    /// Its neighbours in the order of becoming free, while no piece is live.
    older: Option<SegmentId>,
    newer: Option<SegmentId>,
}

/// Things by number, whose numbers are used again.
#[derive(Debug)]
struct Slab<T> {
    items: Vec<T>,
    vacant: Vec<u32>,
}

impl<T> Slab<T> {
    /// The number that the next thing gets.
    fn next(&self) -> u32 {
        self.vacant.last().copied().unwrap_or(self.items.len() as u32)
    }

    fn add(&mut self, item: T) -> u32 {
        match self.vacant.pop() {
            Some(index) => {
                self.items[index as usize] = item;
                index
            }
            None => {
                self.items.push(item);
                (self.items.len() - 1) as u32
            }
        }
    }
}

/// Free pieces by size, of those of a size the one that was freed last first.
type Sizes = BTreeSet<(usize, Reverse<u64>, PieceId)>;

/// The free pieces of an owner.
#[derive(Debug)]
struct List {
    owner: Option<Queue>,
    /// Whole segments of fewer bytes than are divided.
    whole: Sizes,
    /// Pieces of segments that are divided.
    pieces: Sizes,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Book {
    pieces: Slab<Piece>,
    segments: Slab<Segment>,
    /// One for each owner, in no order; few, since only queues that hold free memory have one.
    lists: Vec<List>,
    /// Ends of the list of segments without live pieces.
    oldest: Option<SegmentId>,
    newest: Option<SegmentId>,
    /// Segments of at least so many bytes are divided.
    divided_from: usize,
    clock: u64,
}

impl Book {
    /// A book without segments. Segments of at least `divided_from` bytes will be divided.
    pub(super) fn new(divided_from: usize) -> Self {
        Book {
            pieces: Slab { items: Vec::new(), vacant: Vec::new() },
            segments: Slab { items: Vec::new(), vacant: Vec::new() },
            lists: Vec::new(),
            oldest: None,
            newest: None,
            divided_from,
            clock: 0,
        }
    }

    /// Whether blocks of so many bytes are cut from larger segments.
    pub(super) fn divides(&self, bytes: usize) -> bool {
        bytes >= self.divided_from
    }

    /// The piece's address.
    pub(super) fn address(&self, id: PieceId) -> u64 {
        self.piece(id).address
    }

    /// Bytes of the largest free piece.
    pub(super) fn largest_free(&self) -> usize {
        let largest = |sizes: &Sizes| sizes.last().map_or(0, |&(bytes, ..)| bytes);
        self.lists.iter().map(|list| largest(&list.whole).max(largest(&list.pieces))).max().unwrap_or(0)
    }

    /// All segments, in no order, with their pieces.
    pub(super) fn segments(&self) -> Vec<PoolSegment> {
        let mut is_there = vec![true; self.segments.items.len()];
        for &id in &self.segments.vacant {
            is_there[id as usize] = false;
        }
        let ids = (0u32..).zip(is_there).filter(|&(_, is_there)| is_there).map(|(id, _)| SegmentId(id));
        ids.map(|id| {
            let (address, bytes) = self.place_of(id);
            let piece = |&id: &PieceId| {
                let piece = self.piece(id);
                PoolPiece { bytes: piece.bytes, is_live: matches!(piece.state, PieceState::Live) }
            };
            PoolSegment { address, bytes, pieces: self.pieces_of(id).iter().map(piece).collect() }
        })
        .collect()
    }

    /// Enters a segment that the device gave, all of it one live piece.
    pub(super) fn add(&mut self, address: u64, bytes: usize) -> PieceId {
        let first = PieceId(self.pieces.next());
        let segment = Segment { address, bytes, first, num_live: 1, older: None, newer: None };
        let segment = SegmentId(self.segments.add(segment));
        let piece = Piece { segment, address, bytes, before: None, after: None, state: PieceState::Live };
        PieceId(self.pieces.add(piece))
    }

    /// A free piece of `bytes` bytes that `queue` may use at once; live from here on.
    pub(super) fn take(&mut self, bytes: usize, queue: &Queue) -> Option<PieceId> {
        let usable = |list: &&List| list.owner.as_ref().is_none_or(|owner| owner == queue);
        let found = self.lists.iter().filter(usable).filter_map(|list| self.fit(list, bytes)).min()?;
        Some(self.claim(found.2, bytes))
    }

    /// A free piece of `bytes` bytes that another queue used last, which `queue` has to follow; live from here on.
    /// `is_barred` names queues that nobody may follow.
    pub(super) fn take_of_others(
        &mut self,
        bytes: usize,
        queue: &Queue,
        is_barred: impl Fn(&Queue) -> Result<bool, Error>,
    ) -> Result<Option<(PieceId, Queue)>, Error> {
        let mut best = None;
        for list in &self.lists {
            let Some(owner) = list.owner.as_ref().filter(|owner| *owner != queue) else { continue };
            let Some(found) = self.fit(list, bytes) else { continue };
            if best.as_ref().is_none_or(|(least, _)| found < *least) && !is_barred(owner)? {
                best = Some((found, owner.clone()));
            }
        }
        Ok(best.map(|((.., id), owner)| (self.claim(id, bytes), owner)))
    }

    /// The smallest free piece of a list that holds `bytes` bytes.
    fn fit(&self, list: &List, bytes: usize) -> Option<(usize, Reverse<u64>, PieceId)> {
        let (sizes, most) = match self.divides(bytes) {
            true => (&list.pieces, usize::MAX),
            false => (&list.whole, bytes),
        };
        let from = (bytes, Reverse(u64::MAX), PieceId(0));
        sizes.range(from..).next().copied().filter(|&(bytes, ..)| bytes <= most)
    }

    /// Makes the first `bytes` bytes of a free piece live.
    fn claim(&mut self, id: PieceId, bytes: usize) -> PieceId {
        let free = self.unlist(id);
        let &Piece { segment, address, bytes: whole, after, .. } = self.piece(id);
        if whole > bytes {
            let (address, state) = (address + bytes as u64, PieceState::Live);
            let rest = Piece { segment, address, bytes: whole - bytes, before: Some(id), after, state };
            let rest = PieceId(self.pieces.add(rest));
            if let Some(after) = after {
                self.piece_mut(after).before = Some(rest);
            }
            let piece = self.piece_mut(id);
            (piece.after, piece.bytes) = (Some(rest), bytes);
            self.list(rest, free);
        }
        self.piece_mut(id).state = PieceState::Live;
        if self.segment(segment).num_live == 0 {
            self.leave_order(segment);
        }
        self.segment_mut(segment).num_live += 1;
        id
    }

    /// A live piece is free, in `queue`'s order.
    pub(super) fn free(&mut self, id: PieceId, queue: Queue) {
        self.clock += 1;
        let free = Free { owner: Some(queue.clone()), freed_at: self.clock };
        let segment = self.piece(id).segment;
        self.join(id, free, &queue);
        self.segment_mut(segment).num_live -= 1;
        if self.segment(segment).num_live == 0 {
            self.enter_order(segment);
        }
    }

    /// Lists a piece as free, as one piece with its free neighbours: those of its owner, and where `queue` owns one of
    /// them and nobody the other.
    fn join(&mut self, id: PieceId, free: Free, queue: &Queue) {
        let Free { mut owner, freed_at } = free;
        let mut id = id;
        for is_after in [false, true] {
            let piece = self.piece(id);
            let Some(neighbour) = (if is_after { piece.after } else { piece.before }) else { continue };
            let PieceState::Free(Free { owner: other, .. }) = &self.piece(neighbour).state else { continue };
            let joined = match (&owner, other) {
                (Some(a), Some(b)) if a == b => owner.clone(),
                (None, None) => None,
                (Some(a), None) | (None, Some(a)) if a == queue => Some(queue.clone()),
                _ => continue,
            };
            self.unlist(neighbour);
            owner = joined;
            let (low, high) = if is_after { (id, neighbour) } else { (neighbour, id) };
            let &Piece { bytes, after, .. } = self.piece(high);
            self.piece_mut(high).state = PieceState::Gone;
            let piece = self.piece_mut(low);
            piece.bytes += bytes;
            piece.after = after;
            if let Some(after) = after {
                self.piece_mut(after).before = Some(low);
            }
            self.pieces.vacant.push(high.0);
            id = low;
        }
        self.list(id, Free { owner, freed_at });
    }

    /// Takes the pieces of queues whose work is done from them, so that they become one piece with their neighbours and
    /// anybody's; and `queue`'s with those of nobody. Segments that are not divided stay as they are, since a queue can
    /// follow their owner.
    pub(super) fn gather(
        &mut self,
        queue: &Queue,
        is_done: impl Fn(&Queue) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let is_own = |list: &List| list.owner.as_ref() == Some(queue);
        if self.lists.iter().all(|list| list.pieces.is_empty() || is_own(list)) {
            return Ok(());
        }
        let mut done = Vec::new();
        for list in self.lists.iter().filter(|list| !list.pieces.is_empty()) {
            if list.owner.as_ref().map_or(Ok(true), &is_done)? {
                done.extend(list.pieces.iter().map(|&(.., id)| id));
            }
        }
        for &id in &done {
            let Free { freed_at, .. } = self.unlist(id);
            self.list(id, Free { owner: None, freed_at });
        }
        for id in done {
            // Those that a neighbour has taken in are gone.
            if let PieceState::Free(_) = self.piece(id).state {
                let free = self.unlist(id);
                self.join(id, free, queue);
            }
        }
        self.lists.retain(|list| !list.pieces.is_empty() || !list.whole.is_empty());
        Ok(())
    }

    /// Takes the segment without live pieces that has been so for longest from the lists: nothing of it is taken until
    /// it is back or removed.
    pub(super) fn withdraw_oldest(&mut self) -> Option<SegmentId> {
        let id = self.oldest?;
        self.leave_order(id);
        for piece in self.pieces_of(id) {
            let free = self.unlist(piece);
            self.piece_mut(piece).state = PieceState::Free(free);
        }
        Some(id)
    }

    /// Puts a segment that was withdrawn back: its pieces are free as they were.
    pub(super) fn put_back(&mut self, id: SegmentId) {
        for piece in self.pieces_of(id) {
            if let PieceState::Free(free) = &self.piece(piece).state {
                let free = free.clone();
                self.list(piece, free);
            }
        }
        self.enter_order(id);
    }

    /// Forgets a segment that was withdrawn, since the device has it back.
    pub(super) fn remove(&mut self, id: SegmentId) {
        for piece in self.pieces_of(id) {
            self.piece_mut(piece).state = PieceState::Gone;
            self.pieces.vacant.push(piece.0);
        }
        self.segments.vacant.push(id.0);
    }

    /// Address and bytes of a segment.
    pub(super) fn place_of(&self, id: SegmentId) -> (u64, usize) {
        let Segment { address, bytes, .. } = *self.segment(id);
        (address, bytes)
    }

    fn pieces_of(&self, id: SegmentId) -> Vec<PieceId> {
        let first = Some(self.segment(id).first);
        std::iter::successors(first, |&piece| self.piece(piece).after).collect()
    }

    /// The index of an owner's list, which is made if there is none.
    fn list_of(&mut self, owner: &Option<Queue>) -> usize {
        if let Some(index) = self.lists.iter().position(|list| list.owner == *owner) {
            return index;
        }
        self.lists.push(List { owner: owner.clone(), whole: Sizes::new(), pieces: Sizes::new() });
        self.lists.len() - 1
    }

    /// Enters a piece into the list of its owner.
    fn list(&mut self, id: PieceId, free: Free) {
        let list = self.list_of(&free.owner);
        let (bytes, is_divided) = (self.piece(id).bytes, self.is_divided(id));
        let list = &mut self.lists[list];
        let sizes = if is_divided { &mut list.pieces } else { &mut list.whole };
        sizes.insert((bytes, Reverse(free.freed_at), id));
        self.piece_mut(id).state = PieceState::Free(free);
    }

    /// Takes a free piece from the list of its owner; the caller says what it is from here on.
    fn unlist(&mut self, id: PieceId) -> Free {
        let state = std::mem::replace(&mut self.piece_mut(id).state, PieceState::Gone);
        let PieceState::Free(free) = state else { unreachable!("a piece of a list is free") };
        let list = self.list_of(&free.owner);
        let (bytes, is_divided) = (self.piece(id).bytes, self.is_divided(id));
        let list = &mut self.lists[list];
        let sizes = if is_divided { &mut list.pieces } else { &mut list.whole };
        sizes.remove(&(bytes, Reverse(free.freed_at), id));
        free
    }

    fn is_divided(&self, id: PieceId) -> bool {
        self.divides(self.segment(self.piece(id).segment).bytes)
    }

    /// Enters a segment as the one that became free last.
    fn enter_order(&mut self, id: SegmentId) {
        let older = self.newest.replace(id);
        match older {
            Some(older) => self.segment_mut(older).newer = Some(id),
            None => self.oldest = Some(id),
        }
        let segment = self.segment_mut(id);
        (segment.older, segment.newer) = (older, None);
    }

    fn leave_order(&mut self, id: SegmentId) {
        let &Segment { older, newer, .. } = self.segment(id);
        match older {
            Some(older) => self.segment_mut(older).newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.segment_mut(newer).older = older,
            None => self.newest = older,
        }
    }

    fn piece(&self, id: PieceId) -> &Piece {
        &self.pieces.items[id.0 as usize]
    }

    fn piece_mut(&mut self, id: PieceId) -> &mut Piece {
        &mut self.pieces.items[id.0 as usize]
    }

    fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments.items[id.0 as usize]
    }

    fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments.items[id.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::profile::Place;
    use crate::simulator::tests::Script;

    const DIVIDED_FROM: usize = 16;
    const NUM_QUEUES: usize = 3;

    #[derive(Clone, Debug)]
    enum Step {
        /// Memory for a queue, while these queues are done and those are recorded.
        Take { bytes: usize, queue: usize, done: [bool; NUM_QUEUES], barred: [bool; NUM_QUEUES] },
        /// One of the live pieces is free, in the order of this queue.
        Free { which: usize, queue: usize },
        /// The oldest segments go back to the device, or would have and stay.
        Withdraw { count: usize, stay: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        let flags = any::<[bool; NUM_QUEUES]>;
        prop_oneof![
            5 => (1usize..64, 0..NUM_QUEUES, flags(), flags())
                .prop_map(|(bytes, queue, done, barred)| Step::Take { bytes, queue, done, barred }),
            5 => (any::<usize>(), 0..NUM_QUEUES).prop_map(|(which, queue)| Step::Free { which, queue }),
            1 => (1usize..4, any::<bool>()).prop_map(|(count, stay)| Step::Withdraw { count, stay }),
        ]
    }

    /// A byte of the device's memory.
    #[derive(Clone, Copy, Debug, Default)]
    struct Byte {
        is_live: bool,
        /// Whose work may still be under way with it.
        used_by: Option<usize>,
    }

    /// Cases, and most steps of a case: Miri takes some thousand times as long for each.
    const CASES: (u32, usize) = if cfg!(miri) { (2, 30) } else { (400, 200) };

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES.0) })]

        /// Against a model that knows each byte: nobody gets what another holds, or may still be working with unless it
        /// follows that; and at the end everything can go back, in the pieces that it came in.
        #[test]
        fn no_byte_is_given_twice(steps in prop::collection::vec(step(), 1..CASES.1)) {
            let queues: Vec<Queue> = (0..NUM_QUEUES as u32)
                .map(|number| Queue::Simulated(Script::new((8, 0), Ok(())), Place::Simulated(number)))
                .collect();
            let number = |queue: &Queue| queues.iter().position(|other| other == queue).unwrap();
            let mut book = Book::new(DIVIDED_FROM);
            let mut memory = BTreeMap::<u64, Byte>::new();
            let mut segments = BTreeMap::<u64, usize>::new();
            let mut live: Vec<(PieceId, usize)> = Vec::new();
            let mut next = 1000;
            let bytes_of = |id: PieceId, bytes: usize, book: &Book| book.address(id)..book.address(id) + bytes as u64;
            for step in steps {
                match step {
                    Step::Take { bytes, queue: q, done, barred } => {
                        let queue = &queues[q];
                        let mut followed = None;
                        let mut found = book.take(bytes, queue);
                        if found.is_none() && book.divides(bytes) {
                            let is_done = |queue: &Queue| Ok(done[number(queue)]);
                            let nothing_to_gain = {
                                let is_own = |list: &List| list.owner.as_ref() == Some(queue);
                                book.lists.iter().all(|list| list.pieces.is_empty() || is_own(list))
                            };
                            book.gather(queue, is_done).unwrap();
                            if !nothing_to_gain {
                                for byte in memory.values_mut().filter(|byte| !byte.is_live) {
                                    byte.used_by = byte.used_by.filter(|&user| !done[user]);
                                }
                            }
                            found = book.take(bytes, queue);
                        }
                        if found.is_none()
                            && let Some((id, other)) =
                                book.take_of_others(bytes, queue, |other| Ok(barred[number(other)])).unwrap()
                        {
                            prop_assert!(!barred[number(&other)] && number(&other) != q);
                            (found, followed) = (Some(id), Some(number(&other)));
                        }
                        let id = match found {
                            Some(id) => id,
                            None => {
                                let id = book.add(next, bytes);
                                segments.insert(next, bytes);
                                memory.extend((next..next + bytes as u64).map(|at| (at, Byte::default())));
                                // A gap now and then, so that segments lie side by side too.
                                next += bytes as u64 + (bytes % 2) as u64;
                                id
                            }
                        };
                        for at in bytes_of(id, bytes, &book) {
                            let byte = memory.get_mut(&at).expect("a byte of the device's");
                            prop_assert!(!byte.is_live, "{at}");
                            let known = byte.used_by.is_none_or(|user| user == q || Some(user) == followed);
                            prop_assert!(known, "{at}: {byte:?} for {q}, which follows {followed:?}");
                            *byte = Byte { is_live: true, used_by: Some(q) };
                        }
                        live.push((id, bytes));
                    }
                    Step::Free { .. } if live.is_empty() => {}
                    Step::Free { which, queue } => {
                        let (id, bytes) = live.swap_remove(which % live.len());
                        for at in bytes_of(id, bytes, &book) {
                            memory.insert(at, Byte { is_live: false, used_by: Some(queue) });
                        }
                        book.free(id, queues[queue].clone());
                    }
                    Step::Withdraw { count, stay } => {
                        let ids: Vec<SegmentId> = std::iter::from_fn(|| book.withdraw_oldest()).take(count).collect();
                        for id in ids {
                            let (address, bytes) = book.place_of(id);
                            prop_assert_eq!(segments.get(&address), Some(&bytes));
                            let mut at = address..address + bytes as u64;
                            prop_assert!(at.all(|at| !memory[&at].is_live));
                            if stay {
                                book.put_back(id);
                            } else {
                                book.remove(id);
                                segments.remove(&address);
                                memory.retain(|at, _| !(address..address + bytes as u64).contains(at));
                            }
                        }
                    }
                }
                let listed = |list: &List| list.whole.iter().chain(&list.pieces).map(|&(bytes, ..)| bytes).sum::<usize>();
                let free = memory.values().filter(|byte| !byte.is_live).count();
                prop_assert_eq!(book.lists.iter().map(listed).sum::<usize>(), free);
            }
            for (id, _) in live {
                book.free(id, queues[0].clone());
            }
            book.gather(&queues[0], |_| Ok(true)).unwrap();
            let whole = segments.values().filter(|&&bytes| book.divides(bytes)).max().copied();
            if book.lists.iter().all(|list| list.owner.is_none() || list.pieces.is_empty()) {
                let largest = book.lists.iter().filter_map(|list| list.pieces.last()).map(|&(bytes, ..)| bytes).max();
                prop_assert_eq!(largest, whole, "all of a segment is one piece");
            }
            while let Some(id) = book.withdraw_oldest() {
                let (address, bytes) = book.place_of(id);
                prop_assert_eq!(segments.remove(&address), Some(bytes));
                book.remove(id);
            }
            prop_assert!(segments.is_empty(), "{segments:?}");
            prop_assert_eq!(book.pieces.vacant.len(), book.pieces.items.len());
        }
    }
}
