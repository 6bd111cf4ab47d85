//! What happened before what: vector clocks over the threads and asynchronous agents of a unit.
//!
//! A *unit* is what can synchronise within itself: a cluster, or a block where there are none. Its *actors* are its
//! threads, and beside them one agent for each stream of asynchronous work that completes in order (a thread's
//! `cp.async` groups, the copies of one mbarrier, …). An actor's time advances whenever it releases; an access is
//! stamped with its actor's time, and two accesses are ordered if the later actor has seen the earlier one's stamp.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

/// An actor of a unit at a time, packed: what a byte of memory remembers of its last accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp(u64);

const ACTOR_BITS: u32 = 14;
const TIME_BITS: u32 = 26;

/// The time at which actors start; the stamps below it are the marks of [`Stamp`].
pub(super) const START: u32 = 16;

impl Stamp {
    /// Nothing was ever written.
    pub(super) const NEVER: Stamp = Stamp(0);
    /// Written before the kernel.
    pub(super) const HOST: Stamp = Stamp(1);
    /// Kernels have no business here: a guard band.
    pub(super) const FORBIDDEN: Stamp = Stamp(2);
    /// The bytes of an mbarrier.
    pub(super) const MBARRIER: Stamp = Stamp(3);

    pub(super) fn new(unit: u32, actor: u32, time: u32) -> Self {
        debug_assert!(actor < 1 << ACTOR_BITS && time < 1 << TIME_BITS);
        Stamp(u64::from(unit) << (ACTOR_BITS + TIME_BITS) | u64::from(actor) << TIME_BITS | u64::from(time))
    }

    /// Whether it is one of the marks and no access.
    pub(super) fn is_mark(self) -> bool {
        self.0 < u64::from(START)
    }

    pub(super) fn unit(self) -> u32 {
        (self.0 >> (ACTOR_BITS + TIME_BITS)) as u32
    }

    pub(super) fn actor(self) -> u32 {
        (self.0 >> TIME_BITS) as u32 & ((1 << ACTOR_BITS) - 1)
    }

    pub(super) fn time(self) -> u32 {
        self.0 as u32 & ((1 << TIME_BITS) - 1)
    }
}

/// Times seen, by actor; an actor beyond the end has not been seen.
type Times = Vec<u32>;

/// The memories that a proxy fence can cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Covers {
    Shared,
    Global,
}

/// What an actor has seen of the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Frame {
    /// The latest time of each actor of the unit whose accesses lie before.
    seen: Times,
    /// The same, for what the asynchronous proxy sees too, by the memory that the proxy fence covers.
    proxied: [Times; 2],
    /// What was seen of other units.
    foreign: Option<Rc<BTreeMap<u32, Rc<Times>>>>,
}

fn at(times: &[u32], actor: u32) -> u32 {
    times.get(actor as usize).copied().unwrap_or(0)
}

fn raise(times: &mut Times, actor: u32, time: u32) {
    let index = actor as usize;
    if times.len() <= index {
        times.resize(index + 1, 0);
    }
    times[index] = times[index].max(time);
}

fn merge(into: &mut Times, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, b) in into.iter_mut().zip(from) {
        *a = (*a).max(*b);
    }
}

fn merge_foreign(
    into: &mut Option<Rc<BTreeMap<u32, Rc<Times>>>>,
    from: &Option<Rc<BTreeMap<u32, Rc<Times>>>>,
) {
    match (into.as_mut(), from) {
        (_, None) => {}
        (None, Some(from)) => *into = Some(from.clone()),
        (Some(a), Some(b)) if Rc::ptr_eq(a, b) => {}
        (Some(a), Some(b)) => {
            let a = Rc::make_mut(a);
            for (&unit, times) in b.iter() {
                match a.get_mut(&unit) {
                    None => _ = a.insert(unit, times.clone()),
                    Some(held) if Rc::ptr_eq(held, times) => {}
                    Some(held) => merge(Rc::make_mut(held), times),
                }
            }
        }
    }
}

impl Frame {
    fn merge(&mut self, other: &Frame) {
        merge(&mut self.seen, &other.seen);
        for (proxied, other) in self.proxied.iter_mut().zip(&other.proxied) {
            merge(proxied, other);
        }
        merge_foreign(&mut self.foreign, &other.foreign);
    }

    /// Marks an actor's work up to `time` as seen.
    pub(super) fn see(&mut self, actor: u32, time: u32) {
        raise(&mut self.seen, actor, time);
    }

    /// Marks an asynchronous actor's work as seen, by the asynchronous proxy too.
    pub(super) fn see_proxied(&mut self, actor: u32, time: u32) {
        raise(&mut self.seen, actor, time);
        self.proxied.iter_mut().for_each(|proxied| raise(proxied, actor, time));
    }

