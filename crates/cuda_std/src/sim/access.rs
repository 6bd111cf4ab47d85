//! Loads, stores, atomics and fences.

use core::mem::{MaybeUninit, size_of};
use core::ops::RangeInclusive;
use core::panic::Location;
use std::format;
use std::rc::Rc;
use std::string::String;
use std::vec::Vec;

use super::clock::{Covers, Frame, Stamp, join};
use super::machine::{CLUSTER_WINDOW, Machine, SHARED_BASE, attempt, pause, with};
use super::shadow::{Access, Conflict, Kind};
use super::sync::release_into;
use super::unit::Failure;
use super::{Defect, Need};
use crate::atomic::Order;

/// Where an access goes.
#[derive(Clone, Copy)]
pub(super) enum Space {
    Global(usize),
    /// An address in the block's own window, or in another block's of the cluster.
    Shared(u32),
    /// The same for an instruction that reaches the block's own alone.
    OwnShared(u32),
}

/// Whose stamp an access leaves: the running thread's, or that of an asynchronous agent.
pub(super) type Agent = Option<Stamp>;

impl Machine {
    /// Checks an access, remembers it, and gives the bytes' place.
    #[inline]
    pub(super) fn access(
        &mut self,
        space: Space,
        bytes: usize,
        align: usize,
        kind: Kind,
        agent: Agent,
        line: &'static Location<'static>,
    ) -> Result<*mut u8, Failure> {
        self.step()?;
        let space = match space {
            Space::OwnShared(address) if address >= CLUSTER_WINDOW => {
                let place = self.name(Space::Shared(address));
                let text = format!(
                    "{} out of bounds: at {place}, by an instruction for the block's own",
                    noun(kind)
                );
                return Err(Failure(Defect::OutOfBounds, text));
            }
            Space::OwnShared(address) => Space::Shared(address),
            other => other,
        };
        let number = self.line_number(line);
        let coin = self.random.one_in(2);
        let thread = self.current.thread;
        let outcome = match space {
            Space::Global(address) => {
                if !address.is_multiple_of(align) {
                    return Err(self.misaligned(space, align, kind));
                }
                let Some(device) = self.holder(address, bytes) else {
                    return Err(self.outside(space, bytes, kind));
                };
                let (memory, unit) = self.memory_of_and_unit(device);
                let Some((index, offset)) = memory.find(address, bytes) else {
                    return Err(self.outside(space, bytes, kind));
                };
                let buffer = memory.buffer(index);
                if buffer.is_constant {
                    if matches!(kind, Kind::Write | Kind::AtomicWrite | Kind::AsyncWrite) {
                        return Err(self.too_early(space, kind, "is constant"));
                    }
                } else {
                    if unit.threads[thread].is_ahead {
                        let why = "is not constant, before griddepcontrol.wait";
                        return Err(self.too_early(space, kind, why));
                    }
                    unit.threads[thread].has_touched = true;
                }
                let clock = &unit.threads[thread].clock;
                let stamp = agent.unwrap_or(clock.stamp());
                let access = Access { kind, clock, stamp, memory: Covers::Global, line: number, coin };
                let place = buffer.data().wrapping_add(offset);
                let outcome = buffer.shadow.access(offset, bytes, &access);
                outcome
                    .map(|()| place)
                    .map_err(|(at, conflict)| (Space::Global(address + at - offset), conflict))
            }
            Space::Shared(address) | Space::OwnShared(address) => {
                if !(address as usize).is_multiple_of(align) {
                    return Err(self.misaligned(space, align, kind));
                }
                let shared_bytes = self.shared_bytes;
                let (block, offset) = self.locate(address);
                let inside = offset.checked_add(bytes).is_some_and(|end| end <= shared_bytes as usize);
                if !inside || block >= self.unit().blocks.len() {
                    return Err(self.outside(space, bytes, kind));
                }
                if address >= CLUSTER_WINDOW {
                    let stamp = agent.unwrap_or(self.thread().clock.stamp());
                    self.visit(block, stamp, noun(kind), line)?;
                }
                let unit = self.unit();
                let clock = &unit.threads[thread].clock;
                let stamp = agent.unwrap_or(clock.stamp());
                let access = Access { kind, clock, stamp, memory: Covers::Shared, line: number, coin };
                let block = &mut unit.blocks[block];
                let outcome = block.shadow.access(offset, bytes, &access);
                let place = block.shared[offset..].as_mut_ptr();
                outcome
                    .map(|()| place)
                    .map_err(|(at, conflict)| (Space::Shared(address + (at - offset) as u32), conflict))
            }
        };
        outcome.map_err(|(at, conflict)| self.explain(at, kind, conflict))
    }

