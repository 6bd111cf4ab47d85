//! Rows whose columns are brought into the order of a weight's, and the product behind that.

use abi::ops::matmul::{
    PERMUTE_BLOCK_PIECES_LOG2, PERMUTE_PIECE, PERMUTE_THREADS, PERMUTE_VARIANTS, PermuteColumnsDims,
};
use abi::{DType, RowTiles};

use super::planned::{Backend, Planned};
use super::{MatmulArgs, MatmulB, MatmulProblem, rows_aligned};
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{OptimizationReport, Work, count};
use crate::ladder::Rung;
use crate::launch::Entry;
use crate::ops::check_blocks;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::workspace::Workspace;
use crate::plan::{Check, Choice, Floor, Operator, Plan, Run, check_floats, first, planned};
use crate::stream::Stream;
use crate::tensor::{FloatElement, Tensor, TensorView, TensorViewMut};

pub use abi::ops::matmul::PermuteColumnsVariant;

const OP: &str = "permute_columns";

/// What is to be brought into order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteColumnsProblem {
    /// Most rows of a run.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of x and out.
    pub dtype: DType,
}

impl PermuteColumnsProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(rows: usize, cols: usize, dtype: DType) -> Self {
        PermuteColumnsProblem { rows, cols, dtype }
    }
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct PermuteColumnsArgs<'a> {
    /// `[rows, cols]`.
    pub x: TensorView<'a>,
    /// `[cols]` u32, on the device: which column of x each column of out is. One beyond x gives zeros.
    pub order: TensorView<'a>,
    /// `[rows, cols]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> PermuteColumnsArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(x: TensorView<'a>, order: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        PermuteColumnsArgs { x, order, out }
    }
}

/// Columns in another order: `out[r, j] = x[r, order[j]]`. What a product does with the rows of a when its weight's
/// columns have an order of their own ([`Layout::permuted`](crate::weight::Layout)).
///
/// **Arithmetic**: none, bits are copied.
/// **Determinism**: the same bits on every device.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct PermuteColumns(Plan<Self>);

planned!(
    PermuteColumns,
    PermuteColumnsProblem,
    PermuteColumnsArgs { x, order, out },
    &'static PermuteColumnsVariant
);

/// Rows of a run, and the strides of x and out.
pub(crate) struct Rows {
    rows: u32,
    strides: [u32; 2],
}

impl Operator for PermuteColumns {
    const OP: &'static str = OP;
    const IS_REPEATABLE: bool = true;
    type Problem = PermuteColumnsProblem;
    type Args<'a> = PermuteColumnsArgs<'a>;
    type Dims = Rows;
    type Variant = &'static PermuteColumnsVariant;
    type Kernels = Entry;

    fn check_problem(problem: &PermuteColumnsProblem) -> Result<(), Error> {
        check_floats(OP, problem.dtype, &[("rows", problem.rows), ("cols", problem.cols)])
    }

    fn select(_: &DeviceLimits, problem: &PermuteColumnsProblem) -> Result<Choice<Self::Variant>, Error> {
        let variant = first(OP, PERMUTE_VARIANTS, problem.dtype, |variant| variant.dtype == problem.dtype)?;
        Ok(Choice::new(variant, PERMUTE_THREADS, "the only one of its type"))
    }

    fn forced(
        variant: Self::Variant,
        problem: &PermuteColumnsProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        if variant.dtype != problem.dtype {
            let expected = format!("one for {}", problem.dtype);
            return Err(Error::invalid(OP, "variant", expected, variant.entry));
        }
        Ok(Choice::asked_for(variant, PERMUTE_THREADS))
    }

