//! Ranks on cards, whose collectives NCCL carries.
//!
//! Communicators do not block (`cuda_loader::nccl`), and stay so: a call returns as soon as NCCL has begun,
//! and is waited for here by asking how far it is, until the deadline. So no rank that has died or never
//! comes can keep another one. The price is a thread that NCCL starts for each call; what a graph replays
//! pays nothing.
//!
//! What goes wrong at one rank is the end of all ranks of the group in this process: their communicators are
//! aborted, so that work in their streams ends, and every later call says why. Ranks of other processes find
//! out when they wait for longer than the timeout.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use abi::DType;
use cuda_loader::driver::sys::CUstream;
use cuda_loader::nccl::{self, DataType, NcclError, State, UniqueId, UniqueIdError};

use super::rendezvous::{self, Rendezvous};
use super::{Transport, deadline};
use crate::cuda::Context;
use crate::device::{Backend, Device};
use crate::error::Error;
use crate::queue::Queue;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

/// How long an abort is waited for. NCCL tells the kernels at once; what it frees may take longer, and then
/// does so alone.
const ABORT: Duration = Duration::from_secs(2);
/// How long the last rank of a process waits for its communicators to end in order, at most.
const ENDING: Duration = Duration::from_secs(10);

/// The ranks of a group that are in this process.
#[derive(Debug)]
struct House {
    size: usize,
    timeout: Duration,
    state: Mutex<HouseState>,
}

#[derive(Debug, Default)]
struct HouseState {
    /// Where all ranks are in this process: their calls, which NCCL would not compare.
    ledger: Option<Ledger>,
    members: Vec<Weak<Member>>,
    /// Why nobody calls NCCL any more.
    broken: Option<String>,
    /// Communicators that end in threads of their own.
    endings: Vec<Receiver<()>>,
}

/// What ranks call, of which those that belong together must be alike: NCCL writes as much as the sender
/// says, wherever the receiver's tensor ends.
#[derive(Debug, Default)]
struct Ledger(BTreeMap<Lane, Calls>);

/// Calls that belong together, by their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    /// Of all ranks.
    All,
    /// From one rank to another.
    Pair(usize, usize),
}

#[derive(Debug, Default)]
struct Calls {
    /// How many each rank has made.
    made: BTreeMap<usize, usize>,
    /// How many all have made.
    gone: usize,
    /// Those behind them: what the first rank came with, which that was, and how many have come.
    open: VecDeque<(Call, usize, usize)>,
}

/// What ranks must have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    AllReduce(DType, usize),
    AllGather(DType, usize),
    ReduceScatter(DType, usize),
    Broadcast(DType, usize, usize),
    Passed(DType, usize),
}

impl Call {
    fn is_of_nothing(self) -> bool {
        match self {
            Call::AllReduce(_, len)
            | Call::AllGather(_, len)
            | Call::ReduceScatter(_, len)
            | Call::Broadcast(_, len, _)
            | Call::Passed(_, len) => len == 0,
        }
    }
}

impl Ledger {
    /// Writes down what a rank comes with; `Err` says with whose call it does not go together.
    fn write(&mut self, lane: Lane, ranks: usize, rank: usize, call: Call) -> Result<(), String> {
        let calls = self.0.entry(lane).or_default();
        let made = calls.made.entry(rank).or_default();
        let index = *made - calls.gone;
        *made += 1;
        match calls.open.get_mut(index) {
            None => calls.open.push_back((call, rank, 1)),
            Some((other, first, _)) if *other != call => {
                return Err(format!("rank {first} came with {other:?} and rank {rank} with {call:?}"));
            }
            Some((_, _, come)) => *come += 1,
        }
        while calls.open.front().is_some_and(|(_, _, come)| *come == ranks) {
            calls.open.pop_front();
            calls.gone += 1;
        }
        Ok(())
    }
}

/// A rank's communicator.
#[derive(Debug)]
struct Member {
    rank: usize,
    context: Arc<Context>,
    /// Held from a call to the end of what NCCL does for it: the next one may not come before.
    turn: Mutex<()>,
    /// Held while NCCL is called, which returns at once. None once it has been aborted.
    communicator: Mutex<Option<nccl::Communicator>>,
    /// Last, so that its last member's communicator is on its way when it waits.
    house: Arc<House>,
}

