//! Ranks of one process that exchange bytes in the host's memory: of the CPU and of simulated cards.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use abi::DType;
use half::{bf16, f16};

use super::{Transport, deadline};
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

/// What a rank brings to a collective.
#[derive(Debug)]
struct Call {
    what: What,
    bytes: Vec<u8>,
}

/// Ranks that meet must want the same.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    AllReduce(DType, usize),
    AllGather(DType, usize),
    ReduceScatter(DType, usize),
    Broadcast(DType, usize, usize),
}

/// Where they meet.
#[derive(Debug)]
struct Table {
    size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

/// Type and elements of each, in order.
type Letters = VecDeque<(DType, Vec<u8>)>;

#[derive(Debug, Default)]
struct State {
    /// Meetings that were held.
    held: u64,
    /// What the ranks have brought to the next one.
    brought: Vec<Option<Call>>,
    /// The last one. All have it before the next is held, since each comes there only then.
    last: Option<Arc<Vec<Call>>>,
    /// What is on its way, from one rank to another.
    mail: HashMap<(usize, usize), Letters>,
    /// Why nobody meets here any more.
    broken: Option<String>,
}

/// A rank's place at the table.
#[derive(Debug)]
pub(super) struct Meeting {
    table: Arc<Table>,
    rank: usize,
}

impl Meeting {
    /// The places of so many ranks.
    pub(super) fn transports(size: usize, timeout: Duration) -> Vec<Arc<dyn Transport>> {
        let brought = std::iter::repeat_with(|| None).take(size).collect();
        let state = Mutex::new(State { brought, ..State::default() });
        let table = Arc::new(Table { size, timeout, state, changed: Condvar::new() });
        let place = |rank| Arc::new(Meeting { table: table.clone(), rank }) as Arc<dyn Transport>;
        (0..size).map(place).collect()
    }

    fn failed(&self, op: &'static str, reason: impl Into<String>) -> Error {
        Error::Group { op, rank: self.rank, size: self.table.size, reason: reason.into() }
    }

