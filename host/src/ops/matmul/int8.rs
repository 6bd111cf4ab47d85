//! Products of int8 by int8: the rows of a become int8, are multiplied as
//! [`MatmulI8`](crate::ops::matmul_i8::MatmulI8) does, and activated behind that.

use abi::DType;

use super::{Act, Activations, Bias, Epilogue, MatmulArgs, MatmulB, MatmulProblem, OP, Planned};
use crate::device::Device;
use crate::error::Error;
use crate::kernel::OptimizationReport;
use crate::ladder::Rung;
use crate::ops::glu::{Glu, GluArgs, GluProblem};
use crate::ops::matmul_i8::{self, MatmulI8Args, MatmulI8Problem};
use crate::ops::matmul_i8::{QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem};
use crate::ops::workspace::Workspace;
use crate::plan::{Check, Floor, Operator};
use crate::stream::Stream;
use crate::tensor::Tensor;

/// The parts of a product.
#[derive(Debug)]
pub(super) struct Int8 {
    quantize: Floor<QuantizeRows>,
    product: matmul_i8::Planned,
    glu: Option<Floor<Glu>>,
    /// Rows as int8, what 1 means in each, and the product's sums if they are activated.
    workspace: Workspace<3>,
}

/// Refuses what no device can do.
pub(super) fn check_problem(problem: &MatmulProblem) -> Result<(), Error> {
    let &MatmulProblem { batch, dtype, out_dtype, bias, norm, weight, ref epilogue, .. } = problem;
    let &Epilogue { scale, act, residual } = epilogue;
    let refuse = |expected: &str, got: String| {
        Err(Error::invalid(OP, "problem", format!("{expected}, of int8 by int8"), got))
    };
    if batch != 1 {
        return refuse("batch 1", batch.to_string());
    }
    if weight.is_some() || norm.is_some() || residual || scale != 1.0 {
        return refuse("no packed weight, norm, residual or scale", format!("{problem:?}"));
    }
    if out_dtype != dtype && (act != Act::None || bias != Bias::None) {
        return refuse("out_dtype as of a, beside a bias or an activation", out_dtype.to_string());
    }
    let (quantize, product, glu) = parts(problem);
    QuantizeRows::check_problem(&quantize)?;
    matmul_i8::check_problem(&product)?;
    glu.map_or(Ok(()), |glu| Glu::check_problem(&glu))
}

/// Refuses what this device cannot do.
pub(super) fn supports(device: &Device, problem: &MatmulProblem) -> Result<(), Error> {
    let (quantize, product, glu) = parts(problem);
    Floor::<QuantizeRows>::supports(device, &quantize)?;
    matmul_i8::Planned::supports(device, &product)?;
    glu.map_or(Ok(()), |glu| Floor::<Glu>::supports(device, &glu))
}

/// What the parts of a product are planned for.
fn parts(problem: &MatmulProblem) -> (QuantizeRowsProblem, MatmulI8Problem, Option<GluProblem>) {
    let &MatmulProblem { m, n, k, dtype, out_dtype, bias, ref epilogue, .. } = problem;
    let glu = match epilogue.act {
        Act::None => None,
        Act::Of(activation) | Act::Gated(activation) => Some(GluProblem::new(m, n, dtype, activation)),
    };
    let product = MatmulI8Problem { bias, ..MatmulI8Problem::new(m, problem.b_rows(), k, out_dtype) };
    (QuantizeRowsProblem::new(m, k, dtype), product, glu)
}

impl Int8 {
    pub(super) fn new(device: &Device, problem: &MatmulProblem) -> Result<Self, Error> {
        let (quantize, product, glu) = parts(problem);
        let &MatmulProblem { m, k, out_dtype, .. } = problem;
        let sums = if glu.is_some() { [m, problem.b_rows()] } else { [0, 0] };
        Ok(Int8 {
            quantize: Floor::plan(device, quantize)?,
            product: matmul_i8::Planned::plan(device, product)?,
            glu: glu.map(|glu| Floor::plan(device, glu)).transpose()?,
            workspace: Workspace::new(device, |stream| {
                Ok([
                    Tensor::empty(stream, &[m, k], DType::I8)?,
                    Tensor::empty(stream, &[m], DType::F32)?,
                    Tensor::empty(stream, &sums, out_dtype)?,
                ])
            })?,
        })
    }

