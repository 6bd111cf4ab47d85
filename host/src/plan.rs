//! What every operator's plan does alike: an operator says what is its own ([`Operator`]), [`Plan`] does the rest.
//!
//! An operator is `pub struct Name(Plan<Self>)` with its documentation, an `impl Operator`, and a line of [`planned!`],
//! which gives it the methods of a plan under its own types. A few do more by themselves: they are a [`Rung`] of
//! their own.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use abi::DType;

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work};
use crate::ladder::{Ladder, Rung};
use crate::launch::Entry;
use crate::profile::DeviceLimits;
use crate::stream::Stream;
use crate::tensor::{TensorView, Views};

/// What `select` takes for a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<V> {
    /// The kernel: a row of the operator's table, or what stands for several of them.
    pub variant: V,
    /// Threads of a block.
    pub threads: u32,
    /// Why this one.
    pub why: Cow<'static, str>,
}

impl<V> Choice<V> {
    pub(crate) fn new(variant: V, threads: u32, why: impl Into<Cow<'static, str>>) -> Self {
        Choice { variant, threads, why: why.into() }
    }

    /// What the caller of `plan_with` takes.
    pub(crate) fn asked_for(variant: V, threads: u32) -> Self {
        Choice::new(variant, threads, "asked for")
    }
}

/// What is an operator's own.
pub(crate) trait Operator: fmt::Debug + Sized + 'static {
    /// Its name.
    const OP: &'static str;
    /// How the work is cut up on the CPU, for reports.
    const CPU_TILE: &'static str = "rows";
    /// Whether none of a run's launches reads what a later one writes.
    const IS_REPEATABLE: bool = false;
    /// What is planned for.
    type Problem: Copy + fmt::Debug;
    /// The tensors of a run.
    type Args<'a>: Views;
    /// What a run comes to: sizes and strides.
    type Dims;
    /// What a caller may ask for: a row of its table, mostly.
    type Variant: fmt::Debug;
    /// What is loaded for a plan.
    type Kernels: Kernels;

    /// Refuses what no device can do.
    fn check_problem(problem: &Self::Problem) -> Result<(), Error>;
    /// The choice for a problem: pure.
    fn select(limits: &DeviceLimits, problem: &Self::Problem) -> Result<Choice<Self::Variant>, Error>;
    /// The caller's choice; an error if it cannot do the problem.
    fn forced(variant: Self::Variant, problem: &Self::Problem) -> Result<Choice<Self::Variant>, Error>;
    /// Loads what a choice needs.
    fn load(
        device: &Device,
        problem: &Self::Problem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Self::Kernels, Error>;
    /// Refuses tensors that do not fit.
    fn check(at: &Check<'_>, problem: &Self::Problem, args: &Self::Args<'_>) -> Result<Self::Dims, Error>;
    /// Runs on the CPU.
    fn cpu(problem: &Self::Problem, dims: &Self::Dims, args: &mut Self::Args<'_>);
    /// Launches the plan's kernels.
    fn launch(run: &Run<'_, Self>, dims: Self::Dims, args: &Self::Args<'_>) -> Result<(), Error>;
    /// What a run of the planned size does at least.
    fn work(problem: &Self::Problem) -> Work;
    /// How a choice cuts the work up, for reports.
    fn tile(device: &Device, problem: &Self::Problem, choice: &Choice<Self::Variant>) -> String;
}

/// What is loaded for a plan.
pub(crate) trait Kernels: fmt::Debug {
    /// The kernel that reports are of.
    fn reported(&self) -> &Entry;
}

impl Kernels for Entry {
    fn reported(&self) -> &Entry {
        self
    }
}

/// The chosen kernel, and the one for tensors that are not aligned as it needs them.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) chosen: Entry,
    pub(crate) any: Entry,
}

impl Pair {
    /// Loads both, by their names.
    pub(crate) fn load(
        device: &Device,
        family: &'static str,
        [chosen, any]: [&'static str; 2],
        smem_bytes: u32,
    ) -> Result<Self, Error> {
        let load = |entry| device.entry(family, entry, smem_bytes);
        Ok(Pair { chosen: load(chosen)?, any: load(any)? })
    }

    /// The chosen one if the tensors are as it needs them.
    pub(crate) fn fitting(&self, suits: bool) -> &Entry {
        if suits { &self.chosen } else { &self.any }
    }
}

impl Kernels for Pair {
    fn reported(&self) -> &Entry {
        &self.chosen
    }
}

/// What a launch is made of besides the tensors.
pub(crate) struct Run<'a, O: Operator> {
    pub(crate) device: &'a Device,
    pub(crate) problem: &'a O::Problem,
    pub(crate) choice: &'a Choice<O::Variant>,
    pub(crate) kernels: &'a O::Kernels,
    pub(crate) stream: &'a Stream,
    /// [`Check::is_aligned`] of all tensors.
    pub(crate) is_aligned: bool,
}