    /// Waits until `ready` gives something; the group is broken if it does not in time.
    fn wait<T>(
        &self,
        op: &'static str,
        mut state: MutexGuard<'_, State>,
        ready: impl Fn(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> String,
    ) -> Result<T, Error> {
        let Table { timeout, changed, .. } = &*self.table;
        let end = deadline(*timeout);
        loop {
            if let Some(reason) = &state.broken {
                return Err(self.failed(op, reason.as_str()));
            }
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("{} did not come within {timeout:?}", missing(&state));
                state.broken = Some(reason.clone());
                changed.notify_all();
                return Err(self.failed(op, reason));
            }
            (state, _) = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What all ranks have brought, in their order.
    fn meet(&self, op: &'static str, what: What, bytes: Vec<u8>) -> Result<Arc<Vec<Call>>, Error> {
        let mut state = self.table.lock();
        let meeting = state.held;
        if state.broken.is_none() {
            state.brought[self.rank] = Some(Call { what, bytes });
        }
        if state.brought.iter().all(Option::is_some) {
            let calls: Vec<Call> = state.brought.iter_mut().filter_map(Option::take).collect();
            if let Some(other) = calls.iter().position(|call| call.what != calls[0].what) {
                let (first, what) = (calls[0].what, calls[other].what);
                state.broken = Some(format!("rank 0 came with {first:?} and rank {other} with {what:?}"));
            } else {
                state.last = Some(Arc::new(calls));
                state.held += 1;
            }
            self.table.changed.notify_all();
        }
        let held = |state: &mut State| (state.held > meeting).then(|| state.last.clone()).flatten();
        let missing = |state: &State| {
            let absent = state.brought.iter().enumerate().filter(|(_, call)| call.is_none());
            let absent: Vec<String> = absent.map(|(rank, _)| format!("rank {rank}")).collect();
            absent.join(", ")
        };
        self.wait(op, state, held, missing)
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole at any time.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The elements, after all work of the stream.
fn bytes_of(stream: &Stream, x: TensorView<'_>) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; x.len() * x.dtype().bytes()];
    stream.queue().download(x.address(), &mut bytes)?;
    Ok(bytes)
}

impl Transport for Meeting {
    fn all_reduce(&self, stream: &Stream, mut x: TensorViewMut<'_>) -> Result<(), Error> {
        let (dtype, len) = (x.dtype(), x.len());
        let calls = self.meet("all_reduce", What::AllReduce(dtype, len), bytes_of(stream, x.as_view())?)?;
        x.write_bytes(stream, &sum(&calls, dtype, 0, len))
    }

    fn all_gather(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>) -> Result<(), Error> {
        let what = What::AllGather(x.dtype(), x.len());
        let calls = self.meet("all_gather", what, bytes_of(stream, x)?)?;
        let len = x.len();
        let mut out = out.reshape(&[self.table.size * len])?;
        for (rank, call) in calls.iter().enumerate() {
            out.reborrow().slice(0, rank * len..(rank + 1) * len)?.write_bytes(stream, &call.bytes)?;
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let what = What::ReduceScatter(x.dtype(), x.len());
        let calls = self.meet("reduce_scatter", what, bytes_of(stream, x)?)?;
        let len = out.len();
        out.write_bytes(stream, &sum(&calls, x.dtype(), self.rank * len, len))
    }

    fn broadcast(&self, stream: &Stream, mut x: TensorViewMut<'_>, root: usize) -> Result<(), Error> {
        let own = if self.rank == root { bytes_of(stream, x.as_view())? } else { Vec::new() };
        let calls = self.meet("broadcast", What::Broadcast(x.dtype(), x.len(), root), own)?;
        if self.rank == root { Ok(()) } else { x.write_bytes(stream, &calls[root].bytes) }
    }

    fn send(&self, stream: &Stream, x: TensorView<'_>, to: usize) -> Result<(), Error> {
        let bytes = bytes_of(stream, x)?;
        let mut state = self.table.lock();
        if let Some(reason) = &state.broken {
            return Err(self.failed("send", reason.as_str()));
        }
        state.mail.entry((self.rank, to)).or_default().push_back((x.dtype(), bytes));
        self.table.changed.notify_all();
        Ok(())
    }

    fn recv(&self, stream: &Stream, mut out: TensorViewMut<'_>, from: usize) -> Result<(), Error> {
        let sent = |state: &mut State| state.mail.get_mut(&(from, self.rank))?.pop_front();
        let (dtype, bytes) =
            self.wait("recv", self.table.lock(), sent, |_| format!("what rank {from} sends"))?;
        if dtype != out.dtype() || bytes.len() != out.len() * dtype.bytes() {
            let (got, wanted) = (bytes.len() / dtype.bytes(), out.len());
            let reason = format!(
                "rank {from} sent {got} elements of {dtype}, and {wanted} of {} are to come",
                out.dtype()
            );
            let mut state = self.table.lock();
            state.broken.get_or_insert_with(|| reason.clone());
            self.table.changed.notify_all();
            return Err(self.failed("recv", reason));
        }
        out.write_bytes(stream, &bytes)
    }

    fn exchange(
        &self,
        stream: &Stream,
        (x, to): (TensorView<'_>, usize),
        (out, from): (TensorViewMut<'_>, usize),
    ) -> Result<(), Error> {
        // What is sent waits in the host's memory.
        self.send(stream, x, to)?;
        self.recv(stream, out, from)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        // Ranks wait for each other in the calls.
        stream.synchronize()
    }

    fn leave(&self, reason: &str) {
        self.table.lock().broken.get_or_insert_with(|| format!("rank {} has ended: {reason}", self.rank));
        self.table.changed.notify_all();
    }
}

/// Elements `start..start + len` of the sum, in f32, in the order of the ranks, rounded once.
fn sum(calls: &[Call], dtype: DType, start: usize, len: usize) -> Vec<u8> {
    let size = dtype.bytes();
    let element = |call: &Call, index: usize| -> f32 {
        let bytes = &call.bytes[(start + index) * size..][..size];
        match dtype {
            DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        }
    };
    let mut sums = Vec::with_capacity(len * size);
    for index in 0..len {
        let sum = calls.iter().map(|call| element(call, index)).reduce(|a, b| a + b).unwrap_or(0.0);
        match dtype {
            DType::F16 => sums.extend(f16::from_f32(sum).to_le_bytes()),
            DType::BF16 => sums.extend(bf16::from_f32(sum).to_le_bytes()),
            _ => sums.extend(sum.to_le_bytes()),
        }
    }
    sums
}
