//! Quantisation of rows to int8.

use abi::DType;
use abi::ops::matmul_i8::{QUANTIZE_SMEM_BYTES, QUANTIZE_THREADS, QUANTIZE_VARIANTS, QuantizeRowsDims};

use super::cpu;
use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::matmul::{row_stride, rows_aligned};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

const OP: &str = "quantize_rows";
const FAMILY: &str = "matmul_i8";

/// What is to be quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeRowsProblem {
    /// Most rows of a run.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of x.
    pub dtype: DType,
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct QuantizeRowsArgs<'a> {
    /// `[rows, cols]`.
    pub x: TensorView<'a>,
    /// `[rows, cols]`, int8.
    pub q: TensorViewMut<'a>,
    /// `[rows]`, f32, contiguous: what 1 means in each row of q.
    pub scale: TensorViewMut<'a>,
}

/// Symmetric quantisation of rows to int8: `scale = max |x| / 127; q = x / scale`, to the nearest integer, ties to even.
///
/// A row of zeros has scale 0 and zeros, and so has one so small that its scale rounds to 0 (below 2^-143). A row with an
/// infinity has an infinite scale, one with a NaN the scale NaN, and int8 zeros either way: products of such rows are NaN.
///
/// **Arithmetic**: both divisions in f32, exactly rounded.
/// **Determinism**: the same bits on every device; a row's result does not depend on the other rows or their number.
/// **Aliasing**: none of the tensors may overlap.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct QuantizeRows {
    device: Device,
    problem: QuantizeRowsProblem,
    /// None on the CPU.
    entry: Option<Entry>,
}

impl QuantizeRows {
    /// Whether `device` can do it.
    pub fn supports(_device: &Device, problem: &QuantizeRowsProblem) -> Result<(), Error> {
        check_problem(problem)
    }

    /// Checks the problem and loads its kernel. There is one per type, so none to choose.
    pub fn plan(device: &Device, problem: QuantizeRowsProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let load = |_| {
            let variant = QUANTIZE_VARIANTS.iter().find(|variant| variant.dtype == problem.dtype);
            variant.map(|variant| device.entry(FAMILY, variant.entry, QUANTIZE_SMEM_BYTES)).transpose()
        };
        let entry = device.limits().map_or(Ok(None), load)?;
        Ok(QuantizeRows { device: device.clone(), problem, entry })
    }

    /// Runs once. See [`QuantizeRows`].
    pub fn run(&self, stream: &Stream, mut args: QuantizeRowsArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let QuantizeRowsProblem { rows: max_rows, cols, dtype } = self.problem;
        let QuantizeRowsArgs { x, q, scale } = &args;
        x.expect(OP, "x", &self.device, dtype, &[None, Some(cols)])?;
        let rows = x.shape()[0];
        if rows > max_rows {
            return Err(Error::invalid(
                OP,
                "x",
                format!("at most {max_rows} rows, as planned"),
                rows.to_string(),
            ));
        }
        q.expect(OP, "q", &self.device, DType::I8, &[Some(rows), Some(cols)])?;
        scale.expect(OP, "scale", &self.device, DType::F32, &[Some(rows)])?;
        x.expect_inner_contiguous(OP, "x")?;
        q.expect_inner_contiguous(OP, "q")?;
        scale.expect_inner_contiguous(OP, "scale")?;
        let q_stride = row_stride(OP, "q", q.shape(), q.strides())?;
        if rows > 1 && (q_stride as usize) < cols {
            let expected = format!("rows that do not overlap: a stride of at least {cols}");
            return Err(Error::invalid(OP, "q", expected, q_stride.to_string()));
        }
        let per_piece = 16 / dtype.bytes();
        let in_pieces = rows_aligned!(x, per_piece) && rows_aligned!(q, per_piece);
        let dims = QuantizeRowsDims {
            cols: cols as u32,
            x_stride: row_stride(OP, "x", x.shape(), x.strides())?,
            q_stride,
            cols_in_pieces: if in_pieces { (cols - cols % per_piece) as u32 } else { 0 },
        };
        match &self.entry {
            None => {
                cpu::quantize(dtype, rows, &dims, &mut args);
                Ok(())
            }
            Some(entry) => {
                let params = [(*x).into(), q.into(), scale.into(), (&dims).into()];
                // SAFETY: every row of every tensor is inside its view, as checked above, and aligned where
                // `cols_in_pieces` is not 0; a block per row, and shared memory for its warps.
                unsafe { entry.launch(stream, [rows as u32, 1, 1], [QUANTIZE_THREADS, 1, 1], &params) }
            }
        }
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let QuantizeRowsProblem { rows, cols, dtype } = self.problem;
        let [rows, cols] = [rows, cols].map(count);
        let work = Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            why: "the only one of its type".into(),
            tile: "a row".into(),
            threads: self.entry.as_ref().map_or(1, |_| QUANTIZE_THREADS),
            bytes: rows * (cols * count(dtype.bytes() + 1) + count(4)),
            flops: count(2) * rows * cols,
        };
        OptimizationReport::new(OP, &self.device, self.entry.as_ref(), work)
    }
}

impl Kernel for QuantizeRows {
    type Args<'a> = QuantizeRowsArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: QuantizeRowsArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &QuantizeRowsProblem) -> Result<(), Error> {
    check_size(OP, "problem", "rows", problem.rows)?;
    check_size(OP, "problem", "cols", problem.cols)?;
    if !problem.dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", problem.dtype.name()));
    }
    Ok(())
}
