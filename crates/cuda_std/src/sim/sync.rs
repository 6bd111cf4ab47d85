//! Barriers of blocks and clusters.

use core::panic::Location;
use std::format;
use std::vec::Vec;

use super::clock::{Frame, join, meet};
use super::machine::{CLUSTER_WINDOW, Machine, attempt, suspend};
use super::unit::{Failure, State, Thread, Wait};
use super::warp::{Operation, Together, collective};
use super::{Defect, Need};
use std::rc::Rc;

/// The sixteen barriers of a block.
#[derive(Default)]
pub(super) struct Barriers([Barrier; 16]);

#[derive(Default)]
struct Barrier {
    /// Threads that have come, and how many are meant to; none: all of the block that have not returned.
    arrived: usize,
    expected: Option<u32>,
    waiting: Vec<usize>,
    /// What those have released that do not wait.
    released: Option<Rc<Frame>>,
}

/// Adds to what was released before.
pub(super) fn release_into(released: &mut Option<Rc<Frame>>, frame: Rc<Frame>) {
    match released {
        Some(released) => join(released, &frame),
        None => *released = Some(frame),
    }
}

/// Whether a thread waits at a barrier or only counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    Wait,
    Count,
}

/// `bar.sync` and `bar.arrive` on barrier `id` for `count` threads; without a count, all of the block. Both are
/// `.aligned`: the lanes of a warp come together.
#[track_caller]
pub(crate) fn barrier(instruction: &'static str, id: u32, count: Option<u32>, arrival: Arrival) {
    let line = Location::caller();
    let waits = attempt(instruction, line, |machine| {
        let operation = Operation { instruction, together: Together::Aligned, need: None };
        let mask = machine.warp().lanes;
        let immediate = u64::from(id) << 32 | u64::from(count.unwrap_or(0));
        match machine.arrive_at_warp(operation, mask, immediate, [0; 12], line)? {
            None => machine.wait(Wait::Warp { instruction, mask }),
            Some(_) => machine.arrive_at_barrier(instruction, id, count, arrival)?,
        }
        // The last lane, too, waits for its turn again.
        Ok(true)
    });
    if waits {
        suspend();
    }
}

impl Machine {
    /// The running thread's warp comes to a barrier.
    fn arrive_at_barrier(
        &mut self,
        instruction: &'static str,
        id: u32,
        count: Option<u32>,
        arrival: Arrival,
    ) -> Result<(), Failure> {
        let slot = self.current.slot;
        let (current, first) = self.warp_threads();
        let num_lanes = self.warp().lanes.count_ones() as usize;
        let unit = self.unit();
        let block_index = unit[current].block;
        let threads = unit.blocks[block_index].threads.len() as u32;
        if id >= 16
            || count
                .is_some_and(|count| count == 0 || count % 32 != 0 || count > threads.next_multiple_of(32))
        {
            let count = count.unwrap_or(threads);
            let text = format!(
                "`{instruction}` {id}, {count}: expected a barrier below 16 and a multiple of 32 threads, of the \
                 block's {threads}"
            );
            return Err(Failure(Defect::Unsupported, text));
        }
        let barrier = &mut unit.blocks[block_index].barriers.0[id as usize];
        if barrier.arrived > 0 && barrier.expected != count {
            let text = |count: Option<u32>| count.map_or("all".into(), |count| format!("{count}"));
            let (now, before) = (text(count), text(barrier.expected));
            let text =
                format!("`{instruction}` {id} for {now} threads, while others wait at it for {before}");
            return Err(Failure(Defect::Divergence, text));
        }
        barrier.expected = count;
        barrier.arrived += num_lanes;
        for thread in first..first + num_lanes {
            if arrival == Arrival::Wait {
                unit.blocks[block_index].barriers.0[id as usize].waiting.push(thread);
                unit[thread].state = State::Waiting(Wait::Barrier { id, count });
                continue;
            }
            let frame = unit[thread].clock.release();
            release_into(&mut unit.blocks[block_index].barriers.0[id as usize].released, frame);
        }
        self.complete_barrier(block_index, id)?;
        if arrival == Arrival::Count {
            (first..first + num_lanes).for_each(|thread| self.wake(slot, thread));
        }
        Ok(())
    }

    /// Opens a barrier at which everybody has arrived.
    fn complete_barrier(&mut self, block_index: usize, id: u32) -> Result<(), Failure> {
        let slot = self.current.slot;
        let unit = self.unit();
        let block = &mut unit.blocks[block_index];
        let live = block.threads.len() - block.returned;
        let barrier = &mut block.barriers.0[id as usize];
        let expected = match barrier.expected {
            Some(count) => (count as usize).min(block.threads.len()),
            None => live,
        };
        if barrier.arrived == 0 || barrier.arrived < expected {
            return Ok(());
        }
        if barrier.arrived > expected {
            let text = format!("barrier {id} is for {expected} threads, and {} came", barrier.arrived);
            return Err(Failure(Defect::Divergence, text));
        }
        let Barrier { waiting, released, expected: count, .. } = std::mem::take(barrier);
        let is_met = |thread: &Thread| thread.state == State::Waiting(Wait::Barrier { id, count });
        let met = unit.threads[block.threads.clone()].iter_mut().filter(|thread| is_met(thread));
        meet(met.map(|thread| &mut thread.clock), released.as_ref());
        for thread in waiting {
            self.wake(slot, thread);
        }
        Ok(())
    }

    /// A thread has returned: barriers of all threads of its block, and of the cluster, may be complete without it.
    pub(super) fn barriers_after_return(&mut self) -> Result<(), Failure> {
        let block = self.thread().block;
        for id in 0..16 {
            if self.unit().blocks[block].barriers.0[id as usize].expected.is_none() {
                self.complete_barrier(block, id)?;
            }
        }
        self.complete_cluster_barrier();
        Ok(())
    }
}

