//! The pool's book: which parts of the device's memory are free, and in whose order they were used last. No call goes
//! to the device here.
//!
//! What the device gave in one call is a *segment*; a segment is cut into *pieces*, which lie side by side, each either
//! live or free. A segment of fewer bytes than the book divides is one piece for ever, and is given out for its own
//! size only: small blocks are kept by size class. Larger segments are divided: a request takes the smallest free piece
//! that holds it (*best fit*), what is left of the piece stays free, and free neighbours become one piece again. Where
//! the device says that its segments join, those that lie side by side are divided as one: a piece may lie in several,
//! and a segment goes back when nothing of it is live, for which the free pieces around it are cut at its ends.
//!
//! A free piece belongs to the queue that used it last, whose later work needs no wait, or to nobody, where all work
//! with it is known to be done. Only pieces of one owner become one piece, but for those of nobody, which join a
//! neighbour of the queue that frees or asks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{PoolPiece, PoolSegment};
use crate::backing::Grant;
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
    /// In which it begins.
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
    /// In no list, and not to be joined: free, of a segment that may go back to the device.
    Withdrawn(Free),
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
    /// The piece that its first byte is of.
    first: PieceId,
    /// Live pieces that are of it, in part at least.
    num_live: usize,
    joins: bool,
    /// Those that lie side by side with it, and join.
    before: Option<SegmentId>,
    after: Option<SegmentId>,
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

/// A free piece that is to become longer.
#[derive(Debug)]
pub(super) struct Tail {
    pub(super) id: PieceId,
    pub(super) address: u64,
    pub(super) bytes: usize,
    free: Free,
}

