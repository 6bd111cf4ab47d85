//! Strided copy and cast: `abi::ops::copy` has the kernel table, `gpu/src/ops/copy` the kernels, `tests/ops/copy.rs` the
//! properties, `benches/ops/copy.rs` the bench.

mod cases;
mod cpu;
mod layout;
pub mod reference;
mod select;

use abi::ops::copy::{BLOCK_PIECES_LOG2, CopyDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::check_blocks;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::copy::{CopyKind, CopyTile, CopyVariant, VARIANTS};
pub use cases::{CASES, CopyCase};
use layout::{Layout, MAX_DIMS};
pub use select::{CopyChoice, select};

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

/// The tensors of a run: the same shape, any strides.
#[derive(Debug)]
pub struct CopyArgs<'a> {
    /// Input.
    pub src: TensorView<'a>,
    /// Output.
    pub dst: TensorViewMut<'a>,
}

/// Copies a strided tensor to another of the same shape, and casts between the float types.
///
/// Any shape and strides that come to at most four dimensions when those without gaps in both tensors are merged. Tensors
/// whose last dimension has stride 1, and whose other strides and addresses are multiples of 16 bytes, are copied by
/// 16-byte accesses; others element by element.
///
/// **Arithmetic**: a cast rounds to nearest even, once; beyond the largest finite value the result is an infinity, a NaN
/// stays a NaN (its payload may change). Equal types keep every bit.
/// **Aliasing**: dst may not overlap src.
/// **Determinism**: bitwise the same from run to run.
/// **Errors**: [`Error::Invalid`] for a shape, type or place that does not fit, and for sizes after merging of 2^31 or
/// more; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
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
pub struct Copy {
    device: Device,
    problem: CopyProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that cannot be copied by pieces.
    Cuda {
        choice: CopyChoice,
        entry: Entry,
        by_element: Entry,
    },
}

impl Copy {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &CopyProblem) -> Result<(), Error> {
        select::kind(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: CopyProblem) -> Result<Self, Error> {
        select::kind(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: CopyProblem,
        variant: &'static CopyVariant,
    ) -> Result<Self, Error> {
        select::kind(&problem)?;
        let choice = device.limits().map(|_| CopyChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(device: &Device, problem: CopyProblem, choice: Option<CopyChoice>) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let fallback = select::variant(choice.variant.kind, CopyTile::Scalar)?;
                let by_element = device.entry(OP, fallback.entry, 0)?;
                Backend::Cuda { choice, entry, by_element }
            }
        };
        Ok(Copy { device: device.clone(), problem, backend })
    }

    /// Runs once. See `Copy`.
    pub fn run(&self, stream: &Stream, mut args: CopyArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let layout = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(&layout, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, by_element } => {
                let CopyArgs { src, dst } = &args;
                let by_piece = choice.variant.tile == CopyTile::Pieces
                    && is_aligned(src.address(), &layout.shape, &layout.src, self.problem.src)
                    && is_aligned(dst.address(), &layout.shape, &layout.dst, self.problem.dst);
                let (entry, whole_pieces, units) = if by_piece {
                    let per_piece = choice.variant.kind.per_piece();
                    let whole_pieces = layout.cols() / per_piece;
                    (entry, whole_pieces, whole_pieces + layout.cols() % per_piece)
                } else {
                    (by_element, 0, layout.cols())
                };
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
                // SAFETY: src and dst have one shape, which `layout` is, so every row and column lies inside both views;
                // `by_piece` holds only for what can be read and written in pieces of 16 bytes.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &CopyArgs<'_>) -> Result<Layout, Error> {
        let CopyArgs { src, dst } = args;
        src.expect_same(OP, "src", &self.device, self.problem.src, src.shape())?;
        if src.len() > self.problem.elements {
            let expected = format!("at most {} elements, as planned", self.problem.elements);
            return Err(Error::invalid(OP, "src", expected, src.len().to_string()));
        }
        dst.expect_same(OP, "dst", &self.device, self.problem.dst, src.shape())?;
        Layout::new(src.shape(), src.strides(), dst.strides())
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let CopyProblem { elements, src, dst } = self.problem;
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("{elements} elements, {src} to {dst}"),
            why: why.into(),
            tile,
            threads,
            bytes: count(elements) * count(src.bytes() + dst.bytes()),
            flops: count(0),
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "rows".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let work = work(choice.why, format!("{:?}", choice.variant.tile), THREADS);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
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

impl Kernel for Copy {
    type Args<'a> = CopyArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: CopyArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}