    /// The block's rank in the unit and the offset in its shared memory; the offset is huge if below the start.
    pub(super) fn locate(&mut self, address: u32) -> (usize, usize) {
        let thread = self.current.thread;
        let block = match address / CLUSTER_WINDOW {
            0 => self.unit().threads[thread].block,
            window => window as usize - 1,
        };
        (block, (address % CLUSTER_WINDOW).wrapping_sub(SHARED_BASE) as usize)
    }

    fn name(&mut self, space: Space) -> String {
        match space {
            Space::Global(address) => {
                let other = self.other_holder(address);
                let own = self.unit().device;
                let (memory, _) = self.memory_of_and_unit(other.unwrap_or(own));
                match memory.find(address, 1) {
                    Some((index, offset)) => {
                        let of_card = other.map_or(String::new(), |device| format!(" of card {device}"));
                        format!("byte {offset} of `{}`{of_card}", memory.buffer(index).name)
                    }
                    None => memory.describe(address),
                }
            }
            Space::Shared(address) | Space::OwnShared(address) => {
                let offset = (address % CLUSTER_WINDOW).wrapping_sub(SHARED_BASE) as i32;
                match address / CLUSTER_WINDOW {
                    0 => format!("byte {offset} of shared memory"),
                    window => {
                        format!("byte {offset} of the shared memory of block {} of the cluster", window - 1)
                    }
                }
            }
        }
    }

    pub(super) fn misaligned(&mut self, space: Space, align: usize, kind: Kind) -> Failure {
        let text = format!("{} at {}, which is not aligned to {align} bytes", noun(kind), self.name(space));
        Failure(Defect::Misaligned, text)
    }

    pub(super) fn outside(&mut self, space: Space, bytes: usize, kind: Kind) -> Failure {
        let bounds = match space {
            Space::Global(address) => match self.other_holder(address) {
                Some(_) => format!("{}, in which peer access is not enabled or ends", self.name(space)),
                None => self.memory_and_unit().0.describe(address),
            },
            Space::Shared(_) | Space::OwnShared(_) => {
                format!("{}, of which there are {} bytes", self.name(space), self.shared_bytes)
            }
        };
        Failure(Defect::OutOfBounds, format!("{} of {bytes} bytes out of bounds: at {bounds}", noun(kind)))
    }

    /// An access that other kernels may be in the way of.
    fn too_early(&mut self, space: Space, kind: Kind, why: &str) -> Failure {
        let text = format!("data race: {} of {}, which {why}", noun(kind), self.name(space));
        Failure(Defect::Race, text)
    }

    /// An access to what kernels may not touch.
    pub(super) fn forbidden(&mut self, at: Space, kind: Kind) -> Failure {
        self.explain(at, kind, Conflict::Forbidden)
    }

    fn explain(&mut self, at: Space, kind: Kind, conflict: Conflict) -> Failure {
        let (place, noun) = (self.name(at), noun(kind));
        match conflict {
            Conflict::Uninitialised => {
                Failure(Defect::Uninitialised, format!("{noun} of {place}, which nothing has written"))
            }
            Conflict::Forbidden => Failure(
                Defect::OutOfBounds,
                format!("{noun} out of bounds: {place} is a guard band or a gap between rows"),
            ),
            Conflict::Mbarrier => {
                Failure(Defect::Mbarrier, format!("{noun} of {place}, which belongs to an mbarrier"))
            }
            Conflict::Race { earlier, line, was } => {
                let earlier = self.describe(earlier, line);
                let was = self::noun(was);
                let text =
                    format!("data race: {noun} of {place} with no barrier after the {was} by {earlier}");
                Failure(Defect::Race, text)
            }
            Conflict::ReadOnly { earlier, line } => {
                let earlier = self.describe(earlier, line);
                let text = format!(
                    "{noun} of {place} through the read-only path, written in this kernel by {earlier}"
                );
                Failure(Defect::Race, text)
            }
            Conflict::Proxy { earlier, line } => {
                let earlier = self.describe(earlier, line);
                let text = format!(
                    "missing fence.proxy.async: {noun} of {place}, written by ordinary stores of {earlier}"
                );
                Failure(Defect::ProxyFence, text)
            }
        }
    }
}

