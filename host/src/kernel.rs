//! What all plans have in common.

use std::fmt;
use std::num::Saturating;

use crate::device::Device;
use crate::error::Error;
use crate::launch::Entry;
use crate::profile::{HardwareProfile, Resources};
use crate::stream::Stream;

/// A planned operator: what was chosen, ready to run.
///
/// Modules hold their operators as plans and reports are made over all of them, hence the trait; `forward` is the
/// operator's own `run`.
pub trait Kernel {
    /// The tensors that a run takes.
    type Args<'a>;

    /// The operator's name.
    fn op(&self) -> &'static str;

    /// Runs once: checks the arguments, and enqueues the work. Allocates nothing.
    fn forward(&self, stream: &Stream, args: Self::Args<'_>) -> Result<(), Error>;

    /// What was chosen and why, and what it should take.
    fn optimization_report(&self) -> OptimizationReport;
}

/// What a plan chose, why, and what a run of the planned size should take.
#[derive(Clone, Debug)]
pub struct OptimizationReport {
    /// The operator.
    pub op: &'static str,
    /// The planned problem.
    pub problem: String,
    /// The device.
    pub device: String,
    /// The kernel's entry name; `cpu` on the CPU, also where that is a fallback.
    pub variant: &'static str,
    /// Why this one.
    pub why: String,
    /// How the work is cut up.
    pub tile: String,
    /// Threads of a block.
    pub threads: u32,
    /// What the kernel takes of a multiprocessor; none where no driver says.
    pub resources: Option<Resources>,
    /// Resident threads over the most that a multiprocessor holds; none where no driver says.
    pub occupancy: Option<f64>,
    /// Fewest bytes that a run must move: every input read once, every output written once. [`u64::MAX`] where there
    /// are more, also for `flops`.
    pub bytes: u64,
    /// Floating-point (or integer multiply-add) operations of a run.
    pub flops: u64,
    /// Microseconds for `bytes` at the device's peak memory bandwidth; none where that is unknown.
    pub memory_floor_us: Option<f64>,
    /// What the device that was asked for said, where this is another floor or the CPU: see
    /// [`Fallback`](crate::Fallback).
    pub fallback: Option<String>,
}

/// What a run of a problem does at least: a report's part of the operator.
pub(crate) struct Work {
    pub(crate) problem: String,
    pub(crate) bytes: Saturating<u64>,
    pub(crate) flops: Saturating<u64>,
}

/// How the work is cut up, and why so: a report's part of the choice.
pub(crate) struct Cut {
    pub(crate) why: String,
    pub(crate) tile: String,
    pub(crate) threads: u32,
}

impl Cut {
    /// On the CPU, where there is nothing to choose.
    pub(crate) fn cpu(tile: &str) -> Self {
        Cut { why: "no card".into(), tile: tile.into(), threads: 1 }
    }
}

/// A size as a factor of bytes or operations: a problem bounds its sizes, not their products.
pub(crate) fn count(size: usize) -> Saturating<u64> {
    Saturating(size as u64)
}

impl OptimizationReport {
    pub(crate) fn new(
        op: &'static str,
        device: &Device,
        entry: Option<&Entry>,
        work: Work,
        cut: Cut,
    ) -> Self {
        let HardwareProfile { threads_per_sm, memory_bandwidth, .. } = *device.profile();
        let occupancy = entry
            .and_then(|entry| entry.blocks_per_sm(cut.threads))
            .map(|blocks| f64::from(blocks * cut.threads) / f64::from(threads_per_sm));
        OptimizationReport {
            op,
            problem: work.problem,
            device: device.describe(),
            variant: entry.map_or("cpu", Entry::name),
            why: cut.why,
            tile: cut.tile,
            threads: cut.threads,
            resources: entry.and_then(Entry::resources),
            occupancy,
            bytes: work.bytes.0,
            flops: work.flops.0,
            memory_floor_us: (memory_bandwidth > 0.0).then(|| work.bytes.0 as f64 / memory_bandwidth * 1e6),
            fallback: None,
        }
    }
}

impl fmt::Display for OptimizationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} on {}", self.op, self.problem, self.device)?;
        if let Some(refusal) = &self.fallback {
            writeln!(f, "  fallback   {refusal}")?;
        }
        writeln!(f, "  variant    {} ({})", self.variant, self.why)?;
        writeln!(f, "  tile       {}", self.tile)?;
        if let Some(Resources { registers, local_bytes, smem_bytes, .. }) = self.resources {
            writeln!(
                f,
                "  resources  {} threads, {registers} registers, {smem_bytes} B shared, {local_bytes} B local",
                self.threads
            )?;
        }
        if let Some(occupancy) = self.occupancy {
            writeln!(f, "  occupancy  {:.0} %", occupancy * 100.0)?;
        }
        write!(f, "  work       {} B, {} FLOP", self.bytes, self.flops)?;
        if let Some(floor) = self.memory_floor_us {
            write!(f, "; {floor:.2} µs at peak bandwidth")?;
        }
        Ok(())
    }
}