    fn load(
        device: &Device,
        _: &PermuteColumnsProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Entry, Error> {
        device.entry(super::OP, choice.variant.entry, 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &PermuteColumnsProblem,
        args: &PermuteColumnsArgs<'_>,
    ) -> Result<Rows, Error> {
        let PermuteColumnsArgs { x, order, out } = args;
        let PermuteColumnsProblem { rows: most, cols, dtype } = *problem;
        let [x_stride] = at.elements("x", *x, dtype, &[None, Some(cols)])?;
        let len = x.shape()[0];
        let rows = at.planned("x", "rows", len, most)?;
        at.contiguous("order", *order, DType::U32, &[Some(cols)])?;
        let [out_stride] = at.elements("out", out.as_view(), dtype, &[len, cols].map(Some))?;
        at.apart("out", out_stride, out.shape())?;
        Ok(Rows { rows, strides: [x_stride, out_stride] })
    }

    fn cpu(problem: &PermuteColumnsProblem, rows: &Rows, args: &mut PermuteColumnsArgs<'_>) {
        match problem.dtype {
            DType::F16 => permute::<half::f16>(problem.cols, rows, args),
            DType::BF16 => permute::<half::bf16>(problem.cols, rows, args),
            _ => permute::<f32>(problem.cols, rows, args),
        }
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &PermuteColumnsArgs<'_>) -> Result<(), Error> {
        let PermuteColumnsArgs { x, order, out } = args;
        let PermuteColumnsProblem { cols, dtype, .. } = *run.problem;
        let Rows { rows, strides: [x_stride, out_stride] } = rows;
        let tiles = RowTiles::new(rows, (cols as u32).div_ceil(PERMUTE_PIECE), PERMUTE_BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "x", tiles.blocks(PERMUTE_BLOCK_PIECES_LOG2))?;
        let is_aligned =
            rows_aligned(out.as_view(), 16 / dtype.bytes()) && order.address().is_multiple_of(16);
        let dims = PermuteColumnsDims {
            tiles,
            cols: cols as u32,
            x_stride,
            out_stride,
            is_aligned: u32::from(is_aligned),
        };
        let params = [(*x).into(), (*order).into(), out.into(), (&dims).into()];
        // SAFETY: `check` found every row of x and out inside its view, and an order as long as a row; `is_aligned`
        // says what may be moved in pieces of 16 bytes. The kernel leaves out what is beyond rows and cols, and reads
        // no column that x has not.
        unsafe { run.kernels.launch(run.stream, [grid, 1, 1], [PERMUTE_THREADS, 1, 1], &params) }
    }

    fn work(problem: &PermuteColumnsProblem) -> Work {
        let PermuteColumnsProblem { rows, cols, dtype } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            bytes: count(2 * dtype.bytes()) * rows * cols + count(4) * cols,
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &PermuteColumnsProblem, _: &Choice<Self::Variant>) -> String {
        format!("{PERMUTE_PIECE} columns a thread")
    }
}

fn permute<T: FloatElement>(cols: usize, rows: &Rows, args: &mut PermuteColumnsArgs<'_>) {
    let [x_stride, out_stride] = rows.strides.map(|stride| stride as usize);
    if args.x.is_empty() {
        return;
    }
    let (x, order) = (args.x.host_slice::<T>(), args.order.host_slice::<u32>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(rows.rows as usize, rows.rows as usize * cols, |row| {
        let x = &x[row * x_stride..][..cols];
        // SAFETY: rows do not overlap (`check`), and each is one call's.
        let out = unsafe { out.part(row * out_stride, cols) };
        for (out, &from) in std::iter::zip(out, order) {
            *out = x.get(from as usize).copied().unwrap_or(T::from_f32(0.0));
        }
    });
}

/// A product with a weight whose columns have an order of their own.
#[derive(Debug)]
pub(super) struct Permuted {
    permute: Floor<PermuteColumns>,
    product: Planned,
    /// The rows of a, in the weight's order.
    workspace: Workspace<1>,
}

impl Planned {
    /// A product, behind what brings its rows into the order of the weight's columns, if those have one of their own.
    pub(super) fn permuted(self) -> Result<Self, Error> {
        let Planned { device, problem, .. } = &self;
        if problem.weight.is_none_or(|layout| !layout.permuted) {
            return Ok(self);
        }
        let &MatmulProblem { m, k, dtype, .. } = problem;
        let (device, problem) = (device.clone(), *problem);
        let workspace = Workspace::new(&device, |stream| Ok([Tensor::empty(stream, &[m, k], dtype)?]))?;
        let permute = Floor::plan(&device, PermuteColumnsProblem::new(m, k, dtype))?;
        let backend = Backend::Permuted(Box::new(Permuted { permute, product: self, workspace }));
        Ok(Planned { device, problem, backend })
    }
}

impl Permuted {
    pub(super) fn report(&self) -> OptimizationReport {
        self.product.report()
    }

    /// Checks the tensors and enqueues the work.
    pub(super) fn run(
        &self,
        at: &Check<'_>,
        stream: &Stream,
        args: &mut MatmulArgs<'_>,
    ) -> Result<(), Error> {
        // All that the product finds wrong, a stack of a too, before anything is enqueued.
        if self.product.check(at, args)?.is_none() {
            return Ok(());
        }
        let order = match args.b {
            MatmulB::Packed(weight) => weight.order(),
            _ => None,
        };
        let Some(order) = order else {
            return at.refuse("b", "a packed weight with an order of its columns, as planned", "another");
        };
        let rows = args.a.shape()[0];

        let _alone = self.workspace.enter(stream)?;
        let [ordered] = &self.workspace.tensors;
        // SAFETY: entered, so nobody else has a view of the workspace until this run is enqueued.
        let mut ordered = unsafe { ordered.view_mut_alone() }.slice(0, 0..rows)?;
        let permute = &mut PermuteColumnsArgs::new(args.a, order, ordered.reborrow());
        self.permute.run(stream, permute)?;
        self.product.run(stream, &mut MatmulArgs { a: ordered.as_view(), ..args.reborrow() })
    }
}