    pub(super) fn report(&self) -> OptimizationReport {
        self.product.report()
    }

    /// Checks the tensors and enqueues the work.
    pub(super) fn run(
        &self,
        at: &Check<'_>,
        (stream, problem): (&Stream, &MatmulProblem),
        args: &mut MatmulArgs<'_>,
    ) -> Result<(), Error> {
        let &MatmulProblem { m, n, k, dtype, out_dtype, bias, .. } = problem;
        let MatmulB::Int8 { codes, scales } = args.b else {
            let got = if matches!(args.b, MatmulB::Packed(_)) { "a packed weight" } else { "a matrix" };
            return at.refuse("b", "int8 weights, as planned", got);
        };
        let [_stride] = at.elements("a", args.a, dtype, &[None, Some(k)])?;
        let rows = args.a.shape()[0];
        at.planned("a", "rows", rows, m)?;
        let [_stride] = at.elements("b", codes, DType::I8, &[problem.b_rows(), k].map(Some))?;
        at.contiguous("scales of b", scales, DType::F32, &[Some(problem.b_rows())])?;
        super::check_bias(at, (bias, dtype, problem.b_rows()), args.bias)?;
        for (name, is_there) in
            [("up", args.up.is_some()), ("gain", args.gain.is_some()), ("residual", args.residual.is_some())]
        {
            if is_there {
                return at.refuse(name, "none, as planned", "a tensor");
            }
        }
        let [_stride] = at.elements("out", args.out.as_view(), out_dtype, &[rows, n].map(Some))?;

        let _alone = self.workspace.enter(stream)?;
        // SAFETY: entered, so nobody else has a view of the workspace until this run is enqueued.
        let [mut q, mut scale, mut sums] =
            self.workspace.tensors.each_ref().map(|tensor| unsafe { tensor.view_mut_alone() });
        let mut q = q.reborrow().slice(0, 0..rows)?;
        let mut scale = scale.reborrow().slice(0, 0..rows)?;
        let quantize = &mut QuantizeRowsArgs::new(args.a, q.reborrow(), scale.reborrow());
        self.quantize.run(stream, quantize)?;
        let Some(glu) = &self.glu else {
            let out = args.out.reborrow();
            let product = MatmulI8Args::new(q.as_view(), codes, scale.as_view(), scales, out);
            return self.product.run(stream, &mut MatmulI8Args { bias: args.bias, ..product });
        };
        let mut sums = sums.reborrow().slice(0, 0..rows)?;
        let product = MatmulI8Args::new(q.as_view(), codes, scale.as_view(), scales, sums.reborrow());
        self.product.run(stream, &mut MatmulI8Args { bias: args.bias, ..product })?;
        let sums = sums.as_view();
        let (gate, up) = if problem.is_gated() {
            (sums.slice(1, 0..n)?, Some(sums.slice(1, n..2 * n)?))
        } else {
            (sums, None)
        };
        glu.run(stream, &mut GluArgs { gate, up, out: args.out.reborrow() })
    }
}

/// Whether a product is one of int8 by int8.
pub(super) fn is_asked_for(problem: &MatmulProblem) -> bool {
    problem.activations == Activations::Int8
}

impl Planned {
    /// A product of int8 by int8.
    pub(super) fn int8(device: &Device, problem: MatmulProblem) -> Result<Self, Error> {
        let backend = super::planned::Backend::Int8(Box::new(Int8::new(device, &problem)?));
        Ok(Planned { device: device.clone(), problem, backend })
    }
}