fn noun(kind: Kind) -> &'static str {
    match kind {
        Kind::Read | Kind::ConstantRead => "read",
        Kind::Write => "write",
        Kind::AtomicRead => "atomic read",
        Kind::AtomicWrite => "atomic write",
        Kind::AsyncRead => "asynchronous read",
        Kind::AsyncWrite => "asynchronous write",
    }
}

#[inline]
fn load<T: Copy>(space: Space, kind: Kind, instruction: &str, line: &'static Location<'static>) -> T {
    attempt(instruction, line, |machine| {
        let bytes = size_of::<T>();
        let place = machine.access(space, bytes, bytes, kind, None, line)?;
        // SAFETY: `access` found `bytes` bytes there, inside a buffer or the block's shared memory.
        Ok(unsafe { place.cast::<T>().read_unaligned() })
    })
}

#[inline]
fn store<T: Copy>(space: Space, value: T, kind: Kind, instruction: &str, line: &'static Location<'static>) {
    attempt(instruction, line, |machine| {
        let bytes = size_of::<T>();
        machine.check_registers(bytes_of(&value))?;
        let place = machine.access(space, bytes, bytes, kind, None, line)?;
        machine.progress();
        // SAFETY: as in `load`; the machine alone touches it now.
        unsafe { place.cast::<T>().write_unaligned(value) };
        Ok(())
    });
}

/// A load of global memory, aligned to its size. Outside a simulation: of the host's memory.
///
/// # Safety
/// Outside a simulation: *in-bounds*, *aligned* and *initialised*. Inside, it is checked.
#[inline]
#[track_caller]
pub(crate) unsafe fn load_global<T: Copy>(pointer: *const T, instruction: &str) -> T {
    if !super::is_running() {
        // SAFETY: the caller's promise.
        return unsafe { pointer.read() };
    }
    load(Space::Global(pointer.addr()), Kind::Read, instruction, Location::caller())
}

/// The same through the read-only path.
///
/// # Safety
/// As for [`load_global`].
#[inline]
#[track_caller]
pub(crate) unsafe fn load_constant<T: Copy>(pointer: *const T, instruction: &str) -> T {
    if !super::is_running() {
        // SAFETY: the caller's promise.
        return unsafe { pointer.read() };
    }
    load(Space::Global(pointer.addr()), Kind::ConstantRead, instruction, Location::caller())
}

/// A store to global memory, aligned to its size. Outside a simulation: to the host's memory.
///
/// # Safety
/// Outside a simulation: *in-bounds*, *aligned* and *exclusive*. Inside, it is checked.
#[inline]
#[track_caller]
pub(crate) unsafe fn store_global<T: Copy>(pointer: *mut T, value: T, instruction: &str) {
    if !super::is_running() {
        // SAFETY: the caller's promise.
        return unsafe { pointer.write(value) };
    }
    store(Space::Global(pointer.addr()), value, Kind::Write, instruction, Location::caller());
}

/// How far an atomic is one, and orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    Device,
    System,
}

/// A look at a word of global memory that other threads change.
#[track_caller]
pub(crate) fn atomic_load<T: Copy>(pointer: *const T, order: Order, scope: Scope, instruction: &str) -> T {
    let line = Location::caller();
    attempt(instruction, line, |machine| machine.poll(line));
    pause();
    attempt(instruction, line, |machine| {
        let bytes = size_of::<T>();
        let place =
            machine.access(Space::Global(pointer.addr()), bytes, bytes, Kind::AtomicRead, None, line)?;
        machine.acquire(place.addr(), order, scope);
        // SAFETY: `access` found `bytes` bytes there.
        Ok(unsafe { place.cast::<T>().read_unaligned() })
    })
}

/// A store to a word of global memory that other threads look at.
#[track_caller]
pub(crate) fn atomic_store<T: Copy>(
    pointer: *mut T,
    value: T,
    order: Order,
    scope: Scope,
    instruction: &str,
) {
    let line = Location::caller();
    attempt(instruction, line, |machine| {
        let bytes = size_of::<T>();
        let place =
            machine.access(Space::Global(pointer.addr()), bytes, bytes, Kind::AtomicWrite, None, line)?;
        // What was released here before belongs to the value that is gone.
        machine.forget_released(place.addr());
        machine.release(place.addr(), order, scope);
        machine.progress();
        // SAFETY: as in `atomic_load`; the machine alone touches them now.
        unsafe { place.cast::<T>().write_unaligned(value) };
        Ok(())
    });
}