    /// Everything seen so far of a memory is seen by the asynchronous proxy too.
    fn fence_proxy(&mut self, covers: Covers) {
        let Frame { seen, proxied, .. } = self;
        proxied[covers as usize].clone_from(seen);
    }

    fn has_seen(&self, own_unit: u32, stamp: Stamp) -> bool {
        if stamp.unit() == own_unit {
            return at(&self.seen, stamp.actor()) >= stamp.time();
        }
        let foreign = self.foreign.as_ref().and_then(|units| units.get(&stamp.unit()));
        foreign.is_some_and(|times| at(times, stamp.actor()) >= stamp.time())
    }

    /// The same frame as another unit sees it.
    fn as_foreign(&self, own_unit: u32) -> Frame {
        let mut units = self.foreign.as_deref().cloned().unwrap_or_default();
        units.insert(own_unit, Rc::new(self.seen.clone()));
        Frame { seen: Times::new(), proxied: Default::default(), foreign: Some(Rc::new(units)) }
    }
}

/// Puts what `other` has seen into `frame`.
pub(super) fn join(frame: &mut Rc<Frame>, other: &Rc<Frame>) {
    if !Rc::ptr_eq(frame, other) {
        Rc::make_mut(frame).merge(other);
    }
}

/// A thread's place in time.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    pub(super) unit: u32,
    pub(super) actor: u32,
    pub(super) time: u32,
    /// What it has seen of the others; of itself it has seen everything.
    pub(super) frame: Rc<Frame>,
}

impl Clock {
    pub(super) fn new(unit: u32, actor: u32, frame: Rc<Frame>) -> Self {
        Clock { unit, actor, time: START, frame }
    }

    /// The stamp of an access now.
    pub(super) fn stamp(&self) -> Stamp {
        Stamp::new(self.unit, self.actor, self.time)
    }

    /// Whether the access lies before now.
    pub(super) fn is_after(&self, stamp: Stamp) -> bool {
        (stamp.unit() == self.unit && stamp.actor() == self.actor) || self.frame.has_seen(self.unit, stamp)
    }

    /// Whether the asynchronous proxy sees the access, too: it was asynchronous itself, or a proxy fence lies between.
    pub(super) fn is_proxied(&self, stamp: Stamp, memory: Covers) -> bool {
        stamp.unit() != self.unit || at(&self.frame.proxied[memory as usize], stamp.actor()) >= stamp.time()
    }

    /// A proxy fence: what this thread did and saw so far of these memories is visible to the asynchronous proxy.
    pub(super) fn fence_proxy(&mut self, covers: &[Covers]) {
        let (actor, time) = (self.actor, self.time);
        let frame = Rc::make_mut(&mut self.frame);
        frame.see(actor, time);
        covers.iter().for_each(|&memory| frame.fence_proxy(memory));
        self.time += 1;
    }

    /// Everything up to now, for others to acquire. Later accesses are not part of it.
    pub(super) fn release(&mut self) -> Rc<Frame> {
        let (actor, time) = (self.actor, self.time);
        Rc::make_mut(&mut self.frame).see(actor, time);
        self.time += 1;
        self.frame.clone()
    }

    /// The same for threads of other units.
    pub(super) fn release_foreign(&mut self) -> Rc<Frame> {
        let unit = self.unit;
        Rc::new(self.release().as_foreign(unit))
    }

    /// Takes over what another has released.
    pub(super) fn acquire(&mut self, released: &Rc<Frame>) {
        join(&mut self.frame, released);
    }

    /// Takes over what was released through global memory: of the own unit, too.
    pub(super) fn acquire_foreign(&mut self, released: &Rc<Frame>) {
        let own = released.foreign.as_ref().and_then(|units| units.get(&self.unit)).cloned();
        let frame = Rc::make_mut(&mut self.frame);
        merge_foreign(&mut frame.foreign, &released.foreign);
        if let Some(own) = own {
            merge(&mut frame.seen, &own);
        }
    }
}

/// A barrier of several threads: each has then seen everything that each did.
pub(super) fn meet<'a>(clocks: impl Iterator<Item = &'a mut Clock>, released_before: Option<&Rc<Frame>>) {
    let mut clocks: Vec<&mut Clock> = clocks.collect();
    let Some(first) = clocks.first() else { return };
    let mut met = first.frame.clone();
    let last = met.clone();
    let all = Rc::make_mut(&mut met);
    if let Some(frame) = released_before {
        all.merge(frame);
    }
    // Neighbours mostly share their frame.
    let mut merged = last;
    for clock in &clocks {
        if !Rc::ptr_eq(&clock.frame, &merged) {
            all.merge(&clock.frame);
            merged = clock.frame.clone();
        }
        all.see(clock.actor, clock.time);
    }
    for clock in &mut clocks {
        clock.frame = met.clone();
        clock.time += 1;
    }
}