/// An operator, planned, with what may stand in for it.
pub(crate) type Plan<O> = Ladder<Floor<O>>;

/// An operator, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Floor<O: Operator> {
    device: Device,
    problem: O::Problem,
    /// None on the CPU.
    loaded: Option<(Choice<O::Variant>, O::Kernels)>,
}

impl<O: Operator> Floor<O> {
    fn load(device: &Device, problem: O::Problem, choice: Option<Choice<O::Variant>>) -> Result<Self, Error> {
        let load = |choice| O::load(device, &problem, &choice).map(|kernels| (choice, kernels));
        Ok(Floor { device: device.clone(), loaded: choice.map(load).transpose()?, problem })
    }
}

impl<O: Operator> Rung for Floor<O> {
    const OP: &'static str = O::OP;
    type Problem = O::Problem;
    type Args<'a> = O::Args<'a>;
    type Variant = O::Variant;

    fn supports(device: &Device, problem: &O::Problem) -> Result<(), Error> {
        O::check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| O::select(&limits, problem).map(|_| ()))
    }

    fn plan(device: &Device, problem: O::Problem) -> Result<Self, Error> {
        O::check_problem(&problem)?;
        let choice = device.limits().map(|limits| O::select(&limits, &problem)).transpose()?;
        Self::load(device, problem, choice)
    }

    fn plan_with(device: &Device, problem: O::Problem, variant: O::Variant) -> Result<Self, Error> {
        O::check_problem(&problem)?;
        // Also on the CPU, which has no use for it: a mistake is one everywhere.
        let choice = O::forced(variant, &problem)?;
        Self::load(device, problem, device.limits().map(|_| choice))
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        O::IS_REPEATABLE
    }

    fn run(&self, stream: &Stream, args: &mut O::Args<'_>) -> Result<(), Error> {
        let (device, problem) = (&self.device, &self.problem);
        let check = Check::new(O::OP, device);
        check.stream(stream)?;
        let dims = O::check(&check, problem, args)?;
        match &self.loaded {
            Some((choice, kernels)) => {
                let is_aligned = check.is_aligned();
                O::launch(&Run { device, problem, choice, kernels, stream, is_aligned }, dims, args)
            }
            None => {
                O::cpu(problem, &dims, args);
                Ok(())
            }
        }
    }

    fn report(&self) -> OptimizationReport {
        let (device, problem) = (&self.device, &self.problem);
        let (entry, cut) = match &self.loaded {
            Some((choice, kernels)) => {
                let tile = O::tile(device, problem, choice);
                let why = choice.why.clone().into_owned();
                (Some(kernels.reported()), Cut { why, tile, threads: choice.threads })
            }
            None => (None, Cut::cpu(O::CPU_TILE)),
        };
        OptimizationReport::new(O::OP, device, entry, O::work(problem), cut)
    }
}

/// Gives an operator the methods of its plan, under its own types: their pages and messages name them. What it is
/// planned as is [`Floor`], or its own [`Rung`].
macro_rules! planned {
    ($op:ident, $problem:ty, $args:ident $fields:tt, $variant:ty) => {
        $crate::plan::planned!($op, $problem, $args $fields, $variant, $crate::plan::Floor<$op>);
    };
    ($op:ident, $problem:ty, $args:ident $fields:tt, $variant:ty, $rung:ty) => {
        $crate::tensor::views!($args $fields);

        impl $op {
            /// Whether `device` can do it.
            ///
            /// **Errors**: those of [`Self::plan`], but for what the device has no memory or image for.
            pub fn supports(
                device: &$crate::device::Device,
                problem: &$problem,
            ) -> Result<(), $crate::error::Error> {
                $crate::ladder::Ladder::<$rung>::supports(device, problem)
            }

            /// Checks the problem, chooses kernels, loads them, and takes the memory that runs need besides their
            /// tensors. Where the device refuses that, it is as its [`Fallback`](crate::Fallback) says, also in a run
            /// of which it refuses a launch: such a run plans again.
            pub fn plan(
                device: &$crate::device::Device,
                problem: $problem,
            ) -> Result<Self, $crate::error::Error> {
                $crate::ladder::Ladder::plan(device, problem).map(Self)
            }

            /// Plans with a kernel of the caller's choice; an error if it cannot do the problem. A run whose tensors
            /// do not suit it in address or stride does without, and where the device refuses it what stands in is
            /// chosen anew, as for [`Self::plan`].
            pub fn plan_with(
                device: &$crate::device::Device,
                problem: $problem,
                variant: $variant,
            ) -> Result<Self, $crate::error::Error> {
                $crate::ladder::Ladder::plan_with(device, problem, variant).map(Self)
            }

            /// Runs once: checks the tensors and enqueues the work. The type's own page says what is computed.
            pub fn run(
                &self,
                stream: &$crate::stream::Stream,
                args: $args<'_>,
            ) -> Result<(), $crate::error::Error> {
                self.0.run(stream, args)
            }

            /// What was chosen, and what a run of the planned size should take at least.
            pub fn report(&self) -> $crate::kernel::OptimizationReport {
                self.0.report()
            }
        }

        impl $crate::kernel::Kernel for $op {
            type Args<'a> = $args<'a>;

            fn op(&self) -> &'static str {
                <$rung as $crate::ladder::Rung>::OP
            }

            fn forward(
                &self,
                stream: &$crate::stream::Stream,
                args: $args<'_>,
            ) -> Result<(), $crate::error::Error> {
                self.run(stream, args)
            }

            fn optimization_report(&self) -> $crate::kernel::OptimizationReport {
                self.report()
            }
        }
    };
}
pub(crate) use planned;

