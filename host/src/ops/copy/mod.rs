//! Copies of strided tensors, and casts between the float types: [`Copy`](struct@Copy).

mod cases;
mod cpu;
mod layout;
pub mod reference;
mod select;

use abi::ops::copy::{BLOCK_PIECES_LOG2, CopyDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::copy::{CopyKind, CopyTile, CopyVariant, VARIANTS};
pub use cases::{CASES, CopyCase, samples};
use layout::{Layout, MAX_DIMS};
pub use select::select;

const OP: &str = "copy";

/// What is to be copied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyProblem {
    /// Most elements of a run.
    pub elements: usize,
    /// Type of src.
    pub src: DType,
    /// Type of dst: the same, or another of the float types.
    pub dst: DType,
}

impl CopyProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(elements: usize, src: DType, dst: DType) -> Self {
        CopyProblem { elements, src, dst }
    }
}

/// The tensors of a run: the same shape, any strides.
#[derive(Debug)]
pub struct CopyArgs<'a> {
    /// Input.
    pub src: TensorView<'a>,
    /// Output.
    pub dst: TensorViewMut<'a>,
}

impl<'a> CopyArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(src: TensorView<'a>, dst: TensorViewMut<'a>) -> Self {
        CopyArgs { src, dst }
    }
}

/// Copies a strided tensor to another of the same shape, and casts between the float types.
///
/// Any shape and strides that come to at most four dimensions when those without gaps in both tensors are merged.
/// Tensors whose last dimension has stride 1, and whose other strides and addresses are multiples of 16 bytes, are
/// copied by 16-byte accesses; others element by element.
///
/// **Arithmetic**: a cast rounds to nearest even, once; beyond the largest finite value the result is an infinity, a
/// NaN stays a NaN (its payload may change). Equal types keep every bit. **Aliasing**: dst may not overlap src.
/// **Determinism**: bitwise the same from run to run. **Errors**: [`Error::Invalid`] for a shape, type or place that
/// does not fit, and for sizes after merging of 2^31 or more; never after work was enqueued. **Architectures**: the
/// same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::copy::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = CopyProblem { elements: 4 * 151936, src: DType::BF16, dst: DType::F32 };
/// let cast = Copy::plan(&device, problem)?;
/// let logits = Tensor::zeros(&stream, &[4, 151936], DType::BF16)?;
/// let mut wide = Tensor::empty(&stream, &[4, 151936], DType::F32)?;
/// cast.run(&stream, CopyArgs { src: logits.view(), dst: wide.view_mut() })?;
/// println!("{}", cast.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Copy(Plan<Self>);

planned!(Copy, CopyProblem, CopyArgs { src, dst }, &'static CopyVariant);

impl Operator for Copy {
    const OP: &'static str = OP;
    type Problem = CopyProblem;
    type Args<'a> = CopyArgs<'a>;
    type Dims = Layout;
    type Variant = &'static CopyVariant;
    type Kernels = Pair;

    fn check_problem(problem: &CopyProblem) -> Result<(), Error> {
        select::kind(problem).map(|_| ())
    }

    fn select(limits: &DeviceLimits, problem: &CopyProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &CopyProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(device: &Device, _: &CopyProblem, choice: &Choice<Self::Variant>) -> Result<Pair, Error> {
        let any = select::variant(choice.variant.kind, CopyTile::Scalar)?;
        Pair::load(device, OP, [choice.variant.entry, any.entry], 0)
    }

    fn check(at: &Check<'_>, problem: &CopyProblem, args: &CopyArgs<'_>) -> Result<Layout, Error> {
        let CopyArgs { src, dst } = args;
        at.same("src", *src, problem.src, src.shape())?;
        if src.len() > problem.elements {
            let expected = format!("at most {} elements, as planned", problem.elements);
            return at.refuse("src", expected, src.len().to_string());
        }
        at.same("dst", dst.as_view(), problem.dst, src.shape())?;
        Layout::new(src.shape(), src.strides(), dst.strides())
    }

    fn cpu(_: &CopyProblem, layout: &Layout, args: &mut CopyArgs<'_>) {
        cpu::run(layout, args);
    }

    fn launch(run: &Run<'_, Self>, layout: Layout, args: &CopyArgs<'_>) -> Result<(), Error> {
        let CopyArgs { src, dst } = args;
        let CopyVariant { kind, tile, .. } = run.choice.variant;
        // Of the merged dimensions, unlike that of the views.
        let in_pieces = *tile == CopyTile::Pieces
            && is_aligned(src.address(), &layout.shape, &layout.src, run.problem.src)
            && is_aligned(dst.address(), &layout.shape, &layout.dst, run.problem.dst);
        let whole_pieces = if in_pieces { layout.cols() / kind.per_piece() } else { 0 };
        let units = if in_pieces { whole_pieces + layout.cols() % kind.per_piece() } else { layout.cols() };
        let tiles = RowTiles::new(layout.rows() as u32, units as u32, BLOCK_PIECES_LOG2);
        let grid = check_blocks(OP, "dst", tiles.blocks(BLOCK_PIECES_LOG2))?;
        let dims = CopyDims {
            src_strides: layout.src.map(|stride| stride as u64),
            dst_strides: layout.dst.map(|stride| stride as u64),
            tiles,
            outer: [layout.shape[1] as u32, layout.shape[2] as u32],
            whole_pieces: whole_pieces as u32,
            padding: 0,
        };
        let params = [(*src).into(), dst.into(), (&dims).into()];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: src and dst have one shape, which `layout` is, so every row and column lies inside both views;
        // `in_pieces` holds only for what can be read and written in pieces of 16 bytes.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &CopyProblem) -> Work {
        let CopyProblem { elements, src, dst } = *problem;
        Work {
            problem: format!("{elements} elements, {src} to {dst}"),
            bytes: count(elements) * count(src.bytes() + dst.bytes()),
            flops: count(0),
        }
    }

    fn tile(_: &Device, _: &CopyProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}

/// Whether rows can be accessed in pieces of 16 bytes, and what is left of them by element.
fn is_aligned(address: u64, shape: &[usize; MAX_DIMS], strides: &[usize; MAX_DIMS], dtype: DType) -> bool {
    let per_16 = 16 / dtype.bytes();
    let outer = std::iter::zip(&shape[..MAX_DIMS - 1], strides);
    address.is_multiple_of(16)
        && (strides[MAX_DIMS - 1] == 1 || shape[MAX_DIMS - 1] == 1)
        && outer.into_iter().all(|(&size, stride)| size <= 1 || stride.is_multiple_of(per_16))
}
