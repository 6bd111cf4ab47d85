//! Plain matrices as packed, quantised weights: [`QuantizeWeight`].

mod cases;
mod cpu;
mod quantizer;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::quantize_weight::{QuantizeWeightDims, SPAN, THREADS, WARPS};
use abi::weight::{Codes, E6M9_MAX, TILE_K, TILE_ROWS, WeightDims};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::Entry;
use crate::param::Param;
use crate::plan::{self, Check, Choice, Operator, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};
use crate::weight::{Counts, GateUp, Layout, Scheme};

pub use abi::ops::quantize_weight::{
    QuantizeScalesVariant, QuantizeWeightVariant, SCALES_VARIANTS, VARIANTS,
};
pub use cases::{CASES, QuantizeWeightCase, samples};
pub use quantizer::Quantizer;
pub use select::select;

const OP: &str = "quantize_weight";

/// What is to be quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeWeightProblem {
    /// Most rows of a run, of each matrix.
    pub rows: usize,
    /// Columns, at least 1.
    pub k: usize,
    /// Type of the matrix.
    pub dtype: DType,
    /// How.
    pub scheme: Scheme,
    /// Whether there are two matrices, whose rows come in turn: a gate's and up's.
    pub in_turn: bool,
    /// What scales of [`ScaleType::E4m3`](crate::weight::ScaleType::E4m3) are multiplied by: [`Scheme::global_of`].
    pub global: f32,
}

impl QuantizeWeightProblem {
    /// With what it must have. The other fields do nothing: `in_turn: false, global: 1.0`.
    pub fn new(rows: usize, k: usize, dtype: DType, scheme: Scheme) -> Self {
        QuantizeWeightProblem { rows, k, dtype, scheme, in_turn: false, global: 1.0 }
    }

    /// The layout of the weight.
    pub fn layout(&self) -> Layout {
        let layout = self.scheme.layout();
        if self.in_turn { GateUp::layout_of(layout) } else { layout }
    }

    fn matrices(&self) -> usize {
        if self.in_turn { 2 } else { 1 }
    }

    /// Bytes of the codes, of the scales, and of the zero points, which are none without, for so many rows of each
    /// matrix.
    pub fn bytes(&self, rows: usize) -> Option<[usize; 3]> {
        let layout = self.layout();
        let counts = Counts::new(&layout, rows.checked_mul(self.matrices())?, self.k);
        let scales = counts.scales(&layout)?;
        let zeros = if layout.zeros { scales } else { 0 };
        Some([counts.codes(&layout)?, scales.checked_mul(layout.stored_scale().bytes() as usize)?, zeros])
    }
}

/// The tensors of a run. Of the matrices the last dimension must have stride 1; the other may have any stride.
#[derive(Debug)]
pub struct QuantizeWeightArgs<'a> {
    /// `[rows, k]`.
    pub rows: TensorView<'a>,
    /// `[rows, k]`, where the problem is `in_turn`: row i of it is row 2 i + 1 of the weight, and of `rows` row 2 i.
    pub second: Option<TensorView<'a>>,
    /// The codes, as [`abi::weight`] has them: int8, as many as [`QuantizeWeightProblem::bytes`] says, at a multiple of
    /// 16 bytes. So are the other parts.
    pub codes: TensorViewMut<'a>,
    /// The scales.
    pub scales: TensorViewMut<'a>,
    /// The zero points, where the scheme is asymmetric.
    pub zeros: Option<TensorViewMut<'a>>,
    /// `[1]` f32: becomes the largest magnitude of the matrices if that is larger; infinity or NaN if they have such
    /// values. What is made of those is not said.
    pub largest: TensorViewMut<'a>,
}

impl<'a> QuantizeWeightArgs<'a> {
    /// With what it must have. The other fields do nothing: `second: None, zeros: None`.
    pub fn new(rows: TensorView<'a>, [codes, scales, largest]: [TensorViewMut<'a>; 3]) -> Self {
        QuantizeWeightArgs { rows, second: None, codes, scales, zeros: None, largest }
    }
}