/// `barrier.cluster`.
#[derive(Default)]
pub(super) struct ClusterBarrier {
    /// Threads that have arrived in this phase, in order.
    arrived: Vec<usize>,
    released: Option<Rc<Frame>>,
    waiting: Vec<usize>,
    /// Phases completed, and the phase that each thread arrived in last, plus one.
    phase: u32,
    last_arrival: Vec<u32>,
    /// Each thread's time when it arrived last.
    pub(super) times: Vec<u32>,
    /// What the completed phases have released.
    opened: Option<Rc<Frame>>,
}

/// The lanes of a warp, for an instruction of the cluster that is `.aligned`.
fn come_together(instruction: &'static str, line: &'static Location<'static>) {
    let operation = Operation { instruction, together: Together::Aligned, need: Some(Need::Clusters) };
    collective(operation, u32::MAX, 0, [0; 12], line, |_, _| Ok([[0; 8]; 32]));
}

/// `barrier.cluster.arrive`. `Order::Relaxed` releases nothing but what `fence.mbarrier_init` has.
#[track_caller]
pub(crate) fn cluster_arrive(instruction: &'static str, order: crate::atomic::Order) {
    let line = Location::caller();
    come_together(instruction, line);
    attempt(instruction, line, |machine| {
        let thread = machine.current.thread;
        machine.visits_before_cluster_barrier();
        let unit = machine.unit();
        let frame = (order != crate::atomic::Order::Relaxed).then(|| unit[thread].clock.release());
        let num_threads = unit.threads.len();
        let barrier = &mut unit.cluster_barrier;
        barrier.last_arrival.resize(num_threads, 0);
        if barrier.last_arrival[thread] == barrier.phase + 1 {
            let text = format!("`{instruction}` twice without `barrier.cluster.wait` between");
            return Err(Failure(Defect::Divergence, text));
        }
        let phase = barrier.phase + 1;
        barrier.last_arrival[thread] = phase;
        barrier.arrived.push(thread);
        match frame {
            Some(frame) => release_into(&mut barrier.released, frame),
            None => machine.announce_mbarriers(phase),
        }
        machine.complete_cluster_barrier();
        Ok(())
    });
}

/// `barrier.cluster.wait`.
#[track_caller]
pub(crate) fn cluster_wait(instruction: &'static str) {
    let line = Location::caller();
    come_together(instruction, line);
    let waits = attempt(instruction, line, |machine| {
        let thread = machine.current.thread;
        let unit = machine.unit();
        let barrier = &mut unit.cluster_barrier;
        match barrier.last_arrival.get(thread) {
            Some(&phase) if phase > barrier.phase => {
                barrier.waiting.push(thread);
                machine.wait(Wait::Cluster);
                Ok(true)
            }
            Some(&phase) if phase > 0 => {
                let opened = barrier.opened.clone();
                unit[thread].met_clusters = phase;
                if let Some(opened) = opened {
                    unit[thread].clock.acquire(&opened);
                }
                Ok(false)
            }
            _ => Err(Failure(
                Defect::Divergence,
                format!("`{instruction}` without `barrier.cluster.arrive` before"),
            )),
        }
    });
    if waits {
        suspend();
    }
}

impl Machine {
    fn complete_cluster_barrier(&mut self) {
        let slot = self.current.slot;
        let unit = self.unit();
        let live = unit.threads.iter().filter(|thread| thread.state != State::Returned).count();
        let barrier = &mut unit.cluster_barrier;
        if barrier.arrived.is_empty() || barrier.arrived.len() < live {
            return;
        }
        barrier.arrived.clear();
        barrier.phase += 1;
        if let Some(released) = barrier.released.take() {
            release_into(&mut barrier.opened, released);
        }
        let (opened, phase) = (barrier.opened.clone(), barrier.phase);
        let waiting = std::mem::take(&mut barrier.waiting);
        self.visits_after_cluster_barrier();
        for thread in waiting {
            self.unit()[thread].met_clusters = phase;
            if let Some(opened) = &opened {
                self.unit()[thread].clock.acquire(opened);
            }
            self.wake(slot, thread);
        }
    }
}

/// `mapa`: the same place in another block's shared memory.
#[track_caller]
pub(crate) fn map_shared(address: u32, rank: u32) -> u32 {
    const INSTRUCTION: &str = "mapa.shared::cluster";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::Clusters, INSTRUCTION)?;
        let blocks = machine.unit().blocks.len() as u32;
        if rank >= blocks {
            let text = format!("`{INSTRUCTION}` to block {rank} of a cluster of {blocks}");
            return Err(Failure(Defect::OutOfBounds, text));
        }
        Ok((rank + 1) * CLUSTER_WINDOW + address % CLUSTER_WINDOW)
    })
}

/// A register of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClusterRegister {
    BlockRank,
    NumBlocks,
    ClusterIdxX,
    GridDimX,
}

/// The value of a register of the cluster.
#[track_caller]
pub(crate) fn cluster_register(register: ClusterRegister) -> u32 {
    attempt("%cluster", Location::caller(), |machine| {
        machine.needs(Need::Clusters, "%cluster_ctarank")?;
        let rank = machine.thread().block as u32;
        let [grid, cluster] = machine.extent();
        Ok(match register {
            ClusterRegister::BlockRank => rank,
            ClusterRegister::NumBlocks => cluster.into_iter().product(),
            ClusterRegister::ClusterIdxX => machine.unit().blocks[0].index[0] / cluster[0],
            ClusterRegister::GridDimX => grid[0] / cluster[0],
        })
    })
}
