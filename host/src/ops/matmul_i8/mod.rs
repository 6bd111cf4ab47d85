//! Matrix product of int8 operands, and the quantisation of rows: `abi::ops::matmul_i8` has the kernel tables,
//! `gpu/src/ops/matmul_i8` the kernels, `tests/ops/matmul_i8.rs` the properties, `benches/ops/matmul_i8.rs` the bench.

mod cases;
mod cpu;
mod quantize;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::matmul::THREADS;
use abi::ops::matmul_i8::MatmulI8Variant;

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::check_size;
use crate::ops::matmul::{Bias, Shapes, check_bias, optional};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::matmul_i8::MAX_K;
pub use cases::CASES;
pub use quantize::{QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem};
pub use select::{MatmulI8Choice, select};

const OP: &str = "matmul_i8";

/// What is to be multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulI8Problem {
    /// Most rows of qa in a run.
    pub m: usize,
    /// Rows of qb.
    pub n: usize,
    /// Columns of qa and qb, at most [`MAX_K`].
    pub k: usize,
    /// Type of bias and out.
    pub out_dtype: DType,
    /// What is added.
    pub bias: Bias,
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct MatmulI8Args<'a> {
    /// `[m, k]`, int8: activations, as [`QuantizeRows`] gives them.
    pub qa: TensorView<'a>,
    /// `[n, k]`, int8: a weight, out features × in features.
    pub qb: TensorView<'a>,
    /// `[m]`, f32, contiguous: what 1 means in each row of qa.
    pub a_scale: TensorView<'a>,
    /// `[n]`, f32, contiguous: what 1 means in each row of qb.
    pub b_scale: TensorView<'a>,
    /// `[n]`, there if it was planned.
    pub bias: Option<TensorView<'a>>,
    /// `[m, n]`.
    pub out: TensorViewMut<'a>,
}

/// Matrix product of int8 operands with a transposed right one:
/// `out[i, j] = (Σ_l qa[i, l] · qb[j, l]) · a_scale[i] · b_scale[j] + bias[j]`.
///
/// **Arithmetic**: the sum is exact: k is at most [`MAX_K`], which keeps it in an i32 for any int8 values. It is then
/// rounded to f32, multiplied by the row's scale, by the column's, the bias is added, each with one rounding, and out is
/// rounded to its type.
/// **Determinism**: the same bits on every device and with every kernel, whatever the number of rows.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors, by `dp4a`.
///
/// ```no_run
/// # use host::{Device, DType, Tensor, ops::{matmul::Bias, matmul_i8::*}};
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (m, n, k) = (4, 6144, 1024);
/// let matmul = MatmulI8::plan(&device, MatmulI8Problem { m, n, k, out_dtype: DType::BF16, bias: Bias::None })?;
/// let qa = Tensor::zeros(&stream, &[m, k], DType::I8)?;
/// let qb = Tensor::zeros(&stream, &[n, k], DType::I8)?;
/// let a_scale = Tensor::zeros(&stream, &[m], DType::F32)?;
/// let b_scale = Tensor::zeros(&stream, &[n], DType::F32)?;
/// let mut out = Tensor::empty(&stream, &[m, n], DType::BF16)?;
/// let args = MatmulI8Args {
///     qa: qa.view(),
///     qb: qb.view(),
///     a_scale: a_scale.view(),
///     b_scale: b_scale.view(),
///     bias: None,
///     out: out.view_mut(),
/// };
/// matmul.run(&stream, args)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MatmulI8 {
    device: Device,
    problem: MatmulI8Problem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// Kernels for every number of rows up to the planned one, fewest first.
    Cuda(Vec<(MatmulI8Choice, Entry)>),
}