/// A plain matrix as the parts of a packed weight, quantised by a [`Scheme`]: `code = nearest(x / scale) + zero`, so
/// that `scale · (code − zero)` is near x.
///
/// The scale of a group is its largest magnitude, or the one that a percentile of them covers, over the largest
/// [code](abi::weight::Codes::largest), or its range over the largest code where there are zero points; rounded to the
/// scheme's type before a code is made by it. For a whole weight in one call: [`Weight::quantize`].
///
/// [`Weight::quantize`]: crate::weight::Weight::quantize
///
/// **Arithmetic**: each step is exactly rounded f32, so the bits are those of
/// [`Quantised`](crate::weight::Quantised), which does the same on the host, on every device. **Aliasing**: no tensor
/// may overlap another. **Determinism**: bitwise the same from run to run. **Errors**: [`Error::Invalid`] for a scheme
/// whose layout kernels cannot take, a shape, stride, type, address or place that does not fit; never after work was
/// enqueued. **Architectures**: the same kernels on all floors. **Source**: round to nearest by absolute maxima (Jacob
/// et al., arXiv:1712.05877); scales that are powers of two as in OCP Microscaling Formats 1.0.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{DType, Device, Tensor, ops::quantize_weight::*, weight::Scheme};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = QuantizeWeightProblem::new(4096, 2560, DType::BF16, Scheme::INT4);
/// let quantize = QuantizeWeight::plan(&device, problem)?;
/// let rows = Tensor::zeros(&stream, &[4096, 2560], DType::BF16)?;
/// let [codes, scales, _] = problem.bytes(4096).expect("a size that can be counted");
/// let mut codes = Tensor::empty(&stream, &[codes], DType::I8)?;
/// let mut scales = Tensor::empty(&stream, &[scales], DType::I8)?;
/// let mut largest = Tensor::zeros(&stream, &[1], DType::F32)?;
/// let parts = [codes.view_mut(), scales.view_mut(), largest.view_mut()];
/// quantize.run(&stream, QuantizeWeightArgs::new(rows.view(), parts))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct QuantizeWeight(Plan<Self>);

planned!(
    QuantizeWeight,
    QuantizeWeightProblem,
    QuantizeWeightArgs { rows, second, codes, scales, zeros, largest },
    &'static QuantizeWeightVariant
);

/// What a run launches.
#[derive(Debug)]
pub(crate) struct Kernels {
    scales: Entry,
    codes: Entry,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        &self.codes
    }
}

impl Operator for QuantizeWeight {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "rows of tiles";
    type Problem = QuantizeWeightProblem;
    type Args<'a> = QuantizeWeightArgs<'a>;
    type Dims = QuantizeWeightDims;
    type Variant = &'static QuantizeWeightVariant;
    type Kernels = Kernels;

    fn check_problem(problem: &QuantizeWeightProblem) -> Result<(), Error> {
        let QuantizeWeightProblem { rows, k, dtype, scheme, global, .. } = *problem;
        scheme.check(OP)?;
        if k == 0 {
            return Err(Error::invalid(OP, "problem", "a k of at least 1", "0"));
        }
        if !(global.is_finite() && global > 0.0) {
            let expected = "a positive, finite global scale";
            return Err(Error::invalid(OP, "problem", expected, global.to_string()));
        }
        let n = rows.saturating_mul(problem.matrices());
        check_floats(OP, dtype, &[("rows", rows), ("rows of the weight", n), ("k", k)])?;
        // Kernels count tiles, and spans of rows, in 32 bits.
        let padded = n.next_multiple_of(TILE_ROWS as usize).saturating_mul(k.div_ceil(TILE_K as usize));
        check_floats(OP, dtype, &[("tiles' rows", padded)])?;
        let bytes = problem.bytes(rows);
        bytes.map(|_| ()).ok_or_else(|| {
            Error::invalid(OP, "problem", "a size that can be counted", format!("{rows} rows of {k}"))
        })
    }

