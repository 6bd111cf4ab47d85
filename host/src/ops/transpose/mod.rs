//! Transposition of the matrices of a batch: [`Transpose`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::transpose::{THREADS, TransposeDims, smem_bytes, tile_cols, tile_rows};
use half::{bf16, f16};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::fp8::F8E4M3;
use crate::kernel::{Work, count};
use crate::ops::{check_blocks, check_size};
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::transpose::{TransposeAccess, TransposeVariant, VARIANTS};
pub use cases::{CASES, TransposeCase, samples};
pub use select::select;

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

impl TransposeProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(batch: usize, rows: usize, cols: usize, dtype: DType) -> Self {
        TransposeProblem { batch, rows, cols, dtype }
    }
}

/// The tensors of a run, with any strides.
#[derive(Debug)]
pub struct TransposeArgs<'a> {
    /// Input, `[batch, rows, cols]`.
    pub x: TensorView<'a>,
    /// Output, `[batch, cols, rows]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> TransposeArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(x: TensorView<'a>, out: TensorViewMut<'a>) -> Self {
        TransposeArgs { x, out }
    }
}

/// Transposition of the matrices of a batch: `out[b, col, row] = x[b, row, col]`.
///
/// Tensors whose last dimension has stride 1, and whose other strides and addresses are multiples of 4 bytes, are read
/// and written by words; others element by element, which is slower for types below 4 bytes.
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
pub struct Transpose(Plan<Self>);

planned!(Transpose, TransposeProblem, TransposeArgs { x, out }, &'static TransposeVariant);

impl Operator for Transpose {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "blocks of 64x64";
    type Problem = TransposeProblem;
    type Args<'a> = TransposeArgs<'a>;
    /// Matrices, rows and columns.
    type Dims = [u32; 3];
    type Variant = &'static TransposeVariant;
    type Kernels = Pair;

    fn check_problem(problem: &TransposeProblem) -> Result<(), Error> {
        check_size(OP, "problem", "batch", problem.batch)?;
        check_size(OP, "problem", "rows", problem.rows)?;
        check_size(OP, "problem", "cols", problem.cols)?;
        Ok(())
    }

    fn select(limits: &DeviceLimits, problem: &TransposeProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &TransposeProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(device: &Device, _: &TransposeProblem, choice: &Choice<Self::Variant>) -> Result<Pair, Error> {
        let bytes = choice.variant.element_bytes;
        let any = select::variant(bytes, TransposeAccess::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], smem_bytes(bytes))
    }

    fn check(
        at: &Check<'_>,
        problem: &TransposeProblem,
        args: &TransposeArgs<'_>,
    ) -> Result<[u32; 3], Error> {
        let TransposeArgs { x, out } = args;
        let TransposeProblem { batch, rows, cols, dtype } = *problem;
        at.same("x", *x, dtype, x.shape())?;
        let &[matrices, height, width] = x.shape() else {
            return at.refuse("x", "shape [any, any, any]", format!("{:?}", x.shape()));
        };
        if matrices > batch || height > rows || width > cols {
            let expected = format!("at most [{batch}, {rows}, {cols}], as planned");
            return at.refuse("x", expected, format!("{:?}", x.shape()));
        }
        at.same("out", out.as_view(), dtype, &[matrices, width, height])?;
        Ok([matrices as u32, height as u32, width as u32])
    }

    fn cpu(problem: &TransposeProblem, _: &[u32; 3], args: &mut TransposeArgs<'_>) {
        match problem.dtype {
            DType::F32 => cpu::run::<f32>(args),
            DType::F16 => cpu::run::<f16>(args),
            DType::BF16 => cpu::run::<bf16>(args),
            DType::F8E4M3 => cpu::run::<F8E4M3>(args),
            DType::I8 => cpu::run::<i8>(args),
            DType::I32 => cpu::run::<i32>(args),
            DType::U32 => cpu::run::<u32>(args),
        }
    }

    fn launch(
        run: &Run<'_, Self>,
        [batch, rows, cols]: [u32; 3],
        args: &TransposeArgs<'_>,
    ) -> Result<(), Error> {
        let TransposeArgs { x, out } = args;
        let bytes = run.problem.dtype.bytes();
        let by_word = run.choice.variant.access == TransposeAccess::Words
            && is_aligned_4(x.address(), x.shape(), x.strides(), bytes)
            && is_aligned_4(out.address(), out.shape(), out.strides(), bytes);
        let (row_tiles, col_tiles) = (rows.div_ceil(tile_rows(bytes)), cols.div_ceil(tile_cols(bytes)));
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
        let entry = run.kernels.fitting(by_word);
        // SAFETY: `check` found x and out to be of one shape but for the order, so what lies below rows and cols is
        // inside both views; `by_word` holds only for what can be accessed in words of 4 bytes. One block per tile,
        // with the shared memory of a tile.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &TransposeProblem) -> Work {
        let TransposeProblem { batch, rows, cols, dtype } = *problem;
        let [batch, rows, cols] = [batch, rows, cols].map(count);
        Work {
            problem: format!("[{batch}, {rows}, {cols}] {dtype}"),
            bytes: count(2 * dtype.bytes()) * batch * rows * cols,
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &TransposeProblem, choice: &Choice<Self::Variant>) -> String {
        let TransposeVariant { element_bytes, access, .. } = *choice.variant;
        format!("{}x{}, {access:?}", tile_rows(element_bytes), tile_cols(element_bytes))
    }
}

/// Whether rows can be accessed in words of 4 bytes; their last word may be incomplete.
fn is_aligned_4(address: u64, shape: &[usize], strides: &[usize], element_bytes: usize) -> bool {
    address.is_multiple_of(4)
        && (strides[2] == 1 || shape[2] <= 1)
        && (0..2).all(|axis| shape[axis] <= 1 || (strides[axis] * element_bytes).is_multiple_of(4))
}
