//! Groups of devices that work on one thing together: ranks, and the collectives between them.
//!
//! Every rank runs the same program on its own device, in a thread or a process of its own, and calls the
//! same collectives in the same order: each call returns, or its work in the stream ends, when all ranks
//! have made it.
//!
//! ```
//! # extern crate host as warpforge;
//! use warpforge::{DType, Device, Tensor, group::Group};
//!
//! # fn main() -> Result<(), host::Error> {
//! let group = Group::new(&[Device::cpu(), Device::cpu()])?;
//! let sums = group.run(|rank| {
//!     let stream = rank.device().stream()?;
//!     let mut x = Tensor::from_slice(&stream, &[2], &[rank.rank() as f32, 1.0])?;
//!     rank.all_reduce(&stream, x.view_mut())?;
//!     x.to_vec::<f32>(&stream)
//! });
//! for sum in sums {
//!     assert_eq!(sum?, [1.0, 2.0]);
//! }
//! # Ok(())
//! # }
//! ```

mod meeting;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(not(feature = "cuda"))]
#[path = "no_nccl.rs"]
mod nccl;
mod peer;
#[cfg_attr(not(any(test, feature = "cuda")), allow(dead_code))]
mod rendezvous;
#[cfg(test)]
mod tests;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::DType;

use crate::device::Device;
use crate::error::Error;
use crate::profile::Place;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};
use meeting::Meeting;
use nccl::Nccl;

pub use peer::PeerOptions;
pub use rendezvous::Rendezvous;

const OP: &str = "Group";
/// How long a rank waits for the others, if nobody says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);
/// More ranks than any machine has.
const MOST_RANKS: usize = 1 << 16;

/// The end of a wait that begins now, however long it may be.
fn deadline(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    Instant::now() + timeout.min(YEAR)
}