impl MatmulI8 {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &MatmulI8Problem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses kernels and loads them.
    pub fn plan(device: &Device, problem: MatmulI8Problem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choices = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choices)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: MatmulI8Problem,
        variant: &'static MatmulI8Variant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let limits = device.limits();
        let choice = limits.map(|limits| MatmulI8Choice::forced(&limits, variant, &problem)).transpose()?;
        Self::new(device, problem, choice.map(|choice| vec![choice]))
    }

    fn new(
        device: &Device,
        problem: MatmulI8Problem,
        choices: Option<Vec<MatmulI8Choice>>,
    ) -> Result<Self, Error> {
        let load = |choice: MatmulI8Choice| {
            let smem_bytes = choice.variant.tile.smem_bytes(DType::I8);
            let entry = device.entry(OP, choice.variant.entry, smem_bytes)?;
            Ok((choice, entry))
        };
        let backend = match choices {
            None => Backend::Cpu,
            Some(choices) => Backend::Cuda(choices.into_iter().map(load).collect::<Result<_, Error>>()?),
        };
        Ok(MatmulI8 { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`MatmulI8`].
    pub fn run(&self, stream: &Stream, mut args: MatmulI8Args<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let MatmulI8Problem { m, n, k, out_dtype, bias } = self.problem;
        check_bias(OP, &self.device, (bias, out_dtype, n), args.bias.as_ref())?;
        let shapes = Shapes { sizes: [m, n, k], dtype: DType::I8, out_dtype };
        let names = ["qa", "qb"];
        let mut dims = shapes.check(OP, &self.device, names, &args.qa, &args.qb, &args.out.as_view())?;
        let rows = dims.m as usize;
        for (name, scale, len) in [("a_scale", &args.a_scale, rows), ("b_scale", &args.b_scale, n)] {
            scale.expect(OP, name, &self.device, DType::F32, &[Some(len)])?;
            scale.expect_inner_contiguous(OP, name)?;
        }
        match &self.backend {
            Backend::Cpu => {
                cpu::run(out_dtype, &dims, &mut args);
                Ok(())
            }
            Backend::Cuda(kernels) => {
                let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
                    let expected = format!("at most {m} rows, as planned");
                    return Err(Error::invalid(OP, "qa", expected, rows.to_string()));
                };
                dims.split_log2 = choice.split_log2;
                let grid = choice.variant.tile.blocks(dims.m, dims.n, dims.split_log2) as u32;
                let MatmulI8Args { qa, qb, a_scale, b_scale, bias, out } = &args;
                let params = [
                    (*qa).into(),
                    (*qb).into(),
                    (*a_scale).into(),
                    (*b_scale).into(),
                    optional(bias.as_ref()),
                    out.into(),
                    (&dims).into(),
                ];
                // SAFETY: `check` found every row of every tensor inside its view and set `access` by what is aligned;
                // the scales have a value per row and column; the grid covers the product exactly, which `select` found
                // to fit; shared memory is the tile's.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let MatmulI8Problem { m, n, k, out_dtype, bias } = self.problem;
        let stored = m * n + if bias == Bias::PerColumn { n } else { 0 };
        let work = |why, tile, threads| Work {
            problem: format!("[{m}, {k}] · [{n}, {k}]ᵀ i8 to {out_dtype}"),
            why,
            tile,
            threads,
            bytes: ((m + n) * (k + 4) + stored * out_dtype.bytes()) as u64,
            flops: 2 * (m * n * k) as u64,
        };
        match &self.backend {
            Backend::Cuda(kernels) if let Some((choice, entry)) = kernels.last() => {
                let work = work(choice.why.clone(), format!("{:?}", choice.variant.tile), THREADS);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
            _ => OptimizationReport::new(OP, &self.device, None, work("no card".into(), "tiles".into(), 1)),
        }
    }
}

impl Kernel for MatmulI8 {
    type Args<'a> = MatmulI8Args<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: MatmulI8Args<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &MatmulI8Problem) -> Result<(), Error> {
    let MatmulI8Problem { m, n, k, out_dtype, .. } = *problem;
    for (name, size) in [("m", m), ("n", n)] {
        check_size(OP, "problem", name, size)?;
    }
    if k > MAX_K {
        let expected = format!("k of at most {MAX_K}, so that no sum overflows");
        return Err(Error::invalid(OP, "problem", expected, k.to_string()));
    }
    if !out_dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "out_dtype f32, f16 or bf16", out_dtype.name()));
    }
    Ok(())
}
