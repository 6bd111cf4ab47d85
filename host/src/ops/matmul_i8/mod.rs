//! Matrix products of int8 operands, and the quantisation of rows: [`MatmulI8`], [`QuantizeRows`].

mod cases;
mod cpu;
mod quantize;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::matmul::{MatmulDims, MatmulTile, OUT_BY_TMA, OUT_IN_PIECES, WGMMA_OUT_ROWS};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work, count};
use crate::ladder::{Ladder, Rung};
use crate::launch::Entry;
use crate::ops::check_size;
use crate::ops::matmul::select::{next_may_start, why_of_tensor};
use crate::ops::matmul::{Bias, Shapes, aligned_dims, check_bias, in_pieces, matrix_map};
use crate::plan::{Check, planned};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::matmul_i8::{MAX_K, MMA_VARIANTS, MatmulI8Variant, VARIANTS, WGMMA_VARIANTS};
pub use cases::{CASES, samples};
pub use quantize::{QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem, QuantizeRowsVariant};
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

impl MatmulI8Problem {
    /// With what it must have. The other fields do nothing: `bias: Bias::None`.
    pub fn new(m: usize, n: usize, k: usize, out_dtype: DType) -> Self {
        MatmulI8Problem { m, n, k, out_dtype, bias: Bias::None }
    }
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

impl<'a> MatmulI8Args<'a> {
    /// With what it must have. The other fields do nothing: `bias: None`.
    pub fn new(
        qa: TensorView<'a>,
        qb: TensorView<'a>,
        a_scale: TensorView<'a>,
        b_scale: TensorView<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        MatmulI8Args { qa, qb, a_scale, b_scale, bias: None, out }
    }
}

/// Matrix product of int8 operands with a transposed right one:
/// `out[i, j] = (Σ_l qa[i, l] · qb[j, l]) · a_scale[i] · b_scale[j] + bias[j]`.
///
/// **Arithmetic**: the sum is exact: k is at most [`MAX_K`], which keeps it in an i32 for any int8 values. It is then
/// rounded to f32, multiplied by the row's scale, by the column's, the bias is added, each with one rounding, and out
/// is rounded to its type. **Determinism**: the same bits on every device and with every kernel, whatever the number of
/// rows. **Aliasing**: out may not overlap the other tensors. **Errors**: [`Error::Invalid`] for a shape, stride, type
/// or place that does not fit; never after work was enqueued. **Architectures**: up to 16 rows, and where addresses,
/// strides and k are no multiples of 16 bytes, the same kernels on all floors, by `dp4a`. More rows on tensor cores
/// from sm_80 on (`mma.sync`), on sm_90a by `wgmma`.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::{matmul::Bias, matmul_i8::*}};
///
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
pub struct MatmulI8(Ladder<Planned>);

planned!(
    MatmulI8,
    MatmulI8Problem,
    MatmulI8Args { qa, qb, a_scale, b_scale, bias, out },
    &'static MatmulI8Variant,
    Planned
);

/// A product, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Planned {
    device: Device,
    problem: MatmulI8Problem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    Cuda {
        /// Kernels for every number of rows up to the planned one, fewest first, which take any address and stride.
        kernels: Vec<(MatmulI8Choice, Entry)>,
        /// The tensor cores' kernels, which take operands in pieces of 16 bytes, from `tensor_from` rows on.
        tensor: Vec<(&'static MatmulI8Variant, Entry)>,
        tensor_from: usize,
    },
}

impl Rung for Planned {
    const OP: &'static str = OP;
    type Problem = MatmulI8Problem;
    type Args<'a> = MatmulI8Args<'a>;
    type Variant = &'static MatmulI8Variant;

