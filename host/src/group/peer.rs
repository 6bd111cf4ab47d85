//! Cards of one process that sum by kernels over each other's memory (`gpu/src/collectives/all_reduce.rs`).
//!
//! Each rank has an exchange in memory of its card's pool, which the others' kernels read and write by its address;
//! both sides are on one machine, so an address is all there is to tell. A call is one launch: nothing is allocated,
//! looked up or waited for, so it can be recorded.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use abi::DType;
use abi::collectives::all_reduce::{
    AllReduceDims, AllReduceVariant, MAX_BLOCKS, MAX_RANKS, SMEM_BYTES, Shots, THREADS, VARIANTS,
    exchange_bytes,
};

use super::{OP, TIMEOUT, Transport};
use crate::cuda;
use crate::device::{Backend, Device};
use crate::error::Error;
use crate::launch::{Entry, Param};
use crate::profile::Place;
use crate::simulator::Together;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

const ALL_REDUCE: &str = "all_reduce";

/// What is chosen by a group's ranks and the bytes of a sum, row by row: up to so many ranks, one-shot up to so many
/// bytes, two-shot up to so many, and beyond them another transport if the group has one. Of two ranks each reads as
/// much either way, and one-shot waits once.
const CHOICE: [(usize, usize, usize); 3] =
    [(2, 16 << 20, 16 << 20), (4, 512 << 10, 8 << 20), (MAX_RANKS, 256 << 10, 8 << 20)];

fn choose(options: &PeerOptions, size: usize, bytes: usize) -> Option<Shots> {
    let &(_, one, two) = CHOICE.iter().find(|row| size <= row.0)?;
    match bytes {
        bytes if bytes <= options.one_shot_bytes.unwrap_or(one) => Some(Shots::One),
        bytes if bytes <= options.two_shot_bytes.unwrap_or(two) => Some(Shots::Two),
        _ => None,
    }
}

/// How sums are made over memory of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerOptions {
    /// How long a rank's kernels wait for those of the others.
    pub timeout: Duration,
    /// Up to so many bytes every rank reads all that the others have and sums it: the least waiting. None: by the
    /// number of ranks.
    pub one_shot_bytes: Option<usize>,
    /// Up to so many bytes every rank sums a part, and reads the others' sums: the fewest bytes. Beyond them, what else
    /// the group has. None: by the number of ranks.
    pub two_shot_bytes: Option<usize>,
    /// Bytes that a block exchanges at a time, a multiple of 16; a rank's exchange takes 72 times as much.
    pub slot_bytes: u32,
    /// Most blocks of a kernel, from 1 to 36.
    pub max_blocks: u32,
}

impl Default for PeerOptions {
    fn default() -> Self {
        PeerOptions {
            timeout: TIMEOUT,
            one_shot_bytes: None,
            two_shot_bytes: None,
            slot_bytes: 256 << 10,
            max_blocks: MAX_BLOCKS,
        }
    }
}

impl PeerOptions {
    fn check(&self) -> Result<(), Error> {
        let PeerOptions { slot_bytes, max_blocks, .. } = *self;
        /// Of which an exchange stays below 2³² bytes.
        const LARGEST_SLOT: u32 = 16 << 20;
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(16) || slot_bytes > LARGEST_SLOT {
            let expected = format!("a multiple of 16, up to {LARGEST_SLOT}");
            return Err(Error::invalid(OP, "slot_bytes", expected, slot_bytes.to_string()));
        }
        if !(1..=MAX_BLOCKS).contains(&max_blocks) {
            let expected = format!("from 1 to {MAX_BLOCKS}");
            return Err(Error::invalid(OP, "max_blocks", expected, max_blocks.to_string()));
        }
        Ok(())
    }
}

/// The word in which a rank's kernels say that they have given up.
#[derive(Debug)]
enum Status {
    Host(cuda::HostWord),
    /// Simulated kernels reach no memory but that of cards.
    Simulated(Tensor),
}

impl Status {
    fn address(&mut self) -> u64 {
        match self {
            Status::Host(word) => word.address(),
            Status::Simulated(word) => word.view_mut().address(),
        }
    }

    fn read(&self, member: &Member) -> Result<u32, Error> {
        match self {
            Status::Host(word) => Ok(word.read()),
            Status::Simulated(word) => {
                let mut bytes = [0; 4];
                member.setup.queue().download(word.view().address(), &mut bytes)?;
                Ok(u32::from_le_bytes(bytes))
            }
        }
    }
}

