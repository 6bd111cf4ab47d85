//! Groups of devices that work on one thing together: ranks, and the collectives between them.
//!
//! Every rank runs the same program on its own device, in a thread or a process of its own, and calls the same
//! collectives in the same order: each call returns, or its work in the stream ends, when all ranks have made it.
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
mod peer;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use abi::DType;

use crate::device::Device;
use crate::error::Error;
use crate::profile::Place;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};
use meeting::Meeting;

pub use peer::PeerOptions;

const OP: &str = "Group";
/// How long a rank waits for the others, if nobody says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);

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

    /// What has failed of the work of earlier calls, as far as that is known by now.
    fn status(&self) -> Result<(), Error> {
        Ok(())
    }

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
    /// A rank on each of these devices. On the CPU and on simulated cards what they exchange goes through the host's
    /// memory.
    ///
    /// **Errors**: [`Error::Invalid`] for no devices, or for devices of several kinds.
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
            Place::Cuda(_) => {
                let reason = "cards have no way to exchange in this build".into();
                return Err(Error::Unsupported { op: OP, device: first.describe(), reason });
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

    /// Runs the same at every rank, each in a thread of its own, and waits for all: their results, in order. Where one
    /// of them fails or panics, what the others wait for from it fails too.
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
    /// **Arithmetic**: sums in f32, in the order of the ranks, rounded once.
    /// **Determinism**: the same bits at every rank, and from run to run.
    /// **Errors**: [`Error::Invalid`] for a tensor that does not fit, [`Error::Group`] where a rank does not come in
    /// time or comes with another call.
    pub fn all_reduce(&self, stream: &Stream, x: TensorViewMut<'_>) -> Result<(), Error> {
        const OP: &str = "all_reduce";
        self.check(OP, "x", stream, x.as_view())?;
        sums(OP, x.dtype())?;
        if self.size == 1 { Ok(()) } else { self.transport.all_reduce(stream, x) }
    }

    /// Waits for the stream's work, as [`Stream::synchronize`] does, and says what has failed of this rank's
    /// collectives so far.
    ///
    /// **Errors**: [`Error::Group`] where a rank did not come in time; those of [`Stream::synchronize`].
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        stream.expect_place("Communicator::synchronize", self.device.place())?;
        stream.synchronize()?;
        self.transport.status()
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
