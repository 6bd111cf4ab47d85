//! What a product's problem and tensors must look like, and what a launch comes to.

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{
    A_IN_PIECES, ACTIVATED, B_IN_PIECES, B_IS_CONSTANT, Curve, GATED, GELU_ERF, GELU_TANH, MatmulDims,
    MatmulEpilogue, OUT_IN_PIECES, OUT_IN_QUADS, RESIDUAL_IN_QUADS, SILU,
};

use super::{Act, Bias, MatmulArgs, MatmulProblem, OP, Planned, Residual, RowNorm, int8, packed};
use crate::error::Error;
use crate::plan::{Check, check_size, no_float};
use crate::tensor::TensorView;

/// An activation as the kernels have it.
pub(crate) fn curve(activation: Activation) -> Curve {
    match activation {
        Activation::GeluTanh => GELU_TANH,
        Activation::GeluErf => GELU_ERF,
        _ => SILU,
    }
}

/// Checks what does not depend on the device.
pub(super) fn check_problem(problem: &MatmulProblem) -> Result<(), Error> {
    let MatmulProblem { batch, m, n, k, dtype, out_dtype, epilogue, .. } = *problem;
    for (name, size) in [("m", m), ("n", n), ("k", k), ("rows of b", problem.b_rows())] {
        check_size(OP, "problem", name, size)?;
    }
    if !(1..1 << 16).contains(&batch) {
        return Err(Error::invalid(OP, "problem", "batch from 1 to 65535", batch.to_string()));
    }
    if !dtype.is_float() {
        return Err(no_float(OP, dtype));
    }
    if out_dtype != dtype && out_dtype != DType::F32 {
        return Err(Error::invalid(OP, "problem", format!("out_dtype {dtype} or f32"), out_dtype.name()));
    }
    if let Act::Of(Activation::Sigmoid) | Act::Gated(Activation::Sigmoid) = epilogue.act {
        return Err(Error::invalid(OP, "problem", "activation silu, gelu_tanh or gelu_erf", "sigmoid"));
    }
    if int8::is_asked_for(problem) {
        int8::check_problem(problem)?;
    }
    if let Some(layout) = &problem.weight {
        packed::check_problem(problem, layout)?;
    }
    if let Some(RowNorm { eps, .. }) = problem.norm {
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(Error::invalid(
                OP,
                "problem",
                "a norm's eps that is finite and not negative",
                eps.to_string(),
            ));
        }
        if batch != 1 || m > RowNorm::MAX_ROWS {
            let got = format!("{batch} of {m} rows");
            let expected = format!("one product of up to {} rows, beside a norm", RowNorm::MAX_ROWS);
            return Err(Error::invalid(OP, "problem", expected, got));
        }
    }
    if !epilogue.scale.is_finite() {
        return Err(Error::invalid(OP, "problem", "a finite scale", epilogue.scale.to_string()));
    }
    Ok(())
}

/// What a run comes to.
pub(super) struct Launch<'a> {
    pub(super) batch: u32,
    /// n counts the rows of up too.
    pub(super) dims: MatmulDims,
    pub(super) how: MatmulEpilogue,
    /// The rows of b, or those of the gate.
    pub(super) b: TensorView<'a>,
    /// Those of up, if the product is gated.
    pub(super) up: Option<TensorView<'a>>,
}