/// What a rank has.
#[derive(Debug)]
struct Member {
    device: Device,
    /// The stream that has made its memory.
    setup: Stream,
    kernels: Vec<(&'static AllReduceVariant, Entry)>,
    status: Status,
    status_address: u64,
    /// The stream of the last call.
    last: Mutex<Option<Stream>>,
}

/// What the ranks have together. It goes with the last of them, since each reads what the others have.
#[derive(Debug)]
struct Exchanges {
    /// Among all groups of the process.
    group: u64,
    options: PeerOptions,
    members: Vec<Member>,
    /// Each rank's, at these addresses; none once they cannot be given back.
    memory: Vec<Tensor>,
    addresses: [u64; MAX_RANKS],
    /// Why a rank does not come any more.
    left: Mutex<Option<String>>,
}

impl Drop for Exchanges {
    fn drop(&mut self) {
        // A rank's kernel may still read what another rank has, whose own stream knows nothing of it.
        let is_done = |member: &Member| {
            let last = lock(&member.last);
            let Some(stream) = &*last else { return Ok(true) };
            let can_wait = stream.queue().can_be_waited_for()?;
            if can_wait { stream.synchronize().map(|()| true) } else { Ok::<bool, Error>(false) }
        };
        if !self.members.iter().all(|member| matches!(is_done(member), Ok(true))) {
            // Who is recorded or does not answer may use it yet.
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.members));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whole values at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A rank's transport.
#[derive(Debug)]
struct Peer {
    exchanges: Arc<Exchanges>,
    rank: usize,
    /// What carries all but sums, and the largest of those.
    rest: Option<Arc<dyn Transport>>,
}

/// The transports of a rank on each of these cards, with what carries the rest: one for each rank, or none.
///
/// **Errors**: [`Error::Unsupported`] where the cards cannot access each other's memory: then another transport is to
/// carry everything.
pub(super) fn transports(
    devices: &[Device],
    options: PeerOptions,
    rest: Vec<Arc<dyn Transport>>,
) -> Result<Vec<Arc<dyn Transport>>, Error> {
    let exchanges = Arc::new(connect(devices, options)?);
    let mut rest = rest.into_iter();
    let rank = |rank| {
        let exchanges = exchanges.clone();
        Arc::new(Peer { exchanges, rank, rest: rest.next() }) as Arc<dyn Transport>
    };
    Ok((0..devices.len()).map(rank).collect())
}

fn connect(devices: &[Device], options: PeerOptions) -> Result<Exchanges, Error> {
    static NUM_GROUPS: AtomicU64 = AtomicU64::new(0);
    options.check()?;
    let Some(first) = devices.first() else {
        return Err(Error::invalid(OP, "devices", "at least one", "none"));
    };
    let refused =
        |device: &Device, reason| Err(Error::Unsupported { op: OP, device: device.describe(), reason });
    if devices.len() > MAX_RANKS {
        return refused(first, format!("{} ranks, where kernels over peers take {MAX_RANKS}", devices.len()));
    }
    for (rank, device) in devices.iter().enumerate() {
        for (other, peer) in devices.iter().enumerate().filter(|&(other, _)| other != rank) {
            // Nothing says that two kernels of one card run at the same time, and these wait for each other.
            if device.place() == peer.place() && matches!(device.place(), Place::Cuda(_)) {
                let got = format!("{} for ranks {rank} and {other}", device.place());
                return Err(Error::invalid(OP, "devices", "a card of its own for each rank", got));
            }
            if !enable(device, peer)? {
                let reason =
                    format!("rank {rank} cannot access the memory of rank {other}, {}", peer.describe());
                return refused(device, reason);
            }
        }
    }
    let bytes = exchange_bytes(options.slot_bytes) as usize;
    let mut members = Vec::new();
    let mut memory = Vec::new();
    let mut addresses = [0; MAX_RANKS];
    for (rank, device) in devices.iter().enumerate() {
        let setup = device.stream()?;
        let fits = |row: &&'static AllReduceVariant| {
            let smallest = abi::collectives::all_reduce::variant(row.dtype, row.shots, devices.len());
            smallest.is_some_and(|smallest| smallest.entry == row.entry)
        };
        let load =
            |row: &'static AllReduceVariant| Ok((row, device.entry(ALL_REDUCE, row.entry, SMEM_BYTES)?));
        let kernels = VARIANTS.iter().filter(fits).map(load).collect::<Result<_, Error>>()?;
        let mut status = match device.backend() {
            Backend::Cuda(context, _) => Status::Host(cuda::HostWord::new(context.clone())?),
            _ => Status::Simulated(Tensor::zeros(&setup, &[1], DType::U32)?),
        };
        let mut exchange = Tensor::zeros(&setup, &[bytes / 4], DType::U32)?;
        // Others write it in streams of their own.
        setup.synchronize()?;
        addresses[rank] = exchange.view_mut().address();
        memory.push(exchange);
        let status_address = status.address();
        let (device, last) = (device.clone(), Mutex::new(None));
        members.push(Member { device, setup, kernels, status, status_address, last });
    }
    let group = NUM_GROUPS.fetch_add(1, Ordering::Relaxed);
    Ok(Exchanges { group, options, members, memory, addresses, left: Mutex::new(None) })
}

/// Lets kernels of a card access another's memory: whether they can.
fn enable(device: &Device, peer: &Device) -> Result<bool, Error> {
    match (device.backend(), peer.backend()) {
        (Backend::Cuda(own, _), Backend::Cuda(other, _)) => own.enable_peer(other),
        // A simulated card runs one launch at a time.
        (Backend::Simulated(own), Backend::Simulated(other)) if device.place() != peer.place() => {
            Ok(other.peer_id().is_some_and(|id| own.enable_peer(id)))
        }
        _ => Ok(false),
    }
}

impl Peer {
    fn member(&self) -> &Member {
        &self.exchanges.members[self.rank]
    }

