//! Transposition: `abi::ops::transpose` has the kernel table, `gpu/src/ops/transpose` the kernels,
//! `tests/ops/transpose.rs` the properties, `benches/ops/transpose.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::transpose::{THREADS, TransposeDims, smem_bytes, tile_cols, tile_rows};
use half::{bf16, f16};

use crate::device::Device;
use crate::error::Error;
use crate::fp8::F8E4M3;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::transpose::{TransposeAccess, TransposeVariant, VARIANTS};
pub use cases::{CASES, TransposeCase};
pub use select::{TransposeChoice, select};

const OP: &str = "transpose";

/// What is to be transposed. The sizes are upper bounds for a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransposeProblem {
    /// Matrices.
    pub batch: usize,
    /// Rows of a matrix of x.
    pub rows: usize,
    /// Columns of a matrix of x.
    pub cols: usize,
    /// Type of both tensors.
    pub dtype: DType,
}

/// The tensors of a run, with any strides.
#[derive(Debug)]
pub struct TransposeArgs<'a> {
    /// Input, `[batch, rows, cols]`.
    pub x: TensorView<'a>,
    /// Output, `[batch, cols, rows]`.
    pub out: TensorViewMut<'a>,
}

/// Transposition of the matrices of a batch: `out[b, col, row] = x[b, row, col]`.
///
/// Tensors whose last dimension has stride 1, and whose other strides and addresses are multiples of 4 bytes, are read and
/// written by words; others element by element, which is slower for types below 4 bytes.
///
/// **Arithmetic**: none; every bit is kept.
/// **Aliasing**: out may not overlap x.
/// **Determinism**: bitwise the same from run to run.
/// **Errors**: [`Error::Invalid`] for a shape, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::transpose::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = TransposeProblem { batch: 1, rows: 9728, cols: 2560, dtype: DType::BF16 };
/// let transpose = Transpose::plan(&device, problem)?;
/// let x = Tensor::zeros(&stream, &[1, 9728, 2560], DType::BF16)?;
/// let mut out = Tensor::empty(&stream, &[1, 2560, 9728], DType::BF16)?;
/// transpose.run(&stream, TransposeArgs { x: x.view(), out: out.view_mut() })?;
/// println!("{}", transpose.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Transpose {
    device: Device,
    problem: TransposeProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that cannot be accessed by words.
    Cuda {
        choice: TransposeChoice,
        entry: Entry,
        scalar: Entry,
    },
}

impl Transpose {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &TransposeProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: TransposeProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: TransposeProblem,
        variant: &'static TransposeVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| TransposeChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(
        device: &Device,
        problem: TransposeProblem,
        choice: Option<TransposeChoice>,
    ) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let bytes = choice.variant.element_bytes;
                let entry = device.entry(OP, choice.variant.entry, smem_bytes(bytes))?;
                let scalar = select::variant(bytes, TransposeAccess::Scalar)?;
                let scalar = device.entry(OP, scalar.entry, smem_bytes(bytes))?;
                Backend::Cuda { choice, entry, scalar }
            }
        };
        Ok(Transpose { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Transpose`].
    pub fn run(&self, stream: &Stream, mut args: TransposeArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let [batch, rows, cols] = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                match self.problem.dtype {
                    DType::F32 => cpu::run::<f32>(&mut args),
                    DType::F16 => cpu::run::<f16>(&mut args),
                    DType::BF16 => cpu::run::<bf16>(&mut args),
                    DType::F8E4M3 => cpu::run::<F8E4M3>(&mut args),
                    DType::I8 => cpu::run::<i8>(&mut args),
                    DType::I32 => cpu::run::<i32>(&mut args),
                    DType::U32 => cpu::run::<u32>(&mut args),
                }
                Ok(())
            }
            Backend::Cuda { choice, entry, scalar } => {
                let TransposeArgs { x, out } = &args;
                let bytes = self.problem.dtype.bytes();
                let by_word = choice.variant.access == TransposeAccess::Words
                    && is_aligned_4(x.address(), x.shape(), x.strides(), bytes)
                    && is_aligned_4(out.address(), out.shape(), out.strides(), bytes);
                let entry = if by_word { entry } else { scalar };
                let (row_tiles, col_tiles) =
                    (rows.div_ceil(tile_rows(bytes)), cols.div_ceil(tile_cols(bytes)));
                // Each is below 2^31, and the tiles of a matrix are below 2^52.
                let blocks = (u64::from(row_tiles) * u64::from(col_tiles)).saturating_mul(u64::from(batch));
                let grid = check_blocks(OP, "x", blocks)?;
                let strides = |strides: &[usize]| [strides[0] as u64, strides[1] as u64, strides[2] as u64];
                let dims = TransposeDims {
                    x_strides: strides(x.strides()),
                    out_strides: strides(out.strides()),
                    rows,
                    cols,
                    row_tiles,
                    col_tiles,
                };
                let params = [(*x).into(), out.into(), (&dims).into()];
                // SAFETY: `check` found x and out to be of one shape but for the order, so what lies below rows and cols
                // is inside both views; `by_word` holds only for what can be accessed in words of 4 bytes. One block per
                // tile, with the shared memory of a tile.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    /// Matrices, rows and columns.
    fn check(&self, args: &TransposeArgs<'_>) -> Result<[u32; 3], Error> {
        let TransposeArgs { x, out } = args;
        let TransposeProblem { batch, rows, cols, dtype } = self.problem;
        x.expect(OP, "x", &self.device, dtype, &[None, None, None])?;
        let shape = x.shape();
        if shape[0] > batch || shape[1] > rows || shape[2] > cols {
            let expected = format!("at most [{batch}, {rows}, {cols}], as planned");
            return Err(Error::invalid(OP, "x", expected, format!("{shape:?}")));
        }
        let swapped = [Some(shape[0]), Some(shape[2]), Some(shape[1])];
        out.expect(OP, "out", &self.device, dtype, &swapped)?;
        Ok([shape[0] as u32, shape[1] as u32, shape[2] as u32])
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let TransposeProblem { batch, rows, cols, dtype } = self.problem;
        let [batch, rows, cols] = [batch, rows, cols].map(count);
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("[{batch}, {rows}, {cols}] {dtype}"),
            why: why.into(),
            tile,
            threads,
            bytes: count(2 * dtype.bytes()) * batch * rows * cols,
            flops: count(0),
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "blocks of 64x64".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let bytes = choice.variant.element_bytes;
                let tile = format!("{}x{}, {:?}", tile_rows(bytes), tile_cols(bytes), choice.variant.access);
                OptimizationReport::new(OP, &self.device, Some(entry), work(choice.why, tile, THREADS))
            }
        }
    }
}

/// Whether rows can be accessed in words of 4 bytes; their last word may be incomplete.
fn is_aligned_4(address: u64, shape: &[usize], strides: &[usize], element_bytes: usize) -> bool {
    address.is_multiple_of(4)
        && (strides[2] == 1 || shape[2] <= 1)
        && (0..2).all(|axis| shape[axis] <= 1 || (strides[axis] * element_bytes).is_multiple_of(4))
}

impl Kernel for Transpose {
    type Args<'a> = TransposeArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: TransposeArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &TransposeProblem) -> Result<(), Error> {
    check_size(OP, "problem", "batch", problem.batch)?;
    check_size(OP, "problem", "rows", problem.rows)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    Ok(())
}