    fn select(
        limits: &DeviceLimits,
        problem: &QuantizeWeightProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(
        variant: Self::Variant,
        problem: &QuantizeWeightProblem,
    ) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &QuantizeWeightProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Kernels, Error> {
        let scales = plan::first(OP, SCALES_VARIANTS, problem.dtype, |row| row.dtype == problem.dtype)?;
        let load = |entry| device.entry(OP, entry, 0);
        Ok(Kernels { scales: load(scales.entry)?, codes: load(choice.variant.entry)? })
    }

    fn check(
        at: &Check<'_>,
        problem: &QuantizeWeightProblem,
        args: &QuantizeWeightArgs<'_>,
    ) -> Result<QuantizeWeightDims, Error> {
        let QuantizeWeightArgs { rows, second, codes, scales, zeros, largest } = args;
        let QuantizeWeightProblem { rows: most, k, dtype, scheme, in_turn, global } = *problem;
        let [stride] = at.rows("rows", *rows, dtype, &[None, Some(k)])?;
        let of_each = rows.shape()[0];
        at.planned("rows", "rows", of_each, most)?;
        let second_stride = match (second, in_turn) {
            (Some(second), true) => at.rows("second", *second, dtype, &[of_each, k].map(Some))?,
            (None, false) => [0],
            (Some(_), false) => return at.refuse("second", "none, as planned", "one"),
            (None, true) => return at.refuse("second", "one, as planned", "none"),
        };
        let in_quads = at.is_aligned();
        let part = |name, view: TensorView<'_>, bytes: usize| {
            at.contiguous(name, view, DType::I8, &[Some(bytes)])?;
            match view.address() % 16 {
                0 => Ok(()),
                _ => at.refuse(name, "an address that is a multiple of 16", format!("{:#x}", view.address())),
            }
        };
        // Fewer rows than planned, whose bytes can be counted.
        let [code_bytes, scale_bytes, zero_bytes] = problem.bytes(of_each).unwrap_or_default();
        part("codes", codes.as_view(), code_bytes)?;
        part("scales", scales.as_view(), scale_bytes)?;
        match (zeros, scheme.asymmetric) {
            (Some(zeros), true) => part("zeros", zeros.as_view(), zero_bytes)?,
            (None, false) => {}
            (Some(_), false) => return at.refuse("zeros", "none of a symmetric scheme", "some"),
            (None, true) => return at.refuse("zeros", "those of an asymmetric scheme", "none"),
        }
        at.contiguous("largest", largest.as_view(), DType::F32, &[Some(1)])?;
        let (layout, n) = (problem.layout(), of_each * problem.matrices());
        let counts = Counts::new(&layout, n, k);
        let group = if scheme.group == 0 { (k as u32).max(SPAN + 1) } else { scheme.group };
        Ok(QuantizeWeightDims {
            n: n as u32,
            k: k as u32,
            strides: [stride, second_stride[0]],
            matrices: problem.matrices() as u32,
            in_quads: in_quads.into(),
            largest: scheme.codes.largest(),
            most: scheme.codes.most().into(),
            unscaled_to: if scheme.codes == Codes::E6m9 { E6M9_MAX } else { -1.0 },
            scale: scheme.scale as u32,
            group,
            rows: scheme.rows,
            asymmetric: scheme.asymmetric.into(),
            percentile: scheme.percentile,
            weight: WeightDims { global, ..counts.dims(&layout) },
        })
    }

    fn cpu(problem: &QuantizeWeightProblem, dims: &QuantizeWeightDims, args: &mut QuantizeWeightArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(
        run: &Run<'_, Self>,
        dims: QuantizeWeightDims,
        args: &QuantizeWeightArgs<'_>,
    ) -> Result<(), Error> {
        if dims.n == 0 {
            return Ok(());
        }
        let QuantizeWeightArgs { rows, second, codes, scales, zeros, largest } = args;
        let (first, second) = ((*rows).into(), second.map_or(Param::Address(0), Param::from));
        let zeros = || zeros.as_ref().map_or(Param::Address(0), |zeros| zeros.into());
        let most = 8 * run.device.profile().num_sms.max(1);
        let grid = |units: u32| [units.div_ceil(WARPS).clamp(1, most), 1, 1];
        let WeightDims { row_blocks, tiles, stretches, .. } = dims.weight;
        let spans = if dims.group <= SPAN { (tiles * TILE_K).div_ceil(SPAN) } else { stretches };
        let lines = if dims.rows == 1 {
            row_blocks * TILE_ROWS
        } else {
            (dims.n / dims.matrices).div_ceil(dims.rows) * dims.matrices
        };
        let of_scales = [first, second, scales.into(), zeros(), largest.into(), (&dims).into()];
        let of_codes = [first, second, codes.into(), scales.into(), zeros(), (&dims).into()];
        let (of_each, threads) = (run.kernels, [THREADS, 1, 1]);
        // SAFETY: `check` found every row of both matrices inside its view, and each part as long as the counts of
        // `dims` say and aligned; `in_quads` is so where rows can be read in pieces of 16 bytes; the kernels leave out
        // what is beyond n and k, and walk over as many tiles and groups as there are, whatever the grid.
        unsafe {
            of_each.scales.launch(run.stream, grid(lines.saturating_mul(spans)), threads, &of_scales)?;
            of_each.codes.launch(run.stream, grid(row_blocks.saturating_mul(tiles)), threads, &of_codes)
        }
    }

    fn work(problem: &QuantizeWeightProblem) -> Work {
        let QuantizeWeightProblem { rows, k, dtype, scheme, .. } = *problem;
        let n = count(rows * problem.matrices());
        let bytes = problem.bytes(rows).unwrap_or_default();
        Work {
            problem: format!("[{n}, {k}] {dtype} to {}", scheme.codes.name()),
            bytes: n * count(k * dtype.bytes()) + count(bytes.iter().sum()),
            flops: count(2) * n * count(k),
        }
    }

    fn tile(_: &Device, _: &QuantizeWeightProblem, _: &Choice<Self::Variant>) -> String {
        format!("{TILE_ROWS} × {TILE_K}")
    }
}