    fn failed(&self, op: &'static str, reason: String) -> Error {
        Error::Group { op, rank: self.rank, size: self.exchanges.members.len(), reason }
    }

    /// An error where this rank's kernels have given up, or a rank has left.
    fn check(&self, op: &'static str) -> Result<(), Error> {
        match self.member().status.read(self.member())? {
            0 => {}
            missing => {
                let timeout = self.exchanges.options.timeout;
                return Err(self.failed(op, format!("rank {} did not come within {timeout:?}", missing - 1)));
            }
        }
        match &*lock(&self.exchanges.left) {
            Some(reason) => Err(self.failed(op, reason.clone())),
            None => Ok(()),
        }
    }

    fn rest(&self, op: &'static str) -> Result<&dyn Transport, Error> {
        let unsupported = || {
            let (device, reason) =
                (self.member().device.describe(), "this group sums, and does nothing else".into());
            Error::Unsupported { op, device, reason }
        };
        self.rest.as_deref().ok_or_else(unsupported)
    }

    fn launch(&self, stream: &Stream, x: &TensorViewMut<'_>, shots: Shots) -> Result<(), Error> {
        let Exchanges { options, members, addresses, group, .. } = &*self.exchanges;
        let (member, size) = (self.member(), members.len());
        let found = member.kernels.iter().find(|(row, _)| (row.dtype, row.shots) == (x.dtype(), shots));
        let Some((_, kernel)) = found else {
            return Err(Error::invalid(ALL_REDUCE, "x", "f32, f16 or bf16", x.dtype().name()));
        };
        let pieces = (x.len() * x.dtype().bytes()).div_ceil(16) as u64;
        // A piece for each thread before there is another block; then all have as much.
        let blocks = pieces.div_ceil(THREADS.into()).clamp(1, options.max_blocks.into());
        let block_pieces = pieces.div_ceil(blocks);
        let blocks = pieces.div_ceil(block_pieces.max(1)) as u32;
        let dims = AllReduceDims {
            len: x.len() as u64,
            block_pieces,
            timeout_ns: u64::try_from(options.timeout.as_nanos()).unwrap_or(u64::MAX),
            slot_bytes: options.slot_bytes,
            rank: self.rank as u32,
            size: size as u32,
            is_aligned: u32::from(x.address().is_multiple_of(16)),
        };
        let [a, b, c, d, e, f, g, h] = addresses.map(Param::Address);
        let params: [Param<'_>; 11] =
            [x.into(), a, b, c, d, e, f, g, h, Param::Address(member.status_address), (&dims).into()];
        let together = Together { group: *group, rank: self.rank, size, timeout: options.timeout };
        let mut last = lock(&member.last);
        if let Some(last) = &*last
            && last.queue() != stream.queue()
        {
            stream.queue().follow(last.queue())?;
        }
        // SAFETY: x is contiguous, of `len` elements — `Communicator::check`; the exchanges are of `size` ranks, as
        // large as `slot_bytes` says, and 0 at first — `connect`, and live as long as the last rank. Only these kernels
        // access them; this rank's come one after the other, by the stream or the wait above, and of recorded launches
        // by the caller's promise. `block_pieces` covers x with at most MAX_BLOCKS blocks.
        unsafe { kernel.launch_with(stream, [blocks, 1, 1], [THREADS, 1, 1], &params, Some(together))? };
        *last = Some(stream.clone());
        Ok(())
    }
}

impl Transport for Peer {
    fn all_reduce(&self, stream: &Stream, x: TensorViewMut<'_>) -> Result<(), Error> {
        self.check(ALL_REDUCE)?;
        if x.is_empty() {
            return Ok(());
        }
        let (size, bytes) = (self.exchanges.members.len(), x.len() * x.dtype().bytes());
        let shots = match (choose(&self.exchanges.options, size, bytes), &self.rest) {
            (Some(shots), _) => shots,
            (None, Some(rest)) => return rest.all_reduce(stream, x),
            (None, None) => Shots::Two,
        };
        self.launch(stream, &x, shots)?;
        // A simulated kernel has run by now.
        if matches!(self.member().device.place(), Place::Simulated(_)) {
            self.check(ALL_REDUCE)
        } else {
            Ok(())
        }
    }