/// A load of shared memory, aligned to its size.
#[inline]
#[track_caller]
pub(crate) fn load_shared<T: Copy>(address: u32, instruction: &str) -> T {
    load(Space::OwnShared(address), Kind::Read, instruction, Location::caller())
}

/// A store to shared memory, aligned to its size.
#[inline]
#[track_caller]
pub(crate) fn store_shared<T: Copy>(address: u32, value: T, instruction: &str) {
    store(Space::OwnShared(address), value, Kind::Write, instruction, Location::caller());
}

/// Address of the block's dynamic shared memory.
pub(crate) fn shared_base(instruction: &str) -> u32 {
    with(instruction, |_| SHARED_BASE)
}

/// A read-modify-write of an aligned word; returns the old value.
#[track_caller]
pub(crate) fn atomic_global<T: Copy + PartialEq>(
    pointer: *mut T,
    order: Order,
    instruction: &str,
    change: impl Fn(T) -> T,
) -> T {
    atomic(Space::Global(pointer.addr()), order, instruction, Location::caller(), change)
}

/// The same in shared memory, relaxed.
#[track_caller]
pub(crate) fn atomic_shared<T: Copy + PartialEq>(
    address: u32,
    instruction: &str,
    change: impl Fn(T) -> T,
) -> T {
    atomic(Space::OwnShared(address), Order::Relaxed, instruction, Location::caller(), change)
}

fn atomic<T: Copy + PartialEq>(
    space: Space,
    order: Order,
    instruction: &str,
    line: &'static Location<'static>,
    change: impl Fn(T) -> T,
) -> T {
    // Others may come first.
    if with(instruction, |machine| machine.random.one_in(4)) {
        pause();
    }
    let (old, changed) = attempt(instruction, line, |machine| {
        let bytes = size_of::<T>();
        machine.access(space, bytes, bytes, Kind::AtomicRead, None, line)?;
        let place = machine.access(space, bytes, bytes, Kind::AtomicWrite, None, line)?.cast::<T>();
        // SAFETY: `access` found the bytes; the machine alone touches them now.
        let old = unsafe { place.read_unaligned() };
        let new = change(old);
        // SAFETY: as above.
        unsafe { place.write_unaligned(new) };
        machine.acquire(place.addr(), order, Scope::Device);
        machine.release(place.addr(), order, Scope::Device);
        if new == old {
            machine.poll(line)?;
        } else {
            machine.progress();
        }
        Ok((old, new != old))
    });
    if !changed {
        pause();
    }
    old
}

impl Machine {
    /// What a thread learns by reading a location atomically: at once, or with its next fence.
    ///
    /// What threads of another card have released counts only where both say that it reaches so far; of fences none
    /// does.
    fn acquire(&mut self, location: usize, order: Order, scope: Scope) {
        let device = self.unit().device;
        let acquires = matches!(order, Order::Acquire | Order::AcqRel);
        let reaches = |releaser: usize, its: Scope| {
            releaser == device || acquires && its == Scope::System && scope == Scope::System
        };
        let released = self.released.range(of_location(location));
        let released = released.filter(|(key, _)| reaches(key.1, key.2)).map(|(_, frame)| frame.clone());
        let released: Vec<Rc<Frame>> = released.collect();
        let thread = self.thread();
        for frame in released {
            if acquires {
                thread.clock.acquire_foreign(&frame);
            } else {
                release_into(&mut thread.observed, frame);
            }
        }
    }

    /// A location has a value that nobody has released yet.
    fn forget_released(&mut self, location: usize) {
        while let Some((&key, _)) = self.released.range(of_location(location)).next() {
            self.released.remove(&key);
        }
    }

    /// What others learn by reading what a thread writes to a location atomically.
    fn release(&mut self, location: usize, order: Order, scope: Scope) {
        let device = self.unit().device;
        let thread = self.thread();
        let (released, scope) = match order {
            Order::Release | Order::AcqRel => (Some(thread.clock.release_foreign()), scope),
            Order::Relaxed | Order::Acquire => (thread.fenced.clone(), Scope::Device),
        };
        if let Some(released) = released {
            let entry = self.released.entry((location, device, scope));
            join(entry.or_insert_with(|| Rc::new(Frame::default())), &released);
        }
    }
}

/// The keys of what was released through a location.
fn of_location(location: usize) -> RangeInclusive<(usize, usize, Scope)> {
    (location, 0, Scope::Device)..=(location, usize::MAX, Scope::System)
}

