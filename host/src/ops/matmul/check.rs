//! What a product's problem and tensors must look like, and what a launch comes to.

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{
    A_IN_PIECES, ACTIVATED, B_IN_PIECES, GATED, GELU_ERF, GELU_TANH, MatmulDims, MatmulEpilogue,
    OUT_IN_PIECES, OUT_IN_QUADS, RESIDUAL_IN_QUADS, SILU,
};

use super::{Act, Bias, Matmul, MatmulArgs, MatmulProblem, OP, Residual};
use crate::device::Device;
use crate::error::Error;
use crate::ops::check_size;
use crate::tensor::TensorView;

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
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    if out_dtype != dtype && out_dtype != DType::F32 {
        return Err(Error::invalid(OP, "problem", format!("out_dtype {dtype} or f32"), out_dtype.name()));
    }
    if let Act::Of(Activation::Sigmoid) | Act::Gated(Activation::Sigmoid) = epilogue.act {
        return Err(Error::invalid(OP, "problem", "activation silu, gelu_tanh or gelu_erf", "sigmoid"));
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

impl Matmul {
    /// Checks the tensors; what is to be launched. None if there is no product.
    pub(super) fn check<'a>(&self, args: &MatmulArgs<'a>) -> Result<Option<Launch<'a>>, Error> {
        let MatmulProblem { batch: max_batch, m, n, k, dtype, out_dtype, bias, epilogue, .. } = self.problem;
        let MatmulArgs { a, up, out, .. } = args;
        check_bias(OP, &self.device, (bias, dtype, self.problem.b_rows()), args.bias.as_ref())?;
        let stacked = a.shape().len() == 3;
        let batch = if stacked {
            a.expect(OP, "a", &self.device, dtype, &[None, None, Some(k)])?;
            let batch = a.shape()[0];
            if batch > max_batch {
                let expected = format!("at most {max_batch} products, as planned");
                return Err(Error::invalid(OP, "a", expected, batch.to_string()));
            }
            Some(batch)
        } else {
            None
        };
        let sizes = |rows, cols| [batch, Some(rows), Some(cols)];
        let from = usize::from(!stacked);
        // The gate's rows from here on, and up's.
        let (b, up) = match (self.problem.is_gated(), up) {
            (false, None) => {
                args.b.expect(OP, "b", &self.device, dtype, &sizes(n, k)[from..])?;
                (args.b, None)
            }
            (false, Some(_)) => return Err(Error::invalid(OP, "up", "none, as planned", "a tensor")),
            (true, None) => {
                args.b.expect(OP, "b", &self.device, dtype, &sizes(2 * n, k)[from..])?;
                let axis = usize::from(stacked);
                (args.b.slice(axis, 0..n)?, Some(args.b.slice(axis, n..2 * n)?))
            }
            (true, Some(up)) => {
                args.b.expect(OP, "b", &self.device, dtype, &sizes(n, k)[from..])?;
                up.expect(OP, "up", &self.device, dtype, &sizes(n, k)[from..])?;
                if !up.is_empty() && up.strides() != args.b.strides() {
                    let expected = format!("strides as of b: {:?}", args.b.strides());
                    return Err(Error::invalid(OP, "up", expected, format!("{:?}", up.strides())));
                }
                (args.b, Some(*up))
            }
        };
        let residual = match (epilogue.residual, &args.residual) {
            (false, None) => None,
            (true, Some(Residual::InPlace)) => Some(out.as_view()),
            (true, Some(Residual::Tensor(residual))) => {
                // Of out, whose rank is yet to be looked at.
                let mut shape = [None; 3];
                for (to, &size) in std::iter::zip(&mut shape, out.shape()) {
                    *to = Some(size);
                }
                let rank = out.shape().len().min(3);
                residual.expect(OP, "residual", &self.device, out_dtype, &shape[..rank])?;
                residual.expect_inner_contiguous(OP, "residual")?;
                Some(*residual)
            }
            (false, Some(_)) => return Err(Error::invalid(OP, "residual", "none, as planned", "a tensor")),
            (true, None) => return Err(Error::invalid(OP, "residual", "a tensor, as planned", "none")),
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
            how.curve = match activation {
                Activation::GeluTanh => GELU_TANH,
                Activation::GeluErf => GELU_ERF,
                _ => SILU,
            };
        }
        let shapes = Shapes { sizes: [m, n, k], dtype, out_dtype };
        let names = ["a", "b"];
        let mut dims = match batch {
            None => shapes.check(OP, &self.device, names, a, &b, &out.as_view())?,
            Some(batch) => {
                let rows = a.shape()[1];
                out.expect(OP, "out", &self.device, out_dtype, &[Some(batch), Some(rows), Some(n)])?;
                if batch == 0 {
                    return Ok(None);
                }
                let out = out.as_view();
                let mut dims =
                    shapes.check(OP, &self.device, names, &first(a)?, &first(&b)?, &first(&out)?)?;
                let stride = |argument, view: &TensorView<'_>| {
                    let one = batch == 1 || view.is_empty();
                    if one { Ok(0) } else { check_size(OP, argument, "stride", view.strides()[0]) }
                };
                dims.a_batch_stride = stride("a", a)?;
                dims.b_batch_stride = stride("b", &b)?;
                dims.out_batch_stride = stride("out", &out)?;
                how.residual_batch_stride =
                    residual.as_ref().map_or(Ok(0), |view| stride("residual", view))?;
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
            if !rows_aligned!(rows, 16 / dtype.bytes()) {
                dims.access &= !B_IN_PIECES;
            }
        }
        if let Some(residual) = &residual {
            let rows = if stacked { first(residual)? } else { *residual };
            how.residual_stride = row_stride(OP, "residual", rows.shape(), rows.strides())?;
            if rows_aligned!(rows, 4) && how.residual_batch_stride.is_multiple_of(4) {
                dims.access |= RESIDUAL_IN_QUADS;
            }
        }
        Ok(Some(Launch { batch: batch.unwrap_or(1) as u32, dims, how, b, up }))
    }
}