    fn all_gather(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>) -> Result<(), Error> {
        self.rest("all_gather")?.all_gather(stream, x, out)
    }

    fn reduce_scatter(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        self.rest("reduce_scatter")?.reduce_scatter(stream, x, out)
    }

    fn broadcast(&self, stream: &Stream, x: TensorViewMut<'_>, root: usize) -> Result<(), Error> {
        self.rest("broadcast")?.broadcast(stream, x, root)
    }

    fn send(&self, stream: &Stream, x: TensorView<'_>, to: usize) -> Result<(), Error> {
        self.rest("send")?.send(stream, x, to)
    }

    fn recv(&self, stream: &Stream, out: TensorViewMut<'_>, from: usize) -> Result<(), Error> {
        self.rest("recv")?.recv(stream, out, from)
    }

    fn exchange(
        &self,
        stream: &Stream,
        sent: (TensorView<'_>, usize),
        received: (TensorViewMut<'_>, usize),
    ) -> Result<(), Error> {
        self.rest("exchange")?.exchange(stream, sent, received)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        // Kernels over peers end by themselves.
        let waited = match &self.rest {
            Some(rest) => rest.synchronize(stream),
            None => stream.synchronize(),
        };
        // They say what was missing.
        self.check(ALL_REDUCE)?;
        waited
    }

    /// Kernels that wait already wait on, until their time is over.
    fn leave(&self, reason: &str) {
        lock(&self.exchanges.left).get_or_insert_with(|| format!("rank {} has ended: {reason}", self.rank));
        if let Some(rest) = &self.rest {
            rest.leave(reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_by_ranks_and_bytes() {
        let one = Some(Shots::One);
        for (size, bytes, expected) in [
            (2, 1, one),
            (2, 16 << 20, one),
            (2, (16 << 20) + 1, None),
            (3, 512 << 10, one),
            (4, (512 << 10) + 2, Some(Shots::Two)),
            (5, 256 << 10, one),
            (8, 8 << 20, Some(Shots::Two)),
            (8, 9 << 20, None),
            (9, 1, None),
        ] {
            assert_eq!(choose(&PeerOptions::default(), size, bytes), expected, "{size} ranks, {bytes} bytes");
        }
        let (one_shot_bytes, two_shot_bytes) = (Some(0), Some(usize::MAX));
        let two = PeerOptions { one_shot_bytes, two_shot_bytes, ..PeerOptions::default() };
        assert_eq!([1, 1 << 40].map(|bytes| choose(&two, 2, bytes)), [Some(Shots::Two); 2]);
    }

    #[test]
    fn what_has_no_peers() {
        let message = |devices: &[Device], options| connect(devices, options).unwrap_err().to_string();
        let cpus = |count| vec![Device::cpu(); count];
        assert!(message(&cpus(2), PeerOptions::default()).contains("cannot access the memory of rank 1"));
        assert!(
            message(&cpus(9), PeerOptions::default()).contains("9 ranks, where kernels over peers take 8")
        );
        assert_eq!(message(&[], PeerOptions::default()), "Group: devices: expected at least one, got none");
        let options = PeerOptions { slot_bytes: 24, ..PeerOptions::default() };
        assert!(message(&cpus(2), options).contains("slot_bytes: expected a multiple of 16, up to"));
        let options = PeerOptions { max_blocks: 37, ..PeerOptions::default() };
        assert_eq!(message(&cpus(2), options), "Group: max_blocks: expected from 1 to 36, got 37");
    }
}