impl Planned {
    /// Checks the tensors; what is to be launched. None if there is no product.
    pub(super) fn check<'a>(
        &self,
        at: &Check<'_>,
        args: &MatmulArgs<'a>,
    ) -> Result<Option<Launch<'a>>, Error> {
        let MatmulProblem { batch: max_batch, m, n, k, dtype, out_dtype, bias, epilogue, .. } = self.problem;
        let MatmulArgs { a, up, out, .. } = args;
        check_bias(at, (bias, dtype, self.problem.b_rows()), args.bias)?;
        let stacked = a.shape().len() == 3;
        let batch = if stacked {
            let [] = at.strided("a", *a, dtype, &[None, None, Some(k)])?;
            at.planned("a", "products", a.shape()[0], max_batch)?;
            Some(a.shape()[0])
        } else {
            None
        };
        let sizes = |rows, cols| [batch, Some(rows), Some(cols)];
        let from = usize::from(!stacked);
        let b_sizes = sizes(if self.problem.is_gated() && up.is_none() { 2 * n } else { n }, k);
        // A packed weight is as a matrix of its size to all that follows, which reads none of it.
        let (layout, of_b) = (self.problem.weight, (None, [self.problem.b_rows(), k]));
        let args_b = args.b.planned(at, "b", (layout, dtype), of_b)?;
        if layout.is_some() && up.is_some() {
            return at.refuse("up", "none beside a packed weight, which holds it", "a tensor");
        }
        let b_strides: [u32; 2] = at.elements("b", args_b, dtype, &b_sizes[from..])?;
        // The gate's rows from here on, and up's.
        let (b, up) = match (self.problem.is_gated(), up) {
            (false, None) => (args_b, None),
            (false, Some(_)) => return at.refuse("up", "none, as planned", "a tensor"),
            (true, None) => {
                let axis = usize::from(stacked);
                (args_b.slice(axis, 0..n)?, Some(args_b.slice(axis, n..2 * n)?))
            }
            (true, Some(up)) => {
                let up_strides: [u32; 2] = at.elements("up", *up, dtype, &sizes(n, k)[from..])?;
                if up_strides != b_strides {
                    let expected = format!("strides as of b: {:?}", args_b.strides());
                    return at.refuse("up", expected, format!("{:?}", up.strides()));
                }
                (args_b, Some(*up))
            }
        };
        let gain = at.given("gain", self.problem.norm.is_some(), args.gain, ["planned"; 2])?;
        let mut is_constant = b.is_constant() && up.is_none_or(|up| up.is_constant());
        if let Some(gain) = gain {
            let [] = at.elements("gain", gain, dtype, &[Some(k)])?;
            if stacked {
                return at.refuse("a", "a matrix, beside a norm", format!("{:?}", a.shape()));
            }
            is_constant &= gain.is_constant() && gain.address().is_multiple_of(16);
        }
        let residual =
            match at.given("residual", epilogue.residual, args.residual.as_ref(), ["planned"; 2])? {
                None => None,
                Some(Residual::InPlace) => Some(out.as_view()),
                Some(Residual::Tensor(residual)) => {
                    // Of out, whose rank is yet to be looked at.
                    let mut shape = [None; 3];
                    for (to, &size) in std::iter::zip(&mut shape, out.shape()) {
                        *to = Some(size);
                    }
                    let rank = out.shape().len().min(3);
                    let [] = at.elements("residual", *residual, out_dtype, &shape[..rank])?;
                    Some(*residual)
                }
            };
        let mut how = MatmulEpilogue {
            scale: epilogue.scale,
            options: 0,
            residual_stride: 0,
            residual_batch_stride: 0,
            curve: [0.0; _],
        };
        if let Act::Of(activation) | Act::Gated(activation) = epilogue.act {
            how.options |= ACTIVATED;
            how.curve = curve(activation);
        }
        let shapes = Shapes { sizes: [m, n, k], dtype, out_dtype };
        let names = ["a", "b"];
        let mut dims = match batch {
            None => shapes.check(at, names, *a, b, out.as_view())?,
            Some(batch) => {
                let rows = a.shape()[1];
                let [out_batch_stride] =
                    at.strided("out", out.as_view(), out_dtype, &[batch, rows, n].map(Some))?;
                if batch == 0 {
                    return Ok(None);
                }
                let out = out.as_view();
                let mut dims = shapes.check(at, names, first(a)?, first(&b)?, first(&out)?)?;
                [dims.a_batch_stride] = at.strided("a", *a, dtype, &[None; 3])?;
                [dims.b_batch_stride] = at.strided("b", b, dtype, &[None; 3])?;
                dims.out_batch_stride = out_batch_stride;
                if let Some(residual) = residual {
                    [how.residual_batch_stride] = at.strided("residual", residual, out_dtype, &[None; 3])?;
                }
                let per_piece = (16 / dtype.bytes()) as u32;
                for (flag, stride, elements) in [
                    (A_IN_PIECES, dims.a_batch_stride, per_piece),
                    (B_IN_PIECES, dims.b_batch_stride, per_piece),
                    (OUT_IN_QUADS, dims.out_batch_stride, 4),
                    (OUT_IN_PIECES, dims.out_batch_stride, (16 / out_dtype.bytes()) as u32),
                ] {
                    if !stride.is_multiple_of(elements) {
                        dims.access &= !flag;
                    }
                }
                // Rows of different products may take turns: each axis must step over all that the finer one reaches.
                let mut axes = [(batch, dims.out_batch_stride), (rows, dims.out_stride)];
                axes.sort_by_key(|&(_, stride)| stride);
                let mut reach = n;
                for (size, stride) in axes.into_iter().filter(|&(size, _)| size > 1 && !out.is_empty()) {
                    if (stride as usize) < reach {
                        let expected = format!("rows that do not overlap: a stride of at least {reach}");
                        return Err(Error::invalid(OP, "out", expected, stride.to_string()));
                    }
                    reach += (size - 1) * stride as usize;
                }
                dims
            }
        };
        if let Some(up) = up {
            how.options |= GATED;
            dims.n *= 2;
            let rows = if stacked && batch != Some(0) { first(&up)? } else { up };
            if !rows_aligned(rows, 16 / dtype.bytes()) {
                dims.access &= !B_IN_PIECES;
            }
        }
        if let Some(residual) = &residual {
            let rows = if stacked { first(residual)? } else { *residual };
            [how.residual_stride] = at.strided("residual", rows, out_dtype, &[None; 2])?;
            if rows_aligned(rows, 4) && how.residual_batch_stride.is_multiple_of(4) {
                dims.access |= RESIDUAL_IN_QUADS;
            }
        }
        if is_constant {
            dims.access |= B_IS_CONSTANT;
        }
        Ok(Some(Launch { batch: batch.unwrap_or(1) as u32, dims, how, b, up }))
    }
}