/// A load of shared memory of the cluster, aligned to its size.
#[inline]
#[track_caller]
pub(crate) fn load_cluster<T: Copy>(address: u32, instruction: &str) -> T {
    load(Space::Shared(address), Kind::Read, instruction, Location::caller())
}

/// A store to shared memory of the cluster, aligned to its size.
#[inline]
#[track_caller]
pub(crate) fn store_cluster<T: Copy>(address: u32, value: T, instruction: &str) {
    store(Space::Shared(address), value, Kind::Write, instruction, Location::caller());
}

/// The fences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fence {
    Membar,
    AcqRelBlock,
    AcqRelCluster,
    AcqRelDevice,
    ProxyAsync,
    ProxyAsyncShared,
    ProxyAsyncGlobal,
}

/// A fence. One between threads: what comes before it is released by the next atomic, and what the last atomics have
/// read is acquired. One between proxies: what this thread did and saw is visible to the asynchronous proxy.
#[track_caller]
pub(crate) fn fence(form: Fence) {
    let (instruction, need) = match form {
        Fence::Membar => ("membar.gl", None),
        Fence::AcqRelBlock => ("fence.acq_rel.cta", Some(Need::MemoryModel)),
        Fence::AcqRelCluster => ("fence.acq_rel.cluster", Some(Need::Clusters)),
        Fence::AcqRelDevice => ("fence.acq_rel.gpu", Some(Need::MemoryModel)),
        Fence::ProxyAsync => ("fence.proxy.async", Some(Need::Tma)),
        Fence::ProxyAsyncShared => ("fence.proxy.async.shared::cta", Some(Need::Tma)),
        Fence::ProxyAsyncGlobal => ("fence.proxy.async.global", Some(Need::Tma)),
    };
    attempt(instruction, Location::caller(), |machine| {
        machine.needs(need, instruction)?;
        match form {
            Fence::Membar | Fence::AcqRelBlock | Fence::AcqRelCluster | Fence::AcqRelDevice => {
                let thread = machine.thread();
                if let Some(observed) = thread.observed.take() {
                    thread.clock.acquire_foreign(&observed);
                }
                thread.fenced = Some(thread.clock.release_foreign());
            }
            Fence::ProxyAsync => {
                machine.thread().clock.fence_proxy(&[Covers::Shared, Covers::Global]);
                machine.fence_mbarriers();
            }
            Fence::ProxyAsyncShared => {
                machine.thread().clock.fence_proxy(&[Covers::Shared]);
                machine.fence_mbarriers();
            }
            Fence::ProxyAsyncGlobal => machine.thread().clock.fence_proxy(&[Covers::Global]),
        }
        Ok(())
    });
}

/// `griddepcontrol`: kernels run one after another here, so there is nothing to wait for. But a thread must not have
/// touched what earlier ones may still write or read.
#[track_caller]
pub(crate) fn grid_wait() {
    const INSTRUCTION: &str = "griddepcontrol.wait";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::DependentLaunch, INSTRUCTION)?;
        if machine.thread().has_touched {
            let text = "griddepcontrol.wait by a thread that has touched global memory before, which is not constant";
            return Err(Failure::new(Defect::Race, text));
        }
        Ok(())
    });
}

/// Whether the thread does what a kernel may do before it waits for those ahead from here on: of global memory it may
/// read what is constant.
#[track_caller]
pub(crate) fn grid_ahead(is_ahead: bool) {
    attempt("griddepcontrol.wait", Location::caller(), |machine| {
        machine.thread().is_ahead = is_ahead;
        Ok(())
    });
}

/// See [`grid_wait`].
#[track_caller]
pub(crate) fn grid_launch_dependents() {
    const INSTRUCTION: &str = "griddepcontrol.launch_dependents";
    attempt(INSTRUCTION, Location::caller(), |machine| machine.needs(Need::DependentLaunch, INSTRUCTION));
}

/// Ends the kernel with a report.
#[track_caller]
pub(crate) fn trap() -> ! {
    assert!(super::is_running(), "cuda_std: trap");
    attempt("trap", Location::caller(), |_| Err(Failure::new(Defect::Panic, "trap")))
}

/// Bytes of a value of the kernel's own, such as the arguments of `printf`.
pub(super) fn bytes_of<T>(value: &T) -> &[MaybeUninit<u8>] {
    // SAFETY: the value's own bytes, padding among them, which MaybeUninit allows.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}