    fn supports(device: &Device, problem: &MatmulI8Problem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    fn plan(device: &Device, problem: MatmulI8Problem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let tensor = select::tensor(&limits, &problem);
        Self::new(device, problem, select(&limits, &problem)?, tensor, select::TENSOR_MIN_ROWS)
    }

    fn plan_with(
        device: &Device,
        problem: MatmulI8Problem,
        variant: &'static MatmulI8Variant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Ok(Planned { device: device.clone(), problem, backend: Backend::Cpu });
        };
        let choice = MatmulI8Choice::forced(&limits, variant, &problem)?;
        match variant.tile {
            MatmulTile::Simt { .. } | MatmulTile::Gemv { .. } => {
                Self::new(device, problem, vec![choice], Vec::new(), 0)
            }
            _ => Self::new(device, problem, select(&limits, &problem)?, vec![variant], 0),
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        true
    }

    fn run(&self, stream: &Stream, args: &mut MatmulI8Args<'_>) -> Result<(), Error> {
        let MatmulI8Problem { m, n, k, out_dtype, bias } = self.problem;
        let at = Check::new(OP, &self.device);
        at.stream(stream)?;
        check_bias(&at, (bias, out_dtype, n), args.bias)?;
        let shapes = Shapes { sizes: [m, n, k], dtype: DType::I8, out_dtype };
        let mut dims = shapes.check(&at, ["qa", "qb"], args.qa, args.qb, args.out.as_view())?;
        let rows = dims.m as usize;
        let [] = at.elements("a_scale", args.a_scale, DType::F32, &[Some(rows)])?;
        let [] = at.elements("b_scale", args.b_scale, DType::F32, &[Some(n)])?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(out_dtype, &dims, args);
                Ok(())
            }
            Backend::Cuda { kernels, tensor, tensor_from } => {
                if rows >= *tensor_from
                    && let Some((variant, entry)) = self.fastest(tensor, &dims)
                {
                    return match variant.tile {
                        MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } => {
                            self.run_wgmma(stream, variant, entry, args, dims)
                        }
                        _ => self.launch(stream, variant, entry, args, dims),
                    };
                }
                let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
                    let expected = format!("at most {m} rows, as planned");
                    return Err(Error::invalid(OP, "qa", expected, rows.to_string()));
                };
                dims.split_log2 = choice.split_log2;
                self.launch(stream, choice.variant, entry, args, dims)
            }
        }
    }

    fn report(&self) -> OptimizationReport {
        let MatmulI8Problem { m, n, k, out_dtype, bias } = self.problem;
        let sizes = [m, n, k];
        let [m, n, k] = sizes.map(count);
        let stored = m * n + if bias == Bias::PerColumn { n } else { count(0) };
        let work = Work {
            problem: format!("[{m}, {k}] · [{n}, {k}]ᵀ i8 to {out_dtype}"),
            bytes: (m + n) * (k + count(4)) + stored * count(out_dtype.bytes()),
            flops: count(2) * m * n * k,
        };
        match &self.backend {
            Backend::Cuda { tensor, tensor_from, .. }
                if self.problem.m >= *tensor_from
                    && let Some((variant, entry)) = self.fastest(tensor, &aligned_dims(sizes)) =>
            {
                let why = why_of_tensor(variant.tile, tensor.len());
                let cut = Cut { why, tile: format!("{:?}", variant.tile), threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { kernels, .. } if let Some((choice, entry)) = kernels.last() => {
                let tile = choice.variant.tile;
                let cut = Cut { why: choice.why.clone(), tile: format!("{tile:?}"), threads: tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            _ => OptimizationReport::new(OP, &self.device, None, work, Cut::cpu("tiles")),
        }
    }
}

impl Planned {
    fn new(
        device: &Device,
        problem: MatmulI8Problem,
        choices: Vec<MatmulI8Choice>,
        tensor: Vec<&'static MatmulI8Variant>,
        tensor_from: usize,
    ) -> Result<Self, Error> {
        let load = |variant: &'static MatmulI8Variant| {
            let entry = device.entry(OP, variant.entry, variant.tile.smem_bytes(DType::I8))?;
            Ok::<_, Error>(match variant.tile {
                MatmulTile::Wgmma { threads, cluster, .. } | MatmulTile::Split { threads, cluster, .. } => {
                    entry.in_clusters(cluster, threads, device.profile().num_sms)?
                }
                _ => entry,
            })
        };
        let kernels = choices.into_iter().map(|choice| Ok((choice.clone(), load(choice.variant)?)));
        let kernels = kernels.collect::<Result<_, Error>>()?;
        let tensor = tensor.into_iter().map(|variant| Ok((variant, load(variant)?)));
        let tensor = tensor.collect::<Result<_, Error>>()?;
        let backend = Backend::Cuda { kernels, tensor, tensor_from };
        Ok(Planned { device: device.clone(), problem, backend })
    }

    /// The fastest of the tensor cores' kernels for a launch; none if they cannot take the operands in pieces.
    fn fastest<'a>(
        &self,
        tensor: &'a [(&'static MatmulI8Variant, Entry)],
        dims: &MatmulDims,
    ) -> Option<&'a (&'static MatmulI8Variant, Entry)> {
        if !in_pieces(dims, DType::I8) {
            return None;
        }
        let (sizes, num_sms) = ([dims.m, dims.n, dims.k], self.device.profile().num_sms);
        let split = |(variant, _): &&(&'static MatmulI8Variant, Entry)| {
            select::shares_k(variant.tile, sizes, num_sms)
        };
        let clocks =
            |(variant, _): &&(&'static MatmulI8Variant, Entry)| select::clocks(variant.tile, sizes, num_sms);
        tensor.iter().find(split).or_else(|| tensor.iter().min_by_key(clocks))
    }

    fn run_wgmma(
        &self,
        stream: &Stream,
        variant: &MatmulI8Variant,
        entry: &Entry,
        args: &MatmulI8Args<'_>,
        mut dims: MatmulDims,
    ) -> Result<(), Error> {
        let rows = dims.m.next_multiple_of(8);
        // Boxes of a and b: the blocks of a cluster load an equal part each of what they share; of a, which each has
        // for itself, the rows that there are.
        let ([a_box, b_box], cluster, persists) = match variant.tile {
            MatmulTile::Wgmma { bm, bn, cluster, shares_a: false, .. } => {
                ([rows.min(bm), bn / cluster], cluster, true)
            }
            MatmulTile::Split { bn, cluster, .. } => ([rows.min(64), bn], cluster, false),
            tile => return Err(Error::invalid(OP, "variant", "a tile of `wgmma`", format!("{tile:?}"))),
        };
        let MatmulI8Args { qa, qb, a_scale, b_scale, bias, out } = args;
        let out_dtype = self.problem.out_dtype;
        let matrix = |dtype: DType, address: u64, sizes: [u32; 3], box_rows: u32| {
            matrix_map(OP, &self.device, dtype, address, sizes, box_rows)
        };
        let a_map = matrix(DType::I8, qa.address(), [dims.m, dims.k, dims.a_stride], a_box)?;
        let b_map = matrix(DType::I8, qb.address(), [dims.n, dims.k, dims.b_stride], b_box)?;
        // As in the float product: a tail of n that does not fill 16 bytes would be written over.
        let in_boxes = persists
            && out_dtype.bytes() == 2
            && dims.n.is_multiple_of(8)
            && dims.access & OUT_IN_PIECES != 0;
        let out_map = if in_boxes {
            dims.access |= OUT_BY_TMA;
            matrix(out_dtype, out.address(), [dims.m, dims.n, dims.out_stride], WGMMA_OUT_ROWS)?
        } else {
            a_map
        };
        let tiles = variant.tile.blocks(dims.m, dims.n, 0);
        let clusters = if persists { entry.clusters_for(tiles) } else { tiles as u32 };
        let blocks = clusters * cluster;
        let num_sms = self.device.profile().num_sms;
        dims.access |= next_may_start(variant.tile, DType::I8, blocks.into(), num_sms);
        let params = [
            (&dims).into(),
            (&a_map).into(),
            (&b_map).into(),
            (&out_map).into(),
            (*a_scale).into(),
            (*b_scale).into(),
            (*bias).into(),
            out.into(),
            (*qb).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view, and the maps have its sizes and strides; the
        // scales have a value per row and column; the blocks walk over all tiles, or there is a cluster for each;
        // shared memory and clusters are the tile's.
        unsafe { entry.launch(stream, [blocks, 1, 1], [variant.tile.threads(), 1, 1], &params) }
    }

    /// A kernel with a block per tile.
    fn launch(
        &self,
        stream: &Stream,
        variant: &MatmulI8Variant,
        entry: &Entry,
        args: &MatmulI8Args<'_>,
        mut dims: MatmulDims,
    ) -> Result<(), Error> {
        let blocks = variant.tile.blocks(dims.m, dims.n, dims.split_log2);
        let num_sms = self.device.profile().num_sms;
        dims.access |= next_may_start(variant.tile, DType::I8, blocks, num_sms);
        let MatmulI8Args { qa, qb, a_scale, b_scale, bias, out } = args;
        let params = [
            (*qa).into(),
            (*qb).into(),
            (*a_scale).into(),
            (*b_scale).into(),
            (*bias).into(),
            out.into(),
            (&dims).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view and set `access` by what is aligned, which
        // `fastest` looks at for the tensor cores; the scales have a value per row and column; the grid covers the
        // product exactly, which `select` found to fit; shared memory is the tile's.
        unsafe { entry.launch(stream, [blocks as u32, 1, 1], [variant.tile.threads(), 1, 1], &params) }
    }
}

pub(crate) fn check_problem(problem: &MatmulI8Problem) -> Result<(), Error> {
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
