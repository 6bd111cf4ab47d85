//! What stands in for a plan that its device refuses: the same operator on the next floor, and on the CPU. See
//! [`Fallback`](crate::Fallback).

use std::fmt;
use std::sync::OnceLock;

use crate::device::Device;
use crate::error::Error;
use crate::kernel::OptimizationReport;
use crate::launch;
use crate::nvtx;
use crate::stream::Stream;
use crate::tensor::{Mirror, Views};
use crate::trace;

/// An operator, planned for one floor of a card or for the CPU.
pub(crate) trait Rung: fmt::Debug + Sized {
    /// The operator's name.
    const OP: &'static str;
    /// What is planned for.
    type Problem: Copy + fmt::Debug;
    /// The tensors of a run.
    type Args<'a>: Views;
    /// What a caller may ask for.
    type Variant;

    /// Whether a device can do it.
    fn supports(device: &Device, problem: &Self::Problem) -> Result<(), Error>;
    /// Plans with what the operator chooses.
    fn plan(device: &Device, problem: Self::Problem) -> Result<Self, Error>;
    /// Plans with the caller's choice.
    fn plan_with(device: &Device, problem: Self::Problem, variant: Self::Variant) -> Result<Self, Error>;
    /// Where it is planned for.
    fn device(&self) -> &Device;
    /// Whether a run that came to its middle can be done again from its start: none of its launches reads what a
    /// later one writes.
    fn is_repeatable(&self) -> bool;
    /// Checks the tensors and enqueues the work.
    fn run(&self, stream: &Stream, args: &mut Self::Args<'_>) -> Result<(), Error>;
    /// What was chosen.
    fn report(&self) -> OptimizationReport;
}

/// An operator, planned for a device, with what has come to stand in for it.
#[derive(Debug)]
pub(crate) struct Ladder<R: Rung> {
    rung: R,
    /// What was asked for.
    device: Device,
    problem: R::Problem,
    /// What refused all above this rung; none on the first.
    refused: Option<String>,
    /// What the first run planned of which this rung refused a launch.
    below: OnceLock<Box<Self>>,
}

impl<R: Rung> Ladder<R> {
    pub(crate) fn supports(device: &Device, problem: &R::Problem) -> Result<(), Error> {
        let Err(error) = R::supports(device, problem) else { return Ok(()) };
        let stands_in =
            error.is_refusal() && device.lower().any(|lower| R::supports(&lower, problem).is_ok());
        if stands_in { Ok(()) } else { Err(error) }
    }

    pub(crate) fn plan(device: &Device, problem: R::Problem) -> Result<Self, Error> {
        Self::from_rung(device, problem, R::plan(device, problem))
    }

    pub(crate) fn plan_with(
        device: &Device,
        problem: R::Problem,
        variant: R::Variant,
    ) -> Result<Self, Error> {
        Self::from_rung(device, problem, R::plan_with(device, problem, variant))
    }

    /// From what was planned for the device.
    pub(crate) fn from_rung(
        device: &Device,
        problem: R::Problem,
        planned: Result<R, Error>,
    ) -> Result<Self, Error> {
        match planned {
            Ok(rung) => Ok(Self::new(rung, device, problem, None)),
            Err(error) => Self::plan_below(device, device, problem, error),
        }
    }

    fn new(rung: R, device: &Device, problem: R::Problem, refused: Option<String>) -> Self {
        if trace::hears_of_plans() {
            let OptimizationReport { problem, device, variant, why, .. } = rung.report();
            trace::planned(R::OP, &problem, &device, variant, &why);
        }
        Ladder { rung, device: device.clone(), problem, refused, below: OnceLock::new() }
    }

    /// The next rung below `above`, which gave this error; the error itself if there is none.
    fn plan_below(device: &Device, above: &Device, problem: R::Problem, error: Error) -> Result<Self, Error> {
        if !error.is_refusal() {
            return Err(error);
        }
        for lower in above.lower() {
            match R::plan(&lower, problem) {
                Ok(rung) => {
                    let refused = format!("for {}: {}", above.describe(), error.in_a_line());
                    device.say_fallen(format!("{} falls back to {}, {refused}", R::OP, lower.describe()));
                    return Ok(Self::new(rung, device, problem, Some(refused)));
                }
                // That is not of this floor either: the caller's own mistakes were found above.
                Err(lower) if lower.is_refusal() || matches!(lower, Error::Invalid { .. }) => {}
                Err(lower) => return Err(lower),
            }
        }
        Err(error)
    }

    /// The rung that runs are done on.
    fn last(&self) -> &Self {
        let mut ladder = self;
        while let Some(below) = ladder.below.get() {
            ladder = below;
        }
        ladder
    }

    pub(crate) fn run(&self, stream: &Stream, mut args: R::Args<'_>) -> Result<(), Error> {
        let _range = nvtx::range(R::OP);
        let mut ladder = self.last();
        loop {
            let rung = &ladder.rung;
            if rung.device().place() != self.device.place() {
                return ladder.run_on_host(stream, args);
            }
            let enqueued = launch::enqueued();
            let Err(error) = rung.run(stream, &mut args) else { return Ok(()) };
            let is_new = enqueued == launch::enqueued() || rung.is_repeatable();
            if !is_new || !error.is_refusal() {
                return Err(error);
            }
            // Nothing is planned while a graph is recorded: that may load modules and take memory.
            if stream.queue().is_recorded()? {
                return Err(error);
            }
            let below = Self::plan_below(&self.device, rung.device(), self.problem, error)?;
            // Another thread may have come first; its plan is as good.
            ladder = ladder.below.get_or_init(|| Box::new(below));
        }
    }

    /// Runs on the CPU with copies of a card's tensors.
    fn run_on_host(&self, stream: &Stream, args: R::Args<'_>) -> Result<(), Error> {
        stream.expect_place(R::OP, self.device.place())?;
        if stream.queue().is_recorded()? {
            let reason =
                "it has fallen back to the CPU, whose copies from and to the host cannot be recorded";
            return Err(Error::Unsupported {
                op: R::OP,
                device: self.device.describe(),
                reason: reason.into(),
            });
        }
        Mirror::run(R::OP, stream, self.rung.device(), args, |own, args| self.rung.run(own, args))
    }

    pub(crate) fn report(&self) -> OptimizationReport {
        let last = self.last();
        OptimizationReport { fallback: last.refused.clone(), ..last.rung.report() }
    }
}
