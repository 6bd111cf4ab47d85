//! The book against a model that knows each byte.

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
    /// A queue follows all the others that may be followed, and has what they have freed.
    Merge { queue: usize, fails: bool },
    /// The oldest segments go back to the device, or would have and stay.
    Withdraw { count: usize, stay: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let flags = any::<[bool; NUM_QUEUES]>;
    prop_oneof![
        5 => (1usize..64, 0..NUM_QUEUES, flags(), flags())
            .prop_map(|(bytes, queue, done, barred)| Step::Take { bytes, queue, done, barred }),
        5 => (any::<usize>(), 0..NUM_QUEUES).prop_map(|(which, queue)| Step::Free { which, queue }),
        1 => (0..NUM_QUEUES, any::<bool>()).prop_map(|(queue, fails)| Step::Merge { queue, fails }),
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
    fn no_byte_is_given_twice(steps in prop::collection::vec(step(), 1..CASES.1), joins in any::<bool>()) {
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
                        None if joins && book.divides(bytes) => {
                            // Behind the tail where the device has that free, as if it gave by eights.
                            let tail = book.take_tail(queue);
                            let is_next = tail.as_ref().is_some_and(|tail| tail.end() == next);
                            let free = tail.as_ref().filter(|_| is_next).map_or(0, |tail| tail.bytes);
                            let extended = match tail {
                                Some(tail) if is_next => Some(tail.id),
                                Some(tail) => {
                                    book.put_back_tail(tail);
                                    None
                                }
                                None => None,
                            };
                            let more = (bytes - free).next_multiple_of(8);
                            let id = book.add(Grant { address: next, bytes: more, joins }, extended, bytes);
                            segments.insert(next, more);
                            memory.extend((next..next + more as u64).map(|at| (at, Byte::default())));
                            next += more as u64 + (bytes % 5 == 0) as u64;
                            id
                        }
                        None => {
                            let id = book.add(Grant { address: next, bytes, joins: false }, None, bytes);
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
                Step::Merge { queue, fails } => {
                    for owner in book.owners(&queues[queue]) {
                        let aside = book.set_aside(&owner);
                        // Others free and take meanwhile.
                        if let Some((id, bytes)) = live.pop() {
                            for at in bytes_of(id, bytes, &book) {
                                memory.insert(at, Byte { is_live: false, used_by: Some(number(&owner)) });
                            }
                            book.free(id, owner.clone());
                        }
                        if !fails {
                            for at in aside.iter().flat_map(|&id| bytes_of(id, book.piece(id).bytes, &book)) {
                                memory.insert(at, Byte { is_live: false, used_by: Some(queue) });
                            }
                        }
                        book.bring_back(&aside, (!fails).then_some(&queues[queue]));
                    }
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
            consistent(&book)?;
        }
        for (id, _) in live {
            book.free(id, queues[0].clone());
        }
        book.gather(&queues[0], |_| Ok(true)).unwrap();
        // What is divided as one is one piece.
        let mut runs = Vec::<(u64, usize)>::new();
        for id in book.present() {
            let &Segment { address, bytes, joins, .. } = book.segment(id);
            if joins || book.divides(bytes) {
                runs.push((address, bytes));
            }
        }
        runs.sort();
        runs.dedup_by(|&mut (address, bytes), before| {
            let joined = joins && before.0 + before.1 as u64 == address;
            before.1 += if joined { bytes } else { 0 };
            joined
        });
        if book.lists.iter().all(|list| list.owner.is_none() || list.pieces.is_empty()) {
            let largest = book.lists.iter().filter_map(|list| list.pieces.last()).map(|&(bytes, ..)| bytes).max();
            prop_assert_eq!(largest, runs.iter().map(|&(_, bytes)| bytes).max());
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

impl Book {
    /// The segments that there are.
    fn present(&self) -> Vec<SegmentId> {
        (0..self.segments.items.len() as u32)
            .filter(|id| !self.segments.vacant.contains(id))
            .map(SegmentId)
            .collect()
    }
}

/// Every segment knows its first piece, its neighbours and how many live pieces are of it; pieces lie side by side.
fn consistent(book: &Book) -> Result<(), TestCaseError> {
    for id in book.present() {
        let segment = book.segment(id);
        let end = segment.address + segment.bytes as u64;
        let first = book.piece(segment.first);
        prop_assert!(
            first.address <= segment.address && segment.address < first.address + first.bytes as u64
        );
        let pieces = book.pieces_of(id);
        let live =
            pieces.iter().filter(|&&piece| matches!(book.piece(piece).state, PieceState::Live)).count();
        prop_assert_eq!(segment.num_live, live);
        let mut at = first.address;
        for &piece in &pieces {
            let Piece { segment: of, address, bytes, .. } = *book.piece(piece);
            prop_assert_eq!(address, at);
            let of = book.segment(of);
            prop_assert!(of.address <= address && address < of.address + of.bytes as u64);
            at += bytes as u64;
        }
        prop_assert!(at >= end);
        if let Some(after) = segment.after {
            prop_assert_eq!((book.segment(after).address, book.segment(after).before), (end, Some(id)));
        } else {
            prop_assert_eq!(at, end);
        }
    }
    Ok(())
}