/// Says what the tensors of a run must be, in the name of an operator: one call for each of them.
///
/// The stride of a row that is alone may be anything, and so may one between rows without elements: it is 0 here.
pub(crate) struct Check<'a> {
    op: &'static str,
    device: &'a Device,
    is_aligned: Cell<bool>,
}

impl<'a> Check<'a> {
    pub(crate) fn new(op: &'static str, device: &'a Device) -> Self {
        Check { op, device, is_aligned: Cell::new(true) }
    }

    /// Whether all tensors so far that were checked by [`Self::rows`], [`Self::block`] and [`Self::stack`] can be
    /// read in pieces of 16 bytes.
    pub(crate) fn is_aligned(&self) -> bool {
        self.is_aligned.get()
    }

    /// A stream of the plan's device.
    pub(crate) fn stream(&self, stream: &Stream) -> Result<(), Error> {
        stream.expect_place(self.op, self.device.place())
    }

    /// Elements of a row that are neighbours, which kernels read in pieces of 16 bytes where they can. Returns the
    /// strides of the other axes, outermost first, and 0 for those that there are not.
    pub(crate) fn rows<const N: usize>(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<[u32; N], Error> {
        let strides = self.elements(name, view, dtype, shape)?;
        self.is_aligned.set(self.is_aligned.get() && view.is_aligned_16());
        Ok(strides)
    }

    /// [`Self::rows`] that kernels read element by element, whatever the address.
    pub(crate) fn elements<const N: usize>(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<[u32; N], Error> {
        let strides = self.strided(name, view, dtype, shape)?;
        match (view.shape().last(), view.strides().last()) {
            (Some(&size), Some(&stride)) if size > 1 && stride != 1 => {
                self.refuse(name, "stride 1 in the last dimension", stride.to_string())
            }
            _ => Ok(strides),
        }
    }

    /// A tensor of any strides, read element by element. Returns the strides.
    pub(crate) fn strided<const N: usize>(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<[u32; N], Error> {
        view.expect(self.op, name, self.device, dtype, shape)?;
        let mut strides = [0; N];
        for (axis, stride) in strides.iter_mut().enumerate().take(view.shape().len()) {
            if view.shape()[axis] > 1 && !view.is_empty() {
                *stride = check_size(self.op, name, "stride", view.strides()[axis])?;
            }
        }
        Ok(strides)
    }

    /// A tensor without gaps, read element by element.
    pub(crate) fn contiguous(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<(), Error> {
        view.expect(self.op, name, self.device, dtype, shape)?;
        if view.is_contiguous() {
            return Ok(());
        }
        self.refuse(name, "a contiguous view", "gaps between the elements")
    }

    /// [`Self::contiguous`] that kernels read in pieces of 16 bytes from its first element on where they can.
    pub(crate) fn block(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<(), Error> {
        self.contiguous(name, view, dtype, shape)?;
        self.is_aligned.set(self.is_aligned.get() && view.address().is_multiple_of(16));
        Ok(())
    }

    /// [`Self::block`]s, one after the other at any stride, which is returned.
    pub(crate) fn stack(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[Option<usize>],
    ) -> Result<u32, Error> {
        let [stride] = self.strided(name, view, dtype, shape)?;
        let mut whole = 1;
        for (&size, &stride) in std::iter::zip(&view.shape()[1..], &view.strides()[1..]).rev() {
            // The stride of a single element is of no account.
            if size > 1 && stride != whole && !view.is_empty() {
                return self.refuse(
                    name,
                    "no gaps but along the first axis",
                    format!("strides {:?}", view.strides()),
                );
            }
            whole *= size;
        }
        let is_aligned =
            view.address().is_multiple_of(16) && (stride as usize * dtype.bytes()).is_multiple_of(16);
        self.is_aligned.set(self.is_aligned.get() && is_aligned);
        Ok(stride)
    }

    /// A tensor of these sizes, whatever its strides.
    pub(crate) fn same(
        &self,
        name: &'static str,
        view: TensorView<'_>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<(), Error> {
        view.expect_same(self.op, name, self.device, dtype, shape)
    }

    /// Rows that do not overlap, of a tensor `[rows, cols]`.
    pub(crate) fn apart(&self, name: &'static str, stride: u32, shape: &[usize]) -> Result<(), Error> {
        let &[rows, cols] = shape else { return Ok(()) };
        if rows > 1 && (stride as usize) < cols {
            let expected = format!("rows that do not overlap: a stride of at least {cols}");
            return self.refuse(name, expected, stride.to_string());
        }
        Ok(())
    }

    /// What is there if it was planned, and only then; the reasons say why it should be, and why not.
    pub(crate) fn given<T>(
        &self,
        name: &'static str,
        is_planned: bool,
        given: Option<T>,
        [why, why_not]: [&str; 2],
    ) -> Result<Option<T>, Error> {
        match (is_planned, given) {
            (true, None) => self.refuse(name, format!("a tensor, as {why}"), "none"),
            (false, Some(_)) => self.refuse(name, format!("none, as {why_not}"), "a tensor"),
            (_, given) => Ok(given),
        }
    }

    /// No more than was planned for.
    pub(crate) fn planned(
        &self,
        name: &'static str,
        what: &str,
        got: usize,
        most: usize,
    ) -> Result<u32, Error> {
        if got > most {
            return self.refuse(name, format!("at most {most} {what}, as planned"), got.to_string());
        }
        check_size(self.op, name, "size", got)
    }

    /// A size as kernels take it.
    pub(crate) fn size(&self, name: &'static str, what: &'static str, size: usize) -> Result<u32, Error> {
        check_size(self.op, name, what, size)
    }

    /// The caller's mistake in an argument.
    pub(crate) fn refuse<T>(
        &self,
        name: &'static str,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Result<T, Error> {
        Err(Error::invalid(self.op, name, expected, got))
    }
}

/// Refuses sizes that kernels, which count in 31 bits, cannot take, and a type that none computes in.
pub(crate) fn check_floats(
    op: &'static str,
    dtype: DType,
    sizes: &[(&'static str, usize)],
) -> Result<(), Error> {
    for &(what, size) in sizes {
        check_size(op, "problem", what, size)?;
    }
    if dtype.is_float() { Ok(()) } else { Err(no_float(op, dtype)) }
}

/// Refuses what no norm adds to a mean of squares.
pub(crate) fn check_eps(op: &'static str, eps: f32) -> Result<(), Error> {
    if eps >= 0.0 && eps.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(op, "problem", "a finite eps of at least 0", eps.to_string()))
}

/// A type that no kernel computes in.
pub(crate) fn no_float(op: &'static str, dtype: DType) -> Error {
    Error::invalid(op, "problem", "dtype f32, f16 or bf16", dtype.name())
}

/// The first row of a table of floats that fits a problem of this type.
pub(crate) fn first<V>(
    op: &'static str,
    table: &'static [V],
    dtype: DType,
    fits: impl Fn(&V) -> bool,
) -> Result<&'static V, Error> {
    table.iter().find(|variant| fits(variant)).ok_or_else(|| no_float(op, dtype))
}

/// A size or stride as the kernels take it: below 2^31.
pub(crate) fn check_size(
    op: &'static str,
    argument: &'static str,
    what: &'static str,
    value: usize,
) -> Result<u32, Error> {
    if value < 1 << 31 {
        Ok(value as u32)
    } else {
        Err(Error::invalid(op, argument, format!("{what} below 2^31"), value.to_string()))
    }
}

/// The blocks of a one-dimensional grid: a card takes fewer than 2^31.
pub(crate) fn check_blocks(op: &'static str, argument: &'static str, blocks: u64) -> Result<u32, Error> {
    if blocks < 1 << 31 {
        Ok(blocks as u32)
    } else {
        Err(Error::invalid(op, argument, "a tensor that takes fewer than 2^31 blocks", blocks.to_string()))
    }
}