/// What carries the collectives of a rank; arguments have been checked.
pub(crate) trait Transport: Send + Sync + fmt::Debug {
    /// Sums over all ranks, in place.
    fn all_reduce(&self, stream: &Stream, x: TensorViewMut<'_>) -> Result<(), Error>;

    /// `out` is the ranks' `x`, one after the other.
    fn all_gather(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>) -> Result<(), Error>;

    /// `out` is this rank's part of the sum of the ranks' `x`.
    fn reduce_scatter(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>)
    -> Result<(), Error>;

    /// `x` is what it is at rank `root`.
    fn broadcast(&self, stream: &Stream, x: TensorViewMut<'_>, root: usize) -> Result<(), Error>;

    /// To another rank, which receives as much.
    fn send(&self, stream: &Stream, x: TensorView<'_>, to: usize) -> Result<(), Error>;

    /// From another rank, which sends as much.
    fn recv(&self, stream: &Stream, out: TensorViewMut<'_>, from: usize) -> Result<(), Error>;

    /// To one rank and from one, as one call.
    fn exchange(
        &self,
        stream: &Stream,
        sent: (TensorView<'_>, usize),
        received: (TensorViewMut<'_>, usize),
    ) -> Result<(), Error>;

    /// Waits for the stream's work, but not for ever for other ranks.
    fn synchronize(&self, stream: &Stream) -> Result<(), Error>;

    /// Says that this rank will not come any more: the others' calls fail from here on.
    fn leave(&self, reason: &str);
}

/// A rank of a group: its device, and what it has in common with the other ranks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Communicator {
    device: Device,
    rank: usize,
    size: usize,
    transport: Arc<dyn Transport>,
}

/// All ranks of a group, in this process.
#[derive(Clone, Debug)]
pub struct Group {
    ranks: Vec<Communicator>,
}

impl Group {
    /// A rank on each of these devices. On the CPU and on simulated cards what they exchange goes through
    /// the host's memory. Cards, each of which is one rank's alone, exchange through NCCL, which is looked
    /// for when the program runs: the file that the environment variable `WARPFORGE_NCCL` names, else the
    /// system's `libnccl.so.2`, else that of PyPI's package `nvidia-nccl-cu13` or `-cu12` in the Python
    /// environment. One card alone needs none.
    ///
    /// **Errors**: [`Error::Invalid`] for no devices, for devices of several kinds, or for a card that is
    /// there twice; [`Error::Unsupported`] where cards have no NCCL, with what was tried; [`Error::Group`]
    /// where the ranks do not get together.
    pub fn new(devices: &[Device]) -> Result<Self, Error> {
        Self::with_timeout(devices, TIMEOUT)
    }

    /// The same with how long a rank waits for the others before its call is an [`Error::Group`].
    pub fn with_timeout(devices: &[Device], timeout: Duration) -> Result<Self, Error> {
        let Some(first) = devices.first() else {
            return Err(Error::invalid(OP, "devices", "at least one", "none"));
        };
        let kind = |device: &Device| std::mem::discriminant(&device.place());
        if let Some(other) = devices.iter().find(|device| kind(device) != kind(first)) {
            let expected = format!("devices of one kind, as {}", first.place());
            return Err(Error::invalid(OP, "devices", expected, other.place().to_string()));
        }
        let size = devices.len();
        let transports: Vec<Arc<dyn Transport>> = match first.place() {
            Place::Cpu | Place::Simulated(_) => Meeting::transports(size, timeout),
            // It has nobody to exchange with.
            Place::Cuda(_) if size == 1 => Meeting::transports(size, timeout),
            Place::Cuda(_) => {
                let nccl = Nccl::transports(OP, devices, timeout)?;
                let options = PeerOptions { timeout, ..PeerOptions::default() };
                match peer::transports(devices, options, nccl.clone()) {
                    // Too many of them, cards that do not access each other's memory, or no kernels in this build.
                    Err(Error::Unsupported { .. } | Error::MissingImage { .. }) => nccl,
                    transports => transports?,
                }
            }
        };
        Ok(Self::of(devices, transports))
    }

    /// A rank on each of these cards, of which all access each other's memory: sums are made by kernels of the
    /// library's own, for few bytes sooner than by other ways. Simulated cards do it too, each group of them with
    /// their launches at the same time.
    ///
    /// A rank's calls of [`Communicator::all_reduce`] run one after the other, in whatever streams they are; of
    /// recorded ones the caller sees to that, and that the group is there until they have run. All ranks make the
    /// same calls in the same order, replays among them. A rank that does not come ends the kernels of the others
    /// after [`PeerOptions::timeout`]: their `x` is then no sum, and their next call, or
    /// [`Communicator::synchronize`], is an [`Error::Group`].
    ///
    /// **Errors**: [`Error::Unsupported`] where the devices are no cards, too many, or cannot access each other's
    /// memory; [`Error::Invalid`] for options that do not fit.
    pub fn over_peers(devices: &[Device], options: PeerOptions) -> Result<Self, Error> {
        let rest = match devices.first().map(Device::place) {
            Some(Place::Simulated(_)) => Meeting::transports(devices.len(), options.timeout),
            _ => Vec::new(),
        };
        Ok(Self::of(devices, peer::transports(devices, options, rest)?))
    }

    fn of(devices: &[Device], transports: Vec<Arc<dyn Transport>>) -> Self {
        let rank = |(rank, (device, transport)): (usize, (&Device, Arc<dyn Transport>))| Communicator {
            device: device.clone(),
            rank,
            size: devices.len(),
            transport,
        };
        Group { ranks: std::iter::zip(devices, transports).enumerate().map(rank).collect() }
    }

    /// The ranks.
    pub fn ranks(&self) -> &[Communicator] {
        &self.ranks
    }

    /// Runs the same at every rank, each in a thread of its own, and waits for all: their results, in order.
    /// Where one of them fails or panics, what the others wait for from it fails too. On cards that is seen
    /// by those who wait by [`Communicator::synchronize`]: what a rank reads behind work that was ended
    /// means nothing.
    pub fn run<T: Send, E: Send + fmt::Display>(
        &self,
        work: impl Fn(&Communicator) -> Result<T, E> + Sync,
    ) -> Vec<Result<T, E>> {
        let of_rank = |rank: &Communicator| {
            let result = catch_unwind(AssertUnwindSafe(|| work(rank)));
            match &result {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => rank.transport.leave(&error.to_string()),
                Err(_) => rank.transport.leave("it panicked"),
            }
            result.unwrap_or_else(|panic| resume_unwind(panic))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter().map(|rank| scope.spawn(|| of_rank(rank))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        })
    }
}

impl Communicator {
    /// Rank `rank` of a group of `size`, whose other ranks are in other processes, each with a card of its
    /// own: there every one calls this too. Rank 0 makes the group, and the others get what they need of it
    /// at the [`Rendezvous`], which all name alike. All of them must have the same version of NCCL.
    ///
    /// The processes trust each other to make the same calls with the same sizes: NCCL does not compare them,
    /// results are wrong where they differ, and a rank that sends more than another one takes may write behind
    /// that one's tensor.
    ///
    /// `timeout` is for the meeting and NCCL's start together, and after that for every wait for another
    /// rank. When the communicator is dropped it waits for the others to drop theirs, for ten seconds at
    /// most.
    ///
    /// **Errors**: [`Error::Invalid`] for a rank that is not below `size`, a place where nobody can meet,
    /// and where ranks do not fit together, with what is wrong, also at rank 0: another size, another
    /// version of NCCL, a rank that is there twice. [`Error::Group`] where a rank does not come in time.
    /// [`Error::Unsupported`] without NCCL, and on the CPU and simulated cards, whose ranks exchange through
    /// one process's memory.
    pub fn join(
        device: &Device,
        rank: usize,
        size: usize,
        meeting: &Rendezvous,
        timeout: Duration,
    ) -> Result<Self, Error> {
        const OP: &str = "Communicator::join";
        if !(1..=MOST_RANKS).contains(&size) {
            return Err(Error::invalid(OP, "size", format!("1 to {MOST_RANKS} ranks"), size.to_string()));
        }
        if rank >= size {
            return Err(Error::invalid(OP, "rank", format!("a rank below {size}"), rank.to_string()));
        }
        if !matches!(device.place(), Place::Cuda(_)) {
            let reason =
                "ranks of this kind exchange through one process's memory: Group has them all in one";
            return Err(Error::Unsupported { op: OP, device: device.describe(), reason: reason.into() });
        }
        let transport = Nccl::join(OP, device, (rank, size), meeting, timeout)?;
        Ok(Communicator { device: device.clone(), rank, size, transport })
    }

    /// Its number, from 0 on.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Sums the ranks' tensors, in place: `x = Σ_r x_r`, all of one size, f32, f16 or bf16, without gaps.
    ///
    /// What is promised depends on what carries it. On the CPU and on simulated cards:
    ///
    /// - **Arithmetic**: sums in f32, in the order of the ranks, rounded once.
    /// - **Determinism**: the same bits at every rank, and from run to run.
    /// - It returns when all ranks have come, and a rank that comes with another call is an [`Error::Group`].
    ///
    /// On cards of one process that access each other's memory, up to some megabytes, by kernels of the library's
    /// own: arithmetic and determinism are those, and the call and recordings are as with NCCL. Other sums on cards,
    /// by NCCL:
    ///
    /// - **Arithmetic**: in NCCL's order, which depends on the size, the number of ranks and how the cards
    ///   are connected; sums of f16 and bf16 may be rounded after each addition.
    /// - **Determinism**: NCCL's documentation promises neither the same bits at every rank nor from run to
    ///   run. Where size, ranks, connections and version are the same, its algorithms are too.
    /// - It returns when the call is in the stream, whose work ends when all ranks have come. Ranks of one
    ///   process that come with different calls are an [`Error::Group`]; those of several processes are not
    ///   compared ([`Communicator::join`]).
    /// - It can be recorded ([`Stream::capture`]) in a stream of this device. Call it once before with as
    ///   much, so that NCCL has made its connections. All ranks launch such graphs alike.
    ///
    /// On cards whoever needs the result on the host waits by [`Communicator::synchronize`], which gives up
    /// a rank that does not come. A graph keeps the communicators whose calls were recorded in its stream. Groups
    /// that have a card in common must not have calls under way at the same time: kernels that wait for other ranks
    /// take the room of those that are waited for.
    ///
    /// **Errors**: [`Error::Invalid`] for a tensor that does not fit, [`Error::Group`] where a rank does not
    /// come in time, has ended, or comes with another call. After that every call of the group is one: make
    /// another.
    pub fn all_reduce(&self, stream: &Stream, x: TensorViewMut<'_>) -> Result<(), Error> {
        const OP: &str = "all_reduce";
        self.check(OP, "x", stream, x.as_view())?;
        sums(OP, x.dtype())?;
        if self.size == 1 { Ok(()) } else { self.transport.all_reduce(stream, x) }
    }

    /// Lays the ranks' tensors one after another: `out[r · len ..] = x_r`, of any type, without gaps.
    ///
    /// **Errors**: as [`Communicator::all_reduce`].
    pub fn all_gather(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "all_gather";
        self.check(OP, "x", stream, x)?;
        self.check(OP, "out", stream, out.as_view())?;
        same(OP, (x.dtype(), x.len() * self.size), out.as_view())?;
        if self.size == 1 {
            stream.copy(x.reshape(out.shape())?, out)
        } else {
            self.transport.all_gather(stream, x, out)
        }
    }

    /// Sums the ranks' tensors and gives each rank its part: `out = Σ_r x_r[rank · len ..]`.
    ///
    /// Arithmetic, determinism and errors: as [`Communicator::all_reduce`].
    pub fn reduce_scatter(
        &self,
        stream: &Stream,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "reduce_scatter";
        self.check(OP, "x", stream, x)?;
        self.check(OP, "out", stream, out.as_view())?;
        sums(OP, x.dtype())?;
        if !x.len().is_multiple_of(self.size) {
            let expected = format!("a multiple of {} elements", self.size);
            return Err(Error::invalid(OP, "x", expected, x.len().to_string()));
        }
        same(OP, (x.dtype(), x.len() / self.size), out.as_view())?;
        if self.size == 1 {
            stream.copy(x.reshape(out.shape())?, out)
        } else {
            self.transport.reduce_scatter(stream, x, out)
        }
    }

    /// Makes every rank's tensor what it is at rank `root`; of any type, without gaps.
    ///
    /// **Errors**: as [`Communicator::all_reduce`].
    pub fn broadcast(&self, stream: &Stream, x: TensorViewMut<'_>, root: usize) -> Result<(), Error> {
        const OP: &str = "broadcast";
        self.check(OP, "x", stream, x.as_view())?;
        self.rank_of(OP, "root", root)?;
        if self.size == 1 { Ok(()) } else { self.transport.broadcast(stream, x, root) }
    }

    /// Sends a tensor to another rank, which calls [`Communicator::recv`] for as much.
    ///
    /// On cards it ends in the stream when the other rank receives: two ranks that send to each other first
    /// wait for ever. [`Communicator::exchange`] is for that. Elsewhere it waits for nobody.
    ///
    /// **Errors**: as [`Communicator::all_reduce`].
    pub fn send(&self, stream: &Stream, x: TensorView<'_>, to: usize) -> Result<(), Error> {
        const OP: &str = "send";
        self.check(OP, "x", stream, x)?;
        self.another(OP, "to", to)?;
        self.transport.send(stream, x, to)
    }

    /// Takes what another rank sends.
    ///
    /// **Errors**: as [`Communicator::all_reduce`].
    pub fn recv(&self, stream: &Stream, out: TensorViewMut<'_>, from: usize) -> Result<(), Error> {
        const OP: &str = "recv";
        self.check(OP, "out", stream, out.as_view())?;
        self.another(OP, "from", from)?;
        self.transport.recv(stream, out, from)
    }

    /// Sends `x` to rank `to` and takes from rank `from` what that sends, as one call of which neither half
    /// waits for the other. All ranks of a ring can do so at a time. Types and sizes of `x` and `out` may
    /// differ.
    ///
    /// **Errors**: as [`Communicator::all_reduce`].
    pub fn exchange(
        &self,
        stream: &Stream,
        (x, to): (TensorView<'_>, usize),
        (out, from): (TensorViewMut<'_>, usize),
    ) -> Result<(), Error> {
        const OP: &str = "exchange";
        self.check(OP, "x", stream, x)?;
        self.check(OP, "out", stream, out.as_view())?;
        self.another(OP, "to", to)?;
        self.another(OP, "from", from)?;
        self.transport.exchange(stream, (x, to), (out, from))
    }

    /// Waits until all work of the stream is done, as [`Stream::synchronize`], but for collectives of this
    /// communicator no longer than the group's timeout: then, and where another rank of this process has
    /// ended or NCCL says that something went wrong, the communicators of this process are aborted, and work
    /// that still waits for other ranks ends with results that mean nothing.
    ///
    /// The timeout is for all of the stream's work: it must be longer than what the stream has to do.
    ///
    /// **Errors**: [`Error::Group`] for that; [`Error::Invalid`] for a stream of another device or one that
    /// is being recorded; [`Error::Driver`] for work that failed.
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        stream.expect_place("synchronize", self.device.place())?;
        self.transport.synchronize(stream)
    }

    fn check(
        &self,
        op: &'static str,
        argument: &'static str,
        stream: &Stream,
        x: TensorView<'_>,
    ) -> Result<(), Error> {
        stream.expect_place(op, self.device.place())?;
        if x.place() != self.device.place() {
            let expected = format!("a tensor of {}", self.device.place());
            return Err(Error::invalid(op, argument, expected, format!("one of {}", x.place())));
        }
        if !x.is_contiguous() {
            let got = format!("shape {:?} with strides {:?}", x.shape(), x.strides());
            return Err(Error::invalid(op, argument, "a tensor without gaps", got));
        }
        Ok(())
    }

    fn rank_of(&self, op: &'static str, argument: &'static str, rank: usize) -> Result<(), Error> {
        if rank < self.size {
            return Ok(());
        }
        Err(Error::invalid(op, argument, format!("a rank below {}", self.size), rank.to_string()))
    }

    fn another(&self, op: &'static str, argument: &'static str, rank: usize) -> Result<(), Error> {
        self.rank_of(op, argument, rank)?;
        if rank == self.rank {
            return Err(Error::invalid(op, argument, "another rank", "this one"));
        }
        Ok(())
    }
}

fn sums(op: &'static str, dtype: DType) -> Result<(), Error> {
    if dtype.is_float() { Ok(()) } else { Err(Error::invalid(op, "x", "f32, f16 or bf16", dtype.name())) }
}

fn same(op: &'static str, (dtype, len): (DType, usize), out: TensorView<'_>) -> Result<(), Error> {
    if (out.dtype(), out.len()) == (dtype, len) {
        return Ok(());
    }
    let got = format!("{} of {}", out.len(), out.dtype());
    Err(Error::invalid(op, "out", format!("{len} elements of {dtype}"), got))
}
