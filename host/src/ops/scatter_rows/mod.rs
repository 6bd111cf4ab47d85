//! Rows into places that are named by number: `abi::ops::scatter_rows` has the kernel table, `gpu/src/ops/scatter_rows` the
//! kernels, `tests/ops/scatter_rows.rs` the properties, `benches/ops/scatter_rows.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::scatter_rows::{BLOCK_PIECES_LOG2, ScatterRowsDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::{Store, check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::scatter_rows::{ScatterRowsTile, ScatterRowsVariant, VARIANTS};
pub use cases::{CASES, ScatterRowsCase};
pub use select::{ScatterRowsChoice, select};

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

/// Rows into places that are named by number: `out[ids[t], :] = x[t, :]`, or `+=`.
///
/// **Arithmetic**: bits are copied; a sum is that of f32, rounded once.
/// **Aliasing**: out may not overlap the other tensors.
/// **Determinism**: bitwise the same from run to run if the numbers are distinct; otherwise the row that several go to may
/// hold any of them in any of its parts, or sums that lack some.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
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
pub struct ScatterRows {
    device: Device,
    problem: ScatterRowsProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: ScatterRowsChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl ScatterRows {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &ScatterRowsProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: ScatterRowsProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: ScatterRowsProblem,
        variant: &'static ScatterRowsVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| ScatterRowsChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: ScatterRowsProblem,
        choice: Option<ScatterRowsChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let scalar = select::variant(&problem, ScatterRowsTile::Scalar)?;
                let unaligned = device.entry(OP, scalar.entry, 0)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(ScatterRows { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`ScatterRows`].
    pub fn run(&self, stream: &Stream, mut args: ScatterRowsArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let [rows, num_rows, x_stride, out_stride] = self.check(&args)?;
        let ScatterRowsProblem { cols, dtype, store, .. } = self.problem;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(&self.problem, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let ScatterRowsArgs { x, ids, out } = &args;
                let aligned = choice.variant.tile == ScatterRowsTile::Pieces
                    && x.is_aligned_16()
                    && out.is_aligned_16();
                let (entry, per_piece) = if aligned { (entry, 16 / dtype.bytes()) } else { (unaligned, 1) };
                let tiles = RowTiles::new(rows, (cols / per_piece) as u32, BLOCK_PIECES_LOG2);
                let grid = check_blocks(OP, "x", tiles.blocks(BLOCK_PIECES_LOG2))?;
                let adds = u32::from(store == Store::Add);
                let dims = ScatterRowsDims { tiles, num_rows, x_stride, out_stride, adds };
                let params = [(*x).into(), (*ids).into(), out.into(), (&dims).into()];
                // SAFETY: `check` found every row of every tensor inside its view, and a number for each row of x; `aligned`
                // what the tile moves in pieces of 16 bytes; the kernel leaves out what is beyond rows, cols and num_rows.
                // That the numbers are distinct is the caller's part; where they are not, values are undefined, not memory.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    /// Rows of x and of out, and their strides.
    fn check(&self, args: &ScatterRowsArgs<'_>) -> Result<[u32; 4], Error> {
        let ScatterRowsArgs { x, ids, out } = args;
        let ScatterRowsProblem { rows: max_rows, cols, dtype, .. } = self.problem;
        x.expect(OP, "x", &self.device, dtype, &[None, Some(cols)])?;
        x.expect_inner_contiguous(OP, "x")?;
        let rows = x.shape()[0];
        if rows > max_rows {
            let expected = format!("at most {max_rows} rows, as planned");
            return Err(Error::invalid(OP, "x", expected, rows.to_string()));
        }
        ids.expect(OP, "ids", &self.device, DType::U32, &[Some(rows)])?;
        ids.expect_inner_contiguous(OP, "ids")?;
        out.expect(OP, "out", &self.device, dtype, &[None, Some(cols)])?;
        out.expect_inner_contiguous(OP, "out")?;
        Ok([
            rows as u32,
            check_size(OP, "out", "number of rows", out.shape()[0])?,
            check_size(OP, "x", "stride", x.strides()[0])?,
            check_size(OP, "out", "stride", out.strides()[0])?,
        ])
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let ScatterRowsProblem { rows, cols, dtype, store } = self.problem;
        let [rows, cols] = [rows, cols].map(count);
        let (passes, flops) = match store {
            Store::Replace => (2, count(0)),
            Store::Add => (3, rows * cols),
        };
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("[{rows}, {cols}] {dtype} {store:?}"),
            why: why.into(),
            tile,
            threads,
            bytes: rows * (count(passes * dtype.bytes()) * cols + count(4)),
            flops,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let work = work(choice.why, format!("{:?}", choice.variant.tile), THREADS);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
    }
}

impl Kernel for ScatterRows {
    type Args<'a> = ScatterRowsArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: ScatterRowsArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &ScatterRowsProblem) -> Result<(), Error> {
    check_size(OP, "problem", "rows", problem.rows)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    Ok(())
}
