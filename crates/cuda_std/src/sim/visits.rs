//! Accesses to the shared memory of other blocks of a cluster: such a block must have started before, and must not end
//! until after. Both have to follow from a barrier, whatever the order in which the simulation happens to run them.

use std::format;

use super::Defect;
use super::clock::{START, Stamp};
use super::machine::Machine;
use super::unit::{Failure, Line};

/// The last access of an actor to a block that is not its own.
pub(super) struct Visit {
    stamp: Stamp,
    line: u16,
    what: &'static str,
}

impl Machine {
    /// An access of the running thread, or of an agent on its behalf, to the shared memory of a block.
    pub(super) fn visit(
        &mut self,
        block: usize,
        stamp: Stamp,
        what: &'static str,
        line: Line,
    ) -> Result<(), Failure> {
        let line = self.line_number(line);
        let thread = self.current.thread;
        let unit = self.unit();
        if unit[thread].block == block {
            return Ok(());
        }
        let absent = |how: &str| {
            let text = format!(
                "data race: {what} in the shared memory of block {block} of the cluster, which {how}"
            );
            Err(Failure(Defect::Race, text))
        };
        let visited = &unit.blocks[block];
        let clock = &unit[thread].clock;
        let starts = visited.threads.clone().map(|thread| Stamp::new(unit.id, thread as u32, START));
        if unit[thread].met_clusters == 0 && !starts.into_iter().any(|start| clock.is_after(start)) {
            return absent("may not have started: no barrier of the cluster lies before");
        }
        if visited.returned == visited.threads.len() {
            return absent("has ended");
        }
        unit.blocks[block].visits.insert(stamp.actor(), Visit { stamp, line, what });
        Ok(())
    }

    /// The running thread comes to the cluster's barrier: its visits so far lie before the barrier, whether or not it
    /// releases them.
    pub(super) fn visits_before_cluster_barrier(&mut self) {
        let thread = self.current.thread;
        let unit = self.unit();
        unit.cluster_barrier.times.resize(unit.threads.len(), 0);
        let clock = &mut unit.threads[thread].clock;
        unit.cluster_barrier.times[thread] = clock.time;
        clock.time += 1;
    }

    /// The cluster's barrier opens: visits before it have ended.
    pub(super) fn visits_after_cluster_barrier(&mut self) {
        let unit = self.unit();
        let times = &unit.cluster_barrier.times;
        let is_over = |actor: u32, visit: &Visit| {
            times.get(actor as usize).is_some_and(|&time| visit.stamp.time() <= time)
        };
        for block in &mut unit.blocks {
            block.visits.retain(|&actor, visit| !is_over(actor, visit));
        }
    }

    /// The running thread was the last of its block: nobody may be visiting it.
    pub(super) fn check_visits(&mut self) -> Result<(), Failure> {
        let thread = self.current.thread;
        let unit = self.unit();
        let block = &unit.blocks[unit[thread].block];
        if block.returned < block.threads.len() {
            return Ok(());
        }
        let is_seen =
            |visit: &&Visit| block.threads.clone().any(|thread| unit[thread].clock.is_after(visit.stamp));
        let Some(&Visit { stamp, line, what }) = block.visits.values().find(|visit| !is_seen(visit)) else {
            return Ok(());
        };
        let who = self.describe(stamp, line);
        let text = format!(
            "data race: the block ends with no barrier of the cluster after the {what} in its shared memory by {who}"
        );
        Err(Failure(Defect::Race, text))
    }
}