impl Tail {
    /// Where it ends.
    pub(super) fn end(&self) -> u64 {
        self.address + self.bytes as u64
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Book {
    pieces: Slab<Piece>,
    segments: Slab<Segment>,
    /// Segments that join, by address.
    places: BTreeMap<u64, SegmentId>,
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
            places: BTreeMap::new(),
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

    /// All segments, in no order, with their pieces; those that are divided as one are one.
    pub(super) fn segments(&self) -> Vec<PoolSegment> {
        let mut begins = vec![true; self.segments.items.len()];
        for &id in &self.segments.vacant {
            begins[id as usize] = false;
        }
        let ids = (0u32..).zip(begins).filter(|&(_, begins)| begins).map(|(id, _)| SegmentId(id));
        let first = ids.filter(|&id| self.segment(id).before.is_none());
        first
            .map(|id| {
                let joined = std::iter::successors(Some(id), |&id| self.segment(id).after);
                let piece = |&id: &PieceId| {
                    let piece = self.piece(id);
                    PoolPiece { bytes: piece.bytes, is_live: matches!(piece.state, PieceState::Live) }
                };
                let pieces = std::iter::successors(Some(self.segment(id).first), |&id| self.piece(id).after);
                PoolSegment {
                    address: self.segment(id).address,
                    bytes: joined.map(|id| self.segment(id).bytes).sum(),
                    pieces: pieces.collect::<Vec<_>>().iter().map(piece).collect(),
                }
            })
            .collect()
    }

    /// Enters a segment that the device gave. The first `bytes` bytes of it are a live piece; where there is a `tail`,
    /// a live piece of [`Book::take_tail`] that ends where the segment begins, the first `bytes` bytes of both are.
    pub(super) fn add(&mut self, grant: Grant, tail: Option<PieceId>, bytes: usize) -> PieceId {
        let Grant { address, bytes: all, joins } = grant;
        let first = PieceId(self.pieces.next());
        let segment = Segment {
            address,
            bytes: all,
            first,
            num_live: 0,
            joins,
            before: None,
            after: None,
            older: None,
            newer: None,
        };
        let segment = SegmentId(self.segments.add(segment));
        let piece =
            Piece { segment, address, bytes: all, before: None, after: None, state: PieceState::Live };
        let mut id = PieceId(self.pieces.add(piece));
        // Everything enters the order, and leaves it with its first live piece.
        self.enter_order(segment);
        self.count_live(id, true);
        if joins {
            self.link(segment);
        }
        if let Some(tail) = tail {
            self.count_live(id, false);
            self.count_live(tail, false);
            self.merge(tail, id);
            id = tail;
            self.count_live(id, true);
        }
        if self.piece(id).bytes > bytes {
            self.count_live(id, false);
            let rest = self.split(id, bytes);
            self.count_live(id, true);
            self.clock += 1;
            // Nobody has used it: a tail that holds all that was asked for would have been taken as it is.
            self.join(rest, Free { owner: None, freed_at: self.clock }, None);
        }
        id
    }

    /// Makes a segment the neighbour of those that it lies side by side with, and its one piece that of theirs.
    fn link(&mut self, id: SegmentId) {
        let &Segment { address, bytes, first, .. } = self.segment(id);
        let before = self.places.range(..address).next_back().map(|(_, &before)| before);
        let before = before.filter(|&before| {
            let Segment { address: start, bytes, .. } = *self.segment(before);
            start + bytes as u64 == address
        });
        let after = self.places.get(&(address + bytes as u64)).copied();
        self.places.insert(address, id);
        if let Some(before) = before {
            let last = self.last_of(before);
            (self.segment_mut(before).after, self.segment_mut(id).before) = (Some(id), Some(before));
            (self.piece_mut(last).after, self.piece_mut(first).before) = (Some(first), Some(last));
        }
        if let Some(after) = after {
            // Nothing lay before it, so its first piece begins with it.
            let next = self.segment(after).first;
            (self.segment_mut(after).before, self.segment_mut(id).after) = (Some(id), Some(after));
            (self.piece_mut(next).before, self.piece_mut(first).after) = (Some(first), Some(next));
        }
    }

    /// The piece that a segment's last byte is of, of a segment with none behind it.
    fn last_of(&self, id: SegmentId) -> PieceId {
        let mut last = self.segment(id).first;
        while let Some(after) = self.piece(last).after {
            last = after;
        }
        last
    }

    /// The largest free piece with nothing behind it, of segments that join, that `queue` may use at once.
    fn tail(&self, queue: &Queue) -> Option<(usize, PieceId)> {
        let usable = |list: &&List| list.owner.as_ref().is_none_or(|owner| owner == queue);
        let pieces = self.lists.iter().filter(usable).flat_map(|list| &list.pieces);
        let is_tail = |id: PieceId| {
            let Piece { segment, after, .. } = *self.piece(id);
            after.is_none() && self.segment(segment).joins
        };
        pieces.filter(|&&(.., id)| is_tail(id)).max().map(|&(bytes, .., id)| (bytes, id))
    }

    /// Bytes of what [`Book::take_tail`] would take.
    pub(super) fn tail_bytes(&self, queue: &Queue) -> usize {
        self.tail(queue).map_or(0, |(bytes, _)| bytes)
    }

    /// A free piece behind which the device may have more memory, that `queue` may use at once: live from here on. It
    /// is to be given to [`Book::add`], or back to [`Book::put_back_tail`].
    pub(super) fn take_tail(&mut self, queue: &Queue) -> Option<Tail> {
        let (bytes, id) = self.tail(queue)?;
        let free = self.unlist(id);
        self.piece_mut(id).state = PieceState::Live;
        self.count_live(id, true);
        Some(Tail { id, free, address: self.piece(id).address, bytes })
    }

    /// The tail is as it was.
    pub(super) fn put_back_tail(&mut self, tail: Tail) {
        self.count_live(tail.id, false);
        let owner = tail.free.owner.clone();
        self.join(tail.id, tail.free, owner.as_ref());
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
        if self.piece(id).bytes > bytes {
            let rest = self.split(id, bytes);
            self.list(rest, free);
        }
        self.piece_mut(id).state = PieceState::Live;
        self.count_live(id, true);
        id
    }

    /// Cuts a piece that is in no list behind its first `bytes` bytes: the second part, in no list either.
    fn split(&mut self, id: PieceId, bytes: usize) -> PieceId {
        let &Piece { mut segment, address, bytes: whole, after, .. } = self.piece(id);
        let (address, end) = (address + bytes as u64, address + whole as u64);
        let ends_before = |book: &Self, segment: SegmentId| {
            let Segment { address: start, bytes, .. } = *book.segment(segment);
            start + bytes as u64 <= address
        };
        while ends_before(self, segment)
            && let Some(next) = self.segment(segment).after
        {
            segment = next;
        }
        let state = PieceState::Live;
        let rest = Piece { segment, address, bytes: whole - bytes, before: Some(id), after, state };
        let rest = PieceId(self.pieces.add(rest));
        if let Some(after) = after {
            self.piece_mut(after).before = Some(rest);
        }
        let piece = self.piece_mut(id);
        (piece.after, piece.bytes) = (Some(rest), bytes);
        self.begin_with(segment, address..end, rest);
        rest
    }

    /// Makes one piece of two that lie side by side, both in no list.
    fn merge(&mut self, low: PieceId, high: PieceId) {
        let &Piece { segment, address, bytes, after, .. } = self.piece(high);
        self.begin_with(segment, address..address + bytes as u64, low);
        self.piece_mut(high).state = PieceState::Gone;
        let piece = self.piece_mut(low);
        piece.bytes += bytes;
        piece.after = after;
        if let Some(after) = after {
            self.piece_mut(after).before = Some(low);
        }
        self.pieces.vacant.push(high.0);
    }

    /// The segments from this one on that begin in a range have this first piece.
    fn begin_with(&mut self, segment: SegmentId, range: Range<u64>, first: PieceId) {
        let mut next = Some(segment);
        while let Some(id) = next
            && self.segment(id).address < range.end
        {
            let segment = self.segment_mut(id);
            if segment.address >= range.start {
                segment.first = first;
            }
            next = segment.after;
        }
    }

    /// A piece is one more, or one less, that is live in its segments.
    fn count_live(&mut self, id: PieceId, is_live: bool) {
        let &Piece { segment, address, bytes, .. } = self.piece(id);
        let (mut next, end) = (Some(segment), address + bytes as u64);
        while let Some(id) = next
            && self.segment(id).address < end
        {
            if is_live {
                if self.segment(id).num_live == 0 {
                    self.leave_order(id);
                }
                self.segment_mut(id).num_live += 1;
            } else {
                self.segment_mut(id).num_live -= 1;
                if self.segment(id).num_live == 0 {
                    self.enter_order(id);
                }
            }
            next = self.segment(id).after;
        }
    }

    /// A live piece is free, in `queue`'s order.
    pub(super) fn free(&mut self, id: PieceId, queue: Queue) {
        self.clock += 1;
        let free = Free { owner: Some(queue.clone()), freed_at: self.clock };
        self.count_live(id, false);
        self.join(id, free, Some(&queue));
    }

    /// Lists a piece as free, as one piece with its free neighbours: those of its owner, and where `queue` owns one of
    /// them and nobody the other.
    fn join(&mut self, id: PieceId, free: Free, queue: Option<&Queue>) {
        let Free { mut owner, freed_at } = free;
        let mut id = id;
        for is_after in [false, true] {
            let piece = self.piece(id);
            let Some(neighbour) = (if is_after { piece.after } else { piece.before }) else { continue };
            let PieceState::Free(Free { owner: other, .. }) = &self.piece(neighbour).state else { continue };
            let joined = match (&owner, other) {
                (Some(a), Some(b)) if a == b => owner.clone(),
                (None, None) => None,
                (Some(a), None) | (None, Some(a)) if Some(a) == queue => Some(a.clone()),
                _ => continue,
            };
            self.unlist(neighbour);
            owner = joined;
            let (low, high) = if is_after { (id, neighbour) } else { (neighbour, id) };
            self.merge(low, high);
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
                self.join(id, free, Some(queue));
            }
        }
        self.lists.retain(|list| !list.pieces.is_empty() || !list.whole.is_empty());
        Ok(())
    }

    /// The other queues that have free pieces.
    pub(super) fn owners(&self, queue: &Queue) -> Vec<Queue> {
        let owners =
            self.lists.iter().filter(|list| !list.pieces.is_empty()).filter_map(|list| list.owner.as_ref());
        owners.filter(|owner| *owner != queue).cloned().collect()
    }

    /// Takes a queue's pieces from its list: nobody takes them until they are back.
    pub(super) fn set_aside(&mut self, owner: &Queue) -> Vec<PieceId> {
        let lists = self.lists.iter().filter(|list| list.owner.as_ref() == Some(owner));
        let ids: Vec<PieceId> = lists.flat_map(|list| list.pieces.iter().map(|&(.., id)| id)).collect();
        for &id in &ids {
            let free = self.unlist(id);
            self.piece_mut(id).state = PieceState::Withdrawn(free);
        }
        ids
    }

    /// Puts pieces back that were set aside, where there is a queue as ones of that, which has followed their owner.
    pub(super) fn bring_back(&mut self, ids: &[PieceId], queue: Option<&Queue>) {
        for &id in ids {
            if let PieceState::Withdrawn(Free { owner, freed_at }) = &self.piece(id).state {
                let owner = queue.or(owner.as_ref()).cloned();
                let free = Free { owner: owner.clone(), freed_at: *freed_at };
                self.join(id, free, owner.as_ref());
            }
        }
    }

    /// Takes the segment without live pieces that has been so for longest from the lists: nothing of it is taken until
    /// it is back or removed.
    pub(super) fn withdraw_oldest(&mut self) -> Option<SegmentId> {
        let id = self.oldest?;
        self.leave_order(id);
        let (start, bytes) = self.place_of(id);
        self.cut_at(self.segment(id).first, start);
        // Where it ends, its last piece can go on.
        let last = *self.pieces_of(id).last()?;
        self.cut_at(last, start + bytes as u64);
        for piece in self.pieces_of(id) {
            let free = self.unlist(piece);
            self.piece_mut(piece).state = PieceState::Withdrawn(free);
        }
        Some(id)
    }

    /// Makes two of a free piece that an address is within.
    fn cut_at(&mut self, id: PieceId, at: u64) {
        let Piece { address, bytes, .. } = *self.piece(id);
        if address < at && at < address + bytes as u64 {
            let free = self.unlist(id);
            let rest = self.split(id, (at - address) as usize);
            self.list(id, free.clone());
            self.list(rest, free);
        }
    }

    /// Puts a segment that was withdrawn back: its pieces are free as they were.
    pub(super) fn put_back(&mut self, id: SegmentId) {
        for piece in self.pieces_of(id) {
            if let PieceState::Withdrawn(free) = &self.piece(piece).state {
                let free = free.clone();
                let owner = free.owner.clone();
                self.join(piece, free, owner.as_ref());
            }
        }
        self.enter_order(id);
    }

    /// Forgets a segment that was withdrawn, since the device has it back.
    pub(super) fn remove(&mut self, id: SegmentId) {
        for piece in self.pieces_of(id) {
            let Piece { before, after, .. } = *self.piece(piece);
            if let Some(before) = before {
                self.piece_mut(before).after = None;
            }
            if let Some(after) = after {
                self.piece_mut(after).before = None;
            }
            self.piece_mut(piece).state = PieceState::Gone;
            self.pieces.vacant.push(piece.0);
        }
        let Segment { address, joins, before, after, .. } = *self.segment(id);
        if let Some(before) = before {
            self.segment_mut(before).after = None;
        }
        if let Some(after) = after {
            self.segment_mut(after).before = None;
        }
        if joins {
            self.places.remove(&address);
        }
        self.segments.vacant.push(id.0);
    }

    /// Address and bytes of a segment.
    pub(super) fn place_of(&self, id: SegmentId) -> (u64, usize) {
        let Segment { address, bytes, .. } = *self.segment(id);
        (address, bytes)
    }

    /// Those that begin in a segment, and the one that its first byte is of.
    fn pieces_of(&self, id: SegmentId) -> Vec<PieceId> {
        let Segment { address, bytes, first, .. } = *self.segment(id);
        let is_of = |piece: &PieceId| self.piece(*piece).address < address + bytes as u64;
        std::iter::successors(Some(first), |&piece| self.piece(piece).after).take_while(is_of).collect()
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
        let Segment { bytes, joins, .. } = *self.segment(self.piece(id).segment);
        joins || self.divides(bytes)
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
mod tests;
