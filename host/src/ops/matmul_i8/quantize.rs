//! Quantisation of rows to int8.

use abi::DType;
use abi::ops::matmul_i8::{QUANTIZE_SMEM_BYTES, QUANTIZE_THREADS, QUANTIZE_VARIANTS, QuantizeRowsDims};

use super::cpu;
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::Entry;
use crate::ops::matmul::rows_aligned;
use crate::plan::{Check, Choice, Operator, Plan, Run, check_floats, first, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::matmul_i8::QuantizeRowsVariant;

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

impl QuantizeRowsProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(rows: usize, cols: usize, dtype: DType) -> Self {
        QuantizeRowsProblem { rows, cols, dtype }
    }
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

impl<'a> QuantizeRowsArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(x: TensorView<'a>, q: TensorViewMut<'a>, scale: TensorViewMut<'a>) -> Self {
        QuantizeRowsArgs { x, q, scale }
    }
}

/// Symmetric quantisation of rows to int8: `scale = max |x| / 127; q = x / scale`, to the nearest integer, ties to
/// even.
///
/// A row of zeros has scale 0 and zeros, and so has one so small that its scale rounds to 0 (below 2^-143). A row with
/// an infinity has an infinite scale, one with a NaN the scale NaN, and int8 zeros either way: products of such rows
/// are NaN.
///
/// **Arithmetic**: both divisions in f32, exactly rounded.
/// **Determinism**: the same bits on every device; a row's result does not depend on the other rows or their number.
/// **Aliasing**: none of the tensors may overlap.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
#[derive(Debug)]
pub struct QuantizeRows(Plan<Self>);

planned!(QuantizeRows, QuantizeRowsProblem, QuantizeRowsArgs { x, q, scale }, &'static QuantizeRowsVariant);

impl Operator for QuantizeRows {
    const OP: &'static str = OP;
    type Problem = QuantizeRowsProblem;
    type Args<'a> = QuantizeRowsArgs<'a>;
    /// The rows of a run besides.
    type Dims = (u32, QuantizeRowsDims);
    type Variant = &'static QuantizeRowsVariant;
    type Kernels = Entry;

    fn check_problem(problem: &QuantizeRowsProblem) -> Result<(), Error> {
        check_floats(OP, problem.dtype, &[("rows", problem.rows), ("cols", problem.cols)])
    }

    fn select(_: &DeviceLimits, problem: &QuantizeRowsProblem) -> Result<Choice<Self::Variant>, Error> {
        let variant = first(OP, QUANTIZE_VARIANTS, problem.dtype, |variant| variant.dtype == problem.dtype)?;
        Ok(Choice::new(variant, QUANTIZE_THREADS, "the only one of its type"))
    }

    fn forced(variant: Self::Variant, problem: &QuantizeRowsProblem) -> Result<Choice<Self::Variant>, Error> {
        if variant.dtype != problem.dtype {
            let expected = format!("one for {}", problem.dtype);
            return Err(Error::invalid(OP, "variant", expected, variant.entry));
        }
        Ok(Choice::asked_for(variant, QUANTIZE_THREADS))
    }

    fn load(
        device: &Device,
        _: &QuantizeRowsProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Entry, Error> {
        device.entry(FAMILY, choice.variant.entry, QUANTIZE_SMEM_BYTES)
    }

    fn check(
        at: &Check<'_>,
        problem: &QuantizeRowsProblem,
        args: &QuantizeRowsArgs<'_>,
    ) -> Result<(u32, QuantizeRowsDims), Error> {
        let QuantizeRowsArgs { x, q, scale } = args;
        let QuantizeRowsProblem { rows: most, cols, dtype } = *problem;
        let [x_stride] = at.elements("x", *x, dtype, &[None, Some(cols)])?;
        let len = x.shape()[0];
        let rows = at.planned("x", "rows", len, most)?;
        let [q_stride] = at.elements("q", q.as_view(), DType::I8, &[len, cols].map(Some))?;
        let [] = at.elements("scale", scale.as_view(), DType::F32, &[Some(len)])?;
        at.apart("q", q_stride, q.shape())?;
        // Rows that begin at pieces of 16 elements of x and of q, whatever they end with.
        let per_piece = 16 / dtype.bytes();
        let in_pieces = rows_aligned(*x, per_piece) && rows_aligned(q.as_view(), per_piece);
        let cols_in_pieces = if in_pieces { (cols - cols % per_piece) as u32 } else { 0 };
        Ok((rows, QuantizeRowsDims { cols: cols as u32, x_stride, q_stride, cols_in_pieces }))
    }

    fn cpu(
        problem: &QuantizeRowsProblem,
        (rows, dims): &(u32, QuantizeRowsDims),
        args: &mut QuantizeRowsArgs<'_>,
    ) {
        cpu::quantize(problem.dtype, *rows as usize, dims, args);
    }

    fn launch(
        run: &Run<'_, Self>,
        (rows, dims): (u32, QuantizeRowsDims),
        args: &QuantizeRowsArgs<'_>,
    ) -> Result<(), Error> {
        let QuantizeRowsArgs { x, q, scale } = args;
        let params = [(*x).into(), q.into(), scale.into(), (&dims).into()];
        // SAFETY: `check` found every row of every tensor inside its view, and aligned where `cols_in_pieces` is not 0;
        // a block per row, and shared memory for its warps.
        unsafe { run.kernels.launch(run.stream, [rows, 1, 1], [QUANTIZE_THREADS, 1, 1], &params) }
    }

    fn work(problem: &QuantizeRowsProblem) -> Work {
        let QuantizeRowsProblem { rows, cols, dtype } = *problem;
        let [rows, cols] = [rows, cols].map(count);
        Work {
            problem: format!("[{rows}, {cols}] {dtype}"),
            bytes: rows * (cols * count(dtype.bytes() + 1) + count(4)),
            flops: count(2) * rows * cols,
        }
    }

    fn tile(_: &Device, _: &QuantizeRowsProblem, _: &Choice<Self::Variant>) -> String {
        "a row".into()
    }
}