/// The first matrix of a stack.
fn first<'a>(stack: &TensorView<'a>) -> Result<TensorView<'a>, Error> {
    stack.slice(0, 0..1)?.reshape(&stack.shape()[1..])
}

/// Whether rows begin at multiples of `elements` elements.
macro_rules! rows_aligned {
    ($view:expr, $elements:expr) => {{
        let (view, elements) = ($view, $elements);
        view.address() % (elements * view.dtype().bytes()) as u64 == 0
            && (view.shape()[0] <= 1 || view.strides()[0] % elements == 0)
    }};
}
pub(crate) use rows_aligned;

/// From one row to the next; 0 where that is no way from one element to another.
pub(crate) fn row_stride(
    op: &'static str,
    argument: &'static str,
    shape: &[usize],
    strides: &[usize],
) -> Result<u32, Error> {
    if shape[0] <= 1 || shape[1] == 0 { Ok(0) } else { check_size(op, argument, "stride", strides[0]) }
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
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn check(
        &self,
        op: &'static str,
        device: &Device,
        [a_name, b_name]: [&'static str; 2],
        a: &TensorView<'_>,
        b: &TensorView<'_>,
        out: &TensorView<'_>,
    ) -> Result<MatmulDims, Error> {
        let [max_rows, n, k] = self.sizes;
        a.expect(op, a_name, device, self.dtype, &[None, Some(k)])?;
        let m = a.shape()[0];
        if m > max_rows {
            return Err(Error::invalid(
                op,
                a_name,
                format!("at most {max_rows} rows, as planned"),
                m.to_string(),
            ));
        }
        b.expect(op, b_name, device, self.dtype, &[Some(n), Some(k)])?;
        out.expect(op, "out", device, self.out_dtype, &[Some(m), Some(n)])?;
        a.expect_inner_contiguous(op, a_name)?;
        b.expect_inner_contiguous(op, b_name)?;
        out.expect_inner_contiguous(op, "out")?;
        let out_stride = row_stride(op, "out", out.shape(), out.strides())?;
        if m > 1 && (out_stride as usize) < n {
            let expected = format!("rows that do not overlap: a stride of at least {n}");
            return Err(Error::invalid(op, "out", expected, out_stride.to_string()));
        }
        let per_piece = 16 / self.dtype.bytes();
        let mut access = 0;
        for (flag, is_set) in [
            (A_IN_PIECES, rows_aligned!(a, per_piece)),
            (B_IN_PIECES, rows_aligned!(b, per_piece)),
            (OUT_IN_QUADS, rows_aligned!(out, 4)),
            (OUT_IN_PIECES, rows_aligned!(out, 16 / self.out_dtype.bytes())),
        ] {
            access |= if is_set { flag } else { 0 };
        }
        // A single row has none of its own, and one that suits every kernel.
        let operand_stride = |name: &'static str, view: &TensorView<'_>| {
            if view.shape()[0] == 1 {
                Ok(k as u32)
            } else {
                row_stride(op, name, view.shape(), view.strides())
            }
        };
        Ok(MatmulDims {
            m: check_size(op, a_name, "rows", m)?,
            n: n as u32,
            k: k as u32,
            a_stride: operand_stride(a_name, a)?,
            b_stride: operand_stride(b_name, b)?,
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
    op: &'static str,
    device: &Device,
    (planned, dtype, n): (Bias, DType, usize),
    bias: Option<&TensorView<'_>>,
) -> Result<(), Error> {
    match (planned, bias) {
        (Bias::None, None) => Ok(()),
        (Bias::PerColumn, Some(bias)) => {
            bias.expect(op, "bias", device, dtype, &[Some(n)])?;
            bias.expect_inner_contiguous(op, "bias")
        }
        (Bias::None, Some(_)) => Err(Error::invalid(op, "bias", "none, as planned", "a tensor")),
        (Bias::PerColumn, None) => Err(Error::invalid(op, "bias", "a tensor, as planned", "none")),
    }
}