/// A rank.
#[derive(Debug)]
pub(super) struct Nccl(Arc<Member>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whole at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn context(op: &'static str, device: &Device) -> Result<Arc<Context>, Error> {
    match device.backend() {
        Backend::Cuda(context, _) => Ok(context.clone()),
        Backend::Cpu | Backend::Simulated(_) => {
            let reason = "NCCL is for CUDA cards".into();
            Err(Error::Unsupported { op, device: device.describe(), reason })
        }
    }
}

/// There is no NCCL, or it makes no id.
fn no_id(op: &'static str, device: &Device) -> impl Fn(UniqueIdError) -> Error {
    move |error| Error::Unsupported { op, device: device.describe(), reason: error.to_string() }
}

impl Nccl {
    /// The ranks of a group whose cards are all this process's, each of its own.
    pub(super) fn transports(
        op: &'static str,
        devices: &[Device],
        timeout: Duration,
    ) -> Result<Vec<Arc<dyn Transport>>, Error> {
        let mut ranks = BTreeMap::new();
        for (rank, device) in devices.iter().enumerate() {
            let place = device.place().to_string();
            if let Some(other) = ranks.insert(place.clone(), rank) {
                let got = format!("{place} for ranks {other} and {rank}");
                return Err(Error::invalid(op, "devices", "a card of its own for each rank", got));
            }
        }
        let [first, ..] = devices else { return Ok(Vec::new()) };
        let id = nccl::unique_id().map_err(no_id(op, first))?;
        let house = House::new(devices.len(), timeout);
        lock(&house.state).ledger = Some(Ledger::default());
        let end = deadline(timeout);
        let open = |rank, device: &Device| Member::open(op, &house, rank, context(op, device)?, &id, end);
        std::thread::scope(|scope| {
            let begin = |(rank, device)| {
                let open = &open;
                scope.spawn(move || open(rank, device))
            };
            let threads: Vec<_> = devices.iter().enumerate().map(begin).collect();
            // All are waited for by the scope.
            threads
                .into_iter()
                .map(|thread| {
                    let member = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                    Ok(Arc::new(Nccl(member?)) as Arc<dyn Transport>)
                })
                .collect()
        })
    }

    /// One rank of a group whose others are in other processes.
    pub(super) fn join(
        op: &'static str,
        device: &Device,
        (rank, size): (usize, usize),
        meeting: &Rendezvous,
        timeout: Duration,
    ) -> Result<Arc<dyn Transport>, Error> {
        let context = context(op, device)?;
        let load = |error: nccl::NcclLoadError| no_id(op, device)(error.into());
        let end = deadline(timeout);
        let who = rendezvous::Who { op, rank, size, library: nccl::version().map_err(load)?, timeout, end };
        let id = rendezvous::exchange(meeting, &who, || {
            nccl::unique_id().map(|id| id.0).map_err(no_id(op, device))
        })?;
        let house = House::new(size, timeout);
        Ok(Arc::new(Nccl(Member::open(op, &house, rank, context, &UniqueId(id), end)?)))
    }

    /// A call of NCCL that enqueues something in `stream`.
    fn enqueue(
        &self,
        op: &'static str,
        stream: &Stream,
        calls: &[(Lane, Call)],
        call: impl FnOnce(&nccl::Communicator, CUstream) -> Result<State, NcclError>,
    ) -> Result<(), Error> {
        let member = &self.0;
        let Queue::Cuda(queue) = stream.queue() else {
            return Err(stream.of_another(op, member.context.profile().place));
        };
        let _turn = lock(&member.turn);
        if let Some(reason) = member.house.broken() {
            return Err(member.failed(op, &reason));
        }
        for &(lane, call) in calls {
            member.write(op, lane, call)?;
        }
        if calls.iter().all(|(_, call)| call.is_of_nothing()) {
            return Ok(());
        }
        member.context.enter()?;
        // A graph's kernels use the communicator's memory.
        queue.hold(member);
        match member.call(op, |communicator| call(communicator, queue.handle().cast()))? {
            State::Ready => Ok(()),
            State::InProgress => member.settle(op, deadline(member.house.timeout)),
        }
    }
}

impl House {
    fn new(size: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(House { size, timeout, state: Mutex::default() })
    }

    /// Why the group has ended, if it has.
    fn broken(&self) -> Option<String> {
        lock(&self.state).broken.clone()
    }

    /// Ends the group's ranks in this process.
    fn break_off(&self, reason: impl FnOnce() -> String) {
        let members: Vec<Arc<Member>> = {
            let mut state = lock(&self.state);
            if state.broken.is_some() {
                return;
            }
            state.broken = Some(reason());
            state.members.iter().filter_map(Weak::upgrade).collect()
        };
        let (done, aborted) = channel();
        for member in members {
            let done = done.clone();
            in_thread(move || {
                member.abort();
                // This may be its last owner, and what it then begins to end is for the house to wait for.
                drop(member);
                drop(done);
            });
        }
        drop(done);
        // Until every thread has dropped its end.
        let _: Result<(), RecvTimeoutError> = aborted.recv_timeout(ABORT);
    }
}

impl Drop for House {
    fn drop(&mut self) {
        let end = deadline(ENDING + ABORT);
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for ending in state.endings.drain(..) {
            // What takes longer goes on alone, or ends with the process.
            let _ = ending.recv_timeout(end.saturating_duration_since(Instant::now()));
        }
    }
}

/// Where the system has no thread for it, `work` is dropped with what it owns.
fn in_thread(work: impl FnOnce() + Send + 'static) {
    let _ = std::thread::Builder::new().name("warpforge group".into()).spawn(work);
}

impl Member {
    /// Makes the communicator, for which all ranks must come.
    fn open(
        op: &'static str,
        house: &Arc<House>,
        rank: usize,
        context: Arc<Context>,
        id: &UniqueId,
        end: Instant,
    ) -> Result<Arc<Self>, Error> {
        let (turn, communicator) = (Mutex::default(), Mutex::default());
        let member = Arc::new(Member { rank, context, turn, communicator, house: house.clone() });
        lock(&house.state).members.push(Arc::downgrade(&member));
        // Before others copy from and to its tensors.
        let begun = member.context.share().and_then(|()| member.context.enter()).and_then(|()| {
            let made = nccl::Communicator::init(id, rank as u32, house.size as u32);
            let made = made.map_err(|error| member.failed(op, &error.to_string()))?;
            *lock(&member.communicator) = Some(made);
            Ok(())
        });
        if let Err(error) = begun {
            house.break_off(|| format!("rank {rank} has ended: {error}"));
            return Err(error);
        }
        member.settle(op, end)?;
        Ok(member)
    }

    fn failed(&self, op: &'static str, reason: &str) -> Error {
        Error::Group { op, rank: self.rank, size: self.house.size, reason: reason.into() }
    }

    /// Ends the group for this reason.
    fn give_up(&self, op: &'static str, reason: &str) -> Error {
        self.house.break_off(|| format!("rank {} has ended: {reason}", self.rank));
        self.failed(op, reason)
    }

    /// Compares a call with the other ranks', as far as they are here.
    fn write(&self, op: &'static str, lane: Lane, call: Call) -> Result<(), Error> {
        let ranks = if lane == Lane::All { self.house.size } else { 2 };
        let written = match &mut lock(&self.house.state).ledger {
            Some(ledger) => ledger.write(lane, ranks, self.rank, call),
            None => Ok(()),
        };
        written.map_err(|reason| {
            self.house.break_off(|| reason.clone());
            self.failed(op, &reason)
        })
    }

    /// Calls NCCL, unless the group has ended.
    fn call<T>(
        &self,
        op: &'static str,
        call: impl FnOnce(&nccl::Communicator) -> Result<T, NcclError>,
    ) -> Result<T, Error> {
        if let Some(reason) = self.house.broken() {
            return Err(self.failed(op, &reason));
        }
        let result = match &*lock(&self.communicator) {
            Some(communicator) => call(communicator),
            None => {
                let reason = self.house.broken().unwrap_or_else(|| "its communicator has ended".into());
                return Err(self.failed(op, &reason));
            }
        };
        result.map_err(|error| self.give_up(op, &error.to_string()))
    }

    /// Waits until NCCL has done what it was called for.
    fn settle(&self, op: &'static str, end: Instant) -> Result<(), Error> {
        let mut pause = Pause::default();
        loop {
            if self.call(op, nccl::Communicator::state)? == State::Ready {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(self.late(op));
            }
            pause.wait();
        }
    }

    fn late(&self, op: &'static str) -> Error {
        let reason = format!("the other ranks did not come within {:?}", self.house.timeout);
        self.give_up(op, &reason)
    }

    fn abort(&self) {
        let communicator = lock(&self.communicator).take();
        if let Some(communicator) = communicator {
            // Where the context cannot be entered NCCL sets the device itself.
            let _ = self.context.enter();
            // It ends for a reason that is told; that it ends badly is no news.
            let _ = communicator.abort();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let communicator = self.communicator.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(communicator) = communicator else { return };
        // NCCL may wait for the other ranks' ends, which may be dropped by this thread, later.
        let (done, ended) = channel::<()>();
        lock(&self.house.state).endings.push(ended);
        let (context, broken) = (self.context.clone(), self.house.broken());
        in_thread(move || end(&context, communicator, broken.is_some(), done));
    }
}

/// Ends a communicator in order: after its work, and with the other ranks. Where that does not come, or the
/// group was broken off while it was made, it is aborted.
fn end(context: &Context, communicator: nccl::Communicator, is_broken: bool, _done: Sender<()>) {
    let until = deadline(ENDING);
    let _ = context.enter();
    let mut state = if is_broken { Ok(State::InProgress) } else { communicator.finalize() };
    let mut pause = Pause::default();
    while !is_broken && state == Ok(State::InProgress) && Instant::now() < until {
        pause.wait();
        state = communicator.state();
    }
    // Nobody is there to be told.
    let _ = if state == Ok(State::Ready) { communicator.destroy() } else { communicator.abort() };
}

/// Between two questions: at first short.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn wait(&mut self) {
        match self.0 {
            0..64 => std::thread::yield_now(),
            64..128 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
        self.0 = self.0.saturating_add(1);
    }
}

/// The type of sums.
fn summed(dtype: DType) -> DataType {
    match dtype {
        DType::F16 => DataType::F16,
        DType::BF16 => DataType::BF16,
        // What is no float is refused before: `group::sums`.
        _ => DataType::F32,
    }
}

/// What is only moved is bytes.
fn bytes(x: TensorView<'_>) -> usize {
    x.len() * x.dtype().bytes()
}

impl Transport for Nccl {
    fn all_reduce(&self, stream: &Stream, x: TensorViewMut<'_>) -> Result<(), Error> {
        let x = x.as_view();
        let calls = [(Lane::All, Call::AllReduce(x.dtype(), x.len()))];
        self.enqueue("all_reduce", stream, &calls, |communicator, queue| {
            // SAFETY: the stream is live while `stream` is, and of this rank's device, as the view's memory
            // is, which is without gaps: `Communicator::check`. The memory stays for the stream's work: the
            // pool reuses it in that order. The last call is ready: `turn`.
            unsafe { communicator.all_reduce(x.address(), x.address(), x.len(), summed(x.dtype()), queue) }
        })
    }

    fn all_gather(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>) -> Result<(), Error> {
        let to = out.as_view().address();
        let calls = [(Lane::All, Call::AllGather(x.dtype(), x.len()))];
        self.enqueue("all_gather", stream, &calls, |communicator, queue| {
            // SAFETY: as in `all_reduce`; `out` has the elements of all ranks: `group::same`.
            unsafe { communicator.all_gather(x.address(), to, bytes(x), DataType::U8, queue) }
        })
    }

    fn reduce_scatter(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let out = out.as_view();
        let calls = [(Lane::All, Call::ReduceScatter(x.dtype(), x.len()))];
        self.enqueue("reduce_scatter", stream, &calls, |communicator, queue| {
            // SAFETY: as in `all_reduce`; `x` has `out.len()` elements for each rank: `group::same`.
            unsafe {
                let data_type = summed(x.dtype());
                communicator.reduce_scatter(x.address(), out.address(), out.len(), data_type, queue)
            }
        })
    }

    fn broadcast(&self, stream: &Stream, x: TensorViewMut<'_>, root: usize) -> Result<(), Error> {
        let x = x.as_view();
        let calls = [(Lane::All, Call::Broadcast(x.dtype(), x.len(), root))];
        self.enqueue("broadcast", stream, &calls, |communicator, queue| {
            // SAFETY: as in `all_reduce`.
            unsafe { communicator.broadcast(x.address(), bytes(x), DataType::U8, root as u32, queue) }
        })
    }

    fn send(&self, stream: &Stream, x: TensorView<'_>, to: usize) -> Result<(), Error> {
        let calls = [(Lane::Pair(self.0.rank, to), Call::Passed(x.dtype(), x.len()))];
        self.enqueue("send", stream, &calls, |communicator, queue| {
            // SAFETY: as in `all_reduce`.
            unsafe { communicator.send(x.address(), bytes(x), DataType::U8, to as u32, queue) }
        })
    }

    fn recv(&self, stream: &Stream, out: TensorViewMut<'_>, from: usize) -> Result<(), Error> {
        let out = out.as_view();
        let calls = [(Lane::Pair(from, self.0.rank), Call::Passed(out.dtype(), out.len()))];
        self.enqueue("recv", stream, &calls, |communicator, queue| {
            // SAFETY: as in `all_reduce`.
            unsafe { communicator.recv(out.address(), bytes(out), DataType::U8, from as u32, queue) }
        })
    }

    fn exchange(
        &self,
        stream: &Stream,
        (x, to): (TensorView<'_>, usize),
        (out, from): (TensorViewMut<'_>, usize),
    ) -> Result<(), Error> {
        let out = out.as_view();
        let calls = [
            (Lane::Pair(self.0.rank, to), Call::Passed(x.dtype(), x.len())),
            (Lane::Pair(from, self.0.rank), Call::Passed(out.dtype(), out.len())),
        ];
        self.enqueue("exchange", stream, &calls, |communicator, queue| {
            communicator.grouped(|communicator| {
                if !x.is_empty() {
                    // SAFETY: as in `all_reduce`.
                    unsafe { communicator.send(x.address(), bytes(x), DataType::U8, to as u32, queue)? };
                }
                if !out.is_empty() {
                    let (address, bytes) = (out.address(), bytes(out));
                    // SAFETY: as in `all_reduce`.
                    unsafe { communicator.recv(address, bytes, DataType::U8, from as u32, queue)? };
                }
                Ok(())
            })
        })
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        const OP: &str = "synchronize";
        let member = &self.0;
        if stream.queue().is_recorded()? {
            return Err(Error::invalid(OP, "stream", "one that is not being recorded", "one that is"));
        }
        let end = deadline(member.house.timeout);
        let mut pause = Pause::default();
        loop {
            let progress = stream.queue().progress()?;
            // After the question: work that an abort has ended is done too.
            member.call(OP, nccl::Communicator::state)?;
            match progress {
                Some(true) => return Ok(()),
                Some(false) if Instant::now() >= end => return Err(member.late(OP)),
                // Not known while a graph is recorded, which ends at some time.
                Some(false) | None => pause.wait(),
            }
        }
    }

    fn leave(&self, reason: &str) {
        self.0.house.break_off(|| format!("rank {} has ended: {reason}", self.0.rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_belong_together_are_compared_in_their_order() {
        let mut ledger = Ledger::default();
        let sum = |len| Call::AllReduce(DType::F32, len);
        let mut all = |rank, call| ledger.write(Lane::All, 3, rank, call);
        // Rank 0 is ahead by two.
        for len in [1, 2, 3] {
            assert_eq!(all(0, sum(len)), Ok(()));
        }
        assert_eq!((all(2, sum(1)), all(1, sum(1)), all(1, sum(2))), (Ok(()), Ok(()), Ok(())));
        let other = Call::AllReduce(DType::F16, 2);
        assert_eq!(
            all(2, other),
            Err("rank 0 came with AllReduce(F32, 2) and rank 2 with AllReduce(F16, 2)".into())
        );
        // Pairs have an order of their own, whoever is first.
        let mut pair =
            |from, to, rank, len| ledger.write(Lane::Pair(from, to), 2, rank, Call::Passed(DType::I8, len));
        assert_eq!((pair(0, 1, 1, 5), pair(1, 0, 1, 6), pair(0, 1, 0, 5)), (Ok(()), Ok(()), Ok(())));
        assert!(pair(1, 0, 0, 5).is_err());
        // What all have made is not kept.
        assert_eq!(ledger.0[&Lane::Pair(0, 1)].open.len(), 0);
        assert_eq!(ledger.0[&Lane::All].open.len(), 2);
    }
}