/// The first matrix of a stack.
fn first<'a>(stack: &TensorView<'a>) -> Result<TensorView<'a>, Error> {
    stack.slice(0, 0..1)?.reshape(&stack.shape()[1..])
}

/// Whether rows begin at multiples of `elements` elements.
pub(crate) fn rows_aligned(view: TensorView<'_>, elements: usize) -> bool {
    let outer = std::iter::zip(view.shape(), view.strides()).take(view.shape().len() - 1);
    view.address().is_multiple_of((elements * view.dtype().bytes()) as u64)
        && outer.into_iter().all(|(&size, stride)| size <= 1 || stride.is_multiple_of(elements))
}

/// What the tensors of a product must look like: the part that floats and int8 have in common.
pub(crate) struct Shapes {
    /// Most rows, and n and k.
    pub(crate) sizes: [usize; 3],
    pub(crate) dtype: DType,
    pub(crate) out_dtype: DType,
}

impl Shapes {
    /// Checks the tensors; sizes and strides of the launch, whose split is left at 0.
    pub(crate) fn check(
        &self,
        at: &Check<'_>,
        [a_name, b_name]: [&'static str; 2],
        a: TensorView<'_>,
        b: TensorView<'_>,
        out: TensorView<'_>,
    ) -> Result<MatmulDims, Error> {
        let [most, n, k] = self.sizes;
        let [a_stride] = at.elements(a_name, a, self.dtype, &[None, Some(k)])?;
        let rows = a.shape()[0];
        let m = at.planned(a_name, "rows", rows, most)?;
        let [b_stride] = at.elements(b_name, b, self.dtype, &[n, k].map(Some))?;
        let [out_stride] = at.elements("out", out, self.out_dtype, &[rows, n].map(Some))?;
        at.apart("out", out_stride, out.shape())?;
        let per_piece = 16 / self.dtype.bytes();
        let mut access = 0;
        for (flag, is_set) in [
            (A_IN_PIECES, rows_aligned(a, per_piece)),
            (B_IN_PIECES, rows_aligned(b, per_piece)),
            (OUT_IN_QUADS, rows_aligned(out, 4)),
            (OUT_IN_PIECES, rows_aligned(out, 16 / self.out_dtype.bytes())),
        ] {
            access |= if is_set { flag } else { 0 };
        }
        // A single row has none of its own, and one that suits every kernel.
        let operand_stride = |rows: usize, stride: u32| if rows == 1 { k as u32 } else { stride };
        Ok(MatmulDims {
            m,
            n: n as u32,
            k: k as u32,
            a_stride: operand_stride(rows, a_stride),
            b_stride: operand_stride(n, b_stride),
            out_stride,
            a_batch_stride: 0,
            b_batch_stride: 0,
            out_batch_stride: 0,
            access,
            split_log2: 0,
        })
    }
}

/// Checks that a bias of this type and length is there as planned.
pub(crate) fn check_bias(
    at: &Check<'_>,
    (planned, dtype, n): (Bias, DType, usize),
    bias: Option<TensorView<'_>>,
) -> Result<(), Error> {
    if let Some(bias) = at.given("bias", planned == Bias::PerColumn, bias, ["planned"; 2])? {
        let [] = at.elements("bias", bias, dtype, &[Some(n)])?;
    }
    Ok(())
}
