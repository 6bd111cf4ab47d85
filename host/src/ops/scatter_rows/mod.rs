//! Rows into places that are named by number: [`ScatterRows`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::scatter_rows::{BLOCK_PIECES_LOG2, ScatterRowsDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::{Store, check_blocks};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::scatter_rows::{ScatterRowsTile, ScatterRowsVariant, VARIANTS};
pub use cases::{CASES, ScatterRowsCase, samples};
pub use select::select;

const OP: &str = "scatter_rows";

/// What is to be moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScatterRowsProblem {
    /// Most rows of x in a run.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of x and out.
    pub dtype: DType,
    /// What becomes of what out holds.
    pub store: Store,
}

impl ScatterRowsProblem {
    /// With what it must have. The other fields do nothing: `store: Store::Replace`.
    pub fn new(rows: usize, cols: usize, dtype: DType) -> Self {
        ScatterRowsProblem { rows, cols, dtype, store: Store::Replace }
    }
}

/// The tensors of a run.
#[derive(Debug)]
pub struct ScatterRowsArgs<'a> {
    /// `[rows, cols]`, rows of any stride.
    pub x: TensorView<'a>,
    /// `[rows]` u32, on the device: the row of out that each row of x goes to. Distinct; one beyond out is skipped.
    pub ids: TensorView<'a>,
    /// `[any, cols]`, rows of any stride. Rows that are not named keep what they hold.
    pub out: TensorViewMut<'a>,
}

impl<'a> ScatterRowsArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(x: TensorView<'a>, ids: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        ScatterRowsArgs { x, ids, out }
    }
}

/// Rows into places that are named by number: `out[ids[t], :] = x[t, :]`, or `+=`.
///
/// **Arithmetic**: bits are copied; a sum is that of f32, rounded once. **Aliasing**: out may not overlap the other
/// tensors. **Determinism**: bitwise the same from run to run if the numbers are distinct; otherwise the row that
/// several go to may hold any of them in any of its parts, or sums that lack some. **Errors**: [`Error::Invalid`] for a
/// shape, stride, type or place that does not fit; never after work was enqueued. **Architectures**: the same kernels
/// on all floors; from sm_80 on bf16 is packed by the hardware.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::{Store, scatter_rows::*}};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = ScatterRowsProblem { rows: 2, cols: 64, dtype: DType::BF16, store: Store::Replace };
/// let scatter = ScatterRows::plan(&device, problem)?;
/// let x = Tensor::zeros(&stream, &[2, 64], DType::BF16)?;
/// let ids = Tensor::from_slice(&stream, &[2], &[7u32, 3])?;
/// let mut out = Tensor::zeros(&stream, &[10, 64], DType::BF16)?;
/// scatter.run(&stream, ScatterRowsArgs { x: x.view(), ids: ids.view(), out: out.view_mut() })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ScatterRows(Plan<Self>);

planned!(ScatterRows, ScatterRowsProblem, ScatterRowsArgs { x, ids, out }, &'static ScatterRowsVariant);

/// Rows of x and of out, and their strides.
pub(crate) struct Rows {
    rows: u32,
    num_rows: u32,
    strides: [u32; 2],
}

impl Operator for ScatterRows {
    const OP: &'static str = OP;
    type Problem = ScatterRowsProblem;
    type Args<'a> = ScatterRowsArgs<'a>;
    type Dims = Rows;
    type Variant = &'static ScatterRowsVariant;
    type Kernels = Pair;

    fn check_problem(problem: &ScatterRowsProblem) -> Result<(), Error> {
        check_floats(OP, problem.dtype, &[("rows", problem.rows), ("cols", problem.cols)])
    }

    fn select(limits: &DeviceLimits, problem: &ScatterRowsProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &ScatterRowsProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &ScatterRowsProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        let any = select::variant(problem, ScatterRowsTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &ScatterRowsProblem,
        args: &ScatterRowsArgs<'_>,
    ) -> Result<Rows, Error> {
        let ScatterRowsArgs { x, ids, out } = args;
        let ScatterRowsProblem { rows: most, cols, dtype, .. } = *problem;
        let [x_stride] = at.rows("x", *x, dtype, &[None, Some(cols)])?;
        let rows = at.planned("x", "rows", x.shape()[0], most)?;
        let [] = at.elements("ids", *ids, DType::U32, &[Some(x.shape()[0])])?;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[None, Some(cols)])?;
        let num_rows = at.size("out", "number of rows", out.shape()[0])?;
        Ok(Rows { rows, num_rows, strides: [x_stride, out_stride] })
    }

    fn cpu(problem: &ScatterRowsProblem, _: &Rows, args: &mut ScatterRowsArgs<'_>) {
        cpu::run(problem, args);
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &ScatterRowsArgs<'_>) -> Result<(), Error> {
        let ScatterRowsArgs { x, ids, out } = args;
        let ScatterRowsProblem { cols, dtype, store, .. } = *run.problem;
        let Rows { rows, num_rows, strides: [x_stride, out_stride] } = rows;
        let in_pieces = run.is_aligned && run.choice.variant.tile == ScatterRowsTile::Pieces;
        let per_piece = if in_pieces { 16 / dtype.bytes() } else { 1 };
        let tiles = RowTiles::new(rows, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "x", tiles.blocks(BLOCK_PIECES_LOG2))?;
        let adds = u32::from(store == Store::Add);
        let dims = ScatterRowsDims { tiles, num_rows, x_stride, out_stride, adds };
        let params = [(*x).into(), (*ids).into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and a number for each row of x; `is_aligned`
        // what the tile moves in pieces of 16 bytes; the kernel leaves out what is beyond rows, cols and num_rows. That
        // the numbers are distinct is the caller's part; where they are not, values are undefined, not memory.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &ScatterRowsProblem) -> Work {
        let ScatterRowsProblem { rows, cols, dtype, store } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        let (passes, flops) = match store {
            Store::Replace => (2, count(0)),
            Store::Add => (3, rows * cols),
        };
        Work {
            problem: format!("[{rows}, {cols}] {dtype} {store:?}"),
            bytes: rows * (count(passes * dtype.bytes()) * cols + count(4)),
            flops,
        }
    }

    fn tile(_: &Device, _: &ScatterRowsProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
